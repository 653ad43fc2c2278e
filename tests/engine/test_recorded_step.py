"""A step that is recorded trains what one that is not does, ends after the steps asked for, and writes what it saw."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.verify.record import Run, Setting, read_run
from paceline.verify.recorder import Recorder
from paceline.verify.request import Look, Request, operators_file, values_file
from paceline.world.world import LaunchSettings, World

STEPS = 5


@pytest.fixture(autouse=True)
def _first_engine_of_its_process() -> Iterator[None]:
    Recorder.made = 0
    yield
    Recorder.made = 0


def train(folder: Path | None, *, steps: int = STEPS, write_after: int = 0) -> str:
    settings = LaunchSettings(verify=None if folder is None else str(folder))
    with paceline.Engine(lanes=3, accumulate=2, seed=5, threads=1, world=World(settings=settings)) as engine:
        model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        data = TensorDataset(torch.randn(3 * 2 * 4 * steps, 6), torch.randn(3 * 2 * 4 * steps, 1))
        model, optimizer, loader = engine.prepare(model, optimizer, DataLoader(data, batch_size=4, shuffle=True))
        with suppress(SystemExit):
            for x, y in loader:
                engine.backward(mse_loss(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
                if engine.stepped and engine.step == write_after:
                    with torch.no_grad():
                        model[0].bias[3] = 7
        return engine.weights_hash() if engine.step == steps else f"{engine.step} steps"


def recorded(folder: Path, *, steps: int = STEPS, look: Look | None = None, write_after: int = 0) -> tuple[str, Run]:
    folder.mkdir()
    Request(folder, steps, 3, None, look).write()
    return train(folder, write_after=write_after), read_run(Setting(1), folder)


def test_it_trains_the_bits_that_it_trains_without_a_record(tmp_path: Path) -> None:
    plain = train(None)
    found, run = recorded(tmp_path / "run")
    assert found == plain
    assert run.made == STEPS
    places = [(lane, micro, 0) for lane in range(3) for micro in range(2)]
    for number, step in run.steps.items():
        assert sorted(step.items) == places, number
        assert step.entry == {}
        after = step.after[0]
        assert set(after.weights) == {"0.bias", "0.weight", "1.bias", "1.weight", "3.bias", "3.weight"}
        assert set(after.buffers) == {"1.num_batches_tracked", "1.running_mean", "1.running_var"}
        assert after.gradients is not None
        assert set(after.gradients) == set(after.weights)
        for item in step.items.values():
            assert set(item.gradients) == set(after.weights)
            assert len(item.ids) == 4
            assert set(item.data) == {"[0]", "[1]"}
            assert {"torch", "random"} <= set(item.random)
    assert len({tuple(step.after[0].weights.items()) for step in run.steps.values()}) == STEPS


def test_it_ends_after_the_steps_that_were_asked_for(tmp_path: Path) -> None:
    found, run = recorded(tmp_path / "run", steps=2)
    assert (found, run.made) == ("2 steps", 2)


def test_a_weight_that_the_script_writes_is_seen_before_the_next_step(tmp_path: Path) -> None:
    _, run = recorded(tmp_path / "run", write_after=2)
    assert [number for number, step in run.steps.items() if step.entry] == [3]
    assert list(run.steps[3].entry[0]) == ["0.bias"]


def test_a_closer_look_keeps_values_and_operators_and_changes_no_bit(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    _, first = recorded(tmp_path / "first")
    Recorder.made = 0
    weights = [(kind, "0.weight") for kind in ("entry", "gradient", "weights")]
    wanted = (*weights, ("buffers", "1.running_mean"))
    found, again = recorded(tmp_path / "look", look=Look(3, wanted, (1, 1, 0)))
    assert (found, again.made) == ("3 steps", 3)
    assert all(again.steps[number] == first.steps[number] for number in again.steps)
    kept = load_file(tmp_path / "look" / values_file(0))
    assert set(kept) == {f"{kind} {name}" for kind, name in wanted}
    assert not torch.equal(kept["entry 0.weight"], kept["weights 0.weight"])
    assert (tmp_path / "look" / operators_file((1, 1, 0))).read_text().count('"name"') > 10
