"""Steps without a dataset: batches that a function makes (synthetic ones, prompts, seeds of environments).

    source = StepSource(make_batch, steps=1000)
    model, optimizer, source = engine.prepare(model, optimizer, source)
    for batch in source: …                                  # an epoch of 1000 steps, or what is left of one

`make_batch(place)` is called once for each micro-batch, when its turn comes: with L lanes and A micro-batches each,
L × A times a step in all workers together. torch, numpy and random are seeded from the place before it, so a batch
depends on the place alone, and the numbers on neither workers nor faults. It makes what goes into the model; what needs
the model itself (a rollout) belongs into the loop's body, which has its weights.

An item counts as one sample: all weigh the same, unless `engine.backward(loss, weight=…)` says otherwise. A function
that has a state of its own can't be repeated from a place: that is a stream (`paceline.data.Stream`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader, Dataset

from paceline.errors import ConfigError
from paceline.world.checked_values import whole_number


@dataclass(frozen=True)
class StepPlace:
    """Which micro-batch is to be made."""

    epoch: int
    step: int  # of the epoch, from 0
    lane: int
    micro_batch: int


class StepSource:
    """What `engine.prepare` takes in place of a training loader."""

    def __init__(self, make_batch: Callable[[StepPlace], Any], *, steps: int) -> None:
        if not callable(make_batch):
            raise ConfigError(f"StepSource() takes a function of a place, not {type(make_batch).__name__}")
        self._make_batch = make_batch
        self.steps = whole_number("steps", steps, least=1)

    def loader(self, lanes: int, accumulate: int) -> DataLoader[Any]:
        made = MadeBatches(self._make_batch, self.steps, lanes, accumulate)
        return DataLoader(made, batch_size=1, collate_fn=_only)


class MadeBatches(Dataset[Any]):
    """The batches of an epoch, by their position in it: step by step, micro-batch by micro-batch, lane by lane."""

    draws = True  # seeded before every item, whether or not it is seen to draw: a function is called once for each

    def __init__(self, make_batch: Callable[[StepPlace], Any], steps: int, lanes: int, accumulate: int) -> None:
        self._make_batch, self._steps, self._lanes, self._accumulate = make_batch, steps, lanes, accumulate
        self._epoch = 0

    def __len__(self) -> int:
        return self._steps * self._lanes * self._accumulate

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __getitem__(self, position: int) -> Any:
        step, within = divmod(position, self._lanes * self._accumulate)
        micro_batch, lane = divmod(within, self._lanes)
        return self._make_batch(StepPlace(self._epoch, step, lane, micro_batch))


def _only(samples: list[Any]) -> Any:
    (batch,) = samples
    return batch
