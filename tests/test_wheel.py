"""The wheel: installed beside torch, without a compiler, it trains to the hash of the checkout, in C and without."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

import paceline
from paceline.collectives.shared_memory.kernel_build import VARIANTS, find_compiler

ROOT = Path(__file__).parents[1]
PLACE = "paceline/collectives/shared_memory"
BUILD = "import sys; from hatchling.build import build_{0}; print(build_{0}(sys.argv[1]))"
pytest.importorskip("hatchling", reason="what builds the wheel is not installed here")


def test_the_version_has_one_place_and_what_repeats_it_agrees() -> None:
    assert 'dynamic = ["version"]' in (ROOT / "pyproject.toml").read_text()
    assert f"\nversion: {paceline.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    (released,) = re.findall(r"date-released: (\S+)", (ROOT / "CITATION.cff").read_text())
    assert f"\n## {paceline.__version__} ({released})\n" in (ROOT / "CHANGELOG.md").read_text()


def build(kind: str, source: Path, into: Path, path: str | None = None) -> Path:
    """As `pip wheel` has it built, without a network; `path` is where it looks for a compiler."""
    variables = os.environ if path is None else os.environ | {"PATH": path}
    done = subprocess.run(
        [sys.executable, "-c", BUILD.format(kind), str(into)],
        cwd=source, env=variables, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return into / done.stdout.split()[-1]


def installed(wheel: Path, folder: Path) -> Path:
    """A virtual environment with the wheel; its other packages are those of this Python, behind it on the path."""
    venv.create(folder, with_pip=False, symlinks=True)
    site = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder), "platbase": str(folder)}))
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--target", str(site), str(wheel)], check=True, timeout=300)
    # A line of a .pth file is run as it is read: the folder alone, not its .pth files, of which one is the checkout's.
    (site / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin" / "python"


def train(python: Path | str, folder: Path, **variables: str) -> str:
    """Two workers; everything that they print."""
    folder.mkdir()
    kept = {name: value for name, value in os.environ.items() if name in ("HOME", "LANG")}
    done = subprocess.run(
        [python, "-m", "paceline", "run", "--workers", "2", ROOT / "examples/train_gpt.py", "--steps", "2"],
        cwd=folder, env=kept | variables, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def weights(printed: str) -> list[str]:
    return re.findall(r"weights (sha256:\w+)", printed)


@pytest.mark.job
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(find_compiler() is None, reason="no C compiler")
def test_a_wheel_without_a_compiler_trains_to_the_hash_of_the_checkout(tmp_path: Path) -> None:
    (tmp_path / "bare").mkdir()  # a PATH without a compiler, or anything
    wheel = build("wheel", ROOT, tmp_path)
    assert re.fullmatch(rf"paceline-{re.escape(paceline.__version__)}-py3-none-manylinux_2_\d+_x86_64\.whl", wheel.name)
    python = installed(wheel, tmp_path / "environment")
    nowhere = {"PATH": str(tmp_path / "bare"), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    expected = train(sys.executable, tmp_path / "checkout", PYTHONPATH=str(ROOT / "src"), PATH=os.environ["PATH"])

    in_c = train(python, tmp_path / "in_c", **nowhere)
    assert "(kernels: c)" in in_c
    assert not (tmp_path / "cache" / "paceline" / "kernels").exists(), "something was built"
    found = subprocess.run(
        [python, "-m", "paceline", "doctor"], env=nowhere, capture_output=True, text=True, timeout=120
    )
    assert re.search(r"^ok +kernels +c \(prebuilt, [\w-]+\)", found.stdout, re.MULTILINE), found.stdout + found.stderr
    assert str(tmp_path / "environment") in found.stdout

    for variant in VARIANTS:
        next((tmp_path / "environment").rglob(variant.file)).unlink()
    in_torch = train(python, tmp_path / "in_torch", **nowhere)
    assert "(kernels: torch)" in in_torch
    assert weights(in_c) == weights(in_torch) == weights(expected) != []


@pytest.mark.job
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_without_a_compiler_the_wheel_is_pure_and_an_sdist_builds_the_same_files(tmp_path: Path) -> None:
    (tmp_path / "bare").mkdir()
    sdist = build("sdist", ROOT, tmp_path)
    shutil.unpack_archive(sdist, tmp_path / "unpacked")
    (source,) = (tmp_path / "unpacked").iterdir()
    pure = build("wheel", source, tmp_path, path=str(tmp_path / "bare"))
    assert pure.name == f"paceline-{paceline.__version__}-py3-none-any.whl"
    files = set(zipfile.ZipFile(pure).namelist())
    assert f"{PLACE}/kernels.c" in files
    assert not [file for file in files if file.endswith(".so")]
    if find_compiler() is not None:
        full = set(zipfile.ZipFile(build("wheel", ROOT, tmp_path)).namelist())
        assert full - files == {f"{PLACE}/{variant.file}" for variant in VARIANTS}
