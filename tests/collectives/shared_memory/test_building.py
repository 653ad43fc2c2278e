"""The C kernels: built once, absent without complaint, and never taken from where somebody else could have put them."""

from __future__ import annotations

import ctypes
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline import World
from paceline.collectives.shared_memory import barrier, group, kernels, segment
from paceline.collectives.shared_memory.kernels import compiled_library
from paceline.world import environment
from tests.collectives.shared_memory.ranks import group_of, opts, succeeded
from tests.other_user import NOBODY, as_nobody, needs_root, shared_folder
from tests.workers import run_workers

needs_c = pytest.mark.skipif(compiled_library() is None, reason="no C compiler")
build = compiled_library.__wrapped__  # as a process does it that has not asked yet


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(environment, "cache_folder", lambda: tmp_path / "cache")
    return tmp_path / "cache" / "kernels"


@needs_c
def test_the_library_is_built_once_and_nothing_else_stays_in_the_folder(cache: Path) -> None:
    assert build() is not None
    (library,) = cache.iterdir()
    built = library.stat()
    assert build() is not None
    assert library.stat().st_mtime_ns == built.st_mtime_ns
    assert library.stat().st_mode & 0o077 == 0


def test_without_a_compiler_there_is_no_library_and_no_complaint(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kernels, "COMPILERS", ("no-such-compiler",))
    assert build() is None
    assert capfd.readouterr() == ("", "")


def failing_compiler(folder: Path) -> str:
    script = folder / "cc"
    script.write_text('#!/bin/sh\n[ "$1" = --version ] && echo 1.0 && exit 0\necho broken >&2\nexit 1\n')
    script.chmod(0o755)
    return str(script)


def test_a_compiler_that_fails_means_no_library_and_no_complaint(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kernels, "COMPILERS", (failing_compiler(tmp_path),))
    assert build() is None
    assert capfd.readouterr() == ("", "")
    assert list(cache.iterdir()) == []


def test_a_cache_that_cannot_be_written_means_no_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setattr(environment, "cache_folder", lambda: tmp_path / "file")
    assert build() is None


@needs_c
def test_a_damaged_library_means_no_library(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(compiler: str, library: Path) -> None:
        library.write_bytes(b"not a library")
        library.chmod(0o700)

    monkeypatch.setattr(kernels, "_build", write)
    monkeypatch.setattr(kernels, "_digest", lambda compiler: "damaged")  # what is loaded already has another name
    assert build() is None


@needs_c
@pytest.mark.parametrize(
    "spoil",
    [
        lambda library: library.chmod(0o722),
        lambda library: library.chmod(0o702),
        lambda library: library.parent.chmod(0o777),
    ],
    ids=["writable by the group", "writable by all", "in a folder writable by all"],
)
def test_a_library_that_somebody_else_could_have_written_is_not_loaded(
    cache: Path, spoil: Callable[[Path], None]
) -> None:
    assert build() is not None
    (library,) = cache.iterdir()
    spoil(library)
    assert build() is None


@needs_c
def test_a_library_of_another_user_is_not_loaded(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert build() is not None
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    assert build() is None


@pytest.fixture
def others_cache(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """In a folder of another user, who can rename it and put another in its place."""
    with shared_folder() as folder:
        os.chown(folder, NOBODY, NOBODY)
        monkeypatch.setattr(environment, "cache_folder", lambda: folder)
        yield folder / "kernels"


SWAP = "mv kernels theirs; mkdir kernels; for name in $(ls names); do echo planted > kernels/$name; done"


@needs_c
@needs_root
def test_a_cache_that_is_swapped_between_check_and_load_is_loaded_as_it_was_checked(
    others_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[bytes] = []

    def swap_and_read(path: str) -> str:
        names = others_cache.parent / "names"
        names.mkdir()
        (names / Path(path).name).touch()
        as_nobody(SWAP, others_cache.parent)
        loaded.append(Path(path).read_bytes())
        return path

    monkeypatch.setattr(ctypes, "CDLL", swap_and_read)
    assert build() is not None
    assert loaded[0].startswith(b"\x7fELF")


@needs_c
@needs_root
def test_the_compiler_is_not_led_to_another_folder(others_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither for the library nor for what it writes on the way, which would be linked as it is found."""
    run, folders = subprocess.run, []

    def swap_and_run(command: list[str], **named: Any) -> Any:
        if "-o" in command:
            as_nobody("mv kernels ours; mkdir -m 777 kernels", others_cache.parent)
            folders.append(named["env"]["TMPDIR"])
        return run(command, **named)

    monkeypatch.setattr(subprocess, "run", swap_and_run)
    monkeypatch.setattr(tempfile, "tempdir", str(others_cache.parent))
    assert build() is not None
    assert list(others_cache.iterdir()) == []
    assert [library.suffix for library in (others_cache.parent / "ours").iterdir()] == [".so"]
    assert folders == ["."]


def one_without_c(world: World) -> tuple[str, float]:
    if world.rank == 1:
        for module in (segment, group, barrier, kernels):
            module.compiled_library = lambda: None  # type: ignore[attr-defined]
    with group_of(world) as made:
        tensor = torch.ones(50_000)
        made.allreduce([tensor], opts(torch.distributed.ReduceOp.SUM)).wait()
        return made.kernels, tensor[-1].item()


@pytest.mark.workers
def test_if_one_rank_has_no_compiler_all_use_torch() -> None:
    assert succeeded(run_workers(one_without_c, 3)) == [("torch", 3.0)] * 3
