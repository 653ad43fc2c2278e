"""Arguments from anywhere: every field is a flag in both spellings and a key of a YAML file.

    python train.py --config digits.yaml --learning-rate 3e-4 --bf16 --no-dataloader-pin-memory --eval_strategy=epoch

A flag goes before the file, the file before the default. A name that is no field is an error with the nearest one.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError
from paceline.input_file import cause_of, one_line, read_input
from paceline.trainer import old_spellings
from paceline.trainer.field_values import check_names, converted, field_types, is_switch

CONFIG = "config"
LARGEST_CONFIG = 2**24  # bytes


def from_command_line(cls: type, argv: Sequence[str] | None = None) -> dict[str, Any]:
    """What flags and the file they name say; what they don't is not in it."""
    given = read_flags(cls, sys.argv[1:] if argv is None else argv)
    file = given.pop(CONFIG, None)
    return (from_yaml(cls, file) if file is not None else {}) | given


def from_yaml(cls: type, path: str | Path) -> dict[str, Any]:
    """The keys of a YAML file, as the fields hold them."""
    import yaml

    try:
        found = yaml.safe_load(read_input(path, LARGEST_CONFIG).decode())
    except OSError as error:
        raise ConfigError(f"{path} could not be read: {cause_of(error)}") from error
    except RecursionError:
        raise ConfigError(f"{path} is not YAML of training arguments: it is nested too deeply") from None
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{path} is not YAML: {one_line(' '.join(str(error).split()))}") from error
    if found is None:
        return {}
    if not isinstance(found, Mapping):
        raise ConfigError(f"{path}: expected a key for each argument, got a {type(found).__name__}")
    return _checked(cls, {str(name): value for name, value in found.items()}, str(path))


def read_flags(cls: type, argv: Sequence[str]) -> dict[str, Any]:
    """The flags that were given, by field."""
    kinds = field_types(cls)
    given: dict[str, Any] = {}
    words = list(argv)
    while words:
        word = words.pop(0)
        if word in ("-h", "--help"):
            parser(cls).print_help()
            raise SystemExit(0)
        if not word.startswith("--"):
            raise ConfigError(f"command line: {word!r} belongs to no flag; values of a list are joined by commas")
        flag, equals, value = word[2:].partition("=")
        name = flag.replace("-", "_")
        if name not in kinds and name.startswith("no_") and is_switch(kinds.get(name[3:])) and not equals:
            given[name[3:]] = False
        elif equals:
            given[name] = value
        elif words and not words[0].startswith("--"):
            given[name] = words.pop(0)
        elif is_switch(kinds.get(name, bool)):
            given[name] = True
        else:
            raise ConfigError(f"command line: --{flag} needs a value")
    file = given.pop(CONFIG, None)
    read = _checked(cls, given, "command line")
    return read if file is None else read | {CONFIG: file}


def parser(cls: type) -> argparse.ArgumentParser:
    """For `--help`: all flags with their meaning. Reading is done by `read_flags`, which knows nearest names."""
    shown = argparse.ArgumentParser(add_help=True, description="Training arguments; each is a key of --config too.")
    shown.add_argument("--config", metavar="FILE", help="a YAML file with a key for each argument")
    for name, field in getattr(cls, "__dataclass_fields__", {}).items():
        help = field.metadata.get("help", "").replace("%", "%%")
        shown.add_argument(f"--{name.replace('_', '-')}", metavar="…", help=help)
    return shown


def _checked(cls: type, given: Mapping[str, Any], where: str) -> dict[str, Any]:
    given = old_spellings.todays(given, stacklevel=6)
    kinds = field_types(cls)
    check_names(given, kinds, where)
    try:
        return {name: converted(name, value, kinds[name]) for name, value in given.items()}
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
