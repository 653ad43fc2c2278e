"""Batches hold what fits into the budget, nearly all of them are full, and every sample comes once."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

from paceline.data.length_grouped import Lengths
from paceline.data.token_budget import TokenBudgetSampler, cut_by_padded_size, cut_by_sum
from paceline.errors import ConfigError

DRAWN = np.array([7, 4, 4, 3, 2, 2, 1, 1, 1, 1])


def log_normal(samples: int, longest: int = 4096) -> Lengths:
    return np.random.default_rng(0).lognormal(5.3, 1, samples).clip(1, longest).astype(np.int64)


def size_of(lengths: Lengths, padded: bool) -> int:
    return int(len(lengths) * lengths.max() if padded else lengths.sum())


def test_padded_batches_look_like_the_drawing() -> None:
    batches = [DRAWN[places].tolist() for places in cut_by_padded_size(DRAWN, 12, 10)]
    assert batches == [[7], [4, 4, 3], [2, 2, 1, 1, 1, 1]]


def test_batches_without_padding_look_like_the_drawing() -> None:
    assert [DRAWN[places].tolist() for places in cut_by_sum(DRAWN, 12, 10)] == [[7, 4, 1], [4, 3, 2, 2, 1], [1, 1]]


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=200),
    st.integers(40, 120),
    st.none() | st.integers(1, 9),
    st.booleans(),
    st.integers(1, 5),
)
def test_every_sample_comes_once_and_every_batch_keeps_to_the_budget(
    lengths: list[int], tokens: int, max_samples: int | None, padded: bool, window: int
) -> None:
    sampler = TokenBudgetSampler(lengths, tokens, max_samples, padded=padded, window=window)
    batches = list(sampler)
    assert sorted(sample for batch in batches for sample in batch) == list(range(len(lengths)))
    assert max(size_of(sampler.lengths[batch], padded) for batch in batches) <= tokens
    assert max(len(batch) for batch in batches) <= (max_samples or len(lengths))
    assert min(len(batch) for batch in batches) >= 1
    assert len(sampler) == len(batches)


def test_no_padded_batch_but_one_has_room_for_one_more_sample() -> None:
    lengths = log_normal(20_000)
    roomy = [batch for batch in TokenBudgetSampler(lengths, 8192) if (len(batch) + 1) * lengths[batch].max() <= 8192]
    assert len(roomy) <= 1


def test_without_padding_batches_are_nearly_equal() -> None:
    lengths = log_normal(20_000)
    sums = np.sort([lengths[batch].sum() for batch in TokenBudgetSampler(lengths, 8192, padded=False)])
    assert sums[1] > 0.97 * 8192


def test_padding_is_little() -> None:
    lengths = log_normal(20_000)
    padded = sum(size_of(lengths[batch], padded=True) for batch in TokenBudgetSampler(lengths, 8192))
    waste = 1 - lengths.sum() / padded
    assert waste < 0.03


def test_the_order_comes_from_torch_s_generator_and_differs_between_epochs() -> None:
    sampler = TokenBudgetSampler(log_normal(500), 8192)
    torch.manual_seed(1)
    first, second = list(sampler), list(sampler)
    torch.manual_seed(1)
    assert list(sampler) == first
    assert {frozenset(batch) for batch in first} != {frozenset(batch) for batch in second}


def test_batches_do_not_come_longest_first() -> None:
    lengths = log_normal(2000)
    longest = [int(lengths[batch].max()) for batch in TokenBudgetSampler(lengths, 8192)]
    rising = sum(later > earlier for earlier, later in pairwise(longest))
    assert 0.35 < rising / len(longest) < 0.65


def test_the_number_of_batches_is_known_before_an_epoch_and_exact_after_it() -> None:
    sampler = TokenBudgetSampler(log_normal(3000), 8192)
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    before = len(sampler)
    assert torch.equal(torch.rand(1), expected)  # asking draws nothing
    assert abs(len(list(sampler)) - before) <= 3
    for _ in range(3):
        assert len(list(sampler)) == len(sampler)


def test_a_data_loader_takes_it_as_its_batch_sampler() -> None:
    lengths = log_normal(300)
    loader: DataLoader[Any] = DataLoader(
        TensorDataset(torch.arange(300)), batch_sampler=TokenBudgetSampler(torch.from_numpy(lengths))
    )
    assert sorted(torch.cat([batch for (batch,) in loader]).tolist()) == list(range(300))


def test_a_million_lengths_are_cut_without_a_loop_over_samples() -> None:
    lengths = log_normal(1_000_000)
    assert sum(map(len, TokenBudgetSampler(lengths, 8192))) == 1_000_000


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"lengths": [5, 9001, 9000, 3], "tokens": 8192},
            r"sample 1 has 9,001 tokens and a batch at most tokens=8,192 \(2 of 4 samples don't fit\); truncate or "
            r"leave out what is longer, or raise tokens to 9001",
        ),
        ({"tokens": 0}, "tokens=0; it must be at least 1"),
        ({"max_samples": 0}, "max_samples=0; it must be at least 1"),
        ({"window": 0}, "window=0; it must be at least 1"),
        ({"lengths": []}, "there are no lengths: the dataset is empty"),
        ({"lengths": [3, -2]}, "sample 1 has the length -2; a length is never negative"),
    ],
)
def test_what_cannot_be_batched_is_refused_with_what_to_do(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        TokenBudgetSampler(**{"lengths": [1, 2]} | options)
