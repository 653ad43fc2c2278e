"""Building a token file: text files in, one flat array out, the same bytes with any number of processes.

    sources ──► pieces of about 1 MiB ──► encode, in processes ──► written in order ──► header, fsync, rename
                cut after a newline;      each id below the        hashed on the way    whole or not at all
                small files together      vocabulary?

Where a piece ends is a function of the text alone, never of the processes. Results are taken in the order of the text
and only a few batches are under way, so memory stays small whatever the corpus. The file is written under another name
and has no header until all of it is there, so a build that is cut leaves nothing that opens.

Told in this order: the build, the header, pieces of text, encoding, publishing, progress. No torch here: processes that
encode text import this, and should start quickly.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import json
import os
import pickle
import signal
import socket
import struct
import sys
import time
import zlib
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, BinaryIO
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from paceline.errors import ConfigError, DataError
from paceline.input_file import cause_of, open_input, parse_json
from paceline.world.host_limits import usable_cores
from paceline.world.owned_folder import open_own_file

Encode = Callable[[str], Any]  # text to a sequence of ids: a list, an array, a tensor

PIECE_BYTES = 2**20
FEW_BYTES = 32 * 2**20  # less than this is done before other processes have started
_PR_SET_PDEATHSIG = 1
_NEWLINE_SEARCH_BYTES = 2**16

HEADER_BYTES = 4096
MAGIC = b"paceline tokens\n"
VERSION = 1
LARGEST_ID = {"uint8": 2**8 - 1, "uint16": 2**16 - 1, "int32": 2**31 - 1}  # torch does little with uint32

_FIELDS = struct.Struct("<16sII")
_CRC = slice(16, 20)
BUILD_AGAIN = "build it again (TokenFile.build or `paceline data tokenize`)"

ABANDONED_AFTER_S = 3600.0
PLAIN_EVERY_S = 5.0


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


# ---- the header ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TokenHeader:
    """What a token file says of itself: one page before the tokens, which can tell when it is wrong.

        byte  0             16        20            24                      4096
              │ magic       │ crc32   │ JSON length │ JSON, then zeros      │ token 0, token 1, …  (little-endian)

        {"version": 1, "dtype": "uint16", "tokens": 1000000, "vocabulary": 50257, "sha256": "…", "description": "…"}

    The crc32 covers the whole page (with its own four bytes as zeros), the sha256 covers the tokens. Tokens begin on a
    page boundary, so that they can be mapped, and take the smallest type that holds the vocabulary.
    """

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
            raise DataError(f"{self.path} became shorter while it was read; build again when no process writes to it")
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


# ---- publishing: a file that appears whole or not at all, however its writer ends ------------------------------------


@contextmanager
def published_when_whole(path: Path) -> Iterator[BinaryIO]:
    """A new file to write, which takes the name `path` when the block ends well and vanishes when it doesn't.

        .train.tokens.HOST.1f0c….partial      written and flushed here, locked by its writer
          └── rename ──► train.tokens         readers see the old file or the new one, never a part

    What a killed writer leaves is a partial file that no process has locked: the next writer of the same file removes
    it. Locks may not reach across hosts, so another host's partial file is left alone until it has not changed for an
    hour.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(path)
    partial, file = _locked_partial(path)
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            partial.rename(path)  # while locked, so that no other writer takes it for a leftover
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    _flush_folder(path.parent)


def _locked_partial(path: Path) -> tuple[Path, BinaryIO]:
    while True:
        partial = path.with_name(f".{path.name}.{socket.gethostname()}.{uuid4().hex[:12]}.partial")
        file = partial.open("xb")
        with suppress(OSError):  # a file system without locks: leftovers stay there
            fcntl.flock(file, fcntl.LOCK_EX)
        if partial.exists():
            return partial, file
        file.close()  # another writer took it for a leftover in the instant before it was locked


def _remove_leftovers(path: Path) -> None:
    ours = f".{path.name}.{socket.gethostname()}."
    for partial in path.parent.glob(f".{_literal(path.name)}.*.partial"):
        with suppress(OSError), open_own_file(partial) as file:  # others' files are theirs to remove
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises while its writer lives
            silent_s = time.time() - os.fstat(file.fileno()).st_mtime
            if partial.name.startswith(ours) or silent_s > ABANDONED_AFTER_S:
                partial.unlink()


def _literal(name: str) -> str:
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in name)


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ---- progress, in bytes ----------------------------------------------------------------------------------------------


@contextmanager
def byte_progress(name: str, total: int, *, show: bool = True) -> Iterator[Callable[[int], None]]:
    """Gives a function to call with the number of bytes that were done since the last call.

    on a terminal    train.tokens ━━━━━━━━━━━━━━━╸━━━━━━ 1.2/2.0 GB 85.3 MB/s 0:00:09     gone when the work is done
    elsewhere        paceline: train.tokens · 1.2 of 2.0 GB · 85 MB/s · 9 s left          every few seconds
    """
    if not show:
        yield _nothing
    elif sys.stderr.isatty():
        yield from _bar(name, total)
    else:
        yield _PlainLines(name, total)


def in_units(count: float) -> str:
    """A number of bytes as people write it: 16.0 MB."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:,.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:,.1f} TB"


def _nothing(count: int) -> None:
    pass


def _bar(name: str, total: int) -> Iterator[Callable[[int], None]]:
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(escape(name), total=total)
        yield lambda count: bar.advance(task, count)


class _PlainLines:
    """For logs: nothing about work of a few seconds, then a line now and then."""

    def __init__(self, name: str, total: int) -> None:
        self._name, self._total, self._done = name, total, 0
        self._began = self._last = time.monotonic()

    def __call__(self, count: int) -> None:
        self._done += count
        now = time.monotonic()
        if now - self._last < PLAIN_EVERY_S:
            return
        self._last = now
        speed = self._done / (now - self._began)
        left = (self._total - self._done) / max(speed, 1)
        print(
            f"paceline: {self._name} · {in_units(self._done)} of {in_units(self._total)} · {in_units(speed)}/s · "
            f"{left:,.0f} s left",
            file=sys.stderr,
            flush=True,
        )
