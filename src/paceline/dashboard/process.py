"""The process that serves the page: `paceline monitor`, also the one that `paceline run --dashboard` starts.

    paceline run --dashboard ──stdin──▶ paceline monitor --attached    a line for each run's folder that workers name
                             ──close──▶                                it ends; also where the job's supervisor dies

It is another process, of a lower priority, so that nothing that it does holds up the job.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from paceline.dashboard.access import Access, hosts_of, is_loopback, shown_host, token_of
from paceline.dashboard.run_view import view_of
from paceline.dashboard.server import Runs, listen, serve
from paceline.errors import ConfigError

NICE = 10
ENDS_WITHIN_S = 4.0


def show_runs(
    folders: Sequence[Path],
    address: str,
    port: int | None,
    allowed: Sequence[str],
    token_file: Path | None,
    *,
    follows_stdin: bool,
    say: Callable[[str], None],
) -> None:
    """Until Ctrl-C; with `follows_stdin` until that ends."""
    found = [(folder, view_of(folder)) for folder in _once(folders)]  # an error now, not on a page
    token = token_of(token_file)
    listening, note = listen(address, port)
    port = listening.getsockname()[1]
    if note:
        say(note)
    if not is_loopback(address):
        say(f"{address} can be reached by others, and neither the token nor the page is encrypted on the way")
    name = shown_host(address)
    shown = f"[{name}]" if ":" in name else name
    say(f"dashboard at http://{shown}:{port}/?token={token}" + ("" if follows_stdin else " (Ctrl-C ends it)"))
    access = Access(token, f"paceline_{port}", hosts_of(address, allowed))
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve(listening, access, found, _follow_stdin if follows_stdin else _nothing))


def _once(folders: Sequence[Path]) -> list[Path]:
    return list({folder.resolve(): folder for folder in folders}.values())


def _nothing(runs: Runs, end: Callable[[], None]) -> None: ...


def _follow_stdin(runs: Runs, end: Callable[[], None]) -> None:
    """Each line is the folder of a run; the end of the file is the end of the job."""
    os.nice(NICE)
    loop = asyncio.get_running_loop()

    def read() -> None:
        for line in sys.stdin:
            loop.call_soon_threadsafe(runs.add, Path(line.rstrip("\n")))
        loop.call_soon_threadsafe(end)

    threading.Thread(target=read, name="paceline job", daemon=True).start()


@contextlib.contextmanager
def attached() -> Iterator[Callable[[str], None]]:
    """A server beside a job; what it gives tells it the folder of a run. It has ended afterwards."""
    command = [sys.executable, "-m", "paceline.cli.main", "monitor", "--attached"]
    try:
        # A session of its own: Ctrl-C asks the workers to stop, and they are worth watching while they do.
        process = subprocess.Popen(command, stdin=subprocess.PIPE, text=True, start_new_session=True)
    except OSError as error:
        raise ConfigError(f"--dashboard: its process can't be started ({error.strerror})") from error
    assert process.stdin is not None
    told = process.stdin

    def tell(folder: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # it has ended, and said why
            told.write(folder.replace("\n", " ") + "\n")
            told.flush()

    try:
        yield tell
    finally:
        with contextlib.suppress(OSError):
            told.close()
        try:
            process.wait(ENDS_WITHIN_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
