"""What a process is called in `top` and `ps`: servers differ from the workers that they were forked beside."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

SERVER = "paceline-server"  # the kernel keeps 15 characters


def be_called(name: str) -> None:
    """The calling thread, the main one of its process."""
    with suppress(OSError):
        Path("/proc/self/comm").write_text(name)


def name_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().rstrip("\n")
    except OSError:
        return ""
