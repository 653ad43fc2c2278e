"""Training with weights in shards moves the formula's bytes.

Z bytes of gradients     sent by a worker in a step                      weights, pulled by whoever uses them
fsdp                     (N-1)/N · Z for each of its lanes               by units, forward and backward of an item
hybrid, groups of n      (n-1)/n · Z for each of its lanes inside        as fsdp, inside the group
                         (H-1)/H · Z/n for each root, and back, across
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from paceline import Engine, World
from paceline.collectives.byte_count import Traffic
from paceline.collectives.direct_all_reduce import CANONICAL_SCATTER
from paceline.sharding.flat_layout import BLOCK
from paceline.sharding.footprint import Model as Sizes
from paceline.strategies.fsdp.fsdp import FsdpConfig
from paceline.strategies.fsdp.hybrid import HybridConfig
from paceline.strategies.registry import choose
from paceline.world.lanes import strided_lanes
from tests.workers import run_workers

pytestmark = pytest.mark.workers

LAYERS = 2
Z = 4 * LAYERS * 4 * BLOCK  # 2 and 4 workers own the same
ASKS = "request", "gather of weights"


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(128, BLOCK // 32) * 0.01)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight)


def a_step(world: World, **job: Any) -> Traffic:
    """The traffic of the last step."""
    with Engine(world=world, backend="gloo", **job) as engine:
        model = nn.Sequential(*(Layer() for _ in range(LAYERS)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        inputs = torch.randn(2 * 4 * engine.config.lanes * engine.config.accumulate, 128)
        model, optimizer, loader = engine.prepare(model, optimizer, DataLoader(TensorDataset(inputs), batch_size=4))
        for (x,) in loader:
            engine.backward(model(x).square().mean())
            optimizer.step()
        return engine.traffic


def traffic_of(workers: int, **job: Any) -> list[Traffic]:
    results = run_workers(a_step, workers, **job)
    for result in results:
        assert result.error is None, result.traceback
    return [result.value for result in results]


@pytest.mark.parametrize(("workers", "lanes", "accumulate"), [(2, 2, 1), (4, 8, 1), (2, 3, 2)])
def test_fsdp_sends_each_lane_once_and_pulls_weights_for_every_item(workers: int, lanes: int, accumulate: int) -> None:
    """Layers are units. Weights come twice for an item, but for the last layer's, which backward finds where forward
    left them, and the first one's, whose weights backward does not need."""
    own_lanes = [len(own) for own in strided_lanes(lanes, workers)]
    share = Z * (workers - 1) // workers
    job = {"strategy": FsdpConfig("Layer"), "lanes": lanes, "accumulate": accumulate}
    for rank, traffic in enumerate(traffic_of(workers, **job)):
        assert traffic.operations == {CANONICAL_SCATTER, *ASKS}
        gradients, weights = traffic.of(CANONICAL_SCATTER), traffic.of("gather of weights")
        assert gradients.sent_bytes == own_lanes[rank] * share, f"rank {rank}"
        assert gradients.received_bytes == (lanes - own_lanes[rank]) * Z // workers, f"rank {rank}"
        items = own_lanes[rank] * accumulate
        assert weights.received_bytes == items * share * (2 * LAYERS - 2) // LAYERS, f"rank {rank}"


def test_a_unit_that_is_all_of_the_model_is_pulled_once_for_an_item() -> None:
    """It is whole from forward to the end of backward."""
    for traffic in traffic_of(2, strategy=FsdpConfig("Sequential"), lanes=2):
        assert traffic.of("gather of weights").received_bytes == Z // 2


def test_hybrid_sends_lanes_inside_a_group_and_its_roots_across() -> None:
    """Groups of two have lanes 0 1 2 and 3 4 5, which are two roots each: (0, 1) and 2, 3 and (4, 5)."""
    strategy, lanes = HybridConfig(shard_over=2), 6
    everyone = traffic_of(4, strategy=strategy, lanes=lanes)
    sent = []
    for rank, traffic in enumerate(everyone):
        beside, across = rank ^ 1, (rank + 2) % 4
        inside, roots = traffic.of(CANONICAL_SCATTER), traffic.of("canonical")
        assert {peer: flow.bytes for peer, flow in inside.sent.items()} == {
            beside: (2 if rank in (0, 2) else 1) * Z // 2
        }
        assert {peer: flow.bytes for peer, flow in roots.sent.items()} == {across: 3 * Z // 2 // 2}
        assert {peer for operation in ASKS for peer in traffic.of(operation).sent} == {beside}
        sent.append(inside.sent_bytes + roots.sent_bytes)
    weights = 2 * 2 * Z // 2  # forward and backward, of two items
    predicted = choose(strategy).footprint(Sizes(Z // 4), workers=4, lanes=lanes).sent
    assert max(sent) == predicted - weights


def test_two_groups_with_a_root_each_add_them_up_in_the_backend() -> None:
    for traffic in traffic_of(4, strategy=HybridConfig(shard_over=2), lanes=4):
        assert traffic.of(CANONICAL_SCATTER).sent_bytes == Z // 2
        assert traffic.native["all_reduce"] > 0  # two addends: their order changes no bit
