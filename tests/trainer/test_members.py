"""What people ask a Trainer for besides train() and evaluate(), in transformers' words."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline import TrainerCallback, TrainingArguments
from paceline.errors import ConfigError, LoopError
from paceline.trainer import (
    DefaultFlowCallback,
    EarlyStoppingCallback,
    PrinterCallback,
    ProgressCallback,
    TrainerState,
    hub,
)
from paceline.trainer.argument_fields import OptimizerNames
from paceline.trainer.training_loop import noisy_embeddings
from paceline.world.world import World
from tests.trainer.jobs import Samples, make_trainer
from tests.workers import hashes, run_workers

# -- members ----------------------------------------------------------------------------------------------------------


def test_parameters_learning_rates_and_groups_can_be_asked_for(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, weight_decay=0.1)
    assert trainer.get_num_trainable_parameters() == sum(p.numel() for p in trainer.model.parameters())
    with pytest.raises(ConfigError, match="there is no optimizer yet"):
        trainer.get_learning_rates()
    trainer.create_optimizer()
    assert trainer.get_learning_rates() == [0.01, 0.01]
    assert [len(group) for group in trainer.get_optimizer_group()] == [2, 4]
    assert trainer.get_optimizer_group(trainer.model.get_parameter("outer.bias"))["weight_decay"] == 0.0
    assert trainer.get_optimizer_group(torch.zeros(1)) is None
    assert trainer.model_wrapped is trainer.model


def test_hyperparameter_search_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no hyperparameter_search here: start one run for each trial"):
        make_trainer(tmp_path).hyperparameter_search(n_trials=3)


def test_our_errors_are_those_that_scripts_catch() -> None:
    assert issubclass(ConfigError, ValueError)
    assert issubclass(LoopError, RuntimeError)


class Hub:
    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []

    def create_repo(self, name: str, **options: Any) -> Any:
        self.calls.append((name, options["private"]))
        return SimpleNamespace(repo_id=f"me/{name}")

    def upload_folder(self, **options: Any) -> str:
        self.calls.append((options["repo_id"], options["ignore_patterns"]))
        assert (Path(options["folder_path"]) / "model.safetensors").exists()
        return "a commit"


def test_push_to_hub_saves_the_model_and_its_card_and_uploads_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    api = Hub()
    monkeypatch.setattr(hub, "_api", lambda: api)
    trainer = make_trainer(tmp_path, hub_model_id="digits", hub_private_repo=True, hub_token="secret")
    trainer.evaluate()
    assert trainer.push_to_hub(license="mit", dataset="digits") == "a commit"
    assert api.calls == [("digits", True), ("me/digits", ["_*", ".*", "checkpoint-*"])]
    card = (tmp_path / "README.md").read_text()
    assert card.startswith('---\ndatasets: "digits"\nlicense: "mit"\n---\n')
    assert "| eval_loss | " in card
    assert "- `max_steps`: 6" in card
    assert "secret" not in card
    assert "secret" not in trainer.args.to_json_string() + trainer.args.described()


# -- arguments --------------------------------------------------------------------------------------------------------


def test_values_that_transformers_takes(tmp_path: Path) -> None:
    assert TrainingArguments(tmp_path).output_dir == str(tmp_path)
    made = TrainingArguments(output_dir=None, report_to=None)  # type: ignore[arg-type]
    assert (made.output_dir, made.report_to) == ("trainer_output", [])
    assert TrainingArguments(torch_compile=True).torch_compile_backend == "inductor"
    assert not TrainingArguments(use_cpu=True).dataloader_pin_memory


@pytest.mark.parametrize("wrong", [0, -1])
def test_an_empty_cache_every_0_steps_is_refused(wrong: int) -> None:
    with pytest.raises(ValueError, match=f"torch_empty_cache_steps={wrong}: it is at least 1"):
        TrainingArguments(torch_empty_cache_steps=wrong)


def test_lists_and_switches_of_a_command_line() -> None:
    words = "--report-to tensorboard prometheus --resume-from-checkpoint --label-names a b --max-steps 3"
    made = TrainingArguments.from_command_line(words.split())
    assert (made.report_to, made.label_names, made.max_steps) == (["tensorboard", "prometheus"], ["a", "b"], 3)
    assert made.resume_from_checkpoint == "true"
    assert TrainingArguments.from_command_line(["--resume-from-checkpoint", "a/b"]).resume_from_checkpoint == "a/b"


@pytest.mark.parametrize("name", [name.value for name in OptimizerNames if name is not OptimizerNames.MUON])
def test_every_optimizer_trains_by_its_name(tmp_path: Path, name: str) -> None:
    if name == "adafactor":
        pytest.importorskip("transformers")
    trainer = make_trainer(tmp_path, optim=name, max_steps=2)
    before = trainer.model.get_parameter("outer.weight").clone()
    trainer.train()
    assert not torch.equal(before, trainer.model.get_parameter("outer.weight"))


def test_an_optimizer_that_cannot_take_the_model_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="optim='muon' with optim_args=None: Muon only supports 2D parameters"):
        make_trainer(tmp_path, optim="muon").train()
    with pytest.raises(ConfigError, match="optim='rprop' has no weight decay; set weight_decay=0"):
        make_trainer(tmp_path, optim="rprop", weight_decay=0.1).train()


# -- callbacks --------------------------------------------------------------------------------------------------------


def test_default_callbacks_can_be_taken_out(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    trainer = make_trainer(tmp_path)
    assert [type(one) for one in trainer.callback_handler.callbacks] == [DefaultFlowCallback, ProgressCallback]
    trainer.remove_callback(ProgressCallback)
    trainer.train()
    assert "has ended" not in capfd.readouterr().out
    quiet = make_trainer(tmp_path, disable_tqdm=True)
    assert [type(one) for one in quiet.callback_handler.callbacks] == [DefaultFlowCallback, PrinterCallback]


def test_a_class_of_transformers_stands_for_ours_of_its_name(tmp_path: Path) -> None:
    theirs = type("ProgressCallback", (), {})
    trainer = make_trainer(tmp_path)
    assert isinstance(trainer.pop_callback(theirs), ProgressCallback)
    assert trainer.pop_callback(theirs) is None


def test_callbacks_and_control_come_back_from_trainer_state_json(tmp_path: Path) -> None:
    given: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 3, "metric_for_best_model": "loss"}
    stopping = EarlyStoppingCallback(early_stopping_patience=7)
    make_trainer(tmp_path, save_strategy="steps", save_steps=3, callbacks=[stopping], **given).train()
    fresh = EarlyStoppingCallback()
    trainer = make_trainer(tmp_path, callbacks=[fresh], **given)
    trainer.state = TrainerState.load_from_json(tmp_path / "checkpoint-6" / "trainer_state.json")
    trainer._load_callback_state()
    assert trainer.control.should_training_stop
    assert fresh.early_stopping_patience == 7
    lone = make_trainer(tmp_path)
    lone.state = trainer.state
    with pytest.warns(UserWarning, match="has a state of EarlyStoppingCallback, but there is no such callback"):
        lone._load_callback_state()


class Heard(TrainerCallback):
    def __init__(self) -> None:
        self.events: list[str] = []

    def on_push_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.events.append("push")


def test_events_can_be_called_on_the_handler(tmp_path: Path) -> None:
    heard = Heard()
    trainer = make_trainer(tmp_path, callbacks=[heard])
    trainer.callback_handler.on_push_begin(trainer.args, trainer.state, trainer.control)
    assert heard.events == ["push"]
    with pytest.raises(AttributeError, match="on_nothing"):
        _ = trainer.callback_handler.on_nothing


# -- models and labels ------------------------------------------------------------------------------------------------


class Anything(nn.Module):
    """Its forward names nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 3)

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        self.seen = sorted(kwargs)
        logits = self.inner(kwargs["x"])
        return {"loss": F.cross_entropy(logits, kwargs["labels"]), "logits": logits}


def test_a_model_that_takes_anything_gets_every_column(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, model=Anything(), max_steps=1)
    trainer.train()
    assert trainer.model.seen == ["labels", "number", "x"]


class SeveralClasses(nn.Module):
    def __init__(self, problem_type: str | None) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 3)
        self.config = SimpleNamespace(problem_type=problem_type)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.inner(x)
        if labels is None:
            return {"logits": logits}
        return {"loss": F.binary_cross_entropy_with_logits(logits, labels), "logits": logits}


SEVERAL = [{"x": torch.randn(8), "labels": torch.tensor([1.0, 0.0, 1.0])} for _ in range(8)]


def test_smoothing_is_left_out_for_labels_of_several_classes(tmp_path: Path) -> None:
    parts: dict[str, Any] = {"train_dataset": SEVERAL, "eval_dataset": SEVERAL, "label_smoothing_factor": 0.1}
    with pytest.warns(UserWarning, match="not compatible with multi-label"):
        trainer = make_trainer(tmp_path, model=SeveralClasses("multi_label_classification"), **parts)
    trainer.train()
    with pytest.raises(ConfigError, match="but these labels are a number for each class"):
        make_trainer(tmp_path, model=SeveralClasses(None), **parts).train()


def by_batch(prediction: Any, compute_result: bool) -> dict[str, float] | None:
    return {"done": 1.0} if compute_result else None


def test_predict_keeps_predictions_with_batch_eval_metrics(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, batch_eval_metrics=True, compute_metrics=by_batch)
    output = trainer.predict(Samples(11))
    assert output.predictions.shape == (11, 3)
    assert output.label_ids.shape == (11,)
    assert output.metrics["test_done"] == 1.0


class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.out = nn.Embedding(11, 4), nn.Linear(4, 11)

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        self.seen = self.embedding(input_ids)
        return F.cross_entropy(self.out(self.seen).flatten(0, 1), labels.flatten())


def noisy(world: World, folder: Path) -> str:
    rows = [{"input_ids": torch.tensor([n % 11, 3]), "labels": torch.tensor([1, n % 5])} for n in range(12)]
    given: dict[str, Any] = {"train_dataset": rows, "eval_dataset": rows, "lanes": 3, "neftune_noise_alpha": 0.4}
    trainer = make_trainer(folder, world, model_init=Embedded, **given, max_steps=2)
    trainer.train()
    module = trainer.model.get_submodule("embedding")
    assert not module._forward_hooks
    return trainer.engine.weights_hash()


@pytest.mark.workers
def test_noise_on_embeddings_is_the_lanes_own(tmp_path: Path) -> None:
    one = hashes(run_workers(noisy, 1, folder=tmp_path / "1"))
    assert hashes(run_workers(noisy, 2, folder=tmp_path / "2")) == one


def test_noise_is_added_in_training_alone_and_within_its_bounds() -> None:
    model = Embedded()
    ids = torch.zeros(3, 5, dtype=torch.long)
    with noisy_embeddings(model, 0.4):
        model(ids, ids)
        apart = (model.seen - model.embedding.weight[0]).detach().abs()
        assert 0 < float(apart.max()) <= 0.4 / 20**0.5
        model.eval()
        model(ids, ids)
        assert torch.equal(model.seen[0, 0], model.embedding.weight[0])
    with pytest.raises(ConfigError, match="Anything has none"), noisy_embeddings(Anything(), 1.0):
        pass


# -- again ------------------------------------------------------------------------------------------------------------


def test_train_can_be_called_again(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, save_strategy="epoch", max_steps=3)
    first, again = trainer.train(), trainer.train()
    assert (first.global_step, again.global_step) == (3, 3)


class ShortOfMemory(TrainerCallback):
    """Memory is enough for 4 samples at a time; the first step acts before that is known."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.train_batch_size > 4:
            raise RuntimeError("CUDA out of memory.")


def test_the_batch_size_is_halved_until_it_fits_and_gives_the_bits_of_that_size(tmp_path: Path) -> None:
    given: dict[str, Any] = {"max_steps": 2, "auto_find_batch_size": True, "per_device_train_batch_size": 16}
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 3))
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    trainer = make_trainer(tmp_path / "a", model=Tabular(model), callbacks=[ShortOfMemory()], **given)
    trainer.train()
    assert (trainer.state.train_batch_size, trainer.args.per_device_train_batch_size) == (4, 16)
    found = trainer.engine.weights_hash()
    model.load_state_dict(weights)
    expected = make_trainer(tmp_path / "b", model=Tabular(model), max_steps=2, per_device_train_batch_size=4)
    expected.train()
    assert found == expected.engine.weights_hash()


class Tabular(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.inner(x), labels)


def test_other_errors_and_one_sample_that_does_not_fit_are_raised(tmp_path: Path) -> None:
    class Never(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            raise RuntimeError("CUDA out of memory.")

    given: dict[str, Any] = {"auto_find_batch_size": True, "per_device_train_batch_size": 2, "callbacks": [Never()]}
    with pytest.raises(RuntimeError, match="out of memory"):
        make_trainer(tmp_path, **given).train()
