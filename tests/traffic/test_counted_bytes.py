"""Bytes counted between real processes are the formula's, for 2 … 8 workers; the tables in the docs say the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paceline import World
from paceline.collectives.byte_count import Flow, Traffic
from paceline.collectives.communicator import ByteCount, Communicator
from paceline.world.control import NoSupervisor
from paceline.world.rendezvous_store import open_store
from tests.benchmarks import script
from tests.workers import run_workers

bench = script("traffic")

DOC = Path(__file__).parents[2] / "docs" / "algorithms.md"
UNEVEN = 1_003  # divides by none of 2 … 8


@pytest.mark.workers
@pytest.mark.parametrize(("elements", "sizes_over_servers"), [(53_760, (2, 8)), (UNEVEN, (5,))])
def test_every_rank_counts_exactly_the_bytes_of_the_formula(elements: int, sizes_over_servers: tuple[int, ...]) -> None:
    ranks = run_workers(bench.count, 11, elements=elements, sizes_over_servers=sizes_over_servers)
    for rank, result in enumerate(ranks):
        assert result.error is None, f"rank {rank}: {result.traceback}"
    for name, by_size in bench.predicted(elements).items():
        sizes = sizes_over_servers if name in bench.OVER_SERVERS else bench.SIZES
        assert ranks[0].value[name] == {size: by_size[size] for size in sizes}, name


def test_the_tables_of_the_docs_are_what_the_formulas_say() -> None:
    assert bench.tables(bench.predicted()) in DOC.read_text()


def test_the_tables_put_another_count_beside_the_formula() -> None:
    counts = bench.predicted()
    counts["ring"][8][3] = (7_777_777, 1)
    changed = set(bench.tables(counts).splitlines()) - set(bench.tables(bench.predicted()).splitlines())
    assert len(changed) == 2  # the busiest and the total; the formula's lines stay
    assert all(line.startswith("|  | counted |") for line in changed)


def test_the_benchmark_prints_the_tables(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(bench, "count_in_workers", bench.predicted)
    bench.main([])
    assert capsys.readouterr().out.strip() in DOC.read_text()


# -- the count itself --------------------------------------------------------------------------------------------------


def test_a_count_is_kept_by_operation_and_peer_and_can_be_subtracted() -> None:
    count = ByteCount()
    count.sent("ring", 1, 100)
    before = count.snapshot()
    count.sent("ring", 1, 40)
    count.sent("tree", 2, 7)
    count.received("ring", 3, 5)
    count.called("all_gather")
    now = count.snapshot()
    assert now.sent == {1: Flow(140, 2), 2: Flow(7, 1)}
    assert (now.sent_bytes, now.received_bytes) == (147, 5)
    assert (now - before).sent == {1: Flow(40, 1), 2: Flow(7, 1)}
    assert (now - before).of("ring") == Traffic({("ring", 1): Flow(40, 1)}, {("ring", 3): Flow(5, 1)})
    assert now.operations == {"ring", "tree"}
    assert (now - now) == Traffic()


def a_message_and_a_native_sum(world: World) -> tuple[Traffic, int]:
    """What was counted, and the bytes received before the message was waited for."""
    store = open_store(world, NoSupervisor(), 20.0)
    comm = Communicator.connect(world, store, backend="gloo", device=torch.device("cpu"), timeout_s=20.0)
    if world.rank == 0:
        comm.send(torch.zeros(25), to=1, tag=0).wait()
        early = 0
    else:
        handle = comm.receive(torch.zeros(25), source=0, tag=0, operation="gift")
        early = comm.traffic.received_bytes
        handle.wait()
    comm.all_reduce(torch.zeros(1000)).wait()
    found = comm.traffic
    comm.barrier()
    comm.close()
    return found, early


@pytest.mark.workers
def test_messages_count_when_they_move_and_native_collectives_as_calls_without_bytes() -> None:
    sender, receiver = run_workers(a_message_and_a_native_sum, 2)
    assert sender.value == (Traffic({("message", 1): Flow(100, 1)}, {}, {"all_reduce": 1}), 0), sender.traceback
    assert receiver.value == (Traffic({}, {("gift", 0): Flow(100, 1)}, {"all_reduce": 1}), 0), receiver.traceback
