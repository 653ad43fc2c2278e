"""The example as a program: its parts, and whole runs of four steps in this process."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "examples" / "train_gpt.py"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The script as a module, with little to evaluate and to write; what a run sets in torch is put back."""
    spec = importlib.util.spec_from_file_location("train_gpt", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "train_gpt", module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "EVALUATION_WINDOWS", 8)
    monkeypatch.setattr(module, "EVALUATE_EVERY", 3)
    monkeypatch.setattr(module, "SAMPLE_BYTES", 12)
    monkeypatch.setattr(module, "CORPUS_BYTES", 1_000_000)
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    with torch.random.fork_rng():
        yield module
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)
    torch.utils.deterministic.fill_uninitialized_memory = fill


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A standard library of 40 files, one byte value each, with tests and installed packages among them."""
    root = tmp_path / "library"
    for number in range(40):
        path = root / f"package{number % 3}" / f"module{number:02}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes([65 + number]) * 100)
    for folder in ("test", "package0/tests", "site-packages/numpy"):
        (root / folder).mkdir(parents=True)
        (root / folder / "module.py").write_bytes(b"z" * 100)
    return root


def run(example: ModuleType, folder: Path, *flags: str) -> None:
    example.main(
        ["--steps", "4", "--lanes", "2", "--threads", "1", "--batch-size", "2", "--run-dir", str(folder), *flags]
    )


def rows(folder: Path) -> list[dict[str, float]]:
    """The run's metrics without what the clock decides."""
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if name != "tokens_per_s"} for row in found]


def last_line(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().out.splitlines()[-1]


def test_files_come_in_one_order_without_tests_and_packages(example: ModuleType, library: Path) -> None:
    names = [path.as_posix() for path in example.source_files(library)]
    assert names == sorted(names)
    assert len(names) == 40


def test_a_file_is_trained_on_or_held_out_never_both(example: ModuleType, library: Path) -> None:
    text, held_out = (set(part.tolist()) - {0} for part in example.read_corpus(library))
    assert not text & held_out
    assert text | held_out == set(range(65, 65 + 40))
    assert len(held_out) == 2


def test_the_corpus_is_the_same_every_time_and_ends_at_its_limit(
    example: ModuleType, library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(example, "CORPUS_BYTES", 2500)
    first, again = example.read_corpus(library), example.read_corpus(library)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert sum(map(len, first)) == 25 * 101


def test_windows_cover_the_text_and_each_byte_is_asked_for_its_successor(example: ModuleType) -> None:
    text = torch.arange(2 * example.CONTEXT + 1, dtype=torch.int32).to(torch.uint8)
    windows = example.Windows(text)
    assert len(windows) == 2
    assert torch.equal(torch.cat([x for x, _ in windows_of(windows)]), text[:-1].long())
    assert torch.equal(torch.cat([y for _, y in windows_of(windows)]), text[1:].long())


def windows_of(windows: torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]) -> list[tuple[torch.Tensor, ...]]:
    return [windows[index] for index in range(len(windows))]  # type: ignore[arg-type]


def test_the_model_never_sees_the_byte_it_guesses(example: ModuleType) -> None:
    model = example.GPT().eval()
    text = torch.randint(256, (1, 16))
    other = text.clone()
    other[0, 9] = (other[0, 9] + 1) % 256
    before, after = model(text), model(other)
    assert torch.equal(before[0, :9], after[0, :9])
    assert not torch.equal(before[0, 9], after[0, 9])


@pytest.mark.parametrize("steps", [1, 4, 400])
def test_the_learning_rate_rises_then_falls_to_a_tenth(example: ModuleType, steps: int) -> None:
    factors = [example.learning_rate_factor(step, steps) for step in range(steps + 1)]
    top = factors.index(max(factors))
    assert factors[: top + 1] == sorted(factors[: top + 1])
    assert factors[top:] == sorted(factors[top:], reverse=True)
    assert factors[top] == pytest.approx(1.0)
    assert factors[-1] == pytest.approx(0.1)


def test_a_run_leaves_metrics_plot_sample_and_the_hash(
    example: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(example, tmp_path)
    assert [row["step"] for row in rows(tmp_path) if "loss" in row] == [1, 2, 3, 4]
    assert [row["step"] for row in rows(tmp_path) if "held_out_bits_per_byte" in row] == [3, 4]
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "sample.txt").read_text().startswith("def ")
    word, kind, digest = last_line(capsys).replace(":", " ").split()
    assert (word, kind) == ("weights", "sha256")
    assert len(digest) == 64


def test_a_run_that_stopped_ends_like_one_that_never_did(
    example: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(example, tmp_path / "straight")
    straight = last_line(capsys)
    run(example, tmp_path / "stopped", "--stop-after", "2")
    assert last_line(capsys) != straight
    with (tmp_path / "stopped" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "loss": 9.9}\n{"step": 4, "lo')  # a run killed in step 4, while it wrote
    run(example, tmp_path / "stopped", "--resume")
    assert last_line(capsys) == straight
    assert rows(tmp_path / "stopped") == rows(tmp_path / "straight")
    assert (tmp_path / "stopped" / "sample.txt").read_text() == (tmp_path / "straight" / "sample.txt").read_text()


def test_resuming_a_finished_run_shows_its_hash_again(
    example: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(example, tmp_path)
    finished = last_line(capsys)
    run(example, tmp_path, "--resume")
    assert last_line(capsys) == finished
    assert len(rows(tmp_path)) == 6


def test_zero_steps_are_refused(example: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        example.parse(["--steps", "0"])
    assert "0 is less than 1" in capsys.readouterr().err
