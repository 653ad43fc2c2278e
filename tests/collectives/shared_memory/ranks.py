"""Groups over shared memory for tests: one for each worker of `run_workers`, and values that every rank can make up.

with group_of(world, slot_bytes=4096) as group:
    group.allreduce([tensor], opts(ReduceOp.SUM)).wait()
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, ReduceOp
from torch.distributed.distributed_c10d import AllgatherOptions, AllreduceOptions, BroadcastOptions, ReduceOptions

from paceline import World
from paceline.collectives.canonical_sum import merges
from paceline.collectives.shared_memory.group import SharedMemoryGroup
from paceline.world.control import NoSupervisor
from paceline.world.rendezvous_store import open_store
from tests.workers import Result

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
WHOLE = (torch.int8, torch.uint8, torch.int32, torch.int64)
COMPLEX = (torch.complex64, torch.complex128)
DTYPES = (*FLOATS, *WHOLE, torch.bool, *COMPLEX)
_ODD = (0.0, -0.0, float("inf"), -float("inf"), 1e-45, -1e-45, 1.1754942e-38, 3.4e38, 1.0, -1.0, 2.0**-24)
_TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 2e-2, torch.float32: 1e-5, torch.complex64: 1e-5}


@contextlib.contextmanager
def group_of(world: World, *, timeout_s: float = 20.0, **options: Any) -> Iterator[SharedMemoryGroup]:
    store = open_store(world, NoSupervisor(), 20.0)
    group = SharedMemoryGroup(
        PrefixStore("tests", store), world.rank, world.size, timedelta(seconds=timeout_s), **options
    )
    try:
        yield group
    finally:
        group.shutdown()


@contextlib.contextmanager
def torch_distributed(world: World, *, backend: str = "paceline", timeout_s: float = 20.0) -> Iterator[None]:
    """The same through torch.distributed's own front door."""
    import paceline.backend  # noqa: F401

    store = open_store(world, NoSupervisor(), 20.0)
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.size, timeout=timeout)
    try:
        yield
    finally:
        dist.destroy_process_group()


def opts(op: ReduceOp.RedOpType | None = None, *, root: int | None = None) -> Any:
    """Options of a collective that is waited for, as torch.distributed makes them."""
    if op is not None:
        made: Any = ReduceOptions() if root is not None else AllreduceOptions()
        made.reduceOp = op
    else:
        made = BroadcastOptions() if root is not None else AllgatherOptions()
    if root is not None:
        made.rootRank = root
    made.asyncOp = False
    return made


def values(size: int, count: int, dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    """What each rank brings, the same on whoever asks. Small whole numbers in whole dtypes, so that products fit."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + count)
    if dtype == torch.bool:
        return [torch.randint(0, 2, (count,), generator=generator).bool() for _ in range(size)]
    if dtype in WHOLE:
        low = 0 if dtype == torch.uint8 else -3
        return [torch.randint(low, 4, (count,), generator=generator).to(dtype) for _ in range(size)]
    if dtype in COMPLEX:
        return [torch.randn(count, dtype=torch.complex128, generator=generator).to(dtype) for _ in range(size)]
    return [torch.randn(count, generator=generator).to(dtype) for _ in range(size)]


_REFERENCES: dict[ReduceOp.RedOpType, Callable[[Tensor], Tensor]] = {
    ReduceOp.SUM: lambda rows: rows.sum(0),
    ReduceOp.AVG: lambda rows: rows.mean(0),
    ReduceOp.PRODUCT: lambda rows: rows.prod(0),
    ReduceOp.MIN: lambda rows: rows.amin(0),
    ReduceOp.MAX: lambda rows: rows.amax(0),
    ReduceOp.BAND: lambda rows: _folded(torch.bitwise_and, rows),
    ReduceOp.BOR: lambda rows: _folded(torch.bitwise_or, rows),
    ReduceOp.BXOR: lambda rows: _folded(torch.bitwise_xor, rows),
}


def _folded(function: Callable[[Tensor, Tensor], Tensor], rows: Tensor) -> Tensor:
    total = rows[0]
    for row in rows[1:]:
        total = function(total, row)
    return total


def reductions_of(dtype: torch.dtype) -> list[ReduceOp.RedOpType]:
    if dtype in COMPLEX:
        return [ReduceOp.SUM, ReduceOp.AVG]
    if dtype == torch.bool:
        return [ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR]
    ops = [ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX]
    return [*ops, ReduceOp.AVG] if dtype in FLOATS else [*ops, ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR]


def reference(tensors: list[Tensor], op: ReduceOp.RedOpType) -> Tensor:
    """The reduction in fp64 (complex128, int64), in torch's own order."""
    dtype = tensors[0].dtype
    if dtype == torch.bool:
        return _REFERENCES[op](torch.stack(tensors).to(torch.uint8)).to(torch.bool)
    wide = torch.complex128 if dtype in COMPLEX else torch.float64 if dtype in FLOATS else torch.int64
    return _REFERENCES[op](torch.stack(tensors).to(wide))


def is_close(result: Tensor, wanted: Tensor) -> bool:
    """Whole numbers exactly (as far as the dtype goes), others to what one rounding per addition may do."""
    if result.dtype in FLOATS or result.dtype in COMPLEX:
        tolerance = _TOLERANCE.get(result.dtype, 1e-12)
        return torch.allclose(result.to(wanted.dtype), wanted, rtol=tolerance, atol=tolerance)
    return torch.equal(result, wanted.to(result.dtype))


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def odd_rows(count: int, elements: int, seed: int, *, nan: bool = False) -> list[Tensor]:
    """Numbers whose sum tells the order, with signed zeros, infinities and denormals strewn in."""
    generator = torch.Generator().manual_seed(seed)
    odd = torch.tensor((*_ODD, float("nan")) if nan else _ODD)
    rows = []
    for _ in range(count):
        row = torch.randn(elements, generator=generator) * torch.rand(elements, generator=generator).mul(24).exp2()
        strange = torch.rand(elements, generator=generator) < 0.3
        picks = odd[torch.randint(0, len(odd), (elements,), generator=generator)]
        rows.append(torch.where(strange, picks, row))
    return rows


def same_numbers(a: Tensor, b: Tensor) -> bool:
    """Bit by bit; of a NaN, only that it is one: which of two NaNs an addition keeps is up to the compiler."""
    nan = a.isnan()
    return torch.equal(nan, b.isnan()) and torch.equal(bits(a[~nan]), bits(b[~nan]))


def plain_sum(rows: list[Tensor]) -> Tensor:
    """Along `canonical_sum.merges`, in plain torch."""
    sums = {rank: row.clone() for rank, row in enumerate(rows)}
    for merge in merges(tuple(range(len(rows)))):
        sums[merge.left] += sums.pop(merge.right)
    return sums[0]


def succeeded(results: list[Result]) -> list[Any]:
    """What the workers returned; fails with the traceback of one that raised."""
    for rank, result in enumerate(results):
        assert result.error is None, f"rank {rank}: {result.error}\n{result.traceback}"
    return [result.value for result in results]
