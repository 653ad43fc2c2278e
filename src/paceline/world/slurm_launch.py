"""Workers that `srun` has started: ranks, hosts and a place to meet from SLURM's own variables and notations."""

from __future__ import annotations

from paceline.errors import WorldError
from paceline.world.addresses import derived_port
from paceline.world.checked_variables import (
    Variables,
    beyond,
    first_set,
    number_of,
    port_of,
    required_number,
    text_of,
)
from paceline.world.launch_settings import host_address, settings_of
from paceline.world.slurm_notation import expand_nodelist, tasks_per_node
from paceline.world.world import LOOPBACK, TcpRendezvous, World

# Steps from here on were made by no `srun`: the batch script, an interactive shell (slurm.h: SLURM_BATCH_SCRIPT …).
FIRST_RESERVED_STEP = 0xFFFF_FFF0
SHELLS = frozenset({"bash", "sh", "zsh", "fish", "csh", "tcsh", "ksh"})


def from_slurm(variables: Variables) -> World | None:
    if not started_by_srun(variables):
        return None
    rank = required_number(variables, "SLURM_PROCID", "start the script with srun")
    size_name = first_set(variables, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")
    size = required_number(variables, size_name, "start the script with srun", least=1)
    if rank >= size:
        raise beyond("SLURM_PROCID", rank, size_name, size)
    hosts = _slurm_hosts(variables)
    host_rank = number_of(variables, "SLURM_NODEID") or 0
    if host_rank >= hosts:
        raise beyond("SLURM_NODEID", host_rank, "SLURM_NNODES", hosts)
    local_rank, local_size = _slurm_local(variables, rank, size, host_rank, hosts)
    return World(
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        host_rank=host_rank,
        hosts=hosts,
        source="SLURM",
        rendezvous=_slurm_rendezvous(variables, hosts) if size > 1 else None,
        host_address=host_address(variables, hosts),
        settings=settings_of(variables, size),
    )


def started_by_srun(variables: Variables) -> bool:
    """True for a task of an `srun` step; false for the batch script and for a shell inside an allocation.

    Both also see SLURM_NTASKS, often SLURM_PROCID=0, and would wait for ever for tasks that nobody started.
    """
    step = number_of(variables, "SLURM_STEP_ID")
    if step is None or step >= FIRST_RESERVED_STEP or text_of(variables, "SLURM_PROCID") is None:
        return False
    shell_by_srun = text_of(variables, "SLURM_JOB_NAME") in SHELLS and text_of(variables, "SLURM_PTY_PORT") is not None
    return not (shell_by_srun and step == 0)  # `srun --pty bash` is step 0; an srun typed into it is a later one


def _slurm_hosts(variables: Variables) -> int:
    name = first_set(variables, "SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES")
    return number_of(variables, name, least=1) or 1


def _slurm_local(variables: Variables, rank: int, size: int, host_rank: int, hosts: int) -> tuple[int, int]:
    name = first_set(variables, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    counts = text_of(variables, name)
    if counts is None:
        if hosts > 1:
            raise WorldError(
                f"SLURM says {hosts} hosts but SLURM_TASKS_PER_NODE is not set; start the script with srun"
            )
        counts = str(size)
    tasks = tasks_per_node(counts)
    if len(tasks) != hosts or sum(tasks) != size:
        raise WorldError(
            f"{name}={counts} means {sum(tasks)} tasks on {len(tasks)} hosts, "
            f"but SLURM also says {size} tasks on {hosts} hosts"
        )
    local_rank = number_of(variables, "SLURM_LOCALID")
    if local_rank is None:
        if hosts > 1:
            raise WorldError("SLURM_LOCALID is not set; start the script with srun")
        local_rank = rank
    if local_rank >= tasks[host_rank]:
        raise WorldError(
            f"SLURM_LOCALID={local_rank} but {name}={counts} gives host {host_rank} {tasks[host_rank]} tasks"
        )
    return local_rank, tasks[host_rank]


def _slurm_rendezvous(variables: Variables, hosts: int) -> TcpRendezvous:
    port = port_of(variables, "MASTER_PORT") or derived_port(
        "slurm", text_of(variables, "SLURM_JOB_ID"), text_of(variables, "SLURM_STEP_ID")
    )
    if (address := text_of(variables, "MASTER_ADDR")) is not None:
        return TcpRendezvous(address, port)
    if hosts == 1:
        return TcpRendezvous(LOOPBACK, port)
    name = first_set(variables, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    first = next(expand_nodelist(text_of(variables, name) or ""), None)
    if first is None:
        raise WorldError(
            f"SLURM says {hosts} hosts but SLURM_STEP_NODELIST names none; set MASTER_ADDR to the first host"
        )
    return TcpRendezvous(first, port)
