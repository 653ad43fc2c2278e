"""Whole states out of pieces: the optimizer's state of a parameter, from workers that hold it to those that want it.

    worker 0   weight[0:8192]  {step 7, exp_avg …}  ──┐
    worker 1   weight[8192:]   {step 7, exp_avg …}  ──┴─►  {step 7, exp_avg (6, 4096)} on the receivers

One parameter after another, so that nobody holds more than one whole state that it does not want; the pieces, which are
not needed any more, go one after another too. First all workers tell each other what they keep for each piece; what
is kept once for a piece, like a step count, travels with that.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from paceline.collectives.communicator import Communicator, Handle, wait_all
from paceline.errors import CheckpointError
from paceline.optim.piece_state import State, gather_state
from paceline.sharding.flat_layout import Piece

_OPERATION = "optimizer state"
_EACH, _ONCE, _PLAIN = "each element", "once", "plain"


@dataclass(frozen=True)
class DealtState:
    """One parameter's state in its pieces: who has which, this worker's own, and who shall get the whole."""

    name: str
    parameter: Parameter
    owners: tuple[tuple[int, Piece], ...]
    mine: dict[Piece, tuple[Tensor, State]]  # the piece and what is kept for it
    receivers: frozenset[int]


def whole_states(comm: Communicator | None, dealt: Sequence[DealtState]) -> Iterator[tuple[Parameter, State]]:
    """The states of the parameters that this worker receives; all workers go through all of them.

    This worker's pieces of one are let go before the next.
    """
    mine = [[[p.start, _described(d.name, *held)] for p, held in d.mine.items()] for d in dealt]
    told = [mine] if comm is None else comm.gather_json(mine)
    rank = 0 if comm is None else comm.rank
    for number, d in enumerate(dealt):
        kept = {(worker, start): entries for worker, table in enumerate(told) for start, entries in table[number]}
        wanted = rank in d.receivers
        states: list[State] = []
        under_way: list[Handle] = []
        for owner, piece in d.owners:
            entries = kept[owner, piece.start]
            if owner == rank:
                states.append(_flat(*d.mine[piece]))
                if comm is not None:
                    under_way += _sent(comm, states[-1], entries, d.receivers - {rank})
            elif wanted and comm is not None:
                states.append({name: _room(d.parameter, piece, *about) for name, about in entries.items()})
                under_way += _received(comm, states[-1], entries, owner)
        wait_all(under_way)
        if wanted:
            states = [
                _placed(state, d.parameter, kept[owner, piece.start])
                for state, (owner, piece) in zip(states, d.owners, strict=True)
            ]
            whole = gather_state(states, [piece for _, piece in d.owners], d.parameter, d.name)
        del states, under_way
        d.mine.clear()
        if wanted:
            yield d.parameter, whole
            del whole


Entries = Mapping[str, Sequence[Any]]


def _sent(comm: Communicator, state: State, entries: Entries, receivers: Collection[int]) -> list[Handle]:
    each = [state[name].cpu().view(-1) for name, (kind, *_) in entries.items() if kind == _EACH]
    return [comm.send(t, to=receiver, tag=0, operation=_OPERATION) for t in each for receiver in sorted(receivers)]


def _received(comm: Communicator, state: State, entries: Entries, owner: int) -> list[Handle]:
    each = [state[name].view(-1) for name, (kind, *_) in entries.items() if kind == _EACH]
    return [comm.receive(room, source=owner, tag=0, operation=_OPERATION) for room in each]


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
                f"the optimizer keeps a {type(value).__name__} as {entry!r} of {name!r}, which can't be told to other "
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


def _room(parameter: Parameter, piece: Piece, kind: str, *about: Any) -> Any:
    if kind == _PLAIN:
        return about[0]
    dtype = getattr(torch, about[0])
    if kind == _EACH:
        return torch.empty(() if parameter.dim() == 0 else piece.elements, dtype=dtype)
    shape, values = about[2:]
    return torch.tensor(values, dtype=dtype).view(shape)


def _placed(state: State, parameter: Parameter, entries: Entries) -> State:
    """On the device where its owner keeps it."""
    return {
        name: value.to(parameter.device) if isinstance(value, Tensor) and entries[name][2] != "cpu" else value
        for name, value in state.items()
    }
