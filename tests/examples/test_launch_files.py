"""The launch files: SLURM's script with an srun of two local tasks, the TrainJob with the variables of its pods."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.examples.running import EXAMPLES, ROOT, hash_in
from tests.workers import free_port

LAUNCH = EXAMPLES / "launch"
TIMEOUT_S = 100
BIN = str(Path(sys.executable).parent)

# As srun does: every task with its own variables, the highest code in the end, and, where the test wants it, the notice
# of `--signal` to all tasks when training is under way.
SRUN = """#!{python}
import os, signal, subprocess, sys
words = sys.argv[1:]
while words[0].startswith("--"):
    words.pop(0)
size = int(os.environ["SLURM_NTASKS"])
step = dict(SLURM_STEP_ID="0", SLURM_STEP_NUM_TASKS=str(size), SLURM_STEP_NUM_NODES="1", SLURM_NODEID="0",
            SLURM_STEP_TASKS_PER_NODE=str(size), SLURM_STEP_NODELIST="localhost")
tasks = [
    subprocess.Popen(words, env={{**os.environ, **step, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)}},
                     stdout=subprocess.PIPE if rank == 0 else None, text=True)
    for rank in range(size)
]
notice = "NOTICE" in os.environ
for line in tasks[0].stdout:
    print(line, end="", flush=True)
    if notice and line.startswith("step "):
        notice = False
        for task in tasks:
            task.send_signal(signal.SIGUSR1)
sys.exit(max(task.wait() % 256 for task in tasks))
"""
SCONTROL = """#!/bin/sh
echo "scontrol $*"
"""


@pytest.fixture
def cluster(tmp_path: Path) -> dict[str, str]:
    """The variables of a batch script in an allocation of two tasks, and a folder of SLURM's commands on its PATH."""
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, text in (("srun", SRUN.format(python=sys.executable)), ("scontrol", SCONTROL)):
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    return {
        **os.environ,
        "PATH": f"{commands}:{BIN}:{os.environ['PATH']}",
        "SLURM_JOB_ID": str(free_port()),  # the port is made of it: another one in each run
        "SLURM_NTASKS": "2",
        "SLURM_NNODES": "1",
        "SLURM_TASKS_PER_NODE": "2",
        "RUN_DIR": str(tmp_path / "run"),
        "PACELINE_LANES": "2",
        "PYTHON": sys.executable,
    }


def sbatch(variables: dict[str, str], *arguments: str) -> tuple[int, str]:
    command = ["bash", str(LAUNCH / "slurm.sh"), *arguments]
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=TIMEOUT_S)
    return done.returncode, done.stdout + done.stderr


def test_the_slurm_script_is_bash_and_asks_for_notice_and_requeue() -> None:
    subprocess.run(["bash", "-n", LAUNCH / "slurm.sh"], check=True, timeout=10)
    options = re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?$", (LAUNCH / "slurm.sh").read_text(), re.MULTILINE)
    told = dict(options)
    assert len(told) == len(options)
    assert told["signal"] == "USR1@120"  # not B:USR1, which the batch shell alone would get
    assert "requeue" in told
    assert told["open-mode"] == "append"
    assert int(told["nodes"]) * int(told["ntasks-per-node"]) == 8  # the lanes


@pytest.mark.job
def test_a_slurm_job_trains_to_its_end_with_two_tasks(cluster: dict[str, str]) -> None:
    code, printed = sbatch(cluster, "--max-steps", "3")
    assert code == 0, printed
    assert "2 workers × 1 thread (SLURM)" in printed
    assert "scontrol" not in printed
    assert hash_in(printed)


@pytest.mark.job
def test_a_slurm_job_that_gets_notice_saves_queues_again_and_goes_on(cluster: dict[str, str]) -> None:
    notice = {**cluster, "NOTICE": "1"}
    code, printed = sbatch(notice, "--max-steps", "100000")
    assert code == 75, printed
    assert f"scontrol requeue {cluster['SLURM_JOB_ID']}" in printed
    saved = re.search(r"stopped on request after step (\d+)", printed)
    assert saved is not None, printed
    assert (Path(cluster["RUN_DIR"]) / f"checkpoint-{saved[1]}").is_dir()
    code, printed = sbatch(notice, "--max-steps", "100000")
    assert code == 75, printed
    assert f"after step {saved[1]}\n" in printed


def documents() -> tuple[dict[str, Any], dict[str, Any]]:
    runtime, job = yaml.safe_load_all((LAUNCH / "trainjob.yaml").read_text())
    return runtime, job


def test_the_trainjob_has_the_fields_that_kubeflow_knows() -> None:
    runtime, job = documents()
    for document, kind in ((runtime, "TrainingRuntime"), (job, "TrainJob")):
        assert set(document) == {"apiVersion", "kind", "metadata", "spec"}
        assert (document["apiVersion"], document["kind"]) == ("trainer.kubeflow.org/v1alpha1", kind)
        assert re.fullmatch("[a-z]([-a-z0-9]*[a-z0-9])?", document["metadata"]["name"])
    assert job["spec"]["runtimeRef"] == {"kind": "TrainingRuntime", "name": runtime["metadata"]["name"]}
    trainer = job["spec"]["trainer"]
    assert set(trainer) <= {"image", "command", "args", "env", "numNodes", "numProcPerNode", "resourcesPerNode"}
    assert all(isinstance(word, str) for word in trainer["command"] + trainer["args"])
    assert set(runtime["spec"]) == {"mlPolicy", "template"}
    (node,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    assert node["name"] == "node"
    assert node["template"]["metadata"]["labels"] == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}


def test_a_pod_of_the_trainjob_has_time_to_save_and_a_place_for_it() -> None:
    runtime, job = documents()
    pod = runtime["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    command = job["spec"]["trainer"]["command"]
    assert command[:2] == ["paceline", "run"]
    assert pod["terminationGracePeriodSeconds"] > int(command[command.index("--grace-s") + 1])
    mounts = {mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}
    assert {"/runs", "/dev/shm"} == mounts
    assert {mount["name"] for mount in pod["containers"][0]["volumeMounts"]} == {v["name"] for v in pod["volumes"]}
    args = job["spec"]["trainer"]["args"]
    assert args[args.index("--output-dir") + 1].startswith("/runs/")


@pytest.mark.job
def test_the_pods_of_the_trainjob_meet_and_train_together(tmp_path: Path) -> None:
    _, job = documents()
    trainer = job["spec"]["trainer"]
    words = [word.replace("/runs/", f"{tmp_path}/") for word in (*trainer["command"], *trainer["args"])]
    told = {
        "PATH": f"{BIN}:{os.environ['PATH']}",
        **{variable["name"]: "known to all pods" for variable in trainer["env"]},
        "PET_NNODES": str(trainer["numNodes"]),
        "PET_NPROC_PER_NODE": "1",  # numProcPerNode says 2; a test has two cores
        "PET_MASTER_ADDR": "127.0.0.1",
        "PET_MASTER_PORT": str(free_port()),
    }
    pods = [
        subprocess.Popen(
            [*words, "--max-steps", "2"],
            cwd=ROOT,
            env={**os.environ, **told, "PET_NODE_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(trainer["numNodes"])
    ]
    try:
        printed = [pod.communicate(timeout=TIMEOUT_S)[0] for pod in pods]
    finally:
        for pod in pods:
            pod.kill()
    assert [pod.returncode for pod in pods] == [0, 0], printed
    assert "2 workers" in printed[0]
    assert hash_in(printed[0])
