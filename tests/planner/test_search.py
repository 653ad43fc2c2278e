"""The search: the same global batch in every row, what fits first by speed, and what is said where nothing does."""

from __future__ import annotations

import dataclasses
import io
import json
import re
from functools import cache
from html.parser import HTMLParser
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

from paceline.errors import ConfigError
from paceline.planner.hardware import hardware_named
from paceline.planner.memory_model import Memory
from paceline.planner.model_profile import ModelProfile, Variant
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
    return _profiled(tuple(variants_for(request, 8)))


@cache
def _profiled(variants: tuple[Variant, ...]) -> ModelProfile:
    return profile_source(Source("blocks", model), lambda n: variants, blocks=lambda m: list(m))


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


def test_compiled_code_is_faster_and_is_started_with_compile() -> None:
    plan = planned(strategies=("ddp",), micro_batches=(8,), checkpointing=(False,), compiled=(False, True))
    eager, compiled = sorted(plan.fitting, key=lambda one: one.compiled)
    assert compiled.time.compute_s < eager.time.compute_s
    assert compiled.memory.activations <= eager.memory.activations
    assert plan.best is compiled
    assert plan.flags().endswith("Engine(compile=True)")
    assert compiled.settings.endswith(", compiled")
    assert [one["compile"] for one in plan.to_json()["fitting"]] == [True, False]


def test_the_table_says_what_is_compiled_where_that_was_asked_for() -> None:
    for compiled in ((False,), (False, True)):
        console = Console(width=160, record=True, file=io.StringIO())
        show_plan(planned(strategies=("ddp",), micro_batches=(8,), checkpointing=(False,), compiled=compiled), console)
        assert (" compile " in console.export_text()) == (True in compiled)


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


def test_the_engines_own_time_counts_by_item_and_once_a_step() -> None:
    bare = machine()
    slow = machine(rates={n: dataclasses.replace(r, step_s=0.5, item_s=2.0) for n, r in bare.rates.items()})
    for workers, lanes, items in ((1, 4, 4), (4, 4, 1), (2, 4, 2)):
        one, other = (
            planned(on, workers=workers, lanes=lanes, strategies=("ddp",), micro_batches=(8,), checkpointing=(False,))
            for on in (bare, slow)
        )
        exchange_has_the_first = workers == 2  # the only one that was measured, against a plain loop
        wanted = 2.0 * items + 0.5 - 2.5 * exchange_has_the_first
        assert other.best.time.step_s - one.best.time.step_s == pytest.approx(wanted)


def test_a_measured_exchange_is_used_where_it_was_measured() -> None:
    plan = planned(machine(), workers=2, strategies=("ddp",))
    assert all(one.time.measured for one in plan.fitting)
    assert not any(one.time.measured for one in planned(machine(), strategies=("ddp",)).fitting)


def refused(plan: Plan) -> str:
    assert not plan.fitting
    with pytest.raises(ConfigError) as it:
        _ = plan.best
    assert "\n" not in str(it.value)
    return str(it.value)


def bytes_in(text: str) -> int:
    number, unit = text.split()
    return int(float(number) * {"GiB": 2**30, "MiB": 2**20}[unit])


def test_where_nothing_fits_it_says_by_how_much_and_what_would() -> None:
    said = refused(planned(memory_bytes=640 * 2**20 + 2**16))
    assert re.match(r"nothing fits: .* needs .* on each worker, .* more than the .* it has; the largest part is", said)


PROCESS = 640 * 2**20  # of a worker on a GPU
SHARDED = ("zero1", "zero2", "zero3", "fsdp")


def smallest(**options: Any) -> int:
    """The least memory on which something fits."""
    plan = planned(**options)
    return PROCESS + min(one.memory.peak for one in (*plan.fitting, *plan.too_large))


@pytest.mark.parametrize("strategy", [None, "ddp", *SHARDED])
@pytest.mark.parametrize("share", [0.9, 0.6, 0.3])
def test_the_workers_and_devices_that_would_do_are_the_ones_on_which_it_is_planned(
    strategy: str | None, share: float
) -> None:
    """Whatever the sentence says is planned for: it fits there, and on no device that is smaller."""
    options: dict[str, Any] = {"checkpointing": (False,), "micro_batches": (4,)}
    if strategy is not None:
        options["strategies"] = (strategy,)
    least = smallest(**options)
    room = PROCESS + int(share * (least - PROCESS))
    said = refused(planned(memory_bytes=room, **options))
    devices = re.search(r"devices with (?:at least )?([\d.]+ [GM]iB)", said)
    assert devices is not None, said
    enough = bytes_in(devices[1])
    assert planned(memory_bytes=enough, **options).fitting
    assert not planned(memory_bytes=enough - bytes_in("0.02 GiB"), **options).fitting
    more = re.search(r"It would (?:with (\w+) )?on about (\d+) workers", said)
    tried = [4 * factor for factor in (2, 4, 8, 16, 32, 64)]
    hosts: dict[str, Any] = {"hardware": hardware_named("H100", "InfiniBand 400"), "per_host": 4, "memory_bytes": room}
    fits = (count for count in tried if planned(**hosts, **options, workers=count).fitting)
    assert (int(more[2]) if more else None) == next(fits, None), said


def test_only_the_part_that_a_strategy_shards_gets_smaller_with_more_workers() -> None:
    """Weights and gradients are whole under zero1: where these alone don't fit, workers are no help."""
    plan = planned(strategies=("zero1",))
    memory = min(plan.fitting, key=lambda one: one.memory.peak).memory
    said = refused(planned(strategies=("zero1",), memory_bytes=PROCESS + memory.peak - memory.optimizer_state - 1))
    assert "It needs devices with at least" in said
    assert "workers," not in said.split("it has;")[1]


def test_one_worker_is_told_the_strategy_that_shards() -> None:
    least = smallest(workers=1, micro_batches=(1,))
    said = refused(planned(workers=1, micro_batches=(1,), memory_bytes=least - 2**18))
    assert re.search(r"It would with zero1 on about \d+ workers, or on devices with", said), said


def test_workers_beyond_the_lanes_are_not_advised() -> None:
    """A script that fixes its lanes can't have more workers than lanes."""
    said = refused(planned(lanes=4, memory_bytes=smallest() - 2**16))
    assert "It needs devices with at least" in said


LEFT_OUT: dict[str, dict[str, Any]] = {
    "activation checkpointing (leave --no-checkpointing out)": {"checkpointing": (False,)},
    "--precision bf16": {"precisions": ("fp32",)},
    "--micro-batches 1": {"micro_batches": (8,)},
}
ALL: dict[str, Any] = {"checkpointing": (False, True), "precisions": ("fp32", "bf16"), "micro_batches": (8, 1)}


def of_long_samples(memory_bytes: int = 2**33, **options: Any) -> Plan:
    """Under ddp, with activations that are most of what is held."""
    request = Request(workers=4, strategies=("ddp",), memory_bytes=memory_bytes, **ALL | options)
    profile = profiled(request)
    passes = {
        variant: dataclasses.replace(step, saved_bytes=99 * step.saved_bytes, peak_bytes=99 * step.peak_bytes)
        for variant, step in profile.passes.items()
    }
    return search(dataclasses.replace(profile, passes=passes), hardware_named("H100"), request)


def least_of(plan: Plan) -> Memory:
    return min((one.memory for one in plan.fitting), key=lambda memory: memory.peak)


@pytest.mark.parametrize("advice", LEFT_OUT)
def test_what_was_left_out_and_may_be_enough_is_named(advice: str) -> None:
    room = PROCESS + least_of(of_long_samples(**LEFT_OUT[advice])).peak - 1
    said = refused(of_long_samples(room, **LEFT_OUT[advice]))
    assert said.endswith(f". Not tried, and perhaps enough: {advice}"), said


def test_what_was_tried_or_can_t_be_enough_is_not_advised() -> None:
    assert "Not tried" not in refused(of_long_samples(PROCESS + least_of(of_long_samples()).peak - 1))
    nothing = {name: value[:1] for name, value in ALL.items()}
    assert "Not tried" not in refused(of_long_samples(PROCESS + 2**16, **nothing))


def test_ways_that_are_enough_only_together_are_named_together() -> None:
    left_out = {"checkpointing": (False,), "micro_batches": (8,)}
    memory = least_of(of_long_samples(**left_out))
    kept = memory.model_state + memory.communication + memory.inputs
    room = PROCESS + kept + memory.temporary // 8 + 2**16
    said = refused(of_long_samples(room, **left_out))
    both = "activation checkpointing (leave --no-checkpointing out) and --micro-batches 1"
    assert said.endswith(f"perhaps enough: {both}"), said


def test_a_model_that_ran_for_real_is_advised_a_smaller_batch_of_its_own() -> None:
    """Flags would change nothing: it has one pass, of its own batch."""
    request = Request(workers=4, checkpointing=(False,), micro_batches=(8,), strategies=("ddp",))
    profile = dataclasses.replace(profiled(request), how="a real step, measured")
    peak = search(profile, hardware_named("H100"), request).best.memory.peak
    short = dataclasses.replace(request, memory_bytes=PROCESS + peak - 2**16)
    said = refused(search(profile, hardware_named("H100"), short))
    assert said.endswith(". Not tried, and perhaps enough: a smaller batch of the model's own"), said


def test_workers_that_share_a_host_are_told_what_a_worker_and_the_host_need() -> None:
    hardware = machine(memory_bytes=2**30)
    said = refused(planned(hardware, strategies=("ddp",), memory_bytes=None, workers=4))
    needs = re.search(r"It needs ([\d.]+ [GM]iB) for each worker, ([\d.]+ [GM]iB) on a host", said)
    assert needs is not None, said
    assert planned(machine(memory_bytes=bytes_in(needs[2])), strategies=("ddp",), workers=4).fitting
    assert planned(hardware, strategies=("ddp",), workers=4, memory_bytes=bytes_in(needs[1])).fitting


def test_workers_on_more_hosts_are_advised_with_how_many_each_has() -> None:
    options: dict[str, Any] = {"strategies": ("fsdp",), "workers": 4, "micro_batches": (1,)}
    each = 256 * 2**20 + least_of(planned(machine(), **options)).peak - 2**14
    said = refused(planned(machine(memory_bytes=4 * each), **options))
    hosts = re.search(r"It would on about 8 workers \(4 on each host\), or with [\d.]+ GiB for each worker, ", said)
    assert hosts is not None, said


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
