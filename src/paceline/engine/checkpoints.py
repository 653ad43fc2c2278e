"""Checkpoints of a run: `folder/checkpoint-{step}`, the newest few kept, written while the training goes on.

    checkpoints = engine.checkpoints("runs/demo", keep=3)
    checkpoints.resume()                      # newest that is complete and unharmed, or None
    for batch in loader:
        ...
        if engine.stepped and engine.step % 100 == 0:
            checkpoints.save()
    checkpoints.close()

A save that fails is a warning, and the training goes on: what is lost is a point to go back to. All workers call all of
these, at a step boundary. The `Saver` is their way into a checkpoint and out of it, one save after another:

    training thread, all workers     collect ── agree (space, name) ── snapshot? ──┐
    here or in the background        each writes its portion; the main worker seals and publishes
"""

from __future__ import annotations

import contextlib
import math
import platform
import secrets
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from paceline import __version__
from paceline.checkpoint.load import Checkpoint, full_tree
from paceline.checkpoint.manifest import COMPLETE, read_complete, size_text
from paceline.checkpoint.retention import (
    all_checkpoints,
    best_checkpoint,
    checkpoint_name,
    prune,
    remove_leftovers,
    set_aside,
)
from paceline.checkpoint.save import (
    AsyncWriter,
    Beside,
    Portion,
    SnapshotBuffer,
    complete,
    describe,
    described,
    give_up,
    portion_of,
    write_model,
    write_portion,
)
from paceline.checkpoint.tensor_file import best_checksum
from paceline.checkpoint.weights_file import move_model
from paceline.elastic.faults import fault_point
from paceline.engine.config import EngineConfig
from paceline.engine.state import Alike, JobState, Told, check_whole
from paceline.errors import CheckpointError
from paceline.input_file import cause_of, one_line
from paceline.sharding.flat_layout import BLOCK
from paceline.world import messages
from paceline.world.checked_values import one_word, switch, whole_number
from paceline.world.control import Supervisor
from paceline.world.world import World

WhenBusy = Literal["wait", "drop"]
LONGEST_LINE = 1000


@dataclass(frozen=True)
class Files:
    """What is written into a checkpoint for others than us, and whether the job's state is in it at all."""

    beside: Beside | None = None
    weights: bool = False
    state: bool = True
    model: int = 0
    """Whose weights, where there is no state."""


NONE = Files()
MODEL_FILES = "model-files"  # of a model that is being saved into a folder


@dataclass(frozen=True)
class _Last:
    """A save, and the workers that made it."""

    world: World
    step: int
    folder: Path
    extra: Any
    about: dict[str, Any]
    files: Files


class Checkpoints:
    """The checkpoints of a run, `folder/checkpoint-{step}`: what `engine.checkpoints(folder)` returns.

    All workers call its methods, between two steps.
    """

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

    def save(
        self,
        extra: Any = None,
        *,
        score: float | None = None,
        greater_is_better: bool = True,
        beside: Beside | None = None,
        weights: bool = False,
    ) -> Path | None:
        """Save the job as it is after this step; None if it is not saved: a warning says why.

        `extra`, a tree of plain values and tensors, comes back from `resume`. The best `score` is among those kept.
        `beside` writes more files into the folder, on the main worker, where the checkpoint is written. With `weights`
        those of the first model are in it in Hugging Face's layout too: all workers say so, and each writes some.
        """
        if not self._at_boundary("checkpoints.save"):
            return None
        self.poll()
        folder = self.folder / checkpoint_name(self._step())
        score = None if score is None or math.isnan(score) else float(score)
        about = {} if score is None else {"score": score, "greater_is_better": greater_is_better}
        files = Files(beside, weights)
        try:
            self._set_aside()
            self._last = _Last(self._around().world, self._step(), folder, extra, about, files)
            if self._asynchronous:
                drop = self._when_busy == "drop"
                if not self._saver.start(folder, extra, about, self._prune, drop=drop, files=files):
                    self._say(f"paceline: {folder.name} is dropped: the save before it is still being written")
                    return None
            else:
                self._saver.save(folder, extra, about, files)
        except CheckpointError as error:
            self._warn(str(error))
            return None
        if not self._asynchronous and self._around().world.is_main:
            self._prune_or_warn()
        return folder

    def save_weights(self, *, beside: Beside | None = None) -> Path | None:
        """`checkpoint-{step}` with the first model's weights in Hugging Face's layout, and nothing to go on from.

        It comes back when they are on the disk; each worker writes some, and none holds all of a sharded model.
        """
        if not self._at_boundary("checkpoints.save_weights"):
            return None
        self.poll()
        folder = self.folder / checkpoint_name(self._step())
        try:
            self._saver.save(folder, files=Files(beside, weights=True, state=False))
        except CheckpointError as error:
            self._warn(str(error))
            return None
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
        if isinstance(extra, dict) and "imported" in extra:
            self._say(f"paceline: begins with {folder}, imported from {extra['imported']}")
        else:
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
    """`wait`, at the end of a run."""

    def _save_again(self) -> None:
        """The last save has failed because a worker was lost, and no step has been made since: the others save it."""
        failed = any(self._around().told(self._saver.has_failed))
        last, self._last = self._last, None
        if not failed or last is None or self._around().world is last.world or self._step() != last.step:
            return
        self._saver.take_failure()
        try:
            self._saver.save(last.folder, last.extra, last.about, last.files)
        except CheckpointError as error:
            self._warn(str(error))

    def _set_aside(self) -> None:
        """The first save: this run went on from before those of later steps, which would be taken for the newest."""
        if self._saved or not self._around().world.is_main:
            return
        self._saved = True
        try:
            for path in set_aside(self.folder, self._step()):
                self._say(f"paceline: {path.stem} is of a step that this run has not reached: it is {path.name} now")
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
            messages.logger("engine").info(text)

    def _warn(self, text: str) -> None:
        if not self._around().world.is_main:
            return
        newest = next((path.name for path in all_checkpoints(self.folder)), None)
        left = "there is none before it" if newest is None else f"the newest is {newest}"
        messages.warn(f"{text}. The training goes on; {left}")


@dataclass(frozen=True)
class Surroundings:
    """Of a save: the worker among those that are left, and how it speaks to the others."""

    world: World
    told: Told
    alike: Alike
    supervisor: Supervisor


@dataclass(frozen=True)
class Save:
    """One save under way, on one worker."""

    folder: Path
    partial: Path
    portion: Portion
    about: dict[str, Any]
    checksum: str
    is_main: bool
    timeout_s: float
    step: int
    files: Files

    def write(self) -> None:
        try:
            fault_point("write", self.step)
            write_portion(self.partial, self.portion, self.checksum)
            workers, seconds = self.portion.workers, self.timeout_s
            if self.is_main:
                checkpoint = describe(self.partial, workers, self.about, self.checksum, seconds)
            elif self.files.weights:
                checkpoint = described(self.partial, seconds)
            else:
                return
            if self.files.weights:
                write_model(checkpoint, self.portion.worker, workers, seconds)
            if self.is_main:
                complete(checkpoint, self.folder, self.files.beside, resumable=self.files.state)
        except Exception as error:
            plain = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
            reason = getattr(error, "strerror", None) or plain
            if self.is_main:
                shutil.rmtree(self.partial, ignore_errors=True)
            else:
                give_up(self.partial, self.portion, reason)
            needed = f" (this worker's part has {size_text(self.portion.bytes)})" if isinstance(error, OSError) else ""
            raise CheckpointError(f"{self.folder} could not be saved: {reason}{needed}") from error


class Saver:
    def __init__(
        self,
        config: EngineConfig,
        around: Callable[[], Surroundings],
        state: Callable[[], JobState],
        timed: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        """`timed`: the time inside it is counted as that of a checkpoint."""
        self._config, self._around, self._state, self._timed = config, around, state, timed
        self._writer, self._room = AsyncWriter(), SnapshotBuffer()
        self._under_way: Save | None = None

    def save(self, folder: Path, extra: Any = None, about: dict[str, Any] | None = None, files: Files = NONE) -> None:
        """Save, and come back when it is whole on the disk; raises on every worker if it can't be.

        If workers are lost meanwhile, those that are left save again.
        """
        while True:
            world = self._around().world
            try:
                with self._timed():
                    return self._save_once(folder, extra, about, files)
            except CheckpointError:
                if self._around().world is world:
                    raise

    def _save_once(self, folder: Path, extra: Any, about: dict[str, Any] | None, files: Files) -> None:
        self._all_done()
        save = self._begun(folder, extra, about or {}, files)
        fault_point("snapshot", save.step)
        failure: str | None = None
        try:
            save.write()
            self._tell_launcher(save)
        except CheckpointError as error:
            failure = str(error)
        failures = [text for text in self._around().told(failure) if text is not None]
        if failures:
            raise CheckpointError(failures[0])

    def save_model(self, folder: Path, model: int, beside: Beside | None) -> None:
        """One model's weights in Hugging Face's layout, among what else is in `folder`; raises on every worker."""
        whole = folder / MODEL_FILES
        self.save(whole, files=Files(beside, weights=True, state=False, model=model))
        failure: str | None = None
        if self._around().world.is_main:
            try:
                move_model(whole, folder)
            except OSError as error:
                failure = f"{folder} could not be saved: {cause_of(error)}"
        for text in self._around().told(failure):
            if text is not None:
                raise CheckpointError(text)

    def start(
        self,
        folder: Path,
        extra: Any,
        about: dict[str, Any],
        afterwards: Callable[[], None],
        *,
        drop: bool,
        files: Files = NONE,
    ) -> bool:
        """Take a snapshot and write it in the background; False: it is dropped, for the one before is not written."""
        busy = any(self._around().told(self._writer.busy))
        if busy and drop:
            return False
        with self._timed():
            self._all_done()
            save = self._begun(folder, extra, about, files)
            fault_point("snapshot", save.step)
            copied = Save(**{**vars(save), "portion": save.portion.copied(self._room)})

        def work() -> None:
            copied.write()
            self._tell_launcher(copied)
            if copied.is_main:
                afterwards()

        self._writer.start(work)
        return True

    def abandon(self, why: str) -> None:
        """The workers have changed: no worker waits for a lost one's part of a save. Any thread may say so."""
        save = self._under_way
        if save is not None:
            with contextlib.suppress(OSError):  # it is whole by now, or nobody has begun
                (save.partial / f"{save.portion.file}.failed: a worker was lost").mkdir()

    def finish(self) -> None:
        """Wait for the save under way."""
        self._writer.wait(self._config.timeout_s)

    @property
    def busy(self) -> bool:
        return self._writer.busy

    def _all_done(self) -> None:
        """The save before this one has ended on all workers: its snapshot may still be read otherwise."""
        self.finish()
        late = [rank for rank, busy in enumerate(self._around().told(self._writer.busy)) if busy]
        if late:
            waited = f"{self._config.timeout_s:g} s"
            raise CheckpointError(f"worker {late[0]} has not written the save before in {waited}; this one is left out")

    @property
    def has_failed(self) -> bool:
        return self._writer.has_failed

    def take_failure(self) -> str | None:
        return self._writer.take_failure()

    def load(self, folder: Path, accept: Sequence[str] = ()) -> Any:
        """Put a checkpoint's state back on all workers; what was saved as `extra`."""
        self._all_done()
        checkpoint = self.opened(folder)
        self._state().put_back(checkpoint, accept, self._around().told, self._around().alike)
        return full_tree(checkpoint.tree["extra"])

    def load_weights(self, folder: Path) -> None:
        self._all_done()
        self._state().put_back_weights(self.opened(folder), self._around().told, self._around().alike)

    def opened(self, folder: Path) -> Checkpoint:
        """The same checkpoint on all workers."""
        checkpoint: Checkpoint | None = None
        seal = failure = ""
        try:
            if not (folder / COMPLETE).exists() and (inside := all_checkpoints(folder)):
                failure = f"{folder} is a folder of checkpoints; give one of them, the newest is {inside[0]}"
            else:
                checkpoint, seal = Checkpoint.open(folder), read_complete(folder).decode(errors="replace")
                check_whole(checkpoint)
        except (CheckpointError, OSError) as error:
            failure = str(error)
        seals, failures = zip(*self._around().told([seal, failure]), strict=True)
        if any(failures) or checkpoint is None:
            raise CheckpointError(next(text for text in failures if text))
        if len(set(seals)) > 1:
            raise CheckpointError(f"the workers see different checkpoints in {folder}; the folder must be a shared one")
        return checkpoint

    def wrong_in(self, folder: Path) -> list[str]:
        """What is wrong with a checkpoint; each worker reads some of its files."""
        around = self._around()
        try:
            checkpoint = Checkpoint.open(folder)
            mine = sorted(checkpoint.manifest.files)[around.world.rank :: around.world.size]
            check_whole(checkpoint)
            wrong = checkpoint.verify(mine)
        except CheckpointError as error:
            wrong = [str(error)]
        except Exception as error:  # whatever it is that can't be read: the others wait for this worker's word
            wrong = [f"{folder} can't be read: {type(error).__name__}: {cause_of(error)}"]
        return [line for lines in around.told(wrong) for line in lines]

    def _begun(self, folder: Path, extra: Any, about: dict[str, Any], files: Files) -> Save:
        around, state = self._around(), self._state()
        world, is_main = around.world, around.world.is_main
        portion, failure = None, None
        if files.state:
            tree = state.collected(around.told, around.alike, is_main=is_main, extra=extra)
        else:
            tree = state.one_model(files.model)
        try:
            portion = portion_of(tree, world.rank, world.size)
        except CheckpointError as error:
            failure = f"{folder} could not be saved: {error}"
        size = 0 if portion is None else portion.bytes + files.weights * portion.bytes_of_model
        said = around.told([size, secrets.token_hex(4), best_checksum(), failure])
        if portion is None or any(row[3] for row in said):
            raise CheckpointError(next(row[3] for row in said if row[3]))
        needed, attempt = sum(row[0] for row in said), said[0][1]
        checksum = said[0][2] if len({row[2] for row in said}) == 1 else "sha256"
        partial = folder.with_name(f".{folder.name}.{attempt}.partial")
        failure = self._made_ready(folder, needed) if is_main else None
        for text in around.told(failure):
            if text is not None:
                raise CheckpointError(text)
        if around.world is not self._around().world:
            raise CheckpointError(f"{folder} could not be saved: a worker was lost")
        whole = self._about(state, world) | about if is_main else {}
        timeout_s, step = self._config.timeout_s, state.step.step
        self._under_way = save = Save(folder, partial, portion, whole, checksum, is_main, timeout_s, step, files)
        return save

    def _made_ready(self, folder: Path, needed: int) -> str | None:
        """The main worker clears the way; what stands in it."""
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            remove_leftovers(folder.parent, folder.name)
            free = shutil.disk_usage(folder.parent).free
        except OSError as error:
            return f"{folder} could not be saved: {error.strerror}"
        if free < needed:
            return f"{folder} could not be saved: it needs {size_text(needed)}, and {size_text(free)} are free"
        return None

    def _about(self, state: JobState, world: World) -> dict[str, Any]:
        config = self._config
        return {
            "step": state.step.step,
            "saved at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "strategy": str(config.strategy),
            "workers": world.size,
            "lanes": config.lanes,
            "seed": config.seed,
            "precision": str(config.precision),
            "block": BLOCK,
            "parameters": sum(state.whole.shape(p).numel() for model in state.models for p in model.parameters()),
            "versions": {"paceline": __version__, "torch": str(torch.__version__), "python": platform.python_version()},
        }

    def _tell_launcher(self, save: Save) -> None:
        if save.is_main and save.files.state:
            self._around().supervisor.tell("checkpoint", folder=str(save.folder))
