"""Streams: every sample once, the same samples in a step at any number of workers, from any step on."""

from __future__ import annotations

import random
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from paceline.data.sharded_sampler import WorkItem
from paceline.data.stream_reading import Stream, splits_itself
from paceline.data.streams import Counts, StreamLoader
from paceline.data.work_source import Assignment
from paceline.errors import ConfigError, DataError
from paceline.world.lanes import neighbouring_lanes, strided_lanes

Handed = dict[tuple[int, int, int], Any]  # (step, lane, micro-batch) -> batch


class Numbers(IterableDataset[Tensor]):
    """Splits itself, as torch's documentation teaches; `reads` counts what was read in this process."""

    def __init__(self, samples: int) -> None:
        self.samples = samples
        self.reads: Counter[int] = Counter()

    def __iter__(self) -> Iterator[Tensor]:
        info = get_worker_info()
        first, stride = (0, 1) if info is None else (info.id, info.num_workers)
        for number in range(first, self.samples, stride):
            self.reads[number] += 1
            yield torch.tensor(number)


class Unsplit(IterableDataset[Tensor]):
    """Knows nothing of loader processes, and shuffles with a buffer: its order depends on random numbers."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Tensor]:
        buffer: list[int] = []
        for number in range(self.samples):
            buffer.append(number)
            if len(buffer) > 5:
                yield torch.tensor(buffer.pop(random.randrange(len(buffer))))
        yield from map(torch.tensor, buffer)


class Resumable(Numbers):
    """Has a state, so nothing needs to be read again."""

    place = -1

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]

    def __iter__(self) -> Iterator[Tensor]:
        info = get_worker_info()
        first, stride = (0, 1) if info is None else (info.id, info.num_workers)
        begin = first if self.place < 0 else self.place + stride
        self.place = -1
        for number in range(begin, self.samples, stride):
            self.place = number
            yield torch.tensor(number)


class Table:
    """What workers tell each other before a step: threads that meet stand in for processes.

    They take turns between two meetings (`turn`), since threads, unlike processes, share their random numbers.
    """

    def __init__(self, workers: int) -> None:
        self.turn = threading.Lock()
        self._barrier = threading.Barrier(workers, timeout=20)
        self._told: list[Counts] = [{} for _ in range(workers)]

    def agree(self, worker: int, mine: Counts) -> Counts:
        self._told[worker] = mine
        self.turn.release()
        try:
            self._barrier.wait()
            merged = {lane: counts for told in self._told for lane, counts in told.items()}
            self._barrier.wait()
        finally:
            self.turn.acquire()
        return merged

    def leave(self) -> None:
        self._barrier.abort()


class Job:
    """A job's data without its training: N workers that take whole steps and commit them."""

    def __init__(self, make: Callable[[], IterableDataset[Any]], *, lanes: int = 4, accumulate: int = 1, **loader: Any):
        self._make, self._lanes, self._accumulate = make, lanes, accumulate
        self._options = {"batch_size": 3} | loader
        self.state: dict[str, Any] | None = None
        self.datasets: list[Any] = []

    def run(self, workers: int, steps: int | None = None) -> Handed:
        """What all workers together are handed, up to the epoch's end or for some steps; then the job stops."""
        handed: Handed = {}
        table = Table(workers)
        states: list[Any] = [None] * workers
        failures: list[BaseException] = []

        def work(worker: int) -> None:
            with table.turn:
                work_in_turn(worker)

        def work_in_turn(worker: int) -> None:
            own_lanes = neighbouring_lanes(self._lanes, workers)[worker]
            dataset = self._make()
            self.datasets.append(dataset)
            loader = StreamLoader(
                DataLoader(dataset, **self._options),
                Assignment(self._lanes, self._accumulate, own_lanes, seed=3),
                lambda mine, _: table.agree(worker, mine),
            )
            try:
                if self.state is not None:
                    loader.restore(self.state)
                done = 0
                for item, batch in loader.items():
                    if not item.shadow:
                        handed[item.step, item.lane, item.micro_batch] = as_list(batch)
                    if item.last_of_step:
                        loader.commit(item)
                        done += 1
                        if done == steps:
                            break
                states[worker] = loader.state_after(None)
                if worker == 0:
                    self.merged = loader.merged
            except BaseException as error:
                failures.append(error)
                table.leave()
            finally:
                loader.close()

        threads = [threading.Thread(target=work, args=(worker,)) for worker in range(workers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        for failure in sorted(failures, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
            raise failure
        self.state = self.merged(states)
        return dict(sorted(handed.items()))


def as_list(batch: Any) -> Any:
    return batch.tolist() if isinstance(batch, Tensor) else batch


def samples_of(handed: Handed) -> list[int]:
    return sorted(sample for batch in handed.values() for sample in batch)


STREAMS = pytest.mark.parametrize("make", [lambda: Numbers(50), lambda: Unsplit(50), lambda: Resumable(50)],
                                  ids=["splits itself", "unsplit", "resumable"])  # fmt: skip


# -- every sample once -------------------------------------------------------------------------------------------------


@STREAMS
@pytest.mark.parametrize("accumulate", [1, 2])
def test_every_sample_is_handed_out_once_and_in_the_same_step_and_lane_at_any_number_of_workers(
    make: Callable[[], Any], accumulate: int
) -> None:
    alone = Job(make, accumulate=accumulate).run(1)
    assert samples_of(alone) == list(range(50))
    for workers in (2, 3, 4):
        assert Job(make, accumulate=accumulate).run(workers) == alone


@STREAMS
def test_loader_processes_hand_out_what_the_worker_itself_would(make: Callable[[], Any]) -> None:
    assert Job(make, num_workers=1).run(2) == Job(make).run(2)


def test_two_loader_processes_make_two_parts_of_each_lane_at_any_number_of_workers() -> None:
    handed = Job(lambda: Numbers(50), num_workers=2).run(1)
    assert samples_of(handed) == list(range(50))
    assert handed[0, 0, 0] == [0, 8, 16]  # part 0 of 8; the lane's second micro-batch comes from part 1
    assert handed[1, 0, 0] == [1, 9, 17]
    assert Job(lambda: Numbers(50), num_workers=2).run(3) == handed


def test_nobody_reads_what_another_keeps() -> None:
    job = Job(lambda: Numbers(50))
    job.run(3)
    reads: Counter[int] = sum((dataset.reads for dataset in job.datasets), Counter())
    assert reads == dict.fromkeys(range(50), 1)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 60), st.integers(1, 5), st.integers(1, 4), st.integers(1, 3), st.integers(1, 4), st.booleans())
def test_any_stream_cut_is_exact(
    samples: int, batch_size: int, lanes: int, accumulate: int, workers: int, splits: bool
) -> None:
    samples += lanes * splits  # a stream in parts has something for every lane
    make = (lambda: Numbers(samples)) if splits else (lambda: Unsplit(samples))
    options = {"lanes": lanes, "accumulate": accumulate, "batch_size": batch_size}
    alone = Job(make, **options).run(1)
    assert samples_of(alone) == list(range(samples))
    assert Job(make, **options).run(min(workers, lanes)) == alone


def test_drop_last_drops_less_than_a_batch_of_each_part() -> None:
    handed = Job(lambda: Numbers(50), drop_last=True).run(2)
    assert {len(batch) for batch in handed.values()} == {3}
    assert len(samples_of(handed)) == len(set(samples_of(handed))) == 48
    whole = Job(lambda: Unsplit(50), drop_last=True).run(2)
    assert len(samples_of(whole)) == len(set(samples_of(whole))) == 48


class Ready(Numbers):
    """Makes its own batches."""

    def __iter__(self) -> Iterator[Any]:
        numbers = [int(number) for number in super().__iter__()]
        for low in range(0, len(numbers), 4):
            yield {"x": torch.tensor(numbers[low : low + 4])}


def test_a_stream_of_ready_made_batches_is_assigned_as_it_is() -> None:
    job = Job(lambda: Ready(50), batch_size=None)
    handed = job.run(2)
    assert samples_of({key: batch["x"].tolist() for key, batch in handed.items()}) == list(range(50))


def test_the_items_say_what_a_step_holds() -> None:
    loader = StreamLoader(DataLoader(Numbers(10), batch_size=2), Assignment(3, 1, (0, 1, 2), 0), lambda mine, _: mine)

    def facts(item: WorkItem) -> tuple[Any, ...]:
        return item.step, item.lane, item.position, item.samples, item.present, item.step_samples, item.last_of_step

    assert [facts(item) for item, _ in loader.items()] == [
        (0, 0, 0, 2, (0, 1, 2), 6, False),
        (0, 1, 0, 2, (0, 1, 2), 6, False),
        (0, 2, 0, 2, (0, 1, 2), 6, True),
        (1, 0, 2, 2, (0, 1, 2), 4, False),  # lane 0 has 0 3 6 9, the others three samples each
        (1, 1, 2, 1, (0, 1, 2), 4, False),
        (1, 2, 2, 1, (0, 1, 2), 4, True),
    ]


# -- epochs and resuming -----------------------------------------------------------------------------------------------


@STREAMS
@pytest.mark.parametrize("loader_processes", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_stream_goes_on_at_any_step_with_another_number_of_workers(
    make: Callable[[], Any], loader_processes: int
) -> None:
    def job() -> Job:
        return Job(make, num_workers=loader_processes)

    whole = job().run(1)
    steps = max(step for step, _, _ in whole) + 1
    for stop in range(1, steps):
        stopped = job()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            handed = stopped.run(3, steps=stop) | stopped.run(1 + stop % 4)
        assert handed == whole


def test_a_stream_stopped_at_the_very_end_of_an_epoch_has_nothing_left_of_it() -> None:
    job = Job(lambda: Resumable(24))
    assert len(job.run(2, steps=2)) == 8
    assert job.run(2) == {}
    assert job.state is not None
    assert job.state["epoch"] == 1
    assert job.run(2) == Job(lambda: Resumable(24)).run(1)


def test_every_epoch_begins_anew_and_a_stream_that_wants_to_know_its_epoch_is_told() -> None:
    class Told(Numbers):
        epoch = -1

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __iter__(self) -> Iterator[Tensor]:
            return (number + 100 * self.epoch for number in super().__iter__())

    job = Job(lambda: Told(12))
    assert samples_of(job.run(2)) == list(range(12))
    assert samples_of(job.run(3)) == list(range(100, 112))


def test_a_stream_without_a_state_says_that_it_is_read_again() -> None:
    job = Job(lambda: Numbers(50))
    job.run(2, steps=2)
    text = r"the stream Numbers has no state_dict\(\): to go on, up to 6 samples are read again .* only if it gives the"
    with pytest.warns(UserWarning, match=text):
        job.run(1)


def test_a_stream_with_a_state_reads_nothing_again_and_warns_of_nothing() -> None:
    job = Job(lambda: Resumable(50))
    first, rest = job.run(2, steps=2), job.run(3)
    assert sorted(samples_of(first) + samples_of(rest)) == list(range(50))


class BufferShuffledExamplesIterable:
    """By its name Hugging Face's; its dataset's state says what was read, and not what of that waits in the buffer."""


class Link:
    def __init__(self, **below: Any) -> None:
        vars(self).update(below)


class Buffered(Resumable):
    """Gives its samples in pairs turned around: between the two of a pair its state is wrong."""

    _ex_iterable = Link(ex_iterables=[Link(), Link(ex_iterable=BufferShuffledExamplesIterable())])

    def __iter__(self) -> Iterator[Tensor]:
        held: list[Tensor] = []
        for number in super().__iter__():
            held.append(number)
            if len(held) == 2:
                yield held.pop()
                yield held.pop()
        yield from held


def test_a_stream_whose_state_leaves_out_its_shuffle_buffer_is_read_again() -> None:
    job = Job(lambda: Buffered(50))
    first = job.run(2, steps=1)
    with pytest.warns(UserWarning, match="the stream Buffered has a shuffle buffer outside its state: to go on, up to"):
        rest = job.run(3)
    assert sorted(samples_of(first) + samples_of(rest)) == list(range(50))


class ItsOwnIterator(IterableDataset[Tensor]):
    """To ask it for an iterator is to begin again."""

    def __init__(self, samples: int) -> None:
        self.samples, self.at = samples, 0

    def __iter__(self) -> Iterator[Tensor]:
        info = get_worker_info()
        self.at, self.stride = (0, 1) if info is None else (info.id, info.num_workers)
        return self

    def __next__(self) -> Tensor:
        if self.at >= self.samples:
            raise StopIteration
        self.at += self.stride
        return torch.tensor(self.at - self.stride)


@pytest.mark.parametrize("splits", [False, True])
def test_a_stream_that_is_its_own_iterator_ends_and_gives_every_sample_once(splits: bool) -> None:
    handed = Job(lambda: Stream(ItsOwnIterator(40), splits_itself=splits)).run(2)
    assert samples_of(handed) == list(range(40))


def test_every_part_and_epoch_has_a_seed_of_its_own() -> None:
    class Seeds(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            info = get_worker_info()
            assert info is not None
            assert info.num_workers == 4
            yield info.seed

    job = Job(Seeds)
    seeds = samples_of(job.run(1)) + samples_of(job.run(1))
    assert len(set(seeds)) == 8


class OddState(Numbers):
    def __init__(self, samples: int, state: Any) -> None:
        super().__init__(samples)
        self.state = state

    def state_dict(self) -> Any:
        return self.state


@pytest.mark.parametrize(
    ("state", "text"),
    [
        ({"at": torch.ones(1)}, r"the state_dict\(\) of part 0 of 4 of the stream is not JSON: Object of type Tensor"),
        ({0: 1}, r"the state_dict\(\) of part 0 of 4 of the stream changes when saved as JSON: use text for keys"),
        ({"at": (1, 2)}, "changes when saved as JSON"),
    ],
    ids=["tensor", "number as key", "tuple"],
)
def test_a_state_that_is_not_json_is_refused_before_it_is_needed(state: Any, text: str) -> None:
    with pytest.raises(DataError, match=text):
        Job(lambda: OddState(40, state)).run(1)


def test_the_length_of_a_stream_in_parts_is_no_less_than_its_steps() -> None:
    class Counted(Numbers):
        def __len__(self) -> int:
            return self.samples

    for samples in range(4, 60):
        loader = StreamLoader(
            DataLoader(Counted(samples), batch_size=3, num_workers=0), Assignment(2, 2, (0, 1), 0), lambda mine, _: mine
        )
        steps = {item.step for item, _ in loader.items()}
        assert loader.steps is not None
        assert loader.steps >= len(steps)


# -- what splits itself ------------------------------------------------------------------------------------------------


class Hidden(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return _split_elsewhere()


def _split_elsewhere() -> Iterator[int]:
    info = get_worker_info()
    return iter(range(10) if info is None else range(info.id, 10, info.num_workers))


class SeedsOnly(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        return iter(random.Random(info.id if info is not None else 0).sample(range(10), 10))


class Replaced(Numbers):
    def __iter__(self) -> Iterator[Tensor]:
        return iter([torch.tensor(1)])


class Shards(IterableDataset[int]):
    num_shards = 6

    def __iter__(self) -> Iterator[int]:
        return _split_elsewhere()


@pytest.mark.parametrize(
    ("dataset", "splits"),
    [
        (Numbers(1), True),
        (Ready(1), True),  # by way of super()
        (Replaced(1), False),
        (Unsplit(1), False),
        (SeedsOnly(), False),
        (Hidden(), False),
        (Stream(Hidden(), splits_itself=True), True),
        (Stream(Numbers(1), splits_itself=False), False),
        (Shards(), False),  # a number of shards alone says nothing of who reads them
        (Stream(Shards(), splits_itself=True), True),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_stream_is_split_only_where_it_is_told_or_seen(dataset: Any, splits: bool) -> None:
    assert splits_itself(dataset) is splits


def test_a_stream_of_few_shards_is_read_in_fewer_parts() -> None:
    loader = StreamLoader(
        DataLoader(Stream(Shards(), splits_itself=True), num_workers=2),
        Assignment(4, 1, (0, 1, 2, 3), 0),
        lambda mine, _: mine,
    )
    assert loader.readers == 1
    loader.close()


class FewShards(IterableDataset[Tensor]):
    """Each loader process has whole shards, so the third and all after it nothing."""

    num_shards = 2

    def __iter__(self) -> Iterator[Tensor]:
        info = get_worker_info()
        first, stride = (0, 1) if info is None else (info.id, info.num_workers)
        for shard in range(first, self.num_shards, stride):
            yield from map(torch.tensor, range(25 * shard, 25 * shard + 25))


def test_a_stream_of_fewer_shards_than_lanes_is_read_whole_and_alike_on_any_number_of_workers() -> None:
    """One worker trained with half of the lanes, several were refused."""
    handed = [Job(FewShards).run(workers) for workers in (1, 2, 3, 4)]
    assert handed[1:] == 3 * handed[:1]
    assert samples_of(handed[0]) == list(range(50))
    assert {lane for step, lane, _ in handed[0] if step == 0} == {0, 1, 2, 3}


def test_a_stream_that_says_it_splits_itself_is_told_which_part_it_is() -> None:
    assert samples_of(Job(lambda: Stream(Hidden(), splits_itself=True), lanes=2).run(2)) == list(range(10))


# -- what goes wrong ---------------------------------------------------------------------------------------------------


def test_an_empty_stream_is_refused() -> None:
    with pytest.raises(ConfigError, match="the stream gave nothing in epoch 0: it is empty, or can be read only once"):
        Job(lambda: Unsplit(0)).run(2)


def test_a_lane_that_never_gets_anything_is_refused_with_what_to_do() -> None:
    text = r"the stream gave lanes 2, 3 nothing: it has fewer shards than the 4 parts .* use fewer lanes"
    with pytest.raises(ConfigError, match=text):
        Job(lambda: Numbers(2)).run(2)


class Breaks(Numbers):
    def __iter__(self) -> Iterator[Tensor]:
        for number in super().__iter__():
            if number == 9:
                raise ValueError("disk on fire")
            yield number


@pytest.mark.parametrize("loader_processes", [0, 1])
def test_a_stream_that_fails_is_named_with_its_part_and_traceback(loader_processes: int) -> None:
    text = r"part 1 of 4 of the stream failed after 0 samples: ValueError: disk on fire\n(?s:.*)in __iter__"
    with pytest.raises(DataError, match=text):
        Job(lambda: Breaks(50), num_workers=loader_processes).run(1)


def test_ready_made_batches_of_an_unsplit_stream_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"a stream of ready-made batches .* can't be assigned to lanes"):
        StreamLoader(DataLoader(Unsplit(5), batch_size=None), Assignment(2, 1, (0, 1), 0), lambda mine, _: mine)


def test_another_batch_size_in_the_middle_of_an_epoch_is_refused() -> None:
    job = Job(lambda: Resumable(50))
    job.run(1, steps=1)
    assert job.state is not None
    loader = StreamLoader(
        DataLoader(Resumable(50), batch_size=5), Assignment(4, 1, (0, 1, 2, 3), 3), lambda mine, _: mine
    )
    with pytest.raises(DataError, match="in the middle of epoch 0 can't go on with another batch size"):
        loader.restore(job.state, changed=frozenset({"batch size"}))


class FewNumbers(IterableDataset[torch.Tensor]):
    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter(torch.arange(18.0))


def test_a_stream_hands_out_shadows_that_are_copies() -> None:
    """16 samples are two micro-batches for each of four lanes; the 2 left make one, of lane 0."""
    seen, shadows = [], 0
    for worker, own_lanes in enumerate(strided_lanes(4, 3)):
        deal = Assignment(4, 2, own_lanes, seed=0)
        loader = StreamLoader(DataLoader(FewNumbers(), batch_size=2), deal, lambda mine, _: mine)
        for item, batch in loader.items():
            if item.shadow:
                shadows += 1
                assert worker > 0
                batch.fill_(-1)
            else:
                seen += batch.tolist()
        loader.close()
    assert sorted(seen) == list(range(18))
    assert shadows == 2
