"""Which gradients an update needs: one strategy for each set of optimizers that act together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch.optim import Optimizer

from paceline.collectives.communicator import Communicator
from paceline.collectives.gradient_exchange import GradientExchange
from paceline.engine.config import EngineConfig
from paceline.strategies.ddp import Ddp


class StrategyTable:
    """A loop with one update has one strategy; a GAN's has one for each of its optimizers."""

    def __init__(self, config: EngineConfig, comm: Communicator | None, names: Mapping[int, str]) -> None:
        self._config, self._comm, self._names = config, comm, names
        self._exchange = GradientExchange(comm, config.reduction, config.algorithm)
        self._known: dict[tuple[int, ...], Ddp] = {}

    def of(self, optimizers: Sequence[Optimizer]) -> tuple[Ddp, bool]:
        """Their strategy, and whether it was made anew: they hold other parameters now (unfrozen, a new group)."""
        unique = {id(p): p for o in optimizers for group in o.param_groups for p in group["params"] if p.requires_grad}
        key = tuple(id(optimizer) for optimizer in optimizers)
        known = self._known.get(key)
        if known is not None:
            if len(known.parameters) == len(unique) and all(id(p) in unique for p in known.parameters):
                return known, False
            known.close()
        named = [(self._names.get(index, f"unnamed {place}"), p) for place, (index, p) in enumerate(unique.items())]
        self._known[key] = Ddp(
            named,
            self._comm,
            self._exchange,
            bucket_bytes=int(self._config.bucket_mib * 2**20),
            overlap=self._config.overlap,
        )
        return self._known[key], known is not None

    def close(self) -> None:
        for strategy in self._known.values():
            strategy.close()
        self._exchange.close()


def drop_gradients_of_others(active: Ddp, optimizers: Sequence[Optimizer]) -> None:
    """A loss may reach parameters of an optimizer that is not being updated; those gradients are nobody's."""
    if len(optimizers) < 2:
        return
    mine = {id(parameter) for parameter in active.parameters}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in mine:
                    parameter.grad = None
