"""How much state an optimizer keeps for one element of a parameter, found by letting it update a few."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.optim.range_optimizer import optimizer_on

_TRIED = 4096


def state_bytes(optimizer: Optimizer) -> float | None:
    """Bytes per element, over groups by their sizes; None: it does not run on a piece of a parameter."""
    groups = optimizer.param_groups
    sizes = [sum(p.numel() for p in group["params"] if p.requires_grad) for group in groups]
    pieces = [[torch.zeros(_TRIED)] for _ in groups]
    for (piece,) in pieces:
        piece.grad = torch.zeros(_TRIED)
    try:
        twin = optimizer_on(optimizer, pieces)
        twin.step()
    except Exception:  # whatever an optimizer of the user's own raises: it is only a question
        return None
    kept = [sum(value.nbytes for value in twin.state[piece].values() if _per_element(value)) for (piece,) in pieces]
    everything = sum(sizes)
    return sum(k * size for k, size in zip(kept, sizes, strict=True)) / _TRIED / everything if everything else 0.0


def _per_element(value: object) -> bool:
    return isinstance(value, Tensor) and value.numel() == _TRIED
