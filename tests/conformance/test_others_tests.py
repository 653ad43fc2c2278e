"""What `make conformance` says about the tests of transformers and accelerate."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conformance import accelerate_data_loader, transformers_trainer
from tests.conformance.fetching import ROOT
from tests.conformance.others_tests import OthersTests

DELIBERATE = transformers_trainer.DELIBERATE
FIRST = next(iter(DELIBERATE))
SUITES = [transformers_trainer.SUITE, accelerate_data_loader.SUITE]


def test_what_passes_with_theirs_and_not_with_ours_is_complained_about_unless_it_is_deliberate() -> None:
    theirs = {"a": "passed", "b": "passed", "c": "failure: x", FIRST: "passed"}
    complaints = transformers_trainer.SUITE.complaints
    assert complaints(theirs, {"a": "passed", "b": "failure: y", FIRST: "failure: z"}) == ["b: failure: y"]
    found = complaints(theirs, {"a": "passed", "b": "passed", FIRST: "passed"})
    assert found == [f"{FIRST} passes: take it out of DELIBERATE"]


@pytest.mark.parametrize("suite", SUITES, ids=lambda suite: suite.project)
def test_where_the_tests_cannot_be_had_it_says_so(
    suite: OthersTests, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert suite.main(["--repository", str(tmp_path / "nothing"), "--cache", str(tmp_path / "cache")]) == 0
    assert f"{suite.name}: NOT RUN: the tests can't be had" in capsys.readouterr().out


@pytest.mark.parametrize("suite", SUITES, ids=lambda suite: suite.project)
def test_its_plugin_is_there(suite: OthersTests) -> None:
    assert Path(__file__).with_name(f"{suite.plugin}.py").is_file()


def test_the_docs_list_every_deliberate_failure() -> None:
    text = (ROOT / "docs" / "concepts" / "trainer.md").read_text()
    missing = [name for name, why in DELIBERATE.items() if f"| `{name}` | {why} |" not in text]
    assert missing == []
