"""Attention over a sequence of which each worker of a group has a part (`sequence_split`).

    forward     all-gather of keys and values       bytes received by a worker: (cp−1)/cp · |K, V|     1 collective
                queries of chunk c attend to the keys of chunks 0 … c (causal), or to all keys
    backward    all-to-all of their gradients, then a sum in the order of ranks: a reduce-scatter      the same bytes

Queries, and what is made of them, stay where they are. The sum is in float32 and in one order, which no backend
chooses: its bits don't depend on the backend, and are the same in every run.

The gathered keys and values of a layer are kept for its backward, as attention keeps its inputs. Where that is too
much, activation checkpointing of the layer gathers them again.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from paceline.context_parallel.sequence_split import SequenceSplit
from paceline.errors import ConfigError

SEQUENCE = -2  # dimension of queries, keys and values


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    group: dist.ProcessGroup | None,
    split: SequenceSplit,
    causal: bool,
    scale: float | None = None,
) -> Tensor:
    """What `F.scaled_dot_product_attention` gives for this worker's queries and the keys of the whole sequence.

    Tensors are (batch, heads, tokens of this worker, width); keys and values may have fewer heads, each for a group of
    query heads. All workers of the group call it together, and run its backward.
    """
    if not query.shape[SEQUENCE] == key.shape[SEQUENCE] == value.shape[SEQUENCE]:
        raise ConfigError(
            f"context parallel: attention of {query.shape[SEQUENCE]} queries to {key.shape[SEQUENCE]} keys; both are "
            "the tokens of one sequence, without a cache and without another sequence (cross attention)"
        )
    query, key, value = _in_autocast(query, key, value)
    if split.size == 1:
        return _plain(query, key, value, causal=causal, scale=scale)
    split.chunk_length(query.shape[SEQUENCE] * split.size)
    keys, values = GatherKeysAndValues.apply(key, value, group, split)  # type: ignore[no-untyped-call]
    if not causal:
        return _plain(query, keys, values, causal=False, scale=scale)
    attended = []
    for place, queries in zip(split.chunks, query.chunk(2, SEQUENCE), strict=True):
        seen = (place + 1) * queries.shape[SEQUENCE]
        prefix = keys.narrow(SEQUENCE, 0, seen), values.narrow(SEQUENCE, 0, seen)
        attended.append(_plain(queries, *prefix, causal=True, scale=scale))
    return torch.cat(attended, SEQUENCE)


def _plain(query: Tensor, key: Tensor, value: Tensor, *, causal: bool, scale: float | None) -> Tensor:
    """torch's attention on this worker; `causal`: the queries are the last of the tokens whose keys there are."""
    grouped = query.dim() > 3 and query.shape[-3] != key.shape[-3]
    queries, keys = query.shape[SEQUENCE], key.shape[SEQUENCE]
    mask = None
    if causal and queries != keys:
        if query.device.type == "cpu":
            mask = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
        else:
            mask = _lower_right(queries, keys)
    is_causal = causal and mask is None
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=grouped
    )


def _lower_right(queries: int, keys: int) -> Tensor:
    """The mask that flash kernels know, so that none is made.

    It is a tensor on the host all the same, of memory that is never touched. Deterministic algorithms would fill it:
    230 ms for 8,192 queries and 32,768 keys, where attention and its backward take 34 ms (H200).
    """
    from torch.nn.attention.bias import causal_lower_right  # torch._dynamo with it: a second, for whoever only imports

    deterministic: Any = torch.utils.deterministic
    before = deterministic.fill_uninitialized_memory
    deterministic.fill_uninitialized_memory = False
    try:
        return causal_lower_right(queries, keys)
    finally:
        deterministic.fill_uninitialized_memory = before


def _in_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """As attention casts its inputs under autocast; before they travel, so that fewer bytes do."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    return tuple(tensor.to(torch.get_autocast_dtype(device)) for tensor in tensors)


class GatherKeysAndValues(torch.autograd.Function):
    """Keys and values of the whole sequence, in its order; backward adds up what all workers' queries say of them."""

    @staticmethod
    def forward(
        ctx: Any, key: Tensor, value: Tensor, group: dist.ProcessGroup | None, split: SequenceSplit
    ) -> tuple[Tensor, Tensor]:
        ctx.group, ctx.split = group, split
        ctx.shapes = key.shape, value.shape
        mine = torch.cat([key.reshape(-1), value.reshape(-1)])
        gathered = [torch.empty_like(mine) for _ in range(split.size)]
        dist.all_gather(gathered, mine, group=group)
        parts = [_unpack(part, ctx.shapes) for part in gathered]
        keys, values = (split.join(of_all, SEQUENCE) for of_all in zip(*parts, strict=True))
        return keys.to(key.dtype), values.to(value.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        split: SequenceSplit = ctx.split
        of_all = [split.of(rank) for rank in range(split.size)]
        outgoing = [one.take(whole, SEQUENCE).reshape(-1) for one in of_all for whole in gradients]
        mine = sum_by_rank(torch.cat(outgoing), split.size, ctx.group)
        key, value = _unpack(mine, ctx.shapes)
        return key.to(gradients[0].dtype), value.to(gradients[1].dtype), None, None


def sum_by_rank(outgoing: Tensor, size: int, group: dist.ProcessGroup | None) -> Tensor:
    """A reduce-scatter whose order of addition no backend chooses: part r of all workers' tensors, added up on r."""
    incoming = torch.empty_like(outgoing)
    dist.all_to_all_single(incoming, outgoing, group=group)
    first, *others = incoming.chunk(size)
    total = first.to(torch.promote_types(first.dtype, torch.float32), copy=True)
    for other in others:
        total += other
    return total


def _unpack(flat: Tensor, shapes: tuple[torch.Size, torch.Size]) -> tuple[Tensor, Tensor]:
    of_key = shapes[0].numel()
    return flat[:of_key].view(shapes[0]), flat[of_key:].view(shapes[1])
