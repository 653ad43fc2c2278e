"""Guides and cookbook: each script gives one hash on any number of workers, and the pages show the very files."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import re
import runpy
import sys
import warnings
from pathlib import Path

import pytest

from paceline.world.world import World
from tests.examples.pages import PAGES, blocks, shown
from tests.examples.running import EXAMPLES, ROOT, hash_in, variables_of
from tests.test_tracking import Recorder
from tests.workers import Result, run_workers

LANES = 4
GUIDES = sorted(path.name for path in (EXAMPLES / "guides").glob("*.py"))
RECIPES = sorted(path.name for path in (EXAMPLES / "cookbook").glob("*.py"))
BEFORE = sorted(path.name for path in (EXAMPLES / "guides" / "before").glob("*.py"))
NEEDS = {
    "guides/from_hf_trainer.py": ("transformers",),
    "cookbook/lora.py": ("transformers", "peft"),
    "cookbook/larger_than_a_worker.py": ("transformers",),
}


def run_in(world: World, name: str, folder: str, typed: str = "") -> str:
    """Inside a worker, which ends with it: what the script printed in a folder of its own."""
    os.chdir(folder)
    os.environ.update(variables_of(world), PACELINE_LANES=str(LANES), PACELINE_THREADS="1")
    sys.argv, sys.stdin = [name], io.StringIO(typed)
    if name.endswith("wandb_in_a_loop.py"):
        sys.modules["wandb"] = Recorder("wandb", id="run1")  # nothing is sent
    if "lanes_in_pdb" in name:
        del os.environ["PACELINE_LANES"]  # the script says how many
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), warnings.catch_warnings():
        warnings.simplefilter("ignore" if "before" in name else "error")  # what others warn of is their affair
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return printed.getvalue()


def results_of(name: str, workers: int, folder: Path, typed: str = "") -> list[Result]:
    for package in NEEDS.get(name, ()):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{name} needs {package}")
    folder.mkdir()
    options = {"name": name, "folder": str(folder), "typed": typed}
    return run_workers(run_in, workers, timeout_s=100, imports=NEEDS.get(name, ()), **options)  # type: ignore[arg-type]


def printed_by(name: str, workers: int, folder: Path, typed: str = "") -> str:
    results = results_of(name, workers, folder, typed)
    for result in results:
        assert result.error is None, f"{name} on {result.name}: {result.error}\n{result.traceback}"
    return str(results[0].value)


def without_notes(printed: str) -> list[str]:
    """What the script says; times and speeds are another matter each time."""
    return [line for line in printed.splitlines() if re.match(r"epoch|error|\d+ steps,|loss|generated|distance", line)]


@pytest.mark.workers
@pytest.mark.parametrize("name", [*(f"guides/{name}" for name in GUIDES), *(f"cookbook/{name}" for name in RECIPES)])
def test_a_script_gives_one_hash_and_says_the_same_on_one_and_two_workers(name: str, tmp_path: Path) -> None:
    typed = "c\n" * 20
    alone, together = (printed_by(name, workers, tmp_path / str(workers), typed) for workers in (1, 2))
    assert hash_in(alone) == hash_in(together)
    assert without_notes(alone) == without_notes(together)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_shows_its_files_as_they_are(page: Path) -> None:
    found = blocks(page)
    if page.stem != "README":
        assert found, f"{page} shows no file"
    for kind, names, text in found:
        assert text == shown(kind, names), f"{page}: write it again with python -m tests.examples.pages"


def test_every_script_is_shown_and_every_page_is_listed() -> None:
    text = {page.stem: page.read_text() for page in PAGES}
    named = {Path(name).name for page in PAGES for _, names, _ in blocks(page) for name in names}
    assert {*GUIDES, *RECIPES, *BEFORE} <= named
    for page in PAGES:
        assert page.stem == "README" or f"({page.name})" in (page.parent / "README.md").read_text(), page
    assert all(text.values())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        assert target.startswith("https://") or (page.parent / target).exists(), f"{page}: {target}"


@pytest.mark.parametrize("name", [*(f"guides/{name}" for name in GUIDES), *(f"cookbook/{name}" for name in RECIPES)])
def test_a_script_is_one_screen_and_opens_with_how_to_run_it(name: str) -> None:
    text = (ROOT / "examples" / name).read_text()
    assert len(text.splitlines()) < 65
    assert f"examples/{name}" in text.split('"""')[1]


@pytest.mark.workers
def test_wandb_hears_from_one_worker_what_all_have_logged(tmp_path: Path) -> None:
    told = run_workers(rows_sent, 2, folder=str(tmp_path))
    assert [result.error for result in told] == [None, None], told[0].traceback or told[1].traceback
    assert [row["train/global_step"] for row in told[0].value] == [4, 8, 12, 16]
    assert set(told[0].value[0]) == {"train/loss", "train/grad_norm", "train/global_step"}
    assert told[1].value == []


def rows_sent(world: World, folder: str) -> list[dict[str, float]]:
    run_in(world, "cookbook/wandb_in_a_loop.py", folder)
    return [row for (row,), _ in sys.modules["wandb"].told("log")]


@pytest.mark.workers
def test_pdb_stops_in_the_lane_that_the_page_names(tmp_path: Path) -> None:
    printed = printed_by("cookbook/eight_lanes_in_pdb.py", 1, tmp_path / "alone", "p engine.lane, engine.step\nc\n")
    (place,) = re.findall(r"\((\d), (\d)\)", printed)
    assert f"({', '.join(place)})" in (ROOT / "docs" / "cookbook" / "pdb.md").read_text()
