"""Engine(compile=…): the blocks of a model are compiled, and the bits don't depend on how they are trained."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from paceline import Compile, Engine, World
from paceline.engine.compilation import compile_of
from paceline.errors import ConfigError
from tests.workers import hashes, run_workers

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch's compiler, about itself


class Block(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))
        return made


class Net(nn.Module):
    def __init__(self, width: int = 16, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, width), nn.Linear(width, 1)
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        made: Tensor = self.last(x)
        return made


def samples() -> DataLoader[Any]:
    drawn = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(48, 8, generator=drawn), torch.randn(48, 1, generator=drawn))
    return DataLoader(data, batch_size=4)


def trains(
    world: World, *, strategy: Any = "ddp", compile: Any = None, precision: str = "fp32", count: int = 48
) -> str:
    options: dict[str, Any] = {
        "lanes": 3,
        "timeout_s": 60,
        "bucket_mib": 0.001,
        "precision": precision,
        "device": "cpu",
    }
    with Engine(world=world, strategy=strategy, compile=compile, **options) as engine:
        torch.manual_seed(0)
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        model, optimizer, loader = engine.prepare(model, optimizer, samples())
        for x, y in loader:
            engine.backward(F.mse_loss(model(x), y))
            engine.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
        return engine.weights_hash()


@pytest.mark.workers
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_one_hash_under_every_strategy_and_number_of_workers(precision: str) -> None:
    compile = Compile("aot_eager")
    alone = trains(World(), compile=compile, precision=precision)
    for strategy, workers in (("ddp", 2), ("zero2", 3), ("zero3", 2), ("fsdp", 2), ("fsdp", 3)):
        found = run_workers(trains, workers, strategy=strategy, compile=compile, precision=precision)
        assert hashes(found) == {alone}, strategy


@pytest.mark.slow
@pytest.mark.workers
def test_inductors_code_gives_one_hash_too() -> None:
    alone = trains(World(), compile=True)
    for strategy in ("ddp", "fsdp"):
        assert hashes(run_workers(trains, 2, strategy=strategy, compile=True)) == {alone}


def prepared(engine: Engine) -> tuple[Any, Any]:
    model = Net()
    prepared: Any = engine.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return prepared


def test_blocks_that_are_alike_are_compiled_once_and_a_copy_has_weights_of_its_own() -> None:
    with Engine(world=World(), device="cpu", compile=Compile("aot_eager")) as engine:
        model, _ = prepared(engine)
        x = torch.randn(4, 8)
        before = model(x)
        compiled = engine._objects.compiled
        assert compiled is not None
        assert compiled.graphs == 1
        assert compiled.described == "3 Block compiled by aot_eager"
        other = copy.deepcopy(model)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.zero_()
        assert not other(x).any()
        assert torch.equal(model(x), before)
        assert compiled.graphs == 1
    assert "forward" not in model.blocks[0].__dict__
    assert torch.allclose(model(x), before)


def test_a_model_without_blocks_is_one() -> None:
    with Engine(world=World(), device="cpu", compile=Compile("eager")) as engine:
        model = nn.Linear(8, 1)
        engine.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        model(torch.randn(4, 8))
        assert engine._objects.compiled is not None
        assert engine._objects.compiled.described == "1 Linear compiled by eager"


def test_too_many_shapes_end_the_training() -> None:
    with Engine(world=World(), device="cpu", compile=Compile("eager")) as engine:
        model, _ = prepared(engine)
        with pytest.raises(Exception, match="recompile_limit"):
            for rows in range(2, 20):
                model(torch.randn(rows, 8))


@pytest.mark.parametrize(
    ("compile", "text"),
    [
        ("blocks", "compile='blocks' is not known; give True, or a paceline.Compile"),
        (1, "compile=1 is not known"),
        (lambda: Compile(mode="max-autotune"), "chooses kernels by measuring them"),
        (lambda: Compile("nothing"), "compile: backend='nothing'"),
        (lambda: Compile(mode="fastest"), "compile: mode='fastest'"),
    ],
)
def test_what_can_t_be_compiled_so_is_refused(compile: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Engine(world=World(), compile=compile() if callable(compile) else compile)


@pytest.mark.parametrize(
    ("backend", "device", "refused"), [("inductor", "cuda", True), ("inductor", "cpu", False), ("eager", "cuda", False)]
)
def test_inductor_on_a_gpu_needs_triton(
    backend: str, device: str, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.engine.compilation.find_spec", lambda name: None)
    told = pytest.raises(ConfigError, match=r"needs triton on a GPU.*pip install triton") if refused else nullcontext()
    with told:
        compile_of(Compile(backend=backend), "exact", torch.device(device))


def test_a_model_that_is_compiled_already_is_refused() -> None:
    with Engine(world=World(), compile=True) as engine:
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(ConfigError, match="with Net, which is compiled already"):
            engine.prepare(torch.compile(model, backend="eager"), optimizer)


# -- CUDA graphs -------------------------------------------------------------------------------------------------------

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture
def compiles_here() -> Iterator[None]:
    """Not in processes of its own, whose pipes torch leaves open at the end."""
    import torch._inductor.config as settings

    with settings.patch(compile_threads=1):
        yield


def trains_on_gpu(
    world: World, *, graphs: bool, strategy: str = "ddp", accumulate: int = 1, precision: str = "bf16",
    leaves_out: int | None = None,
) -> tuple[bool, str]:  # fmt: skip
    """With dropout, perhaps an item that is left out, and an evaluation in the middle whose outputs are kept."""
    options: dict[str, Any] = {"lanes": 3, "timeout_s": 120, "precision": precision, "device": "cuda"}
    compile = Compile(cuda_graphs=graphs)
    with Engine(world=world, strategy=strategy, compile=compile, accumulate=accumulate, **options) as engine:
        torch.manual_seed(0)
        model = Net(64, dropout=0.2).to(engine.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
        model, optimizer, loader = engine.prepare(model, optimizer, samples())
        assert engine._objects.compiled is not None
        kept, losses = [], []
        for place, (x, y) in enumerate(loader):
            loss = F.mse_loss(model(x), y)
            losses.append(loss.detach())
            if place == leaves_out:
                continue
            engine.backward(loss)
            engine.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            if engine.stepped:
                model.eval()
                with torch.no_grad():
                    kept += [model(x[:2] * sign) for sign in (1, -1)]
                model.train()
        assert torch.stack(kept).isfinite().all()
        assert torch.stack(losses).isfinite().all()
        return engine._objects.compiled.in_graphs, engine.weights_hash()


@GPU
@pytest.mark.usefixtures("compiles_here")
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2"])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.filterwarnings("ignore:lane 1 of step")
def test_blocks_in_cuda_graphs_give_the_bits_of_blocks_without(strategy: str, accumulate: int) -> None:
    found = {
        graphs: trains_on_gpu(World(), graphs=graphs, strategy=strategy, accumulate=accumulate, leaves_out=4)
        for graphs in (True, False)
    }
    assert found[True][0]
    assert not found[False][0]
    assert found[True][1] == found[False][1]


def on_gpu(workers: int, **options: Any) -> set[Any]:
    return {r.value or r.error for r in run_workers(trains_on_gpu, workers, timeout_s=240, **options)}


@GPU
@pytest.mark.workers
def test_workers_that_share_a_gpu_have_the_bits_of_one_in_graphs() -> None:
    (found,) = set().union(*(on_gpu(workers, graphs=True) for workers in (1, 2, 3)))
    assert found[0] is True


@GPU
@pytest.mark.workers
@pytest.mark.timeout(400)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_workers_that_share_a_gpu_have_the_bits_of_one_under_every_strategy(precision: str) -> None:
    jobs = itertools.product(("ddp", "zero2", "zero3", "fsdp"), (1, 2, 3))
    found = {job: on_gpu(job[1], graphs=False, strategy=job[0], precision=precision) for job in jobs}
    assert set().union(*found.values()) == found["ddp", 1], found
    assert len(found["ddp", 1]) == 1


@GPU
@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"precision": "fp32"}, "parameters in fp32"),
        ({"precision": "bf16", "strategy": "fsdp"}, "weights in shards"),
        ({"precision": "bf16", "activation_checkpointing": "blocks"}, "activation_checkpointing"),
    ],
)
def test_what_graphs_can_t_be_used_with_is_refused(options: dict[str, Any], text: str) -> None:
    with (
        Engine(world=World(), device="cuda", compile=Compile(cuda_graphs=True), **options) as engine,
        pytest.raises(ConfigError, match=f"cuda_graphs=True with {text}"),
    ):
        prepared(engine)


def test_cuda_graphs_on_a_cpu_are_refused() -> None:
    with (
        Engine(world=World(), device="cpu", compile=Compile(cuda_graphs=True)) as engine,
        pytest.raises(ConfigError, match=r"cuda_graphs=True with a cpu, where they can't be used; leave it out"),
    ):
        prepared(engine)
    with pytest.raises(ConfigError, match="they are inductor's"):
        Compile("aot_eager", cuda_graphs=True)
