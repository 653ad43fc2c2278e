"""Fetching the parts of a stream: what they give comes from this process, or from a loader process that reads ahead.

wanted: part 2        part 2 ─ ·                  asked for: the part of which least is at hand
                      part 5 ─ batch, batch       what comes early waits for its turn
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from torch.utils.data import DataLoader

from paceline.data.fetching import Failure
from paceline.data.loader_watch import LoaderWatch, what_processes_need
from paceline.data.stream_reading import Request, StreamReader
from paceline.errors import DataError


class Fetcher:
    """One torch DataLoader of at most one process that reads some parts; no part runs far ahead of the others."""

    def __init__(self, source: DataLoader[Any], reader: StreamReader, parts: Sequence[int], timeout_s: float) -> None:
        self.parts = parts
        self._watch = LoaderWatch(1) if source.num_workers > 0 else None
        self._persistent = source.persistent_workers
        options: dict[str, Any] = {}
        if self._watch is not None:
            options = {
                "num_workers": 1,
                "prefetch_factor": source.prefetch_factor,
                "multiprocessing_context": source.multiprocessing_context,
                "worker_init_fn": self._watch.started(source.worker_init_fn),
                "persistent_workers": self._persistent,
                "timeout": source.timeout or timeout_s,
            }
        self._loader = DataLoader(
            reader, batch_size=None, sampler=self, collate_fn=_as_it_is, pin_memory=source.pin_memory, **options
        )
        self._replies: Iterator[Any] | None = None

    def begin(self, run: int, epoch: int, resume: Mapping[int, Mapping[str, Any]]) -> None:
        self._run, self._epoch = run, epoch
        self._resume: dict[int, Mapping[str, Any] | None] = {part: resume.get(part) for part in self.parts}
        self._buffers: dict[int, deque[Any]] = {part: deque() for part in self.parts}
        self._on_their_way = dict.fromkeys(self.parts, 0)
        self._ended = {part for part in self.parts if (resume.get(part) or {}).get("ended")}
        self._wanted = self.parts[0]
        with what_processes_need() if self._watch is not None else nullcontext():
            self._replies = iter(self._loader)

    def __iter__(self) -> Iterator[Request]:
        """What the DataLoader shall fetch next."""
        while live := [part for part in self.parts if part not in self._ended]:
            part = min(live, key=lambda p: (len(self._buffers[p]) + self._on_their_way[p], p != self._wanted))
            self._on_their_way[part] += 1
            yield Request(self._run, self._epoch, part, self._resume.pop(part, None))

    def next_of(self, part: int) -> tuple[list[tuple[int, int, Any]], dict[str, Any]] | None:
        """The part's next micro-batch and its progress then; None when it has ended."""
        self._wanted = part
        while not self._buffers[part]:
            if part in self._ended:
                return None
            self._receive()
        batches, progress = self._buffers[part].popleft()
        return batches, progress

    def _receive(self) -> None:
        assert self._replies is not None
        try:
            reply = next(self._replies)
        except RuntimeError as error:
            if self._watch is None:
                raise
            raise self._watch.explained(error, getattr(self._replies, "_workers", ())) from error
        if isinstance(reply, Failure):
            raise DataError(reply.text)
        run, part, batches, progress = reply
        if run != self._run:
            return
        self._on_their_way[part] -= 1
        if batches:
            self._buffers[part].append((batches, progress))
        if not batches or progress["ended"]:
            self._ended.add(part)

    def close(self) -> None:
        shutdown = getattr(self._replies, "_shutdown_workers", None)
        self._replies = None
        if shutdown is not None:
            shutdown()
        if self._watch is not None:
            self._watch.close()


def _as_it_is(batch: Any) -> Any:
    return batch
