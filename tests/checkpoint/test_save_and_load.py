"""A checkpoint is whole or not there, comes back as it was however many workers wrote it, and is refused if damaged."""

from __future__ import annotations

import os
import random
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from paceline.checkpoint import disk, weights_file
from paceline.checkpoint.load import Checkpoint
from paceline.checkpoint.manifest import complete_text
from paceline.checkpoint.save import SnapshotBuffer, portion_of
from paceline.errors import CheckpointError
from paceline.sharding.local_shard import LocalShard
from tests.checkpoint.folders import first_weight, read, state, write


@contextmanager
def disk_full_after(size_bytes: int) -> Iterator[None]:
    """The kernel refuses to let any file grow beyond `size_bytes`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


# -- saving ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 2, 3, 7])
def test_what_everyone_has_comes_back_whoever_wrote_which_part(tmp_path: Path, workers: int) -> None:
    big = torch.randn(3, 5000)
    write(tmp_path / "state", {**state(1.0), "big": big, "half": big.bfloat16(), "turned": big.t()}, workers)
    found = read(tmp_path / "state")
    assert (found["step"], found["lr"], found["weight"].tolist()) == (3, 0.125, [1.0] * 100)
    assert torch.equal(found["big"], big)
    assert torch.equal(found["turned"], big.t())
    assert torch.equal(found["half"], big.bfloat16())


def test_slices_of_workers_come_back_as_one_tensor(tmp_path: Path) -> None:
    whole = torch.randn(4, 50)

    def mine(worker: int) -> dict[str, Any]:
        parts = {0: [(0, whole.view(-1)[:70]), (150, whole.view(-1)[150:])], 1: [(70, whole.view(-1)[70:150])], 2: []}
        return {"w": LocalShard.of(whole.shape, whole.dtype, parts[worker]), "count": torch.tensor(7.0)}

    write(tmp_path / "state", mine, workers=3)
    assert torch.equal(read(tmp_path / "state")["w"], whole)
    assert read(tmp_path / "state")["count"] == 7.0


def test_elements_that_nobody_saved_are_an_error_and_not_a_checkpoint(tmp_path: Path) -> None:
    def mine(worker: int) -> dict[str, Any]:
        return {"w": LocalShard.of((100,), torch.float32, [(60 * worker, torch.zeros(40))])}

    with pytest.raises(CheckpointError, match=r"/w has 100 elements, but those from 40 to 60 were saved by no worker"):
        write(tmp_path / "state", mine, workers=2)
    assert not (tmp_path / "state").exists()


def test_workers_that_disagree_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"worker 1 has another value of /count"):
        write(tmp_path / "state", lambda worker: {"count": torch.tensor(float(worker))}, workers=2)


def test_tied_tensors_are_stored_once_and_come_back_under_both_names(tmp_path: Path) -> None:
    table = torch.randn(100)
    write(tmp_path / "state", {"embed": table, "head": table})
    assert len(Checkpoint.open(tmp_path / "state").manifest.tensors) == 1
    assert torch.equal(read(tmp_path / "state")["embed"], read(tmp_path / "state")["head"])


def test_any_reader_of_safetensors_opens_the_files(tmp_path: Path) -> None:
    write(tmp_path / "state", state(1.5), workers=2)
    found = {k: v for path in (tmp_path / "state").glob("*.safetensors") for k, v in load_file(path).items()}
    assert found["/weight[0:100]"].tolist() == [1.5] * 100


def test_a_newer_state_replaces_the_older_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    write(tmp_path / "state", state(1.0), workers=3)
    write(tmp_path / "state", state(2.0))
    assert first_weight(tmp_path / "state") == 2.0
    assert [path.name for path in tmp_path.iterdir()] == ["state"]
    assert sorted(p.name for p in (tmp_path / "state").iterdir()) == [
        "COMPLETE", "manifest.json", "worker-00000-of-00001.safetensors",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "newer", [state(2.0, elements=10_000), {"text": "x" * 10_000}], ids=["in the tensors", "in the JSON"]
)
def test_a_disk_that_fills_up_leaves_the_older_state(tmp_path: Path, newer: dict[str, Any]) -> None:
    folder = tmp_path / "state"
    write(folder, state(1.0))
    with disk_full_after(4096), pytest.raises(OSError, match="too large"):
        write(folder, newer)
    assert first_weight(folder) == 1.0


def test_a_state_that_cannot_be_encoded_leaves_the_older_one_alone(tmp_path: Path) -> None:
    write(tmp_path / "state", state(1.0))
    with pytest.raises(CheckpointError, match="'bad' is a set"):
        write(tmp_path / "state", {"bad": {1}})
    assert first_weight(tmp_path / "state") == 1.0


@pytest.mark.parametrize("weights", [False, True], ids=["parts", "and the model in shards"])
def test_a_save_killed_at_any_call_that_changes_the_disk_leaves_the_old_state_or_the_new(
    tmp_path: Path, weights: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A child of this process saves, and is gone by SIGKILL at its first such call, at its second, and so on."""
    monkeypatch.setattr(weights_file, "WORTH_CUTTING", 0)

    def write_state(value: float) -> None:
        tree = state(value)
        model = {name: tree[name] for name in ("weight", "bias")}
        write(tmp_path / "state", {**tree, "models": [model]}, workers=2, weights=weights)

    def model_in_folder() -> dict[str, list[float]]:
        files = sorted((tmp_path / "state").glob("model-*.safetensors"))
        return {name: value.unique().tolist()[:1] for file in files for name, value in load_file(file).items()}

    write_state(1.0)
    found: list[float] = []
    for call in range(200):
        pid = os.fork()
        if pid == 0:
            _kill_me_at(call)
            write_state(2.0)
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        found.append(first_weight(tmp_path / "state"))
        assert Checkpoint.open(tmp_path / "state").verify() == []
        assert model_in_folder() == ({"weight": [found[-1]], "bias": [0.0]} if weights else {})
        assert (tmp_path / "state" / weights_file.INDEX).exists() == weights
        if os.WIFEXITED(status):
            break
        assert os.WTERMSIG(status) == signal.SIGKILL
        write_state(1.0)
    assert os.WIFEXITED(status), "the save never came to its end"
    assert call >= 20, f"only {call} calls were cut"
    assert found == sorted(found), "once it is published it stays"
    assert found[0] == 1.0
    assert found[-1] == 2.0


def _kill_me_at(call: int) -> None:
    left = [call]

    def dying(original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left[0] -= 1
            return original(*args, **kwargs)

        return wrapped

    def half_written(descriptor: int, data: memoryview) -> int:
        if left[0] == 0:
            os.write(descriptor, data[: len(data) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        left[0] -= 1
        return os.write(descriptor, data)

    disk.write = half_written
    disk.flush = dying(disk.flush)
    disk.rename = dying(disk.rename)
    disk._exchange = dying(disk._exchange)
    for name in ("mkdir", "rename", "unlink", "rmdir"):
        setattr(os, name, dying(getattr(os, name)))


# -- loading -----------------------------------------------------------------------------------------------------------


def test_a_missing_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"there is no checkpoint in .*/nowhere \(COMPLETE is missing\)"):
        read(tmp_path / "nowhere")


@pytest.mark.parametrize("name", ["COMPLETE", "manifest.json"])
def test_a_half_written_one_says_so(tmp_path: Path, name: str) -> None:
    write(tmp_path / "state", state(1.0))
    (tmp_path / "state" / name).unlink()
    with pytest.raises(CheckpointError, match=rf"{name} is missing: it was not written to its end"):
        read(tmp_path / "state")


@pytest.mark.parametrize("left", [0, 7, 100])
def test_a_truncated_or_missing_tensor_file_is_named(tmp_path: Path, left: int) -> None:
    write(tmp_path / "state", state(1.0))
    file = tmp_path / "state" / "worker-00000-of-00001.safetensors"
    file.write_bytes(file.read_bytes()[:left])
    with pytest.raises(CheckpointError, match=rf"damaged: {file.name} has {left} bytes instead of"):
        read(tmp_path / "state")
    file.unlink()
    with pytest.raises(CheckpointError, match=rf"{file.name} is missing"):
        read(tmp_path / "state")


def test_a_newer_format_is_refused_with_both_numbers(tmp_path: Path) -> None:
    write(tmp_path / "state", state(1.0))
    manifest = tmp_path / "state" / "manifest.json"
    text = manifest.read_text().replace('"format": 2', '"format": 7').encode()
    manifest.write_bytes(text)
    (tmp_path / "state" / "COMPLETE").write_bytes(complete_text(text))
    with pytest.raises(CheckpointError, match=r"has format 7; this version reads format 2. It was written by a newer"):
        read(tmp_path / "state")


def test_a_thousand_flipped_bits_are_a_thousand_found(tmp_path: Path) -> None:
    """Anywhere in any file; what is found names the file and, inside a tensor, the tensor."""
    folder = tmp_path / "state"
    write(folder, {**state(1.0), "big": torch.randn(2000)}, workers=2)
    files = {path: path.read_bytes() for path in folder.iterdir()}
    draw = random.Random(0)
    places = [(path, bit) for path, data in files.items() for bit in range(len(data) * 8)]
    missed, tensors_named = [], 0
    for path, bit in draw.sample(places, 1000):
        data = bytearray(files[path])
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        told = wrong_with(folder)
        if not any(path.name in line for line in told):
            missed.append((path.name, bit, told))
        tensors_named += any("'/" in line for line in told)
        path.write_bytes(files[path])
    assert missed == []
    assert tensors_named > 300
    assert wrong_with(folder) == []


def wrong_with(folder: Path) -> list[str]:
    try:
        return Checkpoint.open(folder).verify()
    except CheckpointError as error:
        return [str(error)]


def test_a_flipped_bit_is_found_by_the_worker_that_reads_it(tmp_path: Path) -> None:
    write(tmp_path / "state", state(1.0))
    file = tmp_path / "state" / "worker-00000-of-00001.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 4
    file.write_bytes(data)
    with pytest.raises(
        CheckpointError, match=rf"{file.name} is damaged: '/weight\[0:100\]' does not have its checksum"
    ):
        read(tmp_path / "state")


# -- snapshots ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_snapshot_holds_every_bit_and_does_not_follow_its_source(threads: int) -> None:
    sizes = (1, 17, 4096, 65_537, 300_001)
    tree: dict[str, Any] = {f"f{size}": torch.randn(size + 20) for size in sizes}
    tree |= {"i": torch.arange(1001, dtype=torch.int8), "b": torch.rand(777) > 0.5, "h": torch.randn(333).half()}
    tree["strided"] = torch.randn(64, 64).t()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        portion, room = portion_of(tree, 0, 1), SnapshotBuffer()
        for _ in range(2):  # the second time in the memory of the first
            copied = portion.copied(room)
            assert [part.name for part in copied.parts] == [part.name for part in portion.parts]
            for mine, copy in zip(portion.parts, copied.parts, strict=True):
                assert torch.equal(mine.values, copy.values), mine.name
                mine.values.zero_()
                assert copy.values.count_nonzero() > 0
                mine.values.copy_(copy.values)
    finally:
        torch.set_num_threads(before)
