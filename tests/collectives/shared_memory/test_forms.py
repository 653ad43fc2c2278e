"""Every form in which torch lets a collective be called gives what gloo gives in the same form."""

from __future__ import annotations

import random
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, ReduceOp

from paceline import World
from paceline.collectives.shared_memory.group import SharedMemoryGroup
from paceline.errors import CollectiveError
from paceline.world.control import NoSupervisor
from paceline.world.rendezvous_store import open_store
from tests.collectives.shared_memory.ranks import group_of, opts, succeeded
from tests.workers import run_workers

pytestmark = pytest.mark.workers

DTYPES = (torch.float32, torch.float64, torch.float16, torch.int32, torch.int64, torch.uint8)
OPS = (ReduceOp.SUM, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT)
LONG = timedelta(seconds=20)


def gloo_of(world: World, store: Any) -> Any:
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = LONG
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    place = PrefixStore("gloo", store)
    group = dist.ProcessGroup(place, world.rank, world.size)  # type: ignore[call-arg]
    backend = dist.ProcessGroupGloo(place, world.rank, world.size, options)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    return group


class Case:
    """One random call: the same shapes on every rank, other numbers on each; small ones, whose sums are exact."""

    def __init__(self, seed: int, rank: int, size: int) -> None:
        self.random = random.Random(seed)
        self.dtype, self.op = self.random.choice(DTYPES), self.random.choice(OPS)
        self.shape = [self.random.randint(1, 5) for _ in range(self.random.randint(1, 3))]
        self.root = self.random.randrange(size)
        self.generator = torch.Generator().manual_seed(seed * 100 + rank)
        self.rank, self.size = rank, size

    def tensor(self, *shape: int) -> Tensor:
        return torch.randint(0, 4, shape or self.shape, generator=self.generator).to(self.dtype)

    def tensors(self, count: int) -> list[Tensor]:
        return [self.tensor() for _ in range(count)]


def all_reduce(group: Any, case: Case) -> Any:
    x, y, z, pair = case.tensor(), case.tensor(), case.tensor(), case.tensors(2)
    group.allreduce(x, case.op).wait()
    group.allreduce(tensor=y, op=case.op, timeout=LONG).wait()
    group.allreduce([z], case.op).wait()
    group.allreduce(pair, op=case.op).wait()
    alone = case.tensor()
    group.allreduce(alone).wait()
    return [x, y, z, *pair, alone]


def coalesced(group: Any, case: Case) -> Any:
    """A tensor twice in the list, and a part of it."""
    x, y = case.tensor(6, 2), case.tensor()
    group.allreduce_coalesced([x, y, x, x[1:3]]).wait()
    return [x, y]


def sparse(group: Any, case: Case) -> Any:
    """Several sparse tensors of a rank are several addends, too."""
    pair = [case.tensor(4, 3).to(torch.float32).relu().sub(1).relu().to_sparse() for _ in range(2)]
    group.allreduce(pair).wait()
    return [tensor.to_dense() for tensor in pair]


def broadcast(group: Any, case: Case) -> Any:
    x, y, z, pair = case.tensor(), case.tensor(), case.tensor(), case.tensors(2)
    group.broadcast(x, root=case.root).wait()
    group.broadcast(y, case.root, LONG).wait()
    group.broadcast([z]).wait()
    group.broadcast(pair, opts(root=case.root)).wait()
    return [x, y, z, *pair]


def reduce(group: Any, case: Case) -> Any:
    x, y = case.tensor(), case.tensor()
    group.reduce(x, root=case.root, op=case.op).wait()
    group.reduce(y, case.root).wait()
    return [x, y] if case.rank == case.root else []


def all_gather(group: Any, case: Case) -> Any:
    outs, lists = case.tensors(case.size), [case.tensors(2 * case.size) for _ in range(2)]
    group.allgather(outs, case.tensor()).wait()
    group.allgather(lists, case.tensors(2)).wait()
    more = case.tensors(case.size)
    group.allgather(output_tensors=more, input_tensor=case.tensor(), timeout=LONG).wait()
    return [*outs, *lists[0], *lists[1], *more]


def gather(group: Any, case: Case) -> Any:
    outs = case.tensors(case.size)
    mine = outs if case.rank == case.root else []
    group.gather(mine, case.tensor(), root=case.root).wait()
    return mine


def scatter(group: Any, case: Case) -> Any:
    out, parts = case.tensor(), case.tensors(case.size)
    group.scatter(out, parts if case.rank == case.root else [], case.root).wait()
    return [out]


def reduce_scatter(group: Any, case: Case) -> Any:
    out, again = case.tensor(), case.tensor()
    group.reduce_scatter(out, case.tensors(case.size), case.op).wait()
    group.reduce_scatter(again, input=case.tensors(case.size)).wait()
    return [out, again]


def uneven_reduce_scatter(group: Any, case: Case) -> Any:
    lengths = [case.random.randint(0, 9) for _ in range(case.size)]
    out = case.tensor(lengths[case.rank])
    group.reduce_scatter(out, [case.tensor(length) for length in lengths], case.op).wait()
    return [out]


def all_to_all(group: Any, case: Case) -> Any:
    out, mine = case.tensor(2 * case.size), case.tensor(2 * case.size)
    group.alltoall_base(out, mine, [], [], timeout=LONG).wait()
    group.barrier(LONG).wait()
    group.barrier(timeout=LONG).wait()
    return [out]


CALLS = [
    all_reduce,
    coalesced,
    sparse,
    broadcast,
    reduce,
    all_gather,
    gather,
    scatter,
    reduce_scatter,
    uneven_reduce_scatter,
    all_to_all,
]


def compare(world: World) -> list[str]:
    store = open_store(world, NoSupervisor(), 20.0)
    gloo = gloo_of(world, store)
    ours = SharedMemoryGroup(PrefixStore("ours", store), world.rank, world.size, LONG)
    different = []
    for seed in range(12):
        for call in CALLS:
            wanted, got = (call(group, Case(seed, world.rank, world.size)) for group in (gloo, ours))
            if len(wanted) != len(got) or not all(map(torch.equal, got, wanted)):
                different.append(f"{call.__name__} {seed}: {got} instead of {wanted}")
    ours.barrier().wait()
    ours.shutdown()
    return different


@pytest.mark.parametrize("size", [2, 3])
def test_every_form_gives_what_gloo_gives(size: int) -> None:
    assert succeeded(run_workers(compare, size)) == [[]] * size


def refuse(world: World) -> list[str]:
    x, texts = torch.ones(2), []
    with group_of(world) as group:
        calls: list[Callable[[], Any]] = [
            lambda: group.broadcast(x, root=2),
            lambda: group.reduce([x, x], opts(ReduceOp.SUM, root=0)),
            lambda: group.allreduce([], opts(ReduceOp.SUM)),
            lambda: group.allreduce([x, torch.ones(3)], opts(ReduceOp.SUM)),
            lambda: group.gather([x, x], x, root=1 - world.rank),
            lambda: group.scatter(x, [x], root=world.rank),
            lambda: group.reduce_scatter(x, [torch.ones(3), torch.ones(3)]),
        ]
        for call in calls:
            with pytest.raises(CollectiveError) as info:  # at once: nobody has been told, so nobody waits
                call()
            texts.append(str(info.value))
        with pytest.raises(TypeError, match="root"):
            group.broadcast(x)
        group.broadcast([x], None).wait()  # no options are the long form's
        group.barrier().wait()
    return texts


def test_what_makes_no_sense_is_refused_before_any_other_rank_hears_of_it() -> None:
    for rank, texts in enumerate(succeeded(run_workers(refuse, 2))):
        assert texts == [
            "broadcast: invalid root rank 2: there are ranks 0 to 1",
            "reduce requires a single-element tensor list, not one of 2",
            "all_reduce requires non-empty tensor list",
            "all_reduce: invalid tensor size [3] beside [2]",
            "gather requires empty output on non-root ranks",
            "scatter: Incorrect input list size 1. Input list size should be 2: one tensor for each rank",
            f"reduce_scatter: invalid tensor size: the tensor for rank {rank} is 3 torch.float32, this rank's own 2 "
            "torch.float32",
        ]


def differ(world: World) -> str:
    lengths = (2, 3) if world.rank == 0 else (1, 3)
    with group_of(world) as group:
        out = torch.ones(lengths[world.rank])
        with pytest.raises(CollectiveError) as info:
            group.reduce_scatter(out, [torch.ones(length) for length in lengths]).wait()
    return str(info.value)


def test_parts_of_other_lengths_on_another_rank_are_named() -> None:
    for text in succeeded(run_workers(differ, 2)):
        assert "parts 2, 3" in text, text
        assert "parts 1, 3" in text, text
