"""`paceline top`, `trace` and `monitor`: what they show of a run, and one line for what they can't."""

from __future__ import annotations

import io
import json
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from paceline.cli import main as command_line
from paceline.cli.top import view
from paceline.monitor.events import FOLDER, Part, Use
from paceline.monitor.run_events import read_run
from tests.monitor.simulated import Simulated

Called = tuple[int, str, str]


@pytest.fixture
def paceline(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., Called]:
    def call(*words: object) -> Called:
        monkeypatch.setattr(sys, "argv", ["paceline", *map(str, words)])
        capfd.readouterr()
        with pytest.raises(SystemExit) as end:
            command_line.main()
        said = capfd.readouterr()
        return int(end.value.code or 0), said.out, said.err

    return call


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return Simulated(3, 60, delays={(1, Part.DATA): 0.02}).write(tmp_path / "run")


def test_top_shows_every_worker_and_names_the_late_one(paceline: Callable[..., Called], run: Path) -> None:
    code, out, err = paceline("top", run, "--once")
    assert (code, err) == (0, "")
    rows = [line.split() for line in out.splitlines() if line.strip()[:1].isdigit()]
    assert [row[:2] for row in rows] == [["0", "60"], ["1", "60"], ["2", "60"]]
    assert "worker 1 is late: data takes it longer" in " ".join(out.split())
    assert "has ended" in out


def test_top_says_that_none_stands_out(paceline: Callable[..., Called], tmp_path: Path) -> None:
    _, out, _ = paceline("top", Simulated(3, 60).write(tmp_path), "--once")
    assert "no worker stands out" in out


def drawn(folder: Path, width: int) -> str:
    console = Console(width=width, file=io.StringIO(), highlight=False)
    console.print(view(read_run(folder), 50, console))
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def test_top_has_columns_of_the_use_that_is_known(tmp_path: Path) -> None:
    delays = {(1, Part.DATA): 0.02}
    unknown = Simulated(3, 60, delays=delays).write(tmp_path / "a")
    on_cpu = Simulated(3, 60, delays=delays, use=Use(2.0**30, cpu=0.43)).write(tmp_path / "b")
    on_gpu = Simulated(3, 60, delays=delays, use=Use(2.0**30, 2.0**29, cpu=0.43, gpu=0.97)).write(tmp_path / "c")
    assert "CPU" not in drawn(unknown, 120)
    assert "GPU" not in drawn(on_cpu, 120)
    assert drawn(on_cpu, 120).count("43%") == 3
    assert drawn(on_gpu, 120).count("97%") == 3
    assert drawn(on_gpu, 80).count("of it") == 1, "in a narrow terminal who waits matters more"


@pytest.mark.parametrize("width", [50, 80, 100, 200])
@pytest.mark.parametrize("use", [Use(2.0**30), Use(2.0**30, 2.0**36, cpu=1.0, gpu=1.0)], ids=["CPU", "GPU"])
def test_top_fits_the_terminal(width: int, use: Use, tmp_path: Path) -> None:
    out = drawn(Simulated(3, 60, delays={(1, Part.DATA): 0.02}, use=use).write(tmp_path), width)
    assert max(map(len, out.splitlines())) <= width
    if width >= 80:
        assert "…" not in out
        assert "forward" in out


def test_trace_writes_the_steps(paceline: Callable[..., Called], run: Path, tmp_path: Path) -> None:
    out = tmp_path / "trace.json"
    code, said, _ = paceline("trace", run, "--steps", "10:12", "-o", out)
    assert code == 0
    assert "steps 10 to 12 of 3 workers" in said
    names = [one["name"] for one in json.loads(out.read_text())["traceEvents"]]
    assert names.count("step 11") == 3
    assert "step 13" not in names


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ("100:110", "the run has recorded steps 1 to 60"),
        ("a:b", "expected two numbers, as in 100:110"),
        ("-3", "expected two numbers"),
        ("9:5", "the first step comes after the last"),
        ("9" * 30 + ":" + "9" * 30, "expected two numbers"),
    ],
)
def test_steps_that_are_not_there_are_refused(
    steps: str, words: str, paceline: Callable[..., Called], run: Path, tmp_path: Path
) -> None:
    code, _, err = paceline("trace", run, f"--steps={steps}", "-o", tmp_path / "t.json")
    assert code == 2
    assert words in err
    assert len(err.splitlines()) == 1
    assert not (tmp_path / "t.json").exists()


@pytest.mark.parametrize("verb", [("top", "--once"), ("trace",), ("monitor",)])
def test_a_run_that_can_not_be_read_is_one_line(
    verb: tuple[str, ...], paceline: Callable[..., Called], run: Path, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    newer = Simulated(1, 3).write(tmp_path / "newer", version=99)
    begun = Simulated(1, 1).write(tmp_path / "cut") / FOLDER / "worker-0.0"
    begun.write_bytes(begun.read_bytes()[:30])
    for folder, words in [
        (tmp_path / "nowhere", "there is no such run"),
        (tmp_path / "empty", "has no events"),
        (newer, "update it"),
        (tmp_path / "cut", "its header is cut"),
    ]:
        code, _, err = paceline(verb[0], folder, *verb[1:])
        assert code == 2
        assert words in err
        assert len(err.splitlines()) == 1


def test_monitor_without_a_run_or_with_a_port_in_use_is_one_line(paceline: Callable[..., Called], run: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for words, told in (
            ([], "name the folder of a run"),
            ([run, "--port", port], f"--port {port} on 127.0.0.1 is in use"),
        ):
            code, _, err = paceline("monitor", *words)
            assert code == 2
            assert told in err
            assert len(err.splitlines()) == 1


@pytest.mark.parametrize("words", [["monitor", "here"], ["run", "--dashboard", "train.py"]])
def test_without_its_packages_the_dashboard_names_them(
    words: list[str], paceline: Callable[..., Called], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.cli.monitor.NEEDED", ("starlette_not_here", "uvicorn_not_here"))
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("")
    code, _, err = paceline(*words)
    assert code == 2
    assert err.endswith(
        "starlette_not_here and uvicorn_not_here, which are not installed: pip install 'paceline[monitor]'\n"
    )
    assert len(err.splitlines()) == 1
