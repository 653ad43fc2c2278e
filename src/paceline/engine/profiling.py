"""`engine.profile`: torch's profiler over some steps of the loop, with one trace for each worker.

    with engine.profile(wait=1, warmup=1, active=3):       steps   1     2        3 4 5              6 …
        for batch in loader:                                       wait  warm-up  recorded, saved    nothing
            …

Steps are the engine's, each of `lanes / workers · accumulate` micro-batches: it tells when one counts, so the loop's
body stays as it is. A step that is lost when the workers of an elastic job change, and done again, counts once. The
trace has it twice, and the recovery in between.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.profiler import ProfilerAction, ProfilerActivity, profile

from paceline.errors import ConfigError, LoopError
from paceline.input_file import cause_of
from paceline.world import messages
from paceline.world.checked_values import whole_number

if TYPE_CHECKING:
    from paceline.engine.engine import Engine

FOLDER = "profile"
TOP = 8
"""Operators in the table."""


class Profile:
    """What `with engine.profile() as profile:` gives."""

    def __init__(
        self, engine: Engine, folder: Path, given: Sequence[Any], wait: int, warmup: int, active: int, **options: Any
    ) -> None:
        if given:
            raise ConfigError(
                f"engine.profile() was given a {type(given[0]).__name__}; write "
                "engine.profile(wait=…, warmup=…, active=…), which are numbers of steps"
            )
        self._engine, self._folder = engine, folder
        self._wait = whole_number("profile: wait", wait)
        self._first = self._wait + whole_number("profile: warmup", warmup)
        self._active = whole_number("profile: active", active, least=1)
        self._steps = 0  # that counted since it began
        self._since = 0.0
        self._at: list[int] = []  # their numbers, of those recorded, and what each took:
        self._seconds, self._exposed_s, self._waited_s = 0.0, 0.0, 0.0
        self.trace: Path | None = None
        """Where this worker's is, once it is written."""
        self._was_recorded = False
        self._on_gpu = on_gpu = engine.device.type == "cuda"
        self._profiler = profile(
            activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])],
            schedule=self._action,
            on_trace_ready=self._save,
            **options,
        )

    def __enter__(self) -> Profile:
        listeners = self._engine._group.after_step
        if any(isinstance(getattr(one, "__self__", None), Profile) for one in listeners):
            raise LoopError("engine.profile() is open already; a process has one profiler")
        listeners.append(self._step_counts)
        self._since = time.perf_counter()
        self._profiler.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, frames: object) -> None:
        self._engine._group.after_step.remove(self._step_counts)
        self._profiler.stop()
        if not self._was_recorded and error is None:
            self._engine._note(f"paceline: {self._nothing()}")

    def step(self) -> None:
        """Does nothing, for loops that call it as torch's profiler wants it: the engine counts steps by itself."""

    def key_averages(self, **options: Any) -> Any:
        """torch's, of the steps that were recorded."""
        if not self._was_recorded:
            raise LoopError(self._nothing())
        return self._profiler.key_averages(**options)

    def _nothing(self) -> str:
        return (
            f"engine.profile(wait={self._wait}, warmup={self._first - self._wait}) has recorded nothing, because it "
            f"was left after {self._steps} steps; wait=0 and warmup=0 record from the start"
        )

    def _action(self, step: int) -> ProfilerAction:
        last = self._first + self._active - 1
        if step < self._wait or step > last:
            return ProfilerAction.NONE
        if step < self._first:
            return ProfilerAction.WARMUP
        return ProfilerAction.RECORD if step < last else ProfilerAction.RECORD_AND_SAVE

    def _step_counts(self) -> None:
        now = time.perf_counter()
        if self._first <= self._steps < self._first + self._active:
            timing = self._engine.timing
            self._at.append(self._engine.step)
            self._seconds += now - self._since
            self._exposed_s += timing.exposed_s
            self._waited_s += timing.waited_for_data_s
        self._steps += 1
        self._profiler.step()
        self._since = time.perf_counter()  # a trace may just have been written

    def _save(self, profiler: Any) -> None:
        """By the launcher's rank, which is the slot in an elastic job: no two processes have one at the same time."""
        steps = f"steps{self._at[0]}-{self._at[-1]}" if self._at else "no_whole_step"
        path = self._folder / f"rank{self._engine._group.seat.rank}_{steps}.pt.trace.json.gz"
        self._was_recorded = True
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(path))
            self.trace = path
        except OSError as error:  # what is trained is worth more
            messages.warn(f"engine.profile() can't write {path}: {cause_of(error)}")
        if self._at and self._engine.is_main_process:
            self._engine.show_table(*self._table(profiler.key_averages()))

    def _table(self, averages: Sequence[Any]) -> tuple[str, list[tuple[str, str]]]:
        count, world = len(self._at), self._engine.world
        title = (
            f"steps {self._at[0]} to {self._at[-1]} of worker {world.rank}: {1e3 * self._seconds / count:.1f} ms each"
        )
        rows = [("waiting for data", self._share(self._waited_s))]
        if world.size > 1:
            rows.insert(0, ("exposed communication", self._share(self._exposed_s)))
        spent_in = {id(event): self._time_of(event) for event in averages}  # in µs
        total = sum(spent_in.values()) or 1.0
        for event in sorted(averages, key=lambda event: spent_in[id(event)], reverse=True)[:TOP]:
            spent = spent_in[id(event)]
            calls = f"{event.count / count:g} call{'' if event.count == count else 's'}"
            rows.append((event.key, f"{spent / total:.1%} of all operators, {spent / count / 1e3:.2f} ms in {calls}"))
        return title, [*rows, ("trace", str(self.trace))]

    def _time_of(self, event: Any) -> float:
        """By itself: of operators on the CPU; on a GPU of its kernels, which operators would count a second time."""
        if event.key.startswith("ProfilerStep"):
            return 0.0
        if not self._on_gpu:
            return float(event.self_cpu_time_total)
        is_kernel = event.device_type.name == "CUDA" and not event.is_user_annotation
        return float(event.self_device_time_total) if is_kernel else 0.0

    def _share(self, seconds: float) -> str:
        return f"{seconds / self._seconds:.1%} of the step, {1e3 * seconds / len(self._at):.2f} ms"
