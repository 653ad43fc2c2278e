"""What compressing costs a worker: CPU seconds of all its threads per step, beside a run that compresses nothing.

    paceline run --workers 2 --backend gloo benchmarks/compression_cost.py [--workload mlp25m] [none int8 powersgd …]

The ways take turns, round after round. A worker's CPU time has everything: backward, the update, compressing, adding,
and what the kernel does to send bytes, of which compressed gradients have fewer. `more` is what a way takes beyond
none, in the median of rounds, as a share of the step of none; the smallest and largest of any round are beside it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import paceline
from paceline.bench.workloads import WORKLOADS, ReadyBatches, Workload, adamw

WAYS = ("none", "bf16", "int8", "sign", "topk", "powersgd")


def measure(workload: Workload, way: str, steps: int, warmup: int) -> dict[str, float]:
    """Seconds per step of this worker: of its clock, and of the CPU."""
    compression: Any = None if way == "none" else way
    with paceline.Engine(compression=compression, threads=1) as engine:
        batch = workload.batch_size
        loader = ReadyBatches(workload, (steps + warmup) * batch * engine.config.lanes).loader(batch)
        model = workload.build()
        optimizer = adamw(model)
        model, optimizer, loader = engine.prepare(model, optimizer, loader)
        clock = cpu = 0.0
        for inputs, targets in loader:
            if engine.step == warmup:
                clock, cpu = time.perf_counter(), time.process_time()
            engine.backward(workload.loss(model(inputs), targets))
            optimizer.step()
        return {
            "step_s": (time.perf_counter() - clock) / steps,
            "cpu_s": (time.process_time() - cpu) / steps,
            "sent": engine.traffic.sent_bytes,
            "rank": engine.world.rank,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ways", nargs="*", default=WAYS)
    parser.add_argument("--workload", default="mlp25m", choices=tuple(WORKLOADS))
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    workload = WORKLOADS[args.workload]
    ways = tuple(dict.fromkeys(("none", *args.ways)))
    rounds = [{way: measure(workload, way, args.steps, args.warmup) for way in ways} for _ in range(args.rounds)]
    if rounds[0]["none"]["rank"]:
        return
    print("| compression | CPU per step, ms | more than none, of its step | least – most | sent per step, MB |")
    print("|---|---|---|---|---|")
    for way in ways:
        more = sorted((one[way]["cpu_s"] - one["none"]["cpu_s"]) / one["none"]["step_s"] for one in rounds)
        cpu = statistics.median(one[way]["cpu_s"] for one in rounds)
        sent = rounds[0][way]["sent"] / 1e6
        middle = statistics.median(more)
        print(f"| {way} | {1e3 * cpu:.0f} | {middle:+.1%} | {more[0]:+.1%} – {more[-1]:+.1%} | {sent:.1f} |")
    if args.json is not None:
        args.json.write_text(json.dumps({"workload": args.workload, "rounds": rounds}, indent=2) + "\n")


if __name__ == "__main__":
    main()
