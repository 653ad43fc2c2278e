"""The same seeds, threads and algorithms wherever a lane is ridden."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.world import determinism
from paceline.world.determinism import (
    default_threads,
    fingerprint,
    make_deterministic,
    mix,
    seed_everything,
)

parts = st.lists(st.one_of(st.integers(0, 2**63 - 1), st.text(max_size=5)), max_size=4)


@given(parts, parts)
def test_different_purposes_get_different_seeds(left: list[int | str], right: list[int | str]) -> None:
    assert (mix(*left) == mix(*right)) == (left == right)
    assert 0 <= mix(*left) < 2**63


def test_a_seed_is_the_same_in_every_process_and_every_version() -> None:
    assert mix(1234, 56, 3, 1, "dropout") == 7769747445014511188
    assert mix(np.int64(7), 1) == mix(7, 1)  # type: ignore[arg-type]


def test_mixing_is_cheap_enough_for_every_micro_batch() -> None:
    started = time.perf_counter()
    for step in range(10_000):
        mix(1234, step, 3, 1, "dropout")
    assert (time.perf_counter() - started) / 10_000 < 30e-6  # 2 µs here; room for a busy machine


@pytest.fixture
def generators() -> Iterator[None]:
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(before[0])
    np.random.set_state(before[1])
    torch.set_rng_state(before[2])


@pytest.mark.usefixtures("generators")
def test_seeding_repeats_every_library_s_draws() -> None:
    def draws(seed: int) -> list[float]:
        seed_everything(seed)
        return [random.random(), float(np.random.rand()), float(torch.rand(()))]

    assert draws(mix(1, 2)) == draws(mix(1, 2))
    assert all(a != b for a, b in zip(draws(mix(1, 2)), draws(mix(1, 3)), strict=True))


@pytest.fixture
def algorithms() -> Iterator[None]:
    threads = torch.get_num_threads()
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    yield
    torch.set_num_threads(threads)
    torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("algorithms")
def test_adding_by_index_gives_one_answer_on_two_threads() -> None:
    torch.set_num_threads(2)
    generator = torch.Generator().manual_seed(0)
    index = torch.randint(0, 7, (200_000,), generator=generator)
    values = torch.randn(200_000, generator=generator)
    make_deterministic("cpu")
    sums = {torch.zeros(7).index_put_((index,), values, accumulate=True).numpy().tobytes() for _ in range(10)}
    assert len(sums) == 1, "without make_deterministic there are ten"


@pytest.mark.usefixtures("algorithms")
def test_the_fingerprint_notices_what_bits_depend_on() -> None:
    torch.set_num_threads(1)
    before = fingerprint()
    assert before == fingerprint()
    torch.set_num_threads(2)
    make_deterministic("cpu")
    changed = {name for name, fact in fingerprint().items() if fact != before[name]}
    assert changed == {"threads", "deterministic"}


def test_threads_depend_on_cores_and_lanes_and_are_never_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(determinism, "usable_cores", lambda: 8)
    assert [default_threads(lanes) for lanes in (1, 2, 3, 8, 100)] == [8, 4, 2, 1, 1]
