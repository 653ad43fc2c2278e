"""Small jobs for the tests of the Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from paceline import Trainer, TrainerCallback, TrainingArguments
from paceline.world.world import World


class Classifier(nn.Module):
    """Dropout and a norm, so that random numbers and buffers count; returns its loss and logits as transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 16)
        self.norm = nn.LayerNorm(16)
        self.dropout = nn.Dropout(0.2)
        self.outer = nn.Linear(16, 3)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.outer(self.dropout(F.relu(self.norm(self.inner(x)))))
        return {"logits": logits} if labels is None else {"loss": F.cross_entropy(logits, labels), "logits": logits}


class Naming(Classifier):
    """Its predictions have a text for each sample."""

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Any]:
        out: dict[str, Any] = super().forward(x, labels)
        return out | {"names": [f"class {int(row.argmax())}" for row in out["logits"]]}


class Samples(Dataset[dict[str, Any]]):
    """Samples by name, as a Hugging Face dataset gives them; `number` is a column that no model takes."""

    def __init__(self, count: int, seed: int = 1) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._x = torch.randn(count, 8, generator=generator)
        self._labels = torch.randint(3, (count,), generator=generator)

    def __len__(self) -> int:
        return len(self._x)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": self._x[index], "label": int(self._labels[index]), "number": index}


def vectors(count: int = 24) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(count, 8, generator=generator), torch.randint(3, (count,), generator=generator))


def make_trainer(
    folder: Path | str, world: World | None = None, kind: type[Trainer] = Trainer, **given: Any
) -> Trainer:
    """A Trainer of the classifier; what is no argument of it is a training argument."""
    own = ("model_init", "train_dataset", "eval_dataset", "callbacks", "compute_metrics", "optimizers", "model")
    parts = {name: given.pop(name) for name in own if name in given}
    settings = {
        "logging_steps": 2,
        "save_strategy": "no",
        "max_steps": 6,
        "use_cpu": True,
        "learning_rate": 0.01,
        "threads": 1,
    }
    arguments = TrainingArguments(str(folder), **(settings | {"per_device_train_batch_size": 2} | given))
    defaults = {"model_init": Classifier, "train_dataset": Samples(24), "eval_dataset": Samples(11, seed=2)}
    if "model" in parts:
        del defaults["model_init"]
    return kind(args=arguments, world=world, **(defaults | parts))


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


class StopAt(TrainerCallback):
    """Ends training after a checkpoint."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        control.should_training_stop = state.global_step == self.step


def accuracy(prediction: Any) -> dict[str, float]:
    logits, labels = prediction
    return {"accuracy": float((logits.argmax(-1) == labels).mean())}
