"""Going on: a run that was stopped ends as one that never was, and nothing is written over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline import Trainer, TrainerCallback
from paceline.checkpoint.retention import all_checkpoints
from paceline.errors import CheckpointError
from paceline.trainer import EarlyStoppingCallback
from tests.trainer.jobs import Classifier, StopAt, make_trainer


@pytest.mark.parametrize("stop_at", [3, 12, 17])
def test_a_run_that_goes_on_ends_with_the_bits_and_history_of_one_that_never_stopped(
    tmp_path: Path, stop_at: int
) -> None:
    settings: dict[str, Any] = {
        "max_steps": -1,
        "num_train_epochs": 2,
        "eval_strategy": "epoch",
        "save_strategy": "steps",
        "save_steps": stop_at,
        "logging_steps": 5,
    }
    whole = make_trainer(tmp_path / "whole", **settings)
    whole.train()
    first = make_trainer(tmp_path / "parts", **settings, callbacks=[StopAt(stop_at)])
    first.train()
    second = make_trainer(tmp_path / "parts", **settings)
    second.train(resume_from_checkpoint=str(tmp_path / "parts" / f"checkpoint-{stop_at}"))
    assert second.engine.weights_hash() == whole.engine.weights_hash()
    assert told(second) == told(whole)


def told(trainer: Trainer) -> list[dict[str, Any]]:
    """The history without what depends on the clock."""
    clock = ("runtime", "per_second", "_s", "_gib", "mfu")
    return [{k: v for k, v in row.items() if not k.endswith(clock)} for row in trainer.state.log_history]


def test_resume_true_without_a_checkpoint_starts_at_the_beginning_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = make_trainer(tmp_path)
    assert trainer.train(resume_from_checkpoint=True).global_step == 6
    assert f"there is no checkpoint in {tmp_path}; training starts at step 0" in capsys.readouterr().out


def test_a_new_run_does_not_write_over_the_checkpoints_of_another(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    make_trainer(tmp_path, save_strategy="steps", save_steps=3).train()
    make_trainer(tmp_path, save_strategy="steps").train()
    assert f"{tmp_path} had 2 checkpoints of another run, now checkpoint-6.abandoned" in capfd.readouterr().out
    found = sorted(path.name for path in tmp_path.glob("checkpoint-*"))
    assert found == ["checkpoint-3.abandoned", "checkpoint-6", "checkpoint-6.abandoned"]
    make_trainer(tmp_path, save_strategy="steps", save_steps=4, overwrite_output_dir=True).train()
    ours = [path.name for path in all_checkpoints(tmp_path)]
    assert ours == ["checkpoint-6", "checkpoint-4"]


def test_the_best_model_is_kept_and_loaded_at_the_end(tmp_path: Path) -> None:
    scores = iter([0.1, 0.9, 0.3])
    trainer = make_trainer(
        tmp_path,
        compute_metrics=lambda _: {"score": next(scores)},
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="steps",
        save_steps=2,
        save_total_limit=1,
        metric_for_best_model="score",
        load_best_model_at_end=True,
    )
    seen = Weights()
    trainer.add_callback(seen)
    trainer.train()
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-4")
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-4", "checkpoint-6"]
    torch.testing.assert_close(trainer.model.state_dict()["outer.bias"], seen.at[4], rtol=0, atol=0)


class Weights(TrainerCallback):
    def __init__(self) -> None:
        self.at: dict[int, Tensor] = {}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        self.at[state.global_step] = kwargs["model"].outer.bias.detach().clone()


def test_save_strategy_best_saves_only_what_is_better(tmp_path: Path) -> None:
    scores = iter([0.1, 0.05, 0.3])
    settings = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "best", "metric_for_best_model": "score"}
    make_trainer(tmp_path, compute_metrics=lambda _: {"score": next(scores)}, **settings).train()
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-6"]


def test_the_evaluation_before_the_first_step_is_neither_the_best_nor_a_plateau(tmp_path: Path) -> None:
    scores = iter([0.95, 0.5, 0.6, 0.7])
    trainer = make_trainer(
        tmp_path,
        eval_on_start=True,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="best",
        metric_for_best_model="score",
        load_best_model_at_end=True,
        lr_scheduler_type="reduce_lr_on_plateau",
        lr_scheduler_kwargs={"patience": 0, "mode": "max"},
        compute_metrics=lambda _: {"score": next(scores)},
    )
    trainer.train()
    assert [row["step"] for row in trainer.state.log_history if "eval_score" in row] == [0, 2, 4, 6]
    assert (trainer.state.best_metric, trainer.state.best_global_step) == (0.7, 6)
    assert trainer.optimizer.param_groups[0]["lr"] == 0.01


def test_a_metric_that_is_not_a_number_is_never_the_best(tmp_path: Path) -> None:
    scores = iter([float("nan"), 0.2, float("nan")])
    trainer = make_trainer(
        tmp_path,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="steps",
        save_steps=2,
        metric_for_best_model="score",
        load_best_model_at_end=True,
        compute_metrics=lambda _: {"score": next(scores)},
    )
    trainer.train()
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-4")


def test_early_stopping_goes_on_counting_after_a_resume_and_says_why_it_ends(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def job(scores: list[float], patience: int, **more: Any) -> Trainer:
        left = iter(scores)
        return make_trainer(
            tmp_path,
            max_steps=8,
            eval_strategy="steps",
            eval_steps=1,
            save_strategy="steps",
            save_steps=1,
            metric_for_best_model="score",
            compute_metrics=lambda _: {"score": next(left)},
            callbacks=[EarlyStoppingCallback(patience), *more.pop("callbacks", [])],
        )

    job([0.5, 0.4], 3, callbacks=[StopAt(2)]).train()
    resumed = job([0.3, 0.2, 0.1], 3)
    assert resumed.train(resume_from_checkpoint=True).global_step == 4
    told = "training ends early after step 4: score has not become better than 0.5 in the last 3 evaluations"
    assert told in capfd.readouterr().out


def test_save_only_model_saves_weights_that_nothing_resumes_from(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "save_only_model": True}
    make_trainer(tmp_path, **settings, save_total_limit=2).train()
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-4", "checkpoint-6"]
    names = sorted(path.name for path in (tmp_path / "checkpoint-6").iterdir())
    assert names == ["model.safetensors", "trainer_state.json"]
    with pytest.raises(CheckpointError, match=r"none of the 2 checkpoints in .* can be used; see above why"):
        make_trainer(tmp_path, **settings).train(resume_from_checkpoint=True)


@pytest.mark.parametrize("settings", [{"bf16": True}, {"dataloader_num_workers": 2}, {"optim": "adagrad"}])
def test_other_settings_train_and_go_on(tmp_path: Path, settings: dict[str, Any]) -> None:
    whole = make_trainer(tmp_path / "whole", **settings)
    whole.train()
    make_trainer(tmp_path / "parts", **settings, save_strategy="steps", save_steps=3, callbacks=[StopAt(3)]).train()
    rest = make_trainer(tmp_path / "parts", **settings)
    rest.train(resume_from_checkpoint=True)
    assert rest.engine.weights_hash() == whole.engine.weights_hash()
    assert rest.evaluate()["eval_loss"] == whole.evaluate()["eval_loss"]


def test_going_on_with_another_batch_size_has_to_be_accepted(tmp_path: Path) -> None:
    make_trainer(tmp_path, save_strategy="steps", save_steps=3, callbacks=[StopAt(3)]).train()
    with pytest.raises(CheckpointError, match="batch size was 2, is 4"):
        make_trainer(tmp_path, per_device_train_batch_size=4).train(resume_from_checkpoint=True)
    trainer = make_trainer(tmp_path, per_device_train_batch_size=4)
    assert trainer.train(resume_from_checkpoint=True, accept=["batch size"]).global_step == 6


@pytest.mark.parametrize(("size", "steps"), [(1, 9 + 6 + 12), (4, 9 + 2 + 3)])
def test_epochs_are_trained_to_their_end_with_another_batch_size(tmp_path: Path, size: int, steps: int) -> None:
    epochs: dict[str, Any] = {"max_steps": -1, "num_train_epochs": 3, "save_strategy": "steps", "logging_steps": 1}
    make_trainer(tmp_path, **epochs, lanes=2, save_steps=9, callbacks=[StopAt(9)]).train()
    epochs |= {"per_device_train_batch_size": size, "lanes": 2}
    first = make_trainer(tmp_path, **epochs, save_steps=10, callbacks=[StopAt(10)])
    first.train(resume_from_checkpoint=True, accept=["batch size"])
    assert first.state.max_steps == steps
    last = make_trainer(tmp_path, **epochs)
    assert last.train(resume_from_checkpoint=True).global_step == steps
    assert last.state.epoch == 3
    rates = [row["learning_rate"] for row in last.state.log_history if "learning_rate" in row]
    assert rates[-1] == pytest.approx(0.01 / steps)


def test_train_again_starts_a_second_training(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    trainer.train()
    first = trainer.engine.weights_hash()
    trainer.train()
    assert trainer.state.global_step == 6
    assert trainer.engine.weights_hash() == first  # model_init made the same model again


class Remembering(Classifier):
    """Its buffer grows with every batch."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.empty(0))

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        self.seen = torch.cat([self.seen, x[:, 0].detach()])
        return super().forward(x, labels)


class LoadsItself(Remembering):
    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        if "seen" in state_dict:
            self.seen = state_dict["seen"].clone()
        return super().load_state_dict(state_dict, strict, assign)


def test_a_model_that_loads_itself_may_have_buffers_that_grow(tmp_path: Path) -> None:
    given = {"save_strategy": "steps", "save_steps": 3}
    whole = make_trainer(tmp_path, model_init=LoadsItself, **given)
    whole.train()
    again = make_trainer(tmp_path, model_init=LoadsItself, **given)
    again.train(resume_from_checkpoint=tmp_path / "checkpoint-3")
    assert len(again.model.seen) == 12  # type: ignore[arg-type]
    assert again.engine.weights_hash() == whole.engine.weights_hash()
    other = make_trainer(tmp_path, model_init=Remembering, **given)
    with pytest.raises(CheckpointError, match=r"'seen' is \(6,\) there and \(0,\) here \(a model of buffers that grow"):
        other.train(resume_from_checkpoint=tmp_path / "checkpoint-3")
