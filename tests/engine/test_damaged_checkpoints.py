"""A checkpoint that is damaged in whatever way is skipped in one line that names the file and the cause."""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from paceline import Engine, World
from paceline.checkpoint.manifest import COMPLETE, MANIFEST, complete_text
from paceline.checkpoint.retention import best_checkpoint, prune
from paceline.errors import CheckpointError
from tests.damage import INSTEAD
from tests.workers import run_workers

pytestmark = pytest.mark.timeout(60)

TENSORS = "worker-00000-of-00001.safetensors"


def prepared(engine: Engine) -> tuple[Any, Any, Any]:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    data = TensorDataset(torch.randn(16, 8), torch.randn(16, 1))
    return engine.prepare(model, torch.optim.AdamW(model.parameters()), DataLoader(data, batch_size=4))  # type: ignore[no-any-return]


def resumed(folder: Path) -> int:
    """The step that a new job goes on from."""
    with Engine(world=World()) as engine:
        prepared(engine)
        engine.checkpoints(folder).resume()
        return engine.step


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    with Engine(world=World()) as engine:
        model, optimizer, loader = prepared(engine)
        checkpoints = engine.checkpoints(folder)
        for x, y in loader:
            engine.backward(F.mse_loss(model(x), y))
            optimizer.step()
            if engine.step <= 2:
                checkpoints.save(score=engine.step)
        checkpoints.close()
    return folder


@pytest.fixture
def damaged(run: Path, tmp_path: Path) -> Path:
    """A copy of the run, whose newest checkpoint may be damaged."""
    shutil.copytree(run, tmp_path / "run")
    return tmp_path / "run" / "checkpoint-2"


# -- what stands in the place of a file --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [MANIFEST, COMPLETE, TENSORS])
@pytest.mark.parametrize("instead", INSTEAD)
def test_resume_goes_to_the_one_before_whatever_stands_there(
    damaged: Path, capsys: pytest.CaptureFixture[str], name: str, instead: str
) -> None:
    (damaged / name).unlink()
    INSTEAD[instead](damaged / name)
    if name == MANIFEST and (damaged / name).is_file() and (damaged / name).stat().st_size < 2**30:
        (damaged / COMPLETE).write_bytes(complete_text((damaged / name).read_bytes()))
    assert resumed(damaged.parent) == 1
    lines = [line for line in capsys.readouterr().out.splitlines() if "checkpoint-2" in line]
    assert len(lines) == 1, lines
    assert lines[0].startswith("paceline: checkpoint-2 is skipped: ")
    assert name in lines[0] or name == COMPLETE
    prune(damaged.parent, 1)


def with_header(path: Path, text: bytes) -> None:
    """The same number of bytes with another header."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    assert len(text) <= length, "the header has to fit"
    path.write_bytes(data[:8] + text.ljust(length) + data[8 + length :])


HEADERS = {
    "a list": b'[{"dtype":"F32"}]',
    "a number": b"17",
    "deeply nested": b'{"a":' * 90 + b"1" + b"}" * 90,
    "deeper than that": b"[" * 1500 + b"]" * 1500,
    "not UTF-8": b'{"\xff\xfe": 1}',
    "rows that are lists": b'{"/models/0/0.weight[0:64]":[0,256]}',
    "offsets that are texts": b'{"/models/0/0.weight[0:64]":{"dtype":"F32","shape":[64],"data_offsets":["0","256"]}}',
    "offsets that are missing": b'{"/models/0/0.weight[0:64]":{"dtype":"F32","shape":[64]}}',
    "offsets of nowhere": b'{"/models/0/0.weight[0:64]":{"dtype":"F32","shape":[64],"data_offsets":[0,9999999999999]}}',
    "negative offsets": b'{"/models/0/0.weight[0:64]":{"dtype":"F32","shape":[64],"data_offsets":[-256,0]}}',
    "a type that is none": b'{"/models/0/0.weight[0:64]":{"dtype":[],"shape":[64],"data_offsets":[0,256]}}',
    "a number of 5000 digits": b'{"a":' + b"9" * 5000 + b"}",
}


@pytest.mark.parametrize("kind", HEADERS)
def test_resume_goes_to_the_one_before_a_damaged_header(
    damaged: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    path = damaged / TENSORS
    if len(HEADERS[kind]) > int.from_bytes(path.read_bytes()[:8], "little"):
        length = len(HEADERS[kind])
        path.write_bytes(length.to_bytes(8, "little") + HEADERS[kind])
        manifest = json.loads((damaged / MANIFEST).read_bytes())
        manifest["files"][TENSORS]["bytes"] = path.stat().st_size
        for row in manifest["tensors"].values():
            row.update(shape=[0], ranges=[])
        sealed(damaged, manifest)
    else:
        with_header(path, HEADERS[kind])
    assert resumed(damaged.parent) == 1
    lines = [line for line in capsys.readouterr().out.splitlines() if "checkpoint-2" in line]
    assert len(lines) == 1, lines
    assert TENSORS in lines[0]


# -- a manifest with its checksum, and nonsense in it ------------------------------------------------------------------


def sealed(folder: Path, manifest: Any) -> None:
    text = json.dumps(manifest).encode()
    (folder / MANIFEST).write_bytes(text)
    (folder / COMPLETE).write_bytes(complete_text(text))


def nested(depth: int) -> Any:
    tree: Any = 1
    for _ in range(depth):
        tree = [tree]
    return tree


def put(*path: Any, value: Any) -> Callable[[Any], None]:
    def change(manifest: Any) -> None:
        for key in path[:-1]:
            manifest = manifest[key] if key != "first" else next(iter(manifest.values()))
        manifest[path[-1]] = value

    return change


CHANGES: dict[str, Callable[[Any], object]] = {
    "format as a text": put("format", value="2"),
    "format as a list": put("format", value=[2]),
    "about as a list": put("about", value=[]),
    "about without a step": put("about", value={}),
    "a step that is a text": put("about", "step", value="two"),
    "a step before the first": put("about", "step", value=-1),
    "a score that is a list": put("about", "score", value=[1]),
    "a checksum that is none": put("checksum", value=["sha256"]),
    "a checksum of another kind": put("checksum", value="md5"),
    "a tree that is a list": put("tree", value=[1, 2]),
    "a tree that is deep": put("tree", "extra", value=nested(700)),
    "a tree without models": lambda manifest: manifest["tree"].pop("models"),
    "models that are a text": put("tree", "models", value="models"),
    "a model that is a list": put("tree", "models", value=[[]]),
    "a step in the tree that is a list": put("tree", "step", value=[]),
    "a job that is a number": put("tree", "job", value=3),
    "optimizers without groups": put("tree", "optimizers", value=[{"state": {}}]),
    "groups that are numbers": put("tree", "optimizers", 0, "param_groups", value=[1]),
    "schedulers that are none": put("tree", "schedulers", value=None),
    "a small tensor of text": put("tree", "extra", value={"$small": "F32"}),
    "a small tensor of nothing": put("tree", "extra", value={"$small": ["F32", [3], "00"]}),
    "a tensor that is not there": put("tree", "extra", value={"$tensor": "/nowhere"}),
    "a tensor named by a list": put("tree", "extra", value={"$tensor": []}),
    "a float that is none": put("tree", "extra", value={"$float": []}),
    "a tuple that is none": put("tree", "extra", value={"$tuple": 4}),
    "tensors that are a list": put("tensors", value=[]),
    "a row that is a text": put("tensors", "/models/0/0.weight", value="F32"),
    "a shape of texts": put("tensors", "first", "shape", value=["8"]),
    "a negative shape": put("tensors", "first", "shape", value=[-8, -8]),
    "a shape of thousands of terabytes": put("tensors", "first", "shape", value=[2**62]),
    "a type that is not known": put("tensors", "first", "dtype", value="F7"),
    "a type that is a list": put("tensors", "first", "dtype", value=[]),
    "ranges that are a number": put("tensors", "first", "ranges", value=7),
    "a range that is a list": put("tensors", "first", "ranges", value=[[0, 64]]),
    "a range of texts": put("tensors", "first", "ranges", 0, "start", value="0"),
    "a range of another file": put("tensors", "first", "ranges", 0, "file", value="other.safetensors"),
    "a range that is too long": put("tensors", "first", "ranges", 0, "stop", value=2**40),
    "files that are a list": put("files", value=[TENSORS]),
    "a file elsewhere": lambda manifest: manifest["files"].update({"../checkpoint-1/" + TENSORS: {}}),
    "a file with a line break": lambda m: m["files"].update({"a\nb": {"bytes": 1, "checksum": "0"}}),
    "a size that is a text": put("files", "first", "bytes", value="many"),
    "a size that is not finite": put("files", "first", "bytes", value=float("nan")),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_resume_goes_to_the_one_before_a_manifest_that_makes_no_sense(
    damaged: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    manifest = json.loads((damaged / MANIFEST).read_bytes())
    CHANGES[kind](manifest)
    sealed(damaged, manifest)
    assert resumed(damaged.parent) == 1
    lines = capsys.readouterr().out.splitlines()[1:]
    assert len(lines) == 2, lines
    assert lines[0].startswith("paceline: checkpoint-2 is skipped: ")
    assert MANIFEST in lines[0] or kind == "a checksum of another kind"
    assert len(lines[0]) < 600
    assert best_checkpoint(damaged.parent) is not None


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
    | st.sampled_from(["F32", "BOOL", TENSORS, "/models/0/0.weight", "$tensor", 2**70, -(2**63), "int:x"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["$tensor", "$small", "$tuple", "$float", "int:1", "int:a", "params"]) | st.text(max_size=3),
        inner, max_size=3,
    ),
    max_leaves=6,
)  # fmt: skip


def places(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inside = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [path, *(place for key, value in inside for place in places(value, (*path, key)))]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_whatever_stands_in_a_manifest_is_used_skipped_or_refused(damaged: Path, data: st.DataObject) -> None:
    manifest = json.loads((damaged.parent / "checkpoint-1" / MANIFEST).read_bytes())
    manifest = copy.deepcopy(manifest)
    manifest["about"]["step"] = manifest["tree"]["step"] = 2
    path = data.draw(st.sampled_from(places(manifest)[1:]))
    put(*path, value=data.draw(values))(manifest)
    sealed(damaged, manifest)
    with suppress(CheckpointError):  # of another job, or another model
        assert resumed(damaged.parent) >= 0


# -- other ways in -----------------------------------------------------------------------------------------------------


def test_a_fifo_given_by_name_is_refused_and_nothing_waits(damaged: Path) -> None:
    (damaged / MANIFEST).unlink()
    os.mkfifo(damaged / MANIFEST)
    with Engine(world=World()) as engine:
        prepared(engine)
        with pytest.raises(CheckpointError, match=r"manifest\.json can't be read: it is a fifo"):
            engine.checkpoints(damaged.parent).resume(damaged)
        with pytest.raises(CheckpointError, match=r"manifest\.json can't be read: it is a fifo"):
            engine.load_state(damaged)


def test_a_state_that_is_nested_too_deeply_is_not_saved(tmp_path: Path) -> None:
    with Engine(world=World()) as engine:
        prepared(engine)
        with pytest.warns(UserWarning, match="'extra/0/0.*is nested more than"):
            engine.checkpoints(tmp_path).save(extra=nested(5000))


def _resume_beside(world: World, folder: str) -> int:
    with Engine(world=world, lanes=2, timeout_s=20) as engine:
        model = nn.Linear(8, 1)
        data = TensorDataset(torch.randn(16, 8), torch.randn(16, 1))
        engine.prepare(model, torch.optim.AdamW(model.parameters()), DataLoader(data, batch_size=4))
        engine.checkpoints(folder).resume()
        return engine.step


def _save_beside(world: World, folder: str) -> None:
    with Engine(world=world, lanes=2, timeout_s=20) as engine:
        model = nn.Linear(8, 1)
        data = TensorDataset(torch.randn(16, 8), torch.randn(16, 1))
        model, optimizer, loader = engine.prepare(
            model, torch.optim.AdamW(model.parameters()), DataLoader(data, batch_size=4)
        )
        checkpoints = engine.checkpoints(folder)
        for x, y in loader:
            engine.backward(F.mse_loss(model(x), y))
            optimizer.step()
            if engine.stepped and engine.step <= 2:
                checkpoints.save()
        checkpoints.close()


@pytest.mark.workers
def test_two_workers_skip_together_what_only_one_of_them_reads(tmp_path: Path) -> None:
    for result in run_workers(_save_beside, 2, folder=str(tmp_path)):
        assert result.error is None, result.traceback
    with_header(tmp_path / "checkpoint-2" / "worker-00001-of-00002.safetensors", b"[]")
    assert [result.value for result in run_workers(_resume_beside, 2, folder=str(tmp_path))] == [1, 1]
