"""How far `paceline simulate` is from what was measured here, and from what others have published.

    python benchmarks/simulated.py                  a table: measured, simulated, error
    python benchmarks/simulated.py --png FILE       and a plot: the slow network, Horovod's scaling

The measurements are in benchmarks/results: shaped_network.json and recovery.json are ours, published.toml is others'.
tests/simulate holds the simulator to these errors.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from served_round import ServedRound
from server_round import PARTS

from paceline.collectives.choice import FLAT
from paceline.launch.elastic_job import TICK_S
from paceline.launch.worker_main import BEAT_EVERY_S
from paceline.simulate.collective import Collective
from paceline.simulate.exchange import Exchange, push_and_pull
from paceline.simulate.job import simulate_job
from paceline.simulate.network import network_named
from paceline.simulate.result import simulate
from paceline.simulate.scenario import Scenario
from paceline.simulate.training import Step

RESULTS = Path(__file__).parent / "results"
SHAPED = json.loads((RESULTS / "shaped_network.json").read_text())
RECOVERY = json.loads((RESULTS / "recovery.json").read_text())
PUBLISHED = tomllib.loads((RESULTS / "published.toml").read_text())
KILL_SEEN_S = Scenario.detect_s
BARRIER_S, ROUNDS = 1e-3, 15
"""Hosts leave the barrier before a round so far from each other; who is first decides who waits for whom, so there are
several rounds, as in the measurement. From 0.5 to 10 ms the medians move by at most 7 %."""


@dataclass(frozen=True)
class Row:
    what: str
    case: str
    measured: float
    simulated: float
    unit: str

    @property
    def error(self) -> float:
        return self.simulated / self.measured - 1


# -- ours --------------------------------------------------------------------------------------------------------------


def shaped_seconds(way: str, hosts: int) -> float:
    placed, nbytes = network_named("shaped-100m").for_workers(hosts), SHAPED["tensor_bytes"]
    if way in FLAT:
        return Collective.of(FLAT[way], hosts, nbytes, placed, SHAPED["segment_bytes"]).seconds
    if way == "N servers":
        return served_seconds(hosts)
    placed = network_named("shaped-100m").for_workers(hosts + 1)
    push, pull = push_and_pull(placed, hosts, np.asarray([hosts]), nbytes)
    return push.seconds + pull.seconds


def served_seconds(hosts: int) -> float:
    """A server on every host: of the slowest worker, from when it begins, in the median of rounds."""
    placed = network_named("shaped-100m").for_workers(hosts)
    beside = placed.with_places(np.tile(placed.places, 2))
    job = ServedRound(beside, hosts, hosts, SHAPED["tensor_bytes"], PARTS)
    starts = np.random.default_rng(0).uniform(0, BARRIER_S, (ROUNDS, hosts))
    return statistics.median(float((job.run(each) - each).max()) for each in starts)


def recovery_seconds(row: dict[str, Any], *, detect_s: float, regroup_s: float) -> float:
    """Until the next committed step: the median over failures at random moments."""
    work_s = (row["step_ms"] - row["other_ms"]) / 1e3
    scenario = Scenario(
        workers=row["workers"], lanes=row["lanes"] // row["workers"], other_ms=row["other_ms"], detect_s=detect_s,
        regroup_s=regroup_s, replace_s=1.0, commit_ms=0, mtbf_hours=0.05, hours=10,
    )  # fmt: skip
    # All of a step's work counts as exchange: on the same cores fewer workers with more lanes each take as long.
    steps = [Step(ends=0, takes=row["step_ms"] / 1e3, compute=row["other_ms"] / 1e3, slowest=work_s, wire=work_s)]
    found = simulate_job(scenario, steps, lives=1).recovery_median
    assert found is not None
    return found


def regroup_of(row: dict[str, Any]) -> float:
    """What is left of a kill's recovery: the one number that is taken from the measurement."""
    return float(row["kill"]) - recovery_seconds(row, detect_s=KILL_SEEN_S, regroup_s=0.0)


def hang_seconds(row: dict[str, Any]) -> float:
    """A worker that hangs is found by its heartbeat; the rest is as after a kill."""
    detect_s = row["heartbeat_s"] - BEAT_EVERY_S / 2 + TICK_S / 2
    return recovery_seconds(row, detect_s=detect_s, regroup_s=regroup_of(row))


def restart_seconds() -> float:
    """Until the step that was reached, from a checkpoint: the median over failures at random moments."""
    row = RECOVERY["restart"]
    step_s = row["step_ms"] / 1e3
    scenario = Scenario(
        workers=3, recovery="restart", detect_s=0, restart_s=row["first_new_step"] - step_s, mtbf_hours=0.05,
        checkpoint_every=row["checkpoint_every"], hours=20,
    )  # fmt: skip
    job = simulate_job(scenario, [Step(ends=0, takes=step_s, compute=step_s, slowest=step_s, wire=0)], lives=1)
    assert job.recovery_median is not None
    return job.recovery_median


# -- others' -----------------------------------------------------------------------------------------------------------


def horovod_efficiency(model: dict[str, Any], workers: int) -> float:
    told = PUBLISHED["horovod"]
    scenario = Scenario(
        workers=workers, network=told["network"], algorithm=told["algorithm"], parameters=model["parameters"],
        layers=50, compute_ms=1e3 * told["batch"] / model["images_per_s"], bucket_mb=told["bucket_mb"],
        jitter=told["jitter"], steps=10,
    )  # fmt: skip
    return simulate(scenario).scaling


def bus_bandwidth(told: dict[str, Any], nbytes: int) -> float:
    """In GB/s, by the cheapest of our algorithms."""
    size = told["workers"]
    exchange = Exchange(Scenario(workers=size, network=told["network"], algorithm="auto"))
    return nbytes / exchange.all_reduce(float(nbytes)).seconds * 2 * (size - 1) / size / 1e9


def latency_us(size: int) -> float:
    """Of NCCL's ring of 8 bytes."""
    placed = network_named(PUBLISHED["nccl_latency"]["network"]).for_workers(size)
    return Collective.of(FLAT["ring"], size, 8.0, placed, None).seconds * 1e6


# -- all of it ---------------------------------------------------------------------------------------------------------


def rows() -> Iterator[Row]:
    for way, measured in SHAPED["seconds"].items():
        for hosts, seconds in zip(SHAPED["hosts"], measured, strict=True):
            yield Row("slow network", f"{way}, {hosts} hosts", seconds, shaped_seconds(way, hosts), "s")
    for row in RECOVERY["elastic"]:
        yield Row("recovery from a hang", row["from"], row["stop"], hang_seconds(row), "s")
    restart = RECOVERY["restart"]
    yield Row("restart from a checkpoint", restart["from"], restart["regained"], restart_seconds(), "s")
    for model in PUBLISHED["horovod"]["model"]:
        for size, efficiency in model["efficiency"].items():
            found = horovod_efficiency(model, int(size))
            yield Row("Horovod's scaling", f"{model['name']}, {size} GPUs", efficiency, found, "")
    for told in PUBLISHED["nccl"]:
        for nbytes, bandwidth in told["bus"].items():
            found = bus_bandwidth(told, int(nbytes))
            case = f"{told['workers']} GPUs of {told['network']}, {int(nbytes) >> 20} MiB"
            yield Row("NCCL bus bandwidth", case, bandwidth, found, "GB/s")
    told = PUBLISHED["nccl_latency"]
    for size, measured in told["small"].items():
        note = ", fitted" if int(size) in told["fitted"] else ""
        yield Row("NCCL latency", f"{size} GPUs of {told['network']}{note}", measured, latency_us(int(size)), "µs")


def plot(file: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.0), layout="constrained")
    axes: Any = figure.subplots(1, 2)
    colours = ("tab:red", "tab:orange", "tab:blue", "tab:purple")
    hosts = list(range(2, 9))
    for colour, way in zip(colours, ("star", "unsplit-ring", "ring", "1 server"), strict=True):
        axes[0].plot(hosts, [shaped_seconds(way, each) for each in hosts], color=colour, linewidth=1)
        axes[0].plot(SHAPED["hosts"], SHAPED["seconds"][way], "o", color=colour, label=way, mfc="none")
    axes[0].set(xlabel="hosts", title="an all-reduce of 4 MiB over 100 Mbit/s, s")
    sizes = [4, 8, 16, 32, 64, 128, 256, 512, 1024]
    for colour, model in zip(colours, PUBLISHED["horovod"]["model"], strict=False):
        axes[1].plot(sizes, [horovod_efficiency(model, size) for size in sizes], color=colour, linewidth=1)
        published = {int(size): efficiency for size, efficiency in model["efficiency"].items()}
        axes[1].plot(list(published), list(published.values()), "o", color=colour, label=model["name"], mfc="none")
    axes[1].set(xlabel="P100 GPUs, 4 to a host, 25 Gbit/s", title="scaling efficiency", ylim=(0, 1.05), xscale="log")
    axes[1].set_xticks(sizes, [str(size) for size in sizes])
    axes[1].minorticks_off()
    for panel in axes:
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
        panel.legend(frameon=False, loc="lower left" if panel is axes[1] else "upper left")
    figure.suptitle("lines: paceline simulate · circles: measured (left: here, right: as Horovod published)")
    figure.savefig(file, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--png", type=Path)
    asked = parser.parse_args()
    print("| what | case | measured | simulated | error |\n|---|---|---|---|---|")
    for row in rows():
        values = [f"{value:.3g} {row.unit}".strip() for value in (row.measured, row.simulated)]
        print(f"| {row.what} | {row.case} | {values[0]} | {values[1]} | {row.error:+.0%} |")
    if asked.png is not None:
        plot(asked.png)


if __name__ == "__main__":
    main()
