"""The connected sockets of a gloo group: shutting them down ends, at once, every wait in it.

gloo has no abort. An operation whose peer is gone fails on the peer's neighbours only, and the others wait out their
timeout; but a connection that is shut down under it fails everywhere. Its listening socket must be left alone: gloo
ends the process when that one fails.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator, Mapping


class OpenSockets:
    """Connections of this process by descriptor, with the number that tells them from a later one there."""

    def __init__(self, found: Mapping[int, int]) -> None:
        self._found = dict(found)
        self._shut: dict[int, int] | None = None

    @classmethod
    def none(cls) -> OpenSockets:
        return cls({})

    @classmethod
    @contextlib.contextmanager
    def made_here(cls) -> Iterator[OpenSockets]:
        """The connections to other processes that are made inside the block."""
        before = _connections()
        made = cls({})
        yield made
        made._found = {fd: inode for fd, inode in _connections().items() if before.get(fd) != inode}

    def shut_down(self) -> None:
        for descriptor, inode in self._found.items():
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
                if os.fstat(connection.fileno()).st_ino == inode:  # otherwise gloo has closed it, and another is there
                    connection.shutdown(socket.SHUT_RDWR)
        self._shut, self._found = {**(self._shut or {}), **self._found}, {}

    @property
    def are_closed(self) -> bool:
        """They were shut down, and gloo has seen it: nothing is read into a buffer, or sent from one, any more."""
        return self._shut is not None and not any(_inode(fd) == inode for fd, inode in self._shut.items())


def _inode(descriptor: int) -> int | None:
    try:
        return os.fstat(descriptor).st_ino
    except OSError:
        return None


def _connections() -> dict[int, int]:
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # no socket, or one that is not connected
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as connection:
                if connection.family in (socket.AF_INET, socket.AF_INET6):
                    connection.getpeername()
                    found[int(name)] = os.fstat(connection.fileno()).st_ino
    return found
