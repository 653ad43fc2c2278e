"""Start-up: from the command to the first finished step, of the same script under `paceline run` and under torchrun.

    python benchmarks/startup.py --workers 2

    t=0  the command is started ─▶ interpreter, launcher, workers, torch, group, model ─▶ step 1 is done on every worker

The launchers take turns, and the slowest worker counts. The first turn of each fills the page cache and is dropped.
torchrun gets its default, static rendezvous on a free port.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from command_line import command, run, tell
from rich.console import Console

from paceline.bench.report import disturbance, extremes, machine_line, quartiles, table_of
from paceline.bench.statistics import (
    DISTURBED_ABOVE,
    CpuClock,
    Spread,
    foreign_and_steal,
    is_disturbed,
    machine_facts,
    paired_ratios,
)
from paceline.errors import ConfigError, LaunchError
from paceline.launch.rendezvous import free_port
from paceline.world.host_limits import check_host
from paceline.world.world import LOOPBACK

WARM_UP_TURNS = 1
TIMEOUT_S = 120.0
SCRIPT = """\
import time

import torch
from torch.utils.data import DataLoader, TensorDataset

import paceline

engine = paceline.Engine(threads=1, device="cpu")
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.AdamW(model.parameters())
samples = 4 * engine.world.size
loader = DataLoader(TensorDataset(torch.ones(samples, 8), torch.ones(samples, 1)), batch_size=4)
model, optimizer, loader = engine.prepare(model, optimizer, loader)
for inputs, targets in loader:
    engine.backward(torch.nn.functional.mse_loss(model(inputs), targets))
    optimizer.step()
    optimizer.zero_grad()
    print(f"first step finished at {time.time()}\\n", end="", flush=True)
"""
_FINISHED = re.compile(r"first step finished at (\d+\.\d+)")


@dataclass(frozen=True)
class Start:
    """One start. Seconds from the command to the first finished step, and to the launcher's end."""

    first_step_s: float
    exit_s: float
    foreign: float
    steal: float


def paceline_run(workers: int, script: Path) -> list[str]:
    return [sys.executable, "-m", "paceline.cli.main", "run", "--workers", str(workers), str(script)]


def torchrun(workers: int, script: Path) -> list[str]:
    options = ["--nproc-per-node", str(workers), "--master-addr", LOOPBACK, "--master-port", str(free_port(LOOPBACK))]
    return [sys.executable, "-m", "torch.distributed.run", *options, str(script)]


LAUNCHERS: dict[str, Callable[[int, Path], list[str]]] = {"paceline run": paceline_run, "torchrun": torchrun}


def measure_startup(workers: int, rounds: int, tell: Callable[[str], None]) -> dict[str, Any]:
    if workers < 1:
        raise ConfigError(f"--workers {workers}: a start needs at least one worker")
    check_host(workers, f"--workers {workers}")
    if rounds < 1:
        raise ConfigError(f"--rounds {rounds}: at least one round is measured")
    starts: dict[str, list[Start]] = {name: [] for name in LAUNCHERS}
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        script = Path(folder) / "first_step.py"
        script.write_text(SCRIPT)
        for number in range(WARM_UP_TURNS + rounds):
            for name in list(LAUNCHERS)[:: 1 if number % 2 == 0 else -1]:
                starts[name].append(start_once(LAUNCHERS[name](workers, script), workers))
            turn = " · ".join(f"{name} {turns[-1].first_step_s:.2f} s" for name, turns in starts.items())
            tell(f"round {number + 1}/{WARM_UP_TURNS + rounds}: {turn}")
    return summarise_starts(workers, {name: turns[WARM_UP_TURNS:] for name, turns in starts.items()}, machine_facts())


def start_once(command: Sequence[str], workers: int) -> Start:
    before, children_before, started = CpuClock.read(), _children_s(), time.time()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise LaunchError(f"`{' '.join(command[1:4])} …` had not ended after {TIMEOUT_S:.0f} s") from None
    finally:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    ended = time.time()
    foreign, steal = foreign_and_steal(before, CpuClock.read(), _children_s() - children_before)
    stamps = finished_at(output)
    if process.returncode != 0 or len(stamps) != workers:
        raise LaunchError(
            f"`{' '.join(command[1:4])} …` finished the first step on {len(stamps)} of {workers} workers and exited "
            f"with code {process.returncode}; it said: {output.strip()[-500:]}"
        )
    return Start(max(stamps) - started, ended - started, foreign, steal)


def finished_at(output: str) -> list[float]:
    return [float(stamp) for stamp in _FINISHED.findall(output)]


def summarise_starts(workers: int, starts: dict[str, list[Start]], machine: dict[str, Any]) -> dict[str, Any]:
    ours, theirs = ([start.first_step_s for start in starts[name]] for name in LAUNCHERS)
    return {
        "machine": machine,
        "workers": workers,
        "warm_up_turns": WARM_UP_TURNS,
        "disturbed_above": DISTURBED_ABOVE,
        "disturbed_starts": sum(
            is_disturbed(start.foreign, start.steal) for turns in starts.values() for start in turns
        ),
        "launchers": {
            name: {
                "first_step_s": asdict(Spread.of([start.first_step_s for start in turns])),
                "exit_s": asdict(Spread.of([start.exit_s for start in turns])),
            }
            for name, turns in starts.items()
        },
        "ratio": asdict(Spread.of(paired_ratios(ours, theirs))),
        "starts": {name: [asdict(start) for start in turns] for name, turns in starts.items()},
    }


def _children_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def show_startup(result: dict[str, Any], out: Console) -> None:
    table = table_of("launcher", "first step, s", "quartiles", "least – most", "exit, s")
    for name, times in result["launchers"].items():
        first = times["first_step_s"]
        table.add_row(
            name,
            f"{first['median']:.2f}",
            quartiles(first, 2),
            extremes(first, 2),
            f"{times['exit_s']['median']:.2f}",
        )
    out.print(f"From the command to the first finished step, {result['workers']} workers")
    out.print(table)
    ratio = result["ratio"]
    out.print(
        f"paceline run / torchrun: {ratio['median']:.3f}, quartiles {quartiles(ratio, 3)}, "
        f"least – most {extremes(ratio, 3)}"
    )
    starts = sum(len(turns) for turns in result["starts"].values())
    out.print(disturbance(result["disturbed_starts"], starts, "starts", result["disturbed_above"]))
    out.print(machine_line(result["machine"]))


def main(words: Sequence[str] | None = None) -> None:
    parser = command(__doc__)
    parser.add_argument("--workers", type=int, default=2, help="on this host, one thread each")
    parser.add_argument("--rounds", type=int, default=5, help="measured starts of each; one more comes first")
    asked = parser.parse_args(words)
    run(parser, asked.json, lambda: measure_startup(asked.workers, asked.rounds, tell), show_startup)


if __name__ == "__main__":
    main()
