"""Where two lists of operators of the same item part, and what that says.

order      another operator, or the same from another line         a branch
number     the same operator with another number or word           a value that Python computed
outside    an input that no operator of the item made              kept or made by the script itself
state      a parameter or buffer                                   it was not the same before
random     the same inputs, other results, drawn at random         a generator, or its state
operator   the same inputs, other results                          the operator itself
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

ORDER, NUMBER, OUTSIDE, STATE, RANDOM, OPERATOR = "order", "number", "outside", "state", "random", "operator"

Entry = Mapping[str, Any]


@dataclass(frozen=True)
class DifferentOperator:
    kind: str
    at: int
    left: Entry | None
    right: Entry | None
    name: str = ""  # of the parameter or buffer

    @property
    def operators(self) -> tuple[str, str]:
        """In words, of both lists."""
        return told(self.left), told(self.right)


def told(entry: Entry | None) -> str:
    if entry is None:
        return "nothing more"
    where = " in backward" if entry["line"] == "backward" else f" at {entry['line']}"
    return f"{entry['name']}{where}"


def first_different_operator(left: Sequence[Entry], right: Sequence[Entry]) -> DifferentOperator | None:
    """None: every operator had the same inputs and gave the same."""
    for at, (ours, theirs) in enumerate(zip(left, right, strict=False)):
        if (ours["name"], ours["line"]) != (theirs["name"], theirs["line"]):
            return DifferentOperator(ORDER, at, ours, theirs)
        if ours["others"] != theirs["others"]:
            return DifferentOperator(NUMBER, at, ours, theirs)
        for (origin, value), (_, other) in zip(ours["inputs"], theirs["inputs"], strict=False):
            if value != other:
                kind = OUTSIDE if origin == "outside" else OPERATOR if origin == "an operator" else STATE
                return DifferentOperator(kind, at, ours, theirs, origin)
        if ours["outputs"] != theirs["outputs"]:
            return DifferentOperator(RANDOM if ours["random"] else OPERATOR, at, ours, theirs)
    at = min(len(left), len(right))
    if len(left) != len(right):
        return DifferentOperator(
            ORDER, at, left[at] if at < len(left) else None, right[at] if at < len(right) else None
        )
    return None
