"""The workloads are those whose figures are laid beside the peers'."""

from __future__ import annotations

import pytest
import torch

from paceline.bench import race
from paceline.bench.workloads import WORKLOADS, ReadyBatches


def test_the_plan_and_the_models_know_the_same_workloads() -> None:
    assert tuple(WORKLOADS) == race.WORKLOADS


@pytest.mark.parametrize(
    ("name", "parameters"), [("mlp25m", 25_179_136), ("gpt10m", 10_495_104), ("convnet", 1_129_514)]
)
def test_models_have_the_stated_number_of_parameters(name: str, parameters: int) -> None:
    assert sum(parameter.numel() for parameter in WORKLOADS[name].build().parameters()) == parameters


@pytest.mark.parametrize(
    ("name", "inputs", "targets", "classes"),
    [
        ("mlp25m", (32, 1024), (32,), 1024),
        ("gpt10m", (4, 128), (4, 128), 2048),
        ("convnet", (32, 3, 32, 32), (32,), 10),
    ],
)
def test_batches_and_loss_have_the_stated_shapes(
    name: str, inputs: tuple[int, ...], targets: tuple[int, ...], classes: int
) -> None:
    workload = WORKLOADS[name]
    drawn, wanted = workload.draw(workload.batch_size, seed=0)
    assert (drawn.shape, wanted.shape) == (inputs, targets)
    logits = workload.build()(drawn)
    assert logits.shape == (*targets, classes)
    assert workload.loss(logits, wanted).shape == ()


def test_all_contestants_start_from_the_same_weights() -> None:
    one, other = (WORKLOADS["convnet"].build().state_dict() for _ in range(2))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_gpt_does_not_look_ahead() -> None:
    workload = WORKLOADS["gpt10m"]
    model = workload.build().eval()
    tokens, _ = workload.draw(1, seed=0)
    changed = tokens.clone()
    changed[0, 64:] = (changed[0, 64:] + 1) % 2048
    with torch.no_grad():
        before, after = model(tokens)[0], model(changed)[0]
    assert torch.allclose(before[:64], after[:64], atol=1e-5)
    assert not torch.allclose(before[64:], after[64:], atol=1e-5)


def test_gpt_counts_tokens() -> None:
    assert (WORKLOADS["gpt10m"].units_per_sample, WORKLOADS["gpt10m"].unit) == (128, "tokens/s")


def test_the_dataset_is_as_long_as_asked_and_holds_four_batches() -> None:
    batches = list(ReadyBatches(WORKLOADS["convnet"], length=5 * 32).loader(batch_size=32))
    assert [inputs.shape for inputs, _ in batches] == [(32, 3, 32, 32)] * 5
    assert torch.equal(batches[0][0], batches[4][0])
    assert not torch.equal(batches[0][0], batches[1][0])
