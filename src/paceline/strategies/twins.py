"""Twins: each of the user's optimizers has one on every worker, which keeps state for that worker's pieces only.

    the user's optimizer     groups, learning rates, hooks; its state is empty
    its twin                 pieces and their state: 1/N of the whole

Whatever state the user's optimizer turns out to have (Adagrad's from the start, a state_dict that was loaded) is cut
into pieces and taken over when the next step starts. When pieces are dealt anew (buckets cut in another order, a
parameter thawed, another set of optimizers acting together) the states follow them, one parameter at a time.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from paceline.checkpoint.load import StoredTensor, whole_tree
from paceline.collectives.communicator import Communicator
from paceline.errors import LoopError
from paceline.optim.piece_state import State, like, scatter_state
from paceline.optim.range_optimizer import optimizer_on
from paceline.sharding.flat_layout import Piece
from paceline.sharding.slices import Slices
from paceline.strategies.masters import MASTER, PieceMasters, placed
from paceline.strategies.own_pieces import OwnPieces, in_logical_order
from paceline.strategies.whole_states import DealtState, whole_states
from paceline.world.process import give_back_free_memory

GIVE_BACK_EVERY = 64 * 2**20  # bytes of state that have moved: between old and new places there are only holes


class Twin:
    """One optimizer's update of the pieces that this worker owns."""

    def __init__(self, optimizer: Optimizer, pieces: OwnPieces, masters: PieceMasters | None = None) -> None:
        self.optimizer, self.pieces, self._masters = optimizer, pieces, masters
        self._mine: dict[int, list[Piece]] = {  # by parameter, of those that are dealt out
            pieces.index[id(p)]: [] for p in _parameters_of(optimizer) if id(p) in pieces.index
        }
        for piece in pieces.tensors:
            if piece.parameter in self._mine:
                self._mine[piece.parameter].append(piece)
        self._slices: dict[tuple[int, str], tuple[list[tuple[int, Tensor]], Slices]] = {}  # by parameter and entry
        self._nothing = [_nothing_of(group["params"]) for group in optimizer.param_groups]
        groups = [
            [pieces.tensors[piece] for number in self._numbers(group) for piece in self._mine[number]] or [nothing]
            for group, nothing in zip(optimizer.param_groups, self._nothing, strict=True)
        ]
        first = remember_first_states(optimizer)
        states = {nothing: _of_nothing(first[n], nothing) for n, nothing in enumerate(self._nothing) if n in first}
        self._twin = optimizer_on(optimizer, groups, states)

    @property
    def own(self) -> list[Piece]:
        """Those of its pieces that this worker owns."""
        return [piece for mine in self._mine.values() for piece in mine]

    @property
    def parameters(self) -> list[int]:
        """The numbers of this optimizer's parameters, whoever owns their pieces."""
        return list(self._mine)

    def holds(self, parameter: Parameter) -> bool:
        return self.pieces.index.get(id(parameter)) in self._mine

    def step(self, used: Sequence[bool], turns: Iterable[Sequence[Piece]] | None = None) -> Any:
        """The user's settings as they are now, the update, and what the update changed in the settings.

        With `turns` some pieces after others; each turn starts from the same settings.
        """
        groups = list(zip(self.optimizer.param_groups, self._twin.param_groups, self._nothing, strict=False))
        changes: list[dict[str, Any]] = [{} for _ in groups]
        result: Any = None
        for _ in [None] if turns is None else self._seen_in_turn(turns):
            for theirs, mine, nothing in groups:
                mine.update(_settings(theirs))
                nothing.grad = nothing.new_empty(0) if any(used[number] for number in self._numbers(theirs)) else None
            result = self._twin.step()
            for (theirs, mine, _), changed in zip(groups, changes, strict=True):
                changed.update({name: v for name, v in _settings(mine).items() if v is not theirs.get(name)})
        for (theirs, _, _), changed in zip(groups, changes, strict=True):
            theirs.update(changed)
        return result

    def _seen_in_turn(self, turns: Iterable[Sequence[Piece]]) -> Iterator[None]:
        """Let the optimizer see the gradients of one turn's pieces only."""
        tensors = {piece: self.pieces.tensors[piece] for piece in self.own}
        gradients = {piece: tensor.grad for piece, tensor in tensors.items()}
        for tensor in tensors.values():
            tensor.grad = None
        for turn in turns:
            for piece in turn:
                tensors[piece].grad = gradients[piece]
            yield
            for piece in turn:
                tensors[piece].grad = None
        for piece, tensor in tensors.items():
            tensor.grad = gradients[piece]

    def adopt(self) -> None:
        """Take over what the user's optimizer keeps for the parameters that are dealt out."""
        for parameter in [p for p in self.optimizer.state if id(p) in self.pieces.index]:
            self.put(self.pieces.index[id(parameter)], self.optimizer.state.pop(parameter))

    def put(self, number: int, whole: State) -> None:
        """Keep of a parameter's state, and of its master if that is with it, what belongs to the own pieces."""
        parameter, mine = self.pieces.parameters[number], self._mine[number]
        master = whole.pop(MASTER, None)
        if master is not None and self._masters is not None:
            for piece in mine:
                self._masters.take(self.pieces, piece, master)
        if in_logical_order(parameter):
            states = scatter_state(whole, tuple(parameter.shape), mine)
        else:
            states = [dict(whole) for _ in mine]
        for piece, state in zip(mine, states, strict=True):
            tensor = self.pieces.tensors[piece]
            if tensor.device != parameter.device:
                state = {k: v.to(tensor.device) if isinstance(v, Tensor) else v for k, v in state.items()}
            self._twin.state[tensor] = state

    def own_states(self) -> Iterator[tuple[Parameter, State]]:
        """Of every parameter what is here: what is kept for each element as slices, the rest as it is."""
        for number, mine in self._mine.items():
            parameter, once = self.pieces.parameters[number], State()
            each: dict[str, list[tuple[int, Tensor]]] = {}
            for piece in mine:
                tensor = self.pieces.tensors[piece]
                for entry, value in self._twin.state.get(tensor, {}).items():
                    if isinstance(value, Tensor) and value.shape == tensor.shape:
                        each.setdefault(entry, []).append((piece.start, value))
                    else:
                        once[entry] = value
            slices = {entry: self._sliced(number, entry, parts) for entry, parts in each.items()}
            yield parameter, {**once, **slices}

    def _sliced(self, number: int, entry: str, parts: list[tuple[int, Tensor]]) -> Slices:
        """An optimizer that updates its state in place keeps the slices of before."""
        known = self._slices.get((number, entry))
        if known is not None and [id(value) for _, value in known[0]] == [id(value) for _, value in parts]:
            return known[1]
        slices = Slices.of(self.pieces.parameters[number].shape, parts[0][1].dtype, parts)
        if all(in_logical_order(value) for _, value in parts):  # otherwise it is a copy
            self._slices[number, entry] = parts, slices
        return slices

    def put_stored(self, number: int, stored: State, group: Mapping[str, Any]) -> None:
        """Read of a parameter's saved state what belongs to the own pieces; `group` is its group of settings."""
        parameter = self.pieces.parameters[number]
        for piece in self._mine[number]:
            tensor = self.pieces.tensors[piece]
            state = {name: _part(value, parameter, piece) for name, value in stored.items()}
            self._twin.state[tensor] = {
                name: placed(name, value, dict(group), tensor.device, tensor.dtype) for name, value in state.items()
            }

    def forget(self) -> None:
        self._twin.state.clear()
        self._slices.clear()

    def dealt(self, receivers: Callable[[Parameter], frozenset[int]]) -> list[DealtState]:
        """The state of every parameter and its master, as far as they are here, on their way to the receivers."""
        pieces, found = self.pieces, []
        for number, mine in self._mine.items():
            parameter = pieces.parameters[number]
            here = {p: (pieces.tensors[p], self._twin.state.get(pieces.tensors[p], {})) for p in mine}
            if self._masters is not None and self._masters.has(parameter):
                here = {p: (tensor, {**state, MASTER: tensor}) for p, (tensor, state) in here.items()}
            owners = pieces.shards.owners.get(number, ())
            found.append(DealtState(pieces.names[number], parameter, owners, here, receivers(parameter)))
        return found

    def _numbers(self, group: Mapping[str, Any]) -> list[int]:
        return [self.pieces.index[id(p)] for p in group["params"] if id(p) in self.pieces.index]


def _part(value: Any, parameter: Parameter, piece: Piece) -> Any:
    if not isinstance(value, StoredTensor):
        in_order = in_logical_order(parameter)
        return scatter_state({"": value}, tuple(parameter.shape), [piece])[0][""] if in_order else value
    if value.shape != parameter.shape:  # a count of steps, say
        return value.whole()
    if not in_logical_order(parameter):
        return like(parameter, value.whole())
    return value.part(piece.start, piece.stop).view(() if parameter.dim() == 0 else -1)


def _parameters_of(optimizer: Optimizer) -> list[Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _nothing_of(parameters: Sequence[Tensor]) -> Tensor:
    """What stands for a group of which this worker owns nothing: counts that the group itself keeps go on."""
    return parameters[0].detach().new_empty(0) if parameters else torch.empty(0)


_PER_ELEMENT = object()
_FIRST_STATES: WeakKeyDictionary[Optimizer, dict[int, State]] = WeakKeyDictionary()


def remember_first_states(optimizer: Optimizer) -> dict[int, State]:
    """By group: what the optimizer kept for a parameter before its first step, if it did, less what is per element.

    Adagrad makes its state when it is made, and in torch 2.11 looks for it in every step, also of the empty tensor
    that stands for a group of which a worker owns nothing. By then its state is with the owners, or in a checkpoint.
    """
    known = _FIRST_STATES.setdefault(optimizer, {})
    for number, group in enumerate(optimizer.param_groups):
        example = next((p for p in group["params"] if optimizer.state.get(p)), None)
        if number not in known and example is not None:
            known[number] = {
                name: _PER_ELEMENT if _is_per_element(name, value, example) else copy.deepcopy(value)
                for name, value in optimizer.state[example].items()
            }
    return known


def _is_per_element(name: str, value: Any, parameter: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == parameter.shape and name != "step"


def _of_nothing(first: State, nothing: Tensor) -> State:
    return {name: nothing.new_empty(0) if v is _PER_ELEMENT else copy.deepcopy(v) for name, v in first.items()}


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in ("params", "param_names")}


class Twins:
    """All twins of a job on this worker; strategies that share an optimizer share its twin."""

    def __init__(self, comm: Communicator | None, strategy: str, masters: PieceMasters | None = None) -> None:
        self._comm, self._strategy, self._masters = comm, strategy, masters
        self._rank, self._workers = (0, 1) if comm is None else (comm.rank, comm.size)
        self._twins: dict[int, Twin] = {}
        self._guards: dict[int, RemovableHandle] = {}
        self._stored: dict[int, dict[int, State]] = {}  # by optimizer and place: loaded, to be read when it is dealt
        self._reading = False

    def of(self, optimizer: Optimizer) -> Twin:
        return self._twins[id(optimizer)]

    def deal(self, optimizer: Optimizer, pieces: OwnPieces) -> None:
        """Let the optimizer's twin hold these pieces; where it holds others all workers call this together."""
        old = self._twins.get(id(optimizer))
        if old is None or old.pieces is not pieces:
            new = self._twins[id(optimizer)] = Twin(optimizer, pieces, self._masters)
            if old is not None:
                self._move(old, new)
        if id(optimizer) not in self._guards:
            self._guards[id(optimizer)] = optimizer.register_state_dict_pre_hook(self._guard)
        self._twins[id(optimizer)].adopt()
        self._read_stored(optimizer)

    def _move(self, old: Twin, new: Twin) -> None:
        """A parameter that is dealt to nobody any more (it was frozen) leaves its state with the user's optimizer."""
        pieces = new.pieces

        def receivers(parameter: Parameter) -> frozenset[int]:
            if id(parameter) not in pieces.index:
                return frozenset(range(self._workers))
            return frozenset(worker for worker, _ in pieces.shards.owners.get(pieces.index[id(parameter)], ()))

        dealt = old.dealt(receivers)
        old.forget()  # from here on only `dealt` has it, and lets it go bit by bit
        since = 0
        for parameter, whole in whole_states(self._comm, dealt):
            since += sum(value.nbytes for value in whole.values() if isinstance(value, Tensor))
            if since > GIVE_BACK_EVERY:
                give_back_free_memory()
                since = 0
            if id(parameter) in pieces.index:
                if whole:
                    new.put(pieces.index[id(parameter)], whole)
                continue
            whole.pop(MASTER, None)
            if whole:
                new.optimizer.state[parameter] = whole
        give_back_free_memory()

    # -- masters -----------------------------------------------------------------------------------------------------

    def master_of(self, parameter: Parameter) -> Tensor | None:
        """All of a parameter's master on every worker; None if it has none."""
        if self._masters is None or not self._masters.has(parameter):
            return None
        pieces = self._pieces_of(parameter)
        if pieces is None:
            return self._masters.before_dealing(parameter)
        self._masters.look(pieces)
        number, dtype = pieces.index[id(parameter)], self._masters.dtype_of(parameter)
        flat = torch.empty(parameter.numel(), dtype=dtype, device=parameter.device)
        for owner, piece in pieces.shards.owners.get(number, ()):
            part = flat[piece.start : piece.stop]
            if owner == self._rank:
                part.copy_(pieces.tensors[piece].reshape(-1))
            if self._comm is not None:
                self._comm.broadcast(part, root=owner).wait()
        whole = torch.empty_strided(parameter.shape, parameter.stride(), dtype=dtype, device=parameter.device)
        return whole.copy_(flat.view(parameter.shape)).detach()

    def own_master(self, parameter: Parameter) -> Tensor | Slices | None:
        """What this worker has of it: before it is dealt everyone has all."""
        if self._masters is None or not self._masters.has(parameter):
            return None
        pieces = self._pieces_of(parameter)
        if pieces is None:
            return self._masters.before_dealing(parameter)
        if self._masters.was_written(parameter):
            self._masters.look(pieces)
        return pieces.slices_of(pieces.index[id(parameter)], self._masters.dtype_of(parameter))

    def put_master(self, parameter: Parameter, whole: Tensor) -> bool:
        """Keep this worker's part of a master, with a parameter that holds it rounded; whether there is a master."""
        if self._masters is None or not self._masters.has(parameter):
            return False
        pieces = self._pieces_of(parameter)
        if pieces is None:
            self._masters.put_before_dealing(parameter, whole)
        else:
            for piece in pieces.tensors:
                if pieces.parameters[piece.parameter] is parameter:
                    self._masters.take(pieces, piece, whole)
        self._masters.take_as_right([parameter])
        return True

    def has_dealt(self, parameter: Parameter) -> bool:
        return self._pieces_of(parameter) is not None

    def _pieces_of(self, parameter: Parameter) -> OwnPieces | None:
        holds = (twin.pieces for twin in self._twins.values() if twin.holds(parameter))
        return next(holds, None)

    # -- saved and loaded --------------------------------------------------------------------------------------------

    def kept_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The state_dict of the optimizer, with this worker's slices of the states that are dealt out."""
        twin = self._twins.get(id(optimizer))
        if twin is not None:
            twin.adopt()
            self._read_stored(optimizer)
        self._reading = True
        try:
            saved: dict[str, Any] = optimizer.state_dict()
        finally:
            self._reading = False
        if twin is None:
            return {**saved, "state": {**saved["state"], **whole_tree(self._stored.get(id(optimizer), {}))}}
        places = {id(parameter): place for place, parameter in enumerate(_parameters_of(optimizer))}
        own = {places[id(parameter)]: state for parameter, state in twin.own_states() if state}
        return {**saved, "state": {**saved["state"], **own}}

    def load(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Each worker reads what belongs to its pieces: now, or in the first step, when they are dealt out."""
        optimizer.load_state_dict({**state, "state": {}})
        self._stored[id(optimizer)] = dict(state["state"])
        twin = self._twins.get(id(optimizer))
        if twin is not None:
            twin.forget()
            self._read_stored(optimizer)

    def _read_stored(self, optimizer: Optimizer) -> None:
        """What nobody is dealt, as of frozen parameters, is kept whole by everyone."""
        twin, stored = self._twins[id(optimizer)], self._stored.pop(id(optimizer), {})
        members = [(parameter, group) for group in optimizer.param_groups for parameter in group["params"]]
        for place, state in stored.items():
            parameter, group = members[place]
            if twin.holds(parameter):
                twin.put_stored(twin.pieces.index[id(parameter)], state, group)
            else:
                kept = {k: placed(k, v, group, parameter.device, parameter.dtype) for k, v in whole_tree(state).items()}
                optimizer.state[parameter] = kept

    def _guard(self, _: Optimizer) -> None:
        if not self._reading:
            raise LoopError(
                f"optimizer.state_dict() under strategy={self._strategy!r}: the state is spread over the workers, and "
                "this worker has its part only; save with engine.save_state(folder), which every worker calls"
            )

    def close(self) -> None:
        for guard in self._guards.values():
            guard.remove()
        self._guards.clear()

    def dismantle(self) -> None:
        """Forget this worker's part of the states; the user's optimizers are left without."""
        self.close()
        self._twins.clear()
        self._stored.clear()
