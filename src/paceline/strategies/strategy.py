"""A strategy says *when* tensors move. The loop calls it at the same points whatever it does there.

agreement(round)             whether the workers exchange votes in this round (the table below)
start_step(round, plan)
  start_lane(lane)           only where lanes are apart, before a lane's first forward: the model holds its weights
  start_backward(item)       in each engine.backward of the item; gradients of the lane so far are put back
    (hooks)                  a gradient is final: its bucket may leave
  finish_backward(item)      after its last one: the lane's gradients are put away, `.grad` is None again
  skip(item)                 in its place, where the body left the item without a last backward
used()                       after the worker's last item, for its vote: which parameters got a gradient here
collect(tally)               the step's gradient is where `apply` wants it
keeps_finite()               where the loss is scaled: whether all that was collected is finite
clip(max_norm)               if the loop asks for it
keep_residuals()             before the commit of a step that is applied: compression keeps what it left out
apply(optimizer, step)       who runs the update: the optimizer here, one on a shard, or a server
end_step()
drain()                      at a boundary: updates under way are in, the model holds the newest weights

A *round* is a step of the loop, those left out included; `round` is how many came before it in the job, so it counts
from 0. In which rounds the workers exchange their votes is the strategy's choice:

    agreement   votes        step, means, stop        buffers such as BatchNorm's
    NOW         exchanged    of all workers           the lowest lane's become all workers'
    LATER       none         of this worker alone     put back: rounds up to the next agreed one start from the same
    NEVER       none         of this worker alone     each lane goes on from its own; boundaries see lane 0's

Where lanes are apart (`lanes_apart`) each has weights and buffers of its own from one agreed round to the next, a loss
that is not finite takes its lane out alone, and in agreed rounds and at boundaries the model gets lane 0's buffers.

In a LATER or NEVER round the `Tally` holds this worker's own lanes alone: a strategy that adds up the rounds of a
window (the servers do) has to add up their weights too. One update for several micro-batches is `Engine(accumulate=k)`.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from paceline.collectives.byte_count import Traffic
from paceline.collectives.canonical_sum import SumPlan
from paceline.sharding.local_shard import LocalShard
from paceline.torch_compat import version_of


class Agreement(enum.Enum):
    """Whether the workers exchange votes in a round before its gradient is applied."""

    NOW = "in this round"
    LATER = "in a later round, which ends a window of several"
    NEVER = "not at all"


@dataclass(frozen=True)
class ItemPlace:
    """Where in the step an item stands, as far as moving gradients is concerned."""

    lane: int
    last_of_lane: bool
    last_of_step: bool
    shadow: bool
    weight: float = 0.0  # of the lane's micro-batches so far, this one included: samples or tokens
    left_out: bool = False  # where lanes are apart: the lane's loss was not finite, nothing of it may be used
    samples: int = 0  # in the lane's micro-batches so far, this one included
    loss_scale: float = 1.0  # that gradients are multiplied by


@dataclass(frozen=True)
class Tally:
    """What the votes add up to: those of all workers where they agreed, otherwise this worker's own."""

    agreed: bool
    weights: tuple[tuple[int, float], ...]  # (lane, weight), in lane order
    samples: int  # of the round, in the lanes of all workers; backward divides by it
    used: Sequence[bool]  # per parameter
    scale: float = 1.0  # turns the sum of the counted lanes' gradients into their weighted mean; 0: none counts
    empty: bool = False  # all workers leave this round out: no `apply` follows
    left_out: bool = False  # a loss was not finite, and such steps are skipped; lanes that are apart have weight 0
    loss_scale: float = 1.0  # that gradients are multiplied by; `scale` divides by it


class Strategy(Protocol):
    """What the loop needs of every strategy. One instance serves a set of parameters that are updated together."""

    @property
    def parameters(self) -> Sequence[Parameter]: ...

    @property
    def replicas(self) -> Sequence[Parameter]:
        """Those that all workers hold whole and alike whenever they agree; they are watched for drift."""
        ...

    @property
    def frozen(self) -> Sequence[Parameter]:
        """Those that are not trained and of which the model holds a part."""
        ...

    @property
    def left_during_backward(self) -> int:
        """Buckets of this step that left while backward ran."""
        ...

    @property
    def first_left(self) -> float:
        """When the first bucket left the last backward, by `time.perf_counter`; 0: none did."""
        ...

    @property
    def left_at(self) -> Sequence[float]:
        """When each bucket of this step left, likewise; of a bucket that leaves lane by lane, with the last lane."""
        ...

    @property
    def lane_checks(self) -> Mapping[int, int] | None:
        """By lane, a sum over the bits of its gradient, of a step in which lanes are watched; None: they are not."""
        ...

    @property
    def lanes_apart(self) -> bool:
        """Between two agreed rounds lanes have weights of their own, and so buffers. Those that never agree are too.

        It drives the step (engine/step.py) and what is saved of buffers (engine/state.py). `Registered.lanes_apart`
        tells the memory check the same before there is a strategy.
        """
        ...

    @property
    def traffic(self) -> Traffic:
        """What it has moved so far over groups of its own, beside the workers' communicator."""
        ...

    def watch_lanes(self, wanted: bool) -> None:
        """Find `lane_checks` in the step that comes, to compare them with those that another worker finds."""
        ...

    def agreement(self, round: int) -> Agreement:
        """The same on every worker, and known before the round starts."""
        ...

    def start_step(self, round: int, plan: SumPlan) -> None:
        """Weights that the round may read are in the model when this returns."""
        ...

    def start_lane(self, lane: int) -> None:
        """The lane's first item of the round is handed out. Called only in rounds in which lanes are apart: by
        `lanes_apart`, or where workers never agree."""
        ...

    def start_backward(self, place: ItemPlace, *, last: bool) -> None: ...

    def finish_backward(self, place: ItemPlace) -> None: ...

    def skip(self, place: ItemPlace) -> None:
        """The loop left this item without a backward."""
        ...

    def used(self) -> Sequence[bool]:
        """Which parameters got a gradient on this worker in this step."""
        ...

    def collect(self, tally: Tally) -> None: ...

    def keeps_finite(self) -> bool:
        """Whether all that was collected is finite; if not, all workers drop it. Asked where the loss is scaled."""
        ...

    def clip(self, max_norm: float) -> float | Tensor:
        """Clip what was collected by its global norm and return that; if it is found elsewhere, the last one known.

        On a GPU it is a tensor there, which is ready when the device has come to it."""
        ...

    def apply(self, optimizer: Optimizer, original_step: Callable[[], Any]) -> Any:
        """The update of one optimizer; called for each that steps, in every round that was not left out by all."""
        ...

    def end_step(self) -> None: ...

    def drain(self) -> None:
        """All workers are at a boundary: evaluation, hash, saving, the end of the loop. May be called again and again.

        What the next round reads is still decided by its `start_step`.
        """
        ...

    def local_shard(self, parameter: Parameter) -> Tensor | LocalShard:
        """What this worker can save of its newest weights, after `drain`: all, as all workers can, or its shard."""
        ...

    def local_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The same of the optimizer: its state_dict with local shards where the state is sharded, or without it."""
        ...

    def load(self, optimizer: Optimizer, state: dict[str, Any], *, round: int) -> None:
        """Take over a saved state and go on with `round`; the model has got its weights. All workers call it.

        Tensors of the state may be on the disk, to be read as far as they are needed here.
        """
        ...

    def full_tensor(self, parameter: Parameter) -> Tensor:
        """All of its newest weights, as precise as they are kept; after `drain`, by all workers in the same order."""
        ...

    def load_full(self, parameter: Parameter, full: Tensor) -> None:
        """Make these its weights wherever they are kept; all workers do so, with the same."""
        ...

    def keep_residuals(self) -> None:
        """The step is about to count, and to be applied: what compression keeps is that of the next step."""
        ...

    def compression_state(self, lanes: Sequence[int]) -> dict[str, Any]:
        """What compression keeps between steps, as far as this worker has it; its lanes are these."""
        ...

    def load_compression(self, saved: Mapping[str, Any], lanes: Sequence[int]) -> None:
        """Take such a state over, of any number of workers."""
        ...

    def close(self) -> None: ...


class TensorPeers:
    """The workers that have the other parts of sharded parameters: none, without tensor parallelism."""

    def counts(self, parameter: Parameter) -> bool:
        """Whether this worker's values of it belong into a sum over all of them."""
        return True

    def gathered(self, norms: Tensor) -> Tensor:
        """The norms of all of them, of as many blocks each."""
        return norms

    def all_true(self, here: bool) -> bool:
        return here


class StrategyBase:
    """The base of all strategies: a parameter's own values are all there is, and nothing is watched."""

    frozen: Sequence[Parameter] = ()
    lanes_apart = False

    @property
    def traffic(self) -> Traffic:
        return Traffic()

    @property
    def first_left(self) -> float:
        return 0.0

    @property
    def left_at(self) -> Sequence[float]:
        return ()

    @property
    def lane_checks(self) -> Mapping[int, int] | None:
        return None

    def watch_lanes(self, wanted: bool) -> None:
        """Not for strategies whose lanes can't be computed again by another worker."""

    def keep_residuals(self) -> None:
        """Nothing is compressed."""

    def compression_state(self, lanes: Sequence[int]) -> dict[str, Any]:
        return {}

    def load_compression(self, saved: Mapping[str, Any], lanes: Sequence[int]) -> None:
        """Nothing is compressed."""

    def start_lane(self, lane: int) -> None:
        """All lanes read the same weights."""

    def keeps_finite(self) -> bool:
        raise NotImplementedError("asked only where models compute in low precision, which this strategy does not take")

    def full_tensor(self, parameter: Parameter) -> Tensor:
        return parameter.detach()

    def local_shard(self, parameter: Parameter) -> Tensor | LocalShard:
        return self.full_tensor(parameter)

    def load_full(self, parameter: Parameter, full: Tensor) -> None:
        with torch.no_grad():
            parameter.copy_(full)


class WriteWatch:
    """Sees that something else than its owner wrote to parameters: by version counters, and if wanted by addresses."""

    def __init__(self, *, addresses: bool = False) -> None:
        self._addresses = addresses
        self._clean: dict[int, tuple[int, int]] = {}  # by id: version and address when they were last right

    def mark_clean(self, parameters: Iterable[Parameter]) -> None:
        """What was written so far was meant to be."""
        for parameter in parameters:
            self._clean[id(parameter)] = version_of(parameter), parameter.data_ptr() if self._addresses else 0

    def was_written(self, parameter: Parameter) -> bool:
        """In place; also one that was never marked."""
        return id(parameter) not in self._clean or self._clean[id(parameter)][0] != version_of(parameter)

    def was_moved(self, parameter: Parameter) -> bool:
        """Other memory was put in place of its own, as by `parameter.data = …`."""
        return self._clean[id(parameter)][1] != parameter.data_ptr()

    def first_changed(self, parameters: Iterable[Parameter]) -> Parameter | None:
        """One that was written or moved."""
        for parameter in parameters:
            if (version_of(parameter), parameter.data_ptr()) != self._clean[id(parameter)]:
                return parameter
        return None
