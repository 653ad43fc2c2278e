"""Compressed pushes: wherever keys are cut, their sums are those of the whole bucket; what does not fit is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import Parameter

from paceline.compression import BlockCompressor, Cast, Compression, Compressor, Int8, Sign, TopK
from paceline.compression.block_range import BlockRange, OwnedSum, Span
from paceline.compression.topk import PLACE_DTYPE, add_lanes, largest
from paceline.parameter_server.clock import BoundedStaleness
from paceline.parameter_server.compressed_key import code_bytes, decoders, part_of_key
from paceline.parameter_server.server_core import ServerCore
from paceline.parameter_server.server_key import hold_keys
from paceline.parameter_server.wire import Close, Header, Kind, WireError, lanes_payload
from paceline.sharding.bucket import Bucket
from paceline.sharding.flat_layout import BLOCK
from paceline.strategies.server.space import Space, plan_spaces

SEED, ROUND = 7, 3
CODECS: list[BlockCompressor] = [Int8(), Int8(block=16, rounding="stochastic"), Cast("bf16"), Sign(block=64)]
shapes = st.lists(st.tuples(st.integers(1, 3), st.integers(1, BLOCK)), min_size=1, max_size=6)


def space_of(
    sizes: list[tuple[int, ...]], compressor: Compressor, *, servers: int = 1, key_bytes: int = 4 * BLOCK
) -> Space:
    parameters = [Parameter(torch.zeros(size)) for size in sizes]
    names = {id(parameter): f"p{place}" for place, parameter in enumerate(parameters)}
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    (space,) = plan_spaces(
        *([optimizer], names),
        workers=1, servers=servers, lanes=4, bucket_bytes=30_000, key_bytes=key_bytes,
        compression=Compression(compressor),
    )  # fmt: skip
    return space


def gradients(bucket: Bucket, lanes: int) -> dict[int, Tensor]:
    """Of each lane, with nothing in the gaps."""
    flats = {lane: torch.randn(bucket.elements) * 10.0 ** (lane - 2) for lane in range(lanes)}
    for flat in flats.values():
        for start, stop in bucket.gaps:
            flat[start:stop] = 0
    return flats


@settings(max_examples=40, deadline=None)
@given(shapes, st.sampled_from(CODECS), st.integers(1, 20 * BLOCK), st.integers(1, 5), st.integers(0, 10**6))
def test_keys_of_rows_add_up_to_the_sum_of_their_bucket(
    sizes: list[tuple[int, ...]], codec: BlockCompressor, key_bytes: int, lanes: int, seed: int
) -> None:
    torch.manual_seed(seed)
    space = space_of(sizes, codec, key_bytes=key_bytes)
    names = space.table.layout.names
    held = decoders(space.table.keys, names, seed=SEED, feedback=True)
    for number, bucket in enumerate(space.buckets):
        spans = tuple(Span(names[entry.parameter], 0, entry.elements, entry.offset) for entry in bucket.entries)
        whole = BlockRange(codec, spans, bucket.elements, SEED)
        owner, keys = OwnedSum(whole, feedback=True), space.table.of_bucket(number)
        assert [key.stop for key in keys] == [*(key.start for key in keys[1:]), bucket.elements]
        for round in (ROUND, ROUND + 1):  # the second with residuals of the first
            rows = {
                lane: codec.encode(flat.view(-1, codec.block), whole.partial, whole.noise(round, lane, flat.device))
                for lane, flat in gradients(bucket, lanes).items()
            }
            out = torch.empty(bucket.elements)
            back = owner.add(round, rows, out)
            owner.commit([True] * len(spans))
            for key in keys:
                total = held[key.number].add(round, {lane: part_of_key(key, row) for lane, row in rows.items()})
                held[key.number].commit((1 << len(key.pieces)) - 1)
                assert torch.equal(total, key.of_bucket(out))
                sent = held[key.number].rows
                assert sent is not None
                assert torch.equal(sent, part_of_key(key, back))
                assert code_bytes(key) == (sent.numel(), sent.numel())
        for key in keys:
            kept = held[key.number].residual()
            assert kept is not None
            assert all(
                torch.equal(mine, owners)
                for mine, owners in zip(
                    key.gradient_views(kept), key.gradient_views(key.of_bucket(owner.residual)), strict=True
                )
            )


@settings(max_examples=40, deadline=None)
@given(shapes, st.integers(1, 20 * BLOCK), st.integers(1, 5), st.floats(0.001, 1.0), st.integers(0, 10**6))
def test_keys_of_places_add_up_to_the_sum_of_their_bucket(
    sizes: list[tuple[int, ...]], key_bytes: int, lanes: int, share: float, seed: int
) -> None:
    torch.manual_seed(seed)
    space = space_of(sizes, TopK(share=share), key_bytes=key_bytes)
    held = decoders(space.table.keys, space.table.layout.names, seed=SEED, feedback=True)
    for number, bucket in enumerate(space.buckets):
        chosen = {}
        for lane, flat in gradients(bucket, lanes).items():
            places = largest(flat, max(1, int(share * flat.numel())), seed)
            chosen[lane] = torch.stack([places.to(PLACE_DTYPE), flat[places].view(PLACE_DTYPE)])
        total = torch.empty(bucket.elements)
        add_lanes(chosen, total)
        for key in space.table.of_bucket(number):
            codes = {lane: part_of_key(key, both) for lane, both in chosen.items()}
            least, most = code_bytes(key)
            assert all(least <= code.numel() <= most for code in codes.values())
            assert torch.equal(held[key.number].add(ROUND, codes), key.of_bucket(total))


# -- what does not fit -------------------------------------------------------------------------------------------------


class Pushing:
    """Worker 0 with lanes 0 and 1, and the core of its server, of one key."""

    def __init__(self, compressor: Compressor) -> None:
        self.space = space = space_of([(100,)], compressor)
        (self.key,) = keys = space.table.keys
        held = hold_keys(keys, space.parameters, space.optimizers, space.settings)
        made = decoders(keys, space.table.layout.names, seed=SEED, feedback=True)
        self.core = ServerCore(space.protocol, 0, held, space.settings, BoundedStaleness(0), decoders=made)
        self.say(Kind.OPEN, lanes_payload([0, 1]))

    def say(self, kind: Kind, payload: Tensor | None = None, **about: int) -> None:
        header = Header(kind, 0, self.space.table.digest, **about)  # type: ignore[arg-type]
        list(self.core.handle(header if payload is None else header.holding(payload), payload))

    def push(self, lane: int, payload: Tensor | None) -> None:
        self.say(Kind.PUSH, payload, key=0, lane=lane, flags=1)

    def close(self) -> None:
        settings = tuple(self.space.settings.read())
        self.say(Kind.CLOSE, Close(((0, 1.0), (1, 1.0)), 2.0, settings=settings).packed())


ROWS = torch.zeros(132, dtype=torch.uint8)


def test_a_round_of_rows_is_applied_once_and_needs_those_of_every_lane() -> None:
    pushing = Pushing(Int8())
    pushing.push(0, ROWS)
    with pytest.raises(WireError, match=r"worker 0 closed round 0 without a push of its root 1 for key 0 \(p0\)"):
        pushing.close()
    pushing = Pushing(Int8())
    for lane in (0, 1, 1):
        pushing.push(lane, ROWS)
    pushing.close()
    assert pushing.core.complete(0) == 0


def test_rows_of_another_length_and_none_are_refused() -> None:
    for payload in (ROWS[:-1], None):
        with pytest.raises(WireError, match=r"elements is (131|0), expected 132"):
            Pushing(Int8()).push(0, payload)
    with pytest.raises(WireError, match=r"dtype is torch.uint8, expected torch.float32"):
        pushing = Pushing(Int8())
        key = replace(pushing.key, compressor=None)
        pushing.space.protocol._check_payload(
            Header(Kind.PUSH, 0, 0, key=0, elements=key.elements, dtype=torch.uint8), key
        )


def test_topk_may_choose_nothing_of_a_key() -> None:
    pushing = Pushing(TopK())
    pushing.push(0, None)
    pushing.push(1, torch.tensor([5, 0], dtype=torch.int32).view(torch.uint8))
    pushing.close()
    assert pushing.core.complete(0) == 0


def test_lanes_of_a_round_are_compressed_or_not_but_all_alike() -> None:
    pushing = Pushing(Int8())
    pushing.push(0, ROWS)
    with pytest.raises(WireError, match=r"lane 1 of round 0 is not compressed, those of \[0\] are"):
        pushing.push(1, torch.zeros(pushing.key.gradient_elements))
