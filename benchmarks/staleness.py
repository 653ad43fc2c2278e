"""What a bound on staleness buys when workers are not equally fast, and what it costs in loss.

    scenario    workers                                      clocks
    straggler   4, one of them at half the others' speed     s = 0, 1, 2, 4, inf · d = 1, 3
    jitter      4, each item takes a random time             s = 0, 1, 2

    python benchmarks/staleness.py measure results.json        # about 6 minutes; starts `paceline run` for every cell
    python benchmarks/staleness.py show results.json --png staleness.png

Most of an item's time is a sleep, so that the cores of the machine don't decide. Every clock runs twice: for the same
time, and for the same number of rounds; the loss is of held-out samples, by the weights when all updates are in. The
windows of s = 1, 2, 4 are open from the first round on (s=1,from=0), or 150 rounds would show little of them.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

STRAGGLER = ("s=0", "s=1", "s=2", "s=4", "s=inf", "d=1", "d=3")
JITTER = ("s=0", "s=1", "s=2")
WORKERS = 4
BATCH = 16
ITEM_S = 0.04
SECONDS, ROUNDS = 10.0, 150
LEARNING_RATE, MOMENTUM = 0.02, 0.9
PACELINE = "from paceline.cli.main import main; main()"
CELL_TIMEOUT_S = 180.0


@dataclass(frozen=True)
class Cell:
    scenario: str
    clock: str
    until: str  # "time" or "rounds"

    def command(self, result: Path) -> list[str]:
        script = [__file__, "train", "--scenario", self.scenario, "--clock", self.clock, "--until", self.until]
        workers = ["--workers", str(WORKERS), "--servers", "1", "--threads", "1"]
        return [sys.executable, "-c", PACELINE, "run", *workers, *script, "--result", str(result)]


# -- what a worker does ------------------------------------------------------------------------------------------------


def samples(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Classes of a random teacher: learnable, and not by heart in a few hundred rounds."""
    teacher = torch.Generator().manual_seed(0)
    weights = torch.randn(32, 64, generator=teacher), torch.randn(64, 10, generator=teacher)
    inputs = torch.randn(count, 32, generator=torch.Generator().manual_seed(seed))
    return inputs, (torch.relu(inputs @ weights[0]) @ weights[1]).argmax(1)


def train(scenario: str, clock: str, until: str, result: Path) -> None:
    import paceline
    from paceline.parameter_server.clock import BoundedStaleness, parse_clock
    from paceline.strategies.server import ParameterServer

    ticks = parse_clock(clock)
    if isinstance(ticks, BoundedStaleness):
        ticks = replace(ticks, from_round=0)
    engine = paceline.Engine(strategy=ParameterServer(clock=ticks), device="cpu", seed=0)
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
    length = BATCH * WORKERS * (ROUNDS if until == "rounds" else 100 * ROUNDS)
    inputs, targets = samples(length, seed=1)
    loader: Any = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, targets), batch_size=BATCH)
    model, optimizer, loader = engine.prepare(model, optimizer, loader)
    pace = random.Random(engine.world.rank)
    started, items, busy_s = time.monotonic(), 0, 0.0
    for batch_inputs, batch_targets in loader:
        begun = time.monotonic()
        loss = nn.functional.cross_entropy(model(batch_inputs), batch_targets)
        time.sleep(_nap_s(scenario, engine.world.rank, pace))
        busy_s += time.monotonic() - begun  # a synchronous backward ends by waiting for the others
        engine.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        items += 1
        if until == "time" and time.monotonic() - started > SECONDS:
            engine.stop()
    seconds = time.monotonic() - started
    held_out, classes = samples(4096, seed=2)
    with torch.no_grad():
        reached = float(nn.functional.cross_entropy(model(held_out), classes))
    told = engine.reduce(torch.tensor([items, seconds, busy_s], dtype=torch.float64), "sum").tolist()
    if engine.is_main_process:
        means = {"seconds": told[1] / WORKERS, "busy_s": told[2] / WORKERS}
        result.write_text(json.dumps({"items": int(told[0]), "loss": reached, **means}))


def _nap_s(scenario: str, rank: int, pace: random.Random) -> float:
    if scenario == "straggler":
        return ITEM_S * (2 if rank == WORKERS - 1 else 1)
    return ITEM_S / 2 + pace.expovariate(2 / ITEM_S)


# -- all cells ---------------------------------------------------------------------------------------------------------


def cells() -> list[Cell]:
    return [
        Cell(scenario, clock, until)
        for scenario, clocks in (("straggler", STRAGGLER), ("jitter", JITTER))
        for clock in clocks
        for until in ("time", "rounds")
    ]


def measure(file: Path) -> None:
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="paceline-staleness-") as folder:
        for number, cell in enumerate(cells()):
            result = Path(folder) / f"{number}.json"
            ran = subprocess.run(
                cell.command(result), check=True, timeout=CELL_TIMEOUT_S, stdout=subprocess.PIPE, text=True
            )
            found.append(asdict(cell) | json.loads(result.read_text()) | {"staleness": summary(ran.stdout)})
            print(_told(found[-1]), flush=True)
    file.write_text(json.dumps({"rows": found}, indent=1))


def summary(said: str) -> dict[str, Any]:
    """What the run's last lines tell: `staleness  0: 1 %, 1: 99 % (mean 0.99, at most 1 rounds)`."""
    found: dict[str, Any] = {"delays": {}}
    for line in said.splitlines():
        words = line.partition("] ")[2].split()
        if words[:1] == ["staleness"]:
            found["delays"] = {delay: float(share) for delay, share in re.findall(r"(\d+)(?: or more)?: (\d+) %", line)}
            mean, most = re.findall(r"mean ([\d.]+), at most (\d+)", line)[0]
            found |= {"mean_delay": float(mean), "most_delay": int(most)}
    return found


def _told(row: dict[str, Any]) -> str:
    seen = row["staleness"] or {}
    return (
        f"{row['scenario']} {row['clock']}, same {row['until']}: {speed(row):.0f} updates/s · "
        f"loss {row['loss']:.4f} · staleness {seen.get('mean_delay', 0.0):.2f}, at most {seen.get('most_delay', 0)} · "
        f"waiting {waiting(row):.0%} of the time"
    )


def speed(row: dict[str, Any]) -> float:
    return float(row["items"] / row["seconds"])


def waiting(row: dict[str, Any]) -> float:
    """The share of their time in which workers did not compute."""
    return 1 - float(row["busy_s"] / row["seconds"])


def show(file: Path, png: Path | None) -> None:
    rows = by_cell(json.loads(file.read_text())["rows"])
    for scenario, clocks in (("straggler", STRAGGLER), ("jitter", JITTER)):
        print(
            f"\n| {scenario} | updates/s | to s=0 | workers wait | staleness, rounds: mean, most "
            f"| loss after {SECONDS:.0f} s | loss after {ROUNDS} rounds |\n|---|---|---|---|---|---|---|"
        )
        for clock in clocks:
            timed, counted = rows[scenario, clock, "time"], rows[scenario, clock, "rounds"]
            base = rows[scenario, "s=0", "time"]
            seen = timed["staleness"] or {}
            print(
                f"| {clock} | {speed(timed):.0f} | {speed(timed) / speed(base):.2f} | {100 * waiting(timed):.0f} % | "
                f"{seen.get('mean_delay', 0.0):.2f}, {seen.get('most_delay', 0)} | "
                f"{timed['loss']:.3f} | {counted['loss']:.3f} |"
            )
    if png is not None:
        draw(rows, png)


Rows = dict[tuple[str, str, str], dict[str, Any]]
FULL, OTHER = "#2a6f97", "#d68c45"


def by_cell(rows: list[dict[str, Any]]) -> Rows:
    return {(row["scenario"], row["clock"], row["until"]): row for row in rows}


def draw(rows: Rows, png: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7), layout="constrained")
    (one, two), (three, four) = figure.subplots(2, 2)
    draw_speeds(one, rows, "straggler", STRAGGLER)
    one.set_title("One of 4 workers at half speed: updates/s (grey: waiting)", loc="left")
    draw_delays(two, [rows["straggler", clock, "time"] for clock in STRAGGLER])
    draw_losses(three, rows)
    draw_speeds(four, rows, "jitter", JITTER)
    four.set_title("Items of random length: updates/s (grey: waiting)", loc="left")
    for axis, clocks in ((one, STRAGGLER), (two, STRAGGLER), (three, STRAGGLER), (four, JITTER)):
        axis.set_xticks(range(len(clocks)), [clock.replace("inf", "∞") for clock in clocks])
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(png, dpi=110)


def draw_speeds(axis: Any, rows: Rows, scenario: str, clocks: tuple[str, ...]) -> None:
    """Whole bars: what the workers could do if nobody ever waited."""
    timed = [rows[scenario, clock, "time"] for clock in clocks]
    axis.bar(range(len(clocks)), [speed(row) / (1 - waiting(row)) for row in timed], 0.6, color="#e6e6e6")
    bars = axis.bar(range(len(clocks)), [speed(row) for row in timed], 0.6, color=FULL)
    axis.bar_label(bars, fmt="%.0f", label_type="center", color="white")
    for place, row in enumerate(timed):
        if waiting(row) > 0.075:
            axis.text(place, speed(row) + 1.5, f"{waiting(row):.0%}", ha="center", fontsize=9, color="#777777")


def draw_delays(axis: Any, timed: list[dict[str, Any]]) -> None:
    means = [row["staleness"].get("mean_delay", 0.0) for row in timed]
    most = [row["staleness"].get("most_delay", 0) for row in timed]
    bars = axis.bar(range(len(timed)), means, 0.6, color=FULL)
    axis.bar_label(bars, fmt="%.2f", padding=2)
    axis.plot(range(len(timed)), most, "_", color=OTHER, markersize=26, markeredgewidth=2.5, label="at most")
    axis.set_title("How many rounds old the weights of a push were, mean", loc="left")
    axis.legend(frameon=False, loc="upper left")


def draw_losses(axis: Any, rows: Rows) -> None:
    for until, text, color, marker in (
        ("time", f"after {SECONDS:.0f} s", FULL, "o"),
        ("rounds", f"after {ROUNDS} rounds", OTHER, "s"),
    ):
        losses = [rows["straggler", clock, until]["loss"] for clock in STRAGGLER]
        axis.plot(range(len(losses)), losses, marker, color=color, markersize=8, label=text)
    for place, clock in enumerate(STRAGGLER):
        ends = [rows["straggler", clock, until]["loss"] for until in ("time", "rounds")]
        axis.plot([place, place], ends, color="#cccccc", zorder=0)
    axis.set_title("The same straggler: held-out loss", loc="left")
    axis.legend(frameon=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    measuring = commands.add_parser("measure")
    measuring.add_argument("file", type=Path)
    showing = commands.add_parser("show")
    showing.add_argument("file", type=Path)
    showing.add_argument("--png", type=Path)
    training = commands.add_parser("train", help="one worker of one cell")
    for name in ("scenario", "clock", "until"):
        training.add_argument(f"--{name}", required=True)
    training.add_argument("--result", type=Path, required=True)
    options = parser.parse_args()
    if options.command == "measure":
        measure(options.file)
    elif options.command == "show":
        show(options.file, options.png)
    else:
        train(options.scenario, options.clock, options.until, options.result)


if __name__ == "__main__":
    main()
