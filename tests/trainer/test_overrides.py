"""What a subclass of the Trainer overrides is called with its meaning, or refused by name."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Sampler, SequentialSampler

from paceline import Trainer
from paceline.errors import ConfigError, LoopError
from paceline.trainer.overrides import NEVER_CALLED
from paceline.world.world import World
from tests.trainer.jobs import Samples, Words, accuracy, make_trainer, padded, texts
from tests.workers import hashes, run_workers


def trained(folder: Path, kind: type[Trainer] = Trainer, **given: Any) -> str:
    trainer = make_trainer(folder, kind=kind, **given)
    trainer.train()
    return trainer.engine.weights_hash()


# -- training ---------------------------------------------------------------------------------------------------------


class OwnStep(Trainer):
    """As it is written for transformers' Trainer."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        model.train()
        inputs = self._prepare_inputs(inputs)
        with self.compute_loss_context_manager():
            loss = self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        self.accelerator.backward(loss)
        return loss.detach()


class Doubled(Trainer):
    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        return super().training_step(model, {**inputs, "x": 2 * inputs["x"]}, num_items_in_batch)


class Prepared(Trainer):
    def _prepare_inputs(self, inputs: Any) -> Any:
        inputs = super()._prepare_inputs(inputs)
        return {**inputs, "x": 2 * inputs["x"]}


class Taken(Trainer):
    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        batches, count = super().get_batch_samples(epoch_iterator, num_batches, device)
        return [{**batch, "x": 2 * batch["x"]} for batch in batches], count


def words(world: World, folder: Path, kind: type[Trainer]) -> str:
    """The labels that count differ between micro-batches, so a loss that is weighted by samples gives other bits."""
    given: dict[str, Any] = {"model_init": Words, "train_dataset": texts(40), "max_steps": 4, "lanes": 6}
    arguments = make_trainer(folder, world, kind, **given, per_device_train_batch_size=1, eval_dataset=texts(4))
    arguments.data_collator = padded
    arguments.train()
    return arguments.engine.weights_hash()


@pytest.mark.workers
def test_a_step_of_ones_own_gives_the_bits_of_ours_on_any_number_of_workers(tmp_path: Path) -> None:
    expected = hashes(run_workers(words, 1, folder=tmp_path / "ours", kind=Trainer))
    assert hashes(run_workers(words, 1, folder=tmp_path / "one", kind=OwnStep)) == expected
    assert hashes(run_workers(words, 3, folder=tmp_path / "three", kind=OwnStep)) == expected


def test_training_step_prepare_inputs_and_get_batch_samples_change_what_is_trained_on(tmp_path: Path) -> None:
    plain = trained(tmp_path / "plain")
    changed = {trained(tmp_path / kind.__name__, kind) for kind in (Doubled, Prepared, Taken)}
    assert len(changed) == 1
    assert plain not in changed


def test_prepare_inputs_is_called_in_evaluation_too(tmp_path: Path) -> None:
    plain, prepared = (make_trainer(tmp_path, kind=kind).predict(Samples(4)) for kind in (Trainer, Prepared))
    assert plain.metrics["test_loss"] != prepared.metrics["test_loss"]


class PlainBackward(OwnStep):
    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        loss = self.compute_loss(model, inputs)
        loss.backward()
        return loss.detach()


class OneMoreBackward(Trainer):
    """Adversarial training, as it is written for one process."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        loss = super().training_step(model, inputs, num_items_in_batch)
        self.compute_loss(model, inputs).backward()
        return loss


class BackwardTwice(Trainer):
    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        self.accelerator.backward(self.compute_loss(model, inputs))
        return super().training_step(model, inputs, num_items_in_batch)


class NoBackward(Trainer):
    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        return self.compute_loss(model, inputs).detach()


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (PlainBackward, r"called loss.backward\(\), whose gradient no other worker would get"),
        (OneMoreBackward, r"called loss.backward\(\), whose gradient no other worker would get"),
        (BackwardTwice, "called backward twice for one micro-batch; add the losses up"),
        (NoBackward, "returned without a backward; end it in super"),
    ],
)
def test_a_step_whose_gradient_would_be_wrong_is_refused(tmp_path: Path, kind: type[Trainer], text: str) -> None:
    plain = Tensor.backward
    with pytest.raises(LoopError, match=text):
        trained(tmp_path, kind)
    assert Tensor.backward is plain


class WithCritic(OwnStep):
    """Another model, with an optimizer of its own, is nobody else's business."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        critic = torch.nn.Linear(8, 1)
        critic(inputs["x"]).sum().backward()
        return super().training_step(model, inputs, num_items_in_batch)


def test_a_backward_of_another_model_is_left_alone(tmp_path: Path) -> None:
    assert trained(tmp_path, WithCritic)


class TwoAtOnce(Trainer):
    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        batches = list(epoch_iterator)
        return batches * 2, None


def test_more_batches_than_were_asked_for_are_refused(tmp_path: Path) -> None:
    with pytest.raises(LoopError, match="get_batch_samples returned 2 batches where num_batches is 1"):
        trained(tmp_path, TwoAtOnce)


def test_the_accelerator_refuses_options_of_others(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    with pytest.raises(ConfigError, match="retain_graph has no meaning here"):
        trainer.accelerator.backward(torch.zeros(()), retain_graph=True)
    assert trainer.accelerator.is_main_process
    assert trainer.accelerator.device == trainer.engine.device


# -- samplers and loaders ---------------------------------------------------------------------------------------------


class InOrder(Trainer):
    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler[int]:
        return SequentialSampler(train_dataset)


def test_a_train_sampler_of_ones_own_decides_the_order(tmp_path: Path) -> None:
    expected = trained(tmp_path / "a", train_sampling_strategy="sequential")
    assert trained(tmp_path / "b", InOrder) == expected
    assert trained(tmp_path / "c") != expected


class Backwards(Sampler[int]):
    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[int]:
        return iter(reversed(range(self._count)))


class EvalBackwards(Trainer):
    def _get_eval_sampler(self, eval_dataset: Any) -> Sampler[int]:
        return Backwards(len(eval_dataset))


def test_an_eval_sampler_of_ones_own_decides_the_order(tmp_path: Path) -> None:
    expected = make_trainer(tmp_path).predict(Samples(11))
    found = make_trainer(tmp_path, kind=EvalBackwards).predict(Samples(11))
    assert found.label_ids.tolist() == expected.label_ids.tolist()[::-1]


class WithNumber(Trainer):
    """The collator of this one wants a column that the model does not take."""

    def _set_signature_columns_if_needed(self) -> None:
        super()._set_signature_columns_if_needed()
        assert self._signature_columns is not None
        self._signature_columns += ["number"]

    def _prepare_inputs(self, inputs: Any) -> Any:
        self.seen = inputs.pop("number")
        return super()._prepare_inputs(inputs)


def test_signature_columns_of_ones_own_reach_the_batch(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, kind=WithNumber)
    trainer.evaluate()
    assert isinstance(trainer, WithNumber)
    assert trainer.seen.tolist() == [8, 9, 10]


# -- optimizer, evaluation, saving ------------------------------------------------------------------------------------


class Both(Trainer):
    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        self.steps = num_training_steps
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.lr_scheduler = torch.optim.lr_scheduler.ConstantLR(self.optimizer, factor=0.5, total_iters=100)


def test_optimizer_and_scheduler_are_made_together_before_the_first_step(tmp_path: Path) -> None:
    given: dict[str, Any] = {"max_steps": -1, "num_train_epochs": 2, "gradient_accumulation_steps": 3, "lanes": 2}
    trainer = make_trainer(tmp_path, kind=Both, **given)
    trainer.train()
    assert isinstance(trainer, Both)
    assert (trainer.steps, trainer.state.global_step) == (4, 4)
    assert [row["learning_rate"] for row in trainer.state.log_history if "loss" in row] == [0.05, 0.05]


class Rates(Trainer):
    def get_decay_parameter_names(self, model: Any) -> list[str]:
        return ["outer.weight"]


def test_decaying_parameters_of_ones_own(tmp_path: Path) -> None:
    groups = make_trainer(tmp_path, kind=Rates, weight_decay=0.1).create_optimizer().param_groups
    assert [(len(group["params"]), group["weight_decay"]) for group in groups] == [(1, 0.1), (5, 0.0)]


class Counting(Trainer):
    def evaluation_loop(self, *positional: Any, **named: Any) -> Any:
        output = super().evaluation_loop(*positional, **named)
        output.metrics[f"{named['metric_key_prefix']}_samples"] = output.num_samples
        return output

    def _save_checkpoint(self, model: Any, trial: Any = None) -> None:
        super()._save_checkpoint(model, trial)
        (Path(self.args.output_dir) / f"saved-{self.state.global_step}").touch()

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any = None) -> bool:
        super()._determine_best_metric(metrics, trial)
        return self.state.global_step == 4


def test_evaluation_and_saving_go_through_what_is_overridden(tmp_path: Path) -> None:
    given: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "best"}
    given["metric_for_best_model"] = "loss"
    trainer = make_trainer(tmp_path, kind=Counting, compute_metrics=accuracy, **given)
    trainer.train()
    assert [row["eval_samples"] for row in trainer.state.log_history if "eval_loss" in row] == [11, 11, 11]
    assert sorted(path.name for path in tmp_path.glob("*-*")) == ["checkpoint-4", "saved-4"]
    assert trainer.predict(Samples(5)).metrics["test_samples"] == 5


class OwnFile(Trainer):
    def _save(self, output_dir: Any = None, state_dict: Any = None) -> None:
        assert output_dir is not None
        Path(output_dir).mkdir(exist_ok=True)
        torch.save(sorted(state_dict), Path(output_dir) / "names.pt")


def test_save_model_writes_by_the_save_of_a_subclass(tmp_path: Path) -> None:
    make_trainer(tmp_path, kind=OwnFile).save_model(tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["names.pt"]


# -- refused ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(NEVER_CALLED))
def test_what_would_never_be_called_is_refused_by_name(tmp_path: Path, name: str) -> None:
    kind = type("Mine", (Trainer,), {name: lambda self, *positional, **named: None})
    with pytest.raises(ConfigError, match=f"^Mine.{name} would never be called by paceline") as caught:
        make_trainer(tmp_path, kind=kind)
    assert "\n" not in str(caught.value)


def test_every_method_of_transformers_is_called_or_refused() -> None:
    transformers = pytest.importorskip("transformers")
    theirs = {name for name, _ in inspect.getmembers(transformers.Trainer, inspect.isfunction)}
    ours = {name for name, _ in inspect.getmembers(Trainer, callable)}
    assert theirs - ours - set(NEVER_CALLED) == set()
    assert ours & set(NEVER_CALLED) == {"_get_output_dir", "_load_callback_state"}  # for scripts that call them
