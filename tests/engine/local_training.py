"""A strategy for tests: every worker trains alone on its own lanes, and agrees with the others as it is told to.

    LocalTraining()                  no round agrees; at a boundary everybody takes worker 0's weights
    LocalTraining(agree_every=3)     rounds 2, 5, 8 … agree, those before them later

It writes down every call of the loop, so that tests can read the protocol from it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset

from paceline import Engine
from paceline.collectives.canonical_sum import SumPlan
from paceline.sharding.bucket import plan_buckets
from paceline.strategies.buckets import GradientBuckets
from paceline.strategies.registry import Job, Maker, Registered, register
from paceline.strategies.strategy import Agreement, ItemPlace, StrategyBase, Tally


@dataclass(frozen=True)
class LocalTraining:
    agree_every: int = 0
    watched: bool = False


class Strategy(StrategyBase):
    def __init__(self, config: LocalTraining, job: Job, named: Sequence[tuple[str, Parameter]]) -> None:
        self._config, self._comm = config, job.comm
        self._buckets = GradientBuckets(
            named,
            worker=job.world.rank,
            cut=lambda specs, order: plan_buckets(specs, order, job.bucket_bytes),
            leave=self._left,
            by_lane=True,
            rebuilds=False,
        )
        self.parameters = self._buckets.parameters
        self.replicas = self.parameters if config.watched else []
        self.left_during_backward = 0
        self.calls: list[tuple[Any, ...]] = []

    def said(self, name: str) -> list[Any]:
        """What the calls of that name were given."""
        return [call[1] if len(call) == 2 else call[1:] for call in self.calls if call[0] == name]

    def agreement(self, round: int) -> Agreement:
        every = self._config.agree_every
        if every == 0:
            return Agreement.NEVER
        return Agreement.NOW if round % every == every - 1 else Agreement.LATER

    def start_step(self, round: int, plan: SumPlan) -> None:
        self.calls.append(("start_step", round))
        self._gradients: list[list[Tensor]] = [[] for _ in self._buckets.sums]
        self._buckets.start_step(plan)

    def start_backward(self, place: ItemPlace, *, last: bool) -> None:
        self.calls.append(("start_backward", place.lane, place.weight))
        self._place = place
        self._buckets.start_backward(place, last=last)

    def finish_backward(self, place: ItemPlace) -> None:
        self._buckets.finish_backward(place)

    def skip(self, place: ItemPlace) -> None:
        self._place = place
        self._buckets.skip(place)

    def _left(self, number: int, nodes: dict[int, Tensor]) -> None:
        self._gradients[number] += [] if self._place.left_out else nodes.values()

    def used(self) -> Sequence[bool]:
        return self._buckets.used

    def collect(self, tally: Tally) -> None:
        self.calls.append(("collect", tally))
        for sums, gradients in zip(self._buckets.sums, self._gradients, strict=True):
            total = torch.stack(gradients).sum(0) if gradients else sums.buffer().zero_()
            sums.hand_out(total * tally.scale, self._buckets.used)

    def clip(self, max_norm: float) -> float:
        self.calls.append(("clip", max_norm))
        return 7.0

    def apply(self, optimizer: Optimizer, original_step: Callable[[], Any]) -> Any:
        self.calls.append(("apply", optimizer))
        return None if self.said("collect")[-1].left_out else original_step()

    def end_step(self) -> None:
        self.calls.append(("end_step",))
        for parameter in self.parameters:
            parameter.grad = None

    def drain(self) -> None:
        self.calls.append(("drain",))
        if self._comm is not None:
            for parameter in self.parameters:
                self._comm.broadcast(parameter.data, root=0).wait()

    def local_state(self, optimizer: Optimizer) -> dict[str, Any]:
        self.calls.append(("state_of", optimizer))
        return optimizer.state_dict()

    def load(self, optimizer: Optimizer, state: dict[str, Any], *, round: int) -> None:
        self.calls.append(("load", optimizer, round))
        optimizer.load_state_dict(state)

    def close(self) -> None:
        self._buckets.close()


class LocalMaker(Maker):
    def __init__(self, config: LocalTraining, job: Job) -> None:
        self._config, self._job = config, job

    def make(self, named: Sequence[tuple[str, Parameter]], optimizers: Sequence[Optimizer]) -> Strategy:
        return Strategy(self._config, self._job, named)

    def close(self) -> None:
        pass


register(Registered("local_training", LocalTraining, LocalMaker, bits_of_one_process=lambda config: False))


def strategy_of(engine: Engine) -> Strategy:
    assert engine._objects.step is not None
    found = engine._objects.step.strategy()
    assert isinstance(found, Strategy)
    return found


# -- a model whose buffer tells which items it has seen, whatever its weights are --------------------------------------


class Remembers(nn.Module):
    """`seen` doubles and adds the item's first sample: its value is the history of a lane, as a binary number."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen.mul_(100).add_(x[0, 0])
        out: Tensor = self.layer(x)
        return out


def remembering(engine: Engine, *, steps: int, lanes: int = 3) -> Any:
    """Samples 1, 2, 3 … in order, one for each lane and step."""
    model = Remembers()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    data = TensorDataset(torch.arange(1.0, steps * lanes + 1).view(-1, 1))
    return engine.prepare(model, optimizer, DataLoader(data, batch_size=1))
