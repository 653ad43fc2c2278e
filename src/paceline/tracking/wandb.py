"""Weights & Biases: a resumed run continues the same run there; its id is in `wandb_run.json` of the run's folder.

Values are logged over `train/global_step` and not over W&B's own counter, which can't go back to the step of a
checkpoint. Login, mode (`WANDB_MODE=offline`) and project (`WANDB_PROJECT`) are W&B's own affair.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from typing import Any

from paceline.tracking.reporter import RunInfo, in_section, known_id

ID_FILE = "wandb_run.json"
STEP = "train/global_step"


class WeightsAndBiases:
    name = "wandb"

    def __init__(self) -> None:
        self._run: Any = None

    def start(self, run: RunInfo) -> None:
        wandb: Any = importlib.import_module("wandb")  # not installed with paceline, so not known to a type checker
        file = run.folder / ID_FILE
        known = known_id(file) if run.resumed_at is not None else None
        config = {**run.config, "world": dict(run.world)}
        run.folder.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            name=run.name, dir=str(run.folder), config=config, id=known, resume="allow" if known else None
        )
        self._run.define_metric(STEP)
        self._run.define_metric("*", step_metric=STEP, step_sync=True)
        file.write_text(json.dumps({"id": self._run.id}) + "\n")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({**{in_section(name): value for name, value in values.items()}, STEP: step})

    def close(self, *, ok: bool = True) -> None:
        if self._run is not None:
            self._run.finish(exit_code=0 if ok else 1)
            self._run = None
