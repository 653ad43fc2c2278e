"""The servers of a replay: a worker's strategy talks to them as to real ones, but they do what the log says.

    start    the weights that the turn's item read, each key in its version, are put into the model
    push     is kept until its turn comes, in this turn or a later one
    close    what the log applied is applied, and versions are kept that a later item read

It has the methods of a `Client` that an asynchronous strategy calls.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from paceline.errors import CheckpointError, ReplicaError
from paceline.optim.group_settings import GroupSettings
from paceline.optim.piece_state import State
from paceline.parameter_server.application_log import Applied
from paceline.parameter_server.client import Put
from paceline.parameter_server.held_key import HeldKey, Snapshot
from paceline.parameter_server.key_ranges import Key, KeyTable
from paceline.parameter_server.link import Sent
from paceline.parameter_server.on_arrival import apply_push
from paceline.parameter_server.replay import WHY, Replay
from paceline.parameter_server.replay_order import Application, Item, KeyVersion
from paceline.parameter_server.wire import Close


@dataclass(frozen=True)
class _Pushed:
    gradient: Tensor
    weight: float
    used: int
    version: int  # of the weights that it was made of


class ReplayedClient:
    def __init__(
        self, replay: Replay, table: KeyTable, settings: GroupSettings, hold: Callable[[], Mapping[int, HeldKey]]
    ) -> None:
        """`hold` makes the keys when they are first needed, as servers do."""
        self.table, self._replay, self._settings, self._hold = table, replay, settings, hold
        self._held: Mapping[int, HeldKey] = {}
        self._shown: dict[int, tuple[int, int]] = {}  # which version the model holds, as which worker read it
        self._copies: dict[KeyVersion, Snapshot] = {}  # of versions that a later item read
        self._pushed: dict[tuple[Item, int], _Pushed] = {}
        self.norm = math.nan

    # -- one turn ----------------------------------------------------------------------------------------------------

    def start(self, round: int, put: Put) -> float:
        self._have_keys()
        turn = self._replay.turn
        for number, version in turn.reads.items():
            self._show(number, version, turn.item.worker, put)
        return 0.0

    def push(self, key: Key, gradient: Tensor, *, round: int, lane: int, used: int, weight: float = 1.0) -> Sent:
        turn = self._replay.turn
        if key.number in turn.keys:
            self._pushed[turn.item, key.number] = _Pushed(gradient.clone(), weight, used, turn.reads[key.number])
        return Sent()

    def close(self, round: int, close: Close) -> None:
        turn = self._replay.turn
        for place in turn.forget:
            del self._copies[place]
        for application in turn.applications:
            self._apply(application)
        self._replay.applied()

    def _apply(self, application: Application) -> None:
        record = application.record
        held = self._held[record.key]
        if application.keep_old:
            self._copies[record.key, held.version] = held.snapshot()
        assert record.lane is not None
        assert record.worker is not None
        item = Item(record.round, record.lane, record.worker, record.incarnation)
        pushed = self._pushed.pop((item, record.key), None)
        if pushed is None:
            raise CheckpointError(
                f"replay: {item} pushed key {record.key} in the run, but here its lane had no gradient to push; the "
                "script or its data have changed"
            )
        held.came_back(record.worker, pushed.version)
        apply_push(held, pushed.gradient, pushed.weight, pushed.used, self._values(record), record.outcome)
        if record.check is not None and held.check() != record.check:
            raise ReplicaError(
                f"replay: {self.table.name(record.key)} begins to differ from the recorded run with version "
                f"{application.version}, made of the gradient of {item}; {WHY}"
            )

    def _values(self, record: Applied) -> tuple[float, ...]:
        try:
            return tuple(self._settings.vector(record.settings))
        except (LookupError, TypeError) as error:
            raise CheckpointError(
                f"replay: the log has settings of another optimizer than the script: {list(record.settings)}; "
                "the script has changed since"
            ) from error

    # -- weights -----------------------------------------------------------------------------------------------------

    def newest(self, round: int, put: Put) -> None:
        self._have_keys()
        for number, held in self._held.items():
            put(self.table.keys[number], held.weights)
        self._shown.clear()

    refresh = newest

    def _show(self, number: int, version: int, worker: int, put: Put) -> None:
        held = self._held[number]
        if self._shown.get(number) != (version, worker):
            there = held if held.version == version else self._copies[number, version]
            put(self.table.keys[number], there.seen_by(worker))
            self._shown[number] = version, worker

    def _have_keys(self) -> None:
        self._held = self._held or self._hold()

    # -- saving and loading ------------------------------------------------------------------------------------------

    def states(self, round: int) -> dict[int, list[State]]:
        self._have_keys()
        return {number: held.states() for number, held in self._held.items()}

    def load(self, round: int, parameters: Sequence[Tensor], states: Mapping[int, Sequence[State]]) -> None:
        self._have_keys()
        for number, held in self._held.items():
            held.load_weights(held.key.gathered([parameter.detach() for parameter in parameters]).cpu(), 0)
            held.load_states(states[number])
        self._shown.clear()

    # -- what only real servers need ---------------------------------------------------------------------------------

    def open(self, round: int, lanes: Sequence[int]) -> None: ...

    def tell_settings(self, settings: Sequence[float]) -> None: ...

    def ask(self, round: int) -> None: ...

    def have_been_heard(self) -> None: ...

    def wait_for(self, sent: Sent) -> None: ...

    def begin_at(self, round: int) -> None: ...
