"""What training holds in memory, per worker: each strategy, and what people use today, in processes of its own.

    paceline bench memory --workers 2 --workers 4

A model of 50 million parameters in fp32, AdamW, one lane per worker, one micro-batch per step:

    first steps   the highest peak of the process's memory, by the kernel: what happens once is in it
    one more      the peak of a step, by the kernel
    the last      bytes by role, counted from the tensors that are alive between backward and step()

    parameters + gradients + optimizer state     beside the formula (sharding/footprint.py)
    activations                                  what autograd keeps between forward and backward
    buffers                                      of communication: other tensors, and shared memory beyond the above
    other                                        the rest of a step's peak: temporary results, libraries, and with
                                                 --keep-memory what the allocator keeps when it is freed

The plan is here, without torch; `memory_measure` runs in the workers. Bytes are kept as *spans*, so that nothing is
counted twice:

    a tensor    private memory            its whole allocation: that is what it keeps from being freed
                memory that is shared     its own bytes there, named by the file that all workers map
    a role      parameters, gradients …   the union of its tensors' spans, less what an earlier role has
    a worker    bytes of memory that k workers hold count 1/k for each, as in the kernel's PSS
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError
from paceline.launch.job import Job
from paceline.launch.supervisor import supervise
from paceline.launch.worker_main import Script
from paceline.world.world import LaunchSettings

BACKENDS = ("paceline", "gloo")
# By name: the strategy of ours whose formula is also theirs.
PEERS = {
    "torch-ddp": "ddp",
    "torch-fsdp2": "zero3",
    "deepspeed-zero1": "zero1",
    "deepspeed-zero2": "zero2",
    "deepspeed-zero3": "zero3",
}
ROLES = ("parameters", "gradients", "optimizer_state")
PARTS = (*ROLES, "activations", "buffers", "other")


@dataclass(frozen=True)
class MemoryRun:
    """One contestant on so many workers: a strategy of ours, as `str(Chosen)` names it, or a peer."""

    contestant: str
    workers: int
    backend: str = "paceline"  # ours; the peers' is gloo
    bucket_mib: float | None = None  # ours; zero3 gathers as much at once
    keep_memory: bool = False  # as `paceline run` does; if not, what is freed is not counted

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise ConfigError(f"--workers {self.workers}: there is at least one")
        if self.backend not in BACKENDS:
            raise ConfigError(f"--backend {self.backend!r} is not known; choose one of {', '.join(BACKENDS)}")

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> MemoryRun:
        return cls(**json.loads(text))


def known_peers() -> tuple[str, ...]:
    """Those that can run here: DeepSpeed only where it is installed."""
    return tuple(name for name in PEERS if not name.startswith("deepspeed") or importlib.util.find_spec("deepspeed"))


def check_names(wanted: Sequence[str], ours: Sequence[str]) -> None:
    for name in wanted:
        if name.startswith("deepspeed") and name in PEERS and name not in known_peers():
            raise ConfigError(f"{name} is not here: DeepSpeed is not installed beside paceline")
        if name not in (*ours, *PEERS):
            raise ConfigError(f"{name!r} is not known; choose among {', '.join((*ours, *known_peers()))}")


def measure_memory(
    runs: Sequence[MemoryRun], tell: Callable[[str], None] = lambda line: None
) -> list[dict[str, Any]] | int:
    """A row for each run, or the exit code of workers that failed; the supervisor has told why."""
    rows = []
    for run in runs:
        found = _run_in_workers(run)
        if isinstance(found, int):
            return found
        rows.append(row_of(run, found))
        tell(f"{run.contestant}, {run.workers} workers: {rows[-1]['held'] / 1e6:,.0f} MB held")
    return rows


def _run_in_workers(run: MemoryRun) -> list[dict[str, Any]] | int:
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        job = Job(
            script=Script("paceline.bench.memory_measure", (run.to_json(), folder), is_module=True),
            workers=run.workers,
            settings=LaunchSettings(lanes=run.workers, threads=1, backend=run.backend),
            keep_memory=run.keep_memory,
        )
        code = asyncio.run(supervise(job))
        if code != 0:
            return code
        return [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(run.workers)]


def row_of(run: MemoryRun, workers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The figures of the worker that holds most, in bytes; every worker's are beside them."""
    per_role = {role: shares([worker["spans"][role] for worker in workers]) for role in ROLES}
    each = []
    for place, worker in enumerate(workers):
        parts = {role: round(per_role[role][place]) for role in ROLES}
        in_shared = sum(_in_shared(worker["spans"][role], per_role[role][place]) for role in ROLES)
        parts["activations"] = worker["activations"]
        parts["buffers"] = worker["private_buffers"] + max(0, round(worker["shared_pss"] - in_shared))
        beyond_start = {
            name: worker[name] - worker["pss_at_start"] for name in ("step_peak", "highest_peak", "pss_before_step")
        }
        other = beyond_start["step_peak"] - sum(parts.values())
        each.append({**parts, "other": other, "held": sum(parts[role] for role in ROLES), **beyond_start})
    busiest = max(each, key=lambda figures: figures["held"])
    told = {"contestant": run.contestant, "workers": run.workers, "parameters_in_model": workers[0]["parameters"]}
    return {**told, **busiest, "formula": workers[0]["formula"], "each_worker": each}


def _in_shared(spans: dict[str, Any], share: float) -> float:
    """Of a role's bytes those in shared memory; private ones count whole, so the rest is there."""
    private: int = sum(
        stop - start for memory, found in spans.items() if memory.startswith("worker") for start, stop in found
    )
    return share - private


# -- spans: which bytes of which memory a worker holds -----------------------------------------------------------------

Memory = str  # a mapped file that workers share, or one worker's private memory
Spans = Mapping[Memory, Sequence[tuple[int, int]]]  # by memory: (start, stop), in order and apart from each other


def union(spans: Iterable[tuple[Memory, int, int]]) -> Spans:
    by_memory: dict[Memory, list[tuple[int, int]]] = defaultdict(list)
    for memory, start, stop in sorted(spans):
        known = by_memory[memory]
        if known and start <= known[-1][1]:
            known[-1] = known[-1][0], max(stop, known[-1][1])
        elif start < stop:
            known.append((start, stop))
    return {memory: found for memory, found in by_memory.items() if found}


def without(spans: Spans, others: Spans) -> Spans:
    """What of `spans` is not in `others`."""
    left: list[tuple[Memory, int, int]] = []
    for memory, mine in spans.items():
        for low, stop in mine:
            start = low
            for begin, end in others.get(memory, ()):
                if end <= start or begin >= stop:
                    continue
                left.append((memory, start, begin))
                start = end
            left.append((memory, start, stop))
    return union((memory, start, stop) for memory, start, stop in left if start < stop)


def joined(*many: Spans) -> Spans:
    return union((memory, start, stop) for spans in many for memory, found in spans.items() for start, stop in found)


def size(spans: Spans) -> int:
    return sum(stop - start for found in spans.values() for start, stop in found)


def shares(workers: Sequence[Spans]) -> list[float]:
    """Bytes of each worker; what k of them hold is divided by k."""
    out = [0.0] * len(workers)
    for memory in {memory for spans in workers for memory in spans}:
        edges = sorted({edge for spans in workers for span in spans.get(memory, ()) for edge in span})
        for start, stop in pairwise(edges):
            holders = [place for place, spans in enumerate(workers) if _covers(spans.get(memory, ()), start)]
            for place in holders:
                out[place] += (stop - start) / len(holders)
    return out


def _covers(found: Sequence[tuple[int, int]], byte: int) -> bool:
    return any(start <= byte < stop for start, stop in found)
