"""Reading ahead: the receives of the next messages are posted while one is still on its way.

    one by one      ready ► header ► ready ► tensor ► ready ► header ► …     two waits for every key
    ahead           ready × 16 ► headers ► ready × 4 ► tensor tensor …       a wait for every burst of keys

gloo sends a tensor when its reader has said that it is ready for it, and on a slow link that word waits behind what
goes the other way: at 100 Mbit/s a round of two servers took 1.6 times as long as a ring that moves the same bytes,
and takes 1.16 times as long now.

A thread of the channel hears headers and posts the receives of their tensors; the one who reads waits for the tensors,
in the order of their headers.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from paceline.collectives.communicator import Handle
from paceline.errors import GenerationEnded
from paceline.parameter_server.wire import Header

HEADERS, TENSORS = 16, 4  # whose receives may be posted at a time
ABANDONED_S = 2.0  # its waits have ended by then


@dataclass(frozen=True)
class Coming:
    """A message whose header is here."""

    header: Header
    payload: Tensor | None
    under_way: Handle | None  # the payload


class ReadAhead:
    """`post` starts to receive a header and `begin` the tensor of one that has come; nothing follows the `last`."""

    def __init__(
        self,
        post: Callable[[], tuple[Tensor, Handle]],
        begin: Callable[[Tensor], Coming],
        last: Callable[[Header], bool],
        *,
        name: str,
        timeout_s: float,
    ) -> None:
        self._post, self._begin, self._last, self._timeout_s = post, begin, last, timeout_s
        self._coming: queue.Queue[Coming | Exception] = queue.Queue(TENSORS - 1)  # one more is with the reader
        # Kept until the group has gone: when receives that gloo knew of were dropped after a loss, the process hung.
        self._posted: deque[tuple[Tensor, Handle]] = deque()
        self._thread = threading.Thread(target=self._hear, name=name, daemon=True)

    def receive(self) -> tuple[Header, Tensor | None]:
        if self._thread.ident is None:
            self._thread.start()
        # The thread waits for a header no longer than the group does, and says so.
        found = self._coming.get(timeout=2 * self._timeout_s)
        if isinstance(found, Exception):
            raise found
        if found.under_way is not None:
            found.under_way.wait()
        return found.header, found.payload

    def abandon(self, why: str) -> None:
        """The group is over: what has come is dropped, so that the thread sees it too, and the reader is told."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._coming.get_nowait()
        if self._thread.ident is not None:
            self._thread.join(ABANDONED_S)
        with contextlib.suppress(queue.Full):
            self._coming.put_nowait(GenerationEnded(why))

    def _hear(self) -> None:
        try:
            self._posted.extend(self._post() for _ in range(HEADERS))
            while True:
                packed, work = self._posted.popleft()
                work.wait()
                coming = self._begin(packed)
                self._coming.put(coming, timeout=self._timeout_s)
                if self._last(coming.header):
                    return
                self._posted.append(self._post())
        except queue.Full:
            return  # the reader has gone
        except Exception as error:
            self._tell(error)

    def _tell(self, error: Exception) -> None:
        try:
            self._coming.put(error, timeout=self._timeout_s)
        except queue.Full:
            return
