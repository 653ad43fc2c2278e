"""Limits are found in the cgroup or above it, in either version, and the tightest counts."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.world.memory_limit import MemoryLimit, kills, memory_limit

MEMINFO = "MemTotal:       8388608 kB\nMemFree:        1 kB\nSwapTotal:      1048576 kB\n"
HOST = MemoryLimit(9 * 2**30, "the host")


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def test_without_a_cgroup_it_is_what_the_host_has(tmp_path: Path) -> None:
    assert memory_limit("", tmp_path, MEMINFO) == HOST
    assert memory_limit("", tmp_path, "") is None


@pytest.mark.parametrize(
    ("own", "mount", "limit_file", "kills_file"),
    [
        ("0::/job/worker\n", "", "memory.max", "memory.events"),
        ("5:cpu:/\n4:memory:/job/worker\n", "memory", "memory.limit_in_bytes", "memory.oom_control"),
    ],
)
def test_the_tightest_of_a_group_and_those_above_it_counts(
    own: str, mount: str, limit_file: str, kills_file: str, tmp_path: Path
) -> None:
    root = tmp_path / mount
    write(root / "job/worker" / limit_file, "max\n" if mount == "" else f"{2**63 - 4096}\n")
    write(root / limit_file, f"{10 * 2**30}\n")
    assert memory_limit(own, tmp_path, MEMINFO) == HOST
    write(root / "job" / limit_file, f"{2**30}\n")
    assert memory_limit(own, tmp_path, MEMINFO) == MemoryLimit(2**30, "cgroup /job", root / "job" / kills_file)


def test_kills_are_read_from_the_groups_file(tmp_path: Path) -> None:
    write(tmp_path / "memory.events", "low 0\noom 3\noom_kill 2\n")
    assert kills(tmp_path / "memory.events") == 2
    assert kills(tmp_path / "not there") == 0
