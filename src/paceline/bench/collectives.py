"""Collectives side by side, in the manner of nccl-tests: sizes × contestants, interleaved in one set of processes.

    t     seconds of one call on the slowest rank: the median of a part of about 0.1 s; parts take turns, round after
          round. The mean stands beside it: gloo's calls, now and then, take ten times the usual
    S     bytes of the whole tensor: of all-reduce and broadcast on every rank, of reduce-scatter what comes in, of
          all-gather and all-to-all what goes out
    algorithm bandwidth = S / t        bus bandwidth = algorithm bandwidth × factor: what a link carries at least

| operation      | factor    |     | contestant       | what is called                                          |
|----------------|-----------|     |------------------|---------------------------------------------------------|
| all_reduce     | 2·(N-1)/N |     | paceline         | torch.distributed on the shared-memory group, C kernels |
| reduce_scatter | (N-1)/N   |     | paceline-torch   | the same with torch kernels                             |
| all_gather     | (N-1)/N   |     | paceline-buckets | the same with C, tensors already in shared memory       |
| all_to_all     | (N-1)/N   |     | bound            | two barriers and the C sum over shared tensors, no c10d |
| broadcast      | 1         |     | gloo             | torch.distributed on gloo                               |
| reduce         | 1         |     | openmpi          | mpi4py; mpirun starts the processes then                |
                                   | deepspeed        | its shared-memory all-reduce for inference              |
                                   | ring, star, …    | our schedules over gloo's point-to-point                |

Plan and start are here, without torch; `collectives_measure` runs the plan, `report` shows what came out.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError
from paceline.launch.job import Job
from paceline.launch.rendezvous import free_port
from paceline.launch.supervisor import supervise
from paceline.launch.worker_main import Script
from paceline.world.environment import parent_environment
from paceline.world.world import LOOPBACK, LaunchSettings

MODULE = "paceline.bench.collectives_measure"

OURS = ("paceline", "paceline-torch", "paceline-buckets", "bound")
PEERS = ("gloo", "openmpi", "deepspeed")
BACKENDS = (*OURS, *PEERS)
BASELINE = "gloo"
ALGORITHMS = ("ring", "halving-doubling", "direct", "tree", "star", "unsplit-ring", "hierarchical", "auto")
DEFAULT_SIZES = "4KiB,64KiB,1MiB,4MiB,25MiB,256MiB"
WARM_UP_ROUNDS = 2
ITEM_BYTES = 4  # fp32

_UNITS = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


@dataclass(frozen=True)
class Operation:
    """`only`: the backends that have it, where not all of them do. `algorithms`: the schedules there are for it."""

    name: str
    formula: str
    only: tuple[str, ...] | None = None
    algorithms: tuple[str, ...] = ()

    def factor(self, workers: int) -> float:
        """Bus bandwidth over algorithm bandwidth, which is also the bytes that a rank must send, in S."""
        each = (workers - 1) / workers
        return {"2·(N-1)/N": 2 * each, "(N-1)/N": each}.get(self.formula, 1.0)

    def contestants(self, backends: tuple[str, ...], algorithms: tuple[str, ...]) -> tuple[str, ...]:
        return (
            *(name for name in backends if self.only is None or name in self.only),
            *(name for name in algorithms if name in self.algorithms),
        )


_GENERAL = ("paceline", "paceline-torch", "gloo", "openmpi")

OPERATIONS = {
    operation.name: operation
    for operation in (
        Operation("all_reduce", "2·(N-1)/N", algorithms=ALGORITHMS),
        Operation("reduce_scatter", "(N-1)/N", _GENERAL, algorithms=("ring",)),
        Operation("all_gather", "(N-1)/N", _GENERAL, algorithms=("ring",)),
        Operation("all_to_all", "(N-1)/N", _GENERAL),
        Operation("broadcast", "1", _GENERAL),
        Operation("reduce", "1", _GENERAL),
    )
}


@dataclass(frozen=True)
class Comparison:
    """Everything that is asked for; sizes in bytes. A contestant's part of a round takes about `part_s`."""

    operations: tuple[str, ...]
    sizes: tuple[int, ...]
    backends: tuple[str, ...]
    algorithms: tuple[str, ...] = ()
    workers: int = 2
    rounds: int = 20
    part_s: float = 0.1

    def __post_init__(self) -> None:
        for option, given, known in (
            ("--operation", self.operations, tuple(OPERATIONS)),
            ("--backend", self.backends, BACKENDS),
            ("--algorithm", self.algorithms, ALGORITHMS),
        ):
            for name in given:
                if name not in known:
                    raise ConfigError(f"{option} {name!r} is not known; choose one of {', '.join(known)}")
        if self.workers < 2:
            raise ConfigError(f"--workers {self.workers}: a collective needs at least two")
        if self.rounds < 1:
            raise ConfigError(f"--rounds {self.rounds}: at least one round is measured")
        if not self.sizes:
            raise ConfigError("--sizes names no size")
        for name in self.operations:
            if not self.contestants(name):
                raise ConfigError(f"--operation {name}: no chosen contestant has it; add --backend {BASELINE}")

    @property
    def all_rounds(self) -> int:
        return WARM_UP_ROUNDS + self.rounds

    def contestants(self, operation: str) -> tuple[str, ...]:
        return OPERATIONS[operation].contestants(self.backends, self.algorithms)

    def elements(self, size: int) -> int:
        """Every rank's part is as long, so what does not divide is left off."""
        return max(1, size // ITEM_BYTES // self.workers) * self.workers

    def order(self, operation: str, number: int) -> tuple[str, ...]:
        """Who runs when in round `number`: the first place goes round, and then everything backwards."""
        names = self.contestants(operation)
        cycle, first = divmod(number, len(names))
        names = names if cycle % 2 == 0 else names[::-1]
        return names[first:] + names[:first]

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Comparison:
        told = json.loads(text)
        if not isinstance(told, dict) or set(told) != {field.name for field in fields(cls)}:
            raise ConfigError(
                f"not a comparison: {text[:120]!r}; this module is started by `paceline bench collectives`"
            )
        lists = {name: tuple(value) for name, value in told.items() if isinstance(value, list)}
        return cls(**told | lists)


def parse_sizes(text: str) -> tuple[int, ...]:
    """ "4KiB,1MiB,1000" in bytes, each once, in ascending order."""
    sizes = set()
    for word in text.split(","):
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMG]iB|B|)\s*", word)
        if found is None or float(found[1]) <= 0:
            raise ConfigError(f"--sizes {text!r}: {word!r} is no size; write a list such as 4KiB,1MiB,25MiB")
        sizes.add(round(float(found[1]) * _UNITS[found[2]]))
    return tuple(sorted(sizes))


def size_text(size: int) -> str:
    for unit in ("GiB", "MiB", "KiB"):
        if size >= _UNITS[unit]:
            return f"{size / _UNITS[unit]:.4g} {unit}"
    return f"{size} B"


def without_the_missing(comparison: Comparison) -> tuple[Comparison, list[str]]:
    """The comparison between those that are installed, and a line about each that is not."""
    lines = {name: why for name in comparison.backends if (why := _why_not(name)) is not None}
    left = tuple(name for name in comparison.backends if name not in lines)
    return replace(comparison, backends=left), [f"{name} left out: {why}" for name, why in lines.items()]


def _why_not(name: str) -> str | None:
    match name:
        case "openmpi" if importlib.util.find_spec("mpi4py") is None:
            return "mpi4py is not installed"
        case "openmpi" if shutil.which("mpirun") is None:
            return "there is no mpirun"
        case "deepspeed" if importlib.util.find_spec("deepspeed") is None:
            return "deepspeed is not installed"
        case "bound" if not _has_c_kernels():
            return "there is no C compiler, so paceline itself runs with torch kernels too"
    return None


def _has_c_kernels() -> bool:
    from paceline.collectives.shared_memory.kernels import compiled_library  # it imports torch

    return compiled_library() is not None


# -- starting the workers ----------------------------------------------------------------------------------------------


def run_in_workers(comparison: Comparison) -> dict[str, Any] | int:
    """The result, or the exit code of workers that failed; they have told why."""
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        result_file = Path(folder) / "result.json"
        words = (comparison.to_json(), str(result_file))
        if "openmpi" in comparison.backends:
            code = _by_mpirun(comparison.workers, words)
        else:
            job = Job(
                script=Script(MODULE, words, is_module=True),
                workers=comparison.workers,
                settings=LaunchSettings(lanes=comparison.workers, threads=1),
            )
            code = asyncio.run(supervise(job))
        if code != 0:
            return code
        result: dict[str, Any] = json.loads(result_file.read_text())
        return result


def _by_mpirun(workers: int, words: Sequence[str]) -> int:
    """MPI has to start its processes itself."""
    command = ["mpirun", "--allow-run-as-root", "--bind-to", "none", "--oversubscribe", "-n", str(workers)]
    variables = parent_environment(threads=1, keep_memory=False) | {
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(free_port(LOOPBACK)),
    }
    return subprocess.run([*command, sys.executable, "-m", MODULE, *words], env=variables, check=False).returncode
