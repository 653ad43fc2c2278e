"""The server's decisions, without sockets, threads or time: messages go in, replies come out.

    handle(header, payload) ──► a deterministic clock: round_by_round.py       an asynchronous one: on_arrival.py
             │                  sums whole rounds and applies them in order    applies every push at once
             └────────────────► pulls wait here until their key is complete up to the round they need

Replies come one by one, as keys are done: send each before asking for the next, and updating one key hides behind
sending another. The caller holds a lock while it does. A push's tensor belongs to the core from then on; what it does
not need any more goes to `recycle`, for the next push to be received in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.optim.group_settings import GroupSettings
from paceline.optim.piece_state import State
from paceline.parameter_server.clock import Clock
from paceline.parameter_server.compressed_key import Decoder
from paceline.parameter_server.on_arrival import OnArrival
from paceline.parameter_server.round_by_round import Mode, Recycle, RoundByRound
from paceline.parameter_server.server_key import ServerKey, pack_states, unpack_states
from paceline.parameter_server.staleness_policy import StalenessPolicy
from paceline.parameter_server.staleness_stats import StalenessCounter
from paceline.parameter_server.update_log import Applied
from paceline.parameter_server.wire import (
    ALL,
    LOADS_RESIDUAL,
    LOADS_STATE,
    LOADS_WEIGHTS,
    RESIDUAL,
    Close,
    Header,
    Kind,
    Protocol,
    WireError,
    text_payload,
)


@dataclass(frozen=True)
class Reply:
    """A message to send; `to` counts workers first, then servers."""

    to: int
    header: Header
    payload: Tensor | None = None


class ServerCore:
    def __init__(
        self,
        protocol: Protocol,
        server: int,
        held: Mapping[int, ServerKey],
        settings: GroupSettings,
        clock: Clock,
        *,
        mode: Mode = "update",
        staleness_policy: StalenessPolicy | None = None,
        decoders: Mapping[int, Decoder] | None = None,
        recycle: Recycle = lambda _: None,
        log: Callable[[Applied], None] | None = None,
        stats: StalenessCounter | None = None,
    ) -> None:
        """`held`: the server's keys, none in mode aggregate. `decoders`: of those whose pushes may be compressed.

        `log` hears of an asynchronous update before its effect can be seen.
        """
        self._protocol, self._table, self._server = protocol, protocol.table, server
        self._rank = protocol.workers + server
        self._keys = [key.number for key in self._table.of_server(server)]
        self._held, self._mode, self._recycle, self._decoders = held, mode, recycle, decoders or {}
        self._stats = stats or StalenessCounter(len(self._keys))
        self._applying: RoundByRound | OnArrival
        if clock.deterministic:
            self._applying = RoundByRound(
                *(self._table, server, held, settings, self._stats),
                clock=clock,
                mode=mode,
                workers=protocol.workers,
                recycle=recycle,
                decoders=self._decoders,
            )
        else:
            self._applying = OnArrival(
                *(server, held, settings, self._stats),
                staleness_policy=staleness_policy or StalenessPolicy(),
                workers=protocol.workers,
                lanes=protocol.lanes,
                recycle=recycle,
                log=log,
            )
        self._here = set(range(protocol.workers))
        self._waiting = WaitingPulls(self._keys)
        self._handlers: dict[Kind, Callable[[Header, Tensor | None], Iterator[Reply]]] = {
            Kind.OPEN: self._on_open,
            Kind.SETTINGS: self._on_settings,
            Kind.PUSH: self._on_push,
            Kind.CLOSE: self._on_close,
            Kind.PULL: self._on_pull,
            Kind.STATE: self._on_pull,
            Kind.NORMS: self._on_norms,
            Kind.LOAD: self._on_load,
            Kind.PING: self._on_ping,
        }
        self.failure: str | None = None

    # -- what the caller sees ----------------------------------------------------------------------------------------

    def handle(self, header: Header, payload: Tensor | None = None) -> Iterator[Reply]:
        """One message. Nothing happens unless the replies are asked for."""
        self._protocol.check(header, server=self._server)
        if header.sender < self._protocol.workers:
            if header.sender not in self._here:
                self._stats.duplicate()
                if payload is not None:
                    self._recycle(payload)
                return
            if self.failure is not None:
                if header.kind is not Kind.PUSH:
                    yield self._error(header.sender, self.failure)
                return
        handler = self._handlers.get(header.kind)
        if handler is None:
            raise WireError(f"{self._protocol.name(header.sender)} sent {header.kind.name}, which is not for servers")
        yield from handler(header, payload)

    def worker_left(self, worker: int, *, said_goodbye: bool) -> Iterator[Reply]:
        """It said goodbye, or its connection is gone; both ways of applying know whether the others can go on."""
        if worker not in self._here:
            return
        self._here.discard(worker)
        self._waiting.forget(worker)
        failure = self._applying.leave(worker) if said_goodbye else self._applying.lose(worker)
        yield from self._advance() if failure is None else self.fail(failure)

    def fail(self, text: str) -> Iterator[Reply]:
        """Tell every worker, now and whenever one comes; the first reason stays."""
        self.failure = self.failure or text
        for worker in sorted(self._here):
            yield self._error(worker, self.failure)

    @property
    def waiting(self) -> int:
        """Pulls that wait for their round."""
        return len(self._waiting)

    def complete(self, key: int) -> int:
        """The last round such that this key has all updates up to it."""
        return self._applying.complete(key)

    def states(self, round: int) -> dict[int, list[State]] | None:
        """The states of all keys, not copied; None: not all of them have the updates before `round`."""
        if any(self.complete(key) < round - 1 for key in self._keys):
            return None
        return {key: self._held[key].states() for key in self._keys}

    # -- rounds ------------------------------------------------------------------------------------------------------

    def _on_open(self, header: Header, payload: Tensor | None) -> Iterator[Reply]:
        lanes = () if payload is None else tuple(payload.tolist())
        if len(set(lanes)) < len(lanes) or not all(0 <= lane < self._protocol.lanes for lane in lanes):
            raise WireError(
                f"worker {header.sender} sent OPEN of round {header.round} whose lanes are {list(lanes)}, expected "
                f"different ones of 0 to {self._protocol.lanes - 1}"
            )
        gone = sorted(set(range(self._protocol.workers)) - self._here)
        if gone and self._applying.needs_all_workers(header.round):
            yield from self.fail(
                f"worker {gone[0]} said goodbye but worker {header.sender} starts round {header.round}; all workers "
                "must take the same number of steps"
            )
            return
        yield from self._advance(self._applying.open(header.sender, header.round, lanes))

    def _on_settings(self, header: Header, payload: Tensor | None) -> Iterator[Reply]:
        self._applying.set(header.sender, () if payload is None else tuple(payload.tolist()))
        yield from ()

    def _on_push(self, header: Header, payload: Tensor | None) -> Iterator[Reply]:
        payload = torch.empty(0, dtype=torch.uint8) if payload is None else payload  # topk chose nothing of the key
        yield from self._advance(self._applying.push(header, payload), [header.key])

    def _on_close(self, header: Header, payload: Tensor | None) -> Iterator[Reply]:
        yield from self._advance(self._applying.close(header.sender, header.round, Close.unpacked(payload)))

    def _on_norms(self, header: Header, payload: Tensor | None) -> Iterator[Reply]:
        squares = [] if payload is None else payload.tolist()
        self._applying.hear_norms(header.sender - self._protocol.workers, header.round, squares)
        yield from self._advance()

    def _advance(self, new: bool = True, among: Sequence[int] | None = None) -> Iterator[Reply]:
        """After something new about these keys: apply what can be applied, and answer what waited for it."""
        if not new:
            self._stats.duplicate()
            return
        for key in self._applying.advance(among):
            yield from self._answers(key)
        for round, squares in self._applying.norms_to_tell():
            header = self._header(Kind.NORMS, round=round).holding(squares)
            for server in range(self._table.servers):
                if server != self._server:
                    yield Reply(self._protocol.workers + server, header, squares if squares.numel() else None)

    # -- pulls -------------------------------------------------------------------------------------------------------

    def _on_pull(self, header: Header, _: Tensor | None) -> Iterator[Reply]:
        for key in reversed(self._keys) if header.key == ALL else [header.key]:
            self._waiting.add(key, header)
            yield from self._answers(key)

    def _answers(self, key: int) -> Iterator[Reply]:
        for asked in self._waiting.take(key, self.complete(key)):
            if asked.kind is Kind.STATE:
                yield self._state(asked, key)
            elif self._mode == "aggregate":
                yield self._sum(asked, key)
            else:
                yield self._weights(asked, key)

    def _weights(self, pull: Header, key: int) -> Reply:
        payload = self._applying.weights_for(pull, self._held[key])
        norm = self._applying.norm
        header = self._header(Kind.WEIGHTS, round=pull.round, key=key, weight=norm, flags=pull.flags)
        return Reply(pull.sender, header.holding(payload), payload)

    def _sum(self, pull: Header, key: int) -> Reply:
        found = self._applying.sum_for(pull.sender, key, pull.round)
        if found is None:
            raise WireError(
                f"worker {pull.sender} asked for the sum of round {pull.round} of {self._table.name(key)}, which it "
                "has fetched before or which had no gradients"
            )
        header = self._header(Kind.SUM, round=pull.round, key=key, flags=found.used)
        return Reply(pull.sender, header.holding(found.total), found.total)

    # -- saving and resuming -----------------------------------------------------------------------------------------

    def _state(self, asked: Header, key: int) -> Reply:
        payload = torch.empty(0, dtype=torch.uint8)
        if asked.flags == RESIDUAL:
            residual = self._decoders[key].residual() if key in self._decoders else None
            payload = payload if residual is None else residual.view(torch.uint8)
        elif key in self._held:
            payload = pack_states(self._held[key].states())
        header = self._header(Kind.STATE, round=asked.round, key=key)
        return Reply(asked.sender, header.holding(payload), payload if payload.numel() else None)

    def _on_load(self, header: Header, payload: Tensor | None) -> Iterator[Reply]:
        held = self._held.get(header.key)
        if held is not None and payload is not None:
            if header.flags == LOADS_WEIGHTS:
                held.load_weights(payload, header.version)
            elif header.flags == LOADS_STATE:
                held.load_states(unpack_states(payload))
        if header.flags == LOADS_RESIDUAL and header.key in self._decoders:
            self._decoders[header.key].load_residual(None if payload is None else payload.view(torch.float32))
        self._applying.reset(header.key, header.complete)
        yield Reply(header.sender, self._header(Kind.LOAD, round=header.round, key=header.key))

    # -- other messages ---------------------------------------------------------------------------------------------

    def _on_ping(self, header: Header, _: Tensor | None) -> Iterator[Reply]:
        if header.sender < self._protocol.workers:
            yield Reply(header.sender, self._header(Kind.PING, round=header.round))

    def _error(self, worker: int, text: str) -> Reply:
        payload = text_payload(text)
        return Reply(worker, self._header(Kind.ERROR).holding(payload), payload)

    def _header(self, kind: Kind, *, key: int = ALL, **fields: Any) -> Header:
        """With the key's version and how complete it is."""
        version = self._held[key].version if key in self._held else 0
        complete = -1 if key == ALL else self.complete(key)
        return Header(kind, self._rank, self._table.digest, key=key, version=version, complete=complete, **fields)


class WaitingPulls:
    """Pulls that wait: a worker asks once, and is answered when its key has the updates of all rounds that it needs.

    A later question about the same key takes the place of an earlier one that still waits: no worker reads that answer.
    """

    def __init__(self, keys: Iterable[int]) -> None:
        self._asked: dict[int, dict[tuple[int, Kind], Header]] = {key: {} for key in keys}

    def add(self, key: int, header: Header) -> None:
        self._asked[key][header.sender, header.kind] = header

    def take(self, key: int, complete: int) -> list[Header]:
        """Those that a key with all updates up to round `complete` answers, in the order they came."""
        ready = [header for header in self._asked[key].values() if header.complete <= complete]
        for header in ready:
            del self._asked[key][header.sender, header.kind]
        return ready

    def forget(self, worker: int) -> None:
        """It will not read an answer."""
        for asked in self._asked.values():
            for place in [place for place in asked if place[0] == worker]:
                del asked[place]

    def __len__(self) -> int:
        return sum(len(asked) for asked in self._asked.values())
