"""Whole races, small: in this process, a world of one, and between two where it matters who trains."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from typer.testing import CliRunner

from paceline.bench.contestants import enter
from paceline.bench.measure import borrowed_settings, deterministic, measure, meeting, run_part
from paceline.bench.race import PEERS, Race
from paceline.bench.workloads import WORKLOADS
from paceline.cli.bench import app
from paceline.errors import ConfigError
from paceline.world.world import World
from tests.workers import run_workers


@pytest.mark.slow
def test_a_small_race_measures_everyone_and_leaves_the_process_as_it_was(capsys: pytest.CaptureFixture[str]) -> None:
    # What DTensors used stays with this thread, a process group too, and a fork by another thread would hang.
    peers = tuple(peer for peer in PEERS if peer != "torch-fsdp2")
    race = Race("convnet", 1, ours=("paceline-exact", "paceline-fast"), against=peers, rounds=2, steps_per_round=1)
    threads, exact = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    result = json.loads(json.dumps(measure(race, World())))
    assert set(result["contestants"]) == set(race.contestants)
    assert all(facts["throughput"]["least"] > 0 for facts in result["contestants"].values())
    assert len(result["ratios"]) == 10
    assert len(result["rounds"]) == 2
    assert result["workload"]["parameters"] == 1_129_514
    assert "round 4/4" in capsys.readouterr().out
    assert (torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()) == (threads, exact)
    assert not dist.is_initialized()


def steps_of_fsdp2(world: World) -> bool:
    """Whether a worker keeps less than all of the weights."""
    with meeting(world):
        contestant = enter("torch-fsdp2", WORKLOADS["convnet"], ALONE, world, most_steps=2)
        contestant.step()
        contestant.step()
        parameters = list(contestant.model.parameters())  # type: ignore[attr-defined]
        own = sum(p.to_local().numel() for p in parameters)
        return own < sum(p.numel() for p in parameters)


@pytest.mark.workers
def test_fsdp2_takes_part_and_keeps_a_part() -> None:
    for result in run_workers(steps_of_fsdp2, 2):
        assert result.error is None, result.traceback
        assert result.value


def test_a_race_for_another_number_of_workers_is_refused() -> None:
    race = Race("convnet", 2, ours=("paceline-exact",), against=("torch-ddp",))
    with pytest.raises(ConfigError, match="the race is for 2 workers, but this world has 1"):
        measure(race, World())


def test_a_contestant_runs_under_its_own_determinism() -> None:
    before = torch.are_deterministic_algorithms_enabled()
    with deterministic(True):
        assert torch.are_deterministic_algorithms_enabled()
        with deterministic(False):
            assert not torch.are_deterministic_algorithms_enabled()
        assert torch.are_deterministic_algorithms_enabled()
    assert torch.are_deterministic_algorithms_enabled() is before


# -- one process with as many threads ----------------------------------------------------------------------------------

ALONE = Race("convnet", 2, ours=("no-communication",), against=("one-process",), rounds=1, steps_per_round=1)


class Witness(nn.Module):
    """A model that notes what each forward gets, and on how many threads."""

    def __init__(self) -> None:
        super().__init__()
        self.model = WORKLOADS["convnet"].build()
        self.inputs: list[Tensor] = []
        self.threads: list[int] = []

    def forward(self, inputs: Tensor) -> Tensor:
        self.inputs.append(inputs)
        self.threads.append(torch.get_num_threads())
        logits: Tensor = self.model(inputs)
        return logits


def turn_of(world: World, name: str) -> dict[str, Any]:
    """One turn of two steps, as a worker of a race sees it."""
    witness = Witness()
    workload = replace(WORKLOADS["convnet"], model=lambda: witness)
    with borrowed_settings(), meeting(world):
        contestant = enter(name, workload, ALONE, world, most_steps=2)
        whole_s, mine_s = time.process_time(), time.thread_time()
        run_part(contestant, steps=2)
        dist.barrier()  # where the others wait
        whole_s, mine_s = time.process_time() - whole_s, time.thread_time() - mine_s
        after = torch.get_num_threads()
    return {
        "sums": [float(inputs.double().sum()) for inputs in witness.inputs],
        "batches": [len(inputs) for inputs in witness.inputs],
        "threads": witness.threads,
        "threads_after": after,
        "cpu_s": whole_s,
        "cpu_of_other_threads_s": whole_s - mine_s,
    }


def turns_of(name: str) -> list[dict[str, Any]]:
    results = run_workers(turn_of, 2, name=name)
    for rank, result in enumerate(results):
        assert result.error is None, f"rank {rank}: {result.traceback}"
    return [result.value for result in results]


@pytest.mark.workers
def test_one_process_trains_on_the_batches_of_all_workers_while_the_others_do_nothing() -> None:
    (alone, idle), workers = turns_of("one-process"), turns_of("no-communication")
    assert (alone["batches"], idle["batches"]) == ([64, 64], [])
    assert [worker["batches"] for worker in workers] == [[32, 32], [32, 32]]
    by_step = zip(*(worker["sums"] for worker in workers), strict=True)
    assert alone["sums"] == pytest.approx([sum(of_all) for of_all in by_step])


@pytest.mark.workers
def test_one_process_works_on_as_many_threads_as_there_are_workers_and_gives_them_back() -> None:
    alone, idle = turns_of("one-process")
    assert alone["threads"] == [2, 2]
    assert alone["threads_after"] == idle["threads_after"] == 1
    assert alone["cpu_of_other_threads_s"] > alone["cpu_s"] / 4, "the second thread did next to nothing"
    assert idle["cpu_s"] < alone["cpu_s"] / 4, "the other worker does not sleep"


@pytest.mark.workers
def test_a_race_of_two_workers_has_one_process_in_its_turns() -> None:
    results = run_workers(measure_given, 2, text=ALONE.to_json())
    for rank, result in enumerate(results):
        assert result.error is None, f"rank {rank}: {result.traceback}"
    result = results[0].value
    assert result["contestants"]["one-process"]["batch_size"] == 2 * result["workload"]["batch_size"]
    assert result["contestants"]["one-process"]["throughput"]["least"] > 0
    (ratio,) = result["ratios"]
    assert ratio["throughput"]["median"] > 0
    assert (ratio["ours"], ratio["peer"]) == ("no-communication", "one-process")


def measure_given(world: World, text: str) -> dict[str, Any]:
    return measure(Race.from_json(text), world)


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["step", "--workload", "resnet"], "workload 'resnet' is not known"),
        (["step", "--against", "horovod"], "contestant 'horovod' is not known"),
        (["step", "--reduction", "quick"], "--reduction 'quick' is not known; choose one of exact, fast"),
        (["step", "--workers", "0"], "--workers 0"),
        (["step", "--batch-size", "0"], "--batch-size 0: a batch has at least one sample"),
        (["step", "--json", "no/such/folder/f.json"], "there is no folder no/such/folder"),
    ],
)
def test_bad_input_is_refused_before_anything_starts(command: list[str], words: str) -> None:
    """`paceline.cli.main` prints a ConfigError as one line and exits with 2."""
    refused = CliRunner().invoke(app, command).exception
    assert isinstance(refused, ConfigError), refused
    assert words in str(refused)


def test_the_help_says_where_the_other_benchmarks_are() -> None:
    shown = " ".join(CliRunner().invoke(app, ["--help"]).output.split())
    assert "scripts in the repository's folder benchmarks/" in shown
    assert {command.callback.__name__ for command in app.registered_commands if command.callback} == {
        "step", "collectives", "memory", "network", "hardware",
    }  # fmt: skip
