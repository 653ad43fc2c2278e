"""What was made for transformers runs here: its callbacks, models, schedules and argument names."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

transformers = pytest.importorskip("transformers")

from paceline import Engine, Trainer, TrainingArguments  # noqa: E402
from paceline.trainer.argument_fields import LOOK_AT_METRICS, SchedulerType  # noqa: E402
from paceline.trainer.optimization import get_scheduler  # noqa: E402
from paceline.world.world import World  # noqa: E402
from tests.trainer.jobs import StopAt, make_trainer  # noqa: E402
from tests.workers import hashes, run_workers  # noqa: E402


def test_every_argument_of_transformers_has_a_field_with_its_default() -> None:
    theirs = {item.name: item for item in dataclasses.fields(transformers.TrainingArguments)}
    ours = {item.name: item for item in dataclasses.fields(TrainingArguments)}
    assert set(theirs) - set(ours) == {"local_rank"}
    differ = {
        name
        for name, item in theirs.items()
        if name in ours
        and item.default is not dataclasses.MISSING
        and str(getattr(item.default, "value", item.default)) != str(ours[name].default)
    }
    assert differ == {
        "output_dir",  # the same, said otherwise
        "debug",  # likewise: none
        "log_level_replica",  # in an elastic job any worker may become the one that speaks
        "optim",  # torch's fused AdamW, which is theirs for torch 2.8 and later
        "report_to",
        "disable_tqdm",
        "logging_nan_inf_filter",
        "restore_callback_states_from_checkpoint",
    } - ({"optim"} if str(theirs["optim"].default) == "adamw_torch_fused" else set())


@pytest.mark.parametrize("name", [kind.value for kind in SchedulerType if kind not in LOOK_AT_METRICS])
@pytest.mark.parametrize("warmup", [0, 5])
def test_learning_rates_are_those_of_transformers(name: str, warmup: int) -> None:
    from transformers import get_scheduler as theirs

    more = {
        "cosine_with_restarts": {"num_cycles": 3},
        "polynomial": {"power": 2.0, "lr_end": 1e-3},
        "cosine_with_min_lr": {"min_lr_rate": 0.1},
        "cosine_warmup_with_min_lr": {"min_lr": 0.05, "warmup_lr_rate": 0.2},
        "warmup_stable_decay": {"num_decay_steps": 7, "decay_type": "1-sqrt", "warmup_type": "cosine"},
    }.get(name)
    rates = []
    for make in (get_scheduler, theirs):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
        scheduler = make(
            name, optimizer, num_warmup_steps=warmup, num_training_steps=30, scheduler_specific_kwargs=more
        )
        found = []
        for _ in range(33):
            found.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
        rates.append(found)
    assert rates[0] == pytest.approx(rates[1], abs=1e-12)


def test_callbacks_of_transformers_run_unchanged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scores = iter([0.5, 0.4, 0.3, 0.2])
    stopping = transformers.EarlyStoppingCallback(early_stopping_patience=2)
    trainer = make_trainer(
        tmp_path,
        max_steps=8,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        metric_for_best_model="score",
        load_best_model_at_end=True,
        compute_metrics=lambda _: {"score": next(scores)},
        callbacks=[stopping, transformers.PrinterCallback, Recorder()],
    )
    assert trainer.train().global_step == 3
    assert stopping.early_stopping_patience_counter == 2
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-1")
    assert "'eval_score': '0.4'" in capsys.readouterr().out


class Recorder(transformers.TrainerCallback):  # type: ignore[misc]
    """Writes down what it is called with."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("on_"):
            object.__getattribute__(self, "events").append(name)
        return object.__getattribute__(self, name)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        assert {"model", "optimizer", "lr_scheduler", "train_dataloader", "processing_class"} <= set(kwargs)


def test_events_come_in_transformers_order(tmp_path: Path) -> None:
    recorder = Recorder()
    trainer = make_trainer(
        tmp_path,
        max_steps=1,
        gradient_accumulation_steps=2,
        logging_steps=1,
        eval_strategy="steps",
        save_strategy="steps",
        callbacks=[recorder],
    )
    trainer.train()
    events = [event.removeprefix("on_") for event in recorder.events]
    once = [event for event in dict.fromkeys(events) if event != "prediction_step"]
    before = ["init_end", "train_begin", "epoch_begin", "step_begin", "substep_end"]
    acting = ["pre_optimizer_step", "optimizer_step", "step_end", "log", "evaluate", "save"]
    assert once == [*before, *acting, "epoch_end", "train_end"]


def tiny() -> Any:
    config = transformers.GPT2Config(
        vocab_size=37, n_positions=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=2
    )
    return transformers.GPT2LMHeadModel(config)


def texts(count: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(37, (12,), generator=generator) for _ in range(count)]
    return [{"input_ids": row, "labels": row.clone()} for row in ids]


def train_gpt(world: World, folder: Path, strategy: str) -> str:
    arguments = TrainingArguments(
        str(folder), max_steps=4, per_device_train_batch_size=2, lanes=3, threads=1, use_cpu=True, strategy=strategy
    )
    trainer = Trainer(tiny(), arguments, train_dataset=texts(20), eval_dataset=texts(5), world=world)
    trainer.train()
    trainer.save_model()
    found = trainer.predict(texts(5))
    assert found.predictions.shape == (5, 12, 37)
    return trainer.engine.weights_hash()


@pytest.mark.workers
def test_a_model_of_transformers_trains_alike_on_any_number_of_workers_and_is_saved_as_its_own(tmp_path: Path) -> None:
    def job(workers: int, strategy: str) -> set[str]:
        return hashes(
            run_workers(train_gpt_seeded, workers, folder=tmp_path / f"{workers}{strategy}", strategy=strategy)
        )

    one = job(1, "ddp")
    assert job(2, "zero3") == one
    again = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "2zero3")
    first = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "1ddp")
    for name, value in first.state_dict().items():
        torch.testing.assert_close(again.state_dict()[name], value, rtol=0, atol=0)
    assert again.lm_head.weight is again.transformer.wte.weight


def train_gpt_seeded(world: World, folder: Path, strategy: str) -> str:
    torch.manual_seed(7)
    return train_gpt(world, folder, strategy)


def test_a_greedy_schedule_looks_at_evaluations_and_is_resumed(tmp_path: Path) -> None:
    given: dict[str, Any] = {
        "lr_scheduler_type": "greedy",
        "lr_scheduler_kwargs": {"patience": 1, "factor": 0.5, "smooth": False},
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "steps",
        "save_steps": 2,
        "max_steps": 12,
    }
    whole = make_trainer(tmp_path / "whole", **given)
    whole.train()
    rates = [row["learning_rate"] for row in whole.state.log_history if "loss" in row]
    assert len(set(rates)) > 1
    parts = make_trainer(tmp_path / "parts", **given, callbacks=[StopAt(6)])
    parts.train()
    rest = make_trainer(tmp_path / "parts", **given)
    rest.train(resume_from_checkpoint=True)
    assert [row["learning_rate"] for row in rest.state.log_history if "loss" in row] == rates
    assert rest.engine.weights_hash() == whole.engine.weights_hash()


def tied_gpt() -> Any:
    """Its output layer is its embedding."""
    config = transformers.GPT2Config(
        vocab_size=50, n_positions=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=2
    )
    return transformers.GPT2LMHeadModel(config)


def saved_checkpoint(world: World, folder: Path, **more: Any) -> list[str]:
    arguments = TrainingArguments(
        str(folder), max_steps=4, save_steps=2, use_cpu=True, logging_steps=1, lanes=2, threads=1, **more
    )
    trainer = Trainer(model_init=tied_gpt, args=arguments, train_dataset=texts(8), world=world)
    trainer.train()
    whole = trainer.engine.state_dict()
    trainer.save_model(folder / "final")
    if not world.is_main:
        return []
    wrong = []
    for name in ("checkpoint-4", "final"):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder / name)
        assert model.lm_head.weight is model.transformer.wte.weight
        wrong += [f"{name}/{key}" for key, value in model.state_dict().items() if not torch.equal(value, whole[key])]
    return wrong


@pytest.mark.workers
@pytest.mark.parametrize("more", [{}, {"strategy": "fsdp"}, {"strategy": "zero3"}, {"bf16": True}])
def test_a_checkpoint_opens_with_from_pretrained_under_every_strategy(tmp_path: Path, more: dict[str, Any]) -> None:
    results = run_workers(saved_checkpoint, 2, folder=tmp_path, **more)
    assert [(result.value, result.error) for result in results] == [([], None), ([], None)]
    assert (tmp_path / "checkpoint-4" / "generation_config.json").exists()
    state = transformers.TrainerState.load_from_json(str(tmp_path / "checkpoint-2" / "trainer_state.json"))
    assert (state.global_step, state.max_steps, len(state.log_history)) == (2, 4, 2)
    assert state.total_flos > 0


def shards_written(world: World, folder: Path, **more: Any) -> tuple[list[str], list[str]]:
    """What is wrong in what was saved, and which files of the model this worker wrote in the last checkpoint."""
    from paceline.checkpoint import weights_file

    written: list[str] = []
    write = weights_file.write_weights

    def noted(path: Path, weights: Any) -> int:
        if "checkpoint-4" in path.parent.name:
            written.append(path.name)
        return write(path, weights)

    weights_file.WORTH_CUTTING, weights_file.write_weights = 0, noted
    wrong = saved_checkpoint(world, folder, **more)
    return wrong, written


@pytest.mark.workers
@pytest.mark.parametrize(
    "more", [{"strategy": "zero3"}, {"strategy": "fsdp"}, {"strategy": "hybrid"}, {"strategy": "ddp", "bf16": True}]
)
def test_every_worker_writes_its_shards_of_the_model(tmp_path: Path, more: dict[str, Any]) -> None:
    results = run_workers(shards_written, 2, folder=tmp_path, **more)
    assert [result.error for result in results] == [None, None], results[0].traceback + results[1].traceback
    (wrong, first), (_, second) = (result.value for result in results)
    assert wrong == []
    folder = tmp_path / "checkpoint-4"
    files = sorted(path.name for path in folder.glob("model*"))
    count = len(first) + len(second)
    assert (count >= 2, abs(len(first) - len(second)) <= 1) == (True, True)
    shards = [f"model-{place:05}-of-{count:05}.safetensors" for place in range(1, count + 1)]
    assert (first, second) == (shards[::2], shards[1::2])
    assert files == [*shards, "model.safetensors.index.json"]
    assert not list(folder.glob("worker-*.model"))
    sizes = [(folder / name).stat().st_size for name in shards]
    assert max(sizes) < 0.7 * sum(sizes)


def weights_alone(world: World, folder: Path, strategy: str) -> list[str]:
    """What is wrong in a checkpoint of save_only_model."""
    from paceline.checkpoint import weights_file

    weights_file.WORTH_CUTTING = 0
    arguments = TrainingArguments(
        str(folder),
        max_steps=2,
        save_steps=2,
        use_cpu=True,
        lanes=2,
        threads=1,
        strategy=strategy,
        save_only_model=True,
    )
    trainer = Trainer(model_init=tied_gpt, args=arguments, train_dataset=texts(8), world=world)
    gather = Engine.state_dict
    Engine.state_dict = None  # type: ignore[method-assign,assignment]  # nobody gathers the model to save it
    trainer.train()
    Engine.state_dict = gather  # type: ignore[method-assign]
    whole = trainer.engine.state_dict()
    trainer.engine.barrier()
    if not world.is_main:
        return []
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "checkpoint-2")
    return [key for key, value in model.state_dict().items() if not torch.equal(value, whole[key])]


@pytest.mark.workers
@pytest.mark.parametrize("strategy", ["zero3", "fsdp"])
def test_weights_alone_are_written_by_every_worker_too(tmp_path: Path, strategy: str) -> None:
    results = run_workers(weights_alone, 2, folder=tmp_path, strategy=strategy)
    assert [(result.value, result.error) for result in results] == [([], None), ([], None)], results[0].traceback
    names = sorted(path.name for path in (tmp_path / "checkpoint-2").iterdir() if not path.name.startswith("model-"))
    assert names == ["config.json", "generation_config.json", "model.safetensors.index.json", "trainer_state.json"]


def test_a_checkpoint_has_the_tokenizer_and_of_any_module_the_weights(tmp_path: Path) -> None:
    class Tokenizer:
        def save_pretrained(self, folder: str) -> None:
            (Path(folder) / "chat").mkdir()
            (Path(folder) / "chat" / "words.json").write_text("[]")

    trainer = make_trainer(tmp_path, save_strategy="steps", save_steps=3)
    trainer.processing_class = Tokenizer()
    trainer.train()
    folder = tmp_path / "checkpoint-6"
    assert (folder / "chat" / "words.json").read_text() == "[]"
    found = load_file(folder / "model.safetensors")
    assert {name: value.tolist() for name, value in found.items()} == {
        name: value.tolist() for name, value in trainer.engine.state_dict().items()
    }
    bare = make_trainer(tmp_path / "bare", save_strategy="steps", pretrained_files=False)
    bare.train()
    names = {path.name for path in (tmp_path / "bare" / "checkpoint-6").iterdir()}
    assert names == {"COMPLETE", "manifest.json", "worker-00000-of-00001.safetensors"}


class OwnWay(Trainer):
    def _save(self, output_dir: Any = None, state_dict: Any = None) -> None:
        assert output_dir is not None
        (Path(output_dir) / "mine.txt").write_text(str(len(state_dict)))


def test_a_checkpoint_holds_what_a_subclass_saves(tmp_path: Path) -> None:
    make_trainer(tmp_path, kind=OwnWay, save_strategy="steps").train()
    folder = tmp_path / "checkpoint-6"
    assert (folder / "mine.txt").read_text() == "6"
    assert (folder / "trainer_state.json").exists()
    assert not (folder / "model.safetensors").exists()
    make_trainer(tmp_path, kind=OwnWay, max_steps=8).train(resume_from_checkpoint=True)


def test_the_loss_is_the_mean_over_the_tokens_that_are_predicted(tmp_path: Path) -> None:
    trainer = Trainer(tiny(), TrainingArguments(str(tmp_path), use_cpu=True), eval_dataset=texts(5))
    batch = trainer._collator()(texts(3))
    batch["labels"][0, 3:] = -100
    assert trainer.weight_of(batch) == 2 + 11 + 11  # a causal model predicts the next token: the first has no guess


def test_label_smoothing_is_that_of_transformers(tmp_path: Path) -> None:
    from transformers.trainer_pt_utils import LabelSmoother

    trainer = Trainer(tiny(), TrainingArguments(str(tmp_path), use_cpu=True, label_smoothing_factor=0.1))
    trainer.model.eval()
    batch = trainer._collator()(texts(3))
    batch["labels"][0, 3:] = -100
    expected = LabelSmoother(0.1)(trainer.model(batch["input_ids"]), batch["labels"], shift_labels=True)
    torch.testing.assert_close(trainer.compute_loss(trainer.model, batch), expected)


def test_flags_may_be_read_by_transformers_own_parser() -> None:
    parser = transformers.HfArgumentParser(TrainingArguments)
    argv = ["--output_dir", "x", "--bf16", "--lr_scheduler_kwargs", '{"num_cycles": 2}', "--eval_strategy", "epoch"]
    (arguments,) = parser.parse_args_into_dataclasses(argv)
    assert (arguments.output_dir, arguments.bf16, arguments.eval_strategy) == ("x", True, "epoch")
    assert arguments.lr_scheduler_kwargs == {"num_cycles": 2}


def test_a_tokenizer_pads(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {word: number for number, word in enumerate(["[PAD]", "[UNK]", "a", "b", "c", "d"])}
    inner = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="[PAD]", unk_token="[UNK]")
    config = transformers.BertConfig(
        vocab_size=6, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, num_labels=2
    )
    data = [{**tokenizer(text), "label": len(text) % 2} for text in ("a b c", "d", "a d", "c c c c b")]
    arguments = TrainingArguments(str(tmp_path), max_steps=2, use_cpu=True, per_device_train_batch_size=2)
    model = transformers.BertForSequenceClassification(config)
    trainer = Trainer(model, arguments, train_dataset=data, eval_dataset=data, processing_class=tokenizer)
    trainer.train()
    assert trainer.predict(data).predictions.shape == (4, 2)
    trainer.save_model(tmp_path / "saved")
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {p.name for p in (tmp_path / "saved").iterdir()}
