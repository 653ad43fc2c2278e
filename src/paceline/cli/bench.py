"""`paceline bench step | collectives | memory | network | hardware`: measurements beside what people use today.

    paceline bench step --workload mlp25m --against torch-ddp --workers 2 --json step.json
    paceline bench step --reduction exact --against paceline-exact-no-overlap
    paceline bench collectives --operation all_reduce --operation all_gather --png collectives.png
    paceline bench memory --workers 4 --strategy zero2 --against torch-fsdp2
    paceline bench network --workers 4 --parameters 25_000_000 --step-ms 120
    paceline bench hardware --json here.json

What each side's figures include is written in docs/benchmarks.md. Other measurements are scripts in the repository's
folder benchmarks/.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.bench import collectives as comparing
from paceline.bench import memory as memory_bench
from paceline.bench import network as network_bench
from paceline.bench.race import OURS, PEERS, WORKLOADS, Race, run_in_workers
from paceline.errors import ConfigError
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
    """Measure paceline beside what people use today, in one interleaved run.

    More measurements (start-up, the order of an epoch, length grouping, the loader, traffic, the Trainer, faults) are
    scripts in the repository's folder benchmarks/, such as python benchmarks/loader.py; docs/benchmarks.md lists them.
    """


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
    keep_memory: Annotated[
        bool, typer.Option(help="let the allocator keep what is freed, as paceline run does, for all contestants")
    ] = False,
    json_file: JsonFile = None,
) -> None:
    """Training throughput against torch's DDP: interleaved rounds, and the ratio with its spread."""
    from paceline.bench.report import check_writable, console, show_race, write_json

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
        keep_memory=keep_memory,
    )
    check_writable(json_file)
    result = run_in_workers(race)
    if isinstance(result, int):
        raise typer.Exit(result)
    write_json(result, json_file)
    show_race(result, console())


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
    from paceline.bench.report import check_writable, console, plot_collectives, show_collectives, write_json

    check_writable(json_file)
    check_writable(png_file, "--png")
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
    write_json(result, json_file)
    show_collectives(result, console())
    if png_file is not None:
        plot_collectives(result, png_file)


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
    from paceline.bench.memory_contestants import MLP50M, strategies
    from paceline.bench.report import check_writable, console, show_memory, write_json
    from paceline.bench.statistics import machine_facts

    check_writable(json_file)
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
    write_json(result, json_file)
    show_memory(result, console())


@app.command()
def network(
    workers: Workers = 2,
    mib: Annotated[float, typer.Option(max=MOST, help="of a large message")] = 4.0,
    rounds: Rounds = 20,
    parameters: Annotated[int, typer.Option(help="of the model whose steps are estimated")] = 10_000_000,
    step_ms: Annotated[
        float | None, typer.Option(help="how long its step computes; then shares are told", show_default=False)
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Latency and bandwidth between workers, and what a step waits for them under each strategy.

    On several hosts: paceline run --hosts … -m paceline.bench.network_measure
    """
    from paceline.bench.report import check_writable, console, show_network, write_json

    run = network_bench.NetworkRun(
        workers=workers,
        message_bytes=int(mib * 2**20),
        rounds=rounds,
        parameters=parameters,
        step_s=None if step_ms is None else step_ms / 1e3,
    )
    check_writable(json_file)
    result = network_bench.run_in_workers(run)
    if isinstance(result, int):
        raise typer.Exit(result)
    result["estimates"] = network_bench.estimates(result)
    write_json(result, json_file)
    show_network(result, console())


@app.command()
def hardware(
    workers: Annotated[
        list[int] | None,
        typer.Option(callback=_that_the_host_carries, help="may be repeated [default: 2 and 4]", show_default=False),
    ] = None,
    backend: Annotated[
        list[str] | None, typer.Option(help="may be repeated: paceline, gloo [default: both]", show_default=False)
    ] = None,
    steps: Annotated[int, typer.Option(max=MOST, help="timed steps of each strategy and model")] = 8,
    threads: Annotated[int, typer.Option(max=MOST, help="of a worker")] = 1,
    json_file: JsonFile = None,
) -> None:
    """This machine for `paceline plan`: what workers compute, and what each strategy's exchange costs.

    About 40 s for each number of workers. Nothing else should run meanwhile.
    """
    from paceline.bench import hardware as hardware_bench
    from paceline.bench.report import check_writable, console, show_hardware, write_json

    check_writable(json_file)
    found = hardware_bench.measure_hardware(
        workers or [2, 4], backend or list(hardware_bench.BACKENDS), steps, threads,
        tell=lambda line: print(line, flush=True),
    )  # fmt: skip
    if isinstance(found, int):
        raise typer.Exit(found)
    write_json(found, json_file)
    show_hardware(found, console())


def _ours(reduction: str) -> str:
    name = f"paceline-{reduction}"
    if reduction not in REDUCTIONS or name not in OURS:
        raise ConfigError(f"--reduction {reduction!r} is not known; choose one of {', '.join(REDUCTIONS)}")
    return name
