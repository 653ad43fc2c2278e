"""The sharded optimizer: each of the user's has a shard on every worker, which updates that worker's pieces only.

    the user's optimizer     groups, learning rates, hooks; its state is empty
    its shard                this worker's pieces and their state: 1/N of the whole

Whatever state the user's optimizer turns out to have (Adagrad's from the start, a state_dict that was loaded) is cut
into pieces and taken over when the next step starts. When pieces are assigned to other workers (buckets were rebuilt, a
parameter thawed, another set of optimizers acts together) the states follow them, one parameter at a time.

What is below: `LocalPieces`, the tensors that are updated; `OptimizerShard`, one optimizer on them; `full_states`, how
a state gets to other owners; `ShardedOptimizers`, all optimizers of a job.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from paceline.checkpoint.load import StoredTensor, full_tree
from paceline.collectives.communicator import Communicator, Work, wait_all
from paceline.errors import CheckpointError, ConfigError, LoopError
from paceline.optim.group_settings import NUMBER
from paceline.optim.piece_state import State, gather_state, like, scatter_state
from paceline.optim.range_optimizer import optimizer_on
from paceline.sharding.bucket import Shards
from paceline.sharding.flat_layout import BLOCK, Piece, PieceOf, extent, in_logical_order, piece_of
from paceline.sharding.local_shard import LocalShard
from paceline.strategies.fsdp.unmaterialised import is_unmaterialised
from paceline.strategies.master_weights import MASTER, MasterShards, placed
from paceline.world.process import give_back_free_memory

GIVE_BACK_EVERY = 64 * 2**20  # bytes of state that have moved: between old and new places there are only holes


class LocalPieces:
    """The pieces that this worker owns: tensors that its optimizers update in place, with gradients from the sums.

        bucket's sum, own range     |── 8192 ──|─ 6 ─|────── 4096 ──────|
        pieces                       weight[0:8192]  bias  head[0:4096]     views of the parameters, .grad a view above

    A piece of a parameter is one-dimensional. A parameter whose memory is not in logical order has only one piece,
    itself, and a gradient with its strides: optimizers walk both by memory.
    """

    def __init__(
        self, named: Sequence[tuple[str, Parameter]], shards: Shards, worker: int, values: PieceOf = piece_of
    ) -> None:
        """`values` says where those of a piece are; by default in the parameter itself."""
        self.names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]
        self.shards, self.worker = shards, worker
        self.index = {id(parameter): number for number, parameter in enumerate(self.parameters)}
        self.tensors = {piece: values(self.parameters[piece.parameter], piece) for piece in shards.pieces(worker)}
        self.of_bucket = [[owned.piece for owned in bucket.pieces(worker)] for bucket in shards.buckets]
        self._views: dict[int, tuple[int, list[Tensor]]] = {}  # by bucket: of the sum at that address
        self._shards: dict[int, LocalShard] = {}  # by parameter

    def take_gradients(self, number: int, total: Tensor, used: Sequence[bool]) -> None:
        """Make the own range of a bucket's finished sum the gradients of its pieces; unused parameters have none."""
        address, views = self._views.get(number, (0, []))
        if address != total.data_ptr():
            owned = self.shards.buckets[number].pieces(self.worker)
            views = [total[place.offset : place.offset + place.piece.elements] for place in owned]
            self._views[number] = total.data_ptr(), views
        for piece, gradient in zip(self.of_bucket[number], views, strict=True):
            tensor = self.tensors[piece]
            tensor.grad = _as_gradient_of(tensor, gradient) if used[piece.parameter] else None

    def drop_gradients(self) -> None:
        for tensor in self.tensors.values():
            tensor.grad = None

    @property
    def gradients(self) -> list[Tensor]:
        return [tensor.grad for tensor in self.tensors.values() if tensor.grad is not None]

    def shard_of(self, number: int, dtype: torch.dtype) -> LocalShard:
        """The values of all own pieces of a parameter, of now and, as long as they stay in memory, of later."""
        if number not in self._shards:
            mine = [(piece.start, tensor) for piece, tensor in self.tensors.items() if piece.parameter == number]
            shard = LocalShard.of(self.parameters[number].shape, dtype, mine)
            if not all(in_logical_order(tensor) for _, tensor in mine):
                return shard  # it is a copy
            self._shards[number] = shard
        return self._shards[number]

    @cached_property
    def most_blocks(self) -> int:
        """Of the worker that owns the most."""
        owned = [self.shards.pieces(worker) for worker in range(self.shards.workers)]
        return max(sum(-(-piece.elements // BLOCK) for piece in pieces) for pieces in owned)


def _as_gradient_of(tensor: Tensor, gradient: Tensor) -> Tensor:
    if tensor.is_contiguous():
        return gradient.view(tensor.shape).to(tensor.dtype)
    return torch.empty_like(tensor, memory_format=torch.preserve_format).copy_(gradient.view(tensor.shape))


def check_apart(named: Sequence[tuple[str, Parameter]]) -> None:
    """Two parameters over the same memory would be updated by two owners."""
    spans = sorted(
        (p.data_ptr(), p.data_ptr() + extent(p) * p.element_size(), name)
        for name, p in named
        if p.numel() and not is_unmaterialised(p) and not p.is_meta
    )
    for (_, end, first), (start, _, second) in pairwise(spans):
        if start < end:
            raise ConfigError(
                f"parameters {first!r} and {second!r} are two objects over the same memory, which two workers would "
                "update; tie them by giving both modules one Parameter (b.weight = a.weight), or use strategy='ddp'"
            )


class OptimizerShard:
    """One optimizer's update of the pieces that this worker owns."""

    def __init__(self, optimizer: Optimizer, pieces: LocalPieces, masters: MasterShards) -> None:
        self.optimizer, self.pieces, self._masters = optimizer, pieces, masters
        self._mine: dict[int, list[Piece]] = {  # by parameter, of those that have owners
            pieces.index[id(p)]: [] for p in _parameters_of(optimizer) if id(p) in pieces.index
        }
        for piece in pieces.tensors:
            if piece.parameter in self._mine:
                self._mine[piece.parameter].append(piece)
        self.own = [piece for mine in self._mine.values() for piece in mine]
        self.numbers = list(self._mine)  # of this optimizer's parameters, whichever workers own their pieces
        self.parameters = [pieces.parameters[number] for number in self.numbers]
        self._shards: dict[tuple[int, str], tuple[list[tuple[int, Tensor]], LocalShard]] = {}  # by parameter and entry
        self._nothing = [_nothing_of(group["params"]) for group in optimizer.param_groups]
        groups = [
            [pieces.tensors[piece] for number in self._numbers(group) for piece in self._mine[number]] or [nothing]
            for group, nothing in zip(optimizer.param_groups, self._nothing, strict=True)
        ]
        first = remember_first_states(optimizer)
        states = {nothing: _of_nothing(first[n], nothing) for n, nothing in enumerate(self._nothing) if n in first}
        self._on_pieces = optimizer_on(optimizer, groups, states)

    def holds(self, parameter: Parameter) -> bool:
        return self.pieces.index.get(id(parameter)) in self._mine

    def step(self, used: Sequence[bool], turns: Iterable[Sequence[Piece]] | None = None) -> Any:
        """The user's settings as they are now, the update, and what the update changed in the settings.

        With `turns` some pieces after others; each turn starts from the same settings.
        """
        groups = list(zip(self.optimizer.param_groups, self._on_pieces.param_groups, self._nothing, strict=False))
        changes: list[dict[str, Any]] = [{} for _ in groups]
        own, on_pieces = vars(self.optimizer), vars(self._on_pieces)  # attributes: some optimizers count in one
        numbers = {name: value for name, value in own.items() if isinstance(value, NUMBER)}
        result: Any = None
        for _ in [None] if turns is None else self._seen_in_turn(turns):
            for name in [name for name, value in on_pieces.items() if isinstance(value, NUMBER) and name not in own]:
                del on_pieces[name]  # of an update that was taken back
            on_pieces |= numbers
            for theirs, mine, nothing in groups:
                mine.update(_settings(theirs))
                nothing.grad = nothing.new_empty(0) if any(used[number] for number in self._numbers(theirs)) else None
            result = self._on_pieces.step()
            for (theirs, mine, _), changed in zip(groups, changes, strict=True):
                changed.update({name: v for name, v in _settings(mine).items() if v is not theirs.get(name)})
        for (theirs, _, _), changed in zip(groups, changes, strict=True):
            theirs.update(changed)
        own |= {name: value for name, value in on_pieces.items() if isinstance(value, NUMBER)}
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
        """Take over what the user's optimizer keeps for parameters that have owners."""
        for parameter in [p for p in self.optimizer.state if id(p) in self.pieces.index]:
            self.load_full(self.pieces.index[id(parameter)], self.optimizer.state.pop(parameter))

    def load_full(self, number: int, full: State) -> None:
        """Keep of a parameter's state, and of its master if that is with it, what belongs to the own pieces."""
        parameter, mine = self.pieces.parameters[number], self._mine[number]
        master = full.pop(MASTER, None)
        if master is not None:
            for piece in mine:
                self._masters.load_piece(self.pieces, piece, master)
        if in_logical_order(parameter):
            states = scatter_state(full, tuple(parameter.shape), mine)
        else:
            states = [dict(full) for _ in mine]
        for piece, state in zip(mine, states, strict=True):
            tensor = self.pieces.tensors[piece]
            if tensor.device != parameter.device:
                state = {k: v.to(tensor.device) if isinstance(v, Tensor) else v for k, v in state.items()}
            self._on_pieces.state[tensor] = state

    def local_states(self) -> Iterator[tuple[Parameter, State]]:
        """Of every parameter what is here: what is kept for each element as a shard, the rest as it is."""
        for number, mine in self._mine.items():
            parameter, once = self.pieces.parameters[number], State()
            each: dict[str, list[tuple[int, Tensor]]] = {}
            for piece in mine:
                tensor = self.pieces.tensors[piece]
                for entry, value in self._on_pieces.state.get(tensor, {}).items():
                    if isinstance(value, Tensor) and value.shape == tensor.shape:
                        each.setdefault(entry, []).append((piece.start, value))
                    else:
                        once[entry] = value
            yield parameter, {**once, **{entry: self._shard(number, entry, parts) for entry, parts in each.items()}}

    def _shard(self, number: int, entry: str, parts: list[tuple[int, Tensor]]) -> LocalShard:
        """An optimizer that updates its state in place keeps the shard of before."""
        known = self._shards.get((number, entry))
        if known is not None and [id(value) for _, value in known[0]] == [id(value) for _, value in parts]:
            return known[1]
        shard = LocalShard.of(self.pieces.parameters[number].shape, parts[0][1].dtype, parts)
        if all(in_logical_order(value) for _, value in parts):  # otherwise it is a copy
            self._shards[number, entry] = parts, shard
        return shard

    def load_stored(self, number: int, stored: State, group: Mapping[str, Any]) -> None:
        """Read of a parameter's saved state what belongs to the own pieces; `group` is its group of settings."""
        parameter = self.pieces.parameters[number]
        for piece in self._mine[number]:
            tensor = self.pieces.tensors[piece]
            state = {name: _part(value, parameter, piece) for name, value in stored.items()}
            self._on_pieces.state[tensor] = {
                name: placed(name, value, group, tensor.device, tensor.dtype) for name, value in state.items()
            }

    def forget(self) -> None:
        self._on_pieces.state.clear()
        self._shards.clear()

    def leaving(self, receivers: Callable[[Parameter], frozenset[int]]) -> list[StateInPieces]:
        """The state of every parameter and its master, as far as they are here, on their way to the receivers."""
        pieces, found = self.pieces, []
        for number, mine in self._mine.items():
            parameter = pieces.parameters[number]
            here = {p: (pieces.tensors[p], self._on_pieces.state.get(pieces.tensors[p], {})) for p in mine}
            if self._masters.has(parameter):
                here = {p: (tensor, {**state, MASTER: tensor}) for p, (tensor, state) in here.items()}
            owners = pieces.shards.owners.get(number, ())
            found.append(StateInPieces(pieces.names[number], parameter, owners, here, receivers(parameter)))
        return found

    def _numbers(self, group: Mapping[str, Any]) -> list[int]:
        return [self.pieces.index[id(p)] for p in group["params"] if id(p) in self.pieces.index]


def _part(value: Any, parameter: Parameter, piece: Piece) -> Any:
    if not isinstance(value, StoredTensor):
        in_order = in_logical_order(parameter)
        return scatter_state({"": value}, tuple(parameter.shape), [piece])[0][""] if in_order else value
    if value.shape != parameter.shape:  # a count of steps, say
        return value.full_tensor()
    if not in_logical_order(parameter):
        return like(parameter, value.full_tensor())
    return value.part(piece.start, piece.stop).view(() if parameter.dim() == 0 else -1)


def _parameters_of(optimizer: Optimizer) -> list[Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _nothing_of(parameters: Sequence[Tensor]) -> Tensor:
    """What stands for a group of which this worker owns nothing: counts that the group itself keeps go on."""
    if not parameters:
        return torch.empty(0)
    return torch.empty(0, dtype=parameters[0].dtype, device=parameters[0].device)  # `new_empty` would gather weights


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


# -- states on their way to other owners -------------------------------------------------------------------------------

_OPERATION = "optimizer state"
_EACH, _ONCE, _PLAIN = "each element", "once", "plain"


@dataclass(frozen=True)
class StateInPieces:
    """One parameter's state in its pieces: who has which, this worker's own, and who shall get the whole."""

    name: str
    parameter: Parameter
    owners: tuple[tuple[int, Piece], ...]
    mine: dict[Piece, tuple[Tensor, State]]  # the piece and what is kept for it
    receivers: frozenset[int]


def full_states(comm: Communicator, leaving: Sequence[StateInPieces]) -> Iterator[tuple[Parameter, State]]:
    """The full states of the parameters that this worker receives; all workers go through all of them.

        worker 0   weight[0:8192]  {step 7, exp_avg …}  ──┐
        worker 1   weight[8192:]   {step 7, exp_avg …}  ──┴─►  {step 7, exp_avg (6, 4096)} on the receivers

    One parameter after another, so that no worker holds more than one full state that it does not want; the pieces,
    which are not needed any more, go one after another too. First all workers tell each other what they keep for each
    piece; what is kept once for a piece, like a step count, travels with that.
    """
    mine = [[[p.start, _described(d.name, *held)] for p, held in d.mine.items()] for d in leaving]
    tables, rank = comm.gather_json(mine), comm.rank
    for number, d in enumerate(leaving):
        kept = {(worker, start): entries for worker, table in enumerate(tables) for start, entries in table[number]}
        wanted = rank in d.receivers
        states: list[State] = []
        under_way: list[Work] = []
        for owner, piece in d.owners:
            entries = kept[owner, piece.start]
            if owner == rank:
                states.append(_flat(*d.mine[piece]))
                under_way += _sent(comm, states[-1], entries, d.receivers - {rank})
            elif wanted:
                states.append({name: _buffer(d.parameter, piece, *about) for name, about in entries.items()})
                under_way += _received(comm, states[-1], entries, owner)
        wait_all(under_way)
        if wanted:
            states = [
                _on_owners_device(state, d.parameter, kept[owner, piece.start])
                for state, (owner, piece) in zip(states, d.owners, strict=True)
            ]
            full = gather_state(states, [piece for _, piece in d.owners], d.parameter, d.name)
        del states, under_way
        d.mine.clear()
        if wanted:
            yield d.parameter, full
            del full


Entries = Mapping[str, Sequence[Any]]


def _sent(comm: Communicator, state: State, entries: Entries, receivers: Collection[int]) -> list[Work]:
    each = [state[name].cpu().view(-1) for name, (kind, *_) in entries.items() if kind == _EACH]
    return [comm.send(t, to=receiver, tag=0, operation=_OPERATION) for t in each for receiver in sorted(receivers)]


def _received(comm: Communicator, state: State, entries: Entries, owner: int) -> list[Work]:
    each = [state[name].view(-1) for name, (kind, *_) in entries.items() if kind == _EACH]
    return [comm.receive(buffer, source=owner, tag=0, operation=_OPERATION) for buffer in each]


def _described(name: str, tensor: Tensor, state: State) -> dict[str, list[Any]]:
    """What is kept for a piece, by entry: kind, then dtype and device of tensors, then values that are not each's."""
    out: dict[str, list[Any]] = {}
    for entry, value in state.items():
        if isinstance(value, Tensor):
            about = [str(value.dtype).removeprefix("torch."), value.device.type]
            if value.shape == tensor.shape:
                out[entry] = [_EACH, *about]
            else:
                out[entry] = [_ONCE, *about, list(value.shape), value.detach().reshape(-1).tolist()]
        elif value is None or isinstance(value, bool | int | float | str):
            out[entry] = [_PLAIN, value]
        else:
            raise CheckpointError(
                f"the optimizer keeps a {type(value).__name__} as {entry!r} of {name!r}, which can't be sent to other "
                "workers; tensors, numbers and texts can"
            )
    return out


def _flat(tensor: Tensor, state: State) -> State:
    """What is kept for each element as one dimension in logical order (none for a scalar parameter)."""
    return {
        name: value.detach().reshape(tensor.shape if tensor.dim() == 0 else -1)
        if isinstance(value, Tensor) and value.shape == tensor.shape
        else value
        for name, value in state.items()
    }


def _buffer(parameter: Parameter, piece: Piece, kind: str, *about: Any) -> Any:
    if kind == _PLAIN:
        return about[0]
    dtype = getattr(torch, about[0])
    if kind == _EACH:
        return torch.empty(() if parameter.dim() == 0 else piece.elements, dtype=dtype)
    shape, values = about[2:]
    return torch.tensor(values, dtype=dtype).view(shape)


def _on_owners_device(state: State, parameter: Parameter, entries: Entries) -> State:
    """On the device where its owner keeps it."""
    return {
        name: value.to(parameter.device) if isinstance(value, Tensor) and entries[name][2] != "cpu" else value
        for name, value in state.items()
    }


class ShardedOptimizers:
    """All optimizers of a job, as far as they are on this worker; strategies that share one share its shard."""

    def __init__(self, comm: Communicator, strategy: str, masters: MasterShards) -> None:
        self._comm, self._strategy, self._masters = comm, strategy, masters
        self._rank, self._workers = comm.rank, comm.size
        self._shards: dict[int, OptimizerShard] = {}
        self._guards: dict[int, RemovableHandle] = {}
        self._stored: dict[int, dict[int, State]] = {}  # by optimizer and place: loaded, to be read when it has owners
        self._reading = False

    def of(self, optimizer: Optimizer) -> OptimizerShard:
        return self._shards[id(optimizer)]

    def assign(self, optimizer: Optimizer, pieces: LocalPieces) -> None:
        """Let the optimizer's shard hold these pieces; where it holds others all workers call this together."""
        old = self._shards.get(id(optimizer))
        if old is None or old.pieces is not pieces:
            new = self._shards[id(optimizer)] = OptimizerShard(optimizer, pieces, self._masters)
            if old is not None:
                self._move(old, new)
        if id(optimizer) not in self._guards:
            self._guards[id(optimizer)] = optimizer.register_state_dict_pre_hook(self._guard)
        self._shards[id(optimizer)].adopt()
        self._read_stored(optimizer)

    def _move(self, old: OptimizerShard, new: OptimizerShard) -> None:
        """A parameter that has no owners any more (it was frozen) leaves its state with the user's optimizer."""
        pieces = new.pieces

        def receivers(parameter: Parameter) -> frozenset[int]:
            if id(parameter) not in pieces.index:
                return frozenset(range(self._workers))
            return frozenset(worker for worker, _ in pieces.shards.owners.get(pieces.index[id(parameter)], ()))

        leaving = old.leaving(receivers)
        old.forget()  # from here on only `leaving` has it, and lets it go bit by bit
        since = 0
        for parameter, full in full_states(self._comm, leaving):
            since += sum(value.nbytes for value in full.values() if isinstance(value, Tensor))
            if since > GIVE_BACK_EVERY:
                give_back_free_memory()
                since = 0
            if id(parameter) in pieces.index:
                if full:
                    new.load_full(pieces.index[id(parameter)], full)
                continue
            full.pop(MASTER, None)
            if full:
                new.optimizer.state[parameter] = full
        give_back_free_memory()

    # -- master weights -----------------------------------------------------------------------------------------------

    def full_master(self, parameter: Parameter) -> Tensor | None:
        """All of a parameter's master on every worker; None if it has none."""
        if not self._masters.has(parameter):
            return None
        pieces = self._pieces_of(parameter)
        if pieces is None:
            return self._masters.before_assignment(parameter)
        self._masters.take_over_writes(pieces)
        number, dtype = pieces.index[id(parameter)], self._masters.dtype_of(parameter)
        flat = torch.empty(parameter.numel(), dtype=dtype, device=parameter.device)
        for owner, piece in pieces.shards.owners.get(number, ()):
            part = flat[piece.start : piece.stop]
            if owner == self._rank:
                part.copy_(pieces.tensors[piece].reshape(-1))
            self._comm.broadcast(part, root=owner).wait()
        full = torch.empty_strided(parameter.shape, parameter.stride(), dtype=dtype, device=parameter.device)
        return full.copy_(flat.view(parameter.shape)).detach()

    def local_master(self, parameter: Parameter) -> Tensor | LocalShard | None:
        """What this worker has of it: before its pieces have owners every worker has all."""
        if not self._masters.has(parameter):
            return None
        pieces = self._pieces_of(parameter)
        if pieces is None:
            return self._masters.before_assignment(parameter)
        if self._masters.was_written(parameter):
            self._masters.take_over_writes(pieces)
        return pieces.shard_of(pieces.index[id(parameter)], self._masters.dtype_of(parameter))

    def load_master(self, parameter: Parameter, full: Tensor) -> bool:
        """Keep this worker's part of a master, with a parameter that holds it rounded; whether there is a master."""
        if not self._masters.has(parameter):
            return False
        pieces = self._pieces_of(parameter)
        if pieces is None:
            self._masters.load_before_assignment(parameter, full)
        else:
            for piece in pieces.tensors:
                if pieces.parameters[piece.parameter] is parameter:
                    self._masters.load_piece(pieces, piece, full)
        self._masters.mark_clean([parameter])
        return True

    def has_owners(self, parameter: Parameter) -> bool:
        return self._pieces_of(parameter) is not None

    def _pieces_of(self, parameter: Parameter) -> LocalPieces | None:
        holds = (shard.pieces for shard in self._shards.values() if shard.holds(parameter))
        return next(holds, None)

    # -- saved and loaded --------------------------------------------------------------------------------------------

    def local_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The state_dict of the optimizer, with this worker's shards of the states that have owners."""
        shard = self._shards.get(id(optimizer))
        if shard is not None:
            shard.adopt()
            self._read_stored(optimizer)
        self._reading = True
        try:
            saved: dict[str, Any] = optimizer.state_dict()
        finally:
            self._reading = False
        if shard is None:
            return {**saved, "state": {**saved["state"], **full_tree(self._stored.get(id(optimizer), {}))}}
        places = {id(parameter): place for place, parameter in enumerate(_parameters_of(optimizer))}
        own = {places[id(parameter)]: state for parameter, state in shard.local_states() if state}
        return {**saved, "state": {**saved["state"], **own}}

    def load(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Each worker reads what belongs to its pieces: now, or in the first step, when pieces have owners."""
        optimizer.load_state_dict({**state, "state": {}})
        self._stored[id(optimizer)] = dict(state["state"])
        shard = self._shards.get(id(optimizer))
        if shard is not None:
            shard.forget()
            self._read_stored(optimizer)

    def _read_stored(self, optimizer: Optimizer) -> None:
        """What has no owners, as of frozen parameters, every worker keeps in full."""
        shard, stored = self._shards[id(optimizer)], self._stored.pop(id(optimizer), {})
        members = [(parameter, group) for group in optimizer.param_groups for parameter in group["params"]]
        for place, state in stored.items():
            parameter, group = members[place]
            if shard.holds(parameter):
                shard.load_stored(shard.pieces.index[id(parameter)], state, group)
            else:
                kept = {k: placed(k, v, group, parameter.device, parameter.dtype) for k, v in full_tree(state).items()}
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

    def teardown(self) -> None:
        """Forget this worker's part of the states; the user's optimizers are left without."""
        self.close()
        self._shards.clear()
        self._stored.clear()
