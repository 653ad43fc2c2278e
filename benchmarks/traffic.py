"""What each way to add up gradients moves: bytes counted between real processes beside the formula.

    python benchmarks/traffic.py                    11 processes on this host, groups of 2 … 8 workers and up to 3
                                                    servers, one tensor; prints the tables of docs/algorithms.md
    python benchmarks/traffic.py --count FILE       what each of those processes runs; the first writes the counts

The count is of payload where it is handed to the backend; headers and the network's own packets come on top.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import traffic_theory as theory
from server_round import TENSORS, ServerJob, held_by_servers
from torch._C._distributed_c10d import PrefixStore, Store

from paceline.collectives.canonical_sum import SumPlan, sum_plan
from paceline.collectives.choice import FLAT, HIERARCHICAL, schedule_named
from paceline.collectives.communicator import Communicator
from paceline.collectives.direct_all_reduce import CANONICAL, direct_all_reduce
from paceline.collectives.executor import Scratch, run_schedule
from paceline.launch.job import Job
from paceline.launch.supervisor import supervise
from paceline.launch.worker_main import Script
from paceline.world.control import NoSupervisor, Supervisor, call_supervisor
from paceline.world.environment import read_world
from paceline.world.rendezvous_store import open_store
from paceline.world.world import LaunchSettings, Topology, World

SIZES = range(2, 9)
ELEMENTS = 4 * 53_760  # divides by 64 · N for all N of SIZES, so that every chunk of every algorithm is as long
ITEM_BYTES = 4
DEDICATED = "star, dedicated server"
INSIDE = "parameter server, worker 0 serves"
ONE_SERVER = "parameter server, 1 server"
THREE_SERVERS = "parameter server, 3 servers"
TIMEOUT_S = 120.0

Counts = dict[str, dict[int, list[tuple[int, int]]]]
"""By algorithm and number of workers: (sent, received) of every rank, in bytes."""


@dataclass(frozen=True)
class Row:
    """One algorithm in the tables: what the literature says about its busiest node and about all together, in Z."""

    name: str
    busiest: str
    busiest_share: Callable[[int], float]
    total: str = "2·(N-1)·Z"
    total_share: Callable[[int], float] = lambda size: 2 * (size - 1)
    servers: int = 0  # processes beside the N workers


def _ring_share(size: int) -> float:
    return 2 * (size - 1) / size


def _halving_share(size: int) -> float:
    power = 1 << (size.bit_length() - 1)
    return _ring_share(power) + (size > power)


def _two_hosts_share(size: int) -> float:
    return 1 + (-(-size // 2) - 1).bit_length() if size % 2 else _ring_share(size)


ROWS = (
    Row("star", "(N-1)·Z", lambda size: size - 1),
    Row(DEDICATED, "N·Z", lambda size: size, "2·N·Z", lambda size: 2 * size, servers=1),
    Row("unsplit-ring", "(N-1)·Z", lambda size: size - 1, "N·(N-1)·Z", lambda size: size * (size - 1)),
    Row("ring", "2·(N-1)/N·Z", _ring_share),
    Row("tree", "⌈log2 N⌉·Z", lambda size: (size - 1).bit_length()),
    Row("halving-doubling", "2·(P-1)/P·Z, + Z if N > P", _halving_share),
    Row("direct", "2·(N-1)/N·Z", _ring_share),
    Row(HIERARCHICAL, "2·(N-1)/N·Z, odd N: Z + ⌈log2 g⌉·Z", _two_hosts_share),
    Row(CANONICAL, "2·(N-1)/N·Z", _ring_share),
    Row(INSIDE, "(N-1)·Z", lambda size: size - 1),
    Row(ONE_SERVER, "N·Z", lambda size: size, "2·N·Z", lambda size: 2 * size, servers=1),
    Row(THREE_SERVERS, "N·Z/3, at least Z", lambda size: max(1, size / 3), "2·N·Z", lambda size: 2 * size, servers=3),
)
OVER_SERVERS = (INSIDE, ONE_SERVER, THREE_SERVERS)


def two_hosts(size: int) -> Topology:
    """The lower ranks on one host, the upper ones on the other; of an odd number the first host has one more."""
    return Topology.of([int(rank >= -(-size // 2)) for rank in range(size)])


def one_root_each(size: int) -> SumPlan:
    return sum_plan(size, size, tuple(range(size)))


# -- counting ----------------------------------------------------------------------------------------------------------


def count(
    world: World,
    supervisor: Supervisor = NoSupervisor(),  # noqa: B008 (it has no state)
    *,
    elements: int = ELEMENTS,
    sizes_over_servers: Sequence[int] = SIZES,
) -> Counts:
    """A program for all workers of a world: every way, in groups of the first 2, 3, … of them."""
    store = open_store(world, supervisor, TIMEOUT_S)
    scratch = Scratch()
    counts: Counts = {row.name: {} for row in ROWS}
    for size in range(2, world.size + 1):
        if world.rank >= size:
            continue
        part = replace(world, size=size, local_size=size)
        place = PrefixStore(f"{size}", store)
        comm = Communicator.connect(part, place, backend="gloo", device=torch.device("cpu"), timeout_s=TIMEOUT_S)
        for row in ROWS:
            workers, served = size - row.servers, row.name in OVER_SERVERS
            if workers not in (sizes_over_servers if served else SIZES):
                continue
            if served:
                moved = _by_servers(part, PrefixStore(row.name, place), row.servers, elements)
            else:
                moved = _by_schedule(comm, row.name, elements, scratch)
            counts[row.name][workers] = [(sent, received) for sent, received in comm.gather_json(moved)]
        comm.barrier()
        comm.close()
    return counts


def _by_schedule(comm: Communicator, name: str, elements: int, scratch: Scratch) -> tuple[int, int]:
    """Also checks the sum: rank r brings r + 1, a dedicated server zeros."""
    brought = comm.rank + 1 if name != DEDICATED else comm.rank
    tensor = torch.full((elements,), float(brought))
    before = comm.traffic
    if name == CANONICAL:
        plan = one_root_each(comm.size)
        direct_all_reduce(comm, plan, {comm.rank: tensor}, tensor, tag=0, scratch=scratch)
    else:
        known = "star" if name == DEDICATED else name
        run_schedule(comm, schedule_named(known, two_hosts(comm.size)), tensor, scratch=scratch)
    moved = comm.traffic - before
    wanted = sum(range(comm.size)) if name == DEDICATED else sum(range(comm.size + 1))
    assert bool((tensor == wanted).all()), f"{name}: the sum is wrong"
    return moved.sent_bytes, moved.received_bytes


def _by_servers(part: World, place: Store, servers: int, elements: int) -> tuple[int, int]:
    """One round, in which the last ranks serve; the tensors in it, without the messages that only say something."""
    workers = part.size - servers
    job = ServerJob(replace(part, size=workers, local_size=workers, servers=servers), place, elements)
    if part.rank < workers:
        job.round()
        job.check()
        job.close()
    else:
        job.serve()
    moved = [job.traffic.of(operation) for operation in TENSORS]
    return sum(each.sent_bytes for each in moved), sum(each.received_bytes for each in moved)


def predicted(elements: int = ELEMENTS) -> Counts:
    """What `count` has to find, by the closed forms."""
    forms: dict[str, Callable[[int], Sequence[theory.Moved]]] = {
        "star": lambda size: theory.star(elements, size),
        DEDICATED: lambda size: theory.star(elements, size + 1),
        "unsplit-ring": lambda size: theory.unsplit_ring(elements, size),
        "ring": lambda size: theory.ring(elements, size),
        "tree": lambda size: theory.tree(elements, size),
        "halving-doubling": lambda size: theory.halving_doubling(elements, size),
        "direct": lambda size: theory.direct(elements, size),
        HIERARCHICAL: lambda size: theory.hierarchical(elements, two_hosts(size)),
        CANONICAL: lambda size: theory.canonical(elements, one_root_each(size)),
        INSIDE: lambda size: theory.parameter_server_inside(elements, one_root_each(size)),
        ONE_SERVER: lambda size: theory.parameter_server([elements], one_root_each(size)),
        THREE_SERVERS: lambda size: theory.parameter_server(held_by_servers(elements, 3), one_root_each(size)),
    }
    assert set(forms) == {row.name for row in ROWS} >= {*FLAT, HIERARCHICAL}
    return {
        name: {size: [(ITEM_BYTES * m.sent, ITEM_BYTES * m.received) for m in form(size)] for size in SIZES}
        for name, form in forms.items()
    }


# -- the tables --------------------------------------------------------------------------------------------------------


def tables(counts: Mapping[str, Mapping[int, Sequence[tuple[int, int]]]]) -> str:
    """Formula and count side by side, as markdown."""
    z = ELEMENTS * ITEM_BYTES
    columns = [*(f"N = {size}" for size in SIZES)]
    busiest = [_line("algorithm", "bytes", *columns), "|---|---|" + "---:|" * len(columns)]
    together = list(busiest)
    for row in ROWS:
        by_size = counts[row.name]
        most = [max(max(pair) for pair in by_size[size]) for size in SIZES]
        total = [sum(sent for sent, _ in by_size[size]) for size in SIZES]
        busiest += _pair(row.name, row.busiest, [row.busiest_share(size) * z for size in SIZES], most)
        together += _pair(row.name, row.total, [row.total_share(size) * z for size in SIZES], total)
    return "\n".join(
        [
            f"Sent by the busiest rank, which receives as many (Z = {z:,} bytes, {ELEMENTS:,} fp32):",
            "",
            *busiest,
            "",
            "Sent by all ranks together:",
            "",
            *together,
        ]
    )


def _pair(name: str, formula: str, by_formula: Sequence[float], counted: Sequence[int]) -> list[str]:
    return [
        _line(name, formula, *(f"{round(value):,}" for value in by_formula)),
        _line("", "counted", *(f"{value:,}" for value in counted)),
    ]


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def count_in_workers() -> Counts | int:
    """The counts, or the exit code of workers that failed; the supervisor has told why."""
    workers = max(SIZES) + max(row.servers for row in ROWS)
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        result_file = Path(folder) / "counts.json"
        job = Job(
            script=Script(__file__, ("--count", str(result_file))),
            workers=workers,
            settings=LaunchSettings(lanes=workers, threads=1, backend="gloo"),
        )
        code = asyncio.run(supervise(job))
        if code != 0:
            return code
        read = json.loads(result_file.read_text())
        return {name: {int(size): ranks for size, ranks in by_size.items()} for name, by_size in read.items()}


def count_as_worker(file: Path) -> None:
    world = read_world()
    supervisor = call_supervisor(world)
    counts = count(world, supervisor)
    if world.is_main:
        file.write_text(json.dumps(counts))
    supervisor.close()


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=Path, metavar="FILE", help="be one of the processes")
    asked = parser.parse_args(words)
    if asked.count is not None:
        count_as_worker(asked.count)
        return
    counts = count_in_workers()
    if isinstance(counts, int):
        sys.exit(counts)
    print(tables(counts))


if __name__ == "__main__":
    main()
