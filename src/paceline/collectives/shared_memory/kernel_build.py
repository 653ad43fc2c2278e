"""How kernels.c becomes a library: for every x86-64 when a wheel is built, or for this processor at first use.

    kernels-avx512.so      ┐
    kernels-avx2.so        ├ in a wheel (hatch_build.py), beside kernels.c: the first that this processor has
    kernels-x86-64.so      ┘
    kernels-<digest>.so      -march=native, in the user's cache: where there is none of the others

All of them give the same bits. Sums are taken element by element, in the order of the source, however wide a vector is;
and -ffp-contract=off keeps a product and a sum from becoming one instruction, which rounds once instead of twice (a
wheel's variants are built for processors without that instruction).

This file needs the standard library alone: a wheel is built where neither torch nor paceline is installed.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).with_name("kernels.c")
COMPILERS = ("cc", "gcc", "clang")
FLAGS = ("-O3", "-fPIC", "-shared", "-std=gnu11", "-ffp-contract=off")
LIBRARIES = ("-Wl,--as-needed", "-lm")  # rintf, where it is no instruction
BUILD_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Variant:
    """A library for processors with these instructions, named as in /proc/cpuinfo and as the compiler names them."""

    name: str
    instructions: tuple[str, ...] = ()

    @property
    def file(self) -> str:
        return f"kernels-{self.name}.so"

    @property
    def flags(self) -> tuple[str, ...]:
        return ("-march=x86-64", "-mtune=generic", "-s", *(f"-m{one}" for one in self.instructions))


VARIANTS = (  # the best first
    Variant("avx512", ("avx2", "avx512f", "avx512bw", "avx512dq", "avx512vl")),
    Variant("avx2", ("avx2",)),
    Variant("x86-64"),
)


def find_compiler(names: tuple[str, ...] = COMPILERS) -> str | None:
    return next(filter(None, map(shutil.which, names)), None)


def compile_kernels(
    compiler: str, flags: tuple[str, ...], name: str, folder: Path, variables: Mapping[str, str] | None = None
) -> None:
    """Raises OSError or SubprocessError where the compiler can't."""
    command = [compiler, *FLAGS, *flags, "-o", name, str(SOURCE.absolute()), *LIBRARIES]
    subprocess.run(command, check=True, capture_output=True, timeout=BUILD_TIMEOUT_S, cwd=folder, env=variables)


def needed_glibc(libraries: list[Path]) -> tuple[int, int] | None:
    """The oldest glibc that has all that they call; None if one names no version of it (another C library).

    A library's table of strings holds the version of each symbol that it takes from elsewhere.
    """
    needed = []
    for library in libraries:
        versions = re.findall(rb"\0GLIBC_(\d+)\.(\d+)(?:\.\d+)?(?=\0)", library.read_bytes())
        if not versions:
            return None
        needed.append(max((int(major), int(minor)) for major, minor in versions))
    return max(needed, default=None)


def processor_has(cpuinfo: str, instructions: tuple[str, ...]) -> bool:
    """The kernel lists an instruction set there only if it also saves its registers. Every processor must have it."""
    flags = [set(line.partition(":")[2].split()) for line in cpuinfo.splitlines() if line.startswith("flags")]
    return bool(flags) and all(one.issuperset(instructions) for one in flags)
