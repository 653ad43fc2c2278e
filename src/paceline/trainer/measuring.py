"""The measurements of a Trainer: its model, as it is now, over a dataset."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader

from paceline.trainer.building import share_weights
from paceline.trainer.evaluation import Evaluation, EvaluationOutput

if TYPE_CHECKING:
    from paceline.trainer.trainer import Trainer


class Measurements:
    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._kept: list[tuple[Any, Any]] = []  # the Trainer's own eval datasets, each with its prepared loader

    def forget(self) -> None:
        """The loaders belong to an Engine that is gone."""
        self._kept.clear()

    def of(
        self,
        dataset: Any,
        make: Callable[[Any], DataLoader[Any]],
        prefix: str,
        ignore_keys: list[str] | None,
        *,
        loss_only: bool,
    ) -> EvaluationOutput:
        """Everything measured over `dataset`; the model is in evaluation mode meanwhile."""
        trainer, began = self._trainer, time.perf_counter()
        model, was_training = trainer.model, trainer.model.training
        loader = self._prepared(dataset, make)
        trainer.callback_handler.objects["eval_dataloader"] = loader
        evaluation = Evaluation(
            engine=trainer.engine,
            arguments=trainer.args,
            step=lambda batch, alone: trainer.prediction_step(model, batch, alone, ignore_keys),
            weight=trainer.weight_of,
            main_input=trainer.main_input_name,
            compute_metrics=trainer.compute_metrics,
            preprocess=trainer.preprocess_logits_for_metrics,
            after_round=lambda: trainer.call_event("on_prediction_step"),
        )
        model.eval()
        try:
            output = evaluation.run(loader, prefix, loss_only=loss_only)
        finally:
            model.train(was_training)
            self._let_go(loader)
        seconds = time.perf_counter() - began
        rounds = math.ceil(output.num_samples / (trainer.args.eval_batch_size * trainer.args.world_size))
        output.metrics[f"{prefix}_runtime"] = round(seconds, 4)
        output.metrics[f"{prefix}_samples_per_second"] = round(output.num_samples / seconds, 3)
        output.metrics[f"{prefix}_steps_per_second"] = round(rounds / seconds, 3)
        return output

    def _prepared(self, dataset: Any, make: Callable[[Any], DataLoader[Any]]) -> Any:
        """The dataset's loader; without a training the model is only shared, and put on its device."""
        trainer = self._trainer
        if not trainer.has_trained:
            trainer.model.to(trainer.engine.device)
        evaluates = make == trainer.get_eval_dataloader
        for known, loader in self._kept if evaluates else ():
            if known is dataset:
                return loader
        if not trainer.has_trained:
            share_weights(trainer.engine, trainer.model)
        loader = trainer.engine.prepare(make(dataset))
        given = trainer.eval_dataset
        own = given.values() if isinstance(given, dict) else [given]
        if evaluates and any(dataset is one for one in own):
            self._kept.append((dataset, loader))
        return loader

    def _let_go(self, loader: Any) -> None:
        """A dataset that was given to one call is not kept alive by the Engine."""
        known = self._trainer.engine._group.evaluations
        if loader in known and not any(loader is kept for _, kept in self._kept):
            known.remove(loader)
