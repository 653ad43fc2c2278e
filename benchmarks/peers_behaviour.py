"""What training systems do with data that don't divide, a job that goes on elsewhere, and half an environment.

    python benchmarks/peers_behaviour.py                 all of it, some minutes: the tables of docs/comparison.md
    python benchmarks/peers_behaviour.py --only uneven   or resume, alone, steps
    python benchmarks/peers_behaviour.py --save          writes benchmarks/results/peers_behaviour.json too

uneven    one epoch of 22 samples on 3 workers with batches of 2: how many samples are used twice, how many never
resume    2 workers stop after 3 steps and save; 2 or 1 go on to the end of the epoch: samples lost and repeated, and
          whether the weights are those of the run on 2 workers that never stopped
alone     two processes started by torchrun, or one with half of a launcher's variables, on a host without a GPU: how
          many workers each believes there are; with the CPU named in the script, and without a device
steps     two processes started by torchrun, on such a host: steps of an epoch, of which each would make all if it were
          alone

Every system is used as its documentation shows: `Accelerator.save_state` and `skip_first_batches`, the Trainer's
`resume_from_checkpoint`. The model has a weight for each sample; a sample was used in the steps in which its weight
moved. For `uneven` and `resume` all workers are started by torchrun, and Accelerate and the Trainer are told to use the
CPU, without which they would not join. GPUs are hidden. Needs accelerate and transformers, as `make setup`
installs them.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "peers_behaviour.json"
SAMPLES, BATCH, STOP_AFTER = 22, 2, 3
SYSTEMS = ("torch", "accelerate", "transformers", "paceline")
RESUMING = SYSTEMS[1:]  # DDP and DistributedSampler have no state to save: a script does that by itself
NAMES = {
    "torch": "torch DDP, `DistributedSampler`",
    "accelerate": "Accelerate",
    "transformers": "transformers' Trainer",
    "paceline": "paceline",
}
SLURM = {
    "SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0",
    "SLURM_NODEID": "0", "SLURM_NNODES": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "localhost",
    "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_STEP_NUM_NODES": "1", "SLURM_TASKS_PER_NODE": "2",
}  # fmt: skip
TORCHRUN = "torchrun"
STARTS: dict[str, dict[str, str] | str] = {
    "`torchrun --nproc-per-node 2 train.py`": TORCHRUN,
    "`srun -n 2 python train.py`": SLURM,
    "`WORLD_SIZE=2` without `RANK`": {"WORLD_SIZE": "2"},
}
DEVICES = {"none": False, "the CPU": True}
"""What the peers' scripts say of a device: nothing, or `cpu=True` and `use_cpu=True`. paceline's says nothing."""
NO_DEVICE = "no device"
"""Part of an epoch: the whole, of a script that names no device."""
HIDDEN = {"CUDA_VISIBLE_DEVICES": ""}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=tuple(PARTS))
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS.name}; with --only, that part of it")
    parser.add_argument("--worker", nargs=3, metavar=("SYSTEM", "FOLDER", "PART"), help=argparse.SUPPRESS)
    parser.add_argument("--believes", choices=SYSTEMS, help=argparse.SUPPRESS)
    parser.add_argument("--on-cpu", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        system, folder, part = given.worker
        WORKERS[system](Path(folder), part)
        sys.stdout.flush()
        os._exit(0)  # all is written; gloo's threads now and then abort an interpreter that ends
    elif given.believes:
        sys.stdout.write(f"believes {believed(given.believes, on_cpu=given.on_cpu)}\n")  # at once: two processes write
    else:
        found = {}
        for name in (given.only,) if given.only else PARTS:
            measure, head = PARTS[name]
            found[name] = measure()
            print(table(head, found[name]), flush=True)
        if given.save:
            save(found)


def save(found: dict[str, list[list[Any]]]) -> None:
    versions = {name: importlib.metadata.version(name) for name in ("torch", "accelerate", "transformers")}
    before = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    parts = {name: found.get(name, before.get(name, [])) for name in PARTS}
    about = "benchmarks/peers_behaviour.py --save: the rows of the tables of docs/comparison.md"
    shown = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in {"about": about, **versions}.items()]
    for name, rows in parts.items():
        lines = ",\n".join(f"    {json.dumps(row, ensure_ascii=False)}" for row in rows)
        shown.append(f"  {json.dumps(name)}: [\n{lines}\n  ]")
    RESULTS.write_text("{\n" + ",\n".join(shown) + "\n}\n")


def table(head: list[str], rows: list[list[Any]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(str(cell) for cell in line)} |" for line in lines) + "\n"


# -- what is measured ------------------------------------------------------------------------------------------------


def uneven() -> list[list[Any]]:
    rows: list[list[Any]] = []
    for system in SYSTEMS:
        with tempfile.TemporaryDirectory() as folder:
            start(system, 3, folder, "whole")
            rows.append([NAMES[system], *counted(Path(folder))])
    return rows


def resume() -> list[list[Any]]:
    rows: list[list[Any]] = []
    for system in RESUMING:
        with tempfile.TemporaryDirectory() as folder:
            start(system, 2, folder, "whole")
            never_stopped = (Path(folder) / "weights-0").read_text()
        for workers in (2, 1):
            with tempfile.TemporaryDirectory() as folder:
                start(system, 2, folder, "first")
                start(system, workers, folder, "second")
                same = "yes" if (Path(folder) / "weights-0").read_text() == never_stopped else "no"
                rows.append([NAMES[system], workers, *counted(Path(folder)), same])
    return rows


def alone() -> list[list[Any]]:
    return [
        [told, device, *(beliefs(system, how, on_cpu=on_cpu) for system in RESUMING)]
        for told, how in STARTS.items()
        for device, on_cpu in DEVICES.items()
    ]


def steps() -> list[list[Any]]:
    rows: list[list[Any]] = []
    for system in RESUMING:
        for device, on_cpu in DEVICES.items():
            with tempfile.TemporaryDirectory() as folder:
                start(system, 2, folder, "whole" if on_cpu else NO_DEVICE)
                (used,) = Path(folder).glob("used-*")
                rows.append([NAMES[system], device, len(used.read_text().splitlines())])
    return rows


def beliefs(system: str, how: dict[str, str] | str, *, on_cpu: bool) -> str:
    """What every process of such a start takes the number of workers to be, or the error with which it ends."""
    command = [sys.executable, __file__, "--believes", system, *(["--on-cpu"] if on_cpu else [])]
    processes, environment = 1, {**os.environ, **HIDDEN, "OMP_NUM_THREADS": "1"}
    if how == TORCHRUN:
        processes = 2
        command = [*torchrun(processes), *command[1:]]
    else:
        environment |= how  # type: ignore[arg-type]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    said = [line.removeprefix("believes ") for line in ended.stdout.splitlines() if line.startswith("believes")]
    if len(said) == processes and len(set(said)) == 1:
        return said[0]
    return f"{(ended.stderr.strip().splitlines() or ['?'])[-1][:160]}"


PARTS = {
    "uneven": (uneven, [f"{SAMPLES} samples, 3 workers, batches of {BATCH}", "used twice", "never used"]),
    "resume": (
        resume,
        [f"2 workers, {STOP_AFTER} steps, a stop", "go on with", "used twice", "never used", "weights as without it"],
    ),
    "alone": (alone, ["started as", "device in the script", *(NAMES[system] for system in RESUMING)]),
    "steps": (steps, ["2 workers", "device in the script", f"steps in an epoch of {SAMPLES}, batches of {BATCH}"]),
}


def torchrun(workers: int) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(workers)]


def start(system: str, workers: int, folder: str, part: str) -> None:
    command = [*torchrun(workers), __file__, "--worker", system, folder, part]
    environment = {**os.environ, **HIDDEN, "OMP_NUM_THREADS": "1", "PACELINE_LANES": "3" if workers == 3 else "2"}
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
    accelerator = Accelerator() if part == NO_DEVICE else Accelerator(cpu=True)
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
    device: dict[str, Any] = {} if part == NO_DEVICE else {"use_cpu": True, "ddp_backend": "gloo"}
    arguments = TrainingArguments(
        output_dir=str(folder / "trainer"), per_device_train_batch_size=BATCH, num_train_epochs=1, learning_rate=0.1,
        lr_scheduler_type="constant", optim="sgd", save_strategy="no", report_to=[], disable_tqdm=True,
        logging_strategy="no", remove_unused_columns=False, seed=0, **device,
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


def believed(system: str, *, on_cpu: bool) -> str:
    """How many workers the system takes there to be, as this process was started."""
    if system == "accelerate":
        from accelerate import Accelerator

        return f"{(Accelerator(cpu=True) if on_cpu else Accelerator()).num_processes}"
    if system == "transformers":
        from transformers import TrainingArguments

        return f"{TrainingArguments(output_dir='unused', **({'use_cpu': True} if on_cpu else {})).world_size}"
    from paceline.errors import WorldError
    from paceline.world.environment import read_world

    try:
        return f"{read_world().size}"
    except WorldError as error:
        return f"{type(error).__name__}: {error}"


WORKERS = {
    "torch": torch_worker,
    "accelerate": accelerate_worker,
    "transformers": transformers_worker,
    "paceline": paceline_worker,
}


if __name__ == "__main__":
    main()
