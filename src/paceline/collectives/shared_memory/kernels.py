"""Adding many buffers into one, and waiting for words in shared memory: in C where there is a compiler, or in torch.

    sum_into([out, …], [row 0, row 1, …], merges)       every out gets the rows added along the canonical tree

Both versions add in the same order, element by element, so they give the same bits. The C version adds in one pass over
memory and writes what others will read past the caches; torch's takes a pass per addition and per copy.

A wheel for Linux on x86-64 brings kernels.c as libraries (`kernel_build.py`). Elsewhere it is built at first use by the
system's compiler and kept in the user's cache; absent without complaint. That file's name holds a digest of the source,
the compiler and the processor: another of these is another file. It is published by a rename, so processes that build
it at the same time don't meet, and loaded only if it is the user's own: the folder and the file are checked and used
through their descriptors, so renaming the folder gains another user nothing.
"""

from __future__ import annotations

import ctypes
import hashlib
import platform
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from paceline.collectives.shared_memory.kernel_build import (
    BUILD_TIMEOUT_S,
    COMPILERS,
    FLAGS,
    LIBRARIES,
    SOURCE,
    VARIANTS,
    Variant,
    compile_kernels,
    find_compiler,
    processor_has,
)
from paceline.world import environment
from paceline.world.owned_folder import OwnedFolder, open_own_file

Merges = Sequence[tuple[int, int]]  # (left, right): row left += row right; the last left is the sum
MOST_ROWS = 128  # as in kernels.c
# Below this many bytes (as in kernels.c) a buffer is likely to be read again from a cache, so it is written through it.
STREAM_FROM = 8 * 2**20


class Kernels(Protocol):
    name: str

    def sum_into(self, outs: Sequence[Tensor], rows: Sequence[Tensor], merges: Merges) -> None:
        """fp32, flat, of one length. An out may be one of the rows."""
        ...

    def copy(self, to: Tensor, source: Tensor, *, past_caches: bool = False) -> None:
        """Flat, contiguous, of one dtype and length. `past_caches`: what `to` is a part of is read much later."""
        ...


class TorchKernels:
    name = "torch"

    def sum_into(self, outs: Sequence[Tensor], rows: Sequence[Tensor], merges: Merges) -> None:
        total = merged(rows, merges, outs[0])
        for out in outs if total.data_ptr() != outs[0].data_ptr() else outs[1:]:
            out.copy_(total)

    def copy(self, to: Tensor, source: Tensor, *, past_caches: bool = False) -> None:
        to.copy_(source)


class CKernels:
    name = "c"

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        self._sum = library.paceline_sum
        self._copy = library.paceline_copy
        self._copy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        self._copy.restype = None
        self._sum.argtypes = [
            ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_int,
            ctypes.c_size_t, ctypes.c_void_p,
        ]  # fmt: skip

    def sum_into(self, outs: Sequence[Tensor], rows: Sequence[Tensor], merges: Merges) -> None:
        if len(rows) > MOST_ROWS:
            TorchKernels().sum_into(outs, rows, merges)
            return
        out_addresses = [out.data_ptr() for out in outs]
        row_addresses = [row.data_ptr() for row in rows]
        large = rows[0].nbytes >= STREAM_FROM
        failed = self._sum(
            (ctypes.c_uint64 * len(outs))(*out_addresses),
            len(outs),
            (ctypes.c_uint64 * len(rows))(*row_addresses),
            len(rows),
            merge_table(tuple(merges)),
            len(merges),
            rows[0].numel(),
            bytes(large and address not in row_addresses for address in out_addresses),
        )
        if failed:
            raise MemoryError(f"no room for {len(rows)} blocks of sums")

    def copy(self, to: Tensor, source: Tensor, *, past_caches: bool = False) -> None:
        self._copy(to.data_ptr(), source.data_ptr(), to.nbytes, past_caches)


@cache
def merge_table(merges: tuple[tuple[int, int], ...]) -> ctypes.Array[ctypes.c_int32]:
    return (ctypes.c_int32 * max(1, 2 * len(merges)))(*(row for merge in merges for row in merge))


def merged(rows: Sequence[Tensor], merges: Merges, room: Tensor) -> Tensor:
    """The rows added along `merges`, in torch: in `room`, or the row itself when there is one."""
    if not merges:
        return rows[0]
    sums: dict[int, Tensor] = {}
    alive = len(merges)
    for left, right in merges:
        alive -= 1
        taken, given = sums.get(left, rows[left]), sums.pop(right, rows[right])
        # The last addition writes to `room`, which may be one of the rows: earlier ones must not.
        sums[left] = torch.add(taken, given, out=room if alive == 0 else sums.get(left))
    return sums[merges[-1][0]]


_choosing = threading.Lock()


def choose_kernels(wanted: str | None = None) -> Kernels:
    """C where it can be had, unless torch is asked for."""
    if wanted == "torch":
        return TorchKernels()
    with _choosing:
        library = compiled_library()
    return TorchKernels() if library is None else CKernels(library)


# -- building the C kernels --------------------------------------------------------------------------------------------


NATIVE = ("-march=native",)


@cache
def compiled_library() -> ctypes.CDLL | None:
    """The library that came with the package, or one built here; None where there is neither."""
    prebuilt = prebuilt_library()
    return built_library() if prebuilt is None else prebuilt[1]


@cache
def prebuilt_library() -> tuple[Variant, ctypes.CDLL] | None:
    """The best of a wheel that this processor can run; None without a wheel, or where its files can't be loaded."""
    for variant in VARIANTS:
        library = SOURCE.with_name(variant.file)
        if library.exists() and processor_has(_cpuinfo(), variant.instructions):
            try:
                return variant, ctypes.CDLL(str(library))
            except OSError:  # another C library, a file system that runs nothing
                return None
    return None


def built_library() -> ctypes.CDLL | None:
    """Built if need be; None where there is no compiler or it can't build or keep it."""
    compiler = find_compiler(COMPILERS)
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
        variables = environment.with_temporary_files_in(".")
        compile_kernels(compiler, NATIVE, library.name, Path(folder), variables)
        made = Path(folder) / library.name
        made.chmod(0o700)
        made.rename(library)


def _digest(compiler: str) -> str:
    version = subprocess.run([compiler, "--version"], check=True, capture_output=True, timeout=BUILD_TIMEOUT_S).stdout
    parts = (SOURCE.read_bytes(), version, " ".join((*FLAGS, *NATIVE, *LIBRARIES)).encode(), _processor().encode())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:24]


def _processor() -> str:
    """What -march=native looks at: a library from another machine's home folder must not be run here."""
    if not _cpuinfo():
        return platform.processor()
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(dict.fromkeys(line for line in _cpuinfo().splitlines() if line.startswith(wanted)))


@cache
def _cpuinfo() -> str:
    try:
        return Path("/proc/cpuinfo").read_text()
    except OSError:
        return ""
