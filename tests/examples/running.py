"""An example as a person starts it, in workers that are forked from the preloaded parent instead of started cold.

printed = run_example("digits.py", 2, "--max-steps", "4")      what worker 0 printed
hash_in(printed)                                               sha256:…
printed_by("run --workers 2 …")                                what a job of the launcher said
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import shlex
import signal
import sys
from pathlib import Path

from paceline.world.world import TcpRendezvous, World
from tests.faults.jobs import BorrowedPopen
from tests.workers import Result, run_workers

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
LANES = 2


def run_example(name: str, workers: int, *arguments: str, lanes: int = LANES) -> str:
    """Trains with `workers` workers, which have two lanes between them; what the first of them printed."""
    results = example_results(name, workers, *arguments, lanes=lanes)
    for result in results:
        assert result.error is None, f"{name} on {result.name}: {result.error}\n{result.traceback}"
    return str(results[0].value)


def example_results(
    name: str, workers: int, *arguments: str, lanes: int = LANES, signal_at_save: int = 0
) -> list[Result]:
    """With `signal_at_save` the last worker gets a SIGTERM when it begins its so-manieth save."""
    given = {"name": name, "arguments": arguments, "lanes": lanes, "signal_at_save": signal_at_save}
    return run_workers(run_script, workers, **given)  # type: ignore[arg-type]


def run_script(world: World, name: str, arguments: tuple[str, ...], lanes: int, signal_at_save: int) -> str:
    """Inside a worker, whose process ends with it."""
    os.environ.update(variables_of(world), PACELINE_LANES=str(lanes), PACELINE_THREADS="1")
    sys.argv = [name, *arguments]
    if signal_at_save and world.rank == world.size - 1:
        _signal_at_save(signal_at_save)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return printed.getvalue()


def variables_of(world: World) -> dict[str, str]:
    """What a launcher that sets torchrun's names would leave."""
    if world.size == 1:
        return {}
    assert isinstance(world.rendezvous, TcpRendezvous)
    return {
        "RANK": str(world.rank),
        "WORLD_SIZE": str(world.size),
        "LOCAL_RANK": str(world.local_rank),
        "LOCAL_WORLD_SIZE": str(world.local_size),
        "MASTER_ADDR": world.rendezvous.address,
        "MASTER_PORT": str(world.rendezvous.port),
    }


def printed_by(command: str) -> str:
    """What `paceline <command>` says in the current folder, by a launcher that is forked as well."""
    log = Path("printed.txt").resolve()
    log.unlink(missing_ok=True)
    started = BorrowedPopen(shlex.split(command), log, {})
    while started.poll() is None:
        started.wait()
    assert started.returncode == 0, f"{command}\n{log.read_text()}"
    return log.read_text()


def hash_in(printed: str) -> str:
    found = re.findall(r"sha256:[0-9a-f]{64}", printed)
    assert len(found) == 1, printed
    return str(found[0])


def _signal_at_save(number: int) -> None:
    from paceline.engine.checkpoints import Checkpoints

    save, begun = Checkpoints.save, 0

    def signalled(self: Checkpoints, *given: object, **named: object) -> object:
        nonlocal begun
        begun += 1
        if begun == number:
            os.kill(os.getpid(), signal.SIGTERM)
        return save(self, *given, **named)  # type: ignore[arg-type]

    Checkpoints.save = signalled  # type: ignore[method-assign, assignment]
