"""What `from_pretrained` looks for in a checkpoint, beside the parts that the workers write.

checkpoint-100/
  worker-00000-of-00002.safetensors …, manifest.json, COMPLETE     to resume from
  model.safetensors                                                weights under the model's names, each tied one once
  config.json, generation_config.json                              of a model of transformers
  tokenizer.json …                                                 of the processing_class
  trainer_state.json                                               steps, history, the best metric

Of a PeftModel `adapter_model.safetensors` and `adapter_config.json` are there instead of weights and config.

The weights are read back from the parts, tensor by tensor, by the thread that writes the checkpoint: memory never holds
a second copy of the model, and training waits for none of it. Config and tokenizer are asked for once in a training, in
the training's own thread: a tokenizer that pads a batch must not be saved by another thread meanwhile.
"""

from __future__ import annotations

import copy
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paceline.checkpoint.load import Checkpoint
from paceline.checkpoint.save import Beside
from paceline.checkpoint.weights_file import stored_weights, weights_of, write_weights
from paceline.engine.adapted_models import base_parameters, saves_adapters
from paceline.input_file import read_json
from paceline.strategies.fsdp.unmaterialised import is_unmaterialised

WEIGHTS = "model.safetensors"
STATE = "trainer_state.json"


class PretrainedFiles:
    def __init__(self, model: nn.Module, processing_class: Any) -> None:
        self._adapted = model if saves_adapters(model) else None
        parts: list[Any] = [processing_class] if self._adapted is not None else [model, processing_class]
        self._parts = [part for part in parts if callable(getattr(part, "save_pretrained", None))]
        self._about: dict[Path, bytes] | None = None

    def writer(self, state: dict[str, Any]) -> Beside:
        """Adds the files to a checkpoint that is being written; `state` is the Trainer's as it is now."""
        about, state = self._described(), copy.deepcopy(state)

        def write(checkpoint: Checkpoint) -> None:
            folder = checkpoint.folder
            for name, content in about.items():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_bytes(content)
            if self._adapted is not None:
                write_adapters(folder, self._adapted, checkpoint)
            else:
                weights = stored_weights(checkpoint)
                write_weights(folder / WEIGHTS, weights)
                say_dtype(folder, [weight.dtype for weight in weights.values()])
            write_state(folder, state)

        return write

    def _described(self) -> dict[Path, bytes]:
        """The files that the model and the tokenizer write about themselves."""
        if self._about is None:
            with tempfile.TemporaryDirectory(prefix="paceline-") as folder:
                for part in self._parts:
                    if isinstance(part, nn.Module):
                        part.save_pretrained(folder, state_dict={})  # type: ignore[operator]  # all but weights
                    else:
                        part.save_pretrained(folder)
                files = [path for path in sorted(Path(folder).rglob("*")) if path.is_file()]
                self._about = {path.relative_to(folder): path.read_bytes() for path in files}
        return self._about


def write_adapters(folder: Path, model: nn.Module, checkpoint: Checkpoint) -> None:
    """As the model writes them. Beside adapters that may be embeddings of its base, which is nowhere else.

    Those are frozen, so another thread may read them while the training goes on; unless they are in shards.
    """
    base = base_parameters(model)
    in_shards = any(map(is_unmaterialised, base.values()))
    weights = weights_of(checkpoint) | {name: p.detach() for name, p in base.items() if not in_shards}
    embeddings = False if in_shards else "auto"
    model.save_pretrained(str(folder), state_dict=weights, save_embedding_layers=embeddings)  # type: ignore[operator]


def write_state(folder: Path, state: dict[str, Any]) -> None:
    (folder / STATE).write_text(json.dumps(state, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def say_dtype(folder: Path, saved: Sequence[torch.dtype]) -> None:
    """The config names the precision of the weights in the file: master weights are wider than what computed."""
    path = folder / "config.json"
    kind = next((dtype for dtype in saved if dtype.is_floating_point), None)
    if kind is None or not path.exists():
        return
    config = read_json(path)
    if config.get("dtype") not in (None, name := str(kind).removeprefix("torch.")):
        path.write_text(json.dumps(config | {"dtype": name}, indent=2, sort_keys=True) + "\n", encoding="utf-8")
