"""An ordered fault happens where it was ordered, once, and nowhere else; nonsense is refused in one line."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator

import pytest

from paceline.elastic import faults
from paceline.elastic.faults import PHASES, Fault, arm, fault_point, flips_due, parsed
from paceline.errors import ConfigError


@pytest.fixture(autouse=True)
def nothing_is_ordered() -> Iterator[None]:
    arm(0, 0, "")
    yield
    arm(0, 0, "")


def test_orders_are_read_as_they_are_written() -> None:
    text = "kill:rank=2,step=5,phase=exchange; stop : rank=1, phase=join ;flip:rank=0,step=3,tensor=head.weight;"
    assert parsed(text) == [
        Fault("kill", 2, 5, "exchange"),
        Fault("stop", 1, None, "join"),
        Fault("flip", 0, 3, tensor="head.weight"),
    ]
    assert parsed("slow:rank=1,step=2,phase=data,ms=50,incarnation=1") == [Fault("slow", 1, 2, "data", 1, 50)]
    assert str(parsed(text)[0]) == "kill:rank=2,step=5,phase=exchange"


@pytest.mark.parametrize(
    ("orders", "line"),
    [
        ("burn:rank=1,phase=data", "'burn' is no kind of fault; there are kill, stop, raise, slow, flip"),
        ("kill:rank=1,phase=lunch", "kill with phase=lunch; the phases of a step are data, forward, "),
        ("kill:rank=1,step=3", "kill with no phase; the phases of a step are data, "),
        ("kill:step=3,phase=data", "says not whom it concerns; add rank="),
        ("kill:rank=x,phase=data", "rank=x is no whole number from 0 on"),
        ("kill:rank=1,step=0,phase=data", "step=0 is no whole number from 1 on"),
        ("kill:rank=1,rank=2,phase=data", "'rank=2' is there twice"),
        ("kill:rank=1,when=3,phase=data", "'when=3' is none of incarnation, ms, phase, rank, step, tensor"),
        ("kill", "'kill' says not whom it concerns"),
    ],
)
def test_nonsense_is_refused_in_one_line_that_quotes_it(orders: str, line: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parsed(orders)
    text = str(refused.value)
    assert text.startswith("PACELINE_FAULTS: '"), text
    assert line in text, text
    assert "\n" not in text


def test_a_fault_happens_once_at_its_step_and_phase() -> None:
    arm(1, 0, "raise:rank=1,step=2,phase=exchange")
    for step, phase in [(1, "exchange"), (2, "forward")]:
        fault_point(phase, step)
    with pytest.raises(RuntimeError, match=r"injected fault in phase exchange of step 2 .*raise:rank=1,step=2"):
        fault_point("exchange", 2)
    fault_point("exchange", 2)


def test_a_fault_without_a_step_happens_at_the_first_that_comes() -> None:
    arm(1, 0, "raise:rank=1,phase=serve")
    with pytest.raises(RuntimeError, match="phase serve of step 17"):
        fault_point("serve", 17)
    fault_point("serve", 18)


@pytest.mark.parametrize(("rank", "incarnation"), [(0, 0), (1, 1)])
def test_other_workers_and_the_replacement_are_spared(rank: int, incarnation: int) -> None:
    arm(rank, incarnation, "raise:rank=1,step=1,phase=data")
    fault_point("data", 1)


def test_a_replacement_can_be_named() -> None:
    arm(1, 2, "raise:rank=1,phase=join,incarnation=2")
    with pytest.raises(RuntimeError, match="phase join"):
        fault_point("join", 4)


def test_orders_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_FAULTS", "raise:rank=3,step=1,phase=apply")
    arm(3, 0)
    with pytest.raises(RuntimeError, match="phase apply"):
        fault_point("apply", 1)
    monkeypatch.delenv("PACELINE_FAULTS")
    arm(3, 0)
    assert faults.ordered == []


def test_a_slow_worker_sleeps_as_long_as_it_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    arm(0, 0, "slow:rank=0,step=1,phase=data,ms=50;slow:rank=0,step=2,phase=data")
    fault_point("data", 1)
    fault_point("data", 2)
    assert slept == [0.05, 0.2]


def test_a_fault_is_announced(capfd: pytest.CaptureFixture[str]) -> None:
    arm(1, 0, "slow:rank=1,phase=data,ms=1")
    fault_point("data", 3)
    assert capfd.readouterr().err == "paceline: injected fault slow:rank=1,phase=data in phase data of step 3\n"


def test_flips_are_handed_to_the_engine_once() -> None:
    arm(0, 0, "flip:rank=0,step=2,tensor=head.weight;flip:rank=1,step=2")
    fault_point("apply", 2)
    assert flips_due(1) == []
    assert flips_due(2) == [Fault("flip", 0, 2, tensor="head.weight")]
    assert flips_due(2) == []


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("phase", PHASES)
def test_kill_and_stop_reach_the_process_itself(number: signal.Signals, phase: str) -> None:
    kind = {signal.SIGKILL: "kill", signal.SIGSTOP: "stop"}[number]

    def child() -> None:
        arm(0, 0, f"{kind}:rank=0,step=1,phase={phase}")
        fault_point(phase, 1)

    assert signal_that_halts(child) == number


def signal_that_halts(child: Callable[[], None]) -> int:
    """Fork, and see by which signal the child is killed or stopped; it is gone then."""
    pid = os.fork()
    if pid == 0:
        try:
            child()
        finally:
            os._exit(0)
    _, status = os.waitpid(pid, os.WUNTRACED)
    if os.WIFSTOPPED(status):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        return os.WSTOPSIG(status)
    return os.WTERMSIG(status)
