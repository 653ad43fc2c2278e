"""What every test gets: the choice between quick matrices and full products, and a look at what is left behind."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full-product", action="store_true", help="all combinations instead of a pairwise choice")
    parser.addoption("--every", type=int, default=1, metavar="N", help="of the full product every N-th combination")


@pytest.fixture(scope="session")
def full_product(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--full-product"))


@pytest.fixture(autouse=True)
def no_process_is_left() -> Iterator[None]:
    yield
    left = multiprocessing.active_children()
    assert not left, f"the test left processes behind: {left}"
