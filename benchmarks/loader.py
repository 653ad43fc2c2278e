"""The loader: batches per second beside torch's own DataLoader, and what a step costs when data is fetched ahead.

    python benchmarks/loader.py --loader-processes 0 --loader-processes 1

    throughput    the same dataset, batch size and loader processes; an epoch of one, then of the other, in turns
    step          compute alone │ load alone │ both, in turns;  both / max(compute, load) is 1 when one hides the other

Loader processes are kept from round to round on both sides. Compute is real matrix products in one thread, in a loop
that has its data at hand; load is real work in a loader process. The first steps of a turn are not timed, because
nothing was fetched ahead of them.
"""

from __future__ import annotations

import contextlib
import io
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from typing import Any

import numpy as np
import torch
from command_line import command, run, tell
from rich.console import Console
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from turns import WARM_UP_ROUNDS, in_turns, rounds_as_json, spread_of

from paceline.bench.measure import borrowed_settings
from paceline.bench.report import disturbance, extremes, machine_line, quartiles, table_of
from paceline.bench.statistics import DISTURBED_ABOVE, machine_facts
from paceline.data.loader import ShardedLoader
from paceline.data.work_source import Assignment
from paceline.engine.engine import Engine
from paceline.errors import ConfigError
from paceline.world.host_limits import check_host

TARGET = 1.05  # both / max(compute, load)
BATCHES = {"simple": 400, "decoding": 60, "augmenting": 60}
BATCH_SIZE = {"simple": 64, "decoding": 32, "augmenting": 32}
FIRST_STEPS, STEPS = 4, 40
COMPUTE_AND_LOAD_MS = ((10, 20), (20, 20), (20, 10))


class Rows(Dataset[Tensor]):
    """1 KiB from memory: the loader's own cost is what is measured."""

    def __init__(self, samples: int) -> None:
        self._rows = torch.zeros(samples, 256)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Tensor:
        return self._rows[index]


class Decoded(Dataset[Tensor]):
    """Some tenths of a millisecond of numpy for each sample, as to decode a small image; or with a random crop."""

    def __init__(self, samples: int, *, augment: bool = False) -> None:
        self._samples, self._augment = samples, augment

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> Tensor:
        image = np.sin(np.arange(40 * 40 * 3, dtype=np.float32) + index).reshape(40, 40, 3)
        top, left = np.random.randint(0, 8, 2) if self._augment else (4, 4)
        image = image[top : top + 32, left : left + 32]
        return torch.from_numpy(np.ascontiguousarray((image - image.mean()) / image.std()))


class Work(Dataset[Tensor]):
    """A ready-made row that takes `units` of work to get."""

    def __init__(self, samples: int, units: int) -> None:
        self._samples, self._units = samples, units
        self._row = torch.zeros(64)

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> Tensor:
        work(self._units)
        return self._row


def work(units: int) -> None:
    values = np.ones(4096, dtype=np.float32)
    for _ in range(units):
        values = np.sqrt(values + 1.0)


def datasets() -> dict[str, Dataset[Tensor]]:
    counts = {name: BATCHES[name] * BATCH_SIZE[name] for name in BATCHES}
    return {
        "simple": Rows(counts["simple"]),
        "decoding": Decoded(counts["decoding"]),
        "augmenting": Decoded(counts["augmenting"], augment=True),
    }


def measure_loader(rounds: int, processes: Sequence[int], tell: Callable[[str], None]) -> dict[str, Any]:
    if rounds < 1:
        raise ConfigError(f"--rounds {rounds}: at least one round is measured")
    with borrowed_settings():
        throughput = [_throughput(*kind, count, rounds, tell) for kind in datasets().items() for count in processes]
        steps = [_step(compute, load, rounds, tell) for compute, load in COMPUTE_AND_LOAD_MS]
    return {
        "machine": machine_facts(),
        "rounds": rounds,
        "warm_up_rounds": WARM_UP_ROUNDS,
        "disturbed_above": DISTURBED_ABOVE,
        "throughput": throughput,
        "steps": steps,
        "target": TARGET,
        "reached": all(step["ratio"]["median"] <= TARGET for step in steps),
    }


def _throughput(
    name: str, dataset: Dataset[Tensor], processes: int, rounds: int, tell: Callable[[str], None]
) -> dict[str, Any]:
    def loader() -> DataLoader[Tensor]:
        size, keep = BATCH_SIZE[name], processes > 0
        return DataLoader(dataset, batch_size=size, shuffle=True, num_workers=processes, persistent_workers=keep)

    theirs = loader()
    with closing(ShardedLoader(loader(), Assignment(1, 1, (0,), 0))) as ours:
        measured = in_turns(
            [lambda: {"paceline": _batches_per_s(_epoch(ours))}, lambda: {"torch": _batches_per_s(theirs)}], rounds
        )
    ratio = spread_of(measured, lambda speeds: speeds["paceline"] / speeds["torch"])
    tell(f"{name}, {processes} loader processes: {ratio['median']:.3f} of torch's DataLoader")
    return {
        "dataset": name,
        "loader_processes": processes,
        "paceline_batches_per_s": spread_of(measured, lambda speeds: speeds["paceline"]),
        "torch_batches_per_s": spread_of(measured, lambda speeds: speeds["torch"]),
        "ratio": ratio,
        **rounds_as_json(measured),
    }


def _epoch(loader: ShardedLoader) -> Iterator[Any]:
    """As the Engine takes it: every step is counted, so the next epoch is another one."""
    for item, batch in loader.items():
        if item.last_of_step:
            loader.commit(item)
        yield batch


def _batches_per_s(batches: Iterable[Any]) -> float:
    began, count = time.perf_counter(), 0
    for _ in batches:
        count += 1
    return count / (time.perf_counter() - began)


def _step(compute_ms: int, load_ms: int, rounds: int, tell: Callable[[str], None]) -> dict[str, Any]:
    """One sample is a batch; compute and load take about the milliseconds asked for, and are measured."""
    weight = torch.randn(256, 256)
    products = _times(lambda: weight @ weight, compute_ms)
    units = 50 * _times(lambda: work(50), load_ms)
    samples = FIRST_STEPS + STEPS
    with (
        closing(_Loop(weight, products, Work(samples, 0), processes=0)) as computing,
        closing(_Loop(weight, products, Work(samples, units), processes=1)) as both,
        closing(ShardedLoader(_one_by_one(Work(samples, units), 1), Assignment(1, 1, (0,), 0))) as loading,
    ):
        measured = in_turns(
            [
                lambda: dict(zip(("both", "waited"), both.run(), strict=True)),
                lambda: {"compute": computing.run()[0]},
                lambda: {"load": _step_s([time.perf_counter() for _ in loading.items()])},
            ],
            rounds,
        )
    ratio = spread_of(measured, lambda times: times["both"] / max(times["compute"], times["load"]))
    tell(f"compute {compute_ms} ms, load {load_ms} ms: step {ratio['median']:.3f} of the longer")
    return {
        "both_s": spread_of(measured, lambda times: times["both"]),
        "compute_s": spread_of(measured, lambda times: times["compute"]),
        "load_s": spread_of(measured, lambda times: times["load"]),
        "waited_s": spread_of(measured, lambda times: times["waited"]),
        "ratio": ratio,
        **rounds_as_json(measured),
    }


def _one_by_one(dataset: Dataset[Tensor], processes: int) -> DataLoader[Tensor]:
    if processes == 0:
        return DataLoader(dataset, batch_size=1)
    return DataLoader(dataset, batch_size=1, num_workers=processes, persistent_workers=True, prefetch_factor=4)


class _Loop:
    """A training loop through the Engine whose body is mostly matrix products."""

    def __init__(self, weight: Tensor, products: int, dataset: Dataset[Tensor], *, processes: int) -> None:
        self._weight, self._products = weight, products
        with contextlib.redirect_stdout(io.StringIO()):
            self._engine = Engine(lanes=1, threads=1, device="cpu")
            model = nn.Linear(64, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
            prepared = self._engine.prepare(model, optimizer, _one_by_one(dataset, processes))
        self._model, self._optimizer, self._loader = prepared

    def run(self) -> tuple[float, float]:
        """Seconds of a step, and of those the time spent waiting for data."""
        waits, ends = [], []
        for batch in self._loader:
            for _ in range(self._products):
                self._weight @ self._weight
            self._engine.backward(self._model(batch).mean())
            self._optimizer.step()
            self._optimizer.zero_grad()
            waits.append(self._engine.timing.waited_for_data_s)
            ends.append(time.perf_counter())
        return _step_s(ends), sum(waits[FIRST_STEPS:]) / STEPS

    def close(self) -> None:
        self._engine.close()


def _step_s(ends: Sequence[float]) -> float:
    return (ends[-1] - ends[FIRST_STEPS - 1]) / (len(ends) - FIRST_STEPS)


def _times(unit: Callable[[], Any], milliseconds: int) -> int:
    """How often `unit` has to be done to take so long, by the median of short trials: the machine may be busy."""
    trials = []
    for _ in range(100):
        began, count = time.perf_counter(), 0
        while time.perf_counter() - began < 1e-3:
            unit()
            count += 1
        trials.append((time.perf_counter() - began) / count)
    return max(1, round(milliseconds / 1e3 / statistics.median(trials)))


def show_loader(result: dict[str, Any], out: Console) -> None:
    spreads = ("quartiles", "least – most", "of quiet rounds")
    table = table_of("dataset", "processes", "batches/s", "torch's", "ratio", *spreads)
    for row in result["throughput"]:
        speeds = [f"{row[f'{side}_batches_per_s']['median']:,.0f}" for side in ("paceline", "torch")]
        table.add_row(row["dataset"], str(row["loader_processes"]), *speeds, *_cells(row["ratio"]))
    out.print(table)
    steps = table_of("compute, ms", "load, ms", "step, ms", "waited, ms", "step / longer", *spreads)
    for row in result["steps"]:
        cells = [f"{row[name]['median'] * 1e3:.2f}" for name in ("compute_s", "load_s", "both_s", "waited_s")]
        steps.add_row(*cells, *_cells(row["ratio"]))
    out.print(steps)
    verdict = "reached" if result["reached"] else "MISSED"
    out.print(f"Target: a step of at most {result['target']:g} times the longer of compute and load: {verdict}")
    parts = [*result["throughput"], *result["steps"]]
    disturbed, rounds = sum(part["disturbed_rounds"] for part in parts), sum(len(part["rounds"]) for part in parts)
    out.print(disturbance(disturbed, rounds, "rounds", result["disturbed_above"]))
    out.print(machine_line(result["machine"]))


def _cells(ratio: dict[str, Any]) -> list[str]:
    quiet = ratio["median_of_quiet_rounds"]
    return [
        f"{ratio['median']:.3f}",
        quartiles(ratio, 3),
        extremes(ratio, 3),
        "none" if quiet is None else f"{quiet:.3f}",
    ]


def main(words: Sequence[str] | None = None) -> None:
    parser = command(__doc__)
    parser.add_argument(
        "--loader-processes", type=int, action="append", metavar="N", help="may be repeated [default: 0 and 1]"
    )
    parser.add_argument("--rounds", type=int, default=22, help="measured; one more comes first and is dropped")
    asked = parser.parse_args(words)

    def measure() -> dict[str, Any]:
        for count in asked.loader_processes or ():
            check_host(count, f"--loader-processes {count}")
        return measure_loader(asked.rounds, asked.loader_processes or [0, 1], tell)

    run(parser, asked.json, measure, show_loader)


if __name__ == "__main__":
    main()
