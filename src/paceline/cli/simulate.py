"""`paceline simulate`: what a training would do on workers that nobody has yet.

    paceline simulate --workers 1024 --network dgx-a100 --parameters 7e9 --compute-ms 800 --algorithm hierarchical
    paceline simulate --workers 8,64,512,4096 --network racks-100g --strategy ddp,hybrid
    paceline simulate elastic.toml restart.toml --trace timeline.json

A list with commas makes several scenarios, which are compared; so do several files. docs/concepts/simulate.md has the
model behind it, and how far it is from what was measured.
"""

from __future__ import annotations

import itertools
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.errors import ConfigError
from paceline.input_file import one_line

MOST_SCENARIOS = 64
JOB, NETWORK, SLOW, LOST, OUT = "What is trained", "Over which network", "What is slow", "What is lost", "Output"
WHOLE = ("workers", "parameters", "lanes", "accumulate", "servers", "checkpoint_every", "spares", "every", "layers")


def simulate(
    scenarios: Annotated[
        list[Path] | None, typer.Argument(metavar="FILE", help="Scenarios in TOML, YAML or JSON; flags go first.")
    ] = None,
    workers: Annotated[str | None, typer.Option("--workers", metavar="N,…", rich_help_panel=JOB)] = None,
    strategy: Annotated[str | None, typer.Option("--strategy", metavar="NAME,…", rich_help_panel=JOB)] = None,
    algorithm: Annotated[
        str | None,
        typer.Option("--algorithm", metavar="NAME,…", help="Of all-reduces; exact, unless given.", rich_help_panel=JOB),
    ] = None,
    parameters: Annotated[str | None, typer.Option("--parameters", metavar="P,…", rich_help_panel=JOB)] = None,
    layers: Annotated[int | None, typer.Option("--layers", help="Of equal size; 24.", rich_help_panel=JOB)] = None,
    bucket_mb: Annotated[
        str | None, typer.Option("--bucket-mb", metavar="MIB,…", help="16, as the engine's.", rich_help_panel=JOB)
    ] = None,
    gradient_bytes: Annotated[
        int | None, typer.Option("--gradient-bytes", help="Per parameter; 4.", rich_help_panel=JOB)
    ] = None,
    weight_bytes: Annotated[
        int | None, typer.Option("--weight-bytes", help="Per parameter; 4.", rich_help_panel=JOB)
    ] = None,
    lanes: Annotated[
        str | None, typer.Option("--lanes", metavar="N,…", help="Of each worker; 1.", rich_help_panel=JOB)
    ] = None,
    accumulate: Annotated[str | None, typer.Option("--accumulate", metavar="N,…", rich_help_panel=JOB)] = None,
    servers: Annotated[
        str | None, typer.Option("--servers", metavar="N,…", help="Of parameter_server.", rich_help_panel=JOB)
    ] = None,
    every: Annotated[
        str | None, typer.Option("--every", metavar="N,…", help="Of local_sgd and diloco.", rich_help_panel=JOB)
    ] = None,
    compute_ms: Annotated[
        str | None,
        typer.Option(
            "--compute-ms", metavar="MS,…", help="Forward and backward of a micro-batch.", rich_help_panel=JOB
        ),
    ] = None,
    update_ms: Annotated[
        float | None, typer.Option("--update-ms", help="The optimizer, of all parameters.", rich_help_panel=JOB)
    ] = None,
    steps: Annotated[
        int | None, typer.Option("--steps", help="Simulated one by one; 100.", rich_help_panel=JOB)
    ] = None,
    seed: Annotated[int | None, typer.Option("--seed", rich_help_panel=JOB)] = None,
    network: Annotated[
        str | None, typer.Option("--network", metavar="NAME,…", help="See --list-networks.", rich_help_panel=NETWORK)
    ] = None,
    list_networks: Annotated[
        bool, typer.Option("--list-networks", help="Print them with their sources, and exit.", rich_help_panel=NETWORK)
    ] = False,
    jitter: Annotated[
        str | None,
        typer.Option("--jitter", metavar="SHARE,…", help="Standard deviation, of 1.", rich_help_panel=SLOW),
    ] = None,
    slow_workers: Annotated[int | None, typer.Option("--slow-workers", rich_help_panel=SLOW)] = None,
    slow_factor: Annotated[
        float | None, typer.Option("--slow-factor", help="How much longer they take.", rich_help_panel=SLOW)
    ] = None,
    pause_chance: Annotated[
        float | None, typer.Option("--pause-chance", help="Of a worker in a step.", rich_help_panel=SLOW)
    ] = None,
    pause_ms: Annotated[float | None, typer.Option("--pause-ms", rich_help_panel=SLOW)] = None,
    hours: Annotated[float | None, typer.Option("--hours", help="Of the job; 24.", rich_help_panel=LOST)] = None,
    mtbf_hours: Annotated[
        str | None,
        typer.Option("--mtbf-hours", metavar="H,…", help="Between failures of one worker.", rich_help_panel=LOST),
    ] = None,
    recovery: Annotated[str | None, typer.Option("--recovery", metavar="elastic,restart", rich_help_panel=LOST)] = None,
    checkpoint_every: Annotated[
        str | None, typer.Option("--checkpoint-every", metavar="STEPS,…", rich_help_panel=LOST)
    ] = None,
    checkpoint_s: Annotated[
        float | None, typer.Option("--checkpoint-s", help="That a step waits for it.", rich_help_panel=LOST)
    ] = None,
    restart_s: Annotated[
        float | None, typer.Option("--restart-s", help="All processes anew, checkpoint read; 60.", rich_help_panel=LOST)
    ] = None,
    detect_s: Annotated[float | None, typer.Option("--detect-s", help="0.02.", rich_help_panel=LOST)] = None,
    regroup_s: Annotated[float | None, typer.Option("--regroup-s", help="0.19.", rich_help_panel=LOST)] = None,
    replace_s: Annotated[
        float | None, typer.Option("--replace-s", help="Until a fresh process has joined; 30.", rich_help_panel=LOST)
    ] = None,
    spares: Annotated[
        str | None, typer.Option("--spares", metavar="N,…", help="Workers that wait.", rich_help_panel=LOST)
    ] = None,
    trace: Annotated[
        Path | None, typer.Option("--trace", help="A timeline for ui.perfetto.dev.", rich_help_panel=OUT)
    ] = None,
    trace_workers: Annotated[int, typer.Option("--trace-workers", rich_help_panel=OUT)] = 8,
    trace_steps: Annotated[int, typer.Option("--trace-steps", rich_help_panel=OUT)] = 3,
    json_file: Annotated[Path | None, typer.Option("--json", help="Every number.", rich_help_panel=OUT)] = None,
) -> None:
    """Simulate data-parallel training on up to a million workers: step time, scaling, goodput, what-if."""
    given = dict(locals())
    for name in ("scenarios", "list_networks", "trace", "trace_workers", "trace_steps", "json_file"):
        del given[name]
    from paceline.simulate import report
    from paceline.simulate.result import simulate as run
    from paceline.simulate.result import watched
    from paceline.simulate.scenario import read_scenarios, scenario_of
    from paceline.simulate.trace import write_trace
    from paceline.simulate.training import Watch

    if list_networks:
        report.show_networks(report.console())
        return
    product = _product({name: value for name, value in given.items() if value is not None})
    if scenarios:
        made = [each for flags in product for path in scenarios for each in read_scenarios(path, flags)]
    else:
        made = [scenario_of(flags) for flags in product]
    if len(made) > MOST_SCENARIOS:
        raise ConfigError(f"{len(made):,} scenarios: at most {MOST_SCENARIOS} are compared; give shorter lists")
    if trace is not None and not (trace_workers and trace_steps):
        raise ConfigError("--trace-workers and --trace-steps: a timeline has at least one of each")
    out = report.console()
    found = []
    with out.status("simulating …") if out.is_terminal else nullcontext():
        for scenario in made:
            watch = watched(scenario, trace_workers, trace_steps) if trace is not None else Watch()
            found.append((run(scenario, watch), watch))
    report.show([result for result, _ in found], out)
    if trace is not None:
        count = write_trace(trace, found)
        out.print(f"\n{trace}: {count:,} events; open it at https://ui.perfetto.dev", soft_wrap=True)
    if json_file is not None:
        json_file.write_text(json.dumps([result.to_json() for result, _ in found], indent=1) + "\n")


def _product(given: dict[str, Any]) -> list[dict[str, Any]]:
    """One set of flags for each combination of what lists with commas hold."""
    lists = {name: _values(name, value) for name, value in given.items()}
    return [dict(zip(lists, values, strict=True)) for values in itertools.product(*lists.values())]


def _values(name: str, value: Any) -> list[Any]:
    if not isinstance(value, str):
        return [value]
    words = [word.strip() for word in value.split(",")]
    option = f"--{name.replace('_', '-')}"
    if not all(words):
        raise ConfigError(f"{option} {one_line(value)!r}: a word of the list is empty")
    if name in ("strategy", "algorithm", "network", "recovery"):
        return [None if name == "algorithm" and word == "exact" else word for word in words]
    try:
        numbers = [float(word.replace("_", "")) for word in words]
    except ValueError:
        raise ConfigError(f"{option} {one_line(value)!r}: expected a number, or several with commas") from None
    if name in WHOLE and not all(number.is_integer() for number in numbers):
        raise ConfigError(f"{option} {one_line(value)!r}: expected whole numbers")
    return [int(number) if name in WHOLE else number for number in numbers]
