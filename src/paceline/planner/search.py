"""Every strategy × micro-batch × accumulation × precision × checkpointing, compiled or not: what fits, what is fastest.

    plan = search(profile, hardware, Request(workers=8, per_host=8))
    plan.fitting[0]        the fastest that fits, with `why` and the `flags` to start it with
    plan.too_large         what does not fit, smallest first

The global batch stays what it is (`samples · accumulate · lanes`), so that every row trains the same thing: a smaller
micro-batch is accumulated more often. Strategies that train other numbers than ddp are tried when they are named.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

import paceline.strategies  # noqa: F401 (they register themselves)
from paceline.errors import ConfigError
from paceline.planner.hardware import Hardware
from paceline.planner.memory_model import PARTS, Memory, memory_of
from paceline.planner.model_profile import ModelProfile, PassProfile, Variant
from paceline.planner.step_time_model import StepTime, step_time
from paceline.planner.traffic import Sizes, StepTraffic, step_traffic
from paceline.sharding.footprint import FOOTPRINTS
from paceline.strategies.registry import STRATEGIES, Chosen, choose

PROCESS_BYTES = {"cpu": 256 * 2**20, "cuda": 640 * 2**20}
"""What a worker has besides tensors: libraries on a host; on a GPU a context and libraries' workspaces."""
ALIKE = 0.03  # of a step: what a plan can't tell apart


@dataclass(frozen=True)
class Request:
    """What is planned for. `global_batch`: samples of a step; None: the given micro-batch on every lane."""

    workers: int = 1
    per_host: int = 0  # 0: all of them
    lanes: int = 0  # 0: as many as workers
    global_batch: int | None = None
    strategies: tuple[str, ...] = ()
    precisions: tuple[str, ...] = ("fp32",)
    checkpointing: tuple[bool, ...] = (False, True)
    compiled: tuple[bool, ...] = (False,)
    micro_batches: tuple[int, ...] = ()
    backend: str | None = None
    bucket_mib: float = 16.0
    memory_bytes: int | None = None  # of a worker; None: the hardware's

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise ConfigError(f"--workers {self.workers}: there is at least one")
        if self.per_host and (self.workers % self.per_host and self.per_host < self.workers):
            raise ConfigError(f"--per-host {self.per_host}: {self.workers} workers don't fill hosts of that size")
        if self.lanes and self.lanes < self.workers:
            raise ConfigError(f"--lanes {self.lanes}: fewer than {self.workers} workers leave some without work")

    def of_script(self, lanes: int, accumulate: int, samples: int) -> Request:
        """With the lanes and the global batch that a script fixes, where no others are asked for."""
        lanes = self.lanes or (lanes if lanes > 1 else 0)  # one is what it has where it says nothing
        if 0 < lanes < self.workers:
            raise ConfigError(
                f"the script has {lanes} lanes, so {self.workers} workers would leave some without work; plan for at "
                f"most {lanes}, or change Engine(lanes=…)"
            )
        return replace(
            self, lanes=lanes, global_batch=self.global_batch or (lanes or self.workers) * accumulate * samples
        )

    @property
    def on_host(self) -> int:
        return min(self.per_host or self.workers, self.workers)

    @property
    def all_lanes(self) -> int:
        return self.lanes or self.workers


@dataclass(frozen=True)
class Candidate:
    """One way to train, and what it is predicted to need."""

    strategy: str
    samples: int  # of a micro-batch
    accumulate: int
    precision: str
    recomputed: bool
    lanes: int
    memory: Memory
    traffic: StepTraffic
    time: StepTime
    room: int  # bytes that a worker has
    compiled: bool = False

    @property
    def global_batch(self) -> int:
        return self.samples * self.accumulate * self.lanes

    @property
    def samples_per_s(self) -> float:
        return self.global_batch / self.time.step_s

    @property
    def over(self) -> int:
        """Bytes that are missing; negative where it fits."""
        return self.memory.peak - self.room

    @property
    def fits(self) -> bool:
        return self.over <= 0

    @property
    def settings(self) -> str:
        checkpointing = ", activations made again" if self.recomputed else ""
        compiled = ", compiled" if self.compiled else ""
        times = f" × {self.accumulate}" if self.accumulate > 1 else ""
        return f"{self.strategy}, {self.precision}, micro-batch {self.samples}{times}{checkpointing}{compiled}"

    def to_json(self) -> dict[str, Any]:
        return {
            "strategy": self.strategy,
            "micro_batch": self.samples,
            "accumulate": self.accumulate,
            "precision": self.precision,
            "activation_checkpointing": self.recomputed,
            "compile": self.compiled,
            "global_batch": self.global_batch,
            "fits": self.fits,
            "memory": self.memory.parts() | {"model_state": self.memory.model_state, "peak": self.memory.peak},
            "room": self.room,
            "sent_bytes": list(self.traffic.sent),
            "sent_is_counted": self.traffic.counted,
            "compute_s": self.time.compute_s,
            "update_s": self.time.update_s,
            "communication_s": self.time.communication_s,
            "hidden_s": self.time.hidden_s,
            "exposed_s": self.time.exposed_s,
            "step_s": self.time.step_s,
            "samples_per_s": self.samples_per_s,
        }


@dataclass(frozen=True)
class Plan:
    model: ModelProfile
    hardware: Hardware
    request: Request
    fitting: tuple[Candidate, ...]  # fastest first
    too_large: tuple[Candidate, ...]  # smallest first
    left_out: tuple[str, ...] = ()

    @property
    def best(self) -> Candidate:
        if not self.fitting:
            raise ConfigError(self.why_nothing_fits())
        return self.fitting[0]

    def best_of(self, strategy: str) -> Candidate | None:
        return next((one for one in self.fitting if one.strategy == strategy), None)

    def why(self) -> str:
        """Why the first is first: what it saves against the best of another strategy."""
        best = self.best
        others = {one.strategy: one for one in reversed(self.fitting) if one.strategy != best.strategy}
        others = {name: one for name, one in others.items() if one.samples_per_s < best.samples_per_s * (1 - 1e-9)}
        if not others:
            if any(one.strategy != best.strategy for one in self.too_large):
                return f"{best.strategy} is the only strategy that fits"
            return f"{best.strategy} is the only strategy that was asked for, with the fastest micro-batch"
        rival = max(others.values(), key=lambda one: one.samples_per_s)
        ahead = best.samples_per_s / rival.samples_per_s - 1
        per_sample = {
            name: getattr(rival.time, name) / rival.global_batch - getattr(best.time, name) / best.global_batch
            for name in ("compute_s", "update_s", "exposed_s")
        }
        most = max(per_sample, key=lambda name: per_sample[name])
        told = {
            "compute_s": "computes less",
            "update_s": "each worker updates its part alone",
            "exposed_s": "waits less for other workers",
        }[most]
        numbers = f"{1e3 * getattr(best.time, most):.3g} ms a step against {1e3 * getattr(rival.time, most):.3g}"
        near = "" if ahead > ALIKE else "; so near that only a measurement can tell"
        faster = f"{ahead:.0%} faster than" if ahead >= 0.005 else "as fast as"
        return f"{faster} {rival.strategy}: {told} ({numbers}){near}"

    def flags(self) -> str:
        """What to start the best with; batch_size and accumulate belong to the script."""
        best, request = self.best, self.request
        words = ["paceline run", f"--workers {request.on_host}", f"--strategy {best.strategy}"]
        if request.all_lanes != request.workers:
            words.append(f"--lanes {request.all_lanes}")
        if best.precision != "fp32":
            words.append(f"--precision {best.precision}")
        if best.recomputed:
            words.append("--activation-checkpointing blocks")
        accumulate = [f"accumulate={best.accumulate}"] if best.accumulate != self.model.accumulate else []
        of_engine = ", ".join([*accumulate, *(["compile=True"] if best.compiled else [])])
        script = f"batch_size={best.samples}" + (f", Engine({of_engine})" if of_engine else "")
        name = self.model.name if self.model.name.endswith(".py") else "SCRIPT"
        return f"{' '.join(words)} {name}    with {script}"

    def why_nothing_fits(self) -> str:
        if not self.too_large:
            return "nothing to plan: no strategy takes these settings"
        smallest = self.too_large[0]
        part = max(PARTS, key=lambda name: getattr(smallest.memory, name))
        return (
            f"nothing fits: {smallest.settings} needs {gib(smallest.memory.peak)} on each worker, "
            f"{gib(smallest.over)} more than the {gib(smallest.room)} it has; the largest part is "
            f"{PARTS[part]} ({gib(getattr(smallest.memory, part))}). {self._would_fit(smallest)}"
        )

    def _would_fit(self, smallest: Candidate) -> str:
        """On what it fits, which is planned for as everything is; then what was not tried, which is not known yet."""
        needs = smallest.memory.peak + PROCESS_BYTES[self.hardware.device]
        if self.hardware.shares_memory:
            on_host = self.request.on_host
            host = f", {at_least(on_host * needs)} on a host" if on_host > 1 and not self.request.memory_bytes else ""
            with_more = f"with {at_least(needs)} for each worker{host}"
            certain = f"It needs {with_more.removeprefix('with ')}"
        else:
            with_more = f"on devices with {at_least(needs)}"
            certain = f"It needs devices with at least {at_least(needs)}"
        if (found := self._on_more_workers()) is not None:
            workers, strategy = found
            other = "" if strategy == smallest.strategy else f"with {strategy} "
            each = f" ({self.request.on_host} on each host)" if self.hardware.shares_memory else ""
            certain = f"It would {other}on about {workers} workers{each}, or {with_more}"
        perhaps = self._not_tried()
        return f"{certain}. Not tried, and perhaps enough: {perhaps}" if perhaps else certain

    def _on_more_workers(self) -> tuple[int, str] | None:
        """How many, on hosts as large as now, and the strategy that takes least there; None: no number is enough."""
        for factor in (2, 4, 8, 16, 32, 64):
            workers = factor * self.request.workers
            if 0 < self.request.lanes < workers:
                break
            request = replace(self.request, workers=workers, per_host=self.request.on_host)
            held = ((memory.peak, strategy) for strategy, memory in _memories(self.model, self.hardware, request))
            least, strategy = min(held, default=(math.inf, ""))
            if least <= room_of(self.hardware, request):
                return workers, strategy
        return None

    def _not_tried(self) -> str:
        """What the user left out, where the least that it could take is not too much. It was not profiled."""
        if "fake tensors" not in self.model.how:  # it ran for real, its own batch alone: flags would change nothing
            return "a smaller batch of the model's own" if self._could_fit(samples=1) else ""
        ways: dict[str, dict[str, Any]] = {}
        if True not in self.request.checkpointing and self.model.blocks:
            ways["activation checkpointing (leave --no-checkpointing out)"] = {"recomputed": True}
        if set(self.request.precisions) == {"fp32"}:
            ways["--precision bf16"] = {"precision": "bf16"}
        if all(one.samples > 1 for one in self.too_large):
            ways["--micro-batches 1"] = {"samples": 1}
        if alone := [name for name, changed in ways.items() if self._could_fit(**changed)]:
            return " or ".join(alone)
        together = {name: value for changed in ways.values() for name, value in changed.items()}
        return " and ".join(ways) if len(ways) > 1 and self._could_fit(**together) else ""

    def _could_fit(self, *, samples: int | None = None, precision: str | None = None, recomputed: bool = False) -> bool:
        """Weights and all that is kept of them as planned; of a pass, the least that it could hold."""
        for variant, step in self.model.passes.items():
            wanted = Variant(samples or variant.samples, precision or variant.precision)
            share = wanted.samples / variant.samples
            if wanted.precision != variant.precision and variant.precision == "fp32":
                share /= 2
            least = replace(
                step,
                saved_bytes=0 if recomputed else int(share * step.saved_bytes),
                peak_bytes=int(share * (step.temporary_bytes + (0 if recomputed else step.saved_bytes))),
                input_bytes=int(share * step.input_bytes),
            )
            model = replace(self.model, passes={wanted: least})
            request = replace(self.request, precisions=(wanted.precision,), checkpointing=(False,), compiled=(False,))
            room = room_of(self.hardware, request)
            if any(memory.peak <= room for _, memory in _memories(model, self.hardware, request)):
                return True
        return False

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": "paceline plan",
            "model": {
                "name": self.model.name,
                "parameters": self.model.parameters,
                "profiled_by": self.model.how,
                "blocks": self.model.blocks,
            },
            "hardware": {
                "name": self.hardware.name,
                "source": self.hardware.source,
                "measured": self.hardware.is_measured,
            },
            "workers": self.request.workers,
            "per_host": self.request.on_host,
            "lanes": self.request.all_lanes,
            "best": None if not self.fitting else self.best.to_json() | {"why": self.why(), "flags": self.flags()},
            "fitting": [one.to_json() for one in self.fitting],
            "too_large": [one.to_json() for one in self.too_large],
            "left_out": list(self.left_out),
        }


def gib(number: float) -> str:
    return f"{number / 2**30:.2f} GiB" if abs(number) >= 2**28 else f"{number / 2**20:.1f} MiB"


def at_least(number: float) -> str:
    """Rounded up: who gives it as much as is written here gives it enough."""
    unit = 2**30 / 100 if number >= 2**28 else 2**20 / 10
    return gib(math.ceil(number / unit) * unit)


def micro_batches(global_batch: int, lanes: int, given: int) -> list[int]:
    """Sizes that fill the global batch when they are accumulated: the lane's share, a half of it, a quarter, …"""
    each = max(1, global_batch // lanes)
    sizes = [each]
    while sizes[-1] > 1 and sizes[-1] % 2 == 0 and len(sizes) < 6:
        sizes.append(sizes[-1] // 2)
    return sizes if given in sizes or each % given else sorted({*sizes, given}, reverse=True)


def strategies_for(request: Request, hardware: Hardware) -> tuple[list[Chosen], list[str]]:
    if request.strategies:
        unknown = [name for name in request.strategies if name not in FOOTPRINTS]
        if unknown:
            raise ConfigError(
                f"strategy {unknown[0]!r} can't be planned for: no footprint is known; choose among "
                f"{', '.join(FOOTPRINTS)}"
            )
        return [choose(name) for name in request.strategies], []
    known = [choose(name) for name in FOOTPRINTS if name in STRATEGIES]
    alike = [one for one in known if one.bits_of_one_process and one.entry.bits_of_ddp]
    several_hosts = request.on_host < request.workers
    left_out = []
    if not several_hosts:
        alike = [one for one in alike if one.name != "hybrid"]
    if request.workers == 1:
        alike = [one for one in alike if one.name == "ddp"]
        left_out.append("one worker: strategies are all alike")
    return alike, left_out


def sizes_for(request: Request, hardware: Hardware, accumulate: int, precision: str) -> Sizes:
    backend = request.backend or ("nccl" if hardware.device == "cuda" else "paceline")
    together = request.on_host == request.workers
    if backend == "paceline" and not together:
        backend = "gloo"
    return Sizes(
        request.workers,
        request.all_lanes,
        accumulate,
        backend,
        int(request.bucket_mib * 2**20),
        torch.float32 if precision == "fp32" else torch.bfloat16,
        on_host=request.on_host if request.workers % request.on_host == 0 else None,
        shares_memory=backend == "paceline" and together and request.workers > 1,
    )


def room_of(hardware: Hardware, request: Request) -> int:
    """Bytes that a worker has for tensors."""
    sharers = request.on_host if hardware.shares_memory else 1
    return (request.memory_bytes or hardware.memory_bytes // sharers) - PROCESS_BYTES[hardware.device]


def _ways(
    model: ModelProfile, hardware: Hardware, request: Request, chosen: Sequence[Chosen]
) -> Iterator[tuple[Chosen, Variant, PassProfile, Sizes]]:
    """Every strategy with every pass that fills the global batch."""
    lanes = request.all_lanes
    global_batch = request.global_batch or lanes * model.samples
    for variant, step in model.passes.items():
        if variant.recomputed not in request.checkpointing or variant.precision not in request.precisions:
            continue
        if variant.compiled not in request.compiled:
            continue
        accumulate, rest = divmod(global_batch, lanes * variant.samples)
        if rest or not accumulate:
            continue
        sizes = sizes_for(request, hardware, accumulate, variant.precision)
        for strategy in chosen:
            if variant.precision == "fp32" or strategy.entry.takes_low_precision:
                yield strategy, variant, step, sizes


def _memories(model: ModelProfile, hardware: Hardware, request: Request) -> Iterator[tuple[str, Memory]]:
    """What each way would hold, by strategy."""
    chosen, _ = strategies_for(request, hardware)
    for strategy, variant, step, sizes in _ways(model, hardware, request, chosen):
        yield strategy.name, memory_of(strategy, model, step, sizes, variant.precision, request.on_host)


def search(model: ModelProfile, hardware: Hardware, request: Request) -> Plan:
    chosen, left_out = strategies_for(request, hardware)
    lanes = request.all_lanes
    global_batch = request.global_batch or lanes * model.samples
    room = room_of(hardware, request)
    found: list[Candidate] = []
    for strategy, variant, step, sizes in _ways(model, hardware, request, chosen):
        traffic = step_traffic(strategy.name, model, step, sizes)
        memory = memory_of(strategy, model, step, sizes, variant.precision, request.on_host)
        low = variant.precision != "fp32"
        time = step_time(strategy.name, model, step, sizes, traffic, hardware, request.on_host, low)
        found.append(
            Candidate(
                strategy.name,
                variant.samples,
                sizes.accumulate,
                variant.precision,
                variant.recomputed,
                lanes,
                memory,
                traffic,
                time,
                room,
                variant.compiled,
            )
        )
    if model.passes and not any(variant.precision in request.precisions for variant in model.passes):
        raise ConfigError(
            f"{model.name} was not run in {' or '.join(request.precisions)}: a model that can't be traced runs once, "
            "in fp32; leave --precision out"
        )
    if not found:
        raise ConfigError(
            f"no micro-batch fills a global batch of {global_batch} on {lanes} lanes; give --global-batch a multiple "
            f"of {lanes}, or --micro-batches that divide it"
        )
    fitting = sorted((one for one in found if one.fits), key=lambda one: (-one.samples_per_s, one.memory.peak))
    too_large = sorted((one for one in found if not one.fits), key=lambda one: one.memory.peak)
    return Plan(model, hardware, request, tuple(fitting), tuple(too_large), tuple(left_out))


def variants_for(request: Request, samples: int) -> Sequence[Variant]:
    lanes = request.all_lanes
    global_batch = request.global_batch or lanes * samples
    sizes = list(request.micro_batches) or micro_batches(global_batch, lanes, samples)
    return [
        Variant(size, precision, again, compiled)
        for precision in sorted(request.precisions, key=lambda name: name != "fp32")
        for size in sizes
        for again in request.checkpointing
        for compiled in request.compiled
    ]
