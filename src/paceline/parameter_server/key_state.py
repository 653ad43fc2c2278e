"""The optimizer state of keys on the wire, and between keys and whole parameters.

    key 0: [state of each piece] ┐                              ┌ weight: {"step": 7, "exp_avg": (6, 4096)}
    key 1: [state of each piece] ┴── whole_states / of_keys ──► ┴ bias:   {"step": 7, "exp_avg": (6,)}

One key's state travels as bytes:

    8 bytes: length of the head │ head, JSON: the tree, and of each tensor its type, shape and place │ tensors, aligned
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from math import prod

import torch
from torch import Tensor

from paceline.checkpoint.tensor_file import DTYPES, code_of
from paceline.checkpoint.tree import flatten, unflatten
from paceline.errors import CheckpointError
from paceline.optim.piece_state import State, gather_state, scatter_state
from paceline.parameter_server.key_ranges import KeyTable
from paceline.sharding.flat_layout import Piece
from paceline.sharding.local_shard import LocalShard

_ALIGN = 64
_LENGTH = 8  # bytes that say how long the head is


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


def whole_states(table: KeyTable, by_key: Mapping[int, Sequence[State]], parameters: Sequence[Tensor]) -> list[State]:
    """The state of each parameter, from the states of the pieces of all keys."""
    found = _by_parameter(table, by_key)
    wholes: list[State] = []
    for parameter, name, parts in zip(parameters, table.layout.names, found, strict=True):
        pieces, states = [piece for piece, _ in parts], [state for _, state in parts]
        wholes.append(gather_state(states, pieces, parameter, name))
    return wholes


def sliced_states(table: KeyTable, by_key: Mapping[int, Sequence[State]], parameters: Sequence[Tensor]) -> list[State]:
    """The same without a copy: what is kept for each element as slices, which lie where they are."""
    wholes: list[State] = []
    for parameter, parts in zip(parameters, _by_parameter(table, by_key), strict=True):
        pieces, states = [piece for piece, _ in parts], [state for _, state in parts]
        if any(state.keys() != states[0].keys() for state in states):  # `gather_state` says what is wrong with that
            return whole_states(table, by_key, parameters)
        shapes = [() if parameter.dim() == 0 else (piece.elements,) for piece in pieces]
        whole: State = {}
        for entry, value in max(states, key=_steps, default={}).items():  # no element, no piece
            values = [state[entry] for state in states]
            if all(isinstance(v, Tensor) and v.shape == shape for v, shape in zip(values, shapes, strict=True)):
                places = [(piece.start, values[place]) for place, piece in enumerate(pieces)]
                whole[entry] = LocalShard.of(parameter.shape, value.dtype, places)
            else:
                whole[entry] = value
        wholes.append(whole)
    return wholes


def _steps(state: State) -> float:
    """An asynchronous run may have dropped late pushes of some pieces: what belongs to the whole is of the others."""
    return float(state.get("step", 0))


def _by_parameter(table: KeyTable, by_key: Mapping[int, Sequence[State]]) -> list[list[tuple[Piece, State]]]:
    found: list[list[tuple[Piece, State]]] = [[] for _ in table.layout.names]
    for key in table.keys:
        for piece, state in zip(key.pieces, by_key[key.number], strict=True):
            found[piece.parameter].append((piece, state))
    for parts in found:
        parts.sort(key=lambda part: part[0].start)
    return found


def states_of_keys(table: KeyTable, wholes: Sequence[State]) -> dict[int, list[State]]:
    """The states of each key's pieces, from those of the parameters."""
    shapes = table.layout.shapes
    return {
        key.number: [
            scatter_state(wholes[piece.parameter], shapes[piece.parameter], [piece])[0] for piece in key.pieces
        ]
        for key in table.keys
    }
