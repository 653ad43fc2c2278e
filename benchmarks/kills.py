"""Training through three `kill -9`: paceline's elastic job beside torchrun's restart from its last checkpoint.

    python benchmarks/kills.py --json benchmarks/results/kills.json      about seven minutes; one run of each

Four workers train the small GPT of drift.py, 12 windows a step, for 400 steps. 15, 45 and 75 s after the first step a
worker gets SIGKILL (rank 1, then 2, then 3). Each window is computed and then waited for, PAUSE_S, in place of a device
of the worker's own: four workers that only compute would fight for two cores, and a lost one would cost nothing.
torchrun has a checkpoint every 50 steps, and the setting without which most of its restarts over gloo failed.
What is kept is when each worker finished which step: speed, lost steps and the pause around a kill follow from that.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from drift import CONTEXT, LEARNING_RATE, WINDOWS, TinyGPT, loss_of, windows_of_text

WORKERS = 4
STEPS = 400
KILLS_S = (15.0, 45.0, 75.0)
PAUSE_S = 0.050
CHECKPOINT_EVERY = 50
PATIENCE_S = 400.0
SIDES = ("paceline", "torchrun")


class StepTimes:
    """One line per finished step: when, which, by which rank and process."""

    def __init__(self, folder: Path) -> None:
        self._file = (folder / f"steps-{os.getpid()}").open("a", buffering=1)

    def add(self, step: int, rank: int) -> None:
        self._file.write(f"{time.time()!r} {step} {rank} {os.getpid()}\n")


def train_ours(folder: Path, steps: int) -> None:
    import paceline

    with paceline.Engine(lanes=WORKERS, seed=0, threads=1) as engine:
        text = windows_of_text(steps * WINDOWS)
        loader = torch.utils.data.DataLoader(text, batch_size=WINDOWS // WORKERS)  # type: ignore[arg-type]
        model = TinyGPT()
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
        model, optimizer, loader = engine.prepare(model, optimizer, loader)
        done = StepTimes(folder)
        for windows in loader:
            engine.backward(loss_of(model, windows))
            time.sleep(PAUSE_S * len(windows))
            optimizer.step()
            optimizer.zero_grad()
            if engine.stepped:
                done.add(engine.step, engine.world.rank)
        engine.print("weights", engine.weights_hash())


def train_torch(folder: Path, steps: int) -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    checkpoint, done = folder / "checkpoint.pt", StepTimes(folder)
    torch.distributed.init_process_group("gloo")
    torch.manual_seed(0)
    model = TinyGPT()
    replica = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    step = 0
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
    batches = windows_of_text(steps * WINDOWS).split(WINDOWS)
    while step < steps:
        windows = batches[step].chunk(size)[rank]
        loss_of(replica, windows).backward()
        time.sleep(PAUSE_S * len(windows))
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        done.add(step, rank)
        if rank == 0 and step % CHECKPOINT_EVERY == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(state, checkpoint.with_suffix(".part"))
            os.replace(checkpoint.with_suffix(".part"), checkpoint)
    torch.distributed.destroy_process_group()


# -- the runs ----------------------------------------------------------------------------------------------------------


def finished(folder: Path) -> list[tuple[float, int, int, int]]:
    """(when, step, rank, process) of every finished step so far, in the order of time."""
    lines = [line for file in folder.glob("steps-*") for line in file.read_text().splitlines(keepends=True)]
    whole = (line.split() for line in lines if line.endswith("\n"))
    return sorted((float(when), int(step), int(rank), int(process)) for when, step, rank, process in whole)


def launcher(side: str) -> list[str]:
    if side == "paceline":
        return ["-m", "paceline", "run", "--elastic", "--workers", str(WORKERS), "--lanes", str(WORKERS)]
    return ["-m", "torch.distributed.run", "--standalone", "--max-restarts", "3", "--nproc-per-node", str(WORKERS)]


def run(side: str, kills_s: tuple[float, ...], folder: Path, steps: int) -> dict[str, Any]:
    """A job from start to end, with its kills; times are seconds since its first finished step."""
    words = [
        sys.executable,
        *launcher(side),
        __file__,
        "--worker",
        side,
        "--folder",
        str(folder),
        "--steps",
        str(steps),
    ]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    deadline, killed = time.monotonic() + PATIENCE_S, []
    with (folder / "log").open("wb") as log:
        job = subprocess.Popen(words, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
    try:
        while job.poll() is None:
            if time.monotonic() > deadline:
                raise SystemExit(f"kills: {side} did not end\n{(folder / 'log').read_text()[-3000:]}")
            if len(killed) < len(kills_s) and (rows := finished(folder)):
                due, victim = rows[0][0] + kills_s[len(killed)], len(killed) + 1
                if time.time() >= due:
                    process = [row[3] for row in rows if row[2] == victim][-1]
                    with suppress(ProcessLookupError):  # torchrun is just restarting its workers: the next look kills
                        os.kill(process, signal.SIGKILL)
                        killed.append(time.time())
            time.sleep(0.02)
    finally:
        if job.poll() is None:
            job.terminate()
            job.wait(30)
    said = (folder / "log").read_text(errors="replace")
    if job.returncode != 0 or len(killed) != len(kills_s):
        raise SystemExit(f"kills: {side} ended with {job.returncode} after {len(killed)} kills\n{said[-3000:]}")
    rows = finished(folder)
    start = rows[0][0]
    first = {}  # of a step that ranks finish at slightly different times, the first; done again, it is another one
    for when, step, rank, process in rows:
        if side == "paceline" or rank == 0:
            first.setdefault((step, None if side == "paceline" else process), when - start)
    found = re.findall(r"sha256:[0-9a-f]{64}", said)
    return {
        "kills_s": [round(when - start, 3) for when in killed],
        "steps": [[round(when, 3), step] for (step, _), when in sorted(first.items(), key=lambda item: item[1])],
        "weights": found[-1] if found else None,
    }


def measure(steps: int) -> dict[str, Any]:
    runs: dict[str, Any] = {}
    for name, side, kills_s in (
        ("paceline", "paceline", KILLS_S),
        ("torchrun", "torchrun", KILLS_S),
        ("undisturbed", "paceline", ()),
    ):
        with tempfile.TemporaryDirectory(prefix="paceline-kills-") as folder:
            runs[name] = run(side, kills_s, Path(folder), steps)
        print(f"{name}: {len(runs[name]['steps'])} steps done, {runs[name]['steps'][-1][0]:.1f} s", flush=True)
    if runs["paceline"]["weights"] != runs.pop("undisturbed")["weights"]:
        raise SystemExit("kills: the weights differ from those of a run that was not disturbed")
    return {
        "about": "benchmarks/kills.py: [seconds since the first step, step] of every finished step; one run of each. "
        "Without kills paceline ended with the same weights.",
        "torch": torch.__version__,
        "cores": os.cpu_count(),
        "workers": WORKERS,
        "tokens_per_step": WINDOWS * CONTEXT,
        "pause_s": PAUSE_S,
        "checkpoint_every": CHECKPOINT_EVERY,
        "runs": runs,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--json", type=Path, help="write every number there")
    parser.add_argument("--worker", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.worker is not None:
        torch.set_num_threads(1)
        {"torchrun": train_torch, "paceline": train_ours}[asked.worker](asked.folder, asked.steps)
        return
    result = measure(asked.steps)
    if asked.json is not None:
        asked.json.write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
