"""Blocks run: Python beside an engine and a small model; commands marked `<!-- run -->` as a person types them."""

from __future__ import annotations

import ast
import builtins
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline import World
from tests.docs.blocks import ROOT, Block, blocks
from tests.workers import run_workers

RUN = [block for block in blocks() if block.treatment == "run"]
PYTHON = [block for block in RUN if block.language == "python" and block.reason != "job"]
JOBS = [block for block in RUN if block not in PYTHON]
LINKED = ("examples", "tests", "docs", "benchmarks", "README.md", "Makefile", "src")


def free_names(code: str) -> set[str]:
    """What a block uses and does not make itself."""
    names = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Name)]
    made = {node.id for node in names if isinstance(node.ctx, ast.Store)}
    return {node.id for node in names} - made - set(dir(builtins))


def surroundings(wanted: set[str]) -> dict[str, Any]:
    """What the page has made before: an engine, a prepared model, and the imports that everybody has."""
    import logging

    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    import paceline

    data = TensorDataset(torch.randn(32, 8), torch.randn(32, 1))
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    names: dict[str, Any] = {
        "torch": torch, "nn": nn, "DataLoader": DataLoader, "paceline": paceline, "logging": logging, "data": data,
        "dataset": data, "model": model, "optimizer": torch.optim.AdamW(model.parameters()), "epochs": 1, "rank": 0,
        "loader": DataLoader(data, batch_size=4, shuffle=True), "lengths": [1 + i % 7 for i in range(32)], "pad": list,
    }  # fmt: skip
    if "Gpt" in wanted:
        names |= {"Gpt": lambda width: nn.Linear(width, 1), "config": 8}
    if "DistributedDataParallel" in wanted:
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        names["DistributedDataParallel"] = nn.parallel.DistributedDataParallel
    elif wanted & {"engine", "loader"}:
        names["engine"] = engine = paceline.Engine(lanes=2, seed=1)
        if "prepare" not in wanted:
            prepared = engine.prepare(model, names["optimizer"], names["loader"])
            names["model"], names["optimizer"], names["loader"] = prepared
    return names


def run_block(world: World, code: str, folder: str) -> None:
    os.chdir(folder)
    Path("a.txt").write_text("some text " * 100)
    Path("b.txt").write_text("some more text " * 100)
    wanted = free_names(code) | ({"prepare"} if "engine.prepare(" in code else set())
    exec(compile(code, "block", "exec"), {"__name__": "block", **surroundings(wanted)})


@pytest.mark.workers
@pytest.mark.parametrize("block", PYTHON, ids=str)
def test_a_block_of_python_runs(block: Block, tmp_path: Path) -> None:
    (result,) = run_workers(run_block, 1, code=block.code, folder=str(tmp_path))
    assert result.error is None, f"{block}: {result.error}\n{result.traceback}"


@pytest.mark.job
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("block", JOBS, ids=str)
def test_a_block_of_commands_runs(block: Block, tmp_path: Path) -> None:
    for name in LINKED:
        (tmp_path / name).symlink_to(ROOT / name)
    tools = Path(sys.executable).parent
    (tmp_path / ".venv").symlink_to(tools.parent)
    environment = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT / "src")}
    if block.language == "python":
        (tmp_path / "block.py").write_text(block.code)
        command = [sys.executable, "block.py"]
    else:
        command = ["bash", "-euo", "pipefail", "-c", block.code]
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280)
    assert ended.returncode == 0, f"{block}\n{ended.stdout[-3000:]}\n{ended.stderr[-3000:]}"
