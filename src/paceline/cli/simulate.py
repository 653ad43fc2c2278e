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
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.errors import ConfigError
from paceline.input_file import one_line

MOST_SCENARIOS = 64
WHOLE = ("workers", "parameters", "lanes", "accumulate", "servers", "checkpoint_every", "spares", "every", "layers")


# -- the flags ---------------------------------------------------------------------------------------------------------

_job = partial(typer.Option, rich_help_panel="What is trained")
_network = partial(typer.Option, rich_help_panel="Over which network")
_slow = partial(typer.Option, rich_help_panel="What is slow")
_lost = partial(typer.Option, rich_help_panel="What is lost")
_output = partial(typer.Option, rich_help_panel="Output")

ScenarioFiles = Annotated[
    list[Path] | None, typer.Argument(metavar="FILE", help="Scenarios in TOML, YAML or JSON; flags go first.")
]
Workers = Annotated[str | None, _job("--workers", metavar="N,…")]
StrategyNames = Annotated[str | None, _job("--strategy", metavar="NAME,…")]
Algorithms = Annotated[str | None, _job("--algorithm", metavar="NAME,…", help="Of all-reduces; exact, unless given.")]
Parameters = Annotated[str | None, _job("--parameters", metavar="P,…")]
Layers = Annotated[int | None, _job("--layers", help="Of equal size; 24.")]
BucketMb = Annotated[str | None, _job("--bucket-mb", metavar="MIB,…", help="16, as the engine's.")]
GradientBytes = Annotated[int | None, _job("--gradient-bytes", help="Per parameter; 4.")]
WeightBytes = Annotated[int | None, _job("--weight-bytes", help="Per parameter; 4.")]
Lanes = Annotated[str | None, _job("--lanes", metavar="N,…", help="Of each worker; 1.")]
Accumulate = Annotated[str | None, _job("--accumulate", metavar="N,…")]
Servers = Annotated[str | None, _job("--servers", metavar="N,…", help="Of parameter_server.")]
Every = Annotated[str | None, _job("--every", metavar="N,…", help="Of local_sgd and diloco.")]
ComputeMs = Annotated[str | None, _job("--compute-ms", metavar="MS,…", help="Forward and backward of a micro-batch.")]
UpdateMs = Annotated[float | None, _job("--update-ms", help="The optimizer, of all parameters.")]
Steps = Annotated[int | None, _job("--steps", help="Simulated one by one; 100.")]
Seed = Annotated[int | None, _job("--seed")]
NetworkNames = Annotated[str | None, _network("--network", metavar="NAME,…", help="See --list-networks.")]
ListNetworks = Annotated[bool, _network("--list-networks", help="Print them with their sources, and exit.")]
Jitter = Annotated[str | None, _slow("--jitter", metavar="SHARE,…", help="Standard deviation, of 1.")]
SlowWorkers = Annotated[int | None, _slow("--slow-workers")]
SlowFactor = Annotated[float | None, _slow("--slow-factor", help="How much longer they take.")]
PauseChance = Annotated[float | None, _slow("--pause-chance", help="Of a worker in a step.")]
PauseMs = Annotated[float | None, _slow("--pause-ms")]
Hours = Annotated[float | None, _lost("--hours", help="Of the job; 24.")]
MtbfHours = Annotated[str | None, _lost("--mtbf-hours", metavar="H,…", help="Between failures of one worker.")]
Recovery = Annotated[str | None, _lost("--recovery", metavar="elastic,restart")]
CheckpointEvery = Annotated[str | None, _lost("--checkpoint-every", metavar="STEPS,…")]
CheckpointSeconds = Annotated[float | None, _lost("--checkpoint-s", help="That a step waits for it.")]
RestartSeconds = Annotated[float | None, _lost("--restart-s", help="All processes anew, checkpoint read; 60.")]
DetectSeconds = Annotated[float | None, _lost("--detect-s", help="0.02.")]
RegroupSeconds = Annotated[float | None, _lost("--regroup-s", help="0.19.")]
ReplaceSeconds = Annotated[float | None, _lost("--replace-s", help="Until a fresh process has joined; 30.")]
Spares = Annotated[str | None, _lost("--spares", metavar="N,…", help="Workers that wait.")]
TraceFile = Annotated[Path | None, _output("--trace", help="A timeline for ui.perfetto.dev.")]
TraceWorkers = Annotated[int, _output("--trace-workers")]
TraceSteps = Annotated[int, _output("--trace-steps")]
JsonFile = Annotated[Path | None, _output("--json", help="Every number.")]


def simulate(
    scenarios: ScenarioFiles = None,
    workers: Workers = None,
    strategy: StrategyNames = None,
    algorithm: Algorithms = None,
    parameters: Parameters = None,
    layers: Layers = None,
    bucket_mb: BucketMb = None,
    gradient_bytes: GradientBytes = None,
    weight_bytes: WeightBytes = None,
    lanes: Lanes = None,
    accumulate: Accumulate = None,
    servers: Servers = None,
    every: Every = None,
    compute_ms: ComputeMs = None,
    update_ms: UpdateMs = None,
    steps: Steps = None,
    seed: Seed = None,
    network: NetworkNames = None,
    list_networks: ListNetworks = False,
    jitter: Jitter = None,
    slow_workers: SlowWorkers = None,
    slow_factor: SlowFactor = None,
    pause_chance: PauseChance = None,
    pause_ms: PauseMs = None,
    hours: Hours = None,
    mtbf_hours: MtbfHours = None,
    recovery: Recovery = None,
    checkpoint_every: CheckpointEvery = None,
    checkpoint_s: CheckpointSeconds = None,
    restart_s: RestartSeconds = None,
    detect_s: DetectSeconds = None,
    regroup_s: RegroupSeconds = None,
    replace_s: ReplaceSeconds = None,
    spares: Spares = None,
    trace: TraceFile = None,
    trace_workers: TraceWorkers = 8,
    trace_steps: TraceSteps = 3,
    json_file: JsonFile = None,
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
