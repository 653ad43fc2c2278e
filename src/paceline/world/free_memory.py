"""Memory that is free and still the process's: the allocator keeps it for later, and the system counts it.

    allocated   ████░░░░██░░░░░░██     freed in the middle: kept, unless asked back
    given back  ████    ██      ██     pages in the middle return; what is allocated stays where it is

Steps that are all alike find their memory again, so keeping it is right: pages that come anew are cleared first. After
something large that happens once, such as dealing out optimizer state anew, it would count against the job for ever.
"""

from __future__ import annotations

import ctypes

_MMAP_THRESHOLD = -3  # glibc's M_MMAP_THRESHOLD
LARGE = 4 * 2**20


def give_back_free_memory() -> None:
    """Milliseconds for each gigabyte; nothing where the C library is not glibc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def keep_no_free_memory() -> None:
    """From now on what is large returns as soon as it is freed: the process has what it uses, and is slower for it."""
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        set_option(_MMAP_THRESHOLD, LARGE)
