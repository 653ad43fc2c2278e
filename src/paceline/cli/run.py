"""`paceline run`: from flags to a `Job`, checked before anything starts."""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import importlib.machinery
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
import yaml

from paceline.cli.monitor import check_packages
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

_training = partial(typer.Option, rich_help_panel="How it trains")
_elastic = partial(typer.Option, rich_help_panel="Elastic")
_hosts = partial(typer.Option, rich_help_panel="Several hosts")

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
    int | None,
    _training(
        min=1,
        help="logical workers, fixed for the life of the job [default: the workers]",
    ),
]
Threads = Annotated[
    int | None,
    _training(
        min=1,
        help="threads per worker [default: cores // lanes, at least 1]",
    ),
]
Backend = Annotated[
    str | None,
    _training(
        help="how tensors travel, such as gloo or nccl",
    ),
]
Seed = Annotated[
    int | None,
    _training(
        min=0,
        help="seed of the job",
    ),
]
StrategyName = Annotated[
    str | None,
    _training(
        help="how the work is shared: ddp, zero1, zero2, zero3, fsdp, hybrid, star, local_sgd, …",
    ),
]
Precision = Annotated[
    str | None,
    _training(
        "--precision",
        "--mixed-precision",
        "--mixed_precision",
        help="what the model computes in: fp32, bf16 or fp16",
    ),
]
Recomputed = Annotated[
    str | None,
    _training(
        help="what backward computes again: blocks, k for every k-th, or classes; +matmuls keeps those",
    ),
]
Offload = Annotated[
    str | None,
    _training(
        help="what a GPU leaves to the host: optimizer, parameters",
    ),
]
Tp = Annotated[
    int | None,
    _training(
        min=1,
        help="neighbouring workers that share each layer: tensor parallel groups [default: 1]",
    ),
]
Cp = Annotated[
    int | None,
    _training(
        min=1,
        help="workers, or tensor parallel groups, that share each sequence: context parallelism [default: 1]",
    ),
]
KeepMemory = Annotated[
    bool,
    _training(
        help="let workers keep memory that they free for the next step instead of giving it back to the system",
    ),
]
GraceSeconds = Annotated[
    float,
    typer.Option(help="how long workers have to save and end after SIGTERM or Ctrl-C, before they are killed"),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="show what the script prints, and errors, alone")]
Dashboard = Annotated[bool, typer.Option("--dashboard", help="show the job on a page for the browser while it lasts")]
IsModule = Annotated[bool, typer.Option("-m", "--module", help="run a module, as python -m does")]
Elastic = Annotated[
    bool,
    _elastic(
        "--elastic",
        help="continue when workers die, with the same bits; and replace them",
    ),
]
MinWorkers = Annotated[
    int | None,
    _elastic(
        help="end when fewer are left [default: 1]",
        show_default=False,
    ),
]
MaxWorkers = Annotated[
    int | None,
    _elastic(
        help="at most so many, with those of hosts that come later [default: those of the start]",
        show_default=False,
    ),
]
RestartWorkers = Annotated[
    bool | None,
    _elastic(
        "--restart-workers/--no-restart-workers",
        help="start a fresh process for a worker that died [default: on]", show_default=False,
    ),
]  # fmt: skip
HeartbeatTimeout = Annotated[
    float,
    _elastic(
        help="a worker that is silent for so long is killed and replaced",
    ),
]
StepTimeout = Annotated[
    float,
    _elastic(
        help="likewise one that the others have waited for so long in a step",
    ),
]
Copies = Annotated[
    int,
    _elastic(
        help="of sharded state, on different hosts",
    ),
]
StepLog = Annotated[
    Path | None,
    _elastic(
        help="write each committed step to this file, as JSON lines",
    ),
]
HostCount = Annotated[
    str | None,
    _hosts(
        "--hosts",
        "--nnodes",
        "--num-machines",
        "--num_machines",
        help="hosts that the job starts with; one `paceline run` on each [default: 1]",
    ),
]
HostRank = Annotated[
    int | None,
    _hosts(
        "--host-rank",
        "--node-rank",
        "--node_rank",
        "--machine-rank",
        "--machine_rank",
        min=0,
        help="which host this is, from 0",
    ),
]
Coordinator = Annotated[
    str | None,
    _hosts(
        help="ADDRESS:PORT of host 0, where the hosts meet",
        show_default=False,
    ),
]
SecretFile = Annotated[
    Path | None,
    _hosts(
        help="what all hosts of the job know (or PACELINE_SECRET in the environment)",
    ),
]
MeetTimeout = Annotated[
    float,
    _hosts(
        help="how long to wait for the other hosts",
    ),
]
MasterAddress = Annotated[
    str | None, typer.Option("--master-addr", "--master_addr", "--main-process-ip", "--main_process_ip", hidden=True)
]
MasterPort = Annotated[
    int | None,
    typer.Option("--master-port", "--master_port", "--main-process-port", "--main_process_port", hidden=True),
]
ProcessCount = Annotated[int | None, typer.Option("--num-processes", "--num_processes", min=1, hidden=True)]
Standalone = Annotated[bool, typer.Option("--standalone", hidden=True)]


def _read_config(ctx: typer.Context, file: Path | None) -> Path | None:
    """The file's values become the defaults of this command line, so that what is written there wins."""
    if file is None:
        return None
    known = {
        p.name: p for p in ctx.command.params if p.param_type_name == "option" and p.name not in ("config", "help")
    }
    try:
        with open_input(file) as text:
            values = yaml.safe_load(text)
    except OSError as error:
        raise LaunchError(f"--config {file} can't be read: {cause_of(error)}") from error
    except (yaml.YAMLError, ValueError) as error:
        raise LaunchError(f"--config {file} is no YAML: {one_line(str(error))}") from error
    if not isinstance(values, dict):
        raise LaunchError(f"--config {file}: expected options and their values, such as `workers: 4`")
    defaults = {}
    for key, value in values.items():
        name = str(key).replace("-", "_")
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise LaunchError(f"--config {file}: {one_line(str(key))!r} is no option of `paceline run`{hint}")
        if value is None or isinstance(value, list | dict):
            raise LaunchError(f"--config {file}: {key}: expected one value, not {one_line(str(value))!r}")
        defaults[name] = value if isinstance(value, bool) else str(value)
    ctx.default_map = {**(ctx.default_map or {}), **defaults}
    return file


ConfigFile = Annotated[
    Path | None,
    typer.Option(
        help="YAML with options of this command and their values (`workers: 4`); those on the command line win",
        callback=_read_config, is_eager=True,
    ),
]  # fmt: skip


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
    tp: Tp = None,
    cp: Cp = None,
    keep_memory: KeepMemory = True,
    grace_s: GraceSeconds = GRACE_S,
    quiet: Quiet = False,
    dashboard: Dashboard = False,
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
    num_processes: ProcessCount = None,
    standalone: Standalone = False,
    config: ConfigFile = None,
) -> None:
    """Start workers that train together: paceline run --workers 4 train.py --epochs 3

    torchrun's and accelerate's names work too: --nproc-per-node, --nnodes, --node-rank, --master-addr, --master-port,
    --standalone; --num-processes (of all hosts), --num-machines, --machine-rank, --main-process-ip,
    --main-process-port, --mixed-precision.

    Exit codes: 0 all well (or all but workers that an asynchronous job went on without, with a warning), 1 a worker
    or server failed or hung, 2 wrong usage, 3 could not meet, 4 fewer than --min-workers left or the state lost once
    too often, 75 stopped on request, 128+n killed by signal n, 130 Ctrl-C, 143 SIGTERM.
    """
    not_given = {"--workers": workers or num_processes, "--servers": servers, "--hosts": hosts}
    _tell_of_options_behind(script, arguments or [], [name for name, value in not_given.items() if value is None])
    known = None if standalone else environment.launch_defaults()
    host_count = _host_count(hosts, host_rank, known)
    worker_count = _worker_count(_per_host(workers, num_processes, host_count), known)
    server_count = _server_count(servers)
    is_alone = host_count == 1 and not _may_grow(max_workers, worker_count, server_count, coordinator)
    settings = _settings(lanes, threads, backend, seed, strategy, precision, activation_checkpointing, offload)
    settings = _with_mesh(settings, worker_count * (host_count or 1), tp, cp)
    job = Job(
        script=find_script(script, arguments or [], module),
        workers=worker_count,
        servers=server_count,
        settings=settings,
        keep_memory=keep_memory,
        grace_s=grace_s,
        elastic=_rules(elastic, min_workers, max_workers, restart_workers, heartbeat_timeout_s, step_timeout_s, copies),
        ledger=ledger,
        quiet=quiet or environment.is_quiet(),
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
    with _dashboard() if dashboard else contextlib.nullcontext(None) as shows:
        code = asyncio.run(supervise(job, shows))
    raise typer.Exit(code)


# -- from their values to a job ----------------------------------------------------------------------------------------


def _tell_of_options_behind(script: str, arguments: Sequence[str], ours: Sequence[str]) -> None:
    """What stands behind the script is the script's; somebody may have meant it for us."""
    behind = [word for word in arguments if word.partition("=")[0] in ours]
    if behind:
        typer.echo(
            f"paceline: {behind[0]} stands behind {script}, so it is given to the script. For paceline write it "
            f"before: paceline run {behind[0]} … {script}",
            err=True,
        )


def _rules(
    elastic: bool, min_workers: int | None, max_workers: int | None, restart_workers: bool | None,
    heartbeat_timeout_s: float, step_timeout_s: float, copies: int,
) -> Rules | None:  # fmt: skip
    """None: a job that ends with its first worker. Any of the options that need an elastic one says so too."""
    if not (elastic or min_workers is not None or max_workers is not None or restart_workers):
        return None
    return Rules(
        min_workers=1 if min_workers is None else min_workers,
        max_workers=max_workers,
        restart_workers=restart_workers is not False,
        heartbeat_timeout_s=heartbeat_timeout_s,
        step_timeout_s=step_timeout_s,
        copies=copies,
    )


def _settings(
    lanes: int | None, threads: int | None, backend: str | None, seed: int | None, strategy: str | None,
    precision: str | None, recomputed: str | None, offload: str | None,
) -> LaunchSettings:  # fmt: skip
    """`precision` may be "no", as accelerate says it."""
    try:
        environment.check_settings()  # what the shell says of the job, which workers would find out each by itself
        precision = "fp32" if precision == "no" else precision
        return LaunchSettings(lanes, threads, backend, seed, strategy, precision, recomputed, offload)
    except WorldError as error:
        raise LaunchError(str(error)) from error


def _with_mesh(settings: LaunchSettings, workers: int, tp: int | None, cp: int | None) -> LaunchSettings:
    shared = (tp or 1) * (cp or 1)
    if workers % shared:
        flags = " ".join(f"--{name} {size}" for name, size in (("tp", tp), ("cp", cp)) if size is not None)
        raise LaunchError(
            f"{flags}: {shared} workers share a model, and {workers} are no multiple of that; start with "
            f"--workers {max(1, workers // shared) * shared}"
        )
    return replace(settings, tp=tp, cp=cp)


def _dashboard() -> contextlib.AbstractContextManager[Callable[[str], None]]:
    check_packages("--dashboard")
    from paceline.dashboard.process import attached

    return attached()


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


def find_script(target: str, arguments: Sequence[str], is_module: bool) -> Script:
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


def _per_host(workers: str | None, in_all: int | None, hosts: int | None) -> str | None:
    """torchrun counts the workers of a host, accelerate those of all hosts together."""
    if in_all is None:
        return workers
    if workers is not None:
        raise LaunchError(f"--workers {workers} and --num-processes {in_all}: give one of them")
    if hosts is None or in_all % hosts:
        raise LaunchError(
            f"--num-processes {in_all}: workers of all hosts together, of which there are "
            f"{'an unknown number' if hosts is None else hosts}; give --workers, those of this host"
        )
    return str(in_all // hosts)


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
