"""On one worker, with the samples in order, training is that of transformers' Trainer; elsewhere, by which factor.

Skipped without accelerate, which transformers' Trainer needs.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import paceline

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")


def tiny() -> Any:
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=37,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=16,
        bos_token_id=1,
        eos_token_id=2,
    )
    return transformers.LlamaForCausalLM(config)


def texts(count: int) -> list[dict[str, Any]]:
    """Each has another number of labels, so that a mean over batches would be another than that over tokens."""
    generator = torch.Generator().manual_seed(1)
    rows = []
    for _ in range(count):
        ids = torch.randint(37, (12,), generator=generator)
        labels = ids.clone()
        labels[int(torch.randint(2, 12, (1,), generator=generator)) :] = -100
        rows.append({"input_ids": ids, "labels": labels})
    return rows


def classifier() -> Any:
    torch.manual_seed(3)
    config = transformers.BertConfig(
        vocab_size=37, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_labels=3
    )
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
    return transformers.BertForSequenceClassification(config)


def classes(count: int) -> list[dict[str, Any]]:
    return [{"input_ids": row["input_ids"], "labels": int(row["input_ids"][0]) % 3} for row in texts(count)]


def translator() -> Any:
    torch.manual_seed(3)
    config = transformers.T5Config(
        vocab_size=37,
        d_model=16,
        d_kv=8,
        d_ff=32,
        num_layers=1,
        num_heads=2,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    return transformers.T5ForConditionalGeneration(config)


def gpt2() -> Any:
    torch.manual_seed(3)
    config = transformers.GPT2Config(
        vocab_size=37, n_positions=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=2
    )
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    return transformers.GPT2LMHeadModel(config)


COMMON: dict[str, Any] = {
    "num_train_epochs": 2,
    "per_device_train_batch_size": 4,
    "logging_steps": 1,
    "eval_strategy": "steps",
    "eval_steps": 5,
    "save_strategy": "no",
    "train_sampling_strategy": "sequential",
    "learning_rate": 1e-2,
    "use_cpu": True,
    "report_to": "none",
    "disable_tqdm": True,
}


def histories(
    folder: Path, make: Callable[[], Any], samples: Callable[[int], list[dict[str, Any]]], **settings: Any
) -> list[list[dict[str, Any]]]:
    """Ours and theirs."""
    found = []
    for library in (paceline, transformers):
        arguments = library.TrainingArguments(str(folder / library.__name__), **(COMMON | settings))
        trainer = library.Trainer(make(), arguments, train_dataset=samples(40), eval_dataset=samples(10))
        trainer.train()
        found.append(trainer.state.log_history)
    return found


def column(history: list[dict[str, Any]], name: str) -> list[float]:
    return [float(row[name]) for row in history if name in row]


@pytest.mark.filterwarnings("ignore")  # theirs
@pytest.mark.parametrize(
    ("make", "samples", "settings"),
    [
        (tiny, texts, {"gradient_accumulation_steps": 3}),
        (tiny, texts, {"weight_decay": 0.1, "lr_scheduler_type": "cosine", "warmup_steps": 0.2, "max_grad_norm": 0.3}),
        (tiny, texts, {"label_smoothing_factor": 0.1, "optim": "sgd", "learning_rate": 0.5}),
        (tiny, texts, {"optim": "adafactor", "learning_rate": 1e-3}),
        (classifier, classes, {}),
        (translator, texts, {}),
    ],
)
def test_losses_rates_norms_and_evaluations_are_those_of_transformers(
    tmp_path: Path, make: Any, samples: Any, settings: dict[str, Any]
) -> None:
    ours, theirs = histories(tmp_path, make, samples, **settings)
    for name in ("loss", "learning_rate", "grad_norm", "eval_loss", "epoch"):
        assert column(ours, name) == pytest.approx(column(theirs, name), rel=1e-5), name


def full(count: int) -> list[dict[str, Any]]:
    return [{"input_ids": row["input_ids"], "labels": row["input_ids"]} for row in texts(count)]


@pytest.mark.filterwarnings("ignore")
def test_where_transformers_counts_the_label_that_the_shift_drops_ours_is_the_mean(tmp_path: Path) -> None:
    """12 labels, 11 of which are compared with something: ours is what the model itself calls its loss."""
    ours, theirs = histories(tmp_path, gpt2, full, learning_rate=0.0, max_grad_norm=0.0, eval_steps=10)
    for name in ("loss", "eval_loss"):
        assert column(ours, name) == pytest.approx([12 / 11 * loss for loss in column(theirs, name)], rel=1e-5), name
    batch = torch.stack([row["input_ids"] for row in full(4)])
    assert column(ours, "loss")[0] == pytest.approx(float(gpt2()(input_ids=batch, labels=batch).loss), rel=1e-5)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("make", "samples"), [(classifier, classes), (translator, full)])
def test_where_transformers_adds_the_means_of_micro_batches_ours_is_their_mean(
    tmp_path: Path, make: Any, samples: Any
) -> None:
    """The forward of a classifier or of T5 takes num_items_in_batch among its **kwargs and does nothing with it."""
    settings: dict[str, Any] = {"gradient_accumulation_steps": 2, "learning_rate": 0.0, "max_grad_norm": 0.0}
    ours, theirs = histories(tmp_path, make, samples, **settings, eval_strategy="no")
    assert column(theirs, "loss") == pytest.approx([2 * loss for loss in column(ours, "loss")], rel=1e-5)
    batch = {name: torch.stack([torch.as_tensor(row[name]) for row in samples(8)]) for name in samples(1)[0]}
    assert column(ours, "loss")[0] == pytest.approx(float(make()(**batch).loss), rel=1e-5)


class Line(nn.Module):
    """A plain module, whose loss is a mean that knows nothing of other micro-batches."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(1, 1)
        nn.init.zeros_(self.inner.weight)
        nn.init.zeros_(self.inner.bias)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.mse_loss(self.inner(x), labels).reshape(1)


def points(count: int) -> list[dict[str, Any]]:
    return [{"x": torch.ones(1), "labels": torch.tensor([float(number)])} for number in range(10)]


@pytest.mark.filterwarnings("ignore")
def test_a_short_micro_batch_counts_by_its_samples_where_transformers_counts_it_as_a_whole_one(tmp_path: Path) -> None:
    """10 samples in micro-batches of 4, 4 and 2; the loss of sample n is n²."""
    settings: dict[str, Any] = {"gradient_accumulation_steps": 3, "num_train_epochs": 1, "learning_rate": 0.0}
    ours, theirs = histories(tmp_path, Line, points, **settings, eval_strategy="no", max_grad_norm=0.0)
    assert column(ours, "loss") == pytest.approx([sum(n * n for n in range(10)) / 10])
    assert column(theirs, "loss") == pytest.approx(
        [((0 + 1 + 4 + 9) / 4 + (16 + 25 + 36 + 49) / 4 + (64 + 81) / 2) / 3]
    )
