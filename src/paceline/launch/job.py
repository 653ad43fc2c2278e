"""All that `paceline run` was asked for, as values that are checked before anything starts."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.elastic.decisions import Rules
from paceline.errors import LaunchError
from paceline.launch.exit_rules import GRACE_S
from paceline.launch.rendezvous import Address
from paceline.launch.worker_main import Script
from paceline.world import known_names
from paceline.world.world import LaunchSettings

SERVERS_ON_ANY_HOST = 8
"""So many are allowed even where there are fewer cores, to try things out; more than cores only wait for each other."""

MOST_HOSTS = 10_000


@dataclass(frozen=True)
class Hosts:
    """Where several supervisors meet; None for `count`: as many as the coordinator says."""

    count: int | None
    rank: int
    coordinator: Address
    secret: bytes
    meet_timeout_s: float

    def __post_init__(self) -> None:
        if not 0 < self.meet_timeout_s < float("inf"):
            raise LaunchError(f"--meet-timeout-s {self.meet_timeout_s:g}; hosts are waited for some seconds, above 0")
        if self.count is not None and self.count > MOST_HOSTS:
            raise LaunchError(f"--hosts {self.count}; at most {MOST_HOSTS:,} can meet")
        if self.count is not None and not 0 <= self.rank < self.count:
            raise LaunchError(f"--host-rank {self.rank} of --hosts {self.count}; host ranks count from 0")


@dataclass(frozen=True)
class Job:
    """All that `paceline run` was asked for."""

    script: Script
    workers: int
    settings: LaunchSettings
    hosts: Hosts | None = None
    servers: int = 0
    keep_memory: bool = False
    grace_s: float = GRACE_S
    elastic: Rules | None = None
    ledger: Path | None = None
    quiet: bool = False

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise LaunchError(f"--workers {self.workers}; a job has at least one")
        if not 0 <= self.grace_s < float("inf"):
            raise LaunchError(f"--grace-s {self.grace_s:g}; workers that are asked to stop get 0 or more seconds")
        if self.servers < 0:
            raise LaunchError(f"--servers {self.servers}; a job has none (worker 0 doubles as the server) or more")
        cores = len(os.sched_getaffinity(0))
        if self.servers > max(cores, SERVERS_ON_ANY_HOST) and (self.hosts is None or self.hosts.rank == 0):
            raise LaunchError(
                f"--servers {self.servers}, but they all run on this host, which has {cores} "
                f"core{'s' if cores > 1 else ''}; use at most {max(cores, SERVERS_ON_ANY_HOST)}"
            )
        self._check_strategy()
        if self.hosts is None or self.hosts.count == 1:
            self.settings_for(self.workers)

    def _check_strategy(self) -> None:
        """What flags say about each other; the engine asks again, with the script's word."""
        settings = self.settings
        if settings.backend == "paceline" and self.hosts is not None:
            raise LaunchError(
                "--backend paceline joins the workers of one host, and this job is on several, or open to further "
                "ones; use gloo"
            )
        if settings.strategy in (None, known_names.AUTO):
            return
        traits = known_names.STRATEGIES[settings.strategy]
        if self.servers and not traits.uses_servers:
            able = ", ".join(name for name, other in known_names.STRATEGIES.items() if other.uses_servers)
            raise LaunchError(
                f"--servers {self.servers} with --strategy {settings.strategy}, which has no use for them; leave "
                f"--servers out, or choose {able}"
            )
        if settings.precision not in (None, "fp32") and not traits.takes_low_precision:
            raise LaunchError(
                f"--precision {settings.precision} with --strategy {settings.strategy}, which trains in fp32 alone"
            )
        if settings.offload is not None and not traits.takes_offload:
            able = ", ".join(name for name, other in known_names.STRATEGIES.items() if other.takes_offload)
            raise LaunchError(
                f"--offload {settings.offload} with --strategy {settings.strategy}, which updates weights where they "
                f"are; choose one of {able}"
            )

    def settings_for(self, size: int) -> LaunchSettings:
        """The settings of a job of this many workers; an error where they can't be honoured."""
        if self.elastic is None:
            return _check_lanes(self.settings, size)
        self.elastic.check(size)
        lanes, most = self.settings.lanes or size, self.elastic.max_workers or size
        if self.hosts is not None and most > max(lanes, size):
            raise LaunchError(
                f"--max-workers {most}, but {lanes} lane{'s' if lanes > 1 else ''}; every worker needs at least one: "
                f"use --lanes {most} or more (lanes are fixed for the life of a job)"
            )
        return _check_lanes(replace(self.settings, default_lanes=lanes), size)  # workers may go, lanes stay


def _check_lanes(settings: LaunchSettings, size: int) -> LaunchSettings:
    lanes = settings.lanes
    size //= (settings.tp or 1) * (settings.cp or 1)  # those that share a model have its lanes
    if lanes is not None and lanes < size:
        raise LaunchError(
            f"{size} workers but only {lanes} lane{'s' if lanes > 1 else ''}; every worker needs at least one: "
            f"use --workers {lanes}, or --lanes {size} or more (lanes are fixed for the life of a job)"
        )
    return settings
