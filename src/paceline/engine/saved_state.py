"""What a job saves to go on later: its constants, the place in the data, and the states of the prepared objects.

The constants are those the bits depend on. A state of a job that differs in one of them is refused with the difference:
it could be loaded, but what follows would not be what the other job would have done.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paceline.checkpoint.load import whole_tree
from paceline.engine.config import EngineConfig
from paceline.engine.replicas import plain_name
from paceline.errors import CheckpointError
from paceline.input_file import cause_of
from paceline.sharding.local_shard import LocalShard
from paceline.world.determinism import fingerprint

SYNCHRONOUS = "synchronous"

Kept = Callable[[Tensor], Tensor | LocalShard]


_MACHINE = "machine "


def job_facts(config: EngineConfig, data: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Everything the bits depend on besides the objects themselves; the number of workers is not among it."""
    facts = {
        "lanes": config.lanes,
        "accumulate": config.accumulate,
        "seed": config.seed,
        "reduction": config.reduction,
        "precision": str(config.precision),
        "offload": config.offload,
        "loss_scale": None if config.loss_scale is None else str(config.loss_scale),
        "updates": SYNCHRONOUS if config.strategy.is_synchronous else str(config.strategy),
    }
    return facts | dict(data) | {f"{_MACHINE}{name}": value for name, value in fingerprint(device).items()}


def chosen_by_script(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Without those of the machine."""
    return {name: value for name, value in facts.items() if not name.startswith(_MACHINE)}


def check_same_job(
    folder: Path, saved: Mapping[str, Any], mine: Mapping[str, Any], accept: Sequence[str] = ()
) -> frozenset[str]:
    """The names of accepted differences; a difference that is not accepted is an error that says all of them."""
    if unknown := [name for name in accept if name not in mine]:
        raise CheckpointError(f"accept={unknown!r} names nothing of this job; known are {', '.join(mine)}")
    changed = {name for name, value in mine.items() if saved.get(name) != value}
    if refused := [name for name in mine if name in changed and name not in accept]:
        told = "; ".join(f"{name} was {saved.get(name)!r}, is {mine[name]!r}" for name in refused)
        raise CheckpointError(
            f"the state in {folder} belongs to another job, so the bits would not continue: {told}. To go on all the "
            f"same, still with every sample once: engine.load_state(folder, accept={sorted(changed)!r})"
        )
    return frozenset(changed)


def kept_models(models: Sequence[nn.Module], kept: Kept) -> list[dict[str, Any]]:
    """The models' states as this worker can save them; tied weights are one object."""
    known: dict[int, Any] = {}

    def once(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if id(value) not in known:
            known[id(value)] = kept(value)
        return known[id(value)]

    return [
        {plain_name(name): once(value) for name, value in model.state_dict(keep_vars=True).items()} for model in models
    ]


def kept_schedulers(schedulers: Sequence[Any]) -> list[dict[str, Any]]:
    """state_dict() is the scheduler's __dict__, in which prepare() put a step() of ours."""
    return [{key: value for key, value in s.state_dict().items() if key != "step"} for s in schedulers]


def check_fits(folder: Path, tree: Mapping[str, Any], prepared: Mapping[str, Sequence[Any]]) -> None:
    """That the state is one of these objects; before anything is loaded."""
    for kind, things in prepared.items():
        if len(tree[kind]) != len(things):
            raise CheckpointError(f"{folder} holds {len(tree[kind])} {kind}, this job prepared {len(things)}")
    for saved, model in zip(tree["models"], prepared["models"], strict=True):
        mine = {plain_name(name): value for name, value in model.state_dict(keep_vars=True).items()}
        missing, unknown = sorted(mine.keys() - saved.keys()), sorted(saved.keys() - mine.keys())
        told = [f"it has no {name!r}" for name in missing[:1]] + [f"the model has no {name!r}" for name in unknown[:1]]
        for name in [name for name in mine if name in saved]:
            if (
                isinstance(mine[name], Tensor)
                and not name.endswith("_extra_state")
                and (there := getattr(saved[name], "shape", None)) != mine[name].shape
            ):
                what = f"a {type(saved[name]).__name__}" if there is None else str(tuple(there))
                told.append(f"{name!r} is {what} there and {tuple(mine[name].shape)} here")
        if told:
            more = len(missing) + len(unknown) - 2
            rest = f" and {more} more names" if more > 0 else ""
            raise CheckpointError(f"the checkpoint in {folder} is of another model: {'; '.join(told[:3])}{rest}")
    for kind, optimizer in zip(tree.get("kinds", ()), prepared["optimizers"], strict=False):
        if kind != type(optimizer).__name__:
            raise CheckpointError(
                f"the checkpoint in {folder} is of another optimizer: {kind} there, {type(optimizer).__name__} here"
            )
    for saved, optimizer in zip(tree["optimizers"], prepared["optimizers"], strict=True):
        theirs = [len(group["params"]) for group in saved["param_groups"]]
        ours = [len(group["params"]) for group in optimizer.param_groups]
        if theirs != ours:
            raise CheckpointError(
                f"the checkpoint in {folder} is of another optimizer: its groups have {theirs} parameters, here {ours}"
            )


def load_model(model: nn.Module, put: Callable[[Tensor, Tensor], None], state: Mapping[str, Any]) -> None:
    """One tensor after another: all of them together may not fit into memory."""
    done: set[int] = set()
    others: dict[str, Any] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        saved = state[plain_name(name)]
        if not isinstance(value, Tensor) or name.endswith("_extra_state"):  # get_extra_state() may return a tensor
            others[name] = whole_tree(saved)
        elif id(value) not in done:
            done.add(id(value))
            put(value, whole_tree(saved))
    if others:
        model.load_state_dict(others, strict=False)


def load_one(folder: Path, kind: str, load: Callable[[Any], object], state: Any) -> None:
    try:
        load(state)
    except (RuntimeError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise CheckpointError(f"the {kind} in {folder} does not fit this job's: {cause_of(error)}") from error
