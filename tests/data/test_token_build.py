"""Building token files: every byte of the text once and in order, with any number of processes, or a clear error."""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.data import token_build
from paceline.data.token_build import byte_progress, in_units
from paceline.data.token_file import TokenFile
from paceline.errors import ConfigError, DataError, PacelineError

UTF16 = partial(bytearray, encoding="utf-16-le")  # a tokenizer that other processes have without importing torch


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_build, "PIECE_BYTES", 64)
    monkeypatch.setattr(token_build, "_NEWLINE_SEARCH_BYTES", 16)


@pytest.fixture
def sources(tmp_path: Path) -> list[Path]:
    """Small files, an empty one, one of many pieces, and one of a single long line."""
    texts = ["a\n", "", "b\nc", "".join(f"zeile {number} äöü €\n" for number in range(100)), "𝄞€ä-" * 100, "end"]
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.txt").write_text(text, encoding="utf-8", newline="")
    return [tmp_path / f"{number}.txt" for number in range(len(texts))]


def built(path: Path, sources: list[Path], encode: Any = None, **options: Any) -> TokenFile:
    return TokenFile.build(path, sources, encode, **options)


# -- what is written ---------------------------------------------------------------------------------------------------


def test_bytes_stand_in_the_order_of_the_sources_with_a_separator_after_each(
    tmp_path: Path, sources: list[Path]
) -> None:
    file = built(tmp_path / "t.tokens", sources[::-1], separator=0)
    assert bytes(file.tokens.tolist()) == b"".join(source.read_bytes() + b"\0" for source in sources[::-1])


def test_encoded_pieces_together_are_the_encoded_text(tmp_path: Path, sources: list[Path]) -> None:
    file = built(tmp_path / "t.tokens", sources, lambda text: list(map(ord, text)), vocabulary=0x110000)
    assert "".join(map(chr, file.tokens.tolist())) == "".join(source.read_bytes().decode() for source in sources)


@pytest.mark.parametrize("encode", [None, UTF16], ids=["bytes", "encoded"])
def test_no_byte_of_the_file_depends_on_the_number_of_processes(
    tmp_path: Path, sources: list[Path], encode: Any
) -> None:
    written = []
    for processes in (1, 2):
        built(tmp_path / "t.tokens", sources * 3, encode, separator=7, processes=processes)
        written.append((tmp_path / "t.tokens").read_bytes())
    assert written[0] == written[1]


@pytest.mark.parametrize(
    "kind", [list, tuple, bytes, bytearray, torch.tensor, torch.IntTensor], ids=lambda kind: kind.__name__
)
def test_ids_may_come_as_any_sequence(tmp_path: Path, sources: list[Path], kind: Callable[[list[int]], Any]) -> None:
    file = built(tmp_path / "t.tokens", sources[:3], lambda text: kind([ord(letter) for letter in text]))
    assert bytes(file.tokens.tolist()) == b"a\nb\nc"


@settings(max_examples=100, deadline=None)
@given(st.text(st.sampled_from("ab\n€𝄞"), max_size=400))
def test_pieces_are_the_text_cut_after_newlines_or_between_characters(
    tmp_path_factory: pytest.TempPathFactory, text: str
) -> None:
    path = tmp_path_factory.getbasetemp() / "text.txt"
    path.write_bytes(text.encode())
    pieces = list(token_build._pieces(path))
    assert "".join(piece.read().decode() for piece in pieces) == text
    assert [piece.ends_file for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert all(piece.stop - piece.start <= 2 * 64 + 3 for piece in pieces)


def test_a_long_text_is_cut_after_newlines(sources: list[Path]) -> None:
    pieces = list(token_build._pieces(sources[3]))
    assert len(pieces) > 10
    assert all(piece.read().endswith(b"\n") for piece in pieces)


def test_many_small_files_are_few_errands(tmp_path: Path) -> None:
    for number in range(64):
        (tmp_path / f"{number}").write_text("abcd")
    assert len(list(token_build._batches([tmp_path / f"{number}" for number in range(64)]))) == 4


def test_only_a_few_batches_are_under_way_at_once(sources: list[Path]) -> None:
    asked = 0

    def batches() -> Any:
        nonlocal asked
        for batch in token_build._batches(sources * 10):
            asked += 1
            yield batch

    results = token_build._encoded(batches(), token_build.Recipe(None, 256, None), processes=2)
    next(results)
    results.close()
    assert asked <= 5


def test_a_link_to_a_token_file_stays_a_link(tmp_path: Path, sources: list[Path]) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "t.tokens").symlink_to("folder/t.tokens")
    built(tmp_path / "t.tokens", sources)
    assert (tmp_path / "t.tokens").is_symlink()
    assert (tmp_path / "folder" / "t.tokens").is_file()


# -- what goes wrong ---------------------------------------------------------------------------------------------------


def raises(error: BaseException) -> Callable[[str], Any]:
    def encode(text: str) -> Any:
        raise error

    return encode


@pytest.mark.parametrize(
    ("encode", "text"),
    [
        (lambda text: [3, 256], r"0.txt: the token id 256 is outside the vocabulary of 256 \(0 to 255\); pass "
                                "vocabulary=257 or more"),
        (lambda text: [-1, 3], r"0.txt: the token id -1 is outside the vocabulary .* ids can't be negative"),
        (lambda text: [0.5], r"0.txt: encode should give a flat sequence of ints, but gave float64 of shape \(1,\)"),
        (lambda text: [[1, 2]], r"0.txt: encode should give a flat sequence of ints, but gave int64 of shape \(1, 2\)"),
        (raises(KeyError("ä")), "0.txt: encode raised KeyError: 'ä'"),
    ],
    ids=["too high", "negative", "floats", "nested", "raises"],
)  # fmt: skip
def test_an_encode_that_fails_is_reported_with_the_file(
    tmp_path: Path, sources: list[Path], encode: Any, text: str
) -> None:
    with pytest.raises(DataError, match=text):
        built(tmp_path / "t.tokens", sources, encode)
    assert not list(tmp_path.glob("*t.tokens*")) + list(tmp_path.glob(".*"))


def test_an_error_in_another_process_names_the_file_and_the_piece(tmp_path: Path, sources: list[Path]) -> None:
    text = r"3.txt \(bytes 0 to \d+\): the token id 252 is outside the vocabulary of 200"
    with pytest.raises(DataError, match=text):
        built(tmp_path / "t.tokens", sources[3:], partial(bytearray, encoding="latin-1", errors="ignore"),
              vocabulary=200, processes=2)  # fmt: skip


def test_text_that_is_not_utf8_is_refused_with_its_place(tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes(b"0123456789\n" * 10 + b"\xe4")
    with pytest.raises(DataError, match=r"latin.txt is not UTF-8 text at byte 110 \(unexpected end of data\); convert"):
        built(tmp_path / "t.tokens", [tmp_path / "latin.txt"], lambda text: [1])
    assert len(built(tmp_path / "t.tokens", [tmp_path / "latin.txt"])) == 111


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"separator": 256}, "separator=256 is outside the vocabulary of 256"),
        ({"processes": 0}, "processes=0: at least one is needed"),
        (
            {"processes": 2, "encode": lambda text: []},
            r"encode can't be sent to 2 processes \(.*\); make it a function",
        ),
        ({"vocabulary": 100}, "3.txt .*: the token id 226 is outside the vocabulary of 100"),
        ({"encode": lambda text: []}, "was not built: its 6 source files hold no token"),
    ],
    ids=["separator", "processes", "lambda", "vocabulary", "empty"],
)
def test_what_cannot_be_built_is_refused_with_what_to_do(
    tmp_path: Path, sources: list[Path], options: dict[str, Any], text: str
) -> None:
    with pytest.raises(PacelineError, match=text):
        built(tmp_path / "t.tokens", sources, **options)
    assert not (tmp_path / "t.tokens").exists()


def test_sources_that_cannot_be_read_are_refused_before_anything_is_written(
    tmp_path: Path, sources: list[Path]
) -> None:
    with pytest.raises(DataError, match=f"the source {tmp_path}/none.txt does not exist"):
        built(tmp_path / "t.tokens", [*sources, tmp_path / "none.txt"], pytest.fail)
    with pytest.raises(DataError, match=f"the source {tmp_path} is not a regular file"):
        built(tmp_path / "t.tokens", [*sources, tmp_path], pytest.fail)


def test_a_source_that_shrinks_meanwhile_is_reported(tmp_path: Path, sources: list[Path]) -> None:
    def shrink(text: str) -> list[int]:
        sources[3].write_text("\n")
        return [1]

    with pytest.raises(DataError, match=r"3.txt became shorter while it was read; build again when no process writes"):
        built(tmp_path / "t.tokens", sources, shrink)


def test_a_process_that_dies_ends_the_build_with_likely_reasons(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("import os; os._exit(9)")
    with pytest.raises(DataError, match=r"ended before .*a.py was done: out of memory, or killed, .* processes=1"):
        built(tmp_path / "t.tokens", [tmp_path / "a.py"], exec, processes=2)
    assert [path.name for path in tmp_path.iterdir()] == ["a.py"]


def test_a_failed_build_keeps_the_older_file(tmp_path: Path, sources: list[Path]) -> None:
    built(tmp_path / "t.tokens", sources)
    with pytest.raises(DataError, match="encode raised ValueError"):
        built(tmp_path / "t.tokens", sources, raises(ValueError()))
    TokenFile(tmp_path / "t.tokens").verify()


def test_a_file_of_another_kind_is_not_replaced(tmp_path: Path, sources: list[Path]) -> None:
    with pytest.raises(ConfigError, match=f"{sources[0]} exists and is not a token file; choose another name"):
        built(sources[0], sources[1:])
    assert sources[0].read_text() == "a\n"


def test_a_full_disk_is_reported_with_the_file(sources: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(token_build.Recipe, "tokens_of", full)
    with pytest.raises(DataError, match=r"t.tokens could not be built: No space left on device"):
        built(sources[0].with_name("t.tokens"), sources)


# -- progress ----------------------------------------------------------------------------------------------------------


def test_work_of_a_few_seconds_says_nothing_in_a_log(capsys: pytest.CaptureFixture[str]) -> None:
    with byte_progress("t.tokens", 100) as done:
        done(50)
    assert capsys.readouterr() == ("", "")


def test_long_work_says_now_and_then_how_far_it_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([0.0, 1.0, 10.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    with byte_progress("t.tokens", 40_000_000) as done:
        done(1_000_000)
        done(9_000_000)
    assert capsys.readouterr().err == "paceline: t.tokens · 10.0 MB of 40.0 MB · 1.0 MB/s · 30 s left\n"


def test_a_terminal_gets_a_bar_unless_it_is_unwanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    screen = io.StringIO()
    monkeypatch.setattr(screen, "isatty", lambda: True)
    monkeypatch.setattr(token_build.sys, "stderr", screen)
    with byte_progress("quiet", 100, show=False) as done:
        done(100)
    assert screen.getvalue() == ""
    with byte_progress("t[1].tokens", 100) as done:
        done(100)
    assert "t[1].tokens" in screen.getvalue()


@pytest.mark.parametrize(
    ("count", "text"),
    [(999, "999 bytes"), (1000, "1.0 kB"), (12_345_678, "12.3 MB"), (5e9, "5.0 GB"), (2e15, "2,000.0 TB")],
)
def test_sizes_are_written_as_people_write_them(count: float, text: str) -> None:
    assert in_units(count) == text
