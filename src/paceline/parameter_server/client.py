"""A worker's side: pushes leave, weights arrive, and a round starts when the clock allows it.

    the loop's thread    open(round) ─► push(key) … ─► close(round) ─► start(round+1): waits, puts
                           │              │  ask(round+1)    │                ▲
    servers                ▼              ▼       ▼          ▼                │
    a thread per server (`Lines`)                     WEIGHTS of a key ─► what has arrived

Only `start`, `newest` and `refresh` hand weights out, so nothing changes under a forward that runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from paceline.errors import PeerLostError
from paceline.optim.piece_state import State
from paceline.parameter_server.clock import Clock, PullRequest, WeightsInHand
from paceline.parameter_server.key_ranges import Key
from paceline.parameter_server.key_state import pack_states, unpack_states
from paceline.parameter_server.lines import Lines
from paceline.parameter_server.link import Sent
from paceline.parameter_server.server import Server
from paceline.parameter_server.wire import (
    ALL,
    AS_THEY_ARE,
    LOADS_STATE,
    LOADS_WEIGHTS,
    Close,
    Header,
    Kind,
    Protocol,
    lanes_payload,
)

Put = Callable[[Key, Tensor], None]  # weights or a sum of a key, to be copied at once


class Client:
    def __init__(
        self,
        lines: Lines,
        protocol: Protocol,
        clock: Clock,
        *,
        recycle: Callable[[Tensor], None] = lambda payload: None,
        near: Server | None = None,
    ) -> None:
        """`near`: the one server, where it is in this process and its clock is deterministic."""
        self._near = near
        self._lines, self.protocol, self._clock, self._recycle = lines, protocol, clock, recycle
        self.table = protocol.table
        self._digest = self.table.digest
        self._hand = WeightsInHand(clock, range(len(self.table.keys)))
        self._arrived: dict[int, Tensor] = {}  # weights that nobody has put yet, by key
        self._newest: dict[int, Tensor] | None = None  # at a boundary: weights by key, whatever the clock says
        self._sums: dict[tuple[int, int], tuple[Header, Tensor]] = {}  # by (round, key)
        self._states: dict[int, Tensor | None] = {}
        self._loads = 0
        self.versions: Mapping[int, int] = dict.fromkeys(range(len(self.table.keys)), 0)  # of the weights being read
        self.norm = float("nan")  # of the last round's gradient, where the servers found it
        lines.add(self)

    # -- one round ---------------------------------------------------------------------------------------------------

    def open(self, round: int, lanes: Sequence[int]) -> None:
        self._tell_all(Kind.OPEN, round, lanes_payload(lanes) if lanes else None)

    def tell_settings(self, settings: Sequence[float]) -> None:
        """What pushes are applied with from now on, where they are applied on arrival."""
        self._tell_all(Kind.SETTINGS, 0, torch.tensor(settings, dtype=torch.float64) if settings else None)

    def push(self, key: Key, gradient: Tensor, *, round: int, lane: int, used: int, weight: float = 1.0) -> Sent:
        version = 0 if self._clock.deterministic else self.versions[key.number]
        header = self._header(Kind.PUSH, round, key.number, lane=lane, version=version, flags=used, weight=weight)
        return self._lines.send(key.server, header.holding(gradient), gradient)

    def close(self, round: int, close: Close) -> None:
        self._tell_all(Kind.CLOSE, round, close.packed())
        with self._lines.change:
            self._hand.pushed(round)

    def wait_for(self, sent: Sent) -> None:
        try:
            sent.wait()
        except PeerLostError as error:
            raise self._lines.explained(error) from error

    # -- weights -----------------------------------------------------------------------------------------------------

    def ask(self, round: int) -> None:
        """For the weights that `round` needs, unless they are there or on their way."""
        with self._lines.change:
            request = self._hand.request_for(round)
        if request is not None:
            self._pull(request)

    def start(self, round: int, put: Put) -> float:
        """Wait until `round` may start, and put the weights it reads; the seconds that were waited."""
        with self._lines.change:
            ask = bool(self._hand.lacking(round))
        if ask:
            self.ask(round)
        waited = 0.0
        with self._lines.change:
            while lacking := set(self._hand.lacking(round)):
                here = self._take_arrived()
                if not here:
                    fewer = lambda: bool(self._arrived) or set(self._hand.lacking(round)) != lacking  # noqa: E731
                    waited += self._lines.wait_until(
                        fewer, f"the weights that round {round} needs{self._whose(lacking)}"
                    )
                    continue
                self._lines.change.release()
                try:
                    self._put(here, put)
                finally:
                    self._lines.change.acquire()
            self.versions = self._hand.start(round)
            here = self._take_arrived()
        self._put(here, put)
        return waited

    def newest(self, round: int, put: Put) -> None:
        """Put weights with all updates before `round`, also those that the clock would not show it."""
        self._put(self._as_they_are(round, round - 1), put)

    def refresh(self, round: int, put: Put) -> None:
        """Put the weights as the servers have them now, while everybody stands still; rounds read others."""
        self._put(self._as_they_are(round, -1), put)
        with self._lines.change:
            self._hand.forget()
            self._arrived.clear()

    def _as_they_are(self, round: int, complete: int) -> Mapping[int, Tensor]:
        with self._lines.change:
            self._newest = {}
        self._pull(PullRequest(round, complete, tuple(range(len(self.table.keys)))), flags=AS_THEY_ARE)
        with self._lines.change:
            found = self._newest
            self._lines.wait_until(lambda: len(found) == len(self.table.keys), f"the weights before round {round}")
            self._newest = None
        return found

    def have_been_heard(self) -> None:
        self._lines.have_been_heard()

    def sums(self, round: int, put: Put) -> dict[int, int]:
        """Fetch and put the sum of each key; which of its pieces were used, by key."""
        self._pull(PullRequest(round, round, tuple(range(len(self.table.keys)))))
        used: dict[int, int] = {}
        while len(used) < len(self.table.keys):
            with self._lines.change:
                self._lines.wait_until(lambda: bool(self._sums), f"the sums of round {round}")
                here, self._sums = self._sums, {}
            for (_, number), (header, total) in here.items():
                put(self.table.keys[number], total)
                used[number] = header.flags
                self._recycle(total)
        return used

    def _take_arrived(self) -> dict[int, Tensor]:
        here, self._arrived = self._arrived, {}
        return here

    def _put(self, here: Mapping[int, Tensor], put: Put) -> None:
        for number, weights in here.items():
            put(self.table.keys[number], weights)
            self._recycle(weights)

    def _whose(self, keys: set[int]) -> str:
        servers = sorted({self.table.keys[number].server for number in keys})
        return f" from server{'s' if len(servers) > 1 else ''} {', '.join(map(str, servers))}"

    # -- what arrives, with the lines' lock held ---------------------------------------------------------------------

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

        Where the server is near they are its own tensors, which change when this worker closes another round.
        """
        here = None if self._near is None else self._near.states(self._digest, round)
        if here is not None:
            return here
        self._states.clear()
        for key in self.table.keys:
            header = self._header(Kind.STATE, round, key.number, complete=round - 1)
            self._lines.send(key.server, header)
        with self._lines.change:
            self._lines.wait_until(lambda: len(self._states) == len(self.table.keys), "the optimizer's state")
        return {number: [] if packed is None else unpack_states(packed) for number, packed in self._states.items()}

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
                header = self._header(Kind.LOAD, round, key.number, complete=round - 1, flags=flags)
                self._lines.send(key.server, header if payload is None else header.holding(payload), payload)
                expected += 1
        with self._lines.change:
            self._lines.wait_until(lambda: self._loads == expected, "the servers to load the saved state")

    def begin_at(self, round: int) -> None:
        """The weights at hand are those that `round` reads, and have been loaded."""
        first = self._clock.needs(round) + 1 if self._clock.deterministic else round
        with self._lines.change:
            self._hand = WeightsInHand(self._clock, range(len(self.table.keys)), first_round=first)
            self._arrived.clear()
        self.versions = dict.fromkeys(range(len(self.table.keys)), 0)

    # -- parts -------------------------------------------------------------------------------------------------------

    def _pull(self, request: PullRequest, *, flags: int = 0) -> None:
        wanted = set(request.keys)
        for server in range(self.table.servers):
            keys = [key.number for key in self.table.of_server(server)]
            for number in [ALL] if wanted.issuperset(keys) else [key for key in keys if key in wanted]:
                asked = self._header(Kind.PULL, request.round, number, complete=request.complete, flags=flags)
                self._lines.send(server, asked)

    def _tell_all(self, kind: Kind, round: int, payload: Tensor | None) -> None:
        header = self._header(kind, round, ALL)
        for server in range(self.table.servers):
            self._lines.send(server, header if payload is None else header.holding(payload), payload)

    def _header(
        self,
        kind: Kind,
        round: int,
        key: int,
        *,
        lane: int = 0,
        version: int = 0,
        complete: int = -1,
        flags: int = 0,
        weight: float = 1.0,
    ) -> Header:
        return Header(
            kind=kind,
            sender=self._lines.worker,
            digest=self._digest,
            round=round,
            lane=lane,
            key=key,
            version=version,
            complete=complete,
            weight=weight,
            flags=flags,
        )
