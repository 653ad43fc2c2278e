"""Models, batches and losses of all kinds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from paceline import Trainer, TrainingArguments
from paceline.errors import ConfigError
from paceline.trainer.losses import LossRule
from tests.trainer.jobs import Classifier, Samples, Words, make_trainer, padded, texts, vectors


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


class Masked(nn.Module):
    """It makes the loss from its inputs where it gets no labels."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> Tensor:
        raise NotImplementedError


class OfTwo(nn.Module):
    def forward(self, ids: Tensor, token_mask: Tensor) -> Tensor:
        raise NotImplementedError


IDS, MASK = torch.ones(2, 4, dtype=torch.long), torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]])
LABELS = torch.tensor([[1, 2, -100, -100], [3, -100, -100, -100]])


@pytest.mark.parametrize(
    ("model", "batch", "options", "count"),
    [
        (Masked(), (IDS, MASK), {}, None),
        (Masked(), (IDS, MASK, LABELS), {}, 3),
        (OfTwo(), (IDS, MASK), {}, None),
        (WithLoss(), (IDS, LABELS), {}, 3),
        (WithLoss(), (IDS, MASK.bool()), {}, None),
        (WithLoss(), {"x": IDS, "labels": MASK.bool()}, {}, None),
        # These are the loss function's, or whatever a compute_loss of one's own does with them.
        (OfTwo(), (IDS, LABELS), {"loss_function": F.cross_entropy}, 3),
        (Masked(), (IDS, LABELS), {"calls_model": False}, 3),
    ],
)
def test_what_the_model_takes_for_a_mask_does_not_count_as_labels(
    model: nn.Module, batch: Any, options: dict[str, Any], count: int | None
) -> None:
    counted = LossRule(model, **options).counted(batch)
    assert (None if counted is None else counted.number()) == count


def test_batches_of_ids_and_a_mask_weigh_by_their_samples(tmp_path: Path) -> None:
    class Own(Trainer):
        def compute_loss(self, model: nn.Module, inputs: Any, *_: Any, **__: Any) -> Any:
            raise NotImplementedError

    arguments = TrainingArguments(str(tmp_path), use_cpu=True)
    assert Trainer(Masked(), arguments, train_dataset=vectors()).weight_of((IDS, MASK)) is None
    assert Own(Masked(), arguments, train_dataset=vectors()).weight_of((IDS, LABELS)) == 3


def test_label_smoothing_is_that_of_cross_entropy(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, label_smoothing_factor=0.1)
    batch = trainer._collator()([Samples(4)[i] for i in range(4)])
    trainer.model.eval()
    loss = trainer.compute_loss(trainer.model, batch)
    expected = F.cross_entropy(trainer.model(batch["x"])["logits"], batch["labels"], label_smoothing=0.1)
    torch.testing.assert_close(loss, expected)


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


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # of torch's compiler, about itself
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


def test_an_empty_training_set_and_a_wrong_column_are_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="train_dataset is empty: there is nothing to train on"):
        make_trainer(tmp_path, train_dataset=Samples(0)).train()
    wrong = [{"y": torch.zeros(8)}] * 4
    with pytest.raises(ConfigError, match=r"Classifier.forward takes x, labels.*but the dataset has y: none"):
        make_trainer(tmp_path, train_dataset=wrong).train()
