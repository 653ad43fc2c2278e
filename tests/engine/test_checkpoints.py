"""Checkpoints of a run: kept, dropped, resumed from the newest good one; a save that fails never ends a training."""

from __future__ import annotations

import os
import subprocess
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from paceline import Engine, World
from paceline.checkpoint import save as saving
from paceline.checkpoint import weights_file
from paceline.checkpoint.load import Checkpoint
from paceline.errors import CheckpointError, ConfigError
from tests.workers import hashes, run_workers


def prepared(engine: Engine, width: int = 40, *, samples: int = 40) -> tuple[Any, Any, Any]:
    model = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 1))
    data = TensorDataset(torch.randn(samples, 8), torch.randn(samples, 1))
    return engine.prepare(model, torch.optim.AdamW(model.parameters()), DataLoader(data, batch_size=4, shuffle=True))  # type: ignore[no-any-return]


def train(engine: Engine, model: Any, optimizer: Any, loader: Any, until: int) -> Iterator[int]:
    """Every step, when it is done."""
    while engine.step < until:
        for x, y in loader:
            engine.backward(F.mse_loss(model(x), y))
            optimizer.step()
            if engine.stepped:
                yield engine.step
            if engine.stepped and engine.step == until:
                break


def run(folder: Path, until: int, *, save_at: dict[int, float | None], **options: Any) -> str:
    """A run of one worker that saves after some steps, with a score or without; goes on from what is there."""
    with Engine(world=World()) as engine:
        things = prepared(engine)
        checkpoints = engine.checkpoints(folder, **options)
        checkpoints.resume()
        for step in train(engine, *things, until):
            if step in save_at:
                checkpoints.save(score=save_at[step])
        checkpoints.close()
        return engine.weights_hash()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def flip(folder: Path) -> None:
    path = next(folder.glob("*.safetensors"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


# -- which are kept ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asynchronous", [True, False])
def test_the_newest_and_the_best_are_kept(tmp_path: Path, asynchronous: bool) -> None:
    scores = {1: 0.1, 2: 0.9, 3: 0.2, 4: None, 5: 0.3}
    run(tmp_path, 5, save_at=scores, keep=3, asynchronous=asynchronous)
    assert names(tmp_path) == ["checkpoint-2", "checkpoint-4", "checkpoint-5"]


def test_with_one_to_keep_the_newest_and_the_best_are_kept_all_the_same(tmp_path: Path) -> None:
    run(tmp_path, 4, save_at={1: 0.1, 2: 0.9, 3: 0.2, 4: 0.3}, keep=1)
    assert names(tmp_path) == ["checkpoint-2", "checkpoint-4"]


def test_the_best_is_known_and_its_weights_can_be_loaded(tmp_path: Path) -> None:
    with Engine(world=World()) as engine:
        things = prepared(engine)
        checkpoints = engine.checkpoints(tmp_path, keep=1)
        found = {}
        for step, loss in zip(train(engine, *things, 3), (0.5, 0.2, 0.7), strict=True):
            checkpoints.save(score=loss, greater_is_better=False)
            found[step] = engine.weights_hash()
        assert checkpoints.best == tmp_path / "checkpoint-2"
        checkpoints.load_weights(tmp_path / "checkpoint-2")
        assert (engine.weights_hash(), engine.step) == (found[2], 3)


def goes_back_to_best(world: World, *, folder: Path, strategy: str) -> list[str]:
    with Engine(world=world, strategy=strategy, lanes=2, timeout_s=60) as engine:
        things = prepared(engine)
        checkpoints = engine.checkpoints(folder)
        found = []
        for step in train(engine, *things, 4):
            if step == 2:
                checkpoints.load_weights(folder / "checkpoint-1")
            else:
                checkpoints.save()
            found.append(engine.weights_hash())
        return found


@pytest.mark.workers
def test_weights_are_loaded_between_steps_under_every_strategy(tmp_path: Path) -> None:
    alone = goes_back_to_best(World(), folder=tmp_path / "alone", strategy="ddp")
    assert alone[0] == alone[1] != alone[2]
    for strategy in ("ddp", "zero1", "zero2", "zero3", "fsdp"):
        results = run_workers(goes_back_to_best, 2, folder=tmp_path / strategy, strategy=strategy)
        assert [result.value or result.error for result in results] == [alone, alone], strategy


def test_extra_comes_back(tmp_path: Path) -> None:
    extra = {"log": [1.5, float("nan")], "table": torch.arange(30), "none": None}
    with Engine(world=World()) as engine:
        things = prepared(engine)
        checkpoints = engine.checkpoints(tmp_path)
        assert checkpoints.resume() is None
        next(train(engine, *things, 1))
        checkpoints.save(extra)
        found = checkpoints.resume()
    assert found["log"][0] == 1.5
    assert found["log"][1] != found["log"][1]
    assert found["table"].tolist() == list(range(30))


# -- resuming ----------------------------------------------------------------------------------------------------------


def test_resume_skips_what_is_damaged_or_half_written_and_says_so(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    straight = run(tmp_path / "straight", 6, save_at={})
    run(tmp_path / "run", 4, save_at={1: None, 2: None, 3: None, 4: None})
    flip(tmp_path / "run" / "checkpoint-4")
    (tmp_path / "run" / "checkpoint-3" / "COMPLETE").unlink()
    capfd.readouterr()
    assert run(tmp_path / "run", 6, save_at={}) == straight
    told = [line for line in capfd.readouterr().out.splitlines() if "checkpoint-" in line]
    assert len(told) == 3, told
    assert "checkpoint-4 is skipped" in told[0]
    assert "worker-00000-of-00001.safetensors is damaged: '/" in told[0]
    assert "checkpoint-3 is skipped" in told[1]
    assert "COMPLETE is missing: it was not written to its end" in told[1]
    assert "goes on from" in told[2]
    assert "checkpoint-2, after step 2" in told[2]


def test_a_damaged_checkpoint_is_replaced_by_the_next_of_its_name(tmp_path: Path) -> None:
    straight = run(tmp_path, 3, save_at={1: None, 2: None})
    flip(tmp_path / "checkpoint-2")
    assert run(tmp_path, 3, save_at={2: None}) == straight
    assert Checkpoint.open(tmp_path / "checkpoint-2").verify() == []


def trains_on(world: World, *, folder: str, until: int, resume: bool = True) -> str:
    with Engine(world=world, lanes=3) as engine:
        things = prepared(engine)
        checkpoints = engine.checkpoints(folder)
        if resume:
            checkpoints.resume()
        for step in train(engine, *things, until):
            if step % 2 == 0:
                checkpoints.save()
        checkpoints.close()
        return engine.weights_hash()


@pytest.mark.workers
def test_two_one_and_three_workers_take_turns_to_the_same_bits(tmp_path: Path) -> None:
    straight = hashes(run_workers(trains_on, 1, folder=str(tmp_path / "straight"), until=9, resume=False))
    for workers, until in ((2, 3), (1, 5)):  # each ends with a step that is not saved
        run_workers(trains_on, workers, folder=str(tmp_path / "run"), until=until)
    assert hashes(run_workers(trains_on, 3, folder=str(tmp_path / "run"), until=9)) == straight


def test_what_lies_ahead_of_a_run_that_went_on_from_before_it_is_set_aside(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Counted as the newest, a damaged one would outlive those that are good."""
    straight = run(tmp_path / "straight", 6, save_at={})
    folder = tmp_path / "run"
    run(folder, 4, save_at={2: None, 4: None})
    flip(folder / "checkpoint-4")
    run(folder, 3, save_at={3: None}, keep=1)
    assert names(folder) == ["checkpoint-3", "checkpoint-4.abandoned"]
    told = "checkpoint-4 is of a step that this run has not reached: it is checkpoint-4.abandoned now"
    assert told in capfd.readouterr().out
    assert run(folder, 6, save_at={}) == straight


def test_a_damaged_checkpoint_given_by_name_changes_nothing(tmp_path: Path) -> None:
    run(tmp_path, 1, save_at={1: None})
    flip(tmp_path / "checkpoint-1")
    with Engine(world=World()) as engine:
        prepared(engine)
        before = engine.weights_hash()
        with pytest.raises(CheckpointError, match="does not have its checksum"):
            engine.checkpoints(tmp_path).resume(tmp_path / "checkpoint-1")
        assert (engine.weights_hash(), engine.step) == (before, 0)


def test_what_was_cut_off_is_removed_by_the_next_save(tmp_path: Path) -> None:
    for name in (".checkpoint-7.removed", ".checkpoint-9.00ff.partial", ".checkpoint-9.notes"):
        (tmp_path / name).mkdir()
    run(tmp_path, 1, save_at={1: None})
    assert names(tmp_path) == [".checkpoint-9.notes", "checkpoint-1"]


class Counting(nn.Linear):
    """Its extra state is a tensor."""

    count = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return super().forward(x)

    def get_extra_state(self) -> torch.Tensor:
        return torch.full((40,), float(self.count))

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.count = int(state[0])


def test_an_extra_state_that_is_a_tensor_comes_back(tmp_path: Path) -> None:
    with Engine(world=World()) as engine:
        model = Counting(8, 1)
        data = TensorDataset(torch.randn(40, 8), torch.randn(40, 1))
        optimizer = torch.optim.AdamW(model.parameters())
        things = engine.prepare(model, optimizer, DataLoader(data, batch_size=4))
        list(train(engine, *things, 3))
        engine.save_state(tmp_path / "state")
        model.count = 0
        engine.load_state(tmp_path / "state")
        assert model.count == 3


# -- when it can't be saved --------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if made.returncode:
        pytest.skip("only root mounts file systems")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_full_disk_is_one_warning_with_the_bytes_needed_and_the_training_goes_on(
    small_disk: Path, asynchronous: bool
) -> None:
    with Engine(world=World()) as engine:
        things = prepared(engine, width=2000)
        checkpoints = engine.checkpoints(small_disk, asynchronous=asynchronous)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            for _ in train(engine, *things, 1):
                assert checkpoints.save() is None
            checkpoints.close()
        assert engine.step == 1
    (warning,) = [str(w.message) for w in seen]
    assert "checkpoint-1 could not be saved: it needs 234.4 KiB, and 64.0 KiB are free. The training goes on" in warning
    assert names(small_disk) == []


def test_a_disk_that_fills_up_during_the_save_leaves_the_one_before(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody else takes the space after it was looked for."""
    with Engine(world=World()) as engine:
        things = prepared(engine)
        checkpoints = engine.checkpoints(small_disk)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            for step in train(engine, *things, 2):
                checkpoints.save()
                checkpoints.wait()
                if step == 1:
                    (small_disk / "other").write_bytes(b"x" * _free(small_disk))
                    monkeypatch.setattr("paceline.engine.checkpoints.shutil.disk_usage", lambda _: _Plenty)
        assert engine.step == 2
    (warning,) = [str(w.message) for w in seen]
    assert "checkpoint-2 could not be saved: No space left on device (this worker's part has" in warning
    assert "the newest is checkpoint-1" in warning
    assert names(small_disk) == ["checkpoint-1", "other"]
    assert Checkpoint.open(small_disk / "checkpoint-1").verify() == []


class _Plenty:
    free = 10**12


def _free(folder: Path) -> int:
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize - 4096


def test_a_save_of_its_own_raises_when_it_cannot_be_done(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with Engine(world=World()) as engine:
        next(train(engine, *prepared(engine), 1))
        with pytest.raises(CheckpointError, match=r"file/state could not be saved: Not a directory|File exists"):
            engine.save_state(tmp_path / "file" / "state")


# -- in the background -------------------------------------------------------------------------------------------------


class SlowDisk:
    """Saves wait until they are let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._go = threading.Event()
        original = saving.write_tensors

        def write(*args: Any) -> Any:
            assert self._go.wait(30)
            return original(*args)

        monkeypatch.setattr(saving, "write_tensors", write)

    def go(self) -> None:
        self._go.set()


def test_training_goes_on_while_a_checkpoint_is_written_and_it_holds_what_was_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = SlowDisk(monkeypatch)
    with Engine(world=World()) as engine:
        things = prepared(engine)
        checkpoints = engine.checkpoints(tmp_path)
        then = ""
        for step in train(engine, *things, 4):
            if step == 1:
                then = engine.weights_hash()
                checkpoints.save()
        assert all(name.endswith(".partial") for name in names(tmp_path))
        assert engine.weights_hash() != then
        disk.go()
        checkpoints.wait()
        checkpoints.resume()
        assert (engine.step, engine.weights_hash()) == (1, then)


def test_a_second_save_is_dropped_or_waits_as_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    disk = SlowDisk(monkeypatch)
    with Engine(world=World()) as engine:
        things = prepared(engine)
        dropping, waiting = (engine.checkpoints(tmp_path, when_busy=what) for what in ("drop", "wait"))
        for step in train(engine, *things, 3):
            if step < 3:
                assert (dropping.save() is None) == (step == 2)
            else:
                threading.Timer(0.2, disk.go).start()
                assert waiting.save() == tmp_path / "checkpoint-3"
        waiting.close()
    assert names(tmp_path) == ["checkpoint-1", "checkpoint-3"]
    assert "checkpoint-2 is dropped: the save before it is still being written" in capfd.readouterr().out


def test_no_thread_and_no_save_is_left_when_the_engine_is_closed(tmp_path: Path) -> None:
    with Engine(world=World()) as engine:
        things = prepared(engine)
        checkpoints = engine.checkpoints(tmp_path)
        next(train(engine, *things, 1))
        checkpoints.save()
    assert names(tmp_path) == ["checkpoint-1"]
    assert [thread.name for thread in threading.enumerate() if thread.name == "paceline checkpoint"] == []


def dies_while_saving(world: World, *, folder: str, rank: int, where: str) -> None:
    """A worker is gone in the middle of its part of the second checkpoint, or of its shards of the model."""
    weights_file.WORTH_CUTTING = 0
    with Engine(world=world, lanes=2, timeout_s=3) as engine:
        things = prepared(engine)
        checkpoints = engine.checkpoints(folder)
        for step in train(engine, *things, 2):
            if step == 2 and world.rank == rank:
                setattr(saving, where, lambda *_: os._exit(9))
            checkpoints.save(weights=True)
            if step == 1:
                checkpoints.wait()


@pytest.mark.workers
@pytest.mark.parametrize(("rank", "where"), [(1, "write_tensors"), (1, "write_shards"), (0, "write_shards")])
def test_a_worker_killed_while_it_writes_leaves_the_checkpoint_before(tmp_path: Path, rank: int, where: str) -> None:
    run_workers(dies_while_saving, 2, folder=str(tmp_path), rank=rank, where=where)
    assert [name for name in names(tmp_path) if not name.startswith(".")] == ["checkpoint-1"]
    assert Checkpoint.open(tmp_path / "checkpoint-1").verify() == []
    assert len(list((tmp_path / "checkpoint-1").glob("model-*-of-*.safetensors"))) > 1


def test_a_save_that_outlasts_the_timeout_keeps_its_snapshot_and_the_next_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = SlowDisk(monkeypatch)
    with Engine(world=World(), timeout_s=0.2) as engine:
        things = prepared(engine)
        checkpoints = engine.checkpoints(tmp_path)
        hashes_then = []
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            for _ in train(engine, *things, 2):
                hashes_then.append(engine.weights_hash())
                checkpoints.save()
        assert "worker 0 has not written the save before in 0.2 s; this one is left out" in str(seen[0].message)
        disk.go()
        for _ in range(100):
            checkpoints._saver.finish()
        checkpoints.resume()
        assert (engine.step, engine.weights_hash()) == (1, hashes_then[0])


def saves_a_set(world: World, *, folder: str) -> int:
    with Engine(world=world, lanes=2) as engine:
        things = prepared(engine)
        checkpoints = engine.checkpoints(folder)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            for _ in train(engine, *things, 2):
                assert checkpoints.save({"seen": {1, 2}}) is None
        told = [str(w.message) for w in seen]
        assert all("'extra/seen' is a set" in text for text in told), told
        return len(told)


@pytest.mark.workers
def test_an_extra_that_cannot_be_saved_is_a_warning_of_the_main_worker_and_all_go_on(tmp_path: Path) -> None:
    results = run_workers(saves_a_set, 2, folder=str(tmp_path))
    assert [(result.value, result.error) for result in results] == [(2, None), (0, None)]


def loads_at_once(world: World, *, folder: str) -> str:
    from paceline.engine import checkpoints as saver

    original = saver.complete

    def slow(*args: Any, **options: Any) -> None:
        time.sleep(0.3)
        original(*args, **options)

    saver.complete = slow
    with Engine(world=world, lanes=2) as engine:
        things = prepared(engine)
        checkpoints = engine.checkpoints(folder)
        next(train(engine, *things, 1))
        path = checkpoints.save()
        assert path is not None
        checkpoints.load_weights(path)
        return engine.weights_hash()


@pytest.mark.workers
def test_a_checkpoint_can_be_loaded_right_after_it_was_asked_for(tmp_path: Path) -> None:
    assert len(hashes(run_workers(loads_at_once, 2, folder=str(tmp_path)))) == 1


@pytest.mark.parametrize("asynchronous", [True, False])
def test_scores_may_be_tensors_and_nan_is_never_the_best(tmp_path: Path, asynchronous: bool) -> None:
    with Engine(world=World()) as engine:
        things = prepared(engine)
        checkpoints = engine.checkpoints(tmp_path, asynchronous=asynchronous)
        scores = (float("nan"), torch.tensor(0.9), 0.5)
        for _, score in zip(train(engine, *things, 3), scores, strict=True):
            checkpoints.save(score=score)  # type: ignore[arg-type]
        assert checkpoints.best == tmp_path / "checkpoint-2"


# -- bad input ---------------------------------------------------------------------------------------------------------


def test_a_checkpoint_of_another_model_is_named_and_nothing_is_changed(tmp_path: Path) -> None:
    run(tmp_path, 1, save_at={1: None})
    with Engine(world=World()) as engine:
        prepared(engine, width=50)
        before = engine.weights_hash()
        with pytest.raises(
            CheckpointError, match=r"of another model: '0\.weight' is \(40, 8\) there and \(50, 8\) here"
        ):
            engine.checkpoints(tmp_path).resume()
        assert (engine.weights_hash(), engine.step) == (before, 0)


def test_a_model_with_other_names_is_told_both_ways(tmp_path: Path) -> None:
    run(tmp_path, 1, save_at={1: None})
    with Engine(world=World()) as engine:
        model = nn.Linear(8, 1)
        data = TensorDataset(torch.randn(40, 8), torch.randn(40, 1))
        engine.prepare(model, torch.optim.AdamW(model.parameters()), DataLoader(data, batch_size=4, shuffle=True))
        with pytest.raises(
            CheckpointError, match=r"another model: it has no 'bias'; the model has no '0\.bias' and 4 more"
        ):
            engine.load_state(tmp_path / "checkpoint-1")


def test_another_optimizer_is_named(tmp_path: Path) -> None:
    run(tmp_path, 1, save_at={1: None})
    with Engine(world=World()) as engine:
        model = nn.Sequential(nn.Linear(8, 40), nn.ReLU(), nn.Linear(40, 1))
        data = TensorDataset(torch.randn(40, 8), torch.randn(40, 1))
        engine.prepare(model, torch.optim.SGD(model.parameters()), DataLoader(data, batch_size=4, shuffle=True))
        with pytest.raises(CheckpointError, match=r"is of another optimizer: AdamW there, SGD here"):
            engine.load_state(tmp_path / "checkpoint-1")


def test_a_run_folder_given_as_a_checkpoint_is_told(tmp_path: Path) -> None:
    run(tmp_path, 2, save_at={1: None, 2: None})
    with Engine(world=World()) as engine:
        prepared(engine)
        with pytest.raises(CheckpointError, match=r"is a folder of checkpoints; give one of them, the newest is .*-2"):
            engine.load_state(tmp_path)


@pytest.mark.parametrize(
    ("options", "told"),
    [({"keep": 0}, "keep=0.*at least the newest"), ({"when_busy": "skip"}, "'skip' is not known; choose wait or drop")],
)
def test_options_without_sense_are_refused(tmp_path: Path, options: dict[str, Any], told: str) -> None:
    with Engine(world=World()) as engine, pytest.raises(ConfigError, match=told):
        engine.checkpoints(tmp_path, **options)


@pytest.mark.workers
def test_all_workers_get_whole_weights(tmp_path: Path) -> None:
    found = [result.value for result in run_workers(full_weights, 2)]
    assert found[0] == found[1]
    assert set(found[0]) == {"0.weight", "0.bias", "2.weight", "2.bias"}


def full_weights(world: World) -> dict[str, Any]:
    with Engine(world=world, lanes=2, strategy="fsdp") as engine:
        next(train(engine, *prepared(engine), 1))
        return {name: value.tolist() for name, value in engine.state_dict().items()}


class Table:
    """Something of the script's own with a state, as an average of the weights is."""

    def __init__(self) -> None:
        self.values = torch.zeros(0)

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values, "count": torch.tensor(3), "none": torch.zeros(0)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = state["values"]


def saves_large_tensors(world: World, folder: str, strategy: str) -> float:
    """Of `extra`, and of what was registered; the tensors that come back, added up."""
    with Engine(world=world, lanes=4, strategy=strategy) as engine:
        prepared(engine)
        table = Table()
        engine.register_for_checkpointing(table)
        checkpoints = engine.checkpoints(folder)
        table.values = torch.arange(5000.0)
        checkpoints.save({"large": torch.ones(70, 70), "nested": (1, [torch.full((9000,), 0.5)])})
        checkpoints.wait()
        table.values = torch.zeros(0)
        extra = checkpoints.resume()
        assert extra["nested"][0] == 1
        return float(table.values.sum() + extra["large"].sum() + extra["nested"][1][0].sum())


@pytest.mark.workers
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_large_tensors_of_extra_and_of_what_is_registered_are_saved_by_several_workers(
    tmp_path: Path, strategy: str
) -> None:
    results = run_workers(saves_large_tensors, 3, folder=str(tmp_path), strategy=strategy)
    wanted = sum(range(5000)) + 70 * 70 + 4500
    assert [(result.value, result.error) for result in results] == 3 * [(wanted, None)]


class Counts(torch.optim.SGD):
    """In an attribute of its own, which no state_dict of torch has."""

    def __init__(self, parameters: Any, base: float) -> None:
        super().__init__(parameters, lr=0.1)
        self.made, self.base = 0, base

    def step(self, closure: Any = None) -> Any:
        self.made += 1
        for group in self.param_groups:
            group["lr"] = 0.1 * self.base**self.made
        return super().step(closure)


def counted(world: World, *, folder: str, until: int, base: float, strategy: str, save: bool = False) -> str:
    with Engine(world=world, lanes=2, threads=1, strategy=strategy) as engine:
        model = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 1))
        data = TensorDataset(torch.randn(40, 8), torch.randn(40, 1))
        things = engine.prepare(model, Counts(model.parameters(), base), DataLoader(data, batch_size=4))
        if not save and Path(folder).exists():
            engine.load_state(folder)
        for _ in train(engine, *things, until):
            pass
        if save:
            engine.save_state(folder)
        assert (things[1].made, things[1].base) == (until, base)
        return engine.weights_hash()


@pytest.mark.workers
@pytest.mark.parametrize("strategy", ["ddp", "zero2", "fsdp"])
def test_what_an_optimizer_counts_in_an_attribute_goes_on(tmp_path: Path, strategy: str) -> None:
    how: dict[str, Any] = {"folder": str(tmp_path / "state"), "base": 0.8}
    whole = hashes(run_workers(counted, 2, until=9, strategy=strategy, **how))
    run_workers(counted, 1, until=4, strategy="ddp", save=True, **how)
    assert hashes(run_workers(counted, 2, until=9, strategy=strategy, **how)) == whole
    assert len(hashes(run_workers(counted, 2, until=9, strategy=strategy, **{**how, "base": 0.7}))) == 1  # the script's
