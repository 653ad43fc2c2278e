"""The promise: a worker lost at any moment of a step, in any way, changes not one bit of the result.

    phases      data forward backward bucket exchange ready before_commit after_commit apply snapshot write join
    kinds       kill (SIGKILL)   stop (SIGSTOP, fenced after the heartbeat's deadline)   raise (an exception)
    strategies  all that promise the bits of one process

Every job ends with the hash of a plain run on one worker, every step committed once, every sample used once, and
nothing left. The quick choice puts three faults into one job of four workers, each on another worker in another step;
`make faults` tries every combination by itself (--full-product).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from paceline.strategies.registry import synchronous_strategies
from tests.faults.elastic_jobs import WORKERS, check_unharmed, run_elastic
from tests.faults.training import LANES, ROWS
from tests.smoke import first_of_each

pytestmark = [pytest.mark.job, pytest.mark.beside]

PHASES = (
    "data", "forward", "backward", "bucket", "exchange", "ready",
    "before_commit", "after_commit", "apply", "snapshot", "write", "join",
)  # fmt: skip
KINDS = ("kill", "stop", "raise")
BACKENDS = ("paceline", "gloo")
STRATEGIES = tuple(dict.fromkeys(chosen.name for chosen in synchronous_strategies()))
HURT_STEPS = (2, 5, 7)  # of a short step (4, 8) some workers may have nothing to do
WITHOUT_BUCKETS = ("star", "local_sgd", "diloco")  # gradients leave at the step's end, together
OTHER_NUMBERS = ("local_sgd", "diloco")  # they are compared with themselves on one worker
EVERY = 5  # of these: the steps that are hurt are inside a window and at its end
MOVING = (
    "--moving-settings"  # the optimizer counts in its groups, as schedule-free ones do: an update is taken back whole
)
SAVED = ("snapshot", "write")  # the first checkpoint that comes, in whichever step


@dataclass(frozen=True)
class Case:
    strategy: str
    backend: str
    faults: tuple[tuple[str, str, int], ...]  # kind, phase, victim

    def __str__(self) -> str:
        told = "+".join(f"{kind}-{phase}-of-{rank}" for kind, phase, rank in self.faults)
        return f"{self.strategy}-{self.backend}-{told}"

    @property
    def orders(self) -> list[str]:
        return [
            order for number, fault in enumerate(self.faults) for order in ordered(*fault, step=HURT_STEPS[number % 3])
        ]

    @property
    def trained(self) -> str:
        """What of the arguments gives another hash."""
        moving = "" if self.strategy == "parameter_server" else MOVING  # which refuses such an optimizer
        return moving + (f" --windows {self.strategy}-{EVERY}" if self.strategy in OTHER_NUMBERS else "")

    @property
    def flags(self) -> str:
        return f"--backend {self.backend}" + ("" if self.strategy in OTHER_NUMBERS else f" --strategy {self.strategy}")

    @property
    def arguments(self) -> str:
        words = ["--save-every 2"] if any(phase in SAVED for _, phase, _ in self.faults) else []
        joiners = [rank for _, phase, rank in self.faults if phase == "join"]
        return " ".join([self.trained, *words, *(f"--step-s 0.1 --await-joiner {rank}-1" for rank in joiners)])


def ordered(kind: str, phase: str, rank: int, step: int) -> list[str]:
    if phase == "join":  # of the replacement, for which somebody must die first
        return [f"kill:rank={rank},step=1,phase=forward", f"{kind}:rank={rank},phase=join,incarnation=1"]
    return [f"{kind}:rank={rank}" + ("" if phase in SAVED else f",step={step}") + f",phase={phase}"]


def phases_of(strategy: str) -> list[str]:
    return [phase for phase in PHASES if phase != "bucket" or strategy not in WITHOUT_BUCKETS]


def quick_cases() -> list[Case]:
    """Of the first strategy every phase with every kind; of the others every other phase, with the kinds in turn."""
    cases = []
    for place, strategy in enumerate(STRATEGIES):
        in_steps = [phase for phase in phases_of(strategy) if phase != "join"]
        turns = range(3) if place == 0 else [place]
        pairs = [pair for turn in turns for pair in _in_turn(in_steps, turn)]
        pairs = pairs if place == 0 else pairs[place % 2 :: 2]
        for first in range(0, len(pairs), 3):
            number = place + first // 3
            victims = [(number + offset) % WORKERS for offset in range(3)]
            chosen = [(*pair, victim) for pair, victim in zip(pairs[first : first + 3], victims, strict=False)]
            cases.append(Case(strategy, BACKENDS[number % 2], tuple(chosen)))
        if place % 3 == 0:
            cases.append(Case(strategy, BACKENDS[place // 3 % 2], ((KINDS[place // 3 % 3], "join", place % WORKERS),)))
    return cases


def _in_turn(phases: list[str], start: int) -> list[tuple[str, str]]:
    return [(KINDS[(start + number) % 3], phase) for number, phase in enumerate(phases)]


def full_product() -> list[Case]:
    return [
        Case(strategy, backend, ((kind, phase, victim),))
        for strategy in STRATEGIES
        for kind in KINDS
        for phase in phases_of(strategy)
        for backend in BACKENDS
        for victim in (0, 2)
    ]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        whole = metafunc.config.getoption("--full-product")
        cases = full_product()[:: metafunc.config.getoption("--every")] if whole else quick_cases()
        metafunc.parametrize("case", first_of_each(cases, strategy_that_loses_a_worker))


def strategy_that_loses_a_worker(case: Case) -> str | None:
    return case.strategy if any(kind == "kill" for kind, _, _ in case.faults) else None


def test_a_worker_lost_at_any_moment_changes_no_bit(case: Case, tmp_path: Path) -> None:
    job = run_elastic(tmp_path / "job", case.flags, case.arguments, orders=case.orders)
    check_unharmed(job, case.orders, case.trained)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_worker_lost_before_lanes_go_apart_or_just_then_changes_no_bit(backend: str, tmp_path: Path) -> None:
    """Four steps together, then windows of three."""
    trained = "--windows diloco-3-1-4"
    orders = [
        "kill:rank=1,step=2,phase=exchange",
        "kill:rank=3,step=4,phase=ready",
        "kill:rank=0,step=6,phase=backward",
    ]
    arguments = f"{trained} --step-s 0.05 --await-joiner 1-1"
    check_unharmed(run_elastic(tmp_path / "job", f"--backend {backend}", arguments, orders=orders), orders, trained)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_worker_lost_while_a_fragment_of_lanes_is_on_its_way_changes_no_bit(backend: str, tmp_path: Path) -> None:
    """Of four steps every other has one; workers that join have to take part in the next."""
    trained = "--windows diloco-4-2"
    orders = [
        "kill:rank=1,step=3,phase=backward",
        "kill:rank=3,step=5,phase=exchange",
        "kill:rank=0,step=7,phase=ready",
    ]
    arguments = f"{trained} --step-s 0.05 --await-joiner 1-1"
    check_unharmed(run_elastic(tmp_path / "job", f"--backend {backend}", arguments, orders=orders), orders, trained)


@pytest.mark.parametrize("strategy", ["fsdp", "hybrid"])
def test_one_whose_data_raise_between_two_steps_does_not_wait_for_the_others_to_leave(
    strategy: str, tmp_path: Path
) -> None:
    """They stand in the next step, and wait for it: under fsdp neither would have ended."""
    orders = ["raise:rank=0,step=2,phase=data"]
    check_unharmed(run_elastic(tmp_path / "job", f"--strategy {strategy} --backend paceline", orders=orders), orders)


def test_an_elastic_job_without_faults_has_the_bits_of_a_plain_one(tmp_path: Path) -> None:
    check_unharmed(run_elastic(tmp_path / "job", orders=[]))


def test_with_quiet_a_recovery_is_not_told_but_an_exception_is(tmp_path: Path) -> None:
    orders = ["kill:rank=2,step=2,phase=forward", "raise:rank=1,step=4,phase=forward"]
    job = run_elastic(tmp_path / "job", "--quiet", "--await-joiner 2-1", orders=orders)
    check_unharmed(job, orders)
    told = [line for line in job.text.splitlines() if "paceline: " in line and "injected fault" not in line]
    assert told == [], job.text
    assert "Traceback" in job.err


@pytest.mark.parametrize("strategy", ["ddp", "zero2"])
def test_a_worker_lost_while_the_profiler_records_changes_no_bit(strategy: str, tmp_path: Path) -> None:
    orders = ["kill:rank=0,step=2,phase=exchange"]
    job = run_elastic(tmp_path / "job", f"--strategy {strategy}", "--profile --await-joiner 0-1", orders=orders)
    check_unharmed(job, orders)
    traces = {path.name.partition(".")[0] for path in (job.folder / "run" / "profile").iterdir()}
    assert {f"rank{slot}_steps1-4" for slot in (1, 2, 3)} < traces, traces
    assert any(name.startswith("rank0_steps") for name in traces), traces  # the joiner's own first steps
    assert job.out.count("exposed communication") >= 1, job.text


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("strategy", ["ddp", "zero2"])
def test_a_worker_comes_back_while_the_others_save(strategy: str, backend: str, tmp_path: Path) -> None:
    """Between the commit after which it is admitted and the next step the others have a checkpoint to agree on."""
    orders = ["kill:rank=1,step=1,phase=forward"]
    arguments = "--save-every 1 --step-s 0.05 --await-joiner 1-1"
    flags = f"--strategy {strategy} --backend {backend}"
    job = run_elastic(tmp_path / "job", flags, arguments, orders=orders, timeout_s=60)
    check_unharmed(job, orders)
    assert "worker 1 is back" in job.err, job.text


def test_those_who_save_before_they_change_to_a_joiner_may_still_meet_by_names(tmp_path: Path) -> None:
    """The save after step 5 is the first sum of these lanes, for which workers tell each other where their memory is.

    By then the coordinator has admitted the joiner, but it comes in with step 6.
    """
    trained, orders = "--windows local_sgd-7 --samples 232 --epochs 1", ["kill:rank=1,step=4,phase=after_commit"]
    arguments = f"{trained} --save-every 5 --await-joiner 1-1"
    job = run_elastic(tmp_path / "job", "--backend paceline", arguments, orders=orders, timeout_s=60)
    check_unharmed(job, orders, trained)
    assert "worker 1 is back after step 5" in job.err, job.text


def test_a_worker_comes_back_between_epochs_of_one_step(tmp_path: Path) -> None:
    orders = ["kill:rank=1,step=2,phase=forward"]
    trained = f"--samples {LANES * ROWS} --epochs 8"
    job = run_elastic(tmp_path / "job", "--strategy zero2", f"{trained} --await-joiner 1-1", orders=orders)
    check_unharmed(job, orders, trained)
    assert "worker 1 is back" in job.err, job.text


@pytest.mark.parametrize("strategy", ["ddp", "zero2"])
def test_a_worker_that_fails_in_the_step_after_which_another_joins_has_no_say(strategy: str, tmp_path: Path) -> None:
    """Its exception has ended its loop: it told the joining worker so, which left its own, and the others waited."""
    orders = ["kill:rank=2,step=4,phase=forward", "raise:rank=0,step=5,phase=apply"]
    trained = "--samples 232 --epochs 1"
    job = run_elastic(tmp_path / "job", f"--strategy {strategy}", f"{trained} --await-joiner 2-1", orders=orders)
    check_unharmed(job, orders, trained)


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "fsdp"])
def test_a_worker_that_joins_gets_the_base_of_adapters_from_the_others(tmp_path: Path, strategy: str) -> None:
    """Their checkpoints, which hold a reference to it alone, are those of a job that goes on meanwhile."""
    trained = "--adapters"
    arguments = f"{trained} --save-every 2 --step-s 0.1 --await-joiner 1-1"
    orders = ["kill:rank=1,step=2,phase=backward"]
    job = run_elastic(tmp_path, f"--strategy {strategy}", arguments, orders=orders)
    check_unharmed(job, orders, trained)
    assert "worker 1 is back" in job.err, job.text


@pytest.mark.parametrize("strategy", ["zero3", "fsdp"])
def test_a_worker_joins_a_job_whose_weights_came_from_files(tmp_path: Path, strategy: str) -> None:
    trained, orders = "--pretrained", ["kill:rank=1,step=2,phase=backward"]
    job = run_elastic(tmp_path, f"--strategy {strategy}", f"{trained} --step-s 0.1 --await-joiner 1-1", orders=orders)
    check_unharmed(job, orders, trained)
    assert "worker 1 is back" in job.err, job.text
