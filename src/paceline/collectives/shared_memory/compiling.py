"""kernels.c, built at first use by the system's compiler and kept in the user's cache; absent without complaint.

The file's name holds a digest of the source, the compiler and the processor: another of these is another file. It is
published by a rename, so processes that build it at the same time don't meet, and loaded only if it is the user's own:
the folder and the file are checked and used through their descriptors, so whoever can rename the folder gains nothing.
"""

from __future__ import annotations

import ctypes
import hashlib
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from paceline.world import environment
from paceline.world.owned_folder import OwnedFolder, open_own_file

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
        with OwnedFolder(folder) as cache:
            library = cache.through / f"kernels-{_digest(compiler)}.so"
            if not library.exists():
                _build(compiler, library)
            with open_own_file(library):
                return ctypes.CDLL(str(library))
    except (OSError, subprocess.SubprocessError):
        return None


def _build(compiler: str, library: Path) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        # The compiler works in that folder, which has another name in its process, and keeps its own files there too.
        command = [compiler, *FLAGS, "-o", library.name, str(SOURCE.absolute())]
        variables = environment.with_temporary_files_in(".")
        subprocess.run(command, check=True, capture_output=True, timeout=BUILD_TIMEOUT_S, cwd=folder, env=variables)
        made = Path(folder) / library.name
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
