"""The folder of a run: which arguments it was started with, its checkpoints, its weights.

runs/digits/
  training_arguments.json      as given, and what followed from them: lanes, threads, strategy
  checkpoint-100/ …            to resume from
  model.safetensors            written by save_model
  trainer_state.json           written by save_state
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from paceline import input_file
from paceline.checkpoint.disk import remove_folder
from paceline.checkpoint.retention import all_checkpoints, set_aside
from paceline.checkpoint.weights_file import WEIGHTS, remove_weights, say_dtype
from paceline.engine.config import counted
from paceline.engine.engine import Engine
from paceline.errors import CheckpointError, ConfigError
from paceline.trainer.training_arguments import TrainingArguments
from paceline.world import messages
from paceline.world.known_names import MOST_LANES

ARGUMENTS = "training_arguments.json"


def where_to_begin(arguments: TrainingArguments, resume: bool | str | Path | None) -> bool | Path:
    """At a checkpoint: the one that is named, True for the newest, False for none: at step 0.

    An elastic job that lost all its workers and was restarted resumes from what it has saved itself.
    """
    is_switch = isinstance(resume, bool) or resume is None or str(resume).lower() in ("true", "false", "")
    wanted = str(resume).lower() == "true" if is_switch else Path(str(resume))  # a flag is a text
    elastic = arguments.world.elastic
    if wanted or (elastic is not None and elastic.joins):
        return wanted
    return bool(all_checkpoints(Path(arguments.output_dir))) if elastic is not None and elastic.begins_again else False


def begin(arguments: TrainingArguments, engine: Engine, *, fresh: bool) -> None:
    """Everything was checked: store the arguments. Checkpoints of an earlier run get a name that no run resumes from.

    They can't stay: this run, restarted, would take them for its own. `overwrite_output_dir` removes them.
    """
    if engine._writes_reports:
        folder = Path(arguments.output_dir)
        if fresh and arguments.overwrite_output_dir:
            for path in all_checkpoints(folder):
                remove_folder(path)
        elif fresh and (moved := set_aside(folder, -1)):
            first = moved[0].name
            text = f"paceline: {folder} had {counted(len(moved), 'checkpoint')} of another run, now {first} …"
            engine._note(text, "trainer")
        given = {"arguments": arguments.to_dict(), "resolved": engine.resolved()}
        _publish(Path(arguments.output_dir) / ARGUMENTS, json.dumps(given, indent=2) + "\n")
    engine.barrier()


def write_json(arguments: TrainingArguments, name: str, values: Mapping[str, Any]) -> None:
    _publish(Path(arguments.output_dir) / name, json.dumps(values, indent=2, sort_keys=True) + "\n")


def read_json(arguments: TrainingArguments, name: str) -> dict[str, Any]:
    """What is there; nothing, with a warning, where something is that can't be read."""
    path = Path(arguments.output_dir) / name
    try:
        return input_file.read_json(path)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        messages.warn(f"{path} can't be read, so a new one is written: {input_file.cause_of(error)}")
        return {}


def recorded_lanes(folder: Path) -> int | None:
    """How many lanes the run in `folder` has, where that is on record."""
    try:
        lanes = input_file.read_json(folder / ARGUMENTS)["resolved"]["lanes"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return lanes if type(lanes) is int and 1 <= lanes <= MOST_LANES else None


def write_weights(folder: Path, model: nn.Module, state: dict[str, Tensor], processing_class: Any) -> None:
    """One safetensors file with the names of the model; a model of transformers writes its config too."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if callable(getattr(model, "save_pretrained", None)):
            dtypes = [value.dtype for value in state.values()]  # before: it takes out what it has written
            model.save_pretrained(str(folder), state_dict=state)  # type: ignore[operator]
            say_dtype(folder, dtypes)
        else:
            partial = folder / f".{WEIGHTS}.partial"
            plain = {name: value.clone(memory_format=torch.contiguous_format) for name, value in state.items()}
            save_file(plain, partial, metadata={"format": "pt"})
            partial.replace(folder / WEIGHTS)
            remove_weights(folder, but=[WEIGHTS])
        if callable(getattr(processing_class, "save_pretrained", None)):
            processing_class.save_pretrained(str(folder))
    except OSError as error:
        raise CheckpointError(f"the model could not be saved to {folder}: {error.strerror or error}") from error


def prune_weights(arguments: TrainingArguments, best: str | None, *, main: bool) -> None:
    """With save_only_model: keep the newest, and the best."""
    if not main or arguments.save_total_limit is None:
        return
    for path in all_checkpoints(Path(arguments.output_dir))[arguments.save_total_limit :]:
        if str(path) != best:
            remove_folder(path)


def tied(model: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Names of one and the same parameter get one and the same tensor."""
    first: dict[int, str] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if name in state:
            state[name] = state[first.setdefault(id(value), name)]
    return state


def _publish(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    except OSError as error:
        raise ConfigError(
            f"{path} could not be written: {input_file.cause_of(error)}; choose an output_dir that can be"
        ) from error
