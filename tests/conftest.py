"""What every test gets: its group, the choice between quick choices and full products, and a look at what it leaves.

    unit       one process (and its loader's); what has no other group is a unit test, so nobody writes this one
    workers    forks workers from the preloaded parent of tests/workers.py
    job        starts `paceline run` or another command: real processes, kills, network namespaces
    beside     a job that may run beside another: no time limit, nothing that the machine has once
    browser    opens the page of `paceline monitor` in chromium: `make test-browser`
    slow       left out of `make test`, for its length alone
    smoke      in `make test` whatever its group: each promise once
    product    also has a full product of combinations, which `make bits` runs

pytest itself leaves nothing out: `pytest` runs all groups, and a file or test that is named runs whole. The Makefile
chooses with `-m`: `make test` runs the smoke tests and the quick unit tests, `make test-rest` exactly the others but
for those in a browser.
"""

from __future__ import annotations

import gc
import multiprocessing
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, NoReturn

import pytest

from paceline.world import process
from tests import workers

PROCESSES = ("workers", "job", "browser")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full-product", action="store_true", help="all combinations instead of a pairwise choice")
    parser.addoption("--every", type=int, default=1, metavar="N", help="of the full product every N-th combination")


@pytest.hookimpl(tryfirst=True)  # before pytest chooses by -m
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if not any(map(item.get_closest_marker, PROCESSES)):
            item.add_marker(pytest.mark.unit)


def pytest_collection_finish() -> None:
    """Thousands of tests and all that they import live to the end: engines and collections need not walk over them."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def freed_memory_is_not_kept() -> Iterator[None]:
    """By a group that a test makes in this process, for its life: others measure what they allocate here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "keep_free_memory", lambda: None)
        yield


@pytest.fixture(scope="session")
def full_product(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--full-product"))


@pytest.fixture(autouse=True)
def a_unit_test_is_one_process(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing marker is noticed at once, and not when `make test` has become slow; a compiler is no such process."""
    if request.node.get_closest_marker("unit") is None:
        return

    def fork(*args: Any, **options: Any) -> NoReturn:
        pytest.fail("a unit test forks no worker: mark it @pytest.mark.workers, or job if it runs `paceline run`")

    def start(self: subprocess.Popen[Any], args: Any, *others: Any, **options: Any) -> None:
        if sys.executable in args:
            pytest.fail(f"a unit test starts no Python: mark it @pytest.mark.job; it would have run {args}")
        start_any(self, args, *others, **options)

    start_any = subprocess.Popen.__init__
    monkeypatch.setattr(workers._CONTEXT, "Process", fork)
    monkeypatch.setattr(subprocess.Popen, "__init__", start)


@pytest.fixture(autouse=True)
def no_process_is_left() -> Iterator[None]:
    yield
    left = multiprocessing.active_children()
    assert not left, f"the test left processes behind: {left}"


@pytest.fixture(autouse=True)
def no_default_group_is_left() -> Iterator[None]:
    """An engine that a test did not close keeps torch's default group, which other libraries would find."""
    yield
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.group.WORLD is not None:
        dist.destroy_process_group()
