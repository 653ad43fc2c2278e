"""`paceline data tokenize` and `check`: what they write, what they print, and how they end."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from paceline.cli.data import is_whole
from paceline.cli.main import main
from paceline.data.token_file import TokenFile


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    for name, text in {"b.txt": "bee", "a.txt": "ay", "deep/c.txt": "sea", "d.md": "dee", "e.py": "e"}.items():
        (tmp_path / "corpus" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "corpus" / name).write_text(text)
    return tmp_path / "corpus"


@pytest.fixture
def letters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tokenizer.json, and a `tokenizers` library that numbers letters: a is 0, <end> is 299."""

    class Tokenizer:
        @staticmethod
        def from_str(text: str) -> Tokenizer:
            if text != "{}":
                raise Exception("expected `{`")
            return Tokenizer()

        def encode_batch_fast(self, texts: list[str], *, add_special_tokens: bool) -> list[Any]:
            assert not add_special_tokens
            return [SimpleNamespace(ids=[ord(letter) - ord("a") for letter in text]) for text in texts]

        def get_vocab(self, *, with_added_tokens: bool) -> dict[str, int]:
            return {"a": 0, "z": 25, "<end>": 299}

        def token_to_id(self, token: str) -> int | None:
            return self.get_vocab(with_added_tokens=True).get(token)

    library = ModuleType("tokenizers")
    library.Tokenizer = Tokenizer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tokenizers", library)
    (tmp_path / "letters.json").write_text("{}")
    return tmp_path / "letters.json"


def paceline(monkeypatch: pytest.MonkeyPatch, *words: str | Path) -> int:
    """The exit code of `paceline data WORDS`."""
    monkeypatch.setattr(sys, "argv", ["paceline", "data", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def tokens(path: Path) -> bytes:
    return bytes(TokenFile(path).tokens.tolist())


# -- tokenize ----------------------------------------------------------------------------------------------------------


def test_files_come_as_given_and_those_of_a_folder_by_name(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "t.tokens"
    assert paceline(monkeypatch, "tokenize", out, corpus / "e.py", corpus, "--separator", "0") == 0
    assert tokens(out) == b"e\0ay\0bee\0sea\0"
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("read     4 files, 9 bytes, in ")
    assert lines[1:] == [
        f"wrote    {out}, 4.1 kB",
        "tokens   13 · vocabulary 256 · uint8",
        f"sha256   {TokenFile(out).header.sha256}",
    ]


def test_a_folder_gives_the_files_that_any_pattern_names_once(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert paceline(monkeypatch, "tokenize", tmp_path / "t", corpus, "--glob", "*.md", "--glob", "[de].*") == 0
    assert tokens(tmp_path / "t") == b"deee"
    assert TokenFile(tmp_path / "t").description == "2 files as bytes"


def test_a_tokenizer_encodes_and_knows_its_separator(
    corpus: Path, letters: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "t.tokens"
    assert paceline(monkeypatch, "tokenize", out, corpus, "--tokenizer", letters, "--separator", "<end>") == 0
    file = TokenFile(out)
    assert file.vocabulary == 300
    assert file.tokens.tolist() == [0, 24, 299, 1, 4, 4, 299, 18, 4, 0, 299]
    assert file.description.startswith("3 files by letters.json (sha256 44136fa355b3678a")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["{corpus}/a.txt", "{corpus}/b.txt"], "a.txt exists and is not a token file; choose another name"),
        (["out", "{corpus}", "--glob", "*.rst"], "there is no *.rst in {corpus}; say which files to take"),
        (["out", "{corpus}/none.txt"], "the source {corpus}/none.txt does not exist"),
        (["out", "{corpus}", "--separator", "<end>"], "--separator '<end>' is not the number of a byte; give 0 to 255"),
        (["out", "{corpus}", "--separator", "256"], "separator=256 is outside the vocabulary of 256"),
        (["out", "{corpus}", "--tokenizer", "{letters}", "--separator", "<s>"], "is neither a token of {letters}"),
        (["out", "{corpus}", "--tokenizer", "{corpus}/none"], "--tokenizer {corpus}/none can't be read: No such file"),
        (["out", "{corpus}", "--tokenizer", "{corpus}/e.py"], "e.py is not a tokenizer.json: expected `{{`"),
    ],
    ids=["forgot OUT", "no such files", "no file", "text", "number", "unknown token", "no tokenizer", "not one"],
)  # fmt: skip
def test_what_cannot_be_tokenized_is_refused_in_one_line(
    corpus: Path,
    letters: Path,
    words: list[str],
    text: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(corpus)
    places = {"corpus": corpus, "letters": letters}
    assert paceline(monkeypatch, "tokenize", *(word.format(**places) for word in words)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("paceline: ")
    assert text.format(**places) in line


def test_a_missing_library_is_named_with_how_to_get_it(
    corpus: Path, letters: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert paceline(monkeypatch, "tokenize", corpus / "out", corpus, "--tokenizer", letters) == 2
    assert capsys.readouterr().err == (
        "paceline: --tokenizer needs the `tokenizers` library: pip install 'paceline[text]' "
        "(or pip install tokenizers)\n"
    )


@pytest.mark.job
def test_processes_that_encode_do_not_wait_for_torch() -> None:
    code = "import sys, paceline.data.token_build, paceline.cli.data; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


# -- check -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def built(corpus: Path, tmp_path: Path) -> Path:
    TokenFile.build(tmp_path / "t.tokens", [corpus / "a.txt"], description="one [bold] file")
    return tmp_path / "t.tokens"


def test_check_shows_what_a_file_holds(
    built: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert paceline(monkeypatch, "check", built) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"file     {built}, 4.1 kB",
        "tokens   2 · vocabulary 256 · uint8",
        "made of  one [bold] file",
        f"sha256   {TokenFile(built).header.sha256}",
        "ok       every token is as it was written",
    ]


def test_check_ends_with_1_when_a_file_is_damaged(
    built: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = built.read_bytes()
    built.write_bytes(whole[:-1] + b"?")
    assert paceline(monkeypatch, "check", built) == 1
    assert f"problem  {built} is damaged: the sha256 of its tokens" in capsys.readouterr().out
    built.write_bytes(whole[:-1])
    assert paceline(monkeypatch, "check", built, built.with_name("none")) == 1
    cut, missing = (line for line in capsys.readouterr().out.splitlines() if line)
    assert cut.startswith(f"problem  {built} was cut short: 2 tokens of type uint8")
    assert missing.startswith("problem  there is no token file")


def test_on_a_terminal_the_facts_stand_in_two_columns(built: Path) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=60, color_system=None)
    assert not is_whole(built.with_name("none"), console)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert lines[0].startswith("problem  there is no token file")
    assert len(lines) > 1
    assert all(line.startswith(" " * 9) and len(line) <= 60 for line in lines[1:])
