"""Start-up: from the command to the first finished step, of the same script under `paceline run` and under torchrun.

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

from paceline.bench.machine_load import DISTURBED_ABOVE, CpuClock, foreign_and_steal, is_disturbed, machine_facts
from paceline.bench.statistics import Spread, paired_ratios
from paceline.errors import ConfigError, LaunchError
from paceline.launch.rendezvous import free_port
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
