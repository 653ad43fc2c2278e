"""The order of an epoch: how long until the first batch, until a resume at 90 %, and how much memory that takes.

    python benchmarks/order.py --samples 1000000000

    paceline    position ─▶ 32 ids                                      no list
    torch       randperm(n) ─▶ a list of n ids ─▶ skip to the place ─▶ 32 ids, by DistributedSampler(shuffle=True)

Every figure comes from a process of its own, in which the imports are done before the clock starts. torch's sampler has
no other way to resume than to make the list again and skip. Where its list would not fit it is not run.

    python benchmarks/order.py --turn SIDE SAMPLES POSITION        one such process; prints its figures as JSON
"""

from __future__ import annotations

import contextlib
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
from command_line import command, run, tell
from rich.console import Console

from paceline.bench.report import machine_line, quartiles, table_of
from paceline.bench.statistics import Spread, machine_facts
from paceline.errors import ConfigError, LaunchError

BATCH = 32
SEED, EPOCH = 1, 3
WORKERS = 2  # of the job whose first worker's ids are asked for
RESUME_AT = 0.9
TIMEOUT_S = 900.0
SMALL_SIZES = (10**6, 10**7)
PEER_ROUNDS, PEER_ROUNDS_OF_LARGE = 3, 1  # its seconds vary by some percent, ours are thousandths of them
MIB, GIB = 2**20, 2**30
BYTES_PER_LISTED_SAMPLE = 48  # 8 in randperm's tensor, 8 in the list, 32 for the integer itself
BYTES_OF_TORCH = 2**28
TARGET = {"first_batch_s": 0.010, "resume_s": 0.010, "grown_mib": 1.0}

Take = Callable[[int, int], Sequence[int]]


@dataclass(frozen=True)
class Turn:
    """What one process saw: seconds until it had the ids, and by how much its resident memory had grown at most."""

    seconds: float
    grown_mib: float


def paceline_order() -> Take:
    from paceline.data.global_order import Shuffled

    def take(samples: int, position: int) -> Sequence[int]:
        return Shuffled(samples, SEED, EPOCH).samples_at(range(position, min(position + BATCH, samples)))

    return take


def torch_distributed_sampler() -> Take:
    from torch.utils.data.distributed import DistributedSampler

    def take(samples: int, position: int) -> Sequence[int]:
        dataset: Any = range(samples)  # only its length is asked for
        sampler: DistributedSampler[int] = DistributedSampler(
            dataset, num_replicas=WORKERS, rank=0, shuffle=True, seed=SEED
        )
        sampler.set_epoch(EPOCH)
        return list(itertools.islice(sampler, position // WORKERS, position // WORKERS + BATCH))

    return take


OURS, PEER = "paceline", "DistributedSampler"
SIDES: dict[str, Callable[[], Take]] = {OURS: paceline_order, PEER: torch_distributed_sampler}


def measure_order(samples: int, rounds: int, tell: Callable[[str], None]) -> dict[str, Any]:
    if samples < BATCH:
        raise ConfigError(f"--samples {samples}: at least one batch of {BATCH} is measured")
    if rounds < 1:
        raise ConfigError(f"--rounds {rounds}: at least one round is measured")
    sizes: list[dict[str, Any]] = []
    for size in [*(small for small in SMALL_SIZES if small < samples), samples]:
        tell(f"{size:,} samples")
        sizes.append({"samples": size, "sides": {OURS: measure_side(OURS, size, rounds), PEER: _measure_peer(size)}})
    ours = sizes[-1]["sides"][OURS]
    return {
        "machine": machine_facts(),
        "batch": BATCH,
        "resume_at": RESUME_AT,
        "sizes": sizes,
        "target": TARGET,
        "reached": {what: ours[what]["median"] <= limit for what, limit in TARGET.items()},
    }


def _measure_peer(samples: int) -> dict[str, Any]:
    reason = does_not_fit(samples, psutil.virtual_memory().available)
    if reason is not None:
        return {"not_run": reason}
    return measure_side(PEER, samples, PEER_ROUNDS if samples <= max(SMALL_SIZES) else PEER_ROUNDS_OF_LARGE)


def does_not_fit(samples: int, free: int) -> str | None:
    """Asked before, because a machine that swaps or kills tells nothing."""
    need = BYTES_OF_TORCH + BYTES_PER_LISTED_SAMPLE * samples
    return None if need <= free else f"needs about {need / GIB:.0f} GiB, {free / GIB:.0f} GiB are free: not run"


def measure_side(side: str, samples: int, rounds: int, timeout_s: float = TIMEOUT_S) -> dict[str, Any]:
    places = {"first_batch_s": 0, "resume_s": int(RESUME_AT * samples)}
    turns: dict[str, list[Turn]] = {what: [] for what in places}
    for _ in range(rounds):
        for what, position in places.items():
            turn = in_a_process(side, samples, position, timeout_s)
            if isinstance(turn, str):
                return {"not_run": turn}
            turns[what].append(turn)
    return {
        **{what: asdict(Spread.of([turn.seconds for turn in turns[what]])) for what in places},
        "grown_mib": asdict(Spread.of([turn.grown_mib for what in places for turn in turns[what]])),
        "turns": {what: [asdict(turn) for turn in turns[what]] for what in places},
    }


def in_a_process(side: str, samples: int, position: int, timeout_s: float) -> Turn | str:
    """Its figures, or why there are none."""
    command = [sys.executable, __file__, "--turn", side, str(samples), str(position)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        return f"had no ids after {timeout_s:g} s: ended"
    if done.returncode < 0:
        return f"was ended by signal {-done.returncode}, which is 9 where memory runs out"
    if done.returncode > 0:
        raise LaunchError(f"{side}, {samples:,} samples: the process said: {done.stderr.strip()[-500:]}")
    return Turn(**json.loads(done.stdout))


def measure_here(side: str, samples: int, position: int) -> Turn:
    take = SIDES[side]()
    with contextlib.suppress(OSError):  # where it is forbidden, the peak of the imports counts as growth
        Path("/proc/self/clear_refs").write_text("5")
    before = _memory_mib("VmRSS")
    started = time.perf_counter()
    take(samples, position)
    seconds = time.perf_counter() - started
    return Turn(seconds, _memory_mib("VmHWM") - before)


def _memory_mib(what: str) -> float:
    # Not getrusage: its peak is inherited from the process that started this one.
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[what].split()[0]) / 1024


def show_order(result: dict[str, Any], out: Console) -> None:
    out.print(f"The first {result['batch']} ids of a shuffled epoch, and those at {result['resume_at']:.0%} of it")
    table = table_of("samples", "order", "first, ms", "quartiles", "resume, ms", "quartiles", "memory, MiB", "turns")
    missing = []
    for size in result["sizes"]:
        for side, facts in size["sides"].items():
            if "not_run" in facts:
                table.add_row(f"{size['samples']:,}", side, *["not run"] * 5, "0")
                missing.append(f"{side}, {size['samples']:,} samples: {facts['not_run']}")
            else:
                table.add_row(f"{size['samples']:,}", side, *_figures(facts))
    out.print(table)
    for line in missing:
        out.print(line)
    out.print(_verdict(result))
    out.print(machine_line(result["machine"]))


def _figures(facts: dict[str, Any]) -> list[str]:
    cells = []
    for what in ("first_batch_s", "resume_s"):
        in_ms = {name: 1e3 * value for name, value in facts[what].items()}
        digits = 2 if in_ms["median"] < 100 else 0
        cells += [f"{in_ms['median']:,.{digits}f}", quartiles(in_ms, digits)]
    return [*cells, f"{facts['grown_mib']['median']:,.2f}", str(len(facts["turns"]["first_batch_s"]))]


def _verdict(result: dict[str, Any]) -> str:
    last = result["sizes"][-1]
    ours, target, reached = last["sides"][OURS], result["target"], result["reached"]
    lines = [f"paceline's target at {last['samples']:,} samples"]
    for name, what, scale, unit in (
        ("first batch", "first_batch_s", 1e3, "ms"),
        ("resume", "resume_s", 1e3, "ms"),
        ("memory", "grown_mib", 1, "MiB"),
    ):
        lines.append(
            f"  {name}: {target[what] * scale:g} {unit} {'reached' if reached[what] else 'MISSED'}, "
            f"median {ours[what]['median'] * scale:.2f}, worst turn {ours[what]['most'] * scale:.2f}"
        )
    return "\n".join(lines)


def main(words: Sequence[str] | None = None) -> None:
    parser = command(__doc__)
    parser.add_argument("--samples", type=int, default=10**9, help="in the epoch; smaller sizes are measured first")
    parser.add_argument("--rounds", type=int, default=20, help="turns of paceline's, each in a process of its own")
    parser.add_argument("--turn", nargs=3, metavar=("SIDE", "SAMPLES", "POSITION"), help="what each process runs")
    asked = parser.parse_args(words)
    if asked.turn is not None:
        side, samples, position = asked.turn
        print(json.dumps(asdict(measure_here(side, int(samples), int(position)))))
        return
    run(parser, asked.json, lambda: measure_order(asked.samples, asked.rounds, tell), show_order)


if __name__ == "__main__":
    main()
