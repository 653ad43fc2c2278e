"""Attention as a GPU has it: one operator forward and one backward, which save no scores; without a kernel.

    paceline_plan::attention            queries, keys, values ─► output, one number for each row of scores
    paceline_plan::attention_backward   the output's gradient and all of these ─► three gradients

While `fused()` is open models call these. They run on fake tensors alone: what a GPU runs is profiled on any host. They
are operators, and no function of Python's, because torch's compiler sees operators.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

NAMESPACE = "paceline_plan"

_library = torch.library.Library(NAMESPACE, "DEF")  # type: ignore[no-untyped-call]  # operators live as long as it
for _schema in (
    "attention(Tensor query, Tensor key, Tensor value, bool is_causal) -> (Tensor, Tensor)",
    "attention_backward(Tensor gradient, Tensor query, Tensor key, Tensor value, Tensor out, Tensor rows, "
    "bool is_causal) -> (Tensor, Tensor, Tensor)",
):
    _library.define(_schema)  # type: ignore[no-untyped-call]


def _made(like: Tensor, shape: Sequence[int]) -> Tensor:
    """With the heads of a token side by side, as flash kernels write them: the product behind needs no copy."""
    if len(shape) < 3:
        return like.new_empty(*shape)
    *batch, heads, rows, width = shape
    return like.new_empty(*batch, rows, heads, width).transpose(-2, -3)


def _forward(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
    out = _made(query, (*query.shape[:-1], value.shape[-1]))
    return out, query.new_empty(query.shape[:-1], dtype=torch.float32)


def _backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, rows: Tensor, is_causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return _made(query, query.shape), _made(key, key.shape), _made(value, value.shape)


def _saves(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, ctx.is_causal = inputs
    ctx.save_for_backward(query, key, value, *output)


def _differentiated(ctx: Any, gradient: Tensor, of_rows: Tensor) -> tuple[Tensor | None, ...]:
    made = torch.ops.paceline_plan.attention_backward(gradient, *ctx.saved_tensors, ctx.is_causal)
    return (*made, None)


torch.library.register_fake(f"{NAMESPACE}::attention", _forward)
torch.library.register_fake(f"{NAMESPACE}::attention_backward", _backward)
torch.library.register_autograd(f"{NAMESPACE}::attention", _differentiated, setup_context=_saves)


@contextmanager
def fused() -> Iterator[None]:
    """While it is open attention is one kernel, whatever this machine has: what a GPU runs is profiled on any host."""
    own = nn.functional.scaled_dot_product_attention

    def attention(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, dropout_p: float = 0.0,
        is_causal: bool = False, **options: Any,
    ) -> Tensor:  # fmt: skip
        made: Tensor = torch.ops.paceline_plan.attention(query, key, value, is_causal)[0]
        return made

    nn.functional.scaled_dot_product_attention = attention  # type: ignore[assignment]
    try:
        yield
    finally:
        nn.functional.scaled_dot_product_attention = own


def products(query: Sequence[int], key: Sequence[int], value: Sequence[int]) -> int:
    """Queries with keys, and scores with values."""
    *batch, rows, width = query
    return 2 * prod(batch) * rows * key[-2] * (width + value[-1])
