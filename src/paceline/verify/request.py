"""What `paceline verify` wants of a job: a file in the folder that PACELINE_VERIFY names, read by every worker.

steps       how many are recorded; then the script ends
lanes       of the job, where the script does not say
strategy    in place of the script's own
look        after a difference was found: in which step, at which tensors, and at which item's operators
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

FILE = "request.json"

Place = tuple[int, int, int]  # (lane, micro-batch, update) of an item in its step


@dataclass(frozen=True)
class Look:
    """A closer look at one step."""

    step: int
    tensors: tuple[tuple[str, str], ...] = ()  # (kind, name), whose values are wanted
    item: Place | None = None  # whose operators are wanted


@dataclass(frozen=True)
class Request:
    folder: Path
    steps: int
    lanes: int
    strategy: str | None = None
    look: Look | None = None

    def write(self) -> None:
        values = asdict(self) | {"folder": None}
        (self.folder / FILE).write_text(json.dumps(values))

    @classmethod
    def read(cls, folder: Path) -> Request:
        values: dict[str, Any] = json.loads((folder / FILE).read_text())
        if (look := values["look"]) is not None:
            item = None if look["item"] is None else tuple(look["item"])
            look = Look(look["step"], tuple((kind, name) for kind, name in look["tensors"]), item)
        return cls(**values | {"folder": folder, "look": look})


# What workers leave in the folder.


def record_file(worker: int) -> str:
    """A line for each item and step."""
    return f"worker-{worker}.jsonl"


def values_file(worker: int) -> str:
    """Of the tensors that a closer look wants."""
    return f"values-{worker}.safetensors"


def operators_file(item: Place) -> str:
    """By the worker that had the item."""
    return f"operators-{'-'.join(map(str, item))}.json"
