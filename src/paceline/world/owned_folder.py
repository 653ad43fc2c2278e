"""A folder that is this user's own, held by its descriptor; everything in it is read and removed through that.

    /tmp/paceline-x1y2z3      a name: any user may have made it, and who owns the parent may change what it means
         │ open, not through a link
         ▼
    descriptor ─ fstat ─▶     a folder of this user, to which no other user may write: so are the entries in it
         │ readlinkat, openat, unlinkat
         ▼
    its entries               wherever the folder is by now, and whatever has its name

/dev/shm, TMPDIR and caches are places where other users may leave folders of the names that we look for. Whatever
sweeps, cleans up or loads something there asks this module.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Collection
from io import FileIO
from pathlib import Path

WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_NO_LINK = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # a fifo without a writer must not block us


class OwnedFolder:
    """The caller that opens it closes it; `with` does."""

    def __init__(self, path: Path) -> None:
        """`PermissionError` where it is another user's, or others may write to it; `OSError` where it is no folder."""
        self.path = path
        self.descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | _NO_LINK)  # ENOTDIR where it is a link
        try:
            _check(self.descriptor, path)
        except PermissionError:
            self.close()
            raise

    @classmethod
    def make(cls, path: Path) -> OwnedFolder:
        """A new one, which only this user can enter."""
        path.mkdir(mode=0o700)
        return cls(path)

    def __enter__(self) -> OwnedFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """The folder stays."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    @property
    def through(self) -> Path:
        """A path to the folder by its descriptor, for this process alone and as long as it is open."""
        return Path(f"/proc/self/fd/{self.descriptor}")

    def link(self, name: str) -> Path | None:
        """Where a link in the folder points to; None where there is none of this name."""
        try:
            return Path(os.readlink(name, dir_fd=self.descriptor))
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.EINVAL):
                return None
            raise

    def empty(self, keep: Collection[str] = ()) -> None:
        """Nobody else can change what is in it, so that names and what they mean stay the same here."""
        names: list[str] = []
        with contextlib.suppress(FileNotFoundError):  # another process of this user was quicker, and it is gone
            names = os.listdir(self.descriptor)
        for name in set(names) - set(keep):
            with contextlib.suppress(FileNotFoundError):
                if stat.S_ISDIR(os.stat(name, dir_fd=self.descriptor, follow_symlinks=False).st_mode):
                    shutil.rmtree(name, dir_fd=self.descriptor)
                else:
                    os.unlink(name, dir_fd=self.descriptor)

    def remove(self) -> None:
        """All that is in it, and its name if that is still its own: what else has it by now is left alone."""
        self.empty()
        with contextlib.suppress(FileNotFoundError):
            named = os.stat(self.path, follow_symlinks=False)
            if os.path.samestat(named, os.fstat(self.descriptor)):
                os.rmdir(self.path)  # in the instant between, an empty folder is all that could be lost


def open_own_file(path: Path) -> FileIO:
    """To read: a plain file of this user; `PermissionError` where it is another's, a fifo or a device, or a link."""
    try:
        descriptor = os.open(path, os.O_RDONLY | _NO_LINK)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):  # a link; a socket
            raise _not_ours(path) from error
        raise
    file = FileIO(descriptor)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise _not_ours(path)
        _check(descriptor, path)
    except PermissionError:
        file.close()
        raise
    return file


def _check(descriptor: int, path: Path) -> None:
    about = os.fstat(descriptor)
    if about.st_uid != os.geteuid() or about.st_mode & WRITABLE_BY_OTHERS:
        raise _not_ours(path)


def _not_ours(path: Path) -> PermissionError:
    return PermissionError(errno.EPERM, "it is not this user's own, or others may write to it", str(path))
