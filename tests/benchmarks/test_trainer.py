"""The Trainer and the bare loop that it is compared with take turns, and do the same work to the bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.benchmarks import script

bench = script("trainer")


def test_the_trainer_takes_its_turns_inside_its_own_loop_and_does_what_the_bare_loop_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    options = ["--batch-size", "2", "--rounds", "2", "--steps-per-round", "1"]
    bench.main([*options, "--json", str(tmp_path / "trainer.json")])
    result = json.loads((tmp_path / "trainer.json").read_text())
    assert result["same_weights"]
    assert len(result["rounds"]) == 2
    assert all(spread["least"] > 0 for spread in result["step_s"].values())
    assert "throughput, trainer / engine: " in capsys.readouterr().out
    assert (torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()) == before
    assert not dist.is_initialized()


def test_no_rounds_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        bench.main(["--rounds", "0"])
    assert "--rounds 0: it must be at least 1" in capsys.readouterr().err
