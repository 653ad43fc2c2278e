"""Every mesh against one process: losses, every full gradient, norms; and bits along dp."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from paceline import Mesh
from paceline.strategies.ddp import Ddp
from paceline.strategies.fsdp.hybrid import HybridConfig
from paceline.world.world import World
from tests.mesh.training import Trained, first_error, runs, trained, worst
from tests.workers import run_workers

pytestmark = pytest.mark.workers

MESHES = [
    pytest.param(dp, cp, tp, id=f"dp{dp}-cp{cp}-tp{tp}", marks=[pytest.mark.smoke] if (dp, cp, tp) == (2, 1, 2) else [])
    for dp in (1, 2)
    for cp in (1, 2)
    for tp in (1, 2)
    if dp * cp * tp > 1
]


@pytest.fixture(scope="module")
def alone() -> Trained:
    (found,) = runs(1, looks=True)
    return found


@pytest.mark.parametrize(("dp", "cp", "tp"), MESHES)
def test_a_mesh_has_the_gradients_of_one_process(alone: Trained, dp: int, cp: int, tp: int) -> None:
    found = runs(dp * cp * tp, mesh=Mesh(dp=dp, cp=cp, tp=tp), looks=True)
    assert len({one.hash for one in found}) == 1
    for one in found:
        assert worst(one.gradients, alone.gradients) < 1e-5
        np.testing.assert_allclose(one.losses, alone.losses, rtol=1e-5)
        np.testing.assert_allclose(one.norms, alone.norms, rtol=1e-5)


def mutated(world: World, removed: str, **options: Any) -> Trained:
    """One reduction is left out."""
    if removed == "tensor":  # of what arrives at the input of a layer that is sharded along its output
        from torch.distributed.tensor import Partial

        reduce = Partial._reduce_value

        def in_forward_alone(self: Any, tensor: torch.Tensor, *more: Any) -> torch.Tensor:
            in_backward = torch._C._current_graph_task_id() != -1
            return tensor if in_backward else reduce(self, tensor, *more)

        Partial._reduce_value = in_forward_alone  # type: ignore[method-assign]
    else:  # over dp × cp

        class Own:
            def __init__(self, roots: dict[int, torch.Tensor]) -> None:
                self._roots = list(roots.values())

            def wait(self) -> torch.Tensor:
                return torch.stack(self._roots).sum(0)

        def send(self: Any, number: int, roots: dict[int, torch.Tensor]) -> None:
            self._roots.append(roots)
            self._pending.append(Own(roots))

        Ddp._send = send  # type: ignore[method-assign]
    return trained(world, steps=1, looks=True, **options)


@pytest.mark.parametrize(("removed", "mesh"), [("tensor", Mesh(tp=2)), ("sum", Mesh(dp=2)), ("sum", Mesh(cp=2))])
def test_the_comparison_fails_without_one_reduction(alone: Trained, removed: str, mesh: Mesh) -> None:
    results = run_workers(mutated, 2, removed=removed, mesh=mesh)
    values = [r.value for r in results if r.error is None]
    for value in values:
        assert worst(value.gradients, alone.gradients) > 1e-2
    for result in results:  # what is here by itself: replicas along dp, or whole parameters along tp, differ
        assert result.error is None or result.error.startswith("ReplicaError"), result.traceback
    assert any(r.error is not None for r in results)


@pytest.mark.parametrize(
    ("fixed", "strategies"),
    [
        (Mesh(tp=2), ("ddp", "zero2", "fsdp", "hybrid")),  # zero1: with a forward that is run again, below
        (Mesh(cp=2), ("ddp", "zero2", "fsdp", HybridConfig(shard_over=2), HybridConfig(shard_over=1))),
    ],
    ids=["tp", "cp"],
)
def test_bits_do_not_depend_on_dp_or_its_strategy(fixed: Mesh, strategies: tuple[Any, ...]) -> None:
    (reference,) = {one.hash for one in runs(2, mesh=fixed)}
    for strategy in strategies:
        found = runs(4, mesh=Mesh(dp=2, cp=fixed.cp, tp=fixed.tp), strategy=strategy)
        assert {one.hash for one in found} == {reference}, strategy


def test_a_forward_that_is_run_again_draws_the_same_masks_and_so_does_any_dp() -> None:
    model = {"blocks": 2, "dropout": 0.1}
    options = {"strategy": "zero1", "activation_checkpointing": "blocks"}
    again = {one.hash for one in runs(4, mesh=Mesh(dp=2, tp=2), model=model, **options)}
    once = {one.hash for one in runs(2, mesh=Mesh(tp=2), model=model)}
    assert again == once
    assert len(once) == 1


def test_a_weight_on_sharded_activations_is_found_out() -> None:
    results = run_workers(per_head, 2, listed=False)
    assert "'middle.scale' is not the same on the workers" in first_error(results)
    first, second = runs(2, per_head, listed=True)
    assert first == second


def per_head(world: World, listed: bool) -> str:
    """A model with one weight that all channels of a sharded layer are multiplied with."""
    import paceline

    class Scaled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = torch.nn.Linear(4, 8), torch.nn.Linear(8, 1)
            self.middle = Scale()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.down(self.middle(self.up(x)))
            return out

    class Scale(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale

    engine = paceline.Engine(world=world, mesh=Mesh(tp=2), threads=1, seed=1, timeout_s=20)
    model = Scaled()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    data = torch.utils.data.TensorDataset(torch.randn(8, 4))
    plan = {"up": "colwise", "down": "rowwise", **({"middle": "replicated_with_grad_allreduce"} if listed else {})}
    model, optimizer, loader = engine.prepare(
        model, optimizer, torch.utils.data.DataLoader(data, batch_size=2), plan=plan
    )
    for (x,) in loader:
        engine.backward(model(x).square().mean())
        optimizer.step()
    return engine.weights_hash()
