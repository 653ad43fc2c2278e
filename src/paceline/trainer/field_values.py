"""From what a flag, a YAML file or a script says to the value of a field; from a wrong name to the nearest right one.

learning_rate: 1e-4          YAML reads a text here, because the number has no point; the field is a float
--report-to tensorboard,wandb
--lr-scheduler-kwargs '{"num_cycles": 2}'
"""

from __future__ import annotations

import difflib
import enum
import math
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, Union

from paceline.errors import ConfigError
from paceline.input_file import cause_of, one_line, parse_json, read_input
from paceline.trainer.choices import chosen

LARGEST_JSON = 2**24  # bytes
BEYOND = 2**63
_TRUE = ("true", "yes", "on", "1")
_FALSE = ("false", "no", "off", "0")
_NONE = ("none", "null", "")


def field_types(cls: type) -> dict[str, Any]:
    """The annotation of each field by the class that has it first: a derived one often calls its default a str."""
    hints: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        hints = typing.get_type_hints(base) | hints
    return {name: hints[name] for name in getattr(cls, "__dataclass_fields__", {})}


def is_switch(kind: Any) -> bool:
    """A field that is on or off, and may be a flag without a value."""
    return bool in _alternatives(kind)


def converted(name: str, value: Any, kind: Any) -> Any:
    """`value` as the field `name` holds it."""
    alternatives = _alternatives(kind)
    if value is None and type(None) in alternatives:
        return None
    if Any in alternatives:
        return value
    wanted = [one for one in alternatives if one is not type(None)]
    if isinstance(value, str) and type(None) in alternatives and value.lower() in _NONE and str not in wanted:
        return None
    mappings = [one for one in wanted if (typing.get_origin(one) or one) is dict]
    for one in mappings or wanted:  # a text stands for a mapping where there may be one
        try:
            return _as(name, value, one)
        except ValueError:
            continue
    told = " or ".join(_told(one) for one in alternatives)
    shown = one_line(repr(value), 60)
    raise ConfigError(f"{name}={shown}: expected {told}, got {type(value).__name__}")


def check_names(given: Iterable[str], known: Iterable[str], where: str) -> None:
    """Raise for the first name that is no field, with the nearest that is."""
    known = list(known)
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"{where}: {name!r} is not a training argument{hint}")


def optimizer_options(text: str | None) -> dict[str, Any]:
    """`momentum=0.9,nesterov=True` as options."""
    options: dict[str, Any] = {}
    shown = one_line(text or "", 60)
    for part in (text or "").replace(" ", "").split(","):
        if not part:
            continue
        name, equals, value = part.partition("=")
        if not equals or not name.isidentifier():
            raise ConfigError(f"optim_args={shown!r}: {one_line(part, 60)!r} is no name=value")
        try:
            options[name] = parse_json(value.lower() if value in ("True", "False", "None") else value)
        except ValueError:
            options[name] = None if value == "None" else value
        if isinstance(options[name], float) and not math.isfinite(options[name]):
            raise ConfigError(f"optim_args={shown!r}: {name} must be a finite number")
    return options


def _as(name: str, value: Any, kind: Any) -> Any:
    if isinstance(kind, type) and issubclass(kind, enum.StrEnum):
        return chosen(kind, value, name)
    origin = typing.get_origin(kind) or kind
    if origin is bool:
        return _switch(value)
    if origin in (int, float):
        return _number(value, whole=origin is int)
    if origin is str:
        if isinstance(value, enum.Enum | bool):
            value = str(value).lower() if isinstance(value, bool) else value.value
        if not isinstance(value, str):
            raise ValueError
        return value
    if origin is list:
        return _listed(value)
    if origin is dict:
        return _mapping(name, value)
    raise AssertionError(f"{name}: no rule for {kind}")


def _switch(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    text = str(value).lower()
    if not isinstance(value, str | int) or text not in (*_TRUE, *_FALSE):
        raise ValueError
    return text in _TRUE


def _number(value: Any, *, whole: bool) -> int | float:
    """A field that takes parts of a whole keeps whole numbers whole: 500 steps are not 500.0.

    No field means anything by a number that is not finite, or that 64 bits don't hold.
    """
    if isinstance(value, bool):
        raise ValueError
    try:
        number = float(value) if isinstance(value, str | int | float) else float(_item(value))
    except (OverflowError, TypeError, RuntimeError):
        raise ValueError from None
    if not math.isfinite(number) or (whole and abs(number) >= BEYOND):
        raise ValueError
    if number.is_integer() and (whole or not isinstance(value, float)) and "." not in str(value):
        return int(number)
    if whole:
        if not number.is_integer():
            raise ValueError
        return int(number)
    return number


def _item(value: Any) -> Any:
    """Numbers of numpy and tensors with one element."""
    if not hasattr(value, "item"):
        raise ValueError
    return value.item()


def _listed(value: Any) -> list[str]:
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    if not isinstance(value, list | tuple):
        raise ValueError
    return [str(part) for part in value]


def _mapping(name: str, value: Any) -> dict[str, Any]:
    if isinstance(value, Mapping):
        return dict(value)
    if not isinstance(value, str):
        raise ValueError
    try:
        found = parse_json(value if value.lstrip().startswith("{") else read_input(value, LARGEST_JSON))
    except (OSError, ValueError) as error:
        said = f"{name}={one_line(value, 60)!r}"
        raise ConfigError(f"{said}: expected JSON in braces, or a JSON file: {cause_of(error)}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{name}={value!r}: expected a JSON object, got {type(found).__name__}")
    return found


def _alternatives(kind: Any) -> tuple[Any, ...]:
    return typing.get_args(kind) if typing.get_origin(kind) in (Union, types.UnionType) else (kind,)


def _told(kind: Any) -> str:
    words = {
        int: "a whole number",
        float: "a finite number",
        bool: "true or false",
        str: "a text",
        type(None): "nothing",
    }
    origin = typing.get_origin(kind) or kind
    return words.get(origin, {list: "a list", dict: "a mapping"}.get(origin, str(kind)))
