"""Memory that the ranks of one host share, and that is gone when the last of them is, however it ends.

    rank 0   memfd_create ──► fd 7 ──► store: {"pid": 4711, "fd": 7, "bytes": …, "token": …}
    rank 1   open /proc/4711/fd/7 ──► map it ──► compare size, owner and token

Anonymous memory has no name, so nothing can stay behind in /dev/shm and nobody else's segment can be opened by mistake;
the kernel lets only the same user look into /proc/PID/fd. Pages exist from the moment they are touched.
"""

from __future__ import annotations

import json
import os
import secrets
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.errors import CollectiveError, ConfigError

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
        """From now on nobody else can open the segment; who has it keeps it."""
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
