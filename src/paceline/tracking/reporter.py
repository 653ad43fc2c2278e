"""A reporter: somewhere that a run's values go, one call per moment. Only the main worker has any.

    start(run)            once, before the first step; `run.resumed_at` is the step that an earlier run had reached.
                          Or later, by another worker, where the main one is lost: `run.taken_over`
    log(step, values)     numbers by name, as they come; NaN and infinity are values like others
    close(ok)             once, at the end; not ok: by an exception

Which ones a run has is chosen in `__init__.py`; JSON lines are always among them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from paceline.input_file import cause_of, read_json
from paceline.world import messages

Logged: TypeAlias = tuple[int, Mapping[str, float]]
"""A step and what was logged in it."""


@dataclass(frozen=True)
class RunInfo:
    """What is known of a run before its first step. `config` and `world` hold values of JSON."""

    name: str
    folder: Path
    config: Mapping[str, Any] = field(default_factory=dict)
    world: Mapping[str, Any] = field(default_factory=dict)
    """Workers, lanes, strategy, device, versions: what the config alone doesn't tell."""
    resumed_at: int | None = None
    taken_over: Sequence[Logged] | None = None
    """The run is under way: these are the lines of the last step that a lost worker has written, `resumed_at`."""


class Reporter(Protocol):
    """Where metrics go: started by the main process, told each logged step, closed at the end."""

    name: str

    def start(self, run: RunInfo) -> None: ...
    def log(self, step: int, values: Mapping[str, float]) -> None: ...
    def close(self, *, ok: bool = True) -> None: ...


def known_id(file: Path) -> str | None:
    """The id of the tool's run to continue; None, with a warning where it can't be read: a new one is started."""
    try:
        known = read_json(file)["id"]
        if not isinstance(known, str) or not known:
            raise ValueError("it holds no id")
        return known
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError) as error:
        messages.warn(f"{file} can't be read, so a new run is started there: {cause_of(error)}")
        return None


def in_section(name: str) -> str:
    """`eval_loss` -> `eval/loss`, `loss` -> `train/loss`: how dashboards group curves, with transformers' names."""
    for section in ("eval", "test"):
        if name.startswith(f"{section}_"):
            return f"{section}/{name.removeprefix(section + '_')}"
    return name if "/" in name else f"train/{name}"
