"""Plan for a script: run it in a process of its own, in which `engine.prepare` profiles instead of training.

    1st try    the loop's body on fake tensors, once for each variant      PACELINE_PLAN=order.json python script.py …
    2nd try    where that fails: the body for real, on its own batch

The order says what to profile and where to write it; the engine's side is `engine/script_profile.py`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline import input_file
from paceline.errors import ConfigError
from paceline.planner.model_profile import ModelProfile
from paceline.planner.profile_file import from_json
from paceline.planner.search import Request
from paceline.world.environment import plan_environment

LONGEST_S = 600.0


@dataclass(frozen=True)
class Order:
    """What the script's process is asked for."""

    out: str
    request: Request
    name: str
    real: bool = False  # run the body on real tensors
    timed: bool = False  # and measure how long a pass takes here
    fused_attention: bool = False

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, path: Path) -> Order:
        told = input_file.read_json(path)
        request: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in told["request"].items()}
        return cls(**told | {"request": Request(**request)})


def profile_script(
    script: Path, arguments: Sequence[str], request: Request, *, timed: bool, threads: int, fused_attention: bool
) -> tuple[ModelProfile, str | None]:
    """The profile, and why the script could not be traced, if it could not."""
    if not script.is_file():
        raise ConfigError(f"there is no script {script}")
    with tempfile.TemporaryDirectory(prefix="paceline-plan-") as folder:
        out = Path(folder) / "profile.json"
        order = Order(str(out), request, script.name, timed=timed, fused_attention=fused_attention)
        why = _run(script, arguments, order, Path(folder), threads)
        if out.exists():
            return from_json(input_file.read_json(out)), None
        real = Order(str(out), request, script.name, real=True, timed=True)
        again = _run(script, arguments, real, Path(folder), threads)
        if out.exists():
            return from_json(input_file.read_json(out)), why
    raise ConfigError(
        f"{script} could not be profiled. On fake tensors: {why}. For real: {again}. What can be: a loop over one "
        "loader of engine.prepare(model, optimizer, loader), with engine.backward(loss); otherwise give --model "
        "module:function"
    )


def _run(script: Path, arguments: Sequence[str], order: Order, folder: Path, threads: int) -> str:
    """What it said last, where it did not write a profile."""
    path = folder / "order.json"
    path.write_text(order.to_json())
    try:
        ended = subprocess.run(
            [sys.executable, str(script), *arguments],
            env=plan_environment(path, threads=threads), capture_output=True, text=True, timeout=LONGEST_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"it ran for {LONGEST_S:.0f} s without reaching engine.backward()"
    lines = [line.strip() for line in (ended.stderr or ended.stdout).splitlines() if line.strip()]
    if ended.returncode == 0:
        return "it ended without a step of a prepared loader"
    return lines[-1][:300] if lines else f"it ended with exit code {ended.returncode}"
