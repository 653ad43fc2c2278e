"""`paceline checkpoint`: what a run has saved, seen without starting one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from typer.testing import CliRunner, Result

from paceline import Engine, World
from paceline.checkpoint.manifest import complete_text
from paceline.cli.checkpoint import app
from paceline.errors import CheckpointError
from tests.damage import INSTEAD


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.embed(x))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps, both saved."""
    folder = tmp_path_factory.mktemp("run")
    with Engine(world=World()) as engine:
        model = Tied()
        data = TensorDataset(torch.randn(8, 8), torch.randn(8, 8))
        optimizer = torch.optim.AdamW(model.parameters())
        model, optimizer, loader = engine.prepare(model, optimizer, DataLoader(data, batch_size=4))
        checkpoints = engine.checkpoints(folder)
        for x, y in loader:
            engine.backward(F.mse_loss(model(x), y))
            optimizer.step()
            checkpoints.save(score=engine.step)
        checkpoints.close()
    return folder


def paceline(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_list_shows_the_newest_first_and_what_is_wrong_with_a_broken_one(saved: Path, tmp_path: Path) -> None:
    for name in ("checkpoint-1", "checkpoint-2"):
        (tmp_path / name).symlink_to(saved / name)
    (tmp_path / "checkpoint-3").mkdir()
    lines = paceline("list", tmp_path).stdout.splitlines()
    assert lines[0].split() == ["checkpoint", "step", "workers", "strategy", "size", "saved", "score"]
    assert lines[-1].startswith("checkpoint-3 is not usable: there is no checkpoint in")
    assert [line.split()[:4] for line in lines if line.startswith(("checkpoint-2", "checkpoint-1"))] == [
        ["checkpoint-2", "2", "1", "ddp"], ["checkpoint-1", "1", "1", "ddp"],
    ]  # fmt: skip
    assert next(line for line in lines if line.startswith("checkpoint-2")).rstrip().endswith("2 (best)")


def test_a_folder_without_checkpoints_is_told(tmp_path: Path) -> None:
    for verb in ("list", "show", "verify"):
        error = paceline(verb, tmp_path).exception
        assert isinstance(error, CheckpointError)
        assert str(error) == f"{tmp_path} has no checkpoint"


def test_show_tells_step_job_data_and_tensors(saved: Path) -> None:
    text = paceline("show", saved, "--tensors").stdout
    assert text.startswith(f"{saved}/checkpoint-2: step 2, ")
    for word in ("lanes", "seed", "strategy", "/models/0/embed.weight  F32 [8, 8]  [0:64] worker-00000-of-00001"):
        assert word in text
    manifest = json.loads(paceline("show", saved / "checkpoint-1", "--json").stdout)
    assert (manifest["format"], manifest["about"]["step"]) == (2, 1)


def test_verify_names_the_damaged_tensor_and_fails(saved: Path, tmp_path: Path) -> None:
    good = paceline("verify", saved)
    assert (good.exit_code, "all as they were written" in good.stdout) == (0, True)
    broken = tmp_path / "checkpoint-2"
    broken.mkdir()
    for path in (saved / "checkpoint-2").iterdir():
        data = bytearray(path.read_bytes())
        if path.suffix == ".safetensors":
            data[-5] ^= 16
        (broken / path.name).write_bytes(data)
    bad = paceline("verify", broken)
    assert bad.exit_code == 1
    assert "worker-00000-of-00001.safetensors is damaged: '/" in bad.stderr


def test_export_writes_one_file_with_tied_weights_once(saved: Path, tmp_path: Path) -> None:
    assert paceline("export", saved, tmp_path / "out.safetensors").exit_code == 0
    assert set(load_file(tmp_path / "out.safetensors")) == {"embed.weight", "embed.bias"}
    error = paceline("export", saved, tmp_path / "out.safetensors", "--model", 3).exception
    assert str(error).endswith("holds 1 models; there is no model 3")


def test_diff_says_where_two_states_part_and_nothing_for_the_same(saved: Path, tmp_path: Path) -> None:
    same = paceline("diff", saved / "checkpoint-2", saved)
    assert (same.exit_code, same.stdout) == (0, "no difference\n")
    other = paceline("diff", saved / "checkpoint-1", saved / "checkpoint-2", "--limit", 100)
    assert other.exit_code == 1
    assert "/models/0/embed.bias" in other.stdout
    assert "of 8 elements differ" in other.stdout
    assert "/step" in other.stdout


def test_weights_of_other_people_are_compared_and_pickled_objects_are_not_read(saved: Path, tmp_path: Path) -> None:
    paceline("export", saved, tmp_path / "ours.safetensors")
    weights = load_file(tmp_path / "ours.safetensors")
    torch.save({"state_dict": {**weights, "head.weight": weights["embed.weight"]}}, tmp_path / "theirs.pt")
    assert paceline("diff", saved, tmp_path / "theirs.pt").exit_code == 0
    torch.save({"state_dict": weights, "path": Path("x")}, tmp_path / "objects.pt")
    error = paceline("diff", saved, tmp_path / "objects.pt").exception
    assert isinstance(error, CheckpointError)
    assert "holds pickled objects besides tensors. Reading them would run code" in str(error)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["manifest.json", "COMPLETE", "worker-00000-of-00001.safetensors"])
@pytest.mark.parametrize("instead", INSTEAD)
def test_every_verb_says_in_one_line_what_is_wrong_with_a_damaged_checkpoint(
    saved: Path, tmp_path: Path, name: str, instead: str
) -> None:
    broken = tmp_path / "checkpoint-2"
    shutil.copytree(saved / "checkpoint-2", broken)
    (broken / name).unlink()
    INSTEAD[instead](broken / name)
    for words in (["list", tmp_path], ["show", broken], ["verify", broken], ["diff", broken, saved],
                  ["export", broken, tmp_path / "out.safetensors"], ["export", broken, "--hf", tmp_path / "out"],
                  ["export", broken, "--dcp", tmp_path / "out"]):  # fmt: skip
        said = paceline(*words)
        assert said.exit_code in (1, 2), (words, said.output)
        if said.exception is not None and not isinstance(said.exception, SystemExit):
            assert isinstance(said.exception, CheckpointError), (words, said.exception)
            assert len(str(said.exception).splitlines()) == 1
            assert "checkpoint-2" in str(said.exception)


def test_a_manifest_of_nothing_that_we_wrote_is_shown_all_the_same(saved: Path, tmp_path: Path) -> None:
    """Its checksum is right, so it is what somebody wrote: what can be shown is, and control characters are not."""
    broken = tmp_path / "checkpoint-2"
    shutil.copytree(saved / "checkpoint-2", broken)
    manifest = json.loads((broken / "manifest.json").read_bytes())
    manifest["about"] = {"step": 7, "strategy": "[/]\x1b[31m", "workers": [], "score": 1}
    manifest["tree"] = {"job": 3}
    text = json.dumps(manifest).encode()
    (broken / "manifest.json").write_bytes(text)
    (broken / "COMPLETE").write_bytes(complete_text(text))
    listed = paceline("list", tmp_path)
    assert listed.exit_code == 0, listed.exception
    assert "[/]\\x1b[31m" in listed.stdout
    assert paceline("show", broken).exit_code == 0
    for format in ("--hf", "--dcp"):
        assert "holds no models" in str(paceline("export", broken, format, tmp_path / "out").exception)
    assert not (tmp_path / "out").exists()
