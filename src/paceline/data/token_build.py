"""Building a token file: text files in, one flat array out, the same bytes with any number of processes.

    sources ──► pieces of about 1 MiB ──► encode, in processes ──► written in order ──► header, fsync, rename
                cut after a newline;      each id below the        hashed on the way    whole or not at all
                small files together      vocabulary?

Where a piece ends is a function of the text alone, never of the processes. Results are taken in the order of the text
and only a few batches are under way, so memory stays small whatever the corpus. The file is written under another name
(published_file.py) and has no header until all of it is there, so a build that is cut leaves nothing that opens.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import pickle
import signal
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from paceline.data.byte_progress import byte_progress
from paceline.data.published_file import published_when_whole
from paceline.data.token_header import (
    HEADER_BYTES,
    TokenHeader,
    begins_like_a_token_file,
    dtype_for,
    stored_as,
)
from paceline.errors import ConfigError, DataError
from paceline.input_file import open_input
from paceline.world.host_limits import usable_cores

Encode = Callable[[str], Any]  # text to a sequence of ids: a list, an array, a tensor

PIECE_BYTES = 2**20
FEW_BYTES = 32 * 2**20  # less than this is done before other processes have started
_PR_SET_PDEATHSIG = 1
_NEWLINE_SEARCH_BYTES = 2**16


def build_token_file(
    path: str | os.PathLike[str],
    sources: Iterable[str | os.PathLike[str]],
    encode: Encode | None,
    *,
    vocabulary: int,
    separator: int | None,
    description: str,
    processes: int | None,
    progress: bool,
) -> TokenHeader:
    """Write `path` from the text of `sources`; see TokenFile.build."""
    target = Path(os.path.realpath(path))  # a link stays one
    recipe = Recipe(encode, vocabulary, separator)
    files = [Path(source).absolute() for source in sources]
    total = sum(_size_of(file) for file in files)
    processes = _processes(processes, encode, total)
    TokenHeader(recipe.dtype, 1, vocabulary, "0" * 64, description).pack()  # before an hour of work, not after
    _refuse_to_replace_anything_else(target)
    digest, written = hashlib.sha256(), 0
    try:
        with published_when_whole(target) as out, byte_progress(target.name, total, show=progress) as done:
            out.seek(HEADER_BYTES)
            with closing(_encoded(_batches(files), recipe, processes)) as results:
                for text_bytes, tokens in results:
                    out.write(tokens)
                    digest.update(tokens)
                    written += len(tokens)
                    done(text_bytes)
            if not written:
                raise DataError(f"{target} was not built: its {len(files)} source files hold no token")
            count = written // stored_as(recipe.dtype).itemsize
            header = TokenHeader(recipe.dtype, count, vocabulary, digest.hexdigest(), description)
            out.seek(0)
            out.write(header.pack())
    except OSError as error:
        raise DataError(f"{target} could not be built: {error.strerror or error}") from error
    return header


def _refuse_to_replace_anything_else(target: Path) -> None:
    """A forgotten first argument must not cost the text that stands there."""
    try:
        if target.exists() and target.stat().st_size and not begins_like_a_token_file(target):
            raise ConfigError(f"{target} exists and is not a token file; choose another name, or remove it first")
    except OSError as error:
        raise ConfigError(f"{target} can't be replaced: {error.strerror or error}") from error


def _processes(wanted: int | None, encode: Encode | None, total: int) -> int:
    if wanted is not None and wanted < 1:
        raise ConfigError(f"processes={wanted}: at least one is needed")
    if wanted is None:
        # Bytes that are copied as they are go slower through another process than past it.
        wanted = 1 if encode is None or total < FEW_BYTES else usable_cores()
    if wanted > 1:
        try:
            pickle.dumps(encode)
        except Exception as error:
            raise ConfigError(
                f"encode can't be sent to {wanted} processes ({error}); make it a function or an object of a module's "
                "top level, or pass processes=1"
            ) from error
    return wanted


# ---- pieces: which text goes together ----------------------------------------------------------------------


@dataclass(frozen=True)
class Piece:
    """A stretch of one source file."""

    path: Path
    start: int
    stop: int
    ends_file: bool

    def __str__(self) -> str:
        whole = self.start == 0 and self.ends_file
        return str(self.path) if whole else f"{self.path} (bytes {self.start:,} to {self.stop:,})"

    def read(self) -> bytes:
        try:
            with open_input(self.path) as file:
                file.seek(self.start)
                text = file.read(self.stop - self.start)
        except OSError as error:
            raise _unreadable(self.path, error) from error
        if len(text) != self.stop - self.start:
            raise DataError(f"{self.path} became shorter while it was read; build again when nobody writes to it")
        return text


def _batches(files: Sequence[Path]) -> Iterator[list[Piece]]:
    """Pieces in order, as many together as make up PIECE_BYTES: thousands of small files are few errands."""
    batch: list[Piece] = []
    waiting = 0
    for file in files:
        for piece in _pieces(file):
            batch.append(piece)
            waiting += piece.stop - piece.start
            if waiting >= PIECE_BYTES:
                yield batch
                batch, waiting = [], 0
    if batch:
        yield batch


def _pieces(path: Path) -> Iterator[Piece]:
    try:
        with open_input(path) as file:
            size = os.fstat(file.fileno()).st_size
            start, stop = 0, -1
            while stop < size:
                stop = _cut(file, start + PIECE_BYTES, size)
                yield Piece(path, start, stop, ends_file=stop == size)
                start = stop
    except OSError as error:
        raise _unreadable(path, error) from error


def _cut(file: BinaryIO, earliest: int, size: int) -> int:
    """After the next newline; in a line that goes on for another piece's length, between two UTF-8 characters."""
    for place in range(earliest, min(earliest + PIECE_BYTES, size), _NEWLINE_SEARCH_BYTES):
        file.seek(place)
        newline = file.read(_NEWLINE_SEARCH_BYTES).find(b"\n")
        if newline >= 0:
            return min(place + newline + 1, size)
    if earliest + PIECE_BYTES >= size:
        return size
    file.seek(earliest)
    following = file.read(4)
    return earliest + next((n for n, byte in enumerate(following) if byte & 0xC0 != 0x80), 0)


def _size_of(path: Path) -> int:
    try:
        if not path.is_file():
            raise DataError(f"the source {path} " + ("is not a regular file" if path.exists() else "does not exist"))
        return path.stat().st_size
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> DataError:
    return DataError(f"the source {path} can't be read: {error.strerror or error}")


# ---- encoding: text to ids, here or in processes -----------------------------------------------------------


@dataclass(frozen=True)
class Recipe:
    """How text becomes tokens."""

    encode: Encode | None
    vocabulary: int
    separator: int | None

    def __post_init__(self) -> None:
        dtype_for(self.vocabulary)
        if self.separator is not None and not 0 <= self.separator < self.vocabulary:
            raise ConfigError(f"separator={self.separator} is outside the vocabulary of {self.vocabulary:,}")

    @property
    def dtype(self) -> str:
        return dtype_for(self.vocabulary)

    def tokens_of(self, batch: list[Piece]) -> bytes:
        """The batch as it will stand in the file."""
        stored = stored_as(self.dtype)
        between = b"" if self.separator is None else np.array(self.separator, stored).tobytes()
        return b"".join(
            self._ids(piece).astype(stored, copy=False).tobytes() + (between if piece.ends_file else b"")
            for piece in batch
        )

    def _ids(self, piece: Piece) -> NDArray[Any]:
        text = piece.read()
        if self.encode is None:
            ids: NDArray[Any] = np.frombuffer(text, np.uint8)
        else:
            try:
                given = self.encode(text.decode())
                ids = np.frombuffer(given, np.uint8) if isinstance(given, bytes) else np.asarray(given)
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{piece.path} is not UTF-8 text at byte {piece.start + error.start:,} ({error.reason}); convert "
                    "or leave out the file, or build from bytes (no encode)"
                ) from error
            except Exception as error:
                raise DataError(f"{piece}: encode raised {type(error).__name__}: {error}") from error
        self._check(ids, piece)
        return ids

    def _check(self, ids: NDArray[Any], piece: Piece) -> None:
        if not ids.size or (self.encode is None and self.vocabulary > 255):
            return
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise DataError(
                f"{piece}: encode should give a flat sequence of ints, but gave {ids.dtype} of shape {ids.shape}"
            )
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= self.vocabulary:
            raise DataError(
                f"{piece}: the token id {low if low < 0 else high} is outside the vocabulary of {self.vocabulary:,} "
                f"(0 to {self.vocabulary - 1:,}); "
                + ("ids can't be negative" if low < 0 else f"pass vocabulary={high + 1} or more")
            )


def _encoded(
    batches: Iterable[list[Piece]], recipe: Recipe, processes: int
) -> Generator[tuple[int, bytes], None, None]:
    """(bytes of text, tokens) of each batch, in the order of the text."""
    if processes == 1:
        for batch in batches:
            yield _text_bytes(batch), recipe.tokens_of(batch)
        return
    # spawn: the caller may have threads, and a fork of them can hang.
    with ProcessPoolExecutor(processes, get_context("spawn"), _begin, (recipe, os.getpid())) as pool:
        waiting: deque[tuple[list[Piece], Future[bytes]]] = deque()
        try:
            for batch in batches:
                waiting.append((batch, pool.submit(_encode, batch)))
                if len(waiting) > 2 * processes:
                    yield _taken(*waiting.popleft())
            while waiting:
                yield _taken(*waiting.popleft())
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _taken(batch: list[Piece], future: Future[bytes]) -> tuple[int, bytes]:
    try:
        return _text_bytes(batch), future.result()
    except BrokenProcessPool as error:
        raise DataError(
            f"a process that encodes ended before {batch[0]} was done: out of memory, or killed, or the script that "
            "builds has no `if __name__ == '__main__':` around what it runs; mend that, or pass processes=1"
        ) from error


def _text_bytes(batch: list[Piece]) -> int:
    return sum(piece.stop - piece.start for piece in batch)


_recipe: Recipe | None = None


def _begin(recipe: Recipe, parent: int) -> None:
    """In each encoding process: sent once, not with every batch; and it must not outlive its builder."""
    global _recipe
    _recipe = recipe
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the builder, who ends us
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _encode(batch: list[Piece]) -> bytes:
    assert _recipe is not None
    return _recipe.tokens_of(batch)
