"""This process as the operating system sees it: its name in `top` and `ps`, and the free memory that it keeps.

Servers have a name of their own, which tells them from the workers that were forked beside them.

    allocated   ████░░░░██░░░░░░██     freed in the middle: the allocator keeps it, and the system counts it
    given back  ████    ██      ██     pages in the middle return; what is allocated stays where it is

Steps that are all alike find their memory again, so keeping it is right: pages that come anew are cleared first. After
something large that happens once, such as a new assignment of optimizer state, it would count against the job for ever.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress
from pathlib import Path

SERVER = "paceline-server"  # the kernel keeps 15 characters


def set_process_name(name: str) -> None:
    """The calling thread, the main one of its process."""
    with suppress(OSError):
        Path("/proc/self/comm").write_text(name)


def process_name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().rstrip("\n")
    except OSError:
        return ""


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # glibc's M_TRIM_THRESHOLD and M_MMAP_THRESHOLD
LARGE = 4 * 2**20


def give_back_free_memory() -> None:
    """Milliseconds for each gigabyte; nothing where the C library is not glibc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def keep_no_free_memory() -> None:
    """From now on what is large returns as soon as it is freed: the process has what it uses, and is slower for it."""
    _set_allocator(_MMAP_THRESHOLD, LARGE)


def keep_free_memory() -> None:
    """From now on what is freed stays for the next step, as under `paceline run`, which asks so by the environment."""
    _set_allocator(_TRIM_THRESHOLD, -1)  # never
    if not _set_allocator(_MMAP_THRESHOLD, 2**30):
        _set_allocator(_MMAP_THRESHOLD, 2**25)  # glibc before 2.35 takes no more


def _set_allocator(option: int, value: int) -> bool:
    """False where the C library is not glibc, or refuses the value."""
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    return set_option is not None and bool(set_option(option, value))
