"""Context parallelism in the loop: workers that share a sequence are lanes of their own.

    data lane l, cp = 2         worker of context 0: lane 2·l, the first part of each sequence of the item
                                worker of context 1: lane 2·l + 1, the second part

So gradients are summed over lanes × cp in one fixed tree, whatever the number of workers along dp, and random numbers
differ between the parts. A part's weight is its share of the item's targets: each token counts once.

An evaluation deals batches over dp alone, and what workers find in their parts is put together again:

    a mean over this worker's targets      ─►  WholeBatch.mean    weighted with its share of them, in rank order
    values of this worker's tokens         ─►  WholeBatch.rows    in the order of the sequence
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from paceline.context_parallel import ContextParallel, TargetCount
from paceline.context_parallel.sequence_split import length_of
from paceline.data.fetching import sequence_like
from paceline.data.sharded_sampler import WorkItem
from paceline.errors import LoopError

MOST_FETCHED = 2**16  # items of a step, and of those that are fetched ahead of the loop


class WholeBatch:
    """A batch of an evaluation: what this worker gets of it, and what it found there as of all of it."""

    def __init__(self, whole: Any) -> None:
        self.whole = self.mine = whole

    def mean(self, value: Tensor) -> Tensor:
        """Of a mean over this worker's targets, that over the batch's."""
        return value

    def rows(self, values: Any) -> Any:
        """Of values of this worker's tokens, in any tree, those of whole sequences."""
        return values


class BatchPart(WholeBatch):
    def __init__(self, whole: Any, context: ContextParallel, device: torch.device) -> None:
        self.whole = whole
        self.mine, self._count = context.shard(whole)
        self._context, self._device = context, device
        self._calls = context.calls

    def mean(self, value: Tensor) -> Tensor:
        self._check_attended()
        return self._context.mean(value.detach().to(self._device), self._count)

    def rows(self, values: Any) -> Any:
        if isinstance(values, Mapping):
            return {name: self.rows(value) for name, value in values.items()}
        if isinstance(values, list | tuple):
            return sequence_like(values, [self.rows(value) for value in values])
        value = torch.as_tensor(values, device=self._device).detach()
        if value.dim() == 0 and value.is_floating_point():
            return self.mean(value)
        length = length_of(_named(self.mine))
        if value.dim() < 2 or value.shape[1] != length:
            raise LoopError(
                f"gathered in an evaluation under cp={self._context.split.size}: a {value.dtype} of shape "
                f"{tuple(value.shape)}, of which workers that share sequences have parts. Give the mean over the batch "
                f"(a float), or values of each token, of shape (samples, {length}, …); sum up counts with "
                "engine.reduce(values); whole=True says that these workers have the same values"
            )
        self._check_attended()
        return self._context.join(value)

    def _check_attended(self) -> None:
        if self._calls == self._context.calls:
            raise LoopError(
                f"an evaluation under cp={self._context.split.size} gathers results of a part of each sequence, but no "
                "model has attended to the other parts in this round: give the model to engine.prepare()"
            )


def _named(batch: Any) -> Mapping[Any, Any]:
    return batch if isinstance(batch, Mapping) else dict(enumerate(batch))


class WholeSequences:
    """Without context parallelism an item is whole, and counts as the loop says."""

    parts = 1

    def attach(self, model: nn.Module) -> None: ...

    def items(self, items: Iterator[tuple[WorkItem, Any]], device: torch.device) -> Iterator[tuple[WorkItem, Any]]:
        """For the loop; before the first one all workers check that a model computes with parts what it does with the
        whole."""
        return items

    def of_evaluation(self, batch: Any, device: torch.device) -> WholeBatch:
        """The same batch on all workers that share its sequences; the first is checked like that of a loop."""
        return WholeBatch(batch)

    def tokens(self, item: WorkItem, here: Any, *, padding: bool) -> Any:
        """Of the whole item, of which this worker has counted those that are `here`."""
        return here

    def weight(self, item: WorkItem) -> float:
        """Of the item, where the loop gives it none."""
        return float(item.samples)

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
        self._checked = False
        self._models: list[nn.Module] = []

    def attach(self, model: nn.Module) -> None:
        """Once, whether it is prepared to be evaluated, to be trained, or both."""
        if not any(model is known for known in self._models):
            self._context.attach(model)
            self._models.append(model)

    def items(self, items: Iterator[tuple[WorkItem, Any]], device: torch.device) -> Iterator[tuple[WorkItem, Any]]:
        self._counts.clear()
        for item, batch in items:
            present = tuple(lane * self.parts + part for lane in item.present for part in range(self.parts))
            own = item._replace(lane=item.lane * self.parts + self._part, present=present)
            mine, self._counts[_key(own)] = self._context.shard(batch)
            self._check(batch, device)
            while len(self._counts) > MOST_FETCHED:  # of steps that are over long since
                del self._counts[next(iter(self._counts))]
            yield own, mine

    def of_evaluation(self, batch: Any, device: torch.device) -> WholeBatch:
        part = BatchPart(batch, self._context, device)
        self._check(batch, device)
        return part

    def _check(self, batch: Any, device: torch.device) -> None:
        """Where a model is called with the batch itself; how a loop calls it with a tuple only the loop knows."""
        if self._checked or not self._models:
            return
        self._checked = True
        if isinstance(batch, Mapping) and len(self._models) == 1:
            here = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in batch.items()}
            self._context.check(self._models[0], here)

    def tokens(self, item: WorkItem, here: Any, *, padding: bool) -> Any:
        """A part has no mask: that of the whole batch was counted when it was cut."""
        unmasked = self._counts[_key(item)].unmasked
        return here * self.parts if padding or unmasked is None else unmasked

    def weight(self, item: WorkItem) -> float:
        return self._counts[_key(item)].weight(item.samples)

    def loss(self, item: WorkItem, loss: Any) -> Any:
        return self._counts[_key(item)].finite(loss) if isinstance(loss, Tensor) else loss

    def positions(self, tokens: Tensor) -> Tensor:
        return self._context.split.positions(tokens.shape[1] * self.parts).to(tokens.device)[None]

    def close(self) -> None:
        self._context.close()
        self._models = []


def _key(item: WorkItem) -> tuple[int, ...]:
    return item.epoch, item.step, item.lane, item.micro_batch
