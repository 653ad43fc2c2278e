"""How wrong `paceline plan` is: 2 and 4 workers × 5 strategies × 3 workloads, predicted first and then measured.

python benchmarks/accuracy.py                              all of it, about 7 minutes; writes docs/accuracy.md
python benchmarks/accuracy.py --quick                      one workload on 2 workers; prints, and writes no page
python benchmarks/accuracy.py --show results/accuracy.json the page again, from numbers of an earlier sweep

hardware     paceline bench hardware, on 1, 2 and 4 workers
predicted    by the planner: the model on fake tensors, one pass of one process timed
measured     each setting in processes of its own, as `paceline run` starts them:
             step time     the median of STEPS steps, of the slowest worker
             model state   bytes of parameters, gradients and optimizer state, by tensors that are alive
             peak          of the process in a step, by the kernel, less what it had before the model: the median of
                           PEAKS steps, of the worker with most
             bytes         counted in a step over gloo: in shared memory nothing is sent
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from command_line import tell

from paceline.bench.hardware import measure_hardware
from paceline.bench.memory import MemoryRun, row_of
from paceline.errors import PacelineError
from paceline.launch.job import Job
from paceline.launch.supervisor import supervise
from paceline.launch.worker_main import Script
from paceline.world.world import LaunchSettings, World

WORKERS = (2, 4)
STRATEGIES = ("ddp", "star", "zero1", "zero2", "fsdp")
WORKLOADS = ("mlp25m", "gpt10m", "convnet")
STEPS, WARM_UP, GLOO_STEPS, PEAKS = 12, 4, 4, 5
FOLDER = Path(__file__).parent
RESULTS = FOLDER / "results" / "accuracy.json"
PAGE = FOLDER.parent / "docs" / "accuracy.md"
AIMS = {"model_state": (0.03, 0.03), "peak": (0.10, 0.10), "sent_bytes": (0.0, 0.0), "step_s": (0.15, 0.30)}
"""Median and worst error that the planner aims at."""
NAMES = {"model_state": "model state", "peak": "peak of a step", "sent_bytes": "bytes sent", "step_s": "step time"}

Result = dict[str, Any]


@dataclass(frozen=True)
class Setting:
    workload: str
    workers: int
    strategy: str

    def __str__(self) -> str:
        return f"{self.workload}, {self.workers} workers, {self.strategy}"


# -- predicted ---------------------------------------------------------------------------------------------------------


def predict(settings: Sequence[Setting], hardware_file: Path) -> dict[Setting, Result]:
    import torch

    from paceline.bench.workloads import WORKLOADS as KNOWN
    from paceline.engine.activation_checkpointing import blocks_of
    from paceline.planner.hardware import read_hardware
    from paceline.planner.model_profile import Variant
    from paceline.planner.model_source import Source, profile_source
    from paceline.planner.search import Request, search, sizes_for
    from paceline.planner.traffic import step_traffic

    torch.use_deterministic_algorithms(True)  # as an exact Engine has it
    hardware, out, profiles = read_hardware(hardware_file), {}, {}
    for setting in settings:
        workload = KNOWN[setting.workload]
        if setting.workload not in profiles:
            source = Source(
                workload.name,
                lambda w=workload: (
                    w.model(),
                    w.draw(w.batch_size, 0),
                    lambda model, batch: w.loss(model(batch[0]), batch[1]),
                ),
            )
            profiles[setting.workload] = profile_source(
                source,
                lambda samples: [Variant(samples)],
                blocks=lambda module: list(blocks_of(module)),
                time_passes=True,
            )
        profile = profiles[setting.workload]
        request = Request(setting.workers, strategies=STRATEGIES, checkpointing=(False,))
        found = next(one for one in search(profile, hardware, request).fitting if one.strategy == setting.strategy)
        over_gloo = Request(setting.workers, backend="gloo")
        step = profile.passes[Variant(profile.samples)]
        traffic = step_traffic(setting.strategy, profile, step, sizes_for(over_gloo, hardware, 1, "fp32"))
        out[setting] = {
            "model_state": found.memory.model_state,
            "peak": found.memory.peak,
            "step_s": found.time.step_s,
            "sent_bytes": max(traffic.sent),
            "counted": traffic.counted,
            "parts": found.memory.parts(),
            "time": {name: getattr(found.time, name) for name in ("compute_s", "update_s", "exposed_s")},
        }
    return out


# -- measured ----------------------------------------------------------------------------------------------------------


def measure(setting: Setting, steps: int) -> Result | int:
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        told = json.dumps(asdict(setting) | {"steps": steps})
        job = Job(
            script=Script(__file__, ("--worker", told, folder)),
            workers=setting.workers,
            settings=LaunchSettings(lanes=setting.workers, threads=1),
            keep_memory=True,
            quiet=True,
        )
        code = asyncio.run(supervise(job))
        if code != 0:
            return code
        workers = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(setting.workers)]
    row = row_of(MemoryRun(setting.strategy, setting.workers), workers)
    return {
        "model_state": row["held"],
        "peak": row["step_peak"],
        "step_s": max(worker["step_s"] for worker in workers),
        "sent_bytes": max(worker["sent_bytes"] for worker in workers),
        "parts": {
            name: row[name]
            for name in ("parameters", "gradients", "optimizer_state", "activations", "buffers", "other")
        },
        "busy_elsewhere": max(worker["foreign"] for worker in workers),
    }


def when_all_have(world: World, folder: Path) -> None:
    """Come here: there is no group to meet in yet."""
    (folder / f"{world.rank}.ready").touch()
    deadline = time.monotonic() + 60
    while len(list(folder.glob("*.ready"))) < world.size:
        if time.monotonic() > deadline:
            raise TimeoutError(f"worker {world.rank} waited 60 s for {world.size} workers to begin")
        time.sleep(0.01)


def work(told: Result, folder: Path) -> None:
    """In one of the processes: time, then memory, then bytes over gloo."""
    import torch

    from paceline.bench.memory_contestants import CountedLoop
    from paceline.bench.memory_measure import Resident, counted_once, peak_pss, reset_peak, use_everything_once
    from paceline.bench.statistics import CpuClock, foreign_and_steal
    from paceline.bench.workloads import WORKLOADS as KNOWN
    from paceline.world.environment import read_world
    from paceline.world.process import give_back_free_memory, keep_no_free_memory

    world, workload, steps = read_world(), KNOWN[told["workload"]], told["steps"]
    torch.set_num_threads(1)
    use_everything_once()
    when_all_have(world, folder)  # of pages that workers share, each has its part only when all have them
    at_start = Resident.now().pss
    loop = CountedLoop(
        workload, world, WARM_UP + steps + PEAKS + 8, strategy=told["strategy"], backend="paceline", batches=1
    )
    for _ in range(WARM_UP):
        loop.step()
    seconds = []
    clock, cpu = CpuClock.read(), time.process_time()
    for _ in range(steps):
        started = time.perf_counter()
        loop.step()
        seconds.append(time.perf_counter() - started)
    ours = world.size * (time.process_time() - cpu)
    foreign = sum(foreign_and_steal(clock, CpuClock.read(), ours))
    keep_no_free_memory()
    loop.step()
    gc.collect()
    peaks = []
    for _ in range(PEAKS):
        give_back_free_memory()
        reset_peak()
        loop.step()
        peaks.append(peak_pss())
    peak = statistics.median(peaks)
    figures = counted_once(loop, f"worker {world.rank}")
    loop.close()
    gloo = CountedLoop(workload, world, GLOO_STEPS + 3, strategy=told["strategy"], backend="gloo", batches=1)
    for _ in range(2):  # the first gathers units whose order is not known yet; before the second buckets are cut anew,
        gloo.step()  # and state moves to its new owners
    gloo._engine.barrier()
    before = gloo._engine._group.comm.traffic
    gloo._engine.barrier()  # none asks for weights of the next step before all have looked
    for _ in range(GLOO_STEPS):
        gloo.step()
    gloo._engine.barrier()
    sent = (gloo._engine._group.comm.traffic - before).sent_bytes / GLOO_STEPS
    gloo.close()
    figures |= {
        "parameters": workload.parameters,
        "formula": 0,
        "pss_at_start": at_start,
        "step_peak": peak,
        "highest_peak": peak,
        "step_s": statistics.median(seconds),
        "sent_bytes": sent,
        "foreign": foreign,
    }
    (folder / f"{world.rank}.json").write_text(json.dumps(figures))


# -- the sweep ---------------------------------------------------------------------------------------------------------


def sweep(settings: Sequence[Setting], steps: int, hardware_steps: int) -> Result:
    from paceline.bench.statistics import machine_facts

    began = time.monotonic()
    workers = sorted({setting.workers for setting in settings})
    hardware = measure_hardware(workers, ["paceline"], hardware_steps, 1, tell)
    if isinstance(hardware, int):
        sys.exit(hardware)
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        file = Path(folder) / "hardware.json"
        file.write_text(json.dumps(hardware))
        predicted = predict(settings, file)
    rows = []
    for setting in settings:
        found = measure(setting, steps)
        if isinstance(found, int):
            sys.exit(found)
        rows.append(asdict(setting) | {"predicted": predicted[setting], "measured": found})
        told = rows[-1]
        tell(
            f"{setting}: {1e3 * told['predicted']['step_s']:.1f} ms predicted, {1e3 * found['step_s']:.1f} measured; "
            f"peak {told['predicted']['peak'] / 1e6:.0f} MB, {found['peak'] / 1e6:.0f}; "
            f"state {told['predicted']['model_state'] / 1e6:.1f} MB, {found['model_state'] / 1e6:.1f}; "
            f"sent {told['predicted']['sent_bytes']:,}, {found['sent_bytes']:,}"
        )
    return {"rows": rows, "machine": machine_facts(), "hardware": hardware, "took_s": time.monotonic() - began}


def error_of(row: Result, quantity: str) -> float | None:
    """Relative; None: it can't be measured here, as what a backend's own collective sends."""
    if quantity not in row["measured"] or (quantity == "sent_bytes" and not row["predicted"]["counted"]):
        return None
    predicted, measured = row["predicted"][quantity], row["measured"][quantity]
    if measured == 0:
        return 0.0 if predicted == 0 else float("inf")
    return float(predicted / measured - 1)


def summary(rows: Sequence[Result]) -> list[Result]:
    out = []
    for quantity, (median_aim, worst_aim) in AIMS.items():
        errors = [(abs(error), row) for row in rows if (error := error_of(row, quantity)) is not None]
        if not errors:
            continue
        middle, (worst, where) = statistics.median(error for error, _ in errors), max(errors, key=lambda pair: pair[0])
        out.append(
            {
                "quantity": quantity,
                "median": middle,
                "worst": worst,
                "of": len(errors),
                "where": f"{where['workload']}, {where['workers']} workers, {where['strategy']}",
                "median_aim": median_aim,
                "worst_aim": worst_aim,
                "reached": middle <= median_aim and worst <= worst_aim,
            }
        )
    return out


def choices(rows: Sequence[Result]) -> list[Result]:
    """For each workload and number of workers: the planner's first choice beside what was fastest."""
    out = []
    rows = [row for row in rows if "step_s" in row["measured"]]
    for workload, workers in dict.fromkeys((row["workload"], row["workers"]) for row in rows):
        group = [row for row in rows if (row["workload"], row["workers"]) == (workload, workers)]
        chosen = min(group, key=lambda row: row["predicted"]["step_s"])
        best = min(group, key=lambda row: row["measured"]["step_s"])
        behind = chosen["measured"]["step_s"] / best["measured"]["step_s"] - 1
        out.append(
            {
                "workload": workload,
                "workers": workers,
                "chosen": chosen["strategy"],
                "best": best["strategy"],
                "behind": behind,
            }
        )
    return out


# -- the page ----------------------------------------------------------------------------------------------------------


def page(result: Result) -> str:
    machine, rows = result["machine"], result["rows"]
    lines = [
        "# How wrong `paceline plan` is",
        "",
        "Generated by `python benchmarks/accuracy.py`; the numbers are in `benchmarks/results/accuracy.json`. "
        f"torch {machine['torch']}, {machine['cpu']}, {machine['cores']} cores, one thread for each worker, all on one "
        "host.",
        "",
        "The planner saw the models on fake tensors, one pass of one process, and "
        "`paceline bench hardware`; it saw no step of the settings below.",
        "",
        "| | median error | worst error | aim | |",
        "|---|---:|---:|---|---|",
    ]
    for one in summary(rows):
        aim = "exact" if not one["worst_aim"] else f"{one['median_aim']:.0%} median, {one['worst_aim']:.0%} worst"
        verdict = "reached" if one["reached"] else "**missed**"
        errors = f"{one['median']:.1%} | {one['worst']:.1%} ({one['where']})"
        lines.append(f"| {NAMES[one['quantity']]} ({one['of']} settings) | {errors} | {aim} | {verdict} |")
    found = choices(rows)
    if found:
        lines += ["", "| first choice | planner | fastest measured | behind by |", "|---|---|---|---:|"]
    for one in found:
        name = f"{one['workload']}, {one['workers']} workers"
        lines.append(f"| {name} | {one['chosen']} | {one['best']} | {one['behind']:.1%} |")
    lines += ["", *_rows_of(rows), "", *_notes(result)]
    return "\n".join(lines) + "\n"


def _rows_of(rows: Sequence[Result]) -> list[str]:
    lines = [
        "| setting | step, ms | | error | peak, MB | | error | state, MB | | error | sent, bytes | | |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    columns = (("step_s", 1e3, 1), ("peak", 1e-6, 1), ("model_state", 1e-6, 1), ("sent_bytes", 1, 0))
    for row in rows:
        cells = [f"{row['workload']}, {row['workers']}, {row['strategy']}"]
        for quantity, scale, digits in columns:
            if quantity not in row["measured"]:
                cells += ["", "", ""]
                continue
            cells += [f"{scale * row[side][quantity]:,.{digits}f}" for side in ("predicted", "measured")]
            cells.append(_error_text(quantity, error_of(row, quantity)))
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _error_text(quantity: str, error: float | None) -> str:
    if error is None:
        return "not counted"
    if quantity == "sent_bytes":
        return "=" if error == 0 else f"{error:+.3%}"
    return f"{error:+.1%}"


def _notes(result: Result) -> list[str]:
    disturbed = sum(row["measured"]["busy_elsewhere"] > 0.08 for row in result["rows"])
    untimed = sum("step_s" not in row["measured"] for row in result["rows"])
    left_out = [
        f"Step times of {untimed} settings are left out: the machine was busy with other work. Memory and bytes don't "
        "depend on that. Here predictions were made after the planner's constants for buffers had been found with "
        "these measurements; `python benchmarks/accuracy.py` on a quiet machine predicts first and measures all.",
        "",
    ]
    return [
        *(left_out if untimed else []),
        f"Each pair is predicted, measured. Of {len(result['rows'])} settings {disturbed} were measured while other "
        'work had more than 8 % of the cores. Bytes are those of the busiest worker in a step over gloo; "not counted" '
        "is gloo's own all-reduce of two workers, whose bytes can't be seen from outside. Peak is the kernel's for a "
        "step (the median of five, of the worker with most), less what the process had before the model. The planner's "
        "constants for buffers on their way were found with these three models. On GPUs: "
        "[plan.md](concepts/plan.md#where-the-numbers-come-from).",
        "",
        "A peak of convnet can't be measured to 10 %. Seven steps on 2 workers, looked at again, had 65 to 77 MB "
        "under zero1 (two runs, median 71), 76 to 86 under fsdp (median 80) and 66 to 74 under ddp; workers of one "
        "run were up to 7 MB apart in most of their steps. From one making of this page to the next a setting's peak "
        "was up to 9 MB another, so which of its settings miss the aim changes too; the other models miss none. Most "
        "predictions are at the lower end: the model may be 4 to 7 MB short, but nothing that a strategy holds "
        "explains it, so no part was added. What was seen:",
        "",
        "- Peaks above what a step leaves behind differ by multiples of 4.2 MB, an activation of the first layer. "
        "From that size on (4 MiB) the C library gives memory back at once; what is smaller stays resident if it "
        "lay between others.",
        "- Pages of libraries count by the number of processes that use them. The figure before the model is read "
        "while other workers may not have touched theirs: between workers and runs it had 3 to 15 MB of such pages.",
    ]


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worker", nargs=2, metavar=("SETTING", "FOLDER"), help=argparse.SUPPRESS)
    parser.add_argument("--quick", action="store_true", help="gpt10m on 2 workers; no page is written")
    parser.add_argument("--show", type=Path, metavar="FILE", help="make the page from an earlier sweep")
    parser.add_argument("--json", type=Path, default=RESULTS, metavar="FILE", help="write every number there")
    parser.add_argument("--page", type=Path, default=PAGE, metavar="FILE", help="write the page there")
    asked = parser.parse_args(words)
    if asked.worker is not None:
        work(json.loads(asked.worker[0]), Path(asked.worker[1]))
        return
    if asked.show is not None:
        asked.page.write_text(page(json.loads(asked.show.read_text())))
        return
    workloads, workers = (("gpt10m",), (2,)) if asked.quick else (WORKLOADS, WORKERS)
    settings = [Setting(w, n, s) for w in workloads for n in workers for s in STRATEGIES]
    try:
        result = sweep(settings, STEPS, 4 if asked.quick else 10)
    except PacelineError as error:
        parser.error(str(error))
    if asked.quick:
        print(page(result))
        return
    asked.json.write_text(json.dumps(result, indent=1) + "\n")
    asked.page.write_text(page(result))
    tell(f"{asked.page}: {result['took_s'] / 60:.1f} minutes")


if __name__ == "__main__":
    main()
