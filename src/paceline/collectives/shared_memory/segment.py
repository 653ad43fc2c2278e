"""Memory that the ranks of one host share, and that is gone when the last of them is, however it ends.

    hello/0   {"host": …, "kernels": "c", "cores": [0, 1]}        through the store, before they share memory: one
    hello/1   {"host": …, "kernels": "c", "cores": [0, 1]}        host, or an error that every rank hears; C if all
                                                                  have it; crowded if ranks outnumber the cores

    rank 0   memfd_create ──► fd 7 ──► store: {"pid": 4711, "fd": 7, "bytes": …, "token": …}
    rank 1   open /proc/4711/fd/7 ──► map it ──► compare size, owner and token

Anonymous memory has no name, so nothing stays behind in /dev/shm and no other job's segment is opened by mistake; the
kernel lets only the same user look into /proc/PID/fd. Pages exist from the moment they are touched.

An *arena* is a segment with one tensor of the same size for every rank, and every rank sees all of them. A tensor's
address tells whether it lies in an arena. Its position (which arena, how far in) has to be the same on every rank,
since then the others' counterparts are known without asking.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.collectives.shared_memory.kernels import compiled_library
from paceline.errors import CollectiveError, ConfigError

# -- what the ranks agree on first -------------------------------------------------------------------------------------


HEARING_S = 5.0


@dataclass(frozen=True)
class Agreement:
    use_c: bool  # only if all have it: a rank that sleeps on a word must be woken by the others
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


# -- segments ----------------------------------------------------------------------------------------------------------


PAGE = 4096
_TOKEN_BYTES = 32


class Segment:
    """`bytes` of shared memory as one uint8 tensor; the first page holds the token that proves which segment it is."""

    def __init__(self, descriptor: int, size: int) -> None:
        self._descriptor = descriptor
        try:
            # Unlike the mmap module's, this mapping keeps no descriptor of its own, and ends with its last tensor.
            storage: Any = torch.UntypedStorage.from_file(f"/proc/self/fd/{descriptor}", True, size)
        except RuntimeError as error:
            os.close(descriptor)
            raise CollectiveError(f"{size:,} bytes of shared memory can't be mapped: {error}") from error
        self.memory: Tensor = torch.tensor([], dtype=torch.uint8).set_(storage)

    @classmethod
    def create(cls, size: int) -> tuple[Segment, str]:
        """A new segment of `size` bytes behind its first page, and the text by which others find it."""
        free = free_bytes()
        if free is not None and size > free:
            raise CollectiveError(
                f"the shared memory of the group needs {size:,} bytes but {free:,} are free; use fewer workers on this "
                "host, or give the container more memory"
            )
        token = secrets.token_hex(_TOKEN_BYTES // 2)
        descriptor = os.memfd_create("paceline", os.MFD_CLOEXEC)
        os.fchmod(descriptor, 0o600)
        os.ftruncate(descriptor, PAGE + size)
        segment = cls(descriptor, PAGE + size)
        segment.memory[:_TOKEN_BYTES] = torch.frombuffer(bytearray(token.encode()), dtype=torch.uint8)
        told = {"pid": os.getpid(), "fd": descriptor, "bytes": PAGE + size, "token": token, "host": host_identity()}
        return segment, json.dumps(told)

    @classmethod
    def open(cls, text: str, *, rank: int) -> Segment:
        """The segment that `text` describes, made by a process of this host and this user."""
        told: dict[str, Any] = json.loads(text)
        if told["host"] != host_identity():
            raise ConfigError(
                f"rank {rank} is on host {name_of(host_identity())} and rank 0 on {name_of(told['host'])}: the "
                "paceline backend joins the processes of one host; use gloo between hosts"
            )
        path = f"/proc/{told['pid']}/fd/{told['fd']}"
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise CollectiveError(
                f"rank {rank} can't open the shared memory of rank 0 (pid {told['pid']}): {error.strerror}; do they "
                "run as one user and in one process namespace?"
            ) from error
        about = os.fstat(descriptor)
        if about.st_size != told["bytes"] or about.st_uid != os.getuid():
            os.close(descriptor)
            raise CollectiveError(f"rank {rank}: {path} is not the shared memory that rank 0 made")
        segment = cls(descriptor, about.st_size)
        segment.close_descriptor()
        if bytes(segment.memory[:_TOKEN_BYTES].tolist()).decode(errors="replace") != told["token"]:
            segment.close()
            raise CollectiveError(f"rank {rank}: the shared memory in {path} belongs to another job")
        return segment

    def close_descriptor(self) -> None:
        """From now on no other process can open the segment; those that have it keep it."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def close(self) -> None:
        """Let go; tensors that still look into the memory keep it alive."""
        self.close_descriptor()
        self.memory = torch.empty(0, dtype=torch.uint8)


def host_identity() -> str:
    """The same for processes that can share memory and see each other's numbers."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{os.uname().nodename} {boot} {os.readlink('/proc/self/ns/pid')}"


def name_of(identity: str) -> str:
    return identity.split()[0]


def free_bytes() -> int | None:
    """Memory that can still be had: the machine's, or the container's where that is less."""
    found = []
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            found.append(int(line.split()[1]) * 1024)
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            most = (Path("/sys/fs/cgroup") / limit).read_text().strip()
            found.append(int(most) - int((Path("/sys/fs/cgroup") / used).read_text()))
        except (OSError, ValueError):
            continue  # no such limit
    return min(found, default=None)


# -- tensors inside segments -------------------------------------------------------------------------------------------


_OFFSET_BITS = 40


@dataclass(frozen=True)
class Arena:
    segment: Segment
    rows: Tensor  # size × bytes
    first: int  # address of this rank's row
    bytes: int


class Arenas:
    """What a group has allocated; `make` creates a segment of so many bytes, the same on every rank."""

    def __init__(self, rank: int, size: int, make: Callable[[int], Segment]) -> None:
        self._rank, self._size, self._make = rank, size, make
        self._arenas: dict[int, Arena] = {}  # by number, the same on every rank
        self._commons: list[Segment] = []
        self._numbers = itertools.count()

    def allocate(self, elements: int, dtype: torch.dtype) -> Tensor:
        """A tensor in shared memory. All ranks allocate the same, in the same order."""
        each = -(-elements * dtype.itemsize // PAGE) * PAGE or PAGE
        segment = self._make(each * self._size)
        rows = segment.memory[PAGE:].view(self._size, each)
        arena = Arena(segment, rows, rows[self._rank].data_ptr(), each)
        self._arenas[next(self._numbers)] = arena
        return rows[self._rank, : elements * dtype.itemsize].view(dtype)

    def common(self, bytes_wanted: int) -> Tensor:
        """Memory that exists once for all ranks, as bytes; no rank owns it, so they agree on which writes when."""
        segment = self._make(max(1, bytes_wanted))
        self._commons.append(segment)
        return segment.memory[PAGE : PAGE + bytes_wanted]

    def place_of(self, tensor: Tensor) -> str | None:
        """Which arena and how far in, if `tensor` is there."""
        found = self._find(tensor)
        return None if found is None else f"{found[0]}:{found[1]}"

    def number_of(self, tensor: Tensor) -> int | None:
        """The same as one number, to be told to a rank that wants to read the tensor where it lies."""
        found = self._find(tensor)
        return None if found is None else found[0] << _OFFSET_BITS | found[1]

    def there(self, rank: int, number: int, elements: int, dtype: torch.dtype) -> Tensor:
        """What `rank` named by that number."""
        rows, offset = self._arenas[number >> _OFFSET_BITS].rows, number & (1 << _OFFSET_BITS) - 1
        return rows[rank, offset : offset + elements * dtype.itemsize].view(dtype)

    def everyones(self, tensor: Tensor) -> list[Tensor]:
        """The counterparts of `tensor` on all ranks, in rank order."""
        number = self.number_of(tensor)
        assert number is not None
        return [self.there(rank, number, tensor.numel(), tensor.dtype) for rank in range(self._size)]

    def release(self, tensor: Tensor) -> None:
        """Let go of the arena that `tensor` lies in; the memory is free when every rank has, and no tensor is left."""
        found = self._find(tensor)
        if found is not None:
            self._arenas.pop(found[0]).segment.close()

    def close(self) -> None:
        for arena in self._arenas.values():
            arena.segment.close()
        for segment in self._commons:
            segment.close()
        self._arenas.clear()
        self._commons.clear()

    def _find(self, tensor: Tensor) -> tuple[int, int] | None:
        address = tensor.data_ptr()
        for number, arena in self._arenas.items():
            if arena.first <= address < arena.first + arena.bytes:
                return number, address - arena.first
        return None
