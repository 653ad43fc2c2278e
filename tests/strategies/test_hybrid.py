"""hybrid: shards inside a host, replicas across; the bits of one process however workers are spread over hosts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch.nn.functional as F

from paceline import Engine, World
from paceline.collectives.canonical_sum import SumPlan
from paceline.errors import ConfigError
from paceline.sharding.local_shard import LocalShard
from paceline.strategies.fsdp.hybrid import HybridConfig, groups_of, hybrid_lanes, plan_across, say_if_smaller
from paceline.world.world import Elasticity, Topology
from tests.bits.programs import PROGRAMS, tied_and_scheduled
from tests.strategies.test_fsdp import BLOCKS_DIFFER, holds
from tests.strategies.test_zero import straight, trains
from tests.workers import hashes, run_workers


def on_hosts(world: World, *, run: Callable[..., Any], hosts: int, **job: Any) -> Any:
    """As if the workers were spread over several hosts, each with as many of them."""
    each = world.size // hosts
    here = replace(
        world, local_rank=world.rank % each, local_size=each, host_rank=world.rank // each, hosts=hosts
    )  # fmt: skip
    return run(here, **job)


@cache
def alone(program: str, lanes: int, accumulate: int) -> frozenset[str]:
    return frozenset(hashes(run_workers(PROGRAMS[program], 1, lanes=lanes, accumulate=accumulate)))


@pytest.mark.workers
@pytest.mark.parametrize(
    ("program", "workers", "hosts", "lanes", "accumulate"),
    [
        ("clipped", 4, 2, 5, 2), ("gpt", 4, 2, 8, 1), ("convnet", 4, 2, 4, 1), ("wide", 3, 3, 5, 2),
        ("gan", 4, 2, 5, 1), ("short_last_step", 4, 2, 4, 2), ("odd_parameters", 2, 1, 4, 1),
    ],
)  # fmt: skip
def test_any_number_of_hosts_gives_the_bits_of_one_process(
    program: str, workers: int, hosts: int, lanes: int, accumulate: int
) -> None:
    job = {"lanes": lanes, "accumulate": accumulate, "bucket_mib": 0.01, "backend": "gloo"}
    found = run_workers(on_hosts, workers, run=PROGRAMS[program], hosts=hosts, strategy="hybrid", **job)
    assert hashes(found) == alone(program, lanes, accumulate)


@pytest.mark.workers
@pytest.mark.parametrize("backend", ["gloo", "paceline"])
def test_groups_smaller_than_a_host_give_the_bits_of_one_process(backend: str) -> None:
    job = {"lanes": 5, "accumulate": 2, "backend": backend}
    found = run_workers(PROGRAMS["clipped"], 4, strategy=HybridConfig(shard_over=2), **job)
    assert hashes(found) == alone("clipped", 5, 2)


@pytest.mark.workers
@pytest.mark.parametrize(("before", "after"), [("hybrid", "ddp"), ("ddp", "hybrid"), ("fsdp", "hybrid")])
def test_a_state_saved_under_one_strategy_goes_on_under_another_to_the_same_bits(
    before: str, after: str, tmp_path: Path
) -> None:
    folder = str(tmp_path / "state")
    job = {"run": trains, "hosts": 2, "backend": "gloo", "folder": folder}
    hashes(run_workers(on_hosts, 4, until=3, strategy=before, **job))
    assert hashes(run_workers(on_hosts, 4, until=6, resume=True, strategy=after, **job)) == straight()


@pytest.mark.workers
def test_a_worker_keeps_its_share_of_a_host() -> None:
    for result in run_workers(on_hosts, 4, run=holds, hosts=2, strategy="hybrid", backend="gloo"):
        assert result.error is None, result.traceback
        elements, weights, state, gradients = result.value
        assert weights == elements // 2
        assert gradients == pytest.approx(elements / 2, rel=BLOCKS_DIFFER)
        assert state == pytest.approx(elements, rel=BLOCKS_DIFFER)


# -- who is with whom --------------------------------------------------------------------------------------------------

TWO_HOSTS = Topology.of([0, 0, 1, 1])


def test_hosts_ride_neighbouring_lanes_so_that_each_has_one_root() -> None:
    groups = groups_of(TWO_HOSTS, None)
    assert groups == ((0, 1), (2, 3))
    assignment = hybrid_lanes(8, groups)
    assert assignment == ((0, 2), (1, 3), (4, 6), (5, 7))
    plan = plan_across(SumPlan(tuple(range(8)), assignment), groups)
    assert [plan.roots(host) for host in (0, 1)] == [(0,), (4,)]


def test_hosts_of_different_sizes_are_refused_unless_groups_fit_them() -> None:
    uneven = Topology.of([0, 0, 1, 1, 1, 1])
    with pytest.raises(ConfigError, match=r"the hosts have 2, 4 workers.*HybridConfig\(shard_over=n\)"):
        groups_of(uneven, None)
    assert groups_of(uneven, 2) == ((0, 1), (2, 3), (4, 5))


def test_groups_that_do_not_divide_a_host_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"shard_over=3\): a host has 2 workers, which are no groups of 3"):
        groups_of(TWO_HOSTS, 3)


# -- in an elastic job -------------------------------------------------------------------------------------------------


def parts_kept(world: World) -> list[int]:
    """Elements of weights and state that this worker keeps inside a step, and between two."""
    engine = Engine(world=world, strategy=HybridConfig(shard_over=2), lanes=4, bucket_mib=0.01, timeout_s=30.0)
    elastic, job_of = replace(world, elastic=Elasticity()), engine._preparation.job
    engine._preparation.job = lambda: replace(job_of(), world=elastic)  # type: ignore[method-assign]
    model, optimizer, loader = tied_and_scheduled(engine)[:3]
    strategies = engine._training().strategies
    counts = []

    def count(*_: Any) -> None:
        states = strategies.local_state(optimizer)["state"]
        leaves = [strategies.local_shard(p) for p in model.parameters()] + [
            v for s in states.values() for v in s.values()
        ]
        counts.append(sum(part.numel() for leaf in leaves if isinstance(leaf, LocalShard) for _, part in leaf.parts))

    optimizer.register_step_post_hook(count)
    for x, y in loader:
        engine.backward(F.cross_entropy(model(x).flatten(0, 1), y.flatten()))
        optimizer.step()
        if engine.stepped:
            break
    engine._between.drain()
    count()
    return counts


@pytest.mark.workers
def test_in_a_step_every_group_keeps_its_own_and_between_steps_the_first_speaks_for_all() -> None:
    results = run_workers(parts_kept, 4)
    assert [result.error for result in results] == [None] * 4
    inside, between = zip(*(result.value for result in results), strict=True)
    assert inside[:2] == inside[2:] == between[:2], (inside, between)
    assert between[2:] == (0, 0)


def test_groups_that_are_smaller_than_configured_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    say_if_smaller(Topology.of([0] * 4), 2, shard_over=2)
    say_if_smaller(Topology.of([0, 0, 1, 1]), 2, shard_over=None)
    assert capsys.readouterr().out == ""
    say_if_smaller(Topology.of([0] * 3), 1, shard_over=2)
    say_if_smaller(Topology.of([0] * 4 + [1] * 2), 2, shard_over=None)
    assert capsys.readouterr().out.splitlines() == [
        "paceline: 3 workers are no groups of 2: every worker holds all weights until there are others",
        "paceline: 4 and 2 workers are no groups of 4: weights are shared by 2 workers until there are others",
    ]


def test_where_the_workers_left_can_not_be_grouped_as_configured_the_largest_groups_are_taken() -> None:
    hosts = {"one of 6": [0] * 6, "one of 3": [0] * 3, "4 and 3": [0] * 4 + [1] * 3, "4 and 2": [0] * 4 + [1] * 2}
    found = {
        (name, wanted): len(groups_of(Topology.of(host), wanted, elastic=True)[0])
        for name, host in hosts.items()
        for wanted in (None, 4, 2)
    }
    assert found == {
        ("one of 6", None): 6, ("one of 6", 4): 3, ("one of 6", 2): 2,
        ("one of 3", None): 3, ("one of 3", 4): 3, ("one of 3", 2): 1,
        ("4 and 3", None): 1, ("4 and 3", 4): 1, ("4 and 3", 2): 1,
        ("4 and 2", None): 2, ("4 and 2", 4): 2, ("4 and 2", 2): 2,
    }  # fmt: skip
    with pytest.raises(ConfigError, match="which are no groups of 4"):
        groups_of(Topology.of([0] * 6), 4)
