"""`paceline bench step | overlap | startup | order | lengths | traffic | collectives | loader | memory`: measurements.

    paceline bench step --workload mlp25m --against torch-ddp --workers 2 --json step.json
    paceline bench overlap --workload mlp25m --workers 2
    paceline bench startup --workers 2
    paceline bench order --samples 1000000000
    paceline bench lengths --lanes 8 --accumulate 4
    paceline bench traffic
    paceline bench memory --workers 4 --strategy zero2 --against torch-fsdp2
    paceline bench collectives --operation all_reduce --operation all_gather --png collectives.png

What each side's figures include is written in docs/benchmarks.md.
"""

from __future__ import annotations

import errno
import importlib.util
import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.bench import collectives as comparing
from paceline.bench import memory as memory_bench
from paceline.bench.launching import run_in_workers
from paceline.bench.race import OURS, PEERS, WORKLOADS, Race
from paceline.errors import ConfigError
from paceline.input_file import cause_of
from paceline.world.host_limits import check_host

app = typer.Typer(
    name="bench", no_args_is_help=True, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False,
)  # fmt: skip

REDUCTIONS = ("exact", "fast")

MOST = 10**6


def _that_the_host_carries(ctx: typer.Context, param: typer.CallbackParam, value: Any) -> Any:
    """A number of processes; what is negative is refused later, as everywhere."""
    for count in value if isinstance(value, list | tuple) else [value]:
        if isinstance(count, int) and count > 0:
            check_host(count, f"{param.opts[0]} {count}")
    return value


Workload = Annotated[str, typer.Option(help=f"what is trained: {', '.join(WORKLOADS)}")]
Workers = Annotated[int, typer.Option(callback=_that_the_host_carries, help="workers on this host, one thread each")]
Backend = Annotated[str, typer.Option(help="how our tensors travel: paceline (shared memory) or gloo; theirs: gloo")]
Rounds = Annotated[int, typer.Option(max=MOST, help="measured rounds; two more come first and are dropped")]
StepsPerRound = Annotated[
    int | None, typer.Option(max=MOST, help="steps of each contestant in a round [default: what fills about 0.75 s]")
]
BucketMib = Annotated[float | None, typer.Option(help="paceline's bucket size [default: the Engine's]")]
BatchSize = Annotated[
    int | None, typer.Option(max=MOST, help="samples of a worker in a step [default: the workload's]")
]
JsonFile = Annotated[Path | None, typer.Option("--json", help="write every number there", show_default=False)]


@app.callback()
def bench() -> None:
    """Measure paceline beside what people use today, in one interleaved run."""


@app.command()
def step(
    workload: Workload = "mlp25m",
    against: Annotated[
        list[str] | None,
        typer.Option(help=f"may be repeated: {', '.join(PEERS)} [default: torch-ddp]", show_default=False),
    ] = None,
    reduction: Annotated[
        list[str] | None, typer.Option(help="may be repeated: exact, fast [default: both]", show_default=False)
    ] = None,
    also: Annotated[
        list[str] | None,
        typer.Option(
            help="more to hold against them: torch-ddp-paceline, torch's DDP on our backend; one-process, plain torch "
            "with as many threads and the whole batch; others of ours: "
            f"{', '.join(name for name in OURS if name.removeprefix('paceline-') not in REDUCTIONS)}",
        ),
    ] = None,
    workers: Workers = 2,
    backend: Backend = "paceline",
    rounds: Rounds = 24,
    steps_per_round: StepsPerRound = None,
    bucket_mib: BucketMib = None,
    batch_size: BatchSize = None,
    json_file: JsonFile = None,
) -> None:
    """Training throughput against torch's DDP: interleaved rounds, and the ratio with its spread."""
    race = Race(
        workload=workload,
        workers=workers,
        ours=(*(_ours(name) for name in dict.fromkeys(reduction or REDUCTIONS)), *dict.fromkeys(also or ())),
        against=tuple(dict.fromkeys(against or ["torch-ddp"])),
        rounds=rounds,
        steps_per_round=steps_per_round,
        backend=backend,
        bucket_mib=bucket_mib,
        samples_per_worker=batch_size,
    )
    _run_race(race, json_file)


@app.command()
def overlap(
    workload: Workload = "mlp25m",
    reduction: Annotated[str, typer.Option(help="exact or fast")] = "exact",
    workers: Workers = 2,
    backend: Backend = "paceline",
    rounds: Rounds = 24,
    steps_per_round: StepsPerRound = None,
    bucket_mib: BucketMib = None,
    json_file: JsonFile = None,
) -> None:
    """Exposed communication of Engine(overlap=True) against Engine(overlap=False)."""
    ours = _ours(reduction)
    race = Race(
        workload=workload,
        workers=workers,
        ours=(ours,),
        against=(f"{ours}-no-overlap",),
        rounds=rounds,
        steps_per_round=steps_per_round,
        backend=backend,
        bucket_mib=bucket_mib,
    )
    _run_race(race, json_file)


@app.command()
def startup(
    workers: Workers = 2,
    rounds: Annotated[
        int, typer.Option(max=MOST, help="measured starts of each; one more comes first and is dropped")
    ] = 5,
    json_file: JsonFile = None,
) -> None:
    """From the command to the first finished step: the same script under `paceline run` and under torchrun."""
    from paceline.bench.report import console, show_startup
    from paceline.bench.startup import measure_startup

    _check_writable(json_file)
    result = measure_startup(workers, rounds, tell=lambda line: print(line, flush=True))
    _write(result, json_file)
    show_startup(result, console())


@app.command()
def order(
    samples: Annotated[int, typer.Option(max=10**12, help="in the epoch; smaller sizes are measured first")] = 10**9,
    rounds: Annotated[int, typer.Option(max=MOST, help="turns of paceline's, each in a process of its own")] = 20,
    json_file: JsonFile = None,
) -> None:
    """The first batch of a shuffled epoch, and a resume at 90 % of it, against torch's DistributedSampler."""
    from paceline.bench.order import measure_order, show_order
    from paceline.bench.report import console

    _check_writable(json_file)
    result = measure_order(samples, rounds, tell=lambda line: print(line, flush=True))
    _write(result, json_file)
    show_order(result, console())


@app.command()
def lengths(
    samples: Annotated[int, typer.Option(max=10**8, help="in the epoch, of log-normal length")] = 20_000,
    lanes: Annotated[int, typer.Option(max=MOST, help="that share a step")] = 8,
    batch_size: Annotated[int, typer.Option(max=MOST, help="samples in a micro-batch")] = 8,
    accumulate: Annotated[int, typer.Option(max=MOST, help="micro-batches of a lane in a step")] = 1,
    sigma: Annotated[float, typer.Option(help="how much lengths differ: the deviation of their logarithm")] = 1.0,
    json_file: JsonFile = None,
) -> None:
    """What grouping by length saves in padding and how evenly it loads the lanes, against transformers'; no clock."""
    from paceline.bench.lengths import Grouping, measure_lengths, show_lengths
    from paceline.bench.report import console

    _check_writable(json_file)
    result = measure_lengths(Grouping(samples, lanes, batch_size, accumulate, sigma))
    _write(result, json_file)
    show_lengths(result, console())


@app.command()
def traffic() -> None:
    """Bytes that each all-reduce moves, counted between 2 … 8 processes, beside the formula; prints markdown."""
    from paceline.bench.traffic import count_in_workers, tables

    counts = count_in_workers()
    if isinstance(counts, int):
        raise typer.Exit(counts)
    print(tables(counts))


@app.command()
def collectives(
    operation: Annotated[
        list[str] | None,
        typer.Option(
            help=f"may be repeated: {', '.join(comparing.OPERATIONS)} [default: all_reduce]", show_default=False
        ),
    ] = None,
    sizes: Annotated[str, typer.Option(help="of the whole tensor, a list")] = comparing.DEFAULT_SIZES,
    backend: Annotated[
        list[str] | None,
        typer.Option(
            help=f"may be repeated: {', '.join(comparing.BACKENDS)} [default: all; beside --algorithm: gloo]",
            show_default=False,
        ),
    ] = None,
    algorithm: Annotated[
        list[str] | None,
        typer.Option(
            help=f"over gloo's point-to-point, may be repeated: {', '.join(comparing.ALGORITHMS)} [default: none]",
            show_default=False,
        ),
    ] = None,
    workers: Workers = 2,
    rounds: Rounds = 20,
    json_file: JsonFile = None,
    png_file: Annotated[
        Path | None, typer.Option("--png", help="draw time by size there (needs matplotlib)", show_default=False)
    ] = None,
) -> None:
    """Collectives by size, in the manner of nccl-tests: time, bandwidth, bytes, and the ratio to gloo."""
    from paceline.bench.collectives_report import plot_collectives, show_collectives
    from paceline.bench.report import console

    _check_writable(json_file)
    _check_writable(png_file, "--png")
    if png_file is not None and importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--png is drawn by matplotlib, which is not installed: pip install matplotlib")
    comparison = comparing.Comparison(
        operations=tuple(dict.fromkeys(operation or ["all_reduce"])),
        sizes=comparing.parse_sizes(sizes),
        backends=tuple(dict.fromkeys(backend or ([comparing.BASELINE] if algorithm else comparing.BACKENDS))),
        algorithms=tuple(dict.fromkeys(algorithm or [])),
        workers=workers,
        rounds=rounds,
    )
    comparison, left_out = comparing.without_the_missing(comparison)
    for line in left_out:
        print(line, flush=True)
    result = comparing.run_in_workers(comparison)
    if isinstance(result, int):
        raise typer.Exit(result)
    result["left_out"] = left_out
    _write(result, json_file)
    show_collectives(result, console())
    if png_file is not None:
        plot_collectives(result, png_file)


@app.command()
def loader(
    loader_processes: Annotated[
        list[int] | None,
        typer.Option(callback=_that_the_host_carries, help="may be repeated [default: 0 and 1]", show_default=False),
    ] = None,
    rounds: Annotated[int, typer.Option(max=MOST, help="measured rounds; one more comes first and is dropped")] = 22,
    json_file: JsonFile = None,
) -> None:
    """Batches per second beside torch's DataLoader, and a step's time when data is fetched ahead."""
    from paceline.bench.loader import measure_loader, show_loader
    from paceline.bench.report import console

    _check_writable(json_file)
    result = measure_loader(rounds, loader_processes or [0, 1], tell=lambda line: print(line, flush=True))
    _write(result, json_file)
    show_loader(result, console())


@app.command()
def memory(
    strategy: Annotated[
        list[str] | None,
        typer.Option(help="of ours, may be repeated [default: all whose footprint is known]", show_default=False),
    ] = None,
    against: Annotated[
        list[str] | None,
        typer.Option(
            help=f"may be repeated: {', '.join(memory_bench.PEERS)}, or nobody [default: all that are installed]",
            show_default=False,
        ),
    ] = None,
    workers: Annotated[
        list[int] | None,
        typer.Option(callback=_that_the_host_carries, help="may be repeated [default: 2 and 4]", show_default=False),
    ] = None,
    backend: Backend = "paceline",
    bucket_mib: BucketMib = None,
    keep_memory: Annotated[
        bool, typer.Option(help="let the allocator keep what is freed, as paceline run does; it counts as other")
    ] = False,
    json_file: JsonFile = None,
) -> None:
    """What a worker holds in memory, by role: each strategy beside its formula, torch's FSDP2 and DeepSpeed."""
    from paceline.bench.machine_load import machine_facts
    from paceline.bench.memory_contestants import MLP50M, strategies
    from paceline.bench.memory_report import show_memory
    from paceline.bench.report import console

    _check_writable(json_file)
    peers = [] if against == ["nobody"] else against or list(memory_bench.known_peers())
    names = list(dict.fromkeys([*(strategy or strategies()), *peers]))
    memory_bench.check_names(names, list(strategies()))
    runs = [
        memory_bench.MemoryRun(name, count, backend, bucket_mib, keep_memory)
        for count in workers or [2, 4]
        for name in names
    ]
    rows = memory_bench.measure_memory(runs, tell=lambda line: print(line, flush=True))
    if isinstance(rows, int):
        raise typer.Exit(rows)
    result = {"parameters": MLP50M.parameters, "backend": backend, "rows": rows, "machine": machine_facts()}
    _write(result, json_file)
    show_memory(result, console())


def _run_race(race: Race, json_file: Path | None) -> None:
    from paceline.bench.report import console, show_race

    _check_writable(json_file)
    result = run_in_workers(race)
    if isinstance(result, int):
        raise typer.Exit(result)
    _write(result, json_file)
    show_race(result, console())


def _ours(reduction: str) -> str:
    name = f"paceline-{reduction}"
    if reduction not in REDUCTIONS or name not in OURS:
        raise ConfigError(f"--reduction {reduction!r} is not known; choose one of {', '.join(REDUCTIONS)}")
    return name


def _check_writable(file: Path | None, option: str = "--json") -> None:
    """Before minutes of measuring, not after."""
    if file is None:
        return
    folder = file.absolute().parent
    if file.is_dir() or not folder.is_dir():
        why = "it is a folder" if file.is_dir() else f"there is no folder {file.parent}"
        raise ConfigError(f"{option} {file} can't be written: {why}")
    try:
        if not file.exists():
            file.open("x").close()
            file.unlink()
        elif not os.access(file, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise ConfigError(f"{option} {file} can't be written: {cause_of(error)}") from error


def _write(result: dict[str, Any], file: Path | None) -> None:
    if file is not None:
        try:
            file.write_text(json.dumps(result, indent=2) + "\n")
        except OSError as error:
            raise ConfigError(f"--json {file} could not be written: {cause_of(error)}") from error
