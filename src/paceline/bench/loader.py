"""The loader: batches per second beside torch's own DataLoader, and what a step costs when data is fetched ahead.

    throughput    the same dataset, batch size and loader processes; an epoch of one, then of the other, in turns
    step          compute alone │ load alone │ both, in turns;  both / max(compute, load) is 1 when one hides the other

Epochs are long enough for what is fetched ahead at their beginning not to count for much, and loader processes are kept
from round to round on both sides. Compute is real matrix products in one thread, load is real work in a loader process.
"""

from __future__ import annotations

import contextlib
import io
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from paceline.bench.machine_load import machine_facts
from paceline.bench.report import extremes, machine_line, quartiles, table_of
from paceline.bench.statistics import Spread, paired_ratios
from paceline.data.loader import ShardedLoader
from paceline.data.work_source import Deal
from paceline.engine.engine import Engine
from paceline.errors import ConfigError

WARM_UP_ROUNDS = 1
BATCHES = {"simple": 400, "decoding": 60, "augmenting": 60}
BATCH_SIZE = {"simple": 64, "decoding": 32, "augmenting": 32}
STEPS = 40
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
    torch.set_num_threads(1)
    throughput = [
        _throughput(name, dataset, count, rounds, tell) for name, dataset in datasets().items() for count in processes
    ]
    steps = [_step(compute, load, rounds, tell) for compute, load in COMPUTE_AND_LOAD_MS]
    return {"machine": machine_facts(), "rounds": rounds, "throughput": throughput, "steps": steps}


def _throughput(
    name: str, dataset: Dataset[Tensor], processes: int, rounds: int, tell: Callable[[str], None]
) -> dict[str, Any]:
    def loader() -> DataLoader[Tensor]:
        size, keep = BATCH_SIZE[name], processes > 0
        return DataLoader(dataset, batch_size=size, shuffle=True, num_workers=processes, persistent_workers=keep)

    theirs = loader()
    speeds: dict[str, list[float]] = {"paceline": [], "torch": []}
    with closing(ShardedLoader(loader(), Deal(1, 1, (0,), 0))) as ours:
        for number in range(WARM_UP_ROUNDS + rounds):
            turns: list[tuple[str, Iterable[Any]]] = [("paceline", ours.items()), ("torch", theirs)]
            for side, batches in turns[:: 1 if number % 2 else -1]:
                speeds[side].append(_batches_per_s(batches))
    ours_s, theirs_s = (speeds[side][WARM_UP_ROUNDS:] for side in ("paceline", "torch"))
    ratio = Spread.of(paired_ratios(ours_s, theirs_s))
    tell(f"{name}, {processes} loader processes: {ratio.median:.3f} of torch's DataLoader")
    return {
        "dataset": name,
        "loader_processes": processes,
        "paceline_batches_per_s": asdict(Spread.of(ours_s)),
        "torch_batches_per_s": asdict(Spread.of(theirs_s)),
        "ratio": asdict(ratio),
    }


def _batches_per_s(batches: Iterable[Any]) -> float:
    began, count = time.perf_counter(), 0
    for _ in batches:
        count += 1
    return count / (time.perf_counter() - began)


def _step(compute_ms: int, load_ms: int, rounds: int, tell: Callable[[str], None]) -> dict[str, Any]:
    """One sample is a batch; compute and load take about the milliseconds asked for, and are measured."""
    weight = torch.randn(256, 256)
    products = _times(lambda: weight @ weight, compute_ms)
    units = _times(lambda: work(1), load_ms)
    taken: dict[str, list[float]] = {"compute": [], "load": [], "both": []}
    waited: list[float] = []
    with (
        closing(_Loop(weight, products, Work(STEPS, 0), processes=0)) as computing,
        closing(_Loop(weight, products, Work(STEPS, units), processes=1)) as both,
        closing(ShardedLoader(_one_by_one(Work(STEPS, units), 1), Deal(1, 1, (0,), 0))) as loading,
    ):
        for number in range(WARM_UP_ROUNDS + rounds):
            step_s, waited_s = both.run()
            values = {"both": step_s, "compute": computing.run()[0], "load": 1 / _batches_per_s(loading.items())}
            if number >= WARM_UP_ROUNDS:
                for name, value in values.items():
                    taken[name].append(value)
                waited.append(waited_s)
    bounds = [max(pair) for pair in zip(taken["compute"], taken["load"], strict=True)]
    ratio = Spread.of(paired_ratios(taken["both"], bounds))
    tell(f"compute {compute_ms} ms, load {load_ms} ms: step {ratio.median:.3f} of the longer")
    return {
        **{f"{name}_s": asdict(Spread.of(values)) for name, values in taken.items()},
        "waited_s": asdict(Spread.of(waited)),
        "ratio": asdict(ratio),
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
        waits = []
        began = time.perf_counter()
        for batch in self._loader:
            for _ in range(self._products):
                self._weight @ self._weight
            self._engine.backward(self._model(batch).mean())
            self._optimizer.step()
            self._optimizer.zero_grad()
            waits.append(self._engine.timing.waited_for_data_s)
        return (time.perf_counter() - began) / len(waits), sum(waits) / len(waits)

    def close(self) -> None:
        self._engine.close()


def _times(unit: Callable[[], Any], milliseconds: int) -> int:
    """How often `unit` has to be done to take so long."""
    for _ in range(20):
        unit()
    began = time.perf_counter()
    for _ in range(200):
        unit()
    return max(1, round(milliseconds / 1e3 / ((time.perf_counter() - began) / 200)))


def show_loader(result: dict[str, Any], out: Console) -> None:
    table = table_of("dataset", "processes", "batches/s", "torch's", "ratio", "quartiles", "least – most")
    for row in result["throughput"]:
        ratio = row["ratio"]
        table.add_row(
            row["dataset"],
            str(row["loader_processes"]),
            f"{row['paceline_batches_per_s']['median']:,.0f}",
            f"{row['torch_batches_per_s']['median']:,.0f}",
            f"{ratio['median']:.3f}",
            quartiles(ratio, 3),
            extremes(ratio, 3),
        )
    out.print(table)
    steps = table_of("compute, ms", "load, ms", "step, ms", "waited, ms", "step / longer", "quartiles", "least – most")
    for row in result["steps"]:
        cells = [f"{row[name]['median'] * 1e3:.2f}" for name in ("compute_s", "load_s", "both_s", "waited_s")]
        steps.add_row(*cells, f"{row['ratio']['median']:.3f}", quartiles(row["ratio"], 3), extremes(row["ratio"], 3))
    out.print(steps)
    out.print(machine_line(result["machine"]))
