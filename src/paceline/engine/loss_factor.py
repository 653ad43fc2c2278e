"""A loss that is scaled by hand by what `engine.backward` counts by itself: told in a warning after two steps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from paceline.data.sharded_sampler import WorkItem
from paceline.torch_compat import saved_other
from paceline.world import messages

STEPS_OF_LOSSES = 2
"""That are looked at: a number that is the same in all their items is none of the batch's."""

MANY_LOSSES = 64
"""That are told apart in a sum."""

WORKERS = "the number of workers"

_COMBINES = frozenset(f"{name}Backward0" for name in ("Add", "Sub", "Mul", "Div", "Neg", "ToCopy"))
_SMALLEST = torch.zeros((), dtype=torch.int8)


class FactorOfLoss:
    """A loss that is scaled by what `engine.backward` counts by itself, as loops for other libraries have it.

        loss / 4          with accumulate=4: the mean over micro-batches is taken twice
        loss * workers    undoes a mean over workers that is not taken: on another number of them another gradient

    The graph of the loss tells the number. Most that are no such thing are known by what they scale:

        (a + b) / 2       the mean of so many losses            loss.sum() / 4    of samples, tokens, pixels
        mse_loss(…) / 2   half of a square                      loss / 2.0        a weight: counts are whole numbers

    So is one that is not the same in all items. A 2 is mostly something else: it is told of only where it divides and
    accumulate is 2, or multiplies and there are 2 workers.
    """

    def __init__(self, accumulate: int, lanes: int) -> None:
        self._accumulate, self._lanes = accumulate, lanes
        self._found: tuple[str, int, str] | None = None
        self._steps = 0

    def look(self, loss: Tensor, item: WorkItem, workers: int) -> bool:
        """Before the only backward of an item; whether to look at the next one's too."""
        found = self._factor(loss, item, workers)
        if found is None or self._found not in (None, found):
            return False
        self._found = found
        self._steps += item.last_of_step
        if self._steps == STEPS_OF_LOSSES:
            how, number, what = found
            wrong = f"{number} times too {'small' if how == 'divided' else 'large'}"
            if what == WORKERS:
                wrong = "another on another number of workers"
            messages.warn(
                f"the loss of every item is {how} by {number}, which is {what}: engine.backward() takes the mean over "
                f"micro-batches, lanes and workers by itself, and the gradient would be {wrong}. Give it the mean over "
                "the item's samples alone, or over its tokens with weight= their number; if the number is a weight of "
                "the loss, it is right as it is"
            )
        return self._steps < STEPS_OF_LOSSES

    def _factor(self, loss: Tensor, item: WorkItem, workers: int) -> tuple[str, int, str] | None:
        """Whether the loss was multiplied or divided, the last time or before it, by which number, and what that is."""
        node: Any = loss.grad_fn
        while node is not None and (number := _number_beside(node)) is not None:
            divides = node.name() == "DivBackward0"
            node = node.next_functions[0][0]
            what, of_batch = self._meaning(number, workers, divides), number in (item.samples, item.step_samples)
            if what is None or (_is_mean_of(node, number, of_batch=of_batch) if divides else of_batch):
                continue
            return "divided" if divides else "multiplied", number, what
        return None

    def _meaning(self, number: int, workers: int, divides: bool) -> str | None:
        if number == self._accumulate and number > (1 if divides else 2):
            return f"accumulate={number}"
        if number == workers and number > (2 if divides else 1):
            return WORKERS
        return "the number of lanes" if number == self._lanes and number > 2 and divides else None


def _number_beside(node: Any) -> int | None:
    """The whole number of Python's that this node of a graph multiplies by, or divides by."""
    other = saved_other(node) if node.name() in ("DivBackward0", "MulBackward0") else None
    if other is None or other.dim() or other.dtype != torch.int64 or other.device.type != "cpu":
        return None
    # A number of Python's has no say in the dtype of a result, as a tensor with that value has.
    return int(other) if torch.result_type(other, _SMALLEST) == torch.int8 else None


def _is_mean_of(node: Any, number: int, *, of_batch: bool) -> bool:
    """What is divided by `number` is a sum of that many losses or more, or over samples; or 2 halves a square.

    `of_batch`: the batch has so many samples, so what is not known to be their mean already may be their sum.
    """
    losses, rest = list[Any](), [node]
    while rest and len(losses) < MANY_LOSSES:
        one = rest.pop()
        if one is not None and one.name() in _COMBINES:
            rest += [function for function, _ in one.next_functions]
        elif one is not None:
            losses.append(one)
    if len(losses) >= min(number, MANY_LOSSES) or any(map(_is_sum, losses)):
        return True
    return (of_batch and not all(map(_is_mean, losses))) or (number == 2 and all(map(_is_square, losses)))


def _is_sum(node: Any) -> bool:
    named = any(kind in node.name() for kind in ("Sum", "Dot", "Norm"))
    return named or getattr(node, "_saved_reduction", None) == 2  # reduction="sum"


def _is_mean(node: Any) -> bool:
    return node.name() == "MeanBackward0" or getattr(node, "_saved_reduction", None) == 1


def _is_square(node: Any) -> bool:
    below = node.next_functions[0][0] if node.name() == "MeanBackward0" else None
    return node.name() == "MseLossBackward0" or (below is not None and below.name() == "PowBackward0")
