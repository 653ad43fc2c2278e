"""On one worker, with the samples in order, training is that of transformers' Trainer; skipped without accelerate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

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


@pytest.mark.filterwarnings("ignore")  # theirs
@pytest.mark.parametrize(
    "settings",
    [
        {"gradient_accumulation_steps": 3},
        {"weight_decay": 0.1, "lr_scheduler_type": "cosine", "warmup_steps": 0.2, "max_grad_norm": 0.3},
        {"label_smoothing_factor": 0.1, "optim": "sgd", "learning_rate": 0.5},
    ],
)
def test_losses_rates_norms_and_evaluations_are_those_of_transformers(tmp_path: Path, settings: dict[str, Any]) -> None:
    common: dict[str, Any] = {
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
    histories = []
    for library in (paceline, transformers):
        arguments = library.TrainingArguments(str(tmp_path / library.__name__), **(common | settings))
        trainer = library.Trainer(tiny(), arguments, train_dataset=texts(40), eval_dataset=texts(10))
        trainer.train()
        histories.append(trainer.state.log_history)
    for name in ("loss", "learning_rate", "grad_norm", "eval_loss", "epoch"):
        ours, theirs = ([float(row[name]) for row in history if name in row] for history in histories)
        assert ours == pytest.approx(theirs, rel=1e-5), name
