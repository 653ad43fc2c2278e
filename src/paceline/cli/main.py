"""`paceline VERB …`: one file per verb, imported when it is called.

`paceline --help` reads every verb's signature, so a verb's file imports what is heavy (torch above all) inside its
function.

What no option of any verb can mean is refused here, before the verb is called: a number that is not finite, below zero
or beyond 64 bits, and an empty text. A verb checks only what is its own: which numbers make sense.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import math
import os
import sys
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from paceline import __version__
from paceline.errors import ConfigError, PacelineError, WorldError
from paceline.input_file import one_line

VERBS = {
    "run": "paceline.cli.run",
    "doctor": "paceline.cli.doctor",
    "plan": "paceline.cli.plan",
    "bench": "paceline.cli.bench",
    "data": "paceline.cli.data",
    "checkpoint": "paceline.cli.checkpoint",
    "replay": "paceline.cli.replay",
    "chaos": "paceline.cli.chaos",
    "simulate": "paceline.cli.simulate",
    "verify": "paceline.cli.verify",
    "top": "paceline.cli.top",
    "trace": "paceline.cli.trace",
    "monitor": "paceline.cli.monitor",
}

LONGEST_PATH = 200
BEYOND = 2**63
UNTOUCHED = ("arguments", "job")
"""Words of another command line: whatever they are, they are passed on."""


class Verb(TyperCommand):
    """A verb whose options are told in the groups that they are declared in (typer's `rich_help_panel`)."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            if (record := parameter.get_help_record(ctx)) is not None:
                kind = "Arguments" if parameter.param_type_name == "argument" else "Options"
                groups.setdefault(getattr(parameter, "rich_help_panel", None) or kind, []).append(_short(*record))
        for title, records in groups.items():
            with formatter.section(title):
                formatter.write_dl(records)


def _short(names: str, text: str) -> tuple[str, str]:
    """The first long name of an option alone: others are what other launchers call it."""
    *others, last = names.split(", ")
    long = next((name for name in others if name.startswith("--")), None)
    if long is None:
        return names, text
    _, _, value = last.partition(" ")
    short = [name for name in others if not name.startswith("--")]
    return ", ".join([*short, f"{long} {value}".rstrip()]), text


class VerbGroup(TyperGroup):
    """Verbs, each told by its first sentence, whole."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        verbs = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl([(name, _first_sentence(verb.help or "")) for name, verb in verbs if verb])


def _first_sentence(text: str) -> str:
    return " ".join(text.split("\n\n")[0].split())


class Verbs(VerbGroup):
    """Finds a verb's function in the module of the same name."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] not in VERBS and not args[0].startswith("-"):
            nearest = difflib.get_close_matches(args[0], VERBS, n=1)
            meant = f"did you mean `paceline {nearest[0]}`?" if nearest else f"there are {', '.join(VERBS)}"
            if args[0].endswith(".py"):
                meant = f"a script is started with `paceline run {one_line(args[0], LONGEST_PATH)}`"
            raise ConfigError(f"{one_line(args[0], LONGEST_PATH)!r} is no verb of paceline; {meant}")
        return super().resolve_command(ctx, args)

    def list_commands(self, ctx: Any) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in VERBS:
            return None
        module = importlib.import_module(VERBS[cmd_name])
        if isinstance(getattr(module, "app", None), typer.Typer):  # a verb with verbs of its own
            for command in module.app.registered_commands:
                command.callback, command.cls = _checked(command.callback), Verb
            module.app.info.cls = VerbGroup
            return typer.main.get_command(module.app)
        app = typer.Typer(add_completion=False, rich_markup_mode=None)
        app.command(name=cmd_name, cls=Verb, **getattr(module, "COMMAND", {}))(_checked(getattr(module, cmd_name)))
        return typer.main.get_command(app)


app = typer.Typer(
    cls=Verbs, name="paceline", no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)  # fmt: skip


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"paceline {__version__}")
        raise typer.Exit


@app.callback()
def paceline(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Data-parallel training for PyTorch: the same bits on any number of workers."""


def _checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, with its arguments looked at before it is called."""
    if getattr(function, "checks_values", False):
        return function

    @functools.wraps(function)
    def call(**values: Any) -> Any:
        for name, value in values.items():
            for one in value if isinstance(value, list) else [value]:
                if name not in UNTOUCHED and (wrong := _wrong_with(one)) is not None:
                    raise ConfigError(f"{_option(function, name)} {one_line(str(one))!r}: {wrong}")
        return function(**values)

    call.checks_values = True  # type: ignore[attr-defined]
    return call


def _wrong_with(value: Any) -> str | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        if not math.isfinite(value):
            return "it must be a finite number"
        if value < 0:
            return "it must not be below 0"
        return "it is too large a number" if value >= BEYOND else None
    if isinstance(value, Path) and str(value).startswith("--"):
        return f"an option came where a path belongs; write ./{value} if it is one"
    return "it is empty" if value == "" else None


def _option(function: Callable[..., Any], name: str) -> str:
    """As it is written on the command line."""
    hint = typing.get_type_hints(function, include_extras=True).get(name)
    for about in getattr(hint, "__metadata__", ()):
        if written := [word for word in getattr(about, "param_decls", None) or () if word.startswith("--")]:
            return str(written[0])
        if type(about).__name__ == "ArgumentInfo":
            return str(about.metavar or name.upper())
    return f"--{name.replace('_', '-')}"


def _check_folder() -> None:
    """A library that torch loads would end the process there, without a word of why."""
    try:
        os.getcwd()
    except OSError as error:
        raise ConfigError(
            f"the current folder has been removed ({error.strerror}); change to one that exists"
        ) from error


def main() -> None:
    """One line for whatever a person or their machine can put right; a traceback is a fault of ours."""
    try:
        _check_folder()
        # Path("") is the current folder, so an empty path is seen in the words alone; these verbs pass words on.
        if sys.argv[1:2] not in (["run"], ["chaos"], ["verify"]) and "" in sys.argv[1:]:
            raise ConfigError("a word of the command line is empty (a variable of the shell that is not set?)")
        sys.exit(app(prog_name="paceline", standalone_mode=False) or 0)
    except PacelineError as error:
        print(f"paceline: {error}", file=sys.stderr)
        sys.exit(3 if isinstance(error, WorldError) else 2)
    except OSError as error:  # the disk is full, a folder may not be written, there are no more processes to be had
        where = "" if error.filename is None else f"{one_line(str(error.filename), LONGEST_PATH)}: "
        print(f"paceline: {where}{one_line(error.strerror or str(error))}", file=sys.stderr)
        sys.exit(2)
    except typer.Abort:
        sys.exit(1)
    except Exception as error:
        if not hasattr(error, "format_message"):
            raise
        sys.exit(_say_wrong_usage(error))


def _say_wrong_usage(error: Any) -> int:
    """What typer has to say about the words of a command line, in our one line instead of its box."""
    context = getattr(error, "ctx", None)
    text = error.format_message().strip()
    if "\n" in text:  # help, where nothing was asked for
        print(text, file=sys.stderr)
    else:
        see = f"; see `{context.command_path} --help`" if context is not None else ""
        print(f"paceline: {text.rstrip('.')}{see}", file=sys.stderr)
    return int(error.exit_code)


if __name__ == "__main__":
    main()
