"""`paceline checkpoint export` and `import`: other tools open what we saved, a training begins with what they saved."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.utils.data import DataLoader, TensorDataset
from typer.testing import CliRunner, Result

from paceline import Engine, World
from paceline.checkpoint.load import Checkpoint, differences, full_tree
from paceline.checkpoint.manifest import complete_text
from paceline.cli.checkpoint import app
from paceline.errors import CheckpointError, PacelineError
from tests.checkpoint.folders import write
from tests.checkpoint.test_other_formats import MIB, peak_growth
from tests.workers import hashes, run_workers


class Tied(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embed, self.norm = nn.Linear(width, width), nn.BatchNorm1d(width)
        self.head = nn.Linear(width, width, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Any:
        return self.head(self.norm(self.embed(x)))


def two_groups(model: nn.Module) -> torch.optim.Optimizer:
    """In another order than the model's, so that numbers alone would mix them up."""
    bare = [p for name, p in model.named_parameters() if not name.startswith("embed.weight")]
    rest = [p for name, p in model.named_parameters() if name.startswith("embed.weight")]
    return torch.optim.AdamW([{"params": bare, "weight_decay": 0.0}, {"params": rest}], lr=0.02)


def one_group(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.02)


def batches(width: int = 8) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    values = [torch.randn(16, width, generator=generator) for _ in range(2)]
    return DataLoader(TensorDataset(*values), batch_size=4)


def train(
    world: World,
    begin: Path | None = None,
    save: Path | None = None,
    strategy: str = "ddp",
    make: Callable[[nn.Module], torch.optim.Optimizer] = two_groups,
) -> str:
    """Four steps from a checkpoint, or from the start, saved after two; the hash of the weights at the end."""
    with Engine(world=world, strategy=strategy, lanes=2, threads=1) as engine:
        torch.manual_seed(1)
        model = Tied()
        model, optimizer, loader = engine.prepare(model, make(model), batches())
        if begin is not None:
            engine.load_state(begin)
        for x, y in loader:
            engine.backward(F.mse_loss(model(x), y))
            optimizer.step()
            if save is not None and engine.stepped and engine.step == 2:
                engine.save_state(save)
        return str(engine.weights_hash())


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "checkpoint-2"
    train(World(), save=folder)
    return folder


def paceline(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def done(*arguments: object) -> str:
    said = paceline(*arguments)
    assert said.exit_code == 0, said.exception
    return said.stdout


def refused(*arguments: object) -> str:
    said = paceline(*arguments)
    assert isinstance(said.exception, PacelineError), (said.output, said.exception)
    assert len(str(said.exception).splitlines()) == 1
    return str(said.exception)


# -- Hugging Face ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def language_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of the Trainer: GPT-2 with its output tied to its embedding, in bf16, with a tokenizer."""
    transformers = pytest.importorskip("transformers")
    from paceline import Trainer, TrainingArguments

    folder = tmp_path_factory.mktemp("gpt")
    config = transformers.GPT2Config(
        vocab_size=50, n_positions=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=2
    )

    class Tokenizer:
        def save_pretrained(self, folder: str) -> None:
            (Path(folder) / "tokenizer.json").write_text('{"version": "1.0"}')

    data = [{"input_ids": torch.arange(8) + n, "labels": torch.arange(8) + n} for n in range(4)]
    arguments = TrainingArguments(str(folder), max_steps=2, save_steps=2, use_cpu=True, threads=1, bf16=True)
    trainer = Trainer(transformers.GPT2LMHeadModel(config), arguments, train_dataset=data, processing_class=Tokenizer())
    trainer.train()
    (folder / "checkpoint-2" / "optimizer.pt").write_bytes(b"of another training")
    return folder / "checkpoint-2"


@pytest.mark.parametrize("shards", [False, True], ids=["one file", "shards"])
def test_from_pretrained_opens_an_export(language_model: Path, tmp_path: Path, shards: bool) -> None:
    import transformers

    more = ["--max-shard-size", "10KB"] if shards else []
    said = done("export", language_model, "--hf", tmp_path / "hf", *more)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    expected = Checkpoint.open(language_model).tree["models"][0]
    assert {name: value.dtype for name, value in model.state_dict().items()} == dict.fromkeys(expected, torch.float32)
    assert list(differences(dict(model.state_dict()), expected)) == []
    assert model.lm_head.weight is model.transformer.wte.weight

    model.save_pretrained(tmp_path / "theirs", max_shard_size="10KB" if shards else "50GB")
    ours, theirs = (
        {name for file in (tmp_path / f).glob("*.safetensors") for name in load_file(file)} for f in ("hf", "theirs")
    )
    assert ours == theirs
    names = {path.name for path in (tmp_path / "hf").iterdir() if not path.name.startswith("model-")}
    weights = "model.safetensors.index.json" if shards else "model.safetensors"
    assert names == {weights, "config.json", "generation_config.json", "tokenizer.json"}
    if shards:
        index = json.loads((tmp_path / "hf" / weights).read_text())
        theirs_index = json.loads((tmp_path / "theirs" / weights).read_text())
        assert index["weight_map"].keys() == theirs_index["weight_map"].keys()
        assert index["metadata"]["total_size"] == theirs_index["metadata"]["total_size"]
        assert f"in {len(set(index['weight_map'].values()))} files" in said


@pytest.mark.parametrize("kind", ["T5ForConditionalGeneration", "BertForMaskedLM"])
def test_tied_weights_have_the_name_that_transformers_keeps(tmp_path: Path, kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    bert = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    t5 = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    of = getattr(transformers, kind)
    model = of(of.config_class(vocab_size=40, **(t5 if kind.startswith("T5") else bert)))
    once: dict[int, Tensor] = {}
    state = {
        name: once.setdefault(id(value), value.detach()) for name, value in model.state_dict(keep_vars=True).items()
    }
    assert len(once) < len(state)
    write(tmp_path / "checkpoint-1", {"models": [state]})
    done("export", tmp_path, "--hf", tmp_path / "hf")
    model.save_pretrained(tmp_path / "theirs")
    ours, theirs = (load_file(tmp_path / folder / "model.safetensors") for folder in ("hf", "theirs"))
    assert sorted(ours) == sorted(theirs)
    assert list(differences({name: ours[name] for name in theirs}, theirs)) == []


def test_there_and_back_gives_the_same_bytes(language_model: Path, saved: Path, tmp_path: Path) -> None:
    for place, source in enumerate((language_model, saved)):
        here = tmp_path / str(place)
        done("export", source, "--hf", here / "hf", "--max-shard-size", "10KB")
        done("import", here / "checkpoint-0", "--hf", here / "hf")
        assert done("verify", here / "checkpoint-0")
        done("export", here, "--hf", here / "again", "--max-shard-size", "10KB")
        first, second = ({path.name: path.read_bytes() for path in (here / name).iterdir()} for name in ("hf", "again"))
        assert first == second
        done("export", source, "--dcp", here / "dcp", "--max-shard-size", "10KB")
        done("import", here / "of-dcp", "--dcp", here / "dcp")
        assert done("diff", "--weights", source, here / "of-dcp") == "no difference\n"


def test_an_export_without_a_config_says_what_is_missing(saved: Path, tmp_path: Path) -> None:
    assert "it has no config.json, since the checkpoint has none: model.config.save_pretrained(" in done(
        "export", saved, "--hf", tmp_path / "hf"
    )


# -- torch.distributed.checkpoint --------------------------------------------------------------------------------------


def test_dcp_load_fills_what_torch_calls_the_model_and_the_optimizer(saved: Path, tmp_path: Path) -> None:
    done("export", saved, "--dcp", tmp_path / "dcp", "--max-shard-size", "1KB")
    assert len(list((tmp_path / "dcp").glob("__*_0.distcp"))) > 1
    model = Tied()
    optimizer = two_groups(model)
    state = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}
    expected = full_tree(Checkpoint.open(saved).tree)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert list(differences(state["model"], expected["models"][0])) == []
    numbered = [name for name, _ in model.named_parameters() if name != "embed.weight"] + ["embed.weight"]
    theirs = {numbered.index(name): values for name, values in state["optim"]["state"].items()}
    assert list(differences(dict(sorted(theirs.items())), expected["optimizers"][0]["state"])) == []
    assert [group["params"] for group in state["optim"]["param_groups"]] == [numbered[:-1], numbered[-1:]]
    assert [group["weight_decay"] for group in state["optim"]["param_groups"]] == [0.0, 0.01]


@pytest.mark.workers
def test_the_optimizers_state_comes_back_whatever_the_order_and_the_groups(saved: Path, tmp_path: Path) -> None:
    done("export", saved, "--dcp", tmp_path / "dcp")
    assert "and the optimizer's state" in done("import", tmp_path / "checkpoint-0", "--dcp", tmp_path / "dcp")
    hf = tmp_path / "hf"
    done("export", saved, "--hf", hf)
    done("import", tmp_path / "bare", "--hf", hf)
    with_state = train(World(), begin=tmp_path / "checkpoint-0")
    assert with_state != train(World(), begin=tmp_path / "bare")
    for workers, strategy in ((2, "zero3"), (2, "ddp"), (1, "zero1")):
        results = run_workers(train, workers, begin=tmp_path / "checkpoint-0", strategy=strategy)
        assert hashes(results) == {with_state}
    with pytest.raises(CheckpointError, match=r"of another optimizer, SGD has no setting 'betas'; import the weights "):
        train(World(), begin=tmp_path / "checkpoint-0", make=lambda model: torch.optim.SGD(model.parameters(), lr=0.1))
    done("import", tmp_path / "alone", "--dcp", tmp_path / "dcp", "--no-optimizer")
    assert train(World(), begin=tmp_path / "alone") == train(World(), begin=tmp_path / "bare")


def stepped(make: Callable[[nn.Module], torch.optim.Optimizer] = one_group) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = Tied()
    optimizer = make(model)
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    return model, optimizer


def dcp_save(folder: Path, state: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.save(state, checkpoint_id=folder, no_dist=True)


@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flattened"])
@pytest.mark.parametrize("wrap", [lambda state: state, lambda state: {"app": state}], ids=["bare", "in an app state"])
def test_what_torch_saves_is_imported(tmp_path: Path, flat: bool, wrap: Callable[[Any], Any]) -> None:
    model, optimizer = stepped()
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    states = {
        "model": get_model_state_dict(model),
        "optim": get_optimizer_state_dict(model, optimizer, options=options),
    }
    dcp_save(tmp_path / "dcp", wrap(states))
    done("import", tmp_path / "checkpoint-0", "--dcp", tmp_path / "dcp")
    tree = full_tree(Checkpoint.open(tmp_path / "checkpoint-0").tree)
    assert list(differences(tree["models"][0], dict(model.state_dict()))) == []
    assert list(differences(tree["optimizers"][0]["state"], optimizer.state_dict()["state"])) == []
    with Engine(world=World()) as engine:
        mine = Tied()
        mine, theirs, _ = engine.prepare(mine, two_groups(mine), batches())
        for group in theirs.param_groups:
            group["lr"] = 0.5
        engine.load_state(tmp_path / "checkpoint-0")
        for name, parameter in mine.named_parameters():
            expected = optimizer.state[dict(model.named_parameters())[name]]
            assert list(differences(dict(theirs.state[parameter]), dict(expected))) == []
        settings = [(group["lr"], group["weight_decay"]) for group in theirs.param_groups]
        assert settings == [(0.5, 0.0), (0.5, 0.01)], "the script's"


def save_sharded(world: World, folder: Path) -> None:
    """As FSDP2 saves: each rank a part of every tensor."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    address = f"tcp://127.0.0.1:{world.rendezvous.port}"  # type: ignore[union-attr]
    torch.distributed.init_process_group("gloo", init_method=address, rank=world.rank, world_size=world.size)
    mesh = init_device_mesh("cpu", (world.size,))
    whole = torch.arange(7 * 5.0).view(7, 5)
    state = {"a": distribute_tensor(whole, mesh, [Shard(0)]), "b": distribute_tensor(whole.clone(), mesh, [Shard(1)])}
    dcp.save({"model": state}, checkpoint_id=folder)
    torch.distributed.destroy_process_group()


@pytest.mark.workers
def test_parts_of_several_ranks_become_one_tensor(tmp_path: Path) -> None:
    results = run_workers(save_sharded, 2, folder=tmp_path / "dcp")
    assert [result.error for result in results] == [None, None], results[0].traceback
    done("import", tmp_path / "checkpoint-0", "--dcp", tmp_path / "dcp")
    weights = full_tree(Checkpoint.open(tmp_path / "checkpoint-0").tree)["models"][0]
    for name in ("a", "b"):
        assert torch.equal(weights[name], torch.arange(7 * 5.0).view(7, 5))


# -- what a training does with it --------------------------------------------------------------------------------------


def test_a_run_begins_with_an_import_in_its_folder(saved: Path, tmp_path: Path, capfd: Any) -> None:
    done("export", saved, "--hf", tmp_path / "hf")
    done("import", tmp_path / "run" / "checkpoint-0", "--hf", tmp_path / "hf")
    expected = Checkpoint.open(saved).tree["models"][0]
    with Engine(world=World()) as engine:
        model = Tied()
        model, _, _ = engine.prepare(model, one_group(model), batches())
        assert engine.checkpoints(tmp_path / "run").resume() == {"imported": "hf"}
        assert engine.step == 0
        assert list(differences(dict(model.state_dict()), expected)) == []
        for parameter in model.parameters():
            parameter.detach().zero_()
        engine.checkpoints(tmp_path / "run").load_weights(tmp_path / "run" / "checkpoint-0")
        assert list(differences(dict(model.state_dict()), expected)) == []
    assert f"paceline: begins with {tmp_path}/run/checkpoint-0, imported from hf" in capfd.readouterr().out


def test_the_trainer_begins_with_an_import(tmp_path: Path) -> None:
    from tests.trainer.jobs import Classifier, make_trainer

    torch.manual_seed(5)
    start = Classifier()
    save_file(dict(start.state_dict()), tmp_path / "model.safetensors")
    done("import", tmp_path / "checkpoint-0", "--hf", tmp_path)
    resumed = make_trainer(tmp_path / "a")
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-0"))
    given = make_trainer(tmp_path / "b", model=start)
    given.train()
    assert resumed.state.global_step == given.state.global_step > 0
    assert resumed.engine.weights_hash() == given.engine.weights_hash()


def test_weights_that_do_not_fit_are_named(saved: Path, tmp_path: Path) -> None:
    done("export", saved, tmp_path / "model.safetensors")
    weights = load_file(tmp_path / "model.safetensors")
    del weights["norm.bias"]
    save_file({**weights, "lm_head.weight": torch.zeros(4)}, tmp_path / "model.safetensors")
    done("import", tmp_path / "checkpoint-0", "--hf", tmp_path)
    error = "is of another model: it has no 'norm.bias'; the model has no 'lm_head.weight'"
    with pytest.raises(CheckpointError, match=error):
        train(World(), begin=tmp_path / "checkpoint-0")


@pytest.mark.parametrize("names", [3, [], [["0/embed.weight"]], [[1, 2]]])
def test_an_import_whose_names_make_no_sense_is_refused(saved: Path, tmp_path: Path, names: Any) -> None:
    done("export", saved, "--dcp", tmp_path / "dcp")
    done("import", tmp_path / "checkpoint-0", "--dcp", tmp_path / "dcp")
    manifest = json.loads((tmp_path / "checkpoint-0" / "manifest.json").read_bytes())
    manifest["tree"]["parameter_names"] = names
    text = json.dumps(manifest).encode()
    (tmp_path / "checkpoint-0" / "manifest.json").write_bytes(text)
    (tmp_path / "checkpoint-0" / "COMPLETE").write_bytes(complete_text(text))
    with pytest.raises(CheckpointError, match=r"^the optimizer('s state)? in .*/checkpoint-0 does not fit"):
        train(World(), begin=tmp_path / "checkpoint-0")


# -- memory ------------------------------------------------------------------------------------------------------------


def export_and_import(world: World, folder: str) -> None:
    path, names = Path(folder), [f"layer.{n}" for n in range(12)]
    write(path / "checkpoint-1", {"models": [{name: torch.full((4 * MIB,), 1.0) for name in names}]}, workers=2)
    for words, most in (
        (["export", path, path / "model.safetensors"], 32),
        (["export", path, "--hf", path / "hf", "--max-shard-size", "40MB"], 32),
        (["export", path, "--dcp", path / "dcp", "--max-shard-size", "40MB"], 48),
        (["import", path / "in-hf", "--hf", path / "hf"], 32),
        (["import", path / "in-dcp", "--dcp", path / "dcp"], 48),
    ):
        grown = peak_growth(lambda words=words: done(*words))  # type: ignore[misc]
        assert grown < most * MIB, f"{words[:2]}: {grown / MIB:.0f} of 192 MiB"
        if "model.safetensors" in str(words[-1]):
            (path / "model.safetensors").unlink()


@pytest.mark.workers
def test_an_export_holds_a_shard_at_a_time_and_an_import_a_tensor(tmp_path: Path) -> None:
    (result,) = run_workers(export_and_import, 1, folder=str(tmp_path), timeout_s=60)
    assert result.error is None, result.traceback


# -- what can't be done ------------------------------------------------------------------------------------------------


def test_one_format_is_named(saved: Path, tmp_path: Path) -> None:
    one = "write FILE, --hf FOLDER or --dcp FOLDER: one of them says the format"
    assert refused("export", saved) == one
    both = refused("export", saved, "--hf", tmp_path / "a", "--dcp", tmp_path / "b")
    assert both == one.replace("one of", "only one of")
    assert refused("import", tmp_path / "x") == "write --hf FOLDER or --dcp FOLDER: one of them says the format"
    folder = refused("export", saved, tmp_path / "out")
    assert folder.endswith(f"is not one .safetensors file; a folder that from_pretrained opens is --hf {tmp_path}/out")
    assert "'5' is no size of a file; write 5GB" in refused("export", saved, "--hf", "x", "--max-shard-size", "5")
    assert not list(tmp_path.iterdir())


def test_what_is_there_already_is_not_replaced(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("")
    for words in (["export", saved, "--hf"], ["export", saved, "--dcp"]):
        assert "mine exists already; name a folder that does not" in refused(*words, tmp_path / "mine")
    done("export", saved, "--hf", tmp_path / "hf")
    assert "mine exists already" in refused("import", tmp_path / "mine", "--hf", tmp_path / "hf")
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.tex"]
    (tmp_path / "empty").mkdir()
    done("export", saved, "--dcp", tmp_path / "empty")
    assert not list(tmp_path.glob(".*")), "what was written on the way is gone"


@pytest.mark.parametrize("option", ["--hf", "--dcp"])
@pytest.mark.parametrize("out", ["new", "empty"])
def test_the_checkpoint_in_the_place_of_what_is_written_is_told_with_the_right_order(
    saved: Path, tmp_path: Path, option: str, out: str
) -> None:
    (tmp_path / "empty").mkdir()
    right = f"paceline checkpoint export {saved} {option} {tmp_path}/{out}"
    assert refused("export", option, saved, tmp_path / out).endswith(f"; write: {right}")
    done(*right.split()[2:])
    right = f"paceline checkpoint import {tmp_path}/in {option} {tmp_path}/{out}"
    assert refused("import", tmp_path / out, option, tmp_path / "in").endswith(f"; write: {right}")
    done(*right.split()[2:])
    weights = tmp_path / "weights.safetensors"
    right = f"paceline checkpoint export {saved} {weights}"
    assert refused("export", weights, saved).endswith(f"; write: {right}")
    done(*right.split()[2:])


def test_what_is_exported_already_is_told_and_compared(saved: Path, tmp_path: Path) -> None:
    done("export", saved, "--hf", tmp_path / "out")
    told = refused("export", tmp_path / "out", "--hf", tmp_path / "again")
    assert told == f"{tmp_path}/out has no checkpoint of paceline to export, but weights: from_pretrained opens it"
    assert refused("export", tmp_path / "none", "--hf", tmp_path / "x") == f"there is no folder {tmp_path}/none"
    assert refused("list", tmp_path / "none") == f"there is no folder {tmp_path}/none"
    differences = paceline("diff", "--weights", saved, tmp_path / "out").output.splitlines()
    assert [line.split()[0] for line in differences] == ["/head.weight"], "a tied tensor is written once"
    weights = load_file(tmp_path / "out" / "model.safetensors")
    weights["norm.weight"][0] += 1
    save_file(weights, tmp_path / "out" / "model.safetensors")
    assert "/norm.weight" in paceline("diff", "--weights", saved, tmp_path / "out").output


def test_folders_that_are_no_pretrained_model_are_told_what_they_are(saved: Path, tmp_path: Path) -> None:
    def said(*names: str) -> str:
        shutil.rmtree(tmp_path / "in", ignore_errors=True)
        (tmp_path / "in").mkdir()
        for name in names:
            (tmp_path / "in" / name).write_bytes(b"{}")
        return refused("import", tmp_path / "out", "--hf", tmp_path / "in")

    assert refused("import", tmp_path / "out", "--hf", tmp_path / "none") == f"there is no folder {tmp_path}/none"
    assert said() == f"{tmp_path}/in has no model.safetensors and no model.safetensors.index.json"
    assert said("pytorch_model.bin").endswith(
        "it has pickled weights: open it where it comes from, and save_pretrained again"
    )
    assert said("adapter_model.safetensors").endswith("it is an adapter alone: merge it into its model, and save that")
    assert said(".metadata").endswith("it is of torch.distributed.checkpoint: import it with --dcp")
    assert said("model.safetensors").endswith("is damaged: its header does not fit into the file")
    assert said("model.safetensors.index.json").endswith("has no weight_map of names and files beside it")
    index = tmp_path / "in" / "model.safetensors.index.json"
    for table, error in (
        ({"a": "model-1.safetensors"}, "has no model-1.safetensors, which another file of it names"),
        ({"a": "../model.safetensors"}, "has no weight_map of names and files beside it"),
        ({"b": "model-2.safetensors"}, "has no 'b', which model.safetensors.index.json says it has"),
    ):
        index.write_text(json.dumps({"weight_map": table}))
        save_file({"a": torch.zeros(3)}, tmp_path / "in" / "model-2.safetensors")
        assert error in refused("import", tmp_path / "out", "--hf", tmp_path / "in")
    assert not (tmp_path / "out").exists()


class Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, ("evil",)


def test_a_metadata_runs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(Evil()))
    error = refused("import", "out", "--dcp", "dcp")
    assert "dcp/.metadata can't be understood: it names posix.mkdir, which is not of a metadata" in error
    dcp_save(tmp_path / "values", {"model": {"a": torch.zeros(3), "extra": Evil()}})
    shutil.rmtree("evil", ignore_errors=True)
    assert "'model.extra' is damaged, or holds pickled objects: not read" in refused("import", "out", "--dcp", "values")
    assert not (tmp_path / "evil").exists()


def test_folders_of_dcp_that_lack_something_say_what(tmp_path: Path) -> None:
    model, optimizer = stepped()
    weights = get_model_state_dict(model)

    def said(name: str, state: dict[str, Any]) -> str:
        dcp_save(tmp_path / name, state)
        return refused("import", tmp_path / "out", "--dcp", tmp_path / name)

    missing = refused("import", tmp_path / "out", "--dcp", tmp_path / "none")
    assert missing.endswith("none is not of torch.distributed.checkpoint: there is no such folder")
    assert "holds 'step', and no model's weights; save {'model': …" in said("steps", {"step": 3})
    by_number = said("numbers", {"model": weights, "optim": optimizer.state_dict()})
    assert "its optimizer knows 0, and its model does not; save get_optimizer_state_dict(model, optimizer)" in by_number
    groups = get_optimizer_state_dict(model, optimizer)["param_groups"]
    bare = {"state": {"norm.bias": {"exp_avg": torch.zeros(8)}}}
    assert "its optimizer's state has no param_groups" in said("no groups", {"model": weights, "optim": bare})
    less = {name: value for name, value in weights.items() if name != "norm.bias"}
    optim = {"state": {}, "param_groups": groups}
    assert "its optimizer knows 'norm.bias', and its model does not" in said("less", {"model": less, "optim": optim})
    (tmp_path / "less" / "__0_0.distcp").write_bytes(b"")
    cut = refused("import", tmp_path / "out", "--dcp", tmp_path / "less", "--no-optimizer")
    assert "less/__0_0.distcp: 'model." in cut
    assert "' is damaged: " in cut
    (tmp_path / "less" / "__0_0.distcp").unlink()
    gone = refused("import", tmp_path / "out", "--dcp", tmp_path / "less", "--no-optimizer")
    assert gone.endswith("less/__0_0.distcp can't be read: No such file or directory")
    assert not (tmp_path / "out").exists()


def test_a_damaged_tensor_is_named_and_nothing_is_left(saved: Path, tmp_path: Path) -> None:
    broken = tmp_path / "checkpoint-2"
    shutil.copytree(saved, broken)
    file = next(broken.glob("worker-*.safetensors"))
    data = bytearray(file.read_bytes())
    for place in range(8 + int.from_bytes(data[:8], "little"), len(data), 16):
        data[place] ^= 16
    file.write_bytes(data)
    for words in ([tmp_path / "out.safetensors"], ["--hf", tmp_path / "out"], ["--dcp", tmp_path / "out"]):
        assert f"{file.name} is damaged: '/" in refused("export", broken, *words)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-2"]


def test_a_checkpoint_that_does_not_name_parameters_is_exported_without_the_optimizer(tmp_path: Path) -> None:
    """Those of earlier versions."""
    states = [{"state": {0: {"step": torch.tensor(1.0)}}, "param_groups": [{"params": [0]}]}]
    write(tmp_path / "checkpoint-1", {"models": [{"a": torch.zeros(30)}], "optimizers": states})
    said = done("export", tmp_path, "--dcp", tmp_path / "dcp")
    assert said.splitlines()[0].endswith("/dcp: model, for torch.distributed.checkpoint.load")
    assert said.splitlines()[1].startswith("without the optimizer's state: the checkpoint has none, or does not say")
