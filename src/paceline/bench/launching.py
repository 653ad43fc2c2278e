"""Start a race: the same supervisor, fork server and workers as `paceline run`, with `measure` as the script."""

from __future__ import annotations

import asyncio
import json
import tempfile
from pathlib import Path
from typing import Any

from paceline.bench.race import THREADS_PER_WORKER, Race
from paceline.launch.job import Job
from paceline.launch.supervisor import supervise
from paceline.launch.worker_main import Script
from paceline.world.world import LaunchSettings


def run_in_workers(race: Race) -> dict[str, Any] | int:
    """The result, or the exit code of workers that failed; the supervisor has told why."""
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        result_file = Path(folder) / "result.json"
        job = Job(
            script=Script("paceline.bench.measure", (race.to_json(), str(result_file)), is_module=True),
            workers=race.workers,
            servers=race.servers,
            settings=LaunchSettings(lanes=race.workers, threads=THREADS_PER_WORKER, backend=race.backend),
        )
        code = asyncio.run(supervise(job))
        if code != 0:
            return code
        result: dict[str, Any] = json.loads(result_file.read_text())
        return result
