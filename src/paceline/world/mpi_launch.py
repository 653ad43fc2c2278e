"""Workers that `mpirun` or `mpiexec` has started: Open MPI, and the process manager of MPICH and Intel MPI.

On one host they meet at a port made of the job's name; on several, MASTER_ADDR and MASTER_PORT say where.
"""

from __future__ import annotations

from paceline.world.addresses import derived_port
from paceline.world.checked_variables import Variables, host_by_host, local_place, place_of, port_of, tcp_of, text_of
from paceline.world.launch_settings import host_address, settings_of
from paceline.world.slurm_launch import started_by_srun
from paceline.world.world import LOOPBACK, TcpRendezvous, World


def from_open_mpi(variables: Variables) -> World | None:
    place = place_of(variables, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "start the script with mpirun")
    if place is None:
        return None
    names = ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")
    job = text_of(variables, "PMIX_NAMESPACE") or text_of(variables, "OMPI_MCA_ess_base_jobid")
    return _with_mpi_names(variables, place, names, job, source="Open MPI")


def from_pmi(variables: Variables) -> World | None:
    """MPICH's and Intel MPI's process manager. `srun --mpi=pmi2` sets the same two, and SLURM's own say more."""
    if started_by_srun(variables) and text_of(variables, "PMI_RANK") == text_of(variables, "SLURM_PROCID"):
        return None
    place = place_of(variables, "PMI_RANK", "PMI_SIZE", "start the script with mpiexec")
    if place is None:
        return None
    return _with_mpi_names(variables, place, ("MPI_LOCALRANKID", "MPI_LOCALNRANKS"), None, source="MPI (PMI)")


def _with_mpi_names(
    variables: Variables, place: tuple[int, int], local_names: tuple[str, str], job: str | None, source: str
) -> World:
    rank, size = place
    local_rank, local_size = local_place(variables, local_names, place, default_to_place=size == 1)
    host_rank, hosts = host_by_host(
        rank, size, local_rank, local_size, "use --map-by slot and as many workers per host"
    )
    rendezvous: TcpRendezvous | None = None
    if hosts > 1 or text_of(variables, "MASTER_ADDR") is not None:
        rendezvous = tcp_of(variables, "MASTER_ADDR", "MASTER_PORT")
    elif size > 1:
        rendezvous = TcpRendezvous(LOOPBACK, port_of(variables, "MASTER_PORT") or derived_port("mpi", job))
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


def inside_mpi(variables: Variables) -> bool:
    return any(text_of(variables, name) is not None for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK"))
