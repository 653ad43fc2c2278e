"""A slow network in one machine: over links of 100 Mbit/s an all-reduce takes as long as its busiest node's bytes.

    ┌ namespace ┐                  ┌──────── namespace ────────┐                 ┌ namespace ┐
    │  host 0   │ eth0 ══ tbf ══►  │ port0    a bridge   port1 │  ◄══ tbf ══ eth0 │  host 1   │   …
    └───────────┘      ◄══ tbf ══  └───────────────────────────┘  ══ tbf ══►      └───────────┘

Each host is a network namespace with one process; each cable is shaped in both directions. Z bytes on N hosts:

    way              bytes in and out of the busiest node      time at N = 8 / time at N = 2
    star             (N-1)·Z                                   7
    unsplit ring     (N-1)·Z                                   7
    ring             2·(N-1)/N·Z                               1.75
    1 server         N·Z, at a host of its own                 4          a round of the parameter server
    N servers        2·(N-1)/N·Z                               1.75       one on the host of each worker

    sudo python benchmarks/shaped_network.py --json shaped.json --png shaped.png

It needs root, `ip` and `tc` (iproute2), and takes four minutes. What it makes is removed on every way out but SIGKILL.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shaped_links import address, interface_bytes, network, undisturbed, why_not

HOSTS = (2, 3, 4, 6, 8)
PORT = 29650
SEGMENT_BYTES = 128 * 2**10  # short ones, so that what a node has to wait for before it can send is little
TIMEOUT_S = 120.0
WITHIN = 0.25
"""How far measured ratios may be from the theory's."""

Value = Callable[[dict[str, Any]], float]


@dataclass(frozen=True)
class Way:
    """How N hosts add up a tensor of Z bytes."""

    busiest: Callable[[int], float]
    """Z in (and Z out of) the busiest node, by N."""
    turns: int = 1
    """2: that node has to have everything before it sends anything."""
    marker: str = "o"
    colour: str = "tab:red"


WAYS = {
    "star": Way(lambda hosts: hosts - 1),
    "unsplit-ring": Way(lambda hosts: hosts - 1, marker="s", colour="tab:orange"),
    "ring": Way(lambda hosts: 2 * (hosts - 1) / hosts, marker="D", colour="tab:blue"),
    "1 server": Way(lambda hosts: hosts, turns=2, marker="^", colour="tab:purple"),
    "N servers": Way(lambda hosts: 2 * (hosts - 1) / hosts, marker="v", colour="tab:green"),
}
SERVERS: dict[str, Callable[[int], Sequence[int]]] = {"1 server": lambda hosts: [hosts], "N servers": range}
"""The hosts on which the servers of N workers are; worker r is on host r."""
HOLLOW = ("star", "N servers")  # where two lie on one line hollow markers let both be seen


@dataclass(frozen=True)
class Trial:
    """What is measured: sums of `mib` MiB over the first 2, 3, … hosts, `rounds` times in turn."""

    hosts: tuple[int, ...] = HOSTS
    mib: float = 4.0
    mbit: int = 100
    rounds: int = 5

    def __post_init__(self) -> None:
        if not self.hosts or not all(2 <= count <= 250 for count in self.hosts):
            sys.exit(f"--hosts {','.join(map(str, self.hosts))}: each number is from 2 to 250")
        if self.mib <= 0 or self.mbit < 1 or self.rounds < 1:
            sys.exit(f"--mib {self.mib:g} --mbit {self.mbit} --rounds {self.rounds}: they must be above zero")

    @property
    def elements(self) -> int:
        """fp32, and a multiple of 840 = the least number that 2 … 8 divide."""
        return max(1, round(self.mib * 2**20 / 4 / 840)) * 840

    @property
    def bytes(self) -> int:
        return 4 * self.elements

    @property
    def bytes_per_s(self) -> float:
        return self.mbit * 1e6 / 8


# -- one host ----------------------------------------------------------------------------------------------------------


def work(trial: Trial, rank: int) -> list[dict[str, Any]]:
    """What each host's process runs; the measurements, the same on every rank."""
    import torch
    from shaped_servers import Served
    from torch._C._distributed_c10d import PrefixStore

    from paceline.collectives.communicator import Communicator
    from paceline.world.control import NoSupervisor
    from paceline.world.rendezvous_store import open_store
    from paceline.world.world import TcpRendezvous, World

    torch.set_num_threads(1)

    def world(size: int) -> World:
        meeting = TcpRendezvous(address(0), PORT)
        return World(rank, size, host_rank=rank, hosts=size, rendezvous=meeting, host_address=address(rank))

    def connect(size: int) -> Communicator:
        device = torch.device("cpu")
        prefix = PrefixStore(f"{size}", store)
        return Communicator.connect(world(size), prefix, backend="gloo", device=device, timeout_s=TIMEOUT_S)

    everyone = max(trial.hosts) + 1  # one more for the server
    store = open_store(world(everyone), NoSupervisor(), TIMEOUT_S)
    groups = {size: connect(size) for size in (*trial.hosts, everyone) if rank < size}
    all_hosts = groups[everyone]
    served = {
        (name, size): Served(world(everyone), store, f"{name} {size}", size, hosts(size), trial.elements)
        for name, hosts in SERVERS.items()
        for size in trial.hosts
    }
    found: list[dict[str, Any]] = []
    for number in range(-1, trial.rounds):  # round -1 opens the windows of all connections
        for size in trial.hosts:
            for name in WAYS:
                if name in SERVERS:
                    measured = served[name, size].round(all_hosts)
                else:
                    measured = all_hosts.gather_json(all_reduce(groups[size], name, trial) if rank < size else None)[0]
                if number >= 0:
                    found.append({"round": number, "hosts": size, "algorithm": name, **measured})
        if rank == 0:
            print(f"round {number + 1}/{trial.rounds}{' (not counted)' if number < 0 else ''}", flush=True)
    for each in served.values():
        each.close()
    all_hosts.barrier()
    for group in groups.values():
        group.close()
    return found


def all_reduce(comm: Any, name: str, trial: Trial) -> dict[str, Any]:
    """Seconds of the slowest host; bytes of the busiest: payload as counted, and what its interface saw."""
    import torch

    from paceline.collectives.choice import FLAT
    from paceline.collectives.executor import run_schedule

    tensor = torch.full((trial.elements,), float(comm.rank + 1))
    comm.barrier()
    before, wire = comm.traffic, interface_bytes()
    started = time.perf_counter()
    run_schedule(comm, FLAT[name], tensor, segment_bytes=SEGMENT_BYTES)
    seconds = time.perf_counter() - started
    moved, seen = comm.traffic - before, [now - then for now, then in zip(interface_bytes(), wire, strict=True)]
    if not bool((tensor == sum(range(comm.size + 1))).all()):
        raise AssertionError(f"{name} between {comm.size} hosts: the sum is wrong")
    every = comm.gather_json([seconds, max(moved.sent_bytes, moved.received_bytes), max(seen)])
    return dict(zip(("seconds", "busiest_bytes", "wire_bytes"), map(max, zip(*every, strict=True)), strict=True))


# -- all of them -------------------------------------------------------------------------------------------------------


def measure(trial: Trial) -> dict[str, Any]:
    with (
        network(max(trial.hosts) + 1, trial.mbit) as names,
        tempfile.TemporaryDirectory(prefix="paceline-shaped-") as folder,
    ):
        file = Path(folder) / "found.json"
        worker = [sys.executable, __file__, "--worker", json.dumps(asdict(trial)), str(file)]
        quiet = os.environ | {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # c10d warns that the hosts have no names
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank, name in enumerate(names):
                command = ["ip", "netns", "exec", name, *worker, str(rank)]
                processes.append(subprocess.Popen(command, start_new_session=True, env=quiet))
            _await(processes)
        finally:
            with undisturbed():
                for process in processes:  # all at once, or the others would tell of the first one's death
                    process.kill()
                for process in processes:
                    process.wait()
        return summarise(trial, json.loads(file.read_text()))


def _await(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Until all are done; the first that fails ends it, since the others would only wait for it."""
    while any(process.poll() is None for process in processes):
        time.sleep(0.1)
        for rank, process in enumerate(processes):
            if process.poll():
                sys.exit(f"shaped_network: the process of host {rank} ended with {process.returncode}; see above")


def summarise(trial: Trial, found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    least = min(trial.hosts)
    for name, way in WAYS.items():
        for hosts in trial.hosts:
            own = [each for each in found if (each["algorithm"], each["hosts"]) == (name, hosts)]
            first = [each for each in found if (each["algorithm"], each["hosts"]) == (name, least)]
            seconds = [each["seconds"] for each in own]
            share = way.busiest(hosts)
            rows.append(
                {
                    "algorithm": name,
                    "hosts": hosts,
                    "seconds": statistics.median(seconds),
                    "seconds_least": min(seconds),
                    "seconds_most": max(seconds),
                    "seconds_by_theory": way.turns * share * trial.bytes / trial.bytes_per_s,
                    "ratio": statistics.median(
                        mine["seconds"] / two["seconds"] for mine, two in zip(own, first, strict=True)
                    ),
                    "ratio_by_theory": share / way.busiest(least),
                    "busiest_bytes": max(each["busiest_bytes"] for each in own),
                    "bytes_by_theory": round(share * trial.bytes),
                    "wire_bytes": round(statistics.median(each["wire_bytes"] for each in own)),
                }
            )
    for row in rows:
        row["within"] = abs(row["ratio"] / row["ratio_by_theory"] - 1) <= WITHIN
    return {"trial": asdict(trial), "tensor_bytes": trial.bytes, "rows": rows, "rounds": list(found)}


# -- what it shows -----------------------------------------------------------------------------------------------------


def show(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    trial = result["trial"]
    out = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    least = min(trial["hosts"])
    out.print(f"Sums of {result['tensor_bytes']:,} bytes, links of {trial['mbit']} Mbit/s each way")
    table = Table(box=None, pad_edge=False, header_style="bold")
    columns = ("way", "N", "time, s", "least – most", "by theory", f"× N={least}", "by theory", "busiest, bytes")
    for number, column in enumerate((*columns, "by theory", "on the wire")):
        table.add_column(column, justify="right" if number else "left", no_wrap=True)
    for row in result["rows"]:
        table.add_row(
            row["algorithm"],
            str(row["hosts"]),
            f"{row['seconds']:.3f}",
            f"{row['seconds_least']:.3f} – {row['seconds_most']:.3f}",
            f"{row['seconds_by_theory']:.3f}",
            f"{row['ratio']:.2f}{'' if row['within'] else ' !'}",
            f"{row['ratio_by_theory']:.2f}",
            f"{row['busiest_bytes']:,}",
            f"{row['bytes_by_theory']:,}",
            f"{row['wire_bytes']:,}",
        )
    out.print(table)
    far = [row for row in result["rows"] if not row["within"]]
    out.print(f"{len(far)} of {len(result['rows'])} ratios more than {WITHIN:.0%} from the theory's")


def plot(result: dict[str, Any], file: Path) -> None:
    from matplotlib.figure import Figure

    trial = result["trial"]
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    axes: Any = figure.subplots(1, 2)

    def draw(panel: Any, measured: Value, theory: Value, title: str) -> None:
        for name, way in WAYS.items():
            rows = [row for row in result["rows"] if row["algorithm"] == name]
            hosts, size = [row["hosts"] for row in rows], 10 if name in HOLLOW else 6
            face = "none" if name in HOLLOW else way.colour
            panel.plot(hosts, [theory(row) for row in rows], color=way.colour, linewidth=1, linestyle="--")
            points = [measured(row) for row in rows]
            panel.plot(hosts, points, way.marker, color=way.colour, ms=size, mfc=face, label=name)
        panel.plot([], [], color="grey", linewidth=1, linestyle="--", label="theory")
        panel.set(xlabel="workers, one on each host", title=title, xticks=trial["hosts"])
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)

    mib = 2**20
    draw(axes[0], lambda row: row["seconds"], lambda row: row["seconds_by_theory"], "time, s")
    title = "bytes into the busiest node, MiB (counted)"
    draw(axes[1], lambda row: row["busiest_bytes"] / mib, lambda row: row["bytes_by_theory"] / mib, title)
    axes[0].legend(frameon=False)
    figure.suptitle(f"A sum of {result['tensor_bytes'] / mib:.1f} MiB over links of {trial['mbit']} Mbit/s")
    figure.savefig(file, dpi=150)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Star, unsplit ring, ring and parameter servers on a slow network.")
    parser.add_argument("--hosts", default=",".join(map(str, HOSTS)), help="with workers, a list: 2,3,4,6,8")
    parser.add_argument("--mib", type=float, default=Trial.mib, help="of the tensor")
    parser.add_argument("--mbit", type=int, default=Trial.mbit, help="per second, of every link in each direction")
    parser.add_argument("--rounds", type=int, default=Trial.rounds)
    parser.add_argument("--json", type=Path, help="write every number there")
    parser.add_argument("--png", type=Path, help="draw there (matplotlib)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    if not all(count.strip().isdigit() for count in args.hosts.split(",")):
        sys.exit(f"--hosts {args.hosts}: a list of numbers, such as 2,4,8")
    trial = Trial(tuple(sorted({int(count) for count in args.hosts.split(",")})), args.mib, args.mbit, args.rounds)
    if missing := why_not():
        sys.exit(f"shaped_network: {missing}")
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        result = measure(trial)
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        signal.signal(signal.SIGTERM, before)
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=2) + "\n")
    show(result)
    if args.png is not None:
        plot(result, args.png)


def worker(trial: str, file: str, rank: str) -> None:
    told = json.loads(trial)
    found = work(Trial(**told | {"hosts": tuple(told["hosts"])}), int(rank))
    if int(rank) == 0:
        Path(file).write_text(json.dumps(found))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(*sys.argv[2:])
    else:
        main()
