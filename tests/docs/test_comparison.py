"""The tables of docs/comparison.md have the numbers that benchmarks/peers_behaviour.py has measured."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.docs.blocks import ROOT

PAGE = (ROOT / "docs/comparison.md").read_text()
MEASURED: dict[str, Any] = json.loads((ROOT / "benchmarks/results/peers_behaviour.json").read_text())
SECTIONS = {"uneven": "Data that don't divide", "resume": "Going on after a stop", "alone": "Alone without knowing it"}


def section(name: str) -> str:
    return PAGE.split(f"## {SECTIONS[name]}\n")[1].split("\n## ")[0]


def rows(name: str) -> list[list[str]]:
    """Of the section's table; an empty first cell stands for the one above it."""
    lines = [line for line in section(name).splitlines() if line.startswith("| ")][1:]
    found: list[list[str]] = []
    for line in lines:
        cells = [cell.strip().strip("*") for cell in line.strip("|").split("|")]
        found.append([cells[0] or found[-1][0], *cells[1:]])
    return found


def figure(cell: object) -> str:
    """A number, yes or no, or of an error its type."""
    error = re.match(r"`?(\w+Error)", str(cell))
    return error[1] if error else str(cell)


@pytest.mark.parametrize("name", SECTIONS)
def test_a_table_has_the_rows_that_were_measured(name: str) -> None:
    shown = [[figure(cell) for cell in row[1:]] for row in rows(name)]
    assert shown == [[figure(cell) for cell in row[1:]] for row in MEASURED[name]]
    for row, measured in zip(rows(name), MEASURED[name], strict=True):
        assert row[0].startswith(measured[0])


def test_the_steps_of_processes_that_are_alone_are_those_measured() -> None:
    peers = {
        device: {n for system, on, n in MEASURED["steps"] if on == device and system != "paceline"}
        for device in ("none", "the CPU")
    }
    ours = {n for system, _, n in MEASURED["steps"] if system == "paceline"}
    assert (peers, ours) == ({"none": {11}, "the CPU": {6}}, {6})
    assert "had 11 steps in the first process, as many as 22 samples make, and not 6" in section("alone")
    assert "With paceline the epoch had 6 steps" in section("alone")


def test_the_versions_on_the_page_are_those_measured() -> None:
    torch = MEASURED["torch"].split("+")[0]
    assert f"torch {torch}, Accelerate {MEASURED['accelerate']}, transformers {MEASURED['transformers']}" in PAGE
