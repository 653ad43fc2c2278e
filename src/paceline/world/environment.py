"""Read the world from what the launcher left in the environment. No other module touches `os.environ`.

Launchers nest: torchrun starts inside a SLURM job, `mpirun` starts its daemons with `srun`. The innermost one started
this process, so its word counts. From the inside out:

| launcher     | recognised by                 | also reads                                                     |
|--------------|-------------------------------|----------------------------------------------------------------|
| paceline run | PACELINE_RANK, _WORLD_SIZE    | PACELINE_LOCAL_RANK, _LOCAL_SIZE, _HOST_RANK, _HOSTS, _CONTROL |
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

Under every launcher PACELINE_LANES, _THREADS, _BACKEND and _SEED fix what `paceline run`'s flags fix, and
PACELINE_HOST_ADDRESS names the address that tensors leave this host from. An empty variable counts as unset.

A half-set or contradictory family is a `WorldError`, never a silent world of one: that is how two processes come to
train alone, side by side, on the same data.
"""

from __future__ import annotations

import hashlib
import os
import re
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from ipaddress import ip_address

from paceline.errors import WorldError
from paceline.world.world import LOOPBACK, ControlSocket, LaunchSettings, TcpRendezvous, World

Variables = Mapping[str, str]

# What torchrun and most scripts use; only where nothing tells two jobs on one host apart.
DEFAULT_PORT = 29500
# Steps from here on were made by no `srun`: the batch script, an interactive shell (slurm.h: SLURM_BATCH_SCRIPT …).
FIRST_RESERVED_STEP = 0xFFFF_FFF0
SHELLS = frozenset({"bash", "sh", "zsh", "fish", "csh", "tcsh", "ksh"})


def read_world(variables: Variables | None = None) -> World:
    """This process's place among the workers, by the innermost launcher that left its variables."""
    variables = os.environ if variables is None else variables
    for launcher in LAUNCHERS:
        world = launcher.read(variables)
        if world is not None:
            return world
    return World(settings=_settings(variables, size=1))


def enter(variables: Variables) -> None:
    """Take on a worker's environment: a forked worker's only write to `os.environ`, before the script is imported."""
    os.environ.update(variables)


def worker_environment(world: World) -> dict[str, str]:
    """What `paceline run` leaves for a worker; `read_world` reads the same world back."""
    if not isinstance(world.rendezvous, ControlSocket):
        raise WorldError(
            f"rank {world.rank}: a worker of `paceline run` meets at a control socket, not {world.rendezvous}"
        )
    settings = world.settings
    optional = {
        "PACELINE_HOST_ADDRESS": world.host_address,
        "PACELINE_LANES": settings.lanes,
        "PACELINE_THREADS": settings.threads,
        "PACELINE_BACKEND": settings.backend,
        "PACELINE_SEED": settings.seed,
        "OMP_NUM_THREADS": settings.threads,
    }
    return {
        "PACELINE_RANK": str(world.rank),
        "PACELINE_WORLD_SIZE": str(world.size),
        "PACELINE_LOCAL_RANK": str(world.local_rank),
        "PACELINE_LOCAL_SIZE": str(world.local_size),
        "PACELINE_HOST_RANK": str(world.host_rank),
        "PACELINE_HOSTS": str(world.hosts),
        "PACELINE_CONTROL": world.rendezvous.path,
        **{name: str(value) for name, value in optional.items() if value is not None},
    }


def parent_environment(threads: int | None) -> dict[str, str]:
    """What the process that workers are forked from starts with: the user's variables, without the job's secret.

    Thread pools are sized when numpy and torch are imported, so the count must be there before. None keeps what the
    user set, as torchrun does.
    """
    variables = {name: value for name, value in os.environ.items() if name != "PACELINE_SECRET"}
    if threads is not None:
        variables["OMP_NUM_THREADS"] = str(threads)
    return variables


def thread_limit() -> int | None:
    """OMP_NUM_THREADS as the user set it; None where it is unset or a list per nesting level."""
    return int(os.environ["OMP_NUM_THREADS"]) if _is_number(os.environ, "OMP_NUM_THREADS") else None


def job_secret() -> str | None:
    """The secret that supervisors of one job prove to each other; a file (`--secret-file`) is the other way."""
    return _text(os.environ, "PACELINE_SECRET")


def visible_accelerators() -> list[str] | None:
    """CUDA_VISIBLE_DEVICES as a list, None where it is unset and every device is visible."""
    devices = os.environ.get("CUDA_VISIBLE_DEVICES")
    return None if devices is None else [device for device in devices.split(",") if device.strip() not in ("", "-1")]


def tensor_address(world: World) -> str:
    """The address this host's tensors leave from: the launcher's word, else the interface that reaches the others.

    gloo would take whatever the host name resolves to, which on many distributions is 127.0.1.1.
    """
    if world.host_address is not None:
        return world.host_address
    # TEST-NET-1 is routed like any outside address, and connecting a datagram socket sends nothing.
    outside = TcpRendezvous("192.0.2.1", DEFAULT_PORT)
    for place in (world.rendezvous, outside):
        if isinstance(place, TcpRendezvous):
            try:
                with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                    probe.connect((place.address, place.port))
                    address = str(probe.getsockname()[0])
            except OSError:
                continue
            if not is_loopback(address):
                return address
    raise WorldError(
        f"rank {world.rank}: {world.hosts} hosts, but no interface of this one leads to the others; "
        "set PACELINE_HOST_ADDRESS to this host's address on their network"
    )


def fix_cublas_workspace() -> str:
    """cuBLAS gives the same bits only with a fixed workspace, and reads this when CUDA starts, so it comes before."""
    return os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


# ---- one function per launcher -----------------------------------------------------------------------------


def from_paceline(variables: Variables) -> World | None:
    place = _place(variables, "PACELINE_RANK", "PACELINE_WORLD_SIZE", "start the script with `paceline run`")
    if place is None:
        return None
    rank, size = place
    host_rank, hosts = _place(variables, "PACELINE_HOST_RANK", "PACELINE_HOSTS", "set both, or neither") or (0, 1)
    local_rank, local_size = _local(variables, ("PACELINE_LOCAL_RANK", "PACELINE_LOCAL_SIZE"), place, hosts == 1)
    path = _text(variables, "PACELINE_CONTROL")
    if path is None and size > 1:
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
        host_address=_host_address(variables, hosts),
        settings=_settings(variables, size),
    )


def from_torchrun(variables: Variables) -> World | None:
    if _text(variables, "TORCHELASTIC_RUN_ID") is None:
        return None
    place = _place(variables, "RANK", "WORLD_SIZE", "start the script with torchrun, which sets both")
    if place is None:
        return None
    return _with_torch_names(variables, place, source="torchrun")


def from_hand(variables: Variables) -> World | None:
    """RANK and WORLD_SIZE set by a person, a script, or Kubeflow's PyTorchJob."""
    if _text(variables, "RANK") is None and (_inside_mpi(variables) or started_by_srun(variables)):
        return (
            None  # a batch script often exports WORLD_SIZE and MASTER_ADDR for all and leaves ranks to srun or mpirun
        )
    advice = "set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT for every process, or start with `paceline run`"
    place = _place(variables, "RANK", "WORLD_SIZE", advice)
    if place is None:
        if (local_rank := _text(variables, "LOCAL_RANK")) is not None:
            raise WorldError(f"LOCAL_RANK={local_rank} is set but RANK and WORLD_SIZE are not; {advice}, or unset it")
        return None
    processes = _number(variables, "PET_NPROC_PER_NODE") if _is_number(variables, "PET_NPROC_PER_NODE") else None
    if processes is not None and processes > 1 and _text(variables, "LOCAL_RANK") is None:
        # PyTorchJob counts pods in RANK but workers in WORLD_SIZE: such a world would wait for ever to be complete.
        raise _launcher_needed("Kubeflow", f"PET_NPROC_PER_NODE={processes}")
    return _with_torch_names(variables, place, source="RANK and WORLD_SIZE")


def from_open_mpi(variables: Variables) -> World | None:
    place = _place(variables, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "start the script with mpirun")
    if place is None:
        return None
    names = ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")
    job = _text(variables, "PMIX_NAMESPACE") or _text(variables, "OMPI_MCA_ess_base_jobid")
    return _with_mpi_names(variables, place, names, job, source="Open MPI")


def from_pmi(variables: Variables) -> World | None:
    """MPICH's and Intel MPI's process manager. `srun --mpi=pmi2` sets the same two, and SLURM's own say more."""
    if started_by_srun(variables) and _text(variables, "PMI_RANK") == _text(variables, "SLURM_PROCID"):
        return None
    place = _place(variables, "PMI_RANK", "PMI_SIZE", "start the script with mpiexec")
    if place is None:
        return None
    return _with_mpi_names(variables, place, ("MPI_LOCALRANKID", "MPI_LOCALNRANKS"), None, source="MPI (PMI)")


def from_slurm(variables: Variables) -> World | None:
    if not started_by_srun(variables):
        return None
    rank = _required(variables, "SLURM_PROCID", "start the script with srun")
    size_name = _first_set(variables, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")
    size = _required(variables, size_name, "start the script with srun", least=1)
    if rank >= size:
        raise _beyond("SLURM_PROCID", rank, size_name, size)
    hosts = _slurm_hosts(variables)
    host_rank = _number(variables, "SLURM_NODEID") or 0
    if host_rank >= hosts:
        raise _beyond("SLURM_NODEID", host_rank, "SLURM_NNODES", hosts)
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
        host_address=_host_address(variables, hosts),
        settings=_settings(variables, size),
    )


def from_kubeflow(variables: Variables) -> World | None:
    """PET_* are torchrun's flags as variables, one set per pod: this process is the worker when the pod has one."""
    pod = _kubeflow_pod(variables)
    if pod is None:
        return None
    if pod.workers is not None and pod.workers > 1:
        raise _launcher_needed("Kubeflow", f"PET_NPROC_PER_NODE={pod.workers}")
    if _text(variables, "PET_NPROC_PER_NODE") not in (None, "auto", "1"):
        raise _launcher_needed("Kubeflow", f"PET_NPROC_PER_NODE={variables['PET_NPROC_PER_NODE']}")
    return _one_worker_per_host(variables, pod, source="Kubeflow")


def from_skypilot(variables: Variables) -> World | None:
    task = _skypilot_task(variables)
    if task is None:
        return None
    if task.hosts > 1 and task.workers is not None and task.workers > 1:
        raise _launcher_needed("SkyPilot", f"SKYPILOT_NUM_GPUS_PER_NODE={task.workers}")
    return _one_worker_per_host(variables, task, source="SkyPilot")


# ---- what `paceline run` may take from a cluster -----------------------------------------------------------


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


def launch_defaults(variables: Variables | None = None) -> LaunchDefaults | None:
    """Hosts, host rank and coordinator for `paceline run`, where Kubeflow, SkyPilot or SLURM says them."""
    variables = os.environ if variables is None else variables
    return _kubeflow_pod(variables) or _skypilot_task(variables) or _slurm_supervisor(variables)


def _kubeflow_pod(variables: Variables) -> LaunchDefaults | None:
    nodes = _text(variables, "PET_NNODES")
    if nodes is None:
        if (alone := _text(variables, "PET_NODE_RANK")) is not None:
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
        _number(variables, "PET_NODE_RANK") if hosts == 1 else _required(variables, "PET_NODE_RANK", "one per pod")
    )
    if host_rank is not None and host_rank >= hosts:
        raise _beyond("PET_NODE_RANK", host_rank, "PET_NNODES", hosts)
    processes = _text(variables, "PET_NPROC_PER_NODE")
    if processes is not None and processes not in ("auto", "cpu", "gpu", "xpu"):
        processes = str(_required(variables, "PET_NPROC_PER_NODE", "workers per pod", least=1))
    return LaunchDefaults(
        hosts=hosts,
        host_rank=host_rank or 0,
        coordinator=_tcp(variables, "PET_MASTER_ADDR", "PET_MASTER_PORT") if hosts > 1 else None,
        workers=int(processes) if processes is not None and processes.isdecimal() else None,
        source="Kubeflow",
    )


def _skypilot_task(variables: Variables) -> LaunchDefaults | None:
    host_rank = _number(variables, "SKYPILOT_NODE_RANK")
    addresses = (_text(variables, "SKYPILOT_NODE_IPS") or "").split()
    if host_rank is None:
        return None
    if not addresses:
        raise WorldError(f"SKYPILOT_NODE_RANK={host_rank} is set but SKYPILOT_NODE_IPS is not; SkyPilot sets both")
    hosts = _number(variables, "SKYPILOT_NUM_NODES", least=1) or len(addresses)
    if hosts != len(addresses):
        raise WorldError(f"SKYPILOT_NUM_NODES={hosts} but SKYPILOT_NODE_IPS lists {len(addresses)} addresses")
    if host_rank >= hosts:
        raise _beyond("SKYPILOT_NODE_RANK", host_rank, "SKYPILOT_NUM_NODES", hosts)
    port = derived_port("skypilot", _text(variables, "SKYPILOT_TASK_ID"))
    return LaunchDefaults(
        hosts=hosts,
        host_rank=host_rank,
        coordinator=TcpRendezvous(addresses[0], port) if hosts > 1 else None,
        workers=_number(variables, "SKYPILOT_NUM_GPUS_PER_NODE") or None,
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
        workers=_number(variables, "SLURM_GPUS_ON_NODE") or None,
        source="SLURM",
    )


# ---- SLURM's own notations ---------------------------------------------------------------------------------


def started_by_srun(variables: Variables) -> bool:
    """True for a task of an `srun` step; false for the batch script and for a shell inside an allocation.

    Both also see SLURM_NTASKS, often SLURM_PROCID=0, and would wait for ever for tasks that nobody started.
    """
    step = _number(variables, "SLURM_STEP_ID")
    if step is None or step >= FIRST_RESERVED_STEP or _text(variables, "SLURM_PROCID") is None:
        return False
    shell_by_srun = _text(variables, "SLURM_JOB_NAME") in SHELLS and _text(variables, "SLURM_PTY_PORT") is not None
    return not (shell_by_srun and step == 0)  # `srun --pty bash` is step 0; an srun typed into it is a later one


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


def _slurm_hosts(variables: Variables) -> int:
    name = _first_set(variables, "SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES")
    return _number(variables, name, least=1) or 1


def _slurm_local(variables: Variables, rank: int, size: int, host_rank: int, hosts: int) -> tuple[int, int]:
    name = _first_set(variables, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    counts = _text(variables, name)
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
    local_rank = _number(variables, "SLURM_LOCALID")
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
    port = _port(variables, "MASTER_PORT") or derived_port(
        "slurm", _text(variables, "SLURM_JOB_ID"), _text(variables, "SLURM_STEP_ID")
    )
    if (address := _text(variables, "MASTER_ADDR")) is not None:
        return TcpRendezvous(address, port)
    if hosts == 1:
        return TcpRendezvous(LOOPBACK, port)
    name = _first_set(variables, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    first = next(expand_nodelist(_text(variables, name) or ""), None)
    if first is None:
        raise WorldError(
            f"SLURM says {hosts} hosts but SLURM_STEP_NODELIST names none; set MASTER_ADDR to the first host"
        )
    return TcpRendezvous(first, port)


# ---- shared by several launchers ---------------------------------------------------------------------------


def _with_torch_names(variables: Variables, place: tuple[int, int], source: str) -> World:
    rank, size = place
    rendezvous: TcpRendezvous | None = None
    if size > 1 or _text(variables, "MASTER_ADDR") is not None:
        by_agent = (_text(variables, "TORCHELASTIC_USE_AGENT_STORE") or "").lower() in ("true", "1")
        rendezvous = _tcp(variables, "MASTER_ADDR", "MASTER_PORT", served_by_agent=source == "torchrun" and by_agent)
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
        host_address=_host_address(variables, hosts),
        settings=_settings(variables, size),
    )


def _torch_local(variables: Variables, rank: int, size: int, one_host: bool) -> tuple[int, int]:
    local_rank, local_size = _number(variables, "LOCAL_RANK"), _number(variables, "LOCAL_WORLD_SIZE", least=1)
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
        raise _beyond("LOCAL_RANK", local_rank, "LOCAL_WORLD_SIZE", local_size)
    return local_rank, local_size


def _torch_host(variables: Variables, rank: int, size: int, local_rank: int, local_size: int) -> tuple[int, int]:
    host = _place(variables, "GROUP_RANK", "GROUP_WORLD_SIZE", "set both, or neither")
    return host or _host_by_host(rank, size, local_rank, local_size, "set GROUP_RANK and GROUP_WORLD_SIZE")


def _with_mpi_names(
    variables: Variables, place: tuple[int, int], local_names: tuple[str, str], job: str | None, source: str
) -> World:
    rank, size = place
    local_rank, local_size = _local(variables, local_names, place, default_to_place=size == 1)
    host_rank, hosts = _host_by_host(
        rank, size, local_rank, local_size, "use --map-by slot and as many workers per host"
    )
    rendezvous: TcpRendezvous | None = None
    if hosts > 1 or _text(variables, "MASTER_ADDR") is not None:
        rendezvous = _tcp(variables, "MASTER_ADDR", "MASTER_PORT")
    elif size > 1:
        rendezvous = TcpRendezvous(LOOPBACK, _port(variables, "MASTER_PORT") or derived_port("mpi", job))
    return World(
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        host_rank=host_rank,
        hosts=hosts,
        source=source,
        rendezvous=rendezvous,
        host_address=_host_address(variables, hosts),
        settings=_settings(variables, size),
    )


def _one_worker_per_host(variables: Variables, launch: LaunchDefaults, source: str) -> World:
    return World(
        rank=launch.host_rank,
        size=launch.hosts,
        host_rank=launch.host_rank,
        hosts=launch.hosts,
        source=source,
        rendezvous=launch.coordinator,
        host_address=_host_address(variables, launch.hosts),
        settings=_settings(variables, launch.hosts),
    )


def _host_by_host(rank: int, size: int, local_rank: int, local_size: int, advice: str) -> tuple[int, int]:
    """Where no variable names the host, ranks must fill one host after the other, and hosts be equal."""
    if size % local_size:
        raise WorldError(
            f"{size} workers with {local_size} on this host: hosts differ in size "
            f"and nothing says which host this is; {advice}"
        )
    if rank % local_size != local_rank:
        raise WorldError(
            f"rank {rank} is local rank {local_rank} of {local_size}: ranks do not fill one host after the other "
            f"and nothing says which host this is; {advice}"
        )
    return rank // local_size, size // local_size


def _settings(variables: Variables, size: int) -> LaunchSettings:
    lanes = _number(variables, "PACELINE_LANES", least=1)
    if lanes is not None and lanes < size:
        raise WorldError(
            f"PACELINE_LANES={lanes} but there are {size} workers: a worker without a lane has nothing to do; "
            f"give at least {size} lanes, or start no more workers than lanes"
        )
    return LaunchSettings(
        lanes=lanes,
        threads=_number(variables, "PACELINE_THREADS", least=1),
        backend=_text(variables, "PACELINE_BACKEND"),
        seed=_number(variables, "PACELINE_SEED"),
    )


def _host_address(variables: Variables, hosts: int) -> str | None:
    return _text(variables, "PACELINE_HOST_ADDRESS") or (LOOPBACK if hosts == 1 else None)


def _launcher_needed(source: str, found: str) -> WorldError:
    return WorldError(
        f"{source} asks for several workers on this host ({found}) and this process is only one of them; "
        "start the script with `paceline run script.py`, which starts them all"
    )


def _inside_mpi(variables: Variables) -> bool:
    return any(_text(variables, name) is not None for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK"))


def derived_port(*identity: str | None) -> int:
    """The same port for every worker of a job and, mostly, another one for another job; below the ephemeral range."""
    if identity[-1] is None:
        return DEFAULT_PORT
    digest = hashlib.blake2b("/".join(str(part) for part in identity).encode(), digest_size=4).digest()
    return 10_000 + int.from_bytes(digest, "big") % 20_000


def is_loopback(address: str) -> bool:
    try:
        return ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


# ---- variables, checked ------------------------------------------------------------------------------------


def _text(variables: Variables, name: str) -> str | None:
    return variables.get(name, "").strip() or None


def _is_number(variables: Variables, name: str) -> bool:
    return (_text(variables, name) or "").isdecimal()


def _number(variables: Variables, name: str, least: int = 0) -> int | None:
    value = _text(variables, name)
    if value is None:
        return None
    if not value.isdecimal() or int(value) < least:
        raise WorldError(f"{name}={value!r} is not a whole number of at least {least}")
    return int(value)


def _required(variables: Variables, name: str, advice: str, least: int = 0) -> int:
    value = _number(variables, name, least)
    if value is None:
        raise WorldError(f"{name} is not set; {advice}")
    return value


def _first_set(variables: Variables, *names: str) -> str:
    """The most specific name that is set; the last one when none is."""
    return next((name for name in names if _text(variables, name) is not None), names[-1])


def _place(variables: Variables, rank_name: str, size_name: str, advice: str) -> tuple[int, int] | None:
    """(rank, size), both or neither."""
    rank, size = _number(variables, rank_name), _number(variables, size_name, least=1)
    if rank is None and size is None:
        return None
    if rank is None:
        raise WorldError(f"{size_name}={size} is set but {rank_name} is not; {advice}")
    if size is None:
        raise WorldError(f"{rank_name}={rank} is set but {size_name} is not; {advice}")
    if rank >= size:
        raise _beyond(rank_name, rank, size_name, size)
    return rank, size


def _local(
    variables: Variables, names: tuple[str, str], place: tuple[int, int], default_to_place: bool
) -> tuple[int, int]:
    """(local rank, local size), which are (rank, size) where all workers are known to be on this host."""
    local = _place(variables, *names, "set both, or neither")
    if local is None and not default_to_place:
        raise WorldError(f"{names[0]} and {names[1]} are not set: nothing says which of the workers are on this host")
    return local or place


def _beyond(rank_name: str, rank: int, size_name: str, size: int) -> WorldError:
    allowed = f"from 0 to {size - 1}" if size > 1 else "only 0"
    return WorldError(f"{rank_name}={rank} but {size_name}={size}: {rank_name} may be {allowed}")


def _tcp(variables: Variables, address_name: str, port_name: str, served_by_agent: bool = False) -> TcpRendezvous:
    address, port = _text(variables, address_name), _port(variables, port_name)
    if address is None:
        raise WorldError(f"{address_name} is not set: the workers have no place to meet; set it to rank 0's host")
    if port is None:
        raise WorldError(f"{address_name}={address} is set but {port_name} is not; set it to a free port of that host")
    return TcpRendezvous(address, port, served_by_agent)


def _port(variables: Variables, name: str) -> int | None:
    value = _text(variables, name)
    if value is None:
        return None
    if not value.isdecimal() or not 1 <= int(value) <= 65535:
        raise WorldError(f"{name}={value!r} is not a port; use a number from 1 to 65535")
    return int(value)


# ---- the launchers, from the inside out --------------------------------------------------------------------


@dataclass(frozen=True)
class Launcher:
    name: str
    read: Callable[[Variables], World | None]
    signs: tuple[str, ...]
    """Any of these set means that the launcher was here, whether or not it started this process."""
    also_reads: tuple[str, ...] = ()

    def seen(self, variables: Variables) -> bool:
        return any(_text(variables, name) is not None for name in self.signs)

    def evidence(self, variables: Variables) -> str:
        values = {name: _text(variables, name) for name in self.signs + self.also_reads}
        return " ".join(f"{name}={','.join(value.split())}" for name, value in values.items() if value is not None)


MASTER = ("MASTER_ADDR", "MASTER_PORT")
TORCH = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", *MASTER)
LAUNCHERS = (
    Launcher(
        "paceline run",
        from_paceline,
        signs=("PACELINE_RANK", "PACELINE_WORLD_SIZE"),
        also_reads=tuple(f"PACELINE_{name}" for name in ("LOCAL_RANK", "LOCAL_SIZE", "HOST_RANK", "HOSTS", "CONTROL")),
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


# ---- the same reading, in words ----------------------------------------------------------------------------


class Level(Enum):
    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True)
class Finding:
    """One line of `paceline doctor`: about what, how it stands, and what to do where it stands badly."""

    level: Level
    about: str
    text: str
    advice: str = ""


def explain(variables: Variables | None = None) -> list[Finding]:
    """What `read_world` found, by which variables, what it passed over and why, and what is wrong."""
    variables = os.environ if variables is None else variables
    try:
        world = read_world(variables)
    except WorldError as error:
        seen = [launcher for launcher in LAUNCHERS if launcher.seen(variables)]
        evidence = [Finding(Level.OK, launcher.name, launcher.evidence(variables)) for launcher in seen]
        return [Finding(Level.PROBLEM, "world", str(error)), *evidence]
    passed_over = [x for x in LAUNCHERS if x.name != world.source and x.seen(variables) and not _same(x, world)]
    return [
        Finding(Level.OK, "world", _in_words(world)),
        _found_by(world, variables),
        *_meeting(world),
        *(_passed_over(launcher, world, variables) for launcher in passed_over),
        *_settings_in_words(world),
        *_left_over(world, variables),
    ]


def _same(launcher: Launcher, world: World) -> bool:
    """torchrun and `paceline run` set RANK and WORLD_SIZE too: they are their own, not another launcher's."""
    return launcher.read is from_hand and world.source in ("torchrun", "paceline run")


def _in_words(world: World) -> str:
    if world.size == 1:
        return "one worker, alone" if world.source == "alone" else f"one worker, started by {world.source}"
    place = f"rank {world.rank} of {world.size} workers, local rank {world.local_rank} of {world.local_size}"
    return f"{place}, host {world.host_rank} of {world.hosts}"


def _found_by(world: World, variables: Variables) -> Finding:
    for launcher in LAUNCHERS:
        if launcher.name == world.source:
            return Finding(Level.OK, "found by", f"{launcher.name}: {launcher.evidence(variables)}")
    advice = "start more workers with `paceline run --workers N script.py`"
    return Finding(Level.OK, "found by", "no launcher started this process", advice)


def _meeting(world: World) -> list[Finding]:
    match world.rendezvous:
        case ControlSocket(path):
            where = f"the supervisor's socket {path}"
        case TcpRendezvous(address, port, by_agent):
            where = f"{address}:{port}, served by {'the torchrun agent' if by_agent else 'rank 0'}"
        case _:
            return []
    return [Finding(Level.OK, "meets at", where)]


def _passed_over(launcher: Launcher, world: World, variables: Variables) -> Finding:
    evidence = launcher.evidence(variables)
    if launcher.read is from_slurm and not started_by_srun(variables):
        tasks = _text(variables, "SLURM_NTASKS") or "1"
        advice = f"start all {tasks} with `srun python script.py` or `paceline run --workers {tasks} script.py`"
        unused = world.size == 1 and tasks != "1"
        return Finding(
            Level.WARNING if unused else Level.OK,
            launcher.name,
            f"inside an allocation of {tasks} tasks, but srun did not start this process ({evidence})",
            advice if unused else "",
        )
    try:
        other = launcher.read(variables)
    except WorldError as error:
        return Finding(Level.WARNING, launcher.name, f"passed over for {world.source}, and contradictory: {error}")
    if other is None:
        return Finding(
            Level.OK, launcher.name, f"passed over for {world.source}: it does not say the rank ({evidence})"
        )
    if (other.rank, other.size) == (world.rank, world.size):
        return Finding(Level.OK, launcher.name, f"passed over for {world.source}, and says the same ({evidence})")
    said = f"says rank {other.rank} of {other.size}; passed over because {world.source} is the inner launcher"
    return Finding(Level.OK, launcher.name, f"{said} ({evidence})")


def _settings_in_words(world: World) -> list[Finding]:
    chosen = {name: value for name, value in vars(world.settings).items() if value is not None}
    return (
        [Finding(Level.OK, "settings", " ".join(f"{name}={value}" for name, value in chosen.items()))] if chosen else []
    )


def _left_over(world: World, variables: Variables) -> Iterator[Finding]:
    """Signs that more workers were meant than came."""
    if world.source == "alone" and (address := _text(variables, "MASTER_ADDR")) is not None:
        advice = "set RANK and WORLD_SIZE too, or start with `paceline run`"
        yield Finding(Level.WARNING, "MASTER_ADDR", f"MASTER_ADDR={address} is set, but no rank: not used", advice)
    said_local = _text(variables, "LOCAL_RANK") or _text(variables, "LOCAL_WORLD_SIZE")
    if world.source == "RANK and WORLD_SIZE" and world.hosts > 1 and said_local is None:
        text = "taken as one worker per host, because MASTER_ADDR is not loopback"
        advice = "with several per host set LOCAL_RANK and LOCAL_WORLD_SIZE, or start with `paceline run`"
        yield Finding(Level.OK, "local rank", text, advice)
    accelerators = _text(variables, "SKYPILOT_NUM_GPUS_PER_NODE") or "1"
    if world.source == "SkyPilot" and accelerators not in ("0", "1"):
        advice = f"use all with `paceline run --workers {accelerators} script.py`"
        yield Finding(Level.WARNING, "SkyPilot", f"{accelerators} accelerators on this host, and one worker", advice)
