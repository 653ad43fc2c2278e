"""Acts of another local user, by shell commands: the interpreter of this environment may be closed to it."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

NOBODY = 65534

needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")


def as_nobody(script: str, folder: Path) -> None:
    done = subprocess.run(
        ["/bin/sh", "-euc", script],
        cwd=folder, user=NOBODY, group=NOBODY, extra_groups=[], capture_output=True, timeout=10, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@contextmanager
def shared_folder(mode: int = 0o1777) -> Iterator[Path]:
    """As /tmp is, or the other user's own by another mode; pytest's folders can't be entered by other users."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    try:
        folder.chmod(mode)
        yield folder
    finally:
        shutil.rmtree(folder)
