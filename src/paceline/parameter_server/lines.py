"""A worker's lines to all servers: one thread hears each of them, one says now and then that the worker is there.

    Client of space 0 ─┐          ┌══ server 0        a client for each set of parameters that are updated together;
    Client of space 1 ─┴─ Lines ══┴══ server 1        messages name their space by its digest

A server that is lost fails every wait, with what it held and what to do. In an elastic job the group may be over
instead: then every wait says `GenerationEnded`, and another group's lines are made.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol as Interface

from torch import Tensor

from paceline.errors import GenerationEnded, PacelineError, PeerLostError
from paceline.parameter_server.link import GONE, Channel, Sent, end_of, silence_s
from paceline.parameter_server.server import LAST_PING, keys_of
from paceline.parameter_server.staleness_stats import StalenessCounter, StalenessStats
from paceline.parameter_server.wire import Header, Kind, Protocol, text_of, text_payload
from paceline.world.waiting import Waiting

GOODBYE_S = 5.0
LAST_WORDS_S = 1.0
EXPLANATION_S = 5.0  # that a server has to say who was lost; it notices when the workers do


class Listener(Interface):
    protocol: Protocol

    def heard(self, header: Header, payload: Tensor | None) -> None:
        """Something for its space; the lock is held."""


class Lines:
    def __init__(
        self,
        worker: int,
        channels: Sequence[Channel],
        stats: StalenessCounter,
        *,
        timeout_s: float,
        elastic: bool = False,
    ) -> None:
        """`channels` lead to the servers, in their order. `elastic`: one that fails is replaced, the job goes on."""
        self.worker, self.timeout_s, self.stats = worker, timeout_s, stats
        self._elastic = elastic
        self._channels = channels
        self._clients: dict[int, Listener] = {}
        self.change = threading.Condition()
        self.failure: str | None = None
        self._over = False  # the failure is that the workers have changed: the job goes on
        self._all_fail = False  # with it: it is not this worker's own affair
        self._pings = itertools.count(1)
        self._answered = [0] * len(channels)  # pings, by server
        self._silent = threading.Event()
        self._begun_s = time.monotonic()
        self._threads: list[threading.Thread] = []

    def add(self, client: Listener) -> None:
        self._clients[client.protocol.table.digest] = client
        if self._threads:
            return
        for server in range(len(self._channels)):
            name = f"paceline-worker-hears-server-{server}"
            self._threads.append(threading.Thread(target=self._listen, args=(server,), name=name, daemon=True))
        self._threads.append(threading.Thread(target=self._keep_talking, name="paceline-worker-pings", daemon=True))
        for thread in self._threads:
            thread.start()

    def stats_so_far(self) -> StalenessStats:
        return self.stats.stats(time.monotonic() - self._begun_s)

    # -- saying ------------------------------------------------------------------------------------------------------

    def send(self, server: int, header: Header, payload: Tensor | None = None) -> Sent:
        if payload is not None:
            self.stats.sent(f"server {server}", payload.nbytes)
        try:
            return self._channels[server].send(header, payload)
        except PeerLostError as error:
            self._lose(server, str(error))
            raise self._failed() from error

    def explained(self, error: PeerLostError) -> PeerLostError:
        """What the thread that listens to the lost server says, which knows who that is."""
        return PeerLostError(self._failure_within(LAST_WORDS_S) or str(error))

    def explain_loss(self) -> str | None:
        """Workers that exchange something among themselves see a connection close; the servers know whose it was."""
        return self._failure_within(EXPLANATION_S)

    def _failure_within(self, seconds: float) -> str | None:
        with self.change:
            self.change.wait_for(lambda: self.failure is not None, timeout=seconds)
        return self.failure

    def wait_until(self, true: Callable[[], bool], what: str) -> float:
        """Wait with `change` held; the seconds it took."""
        if self.failure is None and true():
            return 0.0
        begun = time.monotonic()
        # A little longer than servers wait for a worker: they can say who it was.
        patience_s = self.timeout_s + silence_s(self.timeout_s) + LAST_WORDS_S
        with Waiting("the servers"):
            self.change.wait_for(lambda: self.failure is not None or true(), timeout=patience_s)
        if self.failure is not None:
            raise self._failed()
        if not true():
            raise PeerLostError(f"worker {self.worker} waited {self.timeout_s:g} s for {what}, which did not come")
        return time.monotonic() - begun

    def _failed(self) -> PacelineError:
        return GenerationEnded(self.failure) if self._over else PeerLostError(self.failure)

    def have_been_heard(self) -> None:
        """Until the servers have dealt with everything that this worker said."""
        number = next(self._pings)
        self._ping(number)
        with self.change:
            self.wait_until(lambda: min(self._answered) >= number, "a sign of life of the servers")

    def _ping(self, number: int) -> None:
        digest = next(iter(self._clients))
        for server in range(len(self._channels)):
            self.send(server, Header(Kind.PING, sender=self.worker, digest=digest, round=number))

    def _keep_talking(self) -> None:
        """Servers wait for a worker no longer than the timeout, and it for them: somebody has to say something."""
        while not self._silent.wait(silence_s(self.timeout_s)):
            with contextlib.suppress(*GONE):
                self._ping(next(self._pings))

    # -- hearing -----------------------------------------------------------------------------------------------------

    def _listen(self, server: int) -> None:
        try:
            while self._hear(server, *self._channels[server].receive()):
                pass
        except PeerLostError as error:
            self._lose(server, str(error))
        except GenerationEnded as error:
            self._end(str(error))
        except Exception as error:
            with self.change:
                self.failure = self.failure or f"{type(error).__name__}: {error}"
                self.change.notify_all()

    def _hear(self, server: int, header: Header, payload: Tensor | None) -> bool:
        """Whether more will come."""
        if payload is not None:
            self.stats.received(f"server {server}", payload.nbytes)
        with self.change:
            if header.kind is Kind.ERROR:
                self._over = self._over or (self._elastic and self.failure is None)
                self.failure, self._all_fail = self.failure or text_of(payload), True
            elif header.kind is Kind.PING:
                self._answered[server] = max(self._answered[server], header.round)
            else:
                self._clients[header.digest].heard(header, payload)
            self.change.notify_all()
        return header.kind is not Kind.ERROR and (header.kind, header.round) != (Kind.PING, LAST_PING)

    def _lose(self, server: int, why: str) -> None:
        held = keys_of(next(iter(self._clients.values())).protocol.table, server)
        with self.change:
            self.failure = self.failure or (
                f"server {server}, which held {held}, was lost ({end_of(why)}); what it had learned is gone: resume "
                "from the last saved state"
            )
            self._all_fail = True
            self.change.notify_all()

    def _end(self, why: str) -> None:
        with self.change:
            if self.failure is None:
                self.failure, self._over = why, True
            self.change.notify_all()

    # -- the end -----------------------------------------------------------------------------------------------------

    def abandon(self, why: str) -> None:
        """The group is over: every wait ends, nothing is said to anybody, and no thread is left."""
        self._silent.set()
        self._end(why)
        for channel in self._channels:
            channel.abandon(why)
        for thread in self._threads:
            thread.join(GOODBYE_S)

    def close(self) -> None:
        """Say goodbye to all servers, and why where others fail too: a server may not have heard of it yet."""
        self._silent.set()
        if not self._threads:
            return
        if self._over:
            self.abandon(str(self.failure))
            return
        digest = next(iter(self._clients))
        for server in range(len(self._channels)):
            with contextlib.suppress(*GONE):
                if self.failure is not None and self._all_fail:
                    why = text_payload(self.failure)
                    error = Header(Kind.ERROR, sender=self.worker, digest=digest).holding(why)
                    self.send(server, error, why).wait()
                self.send(server, Header(Kind.PING, sender=self.worker, digest=digest, round=LAST_PING)).wait()
                self.send(server, Header(Kind.BYE, sender=self.worker, digest=digest)).wait()
        for thread in self._threads:
            thread.join(GOODBYE_S)
