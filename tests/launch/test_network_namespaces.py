"""Two hosts that share nothing but a network: namespaces joined by a veth pair, one `paceline run` in each."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None, reason="needs root and iproute2 to make network namespaces"
)

SCRIPT = """
import torch, paceline
engine = paceline.Engine()
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
model, optimizer, loader = engine.prepare(model, optimizer, torch.utils.data.DataLoader(data, batch_size=4))
for x, y in loader:
    engine.backward(torch.nn.functional.mse_loss(model(x), y))
    optimizer.step()
engine.print("weights", engine.weights_hash(), "on", engine.world.hosts, "hosts")
"""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=10)


@pytest.fixture
def hosts() -> Iterator[tuple[str, str]]:
    """Two namespaces, 10.77.0.1 and 10.77.0.2, with loopback up."""
    names = (f"paceline-a{os.getpid()}", f"paceline-b{os.getpid()}")
    made: list[str] = []
    try:
        for name in names:
            ip("netns", "add", name)
            made.append(name)
        ip("link", "add", "pl0", "netns", names[0], "type", "veth", "peer", "name", "pl0", "netns", names[1])
        for number, name in enumerate(names, start=1):
            ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", "pl0")
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", "pl0", "up")
        yield names
    finally:
        for name in made:
            ip("netns", "del", name)


def test_two_hosts_train_to_the_bits_of_one(hosts: tuple[str, str], tmp_path: Path) -> None:
    script, secret = tmp_path / "train.py", tmp_path / "secret"
    script.write_text(SCRIPT)
    secret.write_text("known to both hosts")
    paceline = [sys.executable, "-c", "from paceline.cli.main import main; main()"]
    job = ["run", "--workers", "1", "--lanes", "2", "--hosts", "2", "--coordinator", "10.77.0.1:29650"]
    running = [
        subprocess.Popen(
            ["ip", "netns", "exec", host, *paceline, *job, "--host-rank", str(rank), "--secret-file", secret, script],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank, host in enumerate(hosts)
    ]  # fmt: skip
    try:
        said = [process.communicate(timeout=60)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0, 0], said
    alone = subprocess.run(
        [*paceline, "run", "--lanes", "2", str(script)], capture_output=True, text=True, timeout=60, check=True
    )
    (expected,) = [line.split()[1] for line in alone.stdout.splitlines() if line.startswith("weights")]
    assert f"weights {expected} on 2 hosts" in said[0]
