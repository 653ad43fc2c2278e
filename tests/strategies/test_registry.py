"""Strategies are found by name or by their config; what is not known is refused in one line with what is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

import pytest
from torch import nn

from paceline import Engine, World
from paceline.errors import ConfigError
from paceline.optim.offload import OffloadName
from paceline.optim.precision import DTYPES
from paceline.sharding.footprint import Model
from paceline.strategies import registry
from paceline.strategies.ddp import DdpConfig
from paceline.strategies.fsdp.fsdp import FsdpConfig
from paceline.strategies.registry import STRATEGIES, Registered, choose, register, synchronous_strategies
from paceline.strategies.star import StarConfig
from paceline.strategies.zero.zero2 import Zero2Config
from paceline.world import known_names


def test_a_name_means_the_strategy_with_its_defaults() -> None:
    assert choose("star").config == StarConfig()
    assert choose("star") == choose(StarConfig())
    assert str(choose("ddp")) == "ddp"


def test_classes_among_the_settings_are_shown_by_name() -> None:
    assert str(choose(FsdpConfig(units=(nn.Linear, nn.Embedding)))) == "fsdp units=Linear,Embedding"
    assert str(choose(FsdpConfig(units=nn.Linear))) == "fsdp units=Linear"


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"^strategy='dpd' is not known; choose one of ddp(, \w+)*, star(, \w+)*$"):
        Engine(world=World(), strategy="dpd")


def test_something_that_is_no_config_is_refused_with_names_and_an_example() -> None:
    with pytest.raises(
        ConfigError, match=r"^strategy=7 is no strategy; give one of the names ddp, .* DdpConfig\(\) or"
    ):
        Engine(world=World(), strategy=7)


def test_the_footprint_of_a_chosen_strategy_follows_its_configuration() -> None:
    model, job = Model(840), {"workers": 4, "lanes": 4, "per_host": 4}
    assert choose("zero2").footprint(model, **job).parameters == 840
    assert choose(Zero2Config(weights="per worker")).footprint(model, **job).parameters == 4 * 840
    assert choose("ddp").footprint(model, **job).held == 16 * 840
    assert not choose("parameter_server").has_footprint
    with pytest.raises(ConfigError, match="the footprint of strategy='parameter_server' is not known"):
        choose("parameter_server").footprint(model, **job)


def test_every_strategy_is_listed_under_its_own_name_with_a_config_that_needs_no_arguments() -> None:
    for name, entry in STRATEGIES.items():
        assert entry.name == name
        assert choose(name).config == entry.config()
        assert all(type(config) is entry.config for config in entry.examples)


@dataclass(frozen=True)
class _Bounded:
    steps: int = 0
    mode: str = "update"


BOUNDED = Registered(
    "bounded",
    _Bounded,
    open=lambda config, job: None,  # type: ignore[arg-type, return-value]
    bits_of_one_process=lambda config: config.steps == 0,
    examples=(_Bounded(mode="aggregate"), _Bounded(steps=3)),
)


def test_the_synchronous_strategies_are_every_way_to_one_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {name: STRATEGIES[name] for name in ("ddp", "star")} | {"bounded": BOUNDED}
    monkeypatch.setattr(registry, "STRATEGIES", known)
    names = [str(chosen) for chosen in synchronous_strategies()]
    assert names == ["ddp", "star", "bounded", "bounded mode=aggregate"]


def test_a_chosen_strategy_says_how_it_differs_from_its_defaults() -> None:
    assert str(registry.Chosen(BOUNDED, _Bounded(steps=2))) == "bounded steps=2"
    assert str(registry.Chosen(BOUNDED, _Bounded())) == "bounded"


def test_a_name_can_t_be_taken_twice() -> None:
    with pytest.raises(ConfigError, match="two strategies are called 'ddp'"):
        register(Registered("ddp", DdpConfig, open=lambda config, job: None))  # type: ignore[arg-type, return-value]


def test_the_launcher_knows_the_words_that_the_engine_knows() -> None:
    """It has no torch to ask them."""
    told = {
        name: known_names.StrategyTraits(entry.uses_servers, entry.takes_offload, entry.takes_low_precision)
        for name, entry in STRATEGIES.items()
        if entry.open.__module__.startswith("paceline.")
    }
    assert told == known_names.STRATEGIES
    assert tuple(DTYPES) == known_names.PRECISIONS
    assert get_args(OffloadName) == known_names.OFFLOADS
