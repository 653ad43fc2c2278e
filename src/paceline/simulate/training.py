"""Training steps, worker by worker: what computes, what is on the wire meanwhile, and who waits for whom.

    compute    ── forward ──┬────── backward ───────┬ waits ┬ update ┬─ forward …
    wire                       bucket 0  bucket 1    bucket 2

Every worker has two clocks, of its computing and of its exchanges, which run one after another as the engine's do. Both
are arrays over all workers, so that a step of 100,000 takes a few operations per bucket. How long a micro-batch takes
is drawn for every worker and step: jitter (log-normal), workers that are always slow, and pauses now and then.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from paceline.simulate.collective import Collective
from paceline.simulate.exchange import BY_LANE, IN_SHARDS, Exchange, exchange_of
from paceline.simulate.ring_time import Times
from paceline.simulate.scenario import SERVER, WINDOWS, Scenario

FORWARD = 1 / 3
"""The share of forward in a micro-batch: backward has two products of matrices for each one of forward."""


@dataclass(frozen=True)
class Span:
    """Something that some workers did in a step; times are arrays over the workers that are watched."""

    step: int
    lane: str  # "compute" or "wire"
    name: str
    start: Times
    end: Times


@dataclass(frozen=True)
class Step:
    """Seconds. A step's time is compute, averaged, + the wait for the slowest + communication that nothing hides."""

    ends: float
    takes: float
    compute: float
    slowest: float
    wire: float  # that exchanges take when all workers are there

    @property
    def straggling(self) -> float:
        return max(0.0, min(self.slowest, self.takes) - self.compute)

    @property
    def exposed(self) -> float:
        return max(0.0, self.takes - self.compute - self.straggling)


@dataclass
class Watch:
    """Which workers' spans are kept, for a timeline."""

    workers: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    steps: int = 0
    spans: list[Span] = field(default_factory=list)


class Training:
    """A scenario, step by step."""

    def __init__(self, scenario: Scenario, watch: Watch | None = None) -> None:
        self.scenario, self.watch = scenario, watch or Watch()
        self.exchange: Exchange = exchange_of(scenario)
        self._rng = np.random.default_rng(scenario.seed)
        self._slow = np.ones(scenario.workers)
        chosen = self._rng.permutation(scenario.workers)[: scenario.slow_workers]
        self._slow[chosen] = scenario.slow_factor
        self.slow = np.sort(chosen)
        self._clocks = np.zeros(self.exchange.placed.ranks)
        self._last_end = 0.0
        self.done = 0

    def run(self, steps: int) -> list[Step]:
        return [self.step() for _ in range(steps)]

    def step(self) -> Step:
        scenario = self.scenario
        begun = self._clocks
        takes = self._draw()
        now = _Now(self, begun, takes)
        if scenario.strategy in IN_SHARDS:
            now.with_weights_gathered()
        else:
            now.with_whole_weights()
        now.finish()
        self._clocks = now.cpu + scenario.other_ms / 1e3
        workers = slice(0, scenario.workers)
        ends = float(self._clocks[workers].max())
        compute = takes.sum(axis=0) + now.update_s + scenario.other_ms / 1e3
        step = Step(
            ends=ends,
            takes=ends - self._last_end,
            compute=float(compute.mean()),
            slowest=float(compute.max()),
            wire=now.wire_s,
        )
        self._last_end = ends
        self.done += 1
        return step

    def _draw(self) -> Times:
        """Seconds of each micro-batch of each worker."""
        scenario, rng = self.scenario, self._rng
        items = scenario.lanes * scenario.accumulate
        shape = items, scenario.workers
        takes = np.full(shape, scenario.compute_ms / 1e3) * self._slow
        if scenario.jitter:
            sigma = np.sqrt(np.log1p(scenario.jitter**2))
            takes = takes * rng.lognormal(-(sigma**2) / 2, sigma, shape)
        if scenario.pause_chance:
            pauses = rng.random(scenario.workers) < scenario.pause_chance
            takes[-1] += pauses * scenario.pause_ms / 1e3
        return takes


class _Now:
    """One step under way."""

    def __init__(self, training: Training, begun: Times, takes: Times) -> None:
        self._training, self._scenario, self._exchange = training, training.scenario, training.exchange
        self.cpu, self.wire = begun.copy(), begun.copy()
        self._takes = np.zeros((len(takes), len(begun)))  # servers compute nothing
        self._takes[:, : takes.shape[1]] = takes
        self.wire_s = 0.0
        self._workers = slice(0, takes.shape[1])
        whole = self._scenario.update_ms / 1e3
        self.update_s = whole / self._shards if self._scenario.strategy != SERVER else 0.0
        self._server_update_s = whole if self._scenario.strategy == SERVER else 0.0

    @property
    def _shards(self) -> int:
        if self._scenario.strategy in ("zero1", "zero2", *IN_SHARDS):
            return int(self._exchange.groups.shape[1])
        return 1

    def with_whole_weights(self) -> None:
        """Ddp, star, zero1, zero2, servers, and local training, which exchanges nothing here."""
        scenario, exchange = self._scenario, self._exchange
        items = len(self._takes)
        for item, takes in enumerate(self._takes):
            ends_lane = (item + 1) % scenario.accumulate == 0
            sends = ends_lane if scenario.strategy in BY_LANE else item == items - 1
            self._compute("forward", takes * FORWARD)
            backward = takes * (1 - FORWARD)
            if sends and scenario.strategy not in WINDOWS:
                for number, bucket in enumerate(exchange.buckets):
                    self._send(f"bucket {number}", exchange.of_bucket(bucket), self.cpu + backward * bucket.ready)
            self._compute("backward", backward)

    def with_weights_gathered(self) -> None:
        """Zero3, fsdp, hybrid: the next unit's weights come while one computes."""
        scenario, exchange = self._scenario, self._exchange
        units = exchange.buckets[::-1]  # buckets are filled from the last layer on
        total = sum(unit.parameters for unit in units)
        for item, takes in enumerate(self._takes):
            ends_lane = (item + 1) % scenario.accumulate == 0
            begun = self.cpu
            for number, unit in enumerate(units):
                self._send(f"gather {number}", exchange.of_weights(unit.parameters), begun)
                begun = np.maximum(self.cpu, self.wire)
                self.cpu = begun
                self._compute(f"forward {number}", takes * FORWARD * unit.parameters / total)
            for number, unit in reversed(list(enumerate(units))):
                self._send(f"gather {number}", exchange.of_weights(unit.parameters), begun)
                begun = np.maximum(self.cpu, self.wire)
                self.cpu = begun
                self._compute(f"backward {number}", takes * (1 - FORWARD) * unit.parameters / total)
                if ends_lane:
                    self._send(f"reduce-scatter {number}", exchange.of_bucket(unit), self.cpu)
        if scenario.strategy == "hybrid" and len(exchange.groups) > 1:
            for number, bucket in enumerate(exchange.buckets):
                self._send(f"across hosts {number}", exchange.across_hosts(bucket), self.wire)

    def finish(self) -> None:
        """Vote, wait for the last bucket, update, and what follows it."""
        scenario, exchange = self._scenario, self._exchange
        apart = scenario.strategy in WINDOWS and (self._training.done + 1) % scenario.window
        if scenario.workers > 1 and scenario.strategy != SERVER and not apart:
            self._send("vote", exchange.vote, np.maximum(self.cpu, self.wire), counted=False)
        self.cpu = np.maximum(self.cpu, self.wire)
        if self.update_s:
            self._compute("update", np.full(len(self.cpu), self.update_s))
        if self._server_update_s:
            self.wire[self._workers.stop :] += self._server_update_s / max(1, scenario.servers)
        if scenario.strategy in ("zero1", "zero2", SERVER) or (scenario.strategy in WINDOWS and not apart):
            self.wire = np.maximum(self.cpu, self.wire)
            for number, bucket in enumerate(exchange.buckets):
                if scenario.strategy in WINDOWS:
                    after = exchange.all_reduce(bucket.parameters * scenario.gradient_bytes)
                else:
                    after = exchange.of_weights(bucket.parameters)
                self._send(f"{'weights' if scenario.strategy not in WINDOWS else 'bucket'} {number}", after, self.wire)
            self.cpu = np.maximum(self.cpu, self.wire)

    def _compute(self, name: str, takes: Times) -> None:
        begun = self.cpu
        self.cpu = begun + takes
        self._keep("compute", name, begun, self.cpu)

    def _send(self, name: str, collective: Collective, ready: Times, *, counted: bool = True) -> None:
        begun = np.maximum(self.wire, ready)
        self.wire = collective.run(begun)
        if counted:
            self.wire_s += collective.seconds
        self._keep("wire", name, begun, self.wire)

    def _keep(self, lane: str, name: str, start: Times, end: Times) -> None:
        watch = self._training.watch
        if self._training.done < watch.steps:
            chosen = watch.workers
            watch.spans.append(Span(self._training.done, lane, name, start[chosen], end[chosen]))
