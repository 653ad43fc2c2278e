"""Looking ahead: a server answers with the weights as they will be when the gradient made of them comes back.

    version      5    6    7    8                       read at 5, the gradient comes back at 8: a delay of 3 updates
    weights      ●────●────●────●────●
                 └─ ─ ─ ─ ─ ─ ─ ─ ─ ─○   5 + reach × (what update 5 changed),   reach = μ + μ² + μ³ + μ⁴

With momentum μ the next update repeats μ times the last one, whatever gradient comes, so most of the way is known in
advance; without momentum nothing is, and nothing is looked ahead. How far: over the delay that this worker's pushes
have had lately, in updates, and the update that its gradient will be part of. That is Nesterov's momentum with a delay
(for late gradients see SpecTrain, Chen et al. 2018, and DANA, Hakimi et al. 2019); pushes that are not late see the
weights as they are, as in synchronous training.

All of it follows from the updates of the key up to the version that is read, so a replay finds the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

SMOOTHING = 1 / 8  # of a worker's delays: about its last eight pushes count


class LookAhead:
    """Of one key: what the last update changed, and how late each worker's pushes come."""

    def __init__(self, change: Tensor | None = None, delays: Mapping[int, float] | None = None, momentum: float = 0):
        self._change, self._momentum = change, momentum
        self._delays = dict(delays or {})

    def came_back(self, worker: int, updates: int) -> None:
        """A push of the worker arrives so many updates after its weights were read."""
        before = self._delays.get(worker, float(updates))
        self._delays[worker] = before + (updates - before) * SMOOTHING

    def before(self, weights: Tensor) -> None:
        """They are about to be updated."""
        self._change = weights.clone() if self._change is None else self._change.copy_(weights)

    def after(self, weights: Tensor, momentum: float | None) -> None:
        assert self._change is not None
        torch.sub(weights, self._change, out=self._change)
        self._momentum = momentum or 0.0

    def forget(self) -> None:
        """Other weights were loaded."""
        self._change = None
        self._delays.clear()

    def reach(self, worker: int) -> float:
        """How many times the last change is to be added: μ + μ² + … over the delay and one more."""
        delay, momentum = self._delays.get(worker, 0.0), self._momentum
        if not 0 < momentum < 1:
            return 0.0
        kept: float = momentum ** (delay + 1)
        return min(1.0, delay) * momentum * (1 - kept) / (1 - momentum)

    def seen_by(self, worker: int, weights: Tensor) -> Tensor:
        """What the worker reads; a tensor of its own."""
        reach = self.reach(worker)
        return weights.clone() if self._change is None or reach == 0 else weights.add(self._change, alpha=reach)

    def copy(self) -> LookAhead:
        return LookAhead(None if self._change is None else self._change.clone(), self._delays, self._momentum)
