"""A wait that lasts is told with the call and the line of the script that waits; a short one costs nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from paceline.world import script_line, waiting
from paceline.world.control import NoSupervisor
from paceline.world.waiting import Waiting, WaitWatch, waiting_call


class Heard:
    """In place of the line to the supervisor."""

    is_there = True

    def __init__(self) -> None:
        self.words: list[tuple[str, dict[str, Any]]] = []

    def tell(self, kind: str, **fields: Any) -> None:
        self.words.append((kind, fields))

    @property
    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.words]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(waiting, "REPORT_AFTER_S", 0.05)
    monkeypatch.setattr(waiting, "PRINT_AFTER_S", 0.05)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


class Engine:
    """Named as the one that scripts know."""

    def barrier(self, until: Callable[[], bool]) -> None:
        with Waiting(), Waiting("nobody in particular"):
            wait_until(until)


def test_a_wait_that_lasts_is_told_once_and_so_is_its_end(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script_line, "_not_the_script", lambda: ("nothing",))
    heard = Heard()
    watch = WaitWatch(heard, "worker 0")  # type: ignore[arg-type]
    Engine().barrier(lambda: "waits" in heard.kinds)
    wait_until(lambda: heard.kinds == ["waits", "goes_on"])
    with Waiting():
        time.sleep(0.02)
    time.sleep(0.1)
    watch.close()
    assert heard.kinds == ["waits", "goes_on"]
    assert heard.words[0][1]["seconds"] >= 0.05
    assert not waiting._noted


def test_without_a_supervisor_it_is_printed(quick: None, capfd: pytest.CaptureFixture[str]) -> None:
    watch = WaitWatch(NoSupervisor(), "worker 3")
    with Waiting() as waits:
        waits.still_for("workers 1, 2")
        time.sleep(0.3)
    watch.close()
    said = capfd.readouterr().err
    assert said.startswith("paceline: worker 3 has waited 0 s in ")
    assert said.endswith(" for workers 1, 2\n")
    assert said.count("\n") == 1


def test_the_call_is_named_as_the_script_writes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The frames of this file stand for ours, and those of a script that is run in it for the script."""
    monkeypatch.setattr(script_line, "_not_the_script", lambda: (__file__, threading.__file__))
    found: list[tuple[str, str]] = []
    script = compile("\n\nengine.barrier(look)", "/home/somebody/train.py", "exec")

    def look() -> bool:
        import sys

        found.append(waiting_call(sys._getframe()))
        return True

    exec(script, {"engine": Engine(), "look": look})
    assert found == [("engine.barrier()", "train.py:3")]
    assert waiting_call(None) == ("a call", "")


def test_a_wait_that_fails_is_told_at_once_with_what_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    heard = Heard()
    watch = WaitWatch(heard, "worker 0", generation=lambda: 3)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError), Waiting(doing="in the vote of step 7"):
        raise RuntimeError("Timed out waiting 2000ms\nand more")
    watch.close()
    with pytest.raises(RuntimeError), Waiting():
        raise RuntimeError("nobody listens any more")
    ((kind, told),) = heard.words
    assert (kind, told["doing"], told["text"]) == ("wait_failed", "in the vote of step 7", "Timed out waiting 2000ms")
    assert told["generation"] == 3
    assert not waiting._noted
    assert not waiting._watches
