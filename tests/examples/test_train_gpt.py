"""The example as a program: its parts, and whole runs of four steps in this process."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from paceline.world.world import TcpRendezvous, World
from tests.examples.running import hash_in, run_example

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
    training, held_out = example.corpus_files(library)
    assert [library / path for path in example.source_files(library)] == sorted(training + held_out)
    assert len(training + held_out) == len({*training, *held_out}) == 40
    assert len(held_out) == 2


def test_the_corpus_ends_at_its_limit(example: ModuleType, library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(example, "CORPUS_BYTES", 2500)
    assert sum(map(len, example.corpus_files(library))) == 25  # of 100 bytes and an end each


@pytest.fixture
def alone(example: ModuleType, library: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """As much of an engine as opening the corpus takes; Python's library is the small one."""
    monkeypatch.setattr(example.sysconfig, "get_paths", lambda: {"stdlib": str(library)})
    return SimpleNamespace(world=World(), barrier=lambda: None)


def test_the_corpus_is_the_bytes_of_the_files_with_an_end_after_each(
    example: ModuleType, library: Path, alone: SimpleNamespace, tmp_path: Path
) -> None:
    for text, files in zip(example.open_corpus(alone, tmp_path), example.corpus_files(library), strict=True):
        text.verify()
        assert bytes(text.tokens.tolist()) == b"".join(file.read_bytes() + b"\0" for file in files)


def test_the_corpus_is_written_again_only_when_its_files_changed_or_it_is_damaged(
    example: ModuleType, library: Path, alone: SimpleNamespace, tmp_path: Path
) -> None:
    def files() -> list[int]:
        return [text.path.stat().st_ino for text in example.open_corpus(alone, tmp_path)]

    first = files()
    assert files() == first
    (library / "package0" / "module00.py").write_text("longer" * 100)
    changed = files()
    assert (changed[0] != first[0], changed[1] == first[1]) == (True, True)
    os.truncate(tmp_path / "held_out.tokens", 5000)
    assert example.open_corpus(alone, tmp_path)[1].verify() is None


def test_only_the_first_worker_of_a_host_writes_and_all_wait_for_it(
    example: ModuleType, alone: SimpleNamespace, tmp_path: Path
) -> None:
    waited = []
    other = SimpleNamespace(
        world=World(rank=1, size=2, local_rank=1, local_size=2, rendezvous=TcpRendezvous("127.0.0.1", 29500)),
        barrier=lambda: waited.append(example.open_corpus(alone, tmp_path)),
    )
    text, _ = example.open_corpus(other, tmp_path)
    assert waited[0][0].header == text.header


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


@pytest.mark.slow
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


@pytest.mark.slow
def test_resuming_a_finished_run_shows_its_hash_again(
    example: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(example, tmp_path)
    finished = last_line(capsys)
    run(example, tmp_path, "--resume")
    assert last_line(capsys) == finished
    assert len(rows(tmp_path)) == 6


def test_a_run_that_begins_anew_leaves_no_checkpoint_of_the_one_before(
    example: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(example, tmp_path, "--resume", "--stop-after", "2")
    assert f"there is no checkpoint in {tmp_path}; training starts at step 0" in capsys.readouterr().out
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"]
    run(example, tmp_path, "--stop-after", "1")
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-1"]


def test_zero_steps_are_refused(example: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        example.parse(["--steps", "0"])
    assert "0 is less than 1" in capsys.readouterr().err


class Worker:
    """As much of an engine as metrics take; which worker is the main one changes."""

    def __init__(self, example: ModuleType, path: Path, *, main: bool) -> None:
        self.is_main_process, self.step = main, 0
        self.metrics = example.Metrics(self, path)

    def barrier(self) -> None: ...

    def share_with_joiners(self, give: Callable[[], Any], take: Callable[[Any], None]) -> None:
        self.give, self.take = give, take


def steps_in(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


@pytest.mark.parametrize("torn", ["", '{"step": 3, "lo'])
def test_another_worker_goes_on_with_the_metrics_where_the_lost_one_ended(
    example: ModuleType, tmp_path: Path, torn: str
) -> None:
    path = tmp_path / "metrics.jsonl"
    first, second = Worker(example, path, main=True), Worker(example, path, main=False)
    for worker, steps in ((first, [1, 2]), (second, [1, 2, 3])):  # the first is lost before it has written of step 3
        for step in steps:
            worker.metrics.add(step=step, loss=1.0)
    with path.open("a") as file:
        file.write(torn)
    second.is_main_process = True
    second.metrics.add(step=4, loss=1.0)
    assert steps_in(path) == [1, 2, 3, 4]


def test_what_the_lost_worker_was_ahead_with_is_not_written_again(example: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first, second = Worker(example, path, main=True), Worker(example, path, main=False)
    for step in (1, 2):
        first.metrics.add(step=step, loss=1.0)
    second.metrics.add(step=1, loss=1.0)
    second.is_main_process = True
    second.metrics.write()
    for step in (2, 3):
        second.metrics.add(step=step, loss=1.0)
    assert steps_in(path) == [1, 2, 3]


def test_a_replacement_that_becomes_the_main_process_has_all_lines(example: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first, joiner = Worker(example, path, main=True), Worker(example, path, main=False)
    first.metrics.add(step=1, loss=1.0)
    joiner.take(json.loads(json.dumps(first.give())))
    joiner.is_main_process = True
    joiner.metrics.add(step=2, loss=1.0)
    assert steps_in(path) == [1, 2]
    assert [row["step"] for row in joiner.metrics.rows] == [1, 2]


# -- one hash, whoever shares the work and however AdamW computes ------------------------------------------------------

# Every strategy and number of workers with a way, every way with a strategy that cuts parameters anywhere.
SHARED = [
    ("star", 2, "fused"), ("zero1", 3, "fused"), ("zero2", 4, "foreach"), ("zero3", 3, "plain"), ("ddp", 4, "plain"),
    ("fsdp", 3, "fused"), ("fsdp", 2, "foreach"), ("fsdp", 4, "plain"),
    ("hybrid", 2, "fused"), ("hybrid", 3, "foreach"), ("hybrid", 4, "fused"),
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all runs: the text is written once."""
    return tmp_path_factory.mktemp("shared")


@cache
def shared_hash(folder: Path, strategy: str, workers: int, way: str) -> str:
    flags = ["--steps", "30", "--stop-after", "6", "--batch-size", "1", "--run-dir", str(folder)]
    return hash_in(run_example("train_gpt.py", workers, *flags, "--strategy", strategy, "--update", way, lanes=4))


@pytest.mark.workers
@pytest.mark.parametrize(("strategy", "workers", "way"), SHARED)
def test_every_strategy_gives_the_hash_of_one_worker(folder: Path, strategy: str, workers: int, way: str) -> None:
    assert shared_hash(folder, strategy, workers, way) == shared_hash(folder, "ddp", 1, way)
