"""What a lost worker costs, and what being ready for it costs when none is lost.

    python benchmarks/faults.py recovery --kills 25 --stops 5 --peer drive_fault.py     # about 3 minutes
    python benchmarks/faults.py cost --rounds 21                                       # about 2 minutes

`recovery`: four workers train, one is killed (or stopped) at a random moment, and the time until the next committed
step is read from the ledger; the next one waits until four are there again. `--peer` is a program that does the same to
a job of torchrun and prints a line of JSON per kill; its times stand in the same table.

`cost`: two jobs of the same script, one elastic and one not, take turns of some steps each; while one trains, the other
waits at a step boundary. The figure is the median of the ratios of neighbouring turns.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from turns import in_turns, spread_of

from paceline.bench.statistics import Spread
from paceline.elastic.random_faults import Draw, HurtJob

LANES = 8
HEARTBEAT_TIMEOUT_S = 2.0
PATIENCE_S = 60.0
LOOK_EVERY_S = 0.002


# -- the job ---------------------------------------------------------------------------------------------------------


def train(asked: argparse.Namespace) -> None:
    """Steps without end, or turns of them; worker 0 writes down how long each turn took."""
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    import paceline

    with paceline.Engine(device="cpu", threads=1) as engine:
        model = nn.Sequential(
            nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 1024)
        )  # fmt: skip
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        data = TensorDataset(torch.randn(LANES * asked.rows * 50, 512))
        loader = DataLoader(data, batch_size=asked.rows, shuffle=True)
        model, optimizer, loader = engine.prepare(model, optimizer, loader)
        begun, turn = 0.0, 0
        while True:
            for (x,) in loader:
                engine.backward(model(x).square().mean())
                optimizer.step()
                optimizer.zero_grad()
                if not engine.stepped:
                    continue
                time.sleep(asked.sleep_s)
                if asked.turn and engine.step % asked.turn == 1:
                    begun = time.perf_counter()
                if asked.turn and engine.step % asked.turn == 0:
                    took = (time.perf_counter() - begun) / (asked.turn - 1)
                    turn += 1
                    if engine.is_main_process:
                        publish(asked.folder / f"took-{turn}", repr(took))
                    wait_for(asked.folder / f"turn-{turn}")


def publish(file: Path, text: str) -> None:
    file.with_suffix(".part").write_text(text)
    os.replace(file.with_suffix(".part"), file)


def wait_for(file: Path) -> None:
    deadline = time.monotonic() + 10 * PATIENCE_S
    while not file.exists():
        if time.monotonic() > deadline:
            raise SystemExit(f"{file} never came")
        time.sleep(0.01)


@contextmanager
def job(folder: Path, workers: int, flags: list[str], arguments: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    folder.mkdir(parents=True, exist_ok=True)
    launcher = [sys.executable, "-m", "paceline.cli.main", "run", "--workers", str(workers), "--lanes", str(LANES)]
    words = ["train", "--folder", str(folder), *arguments]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [*launcher, "--grace-s", "0", *flags, __file__, *words],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        yield process
    finally:
        process.terminate()
        process.wait(30)


# -- recovery --------------------------------------------------------------------------------------------------------


def recovery(asked: argparse.Namespace, folder: Path) -> dict[str, Any]:
    ledger = folder / "ledger.jsonl"
    flags = ["--elastic", "--heartbeat-timeout-s", str(HEARTBEAT_TIMEOUT_S), "--ledger", str(ledger)]
    kinds = ["kill"] * asked.kills + ["stop"] * asked.stops
    chance = random.Random(asked.seed)
    step_s: list[float] = []
    times: dict[str, list[float]] = {"kill": [], "stop": []}
    with job(folder, asked.workers, flags, ["--rows", str(asked.rows), "--sleep-s", str(asked.sleep_s)]) as process:
        hurt = HurtJob(process.pid, ledger)
        for kind in kinds:
            step_s += whole_again(hurt, process, asked.workers, chance.uniform(0.5, 1.0))
            times[kind].append(hurt_once(hurt, process, Draw(kind, chance.random(), 0.0, 0.0)))
            print(f"{kind}: {times[kind][-1]:.3f} s", flush=True)
    return {"step_s": statistics.median(step_s), "times": {kind: spread(values) for kind, values in times.items()}}


def whole_again(hurt: HurtJob, process: subprocess.Popen[bytes], workers: int, quiet_s: float) -> list[float]:
    """Wait until all are members and have been for `quiet_s`; the times between commits meanwhile."""
    deadline, since, seen, gaps, last = time.monotonic() + PATIENCE_S, None, len(hurt.rows), [], None
    while since is None or time.monotonic() - since < quiet_s:
        look(hurt, process, deadline)
        now = time.monotonic()
        if not hurt.rows or len(hurt.rows[-1].members) < workers:
            since = last = None
        elif since is None:
            since = now
        if len(hurt.rows) > seen:
            if last is not None and len(hurt.rows) == seen + 1:
                gaps.append(now - last)
            seen, last = len(hurt.rows), now
    return gaps


def hurt_once(hurt: HurtJob, process: subprocess.Popen[bytes], draw: Draw) -> float:
    deadline = time.monotonic() + PATIENCE_S
    if not hurt.hurt(draw):
        raise SystemExit(f"nobody could be hurt by a {draw.kind}")
    while (took := hurt.happened[-1].commit_s) is None:
        look(hurt, process, deadline)
    return took


def look(hurt: HurtJob, process: subprocess.Popen[bytes], deadline: float) -> None:
    hurt.look()
    if process.poll() is not None:
        raise SystemExit(f"the job ended with code {process.returncode}; see its log")
    if time.monotonic() > deadline:
        raise SystemExit("no commit for too long")
    time.sleep(LOOK_EVERY_S)


def by_peer(program: Path, kills: int, folder: Path) -> dict[str, Any]:
    """Another launcher's kills: from the kill to the first new step, and until all lost steps are done again."""
    command = [sys.executable, str(program.absolute()), "kill", str(kills)]
    told = subprocess.run(
        command, cwd=program.absolute().parent, env={**os.environ, "PEERS_RESULTS": str(folder)}, check=True,
        stdout=subprocess.PIPE, text=True,
    ).stdout  # fmt: skip
    rows = [json.loads(line) for line in told.splitlines() if line.startswith("{")]
    well = [row for row in rows if row["outcome"] == "recovered"]
    regained = [row["regained_s"] for row in well if row["regained_s"] is not None]
    return {
        "kills": len(rows),
        "recovered": len(well),
        "first_new_step": spread([row["first_new_step_s"] for row in well]),
        "regained": spread(regained),
        "steps_lost": statistics.median(row["steps_lost"] for row in well) if well else None,
    }


# -- cost ------------------------------------------------------------------------------------------------------------


def cost(asked: argparse.Namespace, folder: Path) -> dict[str, Any]:
    arguments = ["--rows", str(asked.rows), "--sleep-s", str(asked.sleep_s), "--turn", str(asked.turn)]
    elastic, plain = folder / "elastic", folder / "plain"
    ways = ["--strategy", asked.strategy]
    with (
        job(elastic, asked.workers, ["--elastic", *ways], arguments) as first,
        job(plain, asked.workers, ways, arguments) as second,
    ):
        turns = {"elastic": Turns(elastic, first), "plain": Turns(plain, second)}
        for each in turns.values():
            each.first()
        parts = [lambda name=name: {name: turns[name].take()} for name in turns]
        rounds = in_turns(parts, asked.rounds)
    return {
        "plain_s": spread_of(rounds, lambda figures: figures["plain"]),
        "elastic_s": spread_of(rounds, lambda figures: figures["elastic"]),
        "ratio": spread_of(rounds, lambda figures: figures["elastic"] / figures["plain"]),
        "difference_s": spread_of(rounds, lambda figures: figures["elastic"] - figures["plain"]),
        "rounds": len(rounds),
        "disturbed": sum(each.disturbed for each in rounds),
    }


class Turns:
    """A job that trains when it is told to, some steps at a time."""

    def __init__(self, folder: Path, process: subprocess.Popen[bytes]) -> None:
        self._folder, self._process, self._turn = folder, process, 0

    def first(self) -> None:
        """The turn that every job takes by itself when it has started."""
        self._finished()

    def take(self) -> float:
        (self._folder / f"turn-{self._turn}").touch()
        return self._finished()

    def _finished(self) -> float:
        self._turn += 1
        took = self._folder / f"took-{self._turn}"
        deadline = time.monotonic() + PATIENCE_S
        while not took.exists():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"turn {self._turn} did not end:\n{(self._folder / 'log').read_text()[-2000:]}")
            time.sleep(LOOK_EVERY_S)
        return float(took.read_text())


# -- told ------------------------------------------------------------------------------------------------------------


def spread(values: list[float]) -> dict[str, Any]:
    if not values:
        return {"times": 0}
    told = Spread.of(values)
    return {
        "times": len(values), "median": told.median, "lower": told.lower_quartile, "upper": told.upper_quartile,
        "most": told.most,
    }  # fmt: skip


def show_recovery(result: dict[str, Any], out: Console) -> None:
    table = Table("lost", "times", "until", "median, s", "quartiles, s", "most, s", box=None)
    ours = result["paceline"]
    rows = [(f"paceline, {kind}", "the next committed step", found) for kind, found in ours["times"].items()]
    if peer := result.get("peer"):
        rows += [
            ("torchrun, kill", "the first step of new workers", peer["first_new_step"]),
            ("torchrun, kill", "the lost steps are done again", peer["regained"]),
        ]
    for name, until, found in rows:
        if found["times"]:
            numbers = f"{found['median']:.3f}", f"{found['lower']:.3f}–{found['upper']:.3f}", f"{found['most']:.3f}"
            table.add_row(name, str(found["times"]), until, *numbers)
    out.print(f"{ours['step_s'] * 1e3:.0f} ms from commit to commit undisturbed; stops are seen after "
              f"{HEARTBEAT_TIMEOUT_S:g} s without a heartbeat")  # fmt: skip
    out.print(table)


def show_cost(result: dict[str, Any], out: Console) -> None:
    ratio, difference = result["ratio"], result["difference_s"]
    plain, elastic = (1e3 * result[name]["median"] for name in ("plain_s", "elastic_s"))
    out.print(
        f"step: {plain:.2f} ms plain, {elastic:.2f} ms elastic; "
        f"ratio {ratio['median']:.4f} (quartiles {ratio['lower_quartile']:.4f}–{ratio['upper_quartile']:.4f}), "
        f"difference {difference['median'] * 1e3:.2f} ms "
        f"(quartiles {difference['lower_quartile'] * 1e3:.2f}–{difference['upper_quartile'] * 1e3:.2f}), "
        f"{result['rounds']} rounds, {result['disturbed']} of them disturbed",
        soft_wrap=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    for name, sleep_s, workers in (("recovery", 0.02, 4), ("cost", 0.0, 2), ("train", 0.0, 0)):
        verb = verbs.add_parser(name)
        verb.add_argument("--rows", type=int, default={"cost": 64}.get(name, 4), help="of a lane's micro-batch")
        verb.add_argument("--sleep-s", type=float, default=sleep_s, help="in every step, beside its work")
        verb.add_argument("--workers", type=int, default=workers)
        verb.add_argument("--json", type=Path)
        if name == "recovery":
            verb.add_argument("--kills", type=int, default=25)
            verb.add_argument("--stops", type=int, default=5)
            verb.add_argument("--seed", type=int, default=0)
            verb.add_argument("--peer", type=Path, help="a program that kills workers of torchrun")
            verb.add_argument("--peer-kills", type=int, default=5)
        if name == "cost":
            verb.add_argument("--rounds", type=int, default=21)
            verb.add_argument("--strategy", default="ddp")
        verb.add_argument("--turn", type=int, default=20 if name == "cost" else 0, help="steps of a turn")
        verb.add_argument("--folder", type=Path)
    asked = parser.parse_args()
    if asked.verb == "train":
        train(asked)
        return
    out = Console(highlight=False, markup=False)
    with tempfile.TemporaryDirectory(prefix="faults-") as name:
        if asked.verb == "recovery":
            result = {"paceline": recovery(asked, Path(name))}
            if asked.peer is not None:
                result["peer"] = by_peer(asked.peer, asked.peer_kills, Path(name))
            show_recovery(result, out)
        else:
            result = cost(asked, Path(name))
            show_cost(result, out)
    if asked.json is not None:
        asked.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
