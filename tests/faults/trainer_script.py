"""A Trainer's run that loses the worker that reports, and when the replacement is there the one that reports since.

Every step is logged. Worker 0 dies by an order from outside, in step 3; worker 1 by its own hand.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from paceline import TrainerCallback
from tests.trainer.jobs import Samples, make_trainer

STEPS = 24
EVALUATED = 4
AWAITED_AT = 5
JOINER_TIMEOUT_S = 20.0

STANDS, JOINED, CACHE = Path("stands"), Path("joined"), Path("cache")


class Story(TrainerCallback):
    """The others wait for the replacement; when that has made a step, the last of the old ones goes."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        self._joins = args.world.elastic is not None and args.world.elastic.joins
        if self._joins:
            STANDS.touch()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        if args.world.rank == 1 and not self._joins and JOINED.exists():
            os.kill(os.getpid(), signal.SIGKILL)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        deadline = time.monotonic() + JOINER_TIMEOUT_S
        while state.global_step == AWAITED_AT and not STANDS.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        if self._joins:
            JOINED.touch()
        elif state.global_step > AWAITED_AT and not JOINED.exists():
            time.sleep(0.1)


if __name__ == "__main__":
    trainer = make_trainer(
        "run",
        train_dataset=Samples(8 * STEPS),
        per_device_train_batch_size=1,
        max_steps=STEPS,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=EVALUATED,
        save_strategy="steps",
        save_steps=2,
        report_to="tensorboard",
        callbacks=[Story()],
    )
    with trainer.args.main_process_first():  # before there is an Engine, and again in each replacement
        assert CACHE.exists() or trainer.args.process_index == 0
        CACHE.touch()
    trainer.train(resume_from_checkpoint="--resume" in sys.argv)
