"""A key as its server holds it: the weights in one flat tensor, and copies of the user's optimizers that update it.

    weights   |── ln.weight ──|─ ln.bias ─|── head[0:4096] ──|       version 7: updated seven times
    pieces       Parameter       Parameter      Parameter            views, so an update of a piece is one of the key
    copies    AdamW(pieces of its groups), one for each of the user's optimizers that has pieces here

Each key has copies of its own: keys are updated one at a time, and a step should not have to look at all the others.

Looking ahead: an asynchronous server answers with the weights as they will be when the gradient of them comes back.

    version      5    6    7    8                       read at 5, the gradient comes back at 8: a delay of 3 updates
    weights      ●────●────●────●────●
                 └─ ─ ─ ─ ─ ─ ─ ─ ─ ─○   5 + reach × (what update 5 changed),   reach = μ + μ² + μ³ + μ⁴

With momentum μ the next update repeats μ times the last one, whatever gradient comes, so most of the way is known in
advance; without momentum nothing is, and nothing is looked ahead. How far: over the delay that this worker's pushes
have had lately, in updates, and the update that its gradient will be part of. That is Nesterov's momentum with a delay
(for late gradients see SpecTrain, Chen et al. 2018, and DANA, Hakimi et al. 2019); pushes that are not late see the
weights as they are, as in synchronous training. All of it follows from the updates of the key up to the version that is
read, so a replay finds the same bits.

A key's optimizer state on the wire:

    8 bytes: length of the head │ head, JSON: the tree, and of each tensor its type, shape and place │ tensors, aligned
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from paceline.checkpoint.tensor_file import DTYPES, code_of
from paceline.checkpoint.tree import flatten, unflatten
from paceline.errors import CheckpointError
from paceline.optim.gradient_norm import block_norms
from paceline.optim.group_settings import GroupSettings
from paceline.optim.piece_state import State, scatter_state
from paceline.optim.range_optimizer import optimizer_on
from paceline.parameter_server.key_ranges import Key

SMOOTHING = 1 / 8  # of a worker's delays: about its last eight pushes count
_ALIGN = 64
_LENGTH = 8  # bytes that say how long the head is


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
        """What the worker reads: these weights, or a tensor of its own."""
        reach = self.reach(worker)
        return weights if self._change is None or reach == 0 else weights.add(self._change, alpha=reach)

    def copy(self) -> LookAhead:
        return LookAhead(None if self._change is None else self._change.clone(), self._delays, self._momentum)


class NoLookAhead(LookAhead):
    """Every worker reads the weights as they are."""

    def came_back(self, worker: int, updates: int) -> None: ...

    def before(self, weights: Tensor) -> None: ...

    def after(self, weights: Tensor, momentum: float | None) -> None: ...


def hold_keys(
    keys: Sequence[Key],
    parameters: Sequence[Tensor],
    optimizers: Sequence[Optimizer],
    settings: GroupSettings,
    devices: Sequence[torch.device | str] = ("cpu",),
    shared: Mapping[int, Tensor] | None = None,
    *,
    look_ahead: bool = False,
) -> dict[int, ServerKey]:
    """A server's keys by number, spread over its devices by size, or in shared memory where that is given."""
    ahead = look_ahead and bool(settings.momentum(settings.read()))
    held: dict[int, ServerKey] = {}
    load = [0] * len(devices)
    for key in sorted(keys, key=lambda key: (-key.gradient_bytes, key.number)):
        place = load.index(min(load))
        load[place] += key.gradient_bytes
        memory = None if shared is None else shared[key.number]
        held[key.number] = ServerKey(key, parameters, optimizers, settings, devices[place], memory, look_ahead=ahead)
    return dict(sorted(held.items()))


@dataclass(frozen=True)
class Snapshot:
    """A key as it was."""

    weights: Tensor
    ahead: LookAhead

    def seen_by(self, worker: int) -> Tensor:
        return self.ahead.seen_by(worker, self.weights)


class ServerKey:
    """`parameters` are the user's, in the order of the layout; they are copied, and never touched again."""

    def __init__(
        self,
        key: Key,
        parameters: Sequence[Tensor],
        optimizers: Sequence[Optimizer],
        settings: GroupSettings,
        device: torch.device | str = "cpu",
        memory: Tensor | None = None,
        *,
        look_ahead: bool = False,
    ) -> None:
        """`memory`: shared memory for the weights, which workers can read; otherwise they get some on `device`."""
        self.key = key
        self.version = 0
        self.weights = key.gathered(parameters).to(device) if memory is None else memory.copy_(key.gathered(parameters))
        self._settings = settings
        self._in_force: Sequence[float] | None = None
        self._copy: Tensor | None = None
        self._ahead = LookAhead() if look_ahead else NoLookAhead()
        views = key.views(self.weights)
        self._pieces = [
            Parameter(view.view(()) if parameters[piece.parameter].dim() == 0 else view)
            for piece, view in zip(key.pieces, views, strict=True)
        ]
        self._copies: list[Optimizer] = []
        self._groups: dict[int, dict[str, Any]] = {}
        groups_before = 0
        for optimizer in optimizers:
            states: dict[Tensor, State] = {}
            members: list[list[Tensor]] = []
            for group in optimizer.param_groups:
                here = {id(parameter) for parameter in group["params"]}
                found = [place for place, piece in enumerate(key.pieces) if id(parameters[piece.parameter]) in here]
                members.append([self._pieces[place] for place in found])
                states |= {self._pieces[place]: self._first_state(place, parameters, optimizer) for place in found}
            if any(members):
                own = optimizer_on(optimizer, members, states)
                self._copies.append(own)
                numbers = [groups_before + place for place, pieces in enumerate(members) if pieces]
                self._groups |= dict(zip(numbers, own.param_groups, strict=True))
            groups_before += len(optimizer.param_groups)

    def _first_state(self, place: int, parameters: Sequence[Tensor], optimizer: Optimizer) -> State:
        """What the user's optimizer keeps already: made with it (Adagrad), or loaded before training."""
        piece = self.key.pieces[place]
        parameter = parameters[piece.parameter]
        (state,) = scatter_state(optimizer.state.get(parameter, {}), parameter.shape, [piece])
        return {
            name: value.to(self.weights.device) if isinstance(value, Tensor) and value.dim() else value
            for name, value in state.items()
        }

    # -- updating ----------------------------------------------------------------------------------------------------

    def as_gradient(self, total: Tensor) -> Tensor:
        """A sum in the precision of the weights, where they are."""
        return total.to(self.weights.device, self.key.dtype)

    def norms(self, gradient: Tensor, used: int) -> list[Tensor]:
        """The block norms of the pieces that were used."""
        views = self.key.gradient_views(gradient)
        return [block_norms(view) for place, view in enumerate(views) if used >> place & 1]

    def update(
        self,
        gradient: Tensor,
        used: int,
        settings: Sequence[float] = (),
        *,
        lr_factor: float = 1.0,
        momentum: Callable[[float], float] | None = None,
    ) -> None:
        """One step of the optimizer; a piece whose bit in `used` is not set has no gradient and is not touched."""
        self._put(settings, lr_factor, momentum)
        views = self.key.gradient_views(gradient)
        for place, (piece, view) in enumerate(zip(self._pieces, views, strict=True)):
            piece.grad = view.view(piece.shape) if used >> place & 1 else None
        self._ahead.before(self.weights)
        for own in self._copies:
            own.step()
        for piece in self._pieces:
            piece.grad = None
        self._ahead.after(self.weights, self._settings.momentum(settings) if settings else None)
        self.version += 1
        self._copy = None

    def _put(self, settings: Sequence[float], lr_factor: float, momentum: Callable[[float], float] | None) -> None:
        """Empty settings: those that are in force. An own copy is written to only when something changes."""
        treated = lr_factor != 1.0 or momentum is not None
        if settings and (treated or settings != self._in_force):
            self._settings.put(settings, self._groups, lr_factor=lr_factor, momentum=momentum)
            self._in_force = None if treated else settings

    def came_back(self, worker: int, version: int) -> None:
        """A push of the worker is about to be applied, made of the weights of this version."""
        self._ahead.came_back(worker, self.version - version)

    # -- reading -----------------------------------------------------------------------------------------------------

    def check(self) -> int:
        """The bits of the weights, added up as whole numbers."""
        whole = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[self.weights.element_size()]
        return int(self.weights.view(whole).sum(dtype=torch.int64).item())

    def copy(self) -> Tensor:
        """The weights as they are now, whatever is applied later; pulls of the same version share one copy."""
        if self._copy is None:
            self._copy = self.weights.to("cpu", copy=True)
        return self._copy

    def seen_by(self, worker: int) -> Tensor:
        """What the worker computes with: the weights, ahead of where they are as far as its pushes come late."""
        seen = self._ahead.seen_by(worker, self.weights)
        return self.copy() if seen is self.weights else seen.cpu()

    def snapshot(self) -> Snapshot:
        return Snapshot(self.weights.clone(), self._ahead.copy())

    def states(self) -> list[State]:
        """What the optimizers keep for each piece; their own tensors, not copies."""
        return [
            next((dict(own.state[piece]) for own in self._copies if own.state.get(piece)), {}) for piece in self._pieces
        ]

    def load_weights(self, weights: Tensor, version: int) -> None:
        self.weights.copy_(weights)
        self.version, self._copy = version, None
        self._ahead.forget()

    def load_states(self, states: Sequence[State]) -> None:
        for piece, state in zip(self._pieces, states, strict=True):
            own = next(t for t in self._copies if any(piece is p for group in t.param_groups for p in group["params"]))
            if state:
                own.state[piece] = {name: self._placed(value) for name, value in state.items()}
            else:
                own.state.pop(piece, None)

    def _placed(self, value: object) -> object:
        """A step count stays on the CPU, as torch keeps it; what belongs to elements goes where the weights are."""
        if not isinstance(value, Tensor):
            return value
        return value.to(self.weights.device, copy=True) if value.dim() else value.clone()


# -- optimizer state on the wire ---------------------------------------------------------------------------------------


def pack_states(states: Sequence[State]) -> Tensor:
    """One copy of each tensor: an elastic job asks for all of it in every round."""
    tree, leaves = flatten(list(states))
    rows, parts, end = [], [], 0
    for path, leaf in leaves.items():
        assert isinstance(leaf, Tensor)
        flat = leaf.detach().contiguous().view(-1).view(torch.uint8)
        rows.append([path, code_of(leaf.dtype, path), list(leaf.shape), end])
        parts.append((end, flat))
        end += _aligned(flat.numel())
    head = json.dumps([tree, rows]).encode()
    data = _aligned(_LENGTH + len(head))
    packed = torch.zeros(data + end, dtype=torch.uint8)
    packed[:_LENGTH].view(torch.int64)[0] = len(head)
    packed[_LENGTH : _LENGTH + len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
    for start, flat in parts:
        packed[data + start : data + start + flat.numel()].copy_(flat)
    return packed


def unpack_states(packed: Tensor) -> list[State]:
    """Without a copy: the tensors lie in what was packed."""
    try:
        length = int(packed[:_LENGTH].view(torch.int64)[0])
        tree, rows = json.loads(packed[_LENGTH : _LENGTH + length].numpy().tobytes())
        data = packed[_aligned(_LENGTH + length) :]
        tensors = {path: _tensor(data, DTYPES[code], shape, start) for path, code, shape, start in rows}
        states: list[State] = unflatten(tree, tensors)
    except (RuntimeError, ValueError, KeyError, TypeError, IndexError) as error:
        raise CheckpointError(f"a key's optimizer state can't be read: {type(error).__name__}: {error}") from error
    return states


def _tensor(data: Tensor, dtype: torch.dtype, shape: Sequence[int], start: int) -> Tensor:
    return data[start : start + prod(shape) * dtype.itemsize].view(dtype).view(list(shape))


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN
