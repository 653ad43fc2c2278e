"""From what a flag, a YAML file or a script says to the values of fields.

    python train.py --config digits.yaml --learning-rate 3e-4 --bf16 --no-dataloader-pin-memory --eval_strategy=epoch

Every field is a flag, in both spellings, and a key of a YAML file. A flag goes before the file, the file before the
default. A value is converted to the type of its field; a name that is no field is an error with the nearest one; a name
that transformers has given up is accepted with one warning that says today's.

    learning_rate: 1e-4          YAML reads a text here, because the number has no point; the field is a float
    --report-to tensorboard,wandb        or --report-to tensorboard wandb
    --resume-from-checkpoint             from the newest
    --lr-scheduler-kwargs '{"num_cycles": 2}'
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import enum
import math
import os
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Union

from paceline.errors import ConfigError
from paceline.input_file import cause_of, one_line, parse_json, read_input
from paceline.trainer.argument_fields import chosen
from paceline.world import messages

LARGEST_FILE = 2**24  # bytes
BEYOND = 2**63
_TRUE = ("true", "yes", "on", "1")
_FALSE = ("false", "no", "off", "0")
_NONE = ("none", "null", "")
_BARE = ("resume_from_checkpoint",)  # a text that may also be switched on: from the newest one

# -- flags and files --------------------------------------------------------------------------------------------------


def from_command_line(cls: type, argv: Sequence[str] | None = None) -> dict[str, Any]:
    """The fields that flags, and the file that `--config` names, give a value."""
    given = _read_flags(cls, sys.argv[1:] if argv is None else argv)
    file = given.pop("config", None)
    flags = _checked(cls, given, "command line")
    return flags if file is None else from_yaml(cls, file) | flags


def from_yaml(cls: type, path: str | Path) -> dict[str, Any]:
    """The keys of a YAML file, as the fields hold them."""
    import yaml

    try:
        found = yaml.safe_load(read_input(path, LARGEST_FILE).decode())
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


def _read_flags(cls: type, argv: Sequence[str]) -> dict[str, Any]:
    """What was written after each flag, by field; True and False for switches."""
    kinds = field_types(cls)
    given: dict[str, Any] = {}
    words = list(argv)
    while words:
        word = words.pop(0)
        if word in ("-h", "--help"):
            _help(cls).print_help()
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
            while words and not words[0].startswith("--") and _is_list(kinds.get(name)):
                given[name] += f",{words.pop(0)}"
        elif is_switch(kinds.get(name, bool)) or name in _BARE:
            given[name] = True
        else:
            raise ConfigError(f"command line: --{flag} needs a value")
    return given


def _help(cls: type) -> argparse.ArgumentParser:
    """All flags with their meaning, for `--help` alone: `_read_flags` knows old names and both spellings."""
    shown = argparse.ArgumentParser(add_help=True, description="Training arguments; each is a key of --config too.")
    shown.add_argument("--config", metavar="FILE", help="a YAML file with a key for each argument")
    for name, field in getattr(cls, "__dataclass_fields__", {}).items():
        help = field.metadata.get("help", "").replace("%", "%%")
        shown.add_argument(f"--{name.replace('_', '-')}", metavar="…", help=help)
    return shown


def _checked(cls: type, given: Mapping[str, Any], where: str) -> dict[str, Any]:
    given = todays_names(given)
    kinds = field_types(cls)
    check_names(given, kinds, where)
    try:
        return {name: converted(name, value, kinds[name]) for name, value in given.items()}
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


# -- names -----------------------------------------------------------------------------------------------------------

_RENAMED = {
    "evaluation_strategy": "eval_strategy",
    "no_cuda": "use_cpu",
    "per_gpu_train_batch_size": "per_device_train_batch_size",
    "per_gpu_eval_batch_size": "per_device_eval_batch_size",
    "warmup_ratio": "warmup_steps",
    "torchdynamo": "torch_compile_backend",
    "include_inputs_for_metrics": "include_for_metrics",
    "include_tokens_per_second": "include_num_input_tokens_seen",
    "group_by_length": "train_sampling_strategy",
    "push_to_hub_token": "hub_token",
    "push_to_hub_model_id": "hub_model_id",
}

_VALUES: dict[str, Callable[[Any], Any]] = {
    "include_inputs_for_metrics": lambda on: ["inputs"] if on else [],
    "include_tokens_per_second": lambda on: "all" if on else "no",
    "group_by_length": lambda on: "group_by_length" if on else "random",
}

_GONE = {
    "logging_dir": "logs go to output_dir",
    "local_rank": "the launcher says who this worker is",
    "jit_mode_eval": "use torch_compile",
    "use_ipex": "torch has what it had",
    "use_mps_device": "an accelerator that is there is used",
    "fp16_backend": "there is one way to compute in fp16",
    "fp16_opt_level": "there is one way to compute in fp16",
    "half_precision_backend": "there is one way to compute in low precision",
    "save_safetensors": "checkpoints are always safetensors",
    "dispatch_batches": "every worker fetches its own samples",
    "split_batches": "the batch size is per lane; accelerator_config={'split_batches': True} shares it among lanes",
    "past_index": "no state is carried from batch to batch",
    "mp_parameters": "there is no SageMaker model parallel",
    "ray_scope": "there is no hyperparameter search",
    "tpu_num_cores": "there are no TPUs",
    "tpu_metrics_debug": "there are no TPUs",
    "fsdp_min_num_params": "units are the model's blocks",
    "fsdp_transformer_layer_cls_to_wrap": "units are the model's blocks",
}


def todays_names(given: Mapping[str, Any]) -> dict[str, Any]:
    """The same arguments under today's names."""
    out: dict[str, Any] = {}
    for name, value in given.items():
        if name in _GONE:
            messages.warn(f"{name} is gone and has no effect: {_GONE[name]}")
        elif name in _RENAMED:
            new = _RENAMED[name]
            value = _VALUES.get(name, lambda same: same)(value)
            wins = not _says_something(new, given)
            taken = f"it is taken as {new}={value!r}" if wins else f"{new}={given[new]!r} is given too, and is taken"
            messages.warn(f"{name} is called {new} now; {taken}")
            if value is not None and wins:
                out[new] = value
        else:
            out.setdefault(name, value)
    return out


def _says_something(new: str, given: Mapping[str, Any]) -> bool:
    """No steps of warm-up leave it to the ratio, as transformers has it."""
    return new in given and not (new == "warmup_steps" and given[new] in (None, 0, "0"))


def check_names(given: Iterable[str], known: Iterable[str], where: str) -> None:
    """Raise for the first name that is no field, with the nearest that is."""
    known = list(known)
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"{where}: {name!r} is not a training argument{hint}")


# -- values ----------------------------------------------------------------------------------------------------------


def field_types(cls: type) -> dict[str, Any]:
    """The annotation of each field by the class that has it first: a derived one often calls its default a str."""
    hints: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        hints = typing.get_type_hints(base) | hints
    return {name: hints[name] for name in getattr(cls, "__dataclass_fields__", {})}


def is_switch(kind: Any) -> bool:
    """A field that is on or off, and may be a flag without a value."""
    return bool in _alternatives(kind)


def _is_list(kind: Any) -> bool:
    return any((typing.get_origin(one) or one) is list for one in _alternatives(kind))


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
        except ConfigError:  # which says more than that the type is another
            raise
        except ValueError:
            continue
    expected = " or ".join(_described(one) for one in alternatives)
    shown = one_line(repr(value), 60)
    raise ConfigError(f"{name}={shown}: expected {expected}, got {type(value).__name__}")


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
        if isinstance(value, os.PathLike):
            value = os.fspath(value)
        if not isinstance(value, str):
            raise ValueError
        return value
    if origin is list:
        return _listed(name, value, typing.get_args(kind))
    if origin is dict:
        return _mapping(name, value)
    if isinstance(kind, type) and isinstance(value, kind):  # of a derived class: a type that only its script knows
        return value
    raise ValueError


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
        number = float(value if isinstance(value, str | int | float) else value.item())  # of numpy, or a tensor
    except (OverflowError, TypeError, RuntimeError, AttributeError):
        raise ValueError from None
    if not math.isfinite(number) or (whole and abs(number) >= BEYOND):
        raise ValueError
    if whole and not number.is_integer():
        raise ValueError
    is_written_whole = not isinstance(value, float) and "." not in str(value)
    return int(number) if whole or (number.is_integer() and is_written_whole) else number


def _listed(name: str, value: Any, kinds: tuple[Any, ...]) -> list[Any]:
    """Each of its values as the field's annotation says: list[int] holds numbers, also from a flag."""
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",") if part.strip()]
    if not isinstance(value, list | tuple):
        raise ValueError
    if not kinds or kinds[0] is Any:
        return list(value)
    if kinds[0] is str:
        return [str(part) for part in value]
    return [converted(name, part, kinds[0]) for part in value]


def _mapping(name: str, value: Any) -> dict[str, Any]:
    if isinstance(value, Mapping):
        return dict(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    value = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(value, str):
        raise ValueError
    try:
        found = parse_json(value if value.lstrip().startswith("{") else read_input(value, LARGEST_FILE))
    except (OSError, ValueError) as error:
        shown = f"{name}={one_line(value, 60)!r}"
        raise ConfigError(f"{shown}: expected JSON in braces, or a JSON file: {cause_of(error)}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{name}={value!r}: expected a JSON object, got {type(found).__name__}")
    return found


def _alternatives(kind: Any) -> tuple[Any, ...]:
    return typing.get_args(kind) if typing.get_origin(kind) in (Union, types.UnionType) else (kind,)


def _described(kind: Any) -> str:
    words = {
        int: "a whole number",
        float: "a finite number",
        bool: "true or false",
        str: "a text",
        list: "a list",
        dict: "a mapping",
        type(None): "nothing",
    }
    return words.get(typing.get_origin(kind) or kind, str(kind))
