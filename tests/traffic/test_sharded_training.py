"""Training in shards moves the formula's bytes: reduce-scatter of every node, all-gather of weights, never a sum back.

Z bytes of gradients     sent by a worker in a step
zero1                    (N-1)/N · Z for each of its roots   + (N-1)/N · Z of weights
zero2                    (N-1)/N · Z for each of its lanes   + (N-1)/N · Z of weights
in bf16                  half of it for weights, and for lanes if they are reduced in it
weights once per host    no weights
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from paceline import Engine, Precision, World
from paceline.collectives.byte_count import Traffic
from paceline.collectives.canonical_sum import sum_plan
from paceline.collectives.direct_all_reduce import CANONICAL_SCATTER
from paceline.sharding.flat_layout import BLOCK
from paceline.strategies.strategy import Strategy
from paceline.strategies.zero.zero1 import Zero1Config
from paceline.strategies.zero.zero2 import Zero2Config
from paceline.world.lanes import strided_lanes
from tests.benchmarks import script
from tests.workers import run_workers

pytestmark = pytest.mark.workers

theory = script("traffic_theory")
Moved = theory.Moved

CONFIGS: dict[str, Any] = {"zero1": Zero1Config, "zero2": Zero2Config}
GATHER = "all-gather of weights"
BLOCKS = 12  # of each of the two parameters: 2, 3 and 4 workers own the same
Z = 4 * 2 * BLOCKS * BLOCK


class Model(nn.Module):
    def __init__(self, blocks: int = BLOCKS) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(blocks, BLOCK) * 0.01)
        self.second = nn.Parameter(torch.randn(BLOCK, blocks) * 0.01)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.first) @ self.second


def a_step(world: World, *, blocks: int = BLOCKS, low: bool = False, **job: Any) -> tuple[Traffic, list[int]]:
    """The traffic of the last step, and the elements that every worker owns."""
    with Engine(world=world, bucket_mib=0.1, **job) as engine:
        model = Model(blocks).bfloat16() if low else Model(blocks)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        count = 3 * 4 * engine.config.lanes * engine.config.accumulate
        inputs = torch.randn(count, blocks).to(model.first.dtype)
        model, optimizer, loader = engine.prepare(model, optimizer, DataLoader(TensorDataset(inputs), batch_size=4))
        for (x,) in loader:
            engine.backward(model(x).square().mean())
            optimizer.step()
        return engine.traffic, owned_by_all(engine._training().strategy(), world.size)


def owned_by_all(strategy: Strategy, workers: int) -> list[int]:
    shards = strategy._pieces.shards  # type: ignore[attr-defined]
    return [sum(piece.elements for piece in shards.pieces(worker)) for worker in range(workers)]


def nodes_sent(strategy: str, lanes: int, workers: int) -> list[int]:
    if strategy == "zero2":
        return [len(own) for own in strided_lanes(lanes, workers)]
    plan = sum_plan(lanes, workers, tuple(range(lanes)))
    return [len(plan.roots(worker)) for worker in range(workers)]


def bytes_of(traffic: Traffic, operation: str) -> Moved:
    return Moved(traffic.of(operation).sent_bytes, traffic.of(operation).received_bytes)


def times(moved: Moved, size: int) -> Moved:
    return Moved(size * moved.sent, size * moved.received)


@pytest.mark.parametrize("strategy", CONFIGS)
@pytest.mark.parametrize(("workers", "lanes", "accumulate"), [(2, 2, 1), (3, 3, 2), (4, 8, 1), (3, 8, 1)])
def test_a_step_sends_each_node_and_the_weights_once(strategy: str, workers: int, lanes: int, accumulate: int) -> None:
    nodes = nodes_sent(strategy, lanes, workers)
    job = {"strategy": strategy, "lanes": lanes, "accumulate": accumulate, "backend": "gloo"}
    for rank, result in enumerate(run_workers(a_step, workers, **job)):
        assert result.error is None, result.traceback
        traffic, _ = result.value
        share = Z * (workers - 1) // workers
        others = sum(nodes) - nodes[rank]
        assert bytes_of(traffic, CANONICAL_SCATTER) == Moved(nodes[rank] * share, others * Z // workers), f"rank {rank}"
        assert bytes_of(traffic, GATHER) == Moved(share, share), f"rank {rank}"
        assert traffic.operations == {CANONICAL_SCATTER, GATHER}
        assert traffic.native == {"all_gather": 1}  # the vote


@pytest.mark.parametrize("strategy", CONFIGS)
def test_with_one_lane_each_both_exchanges_together_are_ddps_all_reduce(strategy: str) -> None:
    for rank, result in enumerate(run_workers(a_step, 4, strategy=strategy, backend="gloo")):
        traffic, _ = result.value
        assert traffic.sent_bytes == 4 * theory.direct(Z // 4, 4)[rank].sent
        assert traffic.received_bytes == 4 * theory.direct(Z // 4, 4)[rank].received


@pytest.mark.parametrize("strategy", CONFIGS)
def test_shares_that_differ_by_a_block_and_weights_in_bf16_are_counted_to_the_byte(strategy: str) -> None:
    """Gradients are summed in fp32, weights travel as they are."""
    workers, lanes = 3, 5
    results = run_workers(a_step, workers, strategy=strategy, lanes=lanes, blocks=7, low=True, backend="gloo")
    for rank, result in enumerate(results):
        assert result.error is None, result.traceback
        traffic, owned = result.value
        assert len(set(owned)) > 1
        sums = theory.scatter_to_owners(owned, nodes_sent(strategy, lanes, workers))[rank]
        assert bytes_of(traffic, CANONICAL_SCATTER) == times(sums, 4)
        assert bytes_of(traffic, GATHER) == times(theory.gather_from_owners(owned)[rank], 2)


@pytest.mark.parametrize(("strategy", "bytes_of_gradients"), [("zero1", 4), ("zero2", 2)])
def test_low_precision_gathers_two_bytes_a_weight_and_lanes_rounded_to_bf16_are_sent_in_it(
    strategy: str, bytes_of_gradients: int
) -> None:
    """zero1 sends sums of several lanes, which bf16 would round again."""
    workers, lanes = 3, 5
    precision = Precision("bf16", reduction="bf16")
    job = {"strategy": strategy, "lanes": lanes, "backend": "gloo", "precision": precision}
    for rank, result in enumerate(run_workers(a_step, workers, **job)):
        assert result.error is None, result.traceback
        traffic, owned = result.value
        sums = theory.scatter_to_owners(owned, nodes_sent(strategy, lanes, workers))[rank]
        assert bytes_of(traffic, CANONICAL_SCATTER) == times(sums, bytes_of_gradients)
        assert bytes_of(traffic, GATHER) == times(theory.gather_from_owners(owned)[rank], 2)


@pytest.mark.parametrize("strategy", CONFIGS)
def test_in_shared_memory_only_weights_that_each_worker_has_of_its_own_travel(strategy: str) -> None:
    own = run_workers(a_step, 2, strategy=CONFIGS[strategy](weights="per worker"), lanes=2, backend="paceline")
    shared = run_workers(a_step, 2, strategy=strategy, lanes=2, backend="paceline")
    for result in (*own, *shared):
        assert result.error is None, result.traceback
        assert result.value[0].native["scatter_bucket"] == 2
        assert "all_reduce" not in result.value[0].native
        assert "sum_bucket" not in result.value[0].native
    assert [bytes_of(result.value[0], GATHER) for result in own] == [Moved(Z // 2, Z // 2)] * 2
    assert [result.value[0].sent_bytes for result in shared] == [0, 0]


@pytest.mark.parametrize("strategy", CONFIGS)
def test_alone_nothing_moves(strategy: str) -> None:
    ((traffic, owned),) = [result.value for result in run_workers(a_step, 1, strategy=strategy, lanes=3)]
    assert traffic == Traffic()
    assert owned == [Z // 4]
