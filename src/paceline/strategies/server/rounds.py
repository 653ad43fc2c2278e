"""Rounds on a worker of a parameter server: read the weights that the clock allows, push gradients, end the round.

    class              clock           servers   pushed                 at step()
    UpdatesOnServers   deterministic   update    roots                  CLOSE ─► servers update ─► weights ─► the model
    UpdatesOnArrival   asynchronous    update    each lane's gradient   CLOSE; the loop goes on as far as the clock says
    SumsOnServers      deterministic   add       roots                  CLOSE ─► sums ─► .grad ─► step() as under ddp

Buckets are pushed in the backward that finishes them: the worker's last one, or a lane's last where pushes are updates
of their own. A bucket is cut into keys without a copy. Its memory serves the next round when the servers are done with
it: as soon as it was sent, or, where they read it in shared memory, when the weights of the next round have come.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from paceline.checkpoint.load import full_tree
from paceline.collectives.byte_count import Traffic
from paceline.collectives.canonical_sum import SumPlan
from paceline.collectives.communicator import Communicator
from paceline.elastic.faults import fault_point
from paceline.errors import CheckpointError, LoopError
from paceline.optim.gradient_norm import clip_, clip_coefficient, global_norm
from paceline.optim.piece_state import State
from paceline.parameter_server.channel import Sent
from paceline.parameter_server.client import Client
from paceline.parameter_server.clock import Clock
from paceline.parameter_server.handshake import StoreBarrier
from paceline.parameter_server.key_ranges import Key
from paceline.parameter_server.staleness_stats import StalenessCounter
from paceline.parameter_server.update_log import NoLog, Read, UpdateLog
from paceline.parameter_server.wire import Close
from paceline.sharding.bucket import Shards, cut_buckets, plan_buckets
from paceline.sharding.local_shard import LocalShard, all_here
from paceline.strategies.buckets import GradientBuckets, GradientPlaceholder
from paceline.strategies.master_weights import load_exactly
from paceline.strategies.registry import Job
from paceline.strategies.server.compressed import PushedGradients
from paceline.strategies.server.space import ModelWeights, Space, sliced_states, states_of_keys
from paceline.strategies.strategy import Agreement, ItemPlace, StrategyBase, Tally
from paceline.torch_compat import STEP_WAS_CALLED
from paceline.world import messages

READS = "weights being read"  # in a saved state
ROUNDS_UNDER_WAY = 2  # whose pushes may still be on their way; a worker that no clock holds back is held back by this


@dataclass(frozen=True)
class Wiring:
    """What rounds of one space are built on."""

    space: Space
    client: Client
    clock: Clock
    job: Job
    stats: StalenessCounter
    gradients: Sequence[Tensor] | None = None  # shared memory for each bucket's; only a synchronous clock may use it
    log: UpdateLog | NoLog = field(default_factory=NoLog)
    group: Communicator | None = None  # of workers and servers
    barrier: StoreBarrier = field(default_factory=StoreBarrier.of_one)  # of asynchronous workers
    # What was loaded, by optimizer: where there are several, strategies that are made later need it too.
    loads: dict[int, tuple[dict[str, Any], int]] | None = None


@dataclass(frozen=True)
class _Pushed:
    """A bucket's memory that servers may still look at."""

    round: int
    bucket: int
    node: Tensor | None  # a payload has memory of its own, which is not used again
    sent: Sequence[Sent]


class PushedRounds(StrategyBase):
    """What all of them share: a round is opened, buckets are cut into keys and pushed, and the round is closed."""

    def __init__(self, wiring: Wiring) -> None:
        space, clock, job = wiring.space, wiring.clock, wiring.job
        self._space, self._loads, self._group = space, wiring.loads, wiring.group
        self._optimizers, self._settings = space.optimizers, space.settings
        self._client, self._clock, self._stats, self._log = wiring.client, clock, wiring.stats, wiring.log
        self._worker, self._comm, self._all_lanes = job.world.rank, job.comm, job.lanes
        self._elastic = job.world.is_elastic
        self._compressed = compressed = PushedGradients(job, space.named, space.table)
        self._buckets = GradientBuckets(
            space.named,
            self._worker,
            cut=lambda specs, order: plan_buckets(compressed.grouped(specs), order, job.bucket_bytes, aligned=False),
            leave=self._leave,
            overlap=job.overlap,
            by_lane=not clock.deterministic,
            rebuilds=False,  # keys are slices of buckets, and servers have theirs from the start
            compress=compressed.take,
        )
        for sums, memory in zip(self._buckets.sums, wiring.gradients or [], strict=wiring.gradients is not None):
            sums.use_slot(memory)
        self.parameters = self._buckets.parameters
        self._weights = ModelWeights(self.parameters)
        self.replicas: Sequence[Parameter] = self.parameters if clock.deterministic else []
        self._under_way: deque[_Pushed] = deque()
        self._round = 0  # the one that runs, or the next after it was closed
        self._closed, self._ever_opened, self._begun = True, False, 0
        self._lost = job.lost
        self._lanes: tuple[int, ...] = ()
        self._acted: set[int] = set()
        self._used_by_any: Sequence[bool] = ()  # worker, in the round that is collected

    @property
    def _speaks_for_all(self) -> bool:
        return all(worker in self._lost for worker in range(self._worker))

    @property
    def traffic(self) -> Traffic:
        """To and from servers; with several workers, what they tell each other too."""
        return Traffic() if self._group is None else self._group.traffic

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

    @property
    def first_left(self) -> float:
        return self._buckets.first_left

    @property
    def left_at(self) -> Sequence[float]:
        return self._buckets.left_at

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
        self._compressed.begin(round, plan, self._buckets.sums, self._shards)
        self._buckets.start_step(plan)

    def _shards(self) -> Shards:
        """Owners are the servers, by key: no worker has a range."""
        return cut_buckets([sums.bucket for sums in self._buckets.sums], 1)

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
            self._log.begin(self._round)
            self._log.read(Read(self._worker, self._round, self._lanes, self._client.versions))
            self._client.open(self._round, self._lanes)
            self._closed, self._ever_opened = False, True
            self._begun += 1

    def used(self) -> Sequence[bool]:
        return self._buckets.used

    def _leave(self, number: int, nodes: dict[int, Tensor]) -> None:
        for lane, node in reversed(nodes.items()):  # the first lane's may be shared memory, and has to come back last
            self._push(number, lane, node, self._used_bits(number))
        if number in self._compressed.now:
            self._push_codes(number)

    def _push_codes(self, number: int) -> None:
        """The payloads of a bucket, of each lane by itself."""
        used = {
            key.number: bits
            for key, bits in zip(self._client.table.of_bucket(number), self._used_bits(number), strict=True)
        }
        for lane, key, code in self._compressed.codes(number):
            sent = self._client.push(key, code, round=self._round, lane=lane, used=used[key.number])
            self._under_way.append(_Pushed(self._round, number, None, [sent]))
        fault_point("bucket")

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
            if pushed.node is not None:
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
        self._compressed.forget()

    def close(self) -> None:
        self._buckets.close()

    def forget_gradients(self) -> None:
        """They lie in memory of a group that is over, or on its servers."""
        for parameter in self.parameters:
            parameter.grad = None

    def _all_workers_are_here(self) -> None:
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

    def keep_residuals(self) -> None:
        self._compressed.commit(self._used_by_any)

    def compression_state(self, lanes: Sequence[int]) -> dict[str, Any]:
        """Of lanes from here; one worker asks the servers for what they keep of sums."""
        state = self._compressed.state(lanes, self._buckets.sums, self._shards)
        asks = bool(state) and self._speaks_for_all
        return self._compressed.with_sums(state, self._client.residuals(self._round) if asks else None)

    def load_compression(self, saved: Mapping[str, Any], lanes: Sequence[int]) -> None:
        self._compressed.load(saved, lanes, self._buckets.sums, self._shards)
        self._all_workers_are_here()
        if self._speaks_for_all:
            self._client.load_residuals(self._round, self._compressed.sums_of(saved))
        self._all_workers_are_here()

    def _note_load(self, optimizer: Optimizer, state: dict[str, Any], round: int) -> None:
        if self._loads is not None:
            self._loads[id(optimizer)] = state, round


# -- servers update ----------------------------------------------------------------------------------------------------


class UpdatesOnServers(PushedRounds):
    """Mode "update": weights and optimizer state live on servers; workers push, and read by the clock.

        weights on servers, cached here · gradients pushed · optimizer state on servers

    Under a synchronous clock `step()` returns when the new weights are here, as under any other synchronous strategy.
    Under others it does not wait: the loop goes on while pushes and weights are on their way, as far as the clock
    allows.
    """

    def __init__(self, wiring: Wiring) -> None:
        super().__init__(wiring)
        self._tally: Tally | None = None
        self._max_norm: float | None = None
        self._waited_s = 0.0
        self._shown = 0  # the round whose weights the model holds
        self._seen = self._weights.versions()
        self._placeholders = [_not_here(name, parameter) for name, parameter in self._space.named]
        self._loaded: dict[int, list[State]] = {}
        self._asked: tuple[int, list[State]] = -1, []  # a round, and the optimizer's state before it

    # -- one round ---------------------------------------------------------------------------------------------------

    def _start_reading(self) -> None:
        self._take_over_changes()
        self._weights.restore()
        self._read_next()
        self._stats.started_round(self._waited_s)
        self._waited_s = 0.0

    def _read_next(self) -> None:
        self._waited_s += self._client.start(self._round, self._weights.put)
        self._shown, self._seen = self._round, self._weights.versions()

    def _take_over_changes(self) -> None:
        """Before the first round the script may still change weights: what the model holds is what is trained."""
        if self._weights.versions() == self._seen:
            return
        if self._ever_opened:
            raise LoopError(
                "the weights were changed between two steps, but the servers hold them and did not hear of it; change "
                "weights before the first step, or train with ParameterServer(mode='aggregate')"
            )
        self._hand_over(self._round, None)

    def collect(self, tally: Tally) -> None:
        self._tally, self._max_norm, self._used_by_any = tally, None, tally.used
        for parameter, placeholder, used in zip(self.parameters, self._placeholders, tally.used, strict=True):
            parameter.grad = placeholder if used and not tally.empty else None
        if tally.empty:
            self._end_round()

    def clip(self, max_norm: float) -> float:
        """The servers find the norm and clip by it; the one returned is the last that they sent."""
        self._max_norm = max_norm
        return self._client.norm

    def apply(self, optimizer: Optimizer, original_step: Callable[[], Any]) -> Any:
        setattr(optimizer, STEP_WAS_CALLED, True)
        if self._all_have_acted(optimizer):
            self._end_round()

    def _tally_of_round(self) -> Tally:
        assert self._tally is not None
        return self._tally

    def _end_round(self) -> None:
        self._close(self._tally_of_round(), max_norm=self._max_norm, settings=self._settings.read())
        self._client.ask(self._round)
        if self._clock.synchronous:
            self._read_next()

    # -- between rounds ----------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Inside a group of rounds that read the same weights, those have to come back for the next of them."""
        if self._shown == self._round:
            return
        if self._clock.pulls_before(self._round):
            self._read_next()
        else:
            self._weights.keep()
            self._client.newest(self._round, self._weights.put)
            self._shown, self._seen = self._round, self._weights.versions()

    def local_shard(self, parameter: Parameter) -> Tensor | LocalShard:
        self._settle_alone()
        return super().local_shard(parameter)

    def _settle_alone(self) -> None:
        """An elastic job keeps its state right after `apply`: the model then has to have what that made of it."""
        if self._clock.deterministic:
            self.drain()

    def local_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """One worker asks the servers for all of it; one that is the server need not ask, nor copy anything."""
        saved: dict[str, Any] = optimizer.state_dict()
        if not self._speaks_for_all:
            return {**saved, "state": {}}
        self._settle_alone()
        states = self._states_now()
        found = by_place(optimizer, self.parameters, states)
        held = self._with_reads({**saved, "state": {p: state for p, state in found.items() if state}}, optimizer)
        whole: dict[str, Any] = all_here(held)
        return whole

    def _states_now(self) -> list[State]:
        """An elastic job asks once in a round, and may want the answer again when the group is over."""
        round, known = self._asked
        if round != self._round:
            known = sliced_states(self._client.table, self._client.states(self._round), self.parameters)
            self._asked = (self._round, known) if self._elastic else (-1, [])
        return known

    def load(self, optimizer: Optimizer, state: dict[str, Any], *, round: int) -> None:
        self._log.check_not_begun()
        state = full_tree(state)
        reads = self._reads_of(optimizer, state, round)
        optimizer.load_state_dict({**state, "state": {}})  # settings for the next rounds; the rest lives elsewhere
        nothing: list[State] = [{}] * len(self.parameters)
        self._loaded[id(optimizer)] = by_parameter(optimizer, self.parameters, state["state"], otherwise=nothing)
        merged: list[State] = [next(filter(None, states), {}) for states in zip(*self._loaded.values(), strict=True)]
        self._hand_over(round, merged)
        self._weights.remember(reads)
        self._note_load(optimizer, state, round)

    def _hand_over(self, round: int, states: Sequence[State] | None) -> None:
        """The servers go on with `round`, from the model's weights and, unless it is None, from these states."""
        self._client.flush()
        self._all_workers_are_here()
        if self._speaks_for_all:
            by_key = None if states is None else states_of_keys(self._client.table, states)
            self._client.load(round, self.parameters, by_key)
        self._all_workers_are_here()
        self._client.begin_at(round)
        self._asked = (-1, [])
        self._round = self._shown = round
        self._seen = self._weights.versions()


def _not_here(name: str, parameter: Parameter) -> GradientPlaceholder:
    made = GradientPlaceholder.of(parameter, name, "parameter_server")
    made.message = (
        f"the gradient of {name!r} is not here: under strategy='parameter_server' servers add and apply it, and .grad "
        "has none of it. To clip, use engine.clip_grad_norm_(max_norm); to look at gradients, use "
        "ParameterServer(mode='aggregate')"
    )
    return made


@dataclass
class _HeldLane:
    """A lane whose pushes wait for the norm of all of them."""

    place: ItemPlace
    buckets: list[tuple[int, Tensor, Sequence[int]]] = field(default_factory=list)  # (number, gradient, used bits)


class UpdatesOnArrival(UpdatesOnServers):
    """Asynchronous: every lane's gradient is an update of its own, applied when it reaches the servers.

        lane 0 ─► push ─► update 17 ┐     weights are read between rounds, the newest that have come; the clock says
        lane 1 ─► push ─► update 19 ┘     which updates must be in them

    A lane's push is its mean gradient (times L times its share of the round's samples, where that is not 1/L), and it
    is applied with 1/L of the learning rate: a round of L pushes moves the weights as far as one synchronous update. To
    scale the gradient instead would be the same for SGD, but not for Adam, which takes a step of the same length
    whatever the gradient's scale, nor for weight decay: both would act L times a round.

    Where the loop weighs micro-batches by tokens each lane's tokens per sample count as typical, since no worker knows
    those of all. Clipping, too, is each lane's own: its mean gradient is clipped, so its buckets leave when all are
    there.
    """

    def __init__(self, wiring: Wiring) -> None:
        super().__init__(wiring)
        self._barrier = wiring.barrier
        self._told: Sequence[float] | None = None
        self._used = [False] * len(self.parameters)
        self._held: dict[int, _HeldLane] = {}
        self._clips: bool | None = None  # whether the loop clipped in the last round; None: there was none yet
        self._norm = math.nan

    # -- one round ---------------------------------------------------------------------------------------------------

    def _start_reading(self) -> None:
        super()._start_reading()
        settings = self._settings.with_learning_rates(self._settings.read(), 1 / self._all_lanes)
        if settings != self._told:
            self._client.tell_settings(settings)
            self._told = settings
        self._used = [False] * len(self.parameters)

    def _begin_item(self, place: ItemPlace) -> None:
        super()._begin_item(place)
        if place.last_of_step and not self._clock.see_own_updates:
            self._client.ask(self._round + 1)  # no earlier: what comes before this backward is done is early enough
        if place.last_of_lane:  # that is when gradients are taken: what is marked from here on is this lane's
            self._used = list(self.used())
            self._buckets.used = [False] * len(self.parameters)

    def used(self) -> Sequence[bool]:
        return [before or now for before, now in zip(self._used, self._buckets.used, strict=True)]

    def _leave(self, number: int, nodes: dict[int, Tensor]) -> None:
        place = self._place
        for lane, node in nodes.items():
            if place.left_out or place.weight == 0:
                self._buckets.sums[number].give_back(node)
            elif self._clips is False:
                self._push(number, lane, node, self._used_bits(number), self._all_lanes * _share(place))
            else:
                held = self._held.setdefault(lane, _HeldLane(place))
                held.buckets.append((number, node, self._used_bits(number)))

    def clip(self, max_norm: float) -> float:
        if self._clips is False:
            messages.warn(
                "engine.clip_grad_norm_() was not called in the step before, so this step's gradients have left "
                "unclipped; it counts from the next one on"
            )
        self._max_norm = max_norm
        self._norm = max((self._norm_of(held) for held in self._held.values()), default=self._norm)
        return self._norm

    def _norm_of(self, held: _HeldLane) -> float:
        """Of the lane's mean gradient."""
        sums = self._buckets.sums
        gradients = [
            node[entry.offset : entry.offset + entry.elements]
            for number, node, _ in held.buckets
            for entry in sums[number].bucket.entries
        ]
        return float(global_norm(gradients)) * _share(held.place) * self._tally_of_round().samples / held.place.samples

    def _end_round(self) -> None:
        for lane, held in self._held.items():
            weight = self._all_lanes * _share(held.place)
            if self._max_norm is not None:
                weight *= clip_coefficient(self._norm_of(held), self._max_norm)
            for number, node, used in held.buckets:
                self._push(number, lane, node, used, weight)
        self._held.clear()
        self._clips = self._max_norm is not None
        self._close(self._tally_of_round(), settings=self._settings.read())
        if self._clock.see_own_updates:
            self._client.ask(self._round)

    # -- between rounds ----------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """What all workers pushed is in before any of them reads, and none pushes before all have read."""
        self._client.flush()
        self._all_workers_are_here()
        if self._ever_opened:
            self._client.refresh(self._round, self._weights.put)
            self._seen = self._weights.versions()
        self._all_workers_are_here()

    def _all_workers_are_here(self) -> None:
        """Those that are left."""
        self._lost |= self._barrier.wait()

    def _hand_over(self, round: int, states: Sequence[State] | None) -> None:
        super()._hand_over(round, states)
        self._told = None


def _share(place: ItemPlace) -> float:
    """Backward has multiplied by the lane's weight over the round's samples; what makes that its share of them."""
    return place.samples / place.weight


# -- servers only add --------------------------------------------------------------------------------------------------


@dataclass
class _Waiting:
    """A round whose sum has not been applied yet, and how that is to be done."""

    round: int
    max_norm: float | None = None
    settings: Sequence[float] = ()
    steps: list[Callable[[], Any]] = field(default_factory=list)


class SumsOnServers(PushedRounds):
    """Mode "aggregate": servers only add; every worker holds the weights and updates them itself.

    weights full · gradients pushed · optimizer state full

    synchronous     collect: CLOSE ─► the sum of all workers ─► .grad ─► clip, step(): as under ddp
    BoundedDelay    the rounds of a group are summed one by one, and applied in order when the group ends:
                    each with the learning rate and the clipping of its own round
    """

    def __init__(self, wiring: Wiring) -> None:
        super().__init__(wiring)
        self._totals: list[Tensor] = []
        self._waiting: list[_Waiting] = []
        self._norm = math.nan
        self._newest: list[Tensor] | None = None  # while the model holds those that a group of rounds reads

    # -- one round ---------------------------------------------------------------------------------------------------

    def _start_reading(self) -> None:
        if self._clock.pulls_before(self._round):
            self._catch_up()
        if self._weights.remembered is not None:
            self._newest = self._weights.copies()
            self._weights.restore()
        self._stats.started_round()

    def collect(self, tally: Tally) -> None:
        round, self._used_by_any = self._round, tally.used
        self._close(tally)
        if self._clock.synchronous:
            self._fetch(round, tally.scale)
        else:
            self._waiting.append(_Waiting(round))

    def _fetch(self, round: int, scale: float = 1.0) -> None:
        """`.grad` becomes the round's gradient; servers have scaled it, but not what comes in rows."""
        self._make_room()
        self._totals = [sums.buffer() for sums in self._buckets.sums]

        def put(key: Key, total: Tensor) -> None:
            into = key.of_bucket(self._totals[key.bucket])
            if total.dtype != torch.uint8:
                into.copy_(total)
                return
            self._compressed.decode(key, total, into)
            if scale != 1.0:
                into.mul_(scale)

        used = self._used_parameters(self._client.sums(round, put))
        for sums, total in zip(self._buckets.sums, self._totals, strict=True):
            sums.hand_out(total, used)

    def _used_parameters(self, bits: dict[int, int]) -> list[bool]:
        used = [False] * len(self.parameters)
        for key in self._client.table.keys:
            for place, piece in enumerate(key.pieces):
                used[piece.parameter] |= bool(bits[key.number] >> place & 1)
        return used

    def clip(self, max_norm: float) -> float:
        if self._clock.synchronous:
            self._norm = self._clip_gradients(max_norm)
        else:
            self._waiting[-1].max_norm = max_norm
        return self._norm

    def _clip_gradients(self, max_norm: float) -> float:
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        return float(clip_(gradients, global_norm(gradients), max_norm))

    def apply(self, optimizer: Optimizer, original_step: Callable[[], Any]) -> Any:
        if self._clock.synchronous:
            return original_step()
        setattr(optimizer, STEP_WAS_CALLED, True)
        waiting = self._waiting[-1]
        waiting.steps.append(original_step)
        waiting.settings = self._settings.read()
        if self._clock.pulls_before(self._round) and len(waiting.steps) == len(self._optimizers):
            self._catch_up()
        return None

    def _catch_up(self) -> None:
        """Apply the rounds that wait, in order, to the weights after those before them."""
        if not self._waiting:
            return
        if self._newest is not None:
            self._weights.put_all(self._newest)
            self._newest = None
        now = self._settings.read()
        groups = dict(enumerate(group for optimizer in self._optimizers for group in optimizer.param_groups))
        for waiting in self._waiting:
            self._fetch(waiting.round)
            if waiting.max_norm is not None:
                self._norm = self._clip_gradients(waiting.max_norm)
            self._settings.put(waiting.settings, groups)
            for step in waiting.steps:
                step()
            self._let_go()
        self._settings.put(now, groups)
        self._waiting = []

    def end_step(self) -> None:
        super().end_step()
        self._let_go()

    def _let_go(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None
        for sums, total in zip(self._buckets.sums, self._totals, strict=bool(self._totals)):
            sums.give_back(total)
        self._totals = []

    # -- between rounds ----------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Inside a group the model shows what its first rounds made of the weights; the next gets those back."""
        if self._waiting and not self._clock.pulls_before(self._round):
            self._weights.keep()
        self._catch_up()

    def local_shard(self, parameter: Parameter) -> Tensor | LocalShard:
        self.drain()  # an elastic job keeps its state right after `apply`, which may have put the update off
        return super().local_shard(parameter)

    def local_state(self, optimizer: Optimizer) -> dict[str, Any]:
        self.drain()
        return self._with_reads(optimizer.state_dict(), optimizer)

    def load(self, optimizer: Optimizer, state: dict[str, Any], *, round: int) -> None:
        state = full_tree(state)
        reads = self._reads_of(optimizer, state, round)
        load_exactly(optimizer, state)
        self._client.flush()
        self._all_workers_are_here()
        if self._speaks_for_all:
            self._client.load(round, None, None)
        self._all_workers_are_here()
        self._waiting, self._newest, self._round = [], None, round
        self._weights.remember(reads)
        self._note_load(optimizer, state, round)


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
