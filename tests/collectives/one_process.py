"""The canonical tree as one process walks it from the root down, knowing nothing of merges, roots or workers.

The plans under test build the same tree from the leaves up; here `join` is an addition, or keeps the shape of the tree.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from paceline.collectives.canonical_sum import SumPlan


def walk(leaves: Mapping[int, Any], join: Callable[[Any, Any], Any]) -> Any:
    """Join the leaves along the tree over lane numbers; a node with one present child is that child."""

    def node(low: int, width: int) -> Any:
        if width == 1:
            return leaves.get(low)
        left, right = node(low, width // 2), node(low + width // 2, width // 2)
        if left is None or right is None:
            return right if left is None else left
        return join(left, right)

    return node(0, 1 << max(leaves).bit_length())


def one_process_sum(values: Mapping[int, Tensor]) -> Tensor:
    return walk(values, torch.add)


def lane_values(present: tuple[int, ...], elements: int) -> dict[int, Tensor]:
    """Gradients whose sum shows in its bits in which order they were added: magnitudes differ by up to 2^24."""
    generator = torch.Generator().manual_seed(elements)
    return {
        lane: torch.randn(elements, generator=generator) * torch.rand(elements, generator=generator).mul(24).exp2()
        for lane in present
    }


def roots_of(plan: SumPlan, worker: int, values: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """What `worker` is left with after it finished its lanes in order and merged what it could."""
    nodes: dict[int, Tensor] = {}
    for lane in sorted(plan.holders[worker]):
        nodes[lane] = values[lane].clone()
        for merge in plan.merges_after[worker][lane]:
            nodes[merge.left].add_(nodes.pop(merge.right))
    return nodes


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))
