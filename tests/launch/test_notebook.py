"""A function that no module has, as one of a notebook, on two workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline.errors import ConfigError, LaunchError
from paceline.launch.notebook import _flags


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
