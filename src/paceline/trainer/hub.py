"""A trained model on the Hugging Face Hub: its model card, and the upload of what `save_model` wrote.

    trainer.create_model_card(license="mit", dataset="squad")      output_dir/README.md
    trainer.push_to_hub()                                          save_model, the card, upload by huggingface_hub

It happens after a training, when it is asked for; checkpoints stay here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError
from paceline.trainer.training_arguments import TrainingArguments

CARD = "README.md"
_STAYS_HERE = ["_*", ".*", "checkpoint-*"]


def create_repository(arguments: TrainingArguments, token: str | None = None) -> str:
    """The repository that the arguments name, made where it is not there; its full name."""
    name = arguments.hub_model_id or Path(arguments.output_dir).absolute().name
    private = arguments.hub_private_repo
    made = _api().create_repo(name, token=token or arguments.hub_token, private=private, exist_ok=True)
    return str(made.repo_id)


def upload(
    arguments: TrainingArguments,
    repository: str,
    *,
    message: str | None,
    token: str | None,
    revision: str | None,
    wait: bool,
) -> Any:
    """What is in output_dir but for checkpoints; the commit, or its future."""
    return _api().upload_folder(
        repo_id=repository,
        folder_path=arguments.output_dir,
        commit_message=message,
        token=token or arguments.hub_token,
        run_as_future=not wait,
        ignore_patterns=_STAYS_HERE,
        revision=revision or arguments.hub_revision,
    )


def _api() -> Any:
    try:
        from huggingface_hub import HfApi
    except ImportError:
        raise ConfigError("push_to_hub needs a package that is not installed: pip install huggingface_hub") from None
    return HfApi()


# -- the model card ---------------------------------------------------------------------------------------------------


def write_card(
    arguments: TrainingArguments, history: Sequence[Mapping[str, Any]], name: str, facts: Mapping[str, Any]
) -> None:
    """`README.md` with the facts as its metadata, the arguments that were changed and the last evaluation."""
    path = Path(arguments.output_dir) / CARD
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(card(arguments, history, name, facts), encoding="utf-8")


def card(
    arguments: TrainingArguments, history: Sequence[Mapping[str, Any]], name: str, facts: Mapping[str, Any]
) -> str:
    metadata = {key: value for key, value in facts.items() if value not in (None, [], "")}
    lines = ["---", *(f"{key}: {json.dumps(value)}" for key, value in metadata.items()), "---", "", f"# {name}", ""]
    evaluated = next((row for row in reversed(history) if any(key.startswith("eval_") for key in row)), None)
    if evaluated is not None:
        values = {key: value for key, value in evaluated.items() if key.startswith("eval_")}
        lines += ["## Evaluation", "", "| metric | value |", "|---|---|"]
        lines += [f"| {key} | {value:.6g} |" for key, value in values.items() if isinstance(value, int | float)]
        lines += [""]
    changed = arguments.changed()
    lines += ["## Training", "", "Trained with paceline; arguments that differ from their defaults:", ""]
    lines += [f"- `{key}`: {json.dumps(value)}" for key, value in changed.items()]
    return "\n".join([*lines, ""])
