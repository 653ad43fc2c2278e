"""Parameter server, mode "aggregate": servers only add; every worker holds the weights and updates them itself.

weights full · gradients pushed · optimizer state full

synchronous     collect: CLOSE ─► the sum of all workers ─► .grad ─► clip, step(): as under ddp
BoundedDelay    the rounds of a group are summed one by one, and applied in order when the group ends:
                each with the learning rate and the clipping of its own round
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from paceline.checkpoint.load import whole_tree
from paceline.optim.gradient_norm import clip_coefficient, global_norm
from paceline.parameter_server.key_ranges import Key
from paceline.sharding.local_shard import LocalShard
from paceline.strategies.master_weights import load_exactly
from paceline.strategies.pushed_rounds import PushedRounds
from paceline.strategies.strategy import Tally


@dataclass
class _Waiting:
    """A round whose sum has not been applied yet, and how that is to be done."""

    round: int
    max_norm: float | None = None
    settings: Sequence[float] = ()
    steps: list[Callable[[], Any]] = field(default_factory=list)


class SumsOnServers(PushedRounds):
    def __init__(self, *parts: Any, **options: Any) -> None:
        super().__init__(*parts, **options)
        self._totals: list[Tensor] = []
        self._waiting: list[_Waiting] = []
        self._norm = math.nan
        self._newest: list[Tensor] | None = None  # while the model holds those that a group of rounds reads

    # -- one round ---------------------------------------------------------------------------------------------------

    def _start_reading(self) -> None:
        if self._clock.pulls_before(self._round):
            self._catch_up()
        if self._weights.remembered is not None:
            self._newest = self._weights.copies()
            self._weights.restore()
        self._stats.started_round()

    def collect(self, tally: Tally) -> None:
        round = self._round
        self._close(tally)
        if self._clock.synchronous:
            self._fetch(round)
        else:
            self._waiting.append(_Waiting(round))

    def _fetch(self, round: int) -> None:
        """`.grad` becomes the round's gradient."""
        self._make_room()
        self._totals = [sums.buffer() for sums in self._buckets.sums]

        def put(key: Key, total: Tensor) -> None:
            key.of_bucket(self._totals[key.bucket]).copy_(total)

        used = self._used_parameters(self._client.sums(round, put))
        for sums, total in zip(self._buckets.sums, self._totals, strict=True):
            sums.hand_out(total, [used[member.parameter] for member in sums.bucket.members])

    def _used_parameters(self, bits: dict[int, int]) -> list[bool]:
        used = [False] * len(self.parameters)
        for key in self._client.table.keys:
            for place, piece in enumerate(key.pieces):
                used[piece.parameter] |= bool(bits[key.number] >> place & 1)
        return used

    def clip(self, max_norm: float) -> float:
        if self._clock.synchronous:
            self._norm = self._clip_gradients(max_norm)
        else:
            self._waiting[-1].max_norm = max_norm
        return self._norm

    def _clip_gradients(self, max_norm: float) -> float:
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        norm = global_norm(gradients)
        if norm > max_norm or not math.isfinite(norm):
            torch._foreach_mul_(gradients, clip_coefficient(norm, max_norm))
        return norm

    def apply(self, optimizer: Optimizer, original_step: Callable[[], Any]) -> Any:
        if self._clock.synchronous:
            return original_step()
        optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers look for it to see that step() came first
        waiting = self._waiting[-1]
        waiting.steps.append(original_step)
        waiting.settings = self._settings.read()
        if self._clock.pulls_before(self._round) and len(waiting.steps) == len(self._optimizers):
            self._catch_up()
        return None

    def _catch_up(self) -> None:
        """Apply the rounds that wait, in order, to the weights after those before them."""
        if not self._waiting:
            return
        if self._newest is not None:
            self._weights.put_all(self._newest)
            self._newest = None
        now = self._settings.read()
        groups = dict(enumerate(group for optimizer in self._optimizers for group in optimizer.param_groups))
        for waiting in self._waiting:
            self._fetch(waiting.round)
            if waiting.max_norm is not None:
                self._norm = self._clip_gradients(waiting.max_norm)
            self._settings.put(waiting.settings, groups)
            for step in waiting.steps:
                step()
            self._let_go()
        self._settings.put(now, groups)
        self._waiting = []

    def end_step(self) -> None:
        super().end_step()
        self._let_go()

    def _let_go(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None
        for sums, total in zip(self._buckets.sums, self._totals, strict=bool(self._totals)):
            sums.give_back(total)
        self._totals = []

    # -- between rounds ----------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Inside a group the model shows what its first rounds made of the weights; the next gets those back."""
        if self._waiting and not self._clock.pulls_before(self._round):
            self._weights.keep()
        self._catch_up()

    def kept(self, parameter: Parameter) -> Tensor | LocalShard:
        self.settle()  # an elastic job keeps its state right after `apply`, which may have put the update off
        return super().kept(parameter)

    def kept_state(self, optimizer: Optimizer) -> dict[str, Any]:
        self.settle()
        return self._with_reads(optimizer.state_dict(), optimizer)

    def load(self, optimizer: Optimizer, state: dict[str, Any], *, round: int) -> None:
        state = whole_tree(state)
        reads = self._reads_of(optimizer, state, round)
        load_exactly(optimizer, state)
        self._client.have_been_heard()
        self._all_workers_are_here()
        if self._speaks_for_all:
            self._client.load(round, None, None)
        self._all_workers_are_here()
        self._waiting, self._newest, self._round = [], None, round
        self._weights.remember(reads)
        self._note_load(optimizer, state, round)
