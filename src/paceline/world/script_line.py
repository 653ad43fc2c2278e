"""The line of the script that led to where paceline is: what warnings, errors and reports of waits name.

train.py:26                    the script: neither ours, nor Python's, nor an installed package's
torch/optim/lr_scheduler.py    on the way to us, like hooks that torch calls
paceline/engine/step.py
"""

from __future__ import annotations

import site
import sysconfig
from functools import cache
from pathlib import Path
from types import FrameType, TracebackType


def frames_to_script(innermost: FrameType | None) -> tuple[list[FrameType], FrameType | None]:
    """The frames from `innermost` outwards, up to the script's, and that one; None where no script has called."""
    inside: list[FrameType] = []
    frame = innermost
    while frame is not None and not _is_of_script(frame):
        inside.append(frame)
        frame = frame.f_back
    return inside, frame


def place_of_error(frames: TracebackType | None) -> str:
    """The script's line that an exception came through last; empty where it came through none."""
    place = ""
    while frames is not None:
        if _is_of_script(frames.tb_frame):
            place = f"{Path(frames.tb_frame.f_code.co_filename).name}:{frames.tb_lineno}"
        frames = frames.tb_next
    return place


def place_of(frame: FrameType) -> str:
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def _is_of_script(frame: FrameType) -> bool:
    # What dataclasses generate for us is in no file; so is a script behind `python -c`.
    generated = frame.f_code.co_filename == "<string>" and frame.f_globals.get("__name__", "").startswith("paceline.")
    return not generated and not frame.f_code.co_filename.startswith(_not_the_script())


@cache
def _not_the_script() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    installed = {paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")} | {site.getusersitepackages()}
    folders = [Path(__file__).parents[1], *(where for path in installed for where in (path, Path(path).resolve()))]
    return ("<frozen", "<eval_with_key>", *(f"{folder}/" for folder in folders))
