"""A collective on a network: against formulas, and against a reference that follows every message."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.collectives.choice import FLAT
from paceline.collectives.hierarchical_all_reduce import hierarchical
from paceline.collectives.schedule import Schedule
from paceline.simulate import collective as collectives
from paceline.simulate.collective import Collective
from paceline.simulate.network import Level, Network
from paceline.simulate.ring_time import after_hops
from paceline.world.world import Topology
from tests.simulate import reference


def flat_network(alpha_s: float, bandwidth: float) -> Network:
    return Network("flat", (Level("network", None, bandwidth, alpha_s),))


def random_network(rng: np.random.Generator, depth: int, per_host: int, per_rack: int) -> Network:
    speeds = np.sort(rng.uniform(1e8, 1e10, depth))[::-1]
    latencies = np.sort(rng.uniform(0, 1e-4, depth))
    further = rng.uniform(0, 1e-5, depth)
    units = [per_host, per_rack, None][-depth:] if depth < 3 else [per_host, per_rack, None]
    levels = [
        Level(f"level {n}", units[n] if n < depth - 1 else None, speeds[n], latencies[n], further[n])
        for n in range(depth)
    ]
    return Network("random", tuple(levels), payload=float(rng.uniform(0.8, 1)))


def schedule_named(name: str, size: int, per_host: int) -> Schedule:
    if name == "hierarchical":
        return hierarchical(Topology.of([rank // per_host for rank in range(size)]))
    return FLAT[name]


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(2, 64),
    nbytes=st.floats(1, 1e9),
    alpha_s=st.floats(0, 1e-3),
    bandwidth=st.floats(1e6, 1e11),
)
def test_a_ring_on_an_ideal_network_takes_the_alpha_beta_formula(
    size: int, nbytes: float, alpha_s: float, bandwidth: float
) -> None:
    placed = flat_network(alpha_s, bandwidth).for_workers(size)
    found = Collective.of(FLAT["ring"], size, nbytes, placed, None).seconds
    assert found == pytest.approx(2 * (size - 1) * (alpha_s + nbytes / size / bandwidth), rel=1e-9)


@pytest.mark.parametrize("name", [*FLAT, "hierarchical"])
@pytest.mark.parametrize("segments", [1, 3, 4])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_it_equals_the_reference_that_follows_every_message(
    name: str, segments: int, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collectives, "LONG", 10**9)  # what that changes is the last test here
    for seed in range(6):
        rng = np.random.default_rng([seed, segments, depth, len(name)])
        per_host, per_rack = int(rng.integers(1, 4)), int(rng.integers(1, 3))
        network = random_network(rng, depth, per_host, per_rack)
        full = network.workers_below(depth - 1)
        size = max(2, full) * int(rng.integers(1, 4)) if full > 1 else int(rng.integers(2, 12))
        placed = network.for_workers(size)
        schedule = schedule_named(name, size, per_host if size % per_host == 0 else 1)
        nbytes = float(rng.uniform(1e4, 1e7))
        segment = nbytes / schedule.chunks(size) / segments * 1.0001 if segments > 1 else None
        clocks = rng.exponential(float(rng.choice([1e-6, 1e-3, 1.0])), size)
        found = Collective.of(schedule, size, nbytes, placed, segment).run(clocks)
        messages = reference.messages_of(schedule, size, nbytes, segment)
        wanted = reference.run(messages, placed, clocks.tolist(), cut=segments > 1)
        np.testing.assert_allclose(found, wanted, rtol=1e-9, atol=1e-12, err_msg=f"{name}, {size}, seed {seed}")


@settings(max_examples=300, deadline=None)
@given(
    rows=st.integers(1, 3),
    size=st.integers(2, 40),
    hops=st.integers(0, 200) | st.sampled_from(["half", "whole"]),
    kinds=st.integers(1, 4),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_ring_in_one_formula_equals_hop_by_hop(rows: int, size: int, hops: int | str, kinds: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    hops = {"half": size - 1, "whole": 2 * (size - 1)}.get(str(hops), hops)
    assert isinstance(hops, int)
    sent = rng.choice(rng.uniform(0, 1, kinds), (rows, size))
    start = rng.exponential(float(rng.choice([0.01, 1, 100])), (rows, size))
    taken = np.roll(sent, 1, axis=1)
    move, stay = taken + rng.choice([0, 0.3], (rows, size)), np.maximum(taken, sent)
    wanted = start
    for _ in range(hops):
        wanted = np.maximum(wanted + stay, np.roll(wanted, 1, axis=1) + move)
    np.testing.assert_allclose(after_hops(start, move, stay, hops), wanted, rtol=1e-9)


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from([*FLAT, "hierarchical"]),
    size=st.sampled_from([2, 4, 8, 12, 24]),
    late=st.floats(0, 10),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_worker_that_begins_later_never_lets_anybody_end_earlier(
    name: str, size: int, late: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    placed = random_network(rng, 2, 2, 1).for_workers(size)
    run = Collective.of(schedule_named(name, size, 2), size, 1e6, placed, 1e5).run
    clocks = rng.exponential(1e-3, size)
    delayed = clocks.copy()
    delayed[int(rng.integers(size))] += late
    assert (run(delayed) >= run(clocks) * (1 - 1e-12)).all()


@pytest.mark.parametrize("name", [*FLAT, "hierarchical"])
@pytest.mark.parametrize("segment", [None, 30_000.0])
def test_shared_links_carry_every_byte_once_each_way_and_no_faster_than_they_can(
    name: str, segment: float | None
) -> None:
    rng = np.random.default_rng(len(name))
    network = random_network(rng, 3, 2, 3)
    placed = network.for_workers(24)
    schedule = schedule_named(name, 24, 2)
    made = Collective.of(schedule, 24, 1e6, placed, segment)
    messages = reference.messages_of(schedule, 24, 1e6, segment)
    for level, below in enumerate(placed.below):
        out, into = np.zeros(24 // below), np.zeros(24 // below)
        for _, source, target, nbytes in messages:
            if source // below != target // below:
                out[source // below] += nbytes
                into[target // below] += nbytes
        found = made.link_bytes(level)
        np.testing.assert_allclose(found[0], out, rtol=1e-9)
        np.testing.assert_allclose(found[1], into, rtol=1e-9)
        assert found[0].sum() == pytest.approx(found[1].sum())
        assert max(out.max(), into.max()) / placed.bandwidths[level] <= made.seconds * (1 + 1e-9)


def test_long_runs_of_two_kinds_of_beats_may_be_taken_at_their_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ring of many ranks whose chunks have an odd number of segments: the bytes are the same, and so is the time."""
    network = random_network(np.random.default_rng(3), 2, 8, 1)
    placed = network.for_workers(304)
    smoothed = Collective.of(FLAT["ring"], 304, 304 * 5e5, placed, 1e5 + 1)
    monkeypatch.setattr(collectives, "LONG", 10**9)
    plain = Collective.of(FLAT["ring"], 304, 304 * 5e5, placed, 1e5 + 1)
    assert len(smoothed._beats) < 20 < 600 < len(plain._beats)
    assert smoothed.seconds == pytest.approx(plain.seconds, rel=0.01)
    np.testing.assert_allclose(smoothed.link_bytes(0)[0], plain.link_bytes(0)[0], rtol=1e-9)
