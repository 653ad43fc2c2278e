"""What all strategies have in common: members that the engine may use on any of them, and the watch over writes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from paceline.collectives.byte_count import Traffic
from paceline.strategies.ddp import Ddp
from paceline.strategies.fsdp.fsdp import Fsdp
from paceline.strategies.fsdp.hybrid import HybridInShards, HybridInTheModel
from paceline.strategies.strategy import Strategy, StrategyBase, WriteWatch
from paceline.strategies.zero.zero1 import Zero1
from paceline.strategies.zero.zero2 import Zero2

DECLARED = sorted(name for name in vars(Strategy) if not name.startswith("_"))


@pytest.mark.parametrize("kind", [Ddp, Zero1, Zero2, Fsdp, HybridInTheModel, HybridInShards])
def test_every_member_of_the_protocol_is_declared_by_the_class(kind: type) -> None:
    made_in_init = {"parameters", "replicas"}
    missing = [name for name in DECLARED if not hasattr(kind, name) and name not in made_in_init]
    assert not missing


def test_a_strategy_whose_lanes_can_not_be_watched_says_nothing_about_them() -> None:
    base = StrategyBase()
    base.watch_lanes(wanted=True)
    assert base.lane_checks is None
    assert base.traffic == Traffic()


def test_a_write_in_place_is_seen_until_it_is_marked_clean() -> None:
    watch, weight = WriteWatch(), nn.Parameter(torch.zeros(3))
    assert watch.was_written(weight)
    watch.mark_clean([weight])
    assert not watch.was_written(weight)
    with torch.no_grad():
        weight.add_(1)
    assert watch.was_written(weight)


def test_other_memory_in_a_parameters_place_is_seen_where_addresses_are_watched() -> None:
    watch, weights = WriteWatch(addresses=True), [nn.Parameter(torch.zeros(3)) for _ in range(2)]
    watch.mark_clean(weights)
    assert watch.first_changed(weights) is None
    weights[1].data = torch.zeros(3)
    assert watch.first_changed(weights) is weights[1]
    assert watch.was_moved(weights[1])
    assert not watch.was_written(weights[1])
