"""Token files: what is opened is what was built, or an error that says why; samples are views of it."""

from __future__ import annotations

import hashlib
import os
import pickle
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from paceline.data.token_build import HEADER_BYTES, MAGIC, VERSION, TokenHeader
from paceline.data.token_file import TokenFile
from paceline.errors import ConfigError, DataError

TEXT = bytes(range(65, 91)) * 4


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """104 tokens, the alphabet four times."""
    (tmp_path / "alphabet.txt").write_bytes(TEXT)
    path = tmp_path / "alphabet.tokens"
    TokenFile.build(path, [tmp_path / "alphabet.txt"], description="four alphabets")
    return path


def numbers(path: Path, count: int, vocabulary: int) -> TokenFile:
    """A file with the tokens 0, 1, 2 …"""
    (path.parent / "any.txt").write_text("any")
    return TokenFile.build(path, [path.parent / "any.txt"], lambda text: range(count), vocabulary=vocabulary)


# -- the format --------------------------------------------------------------------------------------------------------


def test_a_token_file_holds_what_it_was_built_of(path: Path) -> None:
    with TokenFile(path) as file:
        assert bytes(file.tokens.tolist()) == TEXT
        assert (len(file), file.vocabulary, file.dtype, file.description) == (104, 256, torch.uint8, "four alphabets")
        assert repr(file) == f"TokenFile('{path}': 104 tokens, uint8, 256 ids)"


def test_tokens_stand_little_endian_after_one_page_of_header(tmp_path: Path) -> None:
    numbers(tmp_path / "n.tokens", 3, vocabulary=300)
    written = (tmp_path / "n.tokens").read_bytes()
    assert written.startswith(MAGIC)
    assert written[HEADER_BYTES:] == b"\0\0\1\0\2\0"


@pytest.mark.parametrize(
    ("vocabulary", "dtype"),
    [
        (1, torch.uint8),
        (256, torch.uint8),
        (257, torch.uint16),
        (65536, torch.uint16),
        (65537, torch.int32),
        (2**31, torch.int32),
    ],
)
def test_tokens_take_the_smallest_type_that_holds_the_vocabulary(
    tmp_path: Path, vocabulary: int, dtype: torch.dtype
) -> None:
    count = min(vocabulary, 70_000)
    file = numbers(tmp_path / "n.tokens", count, vocabulary)
    assert file.dtype == dtype
    assert file.tokens.tolist() == list(range(count))


@pytest.mark.parametrize(
    ("vocabulary", "text"), [(0, "vocabulary=0 has no token in it"), (2**31 + 1, "more than a token file can hold")]
)
def test_a_vocabulary_that_no_type_holds_is_refused(tmp_path: Path, vocabulary: int, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        numbers(tmp_path / "n.tokens", 1, vocabulary)


def test_a_description_that_does_not_fit_the_header_is_refused_before_anything_is_encoded(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(ConfigError, match=r"the description is too long .* it makes 5,\d\d\d bytes, and 4,072 fit"):
        TokenFile.build(tmp_path / "a.tokens", [tmp_path / "a.txt"], pytest.fail, description="x" * 5000)


# -- opening -----------------------------------------------------------------------------------------------------------


def with_header(**fields: object) -> Callable[[bytes], bytes]:
    """A header that says something else, with a crc32 that fits."""

    def change(whole: bytes) -> bytes:
        page = TokenHeader("uint8", 104, 256, "0" * 64).pack()
        text = page[24:].rstrip(b"\0")
        for name, value in fields.items():
            old = {"version": f'"version": {VERSION}', "dtype": '"dtype": "uint8"', "tokens": '"tokens": 104'}[name]
            text = text.replace(old.encode(), f'"{name}": {value}'.encode())
        page = struct.pack("<16sII", MAGIC, 0, len(text)) + text.ljust(HEADER_BYTES - 24, b"\0")
        return page[:16] + struct.pack("<I", zlib.crc32(page)) + page[20:] + whole[HEADER_BYTES:]

    return change


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda whole: b"", r"is not a token file: it should begin with b'paceline tokens\\n' but begins with b''"),
        (lambda whole: b"once upon a time, a text", "but begins with b'once upon a time'; give the path of one"),
        (lambda whole: whole[:100], "was cut short: its header has 100 of 4,096 bytes; build it again"),
        (lambda whole: whole[:-4], "make 4,200 bytes with the header, but the file has 4,196; build it again"),
        (lambda whole: whole + b"more", "has grown: 104 tokens of type uint8 make 4,200 bytes .* has 4,204"),
        (with_header(version=7), "version 7 of the format, and this paceline reads version 1; build it again"),
        (with_header(dtype='"float"'), "header that can't be used: dtype 'float' is not one of uint8, uint16, int32"),
        (with_header(tokens=0), "header that can't be used: a token file holds at least one token"),
    ],
    ids=["empty", "text", "cut header", "cut tokens", "grown", "version", "dtype", "no tokens"],
)
def test_a_file_that_is_not_whole_is_refused_with_what_was_expected(
    path: Path, damage: Callable[[bytes], bytes], text: str
) -> None:
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError, match=text) as caught:
        TokenFile(path)
    assert str(path) in str(caught.value)


def test_a_file_that_is_not_there_is_refused_with_how_to_make_it(tmp_path: Path) -> None:
    text = f"there is no token file {tmp_path}/none; build it with TokenFile.build or `paceline data tokenize`"
    with pytest.raises(DataError, match=text):
        TokenFile(tmp_path / "none")
    with pytest.raises(DataError, match=f"{tmp_path} can't be opened: it is a folder"):
        TokenFile(tmp_path)


def test_no_bit_of_the_header_can_change_unseen(path: Path) -> None:
    whole = path.read_bytes()
    with path.open("r+b", buffering=0) as file:
        for place in range(HEADER_BYTES):
            os.pwrite(file.fileno(), bytes([whole[place] ^ 1 << place % 8]), place)
            with pytest.raises(DataError, match=r"is not a token file|has a damaged header: its crc32 is"):
                TokenFile(path)
            os.pwrite(file.fileno(), whole[place : place + 1], place)
    TokenFile(path).verify()


def test_a_changed_token_is_found_by_verify(path: Path) -> None:
    file = TokenFile(path)
    file.verify()
    with path.open("r+b") as out:
        out.seek(HEADER_BYTES + 50)
        out.write(b"?")
    right = hashlib.sha256(TEXT).hexdigest()[:16]
    with pytest.raises(DataError, match=rf"alphabet.tokens is damaged: .* but {right} was recorded; build it again"):
        file.verify()
    with pytest.raises(DataError, match="is damaged"):
        TokenFile(path).verify()


def test_a_file_larger_than_memory_opens_at_once(tmp_path: Path) -> None:
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    header = TokenHeader("uint8", 3 * memory, 256, "0" * 64)
    (tmp_path / "large.tokens").write_bytes(header.pack())
    os.truncate(tmp_path / "large.tokens", header.file_bytes)  # a hole: it takes no room on the disk
    assert TokenFile(tmp_path / "large.tokens").tokens[-1] == 0


def test_writing_to_the_tokens_does_not_write_to_the_file(path: Path) -> None:
    before = path.read_bytes()
    file = TokenFile(path)
    file.tokens.fill_(0)
    assert path.read_bytes() == before
    file.verify()


def test_views_outlive_the_file_they_came_from(path: Path) -> None:
    with TokenFile(path) as file:
        view, samples = file.tokens[:26], file.sequences(8)
    with pytest.raises(ConfigError, match=r"alphabet.tokens is closed; open it again with TokenFile\(path\)"):
        _ = file.tokens
    path.unlink()
    assert bytes(view.tolist()) == TEXT[:26]
    assert bytes(samples[0][0].tolist()) == TEXT[:8]


def test_closing_leaves_neither_a_map_nor_an_open_file(path: Path) -> None:
    with TokenFile(path) as file:
        assert str(path) in Path("/proc/self/maps").read_text()
        file.tokens.sum()
    assert str(path) not in Path("/proc/self/maps").read_text()
    assert not [fd for fd in Path("/proc/self/fd").iterdir() if fd.exists() and fd.resolve() == path]


def test_a_token_file_and_its_samples_travel_as_a_path(path: Path) -> None:
    samples = TokenFile(path).sequences(8, stride=3)
    there = pickle.loads(pickle.dumps(samples))  # noqa: S301 -- as loader processes do
    assert len(pickle.dumps(samples)) < 1000
    assert [x.tolist() for x, _ in map(there.__getitem__, range(len(there)))] == [
        x.tolist() for x, _ in map(samples.__getitem__, range(len(samples)))
    ]


def test_a_file_that_was_replaced_meanwhile_is_not_taken_for_the_same(path: Path) -> None:
    file = TokenFile(path)
    sent = pickle.dumps(file)
    numbers(path, 10, vocabulary=256)
    with pytest.raises(DataError, match=r"was replaced since it was opened; build token files before training begins"):
        pickle.loads(sent)  # noqa: S301
    with pytest.raises(DataError, match="was replaced since it was opened; open it again"):
        file.verify()
    assert bytes(file.tokens.tolist()) == TEXT  # what is open stays what it was


# -- sequences ---------------------------------------------------------------------------------------------------------


def test_samples_look_like_the_drawing(tmp_path: Path) -> None:
    samples = numbers(tmp_path / "n.tokens", 10, vocabulary=256).sequences(length=4)
    assert len(samples) == 2
    assert [x.tolist() for x in samples[0]] == [[0, 1, 2, 3], [1, 2, 3, 4]]
    assert [x.tolist() for x in samples[1]] == [[4, 5, 6, 7], [5, 6, 7, 8]]
    assert {x.dtype for x in samples[1]} == {torch.int64}


def test_samples_may_overlap_and_may_come_without_targets(tmp_path: Path) -> None:
    samples = numbers(tmp_path / "n.tokens", 10, vocabulary=256).sequences(length=4, stride=3, targets=False)
    assert [samples[index].tolist() for index in range(len(samples))] == [[0, 1, 2, 3], [3, 4, 5, 6], [6, 7, 8, 9]]


@pytest.fixture(scope="module")
def hundred(tmp_path_factory: pytest.TempPathFactory) -> TokenFile:
    return numbers(tmp_path_factory.mktemp("hundred") / "n.tokens", 100, vocabulary=256)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 40), st.integers(1, 40), st.booleans())
def test_there_is_a_sample_wherever_one_fits(hundred: TokenFile, length: int, stride: int, targets: bool) -> None:
    samples = hundred.sequences(length, stride, targets)
    firsts = [samples[index][0] for index in range(len(samples))]
    starts = [start for start in range(0, 100, stride) if start + length + targets <= 100]
    assert [int(first[0] if targets else first) for first in firsts] == starts


@pytest.mark.parametrize("vocabulary", [256, 60_000, 70_000], ids=["uint8", "uint16", "int32"])
@pytest.mark.parametrize("loader_processes", [0, 2])
def test_loaders_hand_out_the_samples_as_int64_batches(tmp_path: Path, vocabulary: int, loader_processes: int) -> None:
    file = numbers(tmp_path / "n.tokens", vocabulary, vocabulary)
    length = vocabulary // 8 - 1
    batches = list(DataLoader(file.sequences(length), batch_size=4, num_workers=loader_processes))
    assert [x.shape for x, _ in batches] == [(4, length)] * 2
    assert {part.dtype for batch in batches for part in batch} == {torch.int64}
    assert torch.cat([x.flatten() for x, _ in batches]).tolist() == list(range(8 * length))
    assert torch.cat([y.flatten() for _, y in batches]).tolist() == list(range(1, 8 * length + 1))


def test_a_batch_fetched_at_once_is_the_batch_fetched_one_by_one(path: Path) -> None:
    samples = TokenFile(path).sequences(5, stride=2)
    together, alone = samples.__getitems__([7, 0, 7]), [samples[7], samples[0], samples[7]]
    assert [(x.tolist(), y.tolist()) for x, y in together] == [(x.tolist(), y.tolist()) for x, y in alone]


@pytest.mark.parametrize(
    ("length", "stride", "text"),
    [
        (104, None, "has 104 tokens, too few for a sequence of 104 and the one that follows; ask for a shorter length"),
        (0, 1, "length=0 and stride=1 must both be at least 1"),
        (4, 0, "length=4 and stride=0 must both be at least 1"),
    ],
)
def test_sequences_that_cannot_be_had_are_refused(path: Path, length: int, stride: int | None, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        TokenFile(path).sequences(length, stride)
    assert len(TokenFile(path).sequences(104, targets=False)) == 1
