"""Threads cut tensors too: an update must have the same bits however many of them share a tensor.

    one thread       |·················· vectors ··················|       the last few elements one by one
    two threads      |······ vectors ······||······ vectors ·······|       … of each half

For most optimizers one by one or as a vector is the same; some (SGD in bf16) round differently. A worker that updates a
piece has its threads cut at other elements than one that updates the whole, so with several threads those are refused.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from paceline.errors import ConfigError
from paceline.optim.piece_state import State
from paceline.optim.range_optimizer import grown, optimizer_on

SHARED_FROM = 32768  # elements: torch lets several threads share a tensor that has more for each
_LEFT_OVER = 31  # of every thread's part: one less than the longest vector
_TENSORS, _STEPS = 4, 8


def check_thread_cuts(optimizer: Optimizer) -> None:
    """Raise ConfigError if the update of a tensor depends on how many threads share it; nothing is touched."""
    threads = torch.get_num_threads()
    if threads == 1:
        return
    for dtype in sorted(_dtypes_that_threads_share(optimizer), key=str):
        several = _updated(optimizer, dtype, threads)
        try:
            torch.set_num_threads(1)
            alone = _updated(optimizer, dtype, threads)
        finally:
            torch.set_num_threads(threads)
        if not all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(several, alone, strict=True)):
            raise ConfigError(
                f"optimizer {type(optimizer).__name__} gives {str(dtype).removeprefix('torch.')} parameters other bits "
                f"where {threads} threads share a tensor than where one updates it, so the pieces that workers own "
                "would differ from the whole; start with --threads 1, keep parameters in fp32, or train with "
                "strategy='ddp'"
            )


def _dtypes_that_threads_share(optimizer: Optimizer) -> set[torch.dtype]:
    parameters: list[Tensor] = [p for group in optimizer.param_groups for p in group["params"]]
    return {p.dtype for p in parameters if p.numel() > SHARED_FROM and p.device.type == "cpu"}


def _updated(optimizer: Optimizer, dtype: torch.dtype, parts: int) -> list[Tensor]:
    """Random tensors for each group, after some steps; the same ones whenever it is called."""
    elements = parts * (SHARED_FROM + _LEFT_OVER)
    drawn = torch.Generator().manual_seed(0)

    def values() -> Tensor:
        return torch.randn(elements, generator=drawn).to(dtype)

    groups = [[Parameter(values()) for _ in range(_TENSORS)] for _ in optimizer.param_groups]
    states: dict[Tensor, State] = {}
    for theirs, group in zip(optimizer.param_groups, groups, strict=True):
        example = next((p for p in theirs["params"] if optimizer.state.get(p) and p.dim() and p.numel()), None)
        if example is not None:
            kept = optimizer.state[example]
            states |= {whole: {name: grown(value, example, whole) for name, value in kept.items()} for whole in group}
    twin = optimizer_on(optimizer, groups, states)
    for _ in range(_STEPS):
        for parameter in (p for group in groups for p in group):
            parameter.grad = values()
        twin.step()
    return [parameter.detach() for group in groups for parameter in group]
