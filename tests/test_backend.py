"""The backend is there for scripts that have never heard of paceline, and never in their way."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.job

BROKEN = '''
import importlib.abc, sys

class Broken(importlib.abc.MetaPathFinder):
    """Of paceline only the entry point can be imported."""

    def find_spec(self, name, path=None, target=None):
        if name.startswith("paceline.") and name not in ("paceline.backend", "paceline.errors"):
            raise ImportError(f"no {name} here")

sys.meta_path.insert(0, Broken())
'''


def run(script: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment, command = os.environ | variables, [sys.executable, "-c", script, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)


def test_torch_knows_the_backend_without_an_import_of_ours() -> None:
    done = run("import torch.distributed as dist, sys; print('PACELINE' in dist.Backend._plugins, len(sys.modules))")
    assert done.stdout.startswith("True"), done.stderr


def test_registering_loads_nothing_else_of_paceline() -> None:
    done = run("import torch, sys; print(sorted(name for name in sys.modules if name.startswith('paceline')))")
    assert done.stdout.strip() == "['paceline', 'paceline.backend']", done.stderr


def test_importing_the_package_imports_nothing_heavy_and_an_engine_not_the_compiler() -> None:
    done = run(
        "import paceline, sys; print(sorted({name.partition('.')[0] for name in sys.modules} & {'torch', 'numpy'}))"
    )
    assert done.stdout.strip() == "[]", done.stderr
    done = run("from paceline import Engine; import sys; print('torch._dynamo' in sys.modules)")
    assert done.stdout.strip() == "False", done.stderr


def test_torch_is_imported_where_paceline_is_broken_and_a_group_says_so_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(BROKEN)
    script = """
import torch.distributed as dist
print("PACELINE" in dist.Backend._plugins)
try:
    dist.init_process_group("paceline", store=dist.HashStore(), rank=0, world_size=1)
except RuntimeError as error:
    print(error)
"""
    path = f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    done = run(script, PYTHONPATH=path)
    assert done.stdout.splitlines() == [
        "True",
        'the backend "paceline" can\'t be used here: ImportError: no paceline.collectives here; use backend="gloo", or '
        "install paceline again",
    ], done.stderr


def test_torch_is_imported_where_it_does_not_take_the_backend_and_the_doctor_says_so() -> None:
    script = """
import torch, torch.distributed as dist
def refuse(*args, **options):
    raise TypeError("another signature")
dist.Backend.register_backend = refuse
torch._import_device_backends()
print("imported")
from paceline.cli.doctor import torch_build
from paceline.world.world import World
print([finding.text for finding in torch_build(World()) if finding.about == "paceline backend"])
"""
    done = run(script, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert done.stdout.splitlines() == [
        "imported",
        "['torch.distributed does not take it: TypeError: another signature']",
    ], done.stderr


FREED = """
import sys, torch, torch.distributed as dist
from pathlib import Path

def resident_mib():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20

if sys.argv[1:] == ["group"]:
    dist.init_process_group("paceline", store=dist.HashStore(), rank=0, world_size=1)
before = resident_mib()
tensor = torch.ones(2**24)
full = resident_mib() - before
del tensor
print(full > 60, resident_mib() - before > 60)
"""


@pytest.mark.parametrize(
    ("arguments", "variables", "kept"),
    [
        (("group",), {}, True),
        ((), {}, False),
        (("group",), {"PACELINE_KEEP_MEMORY": "0"}, False),
        (("group",), {"MALLOC_ARENA_MAX": "2"}, False),
    ],
    ids=["a group", "no group", "not asked for", "an allocator that is set up"],
)
def test_a_script_with_a_group_of_the_backend_keeps_the_memory_that_it_frees(
    arguments: tuple[str, ...], variables: dict[str, str], kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_up = [name for name in os.environ if name.startswith("MALLOC_")]
    for name in ("PACELINE_KEEP_MEMORY", "GLIBC_TUNABLES", *set_up):
        monkeypatch.delenv(name, raising=False)
    done = run(FREED, *arguments, **variables)
    assert done.stdout.split() == ["True", str(kept)], done.stderr
