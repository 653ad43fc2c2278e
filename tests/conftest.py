"""What every test gets: the choice between quick matrices and full products, and a look at what is left behind."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full-product", action="store_true", help="all combinations instead of a pairwise choice")
    parser.addoption("--every", type=int, default=1, metavar="N", help="of the full product every N-th combination")


# Of these every n-th test is in `make test`; all of them are in `make faults`.
THINNED = {
    "tests/strategies/test_dismantling.py": 3,
    "tests/strategies/test_dismantling_fsdp.py": 3,
    "tests/strategies/test_dismantling_servers.py": 4,
    "tests/parameter_server/test_killed.py": 2,
    "tests/faults/test_hosts.py": 2,
    "tests/launch/test_network_namespaces.py": 2,
}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    asked_for = any("::" in argument for argument in config.args)
    if config.getoption("--full-product") or asked_for:
        return
    kept, left, seen = [], [], dict.fromkeys(THINNED, 0)
    for item in items:
        file = item.nodeid.partition("::")[0]
        if file in THINNED:
            seen[file] += 1
        (kept if file not in THINNED or seen[file] % THINNED[file] == 1 else left).append(item)
    config.hook.pytest_deselected(items=left)
    items[:] = kept


@pytest.fixture(scope="session")
def full_product(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--full-product"))


@pytest.fixture(autouse=True)
def no_process_is_left() -> Iterator[None]:
    yield
    left = multiprocessing.active_children()
    assert not left, f"the test left processes behind: {left}"
