"""A loader of one's own, which is no DataLoader: every worker reads it, and keeps its lanes' batches."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from paceline import Trainer
from paceline.world.world import World
from tests.trainer.jobs import accuracy, make_trainer
from tests.workers import Result, run_workers


class Chained:
    """The batches of several loaders, one loader after another."""

    def __init__(self, *loaders: DataLoader[Any]) -> None:
        self._loaders = loaders

    def __len__(self) -> int:
        return sum(map(len, self._loaders))

    def __iter__(self) -> Iterator[Any]:
        for loader in self._loaders:
            yield from loader


class ChainedTrainer(Trainer):
    def get_train_dataloader(self) -> Any:
        return Chained(super().get_train_dataloader(), super().get_train_dataloader())

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        return Chained(super().get_eval_dataloader(eval_dataset), super().get_eval_dataloader(eval_dataset))


JOB: dict[str, Any] = {
    "max_steps": -1,
    "num_train_epochs": 2,
    "eval_strategy": "epoch",
    "save_strategy": "epoch",
    "compute_metrics": accuracy,
}


def train(world: World, folder: Path, resume: bool = False, kind: type[Trainer] = ChainedTrainer) -> dict[str, Any]:
    trainer = make_trainer(folder, world, kind, lanes=6, **JOB)
    trainer.train(resume_from_checkpoint=folder / "checkpoint-4" if resume else None)
    rows = [row for row in trainer.state.log_history if "eval_loss" in row]
    told = [[row["epoch"], row["eval_loss"], row["eval_accuracy"]] for row in rows]
    return {"hash": trainer.engine.weights_hash(), "steps": trainer.state.global_step, "told": told}


def one_value(results: list[Result]) -> Any:
    values = [result.value for result in results]
    assert None not in values, [result.error for result in results]
    assert all(value == values[0] for value in values)
    return values[0]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("alone")
    return folder, one_value(run_workers(train, 1, folder=folder))


@pytest.mark.workers
@pytest.mark.parametrize("workers", [2, 3])
def test_it_gives_the_same_at_any_number_of_workers(tmp_path: Path, alone: tuple[Path, Any], workers: int) -> None:
    assert alone[1]["steps"] == 8  # two loaders of 12 batches, 6 lanes, two epochs
    assert [row[0] for row in alone[1]["told"]] == [1.0, 2.0]
    assert one_value(run_workers(train, workers, folder=tmp_path)) == alone[1]


@pytest.mark.workers
@pytest.mark.filterwarnings("ignore:.*read again")
def test_it_goes_on_where_it_was(alone: tuple[Path, Any]) -> None:
    assert one_value(run_workers(train, 1, folder=alone[0], resume=True))["hash"] == alone[1]["hash"]


class Differing(Trainer):
    def get_train_dataloader(self) -> Any:
        rank = self.args.process_index
        return [{"x": torch.full((2, 8), float(rank + n)), "labels": torch.tensor([0, 1])} for n in range(8)]


@pytest.mark.workers
def test_workers_that_read_other_batches_are_told(tmp_path: Path) -> None:
    results = run_workers(train, 2, folder=tmp_path, kind=Differing)
    assert all("gives worker 1 other samples than worker 0" in str(result.error) for result in results), [
        result.error for result in results
    ]


class Line(nn.Module):
    """Its labels are no whole numbers, so a batch counts by its samples."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.inner(x).squeeze(1) - y).square().mean()


def test_a_short_batch_counts_by_its_samples(tmp_path: Path) -> None:
    data = TensorDataset(torch.randn(10, 2), torch.randn(10))

    class Own(Trainer):
        def get_train_dataloader(self) -> Any:
            return list(DataLoader(data, batch_size=4))

    given: dict[str, Any] = {"max_steps": 1, "gradient_accumulation_steps": 3, "logging_steps": 1, "model_init": Line}
    own = make_trainer(tmp_path / "a", kind=Own, eval_dataset=None, **given)
    plain = make_trainer(
        tmp_path / "b",
        train_dataset=data,
        eval_dataset=None,
        train_sampling_strategy="sequential",
        **(given | {"per_device_train_batch_size": 4}),
    )
    own.train()
    plain.train()
    losses = [trainer.state.log_history[0]["loss"] for trainer in (own, plain)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)  # of the mean over 10 samples, in another order of division
    norms = [trainer.state.log_history[0]["grad_norm"] for trainer in (own, plain)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)
