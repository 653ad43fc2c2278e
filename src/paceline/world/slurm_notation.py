"""SLURM's own notations: `node[1-3,7],gpu-02` for hosts, `2(x3),1` for tasks per host."""

from __future__ import annotations

import re
from collections.abc import Iterator

from paceline.errors import WorldError


def expand_nodelist(nodelist: str) -> Iterator[str]:
    """`node[1-3,7],gpu-02` -> node1 node2 node3 node7 gpu-02, one at a time."""
    item = r"(?:[^,\[\]]|\[[^\[\]]*\])+"
    if nodelist and not re.fullmatch(f"{item}(?:,{item})*", nodelist):
        raise WorldError(f"SLURM's node list {nodelist!r} is not of the form node[1-3,7],gpu-02")
    for hosts in re.findall(item, nodelist):
        yield from _expand_brackets(hosts)


def tasks_per_node(counts: str) -> list[int]:
    """`2(x3),1` -> [2, 2, 2, 1]."""
    tasks: list[int] = []
    for item in counts.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", item.strip())
        if match is None:
            raise WorldError(f"SLURM's tasks per node {counts!r} are not of the form 2(x3),1")
        tasks += [int(match[1])] * int(match[2] or 1)
    return tasks


def _expand_brackets(item: str) -> Iterator[str]:
    head, bracket, rest = item.partition("[")
    if not bracket:
        yield head
        return
    ranges, _, tail = rest.partition("]")
    for part in ranges.split(","):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise WorldError(f"SLURM's node list has {item!r}, which is not of the form node[1-3,7]")
        for number in range(int(first), int(last if dash else first) + 1):
            for end in _expand_brackets(tail):
                yield f"{head}{number:0{len(first)}d}{end}"
