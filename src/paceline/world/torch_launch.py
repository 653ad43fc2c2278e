"""RANK and WORLD_SIZE, as torchrun sets them, or a person, a script, Kubeflow's PyTorchJob.

Where nothing names the host, it follows from LOCAL_RANK and LOCAL_WORLD_SIZE if ranks fill one host after the other.
"""

from __future__ import annotations

from paceline.errors import WorldError
from paceline.world.addresses import is_loopback
from paceline.world.checked_variables import (
    Variables,
    beyond,
    host_by_host,
    is_number,
    launcher_needed,
    number_of,
    place_of,
    tcp_of,
    text_of,
)
from paceline.world.launch_settings import host_address, settings_of
from paceline.world.mpi_launch import inside_mpi
from paceline.world.slurm_launch import started_by_srun
from paceline.world.world import TcpRendezvous, World


def from_torchrun(variables: Variables) -> World | None:
    if text_of(variables, "TORCHELASTIC_RUN_ID") is None:
        return None
    place = place_of(variables, "RANK", "WORLD_SIZE", "start the script with torchrun, which sets both")
    if place is None:
        return None
    return _with_torch_names(variables, place, source="torchrun")


def from_hand(variables: Variables) -> World | None:
    """RANK and WORLD_SIZE set by a person, a script, or Kubeflow's PyTorchJob."""
    if text_of(variables, "RANK") is None and (inside_mpi(variables) or started_by_srun(variables)):
        return (
            None  # a batch script often exports WORLD_SIZE and MASTER_ADDR for all and leaves ranks to srun or mpirun
        )
    advice = "set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT for every process, or start with `paceline run`"
    place = place_of(variables, "RANK", "WORLD_SIZE", advice)
    if place is None:
        if (local_rank := text_of(variables, "LOCAL_RANK")) is not None:
            raise WorldError(f"LOCAL_RANK={local_rank} is set but RANK and WORLD_SIZE are not; {advice}, or unset it")
        return None
    processes = number_of(variables, "PET_NPROC_PER_NODE") if is_number(variables, "PET_NPROC_PER_NODE") else None
    if processes is not None and processes > 1 and text_of(variables, "LOCAL_RANK") is None:
        # PyTorchJob counts pods in RANK but workers in WORLD_SIZE: such a world would wait for ever to be complete.
        raise launcher_needed("Kubeflow", f"PET_NPROC_PER_NODE={processes}")
    return _with_torch_names(variables, place, source="RANK and WORLD_SIZE")


def _with_torch_names(variables: Variables, place: tuple[int, int], source: str) -> World:
    rank, size = place
    rendezvous: TcpRendezvous | None = None
    if size > 1 or text_of(variables, "MASTER_ADDR") is not None:
        by_agent = (text_of(variables, "TORCHELASTIC_USE_AGENT_STORE") or "").lower() in ("true", "1")
        rendezvous = tcp_of(variables, "MASTER_ADDR", "MASTER_PORT", served_by_agent=source == "torchrun" and by_agent)
    one_host = rendezvous is None or is_loopback(rendezvous.address)
    local_rank, local_size = _torch_local(variables, rank, size, one_host)
    host_rank, hosts = _torch_host(variables, rank, size, local_rank, local_size)
    return World(
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        host_rank=host_rank,
        hosts=hosts,
        source=source,
        rendezvous=rendezvous,
        host_address=host_address(variables, hosts),
        settings=settings_of(variables, size),
    )


def _torch_local(variables: Variables, rank: int, size: int, one_host: bool) -> tuple[int, int]:
    local_rank, local_size = number_of(variables, "LOCAL_RANK"), number_of(variables, "LOCAL_WORLD_SIZE", least=1)
    if local_size is None:
        if local_rank is not None and not one_host and size > 1:
            raise WorldError(
                f"LOCAL_RANK={local_rank} is set but LOCAL_WORLD_SIZE is not, and MASTER_ADDR is not this host alone; "
                "set LOCAL_WORLD_SIZE to the number of workers on this host"
            )
        local_size = size if one_host else 1
    if local_size > size:
        raise WorldError(f"LOCAL_WORLD_SIZE={local_size} but WORLD_SIZE={size}: more workers on this host than in all")
    if local_rank is None:
        local_rank = rank % local_size
    if local_rank >= local_size:
        raise beyond("LOCAL_RANK", local_rank, "LOCAL_WORLD_SIZE", local_size)
    return local_rank, local_size


def _torch_host(variables: Variables, rank: int, size: int, local_rank: int, local_size: int) -> tuple[int, int]:
    host = place_of(variables, "GROUP_RANK", "GROUP_WORLD_SIZE", "set both, or neither")
    return host or host_by_host(rank, size, local_rank, local_size, "set GROUP_RANK and GROUP_WORLD_SIZE")
