"""Which checkpoints of a run there are, and which are let go.

    runs/demo/   checkpoint-10  checkpoint-20 (best)  checkpoint-30  checkpoint-40        keep=2: 10 and 30 go

So many stay: the newest always, the best always, others from the newest on. What has no COMPLETE is not counted, and
not touched: it may be all there is.
"""

from __future__ import annotations

import itertools
import math
import re
import shutil
from pathlib import Path

from paceline.checkpoint.disk import remove_folder, rename
from paceline.checkpoint.manifest import COMPLETE, Manifest, read_manifest
from paceline.errors import CheckpointError
from paceline.input_file import cause_of

_NAME = re.compile(r"checkpoint-(\d+)")


def checkpoint_name(step: int) -> str:
    return f"checkpoint-{step}"


def all_checkpoints(folder: Path) -> list[Path]:
    """Those of this name, newest step first, whatever state they are in."""
    found = [(int(match[1]), path) for path in _entries(folder) if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found, reverse=True)]


def _entries(folder: Path) -> list[Path]:
    try:
        return [path for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []
    except OSError as error:
        raise CheckpointError(f"{folder} can't be read: {cause_of(error)}") from error


def newest_in(folder: Path) -> Path:
    """The checkpoint itself, or the newest complete one of a run's folder."""
    if (folder / COMPLETE).exists():
        return folder
    found = all_checkpoints(folder)
    complete = [path for path in found if (path / COMPLETE).exists()]
    if complete:
        return complete[0]
    if not folder.exists():
        raise CheckpointError(f"there is no folder {folder}")
    what = f"{len(found)} checkpoints, none of them complete" if found else "no checkpoint"
    raise CheckpointError(f"{folder} has {what}")


def has_checkpoint(folder: Path) -> bool:
    """Whether it is a complete one, or a run's folder with one."""
    return any((path / COMPLETE).exists() for path in (folder, *all_checkpoints(folder)))


def best_checkpoint(folder: Path) -> Path | None:
    """The one with the best score; of equal ones the oldest."""
    scored: list[tuple[float, int, Path]] = []
    for place, path in enumerate(reversed(all_checkpoints(folder))):
        manifest = _manifest(path)
        score = None if manifest is None else manifest.about.get("score")
        if manifest is not None and score is not None and not math.isnan(score):
            scored.append((score if manifest.about.get("greater_is_better", True) else -score, -place, path))
    return max(scored)[2] if scored else None


def _manifest(path: Path) -> Manifest | None:
    try:
        return read_manifest(path)
    except CheckpointError:
        return None


def prune(folder: Path, keep: int | None) -> list[Path]:
    """Remove complete checkpoints until `keep` are left, the newest and the best among them."""
    complete = [path for path in all_checkpoints(folder) if (path / COMPLETE).exists()]
    if keep is None or len(complete) <= keep:
        return []
    stays = [*complete[:1], *(path for path in [best_checkpoint(folder)] if path is not None)]
    others = [path for path in complete if path not in stays]
    gone = others[max(0, keep - len(set(stays))) :]
    for path in gone:
        remove_folder(path)
    return gone


def set_aside(folder: Path, step: int) -> list[Path]:
    """Give checkpoints of later steps a name that no job resumes from; their new paths."""
    moved = []
    for path in all_checkpoints(folder):
        if int(path.name.removeprefix("checkpoint-")) > step:
            free = (path.with_name(f"{path.name}.abandoned{n or ''}") for n in itertools.count())
            moved.append(next(place for place in free if not place.exists()))
            rename(path, moved[-1])
    return moved


def remove_leftovers(folder: Path, name: str) -> None:
    """What saves and removals have left that were cut off: of this name, or of any checkpoint if it is one."""
    mine = r"checkpoint-\d+" if _NAME.fullmatch(name) else re.escape(name)
    for path in _entries(folder):
        if re.fullmatch(rf"\.{mine}(\.[0-9a-f]+)?\.(partial|removed)", path.name):
            shutil.rmtree(path, ignore_errors=True)
