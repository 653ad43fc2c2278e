"""A lost worker's residuals are in the in-memory checkpoint: its lanes go on elsewhere, and not one bit changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.elastic_jobs import check_unharmed, run_elastic

pytestmark = [pytest.mark.job, pytest.mark.beside]

PHASES = ("forward", "bucket", "exchange", "ready", "after_commit", "apply")
CASES = [
    ("int8", "ddp", "paceline", 0),
    ("int8", "zero2", "gloo", 1),
    ("topk", "ddp", "gloo", 2),
    ("powersgd", "zero1", "paceline", 3),
    ("sign", "ddp", "gloo", 4),
    ("bf16", "zero2", "paceline", 5),
    ("fp16", "zero1", "gloo", 0),
    ("topk-momentum", "zero2", "paceline", 4),
    ("int8", "parameter_server", "paceline", 1),
    ("topk", "parameter_server --servers 2", "gloo", 3),
]


@pytest.mark.parametrize(("compression", "strategy", "backend", "turn"), CASES)
def test_a_killed_workers_residuals_live_on(
    compression: str, strategy: str, backend: str, turn: int, tmp_path: Path
) -> None:
    phases = [PHASES[(turn + number) % len(PHASES)] for number in range(3)]
    orders = [
        f"kill:rank={rank},step={step},phase={phase}"
        for rank, step, phase in zip((1, 3, 0), (2, 5, 7), phases, strict=True)
    ]
    arguments = f"--compression {compression}"
    flags = f"--strategy {strategy} --backend {backend}"
    job = run_elastic(tmp_path / "job", flags, arguments, orders=orders)
    check_unharmed(job, orders, trained=arguments)


@pytest.mark.parametrize("mode", ["--strategy parameter_server", "--sums-on-servers"])
def test_what_a_killed_server_kept_of_sums_lives_on(mode: str, tmp_path: Path) -> None:
    """Ranks 4 and 5 are the servers."""
    orders = ["kill:rank=4,step=3,phase=serve", "kill:rank=0,step=5,phase=apply", "kill:rank=5,step=7,phase=serve"]
    flags, arguments = (mode, "") if mode.startswith("--strategy") else ("", mode)
    job = run_elastic(tmp_path / "job", f"{flags} --servers 2", f"{arguments} --compression int8", orders=orders)
    check_unharmed(job, orders, trained="--compression int8")


def test_an_update_that_changes_settings_is_made_after_the_step_counts(tmp_path: Path) -> None:
    orders = ["kill:rank=1,step=2,phase=ready", "kill:rank=2,step=5,phase=before_commit"]
    arguments = "--compression topk --moving-settings"
    check_unharmed(run_elastic(tmp_path / "job", "", arguments, orders=orders), orders, trained=arguments)


@pytest.mark.parametrize("strategy", ["ddp", "zero2"])
def test_a_worker_that_begins_with_a_step_without_lanes_knows_the_loss_scale(strategy: str, tmp_path: Path) -> None:
    """Steps 4 and 8 have samples for five of eight lanes."""
    orders = ["kill:rank=1,step=4,phase=forward", "kill:rank=0,step=8,phase=backward"]
    arguments = "--compression int8 --fp16"
    job = run_elastic(tmp_path / "job", f"--strategy {strategy}", arguments, orders=orders)
    check_unharmed(job, orders, trained=arguments)


def test_residuals_reach_a_worker_that_joins_and_one_that_starts_from_a_checkpoint(tmp_path: Path) -> None:
    orders = ["kill:rank=2,step=2,phase=backward"]
    arguments = "--compression int8 --await-joiner 2-1 --save-every 2"
    job = run_elastic(tmp_path / "job", "--backend paceline", arguments, orders=orders)
    check_unharmed(job, orders, trained="--compression int8")
