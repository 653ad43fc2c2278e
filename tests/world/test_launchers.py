"""Every launcher and every contradiction, as a table from variables to a world or to the line a person reads."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import paceline
from paceline.errors import WorldError
from paceline.world import environment
from paceline.world.environment import launch_defaults, read_world, tensor_address, worker_environment
from paceline.world.launchers import LaunchDefaults
from paceline.world.variables import DEFAULT_PORT, derived_port
from paceline.world.world import LOOPBACK, ControlSocket, LaunchSettings, TcpRendezvous, World

PACELINE = {
    "PACELINE_RANK": "1",
    "PACELINE_WORLD_SIZE": "2",
    "PACELINE_LOCAL_RANK": "1",
    "PACELINE_LOCAL_SIZE": "2",
    "PACELINE_HOST_RANK": "0",
    "PACELINE_HOSTS": "1",
    "PACELINE_CONTROL": "/run/paceline/socket",
}
PACELINE_WORLD = World(
    rank=1, size=2, local_rank=1, local_size=2, source="paceline run", rendezvous=ControlSocket("/run/paceline/socket")
)

SERVED = PACELINE | {"PACELINE_SERVERS": "2"}
SERVER = SERVED | {"PACELINE_RANK": "3", "PACELINE_LOCAL_RANK": "3"}
SERVER_WORLD = replace(PACELINE_WORLD, rank=3, local_rank=3, servers=2)

HAND = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29501"}
HAND_WORLD = World(
    rank=1,
    size=2,
    local_rank=1,
    local_size=2,
    source="RANK and WORLD_SIZE",
    rendezvous=TcpRendezvous("127.0.0.1", 29501),
)

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}
TORCHRUN_WORLD = World(
    rank=3,
    size=4,
    local_rank=1,
    local_size=2,
    host_rank=1,
    hosts=2,
    source="torchrun",
    rendezvous=TcpRendezvous("10.0.0.1", 29500, served_by_agent=True),
    host_address=None,
)

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-host-1234@1",
}
OPEN_MPI_WORLD = World(
    rank=1,
    size=2,
    local_rank=1,
    local_size=2,
    source="Open MPI",
    rendezvous=TcpRendezvous(LOOPBACK, derived_port("mpi", "prterun-host-1234@1")),
)

PMI = {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
PMI_WORLD = World(size=2, local_size=2, source="MPI (PMI)", rendezvous=TcpRendezvous(LOOPBACK, DEFAULT_PORT))

SLURM = {
    "SLURM_JOB_ID": "200505",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "7",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_NNODES": "4",
    "SLURM_TASKS_PER_NODE": "2(x3),1",
    "SLURM_STEP_NODELIST": "node[08-10],gpu-02",
}
SLURM_WORLD = World(
    rank=5,
    size=7,
    local_rank=1,
    local_size=2,
    host_rank=2,
    hosts=4,
    source="SLURM",
    rendezvous=TcpRendezvous("node08", derived_port("slurm", "200505", "0")),
    host_address=None,
)

KUBEFLOW = {
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "1",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "job-node-0-0.job",
    "PET_MASTER_PORT": "29400",
}
KUBEFLOW_WORLD = World(
    rank=1,
    size=2,
    host_rank=1,
    hosts=2,
    source="Kubeflow",
    rendezvous=TcpRendezvous("job-node-0-0.job", 29400),
    host_address=None,
)

SKYPILOT = {
    "SKYPILOT_NODE_RANK": "1",
    "SKYPILOT_NODE_IPS": "10.0.0.4\n10.0.0.5",
    "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_NUM_GPUS_PER_NODE": "0",
    "SKYPILOT_TASK_ID": "sky-task-1",
}
SKYPILOT_WORLD = World(
    rank=1,
    size=2,
    host_rank=1,
    hosts=2,
    source="SkyPilot",
    rendezvous=TcpRendezvous("10.0.0.4", derived_port("skypilot", "sky-task-1")),
    host_address=None,
)

# Other rank and size than the rest, so that a winner can be told from a loser.
BATCH_SCRIPT = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_NAME": "train"}
FROM_MAIN = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}


def without(variables: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in variables.items() if name not in names}


WORLDS = {
    "nothing": ({}, World()),
    "an empty variable counts as unset": ({"RANK": "", "WORLD_SIZE": " "}, World()),
    "paceline run": (PACELINE, PACELINE_WORLD),
    "paceline run, no host named": (without(PACELINE, "PACELINE_HOST_RANK", "PACELINE_HOSTS"), PACELINE_WORLD),
    "paceline run, one worker": ({"PACELINE_RANK": "0", "PACELINE_WORLD_SIZE": "1"}, World(source="paceline run")),
    "paceline run with settings": (
        PACELINE
        | {
            "PACELINE_LANES": "8",
            "PACELINE_THREADS": "2",
            "PACELINE_BACKEND": "gloo",
            "PACELINE_SEED": "0",
            "PACELINE_STRATEGY": "zero2",
            "PACELINE_PRECISION": "bf16",
            "PACELINE_OFFLOAD": "optimizer",
            "PACELINE_ACTIVATION_CHECKPOINTING": "blocks",
        }
        | {"PACELINE_HOST_ADDRESS": "10.0.0.7"},
        replace(
            PACELINE_WORLD,
            host_address="10.0.0.7",
            settings=LaunchSettings(8, 2, "gloo", 0, "zero2", "bf16", "blocks", "optimizer"),
        ),
    ),
    "paceline run, a worker beside servers": (SERVED, replace(PACELINE_WORLD, servers=2)),
    "paceline run, a server": (SERVER, SERVER_WORLD),
    "paceline run, a server beside one worker": (
        {"PACELINE_RANK": "1", "PACELINE_WORLD_SIZE": "1", "PACELINE_SERVERS": "1", "PACELINE_CONTROL": "/run/socket"},
        World(rank=1, local_rank=1, servers=1, source="paceline run", rendezvous=ControlSocket("/run/socket")),
    ),
    "only paceline run has servers": (TORCHRUN | {"PACELINE_SERVERS": "2"}, TORCHRUN_WORLD),
    "settings hold under every launcher": (
        HAND | {"PACELINE_LANES": "4"},
        replace(HAND_WORLD, settings=LaunchSettings(lanes=4)),
    ),
    "torchrun": (TORCHRUN, TORCHRUN_WORLD),
    "torchrun, rank 0 serves": (
        TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "False"},
        replace(TORCHRUN_WORLD, rendezvous=TcpRendezvous("10.0.0.1", 29500)),
    ),
    "two processes on one host by hand": (HAND, HAND_WORLD),
    "by hand, one worker needs no meeting place": (
        {"RANK": "0", "WORLD_SIZE": "1"},
        World(source="RANK and WORLD_SIZE"),
    ),
    "by hand, one worker per host": (
        HAND | {"MASTER_ADDR": "10.0.0.1"},
        replace(
            HAND_WORLD,
            local_rank=0,
            local_size=1,
            host_rank=1,
            hosts=2,
            host_address=None,
            rendezvous=TcpRendezvous("10.0.0.1", 29501),
        ),
    ),
    "by hand, the address of this host given": (
        HAND | {"MASTER_ADDR": "10.0.0.1", "PACELINE_HOST_ADDRESS": "10.0.0.2"},
        replace(
            HAND_WORLD,
            local_rank=0,
            local_size=1,
            host_rank=1,
            hosts=2,
            host_address="10.0.0.2",
            rendezvous=TcpRendezvous("10.0.0.1", 29501),
        ),
    ),
    "by hand, LOCAL_WORLD_SIZE alone places the rank": (
        HAND | {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "head", "LOCAL_WORLD_SIZE": "2"},
        World(
            rank=3,
            size=4,
            local_rank=1,
            local_size=2,
            host_rank=1,
            hosts=2,
            source="RANK and WORLD_SIZE",
            rendezvous=TcpRendezvous("head", 29501),
            host_address=None,
        ),
    ),
    "Open MPI on one host": (OPEN_MPI, OPEN_MPI_WORLD),
    "Open MPI, the older job id": (
        without(OPEN_MPI, "PMIX_NAMESPACE") | {"OMPI_MCA_ess_base_jobid": "3567910913"},
        replace(OPEN_MPI_WORLD, rendezvous=TcpRendezvous(LOOPBACK, derived_port("mpi", "3567910913"))),
    ),
    "Open MPI on two hosts": (
        OPEN_MPI | FROM_MAIN | {"OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"},
        replace(
            OPEN_MPI_WORLD,
            local_rank=0,
            local_size=1,
            host_rank=1,
            hosts=2,
            host_address=None,
            rendezvous=TcpRendezvous("10.0.0.1", 29500),
        ),
    ),
    "MPICH": (PMI, PMI_WORLD),
    "SLURM": (SLURM, SLURM_WORLD),
    "SLURM, the step is smaller than the job": (
        SLURM
        | {"SLURM_NTASKS": "9", "SLURM_STEP_NUM_TASKS": "7", "SLURM_NNODES": "5", "SLURM_STEP_NUM_NODES": "4"}
        | {"SLURM_TASKS_PER_NODE": "2(x4),1", "SLURM_STEP_TASKS_PER_NODE": "2(x3),1"},
        SLURM_WORLD,
    ),
    "SLURM with an address by hand": (
        SLURM | FROM_MAIN | {"WORLD_SIZE": "7"},
        replace(SLURM_WORLD, rendezvous=TcpRendezvous("10.0.0.1", 29500)),
    ),
    "SLURM on one host": (
        {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "1", "SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_NNODES": "1"},
        World(
            rank=1,
            size=2,
            local_rank=1,
            local_size=2,
            source="SLURM",
            rendezvous=TcpRendezvous(LOOPBACK, derived_port("slurm", "7", "1")),
        ),
    ),
    "srun --mpi=pmi2 is SLURM": (SLURM | {"PMI_RANK": "5", "PMI_SIZE": "7"}, SLURM_WORLD),
    "the batch script, before any srun": (BATCH_SCRIPT, World()),
    "a shell by salloc": ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_JOB_NAME": "interactive"}, World()),
    "a shell by salloc's interactive step": (BATCH_SCRIPT | {"SLURM_STEP_ID": "4294967290"}, World()),
    "a shell by srun --pty": (
        BATCH_SCRIPT | {"SLURM_STEP_ID": "0", "SLURM_JOB_NAME": "bash", "SLURM_PTY_PORT": "4242"},
        World(),
    ),
    "srun typed into salloc's shell": (SLURM | {"SLURM_JOB_NAME": "interactive"}, SLURM_WORLD),
    "srun typed into a shell by srun --pty": (
        SLURM | {"SLURM_JOB_NAME": "bash", "SLURM_PTY_PORT": "4242", "SLURM_STEP_ID": "1"},
        replace(SLURM_WORLD, rendezvous=TcpRendezvous("node08", derived_port("slurm", "200505", "1"))),
    ),
    "Kubeflow": (KUBEFLOW, KUBEFLOW_WORLD),
    "Kubeflow, auto": (KUBEFLOW | {"PET_NPROC_PER_NODE": "auto"}, KUBEFLOW_WORLD),
    "Kubeflow, equal bounds": (KUBEFLOW | {"PET_NNODES": "2:2"}, KUBEFLOW_WORLD),
    "Kubeflow, one pod": ({"PET_NNODES": "1"}, World(source="Kubeflow")),
    "SkyPilot": (SKYPILOT, SKYPILOT_WORLD),
    "SkyPilot, one host with many accelerators": (
        SKYPILOT
        | {"SKYPILOT_NODE_RANK": "0", "SKYPILOT_NODE_IPS": "10.0.0.4", "SKYPILOT_NUM_NODES": "1"}
        | {"SKYPILOT_NUM_GPUS_PER_NODE": "8"},
        World(source="SkyPilot"),
    ),
    "paceline run inside torchrun": (TORCHRUN | PACELINE, PACELINE_WORLD),
    "torchrun inside mpirun": (OPEN_MPI | TORCHRUN, TORCHRUN_WORLD),
    "torchrun inside SLURM": (SLURM | TORCHRUN, TORCHRUN_WORLD),
    "by hand inside SLURM": (SLURM | HAND, HAND_WORLD),
    "mpirun inside SLURM": (SLURM | OPEN_MPI, OPEN_MPI_WORLD),
    "mpiexec inside SLURM": (SLURM | PMI, PMI_WORLD),
    "torchrun in a Kubeflow pod": (KUBEFLOW | {"PET_NPROC_PER_NODE": "2"} | TORCHRUN, TORCHRUN_WORLD),
    "SLURM inside a Kubeflow pod": (KUBEFLOW | SLURM, SLURM_WORLD),
}


@pytest.mark.parametrize(("variables", "expected"), WORLDS.values(), ids=WORLDS.keys())
def test_the_variables_of_a_launcher_give_its_world(variables: dict[str, str], expected: World) -> None:
    assert read_world(variables) == expected


CONTRADICTIONS = {
    "rank beyond the world": (HAND | {"RANK": "2"}, "RANK=2 but WORLD_SIZE=2: RANK may be from 0 to 1"),
    "rank beyond a world of one": (HAND | {"WORLD_SIZE": "1"}, "RANK=1 but WORLD_SIZE=1: RANK may be only 0"),
    "rank not a number": (HAND | {"RANK": "one"}, "RANK='one' is not a whole number of at least 0"),
    "negative rank": (HAND | {"RANK": "-1"}, "RANK='-1' is not a whole number of at least 0"),
    "no workers": (HAND | {"WORLD_SIZE": "0"}, "WORLD_SIZE='0' is not a whole number of at least 1"),
    "size without rank": (
        {"WORLD_SIZE": "2"},
        "WORLD_SIZE=2 is set but RANK is not; set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT for every process",
    ),
    "rank without size": ({"RANK": "1"}, "RANK=1 is set but WORLD_SIZE is not; set RANK, WORLD_SIZE"),
    "local rank alone": ({"LOCAL_RANK": "1"}, "LOCAL_RANK=1 is set but RANK and WORLD_SIZE are not"),
    "no address": (without(HAND, "MASTER_ADDR"), "MASTER_ADDR is not set: the workers have no place to meet"),
    "no port": (without(HAND, "MASTER_PORT"), "MASTER_ADDR=127.0.0.1 is set but MASTER_PORT is not; set it to a free"),
    "port not a number": (HAND | {"MASTER_PORT": "http"}, "MASTER_PORT='http' is not a port; use a number from 1 to 6"),
    "port too large": (HAND | {"MASTER_PORT": "70000"}, "MASTER_PORT='70000' is not a port"),
    "port 0": (HAND | {"MASTER_PORT": "0"}, "MASTER_PORT='0' is not a port"),
    "local rank beyond": (
        TORCHRUN | {"LOCAL_RANK": "2"},
        "LOCAL_RANK=2 but LOCAL_WORLD_SIZE=2: LOCAL_RANK may be from 0 to 1",
    ),
    "more local than all": (
        TORCHRUN | {"LOCAL_WORLD_SIZE": "8"},
        "LOCAL_WORLD_SIZE=8 but WORLD_SIZE=4: more workers on this host than in all",
    ),
    "local rank without its size": (
        HAND | {"LOCAL_RANK": "1", "MASTER_ADDR": "head"},
        "LOCAL_RANK=1 is set but LOCAL_WORLD_SIZE is not, and MASTER_ADDR is not this host alone; set LOCAL_WORLD_SIZE",
    ),
    "host beyond": (TORCHRUN | {"GROUP_RANK": "2"}, "GROUP_RANK=2 but GROUP_WORLD_SIZE=2: GROUP_RANK may be from 0 to"),
    "half a host": (without(TORCHRUN, "GROUP_RANK"), "GROUP_WORLD_SIZE=2 is set but GROUP_RANK is not; set both"),
    "unequal hosts by hand": (
        HAND | {"WORLD_SIZE": "3", "MASTER_ADDR": "head", "LOCAL_WORLD_SIZE": "2"},
        "3 workers with 2 on this host: hosts differ in size and nothing says which host this is; set GROUP_RANK and",
    ),
    "torchrun without its size": (without(TORCHRUN, "WORLD_SIZE"), "RANK=3 is set but WORLD_SIZE is not; start the"),
    "fewer lanes than workers": (
        PACELINE | {"PACELINE_LANES": "1"},
        "PACELINE_LANES=1 but there are 2 workers: a worker without a lane has nothing to do; give at least 2 lanes",
    ),
    "no lanes": ({"PACELINE_LANES": "0"}, "PACELINE_LANES='0' is not a whole number of at least 1"),
    "no threads": ({"PACELINE_THREADS": "0"}, "PACELINE_THREADS='0' is not a whole number of at least 1"),
    "seed not a number": ({"PACELINE_SEED": "x"}, "PACELINE_SEED='x' is not a whole number of at least 0"),
    "half of paceline": ({"PACELINE_RANK": "0"}, "PACELINE_RANK=0 is set but PACELINE_WORLD_SIZE is not; start the sc"),
    "half of paceline's hosts": (without(PACELINE, "PACELINE_HOSTS"), "PACELINE_HOST_RANK=0 is set but PACELINE_HOSTS"),
    "paceline without a socket": (
        without(PACELINE, "PACELINE_CONTROL"),
        "PACELINE_WORLD_SIZE=2 but PACELINE_CONTROL is not set: the workers have no place to meet; start the script",
    ),
    "paceline without local ranks": (
        without(PACELINE, "PACELINE_LOCAL_RANK", "PACELINE_LOCAL_SIZE") | {"PACELINE_HOSTS": "2"},
        "PACELINE_LOCAL_RANK and PACELINE_LOCAL_SIZE are not set: nothing says which of the workers are on this host",
    ),
    "a rank beyond the servers": (
        SERVER | {"PACELINE_RANK": "4"},
        "PACELINE_RANK=4 but PACELINE_WORLD_SIZE=2 beside 2 servers: PACELINE_RANK may be from 0 to 3",
    ),
    "servers not a number": (SERVED | {"PACELINE_SERVERS": "-1"}, "PACELINE_SERVERS='-1' is not a whole number of at"),
    "a server without a socket": (
        {"PACELINE_RANK": "1", "PACELINE_WORLD_SIZE": "1", "PACELINE_SERVERS": "1"},
        "PACELINE_WORLD_SIZE=1 but PACELINE_CONTROL is not set: the workers have no place to meet",
    ),
    "a worker with a server's local rank": (
        SERVED | {"PACELINE_LOCAL_RANK": "2"},
        "local rank 2 of 2 workers on this host",
    ),
    "half of Open MPI": (without(OPEN_MPI, "OMPI_COMM_WORLD_SIZE"), "OMPI_COMM_WORLD_RANK=1 is set but OMPI_COMM_WOR"),
    "Open MPI over hosts without an address": (
        OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"},
        "MASTER_ADDR is not set: the workers have no place to meet; set it to rank 0's host",
    ),
    "Open MPI dealt round robin": (
        OPEN_MPI | FROM_MAIN | {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "0"},
        "rank 1 is local rank 0 of 2: ranks do not fill one host after the other and nothing says which host this is",
    ),
    "PMI without local ranks": (
        without(PMI, "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
        "MPI_LOCALRANKID and MPI_LOCALNRANKS are not set: nothing says which of the workers are on this host",
    ),
    "SLURM rank beyond": (SLURM | {"SLURM_PROCID": "7"}, "SLURM_PROCID=7 but SLURM_NTASKS=7: SLURM_PROCID may be from"),
    "SLURM host beyond": (SLURM | {"SLURM_NODEID": "4"}, "SLURM_NODEID=4 but SLURM_NNODES=4: SLURM_NODEID may be from"),
    "SLURM local beyond": (
        SLURM | {"SLURM_LOCALID": "2"},
        "SLURM_LOCALID=2 but SLURM_TASKS_PER_NODE=2(x3),1 gives host 2 2 tasks",
    ),
    "SLURM counts disagree": (
        SLURM | {"SLURM_TASKS_PER_NODE": "2(x3)"},
        "SLURM_TASKS_PER_NODE=2(x3) means 6 tasks on 3 hosts, but SLURM also says 7 tasks on 4 hosts",
    ),
    "SLURM counts unreadable": (SLURM | {"SLURM_TASKS_PER_NODE": "2x3"}, "SLURM's tasks per node '2x3' are not of"),
    "SLURM without a size": (without(SLURM, "SLURM_NTASKS"), "SLURM_NPROCS is not set; start the script with srun"),
    "SLURM without counts": (without(SLURM, "SLURM_TASKS_PER_NODE"), "SLURM says 4 hosts but SLURM_TASKS_PER_NODE is "),
    "SLURM without a local rank": (without(SLURM, "SLURM_LOCALID"), "SLURM_LOCALID is not set; start the script with"),
    "SLURM without hosts' names": (
        without(SLURM, "SLURM_STEP_NODELIST"),
        "SLURM says 4 hosts but SLURM_STEP_NODELIST names none; set MASTER_ADDR to the first host",
    ),
    "Kubeflow pod of several": (
        KUBEFLOW | {"PET_NPROC_PER_NODE": "4"},
        "Kubeflow asks for several workers on this host (PET_NPROC_PER_NODE=4) and this process is only one of them; "
        "start the script with `paceline run script.py`, which starts them all",
    ),
    "Kubeflow pod, one per GPU": (KUBEFLOW | {"PET_NPROC_PER_NODE": "gpu"}, "(PET_NPROC_PER_NODE=gpu)"),
    "Kubeflow workers unreadable": (KUBEFLOW | {"PET_NPROC_PER_NODE": "x"}, "PET_NPROC_PER_NODE='x' is not a whole nu"),
    "PyTorchJob with several per pod": (
        KUBEFLOW | HAND | {"WORLD_SIZE": "8", "PET_NPROC_PER_NODE": "4"},
        "Kubeflow asks for several workers on this host (PET_NPROC_PER_NODE=4)",
    ),
    "Kubeflow elastic": (
        KUBEFLOW | {"PET_NNODES": "1:4"},
        "PET_NNODES=1:4 asks for a changing number of pods; give one number, such as PET_NNODES=4",
    ),
    "Kubeflow pods unreadable": (KUBEFLOW | {"PET_NNODES": "two"}, "PET_NNODES='two' is not a number of pods"),
    "Kubeflow pod beyond": (KUBEFLOW | {"PET_NODE_RANK": "2"}, "PET_NODE_RANK=2 but PET_NNODES=2"),
    "Kubeflow without a pod's rank": (without(KUBEFLOW, "PET_NODE_RANK"), "PET_NODE_RANK is not set; one per pod"),
    "half of Kubeflow": ({"PET_NODE_RANK": "0"}, "PET_NODE_RANK=0 is set but PET_NNODES is not; set both, or neither"),
    "Kubeflow without a port": (without(KUBEFLOW, "PET_MASTER_PORT"), "is set but PET_MASTER_PORT is not"),
    "SkyPilot host of several": (
        SKYPILOT | {"SKYPILOT_NUM_GPUS_PER_NODE": "8"},
        "SkyPilot asks for several workers on this host (SKYPILOT_NUM_GPUS_PER_NODE=8)",
    ),
    "SkyPilot counts disagree": (
        SKYPILOT | {"SKYPILOT_NUM_NODES": "3"},
        "SKYPILOT_NUM_NODES=3 but SKYPILOT_NODE_IPS lists 2 addresses",
    ),
    "SkyPilot host beyond": (SKYPILOT | {"SKYPILOT_NODE_RANK": "2"}, "SKYPILOT_NODE_RANK=2 but SKYPILOT_NUM_NODES=2"),
    "half of SkyPilot": ({"SKYPILOT_NODE_RANK": "0"}, "SKYPILOT_NODE_RANK=0 is set but SKYPILOT_NODE_IPS is not"),
}


@pytest.mark.parametrize(("variables", "text"), CONTRADICTIONS.values(), ids=CONTRADICTIONS.keys())
def test_a_contradiction_is_one_line_that_names_variable_and_value(variables: dict[str, str], text: str) -> None:
    with pytest.raises(WorldError) as caught:
        read_world(variables)
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_worker_reads_back_the_world_it_was_given() -> None:
    settings = LaunchSettings(lanes=8, threads=2, backend="gloo", seed=3)
    settled = replace(PACELINE_WORLD, settings=settings, host_address="10.0.0.7")
    for world in (PACELINE_WORLD, settled, replace(PACELINE_WORLD, servers=2), SERVER_WORLD):
        assert read_world(worker_environment(world)) == world


def test_a_worker_that_meets_elsewhere_has_no_paceline_environment() -> None:
    with pytest.raises(WorldError, match="meets at a control socket, not TcpRendezvous"):
        worker_environment(HAND_WORLD)


def test_enter_is_what_read_world_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in HAND:
        monkeypatch.setenv(name, "")  # restored, with what `enter` writes, at the end
    environment.enter(HAND)
    assert read_world() == HAND_WORLD


def test_cublas_gets_a_workspace_and_keeps_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    with environment.cublas_workspace():
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    with environment.cublas_workspace():
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ


DEFAULTS = {
    "nothing": ({}, None),
    "Kubeflow": (
        KUBEFLOW | {"PET_NPROC_PER_NODE": "4"},
        LaunchDefaults(2, 1, TcpRendezvous("job-node-0-0.job", 29400), workers=4, source="Kubeflow"),
    ),
    "Kubeflow, the launcher counts": (
        KUBEFLOW | {"PET_NPROC_PER_NODE": "gpu"},
        LaunchDefaults(2, 1, TcpRendezvous("job-node-0-0.job", 29400), workers=None, source="Kubeflow"),
    ),
    "SkyPilot": (
        SKYPILOT | {"SKYPILOT_NUM_GPUS_PER_NODE": "8"},
        LaunchDefaults(
            2, 1, TcpRendezvous("10.0.0.4", derived_port("skypilot", "sky-task-1")), workers=8, source="SkyPilot"
        ),
    ),
    "SLURM, one supervisor per host": (
        SLURM
        | {"SLURM_PROCID": "1", "SLURM_NODEID": "1", "SLURM_LOCALID": "0", "SLURM_NTASKS": "2", "SLURM_NNODES": "2"}
        | {"SLURM_TASKS_PER_NODE": "1(x2)"},
        LaunchDefaults(
            2, 1, TcpRendezvous("node08", derived_port("slurm", "200505", "0")), workers=None, source="SLURM"
        ),
    ),
    "SLURM batch script": (BATCH_SCRIPT, None),
}


@pytest.mark.parametrize(("variables", "expected"), DEFAULTS.values(), ids=DEFAULTS.keys())
def test_the_cluster_answers_the_launchers_flags(variables: dict[str, str], expected: LaunchDefaults | None) -> None:
    assert launch_defaults(variables) == expected


def test_several_supervisors_on_one_host_are_refused() -> None:
    with pytest.raises(
        WorldError, match="srun started 2 tasks on this host and each is a `paceline run`; use `srun --nta"
    ):
        launch_defaults(SLURM)


def test_jobs_meet_at_their_own_port_below_the_ephemeral_range() -> None:
    ports = {derived_port("slurm", str(job), "0") for job in range(200)}
    assert len(ports) > 190
    assert all(10_000 <= port < 30_000 for port in ports)


def test_the_launchers_address_is_taken_at_its_word() -> None:
    assert tensor_address(World()) == LOOPBACK
    assert tensor_address(replace(HAND_WORLD, host_address="10.9.8.7")) == "10.9.8.7"


def test_tensors_never_leave_from_loopback_when_there_are_several_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    world = replace(TORCHRUN_WORLD, rendezvous=TcpRendezvous(LOOPBACK, 29500))

    def unreachable(*_: object) -> None:
        raise OSError("network is unreachable")

    monkeypatch.setattr("paceline.world.environment.socket.socket.connect", unreachable, raising=False)
    with pytest.raises(
        WorldError, match="rank 3: 2 hosts, but no interface of this one leads to the others; set PACEL"
    ):
        tensor_address(world)


def test_a_world_is_whole_at_birth() -> None:
    for changes, text in (
        ({"rank": 2}, "rank 2 of 2 workers"),
        ({"local_rank": 2}, "local rank 2 of 2"),
        ({"hosts": 3}, "3 hosts but only 2 workers"),
        ({"host_rank": 1}, "host 1 of 1 hosts"),
        ({"rendezvous": None}, "2 workers and no place to meet"),
        ({"host_address": ""}, "the host address is empty"),
    ):
        with pytest.raises(WorldError, match=text):
            replace(HAND_WORLD, **changes)
    with pytest.raises(
        WorldError, match=r"setting threads \(--threads or PACELINE_THREADS\) is 0; it must be at least 1"
    ):
        LaunchSettings(threads=0)


def test_a_server_comes_after_the_workers_on_the_first_host() -> None:
    assert (SERVER_WORLD.is_server, SERVER_WORLD.server_index, SERVER_WORLD.name) == (True, 1, "server 1")
    assert not SERVER_WORLD.is_main
    worker = replace(SERVER_WORLD, rank=0, local_rank=0)
    assert (worker.is_server, worker.is_main, worker.name) == (False, True, "worker 0")
    with pytest.raises(WorldError, match="worker 0 is no server; the servers are the ranks from 2 on"):
        _ = worker.server_index
    for changes, text in (
        ({"servers": -1}, "-1 servers; a world has none or more"),
        ({"rank": 4}, "rank 4 of 2 workers and 2 servers"),
        ({"local_rank": 2}, "server 1 has local rank 2 beside 2 workers; it comes after them and is 3"),
        ({"host_rank": 1, "hosts": 2}, "server 1 on host 1; servers are on host 0"),
        ({"rendezvous": None}, "2 workers and 2 servers and no place to meet"),
    ):
        with pytest.raises(WorldError, match=text):
            replace(SERVER_WORLD, **changes)


def test_workers_and_servers_together_are_a_world_with_the_same_ranks() -> None:
    first = World(size=3, local_size=2, hosts=2, servers=2, rendezvous=ControlSocket("/run/socket"))
    places = {
        "worker 1": (1, 1, 0),
        "worker 2": (2, 0, 1),
        "server 1": (4, 3, 0),
    }
    joint = {}
    for name, (rank, local_rank, host) in places.items():
        local_size = 2 if host == 0 else 1
        world = replace(first, rank=rank, local_rank=local_rank, local_size=local_size, host_rank=host)
        assert world.name == name
        joint[name] = world.joint()
    assert {name: (w.rank, w.local_rank, w.local_size) for name, w in joint.items()} == {
        "worker 1": (1, 1, 4),
        "worker 2": (2, 0, 1),
        "server 1": (4, 3, 4),
    }
    assert {(w.size, w.hosts, w.servers) for w in joint.values()} == {(5, 2, 0)}
    assert replace(first, servers=0).joint() == replace(first, servers=0)


def test_only_environment_touches_the_environment() -> None:
    package = Path(paceline.__file__).parent
    touching = {
        f"{file.relative_to(package)}:{line}"
        for file in package.rglob("*.py")
        if file != package / "world" / "environment.py"
        for line in lines_that_touch_the_environment(file)
    }
    assert touching == set(), "read it in world/environment.py and pass the value on"


def lines_that_touch_the_environment(file: Path) -> Iterator[int]:
    names = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        match node:
            case ast.Attribute(attr=attr, value=ast.Name(id="os")) if attr in names:
                yield node.lineno
            case ast.ImportFrom(module="os", names=imported) if names & {alias.name for alias in imported}:
                yield node.lineno


# -- the process that workers are forked from --------------------------------------------------------------------------


def test_workers_keep_the_memory_they_free_only_if_asked_and_if_the_user_said_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in (*environment.KEEPING_MEMORY, "GLIBC_TUNABLES", "PACELINE_KEEP_MEMORY"):
        monkeypatch.delenv(name, raising=False)
    kept = environment.parent_environment(None, keep_memory=True)
    assert kept["MALLOC_TRIM_THRESHOLD_"] == str(2**40)
    planned = environment.plan_environment(Path("order.json"), threads=1)
    assert planned["MALLOC_TRIM_THRESHOLD_"] == str(2**40)  # a script is timed as it would run
    given_back = environment.parent_environment(None, keep_memory=False)
    assert not any(name.startswith("MALLOC_") for name in given_back)
    assert environment.may_keep_memory({})
    assert not environment.may_keep_memory(given_back)
    monkeypatch.setenv("PACELINE_KEEP_MEMORY", "0")
    assert not any(name.startswith("MALLOC_") for name in environment.parent_environment(None, keep_memory=True))
    monkeypatch.delenv("PACELINE_KEEP_MEMORY")
    monkeypatch.setenv("MALLOC_ARENA_MAX", "1")
    told = environment.parent_environment(None, keep_memory=True)
    assert [name for name in told if name.startswith("MALLOC_")] == ["MALLOC_ARENA_MAX"]
