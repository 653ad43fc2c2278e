"""Settings become runs: each is a job of `paceline run` in a process of its own, recorded in a folder of its own.

first pass       every setting, fingerprints of all steps
closer look      the reference and the first that differs, once more up to that step: values, and operators of the
                 item. They are runs of the same settings, so they also tell whether a run repeats itself
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from paceline.errors import ConfigError
from paceline.verify import comparison
from paceline.verify.causes import Cause, likely_cause
from paceline.verify.comparison import KEPT, Difference, differences_in, first_difference
from paceline.verify.first_different_operator import DifferentOperator, first_different_operator
from paceline.verify.record import Run, Setting, Step, read_run
from paceline.verify.request import Look, Place, Request, operators_file, record_file, values_file

POLL_S = 0.05


class Process(Protocol):
    returncode: int | None

    def poll(self) -> int | None: ...
    def terminate(self) -> None: ...
    def wait(self) -> Any: ...


Start = Callable[[list[str], Path, dict[str, str]], Any]
"""(words after `paceline`, its log, its environment) to a running process."""


@dataclass(frozen=True)
class Plan:
    """What is run."""

    command: tuple[str, ...]  # the script and its arguments, as for `paceline run`
    settings: tuple[Setting, ...]
    steps: int
    lanes: int
    tolerance: float
    folder: Path  # of all runs
    options: tuple[str, ...] = ()  # of `paceline run`

    @property
    def script(self) -> str:
        return self.command[1] if self.command[0] == "-m" else self.command[0]


@dataclass(frozen=True)
class Element:
    """The first of a tensor that differs."""

    kind: str
    name: str
    index: tuple[int, ...]
    values: tuple[float, float]
    bits: tuple[str, str]
    differing: int
    elements: int
    between: tuple[str, str] | None = None  # workers of one run, where these differ


@dataclass
class Outcome:
    """All that is to be told."""

    runs: list[Run] = field(default_factory=list)
    states: list[str] = field(default_factory=list)  # of each: reference, same, differs, failed
    against: list[int | None] = field(default_factory=list)  # of each: its reference; None: it is one
    difference: Difference | None = None
    other: int | None = None  # the run that is unlike; of which workers are unlike each other, it may be a reference
    cause: Cause | None = None
    element: Element | None = None
    parted: DifferentOperator | None = None
    repeats: bool | None = None

    @property
    def pair(self) -> tuple[Run, Run]:
        """What the difference is between: a reference and another run, or a reference and itself."""
        assert self.other is not None
        against = self.against[self.other]
        return self.runs[self.other if against is None else against], self.runs[self.other]

    @property
    def same(self) -> bool:
        return all(state in ("reference", "same") for state in self.states)


Tell = Callable[[Outcome, str, int], None]
"""What there is so far, which run is under way, and its step."""


class Verification:
    """`start` starts a job, `environment` gives its variables, `tell` hears what is going on."""

    def __init__(
        self,
        plan: Plan,
        start: Start,
        environment: Callable[[Path], dict[str, str]],
        tell: Tell = lambda outcome, text, step: None,
    ) -> None:
        self._plan, self._start, self._environment, self._tell = plan, start, environment, tell

        self._out = Outcome()

    def outcome(self) -> Outcome:
        out = self._out
        for setting in self._plan.settings:
            if out.runs and setting.workers > (lanes := out.runs[0].about["lanes"]):
                raise ConfigError(
                    f"{setting}: the script's job has {lanes} lane{'s' if lanes > 1 else ''}, and every worker needs "
                    f"one; leave {setting.workers} out of --workers, or let the script have as many"
                )
            run = self._run(setting)
            out.runs.append(run)
            self._judge(out, run)
        if out.other is not None and out.difference is not None:
            self._explain(out, out.difference)
        return out

    def _judge(self, out: Outcome, run: Run) -> None:
        if len(out.runs) == 1:
            self._check_reference(run)
        alike = [at for at, one in enumerate(out.runs[:-1]) if out.against[at] is None and _same_kind(one, run)]
        if run.about and not alike:
            if run.error is not None:
                raise ConfigError(f"{run.name()} fails: {run.error}")
            out.states.append("reference")
            out.against.append(None)
            return
        at = alike[0] if alike else 0
        found = first_difference(out.runs[at], run, self._plan.tolerance)
        of_reference = found is not None and found.of_reference
        unlike = found if not of_reference else first_difference(
            out.runs[at], run, self._plan.tolerance, within_reference=False
        )  # fmt: skip
        state = "failed" if run.error is not None else "same" if unlike is None else "differs"
        out.states.append(state)
        out.against.append(at)
        if of_reference:
            out.states[at] = "differs"  # it goes on being what others are compared with
        if out.other is None and (of_reference or state != "same"):
            out.other, out.difference = at if of_reference else len(out.runs) - 1, found

    def _check_reference(self, run: Run) -> None:
        """What the others are compared with has to have run."""
        script = self._plan.script
        if run.error is not None:
            raise ConfigError(f"{script} fails with {run.name()}, the first setting: {run.error}")
        if not run.about.get("synchronous", True):
            raise ConfigError(
                f"{script} trains with strategy={run.about['strategy']!r}, whose workers don't wait for each other: "
                "two runs need not agree. Give --strategies ddp, or record a run and do it again with `paceline replay`"
            )
        if run.made == 0:
            raise ConfigError(_no_step(script, self._folder_of(run.setting, None)))

    # -- a run -------------------------------------------------------------------------------------------------------

    def _folder_of(self, setting: Setting, look: Look | None) -> Path:
        number = self._plan.settings.index(setting)
        return self._plan.folder / (f"{number}" if look is None else f"{number}-look")

    def _run(self, setting: Setting, look: Look | None = None) -> Run:
        folder = self._folder_of(setting, look)
        (folder / "files").mkdir(parents=True)
        Request(folder, self._plan.steps, self._plan.lanes, setting.strategy, look).write()
        words = [word.replace("{folder}", str(folder / "files")) for word in self._plan.command]
        log, begun = folder / "log.txt", time.monotonic()
        job = ["run", "--workers", str(setting.workers), *self._plan.options, *words]
        process: Process = self._start(job, log, self._environment(folder))
        try:
            while process.poll() is None:
                self._tell(
                    self._out,
                    f"{setting}{'' if look is None else f', a closer look at step {look.step}'}",
                    steps_in(folder),
                )
                time.sleep(POLL_S)
        finally:
            if process.poll() is None:
                process.terminate()
            process.wait()
        run = read_run(setting, folder)
        run.seconds, run.code = time.monotonic() - begun, process.returncode or 0
        run.error = error_in(log, run.code) if run.code else None
        return run

    # -- a closer look -----------------------------------------------------------------------------------------------

    def _explain(self, out: Outcome, found: Difference) -> None:
        reference, other = out.pair
        if found.step >= 1 and found.kind not in (comparison.STEPS, comparison.ITEMS, comparison.LANES):
            look = self._look_at(found, reference, other)
            pair = (reference,) if found.of_reference else (reference, other)
            found_again = {repeats(run, self._run(run.setting, look), look.step) for run in pair}
            out.repeats = None if None in found_again else found_again == {True}
            folders = (self._folder_of(reference.setting, look), self._folder_of(other.setting, look))
            if look.item is not None:
                out.parted = _different_operator(look.item, *folders)
            out.element = next(_elements(look, found, *folders), None)
        out.cause = likely_cause(found, reference, other, out.parted, repeats=out.repeats)

    def _look_at(self, found: Difference, reference: Run, other: Run) -> Look:
        wanted: dict[str, str] = {}
        for one in differences_in(found.step, reference, other, self._plan.tolerance):
            if one.kind in KEPT:
                wanted.setdefault(KEPT[one.kind], one.name)
        # Weights that are gathered in forward are operators too, and others for each number of workers.
        explains = found.kind in (comparison.RANDOM, comparison.LOSS, comparison.LANE_GRADIENT)
        traced = explains and reference.whole and other.whole
        return Look(found.step, tuple(wanted.items()), found.place if traced else None)


def _same_kind(one: Run, other: Run) -> bool:
    """Whether they promise the same numbers; local steps train others than ddp."""
    return not other.about or one.about["facts"]["updates"] == other.about["facts"]["updates"]


def repeats(first: Run, again: Run, steps: int) -> bool | None:
    """Whether a run has done what the run of the same setting before it did, up to that step; None: it need not."""
    if not first.in_bits:
        return None
    for number in range(1, steps + 1):
        one, two = first.steps.get(number, Step()), again.steps.get(number, Step())
        for name in ("entry", "items", "after"):  # a run that failed may have less of its last step
            ours, theirs = getattr(one, name), getattr(two, name)
            if any(ours[key] != theirs[key] for key in ours.keys() & theirs.keys()):
                return False
    return True


def steps_in(folder: Path) -> int:
    file = folder / record_file(0)
    return file.read_text().count('{"kind": "step"') if file.exists() else 0


def error_in(log: Path, code: int) -> str:
    """What the launcher said last, or the last line of a traceback."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    ours = [line.removeprefix("paceline: ") for line in lines if line.startswith("paceline: ")]
    said = [line for line in ours if not line.startswith(("global batch", "stopping", "also stopped"))]
    raised = [line for line in lines if line[:1].isalpha() and ("Error" in line.split(":")[0]) and ": " in line]
    return (said or raised or [f"it ended with code {code}"])[-1]


def _no_step(script: str, folder: Path) -> str:
    if not (folder / record_file(0)).exists():
        return (
            f"{script} ran to its end and trained nothing with paceline: verify follows a training loop of "
            "paceline.Engine (or a Trainer), with a model, an optimizer and a loader given to prepare()"
        )
    return (
        f"{script} prepared its training and ended before the first step, so there is nothing to compare. If it went "
        "on from a checkpoint of an earlier run, give each run a folder of its own: {folder} among its arguments"
    )


def _different_operator(item: Place, ours: Path, theirs: Path) -> DifferentOperator | None:
    name = operators_file(item)
    if not ((ours / name).exists() and (theirs / name).exists()):
        return None
    return first_different_operator(*(json.loads((folder / name).read_text()) for folder in (ours, theirs)))


def _elements(look: Look, found: Difference, ours: Path, theirs: Path) -> Iterator[Element]:
    """The first element of each tensor that was kept, the tensors in the order of a step."""
    from safetensors.torch import load_file

    def values(folder: Path, worker: int) -> dict[str, Any]:
        file = folder / values_file(worker)
        return load_file(file) if file.exists() else {}

    workers = found.workers or (0,)
    left, right, between = values(ours, 0), values(theirs, workers[0]), None
    if found.of_reference or (found.kind == comparison.WRITTEN and found.inside):
        rest = next(worker for worker in range(len(workers) + 1) if worker not in workers)
        left, between = values(theirs, rest), (f"worker {rest}", f"worker {workers[0]}")
    for kind, name in sorted(look.tensors, key=lambda one: list(KEPT.values()).index(one[0])):
        key = f"{kind} {name}"
        if key in left and key in right and (element := first_element(kind, name, left[key], right[key])) is not None:
            yield element if between is None else _between(element, between)


def _between(element: Element, workers: tuple[str, str]) -> Element:
    return Element(**{**vars(element), "between": workers})


def first_element(kind: str, name: str, left: Any, right: Any) -> Element | None:
    """By bits: 0.0 and -0.0 differ, and a NaN is like itself."""
    import torch

    if left.shape != right.shape or left.dtype != right.dtype:
        return None
    size = left.element_size()
    bits = [value.contiguous().view(-1).view(torch.uint8).view(-1, size) for value in (left, right)]
    unlike = (bits[0] != bits[1]).any(1).nonzero().view(-1)
    if not unlike.numel():
        return None
    at = int(unlike[0])
    index, rest = [], at
    for extent in reversed(left.shape):
        index.append(rest % extent)
        rest //= extent
    return Element(
        kind,
        name,
        tuple(reversed(index)),
        (_number(left.reshape(-1)[at]), _number(right.reshape(-1)[at])),
        (_hex(bits[0][at]), _hex(bits[1][at])),
        int(unlike.numel()),
        int(math.prod(left.shape)),
    )


def _number(value: Any) -> float:
    return float(value)


def _hex(raw: Any) -> str:
    return "0x" + bytes(reversed(raw.tolist())).hex()


def settings_of(workers: Sequence[int], strategies: Sequence[str] | None) -> tuple[Setting, ...]:
    """Each strategy at each number of workers; the first is the reference."""
    names: Sequence[str | None] = strategies or [None]
    return tuple(Setting(count, name) for name in names for count in workers)
