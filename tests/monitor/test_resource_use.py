"""What a worker uses of its host: of the CPUs measured on real processes, of a GPU as a stand-in for NVML tells it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from paceline.monitor.chrome_trace import trace_of
from paceline.monitor.events import DTYPE, RECORD_BYTES, Part, StepRecord, Use, pack_step
from paceline.monitor.recorder import EventFile
from paceline.monitor.resource_use import CpuShare, ResourceUse, usable_cpus
from paceline.monitor.run_events import mean_share, read_run, shares
from paceline.world.processor_time import processor_seconds
from tests.monitor.simulated import Simulated

STEP = StepRecord(3, 1, 7, 10.0, 10.2, 10.3, (0.1,) * len(Part), 0.05, peer=2, peer_s=0.25)
CPU, GPU = SimpleNamespace(type="cpu"), SimpleNamespace(type="cuda", index=0)
UUID = "1b2c3d4e-0000-1111-2222-333344445555"


# -- in a record -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cpu", "gpu"), [(None, None), (0.0, None), (None, 0.0), (0.43, 1.0), (1.0, 0.005), (0.07, 0.29), (1.7, -0.1)]
)
def test_what_is_packed_is_read_to_a_percent(cpu: float | None, gpu: float | None) -> None:
    packed = pack_step(STEP, Use(2.0**30, 2.0**20, cpu, gpu))
    assert len(packed) == RECORD_BYTES
    (found,) = np.frombuffer(packed, DTYPE)
    for share, read in ((cpu, mean_share(found, "cpu")), (gpu, mean_share(found, "gpu"))):
        expected = None if share is None else pytest.approx(min(max(share, 0.0), 1.0), abs=0.0051)
        assert read == expected
    fields = tuple(found[name].item() for name in ("rank", "memory", "device_memory", "peer", "peer_s"))
    assert fields == (3, 2.0**30, 2.0**20, 2, 0.25)


def test_records_of_before_are_not_known_and_neither_is_what_no_version_writes() -> None:
    records = np.zeros(5, DTYPE)
    records["cpu"] = [0, 1, 101, 102, 255]
    assert np.array_equal(shares(records, "cpu"), [np.nan, 0.0, 1.0, np.nan, np.nan], equal_nan=True)
    assert mean_share(records, "cpu") == 0.5
    assert mean_share(records, "gpu") is None


def test_a_trace_has_it_with_each_step_that_knows_it(tmp_path: Path) -> None:
    def told(use: Use, name: str) -> dict[str, float]:
        trace = trace_of(read_run(Simulated(1, 3, use=use).write(tmp_path / name)), 2, 2)
        return next(one["args"]["ms"] for one in trace["traceEvents"] if one["name"] == "step 2")  # type: ignore[no-any-return]

    assert told(Use(1.0, cpu=0.43), "new")["cpu_percent"] == 43
    assert not {"cpu_percent", "gpu_percent"} & set(told(Use(1.0), "old"))


# -- CPUs --------------------------------------------------------------------------------------------------------------


def test_a_share_is_of_all_cpus_since_the_last_look() -> None:
    now, used = [0.0], [5.0]
    share = CpuShare(8, lambda: used[0], lambda: now[0])
    assert share.read() is None, "nothing has passed"
    now[0], used[0] = 2.0, 9.0
    assert share.read() == 0.25
    now[0], used[0] = 2.01, 9.01
    assert share.read() == 0.25, "too soon for the kernel's hundredths of a second"
    now[0], used[0] = 4.0, 8.0
    assert share.read() is None, "a process has gone with its time"
    now[0], used[0] = 5.0, 16.0
    assert share.read() == 1.0


def test_cpu_time_that_the_kernel_does_not_tell_is_not_known() -> None:
    now = iter([0.0, 1.0])
    assert CpuShare(8, lambda: 0.0, lambda: next(now)).read() is None


def share_while(work: Callable[[], object]) -> float:
    share = CpuShare(usable_cpus())
    work()
    found = share.read()
    assert found is not None
    return found


def spin() -> None:
    until = time.thread_time() + 0.3  # of CPU time, however much of it other processes take
    while time.thread_time() < until:
        sum(range(1000))


def test_a_busy_process_has_more_of_the_cpus_than_one_that_sleeps() -> None:
    busy, idle = share_while(spin), share_while(lambda: time.sleep(1))
    assert busy > 2 * idle, (busy, idle)


def test_what_a_process_below_uses_counts_while_it_runs_and_after_it_has_ended() -> None:
    """It ends only when told, so that the first look finds it there; the second finds its time with its parent's."""
    work = "i=0; while [ $i -lt 300000 ]; do i=$((i+1)); done; echo done; read word"
    before = processor_seconds(os.getpid())
    with subprocess.Popen(["sh", "-c", work], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as loader:
        assert loader.stdout is not None
        assert loader.stdout.readline() == b"done\n"
        running = processor_seconds(os.getpid())
        loader.communicate(b"end\n")
    ended = processor_seconds(os.getpid())
    assert running - before > 0.05, (before, running)
    ticks = 2 / os.sysconf("SC_CLK_TCK")  # user's and system's time are rounded down apart, here and there
    assert ended >= running - ticks, (running, ended)


# -- GPUs --------------------------------------------------------------------------------------------------------------


class NvmlError(Exception):
    pass


class Nvml:
    """As `pynvml` behaves on a host of one GPU, which it knows by `uuid`; it tells `rates` one after another."""

    def __init__(self, *rates: int, uuid: str = UUID) -> None:
        self.rates = iter(rates)
        self.uuid = uuid
        self.open = 0
        self.threads: set[str] = set()

    def nvmlInit(self) -> None:  # noqa: N802
        self.open += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.open -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        if uuid != f"GPU-{self.uuid}":
            raise NvmlError("Not Found")
        return "handle"

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> SimpleNamespace:  # noqa: N802
        assert handle == "handle"
        self.threads.add(threading.current_thread().name)
        if (rate := next(self.rates, None)) is None:
            raise NvmlError("Not Supported")
        return SimpleNamespace(gpu=rate, memory=0)


@pytest.fixture
def nvml_is(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    def put(nvml: Nvml | None) -> Nvml | None:
        monkeypatch.setitem(sys.modules, "pynvml", nvml)  # type: ignore[arg-type]  # None: an ImportError
        return nvml

    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: SimpleNamespace(uuid=UUID))
    monkeypatch.setattr("torch.cuda.memory_allocated", lambda device: 2**20)
    return put


def test_the_gpu_is_the_mean_of_what_nvml_told_since_the_last_records(nvml_is: Callable[..., Any]) -> None:
    nvml = nvml_is(Nvml(50, 20, 40, 100))  # the first when it is opened, before there is a step
    use = ResourceUse(GPU)
    assert use.read().gpu is None
    use.sample()
    use.sample()
    assert use.read().gpu == pytest.approx(0.3)
    assert use.read().gpu == pytest.approx(0.3), "records that are written at once have what was known"
    use.sample()
    assert use.read()[1::2] == (2.0**20, 1.0)
    use.close()
    assert nvml.open == 0


def test_a_driver_that_fails_later_is_not_asked_again_and_not_known(nvml_is: Callable[..., Any]) -> None:
    nvml = nvml_is(Nvml(50, 60))
    use = ResourceUse(GPU)
    use.sample()
    assert use.read().gpu == pytest.approx(0.6)
    use.sample()
    assert use.read().gpu is None
    nvml.rates = iter([70])
    use.sample()
    assert use.read().gpu is None
    use.close()
    assert nvml.open == 0


@pytest.mark.parametrize(
    "nvml",
    [None, Nvml(), Nvml(50, uuid="another")],
    ids=["no package", "a part of a GPU", "a GPU that it does not know"],
)
def test_where_nvml_tells_nothing_it_is_not_known_and_no_word_is_said(
    nvml: Nvml | None, nvml_is: Callable[..., Any], capfd: pytest.CaptureFixture[str]
) -> None:
    nvml_is(nvml)
    use = ResourceUse(GPU)
    use.sample()
    assert use.read()._replace(memory=0.0, cpu=None) == Use(0.0, 2.0**20)
    use.close()
    assert nvml is None or nvml.open == 0
    assert capfd.readouterr() == ("", "")


def test_a_worker_on_the_cpu_opens_no_nvml(nvml_is: Callable[..., Any]) -> None:
    nvml = nvml_is(Nvml(50))
    use = ResourceUse(CPU)
    use.sample()
    assert use.read().gpu is None
    assert nvml.threads == set()


def test_the_thread_of_the_events_measures_and_the_training_thread_does_not(
    nvml_is: Callable[..., Any], tmp_path: Path
) -> None:
    nvml = nvml_is(Nvml(*[80] * 10_000))
    file = EventFile(tmp_path, {"worker": 3, "step": 0, "joins": False}, lambda: ResourceUse(GPU), every_s=0.02)
    spin()
    file.add(STEP)
    file.close()
    steps = read_run(tmp_path).workers[3]
    assert mean_share(steps, "gpu") == pytest.approx(0.8)
    assert (mean_share(steps, "cpu") or 0.0) > 0.0
    assert nvml.threads == {"paceline events"}
    assert nvml.open == 0
