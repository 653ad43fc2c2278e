"""What scripts for Accelerate call on the Engine means here what it means there, or is refused with what to write."""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader

from paceline import Engine, World
from paceline.engine.evaluation import share_of
from paceline.errors import CheckpointError, ConfigError, LoopError, UnknownNameError
from tests.engine.loops import prepared, vectors
from tests.workers import hashes, run_workers

# -- the constructor ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mixed", "here"), [("no", "fp32"), ("bf16", "bf16"), ("fp16", "fp16"), (None, "fp32")])
def test_mixed_precision_is_the_precision(mixed: Any, here: str) -> None:
    with Engine(mixed_precision=mixed) as engine:
        assert engine.config.precision.parameters == here
        assert engine.mixed_precision == (mixed or "no")


def test_gradient_accumulation_steps_are_micro_batches() -> None:
    with Engine(gradient_accumulation_steps=3) as engine:
        assert (engine.config.accumulate, engine.gradient_accumulation_steps) == (3, 3)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"mixed_precision": "fp8"}, "mixed_precision='fp8' is not known; choose no, bf16 or fp16"),
        ({"mixed_precision": "bf16", "precision": "fp16"}, "mixed_precision='bf16' and precision='fp16' differ"),
        ({"gradient_accumulation_steps": 2, "accumulate": 4}, "gradient_accumulation_steps=2 and accumulate=4"),
        ({"acumulate": 2}, r"Engine\(acumulate=…\) is not known; did you mean accumulate=\?"),
        ({"cpu": True}, "cpu=…. is not known; write device='cpu'"),
        ({"split_batch": True}, "if split_batches is meant: write global_batch_size="),
        (
            {"devices": 8},
            "devices=…. is not known; leave it out: `paceline run --workers N script.py` starts the workers",
        ),
        ({"zero_stage": 2}, "write strategy='zero1', 'zero2' or 'zero3'"),
        ({"zzz": 1}, r"Engine\(zzz=…\) is not known; docs/concepts/loop.md lists what there is"),
    ],
)
def test_arguments_that_are_not_known_are_refused_with_what_to_write(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told) as error:
        Engine(**given)
    assert len(str(error.value).splitlines()) == 1


# -- names -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("bakward", r"engine\.bakward is not known; did you mean engine\.backward\?"),
        ("is_main_proces", r"did you mean engine\.is_main_process\?"),
        ("no_sync", r"write Engine\(gradient_accumulation_steps=k\)"),
        ("skip_first_batches", "goes on with the next sample by itself"),
        ("clip_grad_value_", r"use engine\.clip_grad_norm_"),
        ("set_trigger", r"call engine\.stop\(\)"),
        ("prepare_data_loader", r"to engine\.prepare"),
        ("setup_dataloaders", r"to engine\.prepare"),
        ("is_global_zero", r"write engine\.is_main_process"),
        ("log_dict", r"use engine\.log\(values\)"),
        ("save_checkpoint", r"use engine\.save_state\(folder\)"),
        ("module", "use the model: `prepare` wraps nothing"),
    ],
)
def test_a_name_that_is_not_known_answers_with_what_to_write(name: str, told: str) -> None:
    with Engine() as engine:
        assert not hasattr(engine, name)
        with pytest.raises(UnknownNameError, match=told) as error:
            getattr(engine, name)
    assert isinstance(error.value, AttributeError)
    assert len(str(error.value).splitlines()) == 1


THEIRS = {"init_trackers": ("project_name", "config", "init_kwargs"), "log": ("values", "step", "log_kwargs")}
"""Whose signatures a decorator hides."""


def calls_of_accelerate(model: nn.Module, folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each method that takes arguments by name, with all of them: what they have to have, and their defaults."""
    accelerate = pytest.importorskip("accelerate")
    given: dict[str, Any] = {
        "config": {}, "f": folder / "f", "function": print, "input_data": torch.ones(2), "input_dir": folder / "state",
        "inputs": [1, 2], "init_kwargs": {}, "log_kwargs": {}, "loss": model.weight.sum(), "max_norm": 1.0,
        "model": model, "obj": {"a": 1}, "output_dir": folder / "state", "parameters": list(model.parameters()),
        "project_name": "run", "save_directory": folder / "model", "step": None, "tensor": torch.ones(2, 2),
        "values": {"loss": 1.0},
    }  # fmt: skip
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    order = ["save_state"]  # there has to be a state to load
    for name in sorted(dir(accelerate.Accelerator), key=lambda name: (name not in order, name)):
        method = inspect.getattr_static(accelerate.Accelerator, name)
        if name.startswith("_") or isinstance(method, property | staticmethod) or not callable(method):
            continue
        taken = {key: p.default for key, p in inspect.signature(method).parameters.items() if p.kind in kinds}
        taken = dict.fromkeys(THEIRS[name]) if name in THEIRS else {k: v for k, v in taken.items() if k != "self"}
        yield name, {key: given.get(key, default) for key, default in taken.items()}


def test_every_method_of_accelerate_takes_its_arguments_by_name_or_says_what_to_write(tmp_path: Path) -> None:
    done = []
    with Engine(device="cpu", project_dir=tmp_path) as engine:
        model, optimizer, loader = prepared(engine, samples=8)
        for name, arguments in calls_of_accelerate(model, tmp_path):
            if name in ("backward", "clip_grad_norm_", "end_training"):  # inside a step, and at the end
                inspect.signature(getattr(engine, name)).bind(**arguments)
                continue
            if hasattr(engine, name):  # what is not is told below
                getattr(engine, name)(**arguments)
                done.append(name)
        for x, y in loader:
            engine.backward(loss=F.mse_loss(model(x), y))
            engine.clip_grad_norm_(parameters=model.parameters(), max_norm=1.0, norm_type=2)
            optimizer.step()
        assert engine.unwrap_model(torch.compile(model, backend="eager"), keep_torch_compile=False) is model
    assert {"load_state", "log", "reduce", "save_model"} <= set(done)


@pytest.mark.parametrize(
    ("method", "given", "told"),
    [
        (
            "save_state",
            {"output_dir": "a", "safe_serialization": False},
            "safe_serialization=False. is not known; leave",
        ),
        ("save_state", {"output_dir": "a", "exclude_frozen_parameters": True}, "is not known; docs/concepts/loop.md"),
        ("save_state", {"folder": "a", "output_dir": "b"}, "is Accelerate's name for folder, which is given too"),
        (
            "save_state",
            {},
            r"folder is missing; write engine.save_state\(folder\)",
        ),
        ("load_state", {"input_dir": "a", "load_kwargs": {"weights_only": True}}, "what was saved is read whole"),
        (
            "init_trackers",
            {"project_name": "a", "init_kwargs": {"wandb": {"name": "b"}}},
            "the tracker's own variables",
        ),
        ("log", {"values": {}, "log_kwargs": {"wandb": {}}}, "each tracker gets the numbers and their step"),
        ("save_model", {"model": None, "save_directory": "a", "max_shard_size": "1GB"}, "max_shard_size='1GB'"),
        ("gather_for_metrics", {"input_data": ["a"], "use_gather_object": True}, "torch.distributed.all_gather_object"),
        (
            "reduce",
            {"tensor": torch.ones(1), "scale": 0.5},
            r"reduce\(scale=0.5\) is not known; multiply what it returns",
        ),
        (
            "save",
            {"obj": {}, "f": "a", "safe_serialization": True},
            r"write safetensors.torch.save_file\(tensors, file",
        ),
        ("save", {"obj": {}}, r"file is missing; write engine.save\(thing, file\)"),
        ("prepare", {"device_placement": [True]}, "leave it out: batches and models go to engine.device"),
        ("profile", {"profile_handler": object()}, r"write engine.profile\(wait=…"),
        ("autocast", {"autocast_handler": object()}, r"write torch.autocast\(…\)"),
    ],
)
def test_arguments_of_accelerates_methods_that_change_something_are_refused_in_one_line(
    method: str, given: dict[str, Any], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with Engine() as engine, pytest.raises(ConfigError, match=told) as error:
        getattr(engine, method)(**given)
    assert len(str(error.value).splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_every_name_of_accelerate_is_there_or_says_what_to_write() -> None:
    accelerate = pytest.importorskip("accelerate")
    with Engine() as engine:
        for name in dir(accelerate.Accelerator):
            if not name.startswith("_") and not hasattr(engine, name):
                with pytest.raises(UnknownNameError) as error:
                    getattr(engine, name)
                assert "lists what there is" not in str(error.value)


def test_an_attribute_error_inside_a_property_is_not_taken_for_an_unknown_name() -> None:
    class Odd(Engine):
        @property
        def odd(self) -> Any:
            return [].nothing  # type: ignore[attr-defined]

    with Odd() as engine, pytest.raises(AttributeError, match="'list' object has no attribute 'nothing'"):
        _ = engine.odd


def test_one_process_is_all_of_them() -> None:
    with Engine() as engine:
        assert (engine.num_processes, engine.process_index, engine.local_process_index) == (1, 0, 0)
        assert (engine.is_main_process, engine.is_local_main_process, engine.is_last_process) == (True, True, True)
        assert (engine.use_distributed, engine.distributed_type) == (False, "NO")
        assert engine.on_main_process(lambda x: x + 1)(1) == engine.on_local_main_process(lambda x: x + 1)(1) == 2
        engine.wait_for_everyone()
        with engine.main_process_first(), engine.local_main_process_first():
            pass


# -- the loop ----------------------------------------------------------------------------------------------------------


def trained(engine: Engine, *, accumulate_block: bool) -> tuple[str, list[bool]]:
    model, optimizer, loader = prepared(engine, samples=72)
    syncs = []
    for x, y in loader:
        if accumulate_block:
            with engine.accumulate(model), engine.autocast():
                engine.backward(F.mse_loss(model(x), y))
                if engine.sync_gradients:
                    engine.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad()
        else:
            engine.backward(F.mse_loss(model(x), y))
            engine.clip_grad_norm_(0.1)
            optimizer.step()
        syncs.append(engine.sync_gradients)
        assert engine.sync_gradients == engine.stepped
    return engine.weights_hash(), syncs


def test_accumulate_gives_the_bits_of_our_own_words() -> None:
    with Engine(lanes=2, gradient_accumulation_steps=2) as engine:
        theirs, syncs = trained(engine, accumulate_block=True)
    with Engine(lanes=2, accumulate=2) as engine:
        assert trained(engine, accumulate_block=False) == (theirs, syncs)
    assert syncs == [False, False, False, True] * 4 + [False, True]  # 72 samples: the last step has two micro-batches


def test_a_step_that_is_left_out_says_so() -> None:
    with Engine(on_nonfinite="skip") as engine:
        model, optimizer, loader = prepared(engine, samples=8)
        said = []
        with pytest.warns(UserWarning, match="the loss of step 1 is nan"):
            for number, (x, y) in enumerate(loader):
                engine.backward(F.mse_loss(model(x), y) * (torch.nan if number == 0 else 1))
                optimizer.step()
                said.append(engine.optimizer_step_was_skipped)
        assert said == [True, False]


def test_autocast_computes_in_the_jobs_precision() -> None:
    weight, x = torch.ones(2, 2), torch.ones(2, 2)
    for mixed, dtype in (("no", torch.float32), ("bf16", torch.bfloat16)):
        with Engine(mixed_precision=mixed) as engine, engine.autocast():
            assert (weight @ x).dtype is dtype


def test_clipping_takes_torchs_arguments_and_returns_a_tensor() -> None:
    with Engine(lanes=2) as engine:
        model, optimizer, loader = prepared(engine, samples=8)
        for x, y in loader:
            engine.backward(10 * F.mse_loss(model(x), y))
            norm = engine.clip_grad_norm_(model.parameters(), max_norm=0.5)
            optimizer.step()
        assert norm.item() > 0.5


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda engine, model: engine.clip_grad_norm_(model.bias, 1.0), "got 1 of 2 parameters that are trained"),
        (lambda engine, model: engine.clip_grad_norm_(model.parameters(), 1.0, norm_type=1), "norm_type=1"),
    ],
)
def test_clipping_of_something_else_is_refused(call: Any, told: str) -> None:
    with Engine() as engine:
        model, _, loader = prepared(engine)
        with pytest.raises(LoopError, match=told):
            for x, y in loader:
                engine.backward(F.mse_loss(model(x), y))
                call(engine, model)


def test_options_of_torchs_backward_are_refused() -> None:
    with Engine() as engine:
        model, _, loader = prepared(engine)
        with pytest.raises(LoopError, match=r"engine\.backward\(retain_graph=…\).*last=False"):
            for x, y in loader:
                engine.backward(F.mse_loss(model(x), y), retain_graph=True)


def test_a_loader_that_was_prepared_without_the_optimizer_does_not_train() -> None:
    with Engine() as engine:
        model = nn.Linear(8, 1)
        model, _ = engine.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        loader = engine.prepare(DataLoader(vectors(), batch_size=4, shuffle=True))
        with pytest.raises(LoopError, match="with the optimizer; one that was given without is for evaluation"):
            for x, y in loader:
                engine.backward(F.mse_loss(model(x), y))


def test_what_is_no_number_can_not_be_gathered() -> None:
    with Engine() as engine, pytest.raises(LoopError, match=r"tensors and numbers, .* not a str; gather the numbers"):
        engine.gather_for_metrics({"texts": ["one", "two"]})


def test_a_named_tuple_is_gathered_by_its_fields() -> None:
    class Scores(NamedTuple):
        right: Any
        loss: Any

    with Engine() as engine:
        for gather in (engine.gather, engine.gather_for_metrics):
            found = gather({"a": Scores(torch.tensor([1, 0]), 0.5)})["a"]
            assert isinstance(found, Scores)
            assert (found.right.tolist(), found.loss.tolist()) == ([1, 0], [0.5])


# -- between steps -----------------------------------------------------------------------------------------------------


class Counter:
    def __init__(self) -> None:
        self.value = 0

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "halves": torch.full((2,), self.value / 2)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]
        assert state["halves"].tolist() == [self.value / 2] * 2


def test_what_is_registered_is_saved_and_loaded(tmp_path: Path) -> None:
    for resumed in (False, True):
        with Engine() as engine:
            prepared(engine)
            counter = Counter()
            engine.register_for_checkpointing(counter)
            if resumed:
                engine.load_state(tmp_path / "state")
                assert counter.value == 7
            else:
                counter.value = 7
                engine.save_state(tmp_path / "state")
    with Engine() as engine:
        prepared(engine)
        with pytest.raises(CheckpointError, match="1 were registered there, 0 here"):
            engine.load_state(tmp_path / "state")
        with pytest.raises(ConfigError, match=r"got a int, without state_dict\(\)"):
            engine.register_for_checkpointing(3)


def test_a_part_for_each_process() -> None:
    assert [share_of([1, 2, 3, 4, 5], rank, 3) for rank in range(3)] == [[1, 2], [3, 4], [5]]
    assert [share_of((1, 2, 3, 4, 5), rank, 3, pad=True) for rank in range(3)] == [(1, 2), (3, 4), (5, 5)]
    assert [share_of([1], rank, 3) for rank in range(3)] == [[1], [], []]
    assert [share_of([1, 2], rank, 2, pad=True) for rank in range(2)] == [[1], [2]]
    parts = [share_of({"a": "xyz", "b": torch.arange(3)}, rank, 2, pad=True) for rank in range(2)]
    assert [(part["a"], part["b"].tolist()) for part in parts] == [("xy", [0, 1]), ("zz", [2, 2])]
    with pytest.raises(ConfigError, match="different lengths"):
        share_of({"a": [1], "b": []}, 0, 2)


def together(world: World, *, folder: str, strategy: str) -> str:
    with Engine(world=world, lanes=4, strategy=strategy) as engine:
        place = Path(folder) / "first"
        if world.rank == 0:
            time.sleep(0.3)  # the others would be first, if they did not wait
        with engine.main_process_first():
            assert place.exists() == (world.rank > 0)
            place.touch()
        engine.wait_for_everyone()
        place.unlink(missing_ok=True)

        assert (engine.num_processes, engine.process_index) == (world.size, world.rank)
        assert engine.gather(torch.tensor([world.rank])).tolist() == list(range(world.size))
        total = engine.reduce({"one": torch.ones(2), "rank": [torch.tensor(world.rank)]})
        assert total["one"].tolist() == [world.size] * 2
        assert total["rank"][0].item() == sum(range(world.size))
        assert engine.reduce(torch.tensor(float(world.rank)), reduction="mean").item() == (world.size - 1) / 2
        assert engine.on_main_process(lambda: "said")() == ("said" if world.rank == 0 else None)
        assert engine.on_last_process(lambda: "said")() == ("said" if world.rank == world.size - 1 else None)
        assert engine.distributed_type == ("NO" if world.size == 1 else "MULTI_CPU")
        ragged = torch.full((1, world.rank + 1), world.rank + 1)
        ends = engine.pad_across_processes({"a": [ragged]}, dim=1)["a"][0]
        starts = engine.pad_across_processes(ragged, dim=1, pad_first=True)
        rows = [[rank + 1] * (rank + 1) for rank in range(world.size)]
        assert engine.gather(ends).tolist() == [row + [0] * (world.size - len(row)) for row in rows]
        assert engine.gather(starts).tolist() == [[0] * (world.size - len(row)) + row for row in rows]
        with engine.split_between_processes(list(range(7))) as mine:
            assert engine.gather_for_metrics(torch.tensor(mine)).tolist() == list(range(7))

        model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False), nn.Linear(8, 1))
        model[1].weight = model[0].weight
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        unprepared = DataLoader(vectors(37), batch_size=4)  # the last of 3 steps has 2 micro-batches
        steps = engine.steps_per_epoch(unprepared)
        model, optimizer, loader = engine.prepare(model, optimizer, unprepared)
        bodies = 0
        for x, y in loader:
            with engine.accumulate(model):
                engine.backward(F.mse_loss(model(x), y))
                engine.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
            bodies += 1
        assert (bodies, engine.step) == (len(loader), steps)
        assert steps == engine.steps_per_epoch(loader) == 3
        weights = engine.get_state_dict(engine.unwrap_model(model))
        engine.save_model(model, folder)
        saved = load_file(Path(folder) / "model.safetensors")
        assert saved.keys() == weights.keys() - {"1.weight"}
        assert all(torch.equal(saved[name], weights[name]) for name in saved)
        return engine.weights_hash()


@pytest.mark.workers
def test_what_workers_do_together_is_what_it_is_called(tmp_path: Path) -> None:
    alone = hashes(run_workers(together, 1, folder=str(tmp_path), strategy="ddp"))
    for workers, strategy in ((2, "ddp"), (3, "zero2"), (2, "fsdp")):
        assert hashes(run_workers(together, workers, folder=str(tmp_path), strategy=strategy)) == alone
