"""`paceline monitor` and `paceline run --dashboard` as processes: they tell where, answer, and are gone afterwards."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.dashboard.training import training
from tests.monitor.simulated import Simulated

PATIENCE_S = 60.0
pytestmark = [pytest.mark.job, pytest.mark.timeout(180)]


def runs_at(url: str) -> list[dict[str, Any]]:
    where, _, token = url.partition("?token=")
    asked = urllib.request.Request(f"{where}runs", headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(asked, timeout=20) as answer:
        return json.loads(answer.read())  # type: ignore[no-any-return]


def wait_until(holds: Callable[[], bool]) -> None:
    ends = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < ends
        time.sleep(0.05)


def is_gone(url: str) -> bool:
    port = int(re.findall(r":(\d+)/", url)[0])
    try:
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
    except ConnectionRefusedError:
        return True
    return False


def test_monitor_ends_with_ctrl_c_while_a_browser_listens(tmp_path: Path) -> None:
    run = Simulated(2, 20).write(tmp_path / "run")
    command = [sys.executable, "-m", "paceline.cli.main", "monitor", run, "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        url = re.findall(r"dashboard at (\S+) \(Ctrl-C ends it\)", server.stderr.readline())[0]
        assert [view["last_step"] for view in runs_at(url)] == [20]
        where, _, token = url.partition("?token=")
        asked = urllib.request.Request(f"{where}events", headers={"Authorization": f"Bearer {token}"})
        with urllib.request.urlopen(asked, timeout=20) as stream:
            stream.readline()
            server.send_signal(signal.SIGINT)
            assert server.wait(20) == 0
        assert is_gone(url)
        assert server.stderr.read() == ""


def test_a_jobs_dashboard_is_gone_when_its_supervisor_is_killed(tmp_path: Path) -> None:
    with training(tmp_path) as (job, url):
        wait_until(lambda: any(view.get("last_step", 0) > 3 for view in runs_at(url)))
        assert runs_at(url)[0]["folder"] == str(tmp_path / "run")
        job.kill()
        wait_until(lambda: is_gone(url))
