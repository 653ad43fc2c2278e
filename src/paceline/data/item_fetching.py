"""torch's DataLoader, asked for work items: their batches come in order, from this process or from loader processes.

    work items ──► (epoch, position, ids) ──► torch's DataLoader ──► batch      (item, batch) to the loop
                   └────────────── remembered in order ────────────────┘

A loader process that fails hands over its error as a text; one that dies or hangs is named with the sample it was at.
Processes end with the loop, or stay for the next one (`persistent_workers`). They also stay where a loop goes on with
other lanes: what is still on its way is dropped before they are asked anew.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import DataLoader

from paceline.data.batch_receiver import BatchReceiver
from paceline.data.batch_ring import BatchMemory, Packed
from paceline.data.fetching import Failure, ItemDataset, Wanted
from paceline.data.loader_watch import LoaderWatch, timed_out
from paceline.data.sharded_sampler import WorkItem
from paceline.data.work_source import Deal
from paceline.errors import DataError
from paceline.world.determinism import mix

LOOK_AFTER_THEM_S = 0.25
WORTH_A_THREAD_S = 2e-3  # a body that takes less leaves the thread nothing to save
_NO_MORE = object()


class ItemFetching:
    """Fetches work items as the user's DataLoader `source` would: its dataset, collate_fn and loader processes."""

    def __init__(self, source: DataLoader[Any], deal: Deal) -> None:
        self._source, self._deal = source, deal
        self._timeout_s = source.timeout or deal.timeout_s
        self._watch = LoaderWatch(source.num_workers) if source.num_workers > 0 else None
        self._memory = BatchMemory(source.num_workers, source.prefetch_factor or 1) if self._watch is not None else None
        slots = self._watch.slots if self._watch is not None else None
        rings = self._memory.address if self._memory is not None else None
        self._dataset = ItemDataset(source.dataset, source.collate_fn, deal.seed, slots, rings)
        self._asked = _Asked()
        self._generator = _generator_of(deal)
        self._loader = self._make_loader()
        self._fetched: Any = None
        self._receiver: BatchReceiver | None = None
        self._leaving, self._stay = False, source.persistent_workers

    def ride(self, lanes: tuple[int, ...]) -> None:
        """These lanes from now on; processes that run already keep the seed of the ones before."""
        if lanes == self._deal.ride:
            return
        self._deal = replace(self._deal, ride=lanes)
        self._generator = _generator_of(self._deal)
        if self._fetched is None:
            self._loader = self._make_loader()

    @contextmanager
    def staying(self) -> Iterator[None]:
        """What `of` gave is closed, and other items are asked for next: processes stay for them."""
        self._stay = True
        try:
            yield
        finally:
            self._stay = self._source.persistent_workers

    def of(self, items: Iterator[WorkItem]) -> Generator[tuple[WorkItem, Any]]:
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
        """End the loader processes."""
        self._stop_receiving()
        self._end_processes()
        if self._watch is not None:
            self._watch.close()
        if self._memory is not None:
            self._memory.close()

    # -- batches -----------------------------------------------------------------------------------------------------

    def _next(self) -> Any:
        if self._receiver is not None and self._receiver.asked:
            return self._receiver.next()
        return self._awaited()

    def _awaited(self) -> Any:
        """The next batch. torch gives up now and then, so that a process that died or hangs is missed."""
        if self._watch is None:
            return next(self._fetched, _NO_MORE)
        deadline = time.monotonic() + self._timeout_s
        while True:
            try:
                batch = next(self._fetched, _NO_MORE)
                return batch.batch() if type(batch) is Packed else batch
            except RuntimeError as error:
                if dead := self._watch.obituaries(self._watch.processes):
                    raise DataError(dead) from error
                if not timed_out(error) or self._leaving:
                    raise
                if time.monotonic() >= deadline:
                    what = f"the loader processes gave no batch for {self._timeout_s:g} s"
                    raise DataError(self._watch.delayed(what)) from error

    def _receive_ahead(self) -> None:
        if self._watch is None or self._source.pin_memory:
            return
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
        if self._watch is None:
            return iter(self._loader) if self._source.pin_memory else map(self._dataset.__getitem__, self._asked)
        with self._watch.starting():
            try:
                fetched: Any = iter(self._loader)
            except RuntimeError as error:  # one of the processes that stayed has not answered in time
                if dead := self._watch.obituaries(self._watch.processes):
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
        if shutdown is None or self._watch is None:
            return
        shutdown()
        for process in self._watch.processes:  # torch asks one that hangs to terminate, and leaves it at that
            process.kill()
            process.join()
        self._watch.processes = ()
        self._loader = self._make_loader()  # that one would hand out the ended ones again

    def _make_loader(self) -> DataLoader[Any]:
        source = self._source
        options: dict[str, Any] = {}
        if self._watch is not None:
            options = {
                "prefetch_factor": source.prefetch_factor,
                "multiprocessing_context": source.multiprocessing_context,
                "worker_init_fn": self._watch.started(source.worker_init_fn),
                "persistent_workers": True,  # when they end is decided here
                "timeout": min(LOOK_AFTER_THEM_S, self._timeout_s),
            }
        return DataLoader(
            self._dataset,
            batch_size=None,
            sampler=self._asked,
            collate_fn=_as_it_is,
            num_workers=source.num_workers,
            pin_memory=source.pin_memory,
            generator=self._generator,
            **options,
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


def _generator_of(deal: Deal) -> torch.Generator:
    """Seeds loader processes, so that what the user makes there from torch's seed differs from worker to worker.

    No sample's value depends on it: those are seeded each for itself.
    """
    generator = torch.Generator()
    generator.manual_seed(mix(deal.seed, "loader processes", *deal.ride))
    return generator


def _as_it_is(batch: Any) -> Any:
    return batch
