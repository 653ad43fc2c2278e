"""Rounds whose gradients go to servers: what both modes of the parameter server share.

    deterministic clocks   backward ─► roots ─────────────► pushed, bucket by bucket, in the worker's last backward
    asynchronous clocks    backward ─► a lane's gradient ─► pushed, bucket by bucket, in the lane's last backward

A bucket is cut into keys without a copy. Its memory serves the next round when the servers are done with it: as soon as
it was sent, or, where they read it in shared memory, when the weights of the next round have come.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from paceline.collectives.byte_count import Traffic
from paceline.collectives.canonical_sum import SumPlan
from paceline.collectives.communicator import Communicator
from paceline.elastic.fault_injection import fault_point
from paceline.errors import CheckpointError, LoopError
from paceline.parameter_server.application_log import Read
from paceline.parameter_server.client import Client
from paceline.parameter_server.clock import Clock
from paceline.parameter_server.link import Sent
from paceline.parameter_server.model_weights import ModelWeights
from paceline.parameter_server.run_log import RunLog
from paceline.parameter_server.staleness_stats import StalenessCounter
from paceline.parameter_server.wire import Close
from paceline.sharding.bucket import plan_buckets
from paceline.strategies.buckets import GradientBuckets
from paceline.strategies.registry import Job
from paceline.strategies.server_space import Space
from paceline.strategies.strategy import Agreement, ItemPlace, StrategyBase, Tally

READS = "weights being read"  # in a saved state
ROUNDS_UNDER_WAY = 2  # whose pushes may still be on their way; a worker that no clock holds back is held back by this


@dataclass(frozen=True)
class _Pushed:
    """A bucket's memory that servers may still look at."""

    round: int
    bucket: int
    node: Tensor
    sent: Sequence[Sent]


class PushedRounds(StrategyBase):
    """`homes`: memory that servers can see, for the gradient of each bucket; only a synchronous clock may use it."""

    def __init__(
        self,
        space: Space,
        client: Client,
        clock: Clock,
        job: Job,
        stats: StalenessCounter,
        homes: Sequence[Tensor] | None = None,
        *,
        log: RunLog | None = None,
        joint: Communicator | None = None,
        loads: dict[int, tuple[dict[str, Any], int]] | None = None,
    ) -> None:
        """`loads` gets what is loaded, by optimizer: where there are several, others may be made that need it too."""
        self._space, self._loads = space, loads
        self._optimizers, self._settings = space.optimizers, space.settings
        self._client, self._clock, self._stats, self._log = client, clock, stats, log
        self._joint = joint
        self._worker, self._comm, self._all_lanes = job.world.rank, job.comm, job.lanes
        self._elastic = job.world.elastic is not None
        self._buckets = GradientBuckets(
            space.named,
            self._worker,
            cut=lambda specs, order: plan_buckets(specs, order, job.bucket_bytes, aligned=False),
            leave=self._leave,
            overlap=job.overlap,
            by_lane=not clock.deterministic,
            rebuilds=False,  # keys are slices of buckets, and servers have theirs from the start
        )
        for sums, home in zip(self._buckets.sums, homes or [], strict=homes is not None):
            sums.use_slot(home)
        self.parameters = self._buckets.parameters
        self._weights = ModelWeights(self.parameters)
        self.replicas: Sequence[Parameter] = self.parameters if clock.deterministic else []
        self._under_way: deque[_Pushed] = deque()
        self._round = 0  # the one that runs, or the next after it was closed
        self._closed, self._ever_opened, self._begun = True, False, 0
        self._lost = job.lost
        self._lanes: tuple[int, ...] = ()
        self._acted: set[int] = set()

    @property
    def _speaks_for_all(self) -> bool:
        return all(worker in self._lost for worker in range(self._worker))

    @property
    def traffic(self) -> Traffic:
        """To and from servers; with several workers, what they tell each other too."""
        return Traffic() if self._joint is None else self._joint.traffic

    @property
    def between_rounds(self) -> bool:
        return self._closed

    @property
    def rounds(self) -> int:
        """Begun here, by this strategy."""
        return self._begun

    @property
    def left_during_backward(self) -> int:
        return self._buckets.left_during_backward

    def agreement(self, round: int) -> Agreement:
        if not self._clock.deterministic:
            return Agreement.NEVER
        return Agreement.NOW if self._clock.pulls_before(self._round + 1) else Agreement.LATER

    # -- one round ---------------------------------------------------------------------------------------------------

    def start_step(self, round: int, plan: SumPlan) -> None:
        self._lanes = plan.holders[self._worker]
        self._start_reading()
        self._make_room()
        self._acted.clear()
        self._buckets.start_step(plan)

    def _start_reading(self) -> None:
        """The weights that the round may read are in the model when this returns."""
        raise NotImplementedError

    def start_backward(self, place: ItemPlace, *, last: bool) -> None:
        self._begin_item(place)
        self._buckets.start_backward(place, last=last)

    def finish_backward(self, place: ItemPlace) -> None:
        self._buckets.finish_backward(place)

    def skip(self, place: ItemPlace) -> None:
        self._begin_item(place)
        self._buckets.skip(place)

    def _begin_item(self, place: ItemPlace) -> None:
        """The round is opened with the first: `engine.update` takes back the start of a step of all optimizers."""
        self._place = place
        if self._closed:
            if self._log is not None:
                self._log.begin(self._round)
                self._log.read(Read(self._worker, self._round, self._lanes, self._client.versions))
            self._client.open(self._round, self._lanes)
            self._closed, self._ever_opened = False, True
            self._begun += 1

    def used(self) -> Sequence[bool]:
        return self._buckets.used

    def _leave(self, number: int, nodes: dict[int, Tensor]) -> None:
        for lane, node in reversed(nodes.items()):  # the first lane's is the home, and has to come back last
            self._push(number, lane, node, self._used_bits(number))

    def _push(self, number: int, lane: int, node: Tensor, used: Sequence[int], weight: float = 1.0) -> None:
        """One bucket of a lane or root, cut into keys; `used` has the bits of each key's pieces."""
        gradient = node if node.device.type == "cpu" else node.cpu()
        sent = [
            self._client.push(key, key.of_bucket(gradient), round=self._round, lane=lane, used=bits, weight=weight)
            for key, bits in zip(self._client.table.of_bucket(number), used, strict=True)
        ]
        self._under_way.append(_Pushed(self._round, number, node, sent))
        fault_point("bucket")

    def _used_bits(self, number: int) -> list[int]:
        used = self._buckets.used
        return [
            sum(1 << place for place, piece in enumerate(key.pieces) if used[piece.parameter])
            for key in self._client.table.of_bucket(number)
        ]

    def _make_room(self) -> None:
        """Buckets that the servers are done with serve again; those of the last rounds are given time to be sent."""
        rounds = 1 if self._clock.synchronous else ROUNDS_UNDER_WAY
        while self._under_way and self._under_way[0].round <= self._round - rounds:
            pushed = self._under_way.popleft()
            for sent in pushed.sent:
                self._client.wait_for(sent)
            self._buckets.sums[pushed.bucket].give_back(pushed.node)

    # -- its end -----------------------------------------------------------------------------------------------------

    def _close(self, tally: Tally, *, max_norm: float | None = None, settings: Sequence[float] = ()) -> None:
        mine = tuple((lane, weight) for lane, weight in tally.weights if lane in self._lanes)
        close = Close(mine, tally.samples, max_norm, tally.left_out, tuple(settings))
        self._client.close(self._round, close)
        self._closed = True
        self._round += 1

    def _all_have_acted(self, optimizer: Optimizer) -> bool:
        self._acted.add(id(optimizer))
        return len(self._acted) == len(self._optimizers)

    def end_step(self) -> None:
        if not self._closed:
            raise LoopError(
                f"{len(self._acted)} of {len(self._optimizers)} optimizers stepped, but servers update all of them "
                "together; call step() of each in every step, or update them one by one with engine.update()"
            )
        for parameter in self.parameters:
            parameter.grad = None

    def close(self) -> None:
        self._buckets.close()

    def forget_gradients(self) -> None:
        """They lie in memory of a group that is over, or on its servers."""
        for parameter in self.parameters:
            parameter.grad = None

    def _all_workers_are_here(self) -> None:
        if self._comm is not None:
            self._comm.barrier()

    # -- saving and loading ------------------------------------------------------------------------------------------

    def _with_reads(self, state: dict[str, Any], optimizer: Optimizer) -> dict[str, Any]:
        """Inside a group of rounds that read the same weights those are needed to go on, besides the newest."""
        kept = self._weights.remembered
        return state if kept is None else state | {READS: by_place(optimizer, self.parameters, kept)}

    def _reads_of(self, optimizer: Optimizer, state: Mapping[str, Any], round: int) -> list[Tensor] | None:
        if self._clock.pulls_before(round):
            return None
        if READS not in state:
            raise CheckpointError(
                f"the state is of step {round}, inside a group of clock {self._clock} whose rounds read the same "
                "weights, and does not have those: another strategy saved it; load one of a step where a group starts"
            )
        known = self._weights.remembered or self._weights.copies()
        return by_parameter(optimizer, self.parameters, state[READS], otherwise=known)

    def _note_load(self, optimizer: Optimizer, state: dict[str, Any], round: int) -> None:
        if self._loads is not None:
            self._loads[id(optimizer)] = state, round


def by_place(optimizer: Optimizer, parameters: Sequence[Parameter], values: Sequence[Any]) -> dict[int, Any]:
    """What belongs to each parameter, under its place in the optimizer, as a state_dict has it."""
    found = {id(parameter): value for parameter, value in zip(parameters, values, strict=True)}
    return {place: found[id(member)] for place, member in enumerate(_members(optimizer)) if id(member) in found}


def by_parameter(
    optimizer: Optimizer, parameters: Sequence[Parameter], values: Mapping[int, Any], otherwise: Sequence[Any]
) -> list[Any]:
    """The inverse; a parameter that is not there keeps what it has otherwise."""
    found = {id(member): values[place] for place, member in enumerate(_members(optimizer)) if place in values}
    return [found.get(id(parameter), other) for parameter, other in zip(parameters, otherwise, strict=True)]


def _members(optimizer: Optimizer) -> list[Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
