"""Loading: any worker reads what it needs from a checkpoint of any number of workers, and checks every byte it reads.

checkpoint = Checkpoint.open(folder)          manifest read, its checksum and sizes checked
checkpoint.tree["models"][0]["weight"]        a StoredTensor: nothing is read yet
.full_tensor(), .part(0, 4096)                its ranges, from whichever files, as one tensor
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from paceline.checkpoint.manifest import MANIFEST, Manifest, Range, StoredShape, read_manifest
from paceline.checkpoint.tensor_file import DTYPES, TensorFile, as_bytes, file_checksum
from paceline.checkpoint.tree import unflatten
from paceline.errors import CheckpointError
from paceline.input_file import cause_of, one_line


class RangeSource(Protocol):
    """What has the bytes of stored tensors: a checkpoint's files, or workers' in-memory checkpoints."""

    def read(self, where: Range, start: int, stop: int) -> Tensor:
        """Elements [start, stop) of the tensor, which lie in the range; one dimension, in memory of its own."""
        ...


@dataclass(frozen=True)
class StoredTensor:
    """A tensor that is not read yet."""

    source: RangeSource
    path: str
    stored: StoredShape

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self.stored.shape)

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.stored.dtype]

    def full_tensor(self) -> Tensor:
        return self.part(0, self.stored.elements).view(self.shape)

    def part(self, start: int, stop: int) -> Tensor:
        """Elements [start, stop) in logical order."""
        wanted = [r for r in self.stored.ranges if r.start < stop and start < r.stop]
        if len(wanted) == 1:
            return self.source.read(wanted[0], start, stop)
        flat = torch.empty(stop - start, dtype=self.dtype)
        for r in wanted:
            low, high = max(start, r.start), min(stop, r.stop)
            flat[low - start : high - start] = self.source.read(r, low, high)
        return flat


@dataclass(frozen=True)
class Checkpoint:
    """A complete one, opened."""

    folder: Path
    manifest: Manifest

    @classmethod
    def open(cls, folder: Path) -> Checkpoint:
        """Raises if it is not complete, not readable, or a file of it has another size than was written."""
        found = cls(folder, read_manifest(folder))
        found.check_types()
        for name, file in found.manifest.files.items():
            path = folder / name
            size = path.stat().st_size if path.is_file() else None
            if size != file.bytes:
                got = "is missing" if size is None else f"has {size:,} bytes instead of {file.bytes:,}"
                raise CheckpointError(f"{folder} is damaged: {name} {got}")
        return found

    def check_types(self) -> None:
        """That the types of the tensors are known and that files have room for them."""
        room = {name: file.bytes for name, file in self.manifest.files.items()}
        for path, stored in self.manifest.tensors.items():
            if stored.dtype not in DTYPES:
                raise CheckpointError(
                    f"{self.folder}/{MANIFEST}: {path!r} is of a type {stored.dtype!r:.20} unknown here"
                )
            size = DTYPES[stored.dtype].itemsize
            if any((r.stop - r.start) * size > room[r.file] for r in stored.ranges):
                raise CheckpointError(f"{self.folder}/{MANIFEST}: {path!r} is larger than the file that holds it")

    @property
    def step(self) -> int:
        return int(self.manifest.about["step"])

    @cached_property
    def tree(self) -> dict[str, Any]:
        """The tree of states, with a StoredTensor for each tensor."""
        stored = {path: StoredTensor(self, path, about) for path, about in self.manifest.tensors.items()}
        try:
            tree = unflatten(self.manifest.tree, stored)
            if not isinstance(tree, dict):
                raise ValueError(f"it is a {type(tree).__name__}")
        except (KeyError, TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise CheckpointError(
                f"the tree in {self.folder}/{MANIFEST} can't be understood: {cause_of(error)}"
            ) from error
        return tree

    def read(self, where: Range, start: int, stop: int) -> Tensor:
        """Some of a range, which is read and checked whole."""
        whole = self._opened(where.file).read(where.name, (self.manifest.checksum, where.checksum))
        return whole[start - where.start : stop - where.start]

    def _opened(self, file: str) -> TensorFile:
        if file not in self._files:
            self._files[file] = TensorFile.open(self.folder / file)
        return self._files[file]

    @cached_property
    def _files(self) -> dict[str, TensorFile]:
        return {}

    def verify(self, files: list[str] | None = None) -> list[str]:
        """Read every byte (of some files, by name): what is wrong, one line for each damaged tensor and file."""
        wrong = []
        for name in self.manifest.files if files is None else files:
            wrong += self._wrong_in(name)
        return wrong

    def _wrong_in(self, name: str) -> list[str]:
        kind, wrong = self.manifest.checksum, []
        expected = {
            r.name: (r, stored.dtype)
            for stored in self.manifest.tensors.values()
            for r in stored.ranges
            if r.file == name
        }
        try:
            file = TensorFile.open(self.folder / name)
            header = file_checksum(kind, file.header, [expected[key][0].checksum for key in file.names()])
        except KeyError as error:
            return [f"{name}: its header is damaged: it has {one_line(str(error))}, which {MANIFEST} does not name"]
        except CheckpointError as error:
            return [str(error)]
        if header != self.manifest.files[name].checksum:
            return [f"{name}: its header does not have its checksum"]
        for key, (where, dtype) in expected.items():
            try:
                read = file.read(key, (kind, where.checksum))
                if (read.numel(), read.dtype) != (where.stop - where.start, DTYPES[dtype]):
                    wrong.append(
                        f"{name}: {key!r} has {read.numel():,} elements of {read.dtype}, not what {MANIFEST} says"
                    )
            except CheckpointError as error:
                wrong.append(str(error))
        return wrong


def full_tree(tree: Any) -> Any:
    """The same tree with its tensors read."""
    if isinstance(tree, StoredTensor):
        return tree.full_tensor()
    if isinstance(tree, dict):
        return {key: full_tree(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(full_tree(value) for value in tree)
    return tree


def differences(first: Any, second: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """In what two trees differ: values by path, tensors by their bits.

    /job/lanes                  4 → 2
    /models/0/embed.weight      3 of 81,920 elements differ, by up to 1.2e-07
    /models/0/bias              only in the first
    """
    first = first.full_tensor() if isinstance(first, StoredTensor) else first
    second = second.full_tensor() if isinstance(second, StoredTensor) else second
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        yield from _differences_of_tensors(first, second, path)
    elif isinstance(first, dict) and isinstance(second, dict):
        for key in [*first, *(key for key in second if key not in first)]:
            where = f"{path}/{key}"
            if key not in second or key not in first:
                yield where, f"only in the {'first' if key in first else 'second'}"
            else:
                yield from differences(first[key], second[key], where)
    elif isinstance(first, list | tuple) and isinstance(second, list | tuple) and len(first) == len(second):
        for place, (mine, theirs) in enumerate(zip(first, second, strict=True)):
            yield from differences(mine, theirs, f"{path}/{place}")
    elif repr(first) != repr(second):  # nan is nan here
        yield path, f"{_short(first)} → {_short(second)}"


def _differences_of_tensors(first: Tensor, second: Tensor, path: str) -> Iterator[tuple[str, str]]:
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        yield path, f"{first.dtype} {tuple(first.shape)} → {second.dtype} {tuple(second.shape)}"
    elif as_bytes(first) != as_bytes(second):
        size = first.element_size()
        bits = [torch.frombuffer(bytearray(as_bytes(t)), dtype=torch.uint8).view(-1, size) for t in (first, second)]
        count = int((bits[0] != bits[1]).any(dim=1).sum())
        apart = (first.double() - second.double()).abs().max().item() if not first.is_complex() else float("nan")
        yield path, f"{count:,} of {first.numel():,} elements differ, by up to {apart:.3g}"


def _short(value: Any) -> str:
    text = f"{type(value).__name__} {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
