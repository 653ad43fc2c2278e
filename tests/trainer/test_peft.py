"""A PeftModel trains as any other, and its checkpoints hold its adapters, in peft's own format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from paceline import Engine, Trainer, TrainingArguments  # noqa: E402
from paceline.checkpoint.load import Checkpoint  # noqa: E402
from paceline.engine.adapted_models import base_parameters  # noqa: E402
from paceline.world.world import World  # noqa: E402
from tests.workers import hashes, run_workers  # noqa: E402

STEPS, HALF = 4, 2
IMPORTS_S = 100.0  # transformers and peft take workers half a minute to import where the host is busy
FILES = {"adapter_model.safetensors", "adapter_config.json"}


class Sentences(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = torch.randint(0, 40, (6,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens.clone()}


def base(seed: int = 5) -> Any:
    torch.manual_seed(seed)
    config = transformers.GPT2Config(vocab_size=40, n_positions=8, n_embd=16, n_layer=2, n_head=2)
    return transformers.GPT2LMHeadModel(config)


def adapted(seed: int = 5, **settings: Any) -> Any:
    config = {"r": 2, "target_modules": ["c_attn"], "fan_in_fan_out": True, "modules_to_save": ["ln_f"]} | settings
    return peft.get_peft_model(base(seed), peft.LoraConfig(**config))


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def trained(
    world: World, *, folder: str, until: int = STEPS, saves: bool = True, written: str | None = None,
    all_parameters: bool = False, **job: Any,
) -> str:  # fmt: skip
    with Engine(world=world, lanes=4, bucket_mib=0.01, **job) as engine:
        model = adapted()
        held = [p for p in model.parameters() if all_parameters or p.requires_grad]
        loader = DataLoader(Sentences(), batch_size=2, shuffle=True)
        model, optimizer, loader = engine.prepare(model, torch.optim.AdamW(held, lr=0.01), loader)
        checkpoints = engine.checkpoints(folder)
        checkpoints.resume()
        while engine.step < until:
            for batch in loader:
                engine.backward(model(**batch).loss)
                optimizer.step()
                optimizer.zero_grad()
                if engine.stepped and engine.step == HALF and saves:
                    checkpoints.save()
                if engine.stepped and engine.step == until:
                    break
        checkpoints.close()
        if written is not None:
            engine.save_model(model, written)
        return engine.weights_hash()


def test_a_checkpoint_of_a_peft_model_holds_no_base(tmp_path: Path) -> None:
    trained(World(), folder=str(tmp_path), until=HALF)
    tree = Checkpoint.open(tmp_path / f"checkpoint-{HALF}").tree
    kept, model = set(tree["models"][0]), adapted()
    assert kept | set(tree["bases"][0]) == set(model.state_dict())
    assert not kept & set(tree["bases"][0])
    assert {name for name, p in model.named_parameters() if p.requires_grad} <= kept
    assert all("default" in name.split(".") for name in kept - set(dict(model.named_buffers())))


@pytest.mark.workers
def test_a_lora_goes_on_under_another_strategy_on_other_workers_with_the_same_bits(tmp_path: Path) -> None:
    job = {"folder": str(tmp_path / "run"), "all_parameters": True}
    hashes(run_workers(trained, 2, timeout_s=IMPORTS_S, strategy="zero2", until=HALF, **job))
    resumed = hashes(
        run_workers(trained, 3, timeout_s=IMPORTS_S, strategy="fsdp", written=str(tmp_path / "out"), **job)
    )
    undisturbed = {"folder": str(tmp_path / "alone"), "saves": False, "all_parameters": True}
    assert resumed == {trained(World(), written=str(tmp_path / "whole"), **undisturbed)}
    assert {path.name for path in (tmp_path / "out").iterdir()} >= FILES
    assert not (tmp_path / "out" / "model.safetensors").exists()
    written = [load_file(tmp_path / name / "adapter_model.safetensors") for name in ("out", "whole")]
    assert same(*written)


def trainer_of(folder: Path, world: World | None = None, model: Any = None, **settings: Any) -> Trainer:
    arguments = TrainingArguments(
        str(folder),
        **{
            "max_steps": STEPS, "save_steps": HALF, "save_strategy": "steps", "logging_steps": 2, "use_cpu": True,
            "threads": 1, "per_device_train_batch_size": 2, "learning_rate": 0.01, "lanes": 2,
            "lr_scheduler_type": "constant", **settings,
        },
    )  # fmt: skip
    return Trainer(model=model or adapted(), args=arguments, train_dataset=Sentences(), world=world)


def trains_with_trainer(world: World, *, folder: str, **settings: Any) -> str:
    trainer = trainer_of(Path(folder), world, **settings)
    trainer.train()
    trainer.save_model(Path(folder) / "final")
    return trainer.engine.weights_hash()


def test_a_checkpoint_of_the_trainer_opens_with_peft(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path)
    trainer.train()
    folder = tmp_path / f"checkpoint-{STEPS}"
    names = {path.name for path in folder.iterdir()}
    assert names >= FILES
    assert not {"model.safetensors", "config.json"} & names
    opened = peft.PeftModel.from_pretrained(base(), str(folder))
    assert same(opened.state_dict(), trainer.engine.state_dict())
    trainer.model.save_pretrained(str(tmp_path / "theirs"), state_dict=trainer.engine.state_dict())
    for name in FILES:
        assert (folder / name).read_bytes() == (tmp_path / "theirs" / name).read_bytes()


@pytest.mark.workers
def test_adapters_of_the_trainer_are_the_same_files_on_any_number_of_workers(tmp_path: Path) -> None:
    alone = trains_with_trainer(World(), folder=str(tmp_path / "1"))
    two = run_workers(trains_with_trainer, 2, timeout_s=IMPORTS_S, folder=str(tmp_path / "2"), strategy="fsdp")
    assert hashes(two) == {alone}
    for inside in (f"checkpoint-{HALF}", "final"):
        for name in FILES:
            assert (tmp_path / "1" / inside / name).read_bytes() == (tmp_path / "2" / inside / name).read_bytes()


def test_the_trainer_resumes_adapters_and_refuses_another_base(tmp_path: Path) -> None:
    whole = trainer_of(tmp_path / "whole")
    whole.train()
    trainer_of(tmp_path / "half", max_steps=HALF).train()
    resumed = trainer_of(tmp_path / "half")
    resumed.train(resume_from_checkpoint=True)
    assert resumed.engine.weights_hash() == whole.engine.weights_hash()
    other = trainer_of(tmp_path / "half", model=adapted(seed=6), max_steps=STEPS + 2)
    first = next(iter(base_parameters(adapted())))
    with pytest.raises(Exception, match=f"holds adapters of another base: '{first}' has other values here"):
        other.train(resume_from_checkpoint=True)


def test_a_resized_embedding_of_the_base_is_among_the_adapters_as_peft_writes_them(tmp_path: Path) -> None:
    base().save_pretrained(str(tmp_path / "base"))
    larger = transformers.GPT2LMHeadModel.from_pretrained(str(tmp_path / "base"))
    larger.resize_token_embeddings(44)
    model = peft.get_peft_model(larger, peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True))
    trainer = trainer_of(tmp_path / "run", model=model, max_steps=HALF)
    with pytest.warns(UserWarning, match="the embedding layer has been resized"):
        trainer.train()
        model.save_pretrained(str(tmp_path / "theirs"), state_dict=trainer.engine.state_dict())
    ours, theirs = tmp_path / "run" / f"checkpoint-{HALF}", tmp_path / "theirs"
    assert "base_model.model.transformer.wte.weight" in load_file(ours / "adapter_model.safetensors")
    for name in FILES:
        assert (ours / name).read_bytes() == (theirs / name).read_bytes()
