"""Rounds in which workers don't hear each other, and what the loop promises a strategy in any round."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from paceline import Engine, World
from paceline.errors import CheckpointError, NonFiniteLossError, PeerLostError
from tests.engine.local_training import LocalTraining, remembering, strategy_of
from tests.engine.loops import prepared
from tests.workers import run_workers


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


# -- without votes ---------------------------------------------------------------------------------------------------


def runs_ahead(world: World, *, flag: str) -> tuple[int, dict[str, int], float, float]:
    """Worker 1 begins when worker 0 has done all its steps: with a vote in any of them both would wait for ever."""
    with Engine(world=world, strategy=LocalTraining(), timeout_s=20) as engine:
        model, optimizer, loader = prepared(engine, samples=40)
        natives: dict[str, int] = {}
        for x, _ in loader:
            deadline = time.monotonic() + 20
            while world.rank == 1 and not Path(flag).exists():
                assert time.monotonic() < deadline
                time.sleep(0.01)
            engine.mean("rank", float(world.rank))
            engine.backward(loss_of(model, x))
            optimizer.step()
            natives |= engine.traffic.native
            mean = engine.means["rank"]
            if engine.step == 5 and world.rank == 0:
                Path(flag).touch()
        weights = model.weight.detach().clone()
        engine.weights_hash()  # raises unless they are alike
        return engine.step, natives, mean, float(weights.sum())


@pytest.mark.workers
def test_a_worker_of_a_strategy_that_never_agrees_runs_ahead_as_it_likes(tmp_path: Path) -> None:
    results = run_workers(runs_ahead, 2, flag=str(tmp_path / "flag"))
    for rank, result in enumerate(results):
        assert result.error is None, result.traceback
        step, natives, mean, _ = result.value
        assert (step, natives, mean) == (5, {}, rank)
    assert results[0].value[3] == results[1].value[3], "the end of the loop is a boundary: it settles"


def stops_alone(world: World) -> tuple[int, int]:
    with Engine(world=world, strategy=LocalTraining(), timeout_s=20) as engine:
        model, optimizer, loader = prepared(engine, samples=80)
        for x, _ in loader:
            if engine.step == 2 + world.rank:
                engine.stop()
            engine.backward(loss_of(model, x))
            optimizer.step()
        return engine.step, loader.position


@pytest.mark.workers
def test_a_stop_is_a_workers_own_where_nobody_listens() -> None:
    assert [result.value for result in run_workers(stops_alone, 2)] == [(3, 24), (4, 32)]


def stops_inside_a_group(world: World) -> int:
    with Engine(world=world, strategy=LocalTraining(agree_every=4), timeout_s=20) as engine:
        model, optimizer, loader = prepared(engine, samples=80)
        try:
            for x, _ in loader:
                if engine.step == 1 and world.rank == 0:
                    engine.stop()
                engine.backward(loss_of(model, x))
                optimizer.step()
                if engine.stepped and engine.step == 2 and world.rank == 0:
                    time.sleep(0.2)
        except PeerLostError:
            if world.rank == 0:
                time.sleep(1.0)  # its process serves the store in which the other one looks for its note
            raise
        return engine.step


@pytest.mark.workers
def test_a_stop_inside_a_group_that_only_one_worker_takes_is_named_by_the_others() -> None:
    _, second = run_workers(stops_inside_a_group, 2)
    assert second.error is not None
    assert "worker 1 waited for worker 0, but it left its training loop after step 2" in second.error


def leaves_out_a_lane(world: World, *, agree_every: int) -> tuple[int, list[Any], list[float], bool]:
    """Steps, the tallies' (left out, weights), lane 2's history of buffers, and whether the weights stayed finite."""
    job: dict[str, Any] = {"strategy": LocalTraining(agree_every), "on_nonfinite": "skip", "timeout_s": 20}
    with Engine(world=world, lanes=3, **job) as engine:
        model, optimizer, loader = remembering(engine, steps=3)
        starts = []
        for (x,) in loader:
            if x == 6:  # lane 2 of the second step
                starts.append(float(model.seen))
                with pytest.warns(UserWarning, match="the loss of step 2 is nan in lane 2; the .* (left out|skipped)"):
                    engine.backward(loss_of(model, x) * math.nan)
            else:
                starts += [float(model.seen)] if x % 3 == 0 else []
                engine.backward(loss_of(model, x))
            optimizer.step()
        tallies = strategy_of(engine).said("collect")
        finite = all(bool(parameter.isfinite().all()) for parameter in model.parameters())
        return engine.step, [(tally.left_out, tally.weights) for tally in tallies], starts, finite


@pytest.mark.workers
def test_where_nobody_agrees_a_loss_that_is_not_finite_takes_only_its_lane_out_and_the_step_counts() -> None:
    (alone,) = run_workers(leaves_out_a_lane, 1, agree_every=0)
    assert alone.error is None, alone.traceback
    step, tallies, starts, finite = alone.value
    full, without = ((0, 1.0), (1, 1.0), (2, 1.0)), ((0, 1.0), (1, 1.0), (2, 0.0))
    assert (step, finite) == (3, True)
    assert tallies == [(False, full), (False, without), (False, full)]
    assert starts == [0, 3, 3], "the lane's buffers go on from where they were"
    _, second = run_workers(leaves_out_a_lane, 2, agree_every=0)
    assert second.value == (3, [(left, weights[1:]) for left, weights in tallies], [0, 3, 3], True), second.traceback


@pytest.mark.workers
def test_inside_a_group_a_loss_that_is_not_finite_leaves_the_round_out_and_the_step_counts() -> None:
    (alone,) = run_workers(leaves_out_a_lane, 1, agree_every=3)
    assert alone.error is None, alone.traceback
    step, tallies, _, finite = alone.value
    assert (step, finite, [left for left, _ in tallies]) == (3, True, [False, True, False])


def stops_at_nan(world: World) -> list[str]:
    with Engine(world=world, lanes=2, strategy=LocalTraining()) as engine:
        model, _, loader = prepared(engine)
        with pytest.raises(NonFiniteLossError, match="the loss of step 1 is nan in lane 0"):
            for x, _ in loader:
                engine.backward(loss_of(model, x) * math.nan)
        return [call[0] for call in strategy_of(engine).calls]


@pytest.mark.workers
def test_where_nobody_agrees_a_loss_that_is_not_finite_stops_before_any_gradient_leaves() -> None:
    (alone,) = run_workers(stops_at_nan, 1)
    assert alone.value == ["start_step"], alone.traceback


def weighs(world: World) -> list[tuple[tuple[int, float], ...]]:
    """The lanes' weights that a worker is told of."""
    with Engine(world=world, lanes=3, strategy=LocalTraining(agree_every=2), timeout_s=20) as engine:
        model, optimizer, loader = prepared(engine, samples=24)
        for x, _ in loader:
            assert engine._objects.step is not None
            item = engine._objects.step.now.item
            assert item is not None
            engine.backward(loss_of(model, x), weight=10 * item.lane + 1)
            optimizer.step()
        found = strategy_of(engine)
        assert {(lane, 10.0 * lane + 1) for lane, _ in found.said("start_backward")} == set(
            found.said("start_backward")
        )
        return [tally.weights for tally in found.said("collect")]


@pytest.mark.workers
def test_a_tally_has_all_lanes_where_workers_agreed_and_a_workers_own_where_not() -> None:
    first, second = run_workers(weighs, 2)
    everybody = ((0, 1.0), (1, 11.0), (2, 21.0))
    assert first.value == [everybody[:1], everybody], first.traceback
    assert second.value == [everybody[1:], everybody], second.traceback


def drifts(world: World, *, agree_every: int) -> int:
    with Engine(world=world, strategy=LocalTraining(agree_every, watched=True), timeout_s=20) as engine:
        model, optimizer, loader = prepared(engine, samples=40)
        for x, _ in loader:
            engine.backward(loss_of(model, x) * (world.rank + 1))
            optimizer.step()
        return engine.step


@pytest.mark.workers
def test_drift_is_looked_for_only_where_workers_agree() -> None:
    assert [result.value for result in run_workers(drifts, 2, agree_every=0)] == [5, 5]
    for result in run_workers(drifts, 2, agree_every=3):
        assert result.error is not None
        assert result.error.startswith("ReplicaError: before step 3 the weights have drifted apart: 'weight'")


# -- buffers -----------------------------------------------------------------------------------------------------------


def histories(world: World, *, agree_every: int, steps: int, look_at: int | None = None) -> list[float]:
    """What lanes 0, 1 and 2 of each step start from on this worker (0: not here), then what the model holds."""
    with Engine(world=world, lanes=3, strategy=LocalTraining(agree_every), timeout_s=20) as engine:
        model, optimizer, loader = remembering(engine, steps=steps)
        starts = [0.0] * (3 * steps)
        for (x,) in loader:
            starts[int(x) - 1] = float(model.seen)
            engine.backward(loss_of(model, x))
            optimizer.step()
            if engine.stepped and engine.step == look_at:
                starts.append(hash(engine.weights_hash()) and float(model.seen))
        return [*starts, float(model.seen)]


@pytest.mark.workers
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_lanes_that_go_their_own_ways_start_from_their_own_buffers(workers: int) -> None:
    results = run_workers(histories, workers, agree_every=0, steps=3)
    for result in results:
        assert result.error is None, result.traceback
    together = [max(values) for values in zip(*(result.value for result in results), strict=True)]
    assert together == [0, 0, 0, 1, 2, 3, 104, 205, 306, 10407]
    assert {result.value[-1] for result in results} == {10407}, "a boundary shows lane 0's on every worker"


@pytest.mark.workers
def test_a_boundary_on_the_way_changes_nothing_for_the_lanes() -> None:
    results = run_workers(histories, 2, agree_every=0, steps=3, look_at=1)
    for result in results:
        assert result.error is None, result.traceback
        assert result.value[-2:] == [1, 10407]
    assert results[1].value[4:6] == [2, 3], "lanes 1 and 2 go on from their own, not from lane 0's"


@pytest.mark.workers
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_rounds_of_a_group_start_from_the_same_buffers_and_its_last_lowest_lane_leaves_the_next_groups(
    workers: int,
) -> None:
    results = run_workers(histories, workers, agree_every=2, steps=5)
    for result in results:
        assert result.error is None, result.traceback
    together = [max(values) for values in zip(*(result.value for result in results), strict=True)]
    assert together == [0, 0, 0, 0, 0, 0, 4, 4, 4, 4, 4, 4, 410, 410, 410, 410]


def buffers_written_between_steps(world: World) -> list[float]:
    with Engine(world=world, lanes=3, strategy=LocalTraining(), timeout_s=20) as engine:
        model, optimizer, loader = remembering(engine, steps=3)
        starts = []
        for (x,) in loader:
            starts.append(float(model.seen))
            engine.backward(loss_of(model, x))
            optimizer.step()
            if engine.stepped and engine.step == 2:
                model.seen.fill_(7)
        return starts


@pytest.mark.workers
def test_buffers_that_the_user_writes_are_where_every_lane_goes_on() -> None:
    (alone,) = run_workers(buffers_written_between_steps, 1)
    assert alone.value == [0, 0, 0, 1, 2, 3, 7, 7, 7], alone.traceback


# -- what the loop promises a strategy ---------------------------------------------------------------------------------


def run(engine: Engine, steps: int = 4, **options: Any) -> Any:
    model, optimizer, loader = prepared(engine, samples=4 * steps, **options)
    for x, _ in loader:
        engine.backward(loss_of(model, x))
        optimizer.step()
    return model, optimizer, loader


def test_rounds_count_from_the_start_and_a_round_that_all_leave_out_counts_too() -> None:
    with Engine(world=World(), strategy=LocalTraining(agree_every=1)) as engine:
        model, optimizer, loader = prepared(engine, samples=16)
        with pytest.warns(UserWarning, match="step 2 is skipped"):
            for number, (x, _) in enumerate(loader):
                engine.backward(loss_of(model, x), weight=0 if number == 1 else None)
                optimizer.step()
        found = strategy_of(engine)
        assert found.said("start_step") == [0, 1, 2, 3]
        assert [tally.empty for tally in found.said("collect")] == [False, True, False, False]
        assert (len(found.said("apply")), engine.step) == (3, 3)


def test_a_resumed_job_goes_on_with_the_round_it_had(tmp_path: Path) -> None:
    with Engine(world=World(), strategy=LocalTraining(agree_every=1)) as engine:
        model, optimizer, loader = prepared(engine, samples=12)
        with pytest.warns(UserWarning, match="step 2 is skipped"):
            for number, (x, _) in enumerate(loader):
                engine.backward(loss_of(model, x), weight=0 if number == 1 else None)
                optimizer.step()
        engine.save_state(tmp_path / "state")
        assert strategy_of(engine).said("state_of") == [optimizer]
    with Engine(world=World(), strategy=LocalTraining(agree_every=1)) as engine:
        model, optimizer, loader = prepared(engine, samples=12)
        engine.load_state(tmp_path / "state")
        for x, _ in loader:
            engine.backward(loss_of(model, x))
            optimizer.step()
        found = strategy_of(engine)
        assert found.said("load") == [(optimizer, 3)]
        assert found.said("start_step") == [3, 4, 5]
        assert engine.step == 5


def test_a_state_of_updates_of_another_kind_is_refused_unless_accepted(tmp_path: Path) -> None:
    with Engine(world=World(), strategy=LocalTraining(agree_every=3)) as engine:
        run(engine)
        engine.save_state(tmp_path / "state")
    with Engine(world=World(), strategy="star") as engine:
        prepared(engine, samples=16)
        with pytest.raises(CheckpointError, match="updates was 'local_training agree_every=3', is 'synchronous'"):
            engine.load_state(tmp_path / "state")
        engine.load_state(tmp_path / "state", accept=["updates"])
        assert engine.step == 4


def test_a_peek_at_a_batch_costs_no_round() -> None:
    with Engine(world=World(), strategy=LocalTraining()) as engine:
        model, optimizer, loader = prepared(engine, samples=16)
        next(iter(loader))
        for x, _ in loader:
            engine.backward(loss_of(model, x))
            optimizer.step()
        assert strategy_of(engine).said("start_step") == [0, 0, 1, 2, 3]


def test_the_strategy_runs_the_update_and_clips() -> None:
    with Engine(world=World(), strategy=LocalTraining(), lanes=2) as engine:
        model, optimizer, loader = prepared(engine, samples=16)
        norms = []
        for x, _ in loader:
            engine.backward(loss_of(model, x))
            norms.append(engine.clip_grad_norm_(0.5))
            optimizer.step()
        found = strategy_of(engine)
        assert found.said("clip") == [0.5, 0.5]
        assert found.said("apply") == [optimizer, optimizer]
        assert [call[0] for call in found.calls if call[0] != "start_backward"][:5] == [
            "start_step", "collect", "clip", "apply", "end_step",
        ]  # fmt: skip
        assert norms[1:] == [7.0, 7.0, 7.0]


def test_boundaries_settle_and_nothing_else_does(tmp_path: Path) -> None:
    with Engine(world=World(), strategy=LocalTraining()) as engine:
        evaluation = engine.prepare(DataLoader(TensorDataset(torch.zeros(8, 8)), batch_size=4))

        def settled() -> int:
            return len(strategy_of(engine).said("drain"))

        run(engine)
        assert settled() == 1, "the end of the loop"
        engine.weights_hash()
        assert settled() == 2
        engine.save_state(tmp_path / "state")
        assert settled() == 3
        for _ in evaluation:
            pass
        assert settled() == 4
        engine.barrier()
        engine.reduce(torch.zeros(1))
        assert settled() == 4


def test_a_strategy_is_built_in_prepare_before_training_starts() -> None:
    with Engine(world=World(), strategy="local_training") as engine:
        prepared(engine)
        assert engine._objects.step is not None
        assert len(engine._objects.step.strategies._known) == 1
