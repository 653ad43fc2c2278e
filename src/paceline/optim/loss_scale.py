"""Loss scaling: fp16's smallest numbers are too large for many gradients, so the loss is multiplied before backward.

    loss ─×65536─► backward ─► sums over all lanes ─÷65536─► clip ─► update
                                       │
                     not finite        └─► no worker updates, the scale is halved     a gradient was too large for fp16
                     2000 good steps   └─► the scale is doubled                        smaller gradients count again

A gradient that is not finite in one lane makes the sum so, and with it the decision of all workers. Powers of two
change no bit of a gradient that fits. When the scale can't get smaller, a gradient that is not finite is like such a
loss: with on_nonfinite="stop" training ends, otherwise the step is left out. Such a gradient is never applied.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from paceline.errors import ConfigError, NonFiniteLossError
from paceline.optim.precision import Precision
from paceline.world import messages
from paceline.world.checked_values import number, whole_number

OnNonFinite = Literal["stop", "skip", "continue"]


@dataclass(frozen=True)
class LossScale:
    """How the scale starts and moves. `LossScale.static(1024)` does not move."""

    initial: float = 2.0**16
    growth: float = 2.0
    growth_every: int | None = 2000  # good steps in a row; None: it never grows
    backoff: float = 0.5
    smallest: float = 1.0
    largest: float = 2.0**24

    def __post_init__(self) -> None:
        def check(ok: bool, text: str) -> None:
            if not ok:
                raise ConfigError(f"LossScale: {text}")

        for name in ("initial", "growth", "backoff", "smallest", "largest"):
            number(f"LossScale: {name}", getattr(self, name))
        if self.growth_every is not None:
            why = "give 1 or more, or None for a scale that never grows"
            whole_number("LossScale: growth_every", self.growth_every, least=1, why=why)

        check(self.initial > 0, f"initial={self.initial} is no number to multiply by")
        check(self.growth > 1, f"growth={self.growth} would not grow; give more than 1")
        check(0 < self.backoff < 1, f"backoff={self.backoff} would not back off; give something between 0 and 1")
        check(
            0 < self.smallest <= self.initial <= self.largest < math.inf,
            f"initial={self.initial} is not between smallest={self.smallest} and largest={self.largest}",
        )

    @classmethod
    def static(cls, scale: float) -> LossScale:
        return cls(initial=scale, growth_every=None, smallest=scale, largest=scale)

    @property
    def is_static(self) -> bool:
        return self.growth_every is None and self.smallest == self.initial

    def __str__(self) -> str:
        if self.is_static:
            return f"{self.initial:g}"
        grows = "" if self.growth_every is None else f", ×{self.growth:g} after {self.growth_every} good steps"
        return f"from {self.initial:g}{grows}, ×{self.backoff:g} on overflow, {self.smallest:g} to {self.largest:g}"


def loss_scale_of(given: LossScale | float | None, precision: Precision) -> LossScale | None:
    """What Engine(loss_scale=…) means: a number stays as it is; by default fp16 has a scale that moves."""
    if given is not None and not isinstance(given, LossScale):
        number("loss_scale", given, above=0)
    if precision.parameters != "fp16":
        if given is not None:
            raise ConfigError(
                f"loss_scale={given} with precision={str(precision)!r}: its gradients have the range of fp32, there is "
                "nothing to scale; leave loss_scale out, or choose precision='fp16'"
            )
        return None
    if given is None:
        return LossScale()
    return given if isinstance(given, LossScale) else LossScale.static(float(given))


class MovingScale:
    """The scale as it is now: the same on every worker, because all of them hear the same about every step."""

    def __init__(self, rule: LossScale) -> None:
        self.rule = rule
        self.value = rule.initial
        self.good_steps = 0  # since it last moved

    def drops(self, finite: bool, on_nonfinite: OnNonFinite, step: int) -> bool:
        """Move on after a gradient; whether no worker may apply it."""
        if finite:
            self._grow()
            return False
        self.good_steps = 0
        if self.value > self.rule.smallest:
            self.value = max(self.rule.smallest, self.value * self.rule.backoff)
            return True
        what = f"the gradient of step {step + 1} is not finite with a loss scale of {self.value:g}, the smallest"
        if on_nonfinite == "stop":
            raise NonFiniteLossError(
                f"{what}; training stops before the weights are touched. Clip gradients or lower the learning rate, "
                "train with precision='bf16', or leave such steps out with on_nonfinite='skip'"
            )
        messages.warn(f"{what}; the step is skipped")
        return True

    def _grow(self) -> None:
        self.good_steps += 1
        if self.rule.growth_every is not None and self.good_steps >= self.rule.growth_every:
            self.value = min(self.rule.largest, self.value * self.rule.growth)
            self.good_steps = 0

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value, "good_steps": self.good_steps}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.value, self.good_steps = float(state["value"]), int(state["good_steps"])
