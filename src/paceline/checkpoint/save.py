"""Saving: each worker writes the ranges of tensors that it has, and the main one publishes all of them together.

    tree of states ──portion_of──► this worker's ranges ──write_portion──► worker-k.safetensors, worker-k.json
                                                         ──complete──────► manifest.json, COMPLETE, the final name

What every worker has whole (weights under ddp) is cut into as many parts as there are workers; what is in slices is
written where it is. `Portion.copied` is the snapshot of an asynchronous save: after it the training may go on.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoint.disk import make_folder, publish, rename, write_file
from paceline.checkpoint.load import Checkpoint
from paceline.checkpoint.manifest import COMPLETE, MANIFEST, complete_text, merge
from paceline.checkpoint.tensor_file import code_of, write_tensors
from paceline.checkpoint.tree import flatten
from paceline.collectives.shared_memory.kernels import choose_kernels
from paceline.errors import CheckpointError
from paceline.input_file import read_json
from paceline.sharding.flat_layout import FlatLayout, part_of
from paceline.sharding.local_shard import LocalShard

Beside = Callable[[Checkpoint], None]
LOOK_EVERY_S = 0.005
STUCK_S = 120.0  # without a new byte of any worker: some may be gone
_ALIGN = 64


@dataclass(frozen=True)
class PartOfTensor:
    path: str
    start: int
    values: Tensor

    @property
    def name(self) -> str:
        return f"{self.path}[{self.start}:{self.start + self.values.numel()}]"


@dataclass(frozen=True)
class Portion:
    """What one worker writes: the tree as far as it knows it, and ranges of its tensors."""

    worker: int
    workers: int
    tree: Any
    shapes: dict[str, tuple[torch.dtype, tuple[int, ...]]]
    parts: tuple[PartOfTensor, ...]

    @property
    def bytes(self) -> int:
        return sum(part.values.numel() * part.values.element_size() for part in self.parts)

    @property
    def file(self) -> str:
        return f"worker-{self.worker:05}-of-{self.workers:05}"

    def copied(self, buffer: SnapshotBuffer) -> Portion:
        """The same with its tensors as they are now."""
        return Portion(self.worker, self.workers, self.tree, self.shapes, tuple(buffer.filled(self.parts)))


class SnapshotBuffer:
    """Memory on the host for one snapshot, used again by every save: new pages would cost more than the copies.

    The training waits for the copies, so all threads of the worker share them, and write past the caches: 1.2 GB took
    60 ms so, and 104 ms with torch's copies of one tensor after another.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._kernels = choose_kernels()

    def filled(self, parts: tuple[PartOfTensor, ...]) -> Iterator[PartOfTensor]:
        sizes = [part.values.numel() * part.values.element_size() for part in parts]
        needed = sum(-(-size // _ALIGN) * _ALIGN for size in sizes)
        devices = {part.values.device for part in parts if part.values.device.type != "cpu"}
        if self._memory.numel() < needed:
            self._memory = torch.empty(needed, dtype=torch.uint8, pin_memory=bool(devices))
        start, targets = 0, []
        for part, size in zip(parts, sizes, strict=True):
            targets.append(self._memory[start : start + size].view(part.values.dtype))
            start += -(-size // _ALIGN) * _ALIGN
        pairs = [(target, part.values) for target, part in zip(targets, parts, strict=True)]
        plain = [pair for pair in pairs if pair[1].device.type == "cpu" and pair[1].is_contiguous()]
        for target, values in pairs:
            if values.device.type != "cpu" or not values.is_contiguous():
                target.copy_(values, non_blocking=True)
        threads = torch.get_num_threads()
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(self._copy, _shares(plain, threads)))
        for device in devices:
            torch.accelerator.synchronize(device)
        return (PartOfTensor(p.path, p.start, copy) for p, copy in zip(parts, targets, strict=True))

    def _copy(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        for target, values in pairs:
            self._kernels.copy(target, values, past_caches=True)


def _shares(pairs: Sequence[tuple[Tensor, Tensor]], count: int) -> list[list[tuple[Tensor, Tensor]]]:
    """As many lists of about the same number of bytes; a large tensor is cut."""
    everything = sum(target.nbytes for target, _ in pairs)
    each = -(-everything // count) or 1
    shares: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(count)]
    done = 0
    for target, values in pairs:
        place = 0
        while place < target.numel():
            share = min(done // each, count - 1)
            fits = max(1, ((share + 1) * each - done) // target.element_size())
            stop = min(target.numel(), place + fits)
            shares[share].append((target[place:stop], values[place:stop]))
            done += (stop - place) * target.element_size()
            place = stop
    return shares


def portion_of(tree: dict[str, Any], worker: int, workers: int) -> Portion:
    """The part of a tree that this worker writes; its tensors are not copied."""
    encoded, leaves = flatten(tree)
    shapes: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    parts: list[PartOfTensor] = []
    whole = {path: leaf for path, leaf in leaves.items() if isinstance(leaf, Tensor)}
    layout = FlatLayout.of(sorted(whole.items()))
    mine = layout.cut(workers)[worker].pieces if whole else ()
    for piece in mine:
        path = layout.names[piece.parameter]
        parts.append(PartOfTensor(path, piece.start, part_of(whole[path], piece).view(-1)))
    for path, leaf in leaves.items():
        shapes[path] = leaf.dtype, tuple(leaf.shape)
        if isinstance(leaf, LocalShard):
            parts.extend(PartOfTensor(path, start, values) for start, values in leaf.parts)
    return Portion(worker, workers, encoded, shapes, tuple(parts))


def write_portion(partial: Path, portion: Portion, checksum: str) -> None:
    """The worker's own file, and what is in it; the latter appears when all of it is on the disk."""
    make_folder(partial)
    file = write_tensors(
        partial / f"{portion.file}.safetensors", [(part.name, part.values) for part in portion.parts], checksum
    )
    tensors: dict[str, dict[str, Any]] = {
        path: {"dtype": code_of(dtype, path), "shape": shape, "ranges": []}
        for path, (dtype, shape) in portion.shapes.items()
    }
    for part, digest in zip(portion.parts, file.tensors, strict=True):
        stop = part.start + part.values.numel()
        row = {"start": part.start, "stop": stop, "file": file.name, "name": part.name, "checksum": digest}
        tensors[part.path]["ranges"].append(row)
    about = {"name": file.name, "bytes": file.bytes, "checksum": file.checksum}
    text = json.dumps({"tree": portion.tree, "tensors": tensors, "file": about})
    hidden = partial / f".{portion.file}.json"
    write_file(hidden, [text.encode()])
    rename(hidden, partial / f"{portion.file}.json")


def give_up(partial: Path, portion: Portion, reason: str) -> None:
    """Tell the main worker, as far as the disk allows it, that this portion won't come."""
    try:
        make_folder(partial / f"{portion.file}.failed: {reason[:120].replace('/', ' ')}")
    except OSError:
        return


def complete(
    partial: Path,
    folder: Path,
    workers: int,
    about: dict[str, Any],
    checksum: str,
    timeout_s: float,
    beside: Beside | None = None,
) -> None:
    """The main worker's last act: wait for all portions, describe them together, publish.

    `beside` may write more files, such as others' formats of what the portions hold.
    """
    parts = [read_json(path) for path in _all_there(partial, workers, timeout_s)]
    manifest = merge(checksum, about, parts)
    text = manifest.text().encode()
    for path in partial.glob("worker-*.json"):
        path.unlink()
    write_file(partial / MANIFEST, [text])
    if beside is not None:
        beside(Checkpoint(partial, manifest))
    write_file(partial / COMPLETE, [complete_text(text)])
    publish(partial, folder)


def _all_there(partial: Path, workers: int, timeout_s: float) -> list[Path]:
    patience_s = min(timeout_s, STUCK_S)
    size = -1
    wanted = [partial / f"worker-{worker:05}-of-{workers:05}.json" for worker in range(workers)]
    deadline = time.monotonic() + patience_s
    while True:
        missing = [path for path in wanted if not path.exists()]
        if not missing:
            return wanted
        for path in partial.glob("worker-*.failed*"):
            worker, _, reason = path.name.partition(".failed: ")
            raise CheckpointError(f"{worker.replace('-', ' ', 1)} could not write its part: {reason}")
        if (grown := _size(partial)) != size:
            size, deadline = grown, time.monotonic() + patience_s
        if time.monotonic() > deadline:
            raise CheckpointError(
                f"{len(missing)} of {workers} workers have not written their parts to {partial.parent}, the first is "
                f"{missing[0].stem}, and nothing has come for {patience_s:g} s; the folder must be one that all hosts "
                "share"
            )
        time.sleep(LOOK_EVERY_S)


def _size(folder: Path) -> int:
    sizes = [0]
    for path in folder.glob("worker-*"):
        with contextlib.suppress(FileNotFoundError):
            sizes.append(path.stat().st_size)
    return sum(sizes)


class AsyncWriter:
    """A save in the background: the training goes on while a thread writes what it was given, one save at a time.

    training   ── snapshot ── step ── step ── step ── step ──
    writer                └── write ── flush ── publish ──┘
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._failure: str | None = None

    @property
    def busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def start(self, work: Callable[[], None]) -> None:
        """Only when it is not busy."""
        assert not self.busy, "one save at a time"

        def run() -> None:
            try:
                work()
            except CheckpointError as error:
                self._failure = str(error)
            except Exception as error:
                self._failure = f"{type(error).__name__}: {error}"

        self._thread = threading.Thread(target=run, name="paceline checkpoint", daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float) -> None:
        """Until it is done, or so long; then it is still `busy`."""
        if self._thread is not None:
            self._thread.join(timeout_s)

    @property
    def has_failed(self) -> bool:
        return self._failure is not None

    def take_failure(self) -> str | None:
        """What went wrong since the last call."""
        failure, self._failure = self._failure, None
        return failure
