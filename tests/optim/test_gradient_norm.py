"""The norm by the block rule: close to torch's, and the same bits however gradients are cut."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.optim.gradient_norm import (
    BLOCK,
    DIGITS,
    block_norms,
    clip_,
    clip_coefficient,
    counted_norms,
    global_norm,
    norm_of_blocks,
)


def gradient(elements: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    scale = torch.rand(elements, generator=generator).mul(20).exp2()
    return (torch.randn(elements, generator=generator) * scale).to(dtype)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 3 * BLOCK), max_size=4))
def test_the_norm_is_close_to_torch_s(sizes: list[int]) -> None:
    gradients = [gradient(elements, seed) for seed, elements in enumerate(sizes)]
    assert global_norm(gradients) == pytest.approx(torch.nn.utils.get_total_norm(gradients).item(), rel=1e-5)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("elements", [1, 100, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 17, 40 * BLOCK + 1])
def test_blocks_have_the_same_bits_one_by_one_and_together(elements: int, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        whole = gradient(elements)
        one_by_one = torch.cat([block_norms(part.clone()) for part in whole.split(BLOCK)])
        assert torch.equal(block_norms(whole), one_by_one)
    finally:
        torch.set_num_threads(before)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 6 * BLOCK), st.integers(0, 6), st.integers(0, 5))
def test_the_norm_has_the_same_bits_wherever_a_gradient_is_cut_between_blocks(
    elements: int, cut: int, seed: int
) -> None:
    whole = gradient(elements, seed)
    assert global_norm([whole[: cut * BLOCK].clone(), whole[cut * BLOCK :].clone()]) == global_norm([whole])


def test_the_norm_does_not_depend_on_the_order_of_the_parameters() -> None:
    gradients = [gradient(3, seed) for seed in range(300)]
    orders = [gradients[cut:] + gradients[:cut] for cut in range(0, 300, 10)]
    assert len({float(global_norm(order)) for order in orders}) == 1


def test_the_norm_follows_logical_order_not_memory() -> None:
    rows = gradient(2 * BLOCK).view(2, BLOCK)
    assert global_norm([rows.t().contiguous().t()]) == global_norm([rows])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_the_norm_takes_every_precision(dtype: torch.dtype) -> None:
    values = gradient(BLOCK + 5).div(2**16).to(dtype)
    assert global_norm([values]) == pytest.approx(values.double().norm().item(), rel=1e-5)


def test_fp64_gradients_are_not_rounded_to_fp32() -> None:
    assert global_norm([torch.tensor([1e200], dtype=torch.float64).sqrt()]) == pytest.approx(1e100)


def test_no_gradients_and_empty_gradients_have_norm_zero() -> None:
    assert (global_norm([]), global_norm([torch.zeros(0)])) == (0.0, 0.0)


@pytest.mark.parametrize(("bad", "norm"), [(math.inf, "inf"), (-math.inf, "inf"), (math.nan, "nan")])
@pytest.mark.parametrize("place", [0, BLOCK + 3])
def test_one_value_that_is_not_finite_shows_in_the_norm(bad: float, norm: str, place: int) -> None:
    values = gradient(2 * BLOCK)
    values[place] = bad
    assert str(float(global_norm([gradient(5), values]))) == norm


def test_nan_wins_over_infinity() -> None:
    assert math.isnan(global_norm([torch.tensor([math.inf]), torch.tensor([math.nan])]))


@pytest.mark.parametrize(
    ("norm", "max_norm", "coefficient"),
    [(0.5, 1.0, 1.0), (0.0, 1.0, 1.0), (4.0, 1.0, 1 / (4 + 1e-6)), (math.inf, 1.0, 0.0), (3.0, 0.0, 0.0)],
)
def test_gradients_are_only_ever_made_smaller(norm: float, max_norm: float, coefficient: float) -> None:
    assert clip_coefficient(norm, max_norm) == coefficient


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 3000), st.integers(0, 10**6), st.integers(-200, 200), st.floats(0, 80))
def test_the_sum_of_squares_is_exact_and_rounded_once(blocks: int, seed: int, power: int, spread: float) -> None:
    """Against whole numbers of Python, which have no end."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.rand(blocks, generator=generator, dtype=torch.float64).mul(spread).exp2() * 2.0**power
    norms = torch.rand(blocks, generator=generator, dtype=torch.float64) * scale
    squares = [float(norm) * float(norm) for norm in norms]
    exponent = max(math.frexp(max(squares))[1], -900)
    total = 0
    for square in squares:
        scaled = math.ldexp(square, DIGITS - exponent)
        high = math.floor(scaled)
        total += (high << DIGITS) + round((scaled - high) * 2**DIGITS)
    assert float(norm_of_blocks(norms)) == math.sqrt(math.ldexp(total, exponent - 2 * DIGITS))


def test_a_sum_of_more_bits_than_fp64_is_rounded_once() -> None:
    """As of 2^22 blocks, whose high parts alone have 55 bits."""
    norms = torch.full((2**22,), 1.4142)
    squares = norms.double().square()
    scaled = math.ldexp(float(squares[0]), DIGITS - 1)
    high = math.floor(scaled)
    each = (high << DIGITS) + round((scaled - high) * 2**DIGITS)
    assert float(norm_of_blocks(norms.double())) == math.sqrt(math.ldexp(each * 2**22, 1 - 2 * DIGITS))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("max_norm", [1.0, 1e30, math.inf, 0.0])
def test_a_gpu_clips_to_the_bits_of_the_host(dtype: torch.dtype, max_norm: float) -> None:
    for bad in (None, math.inf, math.nan):
        here = [gradient(elements, elements, dtype) for elements in (3, BLOCK, 5 * BLOCK + 7)]
        if bad is not None:
            here[1][5] = bad
        there = [one.cuda() for one in here]
        norms = counted_norms((one, True) for one in there)
        clip_(here, norm_of_blocks(norms.cpu()), max_norm)
        found = clip_(there, norm_of_blocks(norms), max_norm)
        assert str(float(found)) == str(float(norm_of_blocks(norms.cpu())))
        assert all(torch.equal(a.cpu().nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip(there, here, strict=True))
