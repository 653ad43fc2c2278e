"""Parameter server, mode "update": weights and optimizer state live on servers; workers push, and read by the clock.

    weights on servers, cached here · gradients pushed · optimizer state on servers

    collect ─► clip ─► apply: CLOSE ─► servers update ─► weights ─► the model, when the next round starts

Under a synchronous clock `step()` returns when the new weights are here, as under any other synchronous strategy. Under
others it does not wait: the loop goes on while pushes and weights are on their way, as far as the clock allows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from paceline.optim.piece_state import State
from paceline.parameter_server.key_state import states_of_keys, whole_states
from paceline.parameter_server.model_weights import ModelWeights
from paceline.strategies.pushed_rounds import PushedRounds
from paceline.strategies.strategy import Tally


class UpdatesOnServers(PushedRounds):
    def __init__(self, *parts: Any, **options: Any) -> None:
        super().__init__(*parts, **options)
        self._weights = ModelWeights(self.parameters)
        self._tally: Tally | None = None
        self._max_norm: float | None = None
        self._waited_s = 0.0
        self._shown = 0  # the round whose weights the model holds
        self._loaded: dict[int, list[State]] = {}

    # -- one round ---------------------------------------------------------------------------------------------------

    def _start_reading(self) -> None:
        self._weights.restore()
        self._read_next()
        self._stats.started_round(self._waited_s)
        self._waited_s = 0.0

    def _read_next(self) -> None:
        self._waited_s += self._client.start(self._round, self._weights.put)
        self._shown = self._round

    def collect(self, tally: Tally) -> None:
        self._tally, self._max_norm = tally, None
        if tally.empty:
            self._end_round()

    def clip(self, max_norm: float) -> float:
        """The servers find the norm and clip by it; the one returned is the last that they told."""
        self._max_norm = max_norm
        return self._client.norm

    def apply(self, optimizer: Optimizer, original_step: Callable[[], Any]) -> Any:
        optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers look for it to see that step() came first
        if self._all_have_acted(optimizer):
            self._end_round()

    def _tally_of_round(self) -> Tally:
        assert self._tally is not None
        return self._tally

    def _end_round(self) -> None:
        self._close(self._tally_of_round(), max_norm=self._max_norm, settings=self._settings.read())
        self._client.ask(self._round)
        if self._clock.synchronous:
            self._read_next()

    # -- between rounds ----------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Inside a group of rounds that read the same weights, those have to come back for the next of them."""
        if self._shown == self._round:
            return
        if self._clock.pulls_before(self._round):
            self._read_next()
        else:
            self._weights.keep()
            self._client.newest(self._round, self._weights.put)
            self._shown = self._round

    def state_of(self, optimizer: Optimizer) -> dict[str, Any]:
        saved: dict[str, Any] = optimizer.state_dict()
        if not self._speaks_for_all:
            return saved
        wholes = whole_states(self._client.table, self._client.states(self._round), self.parameters)
        state_of = {id(parameter): state for parameter, state in zip(self.parameters, wholes, strict=True)}
        members = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        found = {place: state_of.get(id(parameter), {}) for place, parameter in enumerate(members)}
        return {**saved, "state": {place: state for place, state in found.items() if state}}

    def load(self, optimizer: Optimizer, state: dict[str, Any], *, round: int) -> None:
        if self._log is not None:
            self._log.check_not_begun()
        self.settle()
        self._load_own(optimizer, state)
        self._loaded[id(optimizer)] = self._per_parameter(optimizer, state)
        self._all_workers_are_here()
        if self._speaks_for_all:
            merged = [
                next((states[place] for states in self._loaded.values() if states[place]), {})
                for place in range(len(self.parameters))
            ]
            self._client.load(round, self.parameters, states_of_keys(self._client.table, merged))
        self._all_workers_are_here()
        self._client.begin_at(round)
        self._weights.forget()
        self._round = self._shown = round

    def _per_parameter(self, optimizer: Optimizer, state: dict[str, Any]) -> list[State]:
        members = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        found = {id(parameter): state["state"].get(place, {}) for place, parameter in enumerate(members)}
        return [found.get(id(parameter), {}) for parameter in self.parameters]
