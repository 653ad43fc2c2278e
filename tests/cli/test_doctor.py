"""`paceline doctor` in a terminal, in a pipe, on a sick host and in two processes."""

from __future__ import annotations

import io
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer
from rich.console import Console

from paceline.cli import doctor as doctor_module
from paceline.cli.doctor import (
    GIB,
    MIB,
    backends,
    cores,
    doctor,
    gpu_use,
    host_name,
    kernels,
    loopback,
    memory,
    open_files,
    rendezvous_address,
    shared_memory,
    show,
)
from paceline.collectives.shared_memory import kernel_build
from paceline.collectives.shared_memory import kernels as kernels_module
from paceline.world.explanation import Finding, Level
from paceline.world.launchers import LAUNCHERS
from paceline.world.world import LaunchSettings, TcpRendezvous, World

TWO = World(size=2, local_size=2, source="a test", rendezvous=TcpRendezvous("127.0.0.1", 29500))


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for launcher in LAUNCHERS:
        for name in launcher.signs + launcher.also_reads:
            monkeypatch.delenv(name, raising=False)


def test_a_healthy_host_has_no_problem(capsys: pytest.CaptureFixture[str]) -> None:
    doctor()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["ok", "world", "one", "worker,", "alone"]
    for subject in ("found by", "cores", "memory", "shared memory", "open files", "torch", "backends", "loopback"):
        assert any(subject in line for line in lines), subject
    assert not any(line.startswith("problem") for line in lines)


def test_a_world_that_contradicts_itself_exits_with_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "4")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(typer.Exit) as caught:
        doctor()
    assert caught.value.exit_code == 1
    first, *others = capsys.readouterr().out.splitlines()
    assert first.startswith("problem  world ")
    assert first.endswith("RANK=4 but WORLD_SIZE=4: RANK may be from 0 to 3")
    assert any("loopback" in line for line in others), "the host is looked at all the same"


def test_a_terminal_gets_a_table_and_a_pipe_one_line_each() -> None:
    findings = [Finding(Level.WARNING, "cores", "few [of] them", "start fewer"), Finding(Level.OK, "torch", "2.13.0")]
    plain, coloured = io.StringIO(), io.StringIO()
    show(findings, Console(file=plain))
    show(findings, Console(file=coloured, force_terminal=True, width=60))
    assert plain.getvalue().splitlines() == [
        "warning  cores                few [of] them → start fewer",
        "ok       torch                2.13.0",
    ]
    assert "\x1b[33mwarning\x1b[0m" in coloured.getvalue()
    assert "few [of] them" in coloured.getvalue()


def test_threads_follow_the_settings_then_the_lanes() -> None:
    assert "threads per worker: 4 (lanes: 2)" in cores(8, TWO).text
    assert "threads per worker: 1 (lanes: 8)" in cores(8, replace(TWO, settings=LaunchSettings(lanes=8))).text
    assert "threads per worker: 3" in cores(8, replace(TWO, settings=LaunchSettings(threads=3))).text


SICK: dict[str, tuple[Callable[[], Finding], Level, str, str]] = {
    "more workers than cores": (lambda: cores(1, TWO), Level.WARNING, "2 workers share 1 cores", "start fewer"),
    "little memory": (lambda: memory(GIB // 2, 4 * GIB), Level.WARNING, "0.5 GiB available of 4.0 GiB", "0.3 GiB"),
    "no shared memory": (
        lambda: shared_memory(Path("/nowhere/shm")),
        Level.PROBLEM,
        "/nowhere/shm does not exist",
        "mount a tmpfs",
    ),
    "few files": (lambda: open_files(256, 4096), Level.WARNING, "limit 256 (may be raised to 4096)", "ulimit -n 4096"),
    "no gloo": (
        lambda: backends({"gloo": False, "nccl": True}),
        Level.PROBLEM,
        "gloo no, nccl yes",
        "CPU tensors need gloo",
    ),
    "unknown host name": (
        lambda: host_name("host.invalid"),
        Level.WARNING,
        "host.invalid does not resolve",
        "GLOO_SOCKET_IFNAME",
    ),
    "unknown rendezvous address": (
        lambda: rendezvous_address(TcpRendezvous("head.invalid", 29500)),
        Level.PROBLEM,
        "head.invalid does not resolve",
        "set MASTER_ADDR",
    ),
}


@pytest.mark.parametrize(("look", "level", "text", "advice"), SICK.values(), ids=SICK.keys())
def test_what_is_wrong_says_what_to_do(look: Callable[[], Finding], level: Level, text: str, advice: str) -> None:
    finding = look()
    assert finding.level is level
    assert text in finding.text
    assert advice in finding.advice


def test_shared_memory_that_cannot_be_written_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *arguments: False)
    finding = shared_memory(tmp_path)
    assert (finding.level, finding.text) == (Level.PROBLEM, f"{tmp_path} can't be written to")


def test_little_shared_memory_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(total=64 * MIB, free=64 * MIB))
    finding = shared_memory(tmp_path)
    assert finding.level is Level.WARNING
    assert "--shm-size" in finding.advice


def test_no_limit_on_files_is_fine() -> None:
    assert open_files(resource.RLIM_INFINITY, resource.RLIM_INFINITY).text == "limit none (may be raised to any)"


def test_a_loopback_that_takes_no_connections_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_module, "LOOPBACK", "192.0.2.77")  # an address of no interface
    finding = loopback()
    assert finding.level is Level.PROBLEM
    assert "192.0.2.77 does not take connections" in finding.text


@pytest.mark.job
@pytest.mark.timeout(60)
def test_two_processes_on_a_cpu_host_form_a_world_of_two_without_a_flag() -> None:
    told = r'print(f"{w.rank} {w.size} {w.local_rank}\n", end="")'  # in one write: both have the same pipe
    ask = f"from paceline.world.environment import read_world; w = read_world(); {told}"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python"]
    done = subprocess.run([*torchrun, sys.executable, "-c", ask], capture_output=True, text=True, check=True)
    assert sorted(done.stdout.splitlines()) == ["0 2 0", "1 2 1"]


@pytest.mark.parametrize(
    ("prebuilt", "compiler", "built", "expected"),
    [
        (True, None, None, (Level.OK, "c (prebuilt, avx2)")),
        (False, "/usr/bin/cc", True, (Level.OK, "c (built by /usr/bin/cc)")),
        (False, "/usr/bin/cc", None, (Level.WARNING, "torch (/usr/bin/cc can't build the C kernels)")),
        (False, None, None, (Level.WARNING, "torch (no prebuilt library, no C compiler)")),
    ],
)
def test_it_says_which_kernels_there_are_and_why(
    prebuilt: bool,
    compiler: str | None,
    built: bool | None,
    expected: tuple[Level, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    library = SimpleNamespace(paceline_sum=SimpleNamespace(), paceline_copy=SimpleNamespace())
    found = (kernel_build.Variant("avx2"), library) if prebuilt else None
    monkeypatch.delenv("PACELINE_KERNELS", raising=False)
    monkeypatch.setattr(kernel_build, "find_compiler", lambda: compiler)
    monkeypatch.setattr(kernels_module, "prebuilt_library", lambda: found)
    monkeypatch.setattr(kernels_module, "built_library", lambda: library if built else None)
    monkeypatch.setattr(kernels_module, "compiled_library", kernels_module.compiled_library.__wrapped__)
    finding = kernels()
    assert (finding.level, finding.text) == expected
    assert (finding.level is Level.OK) == (not finding.advice)


class NvmlError(Exception):
    pass


def no_driver() -> None:
    raise NvmlError("NVML Shared Library Not Found")


@pytest.mark.parametrize(
    ("nvml", "gpus", "text"),
    [
        (None, 0, "none: nvidia-ml-py is not installed"),
        (
            None,
            1,
            "none: nvidia-ml-py is not installed, so the monitor shows no use of GPUs: pip install 'paceline[monitor]'",
        ),
        (SimpleNamespace(nvmlInit=no_driver), 0, "none: NVML Shared Library Not Found"),
        (
            SimpleNamespace(
                nvmlInit=lambda: None, nvmlShutdown=lambda: None, nvmlSystemGetDriverVersion=lambda: "580.65"
            ),
            0,
            "driver 580.65, tells the use of 0 of 0 GPUs",
        ),
    ],
)
def test_it_says_whether_nvml_is_there(
    nvml: SimpleNamespace | None, gpus: int, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml)  # type: ignore[arg-type]
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpus > 0)
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    assert gpu_use() == Finding(Level.OK, "NVML", text)


def test_kernels_that_were_asked_for_are_no_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_KERNELS", "torch")
    assert (kernels().level, kernels().text) == (Level.OK, "torch (by PACELINE_KERNELS)")
