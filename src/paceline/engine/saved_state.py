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

from paceline.engine.config import EngineConfig
from paceline.engine.replicas import Whole
from paceline.errors import CheckpointError
from paceline.optim.precision import Precision
from paceline.world.determinism import fingerprint

SYNCHRONOUS = "synchronous"


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
    return facts | dict(data) | {f"machine {name}": value for name, value in fingerprint(device).items()}


def check_same_job(
    folder: Path, saved: Mapping[str, Any], mine: Mapping[str, Any], accept: Sequence[str] = ()
) -> frozenset[str]:
    """The names of accepted differences; a difference that is not accepted is an error that says all of them."""
    if unknown := [name for name in accept if name not in mine]:
        raise CheckpointError(f"accept={unknown!r} names nothing of this job; known are {', '.join(mine)}")
    saved = {"updates": SYNCHRONOUS, "precision": str(Precision())} | dict(
        saved
    )  # states from before there were others don't say it
    changed = {name for name, value in mine.items() if saved.get(name) != value}
    if refused := [name for name in mine if name in changed and name not in accept]:
        told = "; ".join(f"{name} was {saved.get(name)!r}, is {mine[name]!r}" for name in refused)
        raise CheckpointError(
            f"the state in {folder} belongs to another job, so the bits would not continue: {told}. To go on all the "
            f"same, still with every sample once: engine.load_state(folder, accept={sorted(changed)!r})"
        )
    return frozenset(changed)


def states_of(models: Sequence[nn.Module], schedulers: Sequence[Any], whole: Whole) -> dict[str, Any]:
    """All but the optimizers' states. All workers call it: weights may lie elsewhere, and the strategy has them."""
    return {
        "models": [
            {name: whole(v) if isinstance(v, Tensor) else v for name, v in model.state_dict(keep_vars=True).items()}
            for model in models
        ],
        # state_dict() is the scheduler's __dict__, in which prepare() put a step() of ours.
        "schedulers": [{k: v for k, v in s.state_dict().items() if k != "step"} for s in schedulers],
    }


def load_model(model: nn.Module, put: Callable[[Tensor, Tensor], None], state: Mapping[str, Any]) -> None:
    model.load_state_dict(state)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        put(parameter, state[name])


def load_states(folder: Path, tree: Mapping[str, Any], loads: Mapping[str, Sequence[Callable[[Any], object]]]) -> None:
    """Give every prepared object its state; `loads` has, for each kind, the functions that take them."""
    for kind, takers in loads.items():
        if len(tree[kind]) != len(takers):
            raise CheckpointError(f"{folder} holds {len(tree[kind])} {kind}, this job prepared {len(takers)}")
        for load, state in zip(takers, tree[kind], strict=True):
            try:
                load(state)
            except (RuntimeError, ValueError, KeyError) as error:
                raise CheckpointError(f"the {kind[:-1]} in {folder} does not fit this job's: {error}") from error
