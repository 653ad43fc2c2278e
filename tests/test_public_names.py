"""Names that documentation and examples use can be imported from where they say, and from public modules alone."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

import paceline

ROOT = Path(__file__).parents[1]
LISTED = re.findall(r"^\| `(paceline[\w.]*)` \|", (ROOT / "docs" / "public_names.md").read_text(), re.MULTILINE)
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
EXAMPLES = sorted((ROOT / "examples").rglob("*.py"))

IMPORT = re.compile(
    r"^[ \t>`(]*from (paceline[\w.]*) import (\([^)]*\)|[^\n`#;]+)|`from (paceline[\w.]*) import ([^`]+)`", re.MULTILINE
)
DOTTED = re.compile(r"(?<![\w./@-])paceline(?:\.[A-Za-z_]\w*)+")
NO_NAMES = {"paceline.log": "a file's name", "paceline.engine": "a logger"}
"""What looks like a name of the package in a page, and is something else."""
INTERNAL = {"architecture.md": "describes what is inside", "adding_a_strategy.md": "uses modules for extensions"}
OTHERS = {
    "Block": "a class of the reader's model",
    "Gpt": "the same",
    "Lines": "the reader's dataset",
    "Flow": "printed, not called",
    "Model": "of paceline.sharding.footprint, which the page names",
}
"""Classes of pages that have the name of one of ours."""


def code_of(page: Path) -> str:
    """What stands between backquotes."""
    return "\n".join(re.findall(r"```.*?```|`[^`\n]+`", page.read_text(), re.DOTALL))


def imports_of(file: Path) -> Iterator[tuple[str, str]]:
    """(module, name) of every `from paceline… import name`."""
    if file.suffix == ".py":
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "paceline":
                yield from ((str(node.module), alias.name) for alias in node.names)
        return
    for module, names, inline_module, inline_names in IMPORT.findall(file.read_text()):
        for name in (names or inline_names).strip("() \n").split(","):
            if word := name.partition(" as ")[0].partition("#")[0].strip():
                yield module or inline_module, word


def dotted_of(file: Path) -> Iterator[str]:
    """paceline.a.b as code has it, other than behind `from`, `import` and `-m`."""
    text = file.read_text() if file.suffix == ".py" else code_of(file)
    text = re.sub(r"(?:from|-m) paceline[\w.]*|^\s*import paceline\.[\w.]*", "", text, flags=re.MULTILINE)
    yield from sorted(set(DOTTED.findall(text)) - set(NO_NAMES))


def resolved(dotted: str) -> tuple[ModuleType, list[str]]:
    """The module that the name is taken from (the longest that is listed), and what follows."""
    parts = dotted.split(".")
    for length in range(len(parts), 0, -1):
        if (module := ".".join(parts[:length])) in LISTED:
            return importlib.import_module(module), parts[length:]
    raise AssertionError(dotted)


def is_public(module: ModuleType, name: str) -> bool:
    return hasattr(module, name) and name in getattr(module, "__all__", dir(module)) and not name.startswith("_")


@pytest.mark.parametrize("file", [*PAGES, *EXAMPLES], ids=lambda file: str(file.relative_to(ROOT)))
def test_what_is_imported_is_public_and_there(file: Path) -> None:
    wrong = [
        f"from {module} import {name}"
        for module, name in imports_of(file)
        if module not in LISTED or not is_public(importlib.import_module(module), name)
    ]
    for dotted in dotted_of(file):
        module, names = resolved(dotted)
        if names and not is_public(module, names[0]):
            wrong.append(dotted)
    assert not wrong, f"not in a module of docs/public_names.md, or not there: {', '.join(wrong)}"


@cache
def our_classes() -> set[str]:
    files = (ROOT / "src" / "paceline").rglob("*.py")
    return {name for file in files for name in re.findall(r"^class (\w+)", file.read_text(), re.MULTILINE)}


@cache
def public_names() -> set[str]:
    return {name for module in LISTED for name in getattr(importlib.import_module(module), "__all__", ())}


def called_classes(page: Path) -> set[str]:
    """Without those that it defines."""
    code = code_of(page)
    return set(re.findall(r"(?<![\w.])([A-Z]\w+)\(", code)) - set(re.findall(r"class ([A-Z]\w+)", code))


@pytest.mark.parametrize("page", [page for page in PAGES if page.name not in INTERNAL], ids=lambda page: page.name)
def test_a_class_that_a_page_calls_can_be_imported_from_a_public_module(page: Path) -> None:
    ours, public = our_classes(), public_names()
    assert (called_classes(page) & ours) - public - set(OTHERS) == set()


@pytest.mark.parametrize("name", LISTED)
def test_a_listed_module_has_what_it_says(name: str) -> None:
    module = importlib.import_module(name)
    assert module.__doc__
    missing = [one for one in getattr(module, "__all__", ()) if not hasattr(module, one)]
    assert not missing


def test_every_module_that_the_package_hands_out_is_listed() -> None:
    modules = [name for name in paceline.__all__ if isinstance(getattr(paceline, name), ModuleType)]
    assert {f"paceline.{name}" for name in modules} <= set(LISTED)


def test_modules_that_pages_run_are_there() -> None:
    run = {name for page in PAGES for name in re.findall(r"-m (paceline[\w.]*)", page.read_text())}
    assert run
    assert all(importlib.util.find_spec(name) is not None for name in run)


def test_the_checks_find_what_is_wrong(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "`from paceline.cli.main import main` and\n```python\nfrom paceline import Engine, Gone\n"
        "from paceline.data import (\n    TokenFile,\n    Lost,\n)\nx = paceline.data.Missing(paceline.nothing)\n```\n"
    )
    assert list(imports_of(page)) == [
        ("paceline.cli.main", "main"), ("paceline", "Engine"), ("paceline", "Gone"),
        ("paceline.data", "TokenFile"), ("paceline.data", "Lost"),
    ]  # fmt: skip
    assert list(dotted_of(page)) == ["paceline.data.Missing", "paceline.nothing"]
    assert not is_public(paceline, "Gone")
    assert not is_public(*(lambda found: (found[0], found[1][0]))(resolved("paceline.data.Missing")))
