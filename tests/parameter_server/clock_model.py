"""A parameter server in miniature: every message waits in its channel until a schedule delivers it.

    worker 0 ──►[open push push … close pull]──► server 0          channels keep their order; between channels
             ◄──[weights weights]◄──────────────                   the schedule decides: one step is one action

Weights are the set of what is in them, so that a read can be held against the rule itself, round by round and lane by
lane, without the numbers (`complete`, versions) by which the real code decides. Workers decide with `WeightsInHand`.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

from paceline.parameter_server.clock import BoundedDelay, BoundedStaleness, Clock, WeightsInHand
from paceline.world.lanes import neighbouring_lanes

Fact = tuple[str, int, int]  # ("push", round, lane), or ("said", round, worker): which lanes it had in the round
Contents = frozenset[Fact]
Action = tuple[Any, ...]

CLOCKS: list[Clock] = [
    *(BoundedStaleness(steps, from_round=0) for steps in (0, 1, 2, math.inf)),
    *(BoundedDelay(rounds) for rounds in (0, 1, 3)),
    BoundedStaleness(1, see_own_updates=True, from_round=0),
    BoundedStaleness(2, from_round=3),
    BoundedStaleness(2),  # its window does not open in the rounds of the miniature
    BoundedStaleness(math.inf, see_own_updates=True),
]
CHOICES = st.lists(st.integers(0, 30), min_size=1, max_size=40)


@dataclass(frozen=True)
class Open:
    round: int
    lanes: tuple[int, ...]


@dataclass(frozen=True)
class Push:
    round: int
    lane: int
    key: int
    version_read: int


@dataclass(frozen=True)
class Close:
    round: int


@dataclass(frozen=True)
class Pull:
    round: int
    complete: int
    keys: tuple[int, ...]


@dataclass(frozen=True)
class Weights:
    round: int
    key: int
    version: int
    complete: int
    contents: Contents


@dataclass(frozen=True)
class Shape:
    """How large the miniature is, and which (round, lane) have no samples."""

    workers: int = 2
    lanes: int = 2
    servers: int = 1
    keys: int = 2
    rounds: int = 4
    absent: frozenset[tuple[int, int]] = frozenset()

    def server_of(self, key: int) -> int:
        return key % self.servers

    def lanes_of(self, worker: int, round: int) -> tuple[int, ...]:
        own = neighbouring_lanes(self.lanes, self.workers)[worker]
        return tuple(lane for lane in own if (round, lane) not in self.absent)

    def facts(self, round: int) -> Iterator[Fact]:
        """All that a round brings."""
        for worker in range(self.workers):
            yield ("said", round, worker)
            yield from (("push", round, lane) for lane in self.lanes_of(worker, round))


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    workers = draw(st.integers(1, 3))
    lanes, rounds = workers + draw(st.integers(0, 2)), draw(st.integers(3, 6))
    keys = draw(st.integers(1, 3))
    places = st.tuples(st.integers(0, rounds - 1), st.integers(0, lanes - 1))
    return Shape(
        workers, lanes, draw(st.integers(1, min(2, keys))), keys, rounds, draw(st.frozensets(places, max_size=4))
    )


@dataclass(frozen=True)
class ReadEntry:
    worker: int
    round: int
    lanes: tuple[int, ...]
    versions: dict[int, int]


@dataclass(frozen=True)
class ApplyEntry:
    server: int
    key: int
    round: int
    lane: int | None  # None: all lanes of the round, summed
    worker: int | None


class ServerOfModel:
    """Applies pushes on arrival, or whole rounds in order where the clock is deterministic."""

    def __init__(self, number: int, shape: Shape, clock: Clock) -> None:
        self.number, self.shape, self.clock = number, shape, clock
        keys = [key for key in range(shape.keys) if shape.server_of(key) == number]
        self.contents: dict[int, Contents] = {key: frozenset() for key in keys}
        self.version: Counter[int] = Counter()
        self.closed: Counter[int] = Counter()
        self.rounds_applied = 0
        self.held: dict[tuple[int, int], Pull] = {}
        self.applied: list[ApplyEntry] = []

    def receive(self, worker: int, message: object) -> list[tuple[int, Weights]]:
        """The answers that it makes possible, each with its worker."""
        if isinstance(message, Pull):
            self.held |= {(worker, key): message for key in message.keys}
        elif self.clock.deterministic:
            if isinstance(message, Close):
                self.closed[message.round] += 1
                self._apply_finished_rounds()
        elif isinstance(message, Open):
            for key in self.contents:
                self.contents[key] |= {("said", message.round, worker)}
        elif isinstance(message, Push):
            self.contents[message.key] |= {("push", message.round, message.lane)}
            self.version[message.key] += 1
            self.applied.append(ApplyEntry(self.number, message.key, message.round, message.lane, worker))
        return list(self._answers())

    def _apply_finished_rounds(self) -> None:
        while self.closed[self.rounds_applied] == self.shape.workers:
            facts = frozenset(self.shape.facts(self.rounds_applied))
            for key in self.contents:
                self.contents[key] |= facts
                if any(kind == "push" for kind, *_ in facts):
                    self.version[key] += 1
                    self.applied.append(ApplyEntry(self.number, key, self.rounds_applied, None, None))
            self.rounds_applied += 1

    def complete(self, key: int) -> int:
        done = 0
        while done < self.shape.rounds and self.contents[key].issuperset(self.shape.facts(done)):
            done += 1
        return done - 1

    def _answers(self) -> Iterator[tuple[int, Weights]]:
        complete = {key: self.complete(key) for key in self.contents}
        for (worker, key), pull in list(self.held.items()):
            if complete[key] >= pull.complete:
                del self.held[worker, key]
                yield worker, Weights(pull.round, key, self.version[key], complete[key], self.contents[key])


@dataclass
class WorkerOfModel:
    hand: WeightsInHand
    newest: dict[int, Contents]
    read: dict[int, Contents]
    round: int = 0
    computing: bool = False
    to_send: deque[tuple[int, object]] = field(default_factory=deque)


def rounds_required(clock: Clock, round: int) -> int:
    """The rule as the issue words it: how many of the first rounds must be in what `round` reads."""
    if isinstance(clock, BoundedDelay):
        return round - round % (clock.rounds + 1)
    assert isinstance(clock, BoundedStaleness)
    least = 0 if clock.steps == math.inf else max(0, round - int(clock.steps))
    return max(least, min(round, clock.opens))


class Miniature:
    """All of it, and the rule that every step is held against. Workers obey `obeyed`, which should be the `clock`."""

    def __init__(
        self, clock: Clock, shape: Shape, obeyed: Clock | None = None, hand: type[WeightsInHand] = WeightsInHand
    ) -> None:
        self.clock, self.shape, self.obeyed = clock, shape, obeyed or clock
        self.servers = [ServerOfModel(number, shape, clock) for number in range(shape.servers)]
        nothing: dict[int, Contents] = {key: frozenset() for key in range(shape.keys)}
        self.workers = [
            WorkerOfModel(hand(self.obeyed, range(shape.keys)), dict(nothing), dict(nothing))
            for _ in range(shape.workers)
        ]
        self.channels: dict[tuple[str, int, int], deque[Any]] = {
            (towards, worker, server): deque()
            for towards in ("server", "worker")
            for worker in range(shape.workers)
            for server in range(shape.servers)
        }
        self.reads: list[ReadEntry] = []

    # -- what can happen next ------------------------------------------------------------------------------------------

    def actions(self) -> list[Action]:
        found: list[Action] = [("deliver", *channel) for channel, queue in self.channels.items() if queue]
        for number, worker in enumerate(self.workers):
            if worker.computing:
                found.append(("send", number))
                if worker.round + 1 < self.shape.rounds and not self.clock.see_own_updates:
                    found.append(("ask early", number))
            elif worker.round < self.shape.rounds and not worker.hand.lacking(worker.round):
                found.append(("start", number))
        return found

    def step(self, choice: int) -> bool:
        """One of the possible actions; False when there is none."""
        actions = self.actions()
        if actions:
            self.act(*actions[choice % len(actions)])
        return bool(actions)

    def act(self, kind: str, *where: Any) -> None:
        if kind == "deliver":
            self._deliver(where)
        elif kind == "ask early":
            self._ask(where[0], self.workers[where[0]].round + 1)
        elif kind == "start":
            self._start(where[0])
        else:
            self._send(where[0])
        for number in range(self.shape.workers):
            self.check_blocked(number)

    def run_to_end(self, choices: Sequence[int] = (0,)) -> None:
        """Whatever the schedule does from here, all workers must come to their end."""
        steps = 0
        # An early question changes nothing when it is asked again, so a schedule may not ask for ever.
        while actions := [action for action in self.actions() if action[0] != "ask early"]:
            self.act(*actions[choices[steps % len(choices)] % len(actions)])
            steps += 1
        stuck = {number: worker.round for number, worker in enumerate(self.workers) if worker.round < self.shape.rounds}
        assert not stuck, f"deadlock: no message is on its way, and workers wait before rounds {stuck}"

    # -- the actions ---------------------------------------------------------------------------------------------------

    def _start(self, number: int) -> None:
        worker = self.workers[number]
        versions = worker.hand.start(worker.round)
        if self.obeyed.pulls_before(worker.round):
            worker.read = dict(worker.newest)
        lanes = self.shape.lanes_of(number, worker.round)
        self.reads.append(ReadEntry(number, worker.round, lanes, versions))
        self.check_read(number, versions)
        worker.computing = True
        servers = range(self.shape.servers)
        worker.to_send.extend((server, Open(worker.round, lanes)) for server in servers)
        for lane in lanes:
            for key in reversed(range(self.shape.keys)):
                worker.to_send.append((self.shape.server_of(key), Push(worker.round, lane, key, versions[key])))
        worker.to_send.extend((server, Close(worker.round)) for server in servers)

    def _send(self, number: int) -> None:
        worker = self.workers[number]
        server, message = worker.to_send.popleft()
        self.channels["server", number, server].append(message)
        if not worker.to_send:
            worker.computing = False
            if self.shape.lanes_of(number, worker.round):
                worker.hand.pushed(worker.round)
            worker.round += 1
            if worker.round < self.shape.rounds:
                self._ask(number, worker.round)

    def _ask(self, number: int, round: int) -> None:
        request = self.workers[number].hand.request_for(round)
        for server in range(self.shape.servers) if request else ():
            keys = tuple(key for key in request.keys if self.shape.server_of(key) == server) if request else ()
            if request and keys:
                self.channels["server", number, server].append(Pull(round, request.complete, keys))

    def _deliver(self, channel: tuple[str, int, int]) -> None:
        towards, worker, server = channel
        message = self.channels[channel].popleft()
        if towards == "server":
            for to, answer in self.servers[server].receive(worker, message):
                self.channels["worker", to, server].append(answer)
            return
        receiver = self.workers[worker]
        if receiver.hand.arrived(message.key, version=message.version, complete=message.complete, round=message.round):
            receiver.newest[message.key] = message.contents

    # -- the rule ------------------------------------------------------------------------------------------------------

    def required(self, number: int) -> Contents:
        """What the worker's next or present round must not miss."""
        round = self.workers[number].round
        facts = {fact for r in range(rounds_required(self.clock, round)) for fact in self.shape.facts(r)}
        if self.clock.see_own_updates:
            facts |= {("push", r, lane) for r in range(round) for lane in self.shape.lanes_of(number, r)}
        return frozenset(facts)

    def check_read(self, number: int, versions: dict[int, int]) -> None:
        worker, required = self.workers[number], self.required(number)
        for key, contents in worker.read.items():
            where = f"worker {number}, round {worker.round}, key {key}"
            assert required <= contents, f"{where}: read without {sorted(required - contents)}"
            pushes = {fact for fact in contents if fact[0] == "push"}
            if self.clock.deterministic:
                assert contents == required, f"{where}: read with {sorted(contents - required)}, which are not its own"
                assert versions[key] == len({round for _, round, _ in pushes}), where
            else:
                assert versions[key] == len(pushes), where

    def check_blocked(self, number: int) -> None:
        worker = self.workers[number]
        if worker.computing or worker.round == self.shape.rounds or not worker.hand.lacking(worker.round):
            return
        required = self.required(number)
        assert any(not required <= contents for contents in worker.newest.values()), (
            f"worker {number} waits before round {worker.round}, but all that the bound requires was delivered to it"
        )
