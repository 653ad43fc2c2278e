"""All-reduces between real processes: whoever adds what, all of them end with the bits of one process."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paceline import World
from paceline.collectives.canonical_sum import SumPlan, sum_plan
from paceline.collectives.communicator import Communicator
from paceline.collectives.direct_all_reduce import direct_all_reduce, direct_all_reduce_by_collectives
from paceline.collectives.executor import Scratch, run_schedule
from paceline.collectives.halving_doubling import HALVING_DOUBLING
from paceline.world.control import NoSupervisor
from paceline.world.rendezvous_store import open_store
from tests.collectives.one_process import lane_values, one_process_sum, roots_of, same_bits
from tests.workers import run_workers

pytestmark = pytest.mark.workers


def cases(workers: int, how: str) -> list[tuple[SumPlan, int]]:
    """Plans with one root each, with several, and with none on some worker; buffers down to less than one each."""
    cases = [(workers, tuple(range(workers))), (2 * workers, tuple(range(2 * workers))), (16, tuple(range(16)))]
    cases += [(7, (1, 2, 5, 6)), (workers, (0,)), (workers, (workers - 1,))]
    sizes = sorted({1, workers - 1, 63, 64, 65, 10_001})
    plans = [sum_plan(lanes, workers, present) for lanes, present in cases]
    return [(plan, elements) for plan in plans if how != "halving" or plan.is_pairwise for elements in sizes]


def differing_sums(world: World, *, hows: list[str]) -> list[str]:
    """The sums whose bits are not the bits of one process."""
    store = open_store(world, NoSupervisor(), 20.0)
    comm = Communicator.connect(world, store, backend="gloo", device=torch.device("cpu"), timeout_s=20.0)
    scratch = Scratch()
    wrong = []
    work = [(how, *case) for how in hows for case in cases(world.size, how)]
    for number, (how, plan, elements) in enumerate(work):
        values = lane_values(plan.present, elements)
        roots = roots_of(plan, world.rank, values)
        out = next(iter(roots.values())) if roots else torch.full((elements,), torch.nan)
        reduce(comm, how, plan, roots, out, 8 * number, scratch)
        if not same_bits(out, one_process_sum(values)):
            wrong.append(f"{how}: {elements} elements of lanes {plan.present}")
    comm.barrier()
    comm.close()
    return wrong


def reduce(
    comm: Communicator, how: str, plan: SumPlan, roots: dict[int, Tensor], out: Tensor, tag: int, scratch: Scratch
) -> None:
    if how == "halving":
        run_schedule(comm, HALVING_DOUBLING, out, tag=tag, scratch=scratch)
    elif how == "direct":
        direct_all_reduce(comm, plan, roots, out, tag=tag, scratch=scratch)
    else:
        direct_all_reduce_by_collectives(comm, plan, roots, out)


@pytest.mark.parametrize("workers", [2, 3, 4, 5])
def test_every_worker_ends_with_the_bits_of_one_process(workers: int) -> None:
    hows = ["direct", "collectives", "halving"] if workers in (2, 4) else ["direct", "collectives"]
    for result in run_workers(differing_sums, workers, hows=hows):
        assert result.error is None, result.traceback
        assert result.value == []
