"""Collectives side by side: what is asked, a small comparison between real processes, and what is shown of it."""

from __future__ import annotations

import itertools
import json
import mmap
import os
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore
from typer.testing import CliRunner

from paceline.bench import collective_contestants as contestants
from paceline.bench import collectives as comparing
from paceline.bench.collective_contestants import Prepared, Room
from paceline.bench.collectives import (
    ALGORITHMS,
    BACKENDS,
    OPERATIONS,
    Comparison,
    parse_sizes,
    size_text,
    without_the_missing,
)
from paceline.bench.collectives_measure import Part, Round, compare, summarise, told
from paceline.bench.report import console, plot_collectives, show_collectives
from paceline.cli import bench as cli
from paceline.collectives import choice
from paceline.collectives.shared_memory.kernels import TorchKernels, compiled_library
from paceline.errors import CollectiveError, ConfigError
from paceline.world.world import World
from tests.workers import run_workers

MACHINE = {"torch": "2.13.0", "python": "3.11", "cpu": "a cpu", "cpu_capability": "AVX2", "cores": 2}
INSTALLED = tuple(
    name for name in BACKENDS if name not in ("openmpi", "deepspeed") and (name != "bound" or compiled_library())
)
SMALL = Comparison(tuple(OPERATIONS), (4096,), INSTALLED, ALGORITHMS, workers=2, rounds=1, part_s=1e-4)


def measured(gloo: float, ours: float, foreign: float = 0.0) -> Round:
    seconds = {"gloo": gloo, "paceline": ours, "ring": 2.0}
    return Round(seconds, {name: 3 * value for name, value in seconds.items()}, foreign, steal=0.0)


def a_case(operation: str = "all_reduce", size: str = "4 KiB", nbytes: int = 4096) -> dict[str, Any]:
    rounds = [measured(1.0, 0.5), measured(4.0, 1.0), measured(1.0, 1.0, foreign=0.5)]
    calls = {"gloo": 1, "paceline": 2, "ring": 3}
    sent = {"gloo": None, "paceline": None, "ring": 4096.0}
    case = summarise(operation, nbytes, 4, rounds, calls, sent, dict.fromkeys(calls, 6144.0))
    return {"size": size, **case}


def a_result(*cases: dict[str, Any]) -> dict[str, Any]:
    names = tuple(dict.fromkeys(case["operation"] for case in cases))
    asked = {"operations": names, "workers": 4, "rounds": 3}
    return {"machine": MACHINE, "comparison": asked, "disturbed_above": 0.08, "cases": list(cases)}


# -- between processes -------------------------------------------------------------------------------------------------


@pytest.mark.workers
@pytest.mark.parametrize("workers", [2, 3])
def test_everybody_gets_every_operation_right_and_schedules_send_the_bytes_of_their_formula(workers: int) -> None:
    """`compare` looks at every result before it measures."""
    asked = replace(SMALL, workers=workers)
    results = run_workers(compare_given, workers, text=asked.to_json())
    for rank, result in enumerate(results):
        assert result.error is None, f"rank {rank}: {result.traceback}"
    cases = {case["operation"]: case for case in json.loads(json.dumps(results[0].value["cases"]))}
    assert set(cases) == set(OPERATIONS)
    for name, case in cases.items():
        assert set(case["contestants"]) == set(asked.contestants(name))
        assert len(case["rounds"]) == 1
        for who, facts in case["contestants"].items():
            assert facts["time_s"]["least"] > 0
            assert facts["sent_bytes"] == (facts["formula_bytes"] if who in ALGORITHMS else None), (name, who)


def compare_given(world: World, text: str) -> dict[str, Any]:
    return compare(Comparison.from_json(text), world)


def test_another_number_of_workers_is_refused() -> None:
    with pytest.raises(ConfigError, match="the comparison is for 2 workers, but this world has 1"):
        compare(SMALL, World())


# -- what is asked -----------------------------------------------------------------------------------------------------


def test_the_algorithms_are_those_that_can_be_trained_over() -> None:
    assert ALGORITHMS == choice.ALGORITHMS


def test_every_contestant_comes_first_equally_often_and_nobody_always_follows_the_same() -> None:
    asked = replace(SMALL, backends=("paceline", "gloo", "bound"), algorithms=())
    orders = [asked.order("all_reduce", number) for number in range(6)]
    assert Counter(order[0] for order in orders) == {"paceline": 2, "gloo": 2, "bound": 2}
    pairs = {pair for order in orders for pair in itertools.pairwise(order)}
    assert {after for before, after in pairs if before == "gloo"} == {"paceline", "bound"}


def test_a_comparison_survives_the_trip_to_the_workers() -> None:
    assert Comparison.from_json(SMALL.to_json()) == SMALL


def test_what_is_no_comparison_is_refused() -> None:
    with pytest.raises(ConfigError, match="not a comparison: '\\[\\]'"):
        Comparison.from_json("[]")


def test_sizes_are_read_with_units_and_told_with_them() -> None:
    sizes = parse_sizes("1MiB, 4KiB,1000,1.5GiB,4096")
    assert sizes == (1000, 4096, 2**20, 3 * 2**29)
    assert [size_text(size) for size in sizes] == ["1000 B", "4 KiB", "1 MiB", "1.5 GiB"]


@pytest.mark.parametrize(("size", "workers", "elements"), [(4096, 2, 1024), (4096, 3, 1023), (1, 3, 3)])
def test_every_rank_has_an_equal_part(size: int, workers: int, elements: int) -> None:
    assert replace(SMALL, workers=workers).elements(size) == elements


@pytest.mark.parametrize(
    ("name", "factor"), [("all_reduce", 1.75), ("reduce_scatter", 0.875), ("all_gather", 0.875), ("broadcast", 1.0)]
)
def test_bus_bandwidth_has_the_factors_of_nccl_tests(name: str, factor: float) -> None:
    assert OPERATIONS[name].factor(8) == factor


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--operation", "all_sum"], "--operation 'all_sum' is not known; choose one of all_reduce"),
        (["--backend", "horovod"], "--backend 'horovod' is not known; choose one of paceline"),
        (["--algorithm", "rong"], "--algorithm 'rong' is not known; choose one of ring"),
        (["--sizes", "4KB"], "'4KB' is no size; write a list such as 4KiB"),
        (["--sizes", "0"], "'0' is no size"),
        (["--workers", "1"], "--workers 1: a collective needs at least two"),
        (["--rounds", "0"], "--rounds 0"),
        (["--operation", "broadcast", "--backend", "bound"], "--operation broadcast: no chosen contestant has it"),
        (["--json", "no/such/folder/f.json"], "--json no/such/folder/f.json can't be written"),
        (["--png", "no/such/folder/f.png"], "--png no/such/folder/f.png can't be written"),
    ],
)
def test_bad_input_is_refused_before_anything_starts(options: list[str], words: str) -> None:
    refused = CliRunner().invoke(cli.app, ["collectives", *options]).exception
    assert isinstance(refused, ConfigError), refused
    assert words in str(refused)
    assert "\n" not in str(refused)


def test_who_is_not_installed_is_left_out_with_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparing.importlib.util, "find_spec", lambda name: None if name == "deepspeed" else object())
    monkeypatch.setattr(comparing.shutil, "which", lambda name: None)
    monkeypatch.setattr(comparing, "_has_c_kernels", lambda: False)
    asked, lines = without_the_missing(replace(SMALL, backends=BACKENDS))
    assert asked.backends == ("paceline", "paceline-torch", "paceline-buckets", "gloo")
    assert lines == [
        "bound left out: there is no C compiler, so paceline itself runs with torch kernels too",
        "openmpi left out: there is no mpirun",
        "deepspeed left out: deepspeed is not installed",
    ]


def test_processes_that_mpi_did_not_start_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = SimpleNamespace(COMM_WORLD=SimpleNamespace(Get_size=lambda: 1))
    monkeypatch.setitem(sys.modules, "mpi4py", ModuleType("mpi4py"))
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", alone)
    with pytest.raises(ConfigError, match="--backend openmpi: MPI knows 1 processes, not 2; start with mpirun"):
        contestants.OpenMpi(Room(SMALL))


def test_deepspeed_without_its_operator_is_refused_and_its_buffers_are_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[str, str] = {}
    monkeypatch.setattr(contestants, "enter_environment", told.update)
    fake = SimpleNamespace(init_distributed=lambda *words, **options: None)
    monkeypatch.setitem(sys.modules, "deepspeed", fake)
    with pytest.raises(ConfigError, match="--backend deepspeed: its shared-memory operator was not built"):
        contestants.DeepSpeed(Room(SMALL), World())
    assert told["LOCAL_SIZE"] == "1"
    left = Path(f"/dev/shm/deepspeed_of_a_test_{os.getpid()}")
    left.write_bytes(bytes(4096))
    with left.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ):
        contestants.DeepSpeed.close(object.__new__(contestants.DeepSpeed))
    assert not left.exists()


def test_the_bound_without_a_compiler_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contestants, "choose_kernels", TorchKernels)
    with pytest.raises(ConfigError, match="--backend bound is a sum in C, but there is no compiler; leave it out"):
        contestants.Bound(Room(SMALL), HashStore(), rank=0, most_elements=1024)


def test_a_wrong_result_is_never_timed() -> None:
    tensors = Room(SMALL).tensors(1024)
    with pytest.raises(CollectiveError, match="gloo: the result of all_reduce on rank 1 is wrong"):
        Prepared("all_reduce", tensors, lambda: None).check("gloo", rank=1, size=2)


# -- what is shown -----------------------------------------------------------------------------------------------------


def test_a_part_is_its_median_call_with_the_mean_beside_it() -> None:
    assert Part.of([10.0, 11.0, 12.0, 17.5]) == Part(median=1.0, mean=2.5)


def test_ratios_are_paired_by_round_and_disturbed_rounds_are_counted() -> None:
    facts = a_case()["contestants"]["paceline"]
    assert facts["times_baseline"]["median"] == 2.0
    assert facts["times_baseline"]["most"] == 4.0
    assert facts["times_baseline_in_quiet_rounds"]["median"] == 3.0
    assert facts["algorithm_bandwidth"] == 4096.0
    assert facts["bus_bandwidth"] == 6144.0
    assert a_case()["contestants"]["gloo"]["times_baseline"] is None
    assert a_case()["disturbed_rounds"] == 1


def test_the_table_shows_times_ratios_and_counted_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    show_collectives(a_result(a_case()), console())
    shown = capsys.readouterr().out
    assert "bus bandwidth = algorithm bandwidth × 2·(N-1)/N = × 1.5" in shown
    assert "1.50 – 3.00" in shown
    assert "4,096 6,144" in " ".join(shown.split())
    assert "1 of 3 rounds disturbed" in shown
    assert told(a_case()).startswith("all_reduce 4 KiB: gloo 1,000,000 · paceline 1,000,000")


def test_the_command_writes_json_and_a_plot_and_says_who_was_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cases = [
        a_case(name, *size) for name in ("all_reduce", "broadcast") for size in (("4 KiB", 4096), ("1 MiB", 2**20))
    ]
    monkeypatch.setattr(comparing, "run_in_workers", lambda comparison: a_result(*cases))
    monkeypatch.setattr(comparing, "without_the_missing", lambda comparison: (comparison, ["openmpi left out: why"]))
    cli.collectives(json_file=tmp_path / "c.json", png_file=tmp_path / "c.png")
    assert json.loads((tmp_path / "c.json").read_text())["left_out"] == ["openmpi left out: why"]
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out.startswith("openmpi left out: why\n")


@pytest.mark.parametrize(
    ("options", "backends"),
    [({}, BACKENDS), ({"algorithm": ["ring"]}, ("gloo",)), ({"algorithm": ["ring"], "backend": ["bound"]}, ("bound",))],
)
def test_unless_told_otherwise_all_run_or_the_algorithms_beside_gloo(
    options: dict[str, list[str]], backends: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Comparison] = []
    monkeypatch.setattr(comparing, "without_the_missing", lambda comparison: (comparison, []))
    monkeypatch.setattr(comparing, "run_in_workers", lambda comparison: asked.append(comparison) or a_result(a_case()))
    cli.collectives(**options)  # type: ignore[arg-type]
    assert asked[0].backends == backends


def test_one_panel_too_many_stays_empty(tmp_path: Path) -> None:
    plot_collectives(a_result(*(a_case(name) for name in tuple(OPERATIONS)[:4])), tmp_path / "c.png")
    assert (tmp_path / "c.png").stat().st_size > 10_000
