"""`paceline chaos -- run …`: does a job under random faults end with the bits of one without?

    undisturbed ──▶ hash, ledger ┐
                                 ├─▶ equal?     and every sample once, and nothing left behind
    disturbed   ──▶ hash, ledger ┘

Both runs get a folder of their own, which the job's arguments name as {folder}; its output is in a log there.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.errors import ConfigError, PacelineError
from paceline.input_file import cause_of

if TYPE_CHECKING:
    from rich.console import Console

    from paceline.elastic.random_faults import Draw, Happened, HurtJob

COMMAND = {"context_settings": {"allow_interspersed_args": False}}

LOOK_EVERY_S = 0.005
DEFAULT_GAP_S = 3.0
HASTE = 0.6
"""Some draws find no worker that they may hit, so that more are made than are wanted."""
WIDTH_OF_A_FILE = 120
LOG_LINES = 15
ORDER = ("kill", "stop", "slow", "cut", "joiner")
MEANING = {"joiner": "kill or stop of a replacement that was not admitted yet"}


@dataclass
class Run:
    """One of the two runs, when it has ended."""

    folder: Path
    code: int
    seconds: float
    faults: list[Happened] = field(default_factory=list)
    left: list[str] = field(default_factory=list)

    @property
    def log(self) -> Path:
        return self.folder / "log.txt"


@dataclass(frozen=True)
class Finding:
    """A line of the result."""

    about: str
    text: str
    fine: bool


def chaos(
    job: Annotated[list[str], typer.Argument(metavar="-- run …", help="the job, as after `paceline`")],
    minutes: Annotated[float, typer.Option(help="how long faults are made, at most")] = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="draws the faults")] = 0,
    faults: Annotated[
        int | None, typer.Option(min=1, help="how many [default: one in 3 s]", show_default=False)
    ] = None,
    folder: Annotated[Path, typer.Option(help="of the two runs; it must not exist yet")] = Path("runs/chaos"),
) -> None:
    """Run a job twice, the second time under random faults, and compare: paceline chaos -- run --workers 4 train.py

    Workers are killed, stopped, slowed and (over gloo) cut off, also while others recover. The script calls
    engine.weights_hash() at its end, and finds its place for files in {folder}: train.py --run-dir {folder}, say.
    Exit codes: 0 the weights are equal, each step was committed once and nothing is left; 1 something differs;
    2 wrong usage, or the job fails when it is left alone.
    """
    from rich.console import Console

    command = _job_command(job)
    out = Console(width=None if sys.stdout.isatty() else WIDTH_OF_A_FILE, highlight=False, markup=False)
    if not minutes > 0:
        raise ConfigError(f"--minutes {minutes:g}: faults are made for some time, above 0")
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        raise ConfigError(f"--folder {folder} exists; runs must begin from nothing, so give a new one") from None
    except OSError as error:
        raise ConfigError(f"--folder {folder} can't be made: {cause_of(error)}") from error
    out.print(f"paceline chaos: the job undisturbed, for its weights (log in {folder / 'undisturbed'})")
    plain = _run(command, folder / "undisturbed", None)
    if plain.code != 0:
        raise ConfigError(f"the job fails undisturbed, with code {plain.code}; the end of its log:\n{_tail(plain.log)}")
    if _hash_of(plain) is None:
        raise ConfigError(
            "the job recorded no hash of its weights, so there is nothing to compare; let the script call "
            "engine.weights_hash() when it has trained"
        )
    out.print(f"paceline chaos: {plain.seconds:.1f} s; now with faults (seed {seed})")
    injected = RandomFaults(seed, minutes * 60, faults)
    hurt = _run(command, folder / "disturbed", injected)
    findings = list(_compared(plain, hurt, asked=faults))
    _show(hurt, findings, out)
    if not all(finding.fine for finding in findings):
        raise typer.Exit(1)


class RandomFaults:
    """When to inject a fault, and how many: `faults` of them spread over `duration_s`."""

    def __init__(self, seed: int, duration_s: float, faults: int | None) -> None:
        from paceline.elastic.random_faults import draws

        gap_s = DEFAULT_GAP_S if faults is None else min(DEFAULT_GAP_S, HASTE * duration_s / faults)
        self._draws: Iterator[Draw] = draws(seed, gap_s)
        self._draw = next(self._draws)
        self._duration_s, self._faults = duration_s, faults
        self._begun: float | None = None
        self._due = 0.0

    def inject_due(self, job: HurtJob) -> bool:
        """Inject the next fault if it is due, once the job has committed a step; False when there are no more."""
        now = time.monotonic()
        if self._begun is None:
            if job.rows:
                self._begun, self._due = now, now + self._draw.gap_s
            return True
        if now - self._begun > self._duration_s or len(job.happened) == self._faults:
            return False
        if now >= self._due:
            job.hurt(self._draw)  # where no worker can be hit that way now, another is drawn
            self._draw = next(self._draws)
            self._due = now + self._draw.gap_s
        return True


def start(command: list[str], log: Path, variables: dict[str, str]) -> subprocess.Popen[bytes]:
    """`paceline run …` in a process of its own, whose output goes to the log alone."""
    with log.open("wb") as out:
        return subprocess.Popen(
            [sys.executable, "-m", "paceline.cli.main", *command],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=variables,
        )


def _job_command(job: list[str]) -> list[str]:
    if job[0] != "run" or len(job) < 2:
        raise ConfigError(
            f"paceline chaos runs a job, not {' '.join(job)!r}: paceline chaos -- run --workers 4 train.py"
        )
    return job[1:]


def _run(command: list[str], folder: Path, faults: RandomFaults | None) -> Run:
    """The job from start to end in a process of its own; nothing of it is left when this returns or raises."""
    from paceline.elastic.random_faults import HurtJob
    from paceline.world import environment

    folder.mkdir(parents=True)
    ours = ["--elastic", "--ledger", str(folder / "ledger.jsonl")]
    theirs = [word.replace("{folder}", str(folder)) for word in command]
    run = Run(folder, 0, 0.0)
    begun = time.monotonic()
    process = start(["run", *ours, *theirs], run.log, environment.hash_telling_environment(folder / "hashes"))
    job = HurtJob(process.pid, folder / "ledger.jsonl")
    try:
        while process.poll() is None:
            job.look()
            if faults is not None and not faults.inject_due(job):
                faults = None
                job.calm()
            time.sleep(LOOK_EVERY_S)
        job.look()
    finally:
        job.calm()
        if process.poll() is None:
            process.terminate()
        process.wait()
    run.code, run.seconds, run.faults = process.returncode, time.monotonic() - begun, job.happened
    segments = Path("/dev/shm").glob(f"paceline-{process.pid}-*")
    run.left = [*(f"process {pid}" for pid in job.left()), *map(str, segments)]
    return run


def _compared(plain: Run, hurt: Run, asked: int | None) -> Iterator[Finding]:
    yield Finding("ended", f"with code {hurt.code} after {hurt.seconds:.1f} s ({plain.seconds:.1f} s undisturbed)",
                  hurt.code == 0)  # fmt: skip
    if asked is not None:
        done = len(hurt.faults)
        short = "" if done == asked else "; the job or the minutes ended first: give it more of them"
        yield Finding("faults", f"{done} of {asked}{short}", done == asked)
    expected, came = _hash_of(plain), _hash_of(hurt)
    text = f"{came}, as undisturbed" if came == expected else f"{came or 'none recorded'}, but undisturbed {expected}"
    yield Finding("weights", text, came == expected)
    yield _ledgers(plain, hurt)
    yield from _samples(hurt)
    yield Finding("left", ", ".join(hurt.left) or "no process, no port, nothing in /dev/shm", not hurt.left)


def _ledgers(plain: Run, hurt: Run) -> Finding:
    from paceline.elastic.step_log import read_step_log

    try:
        expected, came = ([row.place for row in read_step_log(run.folder / "ledger.jsonl")] for run in (plain, hurt))
    except (PacelineError, OSError) as error:
        return Finding("ledger", str(error), False)
    if sorted(came) != sorted(expected):
        return Finding("ledger", f"{len(came):,} steps committed, but {len(expected):,} undisturbed", False)
    return Finding("ledger", f"{len(came):,} steps, each committed once", True)


def _samples(hurt: Run) -> Iterator[Finding]:
    from paceline.data.audit import audit

    records = sorted({path.parent.parent for path in hurt.folder.rglob("samples/attempt-*.jsonl")})
    for folder in records:
        report = audit(folder)
        problems = f": {report.problems[0]}" if report.problems else ""
        yield Finding("samples", f"{report.verdict}{problems}", report.clean)
    if not records:
        yield Finding("samples", "not recorded: Engine(record_samples=…) with a folder in {folder} would be", True)


def _hash_of(run: Run) -> str | None:
    from paceline.elastic.faults import last_hash

    return last_hash(run.folder / "hashes")


def _show(hurt: Run, findings: list[Finding], out: Console) -> None:
    from rich.table import Table

    table = Table("fault", "times", "to the next commit: median", "most", box=None, pad_edge=False, header_style="bold")
    for kind in ORDER:
        faults = [fault for fault in hurt.faults if fault.kind == kind]
        times = sorted(fault.commit_s for fault in faults if fault.commit_s is not None and kind != "joiner")
        median = f"{times[len(times) // 2]:.2f} s" if times else ""
        table.add_row(kind, str(len(faults)), median, f"{times[-1]:.2f} s" if times else MEANING.get(kind, ""))
    result = Table.grid(padding=(0, 2))
    for finding in findings:
        result.add_row(finding.about, finding.text, style=None if finding.fine else "bold red")
    out.print("", table, "", result, sep="\n")
    if not all(finding.fine for finding in findings):
        out.print(f"the end of {hurt.log}:\n{_tail(hurt.log)}", style="dim")


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-LOG_LINES:])
