"""The memory that this process may use: its cgroup's limit, or what the host has.

    cgroup v2   /proc/self/cgroup: 0::/a/b         /sys/fs/cgroup/a/b/memory.max, and those above it
    cgroup v1   /proc/self/cgroup: 4:memory:/a/b   /sys/fs/cgroup/memory/a/b/memory.limit_in_bytes, and those above it

All processes of a cgroup share its limit. Each has a file that counts how often the kernel killed one for want of it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
_NO_LIMIT = 1 << 60  # v1 says "none" by a number near 2**63


@dataclass(frozen=True)
class MemoryLimit:
    """`shared_by` names what shares it: a cgroup, or the host. `kills_file` counts kills; None: nobody does."""

    bytes: int
    shared_by: str
    kills_file: Path | None = None

    @property
    def is_hosts(self) -> bool:
        return self.shared_by == "the host"


def memory_limit(own: str | None = None, root: Path = ROOT, meminfo: str | None = None) -> MemoryLimit | None:
    """The tightest limit of this process; None where nobody tells. `own` and `meminfo` are what /proc would say."""
    own = _read(Path("/proc/self/cgroup")) if own is None else own
    found = [limit for limit in (_of_host(meminfo), *_of_groups(own, root)) if limit is not None]
    return min(found, key=lambda limit: limit.bytes, default=None)


def kills(file: Path) -> int:
    """Processes that were killed because a cgroup's limit was reached; 0 where nobody counts."""
    told = re.search(r"^oom_kill (\d+)$", _read(file), re.MULTILINE)
    return int(told[1]) if told else 0


def _of_groups(own: str, root: Path) -> list[MemoryLimit]:
    found = []
    for line in own.splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            found += _upwards(root, path, "memory.max", "memory.events")
        elif "memory" in controllers.split(","):
            found += _upwards(root / "memory", path, "memory.limit_in_bytes", "memory.oom_control")
    return found


def _upwards(mount: Path, path: str, limit_file: str, kills_file: str) -> list[MemoryLimit]:
    group, found = mount / path.strip("/"), []
    while True:
        told = _read(group / limit_file).strip()
        if told.isdigit() and int(told) < _NO_LIMIT:
            name = f"cgroup {'/' + str(group.relative_to(mount)) if group != mount else '/'}"
            found.append(MemoryLimit(int(told), name, group / kills_file))
        if group == mount:
            return found
        group = group.parent


def _of_host(meminfo: str | None) -> MemoryLimit | None:
    told = dict(re.findall(r"^(MemTotal|SwapTotal): +(\d+) kB$", _told(meminfo), re.MULTILINE))
    if "MemTotal" not in told:
        return None
    return MemoryLimit(1024 * sum(map(int, told.values())), "the host")


def _told(meminfo: str | None) -> str:
    return _read(Path("/proc/meminfo")) if meminfo is None else meminfo


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
