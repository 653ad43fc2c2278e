"""Values that a user gave, checked: one line that says which value is wrong, and what it may be.

    whole_number("lanes", "2", least=1)      lanes='2': expected a whole number of at least 1, got a str
    number("timeout_s", nan, above=0)        timeout_s=nan: expected a number above 0, and a finite one

Numbers of numpy and of torch count as numbers; True and False don't, nor does text.
"""

from __future__ import annotations

import math
import numbers
import operator
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError
from paceline.input_file import one_line

BEYOND = 2**63
LONGEST_WAIT_S = 10 * 366 * 24 * 3600.0
"""Ten years: what clocks of the system can still count."""


def whole_number(name: str, value: Any, *, least: int = 0, most: int = BEYOND - 1, why: str = "") -> int:
    """The value as an int; `why` is the error's text where it is too small."""
    try:
        if isinstance(value, bool):
            raise TypeError
        found = operator.index(value)
    except (TypeError, ValueError, RuntimeError):  # torch's: a tensor of several elements, or of floats
        expected = f"a whole number of at least {least}" + (f" and at most {most:,}" if most < BEYOND - 1 else "")
        raise ConfigError(f"{_given(name, value)}: expected {expected}, got a {type(value).__name__}") from None
    if found < least:
        raise ConfigError(f"{_given(name, found)}: {why or f'it is at least {least}'}")
    if found > most:
        raise ConfigError(f"{_given(name, found)}: it is at most {most:,}")
    return found


def number(
    name: str,
    value: Any,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
    why: str = "",
) -> float:
    """The value as a float within its bounds; `why` is the error's text where it is outside."""
    bounds = {"of at least": least, "above": above, "of at most": most, "below": below}
    expected = "a number" + " and".join(f" {word} {bound:g}" for word, bound in bounds.items() if bound is not None)
    real = isinstance(value, numbers.Real) or hasattr(value, "item")
    try:
        if isinstance(value, bool) or not real:
            raise TypeError
        found = float(value)
    except (TypeError, ValueError, RuntimeError):
        raise ConfigError(f"{_given(name, value)}: expected {expected}, got a {type(value).__name__}") from None
    except OverflowError:
        found = math.inf
    if not math.isfinite(found):
        raise ConfigError(f"{_given(name, value)}: expected {expected}, and a finite one")
    if (
        (least is not None and found < least)
        or (above is not None and found <= above)
        or (most is not None and found > most)
        or (below is not None and found >= below)
    ):
        raise ConfigError(f"{_given(name, value)}: {why or f'it is {expected}'}")
    return found


def seconds(name: str, value: Any, *, why: str = "") -> float:
    """A time to wait."""
    found = number(name, value, above=0, why=why)
    return number(name, found, most=LONGEST_WAIT_S)


def one_word(name: str, value: Any, known: Iterable[str], otherwise: str = "") -> str:
    words = tuple(known)
    if not isinstance(value, str) or value not in words:
        choices = f"{', '.join(words[:-1])} or {words[-1]}" if len(words) > 1 else words[0]
        raise ConfigError(f"{_given(name, value)} is not known; choose {choices}{otherwise}")
    return value


def switch(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{_given(name, value)}: expected True or False, got a {type(value).__name__}")
    return value


def path_of(name: str, value: Any) -> Path:
    """Of something that need not exist."""
    if not isinstance(value, str | os.PathLike):
        raise ConfigError(f"{_given(name, value)}: expected a path, got a {type(value).__name__}")
    text = os.fspath(value)
    if not isinstance(text, str) or not text or "\0" in text:
        raise ConfigError(f"{_given(name, value)}: that is no path")
    return Path(text)


def _given(name: str, value: Any) -> str:
    try:
        shown = repr(value)
    except Exception:  # a user's __repr__
        shown = f"a {type(value).__name__}"
    return f"{name}={one_line(shown, 60)}"
