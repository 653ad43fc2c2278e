"""Where workers of an asynchronous job meet, also when some of them are lost: keys in the store of the job.

    meeting/4/0  meeting/4/2      workers 0 and 2 have come to meeting 4
    gone/1                        worker 1 was lost, or has said goodbye: nobody waits for it
    stats/server 0                what a process counted, for the one that tells it at the end

A group's collectives need all of its members. The store does not, and servers, which notice a loss, write it down here.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from collections.abc import Set
from typing import Any

from torch._C._distributed_c10d import PrefixStore, Store

from paceline.errors import PeerLostError, WorldError

_NAP_S, _LONGEST_NAP_S = 1e-3, 20e-3


class MeetingPoint:
    """`store` is None where a process is alone."""

    def __init__(self, store: Store | None, worker: int, workers: int, timeout_s: float) -> None:
        self._store = None if store is None else PrefixStore("parameter_server/meetings", store)
        self._worker, self._workers, self._timeout_s = worker, workers, timeout_s
        self._meetings = itertools.count()

    def meet(self) -> Set[int]:
        """No worker goes on before all that are left have come; those that did not and never will."""
        if self._store is None or self._workers == 1:
            return frozenset()
        try:
            return self._meet(self._store, f"meeting/{next(self._meetings)}")
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            raise PeerLostError(
                f"worker {self._worker} lost the store in which workers meet, which worker 0 or the launcher serves "
                f"({reason}); resume from the last saved state"
            ) from error

    def _meet(self, store: Store, name: str) -> Set[int]:
        store.set(f"{name}/{self._worker}", "")
        missing = [worker for worker in range(self._workers) if worker != self._worker]
        deadline, nap = time.monotonic() + self._timeout_s, _NAP_S
        while missing := [worker for worker in missing if not store.check([f"{name}/{worker}"])]:
            if all(store.check([f"gone/{worker}"]) for worker in missing):
                break
            if time.monotonic() > deadline:
                raise PeerLostError(
                    f"worker {self._worker} waited {self._timeout_s:g} s at a boundary for worker"
                    f"{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
                )
            time.sleep(nap)
            nap = min(_LONGEST_NAP_S, 1.5 * nap)
        return frozenset(missing)

    def say_gone(self, worker: int) -> None:
        if self._store is not None:
            with contextlib.suppress(RuntimeError, WorldError):  # its store may have gone with it
                self._store.set(f"gone/{worker}", "")

    # -- what was counted --------------------------------------------------------------------------------------------

    def leave(self, name: str, value: Any) -> None:
        if self._store is not None:
            with contextlib.suppress(RuntimeError, WorldError):
                self._store.set(name, json.dumps(value))

    def found(self, names: list[str], within_s: float) -> dict[str, Any]:
        """What others have left under these names, as far as it is there in time."""
        values: dict[str, Any] = {}
        if self._store is None:
            return values
        deadline = time.monotonic() + within_s
        while missing := [name for name in names if name not in values]:
            there = [name for name in missing if self._store.check([name])]
            values |= {name: json.loads(self._store.get(name)) for name in there}
            if time.monotonic() > deadline:
                break
            time.sleep(0 if there else _LONGEST_NAP_S)
        return values
