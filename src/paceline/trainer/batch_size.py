"""auto_find_batch_size: when memory is short, training starts again with half the batch size.

    batch size 64    out of memory in step 1      weights as they were before
    batch size 32    out of memory in step 7      weights as they were before
    batch size 16    trains to the end            the bits of a run that was given 16

One worker only: where one of several is short of memory, the others are in the middle of a step that never ends. Find
the size on one, and give it to all. A run that is resumed goes on with the size it was saved with.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch

from paceline import input_file
from paceline.checkpoint.retention import all_checkpoints
from paceline.errors import ConfigError

if TYPE_CHECKING:
    from paceline.trainer.trainer import Trainer

_T = TypeVar("_T")
_SIGNS = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_NOT_SUPPORTED")


class BatchSizeFinder:
    def __init__(self, trainer: Trainer, resume: bool | Path) -> None:
        self._trainer, args = trainer, trainer.args
        if args.world_size > 1:
            raise ConfigError(
                "auto_find_batch_size works with one worker: when one of several is short of memory, the others wait "
                "for it in the middle of a step; find the size on one worker, then set per_device_train_batch_size"
            )
        if trainer.optimizer is not None:
            raise ConfigError(
                "auto_find_batch_size starts again with a new optimizer, but one was given; use optim or "
                "optimizer_cls_and_kwargs"
            )
        self._before = {name: value.detach().cpu().clone() for name, value in trainer.model.state_dict().items()}
        saved = _saved_size(Path(args.output_dir), resume)
        if saved is not None:
            trainer._train_batch_size = saved

    def run(self, train: Callable[[], _T]) -> _T:
        while True:
            try:
                return train()
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error) or self._trainer._train_batch_size == 1:
                    raise
            self._halve()  # outside: what the exception holds on to is free by now

    def _halve(self) -> None:
        trainer = self._trainer
        trainer._train_batch_size //= 2
        size = trainer._train_batch_size
        text = f"paceline: out of memory; training starts again as with per_device_train_batch_size={size}"
        trainer.engine._note(text, "trainer")
        trainer.engine.close()
        for name, value in trainer.model.state_dict(keep_vars=True).items():
            value.data = self._before[name].to(value.device, copy=True)  # and its dtype: bf16 may have replaced it
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(sign in str(error) for sign in _SIGNS)


def _saved_size(folder: Path, resume: bool | Path) -> int | None:
    """The batch size of the checkpoint that the run goes on from."""
    found = all_checkpoints(folder)[:1] if isinstance(resume, bool) else [resume]
    if not found or resume is False:
        return None
    try:
        size = input_file.read_json(found[0] / "trainer_state.json")["train_batch_size"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return size if type(size) is int and size > 0 else None
