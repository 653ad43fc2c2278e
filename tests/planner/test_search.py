"""The search: the same global batch in every row, what fits first by speed, and what is said where nothing does."""

from __future__ import annotations

import dataclasses
import json
from html.parser import HTMLParser
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

from paceline.errors import ConfigError
from paceline.planner.hardware import hardware_named
from paceline.planner.model_profile import ModelProfile
from paceline.planner.model_source import Source, profile_source
from paceline.planner.report import page, show_plan
from paceline.planner.search import Plan, Request, search, variants_for
from paceline.planner.step_time_model import pass_s
from tests.planner.random_models import Block, loss_of
from tests.planner.test_hardware import machine


def model() -> Any:
    network = nn.Sequential(*(Block(64, 2) for _ in range(3)))
    return network, (torch.randn(8, 32, 64), torch.randn(8, 32, 64)), loss_of


def profiled(request: Request) -> ModelProfile:
    return profile_source(Source("blocks", model), lambda n: variants_for(request, n), blocks=lambda m: list(m))


def planned(hardware: Any = None, **options: Any) -> Plan:
    request = Request(**{"workers": 4} | options)
    return search(profiled(request), hardware or hardware_named("H100"), request)


def test_every_row_has_the_global_batch_and_the_fastest_comes_first() -> None:
    plan = planned(precisions=("fp32", "bf16"))
    assert {one.global_batch for one in plan.fitting} == {4 * 8}
    speeds = [one.samples_per_s for one in plan.fitting]
    assert speeds == sorted(speeds, reverse=True)
    settings = {(o.strategy, o.samples, o.accumulate, o.precision, o.recomputed) for o in plan.fitting}
    assert len(settings) == len(plan.fitting) == 6 * 4 * 2 * 2
    assert plan.best is plan.fitting[0]


def wide() -> Any:
    return nn.Sequential(Block(1024, 2)), (torch.randn(8, 512, 1024), torch.randn(8, 512, 1024)), loss_of


def test_large_products_are_fastest_in_low_precision() -> None:
    request = Request(workers=4, precisions=("fp32", "bf16"))
    profile = profile_source(Source("wide", wide), lambda n: variants_for(request, n), blocks=lambda m: list(m))
    assert search(profile, hardware_named("H100"), request).best.precision == "bf16"


def test_time_and_memory_are_the_sums_of_their_parts() -> None:
    for one in planned().fitting:
        time, memory = one.time, one.memory
        assert time.step_s == pytest.approx(time.compute_s + time.update_s + time.exposed_s)
        assert time.hidden_s + time.exposed_s == pytest.approx(time.communication_s)
        assert memory.peak == sum(memory.parts().values())


def test_checkpointing_takes_longer_and_holds_less() -> None:
    plan = planned(strategies=("ddp",), micro_batches=(8,))
    plain, again = sorted(plan.fitting, key=lambda one: one.recomputed)
    assert again.memory.activations < plain.memory.activations
    assert again.time.compute_s > plain.time.compute_s


def test_sharding_more_holds_less() -> None:
    plan = planned(strategies=("ddp", "zero1", "zero2", "zero3"), checkpointing=(False,), micro_batches=(8,))
    state = {one.strategy: one.memory.model_state for one in plan.fitting}
    assert state["ddp"] > state["zero1"] > state["zero2"] > state["zero3"]


def test_a_faster_network_is_never_slower() -> None:
    slow, fast = (
        planned(hardware_named("H100", name), workers=16, per_host=8) for name in ("10 GbE", "InfiniBand 400")
    )
    by_setting = {(o.strategy, o.samples, o.recomputed): o for o in fast.fitting}
    for one in slow.fitting:
        assert one.time.step_s >= by_setting[one.strategy, one.samples, one.recomputed].time.step_s


def test_a_pass_that_was_timed_is_slowed_by_the_workers_beside_it() -> None:
    (step,) = profiled(Request(checkpointing=(False,), micro_batches=(8,))).passes.values()
    timed = dataclasses.replace(step, measured_s=0.5)
    assert pass_s(timed, machine(), 1) == 0.5
    assert 0.5 < pass_s(timed, machine(), 2) < pass_s(timed, machine(), 4)


def test_a_measured_exchange_is_used_where_it_was_measured() -> None:
    plan = planned(machine(), workers=2, strategies=("ddp",))
    assert all(one.time.measured for one in plan.fitting)
    assert not any(one.time.measured for one in planned(machine(), strategies=("ddp",)).fitting)


def test_where_nothing_fits_it_says_by_how_much_and_what_would() -> None:
    plan = planned(memory_bytes=640 * 2**20 + 2**16)
    assert not plan.fitting
    with pytest.raises(
        ConfigError, match=r"^nothing fits: .* needs .* on each worker, .* more than the .* it has"
    ) as it:
        _ = plan.best
    assert "the largest part is" in str(it.value)
    assert "\n" not in str(it.value)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"workers": 0}, "--workers 0"),
        ({"strategies": ("parameter_server",)}, "can't be planned for: no footprint is known"),
        ({"global_batch": 7}, "no micro-batch fills a global batch of 7 on 4 lanes"),
        ({"workers": 4, "per_host": 3}, "don't fill hosts of that size"),
        ({"workers": 4, "lanes": 2}, "--lanes 2"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        planned(**options)


def test_the_plan_can_be_written_as_json() -> None:
    told = json.loads(json.dumps(planned().to_json()))
    assert told["best"]["flags"].startswith("paceline run --workers 4 --strategy ")
    assert told["best"]["why"]
    assert told["fitting"][0]["step_s"] == told["best"]["step_s"]


class Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.counts: dict[str, int] = {}

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.counts[tag] = self.counts.get(tag, 0) + 1
        if tag not in ("meta", "rect", "line") and not self.get_starttag_text().endswith("/>"):  # type: ignore[union-attr]
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag == "rect":
            return
        assert self.open.pop() == tag


def test_the_page_is_one_file_that_asks_nothing_of_the_network() -> None:
    plan = planned()
    text = page(plan)
    assert "http" not in text
    assert "<script" not in text
    reader = Reader()
    reader.feed(text)
    assert not reader.open
    assert reader.counts["svg"] == 2
    assert reader.counts["tr"] == len(plan.fitting) + 1


def test_the_terminal_shows_choice_reason_and_command(capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned()
    show_plan(plan, Console(width=120))
    shown = capsys.readouterr().out
    for word in ("first choice", "why", "on a worker", "paceline run --workers 4", "exposed", plan.best.strategy):
        assert word in shown
