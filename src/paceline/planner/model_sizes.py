"""A model and its optimizers as `sharding/footprint.py` wants them: how many parameters, and bytes of each by role."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.optim.range_optimizer import state_bytes
from paceline.sharding.footprint import Model

GRADIENT_BYTES = 4
"""Gradients are added in fp32, whatever the model computes in."""


def sizes_of(optimizers: Sequence[Optimizer]) -> Model | None:
    """All trained parameters as if they were alike: the bytes of each, rounded down."""
    trained: dict[int, Tensor] = {}
    state = 0.0
    for optimizer in optimizers:
        each = state_bytes(optimizer)
        mine = {id(p): p for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
        if each is None:
            return None
        state += each * sum(p.numel() for p in mine.values())
        trained |= mine
    elements = sum(p.numel() for p in trained.values())
    if not elements:
        return None
    weight = sum(p.numel() * p.element_size() for p in trained.values()) / elements
    return Model(elements, weight=int(weight), gradient=GRADIENT_BYTES, state=int(state / elements))


def frozen_bytes(models: Sequence[nn.Module], optimizers: Sequence[Optimizer], *, low_precision: bool) -> int:
    """Of parameters and buffers; in low precision a number takes two bytes at least."""
    trained = {id(p) for o in optimizers for group in o.param_groups for p in group["params"] if p.requires_grad}
    rest = {id(t): t for model in models for t in (*model.parameters(), *model.buffers()) if id(t) not in trained}
    lowered = [min(t.element_size(), 2) if low_precision else t.element_size() for t in rest.values()]
    return sum(t.numel() * size for t, size in zip(rest.values(), lowered, strict=True))
