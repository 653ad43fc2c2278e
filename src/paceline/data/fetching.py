"""Fetching one work item: its samples, each under its own random state, then the collate function.

    (seed, epoch, position) ──► random, numpy, torch ──► dataset[id]      the same values wherever the sample is fetched

This runs in the worker itself or in a loader process. Before each sample a loader process writes the sample's number
into a slot of shared memory, and its crashes into a file: when it dies the worker reads both, so the report says which
sample it was at and where in the code.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import random
import shutil
import signal
import sys
import tempfile
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from paceline.data.sharded_sampler import WorkItem
from paceline.errors import DataError
from paceline.world.determinism import mix, seed_everything

_PR_SET_PDEATHSIG = 1
_NOWHERE = -1
_PROBE = 20_240_229  # any seed: it only has to be the same before and after


class Failure:
    """What a loader process hands over instead of a batch: torch would wrap a raised error in its own words."""

    def __init__(self, text: str) -> None:
        self.text = text


class ItemDataset(Dataset[Any]):
    """`dataset[item]` is the collated micro-batch of a work item."""

    def __init__(
        self, dataset: Dataset[Any], collate: Callable[[list[Any]], Any], seed: int, slots: torch.Tensor | None = None
    ) -> None:
        self._dataset, self._collate, self._seed, self._slots = dataset, collate, seed, slots
        self._draws = False
        self._undrawn: tuple[float, ...] = ()
        self._epoch: int | None = None

    def __getitem__(self, item: WorkItem) -> Any:
        try:
            return self._item(item)
        except DataError as error:
            if torch.utils.data.get_worker_info() is None:
                raise
            return Failure(str(error))

    def _item(self, item: WorkItem) -> Any:
        self._enter(item.epoch)
        samples = None if self._draws else self._fetched_without_drawing(item)
        if samples is None:
            self._draws = True
            samples = [self._drawn_and_fetched(item, place) for place in range(item.samples)]
        seed_everything(mix(self._seed, "collate", item.epoch, item.position))
        with named(f"collate_fn failed on the samples {_few(item.sample_ids)}"):
            return self._collate(samples)

    def _fetched_without_drawing(self, item: WorkItem) -> list[Any] | None:
        """The samples, or None if fetching one of them drew a random number.

        Seeding costs more than fetching from a simple dataset does, so it is left out where nobody would see it.
        """
        if len(self._undrawn) != 2 + ("numpy" in sys.modules):
            seed_everything(_PROBE)
            self._undrawn = _next_numbers()
        seed_everything(_PROBE)
        samples = self._fetch(item.sample_ids)
        return samples if _next_numbers() == self._undrawn else None

    def _drawn_and_fetched(self, item: WorkItem, place: int) -> Any:
        seed_everything(mix(self._seed, "sample", item.epoch, item.position + place))
        return self._fetch(item.sample_ids[place : place + 1])[0]

    def _fetch(self, ids: Sequence[int]) -> list[Any]:
        fetch_many = getattr(self._dataset, "__getitems__", None)
        if fetch_many is not None:
            self._at(ids[0])
            with named(f"the dataset failed on the samples {_few(ids)}"):
                return list(fetch_many(list(ids)))
        samples = []
        for sample in ids:
            self._at(sample)
            with named(f"the dataset failed on sample {sample}"):
                samples.append(self._dataset[sample])
        return samples

    def _at(self, sample: int) -> None:
        if self._slots is not None:
            info = torch.utils.data.get_worker_info()
            if info is not None:
                self._slots[info.id] = sample

    def _enter(self, epoch: int) -> None:
        """A dataset that wants to know its epoch is told; nobody calls set_epoch."""
        if epoch != self._epoch:
            self._epoch = epoch
            set_epoch = getattr(self._dataset, "set_epoch", None)
            if set_epoch is not None:
                set_epoch(epoch)


class LoaderWatch:
    """What is known of loader processes that may die: the sample each is at, and the stack of one that crashed."""

    def __init__(self, processes: int) -> None:
        self.slots = torch.full((processes,), _NOWHERE, dtype=torch.int64)
        self.slots.share_memory_()  # type: ignore[no-untyped-call]
        self._folder = Path(tempfile.mkdtemp(prefix="paceline-loader-"))
        self.close = weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)

    def started(self, then: Callable[[int], None] | None) -> _ProcessStart:
        return _ProcessStart(self._folder, then)

    def explained(self, error: RuntimeError, processes: Sequence[Any]) -> Exception:
        """What torch's DataLoader raised, told with who died at which sample and how, or who is slow."""
        if dead := self.obituaries(processes):
            return DataError(dead)
        if "timed out" in str(error):
            places = ", ".join(f"process {n} is {self._place(n)}" for n in range(len(processes)))
            return DataError(f"the loader processes gave no batch in time ({error}); {places}")
        return error

    def obituaries(self, processes: Sequence[Any]) -> str:
        """A paragraph for each process that has died; empty while all live."""
        return "\n".join(self._obituary(n, p) for n, p in enumerate(processes) if p.exitcode is not None)

    def _place(self, number: int) -> str:
        sample = int(self.slots[number])
        return "before its first sample" if sample == _NOWHERE else f"at sample {sample}"

    def _obituary(self, number: int, process: Any) -> str:
        text = f"loader process {number} (pid {process.pid}) died {self._place(number)}: {_death(process.exitcode)}"
        stack = self._folder / f"crash-{process.pid}.txt"
        if stack.exists() and stack.stat().st_size:
            text += "\n" + stack.read_text(errors="replace").rstrip()
        return text


class _ProcessStart:
    """Runs first in each loader process, which must not outlive its trainer, even by torch's five-second check."""

    def __init__(self, folder: Path, then: Callable[[int], None] | None) -> None:
        self._folder, self._then = folder, then

    def __call__(self, number: int) -> None:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        crash = (self._folder / f"crash-{os.getpid()}.txt").open("w")
        faulthandler.enable(crash)
        _open_for_life.append(crash)
        if self._then is not None:
            self._then(number)


_open_for_life: list[Any] = []  # faulthandler keeps the descriptor only, so the file object has to live


@contextmanager
def named(what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        # A traceback can't leave a loader process, so it becomes part of the text.
        raise DataError(f"{what}: {type(error).__name__}: {error}\n{traceback.format_exc().rstrip()}") from error


def samples_in(batch: Any) -> int:
    """How many samples a ready-made batch holds: the length of the first tensor found in it."""
    if isinstance(batch, torch.Tensor):
        return len(batch) if batch.dim() else 1
    if isinstance(batch, dict):
        batch = list(batch.values())
    if isinstance(batch, list | tuple) and batch:
        return samples_in(batch[0])
    return 1


def _next_numbers() -> tuple[float, ...]:
    """What each library would draw next."""
    numpy = sys.modules.get("numpy")
    drawn = (random.random(), float(torch.rand((), dtype=torch.float64)))
    return drawn if numpy is None else (*drawn, float(numpy.random.random_sample()))


def _few(ids: Sequence[int]) -> str:
    shown = ", ".join(str(sample) for sample in ids[:8])
    return f"{shown}, … ({len(ids)} in all)" if len(ids) > 8 else shown


def _death(exit_code: int) -> str:
    if exit_code >= 0:
        return f"it exited with code {exit_code}"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = f"signal {-exit_code}"
    hint = "; the system kills so when memory runs out" if name == "SIGKILL" else ""
    return f"killed by {name}{hint}"
