"""A function that no module has, as one of a notebook, on two workers."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline.errors import ConfigError, LaunchError
from paceline.launch.notebook import _ELSEWHERE, _flags


def a_cell(folder: Path, *, fails: bool) -> Any:
    """Defined here, so known by value alone."""

    def train(word: str) -> None:
        import paceline

        with paceline.Engine() as engine:
            if fails and engine.world.rank == 1:
                raise ValueError("no luck")
            (folder / str(engine.world.rank)).write_text(f"{word} {engine.world.size} {engine.config.lanes}")
            engine.print("a line of a cell")

    return train


@pytest.mark.job
def test_a_function_runs_on_all_workers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paceline.notebook_launcher(a_cell(tmp_path, fails=False), ("hello",), workers=2, options={"lanes": 4})
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == ["hello 2 4"] * 2
    assert "a line of a cell" in capsys.readouterr().out


@pytest.mark.job
def test_a_failure_is_told_and_raised(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(LaunchError, match="ended with code 1"):
        paceline.notebook_launcher(a_cell(tmp_path, fails=True), ("hello",), workers=2)
    assert "ValueError: no luck" in capsys.readouterr().out


def test_options_are_flags() -> None:
    options = {"strategy": "zero2", "elastic": True, "keep_memory": None, "module": False, "heartbeat_timeout_s": 2.5}
    assert _flags(options) == ["--strategy", "zero2", "--elastic", "--heartbeat-timeout-s", "2.5"]


def test_what_is_no_function_is_refused() -> None:
    with pytest.raises(ConfigError, match="not int"):
        paceline.notebook_launcher(3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "count"),
    [
        ({}, "1"),
        ({"num_processes": 4}, "4"),
        ({"workers": 3}, "3"),
        ({"num_processes": 2, "workers": 2}, "2"),
    ],
)
def test_accelerates_name_for_workers_is_known(
    given: dict[str, Any], count: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[Sequence[str]] = []
    monkeypatch.setattr("paceline.launch.notebook._run", lambda command: commands.append(command) or 0)
    paceline.notebook_launcher(print, **given)
    if given.keys() == {"num_processes"}:
        paceline.notebook_launcher(print, (), *given.values())  # by its place, as there
    assert {command[command.index("--workers") + 1] for command in commands} == {count}


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"num_processes": 2, "workers": 3}, "num_processes=2 and workers=3 differ; give one"),
        ({"mixed_precision": "bf16"}, r"write Engine\(mixed_precision=…\) in the function"),
        ({"use_port": "29500"}, "use_port=…. is not known; leave it out"),
        ({"worker": 2}, r"did you mean workers=\?"),
        ({"zzz": 2}, "it takes args, workers and options"),
    ],
)
def test_arguments_that_can_not_work_are_refused_with_what_to_write(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told) as error:
        paceline.notebook_launcher(print, **given)
    assert len(str(error.value).splitlines()) == 1


def test_every_argument_of_accelerates_launcher_is_known_or_told_elsewhere() -> None:
    launchers = pytest.importorskip("accelerate.launchers")
    theirs = inspect.signature(launchers.notebook_launcher).parameters.keys()
    assert theirs <= inspect.signature(paceline.notebook_launcher).parameters.keys() | _ELSEWHERE.keys()
