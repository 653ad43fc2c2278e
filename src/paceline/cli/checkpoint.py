"""`paceline checkpoint {list,show,verify,diff,export,import}`: what runs have saved, without starting one.

$ paceline checkpoint list runs/demo
checkpoint     step  workers  strategy       size  saved                 score
checkpoint-40    40        4  zero3      12.1 MiB  2026-11-15T16:20:01Z
checkpoint-20    20        4  zero3             –  not complete: COMPLETE is missing
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.errors import CheckpointError, ConfigError
from paceline.input_file import one_line

if TYPE_CHECKING:
    from paceline.checkpoint.load import Checkpoint

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    help="Look at what runs have saved, and exchange it with other tools.",
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
        raise CheckpointError(f"{run} has no checkpoint" if run.exists() else f"there is no folder {run}")
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
def diff(
    first: Saved,
    second: Annotated[Path, typer.Argument(help="the other one", show_default=False)],
    weights: Annotated[
        bool, typer.Option("--weights", help="only the weights; also .safetensors and .pt files, and folders of --hf")
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


_formats = partial(typer.Option, rich_help_panel="Formats", show_default=False)


@app.command()
def export(
    checkpoint: Saved,
    file: Annotated[
        Path | None, typer.Argument(help="a .safetensors file, for the weights alone", show_default=False)
    ] = None,
    hf: Annotated[Path | None, _formats("--hf", help="a new folder, which from_pretrained opens")] = None,
    dcp: Annotated[
        Path | None,
        _formats("--dcp", help="a new folder of torch.distributed.checkpoint: model, and optim by parameter name"),
    ] = None,
    model: Annotated[int, typer.Option(help="which of the job's models")] = 0,
    max_shard_size: Annotated[
        str | None,
        typer.Option(help="a file's at most, as 5GB or 200MB [default: 50GB of hf, 1GB of dcp]", show_default=False),
    ] = None,
) -> None:
    """Write a checkpoint for other tools: its weights as safetensors, or a folder of Hugging Face's or of torch's.

    The checkpoint stands alone, what is written behind the format: paceline checkpoint export runs/demo --hf OUT
    """
    from paceline.checkpoint.manifest import size_text
    from paceline.checkpoint.weights_file import parse_size, stored_weights, write_weights

    target = _one_of(file=file, hf=hf, dcp=dcp)
    _check_order(checkpoint, target, "" if file is not None else "--hf " if hf is not None else "--dcp ")
    if file is not None and (file.suffix != ".safetensors" or max_shard_size is not None):
        raise ConfigError(f"{file} is not one .safetensors file; a folder that from_pretrained opens is --hf {file}")
    size = None if max_shard_size is None else parse_size(max_shard_size)
    opened = _opened(checkpoint)
    if file is not None:
        weights = stored_weights(opened, model)
        print(f"{file}: {len(weights)} tensors, {size_text(write_weights(file, weights))}")
    elif hf is not None:
        _export_hf(opened, target, model, size)
    else:
        _export_dcp(opened, target, model, size)


def _check_order(checkpoint: Path, target: Path, option: str) -> None:
    """That they are not the other way round, and that it is not exported already."""
    from paceline.checkpoint.retention import has_checkpoint
    from paceline.checkpoint.weights_file import is_pretrained

    if has_checkpoint(checkpoint):
        return
    if has_checkpoint(target):
        raise ConfigError(
            f"{option}{target} is what would be written, but it has the checkpoint, and {checkpoint} has none; "
            f"write: paceline checkpoint export {target} {option}{checkpoint}"
        )
    if is_pretrained(checkpoint):
        raise ConfigError(
            f"{checkpoint} has no checkpoint of paceline to export, but weights: from_pretrained opens it"
        )


def _export_hf(opened: Checkpoint, folder: Path, model: int, size: int | None) -> None:
    from paceline.checkpoint.disk import new_folder
    from paceline.checkpoint.manifest import size_text
    from paceline.checkpoint.weights_file import LARGEST_SHARD, write_pretrained

    with new_folder(folder) as partial:
        shards = write_pretrained(partial, opened, model, size or LARGEST_SHARD)
    tensors, total = sum(len(shard.names) for shard in shards), sum(shard.bytes for shard in shards)
    print(f"{folder}: {tensors} tensors, {size_text(total)} in {len(shards)} file{'s' if len(shards) > 1 else ''}")
    if not (folder / "config.json").exists():
        print(f"it has no config.json, since the checkpoint has none: model.config.save_pretrained({str(folder)!r})")


def _export_dcp(opened: Checkpoint, folder: Path, model: int, size: int | None) -> None:
    from paceline.checkpoint.dcp_folder import LARGEST_FILE, write_dcp
    from paceline.checkpoint.disk import new_folder

    with new_folder(folder) as partial:
        written = write_dcp(partial, opened, model, size or LARGEST_FILE)
    print(f"{folder}: {' and '.join(written)}, for torch.distributed.checkpoint.load")
    if "optim" not in written:
        print("without the optimizer's state: the checkpoint has none, or does not say whose it is")


@app.command("import")
def import_from(
    checkpoint: Annotated[
        Path, typer.Argument(help="a new folder, such as runs/demo/checkpoint-0", show_default=False)
    ],
    hf: Annotated[Path | None, _formats("--hf", help="a folder that from_pretrained opens")] = None,
    dcp: Annotated[Path | None, _formats("--dcp", help="a folder of torch.distributed.checkpoint")] = None,
    optimizer: Annotated[bool, typer.Option(help="the optimizer's state too, where a folder of dcp has it")] = True,
) -> None:
    """Make a checkpoint of what other tools have saved: weights to begin with, and of dcp the optimizer's state.

    The new one stands alone, what is read behind the format: paceline checkpoint import NEW --hf OUT
    """
    from paceline.checkpoint.imports import import_dcp, import_pretrained

    source = _one_of(hf=hf, dcp=dcp)
    if checkpoint.exists() and not source.exists():
        option = "--hf" if hf is not None else "--dcp"
        raise ConfigError(
            f"{option} {source} is what would be read, but it does not exist, and {checkpoint}, which would be "
            f"written, does; write: paceline checkpoint import {source} {option} {checkpoint}"
        )
    made = (
        import_pretrained(source, checkpoint) if hf is not None else import_dcp(source, checkpoint, optimizer=optimizer)
    )
    also = " and the optimizer's state" if made.tree["optimizers"] else ""
    print(f"{checkpoint}: {len(made.tree['models'][0])} tensors of the model{also}; engine.load_state begins with them")


def _one_of(**given: Path | None) -> Path:
    """The one that is given."""
    there = [path for path in given.values() if path is not None]
    if len(there) != 1:
        words = [name.upper() if name == "file" else f"--{name} FOLDER" for name in given]
        much = "only one of them" if there else "one of them"
        raise ConfigError(f"write {', '.join(words[:-1])} or {words[-1]}: {much} says the format")
    return there[0]


def _opened(path: Path) -> Checkpoint:
    from paceline.checkpoint.load import Checkpoint
    from paceline.checkpoint.retention import newest_in

    return Checkpoint.open(newest_in(path))
