"""What callbacks look at and turn: where training is (`TrainerState`), and what it shall do next (`TrainerControl`).

Both have the fields of transformers' classes of these names, so that callbacks written for those run here unchanged.
"""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.errors import CheckpointError
from paceline.input_file import cause_of, read_json
from paceline.trainer.training_arguments import TrainingArguments


@dataclass
class TrainerState:
    """Where training is. A step is one update of the weights."""

    epoch: float = 0
    global_step: int = 0
    max_steps: int = 0
    logging_steps: int = 500
    eval_steps: int = 500
    save_steps: int = 500
    train_batch_size: int | None = None
    num_train_epochs: int = 0
    num_input_tokens_seen: int = 0
    total_flos: float = 0
    log_history: list[dict[str, Any]] = field(default_factory=list)
    best_metric: float | None = None
    best_global_step: int | None = None
    best_model_checkpoint: str | None = None
    is_local_process_zero: bool = True
    is_world_process_zero: bool = True
    is_hyper_param_search: bool = False
    trial_name: str | None = None
    trial_params: dict[str, Any] | None = None
    stateful_callbacks: dict[str, Any] = field(default_factory=dict)

    def compute_steps(self, args: TrainingArguments, max_steps: int) -> None:
        """Every how many steps; a number below 1 is a part of all steps."""
        for kind in ("logging", "eval", "save"):
            steps = getattr(args, f"{kind}_steps")
            if steps is not None:
                setattr(self, f"{kind}_steps", math.ceil(max_steps * steps) if steps < 1 else int(steps))

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def save_to_json(self, json_path: str | Path) -> None:
        Path(json_path).write_text(json.dumps(self.to_dict(), indent=2, sort_keys=True) + "\n", encoding="utf-8")

    @classmethod
    def from_dict(cls, saved: dict[str, Any]) -> TrainerState:
        """Fields that a newer version may have saved are left."""
        known = {item.name for item in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in saved.items() if name in known})

    @classmethod
    def load_from_json(cls, json_path: str | Path) -> TrainerState:
        try:
            return cls.from_dict(read_json(json_path))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{json_path} can't be read: {cause_of(error)}") from error


@dataclass
class TrainerControl:
    """What shall happen next; a callback sets it, and returns it or not."""

    should_training_stop: bool = False
    should_epoch_stop: bool = False
    should_save: bool = False
    should_evaluate: bool = False
    should_log: bool = False
