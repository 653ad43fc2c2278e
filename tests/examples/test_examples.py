"""Every example of one screen runs alone and with two workers, to the same weights, and does what it says."""

from __future__ import annotations

import json
import re
import warnings
from difflib import unified_diff
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.examples.running import EXAMPLES, ROOT, example_results, hash_in, printed_by, run_example

SCREEN = 60
ONE_SCREEN = sorted(path.name for path in EXAMPLES.glob("*.py") if path.name != "train_gpt.py")


@pytest.mark.parametrize("name", ONE_SCREEN)
def test_an_example_is_one_screen_and_opens_with_how_to_run_it(name: str) -> None:
    text = (EXAMPLES / name).read_text()
    assert len(text.splitlines()) < SCREEN
    assert f"python examples/{name}" in text.split('"""')[1]


@pytest.mark.parametrize("name", [*ONE_SCREEN, "train_gpt.py", "launch/slurm.sh", "launch/trainjob.yaml"])
def test_the_page_of_examples_tells_of_all(name: str) -> None:
    assert f"examples/{name}" in (ROOT / "docs" / "examples.md").read_text()


@pytest.mark.workers
def test_hello_prints_one_hash_on_one_two_and_three_workers() -> None:
    assert len({hash_in(run_example("hello.py", workers, lanes=6)) for workers in (1, 2, 3)}) == 1


@pytest.mark.workers
def test_resume_goes_on_after_a_signal_with_fewer_workers_to_the_same_weights(tmp_path: Path) -> None:
    def arguments(folder: str) -> list[str]:
        return ["--run-dir", str(tmp_path / folder), "--samples", "16000"]

    straight = hash_in(run_example("resume.py", 1, *arguments("straight"), lanes=4))
    stopped = example_results("resume.py", 2, *arguments("stopped"), lanes=4, signal_at_save=1)
    assert {str(result.error).split(":")[0] for result in stopped} == {"StoppedOnRequest"}
    again = run_example("resume.py", 1, *arguments("stopped"), lanes=4)
    step = re.search(r"goes on from .*/checkpoint-(\d+), after step (\d+)", again)
    assert step is not None, again
    assert 100 < int(step[1]) == int(step[2]) < 250
    assert hash_in(again) == straight


@pytest.mark.workers
def test_digits_gives_one_hash_and_the_best_model_on_one_and_two_workers(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    printed = [
        run_example("digits.py", workers, "--num-train-epochs", "3", "--output-dir", str(tmp_path / str(workers)))
        for workers in (1, 2)
    ]
    assert hash_in(printed[0]) == hash_in(printed[1])
    logged = [json.loads(line) for line in (tmp_path / "2" / "metrics.jsonl").read_text().splitlines()]
    best = max(row["eval_accuracy"] for row in logged if "eval_accuracy" in row)
    shown = re.search(r"eval_accuracy +([\d.]+)", printed[1])
    assert shown is not None
    assert float(shown[1]) == pytest.approx(best, abs=1e-4)
    assert best > 0.85


@pytest.mark.workers
def test_digits_stops_early_when_accuracy_stays(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    flags = ("--learning-rate", "0", "--num-train-epochs", "30", "--per-device-train-batch-size", "256")
    printed = run_example("digits.py", 1, *flags, "--output-dir", str(tmp_path))
    assert "step 18/90" in printed, printed  # one evaluation to beat and five that do not, of 3 steps each


@pytest.mark.workers
def test_gpt_gives_one_hash_on_one_and_two_workers_and_learns(tmp_path: Path) -> None:
    printed = [
        run_example("gpt.py", workers, "--max-steps", "12", "--output-dir", str(tmp_path / str(workers)))
        for workers in (1, 2)
    ]
    assert hash_in(printed[0]) == hash_in(printed[1])
    losses = re.search(r"step 1/12 · loss ([\d.]+)(?:.|\n)*step 12/12 · loss ([\d.]+)", printed[0])
    assert losses is not None, printed[0]
    assert float(losses[2]) < float(losses[1]) - 1


@pytest.mark.workers
def test_a_hugging_face_model_gives_one_hash_and_is_loaded_again(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    runs = {"alone": (1, "ddp"), "sharded": (2, "fsdp")}
    printed = {
        folder: run_example(
            "hf_model.py", workers, "--max-steps", "4", "--strategy", strategy, "--output-dir", str(tmp_path / folder)
        )
        for folder, (workers, strategy) in runs.items()
    }
    assert len({hash_in(text) for text in printed.values()}) == 1
    alone, sharded = (load_file(tmp_path / folder / "model.safetensors") for folder in runs)
    assert alone.keys() == sharded.keys()  # in another order in the file: workers write theirs one after another
    assert all(torch.equal(alone[name], sharded[name]) for name in alone)
    assert "\n    def " in printed["sharded"]


@pytest.mark.job
def test_a_mesh_trains_what_one_process_does_and_goes_on_upon_another_mesh(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    script, folder = EXAMPLES / "mesh.py", tmp_path / "saved"
    alone = run_example("mesh.py", 1, "--steps", "10", "--folder", str(tmp_path / "alone"))
    printed_by(f"run --workers 4 --tp 2 --cp 2 --lanes 2 {script} --steps 5 --folder {folder}")
    resumed = printed_by(f"run --workers 2 --tp 2 --lanes 2 {script} --steps 10 --folder {folder} --resume")
    hash_in(resumed)
    expected, found = (re.search(r"step 10: loss ([\d.]+)", text) for text in (alone, resumed))
    assert expected is not None, alone
    assert found is not None, resumed
    assert float(found[1]) == pytest.approx(float(expected[1]), abs=1e-3)


def test_a_script_moves_from_transformers_by_one_line() -> None:
    before, after = (
        (EXAMPLES / f"{name}.py").read_text() for name in ("transformers_original", "moved_from_transformers")
    )
    changed = list(unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=0))[3:]
    assert changed == [
        "-from transformers import Trainer, TrainingArguments",
        "+from paceline import Trainer, TrainingArguments",
    ]
    page = (ROOT / "docs" / "examples.md").read_text()
    assert "\n".join(changed) in page


@pytest.mark.workers
def test_the_moved_script_gives_one_hash_on_one_and_two_workers(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    printed = [
        run_example(
            "moved_from_transformers.py", workers, "--steps", "60", "--output-dir", str(tmp_path / str(workers))
        )
        for workers in (1, 2)
    ]
    assert hash_in(printed[0]) == hash_in(printed[1])
    assert re.fullmatch(r"accuracy 0\.\d+", printed[1].splitlines()[-1])


@pytest.mark.workers
def test_the_script_that_was_moved_runs_with_transformers(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # their affair
        printed = run_example("transformers_original.py", 1, "--steps", "60", "--output-dir", str(tmp_path))
    assert re.fullmatch(r"accuracy 0\.\d+", printed.splitlines()[-1])
