"""One optimizer on many lanes: each lane has weights and a state of its own, swapped in by reference.

    between steps     parameter.data ──► outer weights, the same on every worker       optimizer.state ──► lane 0's
    an item of lane 2 parameter.data ──► lane 2's weights
    step() of lane 2  parameter.data ──► lane 2's weights, .grad ──► its gradient       optimizer.state ──► lane 2's

A *window* is what lanes do apart: it opens with a step, in which every lane begins with a copy of the outer weights,
and is closed when the lanes have met. A lane's optimizer state stays its own from one window to the next. What an
optimizer changes in its groups' settings (Prodigy its `d`) is the lane's too; what a scheduler sets is for all lanes.

Parameters may be in several *fragments*, neighbours of about the same number of elements, whose windows end one after
another.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from paceline.checkpoint.load import full_tree
from paceline.collectives.communicator import Handle
from paceline.errors import LoopError
from paceline.optim.group_settings import numbers_of, set_numbers
from paceline.optim.piece_state import like
from paceline.sharding.local_shard import LocalShard, all_here
from paceline.strategies.buckets import LaneSums
from paceline.strategies.ddp import Pending
from paceline.strategies.master_weights import load_exactly
from paceline.strategies.strategy import WriteWatch

Settings = list[dict[str, Any]]  # by group

LANES, START, OUTER = "lanes", "start", "outer"  # in a saved state, beside the optimizer's own entries


@dataclass(frozen=True)
class Meeting:
    """Lanes that have begun to meet in a fragment: what they have moved is on its way, and how much each counts."""

    round: int
    fragment: int
    parameters: Sequence[Parameter]
    weights: Tensor  # by worker and lane
    weighed: Handle
    sums: Sequence[tuple[LaneSums, Pending]]

    def arrive(self) -> list[Tensor]:
        """By bucket, the sum of what the lanes have moved, each times its weight."""
        self.weighed.wait()
        return [pending.wait() for _, pending in self.sums]

    def hand_out(self) -> float:
        """Make these the parameters' gradients; the sum of all weights comes back."""
        used = [True] * len(self.parameters)
        for (sums, _), total in zip(self.sums, self.arrive(), strict=True):
            sums.hand_out(total, used)
        return math.fsum(self.weights.view(-1).tolist())


class LaneOptimizer:
    """`lanes` are this worker's; `outer_optimizer` holds the same parameters."""

    def __init__(
        self,
        optimizer: Optimizer,
        lanes: Sequence[int],
        outer_optimizer: Optimizer,
        strategy: str,
        fragments: int = 1,
    ) -> None:
        self.optimizer, self.lanes, self.outer_optimizer = optimizer, tuple(lanes), outer_optimizer
        self.outer: dict[Parameter, Tensor] = {}  # of windows that are open: what lanes went apart from
        self.trained: list[dict[int, float]] = [{} for _ in range(fragments)]  # by lane: its samples in this window
        self.meeting: Meeting | None = None  # that has begun, and is to end in this step
        self.is_previewed = False  # the model shows what lanes would give if they met now
        self._strategy = strategy
        self._weights: dict[int, dict[Parameter, Tensor]] = {}
        self._states: dict[int, Any] = {}
        self._settings: dict[int, Settings] = {}
        self._numbers: dict[int, dict[str, float]] = {}  # likewise by lane: attributes in which the optimizer counts
        self._first = self._shown = optimizer.state  # what a lane begins with; what the optimizer shows between steps
        self._watch = WriteWatch()
        self._guard = optimizer.register_state_dict_pre_hook(self._refuse)
        self._reading = False

    @property
    def parameters(self) -> list[Parameter]:
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    @property
    def weights_held(self) -> list[Tensor]:
        """Beside what the parameters show."""
        return [*self.outer.values(), *(tensor for own in self._weights.values() for tensor in own.values())]

    @property
    def states(self) -> list[Any]:
        """Of this worker's lanes, as far as they have their own."""
        return list(self._states.values())

    @property
    def in_window(self) -> bool:
        return bool(self.outer)

    def members(self, fragment: int) -> list[Parameter]:
        """Those of its parameters that lanes have apart."""
        found, of = [], fragments_of(self.parameters, len(self.trained))
        for parameter, number in zip(self.parameters, of, strict=True):
            if number == fragment and parameter in self.outer:
                found.append(parameter)
        return found

    # -- weights -----------------------------------------------------------------------------------------------------

    def open_window(self) -> None:
        """A step begins: from here on what is trained is apart. All workers do so, whatever lanes they have."""
        if self.in_window and (found := next(filter(self._watch.was_written, self.outer), None)) is not None:
            raise LoopError(
                f"weights of shape {tuple(found.shape)} were changed between two steps that belong to one window of "
                f"strategy={self._strategy!r}: lanes have weights of their own there, which did not hear of it. Change "
                "them before the first step, or after one in which the lanes have met"
            )
        for parameter in self.parameters:
            if parameter.requires_grad and parameter not in self.outer:
                self.outer[parameter] = parameter.data
                self._watch.mark_clean([parameter])
        self.is_previewed = False

    def show(self, lane: int) -> None:
        """Let the parameters be the lane's."""
        own = self._weights.setdefault(lane, {})
        for parameter, outer in self.outer.items():
            if parameter not in own:
                own[parameter] = outer.clone(memory_format=torch.preserve_format)
            parameter.data = own[parameter]

    def show_outer(self) -> None:
        for parameter, outer in self.outer.items():
            parameter.data = outer
        self.mark_clean()

    def show_preview(self) -> None:
        """Let the parameters be copies of the outer weights, for an outer step that is not kept."""
        for parameter, outer in self.outer.items():
            parameter.data = outer.clone(memory_format=torch.preserve_format)
        self.is_previewed = True

    def mark_clean(self) -> None:
        self._watch.mark_clean(self.outer)

    def weights_of(self, lane: int, parameter: Parameter) -> Tensor | None:
        """None: the lane has not trained in this window."""
        return self._weights.get(lane, {}).get(parameter)

    def forget_meeting(self) -> None:
        """The lanes stay apart; what is on its way arrives, and is not used."""
        if self.meeting is not None:
            self.meeting.arrive()
        self.meeting = None

    def close_window(self, fragment: int) -> None:
        """The lanes have met, and the fragment's parameters hold what they agreed on."""
        for parameter in self.members(fragment):
            del self.outer[parameter]
            for own in self._weights.values():
                own.pop(parameter, None)
        self.trained[fragment].clear()
        self.meeting = None
        self.is_previewed = False

    def begin_again(self, fragment: int) -> None:
        """The same inside a step: the lanes begin another window of the fragment, in the memory that they have."""
        members = self.members(fragment)
        with torch.no_grad():
            for own in self._weights.values():
                for parameter in members:
                    if parameter in own:
                        own[parameter].copy_(self.outer[parameter])
        self._watch.mark_clean(members)
        self.trained[fragment].clear()
        self.meeting = None

    def go_on_together(self) -> None:
        """All lanes have made the same step: its weights are the outer ones."""
        with torch.no_grad():
            for parameter, weights in self._weights[self.lanes[0]].items():
                self.outer[parameter].copy_(weights)
        self.show_outer()
        self.close_windows()

    def close_windows(self) -> None:
        for fragment in range(len(self.trained)):
            self.close_window(fragment)

    # -- a lane's step -----------------------------------------------------------------------------------------------

    def step(self, lane: int, gradients: Mapping[Parameter, Tensor], original_step: Callable[[], Any]) -> Any:
        self.show(lane)
        for parameter in self.outer:
            parameter.grad = gradients.get(parameter)
        try:
            with self._settings_of(lane), self._numbers_of(lane), self._state_of(lane):
                return original_step()
        finally:
            for parameter in self.outer:
                parameter.grad = None

    def count(self, lane: int, weight: float) -> None:
        """The lane has made a step on samples of this weight."""
        for trained in self.trained:
            trained[lane] = trained.get(lane, 0.0) + weight

    @contextmanager
    def _state_of(self, lane: int) -> Iterator[None]:
        self._take_over_loaded()
        if lane not in self._states:
            self._states[lane] = copied_state(self._first)
        self.optimizer.state = self._states[lane]
        try:
            yield
        finally:
            self._states[lane] = self.optimizer.state
            self._shown = self.optimizer.state = self._states.get(self.lanes[0], self._first)

    def _take_over_loaded(self) -> None:
        """The script has loaded a state into its optimizer: every lane goes on from it."""
        if self.optimizer.state is not self._shown:
            self._first = self._shown = self.optimizer.state
            self._states.clear()
            self._settings.clear()
            self._numbers.clear()

    @contextmanager
    def _numbers_of(self, lane: int) -> Iterator[None]:
        common = numbers_of(self.optimizer)
        set_numbers(self.optimizer, {**common, **self._numbers.get(lane, {})})
        try:
            yield
        finally:
            now = numbers_of(self.optimizer)
            self._numbers[lane] = {name: value for name, value in now.items() if common.get(name) != value}
            set_numbers(self.optimizer, common)

    @contextmanager
    def _settings_of(self, lane: int) -> Iterator[None]:
        """With what the optimizer has changed in this lane's earlier steps; afterwards the groups are as they were."""
        groups = self.optimizer.param_groups
        common = [dict(group) for group in groups]
        own = self._settings.get(lane) or [{} for _ in groups]
        for group, mine in zip(groups, own, strict=False):
            group.update(mine)
        before = [dict(group) for group in groups]
        try:
            yield
        finally:
            names = [
                {*mine, *(name for name in group if not _same(group[name], was.get(name, _same)))}
                for group, was, mine in zip(groups, before, [*own, *({} for _ in groups[len(own) :])], strict=True)
            ]
            self._settings[lane] = [
                {name: group[name] for name in sorted(changed)} for group, changed in zip(groups, names, strict=True)
            ]
            for group, was in zip(groups, common, strict=True):
                for name in [name for name in group if name not in was]:
                    del group[name]
                group.update(was)

    # -- saved and loaded --------------------------------------------------------------------------------------------

    def local_state(self) -> dict[str, Any]:
        """The optimizer's state_dict, which has lane 0's state, and beside it those of all lanes.

        What lanes have is with the worker that holds them; what they went apart from, all have.
        """
        self._take_over_loaded()
        lanes: dict[int, dict[str, Any]] = {}
        for lane in self.lanes:
            weights = self._weights.get(lane, {})
            lanes[lane] = {
                "state": all_here(self._packed(self._states.get(lane, self._first))),
                "settings": self._settings.get(lane, []),
                "numbers": self._numbers.get(lane, {}),
                "weights": {place: LocalShard.all_here(weights[p]) for place, p in self._placed() if p in weights},
                "trained": [trained.get(lane, 0.0) for trained in self.trained],
            }
        saved: dict[str, Any] = {
            "state": lanes[0]["state"] if 0 in lanes else {},
            "param_groups": self._state_dict()["param_groups"],
            LANES: lanes,
            OUTER: self.outer_optimizer.state_dict()["state"],
        }
        if self.in_window:
            saved[START] = {place: self.outer[p].detach() for place, p in self._placed() if p in self.outer}
        return saved

    def load(self, state: Mapping[str, Any]) -> None:
        """A state of another strategy has no lanes: each begins with a copy of it."""
        groups = state["param_groups"]
        lanes, others = state.get(LANES, {}), {"state": state["state"]}
        self.close_windows()
        self._settings.clear()
        self._numbers.clear()
        for lane in self.lanes:
            saved = lanes.get(lane, others)
            load_exactly(self.optimizer, {"state": copied(full_tree(saved["state"])), "param_groups": groups})
            self._states[lane] = self.optimizer.state
            if settings := full_tree(saved.get("settings", [])):
                self._settings[lane] = settings
            self._numbers[lane] = full_tree(saved.get("numbers", {}))
        self._shown = self.optimizer.state = self._states[self.lanes[0]]
        self._first = defaultdict(dict)
        known = self.outer_optimizer.state_dict()
        load_exactly(self.outer_optimizer, {**known, "state": copied(full_tree(state.get(OUTER, {})))})
        for place, parameter in self._placed():
            if place in state.get(START, {}):
                self.outer[parameter] = _for(parameter, state[START][place])
        for lane in self.lanes if self.in_window else ():
            saved = lanes.get(lane, {})
            for trained, weight in zip(self.trained, saved.get("trained", ()), strict=False):
                trained[lane] = weight
            self._weights[lane] = {
                p: _for(p, saved["weights"][place]) for place, p in self._placed() if place in saved.get("weights", {})
            }
        self.show_outer()

    def _placed(self) -> list[tuple[int, Parameter]]:
        return list(enumerate(self.parameters))

    def _packed(self, state: Any) -> dict[int, Any]:
        """A state as a state_dict has it, by number of the parameter."""
        self.optimizer.state = state
        try:
            packed: dict[int, Any] = self._state_dict()["state"]
        finally:
            self.optimizer.state = self._shown
        return packed

    def _state_dict(self) -> dict[str, Any]:
        self._reading = True
        try:
            return self.optimizer.state_dict()
        finally:
            self._reading = False

    def _refuse(self, _: Optimizer) -> None:
        if not self._reading:
            raise LoopError(
                f"optimizer.state_dict() under strategy={self._strategy!r}: each lane has a state of its own, and this "
                f"worker has those of {len(self.lanes)}; save with engine.save_state(folder), which every worker calls"
            )

    def close(self) -> None:
        self._guard.remove()

    def teardown(self) -> None:
        """Leave the user's optimizer without a state, and the parameters in memory that is theirs."""
        self.close()
        for parameter in self.parameters:
            parameter.grad = None
        self.show_outer()
        self.close_windows()
        self.optimizer.state = defaultdict(dict)


def fragments_of(parameters: Sequence[Parameter], fragments: int) -> list[int]:
    """Which fragment each belongs to: the one in which its middle element lies, of all elements in a row."""
    everything = sum(parameter.numel() for parameter in parameters) or 1
    found, before = [], 0
    for parameter in parameters:
        found.append(min(fragments - 1, (2 * before + parameter.numel()) * fragments // (2 * everything)))
        before += parameter.numel()
    return found


def copied(tree: Any) -> Any:
    """With tensors of its own."""
    if isinstance(tree, Tensor):
        return tree.detach().clone(memory_format=torch.preserve_format)
    if isinstance(tree, dict):
        return {key: copied(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(copied(value) for value in tree)
    return tree


def copied_state(state: Any) -> Any:
    """Of an optimizer: parameters, its keys, stay what they are."""
    return defaultdict(dict, {key: copied(value) for key, value in state.items()})


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor) or isinstance(right, Tensor):
        return left is right
    return left is right or bool(left == right)


def _for(parameter: Parameter, stored: Any) -> Tensor:
    values: Tensor = full_tree(stored)
    return like(parameter, values.to(parameter.device, copy=True))
