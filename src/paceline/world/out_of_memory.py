"""A device that is out of memory: the error that ends the script says what was held, by part, and what would take less.

    torch.OutOfMemoryError: CUDA out of memory. Tried to allocate …
    paceline: of 139.80 GiB (cuda:0) ddp holds 4.69 GiB of weights, …

torch raises it anywhere: in the script's forward, in backward, in the update. So whoever shows the error asks here.
"""

from __future__ import annotations

from collections.abc import Callable

_tell: Callable[[], str] | None = None


def told_by(tell: Callable[[], str] | None) -> None:
    """What this process holds is known there; the last engine's stands."""
    global _tell
    _tell = tell


def explain(error: BaseException) -> None:
    """Add it to the error, if it is one of those; the traceback shows it below."""
    if _tell is not None and type(error).__name__ == "OutOfMemoryError":  # without torch, which a launcher may not have
        error.add_note(f"paceline: {_tell()}")
