"""The state of a job: collected into one tree that workers save together, and put back from a checkpoint.

job          what the bits depend on besides the objects; a state of another job is refused
step, data   where it is
models       weights and buffers, as this worker has them: whole, or its slices
optimizers   likewise; learning rates and momenta
schedulers, loss_scale, extra
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn
from torch.optim import Optimizer

from paceline.checkpoint.load import Checkpoint, whole_tree
from paceline.checkpoint.manifest import MANIFEST
from paceline.engine.loop import PreparedLoader
from paceline.engine.saved_state import (
    check_fits,
    check_same_job,
    kept_models,
    kept_schedulers,
    load_model,
    load_one,
)
from paceline.engine.step import TrainStep
from paceline.errors import CheckpointError
from paceline.world.determinism import mix, seed_everything


@dataclass(frozen=True)
class JobState:
    models: Sequence[nn.Module]
    optimizers: Sequence[Optimizer]
    schedulers: Sequence[Any]
    step: TrainStep
    loader: PreparedLoader | None
    facts: Mapping[str, Any]
    seed: int

    def collected(self, told: Callable[[Any], list[Any]], *, is_main: bool, extra: Any = None) -> dict[str, Any]:
        """This worker's tree; all workers call it. What is not tensors comes from the main one."""
        step, loader = self.step, self.loader
        data = None if loader is None else loader.source.merged(told(loader.state_dict()))
        tree: dict[str, Any] = {
            "models": kept_models(self.models, step.strategies.kept),
            "optimizers": [step.strategies.kept_state(optimizer) for optimizer in self.optimizers],
        }
        if is_main:
            tree |= {
                "job": dict(self.facts),
                "kinds": [type(optimizer).__name__ for optimizer in self.optimizers],
                "step": step.step,
                "left_out_steps": step.left_out_steps,
                "loss_scale": None if step.loss_scale is None else step.loss_scale.state_dict(),
                "data": data,
                "schedulers": kept_schedulers(self.schedulers),
                "extra": extra,
            }
        return tree

    def put_back(self, checkpoint: Checkpoint, accept: Sequence[str]) -> None:
        """All workers do so; nothing is changed unless all of it fits. A damaged file is found when it is read."""
        tree, folder, step = checkpoint.tree, checkpoint.folder, self.step
        changed = check_same_job(folder, tree["job"], self.facts, accept)
        prepared = {"models": self.models, "optimizers": self.optimizers, "schedulers": self.schedulers}
        check_fits(folder, tree, prepared)
        if self.loader is not None and tree["data"] is not None:
            place = partial(self.loader.load_state_dict, changed=changed)
            load_one(folder, "place in the data", place, whole_tree(tree["data"]))
        step.step, step.left_out_steps = tree["step"], tree["left_out_steps"]
        if step.loss_scale is not None and tree["loss_scale"] is not None:
            load_one(folder, "loss scale", step.loss_scale.load_state_dict, tree["loss_scale"])
        self.put_back_weights(checkpoint)
        for optimizer, saved in zip(self.optimizers, tree["optimizers"], strict=True):
            load_one(folder, "optimizer", partial(step.load, optimizer), saved)
        for scheduler, saved in zip(self.schedulers, tree["schedulers"], strict=True):
            load_one(folder, "scheduler", scheduler.load_state_dict, whole_tree(saved))
        seed_everything(mix(self.seed, "between", step.step, 0))

    def put_back_weights(self, checkpoint: Checkpoint) -> None:
        check_fits(checkpoint.folder, checkpoint.tree, {"models": self.models, "optimizers": self.optimizers})
        for model, saved in zip(self.models, checkpoint.tree["models"], strict=True):
            load_one(checkpoint.folder, "model", partial(load_model, model, self.step.strategies.put), saved)


_PARTS = {
    "job": dict, "step": int, "left_out_steps": int, "models": list, "optimizers": list, "schedulers": list,
    "loss_scale": dict | None, "data": dict | None, "extra": object,
}  # fmt: skip


def check_whole(checkpoint: Checkpoint) -> None:
    """That a checkpoint is of a job at all: its parts are there, each of its kind. Whose job it is is asked later."""
    tree = checkpoint.tree
    wrong = [name for name, kind in _PARTS.items() if not isinstance(tree.get(name, _PARTS), kind)]
    if not wrong:
        wrong += ["models"] * any(not isinstance(model, dict) for model in tree["models"])
        wrong += ["optimizers"] * any(not _is_optimizer(state) for state in tree["optimizers"])
        wrong += ["schedulers"] * any(not isinstance(state, dict) for state in tree["schedulers"])
        wrong += [name for name in ("step", "left_out_steps") if tree[name] < 0]
    if wrong:
        raise CheckpointError(
            f"{checkpoint.folder}/{MANIFEST} is not of a job: its {wrong[0]!r} is missing, or no such thing"
        )


def _is_optimizer(state: Any) -> bool:
    groups = state.get("param_groups") if isinstance(state, dict) else None
    return (
        isinstance(groups, list)
        and isinstance(state.get("state"), dict)
        and all(isinstance(group, dict) and isinstance(group.get("params"), list) for group in groups)
    )
