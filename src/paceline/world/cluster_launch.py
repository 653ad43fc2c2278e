"""What a cluster says of its hosts: the flags of `paceline run`, answered, or the one worker of each host.

Kubeflow   PET_*          torchrun's flags as variables, one set per pod
SkyPilot   SKYPILOT_*     every node has the addresses of all
SLURM      SLURM_*        `srun --ntasks-per-node=1 paceline run …`: each task is the supervisor of its host
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.errors import WorldError
from paceline.world.addresses import derived_port
from paceline.world.checked_variables import (
    Variables,
    beyond,
    launcher_needed,
    number_of,
    required_number,
    tcp_of,
    text_of,
)
from paceline.world.launch_settings import host_address, settings_of
from paceline.world.slurm_launch import from_slurm, started_by_srun
from paceline.world.world import TcpRendezvous, World


@dataclass(frozen=True)
class LaunchDefaults:
    """Flags of `paceline run` that the cluster has answered; `workers` counts those of one host, None: not said."""

    hosts: int
    host_rank: int
    coordinator: TcpRendezvous | None
    workers: int | None
    source: str

    def __post_init__(self) -> None:
        if not 0 <= self.host_rank < self.hosts:
            raise WorldError(f"{self.source} says this is host {self.host_rank} of {self.hosts}; hosts count from 0")
        if self.hosts > 1 and self.coordinator is None:
            raise WorldError(f"{self.source} says there are {self.hosts} hosts but not where they meet")


def cluster_defaults(variables: Variables) -> LaunchDefaults | None:
    """Hosts, host rank and coordinator for `paceline run`, where Kubeflow, SkyPilot or SLURM says them."""
    return _kubeflow_pod(variables) or _skypilot_task(variables) or _slurm_supervisor(variables)


def from_kubeflow(variables: Variables) -> World | None:
    """PET_* are torchrun's flags as variables, one set per pod: this process is the worker when the pod has one."""
    pod = _kubeflow_pod(variables)
    if pod is None:
        return None
    if pod.workers is not None and pod.workers > 1:
        raise launcher_needed("Kubeflow", f"PET_NPROC_PER_NODE={pod.workers}")
    if text_of(variables, "PET_NPROC_PER_NODE") not in (None, "auto", "1"):
        raise launcher_needed("Kubeflow", f"PET_NPROC_PER_NODE={variables['PET_NPROC_PER_NODE']}")
    return _one_worker_per_host(variables, pod, source="Kubeflow")


def from_skypilot(variables: Variables) -> World | None:
    task = _skypilot_task(variables)
    if task is None:
        return None
    if task.hosts > 1 and task.workers is not None and task.workers > 1:
        raise launcher_needed("SkyPilot", f"SKYPILOT_NUM_GPUS_PER_NODE={task.workers}")
    return _one_worker_per_host(variables, task, source="SkyPilot")


def _one_worker_per_host(variables: Variables, launch: LaunchDefaults, source: str) -> World:
    return World(
        rank=launch.host_rank,
        size=launch.hosts,
        host_rank=launch.host_rank,
        hosts=launch.hosts,
        source=source,
        rendezvous=launch.coordinator,
        host_address=host_address(variables, launch.hosts),
        settings=settings_of(variables, launch.hosts),
    )


def _kubeflow_pod(variables: Variables) -> LaunchDefaults | None:
    nodes = text_of(variables, "PET_NNODES")
    if nodes is None:
        if (alone := text_of(variables, "PET_NODE_RANK")) is not None:
            raise WorldError(f"PET_NODE_RANK={alone} is set but PET_NNODES is not; set both, or neither")
        return None
    fewest, _, most = nodes.partition(":")
    if not fewest.isdecimal() or int(fewest) < 1 or (most and not most.isdecimal()):
        raise WorldError(f"PET_NNODES={nodes!r} is not a number of pods, such as 2")
    if most and most != fewest:
        raise WorldError(
            f"PET_NNODES={nodes} asks for a changing number of pods; give one number, such as PET_NNODES={most}"
        )
    hosts = int(fewest)
    host_rank = (
        number_of(variables, "PET_NODE_RANK")
        if hosts == 1
        else required_number(variables, "PET_NODE_RANK", "one per pod")
    )
    if host_rank is not None and host_rank >= hosts:
        raise beyond("PET_NODE_RANK", host_rank, "PET_NNODES", hosts)
    processes = text_of(variables, "PET_NPROC_PER_NODE")
    if processes is not None and processes not in ("auto", "cpu", "gpu", "xpu"):
        processes = str(required_number(variables, "PET_NPROC_PER_NODE", "workers per pod", least=1))
    return LaunchDefaults(
        hosts=hosts,
        host_rank=host_rank or 0,
        coordinator=tcp_of(variables, "PET_MASTER_ADDR", "PET_MASTER_PORT") if hosts > 1 else None,
        workers=int(processes) if processes is not None and processes.isdecimal() else None,
        source="Kubeflow",
    )


def _skypilot_task(variables: Variables) -> LaunchDefaults | None:
    host_rank = number_of(variables, "SKYPILOT_NODE_RANK")
    addresses = (text_of(variables, "SKYPILOT_NODE_IPS") or "").split()
    if host_rank is None:
        return None
    if not addresses:
        raise WorldError(f"SKYPILOT_NODE_RANK={host_rank} is set but SKYPILOT_NODE_IPS is not; SkyPilot sets both")
    hosts = number_of(variables, "SKYPILOT_NUM_NODES", least=1) or len(addresses)
    if hosts != len(addresses):
        raise WorldError(f"SKYPILOT_NUM_NODES={hosts} but SKYPILOT_NODE_IPS lists {len(addresses)} addresses")
    if host_rank >= hosts:
        raise beyond("SKYPILOT_NODE_RANK", host_rank, "SKYPILOT_NUM_NODES", hosts)
    port = derived_port("skypilot", text_of(variables, "SKYPILOT_TASK_ID"))
    return LaunchDefaults(
        hosts=hosts,
        host_rank=host_rank,
        coordinator=TcpRendezvous(addresses[0], port) if hosts > 1 else None,
        workers=number_of(variables, "SKYPILOT_NUM_GPUS_PER_NODE") or None,
        source="SkyPilot",
    )


def _slurm_supervisor(variables: Variables) -> LaunchDefaults | None:
    """`srun --ntasks-per-node=1 paceline run …`: every task is the supervisor of its host."""
    if not started_by_srun(variables):
        return None
    world = from_slurm(variables)
    if world is None or world.size == 1:
        return None
    if world.local_size > 1:
        raise WorldError(
            f"srun started {world.local_size} tasks on this host and each is a `paceline run`; "
            "use `srun --ntasks-per-node=1 paceline run …`, or `srun python script.py` without it"
        )
    return LaunchDefaults(
        hosts=world.hosts,
        host_rank=world.host_rank,
        coordinator=world.rendezvous if isinstance(world.rendezvous, TcpRendezvous) else None,
        workers=number_of(variables, "SLURM_GPUS_ON_NODE") or None,
        source="SLURM",
    )
