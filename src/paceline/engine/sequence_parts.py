"""Context parallelism in the loop: workers that share a sequence are lanes of their own.

    data lane l, cp = 2         worker of context 0: lane 2·l, the first part of each sequence of the item
                                worker of context 1: lane 2·l + 1, the second part

So gradients are summed over lanes × cp in one fixed tree, whatever the number of workers along dp, and random numbers
differ between the parts. A part's weight is its share of the item's targets: each token counts once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from paceline.context_parallel import ContextParallel, TargetCount
from paceline.data.sharded_sampler import WorkItem
from paceline.strategies.registry import LaneAssignment

MOST_FETCHED = 2**16  # items of a step, and of those that are fetched ahead of the loop


def lanes_of_parts(assignment: LaneAssignment, parts: int) -> LaneAssignment:
    """The lanes of each worker, context by context, from those of each that has samples of its own."""
    return tuple(tuple(lane * parts + part for lane in lanes) for lanes in assignment for part in range(parts))


class WholeSequences:
    """Without context parallelism an item is whole, and counts as the loop says."""

    parts = 1

    def attach(self, model: nn.Module) -> None: ...

    def items(self, items: Iterator[tuple[WorkItem, Any]]) -> Iterator[tuple[WorkItem, Any]]:
        return items

    def check(self, models: Sequence[nn.Module], device: torch.device) -> None:
        """Before the first item, by all workers: that a model computes with parts what it does with the whole."""

    def weight(self, item: WorkItem, given: Any) -> Any:
        """Of the item, where the loop gives it none."""
        return given

    def loss(self, item: WorkItem, loss: Any) -> Any:
        return loss

    def positions(self, tokens: Tensor) -> Tensor:
        """Of tokens in their sequence, which are dimension 1."""
        return torch.arange(tokens.shape[1], device=tokens.device)[None]

    def close(self) -> None: ...


class SequenceParts(WholeSequences):
    def __init__(self, context: ContextParallel) -> None:
        self._context = context
        self.parts, self._part = context.split.size, context.split.rank
        self._counts: dict[tuple[int, ...], TargetCount] = {}  # of items that were fetched
        self._first: Any = None  # batch, whole, until the models were checked with it
        self._checked = False

    def attach(self, model: nn.Module) -> None:
        self._context.attach(model)

    def items(self, items: Iterator[tuple[WorkItem, Any]]) -> Iterator[tuple[WorkItem, Any]]:
        self._counts.clear()
        for item, batch in items:
            present = tuple(lane * self.parts + part for lane in item.present for part in range(self.parts))
            own = item._replace(lane=item.lane * self.parts + self._part, present=present)
            if not self._checked and self._first is None:
                self._first = batch
            mine, self._counts[_key(own)] = self._context.shard(batch)
            while len(self._counts) > MOST_FETCHED:  # of steps that are over long since
                del self._counts[next(iter(self._counts))]
            yield own, mine

    def check(self, models: Sequence[nn.Module], device: torch.device) -> None:
        """Where a model is called with the batch itself; how a loop calls it with a tuple only the loop knows."""
        batch, self._first = self._first, None
        if self._checked or batch is None:
            return
        self._checked = True
        if isinstance(batch, Mapping) and len(models) == 1:
            here = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in batch.items()}
            self._context.check(models[0], here)

    def weight(self, item: WorkItem, given: Any) -> Any:
        return self._counts[_key(item)].weight(item.samples) if given is None else given

    def loss(self, item: WorkItem, loss: Any) -> Any:
        return self._counts[_key(item)].finite(loss) if isinstance(loss, Tensor) else loss

    def positions(self, tokens: Tensor) -> Tensor:
        return self._context.split.positions(tokens.shape[1] * self.parts).to(tokens.device)[None]

    def close(self) -> None:
        self._context.close()


def _key(item: WorkItem) -> tuple[int, ...]:
    return item.epoch, item.step, item.lane, item.micro_batch
