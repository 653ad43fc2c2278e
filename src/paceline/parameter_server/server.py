"""A server at work: one thread for each worker hears it, and the core decides, one message at a time.

    worker 0 ══ thread ─┐             ┌─► replies to the workers that waited for what this brought
    worker 1 ══ thread ─┼─ lock ─ core┤
    server 1 ══ thread ─┘             └─► log, statistics

Updates run inside the lock, in torch's own threads; receiving and sending run outside of it. A worker that is lost ends
one thread: an asynchronous job goes on without it, any other gets the reason and ends. The server itself ends when all
workers have said goodbye; in an elastic job also when its group is over, to be made again in the next one.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from paceline.elastic.faults import fault_point
from paceline.errors import GenerationEnded, PeerLostError
from paceline.optim.piece_state import State
from paceline.parameter_server.channel import GONE, Channel, end_of, keepalive_s, listen
from paceline.parameter_server.server_core import Reply, ServerCore
from paceline.parameter_server.staleness_stats import StalenessCounter, StalenessStats
from paceline.parameter_server.update_log import NoLog, UpdateLog
from paceline.parameter_server.wire import LAST_PING, Header, Kind, Protocol, is_last, text_of

GRACE_S = 5.0


@dataclass(frozen=True)
class CoreMaker:
    """Makes the core of a space when its first message comes."""

    protocol: Protocol
    make: Callable[[], ServerCore]


class Server:
    def __init__(
        self,
        server: int,
        makers: Iterable[CoreMaker],
        channels: Mapping[int, Channel],
        stats: StalenessCounter,
        *,
        timeout_s: float,
        grace_s: float = GRACE_S,
        on_leave: Callable[[int, StalenessStats], None] = lambda worker, stats: None,
        log: UpdateLog | NoLog | None = None,
        shared_sums: Mapping[int, Tensor] | None = None,
    ) -> None:
        """`channels` lead to all workers and to the other servers.

        `grace_s`: for workers to leave when it has failed; in an elastic job the coordinator tells them.
        `shared_sums`: where sums are read, by key of the first of `makers`.
        """
        self._makers = {maker.protocol.table.digest: maker for maker in makers}
        self._protocol = next(iter(self._makers.values())).protocol
        self._server, self._rank = server, self._protocol.workers + server
        self._channels, self._stats, self._timeout_s, self._grace_s = channels, stats, timeout_s, grace_s
        self._on_leave, self._log = on_leave, log or NoLog()
        self._shared_sums, self._shared_round = shared_sums or {}, dict[int, int]()
        self._cores: dict[int, ServerCore] = {}
        self._gone: dict[int, bool] = {}  # workers that left, and whether they said goodbye
        self._lock = threading.Lock()
        self._arrived = 0
        self._change = threading.Condition()
        self._listening = {rank for rank in channels if rank < self._protocol.workers}
        self._error: Exception | None = None
        self._silent = threading.Event()
        self._threads: list[threading.Thread] = []
        self._first_s = self._last_s = 0.0

    @property
    def stats(self) -> StalenessStats:
        return self._stats.stats(self._last_s - self._first_s)

    def start(self) -> None:
        for rank in self._channels:
            name = f"paceline-server-{self._server}-hears-{rank}"
            self._threads.append(threading.Thread(target=self._listen, args=(rank,), name=name, daemon=True))
        if self._others:
            name = f"paceline-server-{self._server}-pings"
            self._threads.append(threading.Thread(target=self._ping, name=name, daemon=True))
        for thread in self._threads:
            thread.start()

    def join(self, within_s: float | None = None) -> None:
        """Until all workers have left; raises what made it fail."""
        with self._change:
            # Ends without a timeout of its own: each thread waits for its worker no longer than the group's.
            self._change.wait_for(lambda: not self._listening or self._error is not None, timeout=within_s)
            if self._error is not None:
                self._change.wait_for(lambda: not self._listening, timeout=self._grace_s)
        self._silent.set()
        for rank in self._others:
            with contextlib.suppress(*GONE):
                self._channels[rank].send(self._ping_of(LAST_PING)).wait()
        if isinstance(self._error, GenerationEnded):
            self._join_threads()
        self._log.end(well=self._error is None)
        if self._error is not None:
            raise self._error

    def abandon(self, why: str) -> None:
        """The group is over: nothing is sent, and no thread is left, nor an update under way."""
        self._end(GenerationEnded(why))
        self._join_threads()
        self._log.end(well=False)

    def _end(self, error: GenerationEnded) -> None:
        self._silent.set()
        with self._change:
            self._error = self._error or error
            self._change.notify_all()
        for channel in self._channels.values():
            channel.abandon(str(error))

    def _join_threads(self) -> None:
        for thread in self._threads:
            thread.join(GRACE_S)

    def states(self, digest: int, round: int) -> dict[int, list[State]] | None:
        """What the optimizers keep for each key, as it lies here before `round` is applied; None: it is not there yet.

        For the process that the server is in, where a deterministic clock lets no message change it meanwhile.
        """
        with self._lock:
            core = self._cores.get(digest)
            return None if core is None else core.states(round)

    def fail(self, error: Exception) -> None:
        """Tell all workers and end."""
        with self._lock:
            self._fail(error)

    # -- one thread for each peer ------------------------------------------------------------------------------------

    def _listen(self, peer: int) -> None:
        hear = partial(self._hear, peer)
        try:
            with torch.no_grad():
                listen(self._channels[peer], hear, lost=partial(self._lose, peer), over=self._end, failed=self.fail)
        finally:
            with self._change:
                self._listening.discard(peer)
                self._change.notify_all()

    def _hear(self, peer: int, header: Header, payload: Tensor | None) -> bool:
        """Whether the peer has more to say."""
        self._count(header, payload)
        with self._lock:
            self._arrived -= 1
            self._last_s = time.monotonic()
            from_server = peer >= self._protocol.workers
            if header.kind is Kind.BYE:
                self._leave(peer, said_goodbye=True)
            elif header.kind is Kind.ERROR:
                self._fail(PeerLostError(text_of(payload)))
            elif header.kind is Kind.PING and (from_server or self._error is None):
                if not from_server:  # answered here: no core is made for the space it names
                    self._send([Reply(peer, self._ping_of(header.round, header.digest))])
            else:
                if header.kind is Kind.OPEN:
                    self._log.begin(header.round)
                self._send(self._core(header).handle(header, payload))
                if header.kind is Kind.PUSH:
                    fault_point("serve", header.round + 1)
        return not is_last(header, from_server=from_server)

    def _count(self, header: Header, payload: Tensor | None) -> None:
        self._arrived += 1  # not exact between threads, and need not be
        self._stats.queued(self._arrived)
        if payload is not None:
            self._stats.received(self._protocol.name(header.sender), payload.nbytes)

    def _lose(self, peer: int, why: str) -> None:
        with self._lock:
            if peer >= self._protocol.workers:
                self._fail(PeerLostError(self._protocol.lost_server(peer - self._protocol.workers, end_of(why))))
                return
            self._leave(peer, said_goodbye=False)
            failure = next((core.failure for core in self._cores.values() if core.failure is not None), None)
            if failure is not None:
                self._fail(PeerLostError(failure))

    # -- inside the lock ---------------------------------------------------------------------------------------------

    def _core(self, header: Header) -> ServerCore:
        maker = self._makers.get(header.digest)
        if maker is None:
            self._protocol.check(header, server=self._server)  # says what is wrong with it
            raise AssertionError("a digest that fits has a maker")
        core = self._cores.get(header.digest)
        if core is None:
            core = self._cores[header.digest] = maker.make()
            for worker, said_goodbye in self._gone.items():
                self._send(core.worker_left(worker, said_goodbye=said_goodbye))
        if not self._first_s:
            self._first_s = time.monotonic()
        return core

    def _leave(self, worker: int, *, said_goodbye: bool) -> None:
        self._gone[worker] = said_goodbye
        for core in self._cores.values():
            self._send(core.worker_left(worker, said_goodbye=said_goodbye))
        self._on_leave(worker, self.stats)

    def _fail(self, error: Exception) -> None:
        with self._change:
            self._error = self._error or error
            self._change.notify_all()
        if not self._cores:  # no sensible message has come yet; a core knows how to tell the workers
            digest, maker = next(iter(self._makers.items()))
            self._cores[digest] = maker.make()
        for core in self._cores.values():
            self._send(core.fail(str(error)))

    def _send(self, replies: Iterable[Reply]) -> None:
        for reply in replies:
            payload = self._shared_payload(reply)
            if payload is not None:
                self._stats.sent(self._protocol.name(reply.to), payload.nbytes)
            # A peer that is lost is noticed by the thread that listens to it.
            with contextlib.suppress(*GONE):
                self._channels[reply.to].send(reply.header, payload)

    def _shared_payload(self, reply: Reply) -> Tensor | None:
        """A sum is sent to all workers from memory of the server's own: where it was made, one of them writes again."""
        header, payload = reply.header, reply.payload
        ours = header.kind is Kind.SUM and header.digest == self._protocol.table.digest
        shared = self._shared_sums.get(header.key) if ours else None
        if shared is None or payload is None:
            return payload
        if self._shared_round.get(header.key) != header.round:
            self._shared_round[header.key] = header.round
            shared.copy_(payload)
        return shared

    # -- servers among each other ------------------------------------------------------------------------------------

    @property
    def _others(self) -> list[int]:
        return [rank for rank in self._channels if rank >= self._protocol.workers]

    def _ping(self) -> None:
        while not self._silent.wait(keepalive_s(self._timeout_s)):
            for rank in self._others:
                with contextlib.suppress(*GONE):
                    self._channels[rank].send(self._ping_of(0)).wait()

    def _ping_of(self, round: int, digest: int | None = None) -> Header:
        return Header(Kind.PING, sender=self._rank, digest=digest or self._protocol.table.digest, round=round)
