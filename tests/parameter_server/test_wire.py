"""What travels between workers and servers, and what is refused."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.parameter_server.key_ranges import KeyTable, plan_keys
from paceline.parameter_server.wire import (
    ALL,
    DTYPES,
    FIELDS,
    LOADS_WEIGHTS,
    Close,
    Header,
    Kind,
    Protocol,
    WireError,
    pack,
    text_of,
    text_payload,
    unpack,
)
from paceline.sharding.bucket import GradientSpec, plan_buckets
from paceline.sharding.flat_layout import FlatLayout


def table_of(*sizes: int, servers: int = 2) -> KeyTable:
    """One key for each size, in this order."""
    specs = [GradientSpec((size,), torch.float32, torch.device("cpu")) for size in sizes]
    names = tuple(f"p{place}" for place in range(len(sizes)))
    layout = FlatLayout(names, tuple(spec.shape for spec in specs), tuple(spec.dtype for spec in specs))
    return plan_keys(layout, plan_buckets(specs, range(len(specs)), 1, aligned=False), servers=servers)


TABLE = table_of(100, 200, 300)
PROTOCOL = Protocol(TABLE, workers=2, lanes=4)
MINE = TABLE.of_server(0)[0]
OTHER = TABLE.of_server(1)[0]


def push(**changes: Any) -> Header:
    header = Header(Kind.PUSH, sender=1, digest=TABLE.digest, round=3, lane=2, key=MINE.number, flags=1)
    return replace(header, elements=MINE.elements, **changes)


headers = st.builds(
    Header,
    kind=st.sampled_from(Kind),
    sender=st.integers(0, 9),
    digest=st.integers(0, 2**63 - 1),
    round=st.integers(0, 2**62),
    lane=st.integers(0, 2**31),
    key=st.integers(-1, 2**31),
    version=st.integers(0, 2**62),
    complete=st.integers(-1, 2**62),
    elements=st.integers(0, 2**62),
    dtype=st.sampled_from(DTYPES),
    weight=st.floats(allow_nan=False),
    flags=st.integers(0, 2**63 - 1),
)


@settings(max_examples=100, deadline=None)
@given(headers)
def test_a_header_survives_the_wire(header: Header) -> None:
    packed = pack(header)
    assert (packed.dtype, packed.shape) == (torch.int64, (FIELDS,))
    assert unpack(packed, header.sender) == header


@pytest.mark.parametrize("weight", [0.1, -0.0, math.inf, 5e-324])
def test_a_weight_keeps_its_bits(weight: float) -> None:
    assert math.copysign(1, unpack(pack(push(weight=weight)), 1).weight) == math.copysign(1, weight)
    assert unpack(pack(push(weight=weight)), 1).weight == weight
    assert math.isnan(unpack(pack(push(weight=math.nan)), 1).weight)


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("place", "value", "text"),
    [
        (0, 1, "rank 1 sent a header whose magic number is 0x1, expected 0x706163656c696e65; it is not a worker"),
        (1, 9, "whose format is 9, expected 1; .* another version of paceline"),
        (2, 99, "whose kind is 99, expected 1 to 13"),
        (4, 7, "whose sender is 7, expected 1"),
        (11, -1, "whose dtype is -1, expected 0 to 5"),
    ],
)
def test_a_header_that_is_not_ours_is_refused_with_field_expected_and_found(place: int, value: int, text: str) -> None:
    packed = pack(push())
    packed[place] = value
    with pytest.raises(WireError, match=text):
        unpack(packed, 1)


def test_a_header_of_another_length_is_refused() -> None:
    with pytest.raises(WireError, match="rank 1 sent a header whose length is 3, expected 16"):
        unpack(torch.zeros(3, dtype=torch.int64), 1)


def test_what_fits_is_let_through() -> None:
    good = [
        push(),
        Header(Kind.OPEN, 0, TABLE.digest, elements=4, dtype=torch.int64),
        Header(Kind.OPEN, 0, TABLE.digest),
        Header(Kind.PULL, 0, TABLE.digest, key=ALL),
        Header(Kind.CLOSE, 0, TABLE.digest, elements=12, dtype=torch.float64),
        Header(Kind.WEIGHTS, 2, TABLE.digest, key=MINE.number, elements=MINE.elements),
        Header(Kind.LOAD, 0, TABLE.digest, key=MINE.number, elements=MINE.elements, flags=LOADS_WEIGHTS),
        Header(Kind.LOAD, 2, TABLE.digest, key=MINE.number, flags=LOADS_WEIGHTS),
        Header(Kind.STATE, 0, TABLE.digest, key=MINE.number),
        Header(Kind.NORMS, 3, TABLE.digest, elements=3, dtype=torch.float64),
        Header(Kind.ERROR, 3, TABLE.digest, elements=3, dtype=torch.uint8),
    ]
    assert [PROTOCOL.check(header, server=0) for header in good] == good


@pytest.mark.parametrize(
    ("header", "text"),
    [
        (
            push(digest=5),
            f"worker 1 sent PUSH of round 3 whose layout digest is 5, expected {TABLE.digest}; the models",
        ),
        (push(round=-1), "worker 1 sent PUSH of round -1 whose round is -1, expected 0 or more"),
        (push(lane=4), "whose lane is 4, expected 0 to 3"),
        (push(lane=-1), "whose lane is -1, expected 0 to 3"),
        (push(key=3), "whose key is 3, expected 0 to 2"),
        (push(key=ALL), "whose key is -1, expected 0 to 2"),
        (push(key=OTHER.number), rf"whose key is key {OTHER.number} \(p\d\), expected one of server 0"),
        (replace(push(), elements=7), f"whose elements is 7, expected {MINE.elements}; the models differ"),
        (push(dtype=torch.float64), "whose dtype is torch.float64, expected torch.float32"),
        (push(flags=2), "whose flags is 0x2, expected 0 to 0x1"),
        (push(weight=math.nan), "whose weight is nan, expected a number, 0 or more"),
        (push(weight=-1.0), "whose weight is -1.0, expected a number"),
        (push(version=-1), "whose version is -1, expected 0 or more"),
        (push(complete=-2), "whose complete is -2, expected -1 or more"),
        (push(sender=2), "server 0 sent PUSH of round 3 whose kind is PUSH, expected one that server 0 may send"),
        (
            Header(Kind.WEIGHTS, 0, TABLE.digest, key=MINE.number, elements=MINE.elements),
            "worker 0 sent WEIGHTS of round 0 whose kind is WEIGHTS, expected one that worker 0 may send",
        ),
        (Header(Kind.OPEN, 0, TABLE.digest, elements=5, dtype=torch.int64), "whose elements is 5, expected 0 to 4"),
        (Header(Kind.OPEN, 0, TABLE.digest, elements=4), "whose dtype is torch.float32, expected torch.int64"),
        (Header(Kind.NORMS, 2, TABLE.digest, elements=9, dtype=torch.float64), "elements is 9, expected 0 to 3"),
        (
            Header(Kind.PULL, 0, TABLE.digest, elements=1),
            "worker 0 sent PULL of round 0 whose elements is 1, expected 0",
        ),
        (Header(Kind.STATE, 0, TABLE.digest), "whose key is -1, expected 0 to 2"),
    ],
)
def test_a_message_that_does_not_fit_names_sender_field_expected_and_found(header: Header, text: str) -> None:
    with pytest.raises(WireError, match=text):
        PROTOCOL.check(header, server=0)


def test_a_model_with_another_shape_is_told_to_be_built_alike() -> None:
    elsewhere = table_of(100, 200, 301)
    header = Header(Kind.OPEN, 1, elsewhere.digest)
    with pytest.raises(WireError, match="the models differ: build the same one, from the same seed and config"):
        PROTOCOL.check(header, server=0)


# -- payloads ----------------------------------------------------------------------------------------------------------


@settings(max_examples=50, deadline=None)
@given(
    st.builds(
        Close,
        lanes=st.lists(st.tuples(st.integers(0, 100), st.floats(0, 1e9)), max_size=5).map(tuple),
        samples=st.floats(0, 1e9),
        max_norm=st.none() | st.floats(0, 1e9),
        skip=st.booleans(),
        settings=st.lists(st.floats(allow_nan=False), max_size=5).map(tuple),
    )
)
def test_the_end_of_a_round_survives_the_wire(close: Close) -> None:
    assert Close.unpacked(close.packed()) == close


@pytest.mark.parametrize("values", [[], [1.0, 2.0], [3.0, 1.0, 1.0, 0.0, 1.0, 1.0], [-1.0, 1.0, 1.0, 0.0]])
def test_the_end_of_a_round_with_missing_numbers_is_refused(values: list[float]) -> None:
    with pytest.raises(WireError, match=f"a CLOSE has {len(values)} numbers"):
        Close.unpacked(torch.tensor(values, dtype=torch.float64))


def test_text_survives_the_wire() -> None:
    assert text_of(text_payload("Σ weight of worker 3")) == "Σ weight of worker 3"
    assert text_of(text_payload("x" * 10**6)) == "x" * 2**16
    assert text_of(None) == ""
