"""What the workers of one run wrote, put together: items by their place in a step, steps by worker."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.verify.request import Place, record_file


@dataclass(frozen=True)
class Setting:
    """What differs between the runs."""

    workers: int
    strategy: str | None = None  # the script's own

    def __str__(self) -> str:
        beside = "" if self.strategy is None else f", {self.strategy}"
        return f"{self.workers} worker{'' if self.workers == 1 else 's'}{beside}"


@dataclass(frozen=True)
class Item:
    """A micro-batch of a lane; what comes after `data` is None or empty where the body left it without backward."""

    worker: int
    epoch: int
    ids: tuple[int, ...]
    data: Mapping[str, str]
    random: Mapping[str, str] = field(default_factory=dict)
    loss: float | None = None
    weight: float | None = None
    gradients: Mapping[str, str] = field(default_factory=dict)  # the item's own


@dataclass(frozen=True)
class After:
    """What a worker had after a step."""

    rates: tuple[float, ...]
    gradients: Mapping[str, str] | None  # of the global batch, where a worker has them whole
    buffers: Mapping[str, str]
    weights: Mapping[str, str]
    sketches: Mapping[str, tuple[float, ...]] = field(default_factory=dict)  # of both, where bits are not promised
    empty: bool = False


@dataclass
class Step:
    entry: dict[int, Mapping[str, str]] = field(default_factory=dict)  # by worker: weights that the script has written
    items: dict[Place, Item] = field(default_factory=dict)
    after: dict[int, After] = field(default_factory=dict)  # by worker


@dataclass
class Run:
    """Of one setting."""

    setting: Setting
    about: Mapping[str, Any] = field(default_factory=dict)
    start: dict[int, Mapping[str, str]] = field(default_factory=dict)  # by worker: the first weights
    steps: dict[int, Step] = field(default_factory=dict)
    seconds: float = 0.0
    code: int = 0
    error: str | None = None  # what the launcher said of a run that failed
    in_updates: bool = False  # its steps have several: then each is recorded like a step of its own

    @property
    def workers(self) -> int:
        return self.setting.workers

    @property
    def made(self) -> int:
        """Steps that all workers have made."""
        return sum(len(step.after) == self.workers for step in self.steps.values())

    @property
    def in_bits(self) -> bool:
        return bool(self.about.get("reduction") != "fast")

    @property
    def whole(self) -> bool:
        """Every worker has all weights between steps."""
        return bool(self.about.get("whole", True))

    def name(self) -> str:
        """With the strategy that the script chose, once it is known."""
        return str(Setting(self.workers, self.setting.strategy or self.about.get("strategy")))


def read_run(setting: Setting, folder: Path) -> Run:
    """What there is: a run that failed, or was stopped, has the steps up to there."""
    run = Run(setting)
    for worker in range(setting.workers):
        file = folder / record_file(worker)
        for text in file.read_text().splitlines() if file.exists() else []:
            try:
                line = json.loads(text)
            except ValueError:  # its writer was killed
                continue
            _take(run, worker, line)
    return run


def _take(run: Run, worker: int, line: dict[str, Any]) -> None:
    kind = line.pop("kind")
    if kind == "start":
        run.start.setdefault(worker, line["weights"])
        run.about = run.about or line
        return
    step = run.steps.setdefault(line["step"], Step())
    if kind == "entry":
        step.entry[worker] = line["changed"]
    elif kind == "item":
        loss = line.get("loss")
        step.items[tuple(line["place"])] = Item(
            worker, line["epoch"], tuple(line["ids"]), line["data"], line.get("random", {}),
            None if loss is None else float.fromhex(loss), line.get("weight"), line["gradients"],
        )  # fmt: skip
    else:
        run.in_updates |= line["update"] > 0
        sketches = {name: tuple(values) for name, values in line["sketches"].items()}
        step.after[worker] = After(
            tuple(line["rates"]), line["gradients"], line["buffers"], line["weights"], sketches, line["empty"]
        )
