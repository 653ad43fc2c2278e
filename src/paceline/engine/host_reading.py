"""A few numbers of the device, for the host: it does not wait for work that was queued after they were made.

    device   forward ─ loss ─┬─ backward ──────────────── update
                             └─ copy ─ event
    host     forward, backward, then read(): waits for the event, while backward runs

`float(loss)` before backward would leave the device without work until the host has queued some, and after it the host
would wait for backward too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class HostReading:
    def __init__(self, value: Tensor) -> None:
        """Of the value as it is now."""
        value = value.detach()
        self._done: Any = None
        if value.device.type != "cuda":
            self._host = value.to("cpu", copy=True)
            return
        self._host = torch.empty(value.shape, dtype=value.dtype, pin_memory=True).copy_(value, non_blocking=True)
        self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._done.record(torch.cuda.current_stream(value.device))

    def read(self) -> Tensor:
        if self._done is not None:
            self._done.synchronize()
        return self._host

    def number(self) -> float:
        return float(self.read())
