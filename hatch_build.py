"""A wheel with the C kernels in it, where there is a compiler for x86-64 Linux: `python -m build`, `pip wheel .`

    compiler, x86-64, glibc      py3-none-manylinux_2_17_x86_64.whl      kernels-*.so beside kernels.c, built here
    anything else                py3-none-any.whl                        kernels.c alone: built at first use, or torch's
    an editable install          points at the checkout                  nothing is built

The tag's numbers are the oldest glibc that has every symbol the libraries need, which are read from the libraries.
"""

from __future__ import annotations

import importlib.util
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

KERNELS = Path("paceline", "collectives", "shared_memory")


class KernelsHook(BuildHookInterface[Any]):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            return
        self._folder = tempfile.TemporaryDirectory(prefix="paceline-kernels-")
        try:
            built, tag = self._build(Path(self._folder.name))
        except NoKernelsError as reason:
            self.app.display_warning(f"no kernels in this wheel, which is py3-none-any: {reason}")
            return
        build_data["pure_python"] = False
        build_data["tag"] = tag
        build_data["force_include"].update({str(file): str(KERNELS / file.name) for file in built})
        self.app.display_info(f"kernels in this wheel: {', '.join(file.name for file in built)}; {tag}")

    def _build(self, folder: Path) -> tuple[list[Path], str]:
        if sys.platform != "linux" or platform.machine() != "x86_64":
            raise NoKernelsError(
                f"they are built for Linux on x86_64, and this is {sys.platform} on {platform.machine()}"
            )
        recipe = load_recipe(Path(self.root))
        compiler = recipe.find_compiler()
        if compiler is None:
            raise NoKernelsError(f"there is no C compiler ({', '.join(recipe.COMPILERS)})")
        try:
            for variant in recipe.VARIANTS:
                recipe.compile_kernels(compiler, variant.flags, variant.file, folder)
        except (OSError, subprocess.SubprocessError) as error:
            told = getattr(error, "stderr", None) or b""
            raise NoKernelsError(f"{compiler} can't build them: {error} {told.decode(errors='replace')}") from error
        built = [folder / variant.file for variant in recipe.VARIANTS]
        glibc = recipe.needed_glibc(built)
        if glibc is None:
            raise NoKernelsError(f"{compiler} builds for another C library than glibc")
        return built, "py3-none-manylinux_{}_{}_x86_64".format(*glibc)

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if hasattr(self, "_folder"):
            self._folder.cleanup()


class NoKernelsError(Exception):
    pass


def load_recipe(root: Path) -> ModuleType:
    """kernel_build.py by its path: importing the package would need torch."""
    place = root / "src" / KERNELS / "kernel_build.py"
    spec = importlib.util.spec_from_file_location("kernel_build", place)
    if spec is None or spec.loader is None:
        raise ImportError(f"{place} can't be loaded")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module
