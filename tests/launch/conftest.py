from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.launch.launching import FULL, PREAMBLE, QUICK, Launch


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Launch]]:
    """Start `paceline run FLAGS script.py ARGS` with this script; nothing of it outlives the test."""
    launches: list[Launch] = []

    def start(
        flags: str,
        script: str,
        arguments: str = "",
        *,
        torch: bool = False,
        environment: dict[str, str] | None = None,
    ) -> Launch:
        number = len(launches)
        (tmp_path / f"script{number}.py").write_text(script if torch else PREAMBLE + script)
        command = [*(FULL if torch else QUICK), *flags.split(), f"script{number}.py", *arguments.split()]
        launches.append(Launch(command, tmp_path, tmp_path / "tmp", environment or {}))
        return launches[-1]

    yield start
    for started in launches:
        if started.process.poll() is None:
            started.process.kill()
        started.process.communicate(timeout=10)
