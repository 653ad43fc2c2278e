"""The launchers: what each leaves in the environment, and the world that follows from it.

Launchers nest: torchrun starts inside a SLURM job, `mpirun` starts its daemons with `srun`. The innermost one started
this process, so its word counts. From the inside out:

| launcher     | recognised by                 | also reads                                                     |
|--------------|-------------------------------|----------------------------------------------------------------|
| paceline run | PACELINE_RANK, _WORLD_SIZE    | PACELINE_LOCAL_RANK, _LOCAL_SIZE, _HOST_RANK, _HOSTS,          |
|              |                               | _CONTROL, _SERVERS                                             |
| torchrun     | RANK, WORLD_SIZE,             | LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK, GROUP_WORLD_SIZE,    |
|              | TORCHELASTIC_RUN_ID           | MASTER_ADDR, MASTER_PORT, TORCHELASTIC_USE_AGENT_STORE         |
| set by hand  | RANK, WORLD_SIZE              | as torchrun; only MASTER_* are required (people, PyTorchJob)   |
| Open MPI     | OMPI_COMM_WORLD_RANK, _SIZE   | OMPI_COMM_WORLD_LOCAL_RANK, _LOCAL_SIZE, MASTER_*,             |
|              |                               | PMIX_NAMESPACE, OMPI_MCA_ess_base_jobid                        |
| MPICH, Intel | PMI_RANK, PMI_SIZE            | MPI_LOCALRANKID, MPI_LOCALNRANKS, MASTER_*                     |
| SLURM        | SLURM_PROCID, SLURM_STEP_ID   | SLURM_STEP_NUM_TASKS or _NTASKS, _NODEID, _LOCALID,            |
|              |                               | _STEP_NUM_NODES or _NNODES or _JOB_NUM_NODES,                  |
|              |                               | _STEP_TASKS_PER_NODE or _TASKS_PER_NODE, _STEP_NODELIST or     |
|              |                               | _JOB_NODELIST, _JOB_ID, _JOB_NAME, _PTY_PORT, MASTER_*         |
| Kubeflow     | PET_NNODES                    | PET_NPROC_PER_NODE, _NODE_RANK, _MASTER_ADDR, _MASTER_PORT     |
| SkyPilot     | SKYPILOT_NODE_RANK, _NODE_IPS | SKYPILOT_NUM_NODES, _NUM_GPUS_PER_NODE, _TASK_ID               |
| alone        | none of these                 |                                                                |

Under every launcher PACELINE_LANES, _THREADS, _BACKEND, _SEED, _STRATEGY, _PRECISION, _ACTIVATION_CHECKPOINTING and
_OFFLOAD fix what `paceline run`'s flags fix, and PACELINE_HOST_ADDRESS names the address that tensors leave this host
from. PACELINE_REPLAY is the folder of a recorded run that one process should do again (`paceline replay`). An empty
variable counts as unset.

Servers are started by `paceline run --servers S` alone. The others know only workers: there `World.servers` is 0, and
worker 0 doubles as the parameter server.

A half-set or contradictory family is a `WorldError`, never a silent world of one: that is how two processes come to
train alone, side by side, on the same data.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from paceline.errors import WorldError
from paceline.world.checked_variables import Variables, local_place, number_of, place_of, text_of
from paceline.world.cluster_launch import from_kubeflow, from_skypilot
from paceline.world.launch_settings import elasticity, host_address, settings_of
from paceline.world.mpi_launch import from_open_mpi, from_pmi
from paceline.world.slurm_launch import from_slurm
from paceline.world.torch_launch import from_hand, from_torchrun
from paceline.world.world import ControlSocket, World


def from_paceline(variables: Variables) -> World | None:
    servers = number_of(variables, "PACELINE_SERVERS") or 0
    advice = "start the script with `paceline run`"
    place = place_of(variables, "PACELINE_RANK", "PACELINE_WORLD_SIZE", advice, servers)
    if place is None:
        return None
    rank, size = place
    host_rank, hosts = place_of(variables, "PACELINE_HOST_RANK", "PACELINE_HOSTS", "set both, or neither") or (0, 1)
    local_names = ("PACELINE_LOCAL_RANK", "PACELINE_LOCAL_SIZE")
    local_rank, local_size = local_place(variables, local_names, place, hosts == 1, servers)
    path = text_of(variables, "PACELINE_CONTROL")
    if path is None and size + servers > 1:
        raise WorldError(
            f"PACELINE_WORLD_SIZE={size} but PACELINE_CONTROL is not set: the workers have no place to meet; "
            "start the script with `paceline run`, which sets all of them"
        )
    return World(
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        host_rank=host_rank,
        hosts=hosts,
        source="paceline run",
        rendezvous=ControlSocket(path) if path is not None else None,
        host_address=host_address(variables, hosts),
        settings=settings_of(variables, size),
        servers=servers,
        elastic=elasticity(variables),
    )


@dataclass(frozen=True)
class Launcher:
    name: str
    read: Callable[[Variables], World | None]
    signs: tuple[str, ...]
    """Any of these set means that the launcher was here, whether or not it started this process."""
    also_reads: tuple[str, ...] = ()

    def seen(self, variables: Variables) -> bool:
        return any(text_of(variables, name) is not None for name in self.signs)

    def evidence(self, variables: Variables) -> str:
        values = {name: text_of(variables, name) for name in self.signs + self.also_reads}
        return " ".join(f"{name}={','.join(value.split())}" for name, value in values.items() if value is not None)


MASTER = ("MASTER_ADDR", "MASTER_PORT")
TORCH = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", *MASTER)
LAUNCHERS = (
    Launcher(
        "paceline run",
        from_paceline,
        signs=("PACELINE_RANK", "PACELINE_WORLD_SIZE"),
        also_reads=tuple(
            f"PACELINE_{name}" for name in ("LOCAL_RANK", "LOCAL_SIZE", "HOST_RANK", "HOSTS", "CONTROL", "SERVERS")
        ),
    ),
    Launcher(
        "torchrun",
        from_torchrun,
        signs=("TORCHELASTIC_RUN_ID",),
        also_reads=("RANK", "WORLD_SIZE", *TORCH, "TORCHELASTIC_USE_AGENT_STORE"),
    ),
    Launcher("RANK and WORLD_SIZE", from_hand, signs=("RANK", "WORLD_SIZE", "LOCAL_RANK"), also_reads=TORCH[1:]),
    Launcher(
        "Open MPI",
        from_open_mpi,
        signs=("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        also_reads=("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE", *MASTER),
    ),
    Launcher(
        "MPI (PMI)",
        from_pmi,
        signs=("PMI_RANK", "PMI_SIZE"),
        also_reads=("MPI_LOCALRANKID", "MPI_LOCALNRANKS", *MASTER),
    ),
    Launcher(
        "SLURM",
        from_slurm,
        signs=("SLURM_JOB_ID", "SLURM_PROCID", "SLURM_NTASKS"),
        also_reads=(
            *(f"SLURM_{name}" for name in ("STEP_ID", "STEP_NUM_TASKS", "LOCALID", "NODEID", "NNODES")),
            *(f"SLURM_{name}" for name in ("STEP_TASKS_PER_NODE", "TASKS_PER_NODE", "STEP_NODELIST", "JOB_NODELIST")),
            *MASTER,
        ),
    ),
    Launcher(
        "Kubeflow",
        from_kubeflow,
        signs=("PET_NNODES", "PET_NODE_RANK"),
        also_reads=("PET_NPROC_PER_NODE", "PET_MASTER_ADDR", "PET_MASTER_PORT"),
    ),
    Launcher(
        "SkyPilot",
        from_skypilot,
        signs=("SKYPILOT_NODE_RANK", "SKYPILOT_NODE_IPS"),
        also_reads=("SKYPILOT_NUM_NODES", "SKYPILOT_NUM_GPUS_PER_NODE"),
    ),
)


def world_from(variables: Variables) -> World:
    """This process's place among the workers, by the innermost launcher that left its variables."""
    for launcher in LAUNCHERS:
        world = launcher.read(variables)
        if world is not None:
            return world
    return World(settings=settings_of(variables, size=1))
