"""`paceline monitor RUN …`: runs on a page for the browser, live or after they have ended."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from paceline.errors import ConfigError

NEEDED = "starlette", "uvicorn"


def monitor(
    runs: Annotated[
        list[Path] | None, typer.Argument(metavar="RUN …", help="the folders of runs, side by side", show_default=False)
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help="where it listens [default: 8350, or the next that is free]"),
    ] = None,
    host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="the address it listens on; others than loopback are not encrypted")
    ] = "127.0.0.1",
    allow_host: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="a further name that browsers may ask for it by", show_default=False),
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="keep the token there, for the next start and for Prometheus"),
    ] = None,
    attached: Annotated[bool, typer.Option("--attached", hidden=True)] = False,
) -> None:
    """Show runs on a page: where the time of each worker's steps goes, live, and which worker the others wait for.

    The address that is printed has a token in it: whoever has it can read the runs.
    """
    check_packages("paceline monitor")
    from paceline.dashboard.process import show_runs

    if not runs and not attached:
        raise ConfigError("paceline monitor RUN: name the folder of a run, the one that holds its events/")
    show_runs(runs or [], host, port, allow_host or [], token_file, follows_stdin=attached, say=_say)


def check_packages(what: str) -> None:
    from importlib.util import find_spec

    if missing := [name for name in NEEDED if find_spec(name) is None]:
        raise ConfigError(
            f"{what} needs {' and '.join(missing)}, which {'are' if len(missing) > 1 else 'is'} not installed: "
            "pip install 'paceline[monitor]'"
        )


def _say(line: str) -> None:
    print(f"paceline: {line}", file=sys.stderr, flush=True)
