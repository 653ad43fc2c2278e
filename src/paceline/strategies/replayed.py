"""A replay of an asynchronous run: the strategy of that run, with servers that do what its log says.

run       UpdatesOnArrival ── Client ──────────► servers, in whatever order pushes arrive
replay    UpdatesOnArrival ── ReplayedClient ──► the same keys and the same updates, in the order of the log
"""

from __future__ import annotations

from collections.abc import Sequence

from torch.nn import Parameter
from torch.optim import Optimizer

from paceline.errors import CheckpointError, ConfigError
from paceline.parameter_server.held_key import HeldKey, hold_keys
from paceline.parameter_server.joint import weights_digest
from paceline.parameter_server.replay import Replay
from paceline.parameter_server.replayed_client import ReplayedClient
from paceline.parameter_server.staleness_stats import StalenessCounter
from paceline.strategies.registry import Job, Maker
from paceline.strategies.server_parts import Plan
from paceline.strategies.server_space import Space, plan_spaces
from paceline.strategies.strategy import Strategy
from paceline.strategies.updates_on_arrival import UpdatesOnArrival


class ReplayedMaker(Maker):
    def __init__(self, plan: Plan, job: Job, replay: Replay) -> None:
        self._plan, self._job, self._replay = plan, job, replay
        recorded = replay.run.job
        if plan.clock.deterministic:
            raise ConfigError(
                f"replay: with clock {plan.clock} the order of updates is fixed, so the run in {replay.folder} gives "
                "the same bits when it is simply run again"
            )
        if str(plan.clock) != recorded.clock or job.lanes != recorded.lanes:
            raise CheckpointError(
                f"replay: the run in {replay.folder} had clock {recorded.clock} and {recorded.lanes} lanes, but the "
                f"script has clock {plan.clock} and {job.lanes}; it has changed since"
            )
        self._space = plan_spaces(
            job.optimizers,
            job.names,
            workers=recorded.workers,
            servers=recorded.servers,
            lanes=job.lanes,
            bucket_bytes=job.bucket_bytes,
            key_bytes=plan.key_bytes,
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
        client = ReplayedClient(self._replay, space.table, space.settings, lambda: _held(space, self._plan))
        return UpdatesOnArrival(space, client, self._plan.clock, self._job, StalenessCounter(), None)

    def close(self) -> None: ...

    def dismantle(self) -> None:
        """One process does it all, so nobody can be lost."""


def _held(space: Space, plan: Plan) -> dict[int, HeldKey]:
    ahead = plan.treatment.look_ahead
    return hold_keys(space.table.keys, space.parameters, space.optimizers, space.settings, look_ahead=ahead)
