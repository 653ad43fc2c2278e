"""Saving: each worker writes the ranges of tensors that it has, and the main one publishes all of them together.

    tree of states ──portion_of──► this worker's ranges ──write_portion──► worker-k.safetensors, worker-k.json
                                                         ──describe──────► manifest.json, once all portions are there
                                                         ──write_model───► model-k.safetensors, if they are wanted
                                                         ──complete──────► COMPLETE, the final name

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
from paceline.checkpoint.manifest import COMPLETE, MANIFEST, Manifest, complete_text, merge
from paceline.checkpoint.tensor_file import code_of, write_tensors
from paceline.checkpoint.tree import flatten
from paceline.checkpoint.weights_file import cut, stored_weights, write_index, write_shards
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
    def bytes_of_model(self) -> int:
        """Of the first one's weights: what `write_model` writes once more."""
        mine = [part.values for part in self.parts if part.path.startswith("/models/0/")]
        return sum(values.numel() * values.element_size() for values in mine)

    @property
    def file(self) -> str:
        return _name_of(self.worker, self.workers)

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


def describe(partial: Path, workers: int, about: dict[str, Any], checksum: str, timeout_s: float) -> Checkpoint:
    """The main worker waits for all portions and describes them together; the others read it (`described`)."""
    wanted = [partial / f"{_name_of(worker, workers)}.json" for worker in range(workers)]
    _wait_for(partial, wanted, timeout_s)
    manifest = merge(checksum, about, [read_json(path) for path in wanted])
    for path in wanted:
        path.unlink()
    hidden = partial / f".{MANIFEST}"
    write_file(hidden, [manifest.text().encode()])
    rename(hidden, partial / MANIFEST)
    return Checkpoint(partial, manifest)


def described(partial: Path, timeout_s: float) -> Checkpoint:
    """What the main worker has described, on another one."""
    _wait_for(partial, [partial / MANIFEST], timeout_s)
    return Checkpoint(partial, Manifest.parse(partial, (partial / MANIFEST).read_bytes()))


def write_model(checkpoint: Checkpoint, worker: int, workers: int, timeout_s: float) -> None:
    """This worker's shards of the weights, in Hugging Face's layout; the main worker waits for all and adds the index.

    Elements that other workers have are read from their files, a tensor at a time.
    """
    folder, weights = checkpoint.folder, stored_weights(checkpoint)
    shards = cut(weights, workers)
    write_shards(folder, weights, shards[worker::workers])
    if worker > 0:
        make_folder(folder / f"{_name_of(worker, workers)}.model")
        return
    done = [folder / f"{_name_of(other, workers)}.model" for other in range(1, workers)]
    _wait_for(folder, done, timeout_s)
    for mark in done:
        mark.rmdir()
    write_index(folder, shards)


def complete(checkpoint: Checkpoint, folder: Path, beside: Beside | None = None, *, resumable: bool = True) -> None:
    """The main worker's last act. `beside` may write more files, such as others' formats of what the portions hold.

    What is not to be resumed from loses the portions: `write_model` has made of them what is left.
    """
    if beside is not None:
        beside(checkpoint)
    partial = checkpoint.folder
    if resumable:
        write_file(partial / COMPLETE, [complete_text((partial / MANIFEST).read_bytes())])
    else:
        for name in (MANIFEST, *checkpoint.manifest.files):
            (partial / name).unlink()
    publish(partial, folder)


def _name_of(worker: int, workers: int) -> str:
    return f"worker-{worker:05}-of-{workers:05}"


def _wait_for(partial: Path, wanted: Sequence[Path], timeout_s: float) -> None:
    """Until all of them are there. A worker that gives up says so in a name; one that is gone writes nothing more."""
    patience_s = min(timeout_s, STUCK_S)
    size = -1
    deadline = time.monotonic() + patience_s
    while missing := [path for path in wanted if not path.exists()]:
        for path in partial.glob("worker-*.failed*"):
            worker, _, reason = path.name.partition(".failed: ")
            raise CheckpointError(f"{worker.replace('-', ' ', 1)} could not write its part: {reason}")
        if not partial.exists():
            raise CheckpointError("the main worker has given it up")
        if (grown := _size(partial)) != size:
            size, deadline = grown, time.monotonic() + patience_s
        if time.monotonic() > deadline:
            more = f", nor are {len(missing) - 1} more" if len(missing) > 1 else ""
            raise CheckpointError(
                f"{missing[0].name} is not in {partial.parent}{more}, and nothing has come for {patience_s:g} s; "
                "the folder must be one that all hosts share"
            )
        time.sleep(LOOK_EVERY_S)


def _size(folder: Path) -> int:
    sizes = [0]
    for path in folder.glob("*"):
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
