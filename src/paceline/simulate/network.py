"""A network is a tree of switches: workers in hosts, hosts in racks, racks in a cluster, joined by shared links.

    level      unit      a link joins              carries, each way
    cluster    rack      a rack to the cluster     what its 32 workers exchange with other racks
    rack       host      a host to its rack        what its 8 workers exchange with other hosts
    host       worker    a worker to its host      all that it exchanges

A message takes the links of both ends up to the first switch that they share. A link is full duplex and shared: what
is on it at the same time takes as long as all its bytes. A message costs the latency of the highest level that it
passes, and `message_s` for each further one that its sender starts or its receiver takes in at the same time.

Workers that don't fill a unit are in one that is not full. More than that must fill all of them.

Networks of common kinds are in networks.toml, with where their numbers are from. `payload` is the share of a link's
bits that are not headers.
"""

from __future__ import annotations

import difflib
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.resources import files
from typing import Any

import numpy as np

from paceline.collectives.rounds import Ranks
from paceline.errors import ConfigError
from paceline.world.checked_values import number, whole_number

GBIT = 1e9 / 8
HOST = "host"
"""The name of a first level whose workers are on one host."""


@dataclass(frozen=True)
class Level:
    """`units` of the level below are joined by links of `bandwidth` bytes per second each way; None: any number."""

    name: str
    units: int | None
    bandwidth: float
    latency_s: float
    message_s: float = 0.0

    def __post_init__(self) -> None:
        where = f"network level {self.name!r}: "
        if self.units is not None:
            whole_number(f"{where}units", self.units, least=1)
        number(f"{where}gbit_s", self.bandwidth / GBIT, above=0)
        number(f"{where}latency_us", self.latency_s * 1e6, least=0)
        number(f"{where}message_us", self.message_s * 1e6, least=0)


@dataclass(frozen=True)
class Network:
    """Levels from the inside out; the last takes any number of units."""

    name: str
    levels: tuple[Level, ...]
    payload: float = 1.0
    call_s: float = 0.0  # until a collective's first message starts, once
    gpu: bool = False  # its workers compute there: the engine exchanges small buckets in another way
    about: str = ""
    source: str = ""

    def __post_init__(self) -> None:
        number(f"network {self.name!r}: payload", self.payload, above=0, most=1)
        number(f"network {self.name!r}: call_us", self.call_s * 1e6, least=0)
        if not self.levels:
            raise ConfigError(f"network {self.name!r} has no levels; give at least one, such as host")
        for level in self.levels[:-1]:
            if level.units is None:
                raise ConfigError(f"network {self.name!r}: level {level.name!r} needs units; only the last may be open")

    def workers_below(self, level: int) -> int:
        """Workers behind one link of that level."""
        return math.prod(each.units or 1 for each in self.levels[:level])

    @property
    def per_host(self) -> int | None:
        """Workers of a full host; None: all are on one. Where no level is a host every worker is on its own."""
        return self.levels[0].units if self.levels[0].name == HOST else 1

    def for_workers(self, workers: int) -> Placed:
        """The links between the first so many workers; a unit that is not full is the only one of its level."""
        whole_number("workers", workers, least=1, why="a job has at least one worker")
        used = [self.levels[0]]
        for number_, level in enumerate(self.levels):
            if level.units is None:
                break
            full = self.workers_below(number_ + 1)
            if workers <= full:
                break
            if workers % full:
                fewer, more = workers // full * full, -(-workers // full) * full
                raise ConfigError(
                    f"workers={workers:,}: network {self.name!r} has {full:,} workers in each {level.name}; "
                    f"choose {fewer:,} or {more:,}"
                )
            if number_ + 1 == len(self.levels):
                raise ConfigError(
                    f"workers={workers:,}: network {self.name!r} ends with one {level.name} of {full:,} workers"
                )
            used.append(self.levels[number_ + 1])
        units = tuple(self.workers_below(number_) for number_ in range(len(used)))
        return Placed(self, tuple(used), units, np.arange(workers, dtype=np.int64))


@dataclass(frozen=True, eq=False)
class Placed:
    """Ranks at places of a network: rank r is where the worker `places[r]` is. Two may share a place and its links."""

    network: Network
    levels: tuple[Level, ...]
    below: tuple[int, ...]  # workers behind a link of each level
    places: Ranks

    @property
    def ranks(self) -> int:
        return len(self.places)

    def with_places(self, places: Ranks) -> Placed:
        """Other ranks on the same network."""
        return Placed(self.network, self.levels, self.below, places)

    @cached_property
    def links(self) -> tuple[Ranks, ...]:
        """By level: which link each rank is behind."""
        return tuple(self.places // below for below in self.below)

    @cached_property
    def bandwidths(self) -> tuple[float, ...]:
        """Of payload."""
        return tuple(level.bandwidth * self.network.payload for level in self.levels)

    def hosts(self, workers: int) -> Ranks:
        """The workers of each host, a row each."""
        per_host = self.network.per_host
        return np.arange(workers, dtype=np.int64).reshape(-1, min(per_host or workers, workers))


# -- networks by name --------------------------------------------------------------------------------------------------


@cache
def presets() -> Mapping[str, Network]:
    told = tomllib.loads(files("paceline.simulate").joinpath("networks.toml").read_text(encoding="utf-8"))
    return {name: network_of(name, about) for name, about in told.items()}


def network_named(name: str) -> Network:
    known = presets()
    if name in known:
        return known[name]
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
    raise ConfigError(f"network={name!r} is not known; {hint}")


KEYS = {"levels", "payload", "call_us", "gpu", "about", "source"}
LEVEL_KEYS = {"name", "units", "gbit_s", "latency_us", "message_us"}


def network_of(name: str, told: Any) -> Network:
    """From a table of a file."""
    if not isinstance(told, dict) or not isinstance(told.get("levels"), list):
        raise ConfigError(f"network {name!r}: expected a table with levels, from the inside out")
    check_keys(f"network {name!r}", told, KEYS)
    levels = []
    for level in told["levels"]:
        if not isinstance(level, dict) or not {"name", "gbit_s", "latency_us"} <= level.keys():
            raise ConfigError(f"network {name!r}: a level has a name, gbit_s and latency_us, and may have units")
        check_keys(f"network {name!r}, level {level['name']!r}", level, LEVEL_KEYS)
        numbers = {
            key: number(f"network {name!r}: {key}", level.get(key, 0.0))
            for key in ("gbit_s", "latency_us", "message_us")
        }
        levels.append(
            Level(
                name=str(level["name"]),
                units=level.get("units"),
                bandwidth=numbers["gbit_s"] * GBIT,
                latency_s=numbers["latency_us"] / 1e6,
                message_s=numbers["message_us"] / 1e6,
            )
        )
    more = {key: told[key] for key in ("payload", "gpu", "about", "source") if key in told}
    call_s = number(f"network {name!r}: call_us", told.get("call_us", 0.0)) / 1e6
    return Network(name, tuple(levels), call_s=call_s, **more)


def check_keys(where: str, told: Mapping[str, Any], known: set[str]) -> None:
    for key in told:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(sorted(known))}"
            raise ConfigError(f"{where}: {key!r} is not known; {hint}")
