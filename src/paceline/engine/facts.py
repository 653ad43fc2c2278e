"""Facts: what must be the same in all workers of a job, and in a saved state that a job goes on from.

of the job        lanes, seed, strategy, data …: the bits depend on them; the number of workers is not among them
of the process    versions, the script and its modules: a worker that joins an elastic job has them in common
"""

from __future__ import annotations

import hashlib
import platform
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from paceline import __version__
from paceline.elastic.slots import MODULE
from paceline.engine.config import EngineConfig
from paceline.errors import CheckpointError
from paceline.world.determinism import fingerprint

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
        "compile": None if config.compile is None else str(config.compile),
        "compression": None if config.compression is None else str(config.compression),
        "loss_scale": None if config.loss_scale is None else str(config.loss_scale),
        "updates": config.strategy.updates,
        **{name: size if size > 1 else None for name, size in (("tp", config.mesh.tp), ("cp", config.mesh.cp))},
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
            f"same, still with every sample once: engine.load_state(folder, accept={sorted(changed)!r}), or the same "
            "accept= of checkpoints.resume() and trainer.train()"
        )
    return frozenset(changed)


def facts_of_process(more: Mapping[str, Any]) -> dict[str, str | int]:
    """What a worker that joins must have in common with the others."""
    code = _own_code()
    about: dict[str, Any] = {
        "paceline": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        **code,
        **more,
    }
    return {name: value if isinstance(value, int | str) else str(value) for name, value in about.items()}


@cache
def _own_code() -> dict[str, str]:
    """A hash of the script and of every module that is neither Python's nor installed, as they are at the first call:
    before the first loop, on a worker of the start and on one that joins."""
    paths = {sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    # An environment may be reached by a link. Thousands of modules are passed over by name: to resolve each takes long.
    installed = tuple({f"{path}/" for path in paths} | {f"{Path(path).resolve()}/" for path in paths})
    found = {}
    for name, module in sorted(sys.modules.items()):
        named = str(getattr(module, "__file__", None) or "")
        if not named.endswith(".py") or named.startswith(installed):
            continue
        file = Path(named)
        if file.is_file() and not str(file.resolve()).startswith(installed):
            label = "script" if name == "__main__" else f"{MODULE}{name}"
            found[label] = hashlib.sha256(file.read_bytes()).hexdigest()[:16]
    return {name: digest for name, digest in found.items() if not name.startswith(f"{MODULE}paceline")}
