"""The manifest: what a checkpoint holds, which range of which tensor is in which file, and every checksum.

    checkpoint-40/
      worker-00000-of-00002.safetensors     ranges of tensors, as each worker had them
      worker-00001-of-00002.safetensors
      manifest.json                         the tree of states, the table of tensors, the table of files
      COMPLETE                              the checksum of the manifest; written last

Every worker describes its own file (`worker-00001-of-00002.json`); the main worker merges what they say and checks that
every element of every tensor is there once. So saving needs no words between workers but those on the disk.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from paceline.errors import CheckpointError

FORMAT = 2
MANIFEST, COMPLETE = "manifest.json", "COMPLETE"


@dataclass(frozen=True)
class Range:
    """Elements [start, stop) of a tensor, in a file under a name."""

    start: int
    stop: int
    file: str
    name: str
    checksum: str


@dataclass(frozen=True)
class StoredShape:
    """A tensor of the tree: its dtype (safetensors' word for it), its shape, and where its elements are, in order."""

    dtype: str
    shape: tuple[int, ...]
    ranges: tuple[Range, ...]

    @property
    def elements(self) -> int:
        return prod(self.shape)

    def gap(self) -> tuple[int, int] | None:
        """The first elements that are nowhere, or in two places."""
        ends = [0, *(stop for r in self.ranges for stop in (r.start, r.stop)), self.elements]
        places = [(ends[at], ends[at + 1]) for at in range(0, len(ends), 2)]
        return next(((low, high) for low, high in places if low != high), None)


@dataclass(frozen=True)
class StoredFile:
    bytes: int
    checksum: str


@dataclass(frozen=True)
class Manifest:
    checksum: str  # which kind
    about: dict[str, Any]
    tree: Any
    tensors: dict[str, StoredShape]
    files: dict[str, StoredFile]
    format: int = field(default=FORMAT)

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files.values())

    def text(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def parse(cls, folder: Path, text: str) -> Manifest:
        try:
            raw = json.loads(text)
            if raw["format"] != FORMAT:
                newer = " It was written by a newer paceline: update this one." if raw["format"] > FORMAT else ""
                raise CheckpointError(
                    f"{folder} has format {raw['format']}; this version reads format {FORMAT}.{newer}"
                )
            return cls(
                raw["checksum"],
                raw["about"],
                raw["tree"],
                {path: _stored(row) for path, row in raw["tensors"].items()},
                {name: StoredFile(**row) for name, row in raw["files"].items()},
            )
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{folder}/{MANIFEST} can't be understood: {type(error).__name__}: {error}"
            ) from error


def _stored(row: Mapping[str, Any]) -> StoredShape:
    return StoredShape(row["dtype"], tuple(row["shape"]), tuple(Range(**r) for r in row["ranges"]))


def seal_of(manifest: bytes) -> bytes:
    """What COMPLETE holds."""
    return f"sha256:{hashlib.sha256(manifest).hexdigest()}\n".encode()


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a complete checkpoint."""
    try:
        seal = (folder / COMPLETE).read_bytes()
        text = (folder / MANIFEST).read_bytes()
    except FileNotFoundError as error:
        there = folder.is_dir()
        why = f"{Path(error.filename).name} is missing" + (": it was not written to its end" if there else "")
        raise CheckpointError(f"there is no checkpoint in {folder} ({why})") from error
    except OSError as error:
        raise CheckpointError(f"{folder} can't be read: {error.strerror}") from error
    if seal != seal_of(text):
        raise CheckpointError(f"{folder} is damaged: {MANIFEST} does not have the checksum that {COMPLETE} says")
    return Manifest.parse(folder, text.decode())


def merge(kind: str, about: dict[str, Any], told: Iterable[Mapping[str, Any]]) -> Manifest:
    """One manifest from what all workers say about their parts, in rank order; the first worker speaks first."""
    tree: Any = {}
    rows: dict[str, tuple[str, tuple[int, ...], list[Range]]] = {}
    files: dict[str, StoredFile] = {}
    for worker, part in enumerate(told):
        tree = _merged(tree, part["tree"], worker, "")
        files[part["file"]["name"]] = StoredFile(part["file"]["bytes"], part["file"]["checksum"])
        for path, row in part["tensors"].items():
            dtype, shape = row["dtype"], tuple(row["shape"])
            known = rows.setdefault(path, (dtype, shape, []))
            if known[:2] != (dtype, shape):
                raise CheckpointError(
                    f"worker {worker} has {path} as {dtype} {shape}, a worker before it as {known[0]} {known[1]}"
                )
            known[2].extend(Range(**r) for r in row["ranges"])
    tensors = {
        path: StoredShape(dtype, shape, tuple(sorted(ranges, key=lambda r: r.start)))
        for path, (dtype, shape, ranges) in rows.items()
    }
    for path, stored in tensors.items():
        if (gap := stored.gap()) is not None:
            raise CheckpointError(
                f"{path} has {stored.elements:,} elements, but those from {min(gap):,} to {max(gap):,} were saved "
                f"{'by nobody' if gap[0] < gap[1] else 'twice'}: not all of it was updated yet, or workers differ"
            )
    return Manifest(kind, about, tree, tensors, files)


def _merged(first: Any, other: Any, worker: int, path: str) -> Any:
    """Two trees, each of which may have what the other has not; where both have something it is the same."""
    if isinstance(first, dict) and isinstance(other, dict):
        if first.keys() & {"$tensor", "$small", "$float"} and first != other:
            raise CheckpointError(f"worker {worker} has another value of {path} than the workers before it")
        both = {key: _merged(first[key], other[key], worker, f"{path}/{key}") for key in first if key in other}
        return {**first, **other, **both}
    if isinstance(first, list) and isinstance(other, list) and len(first) == len(other):
        pairs = enumerate(zip(first, other, strict=True))
        return [_merged(mine, theirs, worker, f"{path}/{place}") for place, (mine, theirs) in pairs]
    if first != other:
        raise CheckpointError(f"worker {worker} has {path} as {other!r}, a worker before it as {first!r}")
    return first


def size_text(count: int) -> str:
    for unit, name in ((2**30, "GiB"), (2**20, "MiB")):
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count / 2**10:.1f} KiB"
