"""Reading a stream: iterators over an iterable dataset, each a *part* that says how far it has come.

    request (part, epoch) ──► the next micro-batch of that part's iterator, and its progress then

This runs in the worker itself or in its loader processes. While a part is read, `get_worker_info()` tells the dataset
that it is loader process `part` of `parts`: a dataset that splits itself by that gives every part samples of its own.
Random numbers are seeded before each micro-batch from its place in the part, so a part read again gives the same.
"""

from __future__ import annotations

import copy
import json
import types
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from paceline.data.fetching import Failure, loader_like, named, samples_in
from paceline.data.loader_watch import LoaderWatch, startup_explained
from paceline.data.sharded_sampler import BatchPlan
from paceline.data.work_source import Assignment
from paceline.errors import ConfigError, DataError
from paceline.torch_compat import loader_worker as torch_worker
from paceline.world.determinism import mix, seed_everything

WHOLE = -1  # the one part of a stream that can't be split


class Stream(IterableDataset[Any]):
    """Says of an iterable dataset whether its `__iter__` splits itself by `torch.utils.data.get_worker_info()`.

    `Engine.prepare` looks into the code of `__iter__` for that; wrap the dataset where this is not to be seen there.
    """

    def __init__(self, dataset: IterableDataset[Any], *, splits_itself: bool) -> None:
        self.dataset, self.splits_itself = dataset, splits_itself

    def __iter__(self) -> Iterator[Any]:
        return iter(self.dataset)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "dataset":
            raise AttributeError(name)
        return getattr(self.dataset, name)


def splits_itself(dataset: Any) -> bool:
    """Whether the stream gives each loader process a part of its own: said by `Stream`, or seen in its code."""
    if isinstance(dataset, Stream):
        return dataset.splits_itself
    names = {name for code in _own_code(type(dataset)) for name in _names_in(code)}
    if not {"get_worker_info", "num_workers"} <= names:
        return False
    if by_rank := names & {"get_rank", "get_world_size"}:
        raise ConfigError(
            f"the stream {type(dataset).__name__} splits itself by get_worker_info() and by {min(by_rank)}(): here the "
            "parts that get_worker_info() tells are those of all workers, so most samples would be left out. Split by "
            "get_worker_info() alone, or say paceline.data.Stream(dataset, splits_itself=True) if the rank chooses none"
        )
    return True


def _own_code(kind: type) -> Iterator[types.CodeType]:
    """The code of its methods, without those of torch and without those that a subclass has replaced."""
    for name in {name for base in kind.__mro__[:-1] for name in vars(base)}:
        for base in kind.__mro__[:-1]:
            method = vars(base).get(name)
            if isinstance(method, types.FunctionType) and not method.__module__.startswith("torch."):
                yield method.__code__
                if "super" not in method.__code__.co_names:
                    break


def shards_of(dataset: Any) -> int | None:
    """How many parts a stream of shards has at most (the attribute that Hugging Face's streams carry)."""
    for name in ("num_shards", "n_shards"):
        shards = getattr(dataset, name, None)
        if isinstance(shards, int):
            return shards
    return None


def has_whole_state(dataset: Any) -> bool:
    """Whether `state_dict()` says where it is: Hugging Face's leaves out what waits in a shuffle buffer."""
    return callable(getattr(dataset, "state_dict", None)) and not _has_buffer(getattr(dataset, "_ex_iterable", None))


def _has_buffer(iterable: Any) -> bool:
    """Anywhere in the chain of its iterables, one of which may have several below it."""
    if iterable is None or type(iterable).__name__ == "BufferShuffledExamplesIterable":
        return iterable is not None
    below = getattr(iterable, "ex_iterables", None) or [getattr(iterable, "ex_iterable", None)]
    return any(map(_has_buffer, below))


def _names_in(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_in(constant)


@dataclass(frozen=True)
class Request:
    """Ask for the next micro-batch of a part (of the whole: for the next step)."""

    run: int  # another run, another iterator: what an earlier one read ahead is forgotten
    epoch: int
    part: int
    resume: Mapping[str, Any] | None = None  # where the part's iterator begins, with its first request


class Reply(NamedTuple):
    """What a request gives."""

    run: int
    part: int
    batches: list[tuple[int, int, Any]]  # (part, samples, batch); of the whole: (lane, samples, batch). None: it ended
    progress: dict[str, Any]  # of the part, from which it can go on
    check: int  # to compare between workers that read the same


@dataclass(frozen=True)
class StreamShape:
    """How the stream is cut, for its readers."""

    assignment: Assignment
    batch_size: int | None  # None: the stream's elements are micro-batches
    drop_last: bool
    parts: int  # of all lanes together


class StreamReader(Dataset[Any]):
    """`reader[request]` is a `Reply`, or a `Failure`."""

    def __init__(self, dataset: Any, collate: Callable[[Any], Any], shape: StreamShape) -> None:
        self.dataset = dataset
        self._dataset = dataset.dataset if isinstance(dataset, Stream) else dataset
        self._collate, self._shape = collate, shape
        self._parts: dict[int, _Part] = {}

    def __getitem__(self, request: Request) -> Any:
        try:
            part = self._parts.get(request.part)
            if part is None or part.run != request.run:
                part = self._parts[request.part] = _Part(self._dataset, self._collate, self._shape, request)
            return Reply(request.run, request.part, part.next_batches(), part.progress(), part.check)
        except DataError as error:
            if torch_worker._worker_info is None:
                raise
            return Failure(str(error))


class _Part:
    """One iterator over the dataset and how far it has come."""

    def __init__(self, dataset: Any, collate: Callable[[Any], Any], shape: StreamShape, request: Request) -> None:
        self.run = request.run
        self._collate, self._shape, self._epoch, self._number = collate, shape, request.epoch, request.part
        self._whole = request.part == WHOLE
        self.check = 0  # of what was read last, to compare between workers that read the same
        self._stateful = has_whole_state(dataset)
        self._dataset = dataset
        self._chunks = self._samples = 0
        self._ended = self._state_checked = False
        resume = request.resume or {}
        with self._reading("could not begin"):
            # Several parts may live in one process, and a stream with a state keeps it in itself.
            if callable(getattr(dataset, "state_dict", None)):
                self._dataset = copy.deepcopy(dataset)
            if callable(getattr(self._dataset, "set_epoch", None)):
                self._dataset.set_epoch(request.epoch)
            if resume.get("state") is not None:
                self._dataset.load_state_dict(copy.deepcopy(resume["state"]))  # it may go on writing into it
            self._iterator = iter(self._dataset)
            if self._iterator is dataset:  # … and so does one that is its own iterator
                self._dataset = copy.deepcopy(dataset)
                self._iterator = iter(self._dataset)
        if resume.get("state") is not None:
            self._chunks, self._samples = resume["chunks"], resume["samples"]
        else:
            while self._chunks < resume.get("chunks", 0) and not self._ended:
                self._read()

    def next_batches(self) -> list[tuple[int, int, Any]]:
        """(part, samples, batch) of the next micro-batch; of the whole: (lane, samples, batch) for the next step.

        Nothing when the part has ended.
        """
        chunk = self._read()
        if not chunk:
            return []
        shape = self._shape
        if shape.batch_size is None:
            return [(self._number, samples_in(chunk[0]), chunk[0])]
        if not self._whole:
            return [(self._number, len(chunk), self._collated(chunk))]
        lanes, accumulate, mine = shape.assignment.lanes, shape.assignment.accumulate, shape.assignment.own_lanes
        cut = BatchPlan(len(chunk), shape.batch_size, lanes, accumulate).micro_batches(0)
        # A worker without samples runs lane 0's first micro-batch as a shadow.
        needed = mine if any(lane in cut for lane in mine) else (0,)
        found: list[tuple[int, int, Any]] = []
        for lane, ranges in cut.items():
            for number, places in enumerate(ranges):
                batch = None
                if lane in needed:  # a collate_fn that draws draws the same, whichever lanes this worker has beside it
                    seed_everything(mix(shape.assignment.seed, "collate", self._epoch, self._chunks, lane, number))
                    batch = self._collated(chunk[places.start : places.stop])
                found.append((lane, len(places), batch))
        return found

    def progress(self) -> dict[str, Any]:
        state = copy.deepcopy(self._dataset.state_dict()) if self._stateful else None
        if state is not None and not self._state_checked:
            self._check_state(state)
        return {"chunks": self._chunks, "samples": self._samples, "ended": self._ended, "state": state}

    def _check_state(self, state: Any) -> None:
        """It travels and is saved as JSON; what would come back changed is refused before it is needed."""
        try:
            same = json.loads(json.dumps(state)) == state
        except (TypeError, ValueError) as error:
            raise DataError(f"the state_dict() of {self._name} is not JSON: {error}") from error
        if not same:
            raise DataError(
                f"the state_dict() of {self._name} changes when saved as JSON: use text for keys, lists for tuples"
            )
        self._state_checked = True

    def _read(self) -> list[Any]:
        """The next micro-batch's samples, of the whole: the next step's."""
        shape, job = self._shape, self._shape.assignment
        size = shape.batch_size or 1
        wanted = size * job.lanes * job.accumulate if self._whole else size
        seed_everything(mix(job.seed, "stream", self._epoch, self._number, self._chunks))
        with self._reading(f"failed after {self._samples} samples"):
            chunk = self._take(wanted)
        self._ended = len(chunk) < wanted
        if self._ended and shape.drop_last:
            return []
        self.check = _check_of(chunk) if self._whole else 0
        self._chunks += bool(chunk)
        self._samples += len(chunk)
        return chunk

    def _take(self, count: int) -> list[Any]:
        """The next samples. By next() alone: to ask some iterators for an iterator is to begin again."""
        found: list[Any] = []
        for _ in range(count):
            try:
                found.append(next(self._iterator))
            except StopIteration:
                break
        return found

    def _collated(self, samples: list[Any]) -> Any:
        with named(f"collate_fn failed after {self._samples} samples of {self._name}"):
            return self._collate(samples)

    @property
    def _name(self) -> str:
        return "the stream" if self._whole else f"part {self._number} of {self._shape.parts} of the stream"

    @contextmanager
    def _reading(self, what: str) -> Iterator[None]:
        """The dataset sees itself in loader process `number` of `parts`; a stream read whole sees none."""
        before = torch_worker._worker_info
        info = torch_worker.WorkerInfo(
            id=self._number,
            num_workers=self._shape.parts,
            seed=mix(self._shape.assignment.seed, "part", self._epoch, self._number),
            dataset=self._dataset,
        )
        torch_worker._worker_info = None if self._whole else info
        try:
            with named(f"{self._name} {what}"):
                yield
        finally:
            torch_worker._worker_info = before


def _check_of(samples: list[Any]) -> int:
    """A number that differs if the first or last of the samples does; where nothing can be told from them, 0."""
    ends = [samples[0], samples[-1]] if samples else []
    return zlib.crc32(b"".join(_bytes_of(sample) for sample in ends))


def _bytes_of(sample: Any) -> bytes:
    if isinstance(sample, Tensor):
        return (
            sample.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes() if sample.numel() else b""
        )
    if isinstance(sample, np.ndarray):
        return sample.tobytes()
    if isinstance(sample, str | bytes | int | float):
        return repr(sample).encode()
    if isinstance(sample, Mapping):
        return b"".join(_bytes_of(value) for value in sample.values())
    if isinstance(sample, list | tuple):
        return b"".join(_bytes_of(value) for value in sample)
    return b""


class PartFetcher:
    """One torch DataLoader that reads some parts, here or in one loader process; no part runs far ahead of the others.

    wanted: part 2        part 2 ─ ·                  asked for: the part of which least is at hand
                          part 5 ─ batch, batch       what comes early waits for its turn
    """

    def __init__(self, source: DataLoader[Any], reader: StreamReader, parts: Sequence[int], timeout_s: float) -> None:
        self.parts = parts
        processes = min(1, source.num_workers)
        self._watch = LoaderWatch(processes)
        self._loader = loader_like(
            source,
            reader,
            self,
            self._watch,
            num_workers=processes,
            persistent_workers=source.persistent_workers,
            timeout=processes * (source.timeout or timeout_s),
        )
        self._replies: Iterator[Any] | None = None

    def begin(self, run: int, epoch: int, resume: Mapping[int, Mapping[str, Any]]) -> None:
        self._run, self._epoch = run, epoch
        self._resume: dict[int, Mapping[str, Any] | None] = {part: resume.get(part) for part in self.parts}
        self._buffers: dict[int, deque[Reply]] = {part: deque() for part in self.parts}
        self._on_their_way = dict.fromkeys(self.parts, 0)
        self._ended = {part for part in self.parts if (resume.get(part) or {}).get("ended")}
        self._wanted = self.parts[0]
        with startup_explained():
            self._replies = iter(self._loader)

    def __iter__(self) -> Iterator[Request]:
        """What the DataLoader shall fetch next."""
        while live := [part for part in self.parts if part not in self._ended]:
            part = min(live, key=lambda p: (len(self._buffers[p]) + self._on_their_way[p], p != self._wanted))
            self._on_their_way[part] += 1
            yield Request(self._run, self._epoch, part, self._resume.pop(part, None))

    def next_of(self, part: int) -> Reply | None:
        """The part's next micro-batch and its progress then; None when it has ended."""
        self._wanted = part
        while not self._buffers[part]:
            if part in self._ended:
                return None
            self._receive()
        return self._buffers[part].popleft()

    def _receive(self) -> None:
        assert self._replies is not None
        try:
            reply = next(self._replies)
        except RuntimeError as error:
            self._watch.explain(error, getattr(self._replies, "_workers", ()))
            raise
        if isinstance(reply, Failure):
            raise DataError(reply.text)
        if reply.run != self._run:
            return
        self._on_their_way[reply.part] -= 1
        if reply.batches:
            self._buffers[reply.part].append(reply)
        if not reply.batches or reply.progress["ended"]:
            self._ended.add(reply.part)

    def close(self) -> None:
        shutdown = getattr(self._replies, "_shutdown_workers", None)
        self._replies = None
        if shutdown is not None:
            shutdown()
        self._watch.close()
