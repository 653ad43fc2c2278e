"""What belongs to other projects, fetched by version into a cache, and never copied into this repository.

fetch_folder(Source("accelerate", "v1.14.0", "https://…"), ("examples",), cache)     a folder with that version
fetch_packages("accelerate", ("datasets==5.2.0", …), cache)                          a folder to import from

Where something can't be had they raise MissingError, with the reason in one line.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

CACHE = Path.home() / ".cache" / "paceline-conformance"
ROOT = Path(__file__).parents[2]
NEEDS_OF_DATASETS = ("pyarrow", "dill", "multiprocess", "xxhash", "pandas", "psutil")


class MissingError(Exception):
    """Something from outside is missing."""


@dataclass(frozen=True)
class Source:
    project: str
    version: str
    """A tag or a commit."""
    repository: str


def fetch_folder(source: Source, folders: tuple[str, ...], cache: Path, what: str) -> Path:
    """A folder with `folders` of that version, and no others: two suites may want different ones."""
    name = "-".join([source.project, source.version, *(one.replace("/", "-") for one in folders)])
    folder, clone = cache / name, cache / f"{name}.partial"
    if folder.is_dir():
        return folder
    git = ["git", "-C", str(clone)]
    why = f"{what} can't be had"
    run(why, ["git", "init", "-q", str(clone)])
    run(why, [*git, "config", "remote.origin.url", source.repository])
    run(why, [*git, "fetch", "-q", "--depth=1", "--filter=blob:none", "origin", source.version])
    run(why, [*git, "sparse-checkout", "set", *folders])
    run(why, [*git, "checkout", "-q", "FETCH_HEAD"])
    clone.rename(folder)
    return folder


def fetch_packages(name: str, packages: tuple[str, ...], cache: Path) -> Path:
    """A folder with packages that this project does not need."""
    folder, partial = cache / f"{name}-packages", cache / f"{name}-packages.partial"
    inside = "site-packages"  # the name by which dill, of `datasets`, knows modules that it need not pickle whole
    if not folder.is_dir():
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(partial / inside)]
        run("packages can't be had", [*pip, *packages])
        partial.rename(folder)
    return folder / inside


def run(why: str, command: list[str]) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=900)
    except (OSError, subprocess.SubprocessError) as error:
        told = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
        raise MissingError(f"{why}: {told[-1] if told else error}") from error
