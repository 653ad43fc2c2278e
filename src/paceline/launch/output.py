"""What workers print, line by line, each with its rank; and one line of progress beneath.

    worker 0 stdout ─▶ Lines("[0] ") ────────┐                         ┌─▶ stdout   [0] loss 2.31
    worker 1 stdout ─▶ Lines("[1] ") ────────┼─▶ Screen (one thread) ──┤            [1] loss 2.33
    worker 1 stderr ─▶ Lines("[1] ") ────────┤                         │
    server 0 stderr ─▶ Lines("[server 0] ") ─┘                         └─▶ stderr   [server 0] warning: …

Bytes stay bytes: a worker may print what is not UTF-8. The screen writes from its own thread, because a terminal held
by Ctrl-S or a pipe into `less` would otherwise hold up the supervisor, and with it Ctrl-C. When it can't keep up, the
pipes are read no further until it has, so a fast worker waits instead of filling our memory.
"""

from __future__ import annotations

import asyncio
import os
import queue
import threading
import time
from collections.abc import Callable
from enum import Enum

from paceline.world.terminal import ProgressLine, SummaryTable

PROGRESS_EVERY_S = 5.0
"""How often a line of progress is written where it can't be redrawn in place."""

STATE_EVERY_S = 1.0
"""How often one state of a bar that redraws itself with \\r (tqdm) becomes a line."""

LONGEST_LINE = 2**20
BACKLOG_LIMIT = 4 * 2**20
ERASE_LINE = b"\r\x1b[2K"


class Stream(Enum):
    STDOUT = 1
    STDERR = 2


class Lines:
    """Cuts one worker's bytes into whole lines and puts the prefix before each.

    `\\r` means "write over this line": only what a terminal would still show is kept, and of a bar that keeps
    redrawing itself one state per `STATE_EVERY_S` is shown.
    """

    def __init__(self, prefix: bytes) -> None:
        self._prefix = prefix
        self._held = bytearray()
        self._state_shown = float("-inf")

    def feed(self, chunk: bytes, now: float) -> bytes:
        self._held += chunk
        *whole, rest = self._held.split(b"\n")
        shown = [self._line(line) for line in whole]
        if b"\r" in rest:
            states, _, rest = rest.rpartition(b"\r")
            if not rest:  # "…50%\r": the bar moves the cursor back first; what it wrote is still to be seen
                states, rest = states.rpartition(b"\r")[0], states.rpartition(b"\r")[2] + b"\r"
            if states.strip(b"\r") and now - self._state_shown >= STATE_EVERY_S:
                shown.append(self._line(states))
                self._state_shown = now
        if len(rest) > LONGEST_LINE:
            shown.append(self._line(rest))
            rest = bytearray()
        self._held = bytearray(rest)
        return b"".join(shown)

    def end(self) -> bytes:
        """What is left when the worker has gone, as a line."""
        rest, self._held = self._held, bytearray()
        return self._line(rest) if rest.strip(b"\r") else b""

    def _line(self, line: bytes | bytearray) -> bytes:
        visible = line.rstrip(b"\r").rpartition(b"\r")[2]
        return self._prefix + bytes(visible) + b"\n"


class Screen:
    """The only writer to the supervisor's stdout and stderr. Close it: that is when the last lines come out."""

    def __init__(self, stdout_fd: int, stderr_fd: int, *, on_room: Callable[[], None] = lambda: None) -> None:
        self._fds = {Stream.STDOUT: stdout_fd, Stream.STDERR: stderr_fd}
        self._live = os.isatty(stdout_fd)
        self._on_room = on_room
        self._items: queue.SimpleQueue[tuple[Stream, bytes] | ProgressLine | SummaryTable | None] = queue.SimpleQueue()
        self._backlog = 0
        self._lock = threading.Lock()
        self._progress: ProgressLine | None = None
        self._written: str | None = None
        self._written_at = float("-inf")
        self._drawn = False
        self._thread = threading.Thread(target=self._run, name="paceline-screen", daemon=True)
        self._thread.start()

    @property
    def full(self) -> bool:
        return self._backlog > BACKLOG_LIMIT

    @property
    def shows_progress(self) -> bool:
        return self._progress is not None

    def write(self, stream: Stream, data: bytes) -> None:
        if data:
            with self._lock:
                self._backlog += len(data)
            self._items.put((stream, data))

    def log(self, text: str) -> None:
        """A line of the supervisor's own."""
        self.write(Stream.STDERR, _bytes(text) + b"\n")

    def show(self, item: ProgressLine | SummaryTable) -> None:
        self._items.put(item)

    def close(self, timeout_s: float) -> bool:
        """Write out what is left; False when stdout or stderr took too long to take it."""
        self._items.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (item := self._items.get()) is not None:
            if isinstance(item, ProgressLine):
                self._show_progress(item)
                continue
            if isinstance(item, SummaryTable):
                self._finish_progress()
                self._put(Stream.STDOUT, _bytes(item.drawn(self._width()) if self._live else item.plain()))
                continue
            stream, data = item
            self._erase()
            self._put(stream, data)
            was_full = self.full
            with self._lock:
                self._backlog -= len(data)
            if was_full and not self.full:
                self._on_room()
            if self._items.empty():
                self._draw()
        self._finish_progress()

    def _show_progress(self, progress: ProgressLine) -> None:
        self._progress = progress
        if progress.final:  # what the script prints from now on comes below the line
            self._finish_progress()
            return
        now = time.monotonic()
        if self._live:
            if now - self._written_at >= 0.1 or progress.step == progress.total:
                self._erase()
                self._draw()
                self._written_at = now
        elif now - self._written_at >= PROGRESS_EVERY_S:
            self._write_progress(progress)
            self._written_at = now

    def _finish_progress(self) -> None:
        if self._progress is None:
            return
        if self._live:
            self._erase()
            self._put(Stream.STDOUT, _bytes(self._progress.drawn(self._width())) + b"\n")
        elif self._progress.text() != self._written:
            self._write_progress(self._progress)
        self._progress = None

    def _write_progress(self, progress: ProgressLine) -> None:
        self._put(Stream.STDOUT, _bytes(f"paceline: {progress.text()}\n"))
        self._written = progress.text()

    def _draw(self) -> None:
        if self._live and self._progress is not None:
            self._put(Stream.STDOUT, _bytes(self._progress.drawn(self._width())))
            self._drawn = True

    def _erase(self) -> None:
        if self._drawn:
            self._put(Stream.STDOUT, ERASE_LINE)
            self._drawn = False

    def _width(self) -> int:
        try:
            return os.get_terminal_size(self._fds[Stream.STDOUT]).columns or 80
        except OSError:
            return 80

    def _put(self, stream: Stream, data: bytes) -> None:
        view = memoryview(data)
        fd = self._fds.get(stream)
        while fd is not None and view:
            try:
                view = view[os.write(fd, view) :]
            except BlockingIOError:
                time.sleep(0.01)  # another process made our terminal non-blocking; it is still ours to wait for
            except OSError:
                # The reader left (`| head`, a closed terminal). A job of days should not die of that: go on in silence.
                del self._fds[stream]
                self._live = self._live and stream is not Stream.STDOUT
                return


class WorkerOutput:
    """One pipe of one worker, read as far as the screen keeps up."""

    def __init__(
        self,
        fd: int,
        rank: int,
        stream: Stream,
        prefix: bytes,
        screen: Screen,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.rank = rank
        self.received = 0
        """Bytes so far."""
        self._fd = fd
        self._stream = stream
        self._lines = Lines(prefix)
        self._alone = not prefix
        self._screen = screen
        self._loop = loop
        self._reading = False
        self.is_open = True
        os.set_blocking(fd, False)
        self.resume()

    def resume(self) -> None:
        if self.is_open and not self._reading:
            self._loop.add_reader(self._fd, self._read)
            self._reading = True

    def read_all(self) -> None:
        """What is in the pipe now: at most its size, so a fast worker can't keep us here."""
        for _ in range(32):
            if not self.is_open or not self._read():
                return

    def close(self) -> None:
        if self.is_open:
            self.is_open = False
            self._pause()
            os.close(self._fd)
            self._screen.write(self._stream, self._lines.end())

    def _read(self) -> bool:
        try:
            chunk = os.read(self._fd, 2**16)
        except BlockingIOError:
            return False
        if not chunk:
            self.close()
            return False
        self.received += len(chunk)
        if self._alone and not self._screen.shows_progress:
            self._screen.write(self._stream, chunk)  # one worker and nothing of ours on the screen: its own bytes
        else:
            self._screen.write(self._stream, self._lines.feed(chunk, time.monotonic()))
        if self._screen.full:
            self._pause()
        return True

    def _pause(self) -> None:
        if self._reading:
            self._loop.remove_reader(self._fd)
            self._reading = False


def _bytes(text: str) -> bytes:
    """A text may have come from a file name that is not UTF-8, or from anywhere."""
    return text.encode(errors="backslashreplace")
