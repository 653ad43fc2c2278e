"""Limits are found in the control group or above it, in either version; a job that exceeds them is refused."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from paceline.errors import LaunchError
from paceline.world import host_limits
from paceline.world.host_limits import (
    MemoryLimit,
    check_host,
    cpu_quotas,
    memory_limit,
    oom_kills,
    process_limits,
    usable_cores,
)

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
    assert oom_kills(tmp_path / "memory.events") == 2
    assert oom_kills(tmp_path / "not there") == 0


@pytest.mark.parametrize(
    ("files", "quotas"),
    [
        ({}, []),
        ({"own": "0::/\n"}, []),
        ({"own": "0::/\n", "cpu.max": "150000 100000\n"}, [1.5]),
        ({"own": "0::/\n", "cpu.max": "max 100000\n"}, []),
        (
            {
                "own": "0::/jobs/7\n",
                "jobs/cpu.max": "400000 100000\n",
                "jobs/7/cpu.max": "max 100000\n",
            },
            [4.0],
        ),
        (
            {
                "own": "4:memory:/job\n3:cpu,cpuacct:/job\n0::/\n",
                "cpu,cpuacct/job/cpu.cfs_quota_us": "250000\n",
                "cpu,cpuacct/job/cpu.cfs_period_us": "100000\n",
                "cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
                "cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            },
            [2.5],
        ),
        (
            {
                "own": "3:cpu:/docker/abc\n",
                "cpu/cpu.cfs_quota_us": "100000\n",
                "cpu/cpu.cfs_period_us": "100000\n",
            },
            [1.0],
        ),
    ],
    ids=["no cgroups", "no limit", "v2", "v2 max", "v2 limited above", "v1", "v1 in a container"],
)
def test_a_container_s_share_of_the_cores_is_found(tmp_path: Path, files: dict[str, str], quotas: list[float]) -> None:
    own = files.get("own", "")
    for name in files.keys() - {"own"}:
        write(tmp_path / name, files[name])
    assert list(cpu_quotas(own, tmp_path)) == quotas


def test_a_quota_limits_the_cores_rounded_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    write(tmp_path / "cpu.max", "150000 100000\n")
    assert usable_cores("0::/\n", tmp_path) == 2
    assert usable_cores("", tmp_path) == 8


@pytest.fixture
def a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_limits, "usable_cores", lambda: 4)
    monkeypatch.setattr(host_limits, "memory_limit", lambda: MemoryLimit(8 * 2**30, "the host"))
    monkeypatch.setattr(host_limits, "process_limits", lambda: iter(()))


def test_more_than_the_cores_can_turn_to_are_refused(a_host: None) -> None:
    check_host(256, "--workers 256")
    with pytest.raises(LaunchError, match="--workers 257: this host has 4 cores, and at most 64 processes a core are"):
        check_host(257, "--workers 257")


def test_more_than_the_memory_holds_are_refused(a_host: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_limits, "memory_limit", lambda: MemoryLimit(320 * 2**20, "cgroup /job"))
    check_host(10, "--workers 10")
    with pytest.raises(LaunchError, match="each takes at least 32 MiB, and cgroup /job has 320 MiB; use 10 or fewer"):
        check_host(11, "--workers 11")


def test_more_than_the_processes_allowed_are_refused(a_host: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_limits, "process_limits", lambda: iter([(20, "the limit of somebody")]))
    check_host(2, "--workers 2")
    with pytest.raises(LaunchError, match="at least 34 processes and threads, and the limit of somebody leaves 20"):
        check_host(10, "--workers 10")


@pytest.mark.parametrize(("own", "folder"), [("0::/a/b\n", "a/b"), ("7:cpu:/x\n8:pids:/a/b\n", "pids/a/b")])
def test_the_limits_of_control_groups_are_read_upwards(tmp_path: Path, own: str, folder: str) -> None:
    inner = tmp_path / folder
    inner.mkdir(parents=True)
    for group, most, used in ((inner, "max", "3"), (inner.parent, "50", "8")):
        (group / "pids.max").write_text(f"{most}\n")
        (group / "pids.current").write_text(f"{used}\n")
    limits = [found for found in process_limits(own, tmp_path) if "pids.max" in found[1]]
    assert limits == [(42, f"{inner.parent / 'pids.max'} (50)")]


def test_the_soft_limit_of_open_files_is_raised_and_the_hard_one_is_told(
    a_host: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    raised: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "setrlimit", lambda which, limits: raised.append(limits))
    monkeypatch.setattr(resource, "getrlimit", lambda which: (30, 4096))
    check_host(2, "--workers 2")
    assert raised == [(36, 4096)]
    monkeypatch.setattr(resource, "getrlimit", lambda which: (24, 24))
    with pytest.raises(LaunchError, match="--workers 2: the launcher needs 36 open files, and 24 are allowed here"):
        check_host(2, "--workers 2")
