"""The Trainer on several workers: the same weights, history and metrics as on one."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from paceline import Trainer, TrainerCallback, TrainingArguments
from paceline.checkpoint import weights_file
from paceline.checkpoint.weights_file import read_pretrained
from paceline.engine.replicas import weights_hash
from paceline.errors import CheckpointError, ConfigError
from paceline.world.world import World
from tests.trainer.jobs import Classifier, Naming, Samples, Words, accuracy, make_trainer, padded, texts
from tests.workers import Result, hashes, run_workers

pytestmark = pytest.mark.workers

JOB: dict[str, Any] = {
    "lanes": 6,
    "gradient_accumulation_steps": 2,
    "train_dataset": Samples(100),
    "per_device_train_batch_size": 1,
    "max_steps": 12,
    "threads": 1,
    "eval_strategy": "steps",
    "eval_steps": 4,
    "compute_metrics": accuracy,
}


def train(world: World, folder: Path, **more: Any) -> str:
    trainer = make_trainer(folder, world, **(JOB | more))
    trainer.train()
    return trainer.engine.weights_hash()


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The hash of one worker that was never stopped."""
    return hashes(run_workers(train, 1, folder=tmp_path_factory.mktemp("one"))).pop()


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_weights_are_those_of_one_worker(tmp_path: Path, expected: str, workers: int, strategy: str) -> None:
    assert hashes(run_workers(train, workers, folder=tmp_path, strategy=strategy)) == {expected}


@pytest.mark.parametrize("strategy", ["star", "zero1", "zero2", "fsdp", "hybrid", "parameter_server"])
def test_every_strategy_gives_them(tmp_path: Path, expected: str, strategy: str) -> None:
    assert hashes(run_workers(train, 2, folder=tmp_path, strategy=strategy, max_grad_norm=1.0)) == {expected}


class LeaveAt(TrainerCallback):
    """Ends after a step and its checkpoint, as a job does whose time is up."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        if state.global_step == self.step:
            control.should_save = control.should_training_stop = True


def go_on(world: World, folder: Path, leave_at: int, **more: Any) -> dict[str, Any]:
    trainer = make_trainer(folder, world, **(JOB | {"lanes": None} | more), callbacks=[LeaveAt(leave_at)])
    trainer.train(resume_from_checkpoint=True)
    history = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    return {"hash": trainer.engine.weights_hash(), "losses": history, "lanes": trainer.engine.config.lanes}


def test_going_on_with_2_then_1_then_3_workers_gives_the_hash_of_the_run_never_stopped(
    tmp_path: Path, expected: str
) -> None:
    first = run_workers(go_on, 2, folder=tmp_path, leave_at=3, lanes=6, strategy="zero2")
    second = run_workers(go_on, 1, folder=tmp_path, leave_at=9)
    third = run_workers(go_on, 3, folder=tmp_path, leave_at=100, strategy="fsdp")
    for results in (first, second, third):
        assert all(result.error is None for result in results), [result.error or "" for result in results]
    assert {result.value["hash"] for result in third} == {expected}
    assert third[0].value["lanes"] == 6  # on record, and not said again
    assert len(third[0].value["losses"]) == 6


class Signalled(TrainerCallback):
    """Worker 1 is told to stop, as by a scheduler whose time is up."""

    def __init__(self, world: World) -> None:
        self.tell = world.rank == world.size - 1

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        if self.tell and state.global_step == 5:
            os.kill(os.getpid(), signal.SIGTERM)


def train_until_signalled(world: World, folder: Path, again: bool, **more: Any) -> Any:
    callbacks = [] if again else [Signalled(world)]
    trainer = make_trainer(folder, world, **(JOB | more), callbacks=callbacks)
    try:
        trainer.train(resume_from_checkpoint=again)
    except SystemExit as left:
        return left.code, trainer.state.global_step
    return trainer.engine.weights_hash(), trainer.state.global_step


def test_a_signal_to_one_worker_ends_all_after_one_step_with_a_checkpoint_to_go_on_from(
    tmp_path: Path, expected: str
) -> None:
    stopped = run_workers(train_until_signalled, 2, folder=tmp_path, again=False)
    assert [result.value for result in stopped] == [(75, 6)] * 2, [result.error for result in stopped]
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-6"]
    finished = run_workers(train_until_signalled, 3, folder=tmp_path, again=True)
    assert [result.value for result in finished] == [(expected, 12)] * 3, [result.error for result in finished]


def test_a_signal_in_the_last_step_of_an_epoch_leaves_its_end_to_the_next_start(tmp_path: Path) -> None:
    job: dict[str, Any] = {"train_dataset": Samples(72), "eval_strategy": "epoch", "eval_steps": None, "again": False}
    [stopped] = run_workers(train_until_signalled, 1, folder=tmp_path, **job)
    assert stopped.value == (75, 6), stopped.traceback  # 6 lanes × 2 × 1 samples a step: 6 steps an epoch
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert not [row for row in rows if "eval_loss" in row]
    [finished] = run_workers(train_until_signalled, 1, folder=tmp_path, **(job | {"again": True}))
    assert finished.error is None, finished.traceback
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "eval_loss" in row] == [6, 12]


def predict_texts(world: World, folder: Path) -> Any:
    trainer = Trainer(
        model_init=Words,
        args=TrainingArguments(str(folder), use_cpu=True, threads=1, per_device_eval_batch_size=2, lanes=3),
        data_collator=padded,
        world=world,
    )
    found = trainer.predict(texts(7))
    return found.predictions.tolist(), found.label_ids.tolist(), found.metrics["test_loss"]


def test_predictions_of_different_length_are_the_same_at_any_number_of_workers(tmp_path: Path) -> None:
    values = [result.value for n in (1, 2, 3) for result in run_workers(predict_texts, n, folder=tmp_path)]
    assert all(value == values[0] for value in values)


def measure(world: World, folder: Path) -> Any:
    trainer = make_trainer(folder, world, per_device_eval_batch_size=2, compute_metrics=accuracy, lanes=3)
    metrics = trainer.evaluate()
    found = trainer.predict(Samples(11, seed=2))
    return metrics["eval_loss"], metrics["eval_accuracy"], found.predictions.tolist(), found.label_ids.tolist()


def test_evaluation_counts_every_sample_once_at_any_number_of_workers(tmp_path: Path) -> None:
    results = [run_workers(measure, workers, folder=tmp_path) for workers in (1, 2, 3)]
    values = [result.value for row in results for result in row]
    samples = Samples(11, seed=2)
    assert values[0][3] == [samples[i]["label"] for i in range(11)]
    assert all(value == values[0] for value in values), values


def train_unseeded(world: World, folder: Path) -> str:
    torch.seed()
    trainer = make_trainer(folder, world, model=Classifier())
    trainer.train()
    return trainer.engine.weights_hash()


def test_models_built_from_no_seed_become_worker_0s(tmp_path: Path) -> None:
    assert len(hashes(run_workers(train_unseeded, 2, folder=tmp_path))) == 1


def save(world: World, folder: Path, strategy: str, shard_bytes: int | None = None) -> str:
    trainer = make_trainer(folder, world, strategy=strategy, lanes=2, max_steps=2)
    trainer.train()
    engine = trainer.engine
    if not engine.config.strategy.entry.full_weights:
        engine.state_dict = engine._between.full_state = None  # type: ignore[method-assign, assignment]  # never whole
    if shard_bytes is not None:
        weights_file.WORTH_CUTTING = shard_bytes
    trainer.save_model()
    return trainer.engine.weights_hash()


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3", "fsdp", "hybrid", "parameter_server"])
def test_save_model_has_whole_weights_under_every_strategy(tmp_path: Path, strategy: str) -> None:
    (tmp_path / "model-00001-of-00002.safetensors").write_text("of an earlier one")
    saved = hashes(run_workers(save, 2, folder=tmp_path, strategy=strategy))
    model: nn.Module = Classifier()
    model.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert {weights_hash([model])} == saved
    assert not (tmp_path / "trainer_state.json").exists()
    assert not (tmp_path / "model-00001-of-00002.safetensors").exists()
    folders = {path.name for path in tmp_path.iterdir() if path.is_dir()}
    assert folders == {"events"}
    assert not [path for path in tmp_path.iterdir() if "partial" in path.name]


def test_a_large_model_is_saved_in_shards_that_replace_the_earlier_file(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_text("of an earlier one")
    saved = hashes(run_workers(save, 2, folder=tmp_path, strategy="fsdp", shard_bytes=1))
    assert not (tmp_path / "model.safetensors").exists()
    model: nn.Module = Classifier()
    shards = [load_file(path) for path in sorted(tmp_path.glob("model-*-of-*.safetensors"))]
    assert read_pretrained(tmp_path).keys() == {name for shard in shards for name in shard}
    model.load_state_dict({name: weight for shard in shards for name, weight in shard.items()})
    assert {weights_hash([model])} == saved


def save_where_it_cannot(world: World, folder: Path) -> str:
    trainer = make_trainer(folder, world, strategy="fsdp", lanes=2, max_steps=1)
    trainer.train()
    (folder / "file").touch()
    with pytest.raises(CheckpointError) as caught:
        trainer.save_model(folder / "file" / "model")
    return str(caught.value)


def test_a_folder_that_cannot_be_made_is_said_on_every_worker(tmp_path: Path) -> None:
    said = {result.value for result in run_workers(save_where_it_cannot, 2, folder=tmp_path)}
    assert len(said) == 1
    assert "could not be saved: Not a directory" in said.pop()


def where(world: World) -> tuple[Any, ...]:
    arguments = TrainingArguments(use_cpu=True)
    arguments._world = world
    return (
        arguments.world_size,
        arguments.process_index,
        arguments.parallel_mode.value,
        str(arguments.distributed_type),
        arguments.should_save,
    )


def test_arguments_know_who_this_worker_is() -> None:
    results: list[Result] = run_workers(where, 2)
    assert [result.value for result in results] == [
        (2, 0, "distributed", "MULTI_CPU", True),
        (2, 1, "distributed", "MULTI_CPU", False),
    ]


def first_and_then(world: World, folder: Path, *, local: bool) -> str:
    """Worker 0 comes last to it, and is first all the same; what stands in its way then does not hold up the others."""
    trainer = make_trainer(folder, world, **JOB)
    place, other = folder / "cache", folder / "other"
    if world.rank == 0:
        time.sleep(0.3)
    with trainer.args.main_process_first(local=local):
        assert place.exists() == (world.rank > 0)
        if world.rank == 0:
            time.sleep(0.1)
            place.touch()
    with contextlib.suppress(KeyError), trainer.args.main_process_first(local=local):
        if world.rank == 0:
            other.touch()
            raise KeyError
        assert other.exists()
    trainer.train()
    return trainer.engine.weights_hash()


@pytest.mark.parametrize("local", [True, False])
def test_the_main_process_goes_first_and_then_the_others(tmp_path: Path, expected: str, local: bool) -> None:
    assert hashes(run_workers(first_and_then, 3, folder=tmp_path, local=local)) == {expected}


def predict_with_names(world: World, folder: Path) -> dict[str, Any]:
    trainer = make_trainer(
        folder, world, model_init=Naming, eval_use_gather_object=True, per_device_eval_batch_size=2, lanes=6
    )
    logits, names = trainer.predict(Samples(11, seed=2)).predictions
    return {"logits": logits.tolist(), "names": names}


@pytest.mark.parametrize("workers", [2, 3])
def test_objects_among_predictions_come_in_the_order_of_the_dataset(tmp_path: Path, workers: int) -> None:
    (alone,) = run_workers(predict_with_names, 1, folder=tmp_path)
    assert len(alone.value["names"]) == 11
    assert {json.dumps(one.value) for one in run_workers(predict_with_names, workers, folder=tmp_path)} == {
        json.dumps(alone.value)
    }


def refused(world: World, folder: Path, **config: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        make_trainer(folder, world, accelerator_config=config)
    return str(caught.value)


def test_what_accelerate_does_between_processes_is_refused(tmp_path: Path) -> None:
    dispatched = run_workers(refused, 2, folder=tmp_path, dispatch_batches=True)
    assert {"each fetches its own samples" in one.value for one in dispatched} == {True}
    synced = run_workers(refused, 2, folder=tmp_path, gradient_accumulation_kwargs={"sync_each_batch": True})
    assert {"gradients travel once a step" in one.value for one in synced} == {True}
