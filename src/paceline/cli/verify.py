"""`paceline verify SCRIPT`: the promise as a command. Does the script train the same bits at every setting?

The settings, as jobs, are in verify/jobs.py; what is told about them in verify/report.py.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from paceline.errors import ConfigError
from paceline.input_file import one_line

MOST_WORKERS = 4096
DEFAULT_STEPS = 20
TOLERANCE = 1e-4


def verify(
    script: Annotated[str, typer.Argument(help="script.py, or with -m a module", show_default=False)],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- ARGUMENTS", help="passed to the script; {folder} is a new folder for each run"),
    ] = None,
    workers: Annotated[
        str, typer.Option(help="numbers of workers; the first is what others are compared with")
    ] = "1,2",
    strategies: Annotated[
        str | None,
        typer.Option(help="in place of the script's own, such as ddp,zero2,fsdp", show_default=False),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="that each run makes, at most")] = DEFAULT_STEPS,
    lanes: Annotated[
        int | None, typer.Option(min=1, help="of all runs [default: the script's, or the most workers]")
    ] = None,
    tolerance: Annotated[
        float, typer.Option(help="of weights, by their norm, where the script has reduction='fast'")
    ] = TOLERANCE,
    module: Annotated[bool, typer.Option("-m", "--module", help="run a module, as python -m does")] = False,
    json: Annotated[bool, typer.Option("--json", help="print the result as JSON")] = False,
) -> None:
    """Run a script at several settings and compare every step bit by bit: paceline verify train.py --workers 1,2,3

    Of a difference it names the first step, tensor and element, both values, and what likely caused it.
    Exit codes: 0 all runs are alike, 1 some differ (or one fails), 2 they could not be run.
    """
    from paceline.cli.chaos import start
    from paceline.cli.run import find_script
    from paceline.verify import report
    from paceline.verify.jobs import Plan, Verification, settings_of
    from paceline.world import environment

    counts, names = _counts(workers), _names(strategies)
    if len(counts) * len(names or [None]) == 1:
        raise ConfigError("one setting has nothing to be compared with; give more --workers, or --strategies")
    find_script(script, arguments or [], module)
    if not tolerance > 0:
        raise ConfigError(f"--tolerance {tolerance:g}: numbers that are not the same are some way apart, above 0")
    words = (*(["-m"] if module else []), script, *(arguments or []))
    most = lanes or max(counts)
    if most < max(counts):
        raise ConfigError(f"--lanes {lanes} with {max(counts)} workers: every worker needs at least one")
    with tempfile.TemporaryDirectory(prefix="paceline-verify-") as folder:
        options = () if lanes is None else ("--lanes", str(lanes))  # a script that says otherwise is told so
        plan = Plan(words, settings_of(counts, names), steps, most, tolerance, Path(folder), options)
        with report.progress(plan, shown=not json and sys.stdout.isatty()) as tell:
            outcome = Verification(plan, start, lambda of: environment.verify_environment(of, most), tell).outcome()
    if json:
        print(report.as_json(plan, outcome))
    else:
        report.show(plan, outcome)
    if not outcome.same:
        raise typer.Exit(1)


def _counts(text: str) -> list[int]:
    """`1,2,3`, each once."""
    counts: list[int] = []
    for word in text.split(","):
        word = word.strip()
        if not (word.isascii() and word.isdecimal() and 1 <= int(word[:9]) <= MOST_WORKERS):
            raise ConfigError(
                f"--workers {one_line(text, 40)!r}: {one_line(word, 20)!r} is no number of workers; give some, with "
                "commas between them: 1,2,3"
            )
        if int(word) in counts:
            raise ConfigError(f"--workers {one_line(text, 40)!r}: {word} is there twice")
        counts.append(int(word))
    return counts


def _names(text: str | None) -> Sequence[str] | None:
    from paceline.world.known_names import STRATEGIES

    if text is None:
        return None
    names = [word.strip() for word in text.split(",")]
    for name in names:
        if name not in STRATEGIES:
            raise ConfigError(
                f"--strategies {one_line(text, 40)!r}: {one_line(name, 20)!r} is no strategy; choose of "
                f"{', '.join(STRATEGIES)}"
            )
        if names.count(name) > 1:
            raise ConfigError(f"--strategies {one_line(text, 40)!r}: {name} is there twice")
    return names
