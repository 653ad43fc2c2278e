"""Groups of c10d, one for each kind of device: gloo for the host's tensors, or our own through shared memory; NCCL.

building   In an elastic job a worker may die while a group is built. So all come to one place first, where a worker
           that has yet to finish what it computes is waited for; and what can't be interrupted, the build itself, is
           left behind as soon as the store knows that its generation is over. The others try again with who is there.
ending     gloo has no abort. An operation whose peer is gone fails on the peer's neighbours only, and the others wait
           out their timeout; but a connection that is shut down under it fails everywhere. Which connections are gloo's
           the store tells: there every rank has published where it listens. The listening socket must be left alone:
           gloo ends the process when that one fails.
leaving    gloo builds and takes apart its groups in C++, and waits for messages there. After a peer died in the middle
           of a build it was seen to stay for good, a few times in a thousand; and when a connection breaks under a
           message that has come or left in part, gloo does not tell the one who waits, who stays until the timeout. The
           thread that is stuck in such a call stays behind, asleep (`in_time`).
"""

from __future__ import annotations

import contextlib
import os
import queue
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from paceline.collectives.shared_memory.group import SharedMemoryGroup
from paceline.errors import ConfigError, WorldError
from paceline.torch_compat import PrefixStore, Store, gloo_options, let_wait
from paceline.world.environment import tensor_address
from paceline.world.waiting import Waiting
from paceline.world.world import World

# -- building ----------------------------------------------------------------------------------------------------------


REBUILD_IN_S = 5.0
STUCK_S = 2.0
LOOK_EVERY_S = 1.0
_HERE = "paceline/here/"


def build_groups(
    world: World, store: Store, backend: str, device: torch.device, timeout_s: float
) -> tuple[Mapping[str, Any], OpenSockets]:
    """The groups by kind of device, and the connections that gloo has made for them."""
    backends = {"cpu": "gloo", device.type: backend}
    waits_s, timeout_s = timeout_s, min(REBUILD_IN_S, timeout_s) if world.is_elastic else timeout_s
    try:
        _gather(world, store, waits_s)
        groups: dict[str, Any] = {}
        sockets = OpenSockets()
        for kind, name in backends.items():
            place = PrefixStore(f"paceline/group/{kind}", store)
            build = partial(_build_group, world, place, name, device, timeout_s)
            patience_s = timeout_s + STUCK_S
            groups[kind] = (
                build()
                if not world.is_elastic
                else in_time(build, patience_s, "building a group", given_up=partial(_is_over, place))
            )
            if name == "gloo":
                sockets.add(gloo_connections(place, world.rank, world.size))
        if waits_s != timeout_s:
            for group in groups.values():
                let_wait(group, timedelta(seconds=waits_s))
        return groups, sockets
    except ConfigError:  # a ValueError too: what was asked for can't be had, whoever comes
        raise
    except (RuntimeError, ValueError, TimeoutError, WorldError) as error:
        raise WorldError(
            f"worker {world.rank} of {world.size} could not join the {backend} group within {timeout_s:.0f} s: "
            f"{first_line(error)}; are all {world.size} workers running, and can their hosts reach each other?"
        ) from error


def _gather(world: World, store: Store, timeout_s: float) -> None:
    """All come to one place first, where one that has not come can be named; an elastic build waits for none."""
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


def interrupt(group: Any) -> None:
    """End what waits in a group that is over, as far as it can be told to; any thread may call it.

    NCCL's kernels wait on the device for peers that are gone, until `abort`, which itself waits until they have ended.
    """
    nccl: Any = getattr(dist, "ProcessGroupNCCL", None)  # not in every build of torch
    if isinstance(group, SharedMemoryGroup):
        group.interrupt()
    elif nccl is not None and isinstance(group, nccl):
        threading.Thread(target=group.abort, name="paceline-nccl-abort", daemon=True).start()


def shut_down(groups: Mapping[str, Any]) -> None:
    for group in groups.values():
        shutdown = getattr(group, "shutdown", None)
        if shutdown is not None:
            shutdown()


def _build_group(world: World, store: Store, backend: str, device: torch.device, timeout_s: float) -> Any:
    if backend == "gloo":
        options = gloo_options(tensor_address(world), timedelta(seconds=timeout_s), threads=2)
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


# -- ending every wait in a gloo group ---------------------------------------------------------------------------------


class OpenSockets:
    """Connections of this process by descriptor, with the number that tells them from a later one there."""

    def __init__(self) -> None:
        self._found: dict[int, int] = {}
        self._shut: dict[int, int] | None = None

    def add(self, found: Mapping[int, int]) -> None:
        self._found |= found

    def shut_down(self) -> None:
        for descriptor, inode in self._found.items():
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
                if os.fstat(connection.fileno()).st_ino == inode:  # otherwise gloo has closed it, and another is there
                    connection.shutdown(socket.SHUT_RDWR)
        self._shut, self._found = {**(self._shut or {}), **self._found}, {}

    @property
    def are_closed(self) -> bool:
        """They were shut down, and gloo has seen it: nothing is read into a buffer, or sent from one, any more."""
        return self._shut is not None and not any(_inode(fd) == inode for fd, inode in self._shut.items())


def _inode(descriptor: int) -> int | None:
    try:
        return os.fstat(descriptor).st_ino
    except OSError:
        return None


def gloo_connections(store: Store, rank: int, size: int) -> dict[int, int]:
    """The connections of the gloo group that was built from this store, by descriptor.

    gloo's ranks tell each other through the store where they listen: one value of each rank, in which the address lies
    as the kernel writes it. Of each pair of ranks one connects there. So a connection is gloo's, and no other thread's,
    exactly if this end of it is where this rank listens, or the other end is where a peer does.
    """
    keys = [f"0/{each}" for each in range(size)]  # of gloo's first device: it is given one
    if size == 1:
        return {}
    told = store.multi_get(keys) if store.check(keys) else [b""] * size
    listening, found = False, {}
    for descriptor in _sockets():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as one:
            if one.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            is_mine = _as_told(one.family, one.getsockname()) in told[rank]
            if one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                listening |= is_mine
                continue
            there = _as_told(one.family, one.getpeername())
            if is_mine or any(there in value for peer, value in enumerate(told) if peer != rank):
                found[descriptor] = os.fstat(one.fileno()).st_ino
    if not listening:
        raise ConfigError(
            f"gloo of torch {torch.__version__} does not tell where it listens as other releases do, and without that "
            "its groups can't be ended; install a torch release that paceline was tested with (see its requirements), "
            'or use backend="paceline" on one host'
        )
    return found


def _sockets() -> Iterator[int]:
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                yield int(name)


def _as_told(family: int, address: Any) -> bytes:
    """A socket's address as the kernel and gloo write it: `struct sockaddr_in`, or `sockaddr_in6`."""
    host, port = address[:2]
    flow = struct.pack("!I", address[2]) if family == socket.AF_INET6 else b""
    return struct.pack("=H", family) + struct.pack("!H", port) + flow + socket.inet_pton(family, host.split("%")[0])


# -- calls that can't be interrupted -----------------------------------------------------------------------------------


T = TypeVar("T")

GIVEN_UP_EVERY_S = 0.02


class GivenUpError(TimeoutError):
    """The call was left behind because its result is needed no more."""


def in_time(call: Callable[[], T], seconds: float, what: str, given_up: Callable[[], bool] | None = None) -> T:
    """What the call gives or raises; TimeoutError if it takes longer, or as soon as `given_up` says so."""
    job = _Job(call)
    _lend_thread(job)
    deadline = time.monotonic() + seconds
    while True:
        left = deadline - time.monotonic()
        if job.done.wait(left if given_up is None else min(left, GIVEN_UP_EVERY_S)):
            break
        if given_up is not None and given_up():
            raise GivenUpError(f"{what} was given up")
        if time.monotonic() >= deadline:
            raise TimeoutError(f"{what} took longer than {seconds:g} s")
    if job.error is not None:
        raise job.error
    result: T = job.result
    return result


class _Job:
    def __init__(self, call: Callable[[], Any]) -> None:
        self.call: Callable[[], Any] | None = call
        self.done = threading.Event()
        self.result: Any = None
        self.error: BaseException | None = None


_idle: list[queue.SimpleQueue[_Job]] = []
"""Threads that wait for a call: to lend one takes some 25 µs, to start one several times that."""
os.register_at_fork(after_in_child=_idle.clear)


def _lend_thread(job: _Job) -> None:
    try:
        jobs = _idle.pop()
    except IndexError:
        jobs = queue.SimpleQueue()
        threading.Thread(target=_serve, args=(jobs,), name="paceline-in-time", daemon=True).start()
    jobs.put(job)


def _serve(jobs: queue.SimpleQueue[_Job]) -> None:
    while True:
        job = jobs.get()
        assert job.call is not None
        try:
            job.result = job.call()
        except BaseException as error:
            job.error = error
        job.call = None  # a thread that was left behind holds nothing
        _idle.append(jobs)
        job.done.set()
        del job
