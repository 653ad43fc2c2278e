"""What this host can carry, asked before anything starts: cores, memory, processes, open files.

    cores       so many processes a core only take turns: a host with 2 cores needs a minute to start 64
    memory      what the smallest worker has for itself, beside the pages that all share
    processes   of this user (ulimit -u) and of the control groups above (pids.max); threads count among them
    open files  of the supervisor: two pipes and up to four connections a worker (ulimit -n)

A number that fits may still be too large for the model. One that does not fit would end after minutes, in a traceback
or in none at all.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

from paceline.errors import LaunchError
from paceline.world.determinism import usable_cores
from paceline.world.memory_limit import memory_limit

MOST_A_CORE = 64
LEAST_MEMORY = 32 * 2**20
"""Measured: 28 MiB of private pages in a worker that has prepared a model of five weights."""
THREADS_EACH = 3
"""Its main thread, the engine's, and torch's: measured in the same worker."""
THREADS_OF_GLOO, THREADS_OF_ELASTIC = 3, 2
FILES, FILES_EACH = 24, 6
OURS = 4  # processes and threads of the launcher itself

CGROUPS = Path("/sys/fs/cgroup")


def check_host(processes: int, asked: str, *, threads_each: int = THREADS_EACH) -> None:
    """Raise in one line where the host can't carry so many processes; `asked` is how they were asked for."""
    cores = usable_cores()
    if processes > MOST_A_CORE * cores:
        raise LaunchError(
            f"{asked}: this host has {cores} core{'s' if cores > 1 else ''}, and at most {MOST_A_CORE} processes a "
            f"core are started; use {MOST_A_CORE * cores} or fewer"
        )
    limit = memory_limit()
    if limit is not None and processes * LEAST_MEMORY > limit.bytes:
        raise LaunchError(
            f"{asked}: each takes at least {LEAST_MEMORY >> 20} MiB, and {limit.shared_by} has {limit.bytes >> 20:,} "
            f"MiB; use {max(1, limit.bytes // LEAST_MEMORY)} or fewer"
        )
    needed = processes * threads_each + OURS
    for left, whose in process_limits():
        if needed > left:
            raise LaunchError(
                f"{asked}: they need at least {needed:,} processes and threads, and {whose} leaves {max(0, left):,}; "
                "raise it, or use fewer"
            )
    _allow_files(FILES + processes * FILES_EACH, asked)


def _allow_files(needed: int, asked: str) -> None:
    """Raise our own limit of open files as far as we may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise LaunchError(
            f"{asked}: the launcher needs {needed:,} open files, and {hard:,} are allowed here; raise the limit "
            f"(ulimit -n {needed}, or LimitNOFILE= of the service), or use fewer"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def process_limits(own: str | None = None, root: Path = CGROUPS) -> Iterator[tuple[int, str]]:
    """(how many more, whose limit): of this user, and of each control group above this process."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if soft != resource.RLIM_INFINITY and os.geteuid() != 0:  # the kernel does not hold root to it
        yield soft - _threads_of(os.getuid()), f"the limit of this user's processes (ulimit -u {soft})"
    for line in (_read(Path("/proc/self/cgroup")) if own is None else own).splitlines():
        controllers, _, path = line.partition(":")[2].partition(":")
        if controllers not in ("", "pids"):
            continue
        mount = root / controllers
        group = mount / path.strip("/")
        while True:
            most, used = _read(group / "pids.max").strip(), _read(group / "pids.current").strip()
            if most.isdecimal() and used.isdecimal():
                yield int(most) - int(used), f"{group / 'pids.max'} ({most})"
            if group == mount:
                break
            group = group.parent


def _threads_of(user: int) -> int:
    count = 0
    for entry in os.scandir("/proc"):
        if entry.name.isdecimal():
            try:
                if entry.stat().st_uid == user:
                    count += len(os.listdir(f"/proc/{entry.name}/task"))
            except OSError:  # it has ended
                continue
    return count


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
