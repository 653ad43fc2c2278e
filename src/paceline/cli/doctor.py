"""`paceline doctor`: what a worker started here would find, one line each: ok, warning or problem, and what to do.

    ok       world        rank 0 of 2 workers, local rank 0 of 2, host 0 of 1
    ok       found by     torchrun: TORCHELASTIC_RUN_ID=none RANK=0 WORLD_SIZE=2 …
    warning  cores        2 usable of 2; threads per worker: 1 (lanes: 4); 4 workers share 2 cores

Exits with 0 when nothing is a problem, with 1 otherwise. Run it the way the script is run (`srun paceline doctor`,
`torchrun --no-python … paceline doctor`) to see that world.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import shutil
import socket
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated

import psutil  # type: ignore[import-untyped]
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

import paceline
from paceline.errors import WorldError
from paceline.input_file import one_line
from paceline.world.environment import explain, read_world, tensor_address, wanted_kernels
from paceline.world.explanation import Finding, Level
from paceline.world.host_limits import usable_cores
from paceline.world.variables import DEFAULT_PORT, is_loopback
from paceline.world.world import LOOPBACK, TcpRendezvous, World

GIB = 1024**3
MIB = 1024**2
COLOURS = {Level.OK: "green", Level.WARNING: "yellow", Level.PROBLEM: "bold red"}


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="a list of findings, for programs")] = False,
) -> None:
    """Say which world this process is in, by which launcher and why, and what on this host would stop training."""
    world = world_or_alone()
    findings = [*explain(), *host(world), *torch_build(world), *packages(), *network(world)]
    if as_json:
        told = ({"level": f.level.value, "about": f.about, "text": f.text, "advice": f.advice} for f in findings)
        print(json.dumps(list(told), indent=2))
    else:
        show(findings, Console())
    if any(finding.level is Level.PROBLEM for finding in findings):
        raise typer.Exit(1)


def world_or_alone() -> World:
    """`explain` reports a world that contradicts itself; the host's own lines still help."""
    try:
        return read_world()
    except WorldError:
        return World()


def show(findings: list[Finding], console: Console) -> None:
    if not console.is_terminal:  # for grep and for logs: one finding is one line, however long
        for finding in findings:
            what_to_do = f" → {finding.advice}" if finding.advice else ""
            print(f"{finding.level.value:<8} {finding.about:<20} {finding.text}{what_to_do}", file=console.file)
        return
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        what_to_do = f"\n→ {finding.advice}" if finding.advice else ""
        level = Text(finding.level.value, style=COLOURS[finding.level])
        table.add_row(level, finding.about, Text(finding.text + what_to_do))
    console.print(table)


# ---- the host ----------------------------------------------------------------------------------------------


def host(world: World) -> Iterator[Finding]:
    yield cores(usable_cores(), world)
    yield memory(psutil.virtual_memory().available, psutil.virtual_memory().total)
    yield shared_memory(Path("/dev/shm"))
    yield open_files(*resource.getrlimit(resource.RLIMIT_NOFILE))


def cores(usable: int, world: World) -> Finding:
    lanes = world.settings.lanes or world.size
    threads = world.settings.threads or max(1, usable // lanes)
    text = f"{usable} usable of {psutil.cpu_count() or usable}; threads per worker: {threads} (lanes: {lanes})"
    if world.local_size * threads > usable:
        advice = "workers will wait for each other: start fewer, or give each fewer threads with --threads"
        return Finding(Level.WARNING, "cores", f"{text}; {world.local_size} workers share {usable} cores", advice)
    return Finding(Level.OK, "cores", text)


def memory(available: int, total: int) -> Finding:
    text = f"{available / GIB:.1f} GiB available of {total / GIB:.1f} GiB"
    if available < GIB:
        return Finding(
            Level.WARNING, "memory", text, "one worker with torch imported takes about 0.3 GiB, plus the model"
        )
    return Finding(Level.OK, "memory", text)


def shared_memory(folder: Path) -> Finding:
    if not folder.is_dir():
        return Finding(Level.PROBLEM, "shared memory", f"{folder} does not exist", f"mount a tmpfs at {folder}")
    if not os.access(folder, os.W_OK | os.X_OK):
        advice = f"mount {folder} so that it can be written: loader processes hand batches over through it"
        return Finding(Level.PROBLEM, "shared memory", f"{folder} can't be written to", advice)
    usage = shutil.disk_usage(folder)
    text = f"{folder}: {usage.free / MIB:,.0f} MiB free of {usage.total / MIB:,.0f} MiB"
    if usage.free < 128 * MIB:  # containers get 64 MiB by default; loader processes hand batches over through it
        return Finding(Level.WARNING, "shared memory", text, "start the container with --shm-size=2g or --ipc=host")
    return Finding(Level.OK, "shared memory", text)


def open_files(soft: int, hard: int) -> Finding:
    endless = resource.RLIM_INFINITY
    text = f"limit {'none' if soft == endless else soft} (may be raised to {'any' if hard == endless else hard})"
    if soft != endless and soft < 1024:
        return Finding(
            Level.WARNING, "open files", text, "raise it with `ulimit -n 4096`: every pair of workers takes some"
        )
    return Finding(Level.OK, "open files", text)


# ---- torch -------------------------------------------------------------------------------------------------


def torch_build(world: World) -> Iterator[Finding]:
    import torch
    import torch.distributed as dist

    from paceline import backend

    yield Finding(Level.OK, "paceline", f"{paceline.__version__} in {Path(paceline.__file__).parent}")
    capability = torch.backends.cpu.get_cpu_capability()
    yield Finding(
        Level.OK, "torch", f"{torch.__version__} on Python {platform.python_version()}, CPU kernels {capability}"
    )
    if not dist.is_available():
        advice = "install a torch build with torch.distributed"
        yield Finding(Level.PROBLEM, "backends", "this torch was built without torch.distributed", advice)
        return
    yield accelerator(world.local_size)
    yield gpu_use()
    yield kernels()
    yield backends({"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available(), "mpi": dist.is_mpi_available()})
    if (error := backend.registration_error) is not None:
        text = f"torch.distributed does not take it: {type(error).__name__}: {error}"
        yield Finding(Level.WARNING, "paceline backend", text, 'init_process_group("paceline") fails; use gloo there')


def accelerator(workers: int) -> Finding:
    import torch
    import torch.distributed as dist

    if not torch.accelerator.is_available():
        return Finding(Level.OK, "accelerator", "none: workers train on the CPU")
    device = torch.accelerator.current_accelerator()
    count = torch.accelerator.device_count()
    if device is None or device.type != "cuda":
        return Finding(Level.OK, "accelerator", f"{count} × {device}")
    names = ", ".join(sorted({torch.cuda.get_device_name(index) for index in range(count)}))
    if workers > count:
        advice = "NCCL refuses two workers on one GPU: start fewer workers, or use --backend gloo"
        return Finding(Level.WARNING, "accelerator", f"{count} × {names} for {workers} workers", advice)
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() else "none"  # type: ignore[no-untyped-call]
    return Finding(Level.OK, "accelerator", f"{count} × {names}, NCCL {nccl}")


def gpu_use() -> Finding:
    """Whether the monitor can tell how busy GPUs are; training needs none of it, so its absence is no warning."""
    import torch

    from paceline.monitor.resource_use import Gpu, opened_nvml, uuid_of

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    try:
        with opened_nvml() as nvml:
            driver = nvml.nvmlSystemGetDriverVersion()
    except ImportError:
        what_to_do = ", so the monitor shows no use of GPUs: pip install 'paceline[monitor]'" if count else ""
        return Finding(Level.OK, "NVML", f"none: nvidia-ml-py is not installed{what_to_do}")
    except Exception as error:  # of the package, which is not known here, or of whatever driver is there
        return Finding(Level.OK, "NVML", f"none: {one_line(str(error))}")
    told, why = 0, ""
    for index in range(count):
        try:
            Gpu(uuid_of(torch.device("cuda", index))).close()
            told += 1
        except Exception as error:
            why = f" ({one_line(str(error))})"
    return Finding(Level.OK, "NVML", f"driver {driver}, tells the use of {told} of {count} GPUs{why}")


def kernels() -> Finding:
    """Of the shared-memory backend: the same bits from both, but torch's take a pass over memory per addition."""
    from paceline.collectives.shared_memory.kernel_build import find_compiler
    from paceline.collectives.shared_memory.kernels import choose_kernels, prebuilt_library

    if wanted_kernels() == "torch":
        return Finding(Level.OK, "kernels", "torch (by PACELINE_KERNELS)")
    compiler = find_compiler()
    if choose_kernels().name == "torch":
        why = f"{compiler} can't build the C kernels" if compiler else "no prebuilt library, no C compiler"
        return Finding(
            Level.WARNING, "kernels", f"torch ({why})", "collectives are slower: install gcc (the bits are the same)"
        )
    prebuilt = prebuilt_library()
    return Finding(
        Level.OK, "kernels", f"c ({f'prebuilt, {prebuilt[0].name}' if prebuilt else f'built by {compiler}'})"
    )


OPTIONAL = {
    "transformers": "the Trainer's models and collators",
    "tensorboard": "report_to tensorboard",
    "wandb": "report_to wandb",
    "mlflow": "report_to mlflow",
    "prometheus_client": "report_to prometheus",
    "tokenizers": "paceline data tokenize",
    "cloudpickle": "notebook_launcher",
}


def packages() -> Iterator[Finding]:
    """What is not needed to train, and which of it is there."""
    there, absent = [], []
    for name, what_for in OPTIONAL.items():
        try:
            there.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            absent.append(f"{name} ({what_for})")
    text = ", ".join(there) or "none"
    yield Finding(Level.OK, "packages", text + (f"; without {', '.join(absent)}" if absent else ""))


def backends(available: dict[str, bool]) -> Finding:
    text = ", ".join(f"{name} {'yes' if there else 'no'}" for name, there in available.items())
    if not available["gloo"]:
        return Finding(Level.PROBLEM, "backends", text, "CPU tensors need gloo: install a torch build that has it")
    return Finding(Level.OK, "backends", text)


# ---- the network -------------------------------------------------------------------------------------------


def network(world: World) -> Iterator[Finding]:
    yield loopback()
    yield host_name(socket.gethostname())
    yield port(DEFAULT_PORT)
    if isinstance(world.rendezvous, TcpRendezvous):
        yield rendezvous_address(world.rendezvous)
    if world.hosts > 1:
        yield tensors_leave_from(world)


def rendezvous_address(rendezvous: TcpRendezvous) -> Finding:
    try:
        addresses = resolve(rendezvous.address)
    except OSError as error:
        advice = "set MASTER_ADDR to a name or address of rank 0's host that every host knows"
        return Finding(Level.PROBLEM, "rendezvous", f"{rendezvous.address} does not resolve: {error}", advice)
    return Finding(Level.OK, "rendezvous", f"{rendezvous.address} resolves to {', '.join(addresses)}")


def tensors_leave_from(world: World) -> Finding:
    try:
        return Finding(Level.OK, "tensor address", tensor_address(world))
    except WorldError as error:
        return Finding(Level.PROBLEM, "tensor address", str(error))


def loopback() -> Finding:
    try:
        with socket.socket() as listener, socket.socket() as caller:
            listener.bind((LOOPBACK, 0))
            listener.listen()
            listener.settimeout(2)
            caller.settimeout(2)
            caller.connect(listener.getsockname())
            listener.accept()[0].close()
    except OSError as error:
        advice = "workers of one host meet there: bring it up (`ip link set lo up`) or allow it in the sandbox"
        return Finding(Level.PROBLEM, "loopback", f"{LOOPBACK} does not take connections: {error}", advice)
    return Finding(Level.OK, "loopback", f"{LOOPBACK} takes connections")


def port(number: int) -> Finding:
    """Where hosts meet unless they are told another place."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("", number))
        except OSError as error:
            advice = "only several hosts need it: give another one with --coordinator ADDRESS:PORT"
            return Finding(Level.WARNING, "port", f"{number} can't be listened on: {error.strerror}", advice)
    return Finding(Level.OK, "port", f"{number} is free, for several hosts to meet")


def host_name(name: str) -> Finding:
    """gloo, left alone, listens on whatever the host name resolves to; paceline tells it the address instead."""
    advice = "paceline doesn't rely on it; for plain torch.distributed set GLOO_SOCKET_IFNAME"
    try:
        addresses = resolve(name)
    except OSError as error:
        return Finding(
            Level.WARNING, "host name", f"{name} does not resolve ({error}): gloo would fail to start", advice
        )
    text = f"{name} resolves to {', '.join(addresses)}"
    if all(is_loopback(address) for address in addresses):
        return Finding(Level.OK, "host name", f"{text}: enough for one host, out of reach for others")
    return Finding(Level.OK, "host name", text)


def resolve(name: str) -> list[str]:
    return sorted({str(entry[4][0]) for entry in socket.getaddrinfo(name, None)})
