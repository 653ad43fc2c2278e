"""torch's own DDP, unmodified and under torchrun, on gloo and on our backend: samples per second, side by side.

    python benchmarks/ddp_backend.py --workers 2

    job "gloo"        ▓▓▓ ............. ▓▓▓ .............    each job lives from the first round to the last, and waits
    job "paceline"    ... ▓▓▓ ......... ... ▓▓▓ .........    for a line on a pipe where it is not its turn

The same script in every job; only the name given to `init_process_group` and the allocator differ. A script with a
group of ours keeps the memory that it frees (paceline/backend.py), so either backend is also measured as the other is.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from command_line import command, run, tell
from rich.console import Console
from turns import in_turns, rounds_as_json, spread_of

from paceline.bench.report import machine_line, table_of
from paceline.bench.statistics import machine_facts
from paceline.bench.workloads import WORKLOADS, adamw
from paceline.errors import LaunchError
from paceline.launch.rendezvous import free_port
from paceline.world.environment import KEEPING_MEMORY
from paceline.world.world import LOOPBACK

START_S = 120.0


@dataclass(frozen=True)
class Contestant:
    name: str
    backend: str
    variables: dict[str, str]


CONTESTANTS = (
    Contestant("gloo", "gloo", {}),
    Contestant("gloo, memory kept", "gloo", KEEPING_MEMORY),
    Contestant("paceline", "paceline", {}),
    Contestant("paceline, memory given back", "paceline", {"PACELINE_KEEP_MEMORY": "0"}),
)


def be_job(backend: str, workload_name: str, turns: Path, times: Path) -> None:
    """What torchrun starts: DDP as a tutorial writes it, for so many steps as each line of `turns` says."""
    torch.set_num_threads(1)
    dist.init_process_group(backend)
    rank = dist.get_rank()
    workload = WORKLOADS[workload_name]
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(workload.build())
    optimizer = adamw(model)
    inputs, targets = workload.draw(workload.batch_size, seed=rank)
    with contextlib.ExitStack() as files:
        asked = files.enter_context(turns.open()) if rank == 0 else None
        told = files.enter_context(times.open("w")) if rank == 0 else None
        while True:
            steps = torch.tensor([int((asked.readline() if asked else "") or 0)])
            dist.broadcast(steps, 0)
            if not int(steps):
                break
            began = time.perf_counter()
            for _ in range(int(steps)):
                workload.loss(model(inputs), targets).backward()
                optimizer.step()
                optimizer.zero_grad()
            dist.barrier()
            if told:
                print(time.perf_counter() - began, file=told, flush=True)
    dist.destroy_process_group()


class Job:
    """One contestant's job, between two turns."""

    def __init__(self, contestant: Contestant, workload: str, workers: int, steps: int, folder: Path) -> None:
        self._contestant, self._steps = contestant, steps
        self._samples = steps * workers * WORKLOADS[workload].batch_size
        turns, times = folder / "turns", folder / "times"
        for path in (turns, times):
            os.mkfifo(path)
        launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(workers)]
        address = ["--master-addr", LOOPBACK, "--master-port", str(free_port(LOOPBACK))]
        job = [__file__, "--be", contestant.backend, workload, str(turns), str(times)]
        self._log = (folder / "log").open("w+")
        self._process = subprocess.Popen(
            [*launcher, *address, *job],
            env=os.environ | {"OMP_NUM_THREADS": "1"} | contestant.variables,
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )
        # For reading and writing: opened for one of them alone, a pipe waits for a job that may have ended.
        self._turns, self._times = (os.open(path, os.O_RDWR) for path in (turns, times))

    def turn(self) -> dict[str, float]:
        os.write(self._turns, f"{self._steps}\n".encode())
        os.set_blocking(self._times, False)
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and self._process.poll() is None:
            with contextlib.suppress(BlockingIOError):
                return {self._contestant.name: self._samples / float(os.read(self._times, 100))}
            time.sleep(0.01)
        self._log.seek(0)
        name, said = self._contestant.name, self._log.read()
        raise LaunchError(f"the job on {name} ended or was silent for {START_S:.0f} s: {said}")

    def close(self) -> None:
        os.write(self._turns, b"0\n")
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
        for descriptor in (self._turns, self._times):
            os.close(descriptor)
        self._log.close()


@contextlib.contextmanager
def jobs_of(workload: str, workers: int, steps: int) -> Iterator[list[Job]]:
    with tempfile.TemporaryDirectory() as root, contextlib.ExitStack() as closing:
        jobs = []
        for number, contestant in enumerate(CONTESTANTS):
            folder = Path(root, str(number))
            folder.mkdir()
            jobs.append(Job(contestant, workload, workers, steps, folder))
            closing.callback(jobs[-1].close)
        yield jobs


def measure(workload: str, workers: int, rounds: int, steps: int) -> dict[str, Any]:
    tell(f"{workload} on {workers} workers, {steps} steps each in a turn, {rounds} rounds")
    with jobs_of(workload, workers, steps) as jobs:
        measured = in_turns([job.turn for job in jobs], rounds)
    ratios = {
        one.name: spread_of(measured, lambda figures, name=one.name: figures[name] / figures["gloo"])
        for one in CONTESTANTS
    }
    speeds = {one.name: spread_of(measured, lambda figures, name=one.name: figures[name]) for one in CONTESTANTS}
    facts = {"machine": machine_facts(), "workload": workload, "workers": workers, "steps": steps}
    return facts | {"to gloo": ratios, "per second": speeds} | rounds_as_json(measured)


def show(result: dict[str, Any], console: Console) -> None:
    console.print(machine_line(result["machine"]))
    table = table_of("torch's DDP on", "samples/s", "to gloo, paired", "in quiet rounds")
    for name, ratio in result["to gloo"].items():
        spread = f"{ratio['median']:.2f} ({ratio['lower_quartile']:.2f} – {ratio['upper_quartile']:.2f})"
        quiet = ratio["median_of_quiet_rounds"]
        speed = f"{result['per second'][name]['median']:.0f}"
        table.add_row(name, speed, spread, "–" if quiet is None else f"{quiet:.2f}")
    console.print(table)
    console.print(f"{result['disturbed_rounds']} of {len(result['rounds'])} rounds were disturbed by other work")


def main() -> None:
    parser = command(__doc__)
    parser.add_argument("--workload", choices=sorted(WORKLOADS), default="mlp25m")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--steps", type=int, default=8, help="of each job in a round")
    options = parser.parse_args()
    run(parser, options.json, lambda: measure(options.workload, options.workers, options.rounds, options.steps), show)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--be"]:
        backend, name, *pipes = sys.argv[2:]
        be_job(backend, name, *map(Path, pipes))
    else:
        main()
