"""Groups of c10d, one for each kind of device: gloo for the host's tensors, or our own through shared memory; NCCL.

In an elastic job somebody may die while one is built. So all come to one place first, where a worker that has yet to
finish what it computes is waited for; and what can't be interrupted, the build itself, is left behind as soon as the
store knows that its generation is over. Whoever has to meet others tries again with those who are there.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from paceline.collectives.in_time import in_time
from paceline.collectives.shared_memory.group import SharedMemoryGroup
from paceline.errors import ConfigError, WorldError
from paceline.world.environment import tensor_address
from paceline.world.waiting import Waiting
from paceline.world.world import World

MEET_AGAIN_S = 5.0
STUCK_S = 2.0
LOOK_EVERY_S = 1.0
_HERE = "paceline/here/"


def build_groups(world: World, store: Store, backend: str, device: torch.device, timeout_s: float) -> Mapping[str, Any]:
    backends = {"cpu": "gloo", device.type: backend}
    waits_s, timeout_s = timeout_s, timeout_s if world.elastic is None else min(MEET_AGAIN_S, timeout_s)
    try:
        _gather(world, store, waits_s)
        groups = {}
        for kind, name in backends.items():
            place = PrefixStore(f"paceline/group/{kind}", store)
            build = partial(_build_group, world, place, name, device, timeout_s)
            patience_s = timeout_s + STUCK_S
            groups[kind] = (
                build()
                if world.elastic is None
                else in_time(build, patience_s, "building a group", given_up=partial(_is_over, place))
            )
        if waits_s != timeout_s:
            for group in groups.values():
                _let_wait(group, waits_s)
        return groups
    except (RuntimeError, ValueError, TimeoutError, WorldError) as error:
        raise WorldError(
            f"worker {world.rank} of {world.size} could not join the {backend} group within {timeout_s:.0f} s: "
            f"{first_line(error)}; are all {world.size} workers running, and can their hosts reach each other?"
        ) from error


def _gather(world: World, store: Store, timeout_s: float) -> None:
    """All come to one place first: who has not come can be named there, and an elastic build waits for nobody."""
    keys, deadline = {rank: f"{_HERE}{rank}" for rank in range(world.size)}, time.monotonic() + timeout_s
    store.set(keys[world.rank], "")
    with Waiting() as waiting:
        while True:
            try:
                store.wait(list(keys.values()), timedelta(seconds=min(LOOK_EVERY_S, timeout_s)))
                return
            except RuntimeError as error:  # time is up; what else may be wrong the next look shows
                missing = [rank for rank, key in keys.items() if not store.check([key])]
                if time.monotonic() >= deadline:
                    raise WorldError(f"{_workers(missing)} did not come" if missing else first_line(error)) from error
                if missing:
                    waiting.still_for(_workers(missing))


def _workers(ranks: Sequence[int]) -> str:
    return f"worker{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _is_over(store: Store) -> bool:
    """Whether the store takes no more of these keys, because their generation is over."""
    try:
        store.check([_HERE])
    except (RuntimeError, WorldError):
        return True
    return False


def _let_wait(group: Any, timeout_s: float) -> None:
    patient = getattr(group, "set_timeout", None) or group._set_default_timeout
    patient(timedelta(seconds=timeout_s))


def shut_down(groups: Mapping[str, Any]) -> None:
    for group in groups.values():
        shutdown = getattr(group, "shutdown", None)
        if shutdown is not None:
            shutdown()


def _build_group(world: World, store: Store, backend: str, device: torch.device, timeout_s: float) -> Any:
    if backend == "gloo":
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timedelta(seconds=timeout_s)
        options._threads = 2
        # Without a name gloo listens on whatever the host name resolves to, which may be any interface.
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=tensor_address(world))]
        return dist.ProcessGroupGloo(store, world.rank, world.size, options)
    if backend == "nccl":
        if device.type != "cuda":
            raise ConfigError(f"backend 'nccl' moves CUDA tensors only, but this worker trains on {device.type}")
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=timeout_s)
        return dist.ProcessGroupNCCL(store, world.rank, world.size, options)
    if backend == "paceline":
        if device.type != "cpu":
            raise ConfigError(f"backend 'paceline' moves CPU tensors only, but this worker trains on {device.type}")
        if world.local_size != world.size:
            raise ConfigError(
                f"backend 'paceline' joins the workers of one host, but {world.size - world.local_size} of the "
                f"{world.size} are on others; use gloo"
            )
        return SharedMemoryGroup(store, world.rank, world.size, timedelta(seconds=timeout_s))
    raise ConfigError(f"backend {backend!r} is not known; choose paceline, gloo or nccl")


def first_line(error: BaseException) -> str:
    """What the error says, without the place in gloo's source and its general advice."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return re.sub(r"^\[/[^\]]*\] ", "", line).split(". This is typically")[0]
