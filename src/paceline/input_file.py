"""Files that a kill, a disk or another program may have damaged: opened without waiting, read within a limit, parsed.

    open_input(path)                 a regular file; anything else (fifo, device, folder, socket) is an OSError at once
    read_input(path)                 all its bytes, if they are not too many
    read_short(path)                 likewise, or what comes through a pipe: of a secret that a shell hands over
    open_output(path)                the descriptor of a file to add to
    append(descriptor, data)         all of it or nothing
    parse_json(data)                 what they mean, or ValueError: not UTF-8, cut, nested too deeply
    read_json(path)                  all three, and the file holds an object

A plain `open` of a fifo waits for a writer that may never come, and `json.loads` of nested text raises RecursionError,
which nobody expects. Whoever reads a file that it did not write in the same breath uses these, and catches
`(OSError, ValueError)`; `cause_of` says either of them in one line.
"""

from __future__ import annotations

import errno
import json
import os
import select
import stat
import time
from io import BufferedReader
from typing import Any

LARGEST = 2**30
"""Bytes of a file that is read whole; the largest that we write is a manifest, of some 300 bytes a tensor."""
LONGEST_CAUSE = 300

_KINDS = {
    stat.S_IFIFO: "a fifo",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
    stat.S_IFSOCK: "a socket",
}


def open_input(path: str | os.PathLike[str]) -> BufferedReader:
    """A regular file, opened for reading."""
    _check_regular(path, os.stat(path))  # before it is opened: opening some devices does something
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        _check_regular(path, os.fstat(descriptor))  # another may have taken its place
        return open(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def _check_regular(path: str | os.PathLike[str], about: os.stat_result) -> None:
    kind = stat.S_IFMT(about.st_mode)
    if kind != stat.S_IFREG:
        raise OSError(errno.EINVAL, f"it is {_KINDS.get(kind, 'something else')} and not a regular file", str(path))


def read_input(path: str | os.PathLike[str], most: int = LARGEST) -> bytes:
    """The bytes of a regular file of at most so many."""
    with open_input(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise OSError(errno.EFBIG, f"it has {size:,} bytes, and at most {most:,} are read", str(path))
        try:
            return file.read(size or min(most, 2**20))  # a file in /proc says that it has no size
        except MemoryError:
            raise OSError(errno.ENOMEM, f"there is no memory for its {size:,} bytes", str(path)) from None


def open_output(path: str | os.PathLike[str]) -> int:
    """The descriptor of a file to add to. Not a fifo that nobody reads: its opening would wait for a reader."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno == errno.ENXIO:
            raise OSError(errno.ENXIO, "it is a fifo that nobody reads, or a socket", str(path)) from error
        raise
    os.set_blocking(descriptor, True)
    return descriptor


def append(descriptor: int, data: bytes) -> None:
    """All of it or nothing: a disk that fills up in the middle must not leave half a line between whole ones."""
    before = os.fstat(descriptor).st_size
    written = 0
    try:
        while written < len(data):
            written += os.write(descriptor, data[written:])
    except OSError:
        os.ftruncate(descriptor, before)
        raise


def read_short(path: str | os.PathLike[str], most: int, timeout_s: float) -> bytes:
    """Likewise, or what comes through a pipe until it ends, of which somebody at the other end has to be quick."""
    if not stat.S_ISFIFO(os.stat(path).st_mode):
        return read_input(path, most)
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        data, deadline = b"", time.monotonic() + timeout_s
        while select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))[0]:
            if not (more := os.read(descriptor, most + 1)):
                return data
            data += more
            if len(data) > most:
                raise OSError(errno.EFBIG, f"more than {most:,} bytes come", str(path))
        raise OSError(errno.ETIMEDOUT, f"it is a fifo, and nobody ended writing within {timeout_s:g} s", str(path))
    finally:
        os.close(descriptor)


def parse_json(data: bytes | str) -> Any:
    """What a JSON text says; ValueError if it says nothing, for whichever reason."""
    try:
        return json.loads(data if isinstance(data, str) else data.decode())  # of bytes it would take UTF-16 as well
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not UTF-8 text (byte {error.start:,}: {error.reason})") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON ({error})") from error
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_json(path: str | os.PathLike[str], most: int = LARGEST) -> dict[str, Any]:
    """The object in a JSON file."""
    found = parse_json(read_input(path, most))
    if not isinstance(found, dict):
        raise ValueError(f"it holds a {type(found).__name__} and not an object")
    return found


def cause_of(error: BaseException) -> str:
    """An error as part of a sentence, on one line, without what could disturb a terminal."""
    if isinstance(error, OSError) and error.strerror:
        text = error.strerror
    else:
        text = f"there is no {error}" if isinstance(error, KeyError) else str(error) or type(error).__name__
    return one_line(text)


def one_line(text: str, most: int = LONGEST_CAUSE) -> str:
    """The text with line breaks and control characters spelled out, cut where it goes on for too long."""
    plain = "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text[: most + 1])
    return plain if len(plain) <= most else f"{plain[: most - 1]}…"
