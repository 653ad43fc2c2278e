"""A terminal as it looked: a worker of an elastic job is killed, and the weights are those of one worker left in peace.

    python benchmarks/terminal.py --text benchmarks/results/terminal.txt      about a minute: runs both jobs

figures.py draws the text. `$ ` begins what was typed, `# ` what was done in another terminal.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

EXAMPLE = Path(__file__).parents[1] / "examples" / "train_gpt.py"
STEPS, KILL_AFTER = 40, 10
PATIENCE_S = 300.0


def run(flags: str, folder: Path, kill: bool) -> list[str]:
    """What the job said. With `kill` the newest of its processes, a worker, gets SIGKILL after some steps."""
    words = [sys.executable, "-m", "paceline", "run", *flags.split(), str(EXAMPLE), "--steps", str(STEPS)]
    log, deadline = folder / "log", time.monotonic() + PATIENCE_S
    with log.open("wb") as out:
        job = subprocess.Popen([*words, "--run-dir", str(folder)], stdout=out, stderr=subprocess.STDOUT)
    try:
        while job.poll() is None:
            if time.monotonic() > deadline:
                raise SystemExit(f"terminal: the job did not end\n{log.read_text()[-2000:]}")
            metrics = folder / "metrics.jsonl"
            if kill and metrics.exists() and len(metrics.read_text().splitlines()) >= KILL_AFTER:
                newest = max(
                    psutil.Process(job.pid).children(recursive=True), key=lambda each: (each.create_time(), each.pid)
                )
                os.kill(newest.pid, signal.SIGKILL)
                kill = False
            time.sleep(0.02)
    finally:
        if job.poll() is None:
            job.terminate()
            job.wait(30)
    said = log.read_text().splitlines()
    if job.returncode != 0 or kill:
        raise SystemExit("\n".join(["terminal: the job failed or no worker was killed", *said[-30:]]))
    return said


def shown(said: list[str], progress: bool) -> list[str]:
    """The launcher's own lines and the hash; without `progress` only the last of its steps."""
    steps = [line for line in said if line.startswith("paceline: step")]
    left_out = set() if progress else set(steps[:-1])
    lines = [line for line in said if line.startswith(("paceline: worker", "paceline: step", "[0] weights", "weights"))]
    return [line for line in lines if line not in left_out]


def record() -> str:
    lines: list[str] = []
    for flags, kill in (("--workers 4 --lanes 4 --elastic", True), ("--workers 1 --lanes 4", False)):
        with tempfile.TemporaryDirectory(prefix="paceline-terminal-") as folder:
            said = shown(run(flags, Path(folder), kill), progress=kill)
        lines.append(f"$ paceline run {flags} examples/train_gpt.py --steps {STEPS}")
        if kill:
            place = next(number for number, line in enumerate(said) if "was killed" in line)
            said.insert(place, f"# in another terminal: kill -9 one of the {flags.split()[1]} workers")
        lines += said
    hashes = {line.split()[-1] for line in lines if "sha256:" in line}
    if len(hashes) != 1:
        raise SystemExit(f"terminal: the hashes differ: {hashes}")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True, help="write it there")
    parser.parse_args().text.write_text(record())


if __name__ == "__main__":
    main()
