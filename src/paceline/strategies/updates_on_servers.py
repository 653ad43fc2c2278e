"""Parameter server, mode "update": weights and optimizer state live on servers; workers push, and read by the clock.

    weights on servers, cached here · gradients pushed · optimizer state on servers

    collect ─► clip ─► apply: CLOSE ─► servers update ─► weights ─► the model, when the next round starts

Under a synchronous clock `step()` returns when the new weights are here, as under any other synchronous strategy. Under
others it does not wait: the loop goes on while pushes and weights are on their way, as far as the clock allows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from paceline.checkpoint.load import whole_tree
from paceline.errors import LoopError
from paceline.optim.piece_state import State
from paceline.parameter_server.key_state import sliced_states, states_of_keys
from paceline.sharding.local_shard import LocalShard, all_here
from paceline.strategies.buckets import GradientPlaceholder
from paceline.strategies.pushed_rounds import PushedRounds, by_parameter, by_place
from paceline.strategies.strategy import Tally


class UpdatesOnServers(PushedRounds):
    def __init__(self, *parts: Any, **options: Any) -> None:
        super().__init__(*parts, **options)
        self._tally: Tally | None = None
        self._max_norm: float | None = None
        self._waited_s = 0.0
        self._shown = 0  # the round whose weights the model holds
        self._seen = self._weights.versions()
        self._placeholders = [_not_here(name, parameter) for name, parameter in self._space.named]
        self._loaded: dict[int, list[State]] = {}
        self._asked: tuple[int, list[State]] = -1, []  # a round, and the optimizer's state before it

    # -- one round ---------------------------------------------------------------------------------------------------

    def _start_reading(self) -> None:
        self._take_over_changes()
        self._weights.restore()
        self._read_next()
        self._stats.started_round(self._waited_s)
        self._waited_s = 0.0

    def _read_next(self) -> None:
        self._waited_s += self._client.start(self._round, self._weights.put)
        self._shown, self._seen = self._round, self._weights.versions()

    def _take_over_changes(self) -> None:
        """Before the first round the script may still change weights: what the model holds is what is trained."""
        if self._weights.versions() == self._seen:
            return
        if self._ever_opened:
            raise LoopError(
                "the weights were changed between two steps, but the servers hold them and did not hear of it; change "
                "weights before the first step, or train with ParameterServer(mode='aggregate')"
            )
        self._hand_over(self._round, None)

    def collect(self, tally: Tally) -> None:
        self._tally, self._max_norm = tally, None
        for parameter, placeholder, used in zip(self.parameters, self._placeholders, tally.used, strict=True):
            parameter.grad = placeholder if used and not tally.empty else None
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
            self._shown, self._seen = self._round, self._weights.versions()

    def kept(self, parameter: Parameter) -> Tensor | LocalShard:
        self._settle_alone()
        return super().kept(parameter)

    def _settle_alone(self) -> None:
        """An elastic job keeps its state right after `apply`: the model then has to have what that made of it."""
        if self._clock.deterministic:
            self.settle()

    def kept_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """One worker asks the servers for all of it; one that is the server need not ask, nor copy anything."""
        saved: dict[str, Any] = optimizer.state_dict()
        if not self._speaks_for_all:
            return {**saved, "state": {}}
        self._settle_alone()
        states = self._states_now()
        found = by_place(optimizer, self.parameters, states)
        held = self._with_reads({**saved, "state": {p: state for p, state in found.items() if state}}, optimizer)
        whole: dict[str, Any] = all_here(held)
        return whole

    def _states_now(self) -> list[State]:
        """An elastic job asks once in a round, and may want the answer again when the group is over."""
        round, known = self._asked
        if round != self._round:
            known = sliced_states(self._client.table, self._client.states(self._round), self.parameters)
            self._asked = (self._round, known) if self._elastic else (-1, [])
        return known

    def load(self, optimizer: Optimizer, state: dict[str, Any], *, round: int) -> None:
        if self._log is not None:
            self._log.check_not_begun()
        state = whole_tree(state)
        reads = self._reads_of(optimizer, state, round)
        optimizer.load_state_dict({**state, "state": {}})  # settings for the next rounds; the rest lives elsewhere
        nothing: list[State] = [{}] * len(self.parameters)
        self._loaded[id(optimizer)] = by_parameter(optimizer, self.parameters, state["state"], otherwise=nothing)
        merged: list[State] = [next(filter(None, states), {}) for states in zip(*self._loaded.values(), strict=True)]
        self._hand_over(round, merged)
        self._weights.remember(reads)
        self._note_load(optimizer, state, round)

    def _hand_over(self, round: int, states: Sequence[State] | None) -> None:
        """The servers go on with `round`, from the model's weights and, unless it is None, from these states."""
        self._client.have_been_heard()
        self._all_workers_are_here()
        if self._speaks_for_all:
            by_key = None if states is None else states_of_keys(self._client.table, states)
            self._client.load(round, self.parameters, by_key)
        self._all_workers_are_here()
        self._client.begin_at(round)
        self._asked = (-1, [])
        self._round = self._shown = round
        self._seen = self._weights.versions()


def _not_here(name: str, parameter: Parameter) -> GradientPlaceholder:
    made = GradientPlaceholder.of(parameter, name, "parameter_server")
    made.message = (
        f"the gradient of {name!r} is not here: under strategy='parameter_server' servers add and apply it, and .grad "
        "has none of it. To clip, use engine.clip_grad_norm_(max_norm); to look at gradients, use "
        "ParameterServer(mode='aggregate')"
    )
    return made
