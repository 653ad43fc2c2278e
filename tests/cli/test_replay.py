"""`paceline replay`: a run that was started from the command line is done again from its record alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.job

SCRIPT = """
import sys, time
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
import paceline
from paceline.parameter_server.clock import BoundedStaleness
from paceline.strategies.server import ParameterServer

strategy = ParameterServer(clock=BoundedStaleness(steps=2), record=sys.argv[1])
engine = paceline.Engine(strategy=strategy, device="cpu", seed=3)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
data = TensorDataset(torch.randn(96, 8), torch.randint(0, 4, (96,)))
model, optimizer, loader = engine.prepare(model, optimizer, DataLoader(data, batch_size=4, shuffle=True))
for epoch in range(int(sys.argv[2])):
    for x, y in loader:
        time.sleep(0.002 * engine.world.rank)
        engine.backward(F.cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
engine.print("weights", engine.weights_hash())
"""


def paceline(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "paceline.cli.main", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)


def test_replay_gives_the_bits_of_the_run_and_says_when_the_script_is_another(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    run = paceline(tmp_path, "run", "--workers", "2", "--servers", "1", "--threads", "1", "train.py", "run", "2")
    assert run.returncode == 0, run.stderr
    (weights,) = [line.split()[-1] for line in run.stdout.splitlines() if "weights sha256" in line]

    again = paceline(elsewhere, "replay", "../run")
    assert (again.returncode, again.stderr) == (0, "")
    assert f"weights {weights}" in again.stdout
    assert again.stdout.splitlines()[-1].startswith("paceline: replayed ")
    assert again.stdout.endswith(f"pushes of 2 workers: {weights} equal to the recorded run\n")

    script.write_text(SCRIPT.replace("Linear(8, 16)", "Linear(8, 16, bias=False)"))
    other = paceline(elsewhere, "replay", "../run")
    assert other.returncode == 1
    assert "trained another model, or cut it into other keys" in other.stderr
    assert other.stderr.endswith("(train.py is not the file that it was then)\n")


def test_a_folder_without_a_log_is_named(tmp_path: Path) -> None:
    found = paceline(tmp_path, "replay", "nothing")
    assert found.returncode == 2
    assert "no log of a parameter server is here" in found.stderr
