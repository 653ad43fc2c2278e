"""What no option of any verb can mean: a number that is not finite, below zero or beyond 64 bits, and an empty text.

A verb's function is wrapped where `main` finds it, so that each checks only what is its own: which numbers make sense.
An empty path can't be seen here (Path("") is the current folder); `main` looks at the words themselves.
"""

from __future__ import annotations

import functools
import math
import typing
from collections.abc import Callable
from typing import Any

from paceline.errors import ConfigError
from paceline.input_file import one_line

BEYOND = 2**63
UNTOUCHED = ("arguments", "job")
"""Words of somebody else's command line: whatever they are, they are passed on."""


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
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
