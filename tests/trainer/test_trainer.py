"""The Trainer in one process: it trains, measures, saves, goes on, and says what is wrong before it starts."""

from __future__ import annotations

import gc
import json
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader

from paceline import Engine, Trainer, TrainerCallback, TrainingArguments
from paceline.errors import ConfigError, NonFiniteLossError
from paceline.tracking.json_lines import rows
from paceline.trainer.optimization import get_scheduler
from tests.trainer.jobs import Classifier, Samples, accuracy, make_trainer


def test_trainer_gives_the_bits_of_the_bare_engine_loop(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, gradient_accumulation_steps=2, warmup_steps=2)
    trainer.train()
    with Engine(seed=42, accumulate=2, threads=1, device="cpu") as engine:
        model = Classifier()
        optimizer = torch.optim.AdamW(groups_of(model), lr=0.01, fused=True)
        scheduler = get_scheduler("linear", optimizer, 2, 6)
        loader = DataLoader(Samples(24), batch_size=2, shuffle=True, collate_fn=trainer._collator())
        *_, loader = engine.prepare(model, optimizer, scheduler, loader)
        for batch in loader:
            if engine.step == 5:
                engine.stop()
            engine.backward(model(**batch)["loss"])
            engine.clip_grad_norm_(1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        assert trainer.engine.weights_hash() == engine.weights_hash()


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    decays = [p for name, p in model.named_parameters() if name in ("inner.weight", "outer.weight")]
    others = [p for name, p in model.named_parameters() if name not in ("inner.weight", "outer.weight")]
    return [{"params": decays, "weight_decay": 0.0}, {"params": others, "weight_decay": 0.0}]


def test_history_has_losses_metrics_and_the_epoch(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, eval_strategy="steps", eval_steps=3, compute_metrics=accuracy)
    output = trainer.train()
    logged = [row["step"] for row in trainer.state.log_history if "loss" in row]
    evaluated = [row["step"] for row in trainer.state.log_history if "eval_loss" in row]
    assert (logged, evaluated) == ([2, 4, 6], [3, 6])
    assert output.global_step == 6
    assert trainer.state.epoch == 0.5
    row = next(row for row in trainer.state.log_history if "eval_loss" in row)
    assert {"eval_loss", "eval_accuracy", "eval_runtime", "epoch", "step"} <= set(row)


def test_evaluation_loss_is_the_mean_over_all_samples(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, per_device_eval_batch_size=4)
    metrics = trainer.evaluate()
    samples = Samples(11, seed=2)
    x = torch.stack([samples[i]["x"] for i in range(11)])
    labels = torch.tensor([samples[i]["label"] for i in range(11)])
    trainer.model.eval()
    expected = float(trainer.model(x, labels)["loss"].detach())
    assert metrics["eval_loss"] == pytest.approx(expected, rel=1e-6)


def test_predictions_come_in_the_order_of_the_dataset(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, per_device_eval_batch_size=4)
    samples = Samples(11, seed=2)
    found = trainer.predict(samples)
    trainer.model.eval()
    expected = trainer.model(torch.stack([samples[i]["x"] for i in range(11)]))["logits"].detach().numpy()
    np.testing.assert_allclose(found.predictions, expected, rtol=1e-5)
    assert found.label_ids.tolist() == [samples[i]["label"] for i in range(11)]
    assert "test_loss" in found.metrics


def test_datasets_given_to_one_call_are_let_go_and_predictions_have_their_own_loader(tmp_path: Path) -> None:
    trainer, made = make_trainer(tmp_path), list[str]()
    for kind in ("eval", "test"):
        setattr(trainer, f"get_{kind}_dataloader", noting(kind, getattr(trainer, f"get_{kind}_dataloader"), made))
    trainer.train()
    trainer.evaluate()
    trainer.evaluate()
    trainer.predict(trainer.eval_dataset)
    assert made == ["eval", "test"]
    seen = []
    for measure in (trainer.predict, trainer.evaluate, trainer.predict):
        dataset = Samples(5)
        seen.append(weakref.ref(dataset))
        measure(dataset)
        del dataset
    gc.collect()
    assert [ref() is None for ref in seen] == [True, True, False]  # callbacks may look at the last one


def noting(kind: str, make: Any, made: list[str]) -> Any:
    def noted(dataset: Any) -> Any:
        made.append(kind)
        return make(dataset)

    return noted


def test_a_metric_that_does_not_exist_is_named_with_those_that_do(tmp_path: Path) -> None:
    trainer = make_trainer(
        tmp_path, eval_strategy="steps", eval_steps=2, metric_for_best_model="f1", compute_metrics=accuracy
    )
    with pytest.raises(
        ConfigError, match=r"metric_for_best_model='f1': there is no 'eval_f1' among the metrics eval_acc"
    ):
        trainer.train()


def test_an_empty_eval_dataset_is_refused_before_training(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"eval_dataset is empty: there is nothing to evaluate"):
        make_trainer(tmp_path, eval_strategy="epoch", eval_dataset=Samples(0))
    with pytest.raises(ConfigError, match=r"eval_dataset\['small'\] is empty"):
        make_trainer(tmp_path, eval_dataset={"large": Samples(3), "small": Samples(0)})
    assert not list(tmp_path.iterdir())


def test_several_eval_datasets_are_measured_by_name(tmp_path: Path) -> None:
    metrics = make_trainer(tmp_path, eval_dataset={"a": Samples(3), "b": Samples(4, seed=5)}).evaluate()
    assert {"eval_a_loss", "eval_b_loss"} <= set(metrics)


def test_save_model_writes_one_safetensors_file_with_the_names_of_the_model(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    trainer.train()
    trainer.save_model(tmp_path / "saved")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    fresh = Classifier()
    fresh.load_state_dict(saved)
    for name, value in trainer.model.state_dict().items():
        torch.testing.assert_close(saved[name], value, rtol=0, atol=0)


def test_save_model_writes_a_model_in_channels_last(tmp_path: Path) -> None:
    model = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    make_trainer(tmp_path, model=model).save_model()
    torch.testing.assert_close(
        load_file(tmp_path / "model.safetensors")["weight"], model.weight.detach(), rtol=0, atol=0
    )


def test_arguments_are_stored_with_the_run_and_those_that_were_changed_are_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_trainer(tmp_path, lanes=2).train()
    stored = json.loads((tmp_path / "training_arguments.json").read_text())
    assert (stored["arguments"]["max_steps"], stored["resolved"]["lanes"]) == (6, 2)
    printed = capsys.readouterr().out
    assert "training arguments that differ from their defaults:\n" in printed
    assert "  max_steps=6\n" in printed
    assert "adam_beta1" not in printed


def test_reduce_on_plateau_looks_at_evaluations(tmp_path: Path) -> None:
    trainer = make_trainer(
        tmp_path,
        lr_scheduler_type="reduce_lr_on_plateau",
        lr_scheduler_kwargs={"patience": 0, "factor": 0.5},
        eval_strategy="steps",
        eval_steps=2,
        metric_for_best_model="score",
        compute_metrics=lambda _: {"score": 1.0},
        greater_is_better=False,
    )
    trainer.train()
    rates = [row["learning_rate"] for row in trainer.state.log_history if "learning_rate" in row]
    assert rates == [0.01, 0.01, 0.005]


def test_values_are_written_as_json_lines_with_speed_and_memory(tmp_path: Path) -> None:
    make_trainer(tmp_path).train()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    logged = [line for line in lines if "loss" in line]
    assert [line["step"] for line in logged] == [2, 4, 6]
    names = {"loss", "learning_rate", "grad_norm", "samples_per_second", "data_wait_s", "peak_memory_gib", "epoch"}
    assert names <= set(logged[-1])
    assert lines[-1] == {**lines[-1], "event": "end", "ok": True}


def test_an_evaluation_after_training_is_a_line_too(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    trainer.evaluate()
    assert not (tmp_path / "metrics.jsonl").exists()
    trainer.train()
    loss = trainer.evaluate()["eval_loss"]
    assert [(row["step"], row["eval_loss"]) for row in rows(tmp_path / "metrics.jsonl")[-1:]] == [(6, loss)]


def test_a_report_that_is_not_known_is_said_before_training(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"report_to='tensorbord' is not known; did you mean 'tensorboard'"):
        make_trainer(tmp_path, report_to="tensorbord")


def test_a_loss_that_is_not_finite_stops_training_and_is_named(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, learning_rate=1e30, max_grad_norm=0, optim="sgd", lr_scheduler_type="constant")
    with pytest.raises(NonFiniteLossError, match=r"the loss of step \d is (nan|inf) in lane 0"):
        trainer.train()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["ok"] is False


def test_a_run_of_epochs_that_skips_a_step_saves_and_evaluates_at_its_end(tmp_path: Path) -> None:
    class OnceNan(Classifier):
        calls = 0

        def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
            found = super().forward(x, labels)
            self.calls += self.training
            return {**found, "loss": found["loss"] * float("nan")} if self.training and self.calls == 3 else found

    trainer = make_trainer(
        tmp_path,
        model_init=OnceNan,
        max_steps=-1,
        num_train_epochs=2,
        on_nonfinite="skip",
        eval_strategy="steps",
        eval_steps=100,
        save_strategy="steps",
        save_steps=100,
    )
    with pytest.warns(UserWarning, match="the step is skipped"):
        steps = trainer.train().global_step
    assert steps == trainer.state.max_steps - 1
    assert [row["step"] for row in trainer.state.log_history if "eval_loss" in row] == [steps]
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == [f"checkpoint-{steps}"]


def test_callbacks_end_an_epoch_early_and_the_next_begins(tmp_path: Path) -> None:
    class Short(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            control.should_epoch_stop = state.global_step in (2, 5)

    epochs: list[float] = []

    class Seen(TrainerCallback):
        def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            epochs.append(state.global_step)

    trainer = make_trainer(tmp_path, max_steps=20, callbacks=[Short(), Seen()])
    trainer.train()
    assert epochs == [2, 5, 17, 20]


def test_what_is_given_to_the_trainer_wrongly_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs a model or a model_init that makes one: give one of them"):
        Trainer(args=TrainingArguments(str(tmp_path)))
    with pytest.raises(ConfigError, match=r"Trainer: 'eval_datset' is not .*did you mean 'eval_dataset'"):
        Trainer(Classifier(), eval_datset=None)
    with pytest.warns(UserWarning, match="tokenizer= is called processing_class= now"):
        assert Trainer(Classifier(), tokenizer="x").processing_class == "x"
    with pytest.raises(ConfigError, match="eval_strategy='epoch', but there is no eval_dataset to evaluate"):
        Trainer(Classifier(), TrainingArguments(str(tmp_path), eval_strategy="epoch"))
    with pytest.raises(ConfigError, match="no train_dataset to train on"):
        Trainer(Classifier(), TrainingArguments(str(tmp_path), use_cpu=True)).train()


def test_metrics_are_shown_and_saved_as_scripts_of_transformers_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = make_trainer(tmp_path)
    result = trainer.train()
    trainer.log_metrics("train", result.metrics)
    trainer.save_metrics("train", result.metrics)
    trainer.save_metrics("eval", trainer.evaluate())
    trainer.save_state()
    assert "train metrics" in capsys.readouterr().out
    together = json.loads((tmp_path / "all_results.json").read_text())
    assert {"train_loss", "eval_loss"} <= set(together)
    assert json.loads((tmp_path / "trainer_state.json").read_text())["global_step"] == 6


def test_optimizers_of_ones_own_are_used(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = Classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.1)
    trainer = make_trainer(tmp_path, model=model, optimizers=(optimizer, scheduler), logging_steps=1)
    trainer.train()
    rates = [row["learning_rate"] for row in trainer.state.log_history if "learning_rate" in row]
    assert rates == pytest.approx([0.5, 0.5, 0.05, 0.05, 0.005, 0.005])
    with pytest.raises(ConfigError, match="the optimizer given to the Trainer belongs to the first training"):
        trainer.train()
