"""The split of a sequence over the workers of a context-parallel group, with equal work for causal attention.

    cp = 4, chunks of the sequence    0   1   2   3   4   5   6   7        a token attends to those before it, so
    worker that has the chunk         0   1   2   3   3   2   1   0        early chunks are cheap, and late ones dear

The sequence is cut into 2·cp chunks, and worker i takes chunk i and chunk 2·cp−1−i: a cheap and a dear one. Tokens of a
worker are not in a row, so the model is told their positions, and the label of each token (the next token, which may
be another worker's) is found before the cut.

    whole batch, the same on all workers of the group ──► shard_batch ──► this worker's tokens, positions and labels
                                                                     └──► TargetCount: its part of the batch's loss
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.errors import ConfigError

IGNORED = -100  # torch's ignore_index: a label that is no target
Labels = Literal["next_token", "aligned"]


@dataclass(frozen=True)
class SequenceSplit:
    """Which chunks of every sequence the worker `rank` of `size` has."""

    size: int
    rank: int

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ConfigError(f"context parallel: rank {self.rank} is not one of a group of {self.size} workers")

    @property
    def chunks(self) -> tuple[int, int]:
        """Of the 2·size chunks of a sequence."""
        return self.rank, 2 * self.size - 1 - self.rank

    def chunk_length(self, length: int) -> int:
        """Of a sequence of `length` tokens."""
        if length == 0 or length % (2 * self.size):
            raise ConfigError(
                f"context parallel: a sequence of {length} tokens can't be cut into {2 * self.size} equal chunks, two "
                f"for each of cp={self.size} workers; pad or pack sequences to a multiple of {2 * self.size} tokens"
            )
        return length // (2 * self.size)

    def positions(self, length: int, device: torch.device | None = None) -> Tensor:
        """Where this worker's tokens stand in the whole sequence, in the order in which it has them."""
        return self.take(torch.arange(length, device=device), 0)

    def take(self, whole: Tensor, dim: int = 1) -> Tensor:
        """This worker's part of a tensor that has the whole sequence in `dim`."""
        chunk = self.chunk_length(whole.shape[dim])
        if self.size == 1:
            return whole
        return torch.cat([whole.narrow(dim, place * chunk, chunk) for place in self.chunks], dim)

    def join(self, parts: Sequence[Tensor], dim: int = 1) -> Tensor:
        """The whole again, of all workers' parts in the order of their ranks."""
        halves = [part.chunk(2, dim) for part in parts]
        return torch.cat([first for first, _ in halves] + [second for _, second in reversed(halves)], dim)

    def of(self, rank: int) -> SequenceSplit:
        """Another worker's."""
        return SequenceSplit(self.size, rank)


@dataclass(frozen=True)
class TargetCount:
    """How many labels of a batch are targets: on this worker, and in the whole. Each token counts once.

    Workers have means over their own targets. Weighted with these numbers they add up to the mean over the batch:

        Σ over workers of  weight(1) · finite(loss)  =  the loss of one process
    """

    here: int
    total: int
    unmasked: int | None = None  # tokens of the whole batch that its attention_mask shows; None: it has no mask

    def weight(self, of_batch: float) -> float:
        """This worker's part of the weight that the whole batch has."""
        return of_batch * self.here / self.total if self.total else 0.0

    def finite(self, loss: Tensor) -> Tensor:
        """A mean over no target is NaN: here it is 0, with gradients of 0, so that backward runs on every worker."""
        nothing = torch.zeros_like(loss)
        return loss if self.here else torch.where(nothing.bool(), loss, nothing)


def next_tokens(labels: Tensor) -> Tensor:
    """The label of the next token in the place of each; the last token has none."""
    return F.pad(labels[:, 1:], (0, 1), value=IGNORED)


def shard_batch(batch: Any, split: SequenceSplit, labels: Labels = "next_token") -> tuple[Any, TargetCount]:
    """This worker's part of a batch, and how many targets it has. All workers are given the same whole batch.

    Of a mapping, `position_ids` are added, and `attention_mask` is left out if it says nothing that causal attention
    doesn't; labels="next_token" shifts `labels` before the cut, and calls them `shift_labels`, the name under which
    transformers takes labels that are shifted. `labels` itself then has no target: a loss that shifts it once more is
    NaN, and not wrong. A tuple or list is cut and nothing else, its last tensor being labels.
    """
    if labels not in ("next_token", "aligned"):
        raise ConfigError(f"context parallel: labels={labels!r} is not known; choose next_token or aligned")
    if isinstance(batch, Mapping):
        return _shard_mapping(batch, split, labels)
    if isinstance(batch, tuple | list) and all(isinstance(value, Tensor) for value in batch) and batch:
        length = length_of(dict(enumerate(batch)))
        parts = [_cut(str(place), value, length, split) for place, value in enumerate(batch)]
        count = _count(batch[-1], parts[-1])
        return (tuple(parts) if isinstance(batch, tuple) else parts), count
    raise ConfigError(
        f"context parallel: a batch is a dict, tuple or list of tensors, whose dimension 1 is the sequence, "
        f"not a {type(batch).__name__}"
    )


def _shard_mapping(
    batch: Mapping[str, Any], split: SequenceSplit, labels: Labels
) -> tuple[dict[str, Any], TargetCount]:
    whole = dict(batch)
    length = length_of(whole)
    split.chunk_length(length)
    mask = whole.pop("attention_mask", None)
    _check_mask(mask, whole.get("labels"), labels)
    unmasked = int(mask.sum()) if isinstance(mask, Tensor) else None
    _check_positions(whole.pop("position_ids", None), length)
    targets = whole.get("labels")
    if targets is not None and labels == "next_token":
        if "shift_labels" in whole:
            raise ConfigError("context parallel: the batch has shift_labels already; leave them or labels out")
        whole["shift_labels"] = targets = next_tokens(targets)
        whole["labels"] = torch.full_like(targets, IGNORED)
    elif targets is None:
        targets = whole.get("shift_labels")
    part = {name: _cut(name, value, length, split) for name, value in whole.items()}
    device = next(value.device for value in whole.values() if _is_sequence(value))
    part["position_ids"] = split.positions(length, device)[None]
    if targets is None:
        return part, TargetCount(1, split.size, unmasked)  # nothing says which tokens count: all do
    return part, replace(_count(targets, split.take(targets)), unmasked=unmasked)


def _is_sequence(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() >= 2


def length_of(whole: Mapping[Any, Any]) -> int:
    """Of the sequences in a batch."""
    for name in ("input_ids", "inputs_embeds", *whole):
        if _is_sequence(whole.get(name)):
            return int(whole[name].shape[1])
    raise ConfigError("context parallel: no tensor of the batch has two dimensions, the second being the sequence")


def _cut(name: str, value: Any, length: int, split: SequenceSplit) -> Any:
    if not _is_sequence(value):
        return value
    if value.shape[1] != length:
        raise ConfigError(
            f"context parallel: {name!r} of the batch has shape {tuple(value.shape)}, but dimension 1 of all tensors "
            f"is the sequence, of {length} tokens here; leave it out of the batch"
        )
    return split.take(value)


def _count(targets: Tensor, here: Tensor) -> TargetCount:
    if targets.is_floating_point():
        return TargetCount(here.numel(), targets.numel())
    return TargetCount(int((here != IGNORED).sum()), int((targets != IGNORED).sum()))


def _check_mask(mask: Any, labels: Tensor | None, kind: Labels) -> None:
    """A mask may be left out if it masks nothing, or what comes after all tokens that count."""
    if mask is None or (isinstance(mask, Tensor) and mask.dim() == 2 and bool((mask == 1).all())):
        return
    right = isinstance(mask, Tensor) and mask.dim() == 2 and bool((mask[:, 1:] <= mask[:, :-1]).all())
    padded = right and labels is not None and bool((labels[mask == 0] == IGNORED).all())
    if not (padded and kind == "next_token"):
        raise ConfigError(
            "context parallel: attention_mask masks tokens; only padding at the right end of causal sequences, with "
            f"labels {IGNORED} under it, needs no mask. Pad at the right, or pack sequences to full length"
        )


def _check_positions(given: Any, length: int) -> None:
    if given is None:
        return
    plain = isinstance(given, Tensor) and given.dim() <= 2 and given.shape[-1] == length
    if not plain or not bool((given == torch.arange(length, device=given.device)).all()):
        raise ConfigError(
            f"context parallel: position_ids of the batch are not 0 … {length - 1} in each sequence, as where several "
            "are packed into one; attention between packed sequences can't be masked: leave position_ids out"
        )
