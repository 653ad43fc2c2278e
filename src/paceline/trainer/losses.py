"""From a batch to a loss and its weight: whatever the model returns, the loss is a mean over `weight` units.

| batch           | the model is called        | labels                    |
|-----------------|----------------------------|---------------------------|
| a mapping       | model(**batch)             | batch["labels"], if there |
| a tuple or list | model(*batch)              | its last, if there is a loss function; the model does not get it |
| anything else   | model(batch)               | none                      |

| the model returns                      | the loss                                        |
|----------------------------------------|-------------------------------------------------|
| a number                               | that                                            |
| an object or dict with `loss`          | that                                            |
| a tuple that begins with a number      | that                                            |
| logits, with a loss function           | compute_loss_func(outputs, labels)              |

The weight counts the labels that are not -100 where labels are whole numbers, and samples otherwise. So the step's
gradient is that of the mean over all tokens of the global batch, however they fell into lanes. The last of a tuple that
the model itself takes is not labels if forward's argument there is a mask, or not the one that is called labels.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.engine.vote import HostReading
from paceline.errors import ConfigError
from paceline.trainer.chunked_loss import IGNORED, ChunkedLoss

LossFunction = Callable[..., Tensor]


@dataclass(frozen=True)
class Called:
    """How a batch is given to the model."""

    positional: tuple[Any, ...]
    named: dict[str, Any]
    labels: Any = None  # as compute_metrics gets them

    def of(self, model: nn.Module) -> Any:
        return model(*self.positional, **self.named)


class LossRule:
    """How this job makes a loss of a batch."""

    def __init__(
        self,
        model: nn.Module,
        *,
        loss_function: LossFunction | None = None,
        label_names: Sequence[str] | None = None,
        smoothing: float = 0.0,
        calls_model: bool = True,
    ) -> None:
        """`calls_model`: it is this rule that does so with a batch, and not a compute_loss of the user's own."""
        self._function, self.smoothing = loss_function, smoothing
        self.names = tuple(label_names or label_names_of(model))
        self._shifts = shifts_labels(model)
        self._not_labels = inputs_of(model, self.names) if calls_model and not self.takes_labels_out else frozenset()
        self._takes_count = loss_function is not None and takes(loss_function, "num_items_in_batch")
        self._chunked: ChunkedLoss | None = None

    @contextmanager
    def in_chunks(
        self, model: nn.Module, *, compile: bool, needed: bool, tell: Callable[[str], object]
    ) -> Iterator[None]:
        """Training without the logits of the whole batch; of a model that can't, with them unless it is needed."""
        if self.takes_labels_out:
            raise ConfigError(
                "chunked_loss=True never has the logits of a whole batch, which label_smoothing_factor and "
                "compute_loss_func need; leave one of them out"
            )
        try:
            self._chunked = ChunkedLoss(model, compile=compile)
        except ConfigError:
            if needed:
                raise
        else:
            tell(self._chunked.described)
        try:
            yield
        finally:
            if self._chunked is not None:
                self._chunked.close()
            self._chunked = None

    @property
    def takes_labels_out(self) -> bool:
        """The model does not get the labels: a loss function does."""
        return self._function is not None or self.smoothing > 0

    def call(self, batch: Any) -> Called:
        if isinstance(batch, Mapping):
            found = tuple(batch[name] for name in self.names if name in batch)
            labels = found if len(found) > 1 else found[0] if found else None
            hidden = self.names if self.takes_labels_out else ()
            return Called((), {str(name): value for name, value in batch.items() if name not in hidden}, labels)
        if isinstance(batch, list | tuple):
            if self.takes_labels_out and len(batch) > 1:
                return Called(tuple(batch[:-1]), {}, batch[-1])
            return Called(tuple(batch), {}, batch[-1] if len(batch) > 1 else None)
        return Called((batch,), {})

    def of(
        self, model: nn.Module, batch: Any, *, needed: bool = True, weight: float | HostReading | None = None
    ) -> tuple[Tensor | None, Any]:
        """Run the model: the loss and its outputs. The loss is None where there is none and it is not needed.

        `weight` is what the batch's labels count, where the caller knows. It is read when forward is under way.
        """
        called = self.call(batch)
        weight = self.counted(batch) if weight is None else weight
        if self._chunked is not None and model.training and called.labels is not None:
            with self._chunked.instead():
                outputs: Any = {"loss": found_loss(called.of(model))}  # its logits are none
        else:
            outputs = called.of(model)
        if isinstance(weight, HostReading):
            weight = weight.number()
        if self._function is not None and (called.labels is not None or needed):
            count = {"num_items_in_batch": weight} if self._takes_count else {}
            value: Tensor | None = self._function(outputs, called.labels, **count)
        elif self.smoothing > 0 and called.labels is not None:
            value = self._smoothed(outputs, called.labels)
        else:
            value = found_loss(outputs)
        if value is None and needed:
            raise ConfigError(_no_loss(model, outputs, batch))
        if value is not None and weight == 0:
            value = _nothing(outputs, value)  # the mean of no labels is 0/0, and would poison the step
        return value, outputs

    def counted(self, batch: Any) -> HostReading | None:
        """How many labels count, on its way to the host; None where samples do."""
        labels = self.call(batch).labels
        if isinstance(batch, Mapping):
            if isinstance(shifted := batch.get("shift_labels"), Tensor):
                return HostReading((shifted != IGNORED).sum())
            labels = batch.get("labels", labels)
        elif isinstance(batch, list | tuple) and len(batch) - 1 in self._not_labels:
            return None
        if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.is_complex() or labels.dim() == 0:
            return None
        if labels.dtype is torch.bool:
            return None
        if self._shifts and labels.dim() > 1:
            labels = labels[..., 1:]
        return HostReading((labels != IGNORED).sum())

    def _smoothed(self, outputs: Any, labels: Tensor) -> Tensor:
        logits = _first_prediction(outputs)
        if logits is None:
            raise ConfigError(
                f"label_smoothing_factor needs the model's logits, but it returned {_described(outputs)}; return them, "
                "or smooth the labels in compute_loss_func"
            )
        if labels.is_floating_point():
            raise ConfigError(
                "label_smoothing_factor spreads a label that is one class over all of them, but these labels are a "
                "number for each class; leave it out, or smooth them in compute_loss_func"
            )
        if self._shifts:
            logits, labels = logits[..., :-1, :], labels[..., 1:]
        return F.cross_entropy(
            logits.reshape(-1, logits.shape[-1]).float(),
            labels.reshape(-1),
            ignore_index=IGNORED,
            label_smoothing=self.smoothing,
        )


def found_loss(outputs: Any) -> Tensor | None:
    """The loss in what a model returned."""
    if isinstance(outputs, Tensor):
        return outputs.reshape(()) if outputs.numel() == 1 else None
    if isinstance(outputs, Mapping):
        value = outputs.get("loss")
    elif hasattr(outputs, "loss"):
        value = outputs.loss
    elif isinstance(outputs, list | tuple) and outputs:
        value = outputs[0]
    else:
        value = None
    return value.mean() if isinstance(value, Tensor) and (value.dim() == 0 or value.numel() == 1) else None


def predictions_of(outputs: Any, ignored: Sequence[str] = ()) -> Any:
    """What a model returned besides its loss; None if that was all. One thing alone is not wrapped."""
    if isinstance(outputs, Tensor):
        return None if outputs.dim() == 0 else outputs
    if isinstance(outputs, Mapping):
        rest = tuple(v for name, v in outputs.items() if name not in ("loss", *ignored) and v is not None)
    elif isinstance(outputs, list | tuple):
        rest = tuple(outputs[1:] if found_loss(outputs) is not None else outputs)
    elif isinstance(getattr(outputs, "logits", None), Tensor):
        rest = (outputs.logits,)
    else:
        rest = ()
    rest = tuple(part for part in rest if isinstance(part, Tensor | list | tuple | Mapping))
    return None if not rest else rest[0] if len(rest) == 1 else rest


def _first_prediction(outputs: Any) -> Tensor | None:
    found = predictions_of(outputs)
    first = found[0] if isinstance(found, tuple) else found
    return first if isinstance(first, Tensor) else None


def forward_of(model: nn.Module) -> Callable[..., Any]:
    """The forward that says which columns the model takes: that of the model inside, where adapters wrap one."""
    inner = getattr(model, "get_base_model", None)
    return (inner() if callable(inner) else model).forward


def label_names_of(model: nn.Module) -> list[str]:
    """The arguments of forward that are labels, by their names."""
    spans = ("start_positions", "end_positions") if "QuestionAnswering" in type(model).__name__ else ()
    return [name for name in inspect.signature(forward_of(model)).parameters if "label" in name or name in spans] or [
        "labels"
    ]


def inputs_of(model: nn.Module, labels: Sequence[str]) -> frozenset[int]:
    """Places of forward's arguments that are no labels by their names: masks, and where it has `labels` all others."""
    names = list(inspect.signature(forward_of(model)).parameters)
    named = not {*labels}.isdisjoint(names)
    return frozenset(
        place for place, name in enumerate(names) if name.endswith("mask") or (named and name not in labels)
    )


def shifts_labels(model: nn.Module) -> bool:
    """A causal language model of transformers compares each token with the label of the next one."""
    config = getattr(model, "config", None)
    if getattr(config, "is_encoder_decoder", False):
        return False
    kind = getattr(model, "loss_type", "")
    return kind in ("ForCausalLM", "ForConditionalGeneration") or (kind is None and "LMHead" in type(model).__name__)


def _nothing(outputs: Any, value: Tensor) -> Tensor:
    """A loss of 0 whose gradient is 0, so that a micro-batch without a label takes part all the same."""
    first = _first_prediction(outputs)
    return first.float().sum() * 0.0 if first is not None and first.is_floating_point() else value


def takes(function: Callable[..., Any], name: str) -> bool:
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False
    return name in parameters or any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())


def _no_loss(model: nn.Module, outputs: Any, batch: Any) -> str:
    given = f"the keys {', '.join(map(str, batch))}" if isinstance(batch, Mapping) else f"a {type(batch).__name__}"
    return (
        f"{type(model).__name__} returned {_described(outputs)}, in which there is no loss; it was given {given}. "
        "Return a loss, or something with .loss, or give the Trainer a compute_loss_func(outputs, labels)"
    )


def _described(outputs: Any) -> str:
    if isinstance(outputs, Tensor):
        return f"a tensor of shape {tuple(outputs.shape)}"
    if isinstance(outputs, Mapping):
        return f"a mapping with {', '.join(map(str, outputs))}"
    return f"a {type(outputs).__name__}"
