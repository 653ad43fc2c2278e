"""The compressors under torch's own DistributedDataParallel: the same losses, and a state that can be saved."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from paceline import World
from paceline.compression import Compression, Int8, PowerSgd, Sign, TopK
from paceline.errors import CheckpointError, ConfigError
from paceline.hooks import CompressionState, beside, compress
from paceline.world.world import TcpRendezvous
from tests.workers import run_workers

WIDTH, STEPS = 24, 60
WAYS: dict[str, Any] = {
    "int8": "int8",
    "int8 stochastic": Int8(rounding="stochastic"),
    "bf16": "bf16",
    "sign": Sign(block=64),
    "topk": TopK(share=0.2, warmup=5),
    "topk momentum": TopK(share=0.2, momentum=0.5),
    "powersgd": PowerSgd(rank=3),
    "mixed": Compression({"*.bias": None, "0.*": "powersgd", "*": "int8"}, start_after=2),
}


def meets(world: World) -> None:
    store: Any = dist.HashStore()
    if world.size > 1:
        assert isinstance(world.rendezvous, TcpRendezvous)
        store = dist.TCPStore(world.rendezvous.address, world.rendezvous.port, world.size, world.rank == 0)
    dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size, timeout=timedelta(seconds=30))


def network(bucket_mib: float = 0.002) -> DistributedDataParallel:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 40), nn.Tanh(), nn.Linear(40, WIDTH))
    return DistributedDataParallel(model, bucket_cap_mb=bucket_mib)


def step(
    model: DistributedDataParallel, optimizer: torch.optim.Optimizer | FrozenOptimizer, number: int, world: World
) -> None:
    generator = torch.Generator().manual_seed(1000 * number + world.rank)
    x = torch.randn(8, WIDTH, generator=generator)
    F.mse_loss(model(x), x.flip(1) * 2).backward()
    optimizer.step()
    optimizer.zero_grad()


def loss_of(model: nn.Module) -> float:
    x = torch.randn(256, WIDTH, generator=torch.Generator().manual_seed(5))
    return float(F.mse_loss(model(x), x.flip(1) * 2).detach())


def flat(model: nn.Module) -> list[float]:
    found: list[float] = torch.cat([p.detach().view(-1) for p in model.parameters()]).tolist()
    return found


def trains(world: World, *, ways: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """Of each way the loss at the end, and how far the weights of the ranks are apart."""
    meets(world)
    found = {}
    for name, way in ways.items():
        model = network()
        if way is not None:
            compress(model, way)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number in range(STEPS):
            step(model, optimizer, number, world)
        largest = torch.tensor(flat(model))
        smallest = largest.clone()
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        dist.all_reduce(smallest, dist.ReduceOp.MIN)
        found[name] = loss_of(model.module), float((largest - smallest).abs().max())
    dist.destroy_process_group()
    return found


@pytest.mark.workers
@pytest.mark.parametrize("ranks", [1, 3])
def test_every_compressor_trains_as_ddp_does_and_all_ranks_alike(ranks: int) -> None:
    without = {f"{name} without feedback": Compression(WAYS[name], feedback=False) for name in ("sign", "powersgd")}
    results = run_workers(trains, ranks, ways={"ddp": None, **WAYS, **without})
    for result in results:
        assert result.error is None, result.traceback
    losses = {name: loss for name, (loss, _) in results[0].value.items()}
    assert all(apart == 0 for _, apart in results[0].value.values())
    for name in set(WAYS) - {"topk momentum"}:
        assert abs(losses[name] / losses["ddp"] - 1) < 0.05, losses
    assert losses["topk momentum"] < losses["ddp"]  # it goes faster, as momentum does
    for name in without:
        assert losses[name] / losses["ddp"] - 1 > 0.1, losses


def stops_and_goes_on(world: World, *, way: Any) -> tuple[list[float], list[float], list[str]]:
    """Weights of a run that was saved in the middle and goes on elsewhere, and of one that never stopped."""
    meets(world)

    def begun() -> tuple[DistributedDataParallel, torch.optim.Optimizer, CompressionState]:
        model = network(bucket_mib=10.0)
        return model, torch.optim.SGD(model.parameters(), lr=0.1), compress(model, way)

    model, optimizer, state = begun()
    for number in range(8):
        if number == 4:
            saved, weights = state.state_dict(), {k: v.clone() for k, v in model.module.state_dict().items()}
        step(model, optimizer, number, world)
    straight = flat(model)
    model, optimizer, state = begun()
    model.module.load_state_dict(weights)
    state.load_state_dict(saved)
    for number in range(4, 8):
        step(model, optimizer, number, world)
    refused = []
    others = {"q": {"another.weight": torch.ones(1)}}
    for changed in ({"rank": 7}, {"ranks": 9}, {"compression": "*: Sign(block=64)x"}, others):
        try:
            state.load_state_dict(saved | changed)
        except CheckpointError as error:
            refused.append(str(error))
    dist.destroy_process_group()
    return straight, flat(model), refused


@pytest.mark.workers
@pytest.mark.parametrize("way", WAYS)
def test_a_saved_state_goes_on_to_the_same_weights(way: str) -> None:
    for result in run_workers(stops_and_goes_on, 2, way=WAYS[way]):
        assert result.error is None, result.traceback
        straight, again, refused = result.value
        assert straight == again
        assert len(refused) == 4


def overflows(world: World, *, ways: dict[str, Any], bad: float) -> dict[str, dict[str, bool]]:
    """Of each way, for a step in which the last rank has one bad value in each gradient: what is true of it."""
    meets(world)
    found = {}
    for name, way in ways.items():
        model = network()
        state = compress(model, way)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number in range(4):
            step(model, optimizer, number, world)
        before = state.state_dict()
        means: list[Tensor] = []
        with contextlib.ExitStack() as spoils:
            for parameter in model.parameters() if world.rank == world.size - 1 else ():
                spoils.enter_context(parameter.register_hook(partial(spoiled, bad=bad)))
            step(model, FrozenOptimizer(optimizer, means), 4, world)
        same = all(equal(state.state_dict()[kind], before[kind]) for kind in CompressionState.KINDS)
        for number in range(5, 8):
            step(model, optimizer, number, world)
        kept = [t for kind in CompressionState.KINDS for t in state.state_dict()[kind].values()]
        found[name] = {
            "state as before": same,
            "every mean is seen": not any(mean.isfinite().all() for mean in means),
            "state is finite": bool(kept) and all(t.isfinite().all() for t in kept),
            "weights are finite": all(math.isfinite(value) for value in flat(model)),
        }
    dist.destroy_process_group()
    return found


def spoiled(gradient: Tensor, *, bad: float) -> Tensor:
    gradient = gradient.clone()
    gradient.view(-1)[gradient.numel() // 2] = bad
    return gradient


class FrozenOptimizer:
    """Leaves the step out, as GradScaler does after an overflow, and keeps the gradients that it was given."""

    def __init__(self, optimizer: torch.optim.Optimizer, means: list[Tensor]) -> None:
        self._optimizer, self._means = optimizer, means

    def step(self) -> None:
        self._means += [p.grad for group in self._optimizer.param_groups for p in group["params"]]

    def zero_grad(self) -> None:
        self._optimizer.zero_grad()


def equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.workers
@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_gradient_that_is_not_finite_is_seen_by_all_and_changes_no_state(ranks: int, bad: float) -> None:
    for result in run_workers(overflows, ranks, ways={**WAYS, "fp16": "fp16"}, bad=bad):
        assert result.error is None, result.traceback
        wrong = {name: [what for what, is_so in told.items() if not is_so] for name, told in result.value.items()}
        assert not any(wrong.values()), wrong


def one_bad_weight(world: World) -> tuple[set[str], int]:
    """The parameters whose residuals changed in a step with inf in the first one, and how many all_reduce it had."""
    meets(world)
    model = network(bucket_mib=10.0)
    state = compress(model, Compression({"*.bias": None, "*": "int8"}))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step(model, optimizer, 0, world)
    before = state.state_dict()["residuals"]
    first = next(model.parameters())
    with first.register_hook(partial(spoiled, bad=math.inf)), counted_all_reduces() as calls:
        step(model, FrozenOptimizer(optimizer, []), 1, world)
    dist.destroy_process_group()
    after = state.state_dict()["residuals"]
    return {name for name in after if not torch.equal(after[name], before[name])}, len(calls)


@contextlib.contextmanager
def counted_all_reduces() -> Iterator[list[int]]:
    """The elements of each."""
    calls, real = [], dist.all_reduce

    def counted(tensor: Tensor, *args: Any, **more: Any) -> Any:
        calls.append(tensor.numel())
        return real(tensor, *args, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", counted)
        yield calls


@pytest.mark.workers
def test_of_a_bucket_only_what_is_not_finite_keeps_its_state_and_the_uncompressed_is_one_all_reduce() -> None:
    for result in run_workers(one_bad_weight, 2):
        assert result.error is None, result.traceback
        changed, all_reduces = result.value
        assert changed == {"2.weight"}
        assert all_reduces == 1


def test_what_is_loaded_lands_where_its_parameter_is() -> None:
    """As from torch.load(map_location="cpu") for a model on a GPU; here the other device is meta."""
    parameters = {"here": torch.ones(2), "there": torch.ones(2, device="meta")}
    saved = {"here": torch.zeros(2), "there": torch.zeros(2)}
    loaded = beside(parameters, saved)
    assert {name: t.device for name, t in loaded.items()} == {name: p.device for name, p in parameters.items()}
    assert loaded["here"].data_ptr() != saved["here"].data_ptr(), "what is kept is not the caller's"


def test_what_is_no_ddp_is_refused() -> None:
    with pytest.raises(ConfigError, match="takes a DistributedDataParallel, not Linear"):
        compress(nn.Linear(2, 2), "int8")  # type: ignore[arg-type]
