"""What this host can carry: cores, memory, processes, open files, as its control groups and this user's limits allow.

    cgroup v2   /proc/self/cgroup: 0::/a/b         /sys/fs/cgroup/a/b/memory.max, and those above it
    cgroup v1   /proc/self/cgroup: 4:memory:/a/b   /sys/fs/cgroup/memory/a/b/memory.limit_in_bytes, and those above it

| limit      | v2         | v1                    | and                                                               |
|------------|------------|-----------------------|-------------------------------------------------------------------|
| cores      | cpu.max    | cpu.cfs_quota_us      | the affinity of this process                                      |
| memory     | memory.max | memory.limit_in_bytes | what the host has                                                 |
| processes  | pids.max   | pids.max              | of this user (ulimit -u); threads count among them                |
| open files |            |                       | of the supervisor: two pipes and up to four connections a worker  |

All processes of a control group share its limits; the tightest counts. `check_host` asks them before a job starts: a
number of workers that fits may still be too large for the model, but one that does not fit would end after minutes, in
a traceback or in none at all.
"""

from __future__ import annotations

import math
import os
import re
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import LaunchError

CGROUPS = Path("/sys/fs/cgroup")
_NO_LIMIT = 1 << 60  # v1 says "none" by a number near 2**63

MOST_A_CORE = 64
LEAST_MEMORY = 32 * 2**20
"""Measured: 28 MiB of private pages in a worker that has prepared a model of five weights."""
THREADS_EACH = 3
"""Its main thread, the engine's, and torch's: measured in the same worker."""
THREADS_OF_GLOO, THREADS_OF_ELASTIC = 3, 2
FILES, FILES_EACH = 24, 6
OURS = 4  # processes and threads of the launcher itself


@dataclass(frozen=True)
class _Group:
    """A control group that limits this process, by the controller that was asked for."""

    folder: Path
    mount: Path
    is_v2: bool

    @property
    def name(self) -> str:
        return f"cgroup /{self.folder.relative_to(self.mount)}" if self.folder != self.mount else "cgroup /"

    def value(self, file: str) -> str:
        return _read(self.folder / file).strip()


def _groups(controller: str, own: str | None, root: Path) -> Iterator[_Group]:
    """The group of this process and all above it; `own` is what /proc/self/cgroup would say.

    Inside a container the path may be the host's; then only the mount itself exists, and the others read as empty.
    """
    for line in (_read(Path("/proc/self/cgroup")) if own is None else own).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "" or controller in controllers.split(","):
            mount, below = root / controllers, Path(path.lstrip("/"))
            for part in (below, *below.parents):
                yield _Group(mount / part, mount, is_v2=controllers == "")


# ---- cores -----------------------------------------------------------------------------------------------------


def usable_cores(own: str | None = None, root: Path = CGROUPS) -> int:
    """CPUs this process may use: its affinity, or a control group's quota (rounded up) where that is less."""
    return min([len(os.sched_getaffinity(0)), *(max(1, math.ceil(quota)) for quota in cpu_quotas(own, root))])


def cpu_quotas(own: str | None = None, root: Path = CGROUPS) -> Iterator[float]:
    """CPUs granted by each control group above this process; a group without a limit is left out."""
    for group in _groups("cpu", own, root):
        if group.is_v2:
            quota, _, period = group.value("cpu.max").partition(" ")
        else:
            quota, period = group.value("cpu.cfs_quota_us"), group.value("cpu.cfs_period_us")
        if quota.isdecimal() and period.isdecimal() and int(quota) > 0:  # else "max", -1, or no such file
            yield int(quota) / int(period)


# ---- memory ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MemoryLimit:
    """`shared_by` names what shares it: a cgroup, or the host. `kills_file` counts kills; None: there is no count."""

    bytes: int
    shared_by: str
    kills_file: Path | None = None

    @property
    def is_hosts(self) -> bool:
        return self.shared_by == "the host"


def memory_limit(own: str | None = None, root: Path = CGROUPS, meminfo: str | None = None) -> MemoryLimit | None:
    """The tightest limit of this process; None where none is known. `own` and `meminfo` are what /proc would say."""
    found = []
    meminfo = _read(Path("/proc/meminfo")) if meminfo is None else meminfo
    if kib := re.findall(r"^(?:MemTotal|SwapTotal): +(\d+) kB$", meminfo, re.MULTILINE):
        found.append(MemoryLimit(1024 * sum(map(int, kib)), "the host"))
    for group in _groups("memory", own, root):
        limit = group.value("memory.max" if group.is_v2 else "memory.limit_in_bytes")
        if limit.isdecimal() and int(limit) < _NO_LIMIT:
            kills_file = group.folder / ("memory.events" if group.is_v2 else "memory.oom_control")
            found.append(MemoryLimit(int(limit), group.name, kills_file))
    return min(found, key=lambda limit: limit.bytes, default=None)


def oom_kills(file: Path) -> int:
    """Processes that the kernel killed because a control group's limit was reached; 0 where there is no count."""
    counted = re.search(r"^oom_kill (\d+)$", _read(file), re.MULTILINE)
    return int(counted[1]) if counted else 0


# ---- processes -------------------------------------------------------------------------------------------------


def process_limits(own: str | None = None, root: Path = CGROUPS) -> Iterator[tuple[int, str]]:
    """(how many more, whose limit): of this user, and of each control group above this process."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if soft != resource.RLIM_INFINITY and os.geteuid() != 0:  # the kernel does not hold root to it
        yield soft - _threads_of(os.getuid()), f"the limit of this user's processes (ulimit -u {soft})"
    for group in _groups("pids", own, root):
        most, used = group.value("pids.max"), group.value("pids.current")
        if most.isdecimal() and used.isdecimal():
            yield int(most) - int(used), f"{group.folder / 'pids.max'} ({most})"


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


# ---- a job's processes, before any of them starts --------------------------------------------------------------


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


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
