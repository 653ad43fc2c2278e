"""`engine.profile`: which steps it records, what each worker leaves, and that the bits are those without it."""

from __future__ import annotations

import gzip
import io
import json
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline import Engine, World
from paceline.errors import ConfigError, LoopError
from tests.engine.loops import prepared
from tests.workers import hashes, run_workers


def train(engine: Engine, *, profiled: bool = True, **asked: Any) -> Any:
    """Of 8 steps, each of 4 items in all."""
    model, optimizer, loader = prepared(engine, samples=64, batch_size=2)
    if not profiled:
        return _loop(engine, model, optimizer, loader)
    with engine.profile(**asked) as profile:
        _loop(engine, model, optimizer, loader, profile)
    return profile


def _loop(engine: Engine, model: Any, optimizer: Any, loader: Any, profile: Any = None) -> None:
    for points, labels in loader:
        engine.backward((model(points) - labels).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        if profile is not None:
            profile.step()  # as loops for torch's profiler do, once per item


def events_of(trace: Path) -> list[str]:
    with gzip.open(trace, "rt") as file:
        return [event.get("name", "") for event in json.load(file)["traceEvents"]]


def test_steps_are_recorded_whatever_their_items(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Engine(lanes=4, project_dir=tmp_path) as engine:
        profile = train(engine, wait=2, warmup=1, active=3)
    assert profile.trace == tmp_path / "profile" / "rank0_steps4-6.pt.trace.json.gz"
    names = events_of(profile.trace)
    assert sum(name == "Optimizer.step#SGD.step" for name in names) == 3
    assert sum(name == "aten::addmm" for name in names) == 3 * 4
    assert any("addmm" in event.key for event in profile.key_averages())
    lines = capsys.readouterr().out.splitlines()
    table = lines[next(number for number, line in enumerate(lines) if line.startswith("steps 4 to 6 of worker 0: ")) :]
    assert "waiting for data" in table[1]
    assert not any("exposed communication" in line for line in table)
    assert any("addmm" in line and "in 4 calls" in line for line in table)
    assert table[-1].split() == ["trace", str(profile.trace)]


def test_a_block_that_ends_early_leaves_what_it_has(tmp_path: Path) -> None:
    with Engine(lanes=4, project_dir=tmp_path) as engine:
        profile = train(engine, wait=0, warmup=0, active=50)
    assert profile.trace.name == "rank0_steps1-8.pt.trace.json.gz"


def test_a_block_that_ends_before_says_that_nothing_was_recorded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Engine(project_dir=tmp_path) as engine:
        with engine.profile(wait=3, warmup=2) as profile:
            pass
        with pytest.raises(LoopError, match=r"wait=3, warmup=2\) has recorded nothing, because it was left after 0"):
            profile.key_averages()
    assert "wait=0 and warmup=0 record from the start" in capsys.readouterr().out
    assert not (tmp_path / "profile").exists()


def test_a_folder_that_cannot_be_written_costs_the_trace_alone(tmp_path: Path) -> None:
    (tmp_path / "profile").write_text("in the way")
    with (
        Engine(lanes=4, project_dir=tmp_path) as engine,
        pytest.warns(UserWarning, match=r"can't write .*rank0_steps3-5.*: .*exists"),
    ):
        profile = train(engine)
        assert engine.step == 8
    assert profile.trace is None
    assert len(profile.key_averages()) > 0


def test_on_a_gpu_kernels_are_counted_and_not_the_operators_that_started_them(tmp_path: Path) -> None:
    def event(key: str, device: Any, on_gpu: float, note: bool = False) -> Any:
        times = {"self_cpu_time_total": 7.0, "self_device_time_total": on_gpu, "count": 3}
        return SimpleNamespace(key=key, device_type=device, is_user_annotation=note, **times)

    cpu, gpu = SimpleNamespace(name="CPU"), SimpleNamespace(name="CUDA")
    events = [event("aten::mm", cpu, 900.0), event("gemm", gpu, 900.0), event("Memcpy", gpu, 300.0)]
    with Engine(lanes=4, project_dir=tmp_path) as engine:
        profile = train(engine)
        profile._on_gpu = True
        _, rows = profile._table([*events, event("ProfilerStep#3", gpu, 5000.0), event("mine", gpu, 50.0, note=True)])
    assert rows[1:3] == [
        ("gemm", "75.0% of all operators, 0.30 ms in 1 call"),
        ("Memcpy", "25.0% of all operators, 0.10 ms in 1 call"),
    ]


def test_a_second_one_inside_is_refused_and_another_after_it_is_not(tmp_path: Path) -> None:
    with Engine(project_dir=tmp_path) as engine:
        with (
            engine.profile(wait=0, warmup=0),
            pytest.raises(LoopError, match="is open already"),
            engine.profile(),
        ):
            pass
        with engine.profile(wait=0, warmup=0):
            pass


def test_what_is_given_as_to_accelerate_is_refused_with_what_to_write() -> None:
    with Engine() as engine:
        with pytest.raises(ConfigError, match=r"was given a dict; write engine.profile\(wait=…, warmup=…, active=…\)"):
            engine.profile({"schedule_option": {}})
        with pytest.raises(ConfigError, match="active"):
            engine.profile(active=0)


def program(world: World, *, folder: str, strategy: str, profiled: bool) -> str:
    with Engine(world=world, lanes=4, strategy=strategy, project_dir=folder) as engine:
        with redirect_stdout(io.StringIO()) as shown:
            profile = train(engine, profiled=profiled)
        assert shown.getvalue().count("exposed communication") == (profiled and world.rank == 0)
        assert profile is None or any(name.startswith("c10d::") for name in events_of(profile.trace))
        return engine.weights_hash()


@pytest.mark.workers
@pytest.mark.parametrize(("workers", "strategy"), [(2, "ddp"), (3, "zero2"), (3, "fsdp")])
def test_every_worker_leaves_a_trace_and_the_bits_are_those_without(
    workers: int, strategy: str, tmp_path: Path
) -> None:
    plain = hashes(run_workers(program, 1, folder=str(tmp_path), strategy="ddp", profiled=False))
    assert hashes(run_workers(program, workers, folder=str(tmp_path), strategy=strategy, profiled=True)) == plain
    traces = sorted(path.name for path in (tmp_path / "profile").iterdir())
    assert traces == [f"rank{rank}_steps3-5.pt.trace.json.gz" for rank in range(workers)]
