"""A signal ends the loop of all workers after one step; they save, leave with a code, and go on to the same bits."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.nn.functional as F

from paceline import Engine, StoppedOnRequest, World
from paceline.engine.stop_signals import EMPTY_LOOPS, STOP_SIGNALS, StopSignals
from paceline.engine.vote import Stop
from paceline.errors import ConfigError, LoopError
from tests.engine.local_training import LocalTraining
from tests.engine.loops import prepared
from tests.workers import hashes, run_workers


@pytest.fixture(autouse=True)
def handlers_are_as_before() -> Iterator[None]:
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    yield
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == before


def train(engine: Engine, model: Any, optimizer: Any, loader: Any, *, signal_at: int | None = None) -> None:
    while loader.epoch < 2 and not engine.stop_requested:
        for x, y in loader:
            if signal_at is not None and engine.step == signal_at - 1 and engine.world.rank == engine.world.size - 1:
                signal.raise_signal(signal.SIGTERM)
            engine.backward(F.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()


# -- several workers ---------------------------------------------------------------------------------------------------


def trains(world: World, *, folder: str, signal_at: int | None = None) -> str:
    with Engine(world=world, lanes=4, threads=1) as engine:
        model, optimizer, loader = prepared(engine, samples=80, shuffle=True)
        engine.stop_on_signals()
        if (Path(folder) / "state").exists():
            engine.load_state(Path(folder) / "state")
        train(engine, model, optimizer, loader, signal_at=signal_at)
        if engine.stop_requested:
            engine.save_state(Path(folder) / "state")
            assert (engine.step, loader.epoch, loader.position) == (7, 1, 32)
        engine.exit_if_stopped()
        return engine.weights_hash()


@pytest.mark.workers
def test_a_signal_to_one_worker_stops_all_after_one_step_and_they_go_on_to_the_same_bits(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    (tmp_path / "cut").mkdir()
    whole = hashes(run_workers(trains, 1, folder=str(tmp_path / "whole")))
    stopped = run_workers(trains, 3, folder=str(tmp_path / "cut"), signal_at=7)
    assert [result.error for result in stopped] == ["StoppedOnRequest: 75"] * 3
    assert hashes(run_workers(trains, 2, folder=str(tmp_path / "cut"))) == whole


def is_asked_alone(world: World) -> tuple[int, bool]:
    with Engine(world=world, strategy=LocalTraining(), timeout_s=20) as engine:
        model, optimizer, loader = prepared(engine, samples=40)
        engine.stop_on_signals()
        for _ in range(3):
            for x, y in loader:
                if engine.step == 2 and world.rank == 1:
                    signal.raise_signal(signal.SIGTERM)
                engine.backward(F.mse_loss(model(x), y))
                optimizer.step()
        return engine.step, engine.stop_requested


@pytest.mark.workers
def test_workers_that_never_agree_in_the_loop_agree_at_its_end() -> None:
    results = run_workers(is_asked_alone, 2)
    assert [result.value for result in results] == [(5, True), (3, True)], results


def is_asked_between_loops(world: World) -> tuple[int, bool]:
    with Engine(world=world) as engine:
        model, optimizer, loader = prepared(engine, samples=32)
        evaluation = engine.prepare(prepared_evaluation())
        engine.stop_on_signals()
        for epoch in range(3):
            for x, y in loader:
                engine.backward(F.mse_loss(model(x), y))
                optimizer.step()
            for _ in evaluation:
                if epoch == 0 and world.rank == 1:
                    signal.raise_signal(signal.SIGUSR1)
        return engine.step, engine.stop_requested


def prepared_evaluation() -> Any:
    from torch.utils.data import DataLoader

    from tests.engine.loops import vectors

    return DataLoader(vectors(16), batch_size=4)


@pytest.mark.workers
def test_a_signal_in_an_evaluation_lets_it_end_and_starts_no_other_loop() -> None:
    assert [result.value for result in run_workers(is_asked_between_loops, 2)] == [(4, True)] * 2


# -- one worker --------------------------------------------------------------------------------------------------------


def test_a_signal_before_the_first_step_leaves_nothing_to_do() -> None:
    with Engine(world=World()) as engine:
        engine.stop_on_signals()
        signal.raise_signal(signal.SIGTERM)
        model, optimizer, loader = prepared(engine)
        train(engine, model, optimizer, loader)
        assert (engine.step, loader.position, engine.stop_requested) == (0, 0, True)


def test_the_last_step_knows_that_it_is_the_last(capfd: pytest.CaptureFixture[str]) -> None:
    with Engine(world=World()) as engine:
        model, optimizer, loader = prepared(engine)
        engine.stop_on_signals()
        seen = []
        for x, y in loader:
            engine.backward(F.mse_loss(model(x), y))
            optimizer.step()
            seen.append(engine.stop_requested)
            if engine.step == 2:
                signal.raise_signal(signal.SIGTERM)
        assert seen == [False, False, True]
        with pytest.raises(StoppedOnRequest) as stopped:
            engine.exit_if_stopped()
        assert stopped.value.code == 75
    out, err = capfd.readouterr()
    assert err == "paceline: SIGTERM: stopping after this step\n"
    assert out.endswith("paceline: stopped on request after step 3; start again to continue\n")


def test_without_a_signal_nothing_is_stopped() -> None:
    with Engine(world=World()) as engine:
        model, optimizer, loader = prepared(engine)
        engine.stop_on_signals()
        train(engine, model, optimizer, loader)
        engine.exit_if_stopped()
        assert (engine.step, engine.stop_requested) == (16, False)


def test_a_while_that_never_looks_is_told_so() -> None:
    with Engine(world=World()) as engine:
        engine.stop_on_signals()
        signal.raise_signal(signal.SIGTERM)
        _, _, loader = prepared(engine)
        with pytest.raises(LoopError, match=r"a `while` around it must end on engine.stop_requested"):
            for _ in range(EMPTY_LOOPS + 1):
                list(loader)


# -- handlers ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def ctrl_c_is_heard() -> Iterator[None]:
    """A shell starts what it puts into the background with Ctrl-C ignored, and so it stays then."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c_is_heard")
def test_a_second_ctrl_c_is_immediate_but_an_echo_of_the_first_is_not() -> None:
    now = [0.0]
    stops = StopSignals("worker 0", tells=False, clock=lambda: now[0])
    stops.watch()
    try:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        now[0] = 2.0
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    finally:
        stops.close()
    assert stops.asked is signal.SIGINT


def test_a_signal_that_the_script_handles_itself_is_left_to_it() -> None:
    got: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: got.append(number))
    stops = StopSignals("worker 0", tells=False)
    try:
        stops.watch()
        signal.raise_signal(signal.SIGUSR1)
        assert (got, stops.asked) == ([signal.SIGUSR1], None)
        stops.watch([signal.SIGUSR1])  # but not when it was asked for by name
        signal.raise_signal(signal.SIGUSR1)
        assert (len(got), stops.asked) == (1, signal.SIGUSR1)
    finally:
        stops.close()
        signal.signal(signal.SIGUSR1, before)


def test_a_server_leaves_signals_to_its_workers() -> None:
    stops = StopSignals("server 0", tells=True, is_server=True)
    stops.watch()
    try:
        signal.raise_signal(signal.SIGTERM)
    finally:
        stops.close()
    assert stops.asked is None


def test_another_thread_is_refused() -> None:
    raised: list[BaseException] = []

    def install() -> None:
        try:
            StopSignals("worker 3", tells=False).watch()
        except ConfigError as error:
            raised.append(error)

    thread = threading.Thread(target=install, name="loader")
    thread.start()
    thread.join(5)
    assert "worker 3: engine.stop_on_signals() was called in thread 'loader'" in str(raised[0])


def test_where_workers_agree_later_a_signal_waits_and_a_wish_does_not() -> None:
    votes = [Stop.vote(asked=True, wanted=False, later=later) for later in (True, False)]
    assert votes == [Stop.NO, Stop.REQUESTED]
    assert [Stop.vote(asked=asked, wanted=True, later=True) for asked in (True, False)] == [Stop.WANTED] * 2
    assert Stop.vote(asked=False, wanted=False, later=False) is Stop.NO
