"""Weights as other tools have them: in shards that several workers write, a tensor at a time in memory."""

from __future__ import annotations

import ctypes
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from paceline.checkpoint import save, weights_file
from paceline.checkpoint.save import describe, described, give_up, portion_of, write_model, write_portion
from paceline.checkpoint.tensor_file import best_checksum
from paceline.checkpoint.weights_file import cut
from paceline.errors import CheckpointError
from paceline.sharding.local_shard import LocalShard
from paceline.world.world import World
from tests.workers import run_workers

MIB = 1 << 20


def peak_growth(work: Callable[[], object]) -> int:
    """By how many bytes the memory of this process grew while it worked, at the most; for a process of its own.

    Where others have worked before, what the allocator has kept of theirs would be in it or not.
    """
    ctypes.CDLL(None).mallopt(-3, MIB)  # M_MMAP_THRESHOLD: what is freed goes back, and so is not counted twice

    def field(name: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith(f"{name}:")).split()[1])

    libc = ctypes.CDLL(None)
    libc.mallopt(-3, MIB)  # M_MMAP_THRESHOLD: what is freed goes back to the system, and is not counted again
    libc.malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak is what it is now
    before = field("VmRSS")
    work()
    return field("VmHWM") - before


def test_small_models_are_one_file_and_large_ones_a_shard_for_each_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = {f"layer.{n}": torch.zeros(100) for n in range(10)}
    weights["tied"] = weights["layer.0"]
    assert [shard.file for shard in cut(weights, workers=4)] == ["model.safetensors"]
    monkeypatch.setattr(weights_file, "WORTH_CUTTING", 0)
    assert [shard.file for shard in cut(weights)] == ["model.safetensors"]
    shards = cut(weights, workers=5)
    assert [shard.file for shard in shards] == [f"model-0000{n}-of-00005.safetensors" for n in range(1, 6)]
    assert [name for shard in shards for name in shard.names] == [f"layer.{n}" for n in range(10)]
    assert {shard.bytes for shard in shards} == {800}
    assert [len(shard.names) for shard in cut(weights, largest=1_199)] == [2] * 5
    assert [len(shard.names) for shard in cut(weights, largest=1)] == [1] * 10


def sharded(worker: int, workers: int, full: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Weights as zero3 has them: of each tensor a part on every worker."""
    shards = {}
    for name, tensor in full.items():
        each = tensor.numel() // workers
        mine = tensor.view(-1)[worker * each : (worker + 1) * each]
        shards[name] = LocalShard.of(tensor.shape, tensor.dtype, [(worker * each, mine)])
    return {"models": [shards]}


def write_in_shards(world: World, folder: str) -> list[int]:
    """By how much two workers' memory grows, each in its turn."""
    weights_file.WORTH_CUTTING = 0
    path = Path(folder)
    full = {f"layer.{n}": torch.full((4 * MIB,), float(n)) for n in range(12)}  # 16 MiB each
    for worker in range(2):
        write_portion(path, portion_of(sharded(worker, 2, full), worker, 2), best_checksum())
    checkpoint = describe(path, 2, {"step": 1}, best_checksum(), timeout_s=5)
    other = described(path, timeout_s=5)
    del full
    return [
        peak_growth(lambda: write_model(other, 1, 2, 5.0)),
        peak_growth(lambda: write_model(checkpoint, 0, 2, 5.0)),
    ]


@pytest.mark.workers
def test_of_sharded_weights_no_worker_holds_more_than_a_tensor(tmp_path: Path) -> None:
    (result,) = run_workers(write_in_shards, 1, folder=str(tmp_path))
    assert result.error is None, result.traceback
    grown = result.value
    assert max(grown) < 32 * MIB, grown  # of 192: a tensor, and a range of it as it is read
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 192 * MIB}
    for file in sorted(set(index["weight_map"].values())):
        for name, value in load_file(tmp_path / file).items():
            assert index["weight_map"].pop(name) == file
            assert torch.equal(value, torch.full((4 * MIB,), float(name.removeprefix("layer."))))
    assert index["weight_map"] == {}


def two_portions(folder: Path) -> list[save.Portion]:
    full = {"weight": torch.arange(400.0), "bias": torch.arange(40.0)}
    portions = [portion_of(sharded(worker, 2, full), worker, 2) for worker in range(2)]
    for portion in portions:
        write_portion(folder, portion, best_checksum())
    return portions


def test_a_worker_that_cannot_write_its_shards_ends_the_save(tmp_path: Path) -> None:
    partial = tmp_path / "partial"
    portions = two_portions(partial)
    checkpoint = describe(partial, 2, {"step": 1}, best_checksum(), timeout_s=5)
    give_up(partial, portions[1], "No space left on device")
    with pytest.raises(CheckpointError, match="00001-of-00002 could not write its part: No space left on device"):
        write_model(checkpoint, 0, 2, timeout_s=5)


def test_a_worker_does_not_wait_for_a_main_worker_that_gives_up_or_is_gone(tmp_path: Path) -> None:
    partial = tmp_path / "partial"
    two_portions(partial)
    with pytest.raises(CheckpointError, match=r"^manifest.json is not in .*, and nothing has come for 0.1 s; "):
        described(partial, timeout_s=0.1)
    timer = threading.Timer(0.05, partial.rename, [tmp_path / "gone"])
    timer.start()
    with pytest.raises(CheckpointError, match="the main worker has given it up"):
        described(partial, timeout_s=5)
    timer.join()
