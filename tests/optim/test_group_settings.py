"""An optimizer's numbers as one vector."""

from __future__ import annotations

import pytest
import torch
from torch.nn import Parameter

from paceline.errors import ConfigError
from paceline.optim.group_settings import GroupSettings, Settings
from paceline.optim.range_optimizer import optimizer_on


def adamw(lr: float | torch.Tensor = 0.1) -> torch.optim.AdamW:
    groups = [{"params": [Parameter(torch.ones(1))]}, {"params": [Parameter(torch.ones(1))], "lr": 0.01}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95))


def test_numbers_read_on_one_side_are_put_into_the_groups_of_the_other() -> None:
    here, there = adamw(), adamw()
    settings = GroupSettings([here])
    here.param_groups[0].update(lr=0.5, betas=(0.1, 0.2), maximize=True)
    GroupSettings([there]).put(settings.read(), dict(enumerate(there.param_groups)))
    for mine, theirs in zip(here.param_groups, there.param_groups, strict=True):
        assert {k: v for k, v in mine.items() if k != "params"} == {k: v for k, v in theirs.items() if k != "params"}
        assert {k: type(v) for k, v in mine.items()} == {k: type(v) for k, v in theirs.items()}


def test_an_optimizer_on_pieces_with_some_of_the_groups_takes_its_part() -> None:
    optimizer = adamw()
    settings = GroupSettings([optimizer])
    on_pieces = optimizer_on(optimizer, [[], [Parameter(torch.ones(1))]])
    optimizer.param_groups[0]["lr"], optimizer.param_groups[1]["lr"] = 7.0, 8.0
    settings.put(settings.read(), {1: on_pieces.param_groups[0]})
    assert on_pieces.param_groups[0]["lr"] == 8.0


def test_groups_are_counted_through_over_several_optimizers() -> None:
    first, second = adamw(), torch.optim.SGD([Parameter(torch.ones(1))], lr=3.0, momentum=0.5)
    settings = GroupSettings([first, second])
    other = torch.optim.SGD([Parameter(torch.ones(1))], lr=1.0)
    settings.put(settings.read(), {2: other.param_groups[0]})
    assert (other.param_groups[0]["lr"], other.param_groups[0]["momentum"]) == (3.0, 0.5)


def test_only_learning_rates_are_multiplied_by_the_factor() -> None:
    optimizer = adamw()
    settings = GroupSettings([optimizer])
    settings.put(settings.read(), dict(enumerate(optimizer.param_groups)), lr_factor=0.5)
    assert [group["lr"] for group in optimizer.param_groups] == [0.05, 0.005]
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.95)


def test_each_momentum_is_changed_in_its_own_group() -> None:
    groups = [{"params": [Parameter(torch.ones(1))], "momentum": m} for m in (0.5, 0.25)]
    optimizers = [torch.optim.SGD(groups, lr=1.0), adamw()]
    settings = GroupSettings(optimizers)
    everything = [group for optimizer in optimizers for group in optimizer.param_groups]
    settings.put(settings.read(), dict(enumerate(everything)), momentum=lambda m: m / 2)
    assert [group["momentum"] for group in everything[:2]] == [0.25, 0.125]
    assert [group["betas"] for group in everything[2:]] == [(0.45, 0.95)] * 2
    assert [group["lr"] for group in everything] == [1.0, 1.0, 0.1, 0.01]


def test_the_first_momentum_is_known_and_a_rule_without_one_has_none() -> None:
    sgd = torch.optim.SGD([Parameter(torch.ones(1))], momentum=0.5)
    adagrad = torch.optim.Adagrad([Parameter(torch.ones(1))])
    found = [GroupSettings([optimizer]) for optimizer in (sgd, adamw(), adagrad)]
    assert [settings.momentum(settings.read()) for settings in found] == [0.5, 0.9, None]


def test_a_tensor_as_learning_rate_is_filled_not_replaced() -> None:
    optimizer = adamw(torch.tensor(0.25))
    rate = optimizer.param_groups[0]["lr"]
    settings = GroupSettings([optimizer])
    settings.put(settings.read(), dict(enumerate(optimizer.param_groups)), lr_factor=2.0)
    assert optimizer.param_groups[0]["lr"] is rate
    assert float(rate) == 0.5


def test_how_an_update_is_computed_does_not_travel() -> None:
    fused = torch.optim.AdamW([Parameter(torch.ones(1))], fused=True)
    plain = torch.optim.AdamW([Parameter(torch.ones(1))], fused=False, foreach=False)
    assert len(GroupSettings([fused])) == len(GroupSettings([plain]))


def test_what_a_scheduler_adds_later_is_not_part_of_the_vector() -> None:
    optimizer = adamw()
    settings = GroupSettings([optimizer])
    before = len(settings.read())
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert "initial_lr" in optimizer.param_groups[0]
    assert len(settings.read()) == before


def test_the_first_difference_of_two_vectors_is_named() -> None:
    optimizer = adamw()
    settings = GroupSettings([optimizer])
    one = settings.read()
    optimizer.param_groups[1]["betas"] = (0.9, 0.5)
    assert settings.difference(one, settings.read()) == ("betas[1] of group 1", 0.95, 0.5)
    assert settings.difference(one, one) is None


def test_a_vector_of_another_length_says_what_to_do() -> None:
    settings = GroupSettings([adamw()])
    with pytest.raises(ConfigError, match="numeric settings here but 1 came; build the same groups"):
        settings.put([1.0], {})


def test_a_vector_by_name_and_back_keeps_values_and_kinds() -> None:
    optimizers = [adamw(), torch.optim.SGD([Parameter(torch.ones(1))], momentum=0.5, nesterov=True)]
    settings = GroupSettings(optimizers)
    named = settings.by_group(settings.read())
    assert named[1]["lr"] == 0.01
    assert named[1]["betas"] == (0.9, 0.95)
    assert named[2]["nesterov"] is True
    assert settings.vector(named) == settings.read()


def test_settings_are_put_back_as_they_were() -> None:
    optimizer = adamw(lr=torch.tensor(0.1))
    optimizer.made = 3  # type: ignore[attr-defined]
    group = optimizer.param_groups[0]
    group["history"], rate, parameters = [1], group["lr"], group["params"]
    before = Settings.of(optimizer)
    optimizer.made, optimizer.come_since = 4, 1.0  # type: ignore[attr-defined]
    rate.fill_(7.0)
    group["history"].append(2)
    group.update(weight_decay=0.5, made=1)
    before.put_back(optimizer)
    assert (optimizer.made, group["history"], group["weight_decay"]) == (3, [1], 0.01)  # type: ignore[attr-defined]
    assert group["lr"] is rate
    assert rate.item() == pytest.approx(0.1)
    assert group["params"] is parameters
    assert "made" not in group
    assert not hasattr(optimizer, "come_since")
