"""`paceline checkpoint {list,show,verify,export,diff}`: look at what runs have saved, without starting one.

$ paceline checkpoint list runs/demo
checkpoint     step  workers  strategy       size  saved                 score
checkpoint-40    40        4  zero3      12.1 MiB  2026-11-15T16:20:01Z
checkpoint-20    20        4  zero3             –  not complete: COMPLETE is missing
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.errors import CheckpointError
from paceline.input_file import one_line

if TYPE_CHECKING:
    from paceline.checkpoint.load import Checkpoint

app = typer.Typer(
    no_args_is_help=True, add_completion=False, rich_markup_mode=None, help="Look at what runs have saved."
)

Saved = Annotated[Path, typer.Argument(help="a checkpoint, or a run's folder: its newest", show_default=False)]


@app.command("list")
def list_checkpoints(
    run: Annotated[Path, typer.Argument(help="the folder that has the checkpoints", show_default=False)],
) -> None:
    """The checkpoints of a run, newest first, and which is the best; 1 when one of them is not usable."""
    from rich.console import Console
    from rich.table import Table

    from paceline.checkpoint.load import Checkpoint
    from paceline.checkpoint.manifest import size_text
    from paceline.checkpoint.retention import all_checkpoints, best_checkpoint

    found, best = all_checkpoints(run), best_checkpoint(run)
    if not found:
        raise CheckpointError(f"{run} has no checkpoint")
    table = Table(box=None, header_style="", pad_edge=False, padding=(0, 2, 0, 0))
    for title in ("checkpoint", "step", "workers", "strategy", "size", "saved", "score"):
        table.add_column(title, justify="right" if title in ("step", "workers", "size") else "left", no_wrap=True)
    broken: list[str] = []
    for path in found:
        try:
            about, size = (opened := Checkpoint.open(path)).manifest.about, size_text(opened.manifest.bytes)
        except CheckpointError as error:
            broken.append(f"{path.name} is not usable: {error}")
            continue
        score = about.get("score")
        rated = "" if score is None else f"{score:g}{' (best)' if path == best else ''}"
        step, workers, strategy, saved = (about.get(name, "") for name in ("step", "workers", "strategy", "saved at"))
        table.add_row(*(one_line(str(cell)) for cell in (path.name, step, workers, strategy, size, saved, rated)))
    Console(width=None if sys.stdout.isatty() else 160, markup=False).print(table)
    for line in broken:
        print(line)
    if broken:
        raise typer.Exit(1)


@app.command()
def show(
    checkpoint: Saved,
    tensors: Annotated[bool, typer.Option("--tensors", help="every tensor, and where it lies")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="the manifest as it is")] = False,
) -> None:
    """What is in a checkpoint: step, job, position in the data, models, optimizers, files."""
    from paceline.checkpoint.manifest import size_text

    opened = _opened(checkpoint)
    manifest = opened.manifest
    if as_json:
        print(manifest.text())
        return
    print(f"{opened.folder}: step {opened.step}, {size_text(manifest.bytes)} in {len(manifest.files)} files, complete")
    for title, table in (("saved", manifest.about), ("job", manifest.tree.get("job"))):
        print(f"\n{title}")
        for name, value in table.items() if isinstance(table, dict) else ():
            print(f"  {one_line(name):24} {one_line(value) if isinstance(value, str) else json.dumps(value)}")
    print(f"\ndata\n  {json.dumps(manifest.tree.get('data'))}")
    print(f"\ntensors: {len(manifest.tensors)}")
    for path, stored in manifest.tensors.items() if tensors else ():
        ranges = ", ".join(f"[{r.start}:{r.stop}] {r.file}" for r in stored.ranges)
        print(f"  {path}  {stored.dtype} {list(stored.shape)}  {ranges}")


@app.command()
def verify(checkpoint: Saved) -> None:
    """Read every byte of a checkpoint and compare checksums; 1 when something is damaged."""
    from paceline.checkpoint.manifest import size_text

    opened = _opened(checkpoint)
    wrong = opened.verify()
    for line in wrong:
        print(f"paceline: {line}", file=sys.stderr)
    if wrong:
        raise typer.Exit(1)
    what = f"{len(opened.manifest.tensors)} tensors in {len(opened.manifest.files)} files"
    print(f"{opened.folder}: {what}, {size_text(opened.manifest.bytes)}, all as they were written")


@app.command()
def export(
    checkpoint: Saved,
    file: Annotated[Path, typer.Argument(help="a .safetensors file, or a folder for model.safetensors")],
    model: Annotated[int, typer.Option(help="which of the job's models")] = 0,
) -> None:
    """The weights as one safetensors file in Hugging Face's layout."""
    from paceline.checkpoint.manifest import size_text
    from paceline.checkpoint.weights_file import weights_of, write_weights

    target = file if file.suffix == ".safetensors" else file / "model.safetensors"
    weights = weights_of(_opened(checkpoint), model)
    size = write_weights(target, weights)
    print(f"{target}: {len(weights)} tensors, {size_text(size)}")


@app.command()
def diff(
    first: Saved,
    second: Annotated[Path, typer.Argument(help="the other one", show_default=False)],
    weights: Annotated[
        bool, typer.Option("--weights", help="only the weights; also .safetensors and .pt files")
    ] = False,
    limit: Annotated[int, typer.Option(min=0, help="differences to print")] = 20,
) -> None:
    """In what two checkpoints differ, bit by bit; 0 if in nothing, 1 otherwise."""
    from paceline.checkpoint.load import differences
    from paceline.checkpoint.weights_file import read_weights

    trees: list[Any]
    if weights or not (first.is_dir() and second.is_dir()):
        trees = [read_weights(first), read_weights(second)]
    else:
        trees = [_opened(first).tree, _opened(second).tree]
    found = list(differences(*trees))
    width = max((len(where) for where, _ in found[:limit]), default=0)
    for where, what in found[:limit]:
        print(f"{where:{width}}  {what}")
    if len(found) > limit:
        print(f"and {len(found) - limit} more")
    if found:
        raise typer.Exit(1)
    print("no difference")


def _opened(path: Path) -> Checkpoint:
    from paceline.checkpoint.load import Checkpoint
    from paceline.checkpoint.retention import newest_in

    return Checkpoint.open(newest_in(path))
