from __future__ import annotations

import os
import pty
import re
import threading

import pytest

from paceline.launch.output import BACKLOG_LIMIT, Lines, Screen, Stream
from paceline.world.terminal import ProgressLine


def test_every_line_gets_the_prefix_however_it_is_cut() -> None:
    text = b"one\ntwo\n\nthree"
    for size in range(1, len(text) + 1):
        lines = Lines(b"[3] ")
        cut = [text[at : at + size] for at in range(0, len(text), size)]
        shown = b"".join(lines.feed(chunk, now=0.0) for chunk in cut) + lines.end()
        assert shown == b"[3] one\n[3] two\n[3] \n[3] three\n", size


def test_bytes_that_are_not_utf8_pass_untouched() -> None:
    assert Lines(b"[0] ").feed(b"caf\xe9 \xff\xfe\n", now=0.0) == b"[0] caf\xe9 \xff\xfe\n"


def test_windows_line_ends_lose_nothing() -> None:
    assert Lines(b"[0] ").feed(b"one\r\ntwo\r\n", now=0.0) == b"[0] one\n[0] two\n"


@pytest.mark.parametrize("bar", [b"\r%d%%", b"%d%%\r"])
def test_a_bar_that_redraws_itself_is_shown_once_a_second_and_at_its_end(bar: bytes) -> None:
    lines = Lines(b"[0] ")
    shown = [lines.feed(bar % percent, now=percent / 20) for percent in range(100)]
    last = lines.feed(b"\r100%\n", now=5.0)
    assert 4 <= len([line for line in shown if line]) <= 6
    assert all(re.fullmatch(rb"(\[0\] \d+%\n)?", line) for line in shown)
    assert last == b"[0] 100%\n"


def test_a_line_without_end_does_not_grow_for_ever() -> None:
    lines = Lines(b"[0] ")
    shown = b"".join(lines.feed(b"x" * 2**16, now=0.0) for _ in range(64))
    assert len(shown) >= 3 * 2**20


def test_progress_is_short_to_read() -> None:
    progress = ProgressLine(17, 100, {"loss": 2.31234, "tokens/s": 5210.4, "lr": 3e-5, "samples": 12345})
    assert progress.text() == "step 17/100 · loss 2.312 · tokens/s 5,210 · lr 3e-05 · samples 12,345"


def test_off_a_terminal_progress_is_a_line_now_and_then_and_at_the_end() -> None:
    reading, writing = os.pipe()
    screen = Screen(writing, writing)
    for step in range(1, 50):
        screen.show(ProgressLine(step, 49))
    screen.write(Stream.STDOUT, b"[0] done\n")
    assert screen.close(5)
    os.close(writing)
    with os.fdopen(reading, "rb") as out:
        assert out.read().decode() == "paceline: step 1/49\n[0] done\npaceline: step 49/49\n"


def test_on_a_terminal_progress_is_one_line_below_the_output() -> None:
    ours, theirs = pty.openpty()
    received = bytearray()

    def read() -> None:
        while True:
            try:
                chunk = os.read(ours, 4096)
            except OSError:
                return
            received.extend(chunk)

    reader = threading.Thread(target=read)
    reader.start()
    screen = Screen(theirs, theirs)
    screen.show(ProgressLine(5, 10, {"loss": 2.5}))
    screen.write(Stream.STDOUT, b"[0] hello\n")
    screen.show(ProgressLine(10, 10, {"loss": 1.5}))
    assert screen.close(5)
    os.close(theirs)
    reader.join(5)
    os.close(ours)
    seen = _as_a_terminal_shows(received.decode())
    assert seen[0] == "[0] hello"
    assert "step 10/10 · loss 1.5" in seen[1]
    assert len(seen) == 2


def _as_a_terminal_shows(text: str) -> list[str]:
    """Apply "erase this line"; leave out colours."""
    rows = []
    for row in re.sub(r"\x1b\[[0-9;]*m", "", text).replace("\r\n", "\n").split("\n"):
        rows.append(row.rpartition("\r\x1b[2K")[2])
    return [row for row in rows if row]


def test_a_reader_that_leaves_does_not_end_the_job() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    errors, out = os.pipe()
    screen = Screen(writing, out)
    screen.write(Stream.STDOUT, b"into the void\n")
    screen.log("still here")
    assert screen.close(5)
    for fd in (writing, out):
        os.close(fd)
    with os.fdopen(errors, "rb") as said:
        assert said.read() == b"still here\n"


def test_a_screen_that_is_held_up_says_when_it_has_room_again() -> None:
    reading, writing = os.pipe()
    room = threading.Event()
    screen = Screen(writing, writing, on_room=room.set)
    for _ in range(BACKLOG_LIMIT // 2**16 + 4):
        screen.write(Stream.STDOUT, b"x" * 2**16)
    assert screen.full
    assert not room.is_set()
    drain = threading.Thread(target=lambda: [None for _ in iter(lambda: os.read(reading, 2**20), b"")])
    drain.start()
    assert room.wait(5)
    assert screen.close(5)
    os.close(writing)
    drain.join(5)
    os.close(reading)
