"""The Trainer in a race: `trainer.train()` runs once, and the race goes on inside its callbacks.

    trainer.train()   on_train_begin ─► others' turns        step 1   step 2 … step n        step n+1 …
                                                    └ clock ─┘            on_step_end ─► others' turns

A part is n steps from one `on_step_end` to another: everything that the Trainer does in them is in its time, with a log
every 10 steps, the progress line and the JSON lines that a user has by default.
"""

from __future__ import annotations

import tempfile
from collections.abc import Generator
from typing import Any, TypeVar

import torch

from paceline.bench.race import THREADS_PER_WORKER, TRAINER, EngineTiming, Race
from paceline.bench.workloads import LEARNING_RATE, ReadyBatches, Workload, adamw, as_it_is
from paceline.engine.engine import Engine
from paceline.trainer import Trainer, TrainerCallback, TrainingArguments
from paceline.trainer.argument_fields import Sampling, SaveStrategy, SchedulerType
from paceline.world.world import World

CLIP_AT = 1.0
LOG_EVERY = 10

T = TypeVar("T")


class TrainerLoop:
    """A contestant that is not asked for steps: it does the next one whenever the race yields."""

    threads = THREADS_PER_WORKER

    def __init__(self, workload: Workload, race: Race, world: World, most_steps: int) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="paceline-bench-trainer-")
        self._between = BetweenSteps()
        buckets: dict[str, Any] = {} if race.bucket_mib is None else {"ddp_bucket_cap_mb": race.bucket_mib}
        arguments = TrainingArguments(
            output_dir=self._folder.name,
            run_name=TRAINER,
            per_device_train_batch_size=workload.batch_size,
            max_steps=most_steps + 1,  # the race ends before
            learning_rate=LEARNING_RATE,
            max_grad_norm=CLIP_AT,
            lr_scheduler_type=SchedulerType.LINEAR,
            train_sampling_strategy=Sampling.SEQUENTIAL,
            remove_unused_columns=False,  # batches are ready made
            logging_steps=LOG_EVERY,
            save_strategy=SaveStrategy.NO,
            lanes=world.size,
            threads=self.threads,
            use_cpu=True,
            ddp_backend=race.backend,
            **buckets,
        )
        model = workload.build()
        samples = (most_steps + 1) * world.size * workload.batch_size
        self._trainer = Trainer(
            model,
            arguments,
            data_collator=as_it_is,
            train_dataset=ReadyBatches(workload, samples, seed=100 * world.rank),
            compute_loss_func=workload.loss,
            optimizers=(adamw(model), None),
            callbacks=[self._between],
            world=world,
        )
        self._engine = self._between.engine = self._trainer.engine
        self.deterministic = torch.are_deterministic_algorithms_enabled()

    def train(self, race: Generator[None, None, T]) -> T:
        """Train until the race has ended; what it returned."""
        self._between.race = race
        self._trainer.train()
        result: T = self._between.result
        return result

    def step(self) -> None:
        raise AssertionError("a Trainer owns its loop: the race yields instead")

    def take_timings(self) -> list[EngineTiming]:
        taken, self._between.timings = self._between.timings, []
        return taken

    def close(self) -> None:
        self._engine.close()
        self._folder.cleanup()


class BetweenSteps(TrainerCallback):
    """Lets the race go on until it is the Trainer's turn to do a step."""

    engine: Engine
    race: Generator[None, None, Any]
    result: Any = None

    def __init__(self) -> None:
        self.timings: list[EngineTiming] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._go_on(control)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        last = self.engine.timing
        self.timings.append(EngineTiming(last.exposed_s, last.backward_s, last.left_during_backward))
        self._go_on(control)

    def _go_on(self, control: Any) -> None:
        try:
            next(self.race)
        except StopIteration as end:
            self.result = end.value
            control.should_training_stop = True
