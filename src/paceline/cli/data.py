"""`paceline data VERB …`: make and check the files that training reads, and prove what a run used of them.

paceline data tokenize train.tokens corpus/ --glob '*.py' --separator 0          the bytes of the files
paceline data tokenize train.tokens *.txt --tokenizer tokenizer.json --separator '<|endoftext|>'
paceline data check train.tokens
paceline data audit RUN                                                          every sample exactly once?

The last line of an audit answers, its tables say where; it exits with 0 when that is proved, with 1 when it is not:

    attempt  workers  from                   steps  samples          rolled back
    1              4  epoch 0, position 0       12      384  2 steps, 64 samples
    2              2  epoch 0, position 320     30      936

    epoch  steps    samples used  lost  repeated  dropped  left out
    0         32  1,000 of 1,000     0         0        0         0
    1          8    256 of 1,000     0         0        0         0

    0 lost, 0 repeated
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.errors import ConfigError, PacelineError
from paceline.input_file import cause_of, read_input

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from paceline.data.audit import AttemptReport, EpochReport, Report, Where
    from paceline.data.token_build import TokenHeader

WIDTH_OF_A_FILE = 120
ROWS = 20

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

    from paceline.data.token_build import build_token_file, in_units

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
    from paceline.data.token_build import in_units
    from paceline.data.token_file import TokenFile

    try:
        with TokenFile(path) as file:
            _show(console, "file", f"{path}, {in_units(file.header.file_bytes)}")
            _show(console, "tokens", _kind(file.header))
            _show(console, "made of", file.description or "(no description)")
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
    """A fact in two columns; off a terminal (grep, logs) it stays one line, however long."""
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


@app.command()
def audit(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="the run folder, or its samples folder", show_default=False)
    ],
    listed: Annotated[int, typer.Option("--list", min=0, help="lost and repeated samples to name, of each")] = 10,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="F", help="write every number there", show_default=False)
    ] = None,
) -> None:
    """Prove from a run's sample log that each was used exactly once; 1 when it was not, or can't be proved."""
    from rich.console import Console

    from paceline.data.audit import audit as audit_record

    report = audit_record(run, listed)
    if json_file is not None:
        _write(report, json_file)
    show_report(report, Console(width=None if sys.stdout.isatty() else WIDTH_OF_A_FILE, highlight=False, markup=False))
    if not report.clean:
        raise typer.Exit(1)


def show_report(report: Report, out: Console) -> None:
    def say(text: str, style: str | None = None) -> None:
        out.print(text, style=style, soft_wrap=True)  # for grep and for logs: one finding is one line, however long

    say(f"{report.folder}: {_number(len(report.attempts), 'attempt')}, {_number(report.lanes, 'lane')}\n")
    out.print(_attempts(report.attempts), "", _epochs(report.epochs), "", sep="\n")
    if not report.ids_proved:
        say(f"note     {'a stream has no' if report.stream else 'the order may repeat'} ids: only positions are proved")
    for text in report.notes:
        say(f"note     {text}")
    for text in report.problems:
        say(f"problem  {text}", style="red")
    for line in _named(report):
        say(line)
    if report.problems and not (report.lost or report.repeated):
        say(f"not proved: {_number(len(report.problems), 'problem')}", style="bold red")
    say(report.verdict, style="bold green" if report.clean else "bold red")


def _attempts(attempts: tuple[AttemptReport, ...]) -> Table:
    table = _table("attempt", "workers", "from", "steps", "samples", "rolled back")
    for attempt in attempts[:ROWS]:
        table.add_row(
            str(attempt.attempt),
            str(attempt.workers),
            f"epoch {attempt.epoch}, position {attempt.position:,}",
            f"{attempt.steps:,}",
            f"{attempt.samples:,}",
            f"{_number(attempt.rolled_back_steps, 'step')}, {_number(attempt.rolled_back_samples, 'sample')}"
            if attempt.rolled_back_samples
            else "",
        )
    if len(attempts) > ROWS:
        table.add_row(f"and {len(attempts) - ROWS:,} more")
    return table


def _epochs(epochs: tuple[EpochReport, ...]) -> Table:
    table = _table("epoch", "steps", "samples used", "lost", "repeated", "dropped", "left out")
    shown = list(_together(epochs)) if len(epochs) > ROWS else list(epochs)
    for epoch in shown[:ROWS]:
        numbers = (epoch.lost, epoch.repeated, epoch.dropped, epoch.left_out)
        table.add_row(
            str(epoch.first) if epoch.first == epoch.last else f"{epoch.first} – {epoch.last}",
            f"{epoch.steps:,}",
            f"{epoch.samples:,}" if epoch.of is None else f"{epoch.samples:,} of {epoch.of:,}",
            *(f"{number:,}" for number in numbers),
        )
    if len(shown) > ROWS:
        table.add_row(f"and {len(shown) - ROWS:,} more")
    return table


def _together(epochs: Iterable[EpochReport]) -> Iterator[EpochReport]:
    """Epochs that differ in nothing but their number, as one."""
    for _, alike in groupby(epochs, key=lambda epoch: replace(epoch, first=0, last=0)):
        first, *others = alike
        yield replace(first, last=others[-1].last if others else first.last)


def _named(report: Report) -> Iterator[str]:
    for lost in report.first_lost:
        sample = "" if lost.id is None else f" (id {lost.id})"
        yield f"lost     epoch {lost.where.epoch}, position {lost.position:,}{sample}: belongs in {_place(lost.where)}"
    for epoch in report.epochs:
        if epoch.unused_ids:
            more = " …" if len(epoch.unused_ids) < epoch.lost + epoch.dropped else ""
            dropped = f"; drop_last may drop {epoch.dropped:,} of them" if epoch.dropped else ""
            yield f"lost     epoch {epoch.first} never used id {', '.join(map(str, epoch.unused_ids))}{more}{dropped}"
    for again in report.first_repeated:
        sample = "" if again.id is None else f" (id {again.id})"
        places = "; and in ".join(_place(where) for where in again.where)
        yield f"repeated epoch {again.where[0].epoch}, position {again.position:,}{sample}: in {places}"


def _place(where: Where) -> str:
    known = {"step": where.step, "lane": where.lane, "attempt": where.attempt, "worker": where.worker}
    return ", ".join(f"{name} {number}" for name, number in known.items() if number is not None)


def _write(report: Report, file: Path) -> None:
    try:
        file.write_text(
            json.dumps({**asdict(report), "clean": report.clean, "verdict": report.verdict}, indent=2) + "\n"
        )
    except OSError as error:
        raise ConfigError(f"--json {file} can't be written: {error.strerror}") from error


def _table(*columns: str) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, justify="left" if column in ("attempt", "epoch", "from") else "right", no_wrap=True)
    return table


def _number(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
