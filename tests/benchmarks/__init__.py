"""The scripts of benchmarks/: a quick look at each, that it measures what it says and shows it."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[2] / "benchmarks"


def script(name: str) -> Any:
    """benchmarks/NAME.py as a module; its neighbours are in reach, as when it is run."""
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    return importlib.import_module(name)
