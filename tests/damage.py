"""What may stand in the place of a file that somebody expects: none of it may hang or crash its reader."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

NESTED = b"[" * 200_000 + b"]" * 200_000


def a_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        before = os.getcwd()
        os.chdir(path.parent)  # an address has at most 108 bytes
        try:
            made.bind(path.name)
        finally:
            os.chdir(before)


def huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2**40)


INSTEAD: dict[str, Callable[[Path], object]] = {
    "nothing": lambda path: None,
    "an empty file": lambda path: path.touch(),
    "a folder": lambda path: path.mkdir(),
    "a fifo": os.mkfifo,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a socket": a_socket,
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a link to nothing": lambda path: path.symlink_to("nowhere"),
    "a huge file": huge,
    "not UTF-8": lambda path: path.write_bytes(b"\xff\xfe\x00{"),
    "deeply nested JSON": lambda path: path.write_bytes(NESTED),
}


@contextmanager
def files_no_longer_than(size: int) -> Iterator[None]:
    """What a full disk does, without one: the write that crosses the limit is cut, the next one fails."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
