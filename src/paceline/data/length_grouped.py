"""Length grouping that balances: samples of similar length meet in a step, and its lanes get nearly equal work.

    shuffled order     ├──── window 0 ────┼──── window 1 ────┼─ …     random samples, about 128 steps of them
    inside a window    sort by length ──► cut into steps of neighbours ──► shuffle the steps

    one step, assigned in pieces of neighbours (3 lanes, two samples a piece), longest first:

        round 0      aa ► lane 0    bb ► lane 1    cc ► lane 2        a lane's first piece decides its padding, so the
        round 1      dd ► lane 2    ee ► lane 1    ff ► lane 0        pieces are long; after it, the longest piece goes
        round 2      gg ► the lane with the fewest tokens so far …    to the lane that has the least

Neighbours in one micro-batch mean little padding; sharing every round over all lanes means equal sums. Single samples
for pieces would balance best and whole micro-batches would pad least: `PIECES` stands between them. With `accumulate`
the step is first cut into that many groups of neighbours, and what one group leaves uneven the next makes good.

All of it is a function of (lengths, seed, epoch, cut): the number of workers appears nowhere.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset, Sampler

from paceline.data.distributed_sampler import DistributedSampler
from paceline.data.global_order import GlobalOrder, Listed, Shuffled
from paceline.data.sharded_sampler import BatchPlan
from paceline.errors import ConfigError
from paceline.world.determinism import mix

Lengths: TypeAlias = NDArray[np.int64]
GivenLengths: TypeAlias = Sequence[int] | NDArray[Any] | Tensor

WINDOW_STEPS = 128  # measured: twice as many take two fifths off the padding, and double the wait for the first batch
PIECES = 4  # a lane's share of a step, and at least two of each micro-batch
WINDOWS_AT_HAND = 2  # a batch may lie across two

MEGA_BATCHES = 50  # transformers' grouping: this many batches are sorted together, or a quarter of the dataset
MEGA_BATCHES_AT_LEAST = 4


class LengthGrouped:
    """A `GlobalOrder` whose steps hold samples of similar length, assigned so that the lanes' sums are nearly equal.

    There are at least two windows, drawn again every epoch, so that a sample doesn't meet the same ones each time. The
    short last step takes neighbours too, from a place that a key chooses; where it is dropped, it is what the shuffle
    put last, so that no length is dropped more often than another.
    """

    def __init__(self, lengths: Lengths, seed: int, epoch: int, cut: BatchPlan, window: int = WINDOW_STEPS) -> None:
        if len(lengths) != cut.samples:
            raise ConfigError(
                f"there are {len(lengths):,} lengths for {cut.samples:,} samples; give one length per sample"
            )
        if cut.start:
            raise ConfigError(
                f"epoch {epoch} was grouped by length for the batch size, lanes and accumulate it began with, so it "
                f"can't be cut again at position {cut.start:,}: go on with those until the epoch ends"
            )
        if window < 1:
            raise ConfigError(f"window={window}: a window has at least one step")
        self._lengths, self._seed, self._epoch, self._cut = lengths, seed, epoch, cut
        self._shuffled = Shuffled(cut.samples, seed, epoch)
        self._starts = _window_starts(cut, window)
        self._windows: dict[int, NDArray[np.int64]] = {}

    def sample_at(self, position: int) -> int:
        return self.samples_at(range(position, position + 1))[0]

    def samples_at(self, positions: range) -> list[int]:
        places = np.arange(positions.start, positions.stop, positions.step, dtype=np.int64)
        windows = np.searchsorted(self._starts, places, side="right") - 1
        found = np.empty_like(places)
        for window in np.unique(windows).tolist():
            here = windows == window
            found[here] = self._window(window)[places[here] - self._starts[window]]
        ids: list[int] = found.tolist()
        return ids

    def _window(self, number: int) -> NDArray[np.int64]:
        """The sample ids of a window, in the order of their positions."""
        if number not in self._windows:
            while len(self._windows) >= WINDOWS_AT_HAND:
                del self._windows[next(iter(self._windows))]
            low, high = int(self._starts[number]), int(self._starts[number + 1])
            ids = np.array(self._shuffled.samples_at(range(low, high)), np.int64)
            dropped = low >= self._cut.samples_per_epoch
            self._windows[number] = ids if dropped else self._grouped(ids, number)
        return self._windows[number]

    def _grouped(self, ids: NDArray[np.int64], number: int) -> NDArray[np.int64]:
        ids = ids[_longest_first(self._lengths[ids])]
        whole, left = divmod(len(ids), self._cut.global_batch)
        slot = mix(self._seed, "short step", self._epoch) % (whole + 1) * self._cut.global_batch
        short = slice(slot, slot + left)
        steps = np.delete(ids, short).reshape(whole, self._cut.global_batch)
        order = Shuffled(whole, mix(self._seed, "steps of a window", number), self._epoch).samples_at(range(whole))
        return np.concatenate(
            [self._assigned(steps[np.array(order, np.intp)]), self._assigned(ids[short].reshape(1, left))]
        )

    def _assigned(self, steps: NDArray[np.int64]) -> NDArray[np.int64]:
        if steps.size == 0:
            return steps.ravel()
        table = assign_pieces(self._lengths[steps], self._cut.batch_size, self._cut.lanes)
        return np.take_along_axis(steps, table, axis=1).ravel()


def assign_pieces(lengths: Lengths, batch_size: int, lanes: int) -> NDArray[np.intp]:
    """Which of a step's samples stands at each of its positions.

    A row is a step, longest sample first. All steps are assigned at once, since each round is a few calls of numpy.
    """
    steps, samples = lengths.shape
    parts = -(-samples // batch_size)  # as BatchPlan.micro_batches cuts them: part p belongs to lane p % lanes
    size, longer = divmod(samples, parts)
    sizes = size + (np.arange(parts) < longer)
    starts = np.cumsum(sizes) - sizes
    pieces = max(2, -(-PIECES // -(-parts // lanes)))
    tokens, padded = np.zeros((2, steps, lanes), np.int64)
    table = np.empty((steps, samples), np.intp)
    row = np.arange(steps)[:, None]
    taken = 0
    for group in range(0, parts, lanes):
        members = min(lanes, parts - group)
        rounds = [(piece, members) for piece in _near_equal(size, pieces)]
        rounds.append((1, min(max(longer - group, 0), members)))  # a sample more for the longer parts
        filled = 0
        for piece, among in rounds:
            load = tokens if filled else tokens + padded
            lane = np.argsort(load[:, :among], axis=1, kind="stable")  # the least loaded gets the longest piece
            chosen = np.arange(taken, taken + among * piece).reshape(among, piece)
            places = (starts[group + lane] + filled)[:, :, None] + np.arange(piece)
            table[row[:, :, None], places] = chosen
            tokens[row, lane] += lengths[:, chosen].sum(axis=2)
            if not filled:
                padded[row, lane] += sizes[group + lane] * lengths[:, chosen[:, 0]]
            filled += piece
            taken += among * piece
    return table


def _near_equal(total: int, pieces: int) -> list[int]:
    pieces = min(pieces, total)
    return [total // pieces + (number < total % pieces) for number in range(pieces)]


def _window_starts(cut: BatchPlan, window: int) -> NDArray[np.int64]:
    """Where windows begin, and where the last ends; what drop_last drops is one more, left as it was shuffled."""
    windows = max(1, min(2, cut.steps // 2), round(cut.steps / window))
    steps = np.arange(windows + 1) * cut.steps // windows
    starts = np.minimum(steps * cut.global_batch, cut.samples_per_epoch)
    return np.unique(np.append(starts, cut.samples))


def _longest_first(lengths: Lengths) -> NDArray[np.intp]:
    return np.argsort(-lengths, kind="stable")  # equal lengths keep their shuffled order


# -- the samplers people know ------------------------------------------------------------------------------------------


class LengthGroupedSampler(Sampler[int]):
    """transformers' sampler of this name; a prepared loader asks it for the balanced `order` instead of iterating it.

    Iterated, it gives the very indices that transformers' gives from the same generator: a random permutation in
    mega-batches of up to 50 batches, each sorted longest first, with the longest sample of all at the start.
    """

    def __init__(
        self,
        batch_size: int,
        dataset: Dataset[Any] | None = None,
        lengths: GivenLengths | None = None,
        model_input_name: str | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        _check_batch_size(batch_size)
        self.batch_size = batch_size
        self.lengths = known_lengths(dataset, lengths, model_input_name)
        self.generator = generator

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[int]:
        return iter(mega_batched(self.lengths, self.batch_size, self.generator).tolist())

    @property
    def identity(self) -> str:
        return "of lengths " + hashlib.blake2b(np.ascontiguousarray(self.lengths).tobytes(), digest_size=8).hexdigest()

    def order(self, seed: int, epoch: int, cut: BatchPlan) -> GlobalOrder:
        """The cut has fewer samples than there are lengths where an epoch goes on after the dataset has grown."""
        return LengthGrouped(self.lengths[: cut.samples], seed, epoch, cut)


class DistributedLengthGroupedSampler(DistributedSampler):
    """transformers' sampler of this name, for a loop of one's own; `Engine.prepare` takes `LengthGroupedSampler`.

    The indices are those of transformers' for the same seed and epoch; what differs is what paceline's
    `DistributedSampler` does differently from torch's: the epoch moves on by itself, and `num_replicas` and `rank` are
    by default what the launcher said.
    """

    def __init__(
        self,
        batch_size: int,
        dataset: Dataset[Any] | None = None,
        num_replicas: int | None = None,
        rank: int | None = None,
        seed: int = 0,
        drop_last: bool = False,
        lengths: GivenLengths | None = None,
        model_input_name: str | None = None,
    ) -> None:
        _check_batch_size(batch_size)
        self.batch_size = batch_size
        self.lengths = known_lengths(dataset, lengths, model_input_name)
        super().__init__(self.lengths, num_replicas, rank, seed=seed, drop_last=drop_last)
        if self.num_samples == 0:
            raise ConfigError(
                f"{len(self.lengths)} samples can't be shared by {self.num_replicas} replicas with drop_last: each "
                "would get none; use drop_last=False"
            )

    def _order_of(self, epoch: int) -> GlobalOrder:
        generator = torch.Generator().manual_seed(self.seed + epoch)
        return Listed(tuple(mega_batched(self.lengths, self.batch_size, generator).tolist()))


def mega_batched(lengths: Lengths, batch_size: int, generator: torch.Generator | None) -> NDArray[np.int64]:
    """transformers' grouping, with its draws: `randperm` is the only one, and sorting keeps the order of equals."""
    samples = len(lengths)
    batches = max(1, min(samples // (batch_size * MEGA_BATCHES_AT_LEAST), MEGA_BATCHES))
    shuffled: NDArray[np.int64] = torch.randperm(samples, generator=generator).numpy()
    size = batches * batch_size
    parts = [shuffled[start : start + size] for start in range(0, samples, size)]
    grouped = np.concatenate([part[_longest_first(lengths[part])] for part in parts])
    # Out of memory should come at the first batch rather than at the last: the longest sample changes places.
    longest = int(np.argmax(lengths[grouped[::size]])) * size
    grouped[[0, longest]] = grouped[[longest, 0]]
    return grouped


def _check_batch_size(batch_size: int) -> None:
    if batch_size < 1:
        raise ConfigError(f"batch_size={batch_size}: a batch has at least one sample")


# -- where lengths come from -------------------------------------------------------------------------------------------


def known_lengths(dataset: Dataset[Any] | None, lengths: GivenLengths | None, column: str | None) -> Lengths:
    """One length per sample: as given, or by looking at every sample's `column` (input_ids)."""
    if lengths is None:
        if dataset is None:
            raise ConfigError("grouping by length needs lengths=, or a dataset= to take them from")
        return checked_lengths(list(_lengths_in(dataset, column or "input_ids")))
    known = checked_lengths(lengths)
    if dataset is not None and len(known) != _size_of(dataset):
        raise ConfigError(
            f"there are {len(known):,} lengths, but the dataset has {_size_of(dataset):,} samples; give one length per "
            "sample, in the order of the dataset"
        )
    return known


def checked_lengths(lengths: GivenLengths) -> Lengths:
    if isinstance(lengths, Tensor):
        lengths = lengths.detach().cpu().numpy()
    array = np.asarray(lengths)
    if array.ndim != 1:
        raise ConfigError(f"lengths have the shape {array.shape}; expected one number per sample")
    if array.size == 0:
        raise ConfigError("there are no lengths: the dataset is empty, and there is nothing to group")
    if array.dtype.kind not in "iu":
        raise ConfigError(f"lengths are {array.dtype}; expected whole numbers (lengths.astype(int) where they are)")
    lowest = int(array.argmin())
    if array[lowest] < 0:
        raise ConfigError(f"sample {lowest} has the length {array[lowest]}; a length is never negative")
    return array.astype(np.int64)


def _lengths_in(dataset: Dataset[Any], column: str) -> Iterator[int]:
    for number in range(_size_of(dataset)):
        sample = dataset[number]
        if not isinstance(sample, Mapping):
            raise ConfigError(
                f"lengths can't be taken from the column {column!r}: sample {number} is of type "
                f"{type(sample).__name__} and has no columns; pass lengths=[…], one number per sample"
            )
        if column not in sample:
            raise ConfigError(
                f"lengths can't be taken from the column {column!r}: sample {number} has "
                f"{', '.join(repr(name) for name in sample) or 'none'}; say which one with model_input_name=, or pass "
                "lengths=[…], one number per sample"
            )
        try:
            yield len(sample[column])
        except TypeError as error:
            raise ConfigError(
                f"sample {number}: the column {column!r} is of type {type(sample[column]).__name__} and has no "
                "length; say which column has one with model_input_name=, or pass lengths=[…], one number per sample"
            ) from error


def _size_of(dataset: Dataset[Any]) -> int:
    return len(cast("Sequence[Any]", dataset))
