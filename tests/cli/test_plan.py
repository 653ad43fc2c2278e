"""`paceline plan --model` of a model that looks at values, and where nothing fits: one line, with what helps."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.cli import main as command_line
from tests.planner.test_hardware import machine

Called = tuple[int, str, str]

LOOKS = """
import torch
from torch import nn

class Looks(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(256, 256)

    def forward(self, x):
        out = self.layer(x)
        return out if out.sum().item() > 0 else 2 * out

def model():
    return Looks(), torch.randn(32, 256), lambda module, batch: module(batch).square().mean()
"""


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Callable[..., Called]:
    """In a folder with a model that can't be traced, looks.py, and a profile of a machine, box.json."""
    (tmp_path / "looks.py").write_text(LOOKS)
    (tmp_path / "box.json").write_text(machine().to_json())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.delitem(sys.modules, "looks", raising=False)

    def call(*words: object) -> Called:
        monkeypatch.setattr(sys, "argv", ["paceline", "plan", "--model", "looks:model", *map(str, words)])
        capfd.readouterr()
        with pytest.raises(SystemExit) as end:
            command_line.main()
        said = capfd.readouterr()
        return int(end.value.code or 0), said.out, said.err

    return call


def test_compiled_code_is_planned_for_gpus_alone(plan: Callable[..., Called]) -> None:
    code, _, err = plan("--hardware", "box.json", "--compile")
    assert code == 2
    assert "compiled code is modelled for GPUs alone" in err


def test_a_model_that_can_t_be_compiled_is_named_with_its_line(plan: Callable[..., Called]) -> None:
    code, _, err = plan("--hardware", "H100", "--compile", "--no-checkpointing")
    assert code == 2
    assert "can't be traced" in err


def test_a_model_that_can_t_be_traced_is_run_for_real_where_it_is_timed(plan: Callable[..., Called]) -> None:
    code, out, err = plan("--hardware", "box.json", "--workers", 2, "--time")
    assert code == 0, err
    assert "looks:model can't be traced with fake tensors at " in err
    assert "looks.py:12 (return out if out.sum().item() > 0 else 2 * out)" in err
    assert err.rstrip().endswith("it is run for real instead")
    assert "model: a real step, measured" in out
    assert "first choice" in out


def test_without_time_the_line_says_how_it_can_be_planned_for(plan: Callable[..., Called]) -> None:
    code, _, err = plan("--hardware", "box.json", "--workers", 2, "--no-time")
    assert code == 2
    (line,) = err.splitlines()
    assert line.endswith("; --time runs it for real instead, on this machine"), line


def test_for_a_gpu_time_is_no_help_and_is_not_advised(plan: Callable[..., Called]) -> None:
    code, _, err = plan("--hardware", "H100", "--workers", 2, "--time")
    assert code == 2
    (line,) = err.splitlines()
    assert line.endswith(
        "; a model that needs values can be planned for on CPUs, where it is run for real, and not for NVIDIA H100 "
        "SXM5 80 GB"
    ), line
    assert "--time" not in line


def test_a_model_that_ran_for_real_and_does_not_fit_is_not_advised_flags_that_it_ignores(
    plan: Callable[..., Called],
) -> None:
    options = ("--hardware", "box.json", "--workers", 2, "--strategy", "ddp", "--time", "--no-checkpointing")
    code, _, err = plan(*options, "--memory-gib", (256 * 2**20 + 32 * 10**6 + 1.1 * 2**20) / 2**30)
    assert code == 2
    last = err.splitlines()[-1]
    assert "nothing fits: ddp, fp32, micro-batch 32 needs " in last
    assert last.endswith("for each worker. Not tried, and perhaps enough: a smaller batch of the model's own"), last


def test_a_precision_that_a_model_did_not_run_in_is_told_so(plan: Callable[..., Called]) -> None:
    code, _, err = plan("--hardware", "box.json", "--workers", 2, "--time", "--precision", "bf16")
    assert code == 2
    assert err.splitlines()[-1].endswith(
        "looks:model was not run in bf16: a model that can't be traced runs once, in fp32; leave --precision out"
    ), err
