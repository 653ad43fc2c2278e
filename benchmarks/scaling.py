"""Weak scaling on one host: N workers have N times the batch, so a step should take as long as it does on few.

    part         N = 2, 4, 8, 16 workers, each in a run of its own              beside it, in the same rounds
    all_reduce   1 MiB and 25 MiB, ordinary tensors and the Engine's buckets    gloo, and the bound of plain C
    mlp25m       steps of training, exact, over shared memory                   torch's DDP on gloo; workers that
    gpt10m       the same                                                       never talk; one process, N threads

    python benchmarks/scaling.py measure results             # about 14 minutes on 16 cores; one JSON for each part
    python benchmarks/scaling.py show results --json benchmarks/results/scaling.json     # then: make figures

Figures of one run are compared as paired ratios. Between runs, that is from one N to the next, minutes pass, and the
lines of the plot may move by the usual 13 % for that alone.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WORKERS = (2, 4, 8, 16)
WORKLOADS = ("mlp25m", "gpt10m")
ALL_REDUCE = "all_reduce"
PARTS = (ALL_REDUCE, *WORKLOADS)
SIZES = "1MiB,25MiB"
ROUNDS = 20
# So few that nobody knows its batches by heart in the end: mlp25m does after 55 to 70 steps. Gradients of the logits
# become subnormal then, and on a Xeon backward took up to three times as long from there on.
STEPS_PER_ROUND = 2
OURS = "paceline-exact"
PEERS = ("torch-ddp", "no-communication", "one-process")
BACKENDS = ("paceline", "paceline-buckets", "gloo", "bound")
TIMEOUT_S, TO_END_S = 240.0, 30.0
"""Of one part; those that take longer are told to end, and the next one begins."""

Result = dict[str, Any]


@dataclass(frozen=True)
class Part:
    name: str
    workers: int

    def __str__(self) -> str:
        return f"{self.name}-{self.workers}"

    def file(self, folder: Path) -> Path:
        return folder / f"{self}.json"

    def words(self, rounds: int) -> list[str]:
        """What `paceline` is told."""
        if self.name == ALL_REDUCE:
            chosen = [word for name in BACKENDS for word in ("--backend", name)]
            words = ["bench", "collectives", "--operation", ALL_REDUCE, "--sizes", SIZES, *chosen]
        else:
            peers = [word for name in PEERS for word in ("--against", name)]
            steps = ["--steps-per-round", str(STEPS_PER_ROUND)]
            words = ["bench", "step", "--workload", self.name, "--reduction", "exact", *peers, *steps]
        return [*words, "--workers", str(self.workers), "--rounds", str(rounds)]


# -- measuring ---------------------------------------------------------------------------------------------------------


def measure(folder: Path, parts: Sequence[Part], rounds: int) -> int:
    """How many parts failed; each writes its JSON, and a log that a failed one is read in."""
    folder.mkdir(parents=True, exist_ok=True)
    failed = 0
    for part in parts:
        started = time.perf_counter()
        code = run(part, folder, rounds)
        took = f"{time.perf_counter() - started:.0f} s"
        if code:
            failed += 1
            print(f"{part}: failed with {code} after {took}, see {folder / f'{part}.log'}", flush=True)
        else:
            print(f"{part}, {took}: {told(part, json.loads(part.file(folder).read_text()))}", flush=True)
    return failed


def run(part: Part, folder: Path, rounds: int) -> int:
    program = [sys.executable, "-c", "from paceline.cli.main import main; main()"]
    with (folder / f"{part}.log").open("w") as log:
        process = subprocess.Popen(
            [*program, *part.words(rounds), "--json", str(part.file(folder))], stdout=log, stderr=log
        )
        try:
            return process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.terminate()  # the supervisor takes its workers along
            try:
                process.wait(TO_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
            return 124


def told(part: Part, result: Result) -> str:
    """One line, for whoever watches."""
    if part.name == ALL_REDUCE:
        times = [f"{case['size']} × gloo " + ", ".join(_times_gloo(case)) for case in result["cases"]]
        return " · ".join([*times, *(f"{case['disturbed_rounds']} disturbed" for case in result["cases"])])
    ratios = [f"/ {ratio['peer']} {spread_text(ratio['throughput'])}" for ratio in result["ratios"]]
    return " · ".join([*ratios, f"{result['disturbed_rounds']} disturbed"])


def _times_gloo(case: Result) -> Iterator[str]:
    for name, facts in case["contestants"].items():
        if facts["times_baseline"] is not None:
            yield f"{name} {spread_text(facts['times_baseline'])}"


# -- showing -----------------------------------------------------------------------------------------------------------


def spread_text(spread: dict[str, float], digits: int = 2) -> str:
    low, high = (f"{spread[what]:,.{digits}f}" for what in ("lower_quartile", "upper_quartile"))
    return f"{spread['median']:,.{digits}f} ({low} – {high})"


def load(folder: Path, name: str) -> list[Result]:
    """The results of a part by number of workers; those that were not measured are not there."""
    files = [Part(name, count).file(folder) for count in WORKERS]
    return [json.loads(file.read_text()) for file in files if file.exists()]


def ratio_to(result: Result, peer: str) -> dict[str, float]:
    found: dict[str, float] = next(ratio["throughput"] for ratio in result["ratios"] if ratio["peer"] == peer)
    return found


def case_of(result: Result, size: str) -> Result:
    found: Result = next(case for case in result["cases"] if case["size"] == size)
    return found


def step_tables(results: Sequence[Result]) -> str:
    """Ratios of one workload, then what everybody reached."""
    lines = [
        "| workers | " + " | ".join(f"to {peer}" for peer in PEERS) + " | rounds disturbed |",
        "|---|---|---|---|---|",
    ]
    for result in results:
        cells = [spread_text(ratio_to(result, peer)) for peer in PEERS]
        lines.append(
            _row(result["race"]["workers"], *cells, f"{result['disturbed_rounds']} of {len(result['rounds'])}")
        )
    names = (OURS, *PEERS)
    lines += ["", f"| workers, {results[0]['workload']['unit']} | " + " | ".join(names) + " |", "|---" * 5 + "|"]
    for result in results:
        speeds = [spread_text(result["contestants"][name]["throughput"], 0) for name in names]
        lines.append(_row(result["race"]["workers"], *speeds))
    return "\n".join(lines)


def all_reduce_table(results: Sequence[Result]) -> str:
    lines = ["| size | workers | " + " | ".join(f"{name}, µs" for name in BACKENDS) + " | rounds disturbed |"]
    lines.append("|---" * (len(BACKENDS) + 3) + "|")
    for size in (case["size"] for case in results[0]["cases"]):
        for result in results:
            case = case_of(result, size)
            cells = [_call(case["contestants"][name]) for name in BACKENDS]
            disturbed = f"{case['disturbed_rounds']} of {len(case['rounds'])}"
            lines.append(_row(size, case["workers"], *cells, disturbed))
    return "\n".join(lines)


def _call(facts: Result) -> str:
    median = f"{1e6 * facts['time_s']['median']:,.0f}"
    ratio = facts["times_baseline"]
    return median if ratio is None else f"{median} · {spread_text(ratio, 1)} ×"


def _row(*cells: object) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


def show(folder: Path) -> None:
    for name in PARTS:
        if results := load(folder, name):
            print(f"\n{name}\n")
            print(all_reduce_table(results) if name == ALL_REDUCE else step_tables(results))


# -- drawing -----------------------------------------------------------------------------------------------------------

STYLES = {
    "no-communication": ("black", "o", "no communication"),
    "torch-ddp": ("tab:red", "s", "torch DDP on gloo"),
    "one-process": ("tab:green", "^", "one process, as many threads"),
    "paceline": ("tab:blue", "D", "paceline, ordinary tensors"),
    "paceline-buckets": ("tab:cyan", "v", "paceline, buckets"),
    "bound": ("black", "o", "bound: plain C"),
}


def points(folder: Path) -> dict[str, list[Result]]:
    """What the plot shows: ratios to the peers by number of workers, and of the largest all-reduce those to gloo."""
    found: dict[str, list[Result]] = {}
    for name in (*WORKLOADS, ALL_REDUCE):
        results = load(folder, name)
        if not results:
            sys.exit(f"scaling: no {name}-N.json in {folder}; measure it first")
        found[name] = [_times(result) if name == ALL_REDUCE else _ratios(result) for result in results]
    return found


def _ratios(result: Result) -> Result:
    return {"workers": result["race"]["workers"], "ratios": {peer: ratio_to(result, peer) for peer in PEERS}}


def _times(result: Result) -> Result:
    case = result["cases"][-1]
    times = {name: case["contestants"][name]["times_baseline"] for name in ("paceline", "paceline-buckets", "bound")}
    return {"workers": case["workers"], "size": case["size"], "times_gloo": times}


def plot(found: dict[str, list[Result]], file: Path) -> None:
    """Ours over each peer, of the same rounds. Bars hold the middle half of them."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4), layout="constrained")
    axes: Any = figure.subplots(1, 3)
    for panel, name in zip(axes, (*WORKLOADS, ALL_REDUCE), strict=True):
        rows, key = found[name], "times_gloo" if name == ALL_REDUCE else "ratios"
        for peer in rows[0][key]:
            line(panel, peer, [row["workers"] for row in rows], [row[key][peer] for row in rows])
        _from_zero(panel)
        panel.set_xscale("log", base=2)
        panel.set_xticks(WORKERS, [str(count) for count in WORKERS])
        panel.set_xlabel("workers, one thread each")
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
        panel.legend(frameon=False, fontsize=8, loc="upper left")
        panel.set_title(f"{name}: throughput of paceline over that of")
    axes[2].set_title(f"all-reduce of {found[ALL_REDUCE][0]['size']}: times as fast as gloo")
    figure.savefig(file, dpi=110)


def _from_zero(panel: Any) -> None:
    """A panel of ratios: all of them, where 1 is, and room for the legend."""
    panel.axhline(1.0, color="grey", linewidth=0.8)
    panel.set_ylim(0, 1.3 * panel.get_ylim()[1])


def line(panel: Any, name: str, counts: list[int], spreads: list[dict[str, float]]) -> None:
    colour, marker, label = STYLES[name]
    medians = [spread["median"] for spread in spreads]
    below = [spread["median"] - spread["lower_quartile"] for spread in spreads]
    above = [spread["upper_quartile"] - spread["median"] for spread in spreads]
    style = "--" if colour == "black" else "-"
    panel.errorbar(counts, medians, [below, above], color=colour, marker=marker, ms=5, ls=style, capsize=3, label=label)


# -- the command -------------------------------------------------------------------------------------------------------


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Weak scaling on the workers of one host.")
    verbs = parser.add_subparsers(dest="verb", required=True)
    measuring = verbs.add_parser("measure", help="run the parts one after the other; a failed one stops no other")
    measuring.add_argument("folder", type=Path)
    measuring.add_argument("--parts", default=",".join(PARTS), help=f"a list of {', '.join(PARTS)}")
    measuring.add_argument("--workers", default=",".join(map(str, WORKERS)), help="a list")
    measuring.add_argument("--rounds", type=int, default=ROUNDS)
    showing = verbs.add_parser("show", help="the tables as markdown, and the plot")
    showing.add_argument("folder", type=Path)
    showing.add_argument("--png", type=Path, help="draw there (matplotlib)")
    showing.add_argument("--json", type=Path, help="write there what is drawn")
    return parser.parse_args(argv)


def parts_of(names: str, workers: str) -> list[Part]:
    chosen = names.split(",")
    for name in chosen:
        if name not in PARTS:
            sys.exit(f"--parts {name}: choose of {', '.join(PARTS)}")
    if not all(count.isdigit() and int(count) > 1 for count in workers.split(",")):
        sys.exit(f"--workers {workers}: a list of numbers from 2, such as 2,4,8,16")
    return [Part(name, int(count)) for name in chosen for count in workers.split(",")]


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    if args.verb == "measure":
        sys.exit(measure(args.folder, parts_of(args.parts, args.workers), args.rounds))
    show(args.folder)
    if args.json is not None:
        args.json.write_text(json.dumps(points(args.folder), indent=1) + "\n")
    if args.png is not None:
        plot(points(args.folder), args.png)


if __name__ == "__main__":
    main()
