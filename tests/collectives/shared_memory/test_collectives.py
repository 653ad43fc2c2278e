"""Every collective, for every dtype that gloo takes, against a reference that one process computes in fp64 or int64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import ReduceOp

from paceline import World
from paceline.collectives.shared_memory.group import SharedMemoryGroup
from tests.collectives.shared_memory.ranks import (
    DTYPES,
    bits,
    group_of,
    is_close,
    opts,
    reductions_of,
    reference,
    succeeded,
    values,
)
from tests.workers import run_workers

pytestmark = pytest.mark.workers

TINY_SLOT = 4096
COUNTS = (0, 1, 7, 1000, 5000)  # the last is larger than a tiny slot, in every dtype
LARGE = 30_011  # in fp32, more than what is reduced in one round


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(bits(a), bits(b))


def wrong_reductions(group: SharedMemoryGroup, rank: int, size: int, dtype: torch.dtype, count: int) -> Iterator[str]:
    for op in reductions_of(dtype):
        tensors = values(size, count, dtype)
        wanted = reference(tensors, op)
        result = tensors[rank].clone()
        group.allreduce([result], opts(op)).wait()
        if not is_close(result, wanted):
            yield f"all_reduce {op}"
        root = (count + 1) % size
        result = tensors[rank].clone()
        group.reduce([result], opts(op, root=root)).wait()
        if not is_close(result, wanted if rank == root else tensors[rank].to(wanted.dtype)):
            yield f"reduce {op} to {root}"
        parts = [values(size, count, dtype, seed=1 + to) for to in range(size)]
        wanted = reference(parts[rank], op)
        out = torch.empty(count, dtype=dtype)
        group.reduce_scatter([out], [[parts[to][rank] for to in range(size)]], opts(op)).wait()
        if not is_close(out, wanted):
            yield f"reduce_scatter {op}"
        out = torch.empty(count, dtype=dtype)
        group._reduce_scatter_base(out, torch.cat([parts[to][rank] for to in range(size)]), opts(op)).wait()
        if not is_close(out, wanted):
            yield f"reduce_scatter of one tensor {op}"


def wrong_moves(group: SharedMemoryGroup, rank: int, size: int, dtype: torch.dtype, count: int) -> Iterator[str]:
    tensors = values(size, count, dtype, seed=9)
    root = (count + 1) % size
    mine = tensors[rank].clone()
    group.broadcast([mine], opts(root=root)).wait()
    if not same(mine, tensors[root]):
        yield f"broadcast from {root}"
    outs = [torch.empty(count, dtype=dtype) for _ in range(size)]
    group.allgather([outs], [tensors[rank]], opts()).wait()
    if not all(map(same, outs, tensors)):
        yield "all_gather"
    out = torch.empty(count * size, dtype=dtype)
    group._allgather_base(out, tensors[rank], opts()).wait()
    if not same(out, torch.cat(tensors)):
        yield "all_gather into one tensor"
    outs = [torch.empty(count, dtype=dtype) for _ in range(size)] if rank == root else []
    group.gather([outs] if outs else [], [tensors[rank]], opts(root=root)).wait()
    if outs and not all(map(same, outs, tensors)):
        yield f"gather to {root}"
    mine = torch.empty(count, dtype=dtype)
    group.scatter([mine], [tensors] if rank == root else [], opts(root=root)).wait()
    if not same(mine, tensors[rank]):
        yield f"scatter from {root}"
    yield from wrong_exchanges(group, rank, size, dtype, count)


def wrong_exchanges(group: SharedMemoryGroup, rank: int, size: int, dtype: torch.dtype, count: int) -> Iterator[str]:
    """Part (source, to) has `count` elements, plus source, less to: uneven and sometimes empty."""

    def part(source: int, to: int) -> Tensor:
        return values(1, max(0, count + source - to), dtype, seed=source * size + to)[0]

    given, wanted = [part(rank, to) for to in range(size)], [part(source, rank) for source in range(size)]
    outs = [torch.empty_like(tensor) for tensor in wanted]
    group.alltoall(outs, given, opts()).wait()
    if not all(map(same, outs, wanted)):
        yield "all_to_all"
    out = torch.empty(sum(len(tensor) for tensor in wanted), dtype=dtype)
    in_splits, out_splits = [len(tensor) for tensor in given], [len(tensor) for tensor in wanted]
    group.alltoall_base(out, torch.cat(given), out_splits, in_splits, opts()).wait()
    if not same(out, torch.cat(wanted)):
        yield "all_to_all of one tensor, uneven"
    even = [values(size, count, dtype, seed=source) for source in range(size)]
    out = torch.empty(size * count, dtype=dtype)
    group.alltoall_base(out, torch.cat(even[rank]), [], [], opts()).wait()
    if not same(out, torch.cat([even[source][rank] for source in range(size)])):
        yield "all_to_all of one tensor, even"


def wrong_results(world: World, kernels: str, slot_bytes: int | None) -> list[str]:
    wrong = []
    with group_of(world, kernels=kernels, slot_bytes=slot_bytes) as group:
        # Where the ranks outnumber the cores by far, every meeting takes its time.
        counts = COUNTS if world.size <= 5 else (7, 1000)
        cases = [(dtype, count) for dtype in DTYPES for count in counts] + [(torch.float32, LARGE)]
        for dtype, count in cases:
            for check in (wrong_reductions, wrong_moves):
                found = check(group, world.rank, world.size, dtype, count)
                wrong += [f"{what} of {count} {dtype}" for what in found]
    return wrong


@pytest.mark.parametrize(
    ("workers", "kernels", "slot_bytes"),
    [
        (1, "c", TINY_SLOT),
        (2, "c", None),
        (2, "torch", TINY_SLOT),
        (3, "c", TINY_SLOT),
        (5, "torch", None),
        (8, "c", TINY_SLOT),
    ],
)
def test_every_collective_gives_the_reference(workers: int, kernels: str, slot_bytes: int | None) -> None:
    for wrong in succeeded(run_workers(wrong_results, workers, kernels=kernels, slot_bytes=slot_bytes)):
        assert wrong == []


# -- tensors of other shapes -------------------------------------------------------------------------------------------


def wrong_with_strides(world: World) -> list[str]:
    rank, size, wrong = world.rank, world.size, []
    with group_of(world) as group:
        for dtype in (torch.float32, torch.complex64):
            grids = [tensor.view(3, 4).t() for tensor in values(size, 12, dtype)]
            mine = grids[rank].clone(memory_format=torch.preserve_format)
            assert not mine.is_contiguous()
            group.allreduce([mine], opts(ReduceOp.SUM)).wait()
            if not torch.allclose(mine, torch.stack(grids).sum(0)):
                wrong.append(f"all_reduce {dtype}")
            mine = grids[rank].clone(memory_format=torch.preserve_format)
            group.broadcast([mine], opts(root=1)).wait()
            if not torch.equal(mine, grids[1]):
                wrong.append(f"broadcast {dtype}")
            outs = [torch.zeros(6, 8, dtype=dtype)[1:5, ::3] for _ in range(size)]
            group.allgather([outs], [grids[rank]], opts()).wait()
            if not all(map(torch.equal, outs, grids)):
                wrong.append(f"all_gather {dtype}")
            out = torch.zeros(4, 6, dtype=dtype)[:, ::2]
            group.reduce_scatter([out], [list(grids)], opts(ReduceOp.SUM)).wait()
            if not torch.allclose(out, grids[rank] * size):
                wrong.append(f"reduce_scatter {dtype}")
            out = torch.zeros(4, 6, dtype=dtype)[:, ::2]
            group.scatter([out], [grids] if rank == 0 else [], opts(root=0)).wait()
            if not torch.equal(out, grids[rank]):
                wrong.append(f"scatter {dtype}")
        scalar = torch.tensor(float(rank))
        group.allreduce([scalar], opts(ReduceOp.MAX)).wait()
        if scalar.item() != size - 1:
            wrong.append("a tensor without dimensions")
        needs_grad = torch.ones(5, requires_grad=True)
        group.allreduce([needs_grad], opts(ReduceOp.SUM)).wait()
        if not torch.equal(needs_grad.detach(), torch.full((5,), float(size))):
            wrong.append("a leaf that wants gradients")
    return wrong


def test_tensors_of_any_stride_are_read_and_written_where_they_are() -> None:
    assert succeeded(run_workers(wrong_with_strides, 3)) == [[]] * 3


def wrong_lists(world: World) -> list[str]:
    rank, size, wrong = world.rank, world.size, []
    kinds = [(3, torch.float32), (0, torch.int64), (2000, torch.bfloat16), (17, torch.complex64)]
    with group_of(world, slot_bytes=TINY_SLOT) as group:
        everyones = [[values(size, count, dtype)[r] for count, dtype in kinds] for r in range(size)]
        sums = [sum(rows[i].to(torch.complex128) for rows in everyones) for i in range(len(kinds))]
        mine = [tensor.clone() for tensor in everyones[rank]]
        group.allreduce_coalesced(mine, opts(ReduceOp.SUM)).wait()
        close = [
            torch.allclose(a.to(torch.complex128), b, rtol=2e-2, atol=2e-2) for a, b in zip(mine, sums, strict=True)
        ]
        if not all(close):
            wrong.append("all_reduce_coalesced")
        outs = [[torch.empty_like(tensor) for tensor in everyones[rank]] for _ in range(size)]
        group.allgather_coalesced(outs, everyones[rank], opts()).wait()
        if not all(
            same(a, b) for got, want in zip(outs, everyones, strict=True) for a, b in zip(got, want, strict=True)
        ):
            wrong.append("all_gather_coalesced")
        wholes = [tensor.new_empty(tensor.numel() * size) for tensor in everyones[rank]]
        group.allgather_into_tensor_coalesced(wholes, everyones[rank], opts()).wait()
        if not all(same(a, torch.cat([rows[i] for rows in everyones])) for i, a in enumerate(wholes)):
            wrong.append("all_gather_into_tensor_coalesced")
        parts = [tensor.new_empty(tensor.numel()) for tensor in everyones[rank]]
        group.reduce_scatter_tensor_coalesced(parts, wholes, opts(ReduceOp.SUM)).wait()
        if not torch.allclose(parts[0], everyones[rank][0] * size):
            wrong.append("reduce_scatter_tensor_coalesced")
    return wrong


def test_lists_of_tensors_of_several_dtypes_go_in_one_call() -> None:
    assert succeeded(run_workers(wrong_lists, 3)) == [[]] * 3


def sparse_sums(world: World) -> Any:
    """Rank r brings r entries (rank 0 none), some at the same place as another's."""
    rank = world.rank
    indices = torch.tensor([[0, 2, 2][:rank], [1, 1, 3][:rank]])
    mine = torch.sparse_coo_tensor(indices, torch.full((rank, 2), float(rank)), (4, 5, 2))
    with group_of(world) as group:
        group.allreduce([mine], opts(ReduceOp.SUM)).wait()
    return mine.to_dense().tolist()


def test_sparse_tensors_are_summed_entry_by_entry() -> None:
    wanted = torch.zeros(4, 5, 2)
    wanted[0, 1] = 1 + 2 + 3
    wanted[2, 1] = 2 + 3
    wanted[2, 3] = 3
    assert succeeded(run_workers(sparse_sums, 4)) == [wanted.tolist()] * 4


def precision_of_halves(world: World) -> list[tuple[float, float]]:
    """1 and many numbers too small to change a half by themselves."""
    out = []
    with group_of(world) as group:
        for dtype, small in ((torch.bfloat16, 2.0**-9), (torch.float16, 2.0**-12)):
            mine = torch.full((3,), 1.0 if world.rank == 0 else small, dtype=dtype)
            group.allreduce([mine], opts(ReduceOp.SUM)).wait()
            out.append((mine[0].item(), torch.tensor(1.0 + 7 * small).to(dtype).item()))
    return out


def test_halves_are_summed_in_single_precision() -> None:
    for sums in succeeded(run_workers(precision_of_halves, 8)):
        assert all(got == wanted > 1.0 for got, wanted in sums), sums


# -- what is refused before anybody else is troubled -------------------------------------------------------------------


def refused(world: World) -> list[str]:
    texts = []
    with group_of(world) as group:
        calls: list[Any] = [
            lambda: group.allreduce([torch.ones(2)], opts(ReduceOp.BAND)),
            lambda: group.allgather([[torch.ones(2)] * 3], [torch.ones(2)], opts()),
            lambda: group.allgather([[torch.ones(2, dtype=torch.float64)] * 2], [torch.ones(2)], opts()),
            lambda: group._allgather_base(torch.ones(5), torch.ones(2), opts()),
            lambda: group._reduce_scatter_base(torch.ones(2), torch.ones(6), opts(ReduceOp.SUM)),
            lambda: group.alltoall([torch.ones(1)], [torch.ones(1)], opts()),
            lambda: group.alltoall_base(torch.ones(4), torch.ones(4), [1, 2], [2, 2], opts()),
            lambda: group.allreduce([torch.ones(2, device="meta")], opts(ReduceOp.SUM)),
        ]
        for call in calls:
            with pytest.raises(RuntimeError) as info:
                call().wait()
            texts.append(str(info.value))
        fine = torch.ones(3)
        group.allreduce([fine], opts(ReduceOp.SUM)).wait()
        assert fine.tolist() == [2.0] * 3
    return texts


def test_calls_that_make_no_sense_are_refused_and_leave_the_group_whole() -> None:
    for texts in succeeded(run_workers(refused, 2)):
        assert texts == [
            "all_reduce: the paceline backend can't reduce torch.float32 by band",
            "all_gather: invalid output tensor list: Incorrect output list size 3. Output list size should be 2: one "
            "tensor for each rank",
            "all_gather: invalid tensor type: the tensor for rank 0 is 2 torch.float64, this rank's own 2 "
            "torch.float32",
            "all_gather: 5 elements can't be cut into 2 equal parts",
            "reduce_scatter: invalid tensor size: a part of 2 torch.float32 for each of 2 ranks, and a whole of 6 "
            "torch.float32",
            "all_to_all: 1 outputs and 1 inputs for 2 ranks",
            "all_to_all: splits [1, 2] don't add up to 4 rows",
            "the paceline backend moves dense CPU tensors, not torch.strided on meta",
        ]
