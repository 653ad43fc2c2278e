"""The scripts of docs/porting.md on 1, 2 and 3 workers under ddp, zero2 and fsdp: one hash and one set of metrics.

python -m tests.conformance.scripts                                 fetches what it needs, once
python -m tests.conformance.scripts --only nlp_example imagenet     those whose names contain one of these
python -m tests.conformance.scripts --clones DIR                    DIR has the clones, by project and by owner+project

`ported_scripts.py` has what is changed in each and counts the lines; `script_data.py` what they read. Workers come
from one parent that has imported what the scripts need, so that a run takes seconds. There is no network while they
run; where a script or the packages that it needs can't be had, this says so and goes on. A script that saves is also
continued from what the combination before it has saved.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import runpy
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.world.world import World
from tests.conformance.fetching import CACHE, MissingError, Source, fetch_folder, fetch_packages
from tests.conformance.ported_scripts import EVALUATE, FOLDERS, PACKAGES, SCRIPTS, Script, code_of_page
from tests.examples.running import variables_of
from tests.workers import _CONTEXT, run_workers

COMBINATIONS = [(workers, strategy) for strategy in ("ddp", "zero2", "fsdp") for workers in (1, 2, 3)]
LANES = 4
MOST_LINES = 10


@dataclass(frozen=True)
class Outcome:
    hash: str
    same: tuple[str, ...]


class FailedError(Exception):
    """A run that did not end well."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clones", type=Path, help="a folder with clones of the projects")
    parser.add_argument("--cache", type=Path, default=CACHE)
    parser.add_argument("--only", nargs="*", default=[""], help="parts of scripts' names")
    options = parser.parse_args(arguments)
    options.cache.mkdir(parents=True, exist_ok=True)
    wanted = [script for script in SCRIPTS if any(part in script.name for part in options.only)]
    try:
        metrics = fetch_folder(_cloned(EVALUATE, options.clones), FOLDERS[EVALUATE], options.cache, "metrics")
        packages = fetch_packages("scripts", PACKAGES, options.cache)
    except MissingError as error:
        print(f"scripts of other projects: NOT RUN: {error}")
        return 0
    _preload(packages)
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        data.mkdir()
        _forked(_make_data, folder=data)
        for name in ("glue", "accuracy"):
            shutil.copytree(metrics / "metrics" / name, data / name)
        for script in wanted:
            failed += not _try(script, options, Path(folder), data)
    return int(failed > 0)


def _cloned(source: Source, clones: Path | None) -> Source:
    """The source, or the clone of it that is there."""
    owner, name = source.repository.split("/")[-2:]
    for place in (
        () if clones is None else (clones / name, clones / f"{owner}+{name}", clones / f"{owner}+{name}" / "repo")
    ):
        if place.is_dir():
            source = replace(source, repository=str(place))
    return source


def _preload(packages: Path) -> None:
    """Before the first worker: what all of them import."""
    sys.path.append(str(packages))
    site = Path(__file__).with_name("scripts_site")
    paths = [str(site), os.environ.get("PYTHONPATH"), str(packages)]
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", CUDA_VISIBLE_DEVICES="", TQDM_DISABLE="1")
    _CONTEXT.set_forkserver_preload(["tests.preload", "tests.conformance.script_preload"])


def _forked(program: Any, **given: Any) -> None:
    (result,) = run_workers(program, 1, timeout_s=300, **given)
    if result.error is not None:
        raise FailedError(f"{result.error}\n{result.traceback}")


def _make_data(world: World, folder: Path) -> None:
    from tests.conformance.script_data import make_data

    make_data(folder)


def _try(script: Script, options: Any, folder: Path, data: Path) -> bool:
    """Whether all combinations of a script give one outcome; prints what was seen."""
    try:
        source = _cloned(script.source, options.clones)
        clone = fetch_folder(source, FOLDERS[script.source], options.cache, "the script")
    except MissingError as error:
        print(f"{script.name}: NOT RUN: {error}", flush=True)
        return True
    text = (clone / script.path).read_text()
    text, lines = script.adapted(code_of_page(text) if script.path.endswith(".mdx") else text)
    print(f"{script.name}: {lines} lines", flush=True)
    good = lines <= MOST_LINES
    seen: dict[Outcome, list[str]] = {}
    for name, workers, strategy, place, arguments in _runs(script, folder):
        _furnish(place, script, text, clone, data)
        try:
            outcome = _run(script, place, workers, strategy, arguments)
        except FailedError as error:
            print(f"  {name}: {error}", flush=True)
            good = False
        else:
            seen.setdefault(outcome, []).append(name)
    for outcome, names in seen.items():
        print(f"  {outcome.hash[:19]} {' | '.join(outcome.same)}: {', '.join(names)}", flush=True)
    return good and len(seen) == 1


def _runs(script: Script, folder: Path) -> Iterator[tuple[str, int, str, Path, tuple[str, ...]]]:
    before = None
    for workers, strategy in COMBINATIONS:
        place = Path(tempfile.mkdtemp(dir=folder))
        yield f"{workers} {strategy}", workers, strategy, place, script.arguments
        if script.resumed and before is not None:
            resumed = tuple(argument.format(folder=before) for argument in script.resumed)
            name, again = f"{workers} {strategy} resumed", Path(tempfile.mkdtemp(dir=folder))
            yield name, workers, strategy, again, (*script.arguments, *resumed)
        before = place


def _furnish(place: Path, script: Script, text: str, clone: Path, data: Path) -> None:
    """The script and what it reads, in the folder where it is run."""
    for thing in data.iterdir():
        (place / thing.name).symlink_to(thing)
    file = place / script.path if script.path.endswith("train_fabric.py") else place / Path(script.path).name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.with_suffix(".py").write_text(script.before + text)
    for name in script.beside:
        shutil.copy((clone / script.path).parent / name, place / name)


def _run(script: Script, place: Path, workers: int, strategy: str, arguments: tuple[str, ...]) -> Outcome:
    (file,) = place.rglob(f"{Path(script.path).stem}.py")
    results = run_workers(run_script, workers, timeout_s=300, file=file, strategy=strategy, arguments=arguments)
    for result in sorted(results, key=lambda result: "PeerLost" in str(result.error)):
        if result.error is not None:
            raise FailedError(f"{result.error}\n{result.traceback[-1000:]}")
    hashes = {result.value[0] for result in results}
    if len(hashes) != 1:
        raise FailedError(f"workers end with different weights: {hashes}")
    printed = [match.group().strip() for match in re.finditer(script.same, results[0].value[1])]
    return Outcome(hashes.pop(), tuple(printed))


def run_script(world: World, file: Path, strategy: str, arguments: tuple[str, ...]) -> tuple[str, str]:
    """Inside a worker, whose process ends with it: the hash of the weights that it leaves, and what it printed."""
    os.chdir(file.parents[3] if file.name == "train_fabric.py" else file.parent)
    os.environ.update(variables_of(world), PACELINE_LANES=str(LANES), PACELINE_THREADS="1", PACELINE_STRATEGY=strategy)
    sys.argv, sys.path[:0] = [str(file), *arguments], [str(file.parent)]
    hashes, printed = _note_hashes(), io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            runpy.run_path(str(file), run_name="__main__")
            close_all()
        except BaseException:
            sys.__stderr__.write(printed.getvalue()[-1000:])
            raise
    if len(hashes) != 1:
        raise FailedError(f"{len(hashes)} engines")
    return hashes[0], printed.getvalue()


def _note_hashes() -> list[str]:
    """Filled as engines are closed, by the script or by `close_all`."""
    from paceline.engine.engine import Engine

    hashes: list[str] = []
    begin, close = Engine.__init__, Engine.close

    def begun(self: Engine, *given: Any, **named: Any) -> None:
        begin(self, *given, **named)
        ENGINES.append(self)

    def closed(self: Engine) -> None:
        if not self._closed:
            hashes.append(self.weights_hash())
        close(self)

    Engine.__init__, Engine.close, Engine.end_training = begun, closed, closed  # type: ignore[method-assign]
    return hashes


ENGINES: list[Any] = []


def close_all() -> None:
    for engine in ENGINES:
        engine.close()


if __name__ == "__main__":
    sys.exit(main())
