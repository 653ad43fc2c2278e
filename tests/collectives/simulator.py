"""Schedules without processes: all ranks in one dict, a hop at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.collectives.choice import FLAT
from paceline.collectives.hierarchical_all_reduce import hierarchical
from paceline.collectives.schedule import Hop, How, Ranges, Schedule
from paceline.world.world import Topology

NAMES = [*FLAT, "hierarchical", "hierarchical, uneven"]


def schedule_of(name: str, size: int) -> Schedule:
    """Hierarchical over hosts of two (or of one and the rest) ranks."""
    if name in FLAT:
        return FLAT[name]
    if name == "hierarchical" and size % 2 == 0:
        return hierarchical(Topology.of([rank // 2 for rank in range(size)]))
    return hierarchical(Topology.of([min(rank, 1) for rank in range(size)]))


def all_hops(schedule: Schedule, size: int) -> list[list[Hop]]:
    return [list(schedule.hops(rank, size)) for rank in range(size)]


def simulate(schedule: Schedule, tensors: Sequence[Tensor]) -> list[Tensor]:
    """What every rank holds in the end; the last hop's kept parts are added in the order of their names."""
    size = len(tensors)
    ranges = schedule.ranges(tensors[0].numel(), size)
    held = {rank: tensor.clone() for rank, tensor in enumerate(tensors)}
    parts = {rank: {rank: tensor} for rank, tensor in enumerate(tensors)}
    for together in zip(*all_hops(schedule, size), strict=True):
        wire = {
            (rank, send.to, send.chunks, send.part): taken(
                held[rank] if send.part is None else parts[rank][send.part], ranges, send.chunks
            )
            for rank, hop in enumerate(together)
            for send in hop.sends
        }
        for rank, hop in enumerate(together):
            for receive in hop.receives:
                arrived = wire.pop((receive.source, rank, receive.chunks, receive.part))
                low, high = span(ranges, receive.chunks)
                if receive.how is How.ADD:
                    held[rank][low:high] += arrived
                elif receive.how is How.COPY:
                    held[rank][low:high] = arrived
                else:
                    assert receive.part is not None
                    parts[rank].setdefault(receive.part, torch.zeros_like(held[rank]))[low:high] = arrived
        assert not wire, f"sent to nobody: {list(wire)}"
    for rank, mine in parts.items():
        if len(mine) > 1:
            held[rank] = mine[0].clone()
            for name in sorted(mine)[1:]:
                held[rank] += mine[name]
    return [held[rank] for rank in range(size)]


def span(ranges: Ranges, chunks: range) -> tuple[int, int]:
    return (ranges[chunks.start][0], ranges[chunks.stop - 1][1]) if chunks else (0, 0)


def taken(tensor: Tensor, ranges: Ranges, chunks: range) -> Tensor:
    low, high = span(ranges, chunks)
    return tensor[low:high].clone()


def random_tensors(size: int, elements: int, dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1000 * size + elements + seed)
    if not dtype.is_floating_point:
        return [torch.randint(-9, 9, (elements,), generator=generator).to(dtype) for _ in range(size)]
    return [torch.randn(elements, generator=generator, dtype=torch.float64).to(dtype) for _ in range(size)]


def error_of(result: Tensor, tensors: Sequence[Tensor]) -> float:
    """The largest difference to the fp64 sum, in units of what rounding N-1 additions may cost; at most 1 is right."""
    exact = torch.stack([tensor.double() for tensor in tensors])
    if not result.numel():
        return 0.0
    if not result.dtype.is_floating_point:
        return 0.0 if torch.equal(result.double(), exact.sum(0)) else float("inf")
    allowed = len(tensors) * torch.finfo(result.dtype).eps * exact.abs().sum(0) + torch.finfo(result.dtype).tiny
    return float(((result.double() - exact.sum(0)).abs() / allowed).max())
