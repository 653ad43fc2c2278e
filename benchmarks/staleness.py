"""What a bound on staleness buys when workers are not equally fast, and what it costs in loss.

    scenario    workers                                      clocks
    straggler   4, one of them at half the others' speed     s = 0, 1, 2, 4, inf · d = 1, 3
    jitter      4, each item takes a random time             s = 0, 1, 2

    python benchmarks/staleness.py measure results.json        # about 5 minutes; starts `paceline run` for every cell
    python benchmarks/staleness.py show results.json --png docs/figures/staleness.png

Most of an item's time is a sleep, so that the cores of the machine don't decide. Every clock runs twice: for the same
time, and for the same number of rounds; the loss is of held-out samples, by the weights when all updates are in.
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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

STRAGGLER = ("s=0", "s=1", "s=2", "s=4", "s=inf", "d=1", "d=3")
JITTER = ("s=0", "s=1", "s=2")
WORKERS = 4
BATCH = 16
ITEM_S = 0.02
SECONDS, ROUNDS = 8.0, 200
LEARNING_RATE = 0.1
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
    from paceline.parameter_server.clock import parse_clock
    from paceline.strategies.parameter_server import ParameterServer

    engine = paceline.Engine(strategy=ParameterServer(clock=parse_clock(clock)), device="cpu", seed=0)
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    length = BATCH * WORKERS * (ROUNDS if until == "rounds" else 100 * ROUNDS)
    inputs, targets = samples(length, seed=1)
    loader: Any = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, targets), batch_size=BATCH)
    model, optimizer, loader = engine.prepare(model, optimizer, loader)
    pace = random.Random(engine.world.rank)
    started, items = time.monotonic(), 0
    for batch_inputs, batch_targets in loader:
        loss = nn.functional.cross_entropy(model(batch_inputs), batch_targets)
        time.sleep(_nap_s(scenario, engine.world.rank, pace))
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
    told = engine.reduce(torch.tensor([items, seconds], dtype=torch.float64), "sum").tolist()
    if engine.is_main_process:
        result.write_text(json.dumps({"items": int(told[0]), "seconds": told[1] / WORKERS, "loss": reached}))


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
    file.write_text(json.dumps(found, indent=1))


def summary(said: str) -> dict[str, Any]:
    """What the run's last lines tell: `staleness  0: 1 %, 1: 99 % (mean 0.99, at most 1 rounds)`, `clock  waited …`."""
    found: dict[str, Any] = {"delays": {}}
    for line in said.splitlines():
        words = line.partition("] ")[2].split()
        if words[:1] == ["staleness"]:
            found["delays"] = {delay: float(share) for delay, share in re.findall(r"(\d+)(?: or more)?: (\d+) %", line)}
            mean, most = re.findall(r"mean ([\d.]+), at most (\d+)", line)[0]
            found |= {"mean_delay": float(mean), "most_delay": int(most)}
        elif words[:2] == ["clock", "waited"]:
            found["waited_s"] = float(words[2].replace(",", ""))
    return found


def _told(row: dict[str, Any]) -> str:
    seen = row["staleness"] or {}
    return (
        f"{row['scenario']} {row['clock']}, same {row['until']}: {row['items'] / row['seconds']:.0f} updates/s · "
        f"loss {row['loss']:.4f} · staleness {seen.get('mean_delay', 0.0):.2f}, at most {seen.get('most_delay', 0)} · "
        f"waited {100 * seen.get('waited_s', 0.0) / (WORKERS * row['seconds']):.0f} % of the time"
    )


def show(file: Path, png: Path | None) -> None:
    rows = {(row["scenario"], row["clock"], row["until"]): row for row in json.loads(file.read_text())}
    for scenario, clocks in (("straggler", STRAGGLER), ("jitter", JITTER)):
        print(
            f"\n| {scenario} | updates/s | to s=0 | staleness, rounds: mean, most | at the clock | loss, same time |",
            end="",
        )
        print(" loss, same updates |\n|---|---|---|---|---|---|---|")
        for clock in clocks:
            timed, counted = rows[scenario, clock, "time"], rows[scenario, clock, "rounds"]
            base = rows[scenario, "s=0", "time"]
            speed = timed["items"] / timed["seconds"]
            seen = timed["staleness"] or {}
            print(
                f"| {clock} | {speed:.0f} | {speed / (base['items'] / base['seconds']):.2f} | "
                f"{seen.get('mean_delay', 0.0):.2f}, {seen.get('most_delay', 0)} | "
                f"{100 * seen.get('waited_s', 0.0) / (WORKERS * timed['seconds']):.0f} % | "
                f"{timed['loss']:.4f} | {counted['loss']:.4f} |"
            )
    if png is not None:
        draw(rows, png)


def draw(rows: dict[tuple[str, str, str], dict[str, Any]], png: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (speeds, losses, delays) = pyplot.subplots(1, 3, figsize=(13, 4), constrained_layout=True)
    places = range(len(STRAGGLER))
    timed = [rows["straggler", clock, "time"] for clock in STRAGGLER]
    counted = [rows["straggler", clock, "rounds"] for clock in STRAGGLER]
    speeds.bar(places, [row["items"] / row["seconds"] for row in timed], color="tab:blue")
    speeds.set_title("updates/s, one of 4 workers at half speed")
    losses.plot(places, [row["loss"] for row in timed], "o-", label=f"after {SECONDS:.0f} s")
    losses.plot(places, [row["loss"] for row in counted], "s--", label=f"after {ROUNDS} rounds")
    losses.set_title("held-out loss")
    losses.legend()
    for place, row in enumerate(timed):
        histogram = {int(delay): count for delay, count in ((row["staleness"] or {}).get("delays") or {}).items()}
        total, bottom = sum(histogram.values()) or 1, 0.0
        for delay in sorted(histogram):
            share = histogram[delay] / total
            shade = pyplot.get_cmap("viridis")(min(delay, 8) / 8)
            delays.bar(place, share, bottom=bottom, color=shade)
            if share > 0.08:
                delays.text(place, bottom + share / 2, str(delay), ha="center", va="center", color="white", fontsize=8)
            bottom += share
    delays.set_title("observed staleness, rounds (share of pushes)")
    for axis in (speeds, losses, delays):
        axis.set_xticks(list(places), STRAGGLER)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(png, dpi=110)


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
