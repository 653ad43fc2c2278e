"""Without a supervisor of ours, workers tell each other in the store who waits and where the others are."""

from __future__ import annotations

import threading
import time

import pytest
from torch.distributed import HashStore

from paceline.world import hang_board
from paceline.world.hang_board import HangBoard


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hang_board, "ANSWERS_S", 0.2)


def sleeps_in_the_script(store: HashStore, made: threading.Event, ends: threading.Event) -> None:
    board = HangBoard(store, rank=1, size=4)
    looking = threading.Thread(target=look_until, args=(board, None, ends))
    looking.start()
    made.set()
    ends.wait()
    looking.join()


def look_until(board: HangBoard, waits: str | None, ends: threading.Event) -> None:
    while not ends.wait(0.01):
        board.look(waits)


def test_who_waits_and_the_stack_of_who_does_not(quick: None, capfd: pytest.CaptureFixture[str]) -> None:
    store, made, ends = HashStore(), threading.Event(), threading.Event()
    late = threading.Thread(target=sleeps_in_the_script, args=(store, made, ends))
    waits = threading.Thread(target=look_until, args=(HangBoard(store, 3, 4), "in a wait", ends))
    late.start()
    waits.start()
    assert made.wait(10)
    HangBoard(store, 0, 4).report("in the vote of step 7 (train.py:3)", 2.0)
    HangBoard(store, 0, 4).report("in the vote of step 7 (train.py:3)", 2.0)  # one tells for all
    ends.set()
    late.join()
    waits.join()
    said = capfd.readouterr().err
    assert said.startswith(
        "paceline: hang: of 4 workers 0, 3 waited 2 s in the vote of step 7 (train.py:3), and 1, 2 did not come\n"
        "paceline: worker 1:\n"
    )
    assert "in sleeps_in_the_script\n    ends.wait()" in said
    assert said.endswith("paceline: worker 2 does not answer: is it stopped, or in a call that keeps Python's lock?\n")
    assert said.count("paceline: hang") == 1


def test_a_store_that_does_not_answer_is_told(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(hang_board, "ANSWERS_S", 0.05)
    monkeypatch.setattr(hang_board, "STORE_S", 0.05)
    ends = threading.Event()

    class Stopped:
        def set(self, key: str, value: str) -> None:
            ends.wait(10)
            raise RuntimeError("the store is gone")

    begun = time.monotonic()
    HangBoard(Stopped(), 1, 2).report("in an all-gather", 2.0)  # type: ignore[arg-type]
    assert time.monotonic() - begun < 5
    ends.set()
    assert "the store does not answer either: is the process that serves it" in capfd.readouterr().err
