"""The environment of this process: no other module touches `os.environ`.

Reading is left to pure functions of a mapping (`launchers`, `explanation`), so that a test can be any worker of any
cluster; here the mapping is this process's own. Writing happens twice: a forked worker enters its environment, and
cuBLAS gets its workspace before CUDA starts.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from paceline.errors import WorldError
from paceline.world import explanation
from paceline.world.explanation import Finding
from paceline.world.launchers import LaunchDefaults, cluster_defaults, world_from
from paceline.world.variables import (
    DEFAULT_PORT,
    Variables,
    is_loopback,
    is_number,
    setting_variable,
    settings_of,
    text_of,
)
from paceline.world.world import ControlSocket, TcpRendezvous, World


def read_world(variables: Variables = os.environ) -> World:
    """This process's place among the workers; `launchers` lists every launcher's variables."""
    return world_from(variables)


def launch_defaults(variables: Variables = os.environ) -> LaunchDefaults | None:
    """What `paceline run` may take from the cluster it is started on."""
    return cluster_defaults(variables)


def check_settings(variables: Variables = os.environ) -> None:
    """That PACELINE_* settings which workers will inherit from here make sense."""
    settings_of(variables, size=1)


def explain(variables: Variables = os.environ) -> list[Finding]:
    """The reading in words."""
    return explanation.explain(variables)


def enter(variables: Variables) -> None:
    """Take on a worker's environment: a forked worker's only write to `os.environ`, before the script is imported."""
    os.environ.update(variables)


def worker_environment(world: World) -> dict[str, str]:
    """What `paceline run` leaves for a worker; `read_world` reads the same world back."""
    if not isinstance(world.rendezvous, ControlSocket):
        raise WorldError(
            f"rank {world.rank}: a worker of `paceline run` meets at a control socket, not {world.rendezvous}"
        )
    optional = {setting_variable(name): value for name, value in asdict(world.settings).items()}
    optional |= {"PACELINE_HOST_ADDRESS": world.host_address, "OMP_NUM_THREADS": world.settings.threads}
    if world.elastic is not None:
        optional |= {
            "PACELINE_INCARNATION": world.elastic.incarnation,
            "PACELINE_MEMORY_FOLDER": world.elastic.memory_folder,
            "PACELINE_COPIES": world.elastic.copies,
            "PACELINE_MEMBERS": " ".join(f"{slot}@{host}" for slot, host in world.elastic.members),
            "PACELINE_ACROSS_HOSTS": int(world.elastic.across_hosts),
        }
    return {
        "PACELINE_RANK": str(world.rank),
        "PACELINE_WORLD_SIZE": str(world.size),
        "PACELINE_LOCAL_RANK": str(world.local_rank),
        "PACELINE_LOCAL_SIZE": str(world.local_size),
        "PACELINE_HOST_RANK": str(world.host_rank),
        "PACELINE_HOSTS": str(world.hosts),
        "PACELINE_SERVERS": str(world.servers),  # also when 0: a job inside a job must not inherit the outer one's
        "PACELINE_INCARNATION": "",  # likewise, where the job is not elastic
        "PACELINE_CONTROL": world.rendezvous.path,
        **{name: str(value) for name, value in optional.items() if value is not None},
    }


def replay_environment(folder: Path, *, lanes: int, threads: int, seed: int) -> dict[str, str]:
    """What makes a process the only worker of a job, which does again what the log in `folder` says."""
    return {
        "PACELINE_RANK": "0",
        "PACELINE_WORLD_SIZE": "1",
        "PACELINE_SERVERS": "0",
        "PACELINE_LANES": str(lanes),
        "PACELINE_THREADS": str(threads),
        "PACELINE_SEED": str(seed),
        "PACELINE_REPLAY": str(folder),
        "OMP_NUM_THREADS": str(threads),
    }


def plan_environment(order: Path, *, threads: int) -> dict[str, str]:
    """Of a process that is the only worker of a job, whose step is profiled as the order says; else as this one's."""
    return {
        **os.environ,
        **(KEEPING_MEMORY if may_keep_memory() else {}),  # it is timed as it would run
        "PACELINE_RANK": "0",
        "PACELINE_WORLD_SIZE": "1",
        "PACELINE_SERVERS": "0",
        "PACELINE_THREADS": str(threads),
        "PACELINE_PLAN": str(order),
        "OMP_NUM_THREADS": str(threads),
    }


# glibc gives large blocks back to the kernel as they are freed, and a step's gradients and activations are faulted in
# anew in every step: up to a quarter of the time of a small model on the CPU.
KEEPING_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(2**40), "MALLOC_MMAP_THRESHOLD_": str(2**30)}


def parent_environment(threads: int | None, *, keep_memory: bool, quiet: bool = False) -> dict[str, str]:
    """What the process that workers are forked from starts with: the user's variables, without the job's secret.

    Thread pools are sized when numpy and torch are imported, so the count must be there before. None keeps what the
    user set, as torchrun does. With `keep_memory` workers reuse the memory that they free, unless the user has set up
    the allocator already; without it nothing in them does. With `quiet` they keep their notes to themselves.
    """
    variables = {name: value for name, value in os.environ.items() if name != "PACELINE_SECRET"}
    if threads is not None:
        variables["OMP_NUM_THREADS"] = str(threads)
    if not keep_memory:
        variables["PACELINE_KEEP_MEMORY"] = "0"
    elif may_keep_memory(variables):
        variables |= KEEPING_MEMORY
    return variables | ({"PACELINE_QUIET": "1"} if quiet else {})


def may_keep_memory(variables: Variables = os.environ) -> bool:
    """Nobody has set up the allocator in another way, or has asked with PACELINE_KEEP_MEMORY=0 to leave it as it is."""
    allocator_is_set = any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in variables)
    return not allocator_is_set and text_of(variables, "PACELINE_KEEP_MEMORY") != "0"


def is_quiet() -> bool:
    """PACELINE_QUIET=1: no messages but errors (`messages`)."""
    return text_of(os.environ, "PACELINE_QUIET") not in (None, "0")


def flight_recorder_is_on() -> bool:
    """torch's: it keeps that many of the last collectives."""
    return (text_of(os.environ, "TORCH_FR_BUFFER_SIZE") or "0") != "0"


@dataclass(frozen=True)
class KubeflowServer:
    """Where Kubeflow Trainer wants to be told how a TrainJob gets on."""

    url: str
    ca_file: str | None
    token_file: str | None


def kubeflow_server() -> KubeflowServer | None:
    """Unless DISABLE_KUBEFLOW_INTEGRATION=TRUE."""
    url = text_of(os.environ, "KUBEFLOW_TRAINER_SERVER_URL")
    if url is None or (text_of(os.environ, "DISABLE_KUBEFLOW_INTEGRATION") or "").upper() == "TRUE":
        return None
    files = (text_of(os.environ, f"KUBEFLOW_TRAINER_SERVER_{part}") for part in ("CA_CERT", "TOKEN"))
    return KubeflowServer(url, *files)


def thread_limit() -> int | None:
    """OMP_NUM_THREADS as the user set it; None where it is unset or a list per nesting level."""
    return int(os.environ["OMP_NUM_THREADS"]) if is_number(os.environ, "OMP_NUM_THREADS") else None


def job_secret() -> str | None:
    """The secret that supervisors of one job prove to each other; a file (`--secret-file`) is the other way."""
    return text_of(os.environ, "PACELINE_SECRET")


def cache_folder() -> Path:
    """Where things that can be made again are kept: XDG_CACHE_HOME, or ~/.cache. OSError where there is no home."""
    base = text_of(os.environ, "XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "paceline"
    except RuntimeError as error:  # HOME is not set, and the system does not know this user
        raise FileNotFoundError(errno.ENOENT, "neither XDG_CACHE_HOME nor HOME is set") from error


def temporary_folder() -> str | None:
    """TMPDIR as the user set it."""
    return text_of(os.environ, "TMPDIR")


def unbuffered() -> dict[str, str]:
    """For a process whose output is read line by line while it runs."""
    return {**os.environ, "PYTHONUNBUFFERED": "1"}


def with_temporary_files_in(folder: str) -> dict[str, str]:
    """For a program that is to leave its temporary files there."""
    return {**os.environ, "TMPDIR": folder}


def wanted_kernels() -> str | None:
    """PACELINE_KERNELS=torch leaves the C kernels of the shared-memory backend alone."""
    return text_of(os.environ, "PACELINE_KERNELS")


def hardware_profile() -> Path | None:
    """PACELINE_HARDWARE: what `paceline bench hardware` measured of this machine, for strategy="auto"."""
    name = text_of(os.environ, "PACELINE_HARDWARE")
    return None if name is None else Path(name)


def injected_faults() -> str | None:
    """PACELINE_FAULTS: what shall go wrong in this job, and where (`elastic.faults`)."""
    return text_of(os.environ, "PACELINE_FAULTS")


def hash_file() -> Path | None:
    """PACELINE_HASH_FILE: where the engine adds a line `slot hash` at every `weights_hash()`, for `paceline chaos`."""
    name = text_of(os.environ, "PACELINE_HASH_FILE")
    return None if name is None else Path(name)


def hash_telling_environment(file: Path) -> dict[str, str]:
    """For a job that is to tell its weights' hashes there: the user's own, and nothing of the faults ordered here."""
    variables = {name: value for name, value in os.environ.items() if name != "PACELINE_FAULTS"}
    return variables | {"PACELINE_HASH_FILE": str(file.absolute())}


def verify_environment(folder: Path, lanes: int) -> dict[str, str]:
    """For a job that records itself there: thread pools of libraries are as large at any number of workers."""
    variables = {name: value for name, value in os.environ.items() if name != "PACELINE_FAULTS"}
    threads = max(1, len(os.sched_getaffinity(0)) // lanes)
    return {"OMP_NUM_THREADS": str(threads)} | variables | {"PACELINE_VERIFY": str(folder.absolute())}


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


@contextmanager
def cublas_workspace() -> Iterator[None]:
    """For the first product of matrices: torch wants to be told that cuBLAS's workspace is fixed, and remembers it.

    torch gives cuBLAS a workspace of its own, which is what makes it deterministic. Were the variable left there, every
    product would take the host longer: 38 ms instead of 17 for a small micro-batch (torch 2.11). What the user has set
    stays.
    """
    given = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    try:
        yield
    finally:
        if given is None:
            os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
