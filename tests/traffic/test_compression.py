"""The bytes of compressed gradients, counted where they are sent: the formula's, and as small as promised."""

from __future__ import annotations

from math import ceil
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from paceline import Engine, World
from paceline.collectives.byte_count import Traffic
from paceline.compression import BlockCompressor, Cast, Compression, Int8, PowerSgd, Sign, TopK
from paceline.strategies.server import ParameterServer
from tests.workers import run_workers

pytestmark = pytest.mark.workers

SHAPES = [(256, 128), (256,), (128, 256), (128,)]
ELEMENTS = sum(torch.Size(shape).numel() for shape in SHAPES)
MATRICES = [shape for shape in SHAPES if len(shape) == 2]
WORKERS = 4


def trains(world: World, *, lanes: int = WORKERS, **job: Any) -> Traffic:
    """The traffic of the last step."""
    with Engine(world=world, lanes=lanes, backend="gloo", bucket_mib=0.05, **job) as engine:
        model = nn.Sequential(nn.Linear(128, 256), nn.Tanh(), nn.Linear(256, 128))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.randn(3 * lanes * 2, 128)
        model, optimizer, loader = engine.prepare(model, optimizer, DataLoader(TensorDataset(x, x), batch_size=2))
        for given, wanted in loader:
            engine.backward(F.mse_loss(model(given), wanted))
            optimizer.step()
            optimizer.zero_grad()
        return engine.traffic


def sent(compression: Any, *, workers: int = WORKERS, **job: Any) -> int:
    """By all workers, in messages of gradients. What one collective of the vote moves is not among them."""
    results = run_workers(trains, workers, compression=compression, **job)
    for result in results:
        assert result.error is None, result.traceback
    return sum(result.value.sent_bytes for result in results)


PLAIN = 2 * (WORKERS - 1) * ELEMENTS * 4
"""Of all workers together: a reduce-scatter and an all-gather."""


def test_uncompressed_gradients_are_what_compressed_ones_are_compared_with() -> None:
    assert sent(None) == PLAIN


@pytest.mark.parametrize(
    ("codec", "share"), [(Int8(), 0.27), (Cast("bf16"), 0.5), (Cast("fp16"), 0.5), (Sign(), 1 / 32 * 1.06)], ids=str
)
def test_block_codecs_move_their_rows_both_ways(codec: BlockCompressor, share: float) -> None:
    rows = sum(ceil(torch.Size(shape).numel() / codec.block) for shape in SHAPES)
    found = sent(codec)
    assert found == 2 * (WORKERS - 1) * rows * codec.row_bytes
    assert found <= share * PLAIN


def test_powersgd_moves_its_factors() -> None:
    """Vectors are left alone, so they are taken out of both sides."""
    rank = 4
    left_alone = {"*.bias": None, "*": PowerSgd(rank)}
    vectors = 2 * (WORKERS - 1) * 4 * (256 + 128)
    found = sent(left_alone) - vectors
    of_plain = sum(rank * (n + m) for n, m in MATRICES) / sum(n * m for n, m in MATRICES)
    matrices = PLAIN - vectors
    assert abs(found / matrices - of_plain) <= 0.05 * of_plain


def test_topk_moves_payloads_of_two_hundredths() -> None:
    found = sent(TopK(share=0.01))
    payload = 8 * sum(ceil(0.01 * torch.Size(shape).numel()) for shape in SHAPES)
    assert found == WORKERS * (WORKERS - 1) * payload
    assert payload <= 0.021 * ELEMENTS * 4


def test_a_worker_with_two_lanes_sends_the_payloads_of_both() -> None:
    """And gets one sum back: the price of bits that don't know who has which lane."""
    rows = sum(ceil(torch.Size(shape).numel() / 128) for shape in SHAPES)
    found = sent("int8", workers=2, lanes=4)
    there, back = 4 / 2 * rows, rows
    assert found == (there + back) * Int8().row_bytes


# -- to servers --------------------------------------------------------------------------------------------------------


def moved(compression: Any, mode: Literal["update", "aggregate"], *, workers: int, servers: int) -> tuple[int, int]:
    """By all workers in the last step: bytes of pushes, and of what came back, weights or sums."""
    job = {"strategy": ParameterServer(mode=mode), "compression": compression, "lanes": WORKERS}
    results = run_workers(trains, workers, servers=servers, **job)
    for result in results:
        assert result.error is None, result.traceback
    answer = "weights" if mode == "update" else "sum"
    counts = [result.value for result in results[:workers]]
    pushed = sum(count.of("push").sent_bytes for count in counts)
    return pushed, sum(count.of(answer).received_bytes for count in counts)


@pytest.mark.parametrize(("workers", "servers"), [(4, 1), (2, 2)])
@pytest.mark.parametrize("codec", [Int8(), Cast("bf16"), Sign()], ids=str)
def test_every_lane_pushes_its_rows_to_the_servers(codec: BlockCompressor, workers: int, servers: int) -> None:
    payload = codec.row_bytes * sum(ceil(torch.Size(shape).numel() / codec.block) for shape in SHAPES)
    assert moved(codec, "update", workers=workers, servers=servers) == (WORKERS * payload, workers * 4 * ELEMENTS)
    assert moved(codec, "aggregate", workers=workers, servers=servers) == (WORKERS * payload, workers * payload)


def test_every_lane_pushes_its_largest_values_to_the_servers() -> None:
    payload = 8 * sum(ceil(0.01 * torch.Size(shape).numel()) for shape in SHAPES)
    assert moved(TopK(share=0.01), "update", workers=2, servers=2) == (WORKERS * payload, 2 * 4 * ELEMENTS)


def test_before_it_starts_pushes_have_the_blocks_of_what_comes() -> None:
    """Roots, as without compression, but every gradient begins at a block: here all fill theirs."""
    late = Compression("int8", start_after=3)
    assert moved(late, "update", workers=2, servers=1) == moved(None, "update", workers=2, servers=1)


def test_before_it_starts_gradients_move_whole() -> None:
    assert sent(Compression("int8", start_after=3)) == PLAIN
