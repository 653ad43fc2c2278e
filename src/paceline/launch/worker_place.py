"""What a process finds when it is born: the variables that make it worker 2 of 4, and how many threads it has."""

from __future__ import annotations

import os

from paceline.launch.hosts import Seat
from paceline.world import environment
from paceline.world.world import LaunchSettings, World


def default_threads(settings: LaunchSettings, size: int) -> int | None:
    """Threads per worker before the engine has its say: a function of lanes, so that bits don't depend on workers."""
    if settings.threads is not None:
        return settings.threads
    if environment.thread_limit() is not None:
        return None
    return max(1, len(os.sched_getaffinity(0)) // (settings.lanes or size))


def worker_variables(world: World, seat: Seat) -> dict[str, str]:
    """One process's environment: ours, and torchrun's names for scripts that know only those."""
    # gloo listens on whatever the host's name resolves to, unless it is told where.
    gloo = {"GLOO_SOCKET_IFNAME": "lo"} if not seat.spans_hosts else {}
    return {
        **environment.worker_environment(world),
        **gloo,
        "RANK": str(world.rank),
        "WORLD_SIZE": str(world.size),
        "LOCAL_RANK": str(world.local_rank),
        "LOCAL_WORLD_SIZE": str(world.local_size),
        "GROUP_RANK": str(world.host_rank),
        "MASTER_ADDR": seat.master_address,
        "MASTER_PORT": str(seat.master_port),
    }
