"""Weights by key, put into the parameters they are made of."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Parameter

from paceline.parameter_server.key_ranges import KeyTable, plan_keys
from paceline.sharding.bucket import GradientSpec, plan_buckets
from paceline.sharding.flat_layout import BLOCK, FlatLayout
from paceline.strategies.server.space import ModelWeights


def parameters() -> list[Parameter]:
    """One of several keys, one whose memory is not in order, a scalar."""
    shapes = [(3, BLOCK), (5, 7), ()]
    made = [Parameter(torch.zeros(shape)) for shape in shapes]
    made[1] = Parameter(torch.zeros(7, 5).t())
    return made


def table_of(of: list[Parameter]) -> KeyTable:
    layout = FlatLayout.of((str(place), parameter) for place, parameter in enumerate(of))
    specs = [GradientSpec(tuple(p.shape), p.dtype, p.device) for p in of]
    return plan_keys(layout, plan_buckets(specs, range(len(of)), 4 * BLOCK, aligned=False), key_bytes=4 * BLOCK)


def values(of: list[Parameter]) -> list[Tensor]:
    return [torch.randn(p.shape, generator=torch.Generator().manual_seed(place)) for place, p in enumerate(of)]


def test_all_keys_together_are_the_weights() -> None:
    mine, wanted = parameters(), values(parameters())
    table, weights = table_of(mine), ModelWeights(mine)
    assert len(table.keys) > 3
    for key in table.keys:
        weights.put(key, key.gathered(wanted))
    assert all(torch.equal(parameter, value) for parameter, value in zip(mine, wanted, strict=True))
    assert mine[1].stride() == (1, 5)


def test_a_parameter_that_got_other_memory_is_still_found() -> None:
    mine, wanted = parameters(), values(parameters())
    table, weights = table_of(mine), ModelWeights(mine)
    for _ in range(2):
        for key in table.keys:
            weights.put(key, key.gathered(wanted))
        mine[0].data = torch.zeros_like(mine[0])
    for key in table.keys:
        weights.put(key, key.gathered(wanted))
    assert torch.equal(mine[0], wanted[0])


def test_what_was_kept_first_comes_back_once() -> None:
    mine = parameters()
    weights = ModelWeights(mine)
    weights.restore()
    weights.keep()
    weights.put_all([torch.ones_like(parameter) for parameter in mine])
    weights.keep()
    weights.put_all([torch.full_like(parameter, 2) for parameter in mine])
    weights.restore()
    assert all(not parameter.any() for parameter in mine)
    weights.put_all([torch.ones_like(parameter) for parameter in mine])
    weights.restore()
    assert all(parameter.all() for parameter in mine)
