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

Under every launcher the PACELINE_* settings (`variables`) fix what `paceline run`'s flags fix.

Servers are started by `paceline run --servers S` alone. The others know only workers: there `World.servers` is 0, and
worker 0 doubles as the parameter server.

A half-set or contradictory family is a `WorldError`, never a silent world of one: that is how two processes come to
train alone, side by side, on the same data.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from paceline.errors import WorldError
from paceline.world.variables import (
    Variables,
    beyond,
    derived_port,
    elasticity,
    first_set,
    host_address,
    host_by_host,
    is_loopback,
    is_number,
    launcher_needed,
    local_place,
    number_of,
    place_of,
    port_of,
    required_number,
    settings_of,
    tcp_of,
    text_of,
)
from paceline.world.world import LOOPBACK, ControlSocket, Elasticity, TcpRendezvous, World


def _world(
    variables: Variables,
    source: str,
    rendezvous: ControlSocket | TcpRendezvous | None,
    *,
    place: tuple[int, int],
    local: tuple[int, int],
    host: tuple[int, int],
    servers: int = 0,
    elastic: Elasticity | None = None,
) -> World:
    """From (rank, size), (local rank, local size) and (host rank, hosts); the rest is the same for every launcher."""
    (rank, size), (local_rank, local_size), (host_rank, hosts) = place, local, host
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
        servers=servers,
        elastic=elastic,
    )


# ---- paceline run ---------------------------------------------------------------------------------------------


def from_paceline(variables: Variables) -> World | None:
    servers = number_of(variables, "PACELINE_SERVERS") or 0
    advice = "start the script with `paceline run`"
    place = place_of(variables, "PACELINE_RANK", "PACELINE_WORLD_SIZE", advice, servers)
    if place is None:
        return None
    host = place_of(variables, "PACELINE_HOST_RANK", "PACELINE_HOSTS", "set both, or neither") or (0, 1)
    local_names = ("PACELINE_LOCAL_RANK", "PACELINE_LOCAL_SIZE")
    local = local_place(variables, local_names, place, host[1] == 1, servers)
    size, path = place[1], text_of(variables, "PACELINE_CONTROL")
    if path is None and size + servers > 1:
        raise WorldError(
            f"PACELINE_WORLD_SIZE={size} but PACELINE_CONTROL is not set: the workers have no place to meet; "
            "start the script with `paceline run`, which sets all of them"
        )
    return _world(
        variables,
        "paceline run",
        ControlSocket(path) if path is not None else None,
        place=place,
        local=local,
        host=host,
        servers=servers,
        elastic=elasticity(variables),
    )


# ---- torchrun, and RANK and WORLD_SIZE set by hand -------------------------------------------------------------


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
    local = _torch_local(variables, rank, size, one_host)
    host = place_of(variables, "GROUP_RANK", "GROUP_WORLD_SIZE", "set both, or neither")
    host = host or host_by_host(rank, size, *local, "set GROUP_RANK and GROUP_WORLD_SIZE")
    return _world(variables, source, rendezvous, place=place, local=local, host=host)


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


# ---- MPI: Open MPI, and the process manager of MPICH and Intel MPI ---------------------------------------------
# On one host the workers meet at a port made of the job's name; on several, MASTER_ADDR and MASTER_PORT say where.


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
    local = local_place(variables, local_names, place, default_to_place=size == 1)
    host = host_by_host(rank, size, *local, "use --map-by slot and as many workers per host")
    rendezvous: TcpRendezvous | None = None
    if host[1] > 1 or text_of(variables, "MASTER_ADDR") is not None:
        rendezvous = tcp_of(variables, "MASTER_ADDR", "MASTER_PORT")
    elif size > 1:
        rendezvous = TcpRendezvous(LOOPBACK, port_of(variables, "MASTER_PORT") or derived_port("mpi", job))
    return _world(variables, source, rendezvous, place=place, local=local, host=host)


def inside_mpi(variables: Variables) -> bool:
    return any(text_of(variables, name) is not None for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK"))


# ---- SLURM: ranks, hosts and a place to meet from srun's variables and notations -------------------------------

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
    local = _slurm_local(variables, rank, size, host_rank, hosts)
    rendezvous = _slurm_rendezvous(variables, hosts) if size > 1 else None
    return _world(variables, "SLURM", rendezvous, place=(rank, size), local=local, host=(host_rank, hosts))


def started_by_srun(variables: Variables) -> bool:
    """True for a task of an `srun` step; false for the batch script and for a shell inside an allocation.

    Both also see SLURM_NTASKS, often SLURM_PROCID=0, and would wait for ever for tasks that were never started.
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


def expand_nodelist(nodelist: str) -> Iterator[str]:
    """`node[1-3,7],gpu-02` -> node1 node2 node3 node7 gpu-02, one at a time."""
    item = r"(?:[^,\[\]]|\[[^\[\]]*\])+"
    if nodelist and not re.fullmatch(f"{item}(?:,{item})*", nodelist):
        raise WorldError(f"SLURM's node list {nodelist!r} is not of the form node[1-3,7],gpu-02")
    for hosts in re.findall(item, nodelist):
        yield from _expand_brackets(hosts)


def tasks_per_node(counts: str) -> list[int]:
    """`2(x3),1` -> [2, 2, 2, 1]."""
    tasks: list[int] = []
    for item in counts.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", item.strip())
        if match is None:
            raise WorldError(f"SLURM's tasks per node {counts!r} are not of the form 2(x3),1")
        tasks += [int(match[1])] * int(match[2] or 1)
    return tasks


def _expand_brackets(item: str) -> Iterator[str]:
    head, bracket, rest = item.partition("[")
    if not bracket:
        yield head
        return
    ranges, _, tail = rest.partition("]")
    for part in ranges.split(","):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise WorldError(f"SLURM's node list has {item!r}, which is not of the form node[1-3,7]")
        for number in range(int(first), int(last if dash else first) + 1):
            for end in _expand_brackets(tail):
                yield f"{head}{number:0{len(first)}d}{end}"


# ---- clusters that start one process per host ------------------------------------------------------------------
# Kubeflow   PET_*          torchrun's flags as variables, one set per pod
# SkyPilot   SKYPILOT_*     every node has the addresses of all
# SLURM      SLURM_*        `srun --ntasks-per-node=1 paceline run …`: each task is the supervisor of its host


@dataclass(frozen=True)
class LaunchDefaults:
    """Flags of `paceline run` that the cluster has answered; `workers` counts those of one host, None: not known."""

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
    if text_of(variables, "PET_NPROC_PER_NODE") not in (None, "auto", "1"):
        raise launcher_needed("Kubeflow", f"PET_NPROC_PER_NODE={variables['PET_NPROC_PER_NODE']}")
    return _one_worker_per_host(variables, pod)


def from_skypilot(variables: Variables) -> World | None:
    task = _skypilot_task(variables)
    if task is None:
        return None
    if task.hosts > 1 and task.workers is not None and task.workers > 1:
        raise launcher_needed("SkyPilot", f"SKYPILOT_NUM_GPUS_PER_NODE={task.workers}")
    return _one_worker_per_host(variables, task)


def _one_worker_per_host(variables: Variables, launch: LaunchDefaults) -> World:
    host = (launch.host_rank, launch.hosts)
    return _world(variables, launch.source, launch.coordinator, place=host, local=(0, 1), host=host)


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


# ---- all of them, from the inside out ---------------------------------------------------------------------------


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
