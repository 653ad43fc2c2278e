"""The Trainer in one process: it trains, measures, saves, goes on, and says what is wrong before it starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from paceline import Engine, Trainer, TrainerCallback, TrainingArguments
from paceline.errors import CheckpointError, ConfigError, NonFiniteLossError
from paceline.trainer import EarlyStoppingCallback
from paceline.trainer.schedules import get_scheduler
from tests.trainer.jobs import Classifier, Samples, accuracy, make_trainer, vectors


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


class StopAt(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        control.should_training_stop = state.global_step == self.step


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


def test_a_new_run_does_not_write_over_the_checkpoints_of_another(tmp_path: Path) -> None:
    make_trainer(tmp_path, save_strategy="steps", save_steps=3).train()
    with pytest.raises(
        ConfigError, match=r"has 2 checkpoints of another run, the newest is checkpoint-6: train\(resume"
    ):
        make_trainer(tmp_path, save_strategy="steps").train()
    make_trainer(tmp_path, save_strategy="steps", save_steps=4, overwrite_output_dir=True).train()
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-4", "checkpoint-6"]


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


def test_arguments_are_stored_with_the_run_and_printed_with_what_was_changed_marked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_trainer(tmp_path, lanes=2).train()
    stored = json.loads((tmp_path / "training_arguments.json").read_text())
    assert (stored["arguments"]["max_steps"], stored["resolved"]["lanes"]) == (6, 2)
    printed = capsys.readouterr().out
    assert "  * max_steps=6\n" in printed
    assert "adam_beta1=0.9" in printed


# -- models and batches of all kinds -----------------------------------------------------------------------------------


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)  # type: ignore[no-any-return]


class WithLoss(Plain):
    def forward(self, x: Tensor, y: Tensor) -> Any:  # type: ignore[override]
        return F.cross_entropy(self.layer(x), y)


class Answer:
    def __init__(self, loss: Tensor, logits: Tensor) -> None:
        self.loss, self.logits = loss, logits


class WithObject(Plain):
    def forward(self, x: Tensor, y: Tensor) -> Any:  # type: ignore[override]
        logits = self.layer(x)
        return Answer(F.cross_entropy(logits, y), logits)


def test_logits_and_a_loss_function_a_loss_and_an_object_with_a_loss_train_alike(tmp_path: Path) -> None:
    hashes = set()
    for number, (kind, function) in enumerate(((Plain, F.cross_entropy), (WithLoss, None), (WithObject, None))):
        arguments = TrainingArguments(str(tmp_path / str(number)), max_steps=3, use_cpu=True, save_strategy="no")
        trainer = Trainer(
            model_init=kind,
            args=arguments,
            train_dataset=vectors(),
            eval_dataset=vectors(5),
            compute_loss_func=function,
        )
        trainer.train()
        assert "eval_loss" in trainer.evaluate()
        hashes.add(trainer.engine.weights_hash())
    assert len(hashes) == 1


def test_a_model_without_a_loss_is_told_what_it_returned(tmp_path: Path) -> None:
    arguments = TrainingArguments(str(tmp_path), use_cpu=True)
    trainer = Trainer(Plain(), arguments, train_dataset=vectors().tensors[0].unbind())
    with pytest.raises(
        ConfigError, match=r"Plain returned a tensor of shape \(8, 3\), in which there is no loss; it was"
    ):
        trainer.train()


def test_label_smoothing_is_that_of_cross_entropy(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, label_smoothing_factor=0.1)
    batch = trainer._collator()([Samples(4)[i] for i in range(4)])
    trainer.model.eval()
    loss = trainer.compute_loss(trainer.model, batch)
    expected = F.cross_entropy(trainer.model(batch["x"])["logits"], batch["labels"], label_smoothing=0.1)
    torch.testing.assert_close(loss, expected)


class Words(nn.Module):
    """Sequences of different length, labels of -100 where there is nothing to learn."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.out = nn.Embedding(11, 8), nn.Linear(8, 11)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.out(self.embedding(input_ids))
        if labels is None:
            return {"logits": logits}
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def texts(count: int, longest: int = 6) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(3)
    lengths = [1 + int(torch.randint(longest, (1,), generator=generator)) for _ in range(count)]
    return [{"input_ids": torch.randint(11, (n,), generator=generator)} for n in lengths]


def padded(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
    longest = max(len(sample["input_ids"]) for sample in samples)
    ids = torch.zeros(len(samples), longest, dtype=torch.long)
    labels = torch.full_like(ids, -100)
    for row, sample in enumerate(samples):
        ids[row, : len(sample["input_ids"])] = labels[row, : len(sample["input_ids"])] = sample["input_ids"]
    return {"input_ids": ids, "labels": labels}


def test_the_gradient_is_that_of_the_mean_over_all_tokens_of_the_step(tmp_path: Path) -> None:
    data = texts(8)
    arguments = TrainingArguments(
        str(tmp_path),
        max_steps=1,
        use_cpu=True,
        per_device_train_batch_size=2,
        lanes=2,
        gradient_accumulation_steps=2,
        optim="sgd",
        learning_rate=1.0,
        lr_scheduler_type="constant",
        max_grad_norm=0,
        save_strategy="no",
    )
    trainer = Trainer(model_init=Words, args=arguments, train_dataset=data, data_collator=padded)
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    alone = Words()
    alone.load_state_dict(before)
    trainer.train()
    alone(**padded(data))["loss"].backward()
    for name, parameter in alone.named_parameters():
        torch.testing.assert_close(before[name] - parameter.grad, trainer.model.state_dict()[name])


def test_predictions_of_different_length_are_padded_with_minus_100(tmp_path: Path) -> None:
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, per_device_eval_batch_size=2)
    data = texts(5)
    found = Trainer(model_init=Words, args=arguments, data_collator=padded).predict(data)
    longest = max(len(sample["input_ids"]) for sample in data)
    assert found.predictions.shape == (5, longest, 11)
    for row, sample in zip(found.label_ids, data, strict=True):
        assert [label for label in row if label != -100] == sample["input_ids"].tolist()


def test_a_micro_batch_without_a_label_takes_no_part(tmp_path: Path) -> None:
    data = [{"input_ids": torch.tensor([1, 2])}, {"input_ids": torch.tensor([], dtype=torch.long)}] * 2

    def collate(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
        ids = torch.stack([F.pad(sample["input_ids"], (0, 2 - len(sample["input_ids"]))) for sample in samples])
        labels = torch.stack(
            [F.pad(sample["input_ids"], (0, 2 - len(sample["input_ids"])), value=-100) for sample in samples]
        )
        return {"input_ids": ids, "labels": labels}

    arguments = TrainingArguments(
        str(tmp_path), max_steps=2, use_cpu=True, per_device_train_batch_size=1, lanes=2, save_strategy="no"
    )
    trainer = Trainer(model_init=Words, args=arguments, train_dataset=data, data_collator=collate)
    output = trainer.train()
    assert np.isfinite(output.training_loss)


# -- schedules and callbacks -------------------------------------------------------------------------------------------


def test_train_again_starts_a_second_training(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    trainer.train()
    first = trainer.engine.weights_hash()
    trainer.train()
    assert trainer.state.global_step == 6
    assert trainer.engine.weights_hash() == first  # model_init made the same model again


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


def test_a_report_that_is_not_known_is_said_before_training(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"report_to='tensorbord' is not known; did you mean 'tensorboard'"):
        make_trainer(tmp_path, report_to="tensorbord")


def test_a_loss_that_is_not_finite_stops_training_and_is_named(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, learning_rate=1e30, max_grad_norm=0, optim="sgd", lr_scheduler_type="constant")
    with pytest.raises(NonFiniteLossError, match=r"the loss of step \d is (nan|inf) in lane 0"):
        trainer.train()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["ok"] is False


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


def test_early_stopping_goes_on_counting_after_a_resume(tmp_path: Path) -> None:
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


def test_gradient_checkpointing_compiling_and_fractions_of_epochs_train(tmp_path: Path) -> None:
    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)))
            self.out = nn.Linear(8, 3)

        def forward(self, x: Tensor, labels: Tensor) -> Any:
            return F.cross_entropy(self.out(self.blocks(x)), labels)

    plain = make_trainer(tmp_path / "a", model_init=Blocks, max_steps=-1, num_train_epochs=0.4)
    assert plain.train().global_step == 5  # of 12 steps an epoch
    for name, settings in (("b", {"gradient_checkpointing": True}), ("c", {"torch_compile_backend": "eager"})):
        other = make_trainer(tmp_path / name, model_init=Blocks, max_steps=5, **settings)
        other.train()
        assert other.engine.weights_hash() == plain.engine.weights_hash()


def test_tokens_are_counted_with_and_without_padding(tmp_path: Path) -> None:
    data = texts(8)
    arguments = TrainingArguments(
        str(tmp_path), max_steps=1, use_cpu=True, save_strategy="no", include_num_input_tokens_seen=True, lanes=2,
        per_device_train_batch_size=4,
    )  # fmt: skip
    trainer = Trainer(model_init=Words, args=arguments, train_dataset=data, data_collator=padded)
    trainer.train()
    assert trainer.state.num_input_tokens_seen >= sum(len(sample["input_ids"]) for sample in data)
    assert trainer.state.log_history[-1]["num_input_tokens_seen"] == trainer.state.num_input_tokens_seen


def test_samples_are_grouped_by_length_and_data_seed_changes_the_order_alone(tmp_path: Path) -> None:
    orders = []
    for settings in ({}, {"data_seed": 5}, {"train_sampling_strategy": "group_by_length"}):
        seen: list[int] = []

        def collate(samples: list[dict[str, Any]], seen: list[int] = seen) -> dict[str, Tensor]:
            seen.append(len(samples[0]["input_ids"]))
            return padded(samples)

        arguments = TrainingArguments(
            str(tmp_path / str(len(orders))), max_steps=8, use_cpu=True, save_strategy="no",
            per_device_train_batch_size=1, **settings,
        )  # fmt: skip
        Trainer(model_init=Words, args=arguments, train_dataset=texts(8), data_collator=collate).train()
        orders.append(seen)
    assert orders[0] != orders[1]
    assert sorted(orders[0]) == sorted(orders[1])


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


def test_save_only_model_saves_weights_that_nothing_resumes_from(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "save_only_model": True}
    make_trainer(tmp_path, **settings, save_total_limit=2).train()
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-4", "checkpoint-6"]
    assert [path.name for path in (tmp_path / "checkpoint-6").iterdir()] == ["model.safetensors"]
    with pytest.raises(CheckpointError, match=r"none of the 2 checkpoints in .* can be used; see above why"):
        make_trainer(tmp_path, **settings).train(resume_from_checkpoint=True)


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


def test_loss_and_optimizer_may_be_overridden(tmp_path: Path) -> None:
    class Own(Trainer):
        def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False) -> Any:  # type: ignore[override]
            outputs = model(**inputs)
            return (outputs["loss"] * 2, outputs) if return_outputs else outputs["loss"] * 2

        def create_optimizer(self) -> torch.optim.Optimizer:
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
            return self.optimizer  # type: ignore[no-any-return]

    arguments = TrainingArguments(str(tmp_path), max_steps=2, use_cpu=True, save_strategy="no", logging_steps=1)
    trainer = Own(model_init=Classifier, args=arguments, train_dataset=Samples(24), eval_dataset=Samples(5))
    plain = make_trainer(tmp_path / "plain", eval_dataset=Samples(5))
    assert trainer.evaluate()["eval_loss"] == pytest.approx(2 * plain.evaluate()["eval_loss"])
    trainer.train()
    assert type(trainer.optimizer) is torch.optim.SGD


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


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        samples = Samples(10)
        return (samples[i] for i in range(10))


def test_streams_are_trained_and_evaluated(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, train_dataset=Stream(), eval_dataset=Stream(), max_steps=7)
    assert trainer.train().global_step == 7
    assert trainer.evaluate()["eval_loss"] > 0
    with pytest.raises(ConfigError, match="a stream without a length has no epochs to count; set max_steps"):
        make_trainer(tmp_path, train_dataset=Stream(), max_steps=-1).train()


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
