"""What every test gets: the choice between quick matrices and full products, and a look at what is left behind."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full-product", action="store_true", help="all combinations instead of a pairwise choice")
    parser.addoption("--every", type=int, default=1, metavar="N", help="of the full product every N-th combination")
    parser.addoption("--rest", action="store_true", help="exactly the tests that are left out otherwise: see THINNED")


# The longest files, of which about one test in n is in `make test`; `make rest` runs the others.
THINNED = {
    "tests/bench/test_collectives_bench.py": 2,
    "tests/bench/test_measure.py": 2,
    "tests/bench/test_memory.py": 3,
    "tests/bits/test_checkpoints.py": 2,
    "tests/bits/test_one_hash.py": 3,
    "tests/collectives/shared_memory/test_all_reduce_in_c.py": 2,
    "tests/collectives/shared_memory/test_bits.py": 2,
    "tests/collectives/shared_memory/test_collectives.py": 2,
    "tests/collectives/shared_memory/test_failures.py": 2,
    "tests/collectives/test_abandoned_groups.py": 2,
    "tests/collectives/test_executor.py": 2,
    "tests/collectives/test_reduce_scatter.py": 3,
    "tests/data/test_batch_ring.py": 2,
    "tests/data/test_fetching.py": 2,
    "tests/data/test_redeal_streams.py": 2,
    "tests/data/test_streams.py": 2,
    "tests/engine/test_data.py": 3,
    "tests/engine/test_failed_backward.py": 2,
    "tests/engine/test_rounds.py": 2,
    "tests/engine/test_second_opinion.py": 2,
    "tests/engine/test_workers.py": 2,
    "tests/examples/test_examples.py": 2,
    "tests/examples/test_launch_files.py": 3,
    "tests/faults/test_any_moment.py": 2,
    "tests/faults/test_hosts.py": 3,
    "tests/faults/test_servers.py": 2,
    "tests/faults/test_starting_anew.py": 3,
    "tests/launch/test_launched_jobs.py": 2,
    "tests/launch/test_launched_servers.py": 2,
    "tests/launch/test_network_namespaces.py": 4,
    "tests/launch/test_stopping.py": 2,
    "tests/parameter_server/test_killed.py": 4,
    "tests/parameter_server/test_replay.py": 3,
    "tests/parameter_server/test_step_traffic.py": 2,
    "tests/strategies/test_dismantling.py": 5,
    "tests/strategies/test_dismantling_servers.py": 6,
    "tests/strategies/test_fsdp.py": 2,
    "tests/strategies/test_fsdp_limits.py": 2,
    "tests/strategies/test_hybrid.py": 2,
    "tests/strategies/test_masters.py": 3,
    "tests/strategies/test_meta_weights.py": 2,
    "tests/strategies/test_parameter_server.py": 3,
    "tests/strategies/test_star.py": 2,
    "tests/strategies/test_zero.py": 3,
    "tests/strategies/test_zero3.py": 2,
    "tests/strategies/test_zero3_offload.py": 3,
    "tests/traffic/test_parameter_server.py": 3,
    "tests/traffic/test_sharded_training.py": 3,
    "tests/trainer/test_workers.py": 2,
}
GOLDEN_RATIO = (5**0.5 - 1) / 2
"""Its multiples fall evenly whatever the period of the parameters is that a choice runs through."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    asked_for = any("::" in argument for argument in config.args)
    if config.getoption("--full-product") or asked_for:
        return
    chosen, rest, seen = [], [], dict.fromkeys(THINNED, 0)
    for item in items:
        file = item.nodeid.partition("::")[0]
        place = 0.0
        if file in THINNED:
            place = seen[file] * GOLDEN_RATIO % 1 * THINNED[file]
            seen[file] += 1
        (chosen if place < 1 else rest).append(item)
    if config.getoption("--rest"):
        chosen, rest = rest, chosen
    config.hook.pytest_deselected(items=rest)
    items[:] = chosen


@pytest.fixture(scope="session")
def full_product(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--full-product"))


@pytest.fixture(autouse=True)
def no_process_is_left() -> Iterator[None]:
    yield
    left = multiprocessing.active_children()
    assert not left, f"the test left processes behind: {left}"
