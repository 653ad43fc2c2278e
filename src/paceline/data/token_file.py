"""A token file: a corpus as one flat array on disk, opened in no time and read without a copy.

    TokenFile.build("train.tokens", ["a.txt", "b.txt"], separator=0)           once; then, in every worker:
    samples = TokenFile("train.tokens").sequences(length=4)

    tokens      t0 t1 t2 t3 t4 t5 t6 t7 t8 t9 …
    sample 0    └────x────┘                          x = t0 … t3, y = t1 … t4: for each token the one that follows
    sample 1                └────x────┘              x = t4 … t7, y = t5 … t8

The file is mapped, not read: a terabyte opens as quickly as a page, workers of a host share one copy in memory, and
what is never asked for is never loaded. Its header (token_build.py) is checked on opening, its tokens by `verify`.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils.data import Dataset

from paceline.data.token_build import (
    BUILD_AGAIN,
    HEADER_BYTES,
    Encode,
    TokenHeader,
    build_token_file,
    byte_progress,
    read_header,
)
from paceline.errors import ConfigError, DataError
from paceline.input_file import open_input

TORCH_DTYPES = {"uint8": torch.uint8, "uint16": torch.uint16, "int32": torch.int32}

# Without it Linux refuses a private map that is larger than memory. Python 3.13 names it; this is Linux's own number.
_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
_READ_BYTES = 2**22


class TokenFile:
    """Tokens on disk as a tensor. Close it, or leave it to the garbage collector; views that are in use stay valid."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()
        try:
            with open_input(self.path) as file:
                self.header = read_header(self.path, file)
                self._tokens: Tensor | None = _mapped(file.fileno(), self.header)
        except FileNotFoundError:
            raise DataError(
                f"there is no token file {self.path}; build it with TokenFile.build or `paceline data tokenize`"
            ) from None
        except OSError as error:
            raise DataError(f"{self.path} can't be opened: {error.strerror or error}") from error

    @staticmethod
    def build(
        path: str | os.PathLike[str],
        sources: Iterable[str | os.PathLike[str]],
        encode: Encode | None = None,
        *,
        vocabulary: int = 256,
        separator: int | None = None,
        description: str = "",
        processes: int | None = None,
        progress: bool = True,
    ) -> TokenFile:
        """Write the text of `sources`, in their order, as one token file, and open it.

        encode        text (str) to ids below `vocabulary`; without it, the tokens are the bytes themselves. A file of
                      more than 1 MiB is encoded in pieces, cut after newlines
        separator     the id that follows each source file
        description   written into the header, to say what the file was made of
        processes     encode in so many [default: the cores; one for bytes and for little text]; no byte depends on it
        """
        build_token_file(
            path,
            sources,
            encode,
            vocabulary=vocabulary,
            separator=separator,
            description=description,
            processes=processes,
            progress=progress,
        )
        return TokenFile(path)

    def __len__(self) -> int:
        return self.header.tokens

    def __repr__(self) -> str:
        return f"TokenFile({str(self.path)!r}: {len(self):,} tokens, {self.header.dtype}, {self.vocabulary:,} ids)"

    @property
    def vocabulary(self) -> int:
        """The number of different ids: every token is below it."""
        return self.header.vocabulary

    @property
    def dtype(self) -> torch.dtype:
        return TORCH_DTYPES[self.header.dtype]

    @property
    def description(self) -> str:
        return self.header.description

    @property
    def tokens(self) -> Tensor:
        """All tokens, in the file's dtype. Writing to it changes this process's view and never the file."""
        if self._tokens is None:
            raise ConfigError(f"{self.path} is closed; open it again with TokenFile(path)")
        return self._tokens

    def sequences(self, length: int, stride: int | None = None, targets: bool = True) -> Sequences:
        """Samples of `length` tokens, `stride` apart [default: one after the other], as int64 for an embedding."""
        return Sequences(self, length, length if stride is None else stride, targets)

    def verify(self, *, progress: bool = False) -> None:
        """Read every token and compare with the checksum that was recorded when the file was built."""
        digest = hashlib.sha256()
        try:
            with open_input(self.path) as file, byte_progress(self.path.name, self._bytes, show=progress) as done:
                if read_header(self.path, file) != self.header:
                    raise DataError(f"{self.path} was replaced since it was opened; open it again")
                while block := file.read(_READ_BYTES):
                    digest.update(block)
                    done(len(block))
        except OSError as error:
            raise DataError(f"{self.path} can't be read: {error.strerror or error}") from error
        if digest.hexdigest() != self.header.sha256:
            raise DataError(
                f"{self.path} is damaged: the sha256 of its tokens begins with {digest.hexdigest()[:16]} but "
                f"{self.header.sha256[:16]} was recorded; {BUILD_AGAIN}"
            )

    @property
    def _bytes(self) -> int:
        return self.header.file_bytes - HEADER_BYTES

    def close(self) -> None:
        """Let go of the tokens; the file is unmapped with the last view of it."""
        self._tokens = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (self.path, self.header)


class Sequences(Dataset[Any]):
    """Sample i is the window of tokens that begins at i · stride: (x, y) with targets, x alone without."""

    def __init__(self, file: TokenFile, length: int, stride: int, targets: bool = True) -> None:
        if length < 1 or stride < 1:
            raise ConfigError(f"length={length} and stride={stride} must both be at least 1")
        self.file, self.length, self.stride, self.targets = file, length, stride, targets
        width = length + 1 if targets else length
        if len(file) < width:
            following = " and the one that follows" if targets else ""
            raise ConfigError(
                f"{file.path} has {len(file):,} tokens, too few for a sequence of {length:,}{following}; "
                "ask for a shorter length, or build the file from more text"
            )
        self._windows = file.tokens.unfold(0, width, stride)  # a view: the windows may overlap and cost nothing

    def __len__(self) -> int:
        return len(self._windows)

    def __getitem__(self, index: int) -> Any:
        return self._sample(self._windows[index].long())

    def __getitems__(self, indices: list[int]) -> list[Any]:
        """A whole batch: gathered in the file's small type and made int64 in one go, for any collate function."""
        return [self._sample(window) for window in self._windows[indices].long().unbind()]

    def _sample(self, window: Tensor) -> Any:
        return (window[:-1], window[1:]) if self.targets else window

    def __reduce__(self) -> tuple[Any, ...]:
        return Sequences, (self.file, self.length, self.stride, self.targets)


def _mapped(descriptor: int, header: TokenHeader) -> Tensor:
    # Private and writable, or torch would warn of a tensor that can't be written to. The tensor owns the map: closing
    # it by hand would pull the memory from under every view.
    private = mmap.MAP_PRIVATE | _MAP_NORESERVE
    mapped = mmap.mmap(descriptor, header.file_bytes, flags=private, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    return torch.frombuffer(mapped, dtype=TORCH_DTYPES[header.dtype], count=header.tokens, offset=HEADER_BYTES)


def _reopen(path: Path, header: TokenHeader) -> TokenFile:
    """In a loader process: the same file, or an error, never another that has taken its place."""
    file = TokenFile(path)
    if file.header != header:
        raise DataError(f"{path} was replaced since it was opened; build token files before training begins")
    return file
