#!/usr/bin/env python3
"""Is the cause of lateness named? Four workers on four shaped hosts, a cause put into one of them, the verdict read.

    sudo python benchmarks/straggler_verdicts.py [--rounds 20] [--causes nothing,data,forward,link,rare] [--json FILE]

    nothing   no worker is to be named
    data      30 ms in the dataset of worker 1
    forward   30 ms in the forward of worker 2
    link      the uplink of worker 3 has 40 of 1,000 Mbit/s (`tc tbf` in its network namespace)
    rare      200 ms in the backward of worker 1, in one of ten steps

One process per host trains once per cause and round, over gloo, and the events of each run are read when it has ended.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shaped_links import BURST, QUEUE, address, network, undisturbed, why_not

WORKERS, PORT, MBIT, SLOW_MBIT = 4, 29650, 1000, 40
STEPS = {"nothing": 60, "data": 40, "forward": 40, "link": 40, "rare": 240}
RIGHT: dict[str, tuple[int, str] | None] = {
    "nothing": None,
    "data": (1, "data"),
    "forward": (2, "forward"),
    "link": (3, "link"),
    "rare": (1, "backward now and then"),
}


# -- one host ----------------------------------------------------------------------------------------------------------


def work(rank: int, rounds: int, causes: Sequence[str], folder: Path) -> None:
    import torch

    torch.set_num_threads(1)
    for number in range(rounds):
        for place, cause in enumerate(causes):
            if rank == 3 and cause == "link":
                set_rate(SLOW_MBIT)
            train(rank, cause, number, PORT + number * len(causes) + place, folder)
            if rank == 3 and cause == "link":
                set_rate(MBIT)


def set_rate(mbit: int) -> None:
    shape = ("tbf", "rate", f"{mbit}mbit", "burst", BURST, "limit", QUEUE)
    subprocess.run(["tc", "qdisc", "replace", "dev", "eth0", "root", *shape], check=True, timeout=10)


def train(rank: int, cause: str, number: int, port: int, folder: Path) -> None:
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, Dataset

    import paceline
    from paceline.world.world import TcpRendezvous, World

    def sleep(at: str, slow: int) -> None:
        if cause == at and rank == slow:
            time.sleep(0.03)

    class Points(Dataset[Any]):
        def __len__(self) -> int:
            return 4 * WORKERS * STEPS[cause]

        def __getitem__(self, index: int) -> Any:
            if index % 4 == 0:  # of a batch of 4
                sleep("data", 1)
            return torch.full((256,), index % 97 / 97), torch.tensor([index % 3 / 3])

    meeting = TcpRendezvous(address(0), port)
    world = World(rank, WORKERS, host_rank=rank, hosts=WORKERS, rendezvous=meeting, host_address=address(rank))
    with paceline.Engine(world=world, backend="gloo", seed=1, timeout_s=120) as engine:
        wide = [layer for _ in range(8) for layer in (nn.Linear(256, 256), nn.Tanh())]
        model: Any = nn.Sequential(*wide, nn.Linear(256, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, loader = engine.prepare(model, optimizer, DataLoader(Points(), batch_size=4))
        engine.record_events(folder / f"{cause}.{number}")
        for points, labels in loader:
            loss = (model(points) - labels).square().mean()
            sleep("forward", 2)
            if cause == "rare" and rank == 1 and engine.step % 10 == number % 10:
                loss.register_hook(lambda _: time.sleep(0.2))
            engine.backward(loss)
            optimizer.step()
            optimizer.zero_grad()


# -- all of them -------------------------------------------------------------------------------------------------------


def measure(rounds: int, causes: Sequence[str]) -> list[dict[str, Any]]:
    with network(WORKERS, MBIT) as names, tempfile.TemporaryDirectory(prefix="paceline-verdicts-") as folder:
        quiet = os.environ | {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # c10d warns that the hosts have no names
        processes = []
        try:
            for rank, name in enumerate(names):
                given = [
                    "--worker",
                    str(rank),
                    "--folder",
                    folder,
                    "--rounds",
                    str(rounds),
                    "--causes",
                    ",".join(causes),
                ]
                command = ["ip", "netns", "exec", name, sys.executable, __file__, *given]
                processes.append(subprocess.Popen(command, start_new_session=True, env=quiet))
            while any(process.poll() is None for process in processes):
                time.sleep(0.1)
                for rank, process in enumerate(processes):
                    if process.poll():
                        sys.exit(f"straggler_verdicts: worker {rank} ended with {process.returncode}; see above")
        finally:
            with undisturbed():
                for process in processes:
                    process.kill()
                for process in processes:
                    process.wait()

        return [judged(Path(folder), cause, number) for number in range(rounds) for cause in causes]


def judged(folder: Path, cause: str, number: int) -> dict[str, Any]:
    from paceline.monitor.attribution import join, straggler
    from paceline.monitor.run_events import read_run

    found = straggler(join(read_run(folder / f"{cause}.{number}")))
    verdict = None
    if found is not None:
        how = "link" if found.by_link else found.part.name.lower()
        verdict = (found.worker, how if found.times is None else f"{how} now and then")
    return {"cause": cause, "round": number, "right": verdict == RIGHT[cause], "verdict": str(found or "none")}


def main() -> None:
    arguments = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    arguments.add_argument("--rounds", type=int, default=20)
    arguments.add_argument("--causes", default=",".join(RIGHT))
    arguments.add_argument("--json", type=Path)
    arguments.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    arguments.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = arguments.parse_args()
    causes = given.causes.split(",")
    if unknown := [cause for cause in causes if cause not in RIGHT]:
        sys.exit(f"--causes {','.join(unknown)}: choose from {', '.join(RIGHT)}")
    if given.worker is not None:
        work(given.worker, given.rounds, causes, given.folder)
        return
    if why := why_not():
        sys.exit(f"straggler_verdicts: {why}")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # namespaces go on every way out
    found = measure(given.rounds, causes)
    for cause in causes:
        own = [one for one in found if one["cause"] == cause]
        print(f"{cause:8}  {sum(one['right'] for one in own)} of {len(own)} right")
        for one in own:
            if not one["right"]:
                print(f"          round {one['round']}: {one['verdict']}")
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=1) + "\n")
    sys.exit(not all(one["right"] for one in found))


if __name__ == "__main__":
    main()
