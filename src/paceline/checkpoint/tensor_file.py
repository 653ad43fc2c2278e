"""A file of raw tensor bytes in the safetensors format, written without a copy and checked range by range.

    8 bytes: length of the header │ header, JSON: name → dtype, shape, where │ the bytes of all tensors, no gaps

Any safetensors reader opens it. We write it ourselves because every tensor's checksum is taken on its way to the disk,
and nothing is gathered into one piece of memory before. The checksum of the file is that of its header and of its
tensors' checksums, which covers every byte without reading any twice.

    xxh3_128   26 GB/s on one core: next to nothing beside writing
    sha256     1.6 GB/s, where xxhash is not installed

A checkpoint says which one it has. Both find every flipped bit; they are no signature, and don't protect from people.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from paceline.checkpoint.disk import CHUNK, write_file
from paceline.errors import CheckpointError
from paceline.input_file import LARGEST, cause_of, open_input, parse_json

CODES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64", torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
DTYPES = {code: dtype for dtype, code in CODES.items()}


class Digest(Protocol):
    def update(self, data: Any, /) -> None: ...

    def hexdigest(self) -> str: ...


def best_checksum() -> str:
    """The name of the quickest that is installed."""
    try:
        import xxhash  # noqa: F401
    except ImportError:
        return "sha256"
    return "xxh3_128"


def new_digest(name: str) -> Digest:
    if name == "sha256":
        return hashlib.sha256()
    if name != "xxh3_128":
        raise CheckpointError(f"this checkpoint has {name!r} checksums, which this version does not know")
    try:
        import xxhash
    except ImportError as error:
        raise CheckpointError(
            "this checkpoint has checksums of xxhash, which is not installed: pip install xxhash"
        ) from error
    return xxhash.xxh3_128()


def digest_of(name: str, *pieces: Any) -> str:
    digest = new_digest(name)
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()


@dataclass(frozen=True)
class WrittenFile:
    name: str
    bytes: int
    checksum: str
    tensors: tuple[str, ...]  # the checksum of each, in the order given


def code_of(dtype: torch.dtype, name: str) -> str:
    if dtype not in CODES:
        raise CheckpointError(f"{name!r} is of {dtype}, which safetensors files don't have")
    return CODES[dtype]


def as_bytes(tensor: Tensor) -> memoryview:
    """The elements in logical order, little-endian; no copy where they lie so on the host."""
    flat = tensor.detach().cpu().contiguous().view(-1)
    return flat.view(torch.uint8).numpy().data


class LazyTensor(Protocol):
    """One that is read when it is written: then memory holds one of them at a time."""

    @property
    def shape(self) -> torch.Size: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def full_tensor(self) -> Tensor: ...


@dataclass(frozen=True)
class Later:
    """A tensor in a file of others'."""

    shape: torch.Size
    dtype: torch.dtype
    full_tensor: Callable[[], Tensor]


def write_tensors(path: Path, tensors: Sequence[tuple[str, Tensor | LazyTensor]], checksum: str) -> WrittenFile:
    """Write tensors under their names, one after another, and flush."""
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors:
        start, end = end, end + tensor.shape.numel() * tensor.dtype.itemsize
        table[name] = {
            "dtype": code_of(tensor.dtype, name),
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors start aligned
    header = len(text).to_bytes(8, "little") + text
    checksums: list[str] = []

    def chunks() -> Iterator[Any]:
        yield header
        for _, tensor in tensors:
            data = as_bytes(tensor if isinstance(tensor, Tensor) else tensor.full_tensor())
            digest = new_digest(checksum)
            chunk = data[:0]
            for start in range(0, len(data), CHUNK):
                chunk = data[start : start + CHUNK]
                digest.update(chunk)
                yield chunk
            checksums.append(digest.hexdigest())
            del data, chunk

    size = write_file(path, chunks())
    return WrittenFile(path.name, size, file_checksum(checksum, header, checksums), tuple(checksums))


def file_checksum(name: str, header: bytes, tensors: Sequence[str]) -> str:
    return digest_of(name, header, *(checksum.encode() for checksum in tensors))


@dataclass(frozen=True)
class TensorFile:
    """An opened file: its header has been read, its tensors are read when they are asked for."""

    path: Path
    header: bytes
    table: dict[str, dict[str, Any]]

    @classmethod
    def open(cls, path: Path) -> TensorFile:
        try:
            with open_input(path) as file:
                length = file.read(8)
                size = os.fstat(file.fileno()).st_size
                count = int.from_bytes(length, "little")
                if len(length) < 8 or count > min(size - 8, LARGEST):
                    raise CheckpointError(f"{path} is damaged: its header does not fit into the file")
                text = file.read(count)
            table = _table(parse_json(text), size - 8 - count)
        except FileNotFoundError as error:
            raise CheckpointError(f"{path.parent} has no {path.name}, which another file of it names") from error
        except OSError as error:
            raise CheckpointError(f"{path} can't be read: {cause_of(error)}") from error
        except (ValueError, KeyError) as error:
            raise CheckpointError(f"{path} is damaged: its header can't be understood: {cause_of(error)}") from error
        return cls(path, length + text, table)

    def names(self) -> list[str]:
        """In the order of their bytes."""
        return sorted(self.table, key=lambda name: self.table[name]["data_offsets"][0])

    def later(self, name: str) -> Later:
        """A tensor that is read when it is asked for."""
        about = self.table[name]
        shape, dtype = about.get("shape"), about.get("dtype")
        if (
            dtype not in DTYPES
            or not isinstance(shape, list)
            or any(type(size) is not int or size < 0 for size in shape)
        ):
            raise CheckpointError(f"{self.path}: {name!r} is of a type {dtype!r:.20} or shape that is unknown here")
        return Later(torch.Size(shape), DTYPES[dtype], partial(self.read, name))

    def read(self, name: str, checksum: tuple[str, str] | None = None) -> Tensor:
        """A tensor; with (kind, expected) its bytes are checked."""
        try:
            about = self.table[name]
            start, stop = about["data_offsets"]
            flat = torch.empty(stop - start, dtype=torch.uint8)
            with open_input(self.path) as file:
                file.seek(len(self.header) + start)
                room = flat.numpy().data
                while room and (got := file.readinto(room)):
                    room = room[got:]
            if room:
                raise CheckpointError(f"{self.path} is damaged: it ends before {name!r} does")
            if checksum is not None and digest_of(checksum[0], flat.numpy().data) != checksum[1]:
                raise CheckpointError(f"{self.path} is damaged: {name!r} does not have its checksum")
            return flat.view(DTYPES[about["dtype"]]).view(about["shape"])
        except (OSError, KeyError, TypeError, ValueError, RuntimeError) as error:
            raise CheckpointError(f"{self.path}: {name!r} can't be read: {cause_of(error)}") from error


def _table(header: Any, room: int) -> dict[str, dict[str, Any]]:
    """The rows of a header; those of a damaged one may be anything."""
    if not isinstance(header, dict):
        raise ValueError(f"it holds a {type(header).__name__} and not an object")
    table = {name: row for name, row in header.items() if name != "__metadata__"}
    for name, row in table.items():
        offsets = row.get("data_offsets") if isinstance(row, dict) else None
        if not isinstance(offsets, list) or [type(offset) for offset in offsets] != [int, int]:
            raise ValueError(f"{name!r} has no place in the file")
        if not 0 <= offsets[0] <= offsets[1] <= room:
            raise ValueError(f"{name!r} lies at {offsets}, and the file has {room:,} bytes for tensors")
    return table
