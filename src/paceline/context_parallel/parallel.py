"""Context parallelism of a model: one object for a group of workers, which train on one sequence together.

cp = ContextParallel(group)                 the group of the workers that share sequences; any backend of torch
cp.attach(model)                            its attention is over the group from now on (`routing`)
cp.check(model, batch)                      on a few tokens: the model split is the model whole
part, count = cp.shard(batch)               this worker's tokens, and how many targets it has (`sequence_split`)
loss = count.finite(model(**part).loss)     gradients of loss · count.weight(1) add up over the group to those of
                                            one process
cp.mean(loss, count), cp.join(logits)       the loss of the whole batch, and its logits in the order of the sequence
cp.close()
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.context_parallel.group_attention import attention
from paceline.context_parallel.routing import TorchAttention, TransformersAttention, outermost_of_transformers
from paceline.context_parallel.sequence_split import (
    Labels,
    SequenceSplit,
    TargetCount,
    length_of,
    shard_batch,
)
from paceline.errors import ConfigError
from paceline.world import messages

CHECKED = 4  # tokens of each chunk that `check` looks at


@dataclass(frozen=True)
class Checked:
    """How far a split model is from the whole one, relative to the largest value; and how far without the routes."""

    error: float
    without_routes: float


class ContextParallel:
    """A group of workers that share sequences, and the models whose attention is over it."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        """None: torch's default group."""
        self._group = group
        self.split = SequenceSplit(dist.get_world_size(group), dist.get_rank(group))
        self.calls = 0  # of attention over the group
        self._routes: list[TorchAttention | TransformersAttention] = []
        self._hooks: list[Any] = []
        self._paused = False

    def attach(self, model: nn.Module) -> None:
        """Before the model is compiled; every forward of it has to attend over the group at least once."""
        if self.split.size == 1:
            return
        known = outermost_of_transformers(model)
        self._routes += [TransformersAttention(one, self._attend) for one in known]
        if not known:
            self._routes.append(TorchAttention(model, self._attend))
        before: dict[str, int] = {}
        self._hooks += [
            model.register_forward_pre_hook(lambda *_: before.update(calls=self.calls)),
            model.register_forward_hook(lambda module, *_: self._check_routed(module, before)),
        ]

    def close(self) -> None:
        """Models are what they were."""
        for hook in self._hooks:
            hook.remove()
        for route in reversed(self._routes):
            route.close()
        self._hooks, self._routes = [], []

    def shard(self, batch: Any, labels: Labels = "next_token") -> tuple[Any, TargetCount]:
        """This worker's part of a batch that all workers of the group have whole."""
        return shard_batch(batch, self.split, labels)

    def check(
        self,
        model: nn.Module,
        batch: Any,
        *,
        labels: Labels = "next_token",
        run: Callable[[Any], Any] | None = None,
    ) -> Checked | None:
        """Run the first few tokens whole, as without context parallelism, and split; refuse a model that differs.

        A model may leave the routes, ignore the positions it is given or mix tokens by other means than attention (a
        convolution, a mean): nothing of that stops, but its numbers are wrong. All workers of the group call this
        together. `run` calls the model with a batch, if not by `model(**batch)`.
        """
        if self.split.size == 1:
            return None
        run = _calling(model, batch) if run is None else run
        named = batch if isinstance(batch, Mapping) else dict(enumerate(batch))
        length = 2 * self.split.size * min(CHECKED, self.split.chunk_length(length_of(named)))
        part, count = self.shard(_first_tokens(batch, length), labels)
        whole = _with_positions(_without_mask(_first_tokens(batch, length)), length)
        with _evaluating(model), torch.no_grad(), torch.random.fork_rng():
            with self._unrouted():
                expected, wrong = _tensors(run(whole)), _tensors(run(part))
            found = _tensors(run(part))
        error, without = self._distance(expected, found, count), self._distance(expected, wrong, count)
        if error is None or without is None:
            raise ConfigError(
                f"context parallel: {type(model).__name__} returned nothing to compare "
                f"({', '.join(expected) or 'no tensor'}): it takes a scalar loss, or a tensor whose dimension 1 is the "
                "sequence; give check(run=…) that returns one"
            )
        tolerance = max(_tolerance(value) for value in found.values())
        if not error <= tolerance or (without > tolerance / 10 and error > without / 2):  # NaN is no agreement
            raise ConfigError(
                f"context parallel: {type(model).__name__} gives other values for a split sequence than for a whole "
                f"one (off by {error:.1e}; {without:.1e} if no attention is over the group): it must use position_ids, "
                "and mix tokens by F.scaled_dot_product_attention or transformers' attention functions alone"
            )
        if without <= tolerance / 10:
            messages.warn(
                "context parallel: tokens have no visible effect on others in this model as it is now, so it could not "
                "be checked that its attention is over the group (are its output projections zero?)"
            )
        return Checked(error, without)

    # -- what the group has found ------------------------------------------------------------------------------------

    def join(self, part: Tensor) -> Tensor:
        """Values of each token, of all workers' tokens in the order of the sequence, which is dimension 1."""
        return self.split.join(self._gather(part), 1)

    def mean(self, value: Tensor, count: TargetCount) -> Tensor:
        """A mean over this worker's targets becomes that over the batch's, the same bits on all workers."""
        if not count.total:  # a mean over nothing, on all of them
            return value
        first, *others = self._gather(count.finite(value).double() * count.weight(1.0))
        total = first.clone()
        for other in others:
            total += other
        return total.to(value.dtype) if value.is_floating_point() else total

    # -- parts -------------------------------------------------------------------------------------------------------

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, *, causal: bool, scale: float | None) -> Tensor:
        self.calls += 1
        return attention(query, key, value, group=self._group, split=self.split, causal=causal, scale=scale)

    def _check_routed(self, model: nn.Module, before: dict[str, int]) -> None:
        if before["calls"] == self.calls and not self._paused:
            raise ConfigError(
                f"context parallel: a forward of {type(model).__name__} had no attention over the group, so tokens see "
                "those of their own worker alone; its attention must be F.scaled_dot_product_attention or one of "
                "transformers' attention functions, called inside the model"
            )

    @contextmanager
    def _unrouted(self) -> Iterator[None]:
        self._paused = True
        try:
            with ExitStack() as stack:
                for route in self._routes:
                    stack.enter_context(route.paused())
                yield
        finally:
            self._paused = False

    def _distance(self, whole: dict[str, Tensor], parts: dict[str, Tensor], count: TargetCount) -> float | None:
        """The largest of all outputs'; None if there is nothing to compare. The same on all workers."""
        found = []
        for name, expected in whole.items():
            part = parts[name]
            if expected.dim() >= 2 and part.shape[1] * self.split.size == expected.shape[1]:
                joined = self.join(part)
            elif expected.numel() == 1 and count.total:  # without a target it is NaN, here and there
                joined = self.mean(part, count)
            else:
                continue
            scale = expected.double().abs().max().clamp_min(torch.finfo(torch.float32).tiny)
            found.append(float((joined.double() - expected.double()).abs().max() / scale))
        return max(found, default=None)

    def _gather(self, part: Tensor) -> list[Tensor]:
        gathered = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(self.split.size)]
        dist.all_gather(gathered, part.contiguous(), group=self._group)
        return gathered


def _first_tokens(batch: Any, length: int) -> Any:
    """Of one sequence."""
    if isinstance(batch, Mapping):
        return {name: _first_tokens(value, length) for name, value in batch.items()}
    if isinstance(batch, tuple | list):
        return type(batch)(_first_tokens(value, length) for value in batch)
    if isinstance(batch, Tensor) and batch.dim() >= 2:
        return batch[:1, :length]
    return batch


def _with_positions(batch: Any, length: int) -> Any:
    if not isinstance(batch, Mapping) or "position_ids" in batch:
        return batch
    device = next((value.device for value in batch.values() if isinstance(value, Tensor)), None)
    return {**batch, "position_ids": torch.arange(length, device=device)[None]}


def _without_mask(batch: Any) -> Any:
    """As its parts are: what padding sees is another thing without a mask, and counts for nothing."""
    if not isinstance(batch, Mapping):
        return batch
    return {name: value for name, value in batch.items() if name != "attention_mask"}


def _calling(model: nn.Module, batch: Any) -> Callable[[Any], Any]:
    if not isinstance(batch, Mapping):
        raise ConfigError("context parallel: check() of a batch that is no mapping needs run=…, which calls the model")
    return lambda given: model(**given)


def _tensors(outputs: Any) -> dict[str, Tensor]:
    """Those that a model returned, and that can be compared."""
    if isinstance(outputs, Tensor):
        outputs = {"output": outputs}
    elif isinstance(outputs, tuple | list):
        outputs = {f"output {place}": value for place, value in enumerate(outputs)}
    elif not isinstance(outputs, Mapping):
        outputs = getattr(outputs, "__dict__", {})
    return {
        str(name): value.detach()
        for name, value in outputs.items()
        if isinstance(value, Tensor) and value.is_floating_point()
    }


def _tolerance(value: Tensor) -> float:
    return 1e-4 if value.dtype in (torch.float32, torch.float64) else 3e-2


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    before = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in before:
            module.training = training
