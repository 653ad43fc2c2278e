"""The loss of a language model's head without its logits: they are made some rows at a time, and never held whole.

    hidden states (tokens × width) ──► rows · weightᵀ ──► fp32 ──► loss of these rows, and its gradient, at once
                                       └ at most LOGITS_AT_ONCE numbers

A vocabulary of 128,000 and 8,192 tokens make 4 GiB of logits in fp32, and as much again for their gradient. Here
forward computes the gradients of the hidden states and of the weights, which are as large as these, and backward scales
them. How rows are cut follows from the vocabulary alone, so bits don't depend on the number of workers.

torch 2.13 has `linear_cross_entropy` for that; older versions that this library takes do not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from paceline.errors import ConfigError
from paceline.input_file import one_line

IGNORED = -100
LOGITS_AT_ONCE = (
    2**27
)  # numbers: 512 MiB in fp32. Half of it costs 4 % of a step on an H200, twice as much gains nothing
CHECKED_TOKENS = 16
CLOSE = 1e-4  # of the two losses: both round logits as the model does, and add them up in fp32


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = IGNORED,
    compile: bool = False,
) -> Tensor:
    """The mean of `cross_entropy(hidden @ weight.T + bias, targets)` over the targets that are not `ignore_index`.

    In fp32 where the tensors have less. Of no targets at all it is 0, and so are its gradients. With `compile`,
    torch.compile fuses the passes over the logits.
    """
    if targets.shape != hidden.shape[:-1]:
        raise ConfigError(
            f"linear_cross_entropy: targets of shape {tuple(targets.shape)} for hidden states of shape "
            f"{tuple(hidden.shape)}; there must be one for each of them"
        )
    if torch.is_autocast_enabled(hidden.device.type):
        hidden = hidden.to(torch.get_autocast_dtype(hidden.device.type))
    weight = weight.to(hidden.dtype)  # also of weights in shards: this gathers them
    bias = None if bias is None else bias.to(hidden.dtype)
    rows, goals = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
    loss = _compiled_loss_of_rows() if compile else _loss_of_rows
    total: Tensor = _SumOfLosses.apply(rows, weight, bias, goals, ignore_index, loss)  # type: ignore[no-untyped-call]
    return total / (goals != ignore_index).sum().clamp(min=1)


def _loss_of_rows(logits: Tensor, targets: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """The sum of their losses, in fp32 at least, and its gradient: softmax, less 1 at the target. Logits are lost."""
    counts = (targets != ignore_index)[:, None]
    goals = targets[:, None].where(counts, 0)
    exact = logits.to(torch.promote_types(logits.dtype, torch.float32))
    normaliser = exact.logsumexp(-1, keepdim=True)
    total = (normaliser - exact.gather(1, goals)).where(counts, 0.0).sum()
    at_target = torch.arange(logits.shape[1], device=logits.device) == goals
    gradient = exact.sub_(normaliser).exp_().add_(at_target, alpha=-1).mul_(counts)
    return total, gradient.to(logits.dtype)


@cache
def _compiled_loss_of_rows() -> Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]:
    return torch.compile(_loss_of_rows, dynamic=False)


class _SumOfLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, ignore_index: int, loss: Any
    ) -> Tensor:
        exact = torch.promote_types(hidden.dtype, torch.float32)
        of_hidden, of_weight, of_bias = (
            torch.zeros_like(x, dtype=dtype) if x is not None and needed else None
            for x, dtype, needed in zip(
                (hidden, weight, bias), (hidden.dtype, exact, exact), ctx.needs_input_grad, strict=False
            )
        )
        total = torch.zeros((), dtype=exact, device=hidden.device)
        at_once = _rows_at_once(weight.shape[0])
        with torch.autocast(hidden.device.type, enabled=False):
            for start in range(0, hidden.shape[0], at_once):
                rows = hidden[start : start + at_once]
                logits = F.linear(rows, weight, bias)
                of_these = loss if len(rows) == at_once else _loss_of_rows  # code for one shape, not for each rest
                of_rows, gradient = of_these(logits, targets[start : start + at_once], ignore_index)
                total += of_rows
                if of_bias is not None:
                    of_bias += gradient.sum(0, dtype=exact)
                if of_hidden is not None:
                    torch.mm(gradient, weight, out=of_hidden[start : start + at_once])
                if of_weight is not None:
                    of_weight += gradient.T @ rows
        ctx.gradients = of_hidden, of_weight, of_bias
        ctx.dtypes = hidden.dtype, weight.dtype, None if bias is None else bias.dtype
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        scaled = [
            None if gradient is None else (gradient * scale.to(gradient.dtype)).to(dtype)
            for gradient, dtype in zip(ctx.gradients, ctx.dtypes, strict=True)
        ]
        del ctx.gradients
        return (*scaled, None, None, None)


def _rows_at_once(vocabulary: int) -> int:
    """A power of two, which divides the tokens of most batches."""
    return 1 << max(0, (LOGITS_AT_ONCE // vocabulary).bit_length() - 1)


class ChunkedLoss:
    """Of a causal language model of transformers: while `instead` is open, its head hands hidden states through, and
    its loss function is `linear_cross_entropy`."""

    def __init__(self, model: nn.Module, *, compile: bool = False) -> None:
        self._model, self._head, self._compile = _inner(model), _head_of(model), False
        self._open = False
        self._own_forward, self._own_loss = self._head.forward, self._model.loss_function
        self._was = self._head.__dict__.get("forward")  # the engine may have put one there
        self._head.__dict__["forward"] = self._forward
        self._model.loss_function = self._loss
        try:
            self._check(model)
        except BaseException:
            self.close()
            raise
        self._compile = compile

    @contextmanager
    def instead(self) -> Iterator[None]:
        self._open = True
        try:
            yield
        finally:
            self._open = False

    @property
    def described(self) -> str:
        rows, name = _rows_at_once(self._head.out_features), type(self._model).__name__
        return f"paceline: {name} has its loss made of {rows:,} rows of logits at a time (chunked_loss)"

    def close(self) -> None:
        if self._was is None:
            del self._head.__dict__["forward"]
        else:
            self._head.__dict__["forward"] = self._was
        self._model.loss_function = self._own_loss

    def _forward(self, hidden: Tensor) -> Tensor:
        return hidden if self._open else self._own_forward(hidden)

    def _loss(self, logits: Tensor, labels: Any, *args: Any, shift_labels: Any = None, **named: Any) -> Any:
        if not self._open:
            shifted = {} if shift_labels is None else {"shift_labels": shift_labels}
            return self._own_loss(logits, labels, *args, **shifted, **named)
        if shift_labels is None:
            shift_labels = F.pad(labels, (0, 1), value=IGNORED)[..., 1:]
        head, goals = self._head, shift_labels.to(logits.device)
        return linear_cross_entropy(logits, head.weight, goals, bias=head.bias, compile=self._compile)

    def _check(self, model: nn.Module) -> None:
        """With a few tokens, that it is the loss that the model itself gives: some change their logits further on."""
        name = type(self._model).__name__
        if any(parameter.is_meta for parameter in model.parameters()):
            raise ConfigError(
                f"chunked_loss=True is tried on the model before it trains, and {name} has no weights yet (device meta)"
            )
        device = self._head.weight.device
        tokens = torch.arange(CHECKED_TOKENS, device=device)[None] * 7 % self._head.out_features
        was_training = model.training
        model.eval()
        try:
            with (
                torch.no_grad(),
                torch.compiler.set_stance("force_eager"),
            ):  # no code for a shape that never comes again
                own = model(input_ids=tokens, labels=tokens).loss.item()
                with self.instead():
                    ours = model(input_ids=tokens, labels=tokens).loss.item()
        except (TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise ConfigError(
                f"chunked_loss=True is tried on {name} with {CHECKED_TOKENS} tokens before it trains, and that fails: "
                f"{one_line(str(error), 200)}"
            ) from error
        finally:
            model.train(was_training)
        if not abs(own - ours) <= CLOSE * abs(own):
            raise ConfigError(
                f"chunked_loss=True: {name}'s own loss of {CHECKED_TOKENS} tokens is {own:.6g}, and that of its head "
                f"alone {ours:.6g}: it does more with its logits; leave chunked_loss out"
            )


def _inner(model: nn.Module) -> Any:
    """The model itself, where adapters wrap it."""
    base = getattr(model, "get_base_model", None)
    return base() if callable(base) else model


def _head_of(model: nn.Module) -> nn.Linear:
    inner = _inner(model)
    find = getattr(inner, "get_output_embeddings", None)
    head = find() if callable(find) else None
    if type(head) is not nn.Linear or not isinstance(getattr(type(inner), "loss_function", None), property):
        raise ConfigError(
            f"chunked_loss=True is for a causal language model of transformers with a linear head, and "
            f"{type(inner).__name__} is none; with a loss of one's own, paceline.linear_cross_entropy does it"
        )
    return head
