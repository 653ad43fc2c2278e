"""kernels.c, built at first use by the system's compiler and kept in the user's cache; absent without complaint.

The file's name holds a digest of the source, the compiler and the processor: another of these is another file. It is
published by a rename, so processes that build it at the same time don't meet, and loaded only if it is the user's own.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from paceline.world import environment

SOURCE = Path(__file__).with_name("kernels.c")
FLAGS = ("-O3", "-march=native", "-fPIC", "-shared", "-std=gnu11", "-ffp-contract=off")
COMPILERS = ("cc", "gcc", "clang")
BUILD_TIMEOUT_S = 60.0


@cache
def compiled_library() -> ctypes.CDLL | None:
    """The library, built if need be; None where there is no compiler or it can't build or keep it."""
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None or not SOURCE.exists():
        return None
    try:
        folder = environment.cache_folder() / "kernels"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        library = folder / f"kernels-{_digest(compiler)}.so"
        if not library.exists():
            _build(compiler, library)
        if not all(map(_is_ours_alone, (folder, library))):
            return None
        return ctypes.CDLL(str(library))
    except (OSError, subprocess.SubprocessError):
        return None


def _is_ours_alone(path: Path) -> bool:
    """Nobody else could have put it there."""
    about = path.stat()
    return about.st_uid == os.getuid() and not about.st_mode & 0o022


def _build(compiler: str, library: Path) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        made = Path(folder) / library.name
        command = [compiler, *FLAGS, "-o", str(made), str(SOURCE)]
        subprocess.run(command, check=True, capture_output=True, timeout=BUILD_TIMEOUT_S)
        made.chmod(0o700)
        made.rename(library)


def _digest(compiler: str) -> str:
    version = subprocess.run([compiler, "--version"], check=True, capture_output=True, timeout=BUILD_TIMEOUT_S).stdout
    parts = (SOURCE.read_bytes(), version, " ".join(FLAGS).encode(), _processor().encode())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:24]


def _processor() -> str:
    """What -march=native looks at: a library from another machine's home folder must not be run here."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(wanted)))
