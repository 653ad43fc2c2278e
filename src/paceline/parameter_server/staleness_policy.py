"""What a late push is worth: a gradient computed τ rounds ago may step less far, remember less, or be thrown away.

    delay τ                                  0      1      2      4      9
    in rounds: learning rate × 1/max(1, τ)   1      1    1/2    1/4    1/9      "divide by delay"
               drop_beyond=4                                         dropped
    in updates: what asynchrony adds         0    0.5   0.67    0.8    0.9      1 - 1/(τ+1)
               what is left of μ = 0.9     0.9    0.8    0.7    0.5      0      "corrected": max(0, 1 - (1-μ)(τ+1))

The learning rate: a gradient from weights that are τ rounds old is a step in a direction that τ other rounds have taken
already; dividing by τ bounds what they add up to (staleness-aware asynchronous SGD, Zhang et al. 2015).

Momentum: applying gradients late mixes old directions into new ones, as momentum does. With a mean delay of τ updates
(each multiplies by μ once more) it acts like a momentum of 1 - 1/(τ+1) besides the optimizer's (Mitliagkas et al.
2016). The two combine as (1-μ_total) = (1-μ_explicit)/(τ+1); to keep the total at the μ that was tuned synchronously,
the optimizer's own must shrink. From τ+1 ≥ 1/(1-μ) on asynchrony alone has as much momentum as was wanted; the rest is
0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from paceline.errors import ConfigError

LearningRate = Literal["as given", "divide by delay"]
Momentum = Literal["as given", "corrected"]


@dataclass(frozen=True)
class Outcome:
    """What the policy made of one push; the log keeps it, so that replay need not decide again."""

    delay: int = 0
    lr_factor: float = 1.0
    momentum: float | None = None  # None: as given, or the optimizer has none
    dropped: bool = False
    updates: int = 0  # since the weights were read; `delay` is the rounds that they make


@dataclass(frozen=True)
class StalenessPolicy:
    """How pushes are applied by their delay; the default applies all of them alike."""

    learning_rate: LearningRate = "as given"
    momentum: Momentum = "as given"
    drop_beyond: int | None = None  # rounds; None: nothing is dropped
    look_ahead: bool = True  # where the optimizer has momentum: see server_key.py

    def __post_init__(self) -> None:
        _check_choice("learning_rate", self.learning_rate, get_args(LearningRate))
        _check_choice("momentum", self.momentum, get_args(Momentum))
        bound = self.drop_beyond
        if bound is not None and (not isinstance(bound, int) or isinstance(bound, bool) or bound < 0):
            raise ConfigError(
                f"StalenessPolicy(drop_beyond={bound!r}): pushes are dropped beyond a whole number of rounds, from 0, "
                "or never (None)"
            )

    def of(self, delay: int, momentum: float | None = None, updates: int = 0) -> Outcome:
        """What happens to a push with this delay, under an optimizer with this momentum (Adam's: its first beta)."""
        if self.drop_beyond is not None and delay > self.drop_beyond:
            return Outcome(delay, dropped=True, updates=updates)
        corrected = None if momentum is None or self.momentum == "as given" else corrected_momentum(momentum, updates)
        factor = 1.0 if self.learning_rate == "as given" else lr_factor(delay)
        return Outcome(delay, factor, corrected, updates=updates)

    def __str__(self) -> str:
        parts = []
        if self.learning_rate == "divide by delay":
            parts.append("learning rate divided by the delay")
        if self.momentum == "corrected":
            parts.append("momentum corrected")
        if self.drop_beyond is not None:
            parts.append(f"dropped beyond {self.drop_beyond} round{'' if self.drop_beyond == 1 else 's'}")
        if not self.look_ahead:
            parts.append("weights not looked ahead")
        return ", ".join(parts) or "as given"


def lr_factor(delay: int) -> float:
    return 1.0 / max(1, delay)


def corrected_momentum(momentum: float, delay: float) -> float:
    """The explicit momentum that keeps the total at `momentum` when gradients come `delay` late."""
    return max(0.0, 1.0 - (1.0 - momentum) * (delay + 1)) if delay else momentum


def delay_in_rounds(version_now: int, version_read: int, updates_per_round: int) -> int:
    """How late a push is: the updates of its key since the weights were read, in rounds begun.

    In updates and not in round numbers, because under a large bound the slowest worker has the lowest round and the
    oldest weights. With workers of equal speed the others push once each meanwhile: a delay of 1.
    """
    return -((version_read - version_now) // updates_per_round)


def _check_choice(name: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        choices = " or ".join(repr(choice) for choice in known)
        raise ConfigError(f"StalenessPolicy({name}={value!r}) is not known; choose {choices}")
