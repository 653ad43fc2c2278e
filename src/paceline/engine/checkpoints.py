"""Checkpoints of a run: `folder/checkpoint-{step}`, the newest few kept, written while the training goes on.

    checkpoints = engine.checkpoints("runs/demo", keep=3)
    checkpoints.resume()                      # newest that is complete and unharmed, or None
    for batch in loader:
        ...
        if engine.stepped and engine.step % 100 == 0:
            checkpoints.save()
    checkpoints.close()

A save that fails is a warning, and the training goes on: what is lost is a point to go back to. All workers call all of
these, at a step boundary.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from paceline.checkpoint.retention import all_checkpoints, best_checkpoint, checkpoint_name, prune, set_aside
from paceline.engine.saver import Saver, Surroundings
from paceline.errors import CheckpointError
from paceline.input_file import one_line
from paceline.world.checked_values import one_word, switch, whole_number
from paceline.world.world import World

WhenBusy = Literal["wait", "drop"]
LONGEST_LINE = 1000


@dataclass(frozen=True)
class _Last:
    """A save, and the workers that made it."""

    world: World
    step: int
    folder: Path
    extra: Any
    about: dict[str, Any]


class Checkpoints:
    def __init__(
        self,
        folder: Path,
        saver: Saver,
        *,
        around: Callable[[], Surroundings],
        at_boundary: Callable[[str], bool],
        resumes: Callable[[], bool],
        step: Callable[[], int],
        keep: int | None,
        asynchronous: bool,
        when_busy: WhenBusy,
    ) -> None:
        if keep is not None:
            why = "at least the newest one is kept; None keeps all"
            whole_number("checkpoints: keep", keep, least=1, why=why)
        one_word("checkpoints: when_busy", when_busy, ("wait", "drop"))
        switch("checkpoints: asynchronous", asynchronous)
        self.folder, self._saver = folder, saver
        self._around, self._at_boundary, self._step = around, at_boundary, step
        self._resumes = resumes
        self._last: _Last | None = None
        self._keep, self._asynchronous, self._when_busy = keep, asynchronous, when_busy
        self._saved = False

    def save(self, extra: Any = None, *, score: float | None = None, greater_is_better: bool = True) -> Path | None:
        """Save the job as it is after this step; None if it is not saved: a warning says why.

        `extra`, a tree of plain values and tensors, comes back from `resume`. The best `score` is among those kept.
        """
        if not self._at_boundary("checkpoints.save"):
            return None
        self.poll()
        folder = self.folder / checkpoint_name(self._step())
        score = None if score is None or math.isnan(score) else float(score)
        about = {} if score is None else {"score": score, "greater_is_better": greater_is_better}
        try:
            self._set_aside()
            self._last = _Last(self._around().world, self._step(), folder, extra, about)
            if self._asynchronous:
                if not self._saver.start(folder, extra, about, self._prune, drop=self._when_busy == "drop"):
                    self._say(f"paceline: {folder.name} is dropped: the save before it is still being written")
                    return None
            else:
                self._saver.save(folder, extra, about)
        except CheckpointError as error:
            self._warn(str(error))
            return None
        if not self._asynchronous and self._around().world.is_main:
            self._prune_or_warn()
        return folder

    def resume(self, which: bool | str | Path | None = True, *, accept: Sequence[str] = ()) -> Any:
        """Go on from a checkpoint, by default the newest that is complete and unharmed; its `extra`, or None."""
        if which is None or which is False or not self._resumes():
            return None
        self._at_boundary("checkpoints.resume")
        self._saver.finish()
        if which is not True:
            if wrong := self._saver.wrong_in(Path(which)):
                raise CheckpointError(wrong[0])
            return self._resumed(Path(which), accept)
        for name in self._names():
            wrong = self._saver.wrong_in(self.folder / name)
            if not wrong:
                return self._resumed(self.folder / name, accept)
            more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
            self._say(f"paceline: {name} is skipped: {one_line(wrong[0], LONGEST_LINE)}{more}")
        return None

    def _names(self) -> list[str]:
        """Of the checkpoints that the main worker sees, newest first."""
        names, failure = [], ""
        try:
            names = [path.name for path in all_checkpoints(self.folder)]
        except CheckpointError as error:
            failure = str(error)
        seen, failure = self._around().told([names, failure])[0]
        if failure:
            raise CheckpointError(failure)
        return list(seen)

    def _resumed(self, folder: Path, accept: Sequence[str]) -> Any:
        self._saved = False
        extra = self._saver.load(folder, accept)
        self._say(f"paceline: goes on from {folder}, after step {self._step()}")
        return {} if extra is None else extra

    @property
    def best(self) -> Path | None:
        """The complete one with the best score."""
        self._saver.finish()
        found = self._around().told(None if (best := best_checkpoint(self.folder)) is None else best.name)[0]
        return None if found is None else self.folder / found

    def load_weights(self, folder: str | Path) -> None:
        """The weights and buffers of a checkpoint, and nothing else of it."""
        self._at_boundary("checkpoints.load_weights")
        self._saver.load_weights(Path(folder))

    def poll(self) -> None:
        """Warn of a save that has failed in the background."""
        failure = self._saver.take_failure()
        if failure is not None:
            self._warn(failure)

    def wait(self) -> None:
        """Until what was saved is on the disk."""
        self._saver.finish()
        self._save_again()
        if any(self._around().told(self._saver.busy)):
            self._warn("the last save is still being written")
        self.poll()

    close = wait

    def _save_again(self) -> None:
        """The last save has failed because a worker was lost, and no step has been made since: the others save it."""
        failed = any(self._around().told(self._saver.has_failed))
        last, self._last = self._last, None
        if not failed or last is None or self._around().world is last.world or self._step() != last.step:
            return
        self._saver.take_failure()
        try:
            self._saver.save(last.folder, last.extra, last.about)
        except CheckpointError as error:
            self._warn(str(error))

    def _set_aside(self) -> None:
        """The first save: this run went on from before those of later steps, which would be taken for the newest."""
        if self._saved or not self._around().world.is_main:
            return
        self._saved = True
        try:
            for path in set_aside(self.folder, self._step()):
                self._say(f"paceline: the run went on from before {path.stem}; that is {path.name} now")
        except OSError as error:  # on this worker alone: it must not end what all are about to do
            self._warn(f"checkpoints of later steps could not be set aside: {error.strerror}")

    def _prune(self) -> None:
        try:
            prune(self.folder, self._keep)
        except OSError as error:
            raise CheckpointError(f"older checkpoints could not be removed: {error.strerror}") from error

    def _prune_or_warn(self) -> None:
        """In the training thread; it is saved all the same, as the other workers know it."""
        try:
            self._prune()
        except CheckpointError as error:
            self._warn(str(error))

    def _say(self, text: str) -> None:
        if self._around().world.is_main:
            print(text, flush=True)

    def _warn(self, text: str) -> None:
        if not self._around().world.is_main:
            return
        newest = next((path.name for path in all_checkpoints(self.folder)), None)
        left = "there is none before it" if newest is None else f"the newest is {newest}"
        warnings.warn(f"{text}. The training goes on; {left}", stacklevel=3)
