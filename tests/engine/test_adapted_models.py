"""Adapters: a checkpoint holds what is trained and a reference to the base, and knows another base when it sees one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from paceline import Engine, World
from paceline.checkpoint.load import Checkpoint
from paceline.errors import CheckpointError
from tests.workers import hashes, run_workers

STEPS, HALF, WIDTH = 6, 3, 24


class Adapted(nn.Module):
    """As peft leaves a model: a frozen base, a trained adapter, one that is not active, a trained head, a buffer."""

    def __init__(self, base_seed: int = 1) -> None:
        super().__init__()
        self.peft_config = {"default": "what peft knows of it", "other": "and of another"}
        self.base_layer = nn.Linear(8, WIDTH)
        self.embed, self.unembed = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.unembed.weight = self.embed.weight
        generator = torch.Generator().manual_seed(base_seed)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
        self.requires_grad_(False)
        self.lora_A = nn.ModuleDict({name: nn.Linear(8, 4, bias=False) for name in self.peft_config})
        self.lora_B = nn.ModuleDict({name: nn.Linear(4, WIDTH, bias=False) for name in self.peft_config})
        self.modules_to_save = nn.ModuleDict({"default": nn.Linear(WIDTH, 1)})
        self.lora_A["other"].requires_grad_(False)
        self.lora_B["other"].requires_grad_(False)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += 1
        hidden = F.relu(self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x)))
        return self.modules_to_save["default"](self.unembed(F.relu(self.embed(hidden))))  # type: ignore[no-any-return]


def trains(
    world: World, *, folder: str | None = None, saves: bool = False, until: int = STEPS, base_seed: int = 1,
    all_parameters: bool = True, asynchronous: bool = True, **job: Any,
) -> str:  # fmt: skip
    """With `all_parameters` the optimizer holds the frozen ones too, so that strategies with shards cut them."""
    with Engine(world=world, **{"lanes": 4, "bucket_mib": 0.001} | job) as engine:
        model = Adapted(base_seed)
        held = [p for p in model.parameters() if all_parameters or p.requires_grad]
        generator = torch.Generator().manual_seed(3)
        data = TensorDataset(torch.randn(48, 8, generator=generator), torch.randn(48, 1, generator=generator))
        model, optimizer, loader = engine.prepare(
            model, torch.optim.AdamW(held, lr=0.01), DataLoader(data, batch_size=2, shuffle=True)
        )
        checkpoints = engine.checkpoints(folder or "unused", asynchronous=asynchronous)
        if folder is not None:
            checkpoints.resume()
        while engine.step < until:
            for x, y in loader:
                engine.backward(F.mse_loss(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
                if engine.stepped and engine.step == HALF and saves:
                    checkpoints.save()
                if engine.stepped and engine.step == until:
                    break
        checkpoints.close()
        return engine.weights_hash()


def stored(folder: Path) -> dict[str, Any]:
    return Checkpoint.open(folder / f"checkpoint-{HALF}").tree


def test_a_checkpoint_holds_what_is_trained_all_adapters_and_a_reference_to_the_base(tmp_path: Path) -> None:
    trains(World(), folder=str(tmp_path), saves=True, until=HALF)
    tree = stored(tmp_path)
    assert set(tree["models"][0]) == {
        "lora_A.default.weight", "lora_A.other.weight", "lora_B.default.weight", "lora_B.other.weight",
        "modules_to_save.default.weight", "modules_to_save.default.bias", "seen",
    }  # fmt: skip
    base = tree["bases"][0]
    assert {name: row[:2] for name, row in base.items()} == {
        "base_layer.weight": ["F32", [WIDTH, 8]],
        "base_layer.bias": ["F32", [WIDTH]],
        "embed.weight": ["F32", [WIDTH, WIDTH]],
        "unembed.weight": ["F32", [WIDTH, WIDTH]],
    }
    assert base["embed.weight"] == base["unembed.weight"] != base["base_layer.weight"]


def test_of_a_plain_model_with_frozen_layers_a_checkpoint_holds_everything(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    model[0].requires_grad_(False)
    with Engine(world=World()) as engine:
        engine.prepare(model, torch.optim.SGD(model[1].parameters(), lr=0.1))
        engine.save_state(tmp_path / "saved")
    tree = Checkpoint.open(tmp_path / "saved").tree
    assert set(tree["models"][0]) == {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert tree["bases"] == [{}]


@pytest.mark.parametrize("all_parameters", [True, False])
@pytest.mark.workers
@pytest.mark.parametrize(
    ("before", "saving", "after", "loading"),
    [("zero2", 2, "fsdp", 3), ("fsdp", 3, "ddp", 1), ("ddp", 2, "zero3", 3), ("zero3", 2, "zero1", 2)],
)
def test_adapters_go_on_under_another_strategy_on_other_workers_with_the_same_bits(
    tmp_path: Path, before: str, saving: int, after: str, loading: int, all_parameters: bool
) -> None:
    job: dict[str, Any] = {"folder": str(tmp_path), "all_parameters": all_parameters}
    hashes(run_workers(trains, saving, saves=True, until=HALF, strategy=before, **job))
    assert not any(name in stored(tmp_path)["models"][0] for name in ("base_layer.weight", "embed.weight"))
    resumed = hashes(run_workers(trains, loading, strategy=after, **job))
    assert resumed == {trains(World(), all_parameters=all_parameters)}


@pytest.mark.workers
@pytest.mark.parametrize("strategy", ["ddp", "zero2", "fsdp"])
def test_another_base_is_refused_by_the_name_of_its_first_parameter(tmp_path: Path, strategy: str) -> None:
    trains(World(), folder=str(tmp_path), saves=True, until=HALF)
    results = run_workers(trains, 2, folder=str(tmp_path), base_seed=2, strategy=strategy)
    folder = tmp_path / f"checkpoint-{HALF}"
    assert [result.error for result in results] == 2 * [
        f"CheckpointError: the checkpoint in {folder} holds adapters of another base: 'base_layer.weight' has other "
        "values here; build the base that it was trained on, from the same files"
    ]


def test_another_dtype_or_shape_of_the_base_is_told(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    with Engine(world=World(), lanes=4) as engine:
        model = Adapted()
        engine.prepare(model, torch.optim.AdamW(model.modules_to_save.parameters()))
        engine.save_state(folder)
    for change, told in [
        (lambda model: model.base_layer.to(torch.float64), "'base_layer.weight' is of F32 there and F64 here"),
        (
            lambda model: setattr(model.base_layer, "bias", nn.Parameter(torch.zeros(1), requires_grad=False)),
            f"'base_layer.bias' is ({WIDTH},) there and (1,) here",
        ),
        (lambda model: setattr(model.base_layer, "bias", None), "the model has no 'base_layer.bias'"),
    ]:
        model = Adapted()
        change(model)
        with Engine(world=World(), lanes=4) as engine:
            engine.prepare(model, torch.optim.AdamW(model.modules_to_save.parameters()))
            with pytest.raises(CheckpointError, match="holds adapters of another base") as refused:
                engine.checkpoints(tmp_path).load_weights(folder)
            assert told in str(refused.value)


def test_a_checkpoint_that_holds_the_base_itself_is_loaded_whole(tmp_path: Path) -> None:
    """As earlier versions wrote them, or a job before its model had a peft_config."""

    def saved(model: Adapted, load: bool) -> str:
        with Engine(world=World(), lanes=4) as engine:
            engine.prepare(model, torch.optim.AdamW(model.modules_to_save.parameters()))
            if load:
                engine.load_state(tmp_path / "whole")
            else:
                engine.save_state(tmp_path / "whole")
            return engine.weights_hash()

    plain = Adapted(1)
    plain.peft_config = {}
    assert saved(Adapted(2), load=False) != (before := saved(plain, load=False))
    assert saved(Adapted(2), load=True) == before
