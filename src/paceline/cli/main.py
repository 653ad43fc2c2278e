"""`paceline VERB …`: one file per verb, imported when it is called.

`paceline --help` reads every verb's signature, so a verb's file imports what is heavy (torch above all) inside its
function.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import typer
from typer.core import TyperGroup

from paceline.errors import PacelineError, WorldError

VERBS = {
    "run": "paceline.cli.run",
    "doctor": "paceline.cli.doctor",
    "bench": "paceline.cli.bench",
    "data": "paceline.cli.data",
    "checkpoint": "paceline.cli.checkpoint",
    "replay": "paceline.cli.replay",
    "chaos": "paceline.cli.chaos",
}


class Verbs(TyperGroup):
    """Finds a verb's function in the module of the same name."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in VERBS:
            return None
        module = importlib.import_module(VERBS[cmd_name])
        if isinstance(getattr(module, "app", None), typer.Typer):  # a verb with verbs of its own
            return typer.main.get_command(module.app)
        app = typer.Typer(add_completion=False, rich_markup_mode=None)
        app.command(name=cmd_name, **getattr(module, "COMMAND", {}))(getattr(module, cmd_name))
        return typer.main.get_command(app)


app = typer.Typer(
    cls=Verbs, name="paceline", no_args_is_help=True, add_completion=False, rich_markup_mode=None,
    pretty_exceptions_enable=False,
)  # fmt: skip


@app.callback()
def paceline() -> None:
    """Data-parallel training for PyTorch: the same bits on any number of workers."""


def main() -> None:
    try:
        app(prog_name="paceline")
    except PacelineError as error:
        print(f"paceline: {error}", file=sys.stderr)
        sys.exit(3 if isinstance(error, WorldError) else 2)


if __name__ == "__main__":
    main()
