"""`paceline bench memory`: bytes by role are the formula's, memory that workers share is divided among them."""

from __future__ import annotations

import io
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from paceline import World
from paceline.bench import memory as plan
from paceline.bench.memory import (
    PARTS,
    PEERS,
    MemoryRun,
    check_names,
    joined,
    row_of,
    shares,
    size,
    union,
    without,
)
from paceline.bench.memory_contestants import MLP50M, strategies
from paceline.bench.memory_measure import Mappings, Resident, formula, measure, peak_pss, reset_peak, resident
from paceline.bench.report import show_memory
from paceline.bench.workloads import mlp
from paceline.cli import bench as cli
from paceline.errors import ConfigError
from tests.workers import run_workers

# A million parameters in layers of many blocks, so that cuts fall where the formula says.
SMALL = mlp("small", narrow=64, wide=512, hidden=3, batch_size=8)


def measured(world: World, *, contestant: str, backend: str = "paceline") -> dict[str, Any]:
    return measure(MemoryRun(contestant, world.size, backend, bucket_mib=0.1), world, SMALL)


@cache
def row(contestant: str, workers: int, backend: str = "paceline") -> dict[str, Any]:
    results = run_workers(measured, workers, contestant=contestant, backend=backend)
    for result in results:
        assert result.error is None, result.traceback
    return row_of(MemoryRun(contestant, workers, backend), [result.value for result in results])


@pytest.mark.workers
@pytest.mark.parametrize("contestant", strategies())
def test_parameters_gradients_and_state_are_within_three_percent_of_the_formula(contestant: str) -> None:
    found = row(contestant, 2)
    assert found["held"] == pytest.approx(found["formula"], rel=0.03), found


@pytest.mark.workers
def test_so_they_are_on_three_workers_over_gloo() -> None:
    found = row("zero1", 3, "gloo")
    assert found["held"] == pytest.approx(found["formula"], rel=0.03), found


@pytest.mark.workers
@pytest.mark.parametrize("contestant", ["torch-ddp", "torch-fsdp2"])
def test_torch_is_measured_the_same_way(contestant: str) -> None:
    found = row(contestant, 2)
    assert found["held"] == pytest.approx(found["formula"], rel=0.03), found
    if contestant == "torch-ddp":
        assert found["buffers"] == pytest.approx(found["gradients"], rel=0.05)  # its buckets


@pytest.mark.workers
def test_parts_add_up_to_the_peak_and_activations_are_what_backward_needs() -> None:
    found = row("ddp", 2)
    assert sum(found[part] for part in PARTS) == found["step_peak"]
    # The inputs of five layers and of the loss; ReLU's results are inputs too.
    assert found["activations"] == pytest.approx(4 * 8 * (64 + 4 * 512 + 64), rel=0.1)


def test_the_model_of_the_bench_has_fifty_million_parameters() -> None:
    assert MLP50M.parameters == 50_357_248
    run = MemoryRun("zero2 weights=per worker", 4)
    assert formula(run, 50_000_000) == 50_000_000 * (4 + 12 // 4)
    assert formula(MemoryRun("zero2", 4), 50_000_000) == 50_000_000 * (1 + 12 // 4)
    assert formula(MemoryRun("zero2", 4, "gloo"), 50_000_000) == formula(run, 50_000_000)
    assert formula(MemoryRun("torch-ddp", 4), 50_000_000) == 16 * 50_000_000


# -- spans -------------------------------------------------------------------------------------------------------------


def test_spans_that_touch_or_overlap_are_one() -> None:
    assert union([("a", 10, 20), ("a", 0, 10), ("a", 15, 18), ("b", 5, 6), ("b", 7, 7)]) == {
        "a": [(0, 20)],
        "b": [(5, 6)],
    }


def test_what_another_role_has_is_not_counted_again() -> None:
    mine = union([("a", 0, 100), ("b", 0, 10)])
    assert without(mine, union([("a", 10, 20), ("a", 90, 120), ("c", 0, 5)])) == {
        "a": [(0, 10), (20, 90)],
        "b": [(0, 10)],
    }
    assert size(without(mine, mine)) == 0
    assert size(joined(mine, {"a": [(50, 200)]})) == 210


def test_memory_that_k_workers_hold_counts_one_k_th_for_each() -> None:
    first, second = {"file": [(0, 90)], "worker 0": [(0, 7)]}, {"file": [(30, 120)], "worker 1": [(0, 7)]}
    assert shares([first, second]) == [30 + 60 / 2 + 7, 60 / 2 + 30 + 7]
    assert shares([first] * 3) == [97 / 3] * 3
    assert shares([{}, first]) == [0, 97]


# -- the process -------------------------------------------------------------------------------------------------------


def test_a_private_tensor_counts_with_its_whole_allocation_and_a_shared_one_by_its_bytes_in_the_file() -> None:
    tensor = torch.zeros(1000)
    start = tensor.data_ptr()
    assert Mappings("worker 0", "").span_of(tensor[10:20]) == ("worker 0", start, start + 4000)
    page = start // 4096 * 4096
    shared = f"{page:x}-{page + 8192:x} rw-s 00003000 00:01 77 /memfd:paceline (deleted)\n"
    private = "00400000-00500000 r-xp 00000000 08:01 99 /bin/python\n"
    offset = start - page + 0x3000
    assert Mappings("worker 0", private + shared).span_of(tensor[10:20]) == (
        "file 00:01 77",
        offset + 40,
        offset + 80,
    )


def test_the_kernels_peak_is_that_since_the_reset_and_untouched_memory_is_not_resident() -> None:
    reset_peak()
    before = peak_pss()
    big = torch.empty(64 * 2**20, dtype=torch.uint8)
    span = big.data_ptr(), big.data_ptr() + big.nbytes
    assert resident([span]) < 2**20
    big.fill_(1)
    assert resident([span]) == pytest.approx(big.nbytes, abs=2**20)
    held = Resident.now().pss
    del big
    assert peak_pss() >= before + 60 * 2**20
    reset_peak()
    assert peak_pss() < held
    assert resident([]) == 0


# -- the command -------------------------------------------------------------------------------------------------------


def made_up(run: MemoryRun) -> dict[str, Any]:
    figures = dict.fromkeys((*PARTS, "held", "pss_before_step", "step_peak", "highest_peak"), 2_000_000)
    return {"contestant": run.contestant, "workers": run.workers, "formula": 1_900_000, **figures}


def test_every_contestant_runs_on_every_number_of_workers_and_the_table_says_how_near_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    seen: list[MemoryRun] = []

    def fake(runs: list[MemoryRun], tell: Any) -> list[dict[str, Any]]:
        seen.extend(runs)
        return [made_up(run) for run in runs]

    monkeypatch.setattr(plan, "measure_memory", fake)
    cli.memory(strategy=["zero1"], against=["torch-ddp"], workers=None, json_file=tmp_path / "memory.json")
    assert [(run.contestant, run.workers) for run in seen] == [
        ("zero1", 2), ("torch-ddp", 2), ("zero1", 4), ("torch-ddp", 4)
    ]  # fmt: skip
    assert "2 (+5.3 %)" in capsys.readouterr().out
    assert '"rows"' in (tmp_path / "memory.json").read_text()


def test_by_default_all_strategies_with_a_formula_run_and_nobody_means_no_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(plan, "measure_memory", lambda runs, tell: seen.extend(run.contestant for run in runs) or [])
    cli.memory(against=["nobody"], workers=[2])
    assert seen == list(strategies())
    assert {"ddp", "zero1", "zero2", "zero2 weights=per worker"} <= set(seen)


def test_the_table_says_how_near_the_formula_is() -> None:
    rows, machine = [made_up(MemoryRun("zero1", 2))], {"torch": "2", "cpu": "x", "cores": 1, "cpu_capability": "y"}
    shown = io.StringIO()
    result = {"parameters": 1, "backend": "gloo", "rows": rows, "machine": machine}
    show_memory(result, Console(file=shown, width=160))
    (row,) = [line for line in shown.getvalue().splitlines() if line.startswith("zero1")]
    assert row.split()[:9] == ["zero1", "2", "2", "2", "2", "2", "2", "(+5.3", "%)"]


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["zero9"], r"'zero9' is not known; choose among ddp, .*torch-fsdp2"),
        (["deepspeed-zero1"], r"deepspeed-zero1 is not here: DeepSpeed is not installed beside paceline"),
    ],
)
def test_who_can_t_run_is_refused_before_anything_starts(
    names: list[str], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "known_peers", lambda: ("torch-ddp", "torch-fsdp2"))
    with pytest.raises(ConfigError, match=text):
        check_names(names, ["ddp"])
    assert set(names) & {*PEERS, "zero9"}


def test_numbers_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ConfigError, match="--workers 0: there is at least one"):
        MemoryRun("ddp", 0)
    with pytest.raises(ConfigError, match="--backend 'smoke' is not known; choose one of paceline, gloo"):
        MemoryRun("ddp", 2, "smoke")
