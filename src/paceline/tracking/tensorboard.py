"""TensorBoard: event files in `tensorboard/` of the run's folder. `tensorboard --logdir OUTPUT_DIR` shows them.

A resumed run tells it to purge what comes after the step it continues from, so a curve never goes back over itself. A
worker that takes over from a lost one writes a further file, which begins with the last step of the one before.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from paceline.tracking.reporter import RunInfo, in_section

FOLDER = "tensorboard"


class TensorBoard:
    name = "tensorboard"

    def __init__(self) -> None:
        self._writer: Any = None

    def start(self, run: RunInfo) -> None:
        from torch.utils.tensorboard import SummaryWriter

        purge = None if run.resumed_at is None else run.resumed_at + (not run.taken_over)
        self._writer = SummaryWriter(str(run.folder / FOLDER), purge_step=purge)
        if run.resumed_at is None:
            for title, facts in (("config", run.config), ("world", run.world)):
                # Indented by four: Markdown for "as it is".
                text = json.dumps(dict(facts), indent=2, default=str)
                self._writer.add_text(title, "\n".join(f"    {line}" for line in text.splitlines()), 0)
        for step, values in run.taken_over or ():
            self.log(step, values)
        self._writer.flush()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(in_section(name), value, step)
        self._writer.flush()  # not lost if this worker is killed

    def close(self, *, ok: bool = True) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
