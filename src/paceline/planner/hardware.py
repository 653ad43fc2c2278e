"""Hardware as the planner knows it: how fast one worker computes, and how fast workers move bytes between them.

    paceline bench hardware --json here.json      measured on this machine, with paceline's own exchanges
    hardware_named("H100")                        data sheets (data/devices.json, data/links.json), with their sources

A *measured* profile has rates for every number of workers that were busy at once, because workers of one host share its
cores and its memory; and for each strategy what its exchange costs in a step:

    seconds = fixed + per byte · bytes of gradients + per tensor · parameters, and at least those of next to no bytes

Where that was not measured the textbook's formula stands in: messages · latency + bytes / bandwidth of the slowest
link. Of a data sheet's peak a training step reaches a part; ATTAINED says which part is assumed.
"""

from __future__ import annotations

import importlib.resources
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from paceline import input_file
from paceline.errors import ConfigError

FORMAT = 1
ATTAINED_FLOPS = 0.62
ATTAINED_BANDWIDTH = 0.8
ATTAINED_LINK = 0.8
LAUNCH_S = 4e-6
"""Of peaks in data sheets, and seconds to launch a kernel: what is assumed, not measured."""
ATTAINED_ATTENTION = 0.31
"""Of flops, by attention's kernels, where none was timed: half of what products reach, because between two products
there is a softmax. Where one was timed data/devices.json says the part. On Hopper torch's flash kernels reach less:
they were written for Ampere's instructions, not for Hopper's (wgmma)."""
ATTENTION = " attention"
"""Behind a dtype in `Rates.flops`: of attention's kernels. Where it is missing they are taken for products."""
OF_ANOTHER_GPU = (
    "write --hardware FILE by hand from its data sheet: device, memory_bytes, rates and inside, as "
    "docs/concepts/plan.md#hardware shows"
)
"""`paceline bench hardware` is no help there: it measures CPUs."""


@dataclass(frozen=True)
class Rates:
    """Of one worker, while as many as the profile says are busy."""

    flops: Mapping[str, float]  # by dtype
    memory_bandwidth: float
    operator_s: float = 0.0  # to start one
    update_bandwidth: float | None = None  # of an optimizer, in bytes read and written; None: the memory's
    step_s: float = 0.0  # what the Engine adds to a step and to each of its items: Python, whatever the model
    item_s: float = 0.0

    def seconds(self, flops: int, moved: int, dtype: str) -> float:
        """Of one operator: it computes or waits for memory, whichever takes longer."""
        rate = self.flops.get(dtype) or self.flops.get(dtype.partition(" ")[0]) or self.flops["float32"]
        return self.operator_s + max(flops / rate, moved / self.memory_bandwidth)

    @property
    def updates(self) -> float:
        return self.update_bandwidth or self.memory_bandwidth


@dataclass(frozen=True)
class Link:
    name: str
    bandwidth: float  # bytes/s each way, of one worker while all send
    latency_s: float


@dataclass(frozen=True)
class Exchange:
    """What a strategy's exchange costs in one step, beyond a step of workers that never talk."""

    fixed_s: float
    per_byte_s: float  # of gradients
    per_tensor_s: float
    least_s: float = 0.0  # with next to no bytes: the line through large models ends below it

    def seconds(self, gradient_bytes: int, tensors: int) -> float:
        return max(self.least_s, self.fixed_s + self.per_byte_s * gradient_bytes + self.per_tensor_s * tensors)


Exchanges = Mapping[str, Mapping[int, Mapping[str, Exchange]]]  # by backend, workers and strategy


@dataclass(frozen=True)
class Hardware:
    name: str
    device: str  # "cpu" or "cuda"
    memory_bytes: int  # of a device, or of a host that workers share
    rates: Mapping[int, Rates]  # by workers of a host that are busy at once
    inside: Link  # between workers of a host
    between: Link | None = None  # between hosts
    exchanges: Exchanges = field(default_factory=dict)
    collectives: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # by backend and workers, as measured
    cores: int | None = None
    threads: int = 1  # of a worker, when it was measured
    source: str = ""

    @property
    def is_measured(self) -> bool:
        return bool(self.exchanges)

    @property
    def shares_memory(self) -> bool:
        """The workers of a host have one memory between them."""
        return self.device == "cpu"

    def rates_for(self, busy: int) -> Rates:
        """While so many workers of a host are busy. Beyond what was measured they take turns."""
        if not self.shares_memory:
            return self.rates[min(self.rates)]
        known = [count for count in self.rates if count <= busy]
        nearest = max(known) if known else min(self.rates)
        found = self.rates[nearest]
        above = [count for count in self.rates if count > busy]
        if nearest == busy or not known:
            return found
        if above:  # between two that were measured
            other, share = self.rates[min(above)], (busy - nearest) / (min(above) - nearest)
            return _between(found, other, share)
        return _scaled(found, nearest / busy)

    def exchange(self, strategy: str, backend: str, workers: int) -> Exchange | None:
        """As it was measured; None: with so many workers, or over this backend, it was not."""
        return self.exchanges.get(backend, {}).get(workers, {}).get(strategy)

    def link_of(self, workers: int, per_host: int) -> Link:
        """The slowest that an exchange of all workers crosses."""
        if workers <= per_host:
            return self.inside
        if self.between is None:
            raise ConfigError(
                f"{workers} workers, {per_host} on each host: nothing says how hosts are connected; give "
                f"--network, one of {', '.join(network_names())}"
            )
        return self.between

    def to_json(self) -> str:
        told = asdict(self) | {"format": FORMAT, "kind": "paceline hardware profile"}
        return json.dumps(told, indent=2) + "\n"


def _scaled(rates: Rates, by: float) -> Rates:
    return Rates(
        {dtype: by * rate for dtype, rate in rates.flops.items()},
        by * rates.memory_bandwidth,
        rates.operator_s / by,
        None if rates.update_bandwidth is None else by * rates.update_bandwidth,
        rates.step_s / by,
        rates.item_s / by,
    )


def _between(low: Rates, high: Rates, share: float) -> Rates:
    """Seconds are interpolated: they are what grows with the number of workers."""

    def middle(a: float, b: float) -> float:
        return 1 / ((1 - share) / a + share / b)

    return Rates(
        {dtype: middle(rate, high.flops.get(dtype, rate)) for dtype, rate in low.flops.items()},
        middle(low.memory_bandwidth, high.memory_bandwidth),
        (1 - share) * low.operator_s + share * high.operator_s,
        middle(low.updates, high.updates),
        (1 - share) * low.step_s + share * high.step_s,
        (1 - share) * low.item_s + share * high.item_s,
    )


# -- where profiles come from ------------------------------------------------------------------------------------------


def _data(name: str) -> Any:
    return json.loads(importlib.resources.files("paceline.planner").joinpath(f"data/{name}.json").read_text())


def published(table: str) -> dict[str, Any]:
    """Of papers and manuals, to hold the planner against; each names its source."""
    found: dict[str, Any] = _data("published")[table]
    return found


def device_names() -> list[str]:
    return list(_data("devices")["devices"])


def hardware_reported_as(reported: str, memory_bytes: int) -> Hardware:
    """The GPU of this machine, by the whole name that its driver reports, with the memory that this one has.

    A part of a name is not enough: an L40S is no L4, and an H100 PCIe has 0.6 of the bandwidth of an SXM5.
    """
    devices = _data("devices")["devices"]
    found = next((name for name, told in devices.items() if reported in told["reported_as"]), None)
    if found is None:
        titles = ", ".join(told["title"] for told in devices.values())
        raise ConfigError(
            f"no data sheet of this GPU ({reported}, {memory_bytes / 2**30:.1f} GiB) is known, only of {titles}; plan "
            f"for one of these with --hardware, or {OF_ANOTHER_GPU}"
        )
    return replace(hardware_named(found), memory_bytes=memory_bytes)


def network_names() -> list[str]:
    return list(_data("links")["links"])


def link_named(name: str) -> Link:
    known = _data("links")["links"]
    found = _match(name, known)
    if found is None:
        raise ConfigError(f"network {name!r} is not known; choose one of {', '.join(known)}")
    return Link(found, ATTAINED_LINK * known[found]["bandwidth"], known[found]["latency_s"])


def hardware_named(name: str, network: str | None = None) -> Hardware:
    """A GPU by its name, or a file: what `paceline bench hardware --json` wrote, or a GPU's by hand."""
    devices = _data("devices")["devices"]
    found = _match(name, devices)
    if found is None:
        if name.endswith(".json") or Path(name).exists():
            return read_hardware(Path(name), network)
        raise ConfigError(
            f"hardware {name!r} is not known; choose one of {', '.join(devices)}, or give --hardware FILE: for CPUs "
            f"what paceline bench hardware --json FILE measures on that machine, for another GPU {OF_ANOTHER_GPU}"
        )
    told = devices[found]
    attention = told.get("attention", ATTAINED_ATTENTION)
    rates = Rates(
        {dtype: ATTAINED_FLOPS * rate for dtype, rate in told["flops"].items()}
        | {dtype + ATTENTION: attention * rate for dtype, rate in told["flops"].items()},
        ATTAINED_BANDWIDTH * told["memory_bandwidth"],
        LAUNCH_S,
    )
    between = None if network is None else link_named(network)
    return Hardware(
        told["title"], "cuda", told["memory_bytes"], {1: rates}, link_named(told["link"]), between,
        source=told["source"],
    )  # fmt: skip


def _match(name: str, known: Mapping[str, Any]) -> str | None:
    def plain(text: str) -> str:
        return "".join(text.lower().split()).replace("-", "").replace("nvidia", "")

    return next((one for one in known if plain(one) == plain(name)), None)


def read_hardware(path: Path, network: str | None = None) -> Hardware:
    try:
        told = input_file.read_json(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"hardware profile {path}: {input_file.cause_of(error)}") from error
    if told.get("kind") != "paceline hardware profile" or told.get("format") != FORMAT:
        raise ConfigError(
            f"{path} is no hardware profile of this version; make one with paceline bench hardware --json {path.name} "
            f"(a machine of CPUs; for a GPU {OF_ANOTHER_GPU})"
        )
    try:
        hardware = _hardware_of(told)
        _check(hardware, path)
    except ConfigError:  # which says what is wrong, and is a ValueError too
        raise
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"hardware profile {path} is damaged ({type(error).__name__}: {error})") from error
    return hardware if network is None else replace(hardware, between=link_named(network))


def _hardware_of(told: Mapping[str, Any]) -> Hardware:
    """What only a measurement has may be missing: a profile that was written by hand is short."""
    between = told.get("between")
    return Hardware(
        name=str(told["name"]),
        device=str(told["device"]),
        memory_bytes=int(told["memory_bytes"]),
        rates={int(count): Rates(**rates) for count, rates in told["rates"].items()},
        inside=Link(**told["inside"]),
        between=None if between is None else Link(**between),
        exchanges={
            backend: {
                int(count): {strategy: Exchange(**cost) for strategy, cost in costs.items()}
                for count, costs in by_workers.items()
            }
            for backend, by_workers in told.get("exchanges", {}).items()
        },
        collectives=dict(told.get("collectives", {})),
        cores=told.get("cores"),
        threads=int(told.get("threads", 1)),
        source=str(told.get("source", "written by hand")),
    )


def _check(hardware: Hardware, path: Path) -> None:
    if hardware.device not in ("cpu", "cuda"):
        raise ConfigError(f"hardware profile {path} has device {hardware.device!r}, which is neither cpu nor cuda")
    numbers = [hardware.inside.bandwidth, hardware.memory_bytes]
    for rates in hardware.rates.values():
        numbers += [rates.memory_bandwidth, *rates.flops.values()]
    if not hardware.rates or not all(math.isfinite(number) and number > 0 for number in numbers):
        raise ConfigError(f"hardware profile {path} has a rate that is not positive; measure it again")
    if any("float32" not in rates.flops for rates in hardware.rates.values()):  # what others are taken for
        raise ConfigError(f"hardware profile {path} has no rate of float32 among its flops")
    times = [hardware.inside.latency_s, *(rates.operator_s for rates in hardware.rates.values())]
    if not all(math.isfinite(seconds) and seconds >= 0 for seconds in times):
        raise ConfigError(f"hardware profile {path} has a latency or an operator_s that is no time in seconds")
