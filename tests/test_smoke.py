"""Which tests run when: a named file runs whole, the targets of `make` share all, no promise is left out."""

from __future__ import annotations

import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import pytest

from tests.bits import test_one_hash as one_hash
from tests.faults import test_any_moment as any_moment
from tests.smoke import first_of_each

pytest_plugins = ["pytester"]

MAKEFILE = Path(__file__).parents[1] / "Makefile"
TESTS = """
import pytest

def test_unit(): pass
@pytest.mark.slow
def test_long(): pass
@pytest.mark.workers
def test_workers(): pass
@pytest.mark.job
@pytest.mark.beside
def test_beside(): pass
@pytest.mark.browser
def test_browser(): pass
@pytest.mark.job
@pytest.mark.parametrize("case", [pytest.param(1, marks=pytest.mark.smoke), 2])
def test_job(case): pass
"""
ALL = {"test_unit", "test_long", "test_workers", "test_job[1]", "test_job[2]", "test_beside", "test_browser"}


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """Tests of every kind, with the real conftest, and without plugins, whose imports take seconds."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makeconftest((Path(__file__).parent / "conftest.py").read_text())
    markers = [f"{name}: {name}" for name in ("unit", "workers", "job", "beside", "browser", "slow", "smoke")]
    pytester.makeini("[pytest]\nmarkers =\n  " + "\n  ".join(markers))
    pytester.makepyfile(test_some=TESTS)
    return pytester


def ran(project: pytest.Pytester, *arguments: str) -> set[str]:
    passed, skipped, failed = project.inline_run("--strict-markers", *arguments).listoutcomes()
    assert not skipped
    assert not failed
    return {report.nodeid.split("::")[1] for report in passed}


def test_a_file_that_is_named_runs_whole(project: pytest.Pytester) -> None:
    assert ran(project, "test_some.py") == ALL
    assert ran(project, "test_some.py::test_job") == {"test_job[1]", "test_job[2]"}


def test_every_test_runs_once_in_make_test_or_make_test_rest_or_make_test_browser(project: pytest.Pytester) -> None:
    text = MAKEFILE.read_text()
    names = dict(re.findall(r"^(QUICK|BESIDE) := (.+)$", text, re.MULTILINE))
    found = re.findall(r'pytest -m "([^"]+)"', text)
    chosen = [re.sub(r"\$\((\w+)\)", lambda name: names[name[1]], one) for one in found]
    assert len(chosen) == 3
    quick, *rest = (ran(project, "-m", one) for one in [*chosen, "browser"])
    assert quick == {"test_unit", "test_job[1]"}
    assert rest == [{"test_long", "test_workers", "test_beside"}, {"test_job[2]"}, {"test_browser"}]
    assert set().union(quick, *rest) == ALL


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        ("import sys, subprocess; subprocess.run([sys.executable, '-V'])", "@pytest.mark.job"),
        ("from tests.workers import run_workers; run_workers(print, 1)", "@pytest.mark.workers"),
    ],
)
def test_a_unit_test_that_starts_a_process_is_told_its_marker(
    project: pytest.Pytester, body: str, complaint: str
) -> None:
    project.makepyfile(test_some=f"def test_unit():\n    {body}")
    (failed,) = project.inline_run().listoutcomes()[2]
    assert complaint in str(failed.longrepr)


def smoke(cases: list[Any], kind: Any) -> set[Hashable]:
    return {kind(parameter.values[0]) for parameter in first_of_each(cases, kind) if parameter.marks}


def test_each_strategy_has_a_smoke_test_of_its_bits_on_each_backend() -> None:
    found = smoke(one_hash.quick_cases(), one_hash.strategy_and_backend)
    assert found == {(str(strategy), backend) for strategy in one_hash.STRATEGIES for backend in one_hash.BACKENDS}


def test_each_strategy_has_a_smoke_test_of_a_killed_worker() -> None:
    assert smoke(any_moment.quick_cases(), any_moment.strategy_that_loses_a_worker) == set(any_moment.STRATEGIES)
