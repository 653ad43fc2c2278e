"""How bytes reach the disk: every call that changes it, so that a save can be cut at each of them.

    .checkpoint-40.3f2a.partial/     written, flushed ──► checkpoint-40/     by one rename, or one exchange of names

A folder of the final name is whole from the first moment it exists. What is cut before leaves a `.partial`, which the
next save of the same name removes.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from paceline.errors import CheckpointError
from paceline.input_file import cause_of

CHUNK = 16 << 20
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def write_file(path: Path, chunks: Iterable[Any]) -> int:
    """Write and flush; the bytes written."""
    written = 0
    with path.open("wb", buffering=0) as file:
        for chunk in chunks:
            left = memoryview(chunk)
            while left:  # a write may take less than it was given
                taken = write(file.fileno(), left)
                left = left[taken:]
                written += taken
            del chunk, left  # before the next is made: it may be as large
        flush(file.fileno())
    return written


def write(descriptor: int, data: memoryview) -> int:
    return os.write(descriptor, data)


def flush(descriptor: int) -> None:
    os.fsync(descriptor)


def flush_folder(path: Path) -> None:
    """Names in a folder are data of the folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        flush(descriptor)
    finally:
        os.close(descriptor)


def make_folder(path: Path) -> None:
    path.mkdir(parents=True, exist_ok=True)


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A hidden folder to write to, which gets its name when it is whole; what has the name already is not replaced."""
    if folder.is_symlink() or (folder.exists() and (not folder.is_dir() or any(folder.iterdir()))):
        raise CheckpointError(f"{folder} exists already; name a folder that does not, or is empty")
    whole = folder.absolute()
    partial = whole.with_name(f".{whole.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)  # of an attempt that was cut off
        make_folder(partial)
        yield partial
        if partial.exists():
            publish(partial, folder)
    except OSError as error:
        raise CheckpointError(f"{folder} could not be written: {cause_of(error)}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def publish(partial: Path, folder: Path) -> None:
    """Give a written folder its name, in the place of an older one if there is any."""
    flush_folder(partial)
    if folder.exists():
        _exchange(partial, folder)
        flush_folder(folder.parent)
        shutil.rmtree(partial, ignore_errors=True)
    else:
        rename(partial, folder)
        flush_folder(folder.parent)


def rename(old: Path, new: Path) -> None:
    old.rename(new)


def remove_folder(folder: Path) -> None:
    """It loses its name first, so that what is half removed is not taken for a checkpoint."""
    doomed = folder.with_name(f".{folder.name}.removed")
    shutil.rmtree(doomed, ignore_errors=True)
    rename(folder, doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def _exchange(new: Path, old: Path) -> None:
    """Swap two folders in one step, so that at no moment there is none of the name."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not libc.renameat2(_AT_FDCWD, os.fsencode(new), _AT_FDCWD, os.fsencode(old), _RENAME_EXCHANGE):
        return
    number = ctypes.get_errno()
    if number != errno.EINVAL:  # a file system that can't, as NFS: for a moment there is none of the name
        raise OSError(number, f"renameat2: {os.strerror(number)}", str(old))
    aside = old.with_name(f".{old.name}.removed")
    rename(old, aside)
    rename(new, old)
    rename(aside, new)
