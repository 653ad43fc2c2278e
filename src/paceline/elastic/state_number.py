"""The number of a kept state: steps, updates inside them and what is laid out for joiners, in one count that grows.

    numbered(7)  =  4 · (7 · 1024)        after step 7
    numbered(8, update=2)                 after the second update of step 8, which has several (`engine.update`)
    numbered(7) + 1                       that of step 7 again, laid out by those who stay for those who join
    numbered(7) + 2                       and again, by those who enter a loop after it; until all of them have, what
                                          was committed must stay as it is, and whole

Files and messages between workers carry the number; people read `said`.
"""

from __future__ import annotations

from collections.abc import Iterable

MOST_UPDATES = 1 << 10
LAST_UPDATE = MOST_UPDATES - 1
_KINDS = 4


def numbered(step: int, update: int = 0) -> int:
    return _KINDS * (step * MOST_UPDATES + update)


def laid_out(number: int) -> int:
    """Of the same state, in parts for those who join."""
    return number | 1


def entered(step: int, committed: int) -> int:
    """As a loop begins after `step`, where `committed` is the newest; after another step one has gone back, or on."""
    same = committed // (_KINDS * MOST_UPDATES) == step and committed > 0
    return committed | 2 if same else numbered(step)


def said(number: int) -> str:
    """`step 7`, `update 2 of step 8`, `step 7, laid out for those who join`."""
    step, update = divmod(number // _KINDS, MOST_UPDATES)
    of = f"step {step}" if update in (0, LAST_UPDATE) else f"update {update} of step {step}"
    return f"{of}, laid out for those who join" if number % 2 else of


def all_said(numbers: Iterable[int | None]) -> str:
    there = sorted(number for number in numbers if number is not None)
    return " and ".join(map(said, there)) or "nothing"
