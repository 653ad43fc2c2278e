"""Every example keeps the promise, as `paceline verify` sees it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.examples.running import EXAMPLES
from tests.verify.running import verified

pytestmark = pytest.mark.beside

IN_FOLDER = {
    "hello.py": [],
    "resume.py": ["--samples", "2000", "--run-dir", "{folder}"],
    "digits.py": ["--output-dir", "{folder}"],
    "gpt.py": ["--output-dir", "{folder}"],
    "hf_model.py": ["--output-dir", "{folder}"],
    "mesh.py": ["--folder", "{folder}"],
    "moved_from_transformers.py": ["--output-dir", "{folder}"],
    "train_gpt.py": ["--run-dir", "{folder}"],
}
NEEDS = {"digits.py": "sklearn"} | dict.fromkeys(
    ("hf_model.py", "mesh.py", "moved_from_transformers.py"), "transformers"
)
OF_OTHERS = "transformers_original.py"  # which has nothing of ours


def test_all_examples_are_here() -> None:
    assert {*IN_FOLDER, OF_OTHERS} == {path.name for path in EXAMPLES.glob("*.py")}


@pytest.mark.job
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", IN_FOLDER)
def test_an_example_is_the_same_on_one_and_two_workers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    monkeypatch.chdir(tmp_path)
    _, outcome = verified(tmp_path / "runs", str(EXAMPLES / name), *IN_FOLDER[name], steps=3, lanes=2)
    assert outcome.states == ["reference", "same"], outcome.cause
    assert [run.made for run in outcome.runs] == [3, 3]
