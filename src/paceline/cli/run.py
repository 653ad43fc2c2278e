"""`paceline run`: from flags to a `Job`, checked before anything starts."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.machinery
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from paceline.elastic.decisions import Rules
from paceline.errors import LaunchError, WorldError
from paceline.input_file import cause_of, one_line, open_input, read_short
from paceline.launch.agents import default_threads
from paceline.launch.exit_rules import GRACE_S
from paceline.launch.job import Hosts, Job
from paceline.launch.rendezvous import Address
from paceline.launch.supervisor import supervise
from paceline.launch.worker_main import Script
from paceline.world import environment
from paceline.world.host_limits import THREADS_EACH, THREADS_OF_ELASTIC, THREADS_OF_GLOO, check_host
from paceline.world.launchers import LaunchDefaults
from paceline.world.variables import DEFAULT_PORT
from paceline.world.world import LaunchSettings

# Everything after the script's name is the script's, also what looks like a flag of ours.
COMMAND = {"context_settings": {"allow_interspersed_args": False}}

LONGEST_SECRET = 64 * 2**10
PATIENCE_S = 5.0
"""For a secret that comes through a pipe, as from --secret-file <(…) of a shell."""


# -- the flags ---------------------------------------------------------------------------------------------------------

ScriptName = Annotated[str, typer.Argument(help="script.py, or with -m a module", show_default=False)]
Arguments = Annotated[list[str] | None, typer.Argument(help="passed to the script untouched")]
Workers = Annotated[
    str | None,
    typer.Option(
        "--workers", "--nproc-per-node", "--nproc_per_node",
        help="workers on this host, or auto: one per accelerator [default: 1]", show_default=False,
    ),
]  # fmt: skip
Servers = Annotated[
    str | None,
    typer.Option(
        help="servers for strategy='parameter_server', on the first host [default: 0, worker 0 doubles as one]",
        show_default=False,
    ),
]
Lanes = Annotated[
    int | None, typer.Option(min=1, help="logical workers, fixed for the life of the job [default: the workers]")
]
Threads = Annotated[int | None, typer.Option(min=1, help="threads per worker [default: cores // lanes, at least 1]")]
Backend = Annotated[str | None, typer.Option(help="how tensors travel, such as gloo or nccl")]
Seed = Annotated[int | None, typer.Option(min=0, help="seed of the job")]
StrategyName = Annotated[
    str | None, typer.Option(help="how the work is shared: ddp, zero1, zero2, zero3, fsdp, hybrid, star, …")
]
Precision = Annotated[str | None, typer.Option(help="what the model computes in: fp32, bf16 or fp16")]
Recomputed = Annotated[
    str | None,
    typer.Option(help="what backward computes again: blocks, k for every k-th, or classes; +matmuls keeps those"),
]
Offload = Annotated[str | None, typer.Option(help="what a GPU leaves to the host: optimizer, parameters")]
KeepMemory = Annotated[
    bool,
    typer.Option(
        help="let workers keep memory that they free for the next step instead of giving it back to the system"
    ),
]
GraceSeconds = Annotated[
    float,
    typer.Option(help="how long workers have to save and end after SIGTERM or Ctrl-C, before they are killed"),
]
IsModule = Annotated[bool, typer.Option("-m", "--module", help="run a module, as python -m does")]
Elastic = Annotated[
    bool, typer.Option("--elastic", help="continue when workers die, with the same bits; and replace them")
]
MinWorkers = Annotated[
    int | None, typer.Option(help="elastic: end when fewer are left [default: 1]", show_default=False)
]
MaxWorkers = Annotated[
    int | None,
    typer.Option(
        help="elastic: at most so many, with those of hosts that come later [default: those of the start]",
        show_default=False,
    ),
]
RestartWorkers = Annotated[
    bool | None,
    typer.Option(
        "--restart-workers/--no-restart-workers",
        help="elastic: start a fresh process for a worker that died [default: on]", show_default=False,
    ),
]  # fmt: skip
HeartbeatTimeout = Annotated[
    float, typer.Option(help="elastic: a worker that is silent for so long is killed and replaced")
]
StepTimeout = Annotated[
    float, typer.Option(help="elastic: likewise one that the others have waited for so long in a step")
]
Copies = Annotated[int, typer.Option(help="elastic: of sharded state, on different hosts")]
StepLog = Annotated[Path | None, typer.Option(help="elastic: write each committed step to this file, as JSON lines")]
HostCount = Annotated[
    str | None,
    typer.Option("--hosts", "--nnodes", help="hosts that the job starts with; one `paceline run` on each [default: 1]"),
]
HostRank = Annotated[
    int | None, typer.Option("--host-rank", "--node-rank", "--node_rank", min=0, help="which host this is, from 0")
]
Coordinator = Annotated[
    str | None, typer.Option(help="ADDRESS:PORT of host 0, where the hosts meet", show_default=False)
]
SecretFile = Annotated[
    Path | None, typer.Option(help="what all hosts of the job know (or PACELINE_SECRET in the environment)")
]
MeetTimeout = Annotated[float, typer.Option(help="how long to wait for the other hosts")]
MasterAddress = Annotated[str | None, typer.Option("--master-addr", "--master_addr", hidden=True)]
MasterPort = Annotated[int | None, typer.Option("--master-port", "--master_port", hidden=True)]
Standalone = Annotated[bool, typer.Option("--standalone", hidden=True)]


def run(
    script: ScriptName,
    arguments: Arguments = None,
    workers: Workers = None,
    servers: Servers = None,
    lanes: Lanes = None,
    threads: Threads = None,
    backend: Backend = None,
    seed: Seed = None,
    strategy: StrategyName = None,
    precision: Precision = None,
    activation_checkpointing: Recomputed = None,
    offload: Offload = None,
    keep_memory: KeepMemory = True,
    grace_s: GraceSeconds = GRACE_S,
    module: IsModule = False,
    elastic: Elastic = False,
    min_workers: MinWorkers = None,
    max_workers: MaxWorkers = None,
    restart_workers: RestartWorkers = None,
    heartbeat_timeout_s: HeartbeatTimeout = Rules.heartbeat_timeout_s,
    step_timeout_s: StepTimeout = Rules.step_timeout_s,
    copies: Copies = Rules.copies,
    ledger: StepLog = None,
    hosts: HostCount = None,
    host_rank: HostRank = None,
    coordinator: Coordinator = None,
    secret_file: SecretFile = None,
    meet_timeout_s: MeetTimeout = 300.0,
    master_addr: MasterAddress = None,
    master_port: MasterPort = None,
    standalone: Standalone = False,
) -> None:
    """Start workers that train together: paceline run --workers 4 train.py --epochs 3

    torchrun's names are accepted too: --nproc-per-node, --nnodes, --node-rank, --master-addr, --master-port,
    --standalone. Exit codes: 0 all well (or all but workers that an asynchronous job went on without, with a warning),
    1 a worker or server failed or hung, 2 wrong usage, 3 could not meet, 4 fewer than --min-workers left or the
    state lost once too often, 75 stopped on request, 128+n killed by signal n, 130 Ctrl-C, 143 SIGTERM.
    """
    rules = Rules(
        min_workers=1 if min_workers is None else min_workers,
        max_workers=max_workers,
        restart_workers=restart_workers is not False,
        heartbeat_timeout_s=heartbeat_timeout_s,
        step_timeout_s=step_timeout_s,
        copies=copies,
    )
    is_elastic = elastic or min_workers is not None or max_workers is not None or bool(restart_workers)
    known = None if standalone else environment.launch_defaults()
    worker_count = _worker_count(workers, known)
    host_count = _host_count(hosts, host_rank, known)
    server_count = _server_count(servers)
    is_alone = host_count == 1 and not _may_grow(max_workers, worker_count, server_count, coordinator)
    try:
        environment.check_settings()  # what the shell says of the job, which workers would find out each by itself
        settings = LaunchSettings(lanes, threads, backend, seed, strategy, precision, activation_checkpointing, offload)
    except WorldError as error:
        raise LaunchError(str(error)) from error
    job = Job(
        script=_find(script, arguments or [], module),
        workers=worker_count,
        servers=server_count,
        settings=settings,
        keep_memory=keep_memory,
        grace_s=grace_s,
        elastic=rules if is_elastic else None,
        ledger=ledger,
        hosts=None
        if is_alone
        else Hosts(
            count=host_count,
            rank=0 if host_count == 1 else _host_rank(host_rank, known),
            coordinator=_coordinator(coordinator, master_addr, master_port, known),
            secret=_secret(secret_file),
            meet_timeout_s=meet_timeout_s,
        ),
    )
    _check_host(job)
    raise typer.Exit(asyncio.run(supervise(job)))


# -- from their values to a job ----------------------------------------------------------------------------------------


def _check_host(job: Job) -> None:
    over_gloo = job.hosts is not None or job.settings.backend == "gloo"
    threads = THREADS_EACH + (default_threads(job.settings, job.workers) or 1) - 1
    threads += THREADS_OF_GLOO * over_gloo + THREADS_OF_ELASTIC * (job.elastic is not None)
    beside = f" and --servers {job.servers}" if job.servers else ""
    check_host(job.workers + job.servers, f"--workers {job.workers}{beside}", threads_each=threads)


def _may_grow(max_workers: int | None, workers: int, servers: int, coordinator: str | None) -> bool:
    """Whether workers of further hosts may join; an error where --max-workers asks for it and they could not."""
    if max_workers is None or max_workers <= workers:
        return False
    asked = f"--max-workers {max_workers} with --workers {workers}"
    if coordinator is None:
        raise LaunchError(
            f"{asked}: further workers come with further hosts, which have to find this one: give --coordinator "
            "ADDRESS:PORT and --secret-file, or start with all workers"
        )
    if servers:
        raise LaunchError(
            f"{asked} and --servers {servers}: no further workers can join a job with server processes; start with "
            "all workers"
        )
    return True


def _find(target: str, arguments: Sequence[str], is_module: bool) -> Script:
    here = os.getcwd()
    if is_module:
        top = target.partition(".")[0]
        if not top or importlib.machinery.PathFinder.find_spec(top, [here, *sys.path]) is None:
            raise LaunchError(f"no module named {top!r} in {here} or among the installed packages")
        return Script(target, tuple(arguments), is_module)
    path = Path(target)
    try:
        if path.is_dir():
            if not (path / "__main__.py").is_file():
                raise LaunchError(f"{target!r} is a folder without a __main__.py; give the script that is to be run")
        else:
            open_input(path).close()
    except FileNotFoundError:
        hint = "; a module is run with -m" if not target.endswith(".py") else ""
        raise LaunchError(f"no script {target!r} in {here}{hint}") from None
    except OSError as error:
        raise LaunchError(f"the script {one_line(target)!r} can't be read: {cause_of(error)}") from error
    return Script(target, tuple(arguments), is_module)


def _worker_count(asked: str | None, known: LaunchDefaults | None) -> int:
    wanted: str | int | None = asked if asked is not None or known is None else known.workers
    if wanted is None:
        return 1
    if wanted == "auto":
        return max(1, _accelerators())
    return _count(wanted, "--workers", "is neither a number nor auto")


def _server_count(asked: str | None) -> int:
    return 0 if asked is None else _count(asked, "--servers", "is not a number of servers, such as 2")


def _count(asked: str | int, flag: str, otherwise: str) -> int:
    """A whole number of at most nine digits; what fits the host is asked later."""
    text = str(asked).strip()
    if text.lstrip("-").isdecimal() and text.isascii():
        if len(text) > 9:
            raise LaunchError(f"{flag} {one_line(text, 30)}: no host can carry so many")
        with contextlib.suppress(ValueError):
            return int(text)
    raise LaunchError(f"{flag} {one_line(text, 30)!r} {otherwise}")


def _accelerators() -> int:
    """GPUs that this process may use, without importing torch or starting CUDA, which no fork survives."""
    visible = environment.visible_accelerators()
    return len(list(Path("/dev").glob("nvidia[0-9]*"))) if visible is None else len(visible)


def _host_count(text: str | None, host_rank: int | None, known: LaunchDefaults | None) -> int | None:
    """None for a host that joins a job which has its hosts already, or whose first host knows how many there are."""
    if text is None:
        found = known.hosts if known is not None else 1
        return None if found == 1 and host_rank else found
    fewest, colon, most = text.partition(":")
    if colon and fewest != most:
        raise LaunchError(f"--hosts {text}: a changing number of hosts is not supported; give the number that the job "
                          "starts with. Further ones join an elastic job while --max-workers allows it")  # fmt: skip
    found = _count(fewest, "--hosts", "is not a number of hosts, such as 2")
    if found < 1:
        raise LaunchError(f"--hosts {text!r} is not a number of hosts, such as 2")
    return found


def _host_rank(asked: int | None, known: LaunchDefaults | None) -> int:
    if asked is not None:
        return asked
    if known is None:
        raise LaunchError("several hosts need --host-rank on each: 0 for the coordinator, then 1, 2, …")
    return known.host_rank


def _coordinator(
    asked: str | None, master_addr: str | None, master_port: int | None, known: LaunchDefaults | None
) -> Address:
    if asked is not None:
        return Address.parse(asked)
    if master_addr is not None:
        return Address.parse(f"{master_addr}:{DEFAULT_PORT if master_port is None else master_port}")
    if known is None or known.coordinator is None:
        raise LaunchError("several hosts need --coordinator ADDRESS:PORT, an address of host 0 that all can reach")
    return Address(known.coordinator.address, known.coordinator.port)


def _secret(file: Path | None) -> bytes:
    if file is None:
        secret = environment.job_secret()
    else:
        try:
            secret = read_short(file, LONGEST_SECRET, PATIENCE_S).decode().strip()
        except (OSError, ValueError) as error:
            raise LaunchError(f"--secret-file {file} can't be read: {cause_of(error)}") from error
    if not secret:
        raise LaunchError(
            "several hosts need a secret that all of them know: `openssl rand -hex 32 > secret`, "
            "copy it to every host, and pass --secret-file secret (or set PACELINE_SECRET)"
        )
    return secret.encode()
