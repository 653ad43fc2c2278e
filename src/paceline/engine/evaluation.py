"""Evaluation: every sample counted once, at any number of workers.

    batches    0 1 2 | 3 4 5 | 6 · ·          3 workers take one batch each per round
    worker     0 1 2   0 1 2   0 1 2          a worker with none left repeats the first batch as a *shadow*

All workers run the same number of rounds, so `gather_for_metrics` and `reduce` may be called in the loop body; they
leave the shadows out, and rows come in the dataset's order. Batches have the same samples whatever the number of
workers, and the same random numbers, in fetching and in the loop's body: those of their first sample.
A stream is read whole by every worker, which keeps its batch of each round.

A body that calls no collective adds up by hand, over its own batches, and reduces after the loop. There a shadow would
count twice, so none is handed out: the worker's loop is over one round earlier. That is known after a body has run, and
can't be done in the first round, nor where forward itself needs all workers (weights in shards): there the first
collective after the loop raises, unless the body has asked for `loader.shadow`.

When a worker is lost, the others go on with the round that not all of them have gathered, dealt anew:

    worker 0     batch 0        batch 3                      batch 3       batch 5      the round of batches 3, 4 and 5
    worker 1     batch 1        batch 4 ┊ worker 2 is lost   batch 4       …            begins again, for two
    worker 2     batch 2        batch 5 ┊
                 gathered       nobody gets rows             gathered      gathered

What the body of a round that is begun again gathers, has no rows. Who had some of them already does not get those again
(`real_rows`), so whatever is collected from one `gather_for_metrics` to the next holds every sample once, in order. Two
calls in one body may be cut apart, the first with its rows and the second without: what belongs together, such as
predictions and labels that are compared right there, goes into one call.

Workers that share sequences (context parallelism) have one batch together, each its part of it: in the pictures above
they are one worker. Each token counts once:

    gather_for_metrics(loss), reduce(loss, "mean")    the loss of the batch: a part weighs as much as it has of targets
    gather_for_metrics(values of tokens)              in the order of the sequence
    reduce(values)                                    the sum over all parts: for sums over a worker's own tokens

A loop that never gathers begins again from its first batch: what the lost worker had added up is gone, and nobody knows
which part of it. No sample is missed then, but those that the others had already seen count twice.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler

from paceline.data.fetching import sequence_like, to_device
from paceline.data.loader import check_assignable, is_plain_shuffle
from paceline.data.loader_watch import startup_explained
from paceline.engine.rules import refuse_update_bn
from paceline.engine.sequence_parts import WholeBatch, WholeSequences
from paceline.errors import ConfigError, LoopError, UnknownNameError
from paceline.world.determinism import drawing_from, mix, seed_everything
from paceline.world.world import World

Place = Sequence[int]  # the number of an evaluation, and the batch from which on it is not confirmed


@dataclass
class _Round:
    """A round as this worker runs it."""

    first: int  # its first batch
    real: int  # how many workers hold a real one; those that share sequences are one
    batch: WholeBatch  # this worker's
    gathered: int = 0  # how many calls of its body were
    met: bool = False  # its body has called a collective
    void: bool = False  # it is begun again
    in_step: bool = False  # it was handed out inside a step of training


class EvaluationCount:
    """Evaluations are numbered throughout a job, whatever loaders they are made with: who joins may lack some.

    Both numbers have to fit between workers: one may leave early what another has run through, but not leave it out.
    """

    def __init__(self) -> None:
        self.begun = 0
        self.whole = 0  # of them: run through to the end by this worker

    def told(self, loaders: Sequence[EvaluationLoader]) -> tuple[int, list[Place]]:
        """What the others need to know when workers have changed: how many were begun; places in those under way."""
        return self.begun, [loader.place() for loader in loaders if loader.under_way]


def place_of(number: int, told: tuple[int, Sequence[Place]]) -> Place:
    """Where one who told this is in that evaluation: in it, before it, or behind it."""
    begun, under_way = told
    before = (number, 0) if number > begun else (number + 1, 0)
    return next((place for place in under_way if place[0] == number), before)


class EvaluationLoader:
    """Iterating it is one evaluation.

    `on_start` and `on_end` are called before the first round and behind the last; the workers may meet there. Where
    all meet in `on_end`, none of them leaves a loop that another has to run a round of again.
    """

    if not TYPE_CHECKING:  # which tells the names that there are by itself

        def __getattr__(self, name: str) -> Any:
            if name in ("epoch", "position", "set_epoch", "next_step"):
                raise UnknownNameError(
                    f"loader.{name} is of a loader that trains, and this one was prepared for evaluation: give it to "
                    "engine.prepare() in one call with the model and the optimizer"
                )
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    _round: _Round | None  # that is handed out
    _had: dict[int, int]  # by call of a round's body: the batch up to which this worker has the rows
    _begun_from: int  # the batch from which on rounds are dealt as they are now
    _again_from: int | None  # … and from which on they will be
    _confirmed_to: int
    _rounds_run: int
    _rounds_run_before: int  # that were dealt in another way

    def __init__(
        self,
        source: DataLoader[Any],
        world: World,
        device: torch.device,
        *,
        seed: int,
        timeout_s: float,
        on_start: Callable[[], None],
        on_end: Callable[[], None] = lambda: None,
        count: EvaluationCount | None = None,
        needs_all: Callable[[], bool] = lambda: False,
        in_step: Callable[[], bool] = lambda: False,
        sequences: WholeSequences | None = None,
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        """`needs_all`: forward is a collective, so that no worker may leave a round out. `in_step`: of training."""
        check_assignable(source)
        self._seed, self._timeout_s, self._on_start, self._on_end = seed, timeout_s, on_start, on_end
        self._source = source
        self._world = world
        self._device = device
        self._stream = isinstance(source.dataset, IterableDataset)
        if self._stream and source.batch_size is None:
            raise ConfigError("an evaluation over a stream needs batch_size=: its batches are dealt to the workers")
        self._needs_all, self._in_step = needs_all, in_step
        self._sequences = WholeSequences() if sequences is None else sequences
        self._meets = self._asks_for_shadow = False  # the bodies of this evaluation
        self._repeated: str | None = None  # what was handed out twice in the last one, and not left out
        self._tell, self._is_told = tell, False
        self._is_apart = False  # the last one has ended, and no worker has met another in it or since
        self._kept: DataLoader[Any] | None = None
        self._dealt = _Dealt()
        self._count = EvaluationCount() if count is None else count
        self.number = 0  # of the evaluation that is under way, or was last
        self._begin()

    # -- who takes part ----------------------------------------------------------------------------------------------

    @property
    def _rank(self) -> int:
        """Among those with batches of their own."""
        return self._world.rank // self._sequences.parts

    @property
    def _size(self) -> int:
        return self._world.size // self._sequences.parts

    @property
    def batch(self) -> WholeBatch | None:
        """What this worker has in this round; None outside of one."""
        return None if self._round is None else self._round.batch

    @property
    def real_rows(self) -> list[int] | None:
        """The workers whose rows count in the gather that comes: those with a real batch; None outside a round.

        Of workers that share sequences one, since each has put the rows of all together.
        """
        if self._round is None:
            return None
        if self._round.void:
            return []
        first, had = self._round.first, self._had.get(self._round.gathered, 0)
        return [rank * self._sequences.parts for rank in range(self._round.real) if first + rank >= had]

    @property
    def void(self) -> bool:
        """What is left of this round's body must not communicate: others are somewhere else in it."""
        return self._round is not None and self._round.void

    def real_workers(self, *, whole: bool) -> range | None:
        """Those with a real batch in this round, or a part of one; None outside of one.

        `whole`: of those that share sequences one, who speaks for the batch.
        """
        parts = self._sequences.parts
        return None if self._round is None else range(0, self._round.real * parts, parts if whole else 1)

    @property
    def shadow(self) -> bool:
        """Whether the batch that this worker has now is another one's, handed out because it has none left."""
        self._asks_for_shadow = True
        return self._round is not None and self._rank >= self._round.real

    def meets(self) -> bool:
        """The script calls a collective of all workers: whether it does so in the body of a round."""
        if self._round is not None:
            self._meets = self._round.met = True
        return self._round is not None

    def check_real(self) -> None:
        """That no worker has a shadow, which a collective can't tell from a batch of its own."""
        if self._round is not None and self._round.real < self._size and not self._asks_for_shadow:
            raise LoopError(
                f"torch.distributed in the body of an evaluation, whose last round has {self._round.real} batches for "
                f"{self._size} workers: the others have the first batch again, which would count twice. Take "
                "engine.gather_for_metrics(values) or engine.reduce(values), or leave batches out for which "
                "loader.shadow is true"
            )

    def check_not_trained(self) -> None:
        """A backward of training: the batch that this hands out is of this worker, not of a lane."""
        if self.under_way and self._round is not None and self._round.in_step:
            raise LoopError(
                "the loop takes batches of a loader that is for evaluation beside those of the one that trains: which "
                "batches meet would depend on the number of workers. Prepare one DataLoader over both datasets, as "
                "torch.utils.data.StackDataset(first, second)"
            )

    def check_counted_once(self) -> None:
        """Before a collective behind the loop, which may be about what the body has added up."""
        self._is_apart = False
        text, self._repeated = self._repeated, None
        if text is not None:
            raise LoopError(text)

    def say_apart(self) -> None:
        """Before the next evaluation, or at the end: nobody has put together what the workers have each seen of it."""
        if self._is_apart and not self._is_told:
            self._is_told = True
            self._tell(
                f"paceline: an evaluation dealt its batches to {self._size} workers, and nothing was gathered or "
                "reduced in it or after it: what its loop adds up is one worker's part. engine.reduce(total) adds up "
                "all workers', engine.gather_for_metrics(values) in the loop brings all values"
            )
        self._is_apart = False

    def confirmed(self) -> None:
        """A gather of this round has succeeded: this worker has the rows of `real_rows`."""
        self.meets()
        if self._round is not None and not self._round.void:
            call, end = self._round.gathered, self._round.first + self._round.real
            self._had[call] = max(self._had.get(call, 0), end)
            self._round.gathered += 1

    def place(self) -> list[int]:
        """Told to the others when workers were lost, whether in an evaluation or not."""
        return [self.number, self._confirmed_to] if self.under_way else [self._count.begun + 1, 0]

    def deal_to(self, world: World, places: Sequence[Place] = ()) -> None:
        """From now on batches are dealt to these workers; in the middle of an evaluation a round begins again."""
        self._world = world
        if self.under_way:
            self.restart_round(world, places)

    def restart_round(self, world: World, places: Sequence[Place] = ()) -> None:
        """Workers were lost in the middle of an evaluation: these go on, from the first of their `places`.

        Where one of them has left this evaluation, all had all of it (see `on_end`), and nothing is left.
        """
        number, first = min([tuple(place) for place in places] or [(self.number, self._confirmed_to)])
        if any(other > self.number for other, _ in places):
            self._again_from = None
        else:
            self._again_from = first if number == self.number else 0
        self._world, self._changed = world, True
        if self._round is not None:
            self._round.void = True

    @property
    def dataset(self) -> Any:
        return self._source.dataset

    @property
    def batch_size(self) -> int | None:
        """Samples of a batch, as the DataLoader was given it; None where it has a batch sampler of its own."""
        return self._source.batch_size

    @property
    def batches(self) -> int:
        return len(self._batches)

    @cached_property
    def _batches(self) -> Sequence[Sequence[int]]:
        """In the dataset's order, whatever `shuffle` says; a sampler of the user's own is asked once, under a seed."""
        sampler, size = self._source.sampler, self._source.batch_size
        if size is None:
            assert self._source.batch_sampler is not None
            with drawing_from(mix(self._seed, "evaluation")):
                return [list(batch) for batch in self._source.batch_sampler]
        if is_plain_shuffle(sampler) or type(sampler) is SequentialSampler:
            ids: Sequence[int] = range(len(self._source.dataset))  # type: ignore[arg-type]
        else:
            with drawing_from(mix(self._seed, "evaluation")):
                ids = [int(index) for index in sampler]
        stop = len(ids) - len(ids) % size if self._source.drop_last else len(ids)
        return [ids[low : low + size] for low in range(0, stop, size)]

    def __len__(self) -> int:
        """Rounds: what every worker iterates; in an evaluation that has lost workers, with those run so far."""
        if self._stream:
            raise TypeError("an evaluation over a stream has no length")
        return self._rounds_run_before + -(-(self.batches - self._begun_from) // self._size)

    # -- rounds ------------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        self._round, self._had = None, {}
        self.under_way = self._changed = False
        self._begun_from = self._again_from = self._confirmed_to = 0
        self._rounds_run = self._rounds_run_before = 0

    def __iter__(self) -> Iterator[Any]:
        refuse_update_bn(sys._getframe(1))
        self.say_apart()
        self._on_start()
        self._begin()
        self._meets = self._asks_for_shadow = False
        self._repeated = None
        self._count.begun += 1
        self.number, self.under_way = self._count.begun, True
        try:
            while self._again_from is not None:
                self._begun_from, self._rounds_run_before = self._again_from, self._rounds_run
                yield from self._rounds_from(self._again_from)
            self._count.whole += 1
        finally:
            self._begin()
            seed_everything(mix(self._seed, "after evaluation"), self._device)

    def _rounds_from(self, first: int) -> Iterator[Any]:
        """Until the end, or until a round has to begin again."""
        self._changed, self._again_from = False, None
        with closing(self._rounds(first)) as rounds:
            for real, batch in rounds:
                has_shadows = real < self._size
                by_hand = not self._meets and self._rounds_run > 0
                if has_shadows and by_hand and not self._needs_all() and self._rank >= real:
                    break
                self._rounds_run += 1
                handed = self._sequences.of_evaluation(batch, self._device)
                self._round = _Round(first, real, handed, in_step=self._in_step())
                seed_everything(self._seed_of(first + self._rank), self._device)
                yield to_device(handed.mine, self._device)
                if self._changed:
                    return
                if has_shadows and not self._round.met and (not by_hand or self._needs_all()):
                    self._note_shadows(real)
                first += real
                self._confirmed_to = first if self._round.gathered else self._confirmed_to
        if self._sequences.parts > 1 and not self._meets:
            self._repeated = (
                f"an evaluation under cp={self._sequences.parts}, whose body has gathered nothing: each worker has "
                "seen a part of each sequence, and its means weigh as much as it has of the targets. Call "
                "engine.reduce(mean, 'mean'), engine.gather_for_metrics(mean), or engine.reduce(sum over its tokens) "
                "inside the loop"
            )
        self._is_apart = self._size > 1 and not self._meets
        self._on_end()

    def _note_shadows(self, real: int) -> None:
        """They were handed out, and the body met no other worker: it may have counted them."""
        if not self._asks_for_shadow:
            size, batches = self._size, "1 batch" if real == 1 else f"{real} batches"
            self._repeated = (
                f"the last round of the evaluation has {batches} for {size} workers, so {size - real} of them got "
                "the first batch again, and nothing was gathered there: sums over batches count it twice. Call "
                "engine.gather_for_metrics(values) or engine.reduce(values) inside the loop, or leave out batches for "
                "which loader.shadow is true"
            )

    def _seed_of(self, batch: int) -> int:
        return mix(self._seed, "evaluation", batch)

    def _rounds(self, start: int) -> Generator[tuple[int, Any]]:
        """(workers that hold a real batch, this worker's batch) of each round, from batch `start` on."""
        if self._stream:
            rounds = _Rounds(self._source, self._rank, self._size, start)
            if self._kept is not None and self._kept.dataset != rounds:
                self._kept = None
            yield from _started(self._fetching(rounds, batch_size=None, collate_fn=_as_it_is))
            return
        firsts = range(start, self.batches, self._size)
        numbers = [first + self._rank for first in firsts]
        self._dealt.batches = [list(self._batches[number if number < self.batches else 0]) for number in numbers]
        fetched = self._fetching(
            _Seeded(self._source.dataset, self._seed), batch_sampler=self._dealt, collate_fn=self._source.collate_fn
        )
        for first, batch in zip(firsts, _started(fetched), strict=True):
            yield min(self._size, self.batches - first), batch

    def _fetching(self, dataset: Any, **options: Any) -> DataLoader[Any]:
        source = self._source
        processes = min(1, source.num_workers) if self._stream else source.num_workers
        if processes:
            options |= {
                "prefetch_factor": source.prefetch_factor,
                "multiprocessing_context": source.multiprocessing_context,
                "worker_init_fn": source.worker_init_fn,
                "timeout": source.timeout or self._timeout_s,
                "persistent_workers": source.persistent_workers,
            }
        if self._kept is None or not source.persistent_workers:
            self._kept = DataLoader(dataset, num_workers=processes, pin_memory=source.pin_memory, **options)
        return self._kept


class _Dealt:
    """The batches of this worker; other ones when they are dealt anew, to loader processes that stay."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)


class _Seeded:
    """A dataset whose batches are fetched, and collated right after it, under seeds of their own."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self._dataset, self._seed = dataset, seed

    def __getitems__(self, ids: Sequence[int]) -> list[Any]:
        seed_everything(mix(self._seed, "evaluation", "fetched", ids[0] if ids else 0), torch.device("cpu"))
        if hasattr(self._dataset, "__getitems__"):
            return self._dataset.__getitems__(ids)  # type: ignore[no-any-return]
        return [self._dataset[number] for number in ids]

    def __len__(self) -> int:
        return len(self._dataset)

    def __getattr__(self, name: str) -> Any:
        """A worker_init_fn finds the user's dataset in `get_worker_info().dataset`."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._dataset, name)


class _Rounds(IterableDataset[Any]):
    """A stream in rounds of one batch for each worker, of which this worker's is collated; from batch `start` on."""

    def __init__(self, source: DataLoader[Any], rank: int, workers: int, start: int) -> None:
        assert source.batch_size is not None
        self._place = rank, workers, start
        self._stream, self._collate, self._drop_last = source.dataset, source.collate_fn, source.drop_last
        self._size = source.batch_size

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Rounds) and self._place == other._place

    __hash__ = None  # type: ignore[assignment]

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        rank, workers, start = self._place
        samples = iter(self._stream)
        for _ in islice(samples, self._size * start):
            pass
        first: list[Any] | None = None
        while chunk := list(islice(samples, self._size * workers)):
            batches = [chunk[low : low + self._size] for low in range(0, len(chunk), self._size)]
            if self._drop_last and len(batches[-1]) < self._size:
                batches.pop()
            if not batches:
                return
            first = first or batches[0]
            mine = batches[rank] if rank < len(batches) else first
            yield len(batches), self._collate(mine)


def _as_it_is(batch: Any) -> Any:
    return batch


def note_collective(loaders: Sequence[EvaluationLoader], *, of_torch: bool = False) -> None:
    """The script is about to call a collective of all workers, in the body of an evaluation or outside.

    `of_torch`: it asks torch.distributed, which knows of no shadows.
    """
    if of_torch:
        for loader in loaders:
            loader.check_real()
    in_a_body = [loader.meets() for loader in loaders]
    if not any(in_a_body):
        for loader in loaders:
            loader.check_counted_once()


def _started(loader: DataLoader[Any]) -> Iterator[Any]:
    with startup_explained():
        return iter(loader)


def no_rows(values: Any) -> Any:
    """What a gather returns in a round that begins again: `values` without rows."""
    if isinstance(values, dict):
        return {key: no_rows(value) for key, value in values.items()}
    if isinstance(values, list | tuple):
        return sequence_like(values, [no_rows(value) for value in values])
    value = torch.as_tensor(values).detach()
    return value.reshape(1)[:0] if value.dim() == 0 else value[:0]


def check_rows(values: Any) -> None:
    """That all values to be gathered are tensors or numbers."""
    if isinstance(values, dict | list | tuple):
        for value in values.values() if isinstance(values, dict) else values:
            check_rows(value)
        return
    try:
        torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise LoopError(
            f"engine.gather_for_metrics() takes tensors and numbers, and lists, tuples and dicts of them, not a "
            f"{type(values).__name__}; gather the numbers that it is made from, as a text's token ids"
        ) from error


def padded_rows(tensor: Tensor, rows: int) -> Tensor:
    """Workers may hold batches of different length; an all-gather needs them equal."""
    if tensor.shape[0] == rows:
        return tensor.contiguous()
    out = torch.zeros((rows, *tensor.shape[1:]), dtype=tensor.dtype, device=tensor.device)
    out[: tensor.shape[0]] = tensor
    return out


def share_of(inputs: Any, rank: int, size: int, *, pad: bool = False) -> Any:
    """A worker's part of a list, tuple or tensor, or of each in a dict: neighbours, the first workers get one more.

    With `pad` all parts are equally long, the last input repeated.
    """
    if isinstance(inputs, dict):
        lengths = {name: len(values) for name, values in inputs.items()}
        if len(set(lengths.values())) > 1:
            raise ConfigError(f"split_between_processes: the values of a dict have different lengths: {lengths}")
        return {name: share_of(values, rank, size, pad=pad) for name, values in inputs.items()}
    each, longer = divmod(len(inputs), size)
    first = rank * each + min(rank, longer)
    part = inputs[first : first + each + (rank < longer)]
    if not pad or not longer or rank < longer:
        return part
    last = inputs[-1:]
    return torch.cat([part, last]) if isinstance(inputs, Tensor) else part + last
