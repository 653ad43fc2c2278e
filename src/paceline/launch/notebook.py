"""A function of a notebook on several workers: `paceline.notebook_launcher(train, args=(…), workers=2)`.

The function travels to the workers of an ordinary `paceline run` by value (cloudpickle): with what it uses of the
notebook, and without forking a process that has threads, or CUDA, in it. All that the launcher does it does here too:
output by worker, a failure with its name, Ctrl-C, an elastic job.
"""

from __future__ import annotations

import difflib
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from paceline.errors import ConfigError, LaunchError
from paceline.world.environment import unbuffered

ENDS_IN_S = 40.0
"""What the launcher has to end its workers when the notebook is interrupted: its grace period, and some more."""

_HOSTS = "write options={'hosts': …, 'host_rank': …, 'coordinator': 'ADDRESS:PORT'}, as `paceline run` has them"

_ELSEWHERE: Mapping[str, str] = {
    "log_line_prefix_template": "leave it out: each line begins with its worker where they print different ones",
    "master_addr": _HOSTS,
    "max_restarts": "write options={'elastic': True}: a worker that dies is replaced, and training goes on",
    "mixed_precision": "write Engine(mixed_precision=…) in the function, or options={'precision': …} here",
    "monitor_interval": "leave it out: the launcher hears at once when a worker ends",
    "node_rank": _HOSTS,
    "num_nodes": _HOSTS,
    "rdzv_backend": _HOSTS,
    "rdzv_conf": _HOSTS,
    "rdzv_endpoint": _HOSTS,
    "rdzv_id": _HOSTS,
    "use_port": "leave it out: workers of one host find a free port by themselves",
}
"""Of Accelerate's notebook_launcher, with what to write here."""


def notebook_launcher(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    num_processes: int | None = None,
    *,
    workers: int | None = None,
    options: Mapping[str, Any] | None = None,
    **unknown: Any,
) -> None:
    """Call `function(*args)` in each of `workers` processes; returns when all have ended, raises if one failed.

    `options` are those of `paceline run` by name: `{"strategy": "zero2", "elastic": True}`. The function makes its own
    Engine. What it returns stays in its process; save what is to be kept. `num_processes` is Accelerate's name for
    `workers`, of which there is 1 by default.
    """
    for name in unknown:
        _refuse(name)
    if num_processes is not None and workers not in (None, num_processes):
        raise ConfigError(f"notebook_launcher(): num_processes={num_processes} and workers={workers} differ; give one")
    count = num_processes if workers is None else workers
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
            str(1 if count is None else count),
            *_flags(options or {}),
            str(script),
        ]
        code = _run(command)
    if code:
        raise LaunchError(f"notebook_launcher(): the workers ended with code {code}; what happened is told above")


def _refuse(name: str) -> NoReturn:
    near = difflib.get_close_matches(name, ("args", "workers", "num_processes", "options"), n=1)
    instead = f"did you mean {near[0]}=?" if near else "it takes args, workers and options"
    raise ConfigError(f"notebook_launcher({name}=…) is not known; {_ELSEWHERE.get(name, instead)}")


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
