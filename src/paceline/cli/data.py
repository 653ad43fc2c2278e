"""`paceline data VERB …`: make and check the files that training reads, and prove what a run used of them.

paceline data tokenize train.tokens corpus/ --glob '*.py' --separator 0          the bytes of the files
paceline data tokenize train.tokens *.txt --tokenizer tokenizer.json --separator '<|endoftext|>'
paceline data check train.tokens
paceline data audit RUN                                                          every sample exactly once?
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.data_audit import audit
from paceline.errors import ConfigError, PacelineError
from paceline.input_file import cause_of, read_input

if TYPE_CHECKING:
    from rich.console import Console

    from paceline.data.token_header import TokenHeader

app = typer.Typer(
    name="data", no_args_is_help=True, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False,
)  # fmt: skip


@app.callback()
def data() -> None:
    """Make and check the files that training reads, and prove what a run used of them."""


# ---- tokenize: text files to one token file ----------------------------------------------------------------


@app.command()
def tokenize(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="the token file to write", show_default=False)],
    files: Annotated[
        list[Path], typer.Argument(metavar="FILES", help="text files, and folders to search", show_default=False)
    ],
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="a tokenizer.json of the `tokenizers` library [default: the bytes themselves]"
        ),
    ] = None,
    glob: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN", help="which files of a folder; may be repeated [default: *.txt]", show_default=False
        ),
    ] = None,
    separator: Annotated[
        str | None,
        typer.Option(metavar="TOKEN", help="what follows each file: a token's id, or its text [default: nothing]"),
    ] = None,
    processes: Annotated[
        int | None,
        typer.Option(metavar="N", max=1024, help="processes that encode [default: what suits the text and the cores]"),
    ] = None,
) -> None:
    """Make one token file of text files, for paceline.data.TokenFile to open."""
    from rich.console import Console

    from paceline.data.byte_progress import in_units
    from paceline.data.token_build import build_token_file

    sources = list(_text_files(files, glob or ["*.txt"]))
    encode = None if tokenizer is None else JsonTokenizer(tokenizer)
    began = time.perf_counter()
    header = build_token_file(
        out,
        sources,
        encode,
        vocabulary=256 if encode is None else encode.vocabulary,
        separator=None if separator is None else _separator(separator, encode),
        description=f"{_files(len(sources))} as bytes" if encode is None else f"{_files(len(sources))} by {encode}",
        processes=processes,
        progress=True,
    )
    seconds = time.perf_counter() - began
    text_bytes = sum(source.stat().st_size for source in sources)
    console = Console(highlight=False)
    speed = in_units(text_bytes / seconds)
    _show(console, "read", f"{_files(len(sources))}, {in_units(text_bytes)}, in {seconds:.1f} s ({speed}/s)")
    _show(console, "wrote", f"{out}, {in_units(header.file_bytes)}")
    _show(console, "tokens", _kind(header))
    _show(console, "sha256", header.sha256)


class JsonTokenizer:
    """Text to ids by a tokenizer.json. It travels to other processes as a path, and is loaded there."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            from tokenizers import Tokenizer  # type: ignore[import-not-found, unused-ignore]
        except ImportError:
            raise ConfigError(
                "--tokenizer needs the `tokenizers` library: pip install 'paceline[text]' (or pip install tokenizers)"
            ) from None
        try:
            self._tokenizer: Any = Tokenizer.from_str(read_input(path).decode())
        except OSError as error:
            raise ConfigError(f"--tokenizer {path} can't be read: {cause_of(error)}") from error
        except Exception as error:  # the library raises a bare Exception
            raise ConfigError(f"--tokenizer {path} is not a tokenizer.json: {cause_of(error)}") from error

    def __call__(self, text: str) -> list[int]:
        # Without special tokens: a long file is encoded in pieces, and each would get its own beginning and end.
        # The fast variant keeps no offsets into the text, and takes two thirds of the time.
        ids: list[int] = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    def __str__(self) -> str:
        return f"{self.path.name} (sha256 {hashlib.sha256(read_input(self.path)).hexdigest()})"

    def __reduce__(self) -> tuple[Any, ...]:
        return JsonTokenizer, (self.path,)

    @property
    def vocabulary(self) -> int:
        """The highest id and one: tokenizers with gaps in their ids exist."""
        return 1 + int(max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1))

    def id_of(self, token: str) -> int | None:
        found: int | None = self._tokenizer.token_to_id(token)
        return found


def _separator(text: str, tokenizer: JsonTokenizer | None) -> int:
    """A token by its text where the tokenizer knows it, otherwise by its number."""
    if tokenizer is not None and (known := tokenizer.id_of(text)) is not None:
        return known
    if text.isdecimal():
        return int(text)
    if tokenizer is None:
        raise ConfigError(f"--separator {text!r} is not the number of a byte; give 0 to 255, such as 0 or 10 (newline)")
    raise ConfigError(f"--separator {text!r} is neither a token of {tokenizer.path} nor a number")


def _text_files(given: list[Path], globs: list[str]) -> Iterator[Path]:
    """Files as they were given; a folder's files in the order of their names, whatever the file system says."""
    for path in given:
        if not path.is_dir():
            yield path
            continue
        found = {file.relative_to(path) for glob in globs for file in path.rglob(glob) if file.is_file()}
        if not found:
            raise ConfigError(
                f"there is no {' or '.join(globs)} in {path}; say which files to take, as in --glob '*.py'"
            )
        yield from (path / file for file in sorted(found, key=Path.as_posix))


def _files(count: int) -> str:
    return f"{count:,} file" + ("" if count == 1 else "s")


# ---- check: is a token file what it was when it was built? -------------------------------------------------


@app.command()
def check(
    files: Annotated[list[Path], typer.Argument(metavar="FILES", help="token files", show_default=False)],
) -> None:
    """Show what a token file holds, and compare its tokens with their checksum; 1 when a file is damaged."""
    from rich.console import Console

    damaged = 0
    for number, file in enumerate(files):
        if number:
            print()
        damaged += not is_whole(file, Console(highlight=False))
    if damaged:
        raise typer.Exit(1)


def is_whole(path: Path, console: Console) -> bool:
    from paceline.data.byte_progress import in_units
    from paceline.data.token_file import TokenFile

    try:
        with TokenFile(path) as file:
            _show(console, "file", f"{path}, {in_units(file.header.file_bytes)}")
            _show(console, "tokens", _kind(file.header))
            _show(console, "made of", file.description or "(nobody wrote it down)")
            _show(console, "sha256", file.header.sha256)
            file.verify(progress=True)
    except PacelineError as error:
        _show(console, "problem", str(error), style="bold red")
        return False
    _show(console, "ok", "every token is as it was written", style="green")
    return True


def _kind(header: TokenHeader) -> str:
    return f"{header.tokens:,} · vocabulary {header.vocabulary:,} · {header.dtype}"


def _show(console: Console, name: str, text: str, style: str = "") -> None:
    """A fact in two columns; where nobody looks (grep, logs) it stays one line, however long."""
    if not console.is_terminal:
        print(f"{name:<8} {text}", file=console.file)
        return
    from rich.table import Table
    from rich.text import Text

    row = Table.grid(padding=(0, 1))
    row.add_column(width=8, no_wrap=True)
    row.add_row(Text(name, style=style), Text(text))
    console.print(row)


# ---- audit: was every sample used exactly once? ------------------------------------------------------------

app.command()(audit)
