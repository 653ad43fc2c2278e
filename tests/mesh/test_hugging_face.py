"""A Hugging Face Llama by the plan that it carries, with sequences that are shared as well."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import paceline
from paceline import Mesh
from paceline.world.world import World
from tests.mesh.small_llama import SmallLlama
from tests.mesh.training import Arrays, runs, worst
from tests.workers import run_workers

pytestmark = pytest.mark.workers


def gradients(world: World, mesh: Mesh | None = None) -> Arrays:
    from transformers import LlamaConfig, LlamaForCausalLM

    engine = paceline.Engine(world=world, mesh=mesh, lanes=2, threads=1, seed=1, timeout_s=40)
    shape: dict[str, Any] = {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=32, **shape))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    drawn = torch.randint(32, (4, 16), generator=torch.Generator().manual_seed(1))
    labels = drawn.clone()
    labels[0, 5:] = -100  # the parts of a sequence have different numbers of targets
    data: Any = [{"input_ids": one, "labels": its} for one, its in zip(drawn, labels, strict=True)]
    loader: Any = torch.utils.data.DataLoader(data, batch_size=2)
    model, optimizer, loader = engine.prepare(model, optimizer, loader)
    found: Arrays = {}
    for batch in loader:
        engine.backward(model(**batch, use_cache=False).loss)
        found |= {name: value.numpy() for name, value in engine.full_gradients().items()}
        optimizer.step()
    engine.weights_hash()
    engine.close()
    return found


def with_and_without_a_mesh(world: World) -> tuple[Arrays, Arrays]:
    return gradients(World()), gradients(world, Mesh(cp=2, tp=2))


def test_its_own_plan_and_shared_sequences_give_the_gradients_of_one_process() -> None:
    for alone, shared in runs(4, with_and_without_a_mesh, imports=("transformers.models.llama.modeling_llama",)):  # type: ignore[misc]
        assert worst(shared, alone) < 1e-5


class IgnoresPositions(torch.nn.Module):
    """Takes a dict of transformers, and attends over the group, but counts positions by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.llama = SmallLlama(blocks=1)

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor | None = None, **_: Any) -> torch.Tensor:
        out: torch.Tensor = self.llama(input_ids)
        return out


def refused(world: World) -> None:
    engine = paceline.Engine(world=world, mesh=Mesh(cp=2), lanes=1, threads=1, timeout_s=20)
    model = IgnoresPositions()
    data: Any = [{"input_ids": tokens, "labels": tokens} for tokens in torch.randint(32, (4, 16))]
    loader: Any = torch.utils.data.DataLoader(data, batch_size=2)
    *_, loader = engine.prepare(model, torch.optim.SGD(model.parameters(), 0.1), loader)
    next(iter(loader))


def test_a_model_that_ignores_the_positions_of_its_tokens_is_refused_before_the_first_step() -> None:
    for result in run_workers(refused, 2):
        assert "gives other values for a split sequence" in str(result.error), result.traceback
        assert "\n" not in str(result.error)
