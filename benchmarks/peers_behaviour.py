"""What training systems do with data that don't divide, a job that goes on elsewhere, and half an environment.

    python benchmarks/peers_behaviour.py                 all of it, some minutes: the tables of docs/comparison.md
    python benchmarks/peers_behaviour.py --only uneven   or resume, alone

uneven    one epoch of 22 samples on 3 workers with batches of 2: how many samples are used twice, how many never
resume    2 workers stop after 3 steps and save; 2 or 1 go on to the end of the epoch: samples lost and repeated, and
          whether the weights are those of the run on 2 workers that never stopped
alone     two processes started with half of a launcher's variables: how many workers each believes there are

Every system is used as its documentation shows: `Accelerator.save_state` and `skip_first_batches`, the Trainer's
`resume_from_checkpoint`. The model has a weight for each sample; a sample was used in the steps in which its weight
moved. All workers are started by torchrun, on CPUs, over gloo (paceline: its default). Needs accelerate and
transformers, as `make setup` installs them.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

SAMPLES, BATCH, STOP_AFTER = 22, 2, 3
SYSTEMS = ("torch", "accelerate", "transformers", "paceline")
RESUMING = SYSTEMS[1:]  # DDP and DistributedSampler have no state to save: a script does that by itself
ENVIRONMENTS = {
    "`srun -n 2 python train.py`": {
        "SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0",
        "SLURM_NODEID": "0", "SLURM_NNODES": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "localhost",
        "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_STEP_NUM_NODES": "1", "SLURM_TASKS_PER_NODE": "2",
    },
    "`WORLD_SIZE=2` without `RANK`": {"WORLD_SIZE": "2"},
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("uneven", "resume", "alone"))
    parser.add_argument("--worker", nargs=3, metavar=("SYSTEM", "FOLDER", "PART"), help=argparse.SUPPRESS)
    parser.add_argument("--believes", choices=SYSTEMS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        system, folder, part = given.worker
        WORKERS[system](Path(folder), part)
    elif given.believes:
        print("believes", believed(given.believes))
    else:
        tables = {"uneven": uneven, "resume": resume, "alone": alone}
        for name in (given.only,) if given.only else tables:
            print(tables[name](), flush=True)


# -- what is measured ------------------------------------------------------------------------------------------------


def uneven() -> str:
    lines = [f"| {SAMPLES} samples, 3 workers, batches of {BATCH} | used twice | never used |", "|---|---|---|"]
    for system in SYSTEMS:
        with tempfile.TemporaryDirectory() as folder:
            start(system, 3, folder, "whole")
            repeated, lost = counted(Path(folder))
        lines.append(f"| {NAMES[system]} | {repeated} | {lost} |")
    return "\n".join(lines) + "\n"


def resume() -> str:
    lines = [
        f"| 2 workers, {STOP_AFTER} steps, a stop | go on with | used twice | never used | weights as without it |",
        "|---|---|---|---|---|",
    ]
    for system in RESUMING:
        with tempfile.TemporaryDirectory() as folder:
            start(system, 2, folder, "whole")
            never_stopped = (Path(folder) / "weights-0").read_text()
        for workers in (2, 1):
            with tempfile.TemporaryDirectory() as folder:
                start(system, 2, folder, "first")
                start(system, workers, folder, "second")
                repeated, lost = counted(Path(folder))
                same = "yes" if (Path(folder) / "weights-0").read_text() == never_stopped else "no"
            lines.append(f"| {NAMES[system]} | {workers} | {repeated} | {lost} | {same} |")
    return "\n".join(lines) + "\n"


def alone() -> str:
    lines = [f"| started as | {' | '.join(NAMES[system] for system in RESUMING)} |", "|---|" + "---|" * len(RESUMING)]
    for told, variables in ENVIRONMENTS.items():
        cells = []
        for system in RESUMING:
            command = [sys.executable, __file__, "--believes", system]
            environment = {**os.environ, **variables}
            ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
            said = [line for line in ended.stdout.splitlines() if line.startswith("believes")]
            last = (ended.stderr.strip().splitlines() or ["?"])[-1]
            cells.append(said[0].removeprefix("believes ") if said else f"error: {last[:160]}")
        lines.append(f"| {told} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def start(system: str, workers: int, folder: str, part: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(workers)]
    command += [__file__, "--worker", system, folder, part]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PACELINE_LANES": "3" if workers == 3 else "2"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    if ended.returncode:
        raise SystemExit(f"{system}, {workers} workers, {part}: {ended.stdout[-2000:]}\n{ended.stderr[-4000:]}")


def counted(folder: Path) -> tuple[int, int]:
    """Of the epoch's samples, how many uses were too many, and how many samples had none."""
    uses = Counter(int(word) for file in folder.glob("used-*") for word in file.read_text().split())
    return sum(uses.values()) - len(uses), SAMPLES - len(uses)


# -- one worker of each system ---------------------------------------------------------------------------------------


class Moves:
    """Which weights have moved since it last looked, as lines of a file; worker 0's alone, since all have the same."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / f"used-{os.getpid()}"
        self.last: list[float] | None = None

    def note(self, weight: Any) -> None:
        now = weight.detach().tolist()
        if self.last is not None and os.environ["RANK"] == "0":
            with self.file.open("a") as file:
                moved = [str(i) for i, (new, old) in enumerate(zip(now, self.last, strict=True)) if new != old]
                file.write(" ".join(moved) + "\n")
        self.last = now


def made(folder: Path) -> tuple[Any, Any, Moves]:
    """The data, and a model with a weight for each sample, which moves when the sample has a part in a step."""
    import torch

    moves = Moves(folder)

    class OneWeightEach(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(SAMPLES))

        def forward(self, index: Any) -> dict[str, Any]:
            moves.note(self.weight)
            return {"loss": self.weight[index].mean()}

    return [{"index": i} for i in range(SAMPLES)], OneWeightEach(), moves


def end(folder: Path, model: Any, moves: Moves) -> None:
    """The last step has moved weights that no forward has seen."""
    moves.note(model.weight)
    (folder / f"weights-{os.environ['RANK']}").write_text(hashlib.sha256(model.weight.detach().numpy()).hexdigest())


def torch_worker(folder: Path, part: str) -> None:
    import torch
    from torch.utils.data import DataLoader, DistributedSampler

    torch.distributed.init_process_group("gloo")
    data, model, moves = made(folder)
    parallel = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    for batch in DataLoader(data, batch_size=BATCH, sampler=DistributedSampler(data)):
        parallel(**batch)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    end(folder, model, moves)
    torch.distributed.destroy_process_group()


def accelerate_worker(folder: Path, part: str) -> None:
    import torch
    from accelerate import Accelerator
    from accelerate.utils import set_seed
    from torch.utils.data import DataLoader

    set_seed(0)
    accelerator = Accelerator(cpu=True)
    data, model, moves = made(folder)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(data, batch_size=BATCH, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if part == "second":
        accelerator.load_state(str(folder / "state"))
        loader = accelerator.skip_first_batches(loader, STOP_AFTER)
    for step, batch in enumerate(loader, 1):
        accelerator.backward(model(**batch)["loss"])
        optimizer.step()
        optimizer.zero_grad()
        if part == "first" and step == STOP_AFTER:
            accelerator.save_state(str(folder / "state"))
            break
    end(folder, accelerator.unwrap_model(model), moves)
    accelerator.end_training()


def transformers_worker(folder: Path, part: str) -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            if part == "first" and state.global_step == STOP_AFTER:
                control.should_save = control.should_training_stop = True

    data, model, moves = made(folder)
    arguments = TrainingArguments(
        output_dir=str(folder / "trainer"), per_device_train_batch_size=BATCH, num_train_epochs=1, learning_rate=0.1,
        lr_scheduler_type="constant", optim="sgd", save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True,
        logging_strategy="no", remove_unused_columns=False, ddp_backend="gloo", seed=0,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=data, callbacks=[Stop()])
    trainer.train(resume_from_checkpoint=True if part == "second" else None)
    end(folder, model, moves)


def paceline_worker(folder: Path, part: str) -> None:
    import torch
    from torch.utils.data import DataLoader

    import paceline

    engine = paceline.Engine(seed=0)
    data, model, moves = made(folder)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = engine.prepare(model, optimizer, DataLoader(data, batch_size=BATCH, shuffle=True))
    if part == "second":
        engine.load_state(folder / "state")
    for batch in loader:
        engine.backward(model(**batch)["loss"])
        optimizer.step()
        optimizer.zero_grad()
        if part == "first" and engine.stepped and engine.step == STOP_AFTER:
            engine.save_state(folder / "state")
            break
    end(folder, model, moves)
    engine.close()


def believed(system: str) -> str:
    """How many workers the system takes there to be, in an environment that says half of it."""
    if system == "accelerate":
        from accelerate import Accelerator

        return f"{Accelerator(cpu=True).num_processes}"
    if system == "transformers":
        from transformers import TrainingArguments

        return f"{TrainingArguments(output_dir='unused', use_cpu=True).world_size}"
    from paceline.errors import WorldError
    from paceline.world.environment import read_world

    try:
        return f"{read_world().size}"
    except WorldError as error:
        return f"refused: {error}"


WORKERS = {
    "torch": torch_worker,
    "accelerate": accelerate_worker,
    "transformers": transformers_worker,
    "paceline": paceline_worker,
}
NAMES = {
    "torch": "torch DDP, `DistributedSampler`",
    "accelerate": "Accelerate",
    "transformers": "transformers' Trainer",
    "paceline": "paceline",
}


if __name__ == "__main__":
    main()
