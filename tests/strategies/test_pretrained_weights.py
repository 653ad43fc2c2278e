"""`prepare(weights=folder)`: files go straight into a model from the meta device, with the bits of from_pretrained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import paceline.strategies.fsdp.fsdp as open_strategy
import paceline.strategies.fsdp.weights as unit_weights
from paceline import Engine, World
from paceline.errors import CheckpointError, ConfigError
from paceline.strategies.fsdp.fsdp import FsdpConfig
from paceline.strategies.fsdp.unmaterialised import is_unmaterialised
from paceline.strategies.meta_device import fill_modules
from paceline.strategies.zero.weights import WeightsPerHost
from paceline.strategies.zero.zero3 import Zero3Config
from tests.workers import hashes, run_workers

WIDTH, LAYERS = 64, 8


class Positions(nn.Module):
    """Has a buffer that no file has."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(WIDTH), persistent=False)
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight)
        self.table.copy_(torch.arange(WIDTH) / WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight + self.table.to(x.dtype)


class Net(nn.Module):
    """Tied ends, a norm with statistics, and a module with a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.last.weight = self.first.weight
        self.positions = Positions()
        self.inner = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(F.relu(self.inner(self.positions(self.first(x))))))  # type: ignore[no-any-return]


def pretrained(folder: Path, *, files: int = 1, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Writes what a save_pretrained would: each tied weight once."""
    torch.manual_seed(9)
    state = {name: value for name, value in Net().state_dict().items() if name != "last.weight"}
    state = {n: torch.randn_like(v).abs().to(dtype) if v.is_floating_point() else v + 3 for n, v in state.items()}
    folder.mkdir(exist_ok=True)
    if files == 1:
        save_file(state, folder / "model.safetensors")
        return state
    where = {name: f"model-{place % files + 1:05}-of-{files:05}.safetensors" for place, name in enumerate(state)}
    for file in set(where.values()):
        save_file({name: state[name] for name in where if where[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return state


def trains(world: World, *, folder: str | None, state: dict[str, Tensor] | None = None, **job: Any) -> str:
    """From `folder` by way of the meta device, or in the ordinary way from `state`."""
    with Engine(world=world, lanes=4, bucket_mib=0.02, **job) as engine:
        with torch.device("meta" if folder is not None else "cpu"):
            model = Net()
        if state is not None:
            model.load_state_dict(state, strict=False)
        generator = torch.Generator().manual_seed(3)
        data = TensorDataset(torch.randn(32, WIDTH, generator=generator), torch.randn(32, WIDTH, generator=generator))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        more = {} if folder is None else {"weights": folder}
        model, optimizer, loader = engine.prepare(model, optimizer, DataLoader(data, batch_size=4), **more)
        for x, y in loader:
            engine.backward(F.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
        assert model.first.weight is model.last.weight
        return engine.weights_hash()


@pytest.mark.workers
@pytest.mark.parametrize(
    ("strategy", "workers", "files"),
    [
        ("ddp", 1, 1), ("ddp", 2, 3), ("zero2", 2, 1), ("zero3", 1, 3), ("zero3", 3, 1), ("fsdp", 1, 1),
        ("fsdp", 3, 3), (Zero3Config(weights="in shards"), 2, 1), ("hybrid", 2, 3),
    ],
)  # fmt: skip
def test_weights_from_files_train_to_the_bits_of_those_loaded_on_a_real_device(
    tmp_path: Path, strategy: Any, workers: int, files: int
) -> None:
    state = pretrained(tmp_path, files=files)
    found = run_workers(trains, workers, folder=str(tmp_path), strategy=strategy)
    assert hashes(found) == {trains(World(), folder=None, state=state)}


@pytest.mark.workers
def test_values_are_converted_to_the_precision_of_the_model(tmp_path: Path) -> None:
    state = pretrained(tmp_path, dtype=torch.bfloat16)
    wanted = trains(World(), folder=None, state=state)
    assert hashes(run_workers(trains, 2, folder=str(tmp_path), strategy="fsdp")) == {wanted}
    assert trains(World(), folder=str(tmp_path / "model.safetensors")) == wanted
    low = trains(World(), folder=str(tmp_path), precision="bf16")
    assert hashes(run_workers(trains, 2, folder=str(tmp_path), strategy="fsdp", precision="bf16")) == {low}


def test_a_checkpoint_of_ours_is_a_folder_of_weights_too(tmp_path: Path) -> None:
    model = Net()
    with Engine(world=World()) as engine:
        engine.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        engine.save_state(tmp_path / "saved")
    state = {name: value.clone() for name, value in model.state_dict().items()}
    assert trains(World(), folder=str(tmp_path / "saved")) == trains(World(), folder=None, state=state)


def refused(folder: Path, model: nn.Module | None = None, kind: type[Exception] = CheckpointError) -> str:
    if model is None:
        with torch.device("meta"):
            model = Net()
    with Engine(world=World()) as engine, pytest.raises(kind) as found:
        engine.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), weights=folder)
    return str(found.value)


def test_names_and_shapes_that_do_not_fit_are_refused_by_name(tmp_path: Path) -> None:
    whole = pretrained(tmp_path)
    file, other = tmp_path / "model.safetensors", f"{tmp_path} holds weights of another model: "
    save_file({name: value for name, value in whole.items() if not name.startswith("norm.")}, file)
    assert refused(tmp_path).startswith(f"{other}it has no 'norm.weight' and 4 more names; build the model")
    save_file(whole | {"head.weight": torch.zeros(3), "head.bias": torch.zeros(3)}, file)
    assert refused(tmp_path).startswith(f"{other}the model has no 'head.bias' and 1 more names; build")
    save_file(whole | {"norm.weight": torch.zeros(3)}, file)
    assert refused(tmp_path).startswith(f"{other}'norm.weight' is (3,) there and ({WIDTH},) in the model; build")


def test_files_that_are_missing_or_damaged_are_refused(tmp_path: Path) -> None:
    assert refused(tmp_path) == f"{tmp_path} has no model.safetensors and no model.safetensors.index.json"
    pretrained(tmp_path, files=2)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    assert "has no model-00002-of-00002.safetensors, which another file" in refused(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    assert "model.safetensors.index.json can't be read" in refused(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    (tmp_path / "model.safetensors").write_bytes(b"123")
    assert refused(tmp_path).endswith("is damaged: its header does not fit into the file")


def test_a_model_that_has_its_weights_and_one_without_an_optimizer_are_refused(tmp_path: Path) -> None:
    pretrained(tmp_path)
    wanted = "engine.prepare(weights=…) is for one model, built under torch.device('meta')"
    assert refused(tmp_path, Net(), ConfigError).startswith(wanted)
    with torch.device("meta"):
        model = Net()
    with Engine(world=World()) as engine, pytest.raises(ConfigError, match="is for one model"):
        engine.prepare(model, weights=tmp_path)


# -- models of transformers --------------------------------------------------------------------------------------------


def kinds() -> dict[str, Any]:
    """Tied and untied, with buffers that no file has, heads that a file may lack."""
    from transformers import BertConfig, GPT2Config, LlamaConfig

    small = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return {
        "gpt2": GPT2Config(vocab_size=40, n_positions=8, n_embd=16, n_layer=2, n_head=2),
        "llama": LlamaConfig(vocab_size=40, num_key_value_heads=2, tie_word_embeddings=False, **small),
        "llama in bf16": LlamaConfig(vocab_size=40, num_key_value_heads=2, dtype="bfloat16", **small),
        "bert": BertConfig(vocab_size=40, max_position_embeddings=8, is_decoder=True, **small),
    }


def trains_language_model(world: World, *, kind: str, folder: str, from_meta: bool, **job: Any) -> str:
    import transformers

    with Engine(world=world, lanes=4, **job) as engine:
        auto: Any = transformers.AutoModelForCausalLM
        if from_meta:
            with torch.device("meta"):
                model = auto.from_config(transformers.AutoConfig.from_pretrained(folder))
        else:
            model = auto.from_pretrained(folder)
        model.train()
        tokens = torch.randint(0, 40, (16, 6), generator=torch.Generator().manual_seed(2))
        loader = DataLoader(TensorDataset(tokens), batch_size=2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        more = {"weights": folder} if from_meta else {}
        model, optimizer, loader = engine.prepare(model, optimizer, loader, **more)
        for (batch,) in loader:
            engine.backward(model(input_ids=batch, labels=batch).loss)
            optimizer.step()
            optimizer.zero_grad()
        return engine.weights_hash()


@pytest.mark.workers
@pytest.mark.parametrize(("kind", "workers"), [("gpt2", 1), ("llama", 2), ("llama in bf16", 1), ("bert", 1)])
def test_a_model_of_transformers_trains_from_its_files_as_from_pretrained(
    tmp_path: Path, kind: str, workers: int
) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(4)
    config = kinds()[kind]
    made = transformers.AutoModelForCausalLM.from_config(config)
    made.save_pretrained(str(tmp_path), max_shard_size="8KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    job = {"kind": kind, "folder": str(tmp_path)}
    wanted = trains_language_model(World(), from_meta=False, **job)
    if workers == 1:
        assert trains_language_model(World(), from_meta=True, **job) == wanted
    else:
        imports_s = 100.0  # transformers takes workers long to import where the host is busy
        found = run_workers(trains_language_model, workers, timeout_s=imports_s, from_meta=True, strategy="fsdp", **job)
        assert hashes(found) == {wanted}


def test_files_of_a_bare_model_fit_one_with_a_tied_head(tmp_path: Path) -> None:
    """As the files of GPT-2 itself are, with masks in them that its code ignores today."""
    transformers = pytest.importorskip("transformers")
    config = kinds()["gpt2"]
    bare = transformers.GPT2Model(config)
    save_file(bare.state_dict() | {"h.0.attn.bias": torch.ones(1, 1, 8, 8)}, tmp_path / "model.safetensors")
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(config)
    with Engine(world=World()) as engine:
        engine.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), weights=tmp_path)
        assert model.lm_head.weight is model.transformer.wte.weight
        assert all(
            torch.equal(value, model.transformer.state_dict()[name]) for name, value in bare.state_dict().items()
        )


# -- memory ------------------------------------------------------------------------------------------------------------


def most_at_a_time(world: World, *, folder: str, strategy: Any) -> tuple[int, int]:
    """The most elements that a worker had for itself while the model was filled, and those of the model."""
    most, held = 0, set[int]()

    def watched(modules: list[nn.Module], *args: Any, **options: Any) -> None:
        nonlocal most
        fill_modules(modules, *args, **options)
        own = [p for p in model.parameters() if not p.is_meta and not is_unmaterialised(p) and id(p) not in held]
        most = max(most, sum(p.numel() for p in own))

    def holds(self: WeightsPerHost, named: Any) -> None:
        hold(self, named)
        held.update(id(parameter) for _, parameter in named)

    hold = WeightsPerHost.hold
    WeightsPerHost.hold = holds  # type: ignore[method-assign]
    unit_weights.fill_modules = open_strategy.fill_modules = watched  # type: ignore[assignment]
    with Engine(world=world, strategy=strategy, bucket_mib=0.02) as engine:
        with torch.device("meta"):
            model = Net()
        data = DataLoader(TensorDataset(torch.randn(8, WIDTH)), batch_size=4)
        engine.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), data, weights=folder)
        return most, sum(p.numel() for p in model.parameters())


@pytest.mark.workers
@pytest.mark.parametrize("strategy", [FsdpConfig(nn.Linear), "fsdp", "zero3", Zero3Config(weights="in shards")])
def test_no_worker_has_the_whole_model_at_any_time(tmp_path: Path, strategy: Any) -> None:
    pretrained(tmp_path)
    for result in run_workers(most_at_a_time, 2, folder=str(tmp_path), strategy=strategy):
        assert result.error is None, result.traceback
        most, elements = result.value
        assert 0 < most <= 0.4 * elements, f"{most:,} of {elements:,}"


def peak_growth(world: World, *, folder: str, layers: int, width: int) -> int:
    """Bytes by which this worker's largest resident memory has grown in prepare()."""
    with Engine(world=world, strategy="fsdp", bucket_mib=4) as engine:
        with torch.device("meta"):
            model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        Path("/proc/self/clear_refs").write_text("5")  # forgets the largest so far
        before = _status("VmRSS")
        engine.prepare(model, optimizer, weights=folder)
        return _status("VmHWM") - before


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


@pytest.mark.workers
def test_resident_memory_stays_below_the_whole_model(tmp_path: Path) -> None:
    layers, width = 24, 1024
    whole = {f"{layer}.weight": torch.zeros(width, width) for layer in range(layers)}
    save_file(whole, tmp_path / "model.safetensors")
    for result in run_workers(peak_growth, 3, folder=str(tmp_path), layers=layers, width=width):
        assert result.error is None, result.traceback
        assert result.value < 0.7 * layers * width * width * 4, f"{result.value:,} of {layers * width * width * 4:,}"
