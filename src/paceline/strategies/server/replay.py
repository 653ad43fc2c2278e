"""A replay of an asynchronous run: the strategy of that run, with servers that do what its log says.

run       UpdatesOnArrival ── Client ──────────► servers, in whatever order pushes arrive
replay    UpdatesOnArrival ── ReplayedClient ──► the same keys and the same updates, in the order of the log

start    the weights that the turn's item read, each key in its version, are put into the model
push     is kept until its turn comes, in this turn or a later one
close    what the log applied is applied, and versions are kept that a later item read
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from paceline.errors import CheckpointError, ConfigError, ReplicaError
from paceline.optim.group_settings import GroupSettings
from paceline.optim.piece_state import State
from paceline.parameter_server.channel import Sent
from paceline.parameter_server.client import Client, Put
from paceline.parameter_server.handshake import weights_digest
from paceline.parameter_server.key_ranges import Key, KeyTable
from paceline.parameter_server.on_arrival import apply_push
from paceline.parameter_server.replay import WHY, Replay
from paceline.parameter_server.replay_order import Application, Item, KeyVersion, item_of
from paceline.parameter_server.server_key import ServerKey, Snapshot, hold_keys
from paceline.parameter_server.staleness_stats import StalenessCounter
from paceline.parameter_server.update_log import Applied
from paceline.parameter_server.wire import Close
from paceline.strategies.registry import Job, Maker
from paceline.strategies.server.parameter_server import ParameterServer
from paceline.strategies.server.rounds import UpdatesOnArrival, Wiring
from paceline.strategies.server.space import plan_spaces
from paceline.strategies.strategy import Strategy


@dataclass(frozen=True)
class _Pushed:
    gradient: Tensor
    weight: float
    used: int
    version: int  # of the weights that it was made of


class ReplayedClient(Client):
    """A client without connections: its servers are the keys that it holds itself."""

    def __init__(
        self, replay: Replay, table: KeyTable, settings: GroupSettings, hold: Callable[[], Mapping[int, ServerKey]]
    ) -> None:
        """`hold` makes the keys."""
        self.table, self._replay, self._settings, self._hold = table, replay, settings, hold
        self._shown: dict[int, tuple[int, int]] = {}  # which version the model holds, as which worker read it
        self._copies: dict[KeyVersion, Snapshot] = {}  # of versions that a later item read
        self._pushed: dict[tuple[Item, int], _Pushed] = {}
        self.norm, self.versions = math.nan, {}

    @cached_property
    def _held(self) -> Mapping[int, ServerKey]:
        """Made when they are first needed, as servers make them."""
        return self._hold()

    # -- one turn ----------------------------------------------------------------------------------------------------

    def start(self, round: int, put: Put) -> float:
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
        item = item_of(record)
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
        for number, held in self._held.items():
            put(self.table.keys[number], held.weights)
        self._shown.clear()

    def refresh(self, round: int, put: Put) -> None:
        self.newest(round, put)

    def _show(self, number: int, version: int, worker: int, put: Put) -> None:
        held = self._held[number]
        if self._shown.get(number) != (version, worker):
            there = held if held.version == version else self._copies[number, version]
            put(self.table.keys[number], there.seen_by(worker))
            self._shown[number] = version, worker

    # -- saving and loading ------------------------------------------------------------------------------------------

    def states(self, round: int) -> dict[int, list[State]]:
        return {number: held.states() for number, held in self._held.items()}

    def load(
        self, round: int, parameters: Sequence[Tensor] | None, states: Mapping[int, Sequence[State]] | None
    ) -> None:
        for number, held in self._held.items():
            if parameters is not None:
                held.load_weights(held.key.gathered([parameter.detach() for parameter in parameters]).cpu(), 0)
            if states is not None:
                held.load_states(states[number])
        self._shown.clear()

    # -- what only real servers need ---------------------------------------------------------------------------------

    def open(self, round: int, lanes: Sequence[int]) -> None: ...

    def tell_settings(self, settings: Sequence[float]) -> None: ...

    def ask(self, round: int) -> None: ...

    def flush(self) -> None: ...

    def wait_for(self, sent: Sent) -> None: ...

    def begin_at(self, round: int) -> None: ...


class ReplayedMaker(Maker):
    def __init__(self, config: ParameterServer, job: Job, replay: Replay) -> None:
        self._config, self._job, self._replay = config, job, replay
        recorded = replay.run.job
        if str(config.clock) != recorded.clock or job.lanes != recorded.lanes:
            raise CheckpointError(
                f"replay: the run in {replay.folder} had clock {recorded.clock} and {recorded.lanes} lanes, but the "
                f"script has clock {config.clock} and {job.lanes}; it has changed since"
            )
        self._space = plan_spaces(
            job.optimizers,
            job.names,
            workers=recorded.workers,
            servers=recorded.servers,
            lanes=job.lanes,
            bucket_bytes=job.bucket_bytes,
            key_bytes=config.key_bytes,
        )[0]
        self._check_model()
        job.at_loop_end.append(replay.loop_ended)

    def _check_model(self) -> None:
        facts, space = self._replay.run.job.facts, self._space
        if facts["keys"] != space.table.digest:
            raise CheckpointError(
                f"replay: the run in {self._replay.folder} trained another model, or cut it into other keys "
                f"({self._replay.run.job.keys} there, {len(space.table.keys)} here); the script has changed since"
            )
        if facts["weights"] != weights_digest(space.parameters):
            raise CheckpointError(
                f"replay: the run in {self._replay.folder} began with other weights of the same model; they must come "
                "from the seed, or from a file that is still the same"
            )

    def make(self, named: Sequence[tuple[str, Parameter]], optimizers: Sequence[Optimizer]) -> Strategy:
        space = self._space
        if not space.is_of(optimizers) or [id(p) for p in space.parameters] != [id(p) for _, p in named]:
            raise ConfigError(
                "replay: the optimizers act one by one, or hold other parameters than at engine.prepare(), which was "
                "not so in the recorded run; the script has changed since"
            )
        ahead = self._config.staleness_policy.look_ahead

        def hold() -> dict[int, ServerKey]:
            return hold_keys(space.table.keys, space.parameters, space.optimizers, space.settings, look_ahead=ahead)

        client = ReplayedClient(self._replay, space.table, space.settings, hold)
        return UpdatesOnArrival(Wiring(space, client, self._config.clock, self._job, StalenessCounter()))

    def close(self) -> None: ...

    def teardown(self) -> None:
        """One process does it all: no other can be lost."""
