"""A saved state is whole or not there, and a damaged one is refused."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.checkpoint import state_folder
from paceline.checkpoint.state_folder import read_state, write_state
from paceline.errors import CheckpointError


def state(value: float, elements: int = 10) -> dict[str, Any]:
    return {"step": 3, "lr": 0.125, "weight": torch.full((elements,), value)}


def first_weight(folder: Path) -> float:
    return float(read_state(folder)["weight"][0])


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


def test_a_state_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    write_state(tmp_path / "state", state(1.0))
    found = read_state(tmp_path / "state")
    assert (found["step"], found["lr"], found["weight"].tolist()) == (3, 0.125, [1.0] * 10)


def test_tensors_that_share_memory_or_are_not_contiguous_come_back(tmp_path: Path) -> None:
    table = torch.arange(6.0).view(2, 3)
    write_state(tmp_path / "state", {"tied": table, "head": table, "turned": table.t()})
    found = read_state(tmp_path / "state")
    assert [found[name].tolist() for name in ("tied", "head", "turned")] == [
        table.tolist(),
        table.tolist(),
        table.t().tolist(),
    ]


def test_a_newer_state_replaces_the_older_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    write_state(tmp_path / "state", state(1.0))
    write_state(tmp_path / "state", state(2.0))
    assert first_weight(tmp_path / "state") == 2.0
    assert [path.name for path in tmp_path.iterdir()] == ["state"]


def test_folders_above_are_made(tmp_path: Path) -> None:
    write_state(tmp_path / "runs" / "a" / "state", state(1.0))
    assert first_weight(tmp_path / "runs" / "a" / "state") == 1.0


@pytest.mark.parametrize(
    "newer", [state(2.0, elements=10_000), {"text": "x" * 10_000}], ids=["in the tensors", "in the JSON"]
)
def test_a_disk_that_fills_up_leaves_the_older_state_and_no_litter(tmp_path: Path, newer: dict[str, Any]) -> None:
    folder = tmp_path / "state"
    write_state(folder, state(1.0))
    with disk_full_after(4096), pytest.raises(CheckpointError, match=f"could not be saved to {folder}: .*too large"):
        write_state(folder, newer)
    assert first_weight(folder) == 1.0
    assert [path.name for path in tmp_path.iterdir()] == ["state"]


def test_a_state_that_cannot_be_encoded_leaves_the_older_one_alone(tmp_path: Path) -> None:
    write_state(tmp_path / "state", state(1.0))
    with pytest.raises(CheckpointError, match="'bad' is a set"):
        write_state(tmp_path / "state", {"bad": {1}})
    assert first_weight(tmp_path / "state") == 1.0


def test_a_place_that_cannot_be_a_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"could not be saved to .*/file/state: "):
        write_state(tmp_path / "file" / "state", state(1.0))


def test_what_a_killed_save_left_behind_does_not_hinder_the_next(tmp_path: Path) -> None:
    (tmp_path / ".state.partial").mkdir()
    (tmp_path / ".state.partial" / "tensors.safetensors").write_bytes(b"half")
    write_state(tmp_path / "state", state(1.0))
    assert first_weight(tmp_path / "state") == 1.0


class Killed(BaseException):
    """As a SIGKILL: no handler runs that would catch an Exception."""


@pytest.mark.parametrize("fault", [OSError(5, "Input/output error"), Killed()], ids=["exchange fails", "killed"])
@pytest.mark.parametrize(("swapped", "left"), [(False, 1.0), (True, 2.0)])
def test_a_save_cut_before_or_after_the_exchange_leaves_a_state_readable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: BaseException, swapped: bool, left: float
) -> None:
    folder, exchange = tmp_path / "state", state_folder._exchange

    def cut(new: Path, old: Path) -> None:
        if swapped:
            exchange(new, old)
        raise fault

    write_state(folder, state(1.0))
    monkeypatch.setattr(state_folder, "_exchange", cut)
    with pytest.raises((CheckpointError, Killed)):
        write_state(folder, state(2.0))
    assert first_weight(folder) == left


# -- loading -----------------------------------------------------------------------------------------------------------


def test_a_missing_state_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"there is no saved state in .*/nowhere \(state.json is missing\)"):
        read_state(tmp_path / "nowhere")


def truncated(data: bytes) -> bytes:
    return data[:-1]


def flipped(data: bytes) -> bytes:
    return data[:-3] + bytes([data[-3] ^ 1]) + data[-2:]


def flipped_in_header(data: bytes) -> bytes:
    return bytes([data[0] ^ 1]) + data[1:]


def emptied(data: bytes) -> bytes:
    return b""


@pytest.mark.parametrize("damage", [truncated, flipped, flipped_in_header, emptied])
def test_a_damaged_tensor_file_is_refused(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    write_state(tmp_path / "state", state(1.0))
    file = tmp_path / "state" / "tensors.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(CheckpointError, match=r"tensors.safetensors is damaged: its sha256 is not the one recorded"):
        read_state(tmp_path / "state")


@pytest.mark.parametrize("damage", [truncated, flipped_in_header, emptied])
def test_a_damaged_json_file_is_refused(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    write_state(tmp_path / "state", state(1.0))
    file = tmp_path / "state" / "state.json"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(CheckpointError, match=r"the state in .*/state can't be read"):
        read_state(tmp_path / "state")


def test_a_flipped_digit_in_the_json_file_is_refused(tmp_path: Path) -> None:
    write_state(tmp_path / "state", state(1.0))
    file = tmp_path / "state" / "state.json"
    file.write_text(file.read_text().replace("0.125", "0.525"))
    with pytest.raises(CheckpointError):
        read_state(tmp_path / "state")


def test_json_of_another_kind_is_refused(tmp_path: Path) -> None:
    write_state(tmp_path / "state", state(1.0))
    (tmp_path / "state" / "state.json").write_text("[]")
    with pytest.raises(CheckpointError, match="can't be read"):
        read_state(tmp_path / "state")


@pytest.mark.parametrize("name", ["state.json", "tensors.safetensors"])
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    write_state(tmp_path / "state", state(1.0))
    (tmp_path / "state" / name).unlink()
    with pytest.raises(CheckpointError, match=rf"there is no saved state in .*/state \({name} is missing\)"):
        read_state(tmp_path / "state")


def test_another_format_is_refused_with_both_numbers(tmp_path: Path) -> None:
    write_state(tmp_path / "state", state(1.0))
    file = tmp_path / "state" / "state.json"
    file.write_text(file.read_text().replace('"format": 1', '"format": 7'))
    with pytest.raises(CheckpointError, match="has format 7; this version reads format 1"):
        read_state(tmp_path / "state")
