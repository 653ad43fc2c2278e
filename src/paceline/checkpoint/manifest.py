"""The manifest: what a checkpoint holds, which range of which tensor is in which file, and every checksum.

    checkpoint-40/
      worker-00000-of-00002.safetensors     ranges of tensors, as each worker had them
      worker-00001-of-00002.safetensors
      manifest.json                         the tree of states, the table of tensors, the table of files
      COMPLETE                              the checksum of the manifest; written last

Every worker describes its own file (`worker-00001-of-00002.json`); the main worker merges what they say and checks that
every element of every tensor is there once. So workers need no messages to save but what they write to the disk.
"""

from __future__ import annotations

import builtins
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from paceline.errors import CheckpointError
from paceline.input_file import LARGEST, cause_of, one_line, parse_json, read_input

FORMAT = 2
LONGEST_COMPLETE = 4096
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
    def parse(cls, folder: Path, text: builtins.bytes) -> Manifest:
        try:
            return _checked(folder, parse_json(text))
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise CheckpointError(f"{folder}/{MANIFEST} can't be understood: {cause_of(error)}") from error


def _checked(folder: Path, raw: Any) -> Manifest:
    """The manifest in a JSON text that may say anything: later readers rely on types, names and sizes."""
    _table(raw, "it")
    if type(raw["format"]) is int and raw["format"] != FORMAT:
        newer = " It was written by a newer paceline: update this one." if raw["format"] > FORMAT else ""
        raise CheckpointError(f"{folder} has format {raw['format']}; this version reads format {FORMAT}.{newer}")
    _number(raw["format"], "its format")
    about = _table(raw["about"], "about")
    _number(about["step"], "its step")
    score = about.get("score")
    if not (score is None or isinstance(score, int | float)):
        raise ValueError(f"its score is {score!r}")
    manifest = Manifest(
        _text(raw["checksum"], "its kind of checksum"),
        about,
        _table(raw["tree"], "its tree"),
        {path: _stored(path, row) for path, row in _table(raw["tensors"], "the table of tensors").items()},
        {name: _file(name, row) for name, row in _table(raw["files"], "the table of files").items()},
    )
    for path, stored in manifest.tensors.items():
        if any(r.file not in manifest.files for r in stored.ranges):
            raise ValueError(f"{path!r} lies in a file that is not in its table")
        if (gap := stored.gap()) is not None:
            raise ValueError(f"{path!r} lacks the elements from {min(gap):,} to {max(gap):,}, or has them twice")
    return manifest


def _stored(path: str, row: Any) -> StoredShape:
    about, shape = _table(row, f"the row of {path!r}"), row["shape"]
    if not isinstance(shape, list) or not isinstance(row["ranges"], list):
        raise ValueError(f"{path!r} has no list of sizes, or of ranges")
    sizes = tuple(_number(size, f"a size of {path!r}") for size in shape)
    return StoredShape(_text(about["dtype"], f"the type of {path!r}"), sizes, tuple(map(_range, row["ranges"])))


def _range(row: Any) -> Range:
    about = _table(row, "a range")
    start, stop = (_number(about[name], f"the {name} of a range") for name in ("start", "stop"))
    return Range(start, stop, *(_text(about[name], f"the {name} of a range") for name in ("file", "name", "checksum")))


def _file(name: str, row: Any) -> StoredFile:
    if Path(name).name != name or name != one_line(name):
        raise ValueError(f"{name!r} is not the name of a file of a checkpoint")
    about = _table(row, f"the row of {name}")
    return StoredFile(_number(about["bytes"], f"the size of {name}"), _text(about["checksum"], f"that of {name}"))


def _table(value: Any, what: str) -> dict[str, Any]:
    return _of(dict, value, what)  # type: ignore[no-any-return]


def _text(value: Any, what: str) -> str:
    return _of(str, value, what)  # type: ignore[no-any-return]


def _number(value: Any, what: str) -> int:
    if _of(int, value, what) < 0:
        raise ValueError(f"{what} is {value}")
    return value  # type: ignore[no-any-return]


def _of(kind: type, value: Any, what: str) -> Any:
    if type(value) is not kind:  # True is an int to Python, and none here
        words = {dict: "an object", str: "a text", int: "a whole number"}
        raise ValueError(f"{what} is {value!r:.40}, and not {words[kind]}")
    return value


def complete_text(manifest: bytes) -> bytes:
    """What COMPLETE holds."""
    return f"sha256:{hashlib.sha256(manifest).hexdigest()}\n".encode()


def read_complete(folder: Path) -> bytes:
    """What the COMPLETE of a checkpoint holds."""
    return _read(folder, COMPLETE, LONGEST_COMPLETE)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a complete checkpoint."""
    complete, text = read_complete(folder), _read(folder, MANIFEST)
    if complete != complete_text(text):
        raise CheckpointError(f"{folder} is damaged: {MANIFEST} does not have the checksum that {COMPLETE} says")
    return Manifest.parse(folder, text)


def _read(folder: Path, name: str, most: int = LARGEST) -> bytes:
    try:
        return read_input(folder / name, most)
    except FileNotFoundError as error:
        there = folder.is_dir()
        why = f"{name} is missing" + (": it was not written to its end" if there else "")
        raise CheckpointError(f"there is no checkpoint in {folder} ({why})") from error
    except OSError as error:
        raise CheckpointError(f"{folder}/{name} can't be read: {cause_of(error)}") from error


def merge(kind: str, about: dict[str, Any], parts: Iterable[Mapping[str, Any]]) -> Manifest:
    """One manifest from what all workers say about their parts, in rank order; the first worker speaks first."""
    tree: Any = {}
    rows: dict[str, tuple[str, tuple[int, ...], list[Range]]] = {}
    files: dict[str, StoredFile] = {}
    for worker, part in enumerate(parts):
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
                f"{'by no worker' if gap[0] < gap[1] else 'twice'}: not all of it was updated yet, or workers differ"
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
