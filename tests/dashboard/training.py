"""A job of two workers with its dashboard, as a person would start it."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

STEPS = 160
SCRIPT = """
import sys, time
import torch
from torch.utils.data import DataLoader, TensorDataset
import paceline

with paceline.Engine(project_dir=sys.argv[1], seed=1) as engine:
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = TensorDataset(torch.randn(2 * 160, 4), torch.randn(2 * 160, 1))
    model, optimizer, loader = engine.prepare(model, optimizer, DataLoader(data, batch_size=1))
    engine.init_trackers("run", config={"learning rate": 0.01})
    for points, labels in loader:
        loss = (model(points) - labels).square().mean()
        engine.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        engine.log({"loss": loss})
        time.sleep(0.05)
"""


@contextlib.contextmanager
def training(folder: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Its process, and where the dashboard is; the run's folder is `folder/run`."""
    script = folder / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "paceline.cli.main", "run", "--dashboard", "--workers", "2", script, folder]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as job:
        assert job.stderr is not None
        try:
            said = next(line for line in job.stderr if "dashboard at" in line)
            reading = threading.Thread(target=job.stderr.read, daemon=True)
            reading.start()
            yield job, re.findall(r"http://\S+", said)[0]
        finally:
            job.terminate()
            job.wait(60)
            reading.join(60)
