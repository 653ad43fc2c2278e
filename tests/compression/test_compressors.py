"""Each compressor by itself, on random gradients: how much it loses, what it makes of it, and what it leaves alone."""

from __future__ import annotations

import math
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.collectives.canonical_sum import merges
from paceline.compression import COMPRESSORS, BlockCompressor, Cast, Compression, Int8, PowerSgd, Sign, TopK
from paceline.compression.block_codec import BlockCodec, OwnedRows
from paceline.compression.noise import uniform
from paceline.compression.power_sgd import first_factor, orthonormal
from paceline.compression.topk import largest
from paceline.errors import ConfigError
from paceline.world import known_names

CODECS: list[BlockCompressor] = [
    Int8(), Int8(block=16), Int8(rounding="stochastic"), Cast("bf16"), Cast("fp16"), Sign(), Sign(block=32),
]  # fmt: skip


def drawn(seed: int, rows: int, block: int, power: int = 0) -> Tensor:
    return torch.randn(rows, block, generator=torch.Generator().manual_seed(seed)) * 10.0**power


def encoded(codec: BlockCompressor, values: Tensor, partial: Any = ()) -> Tensor:
    noise = uniform(7, 0, values.numel()).view_as(values) if codec.draws else None
    return codec.encode(values, partial, noise)


def there_and_back(codec: BlockCompressor, values: Tensor, partial: Any = ()) -> Tensor:
    out = torch.empty_like(values)
    codec.decode(encoded(codec, values, partial), partial, out)
    return out


# -- block codecs ------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(CODECS), st.integers(0, 10**6), st.integers(1, 9), st.integers(-6, 4))
def test_a_block_codec_loses_no_more_than_its_rounding(
    codec: BlockCompressor, seed: int, rows: int, power: int
) -> None:
    values = drawn(seed, rows, codec.block, power)
    found = there_and_back(codec, values)
    lost = (values - found).abs()
    sizes = values.abs().amax(dim=1, keepdim=True)
    if isinstance(codec, Int8):
        steps = 0.5 if codec.rounding == "nearest" else 1.0
        assert (lost <= sizes / 127 * steps * 1.001).all()
    elif isinstance(codec, Cast) and codec.to == "bf16":
        assert (lost <= values.abs() * 2.0**-8).all()
    elif isinstance(codec, Cast):
        fits = values.abs() <= 65504
        assert (lost[fits] <= values[fits].abs() * 2.0**-11 + 2.0**-25).all()
    else:
        assert torch.equal(found < 0, values < 0)
        torch.testing.assert_close(found.abs(), values.abs().mean(1, keepdim=True).expand_as(values))


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(CODECS), st.integers(0, 10**6), st.integers(1, 9), st.data())
def test_rows_are_encoded_and_decoded_alike_in_any_slices(
    codec: BlockCompressor, seed: int, rows: int, data: st.DataObject
) -> None:
    values, cut = drawn(seed, rows, codec.block), data.draw(st.integers(0, rows))
    whole = encoded(codec, values)
    assert whole.shape == (rows, codec.row_bytes)
    assert whole.dtype == torch.uint8
    noise = uniform(7, 0, values.numel()).view_as(values) if codec.draws else None
    parts = [
        codec.encode(values[low:high], (), None if noise is None else noise[low:high])
        for low, high in ((0, cut), (cut, rows))
    ]
    assert torch.equal(torch.cat(parts), whole)
    out = torch.empty(rows - cut, codec.block)
    codec.decode(whole[cut:], (), out)
    assert torch.equal(out, there_and_back(codec, values)[cut:])


@settings(max_examples=80, deadline=None)
@given(st.sampled_from(CODECS), st.integers(0, 10**6), st.integers(0, 9), st.integers(-44, 30), st.booleans())
def test_splitting_is_adding_encoding_and_taking_away_to_the_last_bit(
    codec: BlockCompressor, seed: int, rows: int, power: int, with_residual: bool
) -> None:
    """Also in C, where there is a compiler."""
    values, residual = drawn(seed, rows, codec.block, power), drawn(seed + 1, rows, codec.block, power - 2)
    if rows > 1:
        values[1, 7:] = residual[1, 7:] = 0
        values[0] *= 0.0 if seed % 3 == 0 else 1.0
    partial = [(1, 7)] if rows > 1 else []
    noise = uniform(7, 0, values.numel()).view_as(values) if codec.draws else None
    wanted = values + residual if with_residual else values.clone()
    payload = codec.encode(wanted, partial, noise)
    sent = torch.empty_like(values)
    codec.decode(payload, partial, sent)
    if isinstance(codec, Int8):
        assert torch.equal(sent, payload[:, :-4].view(torch.int8) * payload[:, -4:].view(torch.float32))
    found = codec.split(values, partial, noise, residual if with_residual else None)
    assert torch.equal(found, payload)
    assert torch.equal(values, wanted - sent)


@settings(max_examples=80, deadline=None)
@given(st.sampled_from(CODECS), st.integers(0, 10**6), st.integers(0, 5), st.integers(1, 6), st.integers(-44, 30))
def test_an_owners_sum_is_decoding_adding_and_splitting_to_the_last_bit(
    codec: BlockCompressor, seed: int, rows: int, lanes: int, power: int
) -> None:
    """Also in C, where there is a compiler."""
    partial = [(1, 7)] if rows > 1 else []
    given = [drawn(seed + lane, rows, codec.block, power + lane % 2) for lane in range(lanes)]
    residual = drawn(seed - 1, rows, codec.block, power - 1) if seed % 3 else None
    for values in (*given, *([] if residual is None else [residual])):
        for row, elements in partial:
            values[row, elements:] = 0
    noise = uniform(3, 0, rows * codec.block).view(rows, codec.block) if codec.draws else None
    parts = [encoded(codec, values, partial) for values in given]
    order = [(merge.left, merge.right) for merge in merges(tuple(range(lanes)))]
    wanted_out, wanted_lost, out, lost = (torch.full((rows, codec.block), math.nan) for _ in range(4))
    wanted = BlockCodec.sum(codec, parts, order, OwnedRows(partial, noise, residual, wanted_lost, wanted_out))
    found = codec.sum(parts, order, OwnedRows(partial, noise, residual, lost, out))
    assert torch.equal(found, wanted)
    assert torch.equal(lost.view(torch.int32), wanted_lost.view(torch.int32))
    assert torch.equal(out.view(torch.int32), wanted_out.view(torch.int32))


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_what_is_beyond_the_end_of_a_parameter_stays_zero_and_changes_nothing(codec: BlockCompressor) -> None:
    values = drawn(1, 3, codec.block)
    values[1, 5:] = 0
    found = there_and_back(codec, values, [(1, 5)])
    assert (found[1, 5:] == 0).all()
    if isinstance(codec, Sign):
        torch.testing.assert_close(found[1, 0].abs(), values[1, :5].abs().mean())


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_zeros_and_the_smallest_numbers_do_not_become_anything_else(codec: BlockCompressor) -> None:
    assert (there_and_back(codec, torch.zeros(2, codec.block)) == 0).all()
    tiny = torch.full((1, codec.block), 1e-44)
    assert (there_and_back(codec, tiny).abs() <= 1e-40).all()


@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_seen_in_the_sum(codec: BlockCompressor, bad: float) -> None:
    values = drawn(2, 2, codec.block)
    values[1, 3], values[1, 9:] = bad, 0
    found = there_and_back(codec, values, [(1, 9)])
    assert found[0].isfinite().all()
    assert not found[1, :9].isfinite().all()
    assert (found[1, 9:] == 0).all()  # no parameter's: nothing may get stuck there


def test_what_overflows_fp16_is_sent_as_its_largest_number_and_the_rest_stays() -> None:
    values = torch.full((1, 16), 1e6)
    found = there_and_back(Cast("fp16"), values)
    assert (found == 65504).all()
    residual, sent = values.clone(), torch.zeros_like(values)
    for _ in range(20):
        now = there_and_back(Cast("fp16"), residual)
        sent, residual = sent + now, residual - now
    torch.testing.assert_close(sent, values)


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(CODECS), st.integers(0, 10**6))
def test_with_feedback_the_mean_of_what_is_sent_is_the_gradient(codec: BlockCompressor, seed: int) -> None:
    """A gradient that stays the same: the sum of the residuals can't grow, so the mean of what was sent meets it."""
    values, steps = drawn(seed, 2, codec.block), 200
    residual, sent = torch.zeros_like(values), torch.zeros_like(values)
    for _ in range(steps):
        wanted = values + residual
        now = there_and_back(codec, wanted)
        residual, sent = wanted - now, sent + now
    assert (sent / steps - values).norm() < 0.1 * values.norm()


def test_stochastic_rounding_has_no_bias() -> None:
    codec = Int8(rounding="stochastic")
    values = drawn(3, 1, codec.block)
    noises = [uniform(seed, 0, values.numel()).view_as(values) for seed in range(2000)]
    found = torch.zeros_like(values)
    for noise in noises:
        out = torch.empty_like(values)
        codec.decode(codec.encode(values, (), noise), (), out)
        found += out
    assert (found / len(noises) - values).abs().max() < values.abs().max() / 127 * 0.06


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**63 - 1), st.integers(0, 10**6), st.integers(0, 5000), st.integers(0, 5000))
def test_random_numbers_are_those_of_their_position(seed: int, start: int, skipped: int, count: int) -> None:
    all_of_it = uniform(seed, start, skipped + count)
    assert torch.equal(all_of_it[skipped:], uniform(seed, start + skipped, count))
    assert ((all_of_it >= 0) & (all_of_it < 1)).all()


def test_random_numbers_are_spread_evenly_and_differ_between_seeds() -> None:
    one, other = uniform(1, 0, 100_000), uniform(2, 0, 100_000)
    for numbers in (one, other):
        assert abs(numbers.mean() - 0.5) < 0.005
        counts = torch.histc(numbers, bins=16, min=0, max=1)
        assert (counts - 6250).abs().max() < 400
    assert abs(torch.corrcoef(torch.stack([one, other]))[0, 1]) < 0.02


# -- topk --------------------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 120_000), st.floats(0.0005, 1.0), st.integers(0, 2**62))
def test_topk_finds_exactly_the_largest_whatever_the_sample(
    seed: int, elements: int, share: float, sample: int
) -> None:
    values = torch.randn(elements, generator=torch.Generator().manual_seed(seed)) ** 3
    count = TopK(share=share).count(elements, 0)
    places = largest(values, count, sample)
    assert places.numel() == count == len(set(places.tolist()))
    assert torch.equal(places, places.sort().values)
    smallest_sent = values[places].abs().min()
    rest = torch.ones(elements, dtype=torch.bool).index_fill_(0, places, False)
    assert not rest.any() or values[rest].abs().max() <= smallest_sent


def test_topk_sees_what_is_not_a_number_and_values_that_the_sample_misses() -> None:
    values = torch.zeros(100_000)
    values[[17, 40_001]] = torch.tensor([math.nan, 5.0])
    assert {17, 40_001} <= set(largest(values, 3, 0).tolist())


def test_topks_share_falls_in_its_warmup_and_never_to_nothing() -> None:
    topk = TopK(share=0.01, warmup=4)
    assert [topk.count(10_000, steps) for steps in range(6)] == [2500, 1119, 500, 224, 100, 100]
    assert TopK(share=0.001).count(10, 0) == 1


# -- powersgd ----------------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(4, 40), st.integers(4, 40), st.integers(1, 4))
def test_powersgd_finds_a_matrix_of_its_rank(seed: int, rows: int, columns: int, rank: int) -> None:
    drawn_from = torch.Generator().manual_seed(seed)
    m = torch.randn(rows, rank, generator=drawn_from) @ torch.randn(rank, columns, generator=drawn_from)
    p = orthonormal(first_factor(columns, rank, seed) @ m.t())
    torch.testing.assert_close(p.t() @ (p @ m), m, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(p @ p.t(), torch.eye(rank), atol=1e-5, rtol=0)


def test_a_matrix_of_zeros_has_orthonormal_rows_too() -> None:
    p = orthonormal(torch.zeros(3, 7))
    torch.testing.assert_close(p @ p.t(), torch.eye(3))


def test_powersgd_leaves_vectors_and_small_matrices_alone() -> None:
    compression = Compression(PowerSgd(rank=4))
    assert compression.compressor("bias", (100,)) is None
    assert compression.compressor("column", (100, 1)) is None
    assert compression.compressor("small", (7, 9)) is None  # 4 · 16 = 64 numbers for 63
    assert compression.compressor("weight", (64, 32)) == PowerSgd(rank=4)
    assert compression.compressor("kernel", (16, 3, 3, 3)) == PowerSgd(rank=4)


# -- rules, and what is refused ----------------------------------------------------------------------------------------


def test_the_first_pattern_that_fits_decides() -> None:
    compression = Compression({"*.bias": None, "head.*": "sign", "*": Int8(block=64)})
    assert compression.compressor("blocks.0.bias", (3,)) is None
    assert compression.compressor("head.weight", (3, 3)) == Sign()
    assert compression.compressor("blocks.0.weight", (3, 3)) == Int8(block=64)
    assert Compression({"head.*": "sign"}).compressor("body", (3,)) is None
    assert tuple(COMPRESSORS) == known_names.COMPRESSORS
    assert all(Compression(name).compressor("w", (64, 64)) == found for name, found in COMPRESSORS.items())


REFUSED = {
    "TopK(share=0)": lambda: TopK(share=0),
    "TopK(share=2)": lambda: TopK(share=2),
    "TopK(momentum=1)": lambda: TopK(momentum=1),
    "TopK(warmup=-1)": lambda: TopK(warmup=-1),
    "PowerSgd(rank=0)": lambda: PowerSgd(rank=0),
    "rank too large": lambda: Compression(PowerSgd(rank=8)).compressor("head.weight", (5, 100)),
    "Int8(block=48)": lambda: Int8(block=48),
    "Int8(block=8)": lambda: Int8(block=8),
    "Int8(rounding=…)": lambda: Int8(rounding="up"),  # type: ignore[arg-type]
    "Cast(to=…)": lambda: Cast("fp8"),  # type: ignore[arg-type]
    "no such name": lambda: Compression("gzip"),
    "no rules": lambda: Compression({}),
    "no pattern": lambda: Compression({3: "int8"}),
    "start_after": lambda: Compression("int8", start_after=-1),
    "feedback": lambda: Compression("int8", feedback=None),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_makes_no_sense_is_refused_in_one_line(what: str) -> None:
    with pytest.raises(ConfigError) as error:
        REFUSED[what]()
    assert len(str(error.value).splitlines()) == 1


def test_a_rank_that_a_matrix_cant_have_is_refused_with_its_name_and_a_way_out() -> None:
    with pytest.raises(ConfigError, match=r"'head.weight', a matrix of 5 × 100 .* at most 5; .*'head.weight': None"):
        Compression(PowerSgd(rank=8)).compressor("head.weight", (5, 100))


@pytest.mark.parametrize("to", ["bf16", "fp16"])
@pytest.mark.parametrize("odd", [None, 1e38, 7e4, math.inf, math.nan], ids=str)
@pytest.mark.parametrize("lanes", [1, 2, 3, 5])
def test_the_short_ways_of_half_precision_have_the_bits_of_the_plain_ones(
    to: Literal["bf16", "fp16"], odd: float | None, lanes: int
) -> None:
    codec, generator = Cast(to), torch.Generator().manual_seed(lanes)
    rows, partial = 6, [(5, 7)]

    def gradient() -> Tensor:
        values = torch.randn(rows, codec.block, generator=generator)
        values[5, 7:] = 0
        if odd is not None:
            values[2, 3] = odd
        return values

    for residual in (None, gradient()):
        plain, short = (values := gradient()).clone(), values.clone()
        sent = BlockCodec.split(codec, plain, partial, None, None if residual is None else residual.clone())
        assert bits(codec.split(short, partial, None, residual)) == bits(sent)
        assert bits(short) == bits(plain)
    parts = [codec.encode(gradient(), partial) for _ in range(lanes)]
    along = {1: (), 2: ((0, 1),), 3: ((0, 1), (0, 2)), 5: ((0, 1), (2, 3), (0, 2), (0, 4))}[lanes]
    residual = gradient()
    owned = [OwnedRows(partial, None, residual.clone(), *torch.empty(2, rows, codec.block)) for _ in range(2)]
    assert bits(codec.sum(parts, along, owned[0])) == bits(BlockCodec.sum(codec, parts, along, owned[1]))
    assert bits(owned[0].lost) == bits(owned[1].lost)
    assert bits(owned[0].out) == bits(owned[1].out)


def bits(tensor: Tensor) -> bytes:
    """What is not a number is one number: which one is the processor's affair."""
    if tensor.is_floating_point():
        tensor = tensor.nan_to_num(nan=12345.0, posinf=None, neginf=None) if tensor.isnan().any() else tensor
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()
