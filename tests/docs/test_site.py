"""What `make docs` would refuse, found without a build: anchors, the menu, the reference, errors without a section."""

from __future__ import annotations

import importlib.util
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from paceline import errors
from tests.docs.blocks import FENCE, PAGES, ROOT

DOCS = ROOT / "docs"
ERRORS = [kind for kind in vars(errors).values() if inspect.isclass(kind) and issubclass(kind, errors.PacelineError)]
TROUBLESHOOTING = (DOCS / "troubleshooting.md").read_text()


def hooks() -> Any:
    spec = importlib.util.spec_from_file_location("site_hooks", DOCS / "site_hooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


HOOKS = hooks()


def anchors(page: Path) -> set[str]:
    text = FENCE.sub("", page.read_text())
    headings = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", line) for line in re.findall(r"^#+ (.+)$", text, re.M)]
    named = set(re.findall(r'<a id="([^"]+)"', text)) | set(re.findall(r"^::: (\S+)", text, re.M))
    return {HOOKS.anchor(heading.replace("`", "")) for heading in headings} | named


def test_every_anchor_that_is_linked_exists() -> None:
    missing = []
    for page in PAGES:
        for target, anchor in re.findall(r"\]\(([^)#:\s]*)#([^)\s]+)\)", page.read_text()):
            there = (page.parent / target).resolve() if target else page
            if there.suffix == ".md" and anchor not in anchors(there):
                missing.append(f"{page.relative_to(ROOT)} links to {target}#{anchor}")
    assert not missing, "\n".join(missing)


def test_the_menu_has_every_page_once_there() -> None:
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    listed = HOOKS.pages_in([entry for entry in map(HOOKS.expanded, nav) if entry])
    there = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}
    assert listed == there, f"not in mkdocs.yml: {sorted(there - listed)}; not in docs/: {sorted(listed - there)}"


def test_every_public_name_has_a_docstring_and_an_entry_in_the_reference() -> None:
    wrong = HOOKS.wrong_names()
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.__name__)
def test_every_error_has_a_section_with_cause_and_remedy(kind: type[errors.PacelineError]) -> None:
    found = re.search(rf"^## {kind.__name__}\n(.+?)(?=^## |\Z)", TROUBLESHOOTING, re.M | re.S)
    assert found, f"docs/troubleshooting.md has no section `## {kind.__name__}`"
    assert len(found[1].split()) > 25, f"the section of {kind.__name__} says next to nothing"
    page, _, anchor = kind("…").see.partition("#")
    assert anchor in anchors(ROOT / page)


def test_an_error_of_another_module_is_told_where_its_nearest_kind_is() -> None:
    class WireError(errors.DataError):
        pass

    assert WireError("…").see == "docs/troubleshooting.md#dataerror"
