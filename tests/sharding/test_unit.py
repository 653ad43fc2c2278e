"""Units: every parameter in one, by class or by size, and where its memory is aligned."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from paceline.errors import ConfigError
from paceline.sharding.bucket import GradientSpec
from paceline.sharding.unit import ALIGNED, Classes, Unit, cut_units, unit_buckets

CPU = torch.device("cpu")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.norm = nn.Linear(8, 32), nn.LayerNorm(32)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.zeros(5))
        self.tokens = nn.Embedding(10, 8)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.tokens.weight


def units_of(model: nn.Module, classes: Classes | None = None, unit_bytes: int = 10**9) -> dict[str, list[str]]:
    named = dict(model.named_parameters())
    index = {id(parameter): number for number, parameter in enumerate(named.values())}
    specs = [GradientSpec(tuple(p.shape), p.dtype, CPU) for p in named.values()]
    found = cut_units([model], index, specs, classes=classes, unit_bytes=unit_bytes)
    names = list(named)
    return {unit.name: [names[number] for number in unit.parameters] for unit in found}


def test_a_small_model_is_one_unit() -> None:
    assert units_of(Net()) == {"Net": list(dict(Net().named_parameters()))}


def test_classes_are_units_and_what_is_left_belongs_to_whoever_has_it() -> None:
    assert units_of(Net(), classes=(Block,)) == units_of(Net(), classes=("Block",))
    found = units_of(Net(), classes=(Block,))
    assert found["Net"] == ["position"]
    assert found["tokens"] == ["tokens.weight"]  # and not the head's once more
    assert [len(found[f"blocks.{number}"]) for number in (0, 1)] == [4, 4]
    assert "head" not in found


def test_by_size_units_are_the_largest_modules_that_are_not_larger() -> None:
    block = 4 * (8 * 32 + 32 + 32 + 32)
    assert set(units_of(Net(), unit_bytes=block)) == {"Net", "tokens", "blocks.0", "blocks.1"}
    assert "blocks.0.wide" in units_of(Net(), unit_bytes=block - 1)


def test_a_parameter_of_no_module_is_a_unit_of_its_own() -> None:
    model, alone = nn.Linear(2, 2), nn.Parameter(torch.zeros(3))
    parameters = [*model.parameters(), alone]
    index = {id(parameter): number for number, parameter in enumerate(parameters)}
    specs = [GradientSpec(tuple(p.shape), p.dtype, CPU) for p in parameters]
    assert cut_units([model], index, specs, classes=None, unit_bytes=100)[-1] == Unit("no module", None, (2,))


def test_a_class_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match=r"units=Layer, Conv2d: the model has no module of that class"):
        units_of(Net(), classes=("Layer", nn.Conv2d))


def test_large_and_uncut_parameters_travel_alone_and_small_ones_where_memory_is_aligned() -> None:
    full, low = torch.float32, torch.bfloat16
    specs = [
        GradientSpec((size,), dtype, CPU) for size, dtype in ((100, full), (7, full), (5, low), (9, full), (3, full))
    ]
    buckets = list(unit_buckets(specs, Unit("all", None, (0, 1, 2, 3, 4)), 400, uncut={4}))
    assert [[entry.parameter for entry in bucket.entries] for bucket in buckets] == [[0], [4], [1, 3], [2]]
    packed = buckets[2]
    assert [entry.offset for entry in packed.entries] == [0, ALIGNED // 4]
    assert packed.elements == ALIGNED // 4 + 9
