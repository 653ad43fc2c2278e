"""The libraries of a wheel: one for each kind of processor, the same bits from all, a tag that says what they need."""

from __future__ import annotations

import ctypes
import random
import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.collectives.shared_memory import kernel_build, kernels
from paceline.collectives.shared_memory.kernel_build import (
    VARIANTS,
    Variant,
    find_compiler,
    needed_glibc,
    processor_has,
)
from paceline.collectives.shared_memory.kernels import CKernels, TorchKernels
from paceline.collectives.shared_memory.operations import rank_merges
from paceline.compression import int8
from paceline.compression.block_codec import OwnedRows
from paceline.compression.int8 import Int8

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="no C compiler")

CPUINFO = Path("/proc/cpuinfo").read_text()
FUSED = re.compile(r"\tvfn?m(?:add|sub)")
NAMES = [variant.name for variant in VARIANTS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("variants")
    for variant in VARIANTS:
        kernel_build.compile_kernels(str(find_compiler()), variant.flags, variant.file, folder)
    return folder


def library_of(variant: Variant, folder: Path) -> ctypes.CDLL:
    if not processor_has(CPUINFO, variant.instructions):
        pytest.skip(f"this processor has not all of {', '.join(variant.instructions)}")
    return ctypes.CDLL(str(folder / variant.file))


def disassembled(library: Path) -> str:
    return subprocess.run(["objdump", "-d", library], capture_output=True, text=True, check=True).stdout


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize("variant", VARIANTS, ids=NAMES)
def test_every_variant_sums_to_the_bits_of_torch(variant: Variant, folder: Path) -> None:
    adder, draw = CKernels(library_of(variant, folder)), random.Random(variant.name)
    for case in range(60):
        torch.manual_seed(case)
        count, length, outs = draw.randint(1, 9), draw.randint(1, 5000), draw.randint(1, 3)
        rows = [
            torch.randn(length + 1)[draw.randint(0, 1) :][:length] * 10.0 ** draw.randint(-42, 30) for _ in range(count)
        ]
        ours, theirs = ([torch.empty(length) for _ in range(outs)] for _ in range(2))
        adder.sum_into(ours, rows, rank_merges(count))
        TorchKernels().sum_into(theirs, rows, rank_merges(count))
        for mine, other in zip(ours, theirs, strict=True):
            assert torch.equal(bits(mine), bits(other)), f"case {case}: {count} rows of {length}"


def coded(rows: int, block: int, parts: int) -> list[Tensor]:
    """All that Int8 makes of random values: payloads, what they lose, and their sum, coded again."""
    codec, made, payloads = Int8(block=block), [], []
    for _ in range(parts):
        values = torch.randn(rows, block) * 10.0 ** torch.randint(-40, 30, (rows, 1)).float()
        payloads.append(codec.split(values, (), None, torch.randn(rows, block)))
        made.append(values)
    lost, out = torch.empty(rows, block), torch.empty(rows, block)
    owned = OwnedRows((), None, torch.randn(rows, block), lost, out)
    total = codec.sum(payloads, rank_merges(parts), owned)
    return [*made, *payloads, lost, out, total]


def differing_cases(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Cases in which int8 by this library and by torch have not the same bits."""
    monkeypatch.setattr(int8, "choose_kernels", lambda _: CKernels(library))
    in_c, differing = int8.in_c.__wrapped__(), []
    for case in range(12):
        both = []
        for chosen in (in_c, None):
            monkeypatch.setattr(int8, "in_c", lambda chosen=chosen: chosen)
            torch.manual_seed(case)
            both.append(coded(rows=1 + case % 5, block=2 ** (4 + case % 8), parts=1 + case % 4))
        if not all(torch.equal(bits(ours), bits(theirs)) for ours, theirs in zip(*both, strict=True)):
            differing.append(case)
    return differing


@pytest.mark.parametrize("variant", VARIANTS, ids=NAMES)
def test_every_variant_codes_int8_to_the_bits_of_torch(
    variant: Variant, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A product and a sum in turn: the place where a fused multiply-add would show."""
    assert differing_cases(library_of(variant, folder), monkeypatch) == []


@pytest.mark.slow
def test_with_a_fused_multiply_add_the_bits_would_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So the test above can fail: the same source, with the instruction and leave to use it."""
    fused = Variant("fused", ("avx2", "fma"))
    flags = (*fused.flags, "-ffp-contract=fast")
    kernel_build.compile_kernels(str(find_compiler()), flags, fused.file, tmp_path)
    assert differing_cases(library_of(fused, tmp_path), monkeypatch)
    if shutil.which("objdump") is not None:
        assert FUSED.search(disassembled(tmp_path / fused.file))


@pytest.mark.skipif(shutil.which("objdump") is None, reason="no objdump")
def test_no_variant_has_a_fused_multiply_add_and_only_the_last_ones_have_wide_vectors(folder: Path) -> None:
    code = {variant.name: disassembled(folder / variant.file) for variant in VARIANTS}
    assert not any(map(FUSED.search, code.values()))
    assert {name: ("ymm" in text, "zmm" in text) for name, text in code.items()} == {
        "avx512": (True, True),
        "avx2": (True, False),
        "x86-64": (False, False),
    }


@pytest.mark.skipif(shutil.which("objdump") is None, reason="no objdump")
def test_the_glibc_of_the_tag_is_the_newest_that_objdump_finds(folder: Path) -> None:
    libraries = [folder / variant.file for variant in VARIANTS]
    told = subprocess.run(["objdump", "-T", *libraries], capture_output=True, text=True, check=True).stdout
    versions = {(int(a), int(b)) for a, b in re.findall(r"GLIBC_(\d+)\.(\d+)", told)}
    assert needed_glibc(libraries) == max(versions)


def test_a_library_that_names_no_glibc_gets_no_tag(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "musl.so").write_bytes(b"\x7fELF\0libc.musl-x86_64.so.1\0")
    assert needed_glibc([folder / VARIANTS[0].file, tmp_path / "musl.so"]) is None


def test_a_processor_without_one_instruction_gets_a_lesser_variant(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = {}
    monkeypatch.setattr(kernels, "SOURCE", folder / "kernels.c")
    monkeypatch.setattr(ctypes, "CDLL", lambda path: SimpleNamespace(path=path))
    for flags in ("sse2", "sse2 avx2", "avx2 avx512f avx512bw avx512dq", "avx2 avx512f avx512bw avx512dq avx512vl fma"):
        monkeypatch.setattr(kernels, "_cpuinfo", lambda flags=flags: f"flags\t\t: {flags}\nbugs\t: avx512vl\n")
        found: Any = kernels.prebuilt_library.__wrapped__()
        chosen[flags] = Path(found[1].path).name
    assert list(chosen.values()) == ["kernels-x86-64.so", "kernels-avx2.so", "kernels-avx2.so", "kernels-avx512.so"]


def test_cores_of_two_kinds_get_what_both_can_run() -> None:
    assert not processor_has("flags : avx2 avx512f\n\nflags : avx2\n", ("avx512f",))
    assert processor_has("flags : avx2 avx512f\n\nflags : avx2\n", ("avx2",))
    assert not processor_has("", ())


def test_with_a_prebuilt_library_no_compiler_is_asked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "SOURCE", folder / "kernels.c")
    monkeypatch.setattr(kernels, "prebuilt_library", kernels.prebuilt_library.__wrapped__)
    monkeypatch.setattr(kernels, "built_library", lambda: pytest.fail("the compiler was asked"))
    library = kernels.compiled_library.__wrapped__()
    assert library is not None
    assert Path(library._name).parent == folder


def test_prebuilt_libraries_that_cannot_be_loaded_are_built_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variant in VARIANTS:
        (tmp_path / variant.file).write_bytes(b"for another machine")
    monkeypatch.setattr(kernels, "SOURCE", tmp_path / "kernels.c")
    monkeypatch.setattr(kernels, "prebuilt_library", kernels.prebuilt_library.__wrapped__)
    monkeypatch.setattr(kernels, "built_library", lambda: "built")
    assert kernels.compiled_library.__wrapped__() == "built"
