"""A slow network in one machine: over links of 100 Mbit/s an all-reduce takes as long as its busiest node's bytes.

    ┌ namespace ┐                  ┌──────── namespace ────────┐                 ┌ namespace ┐
    │  host 0   │ eth0 ══ tbf ══►  │ port0    a bridge   port1 │  ◄══ tbf ══ eth0 │  host 1   │   …
    └───────────┘      ◄══ tbf ══  └───────────────────────────┘  ══ tbf ══►      └───────────┘

Each host is a network namespace with one process; each cable is shaped in both directions. Z bytes on N hosts:

    algorithm        bytes in and out of the busiest node      time at N = 8 / time at N = 2
    star             (N-1)·Z                                   7
    unsplit ring     (N-1)·Z                                   7
    ring             2·(N-1)/N·Z                               1.75

    sudo python benchmarks/shaped_network.py --json shaped.json --png shaped.png

It needs root, `ip` and `tc` (iproute2), and takes two minutes. What it makes has its process number in the name and is
removed on every way out but SIGKILL.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ALGORITHMS = ("star", "unsplit-ring", "ring")
HOSTS = (2, 3, 4, 6, 8)
SUBNET = "10.78.0"
PORT = 29650
SEGMENT_BYTES = 128 * 2**10  # short ones, so that what a node has to wait for before it can send is little
# A bucket that lets out no more than 11 packets at once, and a queue so long that nothing has to be sent twice.
BURST, QUEUE = "16kb", "8mb"
TIMEOUT_S = 120.0
WITHIN = 0.25
"""How far measured ratios may be from the theory's."""

Value = Callable[[dict[str, Any]], float]


@dataclass(frozen=True)
class Trial:
    """What is measured: all-reduces of `mib` MiB between the first 2, 3, … hosts, `rounds` times in turn."""

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


# -- the network -------------------------------------------------------------------------------------------------------


def why_not() -> str | None:
    """What is missing on this machine."""
    if os.geteuid() != 0:
        return "needs root, to make network namespaces"
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    return f"needs {' and '.join(missing)}: install iproute2" if missing else None


@contextlib.contextmanager
def network(hosts: int, mbit: int) -> Iterator[list[str]]:
    """Namespaces joined by a bridge in one more; their names. Links and bridge go when their namespaces go."""
    switch, *names = (f"paceline-{os.getpid()}-{what}" for what in ("switch", *range(hosts)))
    made: list[str] = []
    try:
        for name in (switch, *names):
            made.append(name)
            _run("ip", "netns", "add", name)
            _run("ip", "-n", name, "link", "set", "lo", "up")
        _run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "bridge", "up")
        for number, name in enumerate(names):
            _plug_in(name, switch, number, mbit)
        yield names
    finally:
        with _undisturbed():
            for name in made:
                subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=10, check=False)


def _plug_in(name: str, switch: str, number: int, mbit: int) -> None:
    port = f"port{number}"
    _run("ip", "link", "add", "eth0", "netns", name, "type", "veth", "peer", "name", port, "netns", switch)
    _run("ip", "-n", switch, "link", "set", port, "master", "bridge", "up")
    _run("ip", "-n", name, "addr", "add", f"{address(number)}/24", "dev", "eth0")
    _run("ip", "-n", name, "link", "set", "eth0", "up")
    for namespace, device in ((name, "eth0"), (switch, port)):
        shape = ("tbf", "rate", f"{mbit}mbit", "burst", BURST, "limit", QUEUE)
        _run("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", *shape)


def address(number: int) -> str:
    return f"{SUBNET}.{number + 1}"


def _run(*words: str) -> None:
    ran = subprocess.run(words, capture_output=True, text=True, timeout=10, check=False)
    if ran.returncode:
        sys.exit(f"shaped_network: `{' '.join(words)}` failed: {ran.stderr.strip() or ran.stdout.strip()}")


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Who presses Ctrl-C twice still gets everything removed."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# -- one host ----------------------------------------------------------------------------------------------------------


def work(trial: Trial, rank: int) -> list[dict[str, Any]]:
    """What each host's process runs; the measurements, the same on every rank."""
    import torch
    from torch._C._distributed_c10d import PrefixStore

    from paceline.collectives.communicator import Communicator
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

    everyone = max(trial.hosts)
    store = open_store(world(everyone), None, TIMEOUT_S)
    groups = {size: connect(size) for size in trial.hosts if rank < size}
    all_hosts = groups[everyone]
    found: list[dict[str, Any]] = []
    for number in range(-1, trial.rounds):  # round -1 opens the windows of all connections
        for size in trial.hosts:
            for name in ALGORITHMS:
                told = all_reduce(groups[size], name, trial) if size in groups else None
                measured = all_hosts.gather_json(told)[0]
                if number >= 0:
                    found.append({"round": number, "hosts": size, "algorithm": name, **measured})
        if rank == 0:
            print(f"round {number + 1}/{trial.rounds}{' (not counted)' if number < 0 else ''}", flush=True)
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


def interface_bytes() -> list[int]:
    """Received and sent by eth0 since it is up, headers included."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == "eth0":
            return [int(counts.split()[column]) for column in (0, 8)]
    raise AssertionError("no eth0 in this namespace")


# -- all of them -------------------------------------------------------------------------------------------------------


def measure(trial: Trial) -> dict[str, Any]:
    with (
        network(max(trial.hosts), trial.mbit) as names,
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
            with _undisturbed():
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


def busiest_share(name: str, hosts: int) -> float:
    """Bytes in (and out of) the busiest node, in units of Z."""
    return 2 * (hosts - 1) / hosts if name == "ring" else float(hosts - 1)


def summarise(trial: Trial, found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    least = min(trial.hosts)
    for name in ALGORITHMS:
        for hosts in trial.hosts:
            own = [each for each in found if (each["algorithm"], each["hosts"]) == (name, hosts)]
            first = [each for each in found if (each["algorithm"], each["hosts"]) == (name, least)]
            seconds = [each["seconds"] for each in own]
            share = busiest_share(name, hosts)
            rows.append(
                {
                    "algorithm": name,
                    "hosts": hosts,
                    "seconds": statistics.median(seconds),
                    "seconds_least": min(seconds),
                    "seconds_most": max(seconds),
                    "seconds_by_theory": share * trial.bytes / trial.bytes_per_s,
                    "ratio": statistics.median(
                        mine["seconds"] / two["seconds"] for mine, two in zip(own, first, strict=True)
                    ),
                    "ratio_by_theory": share / busiest_share(name, least),
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
    out.print(f"All-reduce of {result['tensor_bytes']:,} bytes, links of {trial['mbit']} Mbit/s each way")
    table = Table(box=None, pad_edge=False, header_style="bold")
    columns = ("algorithm", "N", "time, s", "least – most", "by theory", f"× N={least}", "by theory", "busiest, bytes")
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
    styles = {"star": ("tab:red", "o"), "unsplit-ring": ("tab:orange", "s"), "ring": ("tab:blue", "D")}

    def draw(panel: Any, measured: Value, theory: Value, title: str) -> None:
        for name, (colour, marker) in styles.items():
            rows = [row for row in result["rows"] if row["algorithm"] == name]
            hosts = [row["hosts"] for row in rows]
            # Star and unsplit ring lie on one line: hollow markers let both be seen.
            size = 10 if name == "star" else 6
            face = "none" if name == "star" else colour
            panel.plot(hosts, [theory(row) for row in rows], color=colour, linewidth=1, linestyle="--")
            panel.plot(hosts, [measured(row) for row in rows], marker, color=colour, ms=size, mfc=face, label=name)
        panel.plot([], [], color="grey", linewidth=1, linestyle="--", label="theory")
        panel.set(xlabel="hosts", title=title, xticks=trial["hosts"])
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)

    mib = 2**20
    draw(axes[0], lambda row: row["seconds"], lambda row: row["seconds_by_theory"], "time, s")
    title = "bytes into the busiest node, MiB (counted)"
    draw(axes[1], lambda row: row["busiest_bytes"] / mib, lambda row: row["bytes_by_theory"] / mib, title)
    axes[0].legend(frameon=False)
    figure.suptitle(f"All-reduce of {result['tensor_bytes'] / mib:.1f} MiB over links of {trial['mbit']} Mbit/s")
    figure.savefig(file, dpi=150)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Star, unsplit ring and ring on a slow network.")
    parser.add_argument("--hosts", default=",".join(map(str, HOSTS)), help="how many, a list: 2,3,4,6,8")
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
