"""Arguments with transformers' meaning around a training: messages, memory, Accelerate's batches, the Hub."""

from __future__ import annotations

import dataclasses
import logging
import mmap
import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from paceline import TrainingArguments
from paceline.errors import ConfigError, LoopError, NonFiniteLossError
from paceline.trainer import Trainer
from paceline.trainer.evaluation import Rows, packed, unpacked
from paceline.world import messages
from tests.trainer.jobs import Classifier, Naming, Samples, accuracy, make_trainer

# -- accelerator_config ------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class LikeAccelerates:
    split_batches: bool = True
    gradient_accumulation_kwargs: dict[str, Any] | None = None


@pytest.mark.parametrize("as_file", [False, True])
def test_split_batches_shares_the_batch_among_lanes(tmp_path: Path, as_file: bool) -> None:
    config: Any = LikeAccelerates()
    if as_file:
        config = tmp_path / "accelerator.json"
        config.write_text('{"split_batches": true}')
    sizes = {"per_device_train_batch_size": 6, "per_device_eval_batch_size": 9}
    split = make_trainer(tmp_path / "a", lanes=3, accelerator_config=config, **sizes)
    plain = make_trainer(tmp_path / "b", lanes=3, per_device_train_batch_size=2)
    split.train()
    plain.train()
    assert split.engine.weights_hash() == plain.engine.weights_hash()
    assert split.get_eval_dataloader().batch_size == 3
    assert (split.accelerator.split_batches, plain.accelerator.split_batches) == (True, False)


def test_split_batches_that_do_not_come_out_even_are_refused(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, lanes=3, per_device_train_batch_size=4, accelerator_config={"split_batches": True})
    with pytest.raises(ConfigError, match="shares a batch of 4 among 3 lanes"):
        trainer.train()


def test_num_steps_is_gradient_accumulation(tmp_path: Path) -> None:
    config = {"gradient_accumulation_kwargs": {"num_steps": 3}}
    given = make_trainer(tmp_path / "a", accelerator_config=config)
    plain = make_trainer(tmp_path / "b", gradient_accumulation_steps=3)
    assert given.accelerator.gradient_state.plugin_kwargs == {"num_steps": 3}
    given.train()
    plain.train()
    assert given.engine.weights_hash() == plain.engine.weights_hash()
    with pytest.raises(ConfigError, match="gradient_accumulation_steps=2 is too; say it once"):
        make_trainer(tmp_path / "c", accelerator_config=config, gradient_accumulation_steps=2)


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"use_configured_state": True}, "there is no state of Accelerate; make an Accelerator"),
        ({"split_batch": True}, "accelerator_config has no 'split_batch'; it has split_batches"),
        ({"even_batches": "maybe"}, "even_batches='maybe': expected true or false"),
        ({"gradient_accumulation_kwargs": {"steps": 2}}, "has no 'steps'; it has num_steps"),
        ({"gradient_accumulation_kwargs": {"num_steps": 0}}, "num_steps=0: expected a whole number from 1 on"),
    ],
)
def test_what_accelerate_has_and_nothing_here_does_is_refused(config: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        TrainingArguments(accelerator_config=config)


def test_a_state_of_accelerates_has_to_be_of_this_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"num_processes": 1, "process_index": 0}
    state = types.SimpleNamespace(PartialState=types.SimpleNamespace(_shared_state=found))
    monkeypatch.setitem(sys.modules, "accelerate.state", state)
    config = {"use_configured_state": True}
    make_trainer(tmp_path, accelerator_config=config)
    found["num_processes"] = 4
    with pytest.raises(ConfigError, match="Accelerate's state is of process 0 of 4, and this is worker 0 of 1"):
        make_trainer(tmp_path, accelerator_config=config)


def test_drop_last_leaves_a_short_batch_out_of_an_evaluation_and_says_so(tmp_path: Path) -> None:
    given: dict[str, Any] = {"dataloader_drop_last": True, "lanes": 2}
    trainer = make_trainer(tmp_path, per_device_eval_batch_size=4, **given)
    assert trainer.get_train_dataloader().total_batch_size == 4  # type: ignore[attr-defined]
    with pytest.warns(UserWarning, match="dataloader_drop_last leaves the last 3 of 11 samples out of test_dataset"):
        assert len(trainer.predict(Samples(11)).predictions) == 8
    trainer = make_trainer(tmp_path, per_device_eval_batch_size=16, **given)
    with pytest.raises(ConfigError, match="eval_dataset has 11 samples, no batch of 16, and dataloader_drop_last"):
        trainer.evaluate()


def test_a_class_is_no_config() -> None:
    with pytest.raises(NotImplementedError, match="LikeAccelerates is a class; give an object of it"):
        TrainingArguments(accelerator_config=LikeAccelerates)


# -- messages ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def level() -> Iterator[None]:
    yield
    messages.obey_environment()


@pytest.mark.usefixtures("level")
def test_log_level_says_which_messages_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_trainer(tmp_path / "a").train()
    assert "Running training: 6 steps in 1 epoch\n" in capsys.readouterr().out
    make_trainer(tmp_path / "b", log_level="error", disable_tqdm=False).train()
    assert capsys.readouterr().out == ""
    assert TrainingArguments(log_level="error").get_process_log_level() == logging.ERROR
    with pytest.raises(ConfigError, match="log_level"):
        TrainingArguments(log_level="loud")


def test_a_number_of_steps_that_is_no_whole_number_is_refused() -> None:
    for value in (1.0, "none", True):
        with pytest.raises(ConfigError, match=r"torch_empty_cache_steps=.*expected a whole number of steps or None"):
            TrainingArguments(torch_empty_cache_steps=value)
    assert TrainingArguments.from_command_line(["--torch-empty-cache-steps", "none"]).torch_empty_cache_steps is None


def test_saving_the_best_needs_a_metric() -> None:
    with pytest.raises(ConfigError, match=r"`args\.metric_for_best_model` must be provided with save_strategy='best'"):
        TrainingArguments(save_strategy="best", eval_strategy="epoch")


# -- memory ------------------------------------------------------------------------------------------------------------


class Holding(Classifier):
    """Memory that stays after the model was made, and memory that an evaluation has for a while."""

    def __init__(self) -> None:
        super().__init__()
        self.held = torch.frombuffer(mmap.mmap(-1, 2**25), dtype=torch.uint8)  # malloc might hand out freed memory
        self.held.fill_(1)


def test_memory_metrics_tell_what_a_stage_took(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, model_init=Holding, skip_memory_metrics=False)
    metrics = trainer.train().metrics
    assert metrics["init_mem_cpu_alloc_delta"] >= 2**25
    assert metrics["before_init_mem_cpu"] > 0
    assert {"train_mem_cpu_alloc_delta", "train_mem_cpu_peaked_delta"} <= metrics.keys()
    evaluated = trainer.evaluate()
    assert "eval_mem_cpu_alloc_delta" in evaluated
    assert not any(name.startswith(("init", "before_init")) for name in evaluated)
    assert "test_mem_cpu_peaked_delta" in trainer.predict(Samples(4)).metrics
    assert not [thread for thread in threading.enumerate() if thread.name == "paceline-memory-metrics"]
    without = make_trainer(tmp_path / "b", eval_strategy="epoch")
    assert not any("_mem_" in name for name in without.train().metrics | without.evaluate())


# -- where a number is lost --------------------------------------------------------------------------------------------


class Overflowing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.act, self.outer = nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 3)
        nn.init.constant_(self.inner.weight, 1e38)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.outer(self.act(self.inner(x * 1e3)))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def test_debug_names_the_module_in_which_a_number_is_lost(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, model_init=Overflowing, debug="underflow_overflow")
    with pytest.raises(
        NonFiniteLossError, match=r"the output of inner \(Linear\) has \d+ values that are NaN or infin"
    ):
        trainer.train()
    assert not any(module._forward_hooks for module in trainer.model.modules())
    assert TrainingArguments(debug=None).debug == []
    with pytest.raises(ConfigError, match="debug='tpu_metrics_debug' is not known here; choose one of underflow_over"):
        TrainingArguments(debug="tpu_metrics_debug")


def test_debug_changes_no_bit(tmp_path: Path) -> None:
    trainers = [make_trainer(tmp_path / name, debug=name) for name in ("", "underflow_overflow")]
    for trainer in trainers:
        trainer.train()
    assert trainers[0].engine.weights_hash() == trainers[1].engine.weights_hash()


# -- objects among predictions -----------------------------------------------------------------------------------------


def test_rows_come_back_as_they_were() -> None:
    rows = Rows([None, "Zürich", {"a": [1, 2.5, float("inf")]}, [], torch.tensor([[1.5, -2.0]]), np.int64(7), True])
    found = unpacked(packed(rows, torch.device("cpu"), -100))
    assert found[:4] == rows[:4]
    assert found[5:] == [7, True]
    assert found[4].dtype == np.float32
    np.testing.assert_array_equal(found[4], [[1.5, -2.0]])
    with pytest.raises(LoopError, match="a slice is among the predictions or labels"):
        packed(Rows([slice(1)]), torch.device("cpu"), -100)


# -- activation checkpointing by the model itself ----------------------------------------------------------------------


class ByItself(Classifier):
    supports_gradient_checkpointing = True
    how: dict[str, Any] | None = None

    def gradient_checkpointing_enable(self, how: dict[str, Any]) -> None:
        self.how = how


def test_a_model_without_blocks_checkpoints_its_activations_by_itself(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, model_init=ByItself, gradient_checkpointing=True)
    trainer.train()
    assert trainer.model.how == {"use_reentrant": False}
    with pytest.raises(ConfigError, match="the model has no blocks"):
        make_trainer(tmp_path / "b", gradient_checkpointing=True).train()


# -- the Hub -----------------------------------------------------------------------------------------------------------


def test_save_model_uploads_with_hub_strategy_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[str | None] = []
    monkeypatch.setattr(Trainer, "push_to_hub", lambda self, commit_message: sent.append(commit_message))
    trainer = make_trainer(tmp_path, push_to_hub=True, hub_strategy="end", save_strategy="steps", save_steps=3)
    trainer.train()
    assert sent == []
    trainer.save_model()
    assert sent == ["Model save"]
    with pytest.raises(
        ConfigError, match="hub_strategy='every_save': nothing is uploaded during a training; set hub_str"
    ):
        TrainingArguments(push_to_hub=True)
    assert TrainingArguments(hub_strategy="checkpoint").hub_strategy.value == "checkpoint"


def test_accuracy_over_lists_of_texts(tmp_path: Path) -> None:
    """One worker; tests/trainer/test_workers.py has several."""
    seen: list[Any] = []

    def metrics(given: Any) -> dict[str, float]:
        seen.append(given.predictions)
        return accuracy((given.predictions[0], given.label_ids))

    trainer = make_trainer(
        tmp_path, model_init=Naming, eval_use_gather_object=True, compute_metrics=metrics, per_device_eval_batch_size=4
    )
    trainer.evaluate()
    logits, names = seen[0]
    assert len(logits) == len(names) == 11
    assert names == [f"class {row.argmax()}" for row in logits]
