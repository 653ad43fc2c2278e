"""Evaluation: every sample once, at any number of workers, and the same numbers from all of them.

    round     worker 0     worker 1          gathered, in the dataset's order
      0       batch 0      batch 1     ──►   rows of batch 0, rows of batch 1
      1       batch 2      (shadow)    ──►   rows of batch 2

The loss is the mean over samples of their batch's loss, as in transformers. Losses are added batch by batch in the
dataset's order, so the number of workers changes no bit of the sum. Predictions of different length are padded
with -100. Workers that share sequences put what they have found in their parts together first; labels and inputs are
those of the whole batch.
"""

from __future__ import annotations

import base64
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader

from paceline.data.fetching import to_device
from paceline.errors import ConfigError, LoopError
from paceline.trainer.dataloaders import as_loader, batch_size_of
from paceline.trainer.engine_setup import share_weights

if TYPE_CHECKING:
    from paceline.trainer.trainer import Trainer

PADDING = -100


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


class Evaluator:
    """Measures the Trainer's model, as it is now, over a dataset."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._kept: list[tuple[Any, Any]] = []  # the Trainer's own eval datasets, each with its prepared loader

    def forget_loaders(self) -> None:
        """They belong to an Engine that is gone."""
        self._kept.clear()

    def measure(
        self,
        dataset: Any,
        make: Callable[[Any], DataLoader[Any]],
        prefix: str,
        ignore_keys: list[str] | None,
        *,
        loss_only: bool | None,
        description: str,
    ) -> EvaluationOutput:
        """The Trainer's evaluation_loop over `dataset`, and how long it took."""
        trainer, began = self._trainer, time.perf_counter()
        loader = self._prepared(dataset, make)
        trainer.callback_handler.objects["eval_dataloader"] = loader
        try:
            output = trainer.evaluation_loop(
                loader,
                description=description,
                prediction_loss_only=loss_only,
                ignore_keys=ignore_keys,
                metric_key_prefix=prefix,
            )
        finally:
            self._let_go(loader)
        seconds = time.perf_counter() - began
        size = trainer.lane_batch_size(trainer.args.eval_batch_size)
        rounds = math.ceil(output.num_samples / (size * trainer.data_workers))
        output.metrics[f"{prefix}_runtime"] = round(seconds, 4)
        output.metrics[f"{prefix}_samples_per_second"] = round(output.num_samples / seconds, 3)
        output.metrics[f"{prefix}_steps_per_second"] = round(rounds / seconds, 3)
        return output

    # -- loaders ------------------------------------------------------------------------------------------------------

    def _prepared(self, dataset: Any, make: Callable[[Any], DataLoader[Any]]) -> Any:
        """The dataset's loader. A model that `prepare` has not seen is shared, and put on its device."""
        trainer = self._trainer
        if not trainer.has_trained:
            trainer.model.to(trainer.engine.device)
            trainer.engine._group.sequences.attach(trainer.model)
        is_evaluation = make == trainer.get_eval_dataloader
        for known, loader in self._kept if is_evaluation else ():
            if known is dataset:
                return loader
        if not trainer.has_trained:
            share_weights(trainer.engine, trainer.model)
        loader = trainer.engine.prepare(as_loader(make(dataset)))
        given = trainer.eval_dataset
        own = given.values() if isinstance(given, dict) else [given]
        if is_evaluation and any(dataset is one for one in own):
            self._kept.append((dataset, loader))
        return loader

    def _let_go(self, loader: Any) -> None:
        """A dataset that was given to one call is not kept alive by the Engine."""
        known = self._trainer.engine._group.evaluations
        if loader in known and not any(loader is kept for _, kept in self._kept):
            known.remove(loader)

    # -- the loop -----------------------------------------------------------------------------------------------------

    def run(
        self, loader: Any, prefix: str, ignore_keys: list[str] | None, *, loss_only: bool, keeps_rows: bool
    ) -> EvaluationOutput:
        """With the model in evaluation mode; a loader that the Engine has not seen is prepared."""
        model = self._trainer.model
        if isinstance(loader, DataLoader):
            loader = self._trainer.engine.prepare(loader)
        was_training = model.training
        model.eval()
        try:
            return self._loop(loader, prefix, ignore_keys, loss_only, keeps_rows)
        finally:
            model.train(was_training)

    def _loop(
        self, loader: Any, prefix: str, ignore_keys: list[str] | None, loss_only: bool, keeps_rows: bool
    ) -> EvaluationOutput:
        trainer, args = self._trainer, self._trainer.args
        if args.eval_use_gather_object and not loss_only and trainer.engine.config.mesh.cp > 1:
            raise ConfigError(
                f"eval_use_gather_object with {trainer.engine.config.mesh}: results that are no tensors can't be put "
                "together again from parts of sequences; leave it out, or evaluate a checkpoint without cp"
            )
        kept: dict[str, list[Any]] = {"predictions": [], "labels": [], "inputs": []}  # a tree of rows for each round
        tally: list[list[float]] = []  # of each batch: loss, weight, samples
        by_round: Mapping[str, Any] | None = None
        for number, batch in enumerate(loader):
            before = len(tally)
            rows = self._round(batch, ignore_keys, loss_only, tally)
            if args.batch_eval_metrics and not loss_only:
                by_round = self._metrics(rows, tally[before:], compute_result=number + 1 == len(loader))
            if keeps_rows or not args.batch_eval_metrics:
                for name, tree in rows.items():
                    kept[name].append(tree)
            if (steps := args.eval_accumulation_steps) is not None and (number + 1) % steps == 0:
                for trees in kept.values():
                    trees[-steps:] = [map_tree(to_numpy, tree) for tree in trees[-steps:]]
            trainer.call_event("on_prediction_step")
        if not tally:
            raise ConfigError(f"the {prefix} dataset is empty: there is nothing to evaluate")
        found = {name: concat_trees(trees) if trees else None for name, trees in kept.items()}
        metrics = by_round if by_round is not None else self._metrics(found, tally)
        named = {f"{prefix}_loss": _mean(tally)} if not math.isnan(tally[0][1]) else {}
        for name, value in metrics.items():
            full = name if name.startswith(f"{prefix}_") else f"{prefix}_{name}"
            named[full] = value.tolist() if hasattr(value, "tolist") else value  # plain, as JSON has it
        samples = int(sum(samples for *_, samples in tally))
        return EvaluationOutput(found["predictions"], found["labels"], named, samples)

    def _round(
        self, batch: Any, ignore_keys: list[str] | None, loss_only: bool, tally: list[list[float]]
    ) -> dict[str, Any]:
        """This round's rows of all workers, those that there are."""
        trainer, engine = self._trainer, self._trainer.engine
        found = engine._between.evaluation_batch(batch)
        with torch.no_grad():
            loss, predictions, labels = trainer.prediction_step(trainer.model, batch, loss_only, ignore_keys)
        samples = float(batch_size_of(found.whole))
        weight = 0.0 if trainer.weight_of(found.whole) == 0 else samples  # without a label its loss does not count
        row = [math.nan, math.nan, samples] if loss is None else [float(found.mean(loss)), weight, samples]
        tally += engine.gather_for_metrics(torch.tensor([row], dtype=torch.float64), whole=True).tolist()
        if loss_only:
            return {}
        if trainer.args.eval_use_gather_object:
            predictions, labels = marked(predictions), marked(labels)
        if found.whole is not found.mine:
            predictions = found.rows(predictions)
            labels = to_device(trainer.loss_rule.call(found.whole).labels, engine.device)
        labels, predictions = self._equally_long(labels), self._equally_long(predictions)
        if trainer.preprocess_logits_for_metrics is not None and predictions is not None:
            predictions = trainer.preprocess_logits_for_metrics(predictions, labels)
        trees = {"predictions": predictions, "labels": labels}
        if "inputs" in trainer.args.include_for_metrics:
            trees["inputs"] = self._equally_long(to_device(self._main_input(found.whole), engine.device))
        return {name: map_tree(self._gathered, tree) for name, tree in trees.items() if tree is not None}

    def _gathered(self, leaf: Any) -> Any:
        engine = self._trainer.engine
        if not isinstance(leaf, Rows):
            return engine.gather_for_metrics(leaf, whole=True)
        rows = self._equally_long(packed(leaf, engine.device, PADDING))
        return unpacked(engine.gather_for_metrics(rows, whole=True))

    def _equally_long(self, tree: Any) -> Any:
        """Workers' batches may be padded to different lengths; rows that are gathered have one."""
        engine = self._trainer.engine
        if tree is None or engine.world.size == 1:
            return tree

        def padded(tensor: Any) -> Any:
            if not isinstance(tensor, Tensor) or tensor.dim() < 2:
                return tensor
            shape = torch.tensor(tensor.shape, device=tensor.device)
            return pad_to(tensor, engine.reduce(shape, "max").tolist())

        return map_tree(padded, tree)

    def _main_input(self, batch: Any) -> Any:
        if isinstance(batch, Mapping):
            return batch.get(self._trainer.main_input_name)
        return batch[0] if isinstance(batch, list | tuple) else batch

    def _metrics(self, rows: Mapping[str, Any], tally: list[list[float]], **more: Any) -> Mapping[str, Any]:
        compute_metrics = self._trainer.compute_metrics
        predictions, labels = rows.get("predictions"), rows.get("labels")
        if compute_metrics is None or predictions is None or labels is None:
            return {}
        losses = None
        if "loss" in self._trainer.args.include_for_metrics:  # one per sample: that of its batch
            losses = np.array([loss for loss, _, samples in tally for _ in range(int(samples))], dtype=np.float32)
        found: Mapping[str, Any] | None = compute_metrics(
            EvalPrediction(predictions, labels, rows.get("inputs"), losses), **more
        )
        return found or {}


def _mean(tally: Sequence[Sequence[float]]) -> float:
    counted = [(loss, weight) for loss, weight, _ in tally if weight > 0]
    total = sum(weight for _, weight in counted)
    return sum(loss * weight for loss, weight in counted) / total if total else math.nan


# -- trees of tensors and arrays -------------------------------------------------------------------------------------


def map_tree(change: Callable[[Any], Any], tree: Any) -> Any:
    """The tree with every leaf changed."""
    if isinstance(tree, Mapping):
        return {name: map_tree(change, part) for name, part in tree.items()}
    if isinstance(tree, list | tuple) and not isinstance(tree, Rows):
        return tuple(map_tree(change, part) for part in tree)
    return change(tree)


def concat_trees(parts: Sequence[Any]) -> Any:
    """Trees of the same form, with the rows of their leaves one after another, as arrays."""
    first = parts[0]
    if isinstance(first, Mapping):
        return {name: concat_trees([part[name] for part in parts]) for name in first}
    if isinstance(first, Rows):
        return [row for part in parts for row in part]
    if isinstance(first, list | tuple):
        return tuple(concat_trees([part[place] for part in parts]) for place in range(len(first)))
    return _concat_rows([to_numpy(part) for part in parts])


def to_numpy(leaf: Tensor | NDArray[Any]) -> NDArray[Any]:
    if not isinstance(leaf, Tensor):
        return leaf
    leaf = leaf.detach().cpu()
    array: NDArray[Any] = (leaf.float() if leaf.dtype in (torch.bfloat16, torch.float16) else leaf).numpy()
    return array


def pad_to(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """The tensor at the start of a larger one; the rows stay as many as they are."""
    shape = (tensor.shape[0], *shape[1:])
    if tuple(tensor.shape) == tuple(shape):
        return tensor
    out = tensor.new_full(shape, PADDING)
    out[tuple(slice(0, size) for size in tensor.shape)] = tensor
    return out


def _concat_rows(arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
    shapes = {array.shape[1:] for array in arrays}
    if len(shapes) == 1:
        return np.concatenate(arrays)
    longest = tuple(max(sizes) for sizes in zip(*shapes, strict=True))
    out = np.full((sum(len(array) for array in arrays), *longest), PADDING, dtype=arrays[0].dtype)
    row = 0
    for array in arrays:
        out[(slice(row, row + len(array)), *(slice(0, size) for size in array.shape[1:]))] = array
        row += len(array)
    return out


# -- results that are no tensors: eval_use_gather_object ---------------------------------------------------------------


_ARRAY = "__array__"


class Rows(list[Any]):
    """One object for each sample.

        ["a cat", "two dogs"]            a list is rows; tuples and dicts say how results are arranged, as ever
        [{"boxes": Tensor}, …]           a row: numbers, texts, None, and lists, dicts and tensors of them

    Workers exchange them as tensors do: each row is JSON, and its bytes are a row of a tensor, filled up with -100. So
    rows are gathered in the dataset's order, and no object is pickled. Tensors come back as arrays, tuples as lists.
    """


def marked(tree: Any) -> Any:
    """The tree with its lists as `Rows`."""
    if isinstance(tree, Mapping):
        return {name: marked(part) for name, part in tree.items()}
    if isinstance(tree, tuple):
        return tuple(marked(part) for part in tree)
    return Rows(tree) if isinstance(tree, list) else tree


def packed(rows: Rows, device: torch.device, filler: int) -> Tensor:
    texts = [json.dumps(row, default=_described).encode() for row in rows]
    longest = max(map(len, texts), default=0)
    out = torch.full((len(texts), max(1, longest)), filler, dtype=torch.int16)
    for place, text in enumerate(texts):
        out[place, : len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return out.to(device)


def unpacked(packed_rows: Tensor) -> Rows:
    rows = packed_rows.cpu().numpy()
    return Rows(json.loads(row[row >= 0].astype(np.uint8).tobytes(), object_hook=_made) for row in rows)


def _described(value: Any) -> Any:
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        value = (value.float() if value.dtype is torch.bfloat16 else value).numpy()  # numpy has none
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray) and value.dtype != object:
        return {
            _ARRAY: base64.b64encode(np.ascontiguousarray(value).tobytes()).decode(),
            "dtype": value.dtype.str,
            "shape": value.shape,
        }
    raise LoopError(
        f"eval_use_gather_object: a {type(value).__name__} is among the predictions or labels, but rows are numbers, "
        "texts, None, tensors, and lists and dicts of them; return what it is made from"
    )


def _made(found: dict[str, Any]) -> Any:
    if _ARRAY not in found:
        return found
    return np.frombuffer(base64.b64decode(found[_ARRAY]), found["dtype"]).reshape(found["shape"]).copy()
