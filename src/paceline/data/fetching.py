"""Fetching: from a work item to its batch on the device.

    (seed, epoch, position) ──► random, numpy, torch ──► dataset[id] ──► collate_fn        in this or a loader process
    work items ──► (epoch, position, ids) ──► torch's DataLoader ──► batch ──► copied to the device
                   └────────────── remembered in order ────────────────┘      (item, batch) to the loop

Each sample is fetched under a random state of its own, so that it has the same values wherever that happens. Seeding
costs more than fetching from a simple dataset does, so only libraries that the dataset draws from are seeded before
each sample. Which these are is observed: an item begins with the others in a known state, and if one of them has moved
on at the end, the item is fetched again.

A loader process that fails hands over its error as a text; one that dies or hangs is named with the sample it was at
(`loader_watch`). Processes end with the loop, or stay for the next one (`persistent_workers`). They also stay where a
loop goes on with other lanes: what is still on its way is dropped before they are asked anew.
"""

from __future__ import annotations

import copy
import random
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate, get_worker_info

from paceline.data.batch_ring import BatchMemory, BatchRing, Packed, RingAddress, pinned
from paceline.data.global_order import scrambled
from paceline.data.loader_watch import COLLATING, HANDING_OVER, LoaderWatch, Slot, Slots, timed_out
from paceline.data.second_look import LONGEST_S, compare
from paceline.data.sharded_sampler import WorkItem
from paceline.data.work_source import Assignment
from paceline.errors import DataError
from paceline.torch_compat import loader_worker as torch_worker
from paceline.world.determinism import mix, own_generators, seed_everything

LOOK_AFTER_THEM_S = 0.25
WORTH_A_THREAD_S = 2e-3  # a body that takes less leaves the thread nothing to save
_NO_MORE = object()

Pair = tuple[WorkItem, Any]
Pairs = Generator[Pair, None, None]

# What fetching has to know of a work item: epoch, position, sample ids. It travels to a loader process, which plain
# tuples do faster.
Wanted = tuple[int, int, tuple[int, ...]]

# -- one item: its samples, then the collate function ------------------------------------------------------------------


class Failure:
    """What a loader process hands over instead of a batch: torch would wrap a raised error in its own words."""

    def __init__(self, text: str) -> None:
        self.text = text


class Library(NamedTuple):
    """Random numbers that a whole process shares; `mark` is another one if something was drawn since `seed`."""

    seed: Callable[[int], Any]
    mark: Callable[[], float]


def _cuda_offset() -> float:
    return torch.cuda.default_generators[torch.cuda.current_device()].get_offset()


_torch_number = torch.empty((), dtype=torch.int64, device="cpu")
LIBRARIES = (
    Library(random.seed, random.random),
    Library(lambda seed: np.random.seed(seed & 0xFFFF_FFFF), np.random.random_sample),
    Library(torch.default_generator.manual_seed, lambda: _torch_number.random_().item()),
)
CUDA = Library(torch.cuda.manual_seed, _cuda_offset)


class ItemDataset(Dataset[Any]):
    """`dataset[wanted]` is the collated micro-batch of a work item."""

    def __init__(
        self, dataset: Dataset[Any], collate: Callable[[Any], Any], seed: int, *, looks_twice: bool = False
    ) -> None:
        """`looks_twice`: at the job's first item, unless the dataset has a generator in sight or says that it draws."""
        self.dataset = self._dataset = dataset
        self._looks_twice = looks_twice and not getattr(dataset, "draws", False) and not own_generators(dataset)
        self._collate, self._seed = collate, seed
        self._at = Slot()  # which sample it is at, for others to see
        self._epoch: int | None = None
        self._undrawn = self._sample_key = 0
        self._drawn: list[Library] = []  # seeded before each sample
        self._quiet: list[tuple[Library, float]] = []  # seeded before each item, with their marks if nothing is drawn
        self._ready_made = False
        self._fetch_one: Callable[[int], Any] = dataset.__getitem__
        self._fetch_many: Callable[[list[int]], Any] | None = getattr(dataset, "__getitems__", None)

    def __getitem__(self, wanted: Wanted) -> Any:
        if not self._looks_twice or wanted[:2] != (0, 0):
            return self._batch(wanted)
        self._looks_twice, began = False, time.perf_counter()
        batch = self._batch(wanted)
        if time.perf_counter() - began < LONGEST_S:
            compare(batch, lambda: self._batch(wanted), type(self.dataset).__name__, _names(wanted[2]))
        return batch

    def _batch(self, wanted: Wanted) -> Any:
        epoch, position, ids = wanted
        if epoch != self._epoch:
            self._enter(epoch, position)
        samples = self._samples(position, ids)
        self._at.state = COLLATING
        try:
            if self._collate is default_collate:  # which draws nothing
                batch = self._default_collated(samples)
            else:
                seed_everything(mix(self._seed, "collate", epoch, position))
                batch = self._collate(samples)
        except Exception as error:
            raise _failed(f"collate_fn failed on {_names(ids)}", error) from error
        self._at.state = HANDING_OVER
        return batch

    def _default_collated(self, samples: Any) -> Any:
        return default_collate(samples)

    def _samples(self, position: int, ids: tuple[int, ...]) -> Any:
        while True:
            for library, _ in self._quiet:
                library.seed(self._undrawn)
            samples = self._fetch_each(position, ids) if self._drawn else self._fetch(ids)
            drawn = [library for library, mark in self._quiet if library.mark() != mark]
            if not drawn:
                return samples
            self._drawn += drawn
            self._quiet = [(library, mark) for library, mark in self._quiet if library not in drawn]

    def _fetch_each(self, position: int, ids: tuple[int, ...]) -> Any:
        samples: list[Any] = []
        key, libraries = self._sample_key + position, [library.seed for library in self._drawn]
        for place, sample in enumerate(ids):
            seed = scrambled(key + place)
            for seed_library in libraries:
                seed_library(seed)
            if self._ready_made:
                return self._fetch(ids)
            samples += self._fetch((sample,))
        return samples

    def _fetch(self, ids: Sequence[int]) -> Any:
        at = self._at
        if self._fetch_many is not None:
            at.sample, at.state = ids[0], len(ids)
            try:
                fetched = self._fetch_many(list(ids))
            except Exception as error:
                raise _failed(f"the dataset failed on {_names(ids)}", error) from error
            self._ready_made = not isinstance(fetched, list)  # a batch, not to be put together from single samples
            return fetched
        samples: list[Any] = []
        at.state = 1
        try:
            self._fetch_in_turn(ids, samples)
        except Exception as error:  # what was fetched before it is in the list
            raise _failed(f"the dataset failed on sample {ids[len(samples)]}", error) from error
        return samples

    def _fetch_in_turn(self, ids: Sequence[int], samples: list[Any]) -> None:
        samples.extend(map(self._fetch_one, ids))
        if len(samples) < len(ids):  # extend() takes a StopIteration of the dataset for the end
            raise RuntimeError("it raised StopIteration, which ends no epoch here; let __len__ say how many there are")

    def _enter(self, epoch: int, position: int) -> None:
        """The dataset's `set_epoch` is called here, so that the user need not."""
        set_epoch = getattr(self._dataset, "set_epoch", None)
        if set_epoch is not None:
            seed_everything(mix(self._seed, "set_epoch", epoch))
            with named(f"the dataset's set_epoch({epoch}) failed"):
                set_epoch(epoch)
        self._epoch = epoch
        self._sample_key = mix(self._seed, "sample", epoch)
        # Another one in every process and epoch: a dataset may make a generator of its own from torch.initial_seed().
        self._undrawn = mix(self._seed, "undrawn", epoch, position)
        self._quiet = []
        for library in (*LIBRARIES, CUDA) if torch.cuda.is_initialized() else LIBRARIES:  # type: ignore[no-untyped-call]
            if getattr(self._dataset, "draws", False) and library not in self._drawn:
                self._drawn.append(library)  # it says so itself: none of its samples is fetched twice to find out
            if library not in self._drawn:
                library.seed(self._undrawn)
                self._quiet.append((library, library.mark()))


class LoaderProcessDataset(ItemDataset):
    """The same in a loader process: batches leave by the ring, and errors as texts."""

    def __init__(
        self,
        dataset: Dataset[Any],
        collate: Callable[[Any], Any],
        seed: int,
        slots: Slots,
        rings: RingAddress,
        *,
        looks_twice: bool,
    ) -> None:
        super().__init__(dataset, collate, seed, looks_twice=looks_twice)
        self._slots, self._rings = slots, rings
        self._ring: BatchRing | None = None

    def __getitem__(self, wanted: Wanted) -> Any:
        if self._ring is None:
            info = get_worker_info()
            assert info is not None
            self._ring, self._at = BatchRing(self._rings, info.id), self._slots[info.id]
        try:
            batch = super().__getitem__(wanted)
            try:
                return self._ring.packed(batch)
            except Exception as error:
                raise _failed(f"the batch of {_names(wanted[2])} can't leave the loader process", error) from error
        except DataError as error:
            return Failure(str(error))

    def _fetch_in_turn(self, ids: Sequence[int], samples: list[Any]) -> None:
        for sample in ids:
            self._at.sample = sample
            samples.append(self._fetch_one(sample))

    def _default_collated(self, samples: Any) -> Any:
        """Where it does not see that this is a loader process, it does not open shared memory, which the ring has."""
        info = torch_worker._worker_info
        if self._ring is not None and self._ring.took_the_last:
            torch_worker._worker_info = None
        try:
            return default_collate(samples)
        finally:
            torch_worker._worker_info = info


@contextmanager
def named(what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise _failed(what, error) from error


def _failed(what: str, error: Exception) -> DataError:
    # A traceback can't leave a loader process, so it becomes part of the text.
    lines = "".join(traceback.format_exception(error)).rstrip()
    return DataError(f"{what}: {type(error).__name__}: {error}\n{lines}")


def samples_in(batch: Any) -> int:
    """How many samples a ready-made batch holds: the length of the first tensor found in it."""
    if isinstance(batch, torch.Tensor):
        return len(batch) if batch.dim() else 1
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if isinstance(batch, list | tuple) and batch:
        return samples_in(batch[0])
    return 1


def _names(ids: Sequence[int]) -> str:
    if len(ids) == 1:
        return f"sample {ids[0]}"
    shown = ", ".join(str(sample) for sample in ids[:8])
    return f"the samples {shown}, … ({len(ids)} in all)" if len(ids) > 8 else f"the samples {shown}"


# -- items in order, from this process or from loader processes --------------------------------------------------------


class ItemFetcher:
    """Fetches work items as the user's DataLoader `source` would, in this process."""

    def __init__(self, source: DataLoader[Any], assignment: Assignment) -> None:
        twice = assignment.looks_twice
        self._dataset = ItemDataset(source.dataset, source.collate_fn, assignment.seed, looks_twice=twice)
        self._pins = source.pin_memory and torch.accelerator.is_available()

    def of(self, items: Iterator[WorkItem]) -> Generator[Pair]:
        for item in items:
            batch = self._dataset[item.epoch, item.position, item.sample_ids]
            yield item, pinned(batch) if self._pins else batch

    def assign(self, lanes: tuple[int, ...]) -> None:
        """These lanes from now on."""

    def staying(self) -> AbstractContextManager[None]:
        """What `of` gave is closed, and other items are asked for next: loader processes stay for them."""
        return nullcontext()

    def close(self) -> None:
        """End the loader processes."""


class ProcessFetcher(ItemFetcher):
    """… in its loader processes."""

    def __init__(self, source: DataLoader[Any], assignment: Assignment) -> None:
        self._source, self._seed, self._lanes = source, assignment.seed, assignment.own_lanes
        self._timeout_s = source.timeout or assignment.timeout_s
        self._watch = LoaderWatch(source.num_workers)
        self._memory = BatchMemory(source.num_workers, source.prefetch_factor or 1)
        slots, rings = self._watch.slots, self._memory.address
        collate, twice = source.collate_fn, assignment.looks_twice
        self._dataset = LoaderProcessDataset(source.dataset, collate, assignment.seed, slots, rings, looks_twice=twice)
        self._asked = _Asked()
        self._generator = torch.Generator()
        self._seed_processes()
        self._loader = self._make_loader()
        self._fetched: Any = None
        self._receiver: BatchReceiver | None = None
        self._leaving, self._stay = False, source.persistent_workers

    def assign(self, lanes: tuple[int, ...]) -> None:
        """Processes that run already keep the seed of the lanes before."""
        if lanes != self._lanes:
            self._lanes = lanes
            self._seed_processes()

    def _seed_processes(self) -> None:
        """So that what the user makes there from torch's seed differs from worker to worker.

        No sample's value depends on it: those are seeded each for itself.
        """
        self._generator.manual_seed(mix(self._seed, "loader processes", *self._lanes))

    @contextmanager
    def staying(self) -> Iterator[None]:
        self._stay = True
        try:
            yield
        finally:
            self._stay = self._source.persistent_workers

    def of(self, items: Iterator[WorkItem]) -> Generator[Pair]:
        clean = False
        try:
            self._drop_what_is_on_its_way()
            self._asked.begin(items)
            self._fetched = self._begin()
            body_s = 0.0
            while (batch := self._next()) is not _NO_MORE:
                if isinstance(batch, Failure):
                    raise DataError(batch.text)
                if body_s > WORTH_A_THREAD_S:
                    self._receive_ahead()
                began = time.perf_counter()
                yield self._asked.taken(), batch
                body_s = time.perf_counter() - began
            clean = True
        except GeneratorExit:
            clean = True
            raise
        finally:
            self._stop_receiving()
            if not (clean and self._stay):
                self._end_processes()

    def close(self) -> None:
        self._stop_receiving()
        self._end_processes()
        self._watch.close()
        self._memory.close()

    # -- batches -----------------------------------------------------------------------------------------------------

    def _next(self) -> Any:
        if self._receiver is not None and self._receiver.asked:
            return self._receiver.next()
        return self._awaited()

    def _awaited(self) -> Any:
        """The next batch. torch gives up now and then, so that a process that died or hangs is missed."""
        deadline = time.monotonic() + self._timeout_s
        while True:
            try:
                batch = next(self._fetched, _NO_MORE)
                return batch.batch() if type(batch) is Packed else batch
            except RuntimeError as error:
                if dead := self._watch.deaths(self._watch.processes):
                    raise DataError(dead) from error
                if not timed_out(error) or self._leaving:
                    raise
                if time.monotonic() >= deadline:
                    what = f"the loader processes gave no batch for {self._timeout_s:g} s"
                    raise DataError(self._watch.delayed(what)) from error

    def _receive_ahead(self) -> None:
        if self._source.pin_memory:
            return  # torch has such a thread there
        if self._receiver is None:
            self._receiver = BatchReceiver(self._awaited)
        self._receiver.ask()

    def _stop_receiving(self) -> None:
        if self._receiver is not None:
            self._leaving = True
            self._receiver.stop()
            self._receiver, self._leaving = None, False

    # -- processes ---------------------------------------------------------------------------------------------------

    def _begin(self) -> Iterator[Any]:
        with self._watch.starting():
            try:
                fetched: Any = iter(self._loader)
            except RuntimeError as error:  # one of the processes that stayed has not answered in time
                if dead := self._watch.deaths(self._watch.processes):
                    raise DataError(dead) from error
                self._end_processes()
                fetched = iter(self._loader)
            self._watch.processes = fetched._workers
        return fetched  # type: ignore[no-any-return]

    def _drop_what_is_on_its_way(self) -> None:
        if self._fetched is not None:
            self._asked.begin(iter(()))
            while self._awaited() is not _NO_MORE:
                pass

    def _end_processes(self) -> None:
        shutdown = getattr(self._fetched, "_shutdown_workers", None)
        self._fetched = None
        if shutdown is None:
            return
        shutdown()
        for process in self._watch.processes:  # torch asks one that hangs to terminate, and leaves it at that
            process.kill()
            process.join()
        self._watch.processes = ()
        self._loader = self._make_loader()  # that one would hand out the ended ones again

    def _make_loader(self) -> DataLoader[Any]:
        return loader_like(
            self._source,
            self._dataset,
            self._asked,
            self._watch,
            num_workers=self._source.num_workers,
            generator=self._generator,
            persistent_workers=True,  # when they end is decided here
            timeout=min(LOOK_AFTER_THEM_S, self._timeout_s),
        )


class _Asked:
    """The sampler behind torch's DataLoader: hands it what is wanted, and remembers the items in that order."""

    def __init__(self) -> None:
        self._items: Iterator[WorkItem] = iter(())
        self._out: deque[WorkItem] = deque()

    def begin(self, items: Iterator[WorkItem]) -> None:
        self._items = items
        self._out.clear()

    def __iter__(self) -> Iterator[Wanted]:
        items = self._items
        for item in items:
            if items is not self._items:  # another loop has begun
                return
            self._out.append(item)
            yield item.epoch, item.position, item.sample_ids

    def taken(self) -> WorkItem:
        return self._out.popleft()


def loader_like(
    source: DataLoader[Any], dataset: Dataset[Any], requests: Iterable[Any], watch: LoaderWatch, **options: Any
) -> DataLoader[Any]:
    """torch's DataLoader with the settings of the user's, over requests in the place of samples."""
    return DataLoader(
        dataset,
        batch_size=None,
        sampler=requests,
        collate_fn=_as_it_is,
        pin_memory=source.pin_memory,
        prefetch_factor=source.prefetch_factor,
        multiprocessing_context=source.multiprocessing_context,
        worker_init_fn=watch.started(source.worker_init_fn),
        **options,
    )


def _as_it_is(batch: Any) -> Any:
    return batch


class BatchReceiver:
    """A thread that takes the next batch over from the loader processes while the loop works on this one.

        loop       step on batch 1 ▓▓▓▓▓▓▓▓▓▓▓   step on batch 2 ▓▓▓▓▓▓▓▓▓▓▓
        thread      batch 2 ▒▒                    batch 3 ▒▒                    handing over memory takes about 1 ms

    `ask()` has the thread call `take`; `next()` is what it gave, or raises what it raised.
    """

    def __init__(self, take: Callable[[], Any]) -> None:
        self._take = take
        self._asks: SimpleQueue[bool] = SimpleQueue()
        self._taken: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="paceline-batch-receiver", daemon=True)
        self._thread.start()
        self.asked = False

    def ask(self) -> None:
        self.asked = True
        self._asks.put(True)

    def next(self) -> Any:
        batch, error = self._taken.get()
        self.asked = False
        if error is not None:
            raise error
        return batch

    def stop(self) -> None:
        """Returns when the thread has ended, which a `take` in progress delays."""
        self._asks.put(False)
        if threading.current_thread() is not self._thread:  # the garbage collector runs anywhere
            self._thread.join()

    def _run(self) -> None:
        while self._asks.get():
            try:
                self._taken.put((self._take(), None))
            except BaseException as error:
                self._taken.put((None, error))


# -- a loop, which may go on with other items --------------------------------------------------------------------------


class Loop(Iterator[Pair]):
    """What `items()` gives. It lasts until it is closed or forgotten, also where it has come to its end: a worker may
    learn only then that the others have changed."""

    def __init__(self, pairs: Pairs, epoch: int) -> None:
        self._pairs = pairs
        self.epoch: int | None = epoch
        self.closed = False

    def __next__(self) -> Pair:
        return next(self._pairs)

    def close(self) -> None:
        self.closed = True
        self._pairs.close()


class Loops:
    """The loop under way, if there is one. It belongs to one epoch: interrupted behind the last step of that, it has
    nothing left, and does not run on into the next one."""

    def __init__(self) -> None:
        self._current: Callable[[], Loop | None] = lambda: None
        self._epoch: int | None = None  # of an interrupted loop

    def begin(self, epoch: int, pairs: Callable[[bool], Pairs]) -> Loop:
        """A loop, or the interrupted one again, of `pairs(whether its epoch is over)`."""
        of = epoch if self._epoch is None else self._epoch
        self._epoch = None
        loop = Loop(pairs(of != epoch), of)
        self._current = weakref.ref(loop)
        return loop

    def interrupt(self) -> None:
        """End what was given for the loop under way; it goes on with the next `begin`."""
        loop = self._current()
        if loop is not None and not loop.closed:
            self._epoch = loop.epoch
            loop.close()

    def moved(self) -> None:
        """The place is another one: the loop under way goes on there, in whichever epoch that is."""
        self._epoch = None
        loop = self._current()
        if loop is not None:
            loop.epoch = None


# -- to the device ahead of use ----------------------------------------------------------------------------------------


class Prefetch:
    """Iterates (item, batch on the device).

        copy stream       batch 1 ▓▓   batch 2 ▓▓   batch 3 ▓▓
        compute stream            step on batch 1 ▓▓▓▓▓▓  step on batch 2 ▓▓▓▓▓▓

    Looking ahead is worth it where loader processes prepare batches meanwhile; without them the next batch would have
    to be made before this one is handed out. On the CPU there is nowhere to copy to.
    """

    def __init__(self, items: Iterator[Pair], device: torch.device, *, ahead: bool) -> None:
        self._items, self._device = items, device
        self._copies = torch.Stream(device=device) if ahead and device.type != "cpu" else None
        self._next: Pair | Exception | None = None

    def __iter__(self) -> Prefetch:
        return self

    def __next__(self) -> Pair:
        found = self._next if self._next is not None else self._fetched()
        self._next = None
        if isinstance(found, Exception):
            raise found
        item, batch = found
        if self._copies is not None:
            current = torch.accelerator.current_stream(self._device)
            current.wait_stream(self._copies)
            _used_on(batch, current)
            self._next = self._fetched()
        return item, to_device(batch, self._device)

    def close(self) -> None:
        self._next = None
        close = getattr(self._items, "close", None)
        if close is not None:
            close()

    def _fetched(self) -> Pair | Exception:
        """The next pair, or what came in its place: a failure ahead must not keep this batch from being used."""
        try:
            item, batch = next(self._items)
        except Exception as error:
            return error
        if self._copies is None:
            return item, batch
        with self._copies:
            return item, to_device(batch, self._device, seen_through=True)


def to_device(batch: Any, device: torch.device, *, seen_through: bool = False) -> Any:
    """The batch with its tensors on the device.

    With `seen_through`, only what `_used_on` finds: other objects are moved when they are handed out.
    """
    if device.type == "cpu":
        return batch
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if callable(getattr(batch, "to", None)):  # a transformers BatchEncoding, a PackedSequence, a graph
        return batch if seen_through and not isinstance(batch, Mapping | list | tuple) else _asked_to(batch, device)
    if isinstance(batch, Mapping):
        moved = {key: to_device(value, device, seen_through=seen_through) for key, value in batch.items()}
        return moved if type(batch) is dict else _like(batch, moved)
    if isinstance(batch, list | tuple):
        return sequence_like(batch, [to_device(value, device, seen_through=seen_through) for value in batch])
    return batch


def sequence_like(given: list[Any] | tuple[Any, ...], values: Sequence[Any]) -> Any:
    """The values as a list, a tuple or a named tuple, whichever was given."""
    return type(given)(*values) if hasattr(given, "_fields") else type(given)(values)


def _asked_to(batch: Any, device: torch.device) -> Any:
    try:
        return batch.to(device, non_blocking=True)
    except TypeError:
        return batch.to(device)


def _like(batch: Mapping[Any, Any], moved: dict[Any, Any]) -> Any:
    """A mapping of the user's own type keeps what else it holds."""
    copied: Any = copy.copy(batch)
    if not hasattr(copied, "update"):
        return moved
    copied.update(moved)
    return copied


def _used_on(batch: Any, stream: torch.Stream) -> None:
    """The allocator must not reuse a copied tensor's memory before the compute stream is done with it."""
    if isinstance(batch, Tensor):
        if batch.device.type != "cpu":  # a PackedSequence keeps its lengths there
            batch.record_stream(stream)
    elif isinstance(batch, Mapping):
        for value in batch.values():
            _used_on(value, stream)
    elif isinstance(batch, list | tuple):
        for value in batch:
            _used_on(value, stream)
