"""A worker's side: pushes leave, weights arrive, and a round starts when the clock allows it.

    the loop's thread    open(round) ─► push(key) … ─► close(round) ─► start(round+1): waits, puts
                           │              │  ask(round+1)    │                ▲
    servers                ▼              ▼       ▼          ▼                │
    a thread per server                              WEIGHTS of a key ─► what has arrived

    Client of space 0 ─┐                      ┌══ server 0     a client for each set of parameters that are updated
    Client of space 1 ─┴─ ServerConnections ══┴══ server 1     together; messages name their space by its digest

Only `start`, `newest` and `refresh` hand weights out, so nothing changes under a forward that runs.

A server that is lost fails every wait, with what it held and what to do. In an elastic job the group may be over
instead: then every wait says `GenerationEnded`, and the connections of another group are made.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from paceline.errors import GenerationEnded, PacelineError, PeerLostError
from paceline.optim.piece_state import State
from paceline.parameter_server.channel import GONE, Channel, Sent, end_of, keepalive_s, listen
from paceline.parameter_server.clock import Clock, PullRequest, WeightsInHand
from paceline.parameter_server.key_ranges import Key
from paceline.parameter_server.server import Server
from paceline.parameter_server.server_key import pack_states, unpack_states
from paceline.parameter_server.staleness_stats import StalenessCounter, StalenessStats
from paceline.parameter_server.wire import (
    ALL,
    AS_THEY_ARE,
    LAST_PING,
    LOADS_RESIDUAL,
    LOADS_STATE,
    LOADS_WEIGHTS,
    RESIDUAL,
    Close,
    Header,
    Kind,
    Protocol,
    is_last,
    lanes_payload,
    text_of,
    text_payload,
)
from paceline.world.waiting import Waiting

Put = Callable[[Key, Tensor], None]  # weights or a sum of a key, to be copied at once

GOODBYE_S = 5.0
LAST_WORDS_S = 1.0
EXPLANATION_S = 5.0  # that a server has to say who was lost; it notices when the workers do


class ServerConnections:
    """One thread hears each server, and one says now and then that the worker is there."""

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
        self._clients: dict[int, Client] = {}  # by the digest of their space
        self.change = threading.Condition()
        self.failure: str | None = None
        self._over = False  # the failure is that the workers have changed: the job goes on
        self._all_fail = False  # with it: it is not this worker's own affair
        self._pings = itertools.count(1)
        self._answered = [0] * len(channels)  # pings, by server
        self._silent = threading.Event()
        self._begun_s = time.monotonic()
        self._threads: list[threading.Thread] = []

    def add(self, client: Client) -> None:
        self._clients[client.protocol.table.digest] = client
        if self._threads:
            return
        for server in range(len(self._channels)):
            name = f"paceline-worker-hears-server-{server}"
            self._threads.append(threading.Thread(target=self._listen, args=(server,), name=name, daemon=True))
        self._threads.append(threading.Thread(target=self._keep_alive, name="paceline-worker-pings", daemon=True))
        for thread in self._threads:
            thread.start()

    def stats_so_far(self) -> StalenessStats:
        return self.stats.stats(time.monotonic() - self._begun_s)

    # -- sending -----------------------------------------------------------------------------------------------------

    def send(self, server: int, header: Header, payload: Tensor | None = None) -> Sent:
        if payload is not None:
            header = header.holding(payload)
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
        """The seconds it took."""
        with self.change:
            if self.failure is None and true():
                return 0.0
            begun = time.monotonic()
            # A little longer than servers wait for a worker: they can say who it was.
            patience_s = self.timeout_s + keepalive_s(self.timeout_s) + LAST_WORDS_S
            with Waiting("the servers"):
                self.change.wait_for(lambda: self.failure is not None or true(), timeout=patience_s)
            if self.failure is not None:
                raise self._failed()
            if not true():
                raise PeerLostError(f"worker {self.worker} waited {self.timeout_s:g} s for {what}, which did not come")
            return time.monotonic() - begun

    def _failed(self) -> PacelineError:
        return GenerationEnded(self.failure) if self._over else PeerLostError(self.failure)

    def flush(self) -> None:
        """Wait until the servers have handled everything that this worker sent."""
        number = next(self._pings)
        self._ping(number)
        self.wait_until(lambda: min(self._answered) >= number, "a sign of life of the servers")

    def _ping(self, number: int) -> None:
        digest = next(iter(self._clients))
        for server in range(len(self._channels)):
            self.send(server, Header(Kind.PING, sender=self.worker, digest=digest, round=number))

    def _keep_alive(self) -> None:
        """Servers wait for a worker no longer than the timeout, and it for them: an idle one sends pings."""
        while not self._silent.wait(keepalive_s(self.timeout_s)):
            with contextlib.suppress(*GONE):
                self._ping(next(self._pings))

    # -- receiving ---------------------------------------------------------------------------------------------------

    def _listen(self, server: int) -> None:
        listen(
            self._channels[server],
            partial(self._hear, server),
            lost=partial(self._lose, server),
            over=lambda error: self._fail(str(error), over=True),
            failed=lambda error: self._fail(f"{type(error).__name__}: {error}"),
        )

    def _hear(self, server: int, header: Header, payload: Tensor | None) -> bool:
        """Whether more will come."""
        if payload is not None:
            self.stats.received(f"server {server}", payload.nbytes)
        with self.change:
            if header.kind is Kind.ERROR:
                self._fail(text_of(payload), over=self._elastic, all_fail=True)
            elif header.kind is Kind.PING:
                self._answered[server] = max(self._answered[server], header.round)
            else:
                self._clients[header.digest].heard(header, payload)
            self.change.notify_all()
        return not is_last(header, from_server=True)

    def _lose(self, server: int, why: str) -> None:
        protocol = next(iter(self._clients.values())).protocol
        self._fail(protocol.lost_server(server, end_of(why)), all_fail=True)

    def _fail(self, failure: str, *, over: bool = False, all_fail: bool = False) -> None:
        """Every wait ends; the first reason stays. `over`: the job goes on. `all_fail`: the servers have to know it."""
        with self.change:
            if self.failure is None:
                self.failure, self._over = failure, over
            self._all_fail = self._all_fail or all_fail
            self.change.notify_all()

    # -- the end -----------------------------------------------------------------------------------------------------

    def abandon(self, why: str) -> None:
        """The group is over: every wait ends, nothing is sent, and no thread is left."""
        self._silent.set()
        self._fail(why, over=True)
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
                    self.send(server, Header(Kind.ERROR, sender=self.worker, digest=digest), why).wait()
                self.send(server, Header(Kind.PING, sender=self.worker, digest=digest, round=LAST_PING)).wait()
                self.send(server, Header(Kind.BYE, sender=self.worker, digest=digest)).wait()
        for thread in self._threads:
            thread.join(GOODBYE_S)


class Client:
    def __init__(
        self,
        connections: ServerConnections,
        protocol: Protocol,
        clock: Clock,
        *,
        recycle: Callable[[Tensor], None] = lambda payload: None,
        local_server: Server | None = None,
    ) -> None:
        """`local_server`: the one server, where it is in this process and its clock is deterministic."""
        self._local_server = local_server
        self._connections, self.protocol, self._clock, self._recycle = connections, protocol, clock, recycle
        self.table = protocol.table
        self._worker, self._digest = connections.worker, self.table.digest
        self._hand = WeightsInHand(clock, range(len(self.table.keys)))
        self._arrived: dict[int, Tensor] = {}  # weights that were not put yet, by key
        self._newest: dict[int, Tensor] | None = None  # at a boundary: weights by key, whatever the clock says
        self._sums: dict[tuple[int, int], tuple[Header, Tensor]] = {}  # by (round, key)
        self._states: dict[int, Tensor | None] = {}
        self._loads = 0
        self.versions: Mapping[int, int] = dict.fromkeys(range(len(self.table.keys)), 0)  # of the weights being read
        self.norm = float("nan")  # of the last round's gradient, where the servers found it
        connections.add(self)

    # -- one round ---------------------------------------------------------------------------------------------------

    def open(self, round: int, lanes: Sequence[int]) -> None:
        self._tell_all(Kind.OPEN, round, lanes_payload(lanes) if lanes else None)

    def tell_settings(self, settings: Sequence[float]) -> None:
        """What pushes are applied with from now on, where they are applied on arrival."""
        self._tell_all(Kind.SETTINGS, 0, torch.tensor(settings, dtype=torch.float64) if settings else None)

    def push(self, key: Key, gradient: Tensor, *, round: int, lane: int, used: int, weight: float = 1.0) -> Sent:
        version = 0 if self._clock.deterministic else self.versions[key.number]
        about = {"round": round, "lane": lane, "key": key.number, "version": version, "flags": used}
        payload = gradient if gradient.numel() else None
        return self._connections.send(key.server, self._header(Kind.PUSH, weight=weight, **about), payload)

    def close(self, round: int, close: Close) -> None:
        self._tell_all(Kind.CLOSE, round, close.packed())
        with self._connections.change:
            self._hand.pushed(round)

    def wait_for(self, sent: Sent) -> None:
        try:
            sent.wait()
        except PeerLostError as error:
            raise self._connections.explained(error) from error

    # -- weights -----------------------------------------------------------------------------------------------------

    def ask(self, round: int) -> None:
        """For the weights that `round` needs, unless they are there or on their way."""
        with self._connections.change:
            request = self._hand.request_for(round)
        if request is not None:
            self._pull(request)

    def start(self, round: int, put: Put) -> float:
        """Wait until `round` may start, and put the weights it reads; the seconds that were waited."""
        with self._connections.change:
            lacking = set(self._hand.lacking(round))
        if lacking:
            self.ask(round)
        waited = 0.0
        while True:
            with self._connections.change:
                lacking = set(self._hand.lacking(round))
                here, self._arrived = self._arrived, {}
                if not lacking:
                    self.versions = self._hand.start(round)
            self._put(here, put)  # without the lock: more may arrive meanwhile
            if not lacking:
                return waited
            if not here:
                what = f"the weights that round {round} needs{self._whose(lacking)}"
                waited += self._connections.wait_until(partial(self._has_news, round, lacking), what)

    def _has_news(self, round: int, lacking: set[int]) -> bool:
        return bool(self._arrived) or set(self._hand.lacking(round)) != lacking

    def newest(self, round: int, put: Put) -> None:
        """Put weights with all updates before `round`, also those that the clock would not show it."""
        self._put(self._as_they_are(round, round - 1), put)

    def refresh(self, round: int, put: Put) -> None:
        """Put the weights as the servers have them now, while all workers stand still; rounds read others."""
        self._put(self._as_they_are(round, -1), put)
        with self._connections.change:
            self._hand.forget()
            self._arrived.clear()

    def _as_they_are(self, round: int, complete: int) -> Mapping[int, Tensor]:
        with self._connections.change:
            self._newest = {}
            found = self._newest
        self._pull(PullRequest(round, complete, tuple(range(len(self.table.keys)))), flags=AS_THEY_ARE)
        what = f"the weights before round {round}"
        self._connections.wait_until(lambda: len(found) == len(self.table.keys), what)
        self._newest = None
        return found

    def flush(self) -> None:
        self._connections.flush()

    def sums(self, round: int, put: Put) -> dict[int, int]:
        """Fetch and put the sum of each key; which of its pieces were used, by key."""
        self._pull(PullRequest(round, round, tuple(range(len(self.table.keys)))))
        used: dict[int, int] = {}
        while len(used) < len(self.table.keys):
            self._connections.wait_until(lambda: bool(self._sums), f"the sums of round {round}")
            with self._connections.change:
                here, self._sums = self._sums, {}
            for (_, number), (header, total) in here.items():
                put(self.table.keys[number], total)
                used[number] = header.flags
                self._recycle(total)
        return used

    def _put(self, here: Mapping[int, Tensor], put: Put) -> None:
        for number, weights in here.items():
            put(self.table.keys[number], weights)
            self._recycle(weights)

    def _whose(self, keys: set[int]) -> str:
        servers = sorted({self.table.keys[number].server for number in keys})
        return f" from server{'s' if len(servers) > 1 else ''} {', '.join(map(str, servers))}"

    # -- what arrives, with the connections' lock held ---------------------------------------------------------------

    def heard(self, header: Header, payload: Tensor | None) -> None:
        if header.kind is Kind.WEIGHTS and payload is not None:
            self.norm = header.weight
            self._weights(header, payload)
        elif header.kind is Kind.SUM and payload is not None:
            self._sums[header.round, header.key] = header, payload
        elif header.kind is Kind.STATE:
            self._states[header.key] = payload
        elif header.kind is Kind.LOAD:
            self._loads += 1

    def _weights(self, header: Header, payload: Tensor) -> None:
        if header.flags & AS_THEY_ARE:
            if self._newest is not None:
                self._newest[header.key] = payload
            return
        version, complete, round = header.version, header.complete, header.round
        if self._hand.arrived(header.key, version=version, complete=complete, round=round):
            old = self._arrived.pop(header.key, None)
            self._arrived[header.key] = payload
        else:
            old = payload
        if old is not None:
            self._recycle(old)

    # -- saving and loading ------------------------------------------------------------------------------------------

    def states(self, round: int) -> dict[int, list[State]]:
        """What the optimizers keep for the pieces of each key, with all updates before `round`.

        Of a server in this process they are its own tensors, which change when this worker closes another round.
        """
        here = None if self._local_server is None else self._local_server.states(self._digest, round)
        if here is not None:
            return here
        packed = self._ask_states(round, self.table.keys)
        return {number: [] if found is None else unpack_states(found) for number, found in packed.items()}

    def residuals(self, round: int) -> dict[int, Tensor]:
        """What compression keeps of each key's sums, as its gradient lies, with all updates before `round`."""
        keys = [key for key in self.table.keys if key.compressor is not None]
        found = self._ask_states(round, keys, flags=RESIDUAL)
        return {number: kept.view(torch.float32) for number, kept in found.items() if kept is not None}

    def _ask_states(self, round: int, keys: Sequence[Key], flags: int = 0) -> dict[int, Tensor | None]:
        self._states = {}
        for key in keys:
            about = {"round": round, "key": key.number, "complete": round - 1, "flags": flags}
            self._connections.send(key.server, self._header(Kind.STATE, **about))
        self._connections.wait_until(lambda: len(self._states) == len(keys), "the servers' state")
        return self._states

    def load(
        self, round: int, parameters: Sequence[Tensor] | None, states: Mapping[int, Sequence[State]] | None
    ) -> None:
        """Have the servers go on with `round` from these; None: from what they have, if they have such."""
        self._loads, expected = 0, 0
        for key in self.table.keys:
            payloads: list[tuple[int, Tensor | None]] = [(0, None)]
            if parameters is not None:
                weights = key.gathered([parameter.detach() for parameter in parameters]).cpu()
                payloads.append((LOADS_WEIGHTS, weights))
            if states is not None:
                payloads.append((LOADS_STATE, pack_states(states[key.number])))
            for flags, payload in payloads:
                header = self._header(Kind.LOAD, round=round, key=key.number, complete=round - 1, flags=flags)
                self._connections.send(key.server, header, payload)
                expected += 1
        self._connections.wait_until(lambda: self._loads == expected, "the servers to load the saved state")

    def load_residuals(self, round: int, residuals: Mapping[int, Tensor]) -> None:
        """Have the servers go on with these; a key that is not there begins with nothing."""
        keys = [key for key in self.table.keys if key.compressor is not None]
        self._loads = 0
        for key in keys:
            about = {"round": round, "key": key.number, "complete": round - 1, "flags": LOADS_RESIDUAL}
            kept = residuals.get(key.number)
            payload = None if kept is None else kept.contiguous().view(torch.uint8)
            self._connections.send(key.server, self._header(Kind.LOAD, **about), payload)
        self._connections.wait_until(lambda: self._loads == len(keys), "the servers to load compression's residuals")

    def begin_at(self, round: int) -> None:
        """The weights at hand are those that `round` reads, and have been loaded."""
        first = self._clock.needs(round) + 1 if self._clock.deterministic else round
        with self._connections.change:
            self._hand = WeightsInHand(self._clock, range(len(self.table.keys)), first_round=first)
            self._arrived.clear()
        self.versions = dict.fromkeys(range(len(self.table.keys)), 0)

    # -- messages ----------------------------------------------------------------------------------------------------

    def _pull(self, request: PullRequest, *, flags: int = 0) -> None:
        wanted = set(request.keys)
        about = {"round": request.round, "complete": request.complete, "flags": flags}
        for server in range(self.table.servers):
            keys = [key.number for key in self.table.of_server(server)]
            for number in [ALL] if wanted.issuperset(keys) else [key for key in keys if key in wanted]:
                self._connections.send(server, self._header(Kind.PULL, key=number, **about))

    def _tell_all(self, kind: Kind, round: int, payload: Tensor | None) -> None:
        for server in range(self.table.servers):
            self._connections.send(server, self._header(kind, round=round), payload)

    def _header(self, kind: Kind, **about: Any) -> Header:
        return Header(kind, self._worker, self._digest, **about)
