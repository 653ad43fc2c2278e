"""Models built on the meta device: the same first weights at any number of workers; what can't be filled is named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from paceline import Engine, World
from paceline.errors import ConfigError
from paceline.strategies.fsdp.fsdp import FsdpConfig
from paceline.strategies.fsdp.unmaterialised import is_unmaterialised
from paceline.strategies.meta_device import fill, fill_modules, is_on_meta, module_names
from paceline.strategies.zero.zero3 import Zero3Config
from tests.bits.programs import TiedGpt
from tests.workers import hashes, run_workers

CPU = torch.device("cpu")

SHARDS = Zero3Config(weights="in shards")


def on_meta(make: Any) -> nn.Module:
    with torch.device("meta"):
        model: nn.Module = make()
    return model


def filled(make: Any, seed: int = 0) -> nn.Module:
    model = on_meta(make)
    fill(model, module_names([model]), seed=seed, device=CPU)
    return model


def test_every_module_is_filled_and_parameters_stay_the_same_objects() -> None:
    model = on_meta(TiedGpt)
    before = list(model.parameters())
    fill(model, module_names([model]), seed=0, device=CPU)
    assert not is_on_meta(model)
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
    assert all(bool(p.isfinite().all()) for p in model.parameters())


def test_a_part_filled_alone_gets_what_it_gets_in_the_whole_and_another_seed_gives_other_weights() -> None:
    whole, other = filled(TiedGpt), filled(TiedGpt, seed=1)
    model = on_meta(TiedGpt)
    names = module_names([model])
    for part in reversed(list(model.modules())):
        fill(part, names, seed=0, device=CPU)
    for (name, a), b, c in zip(model.named_parameters(), whole.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b), name
        assert not torch.equal(a, c) or "norm" in name


def test_what_the_script_draws_is_not_disturbed() -> None:
    torch.manual_seed(5)
    wanted = torch.rand(3)
    torch.manual_seed(5)
    filled(TiedGpt)
    assert torch.equal(torch.rand(3), wanted)


class Attends(nn.Module):
    """Its attention sets a bias of the module below it to 0, after that has drawn it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.ModuleDict({"a": nn.MultiheadAttention(8, 2)}) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block["a"](x, x, x)[0]  # type: ignore[index]
        return x


def test_a_reset_that_sets_weights_of_a_module_below_runs_after_that_modules_own() -> None:
    for parts in (list, lambda modules: reversed(list(modules))):
        model = on_meta(Attends)
        names = module_names([model])
        for part in parts(model.modules()):
            fill(part, names, seed=0, device=CPU)
        whole = filled(Attends)
        for (name, a), b in zip(model.named_parameters(), whole.named_parameters(), strict=True):
            assert torch.equal(a, b[1]), name
            assert bool((a == 0).all()) == name.endswith("bias"), name


def attends(world: World, **job: Any) -> str:
    with Engine(world=world, lanes=2, device="cpu", **job) as engine:
        with torch.device("meta"):
            model = Attends()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine.prepare(model, optimizer, DataLoader(TensorDataset(torch.randn(4, 8))))
        return engine.weights_hash()


@pytest.mark.workers
@pytest.mark.parametrize(
    "strategy",
    ["fsdp", FsdpConfig(nn.Linear), FsdpConfig(nn.MultiheadAttention), FsdpConfig("Attends"), SHARDS],
    ids=str,
)
def test_first_weights_do_not_depend_on_how_units_are_cut(strategy: Any) -> None:
    assert hashes(run_workers(attends, 2, strategy=strategy)) == hashes(run_workers(attends, 1))


class NoReset(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))


class Forgets(NoReset):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(3.0))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (NoReset, r"0 \(NoReset\) was built on the meta device and has no reset_parameters\(\) to give 'scale'"),
        (Forgets, r"0 \(Forgets\).*reset_parameters\(\) does not set all of 'table'"),
    ],
)
def test_a_module_that_can_not_be_filled_is_named(kind: type[nn.Module], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        filled(lambda: nn.Sequential(kind()))


def trains_from_meta(world: World, *, norm: bool = True, **job: Any) -> str:
    with Engine(world=world, **{"lanes": 4, "device": "cpu"} | job) as engine:
        with torch.device("meta"):
            model = nn.Sequential(TiedGpt(), nn.BatchNorm1d(16)) if norm else TiedGpt()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        text = torch.randint(0, 32, (40, 17), generator=torch.Generator().manual_seed(2))
        loader = DataLoader(TensorDataset(text[:, :-1], text[:, 1:]), batch_size=4)
        model, optimizer, loader = engine.prepare(model, optimizer, loader)
        for x, y in loader:
            engine.backward(F.cross_entropy(model(x).flatten(0, 1), y.flatten()))
            optimizer.step()
        return engine.weights_hash()


@pytest.mark.workers
@pytest.mark.parametrize(
    ("strategy", "workers"),
    [("ddp", 3), ("zero2", 2), ("zero3", 2), (SHARDS, 3), ("fsdp", 1), ("fsdp", 3), ("hybrid", 2)],
)
def test_training_from_the_meta_device_gives_one_hash(strategy: str, workers: int) -> None:
    assert hashes(run_workers(trains_from_meta, workers, strategy=strategy)) == hashes(run_workers(trains_from_meta, 1))


def most_filled(world: World) -> tuple[int, int]:
    """The most elements that a worker has filled at a time, and those of the model."""
    import paceline.strategies.fsdp.weights as unit_weights

    most = 0

    def watched(modules: list[nn.Module], *args: Any, **options: Any) -> None:
        nonlocal most
        fill_modules(modules, *args, **options)
        whole = [p for p in model.parameters() if not p.is_meta and not is_unmaterialised(p)]
        most = max(most, sum(p.numel() for p in whole))

    unit_weights.fill_modules = watched  # type: ignore[assignment]
    with Engine(world=world, strategy=FsdpConfig(nn.Linear)) as engine:
        with torch.device("meta"):
            model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine.prepare(model, optimizer, DataLoader(TensorDataset(torch.randn(8, 64)), batch_size=4))
        return most, sum(p.numel() for p in model.parameters())


@pytest.mark.workers
def test_no_more_than_one_unit_is_whole_at_a_time() -> None:
    for result in run_workers(most_filled, 2):
        assert result.error is None, result.traceback
        most, elements = result.value
        assert most == elements // 8


def test_an_optimizer_that_has_made_its_state_on_meta_is_refused() -> None:
    model = on_meta(lambda: nn.Linear(4, 4))
    with (
        pytest.raises(ConfigError, match=r"Adagrad made its state when it was made, for weights on the meta device"),
        Engine(world=World(), device="cpu") as engine,
    ):
        engine.prepare(model, torch.optim.Adagrad(model.parameters()))


def test_a_tied_weight_is_the_first_modules() -> None:
    model = filled(TiedGpt)
    assert isinstance(model, TiedGpt)
    assert model.head.weight is model.embedding.weight
    assert float(model.embedding.weight.detach().std()) > 0.5, "an embedding's: a head's would be smaller"


def of_transformers(kind: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    small = {"vocab_size": 97, "num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 64}
    if kind == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=97, n_layer=2, n_head=2, n_embd=64, initializer_range=0.1, bos_token_id=1, eos_token_id=1
        )
        return transformers.GPT2LMHeadModel(config)  # type: ignore[no-any-return]
    if kind == "bert":
        config = transformers.BertConfig(**small, intermediate_size=64, initializer_range=0.1)
        return transformers.BertForMaskedLM(config)  # type: ignore[no-any-return]
    config = transformers.LlamaConfig(**small, intermediate_size=64, initializer_range=0.1)
    return transformers.LlamaForCausalLM(config)  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", ["gpt2", "bert", "llama"])
def test_a_model_of_transformers_is_filled_as_it_fills_itself(kind: str) -> None:
    """The values are others, their spread is the model's own: gpt2 scales down what goes to the residual stream."""
    torch.manual_seed(0)
    real, ours = of_transformers(kind), filled(lambda: of_transformers(kind))
    for (name, a), b in zip(ours.named_parameters(), real.parameters(), strict=True):
        spread = 0.1 if b.numel() > 500 else 0.3
        torch.testing.assert_close(a.std(), b.std(), rtol=spread, atol=1e-3, msg=name)
        torch.testing.assert_close(a.mean(), b.mean(), rtol=spread, atol=0.02, msg=name)
    for (name, a), b in zip(ours.named_buffers(), real.buffers(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_its_parts_have_the_same_weights_in_any_order(kind: str) -> None:
    whole, model = filled(lambda: of_transformers(kind)), on_meta(lambda: of_transformers(kind))
    names = module_names([model])
    for part in reversed(list(model.modules())):
        fill(part, names, seed=0, device=CPU)
    for (name, a), b in zip(model.named_parameters(), whole.parameters(), strict=True):
        assert torch.equal(a, b), name


def trains_of_transformers(world: World, *, strategy: Any) -> str:
    with Engine(world=world, strategy=strategy, lanes=2) as engine:
        model = on_meta(lambda: of_transformers("gpt2"))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        rows = torch.randint(0, 97, (8, 6), generator=torch.Generator().manual_seed(1))
        model, optimizer, loader = engine.prepare(model, optimizer, DataLoader(TensorDataset(rows), batch_size=2))
        for (x,) in loader:
            engine.backward(model(input_ids=x, labels=x).loss)
            optimizer.step()
            optimizer.zero_grad()
        return engine.weights_hash()


@pytest.mark.workers
@pytest.mark.parametrize("strategy", ["fsdp", "zero2", SHARDS])
def test_it_trains_from_the_meta_device_to_one_hash(strategy: Any) -> None:
    alone = hashes(run_workers(trains_of_transformers, 1, strategy="ddp"))
    assert hashes(run_workers(trains_of_transformers, 2, strategy=strategy)) == alone
