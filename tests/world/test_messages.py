"""paceline's own messages: their text is what it would be if they were printed, and they obey logging."""

from __future__ import annotations

import io
import logging
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline import Engine
from paceline.engine.progress import Bar
from paceline.world import messages
from paceline.world.terminal import SummaryTable
from tests.engine.loops import prepared

SOURCE = Path(__file__).parents[2] / "src" / "paceline"
TOP = logging.getLogger("paceline")


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    level, handlers, propagate = TOP.level, TOP.handlers[:], TOP.propagate
    yield
    TOP.setLevel(level)
    TOP.handlers[:], TOP.propagate = handlers, propagate


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_notes_are_on_stdout_and_warnings_on_stderr_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    messages.logger("engine").info("paceline: 100%s")
    messages.logger("world").warning("paceline: waits")
    assert capsys.readouterr() == ("paceline: 100%s\n", "paceline: waits\n")


def test_a_script_that_sets_up_logging_sees_them_once(capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    theirs = logging.StreamHandler(sys.stdout)
    root.addHandler(theirs)
    try:
        messages.logger("engine").info("once")
    finally:
        root.removeHandler(theirs)
    assert capsys.readouterr().out == "once\n"


def test_on_a_terminal_warnings_have_a_colour_and_notes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    out, err = Terminal(), Terminal()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    text = f"paceline: [bold]{'long ' * 60}"
    messages.logger("engine").info(text)
    messages.logger("engine").warning(text)
    assert out.getvalue() == f"{text}\n"
    assert err.getvalue().startswith("\x1b[33m")
    assert re.sub(r"\x1b\[[0-9;]*m", "", err.getvalue()) == f"{text}\n"


def test_the_level_silences_notes_progress_and_tables(capsys: pytest.CaptureFixture[str]) -> None:
    TOP.setLevel(logging.WARNING)
    with Engine() as engine:
        prepared(engine)
        bar = engine.bar(10)
        bar.step_done(1)
        bar.close()
        engine.show_table("ended", [("steps", "7")])
        engine.print("the script's")
    assert capsys.readouterr() == ("the script's\n", "")


def test_a_supervisor_is_not_told_of_progress_that_nobody_wants() -> None:
    class Supervisor:
        is_there = True
        told = 0

        def tell(self, kind: str, **fields: object) -> None:
            self.told += 1

    supervisor = Supervisor()
    for level in (logging.INFO, logging.ERROR):
        TOP.setLevel(level)
        bar = Bar(step=0, total=1, main=lambda: True, supervisor=supervisor)  # type: ignore[arg-type]
        bar.step_done(1)
    assert supervisor.told == 1


def test_a_handler_of_ones_own_gets_them_instead(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    TOP.handlers[:] = [caplog.handler]
    with Engine() as engine:
        prepared(engine)
        engine.show_table("ended", [("steps", "7")])
    assert capsys.readouterr().out == ""
    assert caplog.records[0].name == "paceline.engine"
    assert caplog.records[-1].getMessage() == "ended\n  steps  7"


def test_from_error_on_there_are_no_warnings_either() -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        messages.warn("first")
        TOP.setLevel(logging.ERROR)
        messages.warn("second")
    assert [str(one.message) for one in seen] == ["first"]
    assert seen[0].filename == __file__


@pytest.mark.parametrize(
    ("word", "level"), [("1", logging.ERROR), ("0", logging.INFO), ("", logging.INFO), (None, logging.INFO)]
)
def test_the_environment_chooses_the_level(monkeypatch: pytest.MonkeyPatch, word: str | None, level: int) -> None:
    if word is None:
        monkeypatch.delenv("PACELINE_QUIET", raising=False)
    else:
        monkeypatch.setenv("PACELINE_QUIET", word)
    messages.obey_environment()
    assert TOP.level == level


def test_what_the_script_has_set_before_stays() -> None:
    theirs = logging.NullHandler()
    TOP.handlers[:], TOP.propagate = [theirs], True
    TOP.setLevel(logging.DEBUG)
    messages._set_up()
    assert (TOP.handlers, TOP.level, TOP.propagate) == ([theirs], logging.DEBUG, True)


def test_a_supervisors_messages_are_handed_on_while_its_job_runs(capsys: pytest.CaptureFixture[str]) -> None:
    lines: list[str] = []
    for quiet in (False, True):
        with messages.handed_to(lines.append, quiet=quiet):
            messages.logger("launch").warning("warning")
            messages.logger("launch").error("error")
    messages.logger("launch").warning("after")
    assert lines == ["warning", "error", "error"]
    assert capsys.readouterr().err == "after\n"


def test_a_table_is_drawn_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    out = Terminal()
    monkeypatch.setattr(sys, "stdout", out)
    messages.show_table(SummaryTable.of("ended", [("steps", "7")]), "engine")
    assert "╭" in out.getvalue()


PRINTS = {
    "data/token_build.py": "what a verb was asked for",
    "engine/group.py": "engine.print, the script's own",
    "engine/one_line_errors.py": "the error that ends the script",
    "launch/notebook.py": "what the workers of a cell printed",
    "launch/worker_main.py": "the error that ends a worker, where the supervisor does not take it",
    "trainer/callbacks.py": "PrinterCallback, which a script asks for",
}


def test_no_other_place_prints() -> None:
    rooms = ("collectives", "data", "elastic", "engine", "launch", "optim", "parameter_server", "strategies", "trainer")
    found = {
        str(path.relative_to(SOURCE))
        for room in (*rooms, "checkpoint", "sharding", "tracking", "world")
        for path in (SOURCE / room).rglob("*.py")
        if re.search(r"(?<!def )(?<![\w.])print\(|std(err|out)\.write\(|warnings\.warn\(", path.read_text())
    }
    assert found - {"world/messages.py"} == set(PRINTS)
