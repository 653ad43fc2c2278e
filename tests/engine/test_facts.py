"""What a joiner is compared by: code of the user's own, and nothing that is installed."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

import pytest

from paceline.engine import facts as process_facts


def test_modules_of_an_environment_that_is_reached_by_a_link_are_installed_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = sysconfig.get_paths()
    (tmp_path / "venv").symlink_to(Path(paths["purelib"]).resolve())
    linked = paths | dict.fromkeys(("platstdlib", "purelib", "platlib"), str(tmp_path / "venv"))
    (tmp_path / "mine.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sysconfig, "get_paths", lambda: linked)
    __import__("mine")
    process_facts._own_code.cache_clear()
    try:
        names = set(process_facts._own_code())
    finally:
        process_facts._own_code.cache_clear()
        del sys.modules["mine"]
    assert "module mine" in names
    assert not [name for name in names if name.startswith(("module torch", "module numpy"))]
