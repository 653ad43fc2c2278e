"""What the ranks tell each other through the store before they share memory, and what follows from it for all of them.

hello/0   {"host": …, "kernels": "c", "cores": [0, 1]}        one host, or an error that every rank hears
hello/1   {"host": …, "kernels": "c", "cores": [0, 1]}        C if all have it; crowded if ranks outnumber the cores
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from paceline.collectives.shared_memory.compiling import compiled_library
from paceline.collectives.shared_memory.segment import host_identity, name_of
from paceline.errors import ConfigError

HEARING_S = 5.0


@dataclass(frozen=True)
class Agreement:
    use_c: bool  # only if everybody has it: who sleeps on a word must be woken by the others
    crowded: bool  # more ranks than cores that any of them may use


def agree(store: Any, rank: int, size: int, wanted_kernels: str | None) -> Agreement:
    kernels = "c" if wanted_kernels != "torch" and compiled_library() is not None else "torch"
    mine = {"host": host_identity(), "kernels": kernels, "cores": sorted(os.sched_getaffinity(0))}
    store.set(f"hello/{rank}", json.dumps(mine))
    everyone = [json.loads(store.get(f"hello/{other}")) for other in range(size)]
    hosts = [hello["host"] for hello in everyone]
    if len(set(hosts)) > 1:
        other = next(rank for rank, host in enumerate(hosts) if host != hosts[0])
        until_all_have_heard(store, rank, size)
        raise ConfigError(
            f"rank 0 is on host {name_of(hosts[0])} and rank {other} on {name_of(hosts[other])}: the paceline "
            "backend joins the processes of one host; use gloo between hosts"
        )
    cores = {core for hello in everyone for core in hello["cores"]}
    return Agreement(all(hello["kernels"] == "c" for hello in everyone), size > len(cores))


def until_all_have_heard(store: Any, rank: int, size: int) -> None:
    """Rank 0 often holds the store: if it failed at once, the others would only see that the store is gone."""
    store.set(f"heard/{rank}", "")
    if rank == 0:
        with contextlib.suppress(RuntimeError):
            store.wait([f"heard/{other}" for other in range(size)], timedelta(seconds=HEARING_S))
