"""What a worker that joins an elastic job must have in common with the others: versions, the script, its modules.

The job's own facts (lanes, seed, strategy, data …) come on top of them.
"""

from __future__ import annotations

import hashlib
import platform
import sys
import sysconfig
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch

from paceline import __version__
from paceline.elastic.slots import MODULE


def facts_of_process(more: Mapping[str, Any]) -> dict[str, str | int]:
    """What a worker that joins must have in common with the others."""
    code = _own_code()
    about: dict[str, Any] = {
        "paceline": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        **code,
        **more,
    }
    return {name: value if isinstance(value, int | str) else str(value) for name, value in about.items()}


@cache
def _own_code() -> dict[str, str]:
    """A hash of the script and of every module that is neither Python's nor installed, as they are at the first call:
    before the first loop, on a worker of the start and on one that joins."""
    paths = {sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    # An environment may be reached by a link. Thousands of modules are passed over by name: to resolve each takes long.
    installed = tuple({f"{path}/" for path in paths} | {f"{Path(path).resolve()}/" for path in paths})
    found = {}
    for name, module in sorted(sys.modules.items()):
        named = str(getattr(module, "__file__", None) or "")
        if not named.endswith(".py") or named.startswith(installed):
            continue
        file = Path(named)
        if file.is_file() and not str(file.resolve()).startswith(installed):
            label = "script" if name == "__main__" else f"{MODULE}{name}"
            found[label] = hashlib.sha256(file.read_bytes()).hexdigest()[:16]
    return {name: digest for name, digest in found.items() if not name.startswith(f"{MODULE}paceline")}
