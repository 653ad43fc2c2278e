"""What the benchmarks of this folder share as commands: `--json FILE`, and bad input as one line with exit code 2."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from paceline.bench.report import check_writable, console, write_json
from paceline.errors import PacelineError

Result = dict[str, Any]


def command(doc: str | None) -> argparse.ArgumentParser:
    """A parser whose help is the module's own words."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every number there")
    return parser


def run(
    parser: argparse.ArgumentParser,
    file: Path | None,
    measure: Callable[[], Result],
    show: Callable[[Result, Console], None],
) -> None:
    """Measure, write what was measured, and show it."""
    try:
        check_writable(file)
        result = measure()
        write_json(result, file)
    except PacelineError as error:
        parser.error(str(error))
    show(result, console())


def tell(line: str) -> None:
    print(line, flush=True)
