"""gpt10m on 4 hosts behind slow cables: steps/s, bytes and loss of every way to send less, and of torch's own.

    sudo python benchmarks/slow_network.py --json slow_network.json --png slow_network.png

Each host is a network namespace with one worker and a cable of 100 Mbit/s, then of 1 Gbit/s (shaped_links.py). What is
learned is the source of Python's standard library, byte by byte, one sequence of 128 per worker and step.

    curve       every way trains --steps steps at 1 Gbit/s; held-out loss as it goes. By the promise of equal bits this
                is its curve at any speed (for torch's DDP likewise, where the network changes no sum)
    pace        rounds in which all ways take turns, in another order each, at each speed: steps/s of whole windows
    equal time  the loss of the curve at the step that the way's pace has reached when `none` has made --reach steps

Evaluations are not in the time. Processes on one machine share its cores: at 1 Gbit/s most of a step is computing.
It needs root, `ip` and `tc`; what it makes is removed on every way out but SIGKILL.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from shaped_links import address, interface_bytes, network, undisturbed, why_not

HOSTS, PORT, TIMEOUT_S = 4, 29750, 300.0
SEQUENCE, LEARNING_RATE, WARMUP_STEPS, CLIP = 128, 1e-3, 10, 1.0
HELD_OUT = 32  # sequences
SPEEDS = (100, 1000)
WAYS = {
    "none": 1, "bf16": 1, "int8": 1, "topk 1 %": 1, "powersgd rank 4": 1, "sign": 1, "local_sgd H=8": 8,
    "diloco H=50": 50, "torch DDP fp16_compress": 1, "torch DDP PowerSGD rank 4": 1,
}  # fmt: skip
"""And how many steps a window has."""
COLOURS = (
    "black",
    "tab:brown",
    "tab:blue",
    "tab:green",
    "tab:orange",
    "tab:red",
    "tab:purple",
    "tab:pink",
    "grey",
    "tan",
)


def texts(seed: int) -> tuple[Any, Any]:
    """Training sequences in the order of samples, and the held-out ones: (count, SEQUENCE + 1) bytes each."""
    import torch

    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(path for path in root.glob("*.py"))
    held, trained = files[::20], [path for number, path in enumerate(files) if number % 20]
    found = []
    for paths in (trained, held):
        whole = torch.frombuffer(bytearray(b"\0".join(path.read_bytes() for path in paths)), dtype=torch.uint8).long()
        found.append(whole[: len(whole) // (SEQUENCE + 1) * (SEQUENCE + 1)].view(-1, SEQUENCE + 1))
    order = torch.randperm(len(found[0]), generator=torch.Generator().manual_seed(seed))
    return found[0][order], found[1][:: len(found[1]) // HELD_OUT][:HELD_OUT]


def rate(step: int) -> float:
    return min(1.0, (step + 1) / WARMUP_STEPS)


# -- one host ----------------------------------------------------------------------------------------------------------


class Clock:
    """Seconds, and bytes that the interface has sent, without what happens while it stands."""

    def __init__(self) -> None:
        self.seconds, self._since, self._bytes, self.sent = 0.0, 0.0, 0, 0

    def go(self) -> None:
        self._since, self._bytes = time.perf_counter(), interface_bytes()[1]

    def begin_again(self) -> None:
        self.seconds, self.sent = 0.0, 0
        self.go()

    def stand(self) -> None:
        self.seconds += time.perf_counter() - self._since
        self.sent += interface_bytes()[1] - self._bytes


def engine_of(way: str, rank: int) -> Any:
    import paceline
    from paceline.compression import PowerSgd, TopK
    from paceline.strategies.local.diloco import DilocoConfig
    from paceline.strategies.local.local_sgd import LocalSgdConfig
    from paceline.world.world import TcpRendezvous, World

    where = TcpRendezvous(address(0), PORT)
    world = World(rank, HOSTS, host_rank=rank, hosts=HOSTS, rendezvous=where, host_address=address(rank))
    compressions: dict[str, Any] = {
        "bf16": "bf16", "int8": "int8", "sign": "sign",
        "topk 1 %": TopK(share=0.01), "powersgd rank 4": PowerSgd(rank=4),
    }  # fmt: skip
    strategies: dict[str, Any] = {"local_sgd H=8": LocalSgdConfig(every=8), "diloco H=50": DilocoConfig(every=50)}
    return paceline.Engine(
        world=world, lanes=HOSTS, backend="gloo", threads=1, timeout_s=TIMEOUT_S,
        strategy=strategies.get(way, "ddp"), compression=compressions.get(way),
    )  # fmt: skip


def train_engine(way: str, rank: int, steps: int, skip: int, marks: Sequence[int]) -> dict[str, Any]:
    import torch
    import torch.nn.functional as F
    from torch.utils.data import DataLoader, TensorDataset

    from paceline.bench.workloads import WORKLOADS

    trained, held_out = texts(0)
    clock, curve = Clock(), {}
    with engine_of(way, rank) as engine:
        model = WORKLOADS["gpt10m"].build()
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
        loader = DataLoader(TensorDataset(trained[: steps * HOSTS]), batch_size=1)
        model, optimizer, scheduler, loader = engine.prepare(model, optimizer, scheduler, loader)
        judged = engine.prepare(DataLoader(TensorDataset(held_out), batch_size=HELD_OUT // HOSTS))

        def evaluate() -> float:
            losses = []
            with torch.no_grad():
                for (text,) in judged:
                    each = F.cross_entropy(model(text[:, :-1]).transpose(1, 2), text[:, 1:], reduction="none")
                    losses.append(engine.gather_for_metrics(each.double().mean(1)))
            return float(torch.cat(losses).mean())

        clock.go()
        for (text,) in loader:
            engine.backward(F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten()))
            engine.clip_grad_norm_(CLIP)
            optimizer.step()
            scheduler.step()
            if engine.step == skip:
                engine.barrier()
                clock.begin_again()
            if engine.step in marks:
                clock.stand()
                curve[engine.step] = evaluate()
                engine.barrier()
                clock.go()
        clock.stand()
    return {"seconds": clock.seconds, "sent": clock.sent, "steps": steps - skip, "curve": curve}


def train_torch(way: str, rank: int, steps: int, skip: int, marks: Sequence[int]) -> dict[str, Any]:
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
    from torch.nn.parallel import DistributedDataParallel

    from paceline.bench.workloads import WORKLOADS

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://{address(0)}:{PORT}", rank=rank, world_size=HOSTS)
    trained, held_out = texts(0)
    clock, curve = Clock(), {}
    # In one bucket: over gloo the hook of PowerSGD starts the sums of several in an order that ranks do not share.
    model = DistributedDataParallel(WORKLOADS["gpt10m"].build(), bucket_cap_mb=1000 if "PowerSGD" in way else None)
    if way.endswith("fp16_compress"):
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    if "PowerSGD" in way:
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    part = held_out[rank::HOSTS]
    clock.go()
    for step in range(steps):
        if step == skip:
            dist.barrier()
            clock.begin_again()
        text = trained[step * HOSTS + rank].unsqueeze(0)
        optimizer.zero_grad()
        F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        scheduler.step()
        if step + 1 in marks:
            clock.stand()
            with torch.no_grad():
                loss = F.cross_entropy(model.module(part[:, :-1]).flatten(0, 1), part[:, 1:].flatten()).double()
            dist.all_reduce(loss)
            curve[step + 1] = float(loss) / HOSTS
            dist.barrier()
            clock.go()
    clock.stand()
    dist.barrier()
    dist.destroy_process_group()
    return {"seconds": clock.seconds, "sent": clock.sent, "steps": steps - skip, "curve": curve}


def worker(way: str, rank: str, steps: str, skip: str, marks: str, file: str) -> None:
    train = train_torch if way.startswith("torch") else train_engine
    found = train(way, int(rank), int(steps), int(skip), json.loads(marks))
    Path(f"{file}.{rank}").write_text(json.dumps(found))


# -- all of them -------------------------------------------------------------------------------------------------------


def run(names: Sequence[str], way: str, steps: int, skip: int, marks: Sequence[int] = ()) -> dict[str, Any]:
    """One training on all hosts: the slowest one's seconds, the busiest one's bytes."""
    with tempfile.TemporaryDirectory(prefix="paceline-slow-") as folder:
        words = [str(steps), str(skip), json.dumps(list(marks)), f"{folder}/found"]
        quiet = os.environ | {"TORCH_CPP_LOG_LEVEL": "ERROR", "GLOO_SOCKET_IFNAME": "eth0"}
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank, name in enumerate(names):
                command = ["ip", "netns", "exec", name, sys.executable, __file__, "--worker", way, str(rank), *words]
                processes.append(
                    subprocess.Popen(command, start_new_session=True, env=quiet, stdout=subprocess.DEVNULL)
                )
            while any(process.poll() is None for process in processes):
                time.sleep(0.05)
                if any(process.poll() for process in processes):
                    sys.exit(f"slow_network: {way}: the process of a host failed; see above")
        finally:
            with undisturbed():
                for process in processes:
                    process.kill()
                for process in processes:
                    process.wait()
        found = [json.loads(Path(f"{folder}/found.{rank}").read_text()) for rank in range(len(names))]
    return {
        "steps_per_s": found[0]["steps"] / max(one["seconds"] for one in found),
        "sent_per_step": max(one["sent"] for one in found) / found[0]["steps"],
        "curve": {int(step): loss for step, loss in found[0]["curve"].items()},
    }


def measure(args: argparse.Namespace) -> dict[str, Any]:
    result: dict[str, Any] = {
        "date": date.today().isoformat(), "torch": version("torch"),
        "steps": args.steps, "reach": args.reach, "cores": os.cpu_count(), "curves": {}, "rounds": {}
    }  # fmt: skip
    marks = list(range(10, args.steps + 1, 10))

    def keep() -> None:
        if args.json is not None:
            args.json.write_text(json.dumps(result, indent=1) + "\n")

    for mbit in sorted(args.mbit, reverse=True):
        with network(HOSTS, mbit) as names:
            if not result["curves"]:
                for way in args.ways:
                    result["curves"][way] = run(names, way, args.steps, 2, marks)["curve"]
                    print(f"curve: {way}: {result['curves'][way][args.steps]:.3f}", flush=True)
                    keep()
            rounds: list[dict[str, Any]] = []
            result["rounds"][str(mbit)] = rounds
            for number in range(args.rounds):
                ways = args.ways[number * 4 % len(args.ways) :] + args.ways[: number * 4 % len(args.ways)]
                rounds.append({})
                for way in ways:
                    window = WAYS[way]
                    skip = max(2, window % 50)  # until all connections are open; of 50 steps that is little
                    skip = 0 if window == 50 else skip
                    one = run(names, way, skip + window * max(1, args.pace // window), skip)
                    rounds[-1][way] = {key: one[key] for key in ("steps_per_s", "sent_per_step")}
                    print(f"{mbit} Mbit/s, round {number}: {way}: {one['steps_per_s']:.2f} steps/s", flush=True)
                    keep()
    return result


# -- what it shows -----------------------------------------------------------------------------------------------------


def loss_at(curve: dict[Any, float], step: float) -> float | None:
    """Between two marks in a line; None beyond the last."""
    points = sorted((int(at), loss) for at, loss in curve.items())
    for (left, low), (right, high) in itertools.pairwise(points):
        if left <= step <= right:
            return low + (high - low) * (step - left) / (right - left)
    return None


def rows(result: dict[str, Any], mbit: str) -> list[dict[str, Any]]:
    rounds, found = result["rounds"][mbit], []
    pace = {way: [one[way]["steps_per_s"] for one in rounds] for way in rounds[0]}
    seconds = result["reach"] / statistics.median(pace["none"])
    for way, speeds in pace.items():
        median = statistics.median(speeds)
        curve = result["curves"][way]
        found.append(
            {
                "way": way, "median": median, "least": min(speeds), "most": max(speeds), "seconds": seconds,
                "sent": statistics.median(one[way]["sent_per_step"] for one in rounds),
                "samples": loss_at(curve, result["steps"]), "time": loss_at(curve, median * seconds),
                "reached": median * seconds,
            }
        )  # fmt: skip
    return found


def show(result: dict[str, Any]) -> None:
    for mbit in result["rounds"]:
        table = rows(result, mbit)
        print(
            f"\n{mbit} Mbit/s; equal time: {table[0]['seconds']:.0f} s, in which none makes {result['reach']} steps\n"
        )
        print(
            f"| | steps/s | least – most | MB sent per step | loss after {result['steps']} steps | after equal time |"
        )
        print("|---|---|---|---|---|---|")
        for row in table:
            last = result["curves"][row["way"]]
            late = f"< {loss_at(last, result['steps']):.3f}" if row["time"] is None else f"{row['time']:.3f}"
            print(
                f"| {row['way']} | {row['median']:.2f} | {row['least']:.2f} – {row['most']:.2f} | "
                f"{row['sent'] / 1e6:.2f} | {row['samples']:.3f} | {late} (step {row['reached']:.0f}) |"
            )


def plot(result: dict[str, Any], file: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.4), layout="constrained")
    axes: Any = figure.subplots(1, 1 + len(result["rounds"]), sharey=True)
    for way, colour in zip(result["curves"], COLOURS, strict=False):
        curve = sorted((int(step), loss) for step, loss in result["curves"][way].items())
        style = "--" if way.startswith("torch") else "-"
        axes[0].plot(*zip(*curve, strict=True), color=colour, linestyle=style, label=way)
        for panel, mbit in zip(axes[1:], result["rounds"], strict=True):
            pace = statistics.median(one[way]["steps_per_s"] for one in result["rounds"][mbit])
            panel.plot([step / pace for step, _ in curve], [loss for _, loss in curve], style, color=colour)
    axes[0].set(xlabel="steps (equal samples)", ylabel="held-out loss")
    axes[0].legend(frameon=False, fontsize=7)
    for panel, mbit in zip(axes[1:], result["rounds"], strict=True):
        panel.set(xlabel=f"seconds at {mbit} Mbit/s", xscale="log")
    for panel in axes:
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    figure.suptitle("gpt10m on 4 hosts behind slow cables")
    figure.savefig(file, dpi=150)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ways", nargs="*", default=list(WAYS))
    parser.add_argument("--steps", type=int, default=60, help="of the curves")
    parser.add_argument("--pace", type=int, default=6, help="steps of a round")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--reach", type=int, default=10, help="steps of `none` in the equal time")
    parser.add_argument("--mbit", type=int, nargs="+", default=SPEEDS)
    parser.add_argument("--json", type=Path, help="write every number there")
    parser.add_argument("--png", type=Path, help="draw there (matplotlib)")
    parser.add_argument("--show", type=Path, help="measure nothing; tell of the numbers in this file")
    args = parser.parse_args(argv)
    if args.show is None and (missing := why_not()):
        sys.exit(f"slow_network: {missing}")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # what was made is removed
    result = json.loads(args.show.read_text()) if args.show is not None else measure(args)
    show(result)
    if args.png is not None:
        plot(result, args.png)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(*sys.argv[2:])
    else:
        main()
