"""What `from_pretrained` looks for in a checkpoint, beside the parts that the workers write.

checkpoint-100/
  worker-00000-of-00002.safetensors …, manifest.json, COMPLETE     to resume from
  model.safetensors                                                weights under the model's names, each tied one once;
                                                                   of a large model shards with an index
  config.json, generation_config.json                              of a model of transformers
  tokenizer.json …                                                 of the processing_class
  trainer_state.json                                               steps, history, the best metric

Of a PeftModel `adapter_model.safetensors` and `adapter_config.json` are there instead of weights and config.

The weights are written by all workers, each its shards of them (`checkpoints.save(weights=True)`): read back from the
parts, tensor by tensor, in the thread that writes the checkpoint. So no worker ever holds the whole model, and training
waits for none of it. The rest is written here, by the main worker. Config and tokenizer are asked for once in a
training, in the training's own thread: a tokenizer that pads a batch must not be saved by another thread meanwhile.
"""

from __future__ import annotations

import copy
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from paceline.checkpoint.load import Checkpoint
from paceline.checkpoint.save import Beside
from paceline.checkpoint.weights_file import say_dtype, stored_weights, weights_of
from paceline.engine.adapted_models import base_parameters, saves_adapters
from paceline.strategies.fsdp.unmaterialised import is_unmaterialised, names_only

STATE = "trainer_state.json"


class PretrainedFiles:
    def __init__(self, model: nn.Module, processing_class: Any) -> None:
        self._adapted = model if saves_adapters(model) else None
        parts: list[Any] = [processing_class] if self._adapted is not None else [model, processing_class]
        self._parts = [part for part in parts if callable(getattr(part, "save_pretrained", None))]
        self._about: dict[Path, bytes] | None = None

    @property
    def are_adapters(self) -> bool:
        """Then the main worker writes all of them, and there is no model.safetensors."""
        return self._adapted is not None

    def writer(self, state: dict[str, Any] | None = None) -> Beside:
        """Adds the files to what is being written; `state` is the Trainer's as it is now, for a checkpoint."""
        about, state = self._described(), copy.deepcopy(state)
        base = {} if self._adapted is None else base_parameters(self._adapted)
        if any(map(is_unmaterialised, base.values())):  # which only the loop's thread can tell
            base = {}

        def write(checkpoint: Checkpoint) -> None:
            folder = checkpoint.folder
            for name, content in about.items():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_bytes(content)
            if self._adapted is not None:
                write_adapters(folder, self._adapted, checkpoint, base)
            else:
                say_dtype(folder, [weight.dtype for weight in stored_weights(checkpoint).values()])
            if state is not None:
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


def write_adapters(folder: Path, model: nn.Module, checkpoint: Checkpoint, base: Mapping[str, Tensor]) -> None:
    """As the model writes them. Beside adapters that may be embeddings of its base, which is nowhere else.

    Those are frozen, so another thread may read them while the training goes on; without a `base`, where it is in
    shards, they are left out. The model's own weights are looked at for their names alone.
    """
    weights = weights_of(checkpoint) | {name: parameter.detach() for name, parameter in base.items()}
    embeddings = "auto" if base else False
    with names_only():
        model.save_pretrained(  # type: ignore[operator]
            str(folder), state_dict=weights, save_embedding_layers=embeddings
        )


def write_state(folder: Path, state: dict[str, Any]) -> None:
    (folder / STATE).write_text(json.dumps(state, indent=2, sort_keys=True) + "\n", encoding="utf-8")
