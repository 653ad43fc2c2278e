"""A bucket under `powersgd`: two canonical sums of thin factors, one after the other.

    with the bucket       P_l = M_l Q of each lane ─► sum ─► orthonormal P          sent as a gradient of r·n elements
    when all have left    Q_l = M_lᵀ P of each lane ─► sum ─► Q                     sent as a gradient of r·m elements
                          the sum of the bucket is P Qᵀ; a lane keeps M_l - P Q_lᵀ

Factors are added as uncompressed buckets are, so a worker sends one sum of its lanes. Every worker makes the whole
product, also where it needs a range of it: a part of a product may have other bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoint.load import full_tree
from paceline.collectives.canonical_sum import SumPlan
from paceline.collectives.gradient_exchange import PendingSum
from paceline.compression import PowerSgd
from paceline.compression.power_sgd import first_factor, matrix_shape, orthonormal
from paceline.sharding.bucket import ALIGNED, BucketEntry, BucketShards
from paceline.strategies.buckets import LaneSums
from paceline.strategies.compressed.bucket import Exchanging, LaneTensors, State, Step, merged_states, part_of
from paceline.world.determinism import mix


class LowRankBucket:
    def __init__(
        self, number: int, sums: LaneSums, shards: BucketShards, powersgd: PowerSgd, shared: Exchanging
    ) -> None:
        self._number, self._sums, self._shared = number, sums, shared
        self._own = shards.ranges[shared.comm.rank]
        entries = sums.bucket.entries
        self._shapes = [matrix_shape(entry.shape) for entry in entries]
        self._left = _Factors([(powersgd.rank, rows) for rows, _ in self._shapes], sums)
        self._right = _Factors([(powersgd.rank, columns) for _, columns in self._shapes], sums)
        self._residuals = LaneTensors(sums, shared.lanes)
        seeds = [mix(shared.seed, "powersgd", shared.names[entry.parameter]) for entry in entries]
        self._q = self._right.buffer()  # where the next power iteration begins; all workers have it
        for q, seed in zip(self._right.of(self._q), seeds, strict=True):
            q.copy_(first_factor(q.shape[1], q.shape[0], seed))
        self._next_q: Tensor | None = None
        self._sets = shared.exchange.new_set(), shared.exchange.new_set()
        self._held: dict[int, Tensor] = {}  # by lane: gradient and residual
        self._step: Step | None = None
        self._pending: PendingSum | None = None
        self._p: Tensor | None = None
        self._q_of: dict[int, Tensor] = {}
        self._out: Tensor | None = None

    # -- one step ----------------------------------------------------------------------------------------------------

    def take(self, step: Step, lane: int, gradient: Tensor) -> None:
        if (residual := self._residuals.now.get(lane)) is not None:
            gradient.add_(residual)
        self._held[lane] = gradient

    def start(self, step: Step) -> None:
        self._step = step
        factors = {lane: self._left.buffer() for lane in self._held}
        for lane, held in self._held.items():
            for m, q, p in zip(
                self._matrices(held), self._right.of(self._q), self._left.of(factors[lane]), strict=True
            ):
                torch.mm(q, m.t(), out=p)
        self._pending = self._summed(self._sets[0], factors, self._left)

    def advance(self) -> None:
        """All workers know P: begin the sum of Q."""
        assert self._pending is not None
        total = self._pending.wait()
        self._p = self._left.buffer()
        for p, summed in zip(self._left.of(self._p), self._left.of(total), strict=True):
            p.copy_(orthonormal(summed))
        self._q_of = {lane: self._right.buffer() for lane in self._held}
        for lane, held in self._held.items():
            of_lane = self._right.of(self._q_of[lane])
            for m, p, q in zip(self._matrices(held), self._left.of(self._p), of_lane, strict=True):
                torch.mm(p, m, out=q)
        sent = {lane: q.clone() for lane, q in self._q_of.items()}  # sums are made in place
        self._pending = self._summed(self._sets[1], sent, self._right)

    def wait(self) -> Tensor:
        assert self._pending is not None
        assert self._p is not None
        self._next_q = self._right.buffer().copy_(self._pending.wait())
        self._pending = None
        self._out = self._sums.buffer()
        left = self._left.of(self._p)
        for out, p, q in zip(self._matrices(self._out), left, self._right.of(self._next_q), strict=True):
            torch.mm(p.t(), q, out=out)
        for lane, held in self._held.items():
            if self._shared.feedback:
                for m, p, q in zip(self._matrices(held), left, self._right.of(self._q_of[lane]), strict=True):
                    m.addmm_(p.t(), q, alpha=-1)
                self._residuals.stage(lane, held)
            else:
                self._sums.give_back(held)
        self._held, self._q_of, self._p = {}, {}, None
        return self._out if self._shared.whole else self._out[slice(*self._own)]

    def _summed(self, of: int, factors: dict[int, Tensor], kind: _Factors) -> PendingSum:
        """Merge what this worker can, and begin the sum of what is left."""
        assert self._step is not None
        plan: SumPlan = self._step.plan
        for lane in plan.holders[self._shared.comm.rank]:
            for merge in plan.merges_after[self._shared.comm.rank][lane]:
                factors[merge.left].add_(factors.pop(merge.right))
        return self._shared.exchange.start(of, self._number, plan, factors, kind.buffer)

    def commit(self, used: Sequence[bool]) -> None:
        self._residuals.commit(used)
        if self._next_q is not None:
            of_next, of_now = self._right.of(self._next_q), self._right.of(self._q)
            for entry, new, now in zip(self._sums.bucket.entries, of_next, of_now, strict=True):
                if used[entry.parameter]:
                    now.copy_(new)
            self._next_q = None

    def forget(self) -> None:
        for held in self._held.values():  # of a step that was not ended
            self._sums.give_back(held)
        self._residuals.forget()
        if self._out is not None and not self._shared.whole:
            self._sums.give_back(self._out)
        self._held, self._q_of, self._next_q, self._p, self._pending, self._out = {}, {}, None, None, None, None

    # -- its state ---------------------------------------------------------------------------------------------------

    def state(self, lanes: Sequence[int]) -> State:
        names, entries = self._shared.names, self._sums.bucket.entries
        residuals = self._residuals.state(lanes, names) if self._shared.feedback else {}
        q = {names[e.parameter]: factor for e, factor in zip(entries, self._right.of(self._q), strict=True)}
        return merged_states({"lanes": residuals, "q": q})

    def load(self, saved: Mapping[str, Mapping[str, Any]], lanes: Sequence[int]) -> None:
        names, entries = self._shared.names, self._sums.bucket.entries
        self._residuals.load([saved.get(names[e.parameter], {}).get("lanes") for e in entries], lanes)
        for entry, q in zip(entries, self._right.of(self._q), strict=True):
            factor = saved.get(names[entry.parameter], {}).get("q")
            if factor is not None:
                q.copy_(full_tree(factor))

    def _matrices(self, flat: Tensor) -> list[Tensor]:
        return [part_of(flat, entry).view(shape) for entry, shape in self._entries_and_shapes]

    @property
    def _entries_and_shapes(self) -> list[tuple[BucketEntry, tuple[int, int]]]:
        return list(zip(self._sums.bucket.entries, self._shapes, strict=True))


class _Factors:
    """A factor of each matrix in one flat tensor, where memory is aligned: elsewhere a product has other bits."""

    def __init__(self, shapes: Sequence[tuple[int, int]], sums: LaneSums) -> None:
        self._shapes, self._bucket = shapes, sums.bucket
        step = ALIGNED // self._bucket.dtype.itemsize
        self._starts = [0]
        for rows, columns in shapes:
            self._starts.append(self._starts[-1] + -(-rows * columns // step) * step)

    def buffer(self) -> Tensor:
        return torch.zeros(self._starts[-1], dtype=self._bucket.dtype, device=self._bucket.device)

    def of(self, flat: Tensor) -> list[Tensor]:
        return [
            flat[start : start + rows * columns].view(rows, columns)
            for start, (rows, columns) in zip(self._starts, self._shapes, strict=False)
        ]
