"""What the doctor says about a world: found by what, what was passed over, and what is wrong."""

from __future__ import annotations

import pytest

from paceline.world.environment import explain
from paceline.world.explanation import Finding, Level

HAND = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29501"}
TORCHRUN = HAND | {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_USE_AGENT_STORE": "True"}
SRUN = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "0",
    "SLURM_NTASKS": "4",
    "SLURM_NNODES": "1",
    "SLURM_LOCALID": "0",
}


def about(findings: list[Finding], subject: str) -> Finding:
    return next(finding for finding in findings if finding.about == subject)


def test_a_world_of_one_says_how_to_start_more() -> None:
    assert explain({}) == [
        Finding(Level.OK, "world", "one worker, alone"),
        Finding(
            Level.OK,
            "found by",
            "no launcher started this process",
            "start more workers with `paceline run --workers N script.py`",
        ),
    ]


def test_a_world_says_by_which_variables_it_was_found() -> None:
    findings = explain(TORCHRUN | {"PACELINE_LANES": "4"})
    assert about(findings, "world").text == "rank 1 of 2 workers, local rank 1 of 2, host 0 of 1"
    assert about(findings, "found by").text == (
        "torchrun: TORCHELASTIC_RUN_ID=none RANK=1 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29501 "
        "TORCHELASTIC_USE_AGENT_STORE=True"
    )
    assert about(findings, "meets at").text == "127.0.0.1:29501, served by the torchrun agent"
    assert about(findings, "settings").text == "lanes=4"
    assert len(findings) == 4, "RANK and WORLD_SIZE are torchrun's own, not a launcher passed over"


def test_a_contradiction_is_a_problem_with_the_variables_beside_it() -> None:
    problem, evidence = explain(HAND | {"RANK": "2"})
    assert problem == Finding(Level.PROBLEM, "world", "RANK=2 but WORLD_SIZE=2: RANK may be from 0 to 1")
    assert evidence.text == "RANK=2 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29501"


def test_the_outer_launcher_is_passed_over_and_named() -> None:
    finding = about(explain(SRUN | TORCHRUN), "SLURM")
    assert finding.level is Level.OK
    assert finding.text.startswith(
        "says rank 0 of 4; passed over because torchrun is the inner launcher (SLURM_JOB_ID=7"
    )


@pytest.mark.parametrize(
    ("variables", "subject", "level", "text"),
    [
        (SRUN | HAND | {"WORLD_SIZE": "4", "RANK": "0"}, "SLURM", Level.OK, "and says the same"),
        (
            SRUN | {"WORLD_SIZE": "4"},
            "RANK and WORLD_SIZE",
            Level.OK,
            "passed over for SLURM: it does not say the rank",
        ),
        (
            TORCHRUN | {"PMI_RANK": "9", "PMI_SIZE": "2"},
            "MPI (PMI)",
            Level.WARNING,
            "contradictory: PMI_RANK=9 but PMI_",
        ),
        (
            {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"},
            "SLURM",
            Level.WARNING,
            "inside an allocation of 4 tasks, but srun did not start this process",
        ),
        (TORCHRUN | {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"}, "SLURM", Level.OK, "srun did not start this process"),
        ({"MASTER_ADDR": "head"}, "MASTER_ADDR", Level.WARNING, "MASTER_ADDR=head is set, but no rank: not used"),
        (HAND | {"MASTER_ADDR": "head"}, "local rank", Level.OK, "taken as one worker per host"),
        (
            {"SKYPILOT_NODE_RANK": "0", "SKYPILOT_NODE_IPS": "10.0.0.4", "SKYPILOT_NUM_GPUS_PER_NODE": "8"},
            "SkyPilot",
            Level.WARNING,
            "8 accelerators on this host, and one worker",
        ),
    ],
)
def test_what_was_passed_over_says_why(variables: dict[str, str], subject: str, level: Level, text: str) -> None:
    finding = about(explain(variables), subject)
    assert finding.level is level
    assert text in finding.text


def test_an_unused_allocation_says_how_to_use_it() -> None:
    finding = about(explain({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"}), "SLURM")
    assert finding.advice == "start all 4 with `srun python script.py` or `paceline run --workers 4 script.py`"


def test_a_workers_socket_is_named() -> None:
    found = explain({"PACELINE_RANK": "0", "PACELINE_WORLD_SIZE": "1", "PACELINE_CONTROL": "/run/paceline/socket"})
    assert about(found, "world").text == "one worker, started by paceline run"
    assert about(found, "meets at").text == "the supervisor's socket /run/paceline/socket"


def test_a_server_is_called_one() -> None:
    place = {
        "PACELINE_RANK": "2",
        "PACELINE_WORLD_SIZE": "1",
        "PACELINE_SERVERS": "2",
        "PACELINE_CONTROL": "/run/socket",
    }
    assert about(explain(place), "world").text == "server 1 of 2, beside 1 worker, host 0 of 1"


def test_the_rank_that_paceline_run_sets_for_other_libraries_is_its_own() -> None:
    for_others = {"RANK": "0", "WORLD_SIZE": "1", "GROUP_RANK": "0"}
    found = explain({"PACELINE_RANK": "0", "PACELINE_WORLD_SIZE": "1"} | for_others)
    assert [finding.about for finding in found] == ["world", "found by"]
