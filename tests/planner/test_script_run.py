"""`paceline plan SCRIPT`: the script's own loop is profiled, on fake tensors or for real, and nothing is trained."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.errors import ConfigError
from paceline.planner.model_profile import Variant
from paceline.planner.script_run import profile_script
from paceline.planner.search import Request

ROOT = Path(__file__).parents[2]
GUIDES = sorted((ROOT / "examples/guides").glob("from_*.py"))

pytestmark = [pytest.mark.job, pytest.mark.beside]

SCRIPT = """
import torch, paceline
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

engine = paceline.Engine()
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
data = TensorDataset(torch.randn(64, 16), torch.randint(4, (64,)))
model, optimizer, loader = engine.prepare(model, optimizer, DataLoader(data, batch_size=8, shuffle=True))
total = 0.0
for x, y in loader:
    loss = nn.functional.cross_entropy(model(x), y)
    LOOKS
    engine.mean("loss", loss)
    engine.backward(loss)
    engine.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    total += loss.item()
    print(f"{loss:.3f}", engine.means["loss"], engine.step)
print("trained")
"""


def script(folder: Path, looks: str = "pass") -> Path:
    file = folder / "train.py"
    file.write_text(SCRIPT.replace("LOOKS", looks))
    return file


def test_a_loop_is_profiled_in_every_variant(tmp_path: Path) -> None:
    request = Request(workers=2, checkpointing=(False,), precisions=("fp32", "bf16"))
    profile, why = profile_script(script(tmp_path), [], request, timed=False, threads=1, fused_attention=False)
    assert why is None
    assert profile.how == "the script's loop on fake tensors"
    assert set(profile.passes) == {Variant(n, p) for n in (8, 4, 2, 1) for p in ("fp32", "bf16")}
    assert profile.samples == 8
    assert profile.state_bytes == 4  # momentum
    assert profile.passes[Variant(8)].flops == 2 * 8 * (2 * 16 * 32 + 3 * 32 * 4)


def test_a_batch_of_one_is_left_out_where_batch_norm_cannot_have_it(tmp_path: Path) -> None:
    file = script(tmp_path)
    file.write_text(file.read_text().replace("nn.ReLU()", "nn.BatchNorm1d(32)"))
    request = Request(workers=2, checkpointing=(False,))
    profile, why = profile_script(file, [], request, timed=False, threads=1, fused_attention=False)
    assert why is None
    assert set(profile.passes) == {Variant(n) for n in (8, 4, 2)}


def test_a_loop_that_looks_at_its_loss_runs_for_real_and_says_why(tmp_path: Path) -> None:
    file = script(tmp_path, looks="assert loss.item() < 100")
    profile, why = profile_script(file, [], Request(workers=2), timed=False, threads=1, fused_attention=False)
    assert why is not None
    assert "DataDependent" in why
    assert list(profile.passes) == [Variant(8)]
    assert profile.passes[Variant(8)].measured_s is not None
    assert profile.how == "a real step, recorded, timed here"


@pytest.mark.parametrize("workers", [0, 1])
def test_fetching_counts_where_no_process_does_it_beside_the_step(workers: int, tmp_path: Path) -> None:
    file = script(tmp_path)
    slow = "collate_fn=lambda rows: time.sleep(0.05) or torch.utils.data.default_collate(rows), "
    text = file.read_text().replace("import torch,", "import time, torch,")
    file.write_text(text.replace("batch_size=8", f"batch_size=8, {slow}num_workers={workers}"))
    assert slow in file.read_text()
    profile, why = profile_script(file, [], Request(workers=2), timed=True, threads=1, fused_attention=False)
    assert why is None
    seconds = profile.passes[Variant(8)].measured_s
    assert seconds is not None
    assert (seconds >= 0.05) == (workers == 0)


def test_a_script_that_prepares_nothing_is_refused_with_what_it_needs(tmp_path: Path) -> None:
    file = tmp_path / "nothing.py"
    file.write_text("print('hello')\n")
    with pytest.raises(ConfigError, match=r"could not be profiled.*ended without a step.*engine\.prepare") as error:
        profile_script(file, [], Request(), timed=False, threads=1, fused_attention=False)
    assert "\n" not in str(error.value)
    with pytest.raises(ConfigError, match="there is no script"):
        profile_script(tmp_path / "none.py", [], Request(), timed=False, threads=1, fused_attention=False)


@pytest.mark.parametrize("guide", [*GUIDES, ROOT / "examples/resume.py"], ids=lambda file: str(file.stem))
def test_the_loops_of_the_guides_are_profiled_and_leave_nothing(
    guide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    profile, _ = profile_script(guide, [], Request(workers=2), timed=False, threads=1, fused_attention=False)
    assert profile.passes
    assert not [file for file in tmp_path.rglob("*") if file.is_file()]


TRAINER = """
import torch
from torch import nn
from paceline import Trainer, TrainingArguments

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 4)

    def forward(self, x, labels=None):
        logits = self.layer(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}

data = [{"x": torch.randn(16), "labels": torch.tensor(n % 4)} for n in range(64)]
arguments = TrainingArguments("run", per_device_train_batch_size=8, gradient_accumulation_steps=2, OPTIONS)
Trainer(Net(), arguments, train_dataset=data, eval_dataset=data).train()
print("trained")
"""
OWN_LOOP = SCRIPT.replace("engine = paceline.Engine()", "engine = paceline.Engine(project_dir='.')").replace(
    "total = 0.0", "engine.init_trackers('run')\ntotal = 0.0"
)


@pytest.mark.parametrize(
    ("source", "accumulate"),
    [
        (TRAINER.replace("OPTIONS", "bf16=True"), 2),
        (TRAINER.replace("OPTIONS", "overwrite_output_dir=True, eval_on_start=True"), 2),
        (OWN_LOOP.replace("LOOKS", "pass"), 1),
    ],
    ids=["a Trainer", "a Trainer that overwrites", "a loop of one's own"],
)
def test_the_folder_of_the_run_is_left_alone(
    source: str, accumulate: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "run"
    (folder / "checkpoint-5").mkdir(parents=True)
    (folder / "checkpoint-5" / "index.json").write_text("{}")
    (folder / "metrics.jsonl").write_text('{"step": 5, "loss": 1.0}\n')
    before = {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    file = tmp_path / "train.py"
    file.write_text(source)
    request = Request(workers=2, checkpointing=(False,))
    profile, why = profile_script(file, [], request, timed=False, threads=1, fused_attention=False)
    assert why is None
    assert (profile.samples, profile.accumulate) == (8, accumulate)
    assert {Variant(n) for n in (8, 4, 2, 1)} <= profile.passes.keys()
    assert {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()} == before


def test_a_plan_has_the_lanes_and_the_global_batch_of_its_script(tmp_path: Path) -> None:
    file = script(tmp_path)
    file.write_text(file.read_text().replace("Engine()", "Engine(lanes=6, accumulate=2)"))
    profile, _ = profile_script(file, [], Request(workers=2), timed=False, threads=1, fused_attention=False)
    assert (profile.lanes, profile.accumulate) == (6, 2)
    request = Request(workers=2).of_script(profile.lanes, profile.accumulate, profile.samples)
    assert (request.all_lanes, request.global_batch) == (6, 96)
    assert Request(workers=2, lanes=4, global_batch=32).of_script(6, 2, 8) == Request(2, lanes=4, global_batch=32)
    with pytest.raises(ConfigError, match="the script has 6 lanes, so 8 workers"):
        Request(workers=8).of_script(6, 1, 8)


def test_the_command_plans_a_script(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "paceline.cli.main", "plan", str(script(tmp_path)), "--workers", "2"]
    out = tmp_path / "plan.json"
    done = subprocess.run(
        [*words, "--hardware", "L4", "--json", str(out), "--html", str(tmp_path / "plan.html")],
        capture_output=True, text=True, check=False, timeout=110,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "first choice" in done.stdout
    assert "trained" not in done.stdout
    assert json.loads(out.read_text())["model"]["name"] == "train.py"
    assert (tmp_path / "plan.html").read_text().startswith("<!doctype html>")
