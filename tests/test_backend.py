"""The backend is there for scripts that have never heard of paceline."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.job


def test_torch_knows_the_backend_without_an_import_of_ours() -> None:
    script = "import torch.distributed as dist, sys; print('PACELINE' in dist.Backend._plugins, len(sys.modules))"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout.startswith("True"), run.stderr


def test_registering_loads_nothing_of_the_backend_itself() -> None:
    script = "import torch, sys; print([name for name in sys.modules if 'shared_memory.' in name])"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout.strip() == "[]"
