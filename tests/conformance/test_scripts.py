"""How other projects' scripts are changed, and what is said where they can't be had."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conformance import scripts
from tests.conformance.fetching import ROOT
from tests.conformance.ported_scripts import NANOGPT, SCRIPTS, Change, Script, code_of_page

TEXT = "import a\nrun(1)\nsave({\n  1,\n  2,\n})\nrun(2)\n"


def script(*changes: Change, smaller: tuple[Change, ...] = ()) -> Script:
    return Script("x", NANOGPT, "x.py", changes, smaller=smaller)


def test_lines_that_are_new_or_changed_are_counted_and_removed_ones_are_not() -> None:
    changes = Change("import a", "import b\nimport c"), Change("save({…})", "keep()"), Change("run(1)\n", "")
    assert script(*changes).adapted(TEXT) == ("import b\nimport c\nkeep()\nrun(2)\n", 3)


def test_what_makes_a_script_smaller_does_not_count() -> None:
    assert script(smaller=(Change("run(2)", "run(1)"),)).adapted(TEXT)[1] == 0


def test_a_script_that_is_another_version_is_named() -> None:
    with pytest.raises(ValueError, match=r"x: 'run\(3\)' is there 0 times, not 1: another version"):
        script(Change("run(3)", "")).adapted(TEXT)


def test_the_code_of_a_page_is_what_stands_behind_its_prompts() -> None:
    page = "# Title\n```py\n>>> a = 1\n```\n```py\n>>> for b in c:\n...     optimizer.step()\n```\n"
    assert code_of_page(page) == "for b in c:\n    optimizer.step()\n"


def test_where_they_cannot_be_had_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "evaluate").mkdir()
    assert scripts.main(["--clones", str(tmp_path), "--cache", str(tmp_path / "cache")]) == 0
    assert "scripts of other projects: NOT RUN: metrics can't be had" in capsys.readouterr().out


def test_the_docs_list_every_script() -> None:
    text = (ROOT / "docs" / "porting.md").read_text()
    assert [script.name for script in SCRIPTS if f"| {script.name} |" not in text] == []
