"""The header of a token file: one page that says what follows, and can tell when it lies.

    byte  0             16        20            24                      4096
          │ magic       │ crc32   │ JSON length │ JSON, then zeros      │ token 0, token 1, …  (little-endian)

    {"version": 1, "dtype": "uint16", "tokens": 1000000, "vocabulary": 50257, "sha256": "…", "description": "…"}

The crc32 covers the whole page (with its own four bytes as zeros), the sha256 covers the tokens. Tokens begin on a page
boundary, so that they can be mapped, and take the smallest type that holds the vocabulary. No torch here: processes
that encode text import this, and should start quickly.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from paceline.errors import ConfigError, DataError
from paceline.input_file import cause_of, open_input, parse_json

HEADER_BYTES = 4096
MAGIC = b"paceline tokens\n"
VERSION = 1
LARGEST_ID = {"uint8": 2**8 - 1, "uint16": 2**16 - 1, "int32": 2**31 - 1}  # torch does little with uint32

_FIELDS = struct.Struct("<16sII")
_CRC = slice(16, 20)
BUILD_AGAIN = "build it again (TokenFile.build or `paceline data tokenize`)"


@dataclass(frozen=True)
class TokenHeader:
    """What a token file says of itself."""

    dtype: str
    tokens: int
    vocabulary: int
    sha256: str
    description: str = ""

    def __post_init__(self) -> None:
        if self.dtype not in LARGEST_ID:
            raise ConfigError(f"dtype {self.dtype!r} is not one of {', '.join(LARGEST_ID)}")
        if type(self.tokens) is not int or type(self.vocabulary) is not int:
            raise ConfigError(f"{self.tokens!r} tokens of {self.vocabulary!r} ids are no whole numbers")
        if self.tokens < 1:
            raise ConfigError("a token file holds at least one token")
        if not isinstance(self.sha256, str) or not isinstance(self.description, str):
            raise ConfigError("a checksum and a description are texts")

    @property
    def stored_as(self) -> np.dtype[Any]:
        return stored_as(self.dtype)

    @property
    def file_bytes(self) -> int:
        return HEADER_BYTES + self.tokens * self.stored_as.itemsize

    def pack(self) -> bytes:
        """The page as it stands in the file."""
        text = json.dumps({"version": VERSION} | asdict(self)).encode()
        room = HEADER_BYTES - _FIELDS.size
        if len(text) > room:
            raise ConfigError(
                f"the description is too long for a token file's header: it makes {len(text):,} bytes, and {room:,} fit"
            )
        page = bytearray(_FIELDS.pack(MAGIC, 0, len(text)) + text.ljust(room, b"\0"))
        page[_CRC] = struct.pack("<I", zlib.crc32(page))
        return bytes(page)


def dtype_for(vocabulary: int) -> str:
    """The smallest type that holds every id of the vocabulary."""
    if vocabulary < 1:
        raise ConfigError(f"vocabulary={vocabulary} has no token in it; give the number of different ids")
    for dtype, largest in LARGEST_ID.items():
        if vocabulary - 1 <= largest:
            return dtype
    raise ConfigError(f"vocabulary={vocabulary:,} is more than a token file can hold ({LARGEST_ID['int32'] + 1:,})")


def stored_as(dtype: str) -> np.dtype[Any]:
    return np.dtype(dtype).newbyteorder("<")


def begins_like_a_token_file(path: Path) -> bool:
    with open_input(path) as file:
        return file.read(len(MAGIC)) == MAGIC


def read_header(path: Path, file: BinaryIO) -> TokenHeader:
    """The header of an open file whose size is exactly what the header says; reads one page, whatever the size."""
    page = file.read(HEADER_BYTES)
    if page[: len(MAGIC)] != MAGIC:
        raise DataError(
            f"{path} is not a token file: it should begin with {MAGIC!r} but begins with {page[: len(MAGIC)]!r}; "
            "give the path of one, or build one (TokenFile.build or `paceline data tokenize`)"
        )
    if len(page) < HEADER_BYTES:
        raise DataError(f"{path} was cut short: its header has {len(page):,} of {HEADER_BYTES:,} bytes; {BUILD_AGAIN}")
    header = _parse(path, page)
    size = os.fstat(file.fileno()).st_size
    if size != header.file_bytes:
        what = "was cut short" if size < header.file_bytes else "has grown"
        raise DataError(
            f"{path} {what}: {header.tokens:,} tokens of type {header.dtype} make {header.file_bytes:,} bytes with the "
            f"header, but the file has {size:,}; {BUILD_AGAIN}"
        )
    return header


def _parse(path: Path, page: bytes) -> TokenHeader:
    _, crc, length = _FIELDS.unpack_from(page)
    blank = bytearray(page)
    blank[_CRC] = bytes(4)
    if (found := zlib.crc32(blank)) != crc:
        raise DataError(
            f"{path} has a damaged header: its crc32 is {found:08x} but {crc:08x} was recorded; {BUILD_AGAIN}"
        )
    try:
        fields = parse_json(page[_FIELDS.size : _FIELDS.size + length])
        version = fields.pop("version")
        if version != VERSION:
            raise DataError(f"it has version {version} of the format, and this paceline reads version {VERSION}")
        return TokenHeader(**fields)
    except (ConfigError, DataError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise DataError(f"{path} has a header that can't be used: {cause_of(error)}; {BUILD_AGAIN}") from error
