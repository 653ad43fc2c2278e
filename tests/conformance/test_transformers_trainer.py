"""What `make conformance` says about transformers' trainer tests."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers")

from tests.conformance import transformers_trainer as runner

FIRST = next(iter(runner.DELIBERATE))


def test_what_passes_with_theirs_and_not_with_ours_is_complained_about_unless_it_is_deliberate() -> None:
    theirs = {"a": "passed", "b": "passed", "c": "failure: x", FIRST: "passed"}
    assert runner.complaints(theirs, {"a": "passed", "b": "failure: y", FIRST: "failure: z"}) == ["b: failure: y"]
    found = runner.complaints(theirs, {"a": "passed", "b": "passed", FIRST: "passed"})
    assert found == [f"{FIRST} passes: take it out of DELIBERATE"]


def test_where_the_tests_cannot_be_had_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert runner.main(["--repository", str(tmp_path / "nothing"), "--cache", str(tmp_path / "cache")]) == 0
    assert "transformers' trainer tests: NOT RUN: transformers' tests can't be had" in capsys.readouterr().out


def test_the_docs_list_every_deliberate_failure() -> None:
    text = (runner.ROOT / "docs" / "concepts" / "trainer.md").read_text()
    missing = [name for name, why in runner.DELIBERATE.items() if f"| `{name}` | {why} |" not in text]
    assert missing == []
