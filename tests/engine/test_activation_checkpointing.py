"""Activation checkpointing: which modules it takes, that less is kept, and that nobody else notices."""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

from paceline import Engine, World
from paceline.engine.activation_checkpointing import ActivationCheckpointing, Recomputed, find_modules, parse
from paceline.errors import ConfigError


class Block(nn.Module):
    """Everything that could make a second run differ from the first."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm = nn.BatchNorm1d(width)
        self.drop = nn.Dropout(0.3)
        self.register_buffer("scale", torch.ones(()))
        self.scale: Tensor

    def forward(self, x: Tensor, factor: Tensor | float = 1.0) -> Tensor:
        self.scale *= 1.25
        drawn = random.random() + np.random.random()
        return x + self.drop(self.out(torch.tanh(self.into(self.norm(x))))) * self.scale * drawn * factor


class Model(nn.Module):
    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, factor=torch.tensor(0.5))
        out: Tensor = self.head(x)
        return out


def model_of(seed: int = 0) -> Model:
    torch.manual_seed(seed)
    return Model()


@contextmanager
def recomputed(model: nn.Module, wanted: Any) -> Iterator[None]:
    config = parse(wanted)
    if config is None:
        yield
        return
    modules = Recomputed(config, [model])
    try:
        yield
    finally:
        modules.close()


def trained(wanted: Any, losses: int = 1) -> dict[str, Any]:
    """Everything that a forward and a backward leave behind."""
    model = model_of()
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    with recomputed(model, wanted):
        out = model(torch.randn(8, 16))
        for _ in range(losses - 1):
            out.sum().backward(retain_graph=True)
        out.square().mean().backward()
    left = {name: p.grad for name, p in model.named_parameters()} | dict(model.named_buffers())
    drawn = torch.rand(3), torch.tensor(random.random()), torch.tensor(np.random.random())
    return left | {"out": out.detach(), "drawn by torch": drawn[0], "by Python": drawn[1], "by numpy": drawn[2]}


@pytest.mark.parametrize("wanted", ["blocks", 2, Block, "Block", (Block, nn.Linear), "blocks+matmuls"])
def test_gradients_buffers_and_all_random_numbers_are_those_of_a_plain_backward(wanted: Any) -> None:
    plain, again = trained(None), trained(wanted)
    different = [name for name in plain if not torch.equal(plain[name], again[name])]
    assert not different
    assert plain["blocks.0.scale"] == 1.25


def test_a_graph_that_is_kept_can_be_run_backward_twice() -> None:
    plain, again = trained(None, losses=2), trained("blocks", losses=2)
    assert [name for name in plain if not torch.equal(plain[name], again[name])] == []


# -- what is kept ------------------------------------------------------------------------------------------------------


def bytes_kept(wanted: Any) -> int:
    """What autograd holds between forward and backward, parameters apart; every memory once."""
    model = model_of()
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with recomputed(model, wanted), saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(torch.randn(256, 16)).square().mean()
        total = sum(kept.values())
        loss.backward()
    return total


def test_only_inputs_of_blocks_are_kept() -> None:
    plain, half, blocks = bytes_kept(None), bytes_kept(2), bytes_kept("blocks")
    inputs = 4 * 256 * 16 * 4
    assert blocks < 1.5 * inputs
    assert blocks < half < plain
    assert plain > 5 * blocks, f"{plain:,} bytes without, {blocks:,} with"


class _Products(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[str(func)] += 1
        return func(*args, **(kwargs or {}))


def products_in_backward(wanted: Any) -> int:
    model = model_of()
    with recomputed(model, wanted):
        loss = model(torch.randn(8, 16)).square().mean()
        with _Products() as products:
            loss.backward()
    return products.seen["aten.addmm.default"]


def test_kept_products_of_matrices_are_not_computed_again() -> None:
    assert products_in_backward(None) == products_in_backward("blocks+matmuls") == 0
    assert products_in_backward("blocks") == 4 * 2
    assert bytes_kept("blocks+matmuls") == bytes_kept("blocks")  # autograd's own; products lie elsewhere


def calls_of_blocks(step: Callable[[Model], Any]) -> int:
    model, calls = model_of(), 0

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1

    for block in model.blocks:
        block.into.register_forward_hook(count)  # type: ignore[union-attr,operator]
    with recomputed(model, "blocks"):
        step(model)
    return calls


def test_without_gradients_and_in_evaluation_nothing_runs_twice() -> None:
    x = torch.randn(8, 16)
    assert calls_of_blocks(lambda model: model(x).sum().backward()) == 8
    with torch.no_grad():
        assert calls_of_blocks(lambda model: model(x)) == 4
    assert calls_of_blocks(lambda model: model.eval()(x).sum().backward()) == 4


# -- nobody notices ----------------------------------------------------------------------------------------------------


def test_names_objects_and_classes_stay_and_forward_is_put_back() -> None:
    model = model_of()
    before = [(name, id(module), type(module)) for name, module in model.named_modules()], list(model.state_dict())
    with recomputed(model, "blocks"):
        assert ([(n, id(m), type(m)) for n, m in model.named_modules()], list(model.state_dict())) == before
        assert "forward" in model.blocks[0].__dict__
    assert all("forward" not in module.__dict__ for module in model.modules())


def test_a_forward_of_the_users_own_on_an_instance_is_run_and_put_back() -> None:
    model, seen = model_of(), []
    own = model.blocks[1].forward = lambda x, factor: seen.append(factor) or x  # type: ignore[method-assign,func-returns-value]
    with recomputed(model, "blocks"):
        model(torch.randn(8, 16)).sum().backward()
    assert seen
    assert model.blocks[1].forward is own


def test_a_deep_copy_runs_its_own_weights() -> None:
    model = model_of()
    with recomputed(model, "blocks"):
        average = copy.deepcopy(model).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        assert average.blocks[0](torch.ones(8, 16)).std() > 0
        assert average.blocks[0].forward.__self__ is average.blocks[0]


def test_the_engine_says_what_it_found_and_closes_it(capsys: pytest.CaptureFixture[str]) -> None:
    model = model_of()
    data = DataLoader(TensorDataset(torch.randn(16, 16)), batch_size=8)
    with Engine(world=World(), activation_checkpointing=ActivationCheckpointing(every=2, keep="matmuls")) as engine:
        engine.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), data)
        told = capsys.readouterr().out
        assert "forward" in model.blocks[1].__dict__
    expected = (
        "paceline: activations of 2 Block (of 4) are computed again in backward; outputs of matrix products are kept"
    )
    assert told.splitlines()[0] == expected
    assert "forward" not in model.blocks[1].__dict__


# -- which modules -----------------------------------------------------------------------------------------------------


def found(model: nn.Module, wanted: Any = "blocks") -> list[str]:
    config = parse(wanted)
    assert config is not None
    names = {id(module): name for name, module in model.named_modules()}
    return [names[id(module)] for module in find_modules(config, [model])[0]]


def conv() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 3, 1), nn.ReLU())


def test_blocks_are_what_repeats_and_has_something_inside() -> None:
    assert found(Model(3)) == ["blocks.0", "blocks.1", "blocks.2"]
    assert found(nn.Sequential(nn.Linear(1, 1), conv(), nn.Linear(1, 1), conv())) == ["1", "3"]
    stages = nn.Sequential(nn.Sequential(Block(), Block()), nn.Sequential(Block(), Block()))
    assert found(stages) == ["0.0", "0.1", "1.0", "1.1"]
    layer = nn.TransformerEncoderLayer(8, 2, batch_first=True)
    assert found(nn.TransformerEncoder(layer, 2)) == ["layers.0", "layers.1"]


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([conv(), conv()])

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([expert(x) for expert in self.experts]).sum(0)


def test_what_repeats_inside_a_block_is_not_meant() -> None:
    model = nn.Sequential(Experts(), Experts())
    assert found(model) == ["0", "1"]
    assert found(model, nn.ReLU) == ["0.experts.0.1", "0.experts.1.1", "1.experts.0.1", "1.experts.1.1"]


def test_every_second_is_the_second_the_fourth_and_so_on() -> None:
    assert found(Model(5), 2) == ["blocks.1", "blocks.3"]
    assert found(Model(5), "2") == found(Model(5), ActivationCheckpointing(Block, every=2)) == ["blocks.1", "blocks.3"]


def test_of_modules_inside_each_other_the_outer_one_is_taken() -> None:
    assert found(Model(2), (Model, Block)) == [""]
    assert found(Model(2), "Block,Linear") == ["blocks.0", "blocks.1", "head"]


def test_a_flags_text_says_what_the_objects_say() -> None:
    assert parse("blocks") == parse(1) == ActivationCheckpointing()
    assert parse("3+matmuls") == ActivationCheckpointing(every=3, keep="matmuls")
    assert parse("Block, Head+matmuls") == ActivationCheckpointing(("Block", "Head"), keep="matmuls")
    assert parse(None) is None
    assert [str(parse(text)) for text in ("blocks", "Block,Head+matmuls", "4")] == [
        "blocks",
        "Block,Head+matmuls",
        "blocks/4",
    ]


# -- what can't be -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "text"),
    [
        (0, r"every=0 is no count of blocks; 1 takes every block, 2 every second one"),
        ("-1", r"every=-1 is no count of blocks"),
        (True, r"activation_checkpointing=True names no modules; give 'blocks', a number k"),
        ((), r"activation_checkpointing=\(\) names no modules"),
        (1.5, r"activation_checkpointing=1\.5 names no modules"),
        (int, r"<class 'int'> is no class of modules; give a class such as nn\.TransformerEncoderLayer"),
        ("", r"activation_checkpointing='' can't be read; write blocks, a number k"),
        ("blocks+all", r"'all' can't be kept; choose \+matmuls"),
        ("Bloc", r"activation_checkpointing='Bloc': the model has no Bloc; it has Block, Model$"),
        (nn.LSTM, r"activation_checkpointing='LSTM': the model has no LSTM; it has Block, Model$"),
        (9, r"activation_checkpointing='blocks/9': the model has only 4 of them; choose a smaller number than 9"),
        ("ModuleList", r"ModuleList has no forward to run again; choose among Block, Model"),
    ],
)
def test_what_names_nothing_is_refused_in_one_line(wanted: Any, text: str) -> None:
    model = model_of()
    with pytest.raises(ConfigError, match=text) as refused, recomputed(model, wanted):
        pass
    assert "\n" not in str(refused.value)
    assert all("forward" not in module.__dict__ for module in model.modules())


def test_keeping_something_unknown_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"keep='attention' is not known; choose nothing or matmuls"):
        ActivationCheckpointing(keep="attention")  # type: ignore[arg-type]


def test_a_model_without_blocks_is_refused_by_the_engine_with_the_classes_it_has() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))
    with (
        Engine(world=World(), activation_checkpointing="blocks") as engine,
        pytest.raises(ConfigError, match=r"has no blocks \(modules of one class, .*; name a class .*: Sequential$"),
    ):
        engine.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_a_compiled_model_is_refused() -> None:
    model = model_of()
    model.compile(backend="eager")
    with pytest.raises(ConfigError, match=r"with a compiled Model: torch\.compile decides by itself"):
        found(model)


def test_a_product_that_is_changed_in_place_can_t_be_kept() -> None:
    layer = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4))
    with recomputed(layer, "Sequential+matmuls"):
        out = layer(torch.randn(2, 4)).sum()
        with pytest.raises(ConfigError, match=r"but Sequential changes such an output in place \(as nn\.ReLU\(inplace"):
            out.backward()
    with recomputed(layer, "Sequential"):
        layer(torch.randn(2, 4)).sum().backward()
