"""`paceline replay`: do a recorded asynchronous run again, on one process, and compare the weights bit for bit.

The script runs here, in the folder and with the arguments, lanes, threads and seed that it had.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.errors import CheckpointError, PacelineError


def replay(
    run: Annotated[Path, typer.Argument(help="the folder given to ParameterServer(record=…)", show_default=False)],
) -> None:
    """Do a recorded asynchronous run again on one process: the weights must have the same bits.

    Exit codes: 0 the weights are equal (or the log ends where the run was killed, and was replayed up to there),
    1 they are not, or the script does something else now, 2 there is no log that could be replayed.
    """
    from paceline.launch.worker_main import Script, run_script
    from paceline.parameter_server.replay import replay_of
    from paceline.parameter_server.update_log import read_log
    from paceline.world import environment

    folder = run.absolute()
    job = read_log(folder).job
    script, threads, seed = _facts_for_replay(folder, job.facts)
    _enter_folder(script)
    # Thread pools are sized when torch is imported, which the script does.
    environment.enter(environment.replay_environment(folder, lanes=job.lanes, threads=threads, seed=seed))
    prepared = replay_of(folder)
    try:
        try:
            names = run_script(Script(script["target"], tuple(script["arguments"]), script["is_module"]))
        except SystemExit as end:
            if end.code not in (0, None):
                raise
            names = {}
        print(f"paceline: {prepared.verdict()}", flush=True)
        del names
    except PacelineError as error:
        print(f"paceline: {error}{_changes(script)}", file=sys.stderr)
        raise typer.Exit(1) from error


def _facts_for_replay(folder: Path, facts: Mapping[str, Any]) -> tuple[Mapping[str, Any], int, int]:
    """The script, the threads and the seed that the run had."""
    script, engine = facts.get("script"), facts.get("engine")
    texts = [script.get(name) for name in ("target", "folder")] if isinstance(script, dict) else [None]
    numbers: list[Any] = (
        [engine.get(name) for name in ("machine threads", "seed")] if isinstance(engine, dict) else [None]
    )
    if (
        not {"script", "engine", "keys", "weights"} <= facts.keys()
        or not isinstance(script, dict)
        or not all(isinstance(text, str) for text in texts)
        or not all(type(number) is int for number in numbers)
        or not isinstance(script.get("arguments"), list)
        or not isinstance(script.get("is_module"), bool)
        or not all(isinstance(word, str) for word in script["arguments"])
    ):
        raise CheckpointError(f"{folder}: its log does not say how the run was started, so it can't be started again")
    return script, numbers[0], numbers[1]


def _enter_folder(script: Mapping[str, Any]) -> None:
    """Relative paths in the arguments mean what they meant then."""
    folder = Path(script["folder"])
    if folder.is_dir():
        os.chdir(folder)
    if not script["is_module"] and not Path(script["target"]).exists():
        raise CheckpointError(
            f"the run was started as {script['target']} in {folder}, and that is not there; "
            "put the script back, or start replay in a folder that has it"
        )


def _changes(script: Mapping[str, Any]) -> str:
    """What explains a difference best."""
    from paceline.parameter_server.update_log import script_digest

    if script["is_module"] or script_digest(script["target"]) == script.get("digest"):
        return ""
    return f" ({script['target']} is not the file that it was then)"
