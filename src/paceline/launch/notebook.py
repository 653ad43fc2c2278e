"""A function of a notebook on several workers: `paceline.notebook_launcher(train, args=(…), workers=2)`.

The function travels to the workers of an ordinary `paceline run` by value (cloudpickle): with what it uses of the
notebook, and without forking a process that has threads, or CUDA, in it. All that the launcher does it does here too:
output by worker, a failure with its name, Ctrl-C, an elastic job.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError, LaunchError
from paceline.world.environment import unbuffered

ENDS_IN_S = 40.0
"""What the launcher has to end its workers when the notebook is interrupted: its grace period, and some more."""


def notebook_launcher(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    *,
    workers: int = 1,
    options: Mapping[str, Any] | None = None,
) -> None:
    """Call `function(*args)` in each of `workers` processes; returns when all have ended, raises if one failed.

    `options` are those of `paceline run` by name: `{"strategy": "zero2", "elastic": True}`. The function makes its own
    Engine. What it returns stays in its process; save what is to be kept.
    """
    try:
        import cloudpickle
    except ImportError as error:
        raise ConfigError("notebook_launcher() needs cloudpickle: pip install cloudpickle") from error
    if not callable(function):
        raise ConfigError(f"notebook_launcher() takes a function and its args, not {type(function).__name__}")
    with tempfile.TemporaryDirectory(prefix="paceline-notebook-") as folder:
        script, parcel = Path(folder) / "notebook.py", Path(folder) / "function.pkl"
        parcel.write_bytes(cloudpickle.dumps((function, tuple(args))))
        script.write_text(
            "import sys, cloudpickle\n"
            f"sys.path[:0] = {[path for path in sys.path if path]!r}\n"
            f"with open({str(parcel)!r}, 'rb') as parcel:\n"
            "    function, arguments = cloudpickle.load(parcel)\n"
            "function(*arguments)\n"
        )
        command = [
            sys.executable,
            "-m",
            "paceline",
            "run",
            "--workers",
            str(workers),
            *_flags(options or {}),
            str(script),
        ]
        code = _run(command)
    if code:
        raise LaunchError(f"notebook_launcher(): the workers ended with code {code}; what happened is told above")


def _flags(options: Mapping[str, Any]) -> list[str]:
    flags = []
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        if value is True:
            flags.append(flag)
        elif value is not False and value is not None:
            flags += [flag, str(value)]
    return flags


def _run(command: Sequence[str]) -> int:
    """Its output is the notebook's: a cell shows what is written to Python's stdout, not to the descriptor."""
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, text=True, env=unbuffered()
    ) as launcher:
        try:
            assert launcher.stdout is not None
            for line in launcher.stdout:
                print(line, end="", flush=True)
            return launcher.wait()
        except BaseException:  # the cell was interrupted; a kernel's processes got the signal too, or did not
            launcher.terminate()
            try:
                launcher.wait(ENDS_IN_S)
            except subprocess.TimeoutExpired:
                launcher.kill()
            raise
