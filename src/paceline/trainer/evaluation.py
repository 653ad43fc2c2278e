"""Evaluation: every sample once, at any number of workers, and the same numbers from all of them.

    round     worker 0     worker 1          gathered, in the dataset's order
      0       batch 0      batch 1     ──►   rows of batch 0, rows of batch 1
      1       batch 2      (shadow)    ──►   rows of batch 2

The loss is the mean over samples of their batch's loss, as in transformers. Losses are added batch by batch in the
dataset's order, so the number of workers changes no bit of the sum. Predictions of different length are padded
with -100.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.engine.engine import Engine
from paceline.errors import ConfigError
from paceline.trainer.dataloaders import batch_size_of
from paceline.trainer.nested import as_array, joined, mapped, padded_to
from paceline.trainer.training_arguments import TrainingArguments

Step = tuple[Tensor | None, Any, Any]  # loss, predictions, labels


class EvalPrediction:
    """What compute_metrics gets: predictions and labels, and where asked for inputs and losses; it unpacks."""

    def __init__(self, predictions: Any, label_ids: Any, inputs: Any = None, losses: Any = None) -> None:
        self.predictions, self.label_ids, self.inputs, self.losses = predictions, label_ids, inputs, losses
        self.elements = (predictions, label_ids, *(part for part in (inputs, losses) if part is not None))

    def __iter__(self) -> Iterator[Any]:
        return iter(self.elements)

    def __getitem__(self, place: int) -> Any:
        return self.elements[place]


class EvaluationOutput(NamedTuple):
    predictions: Any
    label_ids: Any
    metrics: dict[str, float]
    num_samples: int


@dataclass
class _Kept:
    """Rows gathered so far: on the device until they are moved to the host."""

    here: list[Any] = field(default_factory=list)
    on_host: list[Any] = field(default_factory=list)

    def add(self, rows: Any) -> None:
        if rows is not None:
            self.here.append(rows)

    def to_host(self) -> None:
        self.on_host += [mapped(as_array, rows) for rows in self.here]
        self.here.clear()

    def all(self) -> Any:
        self.to_host()
        return joined(self.on_host) if self.on_host else None


@dataclass(frozen=True)
class Evaluation:
    """How this job evaluates."""

    engine: Engine
    arguments: TrainingArguments
    step: Callable[[Any, bool], Step]  # of a batch, and whether the loss alone is wanted
    weight: Callable[[Any], float | None]  # how many labels of a batch count; none: its loss does not
    main_input: str = "input_ids"
    compute_metrics: Callable[..., Mapping[str, Any]] | None = None
    preprocess: Callable[[Any, Any], Any] | None = None
    after_round: Callable[[], None] = lambda: None

    def run(self, loader: Any, prefix: str, *, loss_only: bool) -> EvaluationOutput:
        kept = {name: _Kept() for name in ("predictions", "labels", "inputs")}
        tally: list[list[float]] = []  # of each batch: loss, weight, samples
        by_round: Mapping[str, Any] | None = None
        for number, batch in enumerate(loader):
            before = len(tally)
            rows = self._round(batch, loss_only, tally)
            if self.arguments.batch_eval_metrics and not loss_only:
                by_round = self._metrics(rows, _losses(tally[before:]), compute_result=number + 1 == len(loader))
            else:
                for name, part in rows.items():
                    kept[name].add(part)
            if (number + 1) % (self.arguments.eval_accumulation_steps or math.inf) == 0:
                for part in kept.values():
                    part.to_host()
            self.after_round()
        if not tally:
            raise ConfigError(f"the {prefix} dataset is empty: there is nothing to evaluate")
        found = {name: part.all() for name, part in kept.items()}
        metrics = by_round if by_round is not None else self._metrics(found, _losses(tally))
        named = {f"{prefix}_loss": _mean(tally)} if not math.isnan(tally[0][1]) else {}
        for name, value in metrics.items():
            named[name if name.startswith(f"{prefix}_") else f"{prefix}_{name}"] = _plain(value)
        return EvaluationOutput(found["predictions"], found["labels"], named, int(sum(row[2] for row in tally)))

    def _round(self, batch: Any, loss_only: bool, tally: list[list[float]]) -> dict[str, Any]:
        """This round's rows of all workers."""
        with torch.no_grad():
            loss, predictions, labels = self.step(batch, loss_only)
        samples = float(batch_size_of(batch))
        weight = 0.0 if self.weight(batch) == 0 else samples
        row = [math.nan, math.nan, samples] if loss is None else [float(loss), weight, samples]
        tally += self.engine.gather_for_metrics(torch.tensor([row], dtype=torch.float64)).tolist()
        if loss_only:
            return {"predictions": None, "labels": None, "inputs": None}
        labels = self._equally_long(labels)
        predictions = self._equally_long(predictions)
        if self.preprocess is not None and predictions is not None:
            predictions = self.preprocess(predictions, labels)
        wants_inputs = "inputs" in self.arguments.include_for_metrics
        inputs = self._equally_long(self._input_of(batch)) if wants_inputs else None
        found = {"predictions": predictions, "labels": labels, "inputs": inputs}
        return {name: None if tree is None else mapped(self._gathered, tree) for name, tree in found.items()}

    def _gathered(self, tensor: Any) -> Any:
        return self.engine.gather_for_metrics(tensor)

    def _equally_long(self, tree: Any) -> Any:
        """Workers' batches may be padded to different lengths; rows that are gathered have one."""
        if tree is None or self.engine.world.size == 1:
            return tree

        def padded(tensor: Any) -> Any:
            if not isinstance(tensor, Tensor) or tensor.dim() < 2:
                return tensor
            shape = torch.tensor(tensor.shape, device=tensor.device)
            return padded_to(tensor, self.engine.reduce(shape, "max").tolist())

        return mapped(padded, tree)

    def _input_of(self, batch: Any) -> Any:
        if isinstance(batch, Mapping):
            return batch.get(self.main_input)
        return batch[0] if isinstance(batch, list | tuple) else batch

    def _metrics(self, rows: Mapping[str, Any], losses: Any, **more: Any) -> Mapping[str, Any]:
        if self.compute_metrics is None or rows["predictions"] is None or rows["labels"] is None:
            return {}
        wanted = losses if "loss" in self.arguments.include_for_metrics else None
        prediction = EvalPrediction(rows["predictions"], rows["labels"], rows["inputs"], wanted)
        found = self.compute_metrics(prediction, **more)
        return found or {}


def _losses(tally: Sequence[Sequence[float]]) -> Any:
    """One loss per sample: that of its batch."""
    return as_array(torch.tensor([loss for loss, _, samples in tally for _ in range(int(samples))]))


def _mean(tally: Sequence[Sequence[float]]) -> float:
    counted = [(loss, weight) for loss, weight, _ in tally if weight > 0]
    total = sum(weight for _, weight in counted)
    return sum(loss * weight for loss, weight in counted) / total if total else math.nan


def _plain(value: Any) -> Any:
    """Numbers and lists, as JSON has them."""
    return value.tolist() if hasattr(value, "tolist") else value
