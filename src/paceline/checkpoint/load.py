"""Loading: any worker reads what it needs from a checkpoint of any number of workers, and checks every byte it reads.

checkpoint = Checkpoint.open(folder)          manifest read, seal and sizes checked
checkpoint.tree["models"][0]["weight"]        a StoredTensor: nothing is read yet
.whole(), .part(0, 4096)                      its ranges, from whichever files, as one tensor
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from paceline.checkpoint.manifest import MANIFEST, Manifest, Range, StoredShape, read_manifest
from paceline.checkpoint.tensor_file import DTYPES, TensorFile, file_checksum
from paceline.checkpoint.tree import unflatten
from paceline.errors import CheckpointError
from paceline.input_file import cause_of, one_line


class RangeSource(Protocol):
    """What has the bytes of stored tensors: a checkpoint's files, or workers' in-memory checkpoints."""

    def read(self, where: Range, start: int, stop: int) -> Tensor:
        """Elements [start, stop) of the tensor, which lie in the range; one dimension, and nobody else's memory."""
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

    def whole(self) -> Tensor:
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


def whole_tree(tree: Any) -> Any:
    """The same tree with its tensors read."""
    if isinstance(tree, StoredTensor):
        return tree.whole()
    if isinstance(tree, dict):
        return {key: whole_tree(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(whole_tree(value) for value in tree)
    return tree
