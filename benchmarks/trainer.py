"""The Trainer beside the bare loop that it stands for: what `Trainer` adds to the time of a step.

    python benchmarks/trainer.py --workload convnet --batch-size 20                  one worker
    paceline run --workers 2 benchmarks/trainer.py --workload convnet                or several

    trainer.train()   on_train_begin     step 1 … step n  on_step_end     step n+1 … step 2n  on_step_end
                      loop: n steps     └── a part ───┘  loop: n steps    └─── a part ────┘  loop: n steps

The Trainer owns its loop, so the other one has its turns in the Trainer's callbacks. A part is n steps from one
`on_step_end` to another: everything that the Trainer does in them is in its time, with a log every 10 steps, the
progress line and the JSON lines that a user has by default. The bare loop does the same work through the Engine, clips
gradients and follows the same schedule; in the end both must have the same weights.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
import torch.distributed as dist
from command_line import command, run
from rich.console import Console

from paceline.bench.contestants import PacelineLoop, engine_options
from paceline.bench.measure import borrowed_settings, gathered, meeting
from paceline.bench.race import BACKENDS
from paceline.bench.report import disturbance, extremes, machine_line, quartiles, table_of
from paceline.bench.statistics import (
    DISTURBED_ABOVE,
    CpuClock,
    Spread,
    foreign_and_steal,
    is_disturbed,
    machine_facts,
    paired_ratios,
)
from paceline.bench.workloads import LEARNING_RATE, WORKLOADS, ReadyBatches, Workload, adamw, as_it_is
from paceline.errors import ConfigError
from paceline.trainer import Trainer, TrainerCallback, TrainingArguments
from paceline.trainer.argument_fields import Sampling, SaveStrategy, SchedulerType
from paceline.world.environment import read_world
from paceline.world.world import World

TRAINER, ENGINE = "trainer", "engine"
CLIP_AT = 1.0
LOG_EVERY = 10
WARM_UP_ROUNDS = 2
"""Run like the others and dropped."""


class BareLoop(PacelineLoop):
    """What a Trainer does in a step, written by hand."""

    def __init__(self, workload: Workload, world: World, steps: int, **options: Any) -> None:
        super().__init__(workload, world, steps, **options)
        # Down to nothing, as a Trainer's default is.
        decay = torch.optim.lr_scheduler.LambdaLR(self._optimizer, lambda step: max(0.0, 1 - step / (steps + 1)))
        self._scheduler: Any = self._engine.prepare(decay)

    def update(self) -> None:
        self._engine.clip_grad_norm_(CLIP_AT)
        self._optimizer.step()
        self._scheduler.step()
        self._optimizer.zero_grad()

    def weights_hash(self) -> str:
        return self._engine.weights_hash()


class TakesTurns(TrainerCallback):
    """Times the Trainer's parts, and lets the bare loop have its own between them."""

    def __init__(self, loop: BareLoop, rounds: int, steps: int) -> None:
        self._loop, self._rounds, self._steps = loop, rounds, steps
        self._done = 0
        self.rounds: list[dict[str, float]] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._begin_round()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._done += 1
        if self._done % self._steps:
            return
        trainer_s = time.perf_counter() - self._began
        dist.barrier()
        began = time.perf_counter()
        for _ in range(self._steps):
            self._loop.step()
        engine_s = time.perf_counter() - began
        (trainers,), (engines,), (ours_s,) = (
            gathered([value]) for value in (trainer_s, engine_s, time.process_time() - self._cpu)
        )
        foreign, steal = foreign_and_steal(self._clock, CpuClock.read(), sum(ours_s))
        self.rounds.append({TRAINER: max(trainers), ENGINE: max(engines), "foreign": foreign, "steal": steal})
        if len(self.rounds) == self._rounds:
            control.should_training_stop = True
        else:
            self._begin_round()

    def _begin_round(self) -> None:
        self._clock, self._cpu = CpuClock.read(), time.process_time()
        dist.barrier()
        self._began = time.perf_counter()


def make_trainer(
    workload: Workload, world: World, steps: int, turns: TakesTurns, folder: str, **options: Any
) -> Trainer:
    arguments = TrainingArguments(
        output_dir=folder,
        run_name=TRAINER,
        per_device_train_batch_size=workload.batch_size,
        max_steps=steps + 1,  # the turns end before
        learning_rate=LEARNING_RATE,
        max_grad_norm=CLIP_AT,
        lr_scheduler_type=SchedulerType.LINEAR,
        train_sampling_strategy=Sampling.SEQUENTIAL,
        remove_unused_columns=False,  # batches are ready made
        logging_steps=LOG_EVERY,
        save_strategy=SaveStrategy.NO,
        lanes=world.size,
        threads=1,
        use_cpu=True,
        **options,
    )
    model = workload.build()
    return Trainer(
        model,
        arguments,
        data_collator=as_it_is,
        train_dataset=ReadyBatches(workload, (steps + 1) * world.size * workload.batch_size, seed=100 * world.rank),
        compute_loss_func=workload.loss,
        optimizers=(adamw(model), None),
        callbacks=[turns],
        world=world,
    )


def measure_trainer(workload: Workload, world: World, rounds: int, steps: int, backend: str) -> dict[str, Any]:
    for name, value in (("rounds", rounds), ("steps-per-round", steps), ("batch-size", workload.batch_size)):
        if value < 1:
            raise ConfigError(f"--{name} {value}: it must be at least 1")
    all_rounds = WARM_UP_ROUNDS + rounds
    with borrowed_settings(), meeting(world), tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        loop = BareLoop(workload, world, all_rounds * steps, **engine_options(backend, None))
        turns = TakesTurns(loop, all_rounds, steps)
        trainer = make_trainer(workload, world, all_rounds * steps, turns, folder, ddp_backend=backend)
        try:
            trainer.train()
            same = trainer.engine.weights_hash() == loop.weights_hash()
        finally:
            trainer.engine.close()
            loop.close()
    measured = turns.rounds[WARM_UP_ROUNDS:]
    seconds = {name: [each[name] / steps for each in measured] for name in (TRAINER, ENGINE)}
    return {
        "machine": machine_facts(),
        "workload": workload.name,
        "batch_size": workload.batch_size,
        "workers": world.size,
        "steps_per_round": steps,
        "step_s": {name: asdict(Spread.of(values)) for name, values in seconds.items()},
        "ratio": asdict(Spread.of(paired_ratios(seconds[ENGINE], seconds[TRAINER]))),
        "same_weights": same,
        "disturbed_above": DISTURBED_ABOVE,
        "disturbed_rounds": sum(is_disturbed(each["foreign"], each["steal"]) for each in measured),
        "rounds": measured,
    }


def show_trainer(result: dict[str, Any], out: Console) -> None:
    out.print(
        f"{result['workload']}, batch {result['batch_size']} per worker · {result['workers']} workers × 1 thread · "
        f"{len(result['rounds'])} rounds × {result['steps_per_round']} steps"
    )
    table = table_of("loop", "step, ms", "quartiles", "least – most")
    for name, spread in result["step_s"].items():
        in_ms = {what: 1e3 * value for what, value in spread.items()}
        table.add_row(name, f"{in_ms['median']:.2f}", quartiles(in_ms, 2), extremes(in_ms, 2))
    out.print(table)
    ratio = result["ratio"]
    out.print(
        f"throughput, trainer / engine: {ratio['median']:.3f}, quartiles {quartiles(ratio, 3)}, "
        f"least – most {extremes(ratio, 3)}"
    )
    out.print("The weights of both are the same." if result["same_weights"] else "The weights of both DIFFER.")
    out.print(disturbance(result["disturbed_rounds"], len(result["rounds"]), "rounds", result["disturbed_above"]))
    out.print(machine_line(result["machine"]))


def main(words: Sequence[str] | None = None) -> None:
    parser = command(__doc__)
    parser.add_argument("--workload", choices=tuple(WORKLOADS), default="convnet")
    parser.add_argument("--batch-size", type=int, help="samples of a worker in a step [default: the workload's]")
    parser.add_argument("--rounds", type=int, default=40, help="measured; two more come first and are dropped")
    parser.add_argument("--steps-per-round", type=int, default=16)
    parser.add_argument("--backend", choices=BACKENDS, default="paceline")
    asked = parser.parse_args(words)
    world, workload = read_world(), WORKLOADS[asked.workload]
    if asked.batch_size is not None:
        workload = replace(workload, batch_size=asked.batch_size)

    def show(result: dict[str, Any], out: Console) -> None:
        if world.is_main:
            show_trainer(result, out)

    run(
        parser,
        asked.json if world.is_main else None,
        lambda: measure_trainer(workload, world, asked.rounds, asked.steps_per_round, asked.backend),
        show,
    )


if __name__ == "__main__":
    main()
