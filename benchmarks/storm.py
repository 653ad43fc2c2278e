"""A storm of kills from outside over every strategy and backend: does each job end with the bits of one left alone?

    python benchmarks/storm.py --kills 200                                    # about 12 minutes on 2 cores
    python benchmarks/storm.py --kills 40 --strategies zero2,fsdp --backends gloo --seed 3

For each strategy and backend one elastic job trains a small model. Real processes of it are killed by SIGKILL at random
moments, every third time two or three of them at once, and a third of the kills fall into the recovery from another.
Nobody is spared: where no worker with the state is left, all start anew from the last checkpoint, and those that start
are killed too. When a job has had its kills it is told in which epoch to end. Then all of this must hold:

    it ended with code 0 and the hash that one worker, whom nobody disturbed, had after that epoch
    every step is in its ledger once, every sample was used once
    no process is left, no folder in /dev/shm, none of temporary files

What is timed is from a kill to the next committed step that can know of it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from paceline.bench.statistics import Spread
from paceline.cli.chaos import start
from paceline.data.audit import audit
from paceline.elastic.random_faults import MOMENT_S, HurtJob
from paceline.elastic.step_log import read_step_log
from paceline.errors import PacelineError

STRATEGIES = ("star", "parameter_server", "ddp", "zero1", "zero2", "zero3", "fsdp", "hybrid")
BACKENDS = ("paceline", "gloo")
LANES, ROWS = 8, 4
STEPS_OF_EPOCH = 10
SAVE_EVERY = 20
HEARTBEAT_TIMEOUT_S = 2.0

SEVERAL = 1 / 3
"""So many of the kills hit two or three processes at once."""
CLOSE_BEHIND = 1 / 3
CALM_S = (0.05, 0.6)
"""From when all are members again to the next kill that does not fall into a recovery."""
MOST_UNRECOVERED = 2
"""More kills before the next commit would use up the starts that a job has without a new step."""
PATIENCE_S = 60.0
LOOK_EVERY_S = 0.002
NEVER = 1 << 40


# -- the job ---------------------------------------------------------------------------------------------------------


def train(folder: Path, epochs: int | None, step_s: float, width: int) -> None:
    """Until the epoch that the file `ends` tells; or `epochs` of them, writing down the hash after each."""
    import torch
    import torch.nn.functional as F
    from torch import Tensor, nn
    from torch.utils.data import DataLoader, Dataset

    import paceline

    class Noisy(Dataset[tuple[Tensor, Tensor]]):
        """Draws noise as a sample is fetched: a sample that is fetched again by another worker must be the same."""

        def __init__(self) -> None:
            generator = torch.Generator().manual_seed(1)
            self.points = torch.randn(LANES * ROWS * STEPS_OF_EPOCH - 20, 16, generator=generator)
            self.labels = torch.randint(0, 10, (len(self.points),), generator=generator)

        def __len__(self) -> int:
            return len(self.points)

        def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
            return self.points[index] + 0.1 * torch.randn(16), self.labels[index]

    def last_epoch() -> int:
        ends = folder / "ends"
        return epochs or (int(ends.read_text()) if ends.exists() else NEVER)

    with paceline.Engine(device="cpu", bucket_mib=width**2 / 2**21, record_samples=folder / "run") as engine:
        publish(folder / f"slot-of-{os.getpid()}", os.environ["PACELINE_RANK"])
        model = nn.Sequential(
            nn.Linear(16, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(width, width), nn.ReLU(),
            nn.Linear(width, 10),
        )  # fmt: skip
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)
        loader = DataLoader(Noisy(), batch_size=ROWS, shuffle=True)
        model, optimizer, loader, schedule = engine.prepare(model, optimizer, loader, schedule)
        checkpoints = engine.checkpoints(folder / "run", keep=2)
        checkpoints.resume()
        while loader.epoch < last_epoch():
            for points, labels in loader:
                engine.backward(F.cross_entropy(model(points), labels))
                engine.clip_grad_norm_(0.5)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                if engine.stepped:
                    time.sleep(step_s)
                    if engine.step % SAVE_EVERY == 0 and not epochs:
                        checkpoints.save()
            if epochs:
                note(folder / "hashes", f"{loader.epoch} {engine.weights_hash()}")
        checkpoints.close()
        if not epochs:
            digest = engine.weights_hash()
            if engine.is_main_process:
                note(folder / "hashes", f"{loader.epoch} {digest}")


def note(file: Path, line: str) -> None:
    with file.open("a") as out:
        out.write(f"{line}\n")


def hashes(folder: Path) -> dict[int, str]:
    """By epoch."""
    file = folder / "hashes"
    lines = file.read_text().splitlines() if file.exists() else []
    return {int(epoch): digest for epoch, digest in map(str.split, lines)}


# -- the storm -------------------------------------------------------------------------------------------------------


@dataclass
class Kill:
    processes: int
    seconds: float | None
    all_anew: bool
    joiners: bool
    """Only processes that had not joined yet: nobody has to recover from it."""

    def __str__(self) -> str:
        number = "" if self.processes == 1 else f"{self.processes} at once "
        took = "never" if self.seconds is None else f"{self.seconds:.2f} s"
        return f"{number}{took}{' (all start anew)' * self.all_anew}{' (not joined yet)' * self.joiners}"


@dataclass
class Result:
    strategy: str
    backend: str
    kills: list[Kill] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0
    epoch: int = 0
    digest: str = ""


def storm(strategy: str, backend: str, kills: int, asked: argparse.Namespace, folder: Path) -> Result:
    """One job from its start to its end; what was wrong with it is in the result."""
    result, chance = Result(strategy, backend), random.Random(f"{asked.seed} {strategy} {backend}")
    temporary = folder / "tmp"
    temporary.mkdir(parents=True)
    ledger = folder / "ledger.jsonl"
    flags = ["--workers", str(asked.workers), "--lanes", str(LANES), "--strategy", strategy, "--backend", backend]
    flags += ["--elastic", "--heartbeat-timeout-s", str(HEARTBEAT_TIMEOUT_S), "--ledger", str(ledger)]
    flags += ["--servers", str(asked.servers)] if asked.servers and strategy == "parameter_server" else []
    job = [__file__, "train", "--folder", str(folder), "--step-s", str(asked.step_s), "--width", str(asked.width)]
    begun = time.monotonic()
    process = start(["run", *flags, *job], folder / "log", {**os.environ, "TMPDIR": str(temporary)})
    hurt = HurtJob(process.pid, ledger)
    sizes: list[int] = []
    try:
        for victims in kills_to_come(chance, hurt, process, asked.workers, kills):
            hurt.kill_together(victims, slots_of(victims, folder))
            sizes.append(len(victims))
        watch(hurt, process, lambda: hurt.happened[-1].commit_s is not None, "a commit after the last kill")
        result.epoch = hurt.rows[-1].step // STEPS_OF_EPOCH + 3  # not the one that workers are just about to leave
        publish(folder / "ends", str(result.epoch))
        watch(hurt, process, lambda: process.poll() is not None, "its end", may_end=True)
    except StuckError as stuck:
        result.problems.append(str(stuck))
    finally:
        if process.poll() is None:
            process.terminate()
        process.wait(PATIENCE_S)
    result.seconds = time.monotonic() - begun
    result.kills = [
        Kill(size, fault.commit_s, fault.all_anew, fault.kind == "joiner")
        for size, fault in zip(sizes, hurt.happened, strict=True)
    ]
    result.problems += looked_at(folder, process, hurt)
    result.digest = hashes(folder).get(result.epoch, "")
    return result


def slots_of(victims: Sequence[int], folder: Path) -> list[int]:
    """Of those that have come as far as to tell."""
    told = [folder / f"slot-of-{pid}" for pid in victims]
    return [int(file.read_text()) for file in told if file.exists()]


class StuckError(Exception):
    """The job does not do what it is waited for."""


def kills_to_come(
    chance: random.Random, hurt: HurtJob, process: subprocess.Popen[bytes], workers: int, kills: int
) -> Iterator[list[int]]:
    """The processes to kill next, each time that the moment has come."""
    watch(hurt, process, lambda: len(hurt.rows) > 2, "its first steps")
    for number in range(kills):
        if number and chance.random() < CLOSE_BEHIND:
            pending = [fault for fault in hurt.happened if fault.commit_s is None]
            if len(pending) >= MOST_UNRECOVERED:
                watch(hurt, process, lambda: hurt.happened[-1].commit_s is not None, "a commit after a kill")
            calm_s = chance.uniform(*MOMENT_S)
        else:
            watch(hurt, process, lambda: len(hurt.rows[-1].members) == workers, "all are members")
            watch(hurt, process, lambda: not hurt.happened or hurt.happened[-1].commit_s is not None, "a commit")
            calm_s = chance.uniform(*CALM_S)
        watch(hurt, process, _passed(time.monotonic() + calm_s), "a moment")
        there = hurt.processes()
        together = chance.randint(2, 3) if chance.random() < SEVERAL else 1
        yield chance.sample(there, min(together, len(there)))


def _passed(moment: float) -> Callable[[], bool]:
    return lambda: time.monotonic() >= moment


def watch(
    hurt: HurtJob, process: subprocess.Popen[bytes], until: Callable[[], bool], what: str, *, may_end: bool = False
) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not until():
        hurt.look()
        if process.poll() is not None and not may_end:
            raise StuckError(f"ended with code {process.returncode} before {what}")
        if time.monotonic() > deadline:
            raise StuckError(f"waited {PATIENCE_S:g} s in vain for {what}")
        time.sleep(LOOK_EVERY_S)
    hurt.look()


def publish(file: Path, text: str) -> None:
    file.with_suffix(".part").write_text(text)
    os.replace(file.with_suffix(".part"), file)


def looked_at(folder: Path, process: subprocess.Popen[bytes], hurt: HurtJob) -> list[str]:
    """What is wrong with a job that has ended, but for its hash."""
    problems = [] if process.returncode == 0 else [f"ended with code {process.returncode}"]
    try:
        steps = [row.step for row in read_step_log(folder / "ledger.jsonl")]
        if steps != list(range(1, len(steps) + 1)):
            problems.append(f"the {len(steps)} steps of its ledger are not each there once, in order")
        report = audit(folder / "run")
        if not report.clean:
            problems.append(f"samples: {report.verdict}")
    except (PacelineError, OSError) as error:
        problems.append(str(error))
    left = [f"process {pid}" for pid in hurt.left()]
    left += map(str, [*Path("/dev/shm").glob(f"paceline-{process.pid}-*"), *(folder / "tmp").glob("paceline-*")])
    return [*problems, *(f"left behind: {what}" for what in left)]


def undisturbed(epochs: int, width: int, folder: Path) -> dict[int, str]:
    """The hash of one worker after each epoch: that of every strategy, backend and number of workers."""
    folder.mkdir()
    job = [__file__, "train", "--folder", str(folder), "--epochs", str(epochs), "--width", str(width)]
    process = start(["run", "--workers", "1", "--lanes", str(LANES), *job], folder / "log", dict(os.environ))
    if process.wait(10 * PATIENCE_S) != 0:
        raise SystemExit(f"the job fails undisturbed:\n{(folder / 'log').read_text()[-2000:]}")
    return hashes(folder)


# -- told ------------------------------------------------------------------------------------------------------------


def show(results: Sequence[Result]) -> None:
    print(
        f"\n{'strategy':<18}{'backend':<10}{'kills':>6}{'processes':>11}{'median':>9}{'most':>9}{'anew':>6}{'took':>8}"
    )
    for result in [*results, total(results)]:
        times = recoveries([result])
        spread = (f"{Spread.of(times).median:.2f} s", f"{max(times):.2f} s") if times else ("", "")
        anew = sum(kill.all_anew for kill in result.kills)
        processes = sum(kill.processes for kill in result.kills)
        print(
            f"{result.strategy:<18}{result.backend:<10}{len(result.kills):>6}{processes:>11}{spread[0]:>9}"
            f"{spread[1]:>9}{anew:>6}{result.seconds:>6.0f} s"
        )
    anew = [kill.seconds for result in results for kill in result.kills if kill.all_anew and kill.seconds is not None]
    if anew:
        print(f"where all start anew: median {Spread.of(anew).median:.2f} s, most {max(anew):.2f} s, {len(anew)} kills")
    slow = sorted(recoveries(results))[-5:]
    print(f"the slowest of the others: {', '.join(f'{seconds:.2f} s' for seconds in reversed(slow))}")
    for result in results:
        for problem in result.problems:
            print(f"{result.strategy}, {result.backend}: {problem}")
    wrong = sum(bool(result.problems) for result in results)
    well = len(results) - wrong
    print(f"{well} of {len(results)} jobs ended with the hash, every step and sample once, nothing left")


def recoveries(results: Sequence[Result]) -> list[float]:
    """Of the kills that took a member, where somebody with the state was left."""
    kills = [kill for result in results for kill in result.kills]
    return [kill.seconds for kill in kills if kill.seconds is not None and not (kill.all_anew or kill.joiners)]


def total(results: Sequence[Result]) -> Result:
    kills = [kill for result in results for kill in result.kills]
    return Result("all", "", kills, seconds=sum(result.seconds for result in results))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", nargs="?", choices=("storm", "train"), default="storm", help=argparse.SUPPRESS)
    parser.add_argument("--kills", type=int, default=200, help="in all jobs together")
    parser.add_argument("--strategies", default=",".join(STRATEGIES))
    parser.add_argument("--backends", default=",".join(BACKENDS))
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--servers", type=int, default=0, help="of parameter_server; killed as workers are")
    parser.add_argument("--width", type=int, default=40, help="of the model's layers: 1500 makes messages of megabytes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--step-s", type=float, default=0.02, help="in every step, beside its work")
    parser.add_argument("--folder", type=Path, help="of the jobs with their logs; by default a temporary one")
    parser.add_argument("--epochs", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    if asked.verb == "train":
        train(asked.folder, asked.epochs, asked.step_s if asked.epochs is None else 0.0, asked.width)
        return
    with tempfile.TemporaryDirectory(prefix="storm-") as name:
        folder = Path(name) if asked.folder is None else asked.folder.absolute()
        results = all_storms(asked, folder)
    show(results)
    if asked.json is not None:
        asked.json.write_text(json.dumps([asdict(result) for result in results], indent=1))
    if any(result.problems for result in results):
        sys.exit(1)


def all_storms(asked: argparse.Namespace, folder: Path) -> list[Result]:
    pairs = [(strategy, backend) for strategy in asked.strategies.split(",") for backend in asked.backends.split(",")]
    results = []
    for place, (strategy, backend) in enumerate(pairs):
        kills = asked.kills * (place + 1) // len(pairs) - asked.kills * place // len(pairs)
        result = storm(strategy, backend, kills, asked, folder / f"{strategy}-{backend}")
        print(f"{strategy}, {backend}: {', '.join(map(str, result.kills))} {'; '.join(result.problems)}", flush=True)
        results.append(result)
    expected = undisturbed(max(result.epoch for result in results) or 1, asked.width, folder / "undisturbed")
    for result in results:
        if result.epoch and result.digest != expected[result.epoch]:
            came = result.digest or "none told"
            result.problems.append(f"hash after epoch {result.epoch}: {came}, but undisturbed {expected[result.epoch]}")
    return results


if __name__ == "__main__":
    main()
