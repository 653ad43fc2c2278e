"""paceline's own messages, all through `logging`: the line at the start, warnings, recoveries, the table at the end.

    logger              in                       a message of INFO        of WARNING or worse
    paceline.engine …   a worker, by its area    to its stdout            to its stderr
    paceline.launch     the supervisor           –                        to its stderr, above the progress line

So they are silenced or sent elsewhere as those of any library:

    logging.getLogger("paceline").setLevel(logging.WARNING)      no notes, progress, tables; ERROR: no warnings either
    logging.getLogger("paceline").handlers[:] = [mine]           to a handler of one's own

PACELINE_QUIET=1, which `paceline run --quiet` sets for its workers, begins with ERROR. What a verb was asked for, what
the script prints (`engine.print`) and the error that ends it are no messages in this sense, and are always printed.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator

from paceline.world import environment
from paceline.world.script_line import frames_to_script
from paceline.world.terminal import SummaryTable

NAME = "paceline"
_STYLES = {logging.WARNING: "yellow", logging.ERROR: "red"}


class ToTheTerminal(logging.Handler):
    """The text alone, on what stdout and stderr are at that moment; on a terminal rich draws tables and colours."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            stream = sys.stderr if record.levelno >= logging.WARNING else sys.stdout
            stream.write(_drawn(record) if stream.isatty() else f"{self.format(record)}\n")
            stream.flush()
        except Exception:
            self.handleError(record)


class ToCaller(logging.Handler):
    """Each text to a function: the supervisor's screen."""

    def __init__(self, write: Callable[[str], None]) -> None:
        super().__init__()
        self._write = write

    def emit(self, record: logging.LogRecord) -> None:
        self._write(self.format(record))


def _drawn(record: logging.LogRecord) -> str:
    table, text = getattr(record, "table", None), record.getMessage()
    if isinstance(table, SummaryTable):
        return table.drawn(shutil.get_terminal_size().columns)
    if record.levelno not in _STYLES:
        return f"{text}\n"
    from rich.console import Console  # imported late: most runs draw nothing, and it costs 50 ms
    from rich.text import Text

    console = Console(force_terminal=True, soft_wrap=True, legacy_windows=False)
    with console.capture() as captured:
        console.print(Text(text, style=_STYLES[record.levelno]))
    return captured.get()


def logger(area: str) -> logging.Logger:
    return logging.getLogger(f"{NAME}.{area}")


def set_level(level: int) -> None:
    """Of all messages of this process: those below it are left out."""
    logging.getLogger(NAME).setLevel(level)


def obey_environment() -> None:
    """The level that PACELINE_QUIET asks for; a worker is forked with that of the process it comes from."""
    set_level(logging.ERROR if environment.is_quiet() else logging.INFO)


@contextlib.contextmanager
def handed_to(write: Callable[[str], None], *, quiet: bool) -> Iterator[None]:
    """For the time of a job its supervisor's messages go to `write`, and with `quiet` errors alone."""
    top = logging.getLogger(NAME)
    handlers, level = top.handlers[:], top.level
    top.handlers[:] = [ToCaller(write)]
    top.setLevel(logging.ERROR if quiet else logging.INFO)
    try:
        yield
    finally:
        top.handlers[:] = handlers
        top.setLevel(level)


def shows_notes() -> bool:
    """Whether progress and tables are wanted, which the supervisor draws."""
    return logging.getLogger(NAME).isEnabledFor(logging.INFO)


def show_table(table: SummaryTable, area: str) -> None:
    logger(area).info(table.plain().rstrip("\n"), extra={"table": table})


def warn(text: str) -> None:
    """Python's warning, for what a line of the script leads to: it names the line, and filters of warnings know it."""
    if logging.getLogger(NAME).isEnabledFor(logging.WARNING):
        caller = sys._getframe(1)
        frame = frames_to_script(caller)[1] or caller
        seen = frame.f_globals.setdefault("__warningregistry__", {})  # of that module, for filters such as "once"
        module = frame.f_globals.get("__name__")
        file, line = frame.f_code.co_filename, frame.f_lineno
        warnings.warn_explicit(text, UserWarning, file, line, module=module, registry=seen)


def _set_up() -> None:
    """What the script has set before stays: a level, a handler."""
    top = logging.getLogger(NAME)
    if top.level == logging.NOTSET:
        obey_environment()
    if not top.handlers:
        top.addHandler(ToTheTerminal())
        top.propagate = False  # or a script that calls logging.basicConfig() would see everything twice


_set_up()
