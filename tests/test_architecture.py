"""docs/architecture.md quotes the code and names its files: both are what the code has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "architecture.md").read_text()
QUOTED = re.findall(r"<!-- verbatim: (\S+) -->\n```python\n(.*?)```", TEXT, re.DOTALL)
FILES = sorted(set(re.findall(r"[a-z_]+(?:/[a-z_]+)*\.py\b", TEXT)))
NAMES = sorted(set(re.findall(r"`([A-Z]\w+)(?:\.(\w+))?[`(]", TEXT)))


@pytest.mark.parametrize(("file", "code"), QUOTED, ids=[file for file, _ in QUOTED])
def test_what_is_quoted_stands_in_the_file(file: str, code: str) -> None:
    assert code in (ROOT / file).read_text(), f"{file} has changed: quote it anew in docs/architecture.md"


def test_something_of_the_loop_the_step_and_the_recovery_is_quoted() -> None:
    assert {Path(file).stem for file, _ in QUOTED} == {"loop", "step", "recovery"}


@pytest.mark.parametrize(
    "room", ["engine", "collectives", "collectives/shared_memory", "strategies", "launch", "world", "elastic", "verify"]
)
def test_the_first_lines_of_a_room_name_its_files(room: str) -> None:
    folder = ROOT / "src" / "paceline" / room
    listed = set(re.findall(r"\b\w+\b", (folder / "__init__.py").read_text()))
    assert {file.stem for file in folder.glob("*.py") if file.stem != "__init__"} - listed == set()


@pytest.mark.parametrize("file", FILES)
def test_files_that_are_named_are_there(file: str) -> None:
    places = [ROOT / "src" / "paceline" / file, ROOT / file, *(ROOT / "src").rglob(file)]
    assert any(place.is_file() for place in places)


def test_classes_and_methods_that_are_named_are_there() -> None:
    code = "\n".join(path.read_text() for folder in ("src", "tests") for path in (ROOT / folder).rglob("*.py"))
    for name, member in NAMES:
        assert re.search(rf"\b(class {name}\b|{name}(: [^=\n]*)? = )", code), name
        assert not member or re.search(rf"def {member}\(|self\.{member}\b|^    {member}: ", code, re.MULTILINE), (
            f"{name}.{member}"
        )
