"""A file that appears whole or not at all, however its writer ends and however many write it at once.

    .train.tokens.HOST.1f0c….partial      written and flushed here, locked by its writer
      └── rename ──► train.tokens         readers see the old file or the new one, never a part

What a killed writer leaves is a partial file that nobody has locked: the next writer of the same file removes it. Locks
may not reach across hosts, so another host's partial file is left alone until it has not changed for an hour.
"""

from __future__ import annotations

import fcntl
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO
from uuid import uuid4

from paceline.world.owned_folder import open_own_file

ABANDONED_AFTER_S = 3600.0


@contextmanager
def published_when_whole(path: Path) -> Iterator[BinaryIO]:
    """A new file to write, which takes the name `path` when the block ends well and vanishes when it doesn't."""
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
        with suppress(OSError):  # a file system without locks: nobody removes anything there
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
