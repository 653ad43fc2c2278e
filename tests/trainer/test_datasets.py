"""Datasets of Hugging Face, with random access and streamed, in a plain loop and in the Trainer: one hash each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

pytest.importorskip("datasets")

from paceline import Engine, Trainer, TrainingArguments, World
from tests.trainer.jobs import Classifier
from tests.workers import Result, hashes, run_workers

pytestmark = pytest.mark.workers
ROWS = 37  # the last step of an epoch is a short one
KINDS = ["random access", "mapped", "stream", "shuffled stream", "stream of one shard"]


def larger(row: dict[str, Any]) -> dict[str, Any]:
    return {"x": [2 * value for value in row["x"]]}


def made(kind: str) -> Any:
    import datasets

    datasets.disable_progress_bars()
    generator = torch.Generator().manual_seed(1)
    points, labels = torch.randn(ROWS, 8, generator=generator), torch.randint(3, (ROWS,), generator=generator)
    whole = datasets.Dataset.from_dict({"x": points.tolist(), "labels": labels.tolist()})
    if kind == "mapped":
        whole = whole.map(larger)
    if "stream" in kind:
        whole = whole.to_iterable_dataset(num_shards=1 if "one shard" in kind else 8)
        whole = whole.map(larger)
    if "shuffled" in kind:
        whole = whole.shuffle(seed=3, buffer_size=10)
    return whole.with_format("torch")


def trains(world: World, *, kind: str, processes: int = 0) -> str:
    with Engine(world=world, lanes=4) as engine:
        model, order = Classifier(), {} if "stream" in kind else {"shuffle": True}
        loader = DataLoader(made(kind), batch_size=2, num_workers=processes, **order)
        model, optimizer, loader = engine.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01), loader)
        for _ in range(2):
            for batch in loader:
                engine.backward(model(**batch)["loss"])
                optimizer.step()
                optimizer.zero_grad()
        return engine.weights_hash()


def trains_with_trainer(world: World, *, kind: str, folder: str) -> str:
    arguments = TrainingArguments(
        folder, max_steps=7, lanes=4, threads=1, use_cpu=True, per_device_train_batch_size=2, save_strategy="no"
    )
    trainer = Trainer(model_init=Classifier, args=arguments, train_dataset=made(kind), world=world)
    trainer.train()
    return trainer.engine.weights_hash()


def on_one_two_and_three(program: Any, **options: Any) -> list[Result]:
    alone = Result(value=program(World(), **options))
    return [alone, *(result for workers in (2, 3) for result in run_workers(program, workers, **options))]


@pytest.mark.parametrize("kind", KINDS)
def test_a_plain_loop_has_one_hash_on_any_number_of_workers(kind: str) -> None:
    assert len(hashes(on_one_two_and_three(trains, kind=kind))) == 1


@pytest.mark.slow
def test_loader_processes_read_a_stream_with_one_hash() -> None:
    """They cut it into more parts, so the order is another than without."""
    found = [result for workers in (1, 2) for result in run_workers(trains, workers, kind="stream", processes=2)]
    assert len(hashes(found)) == 1


@pytest.mark.parametrize("kind", ["random access", "stream"])
def test_the_trainer_has_one_hash_on_any_number_of_workers(kind: str, tmp_path: Path) -> None:
    assert len(hashes(on_one_two_and_three(trains_with_trainer, kind=kind, folder=str(tmp_path)))) == 1
