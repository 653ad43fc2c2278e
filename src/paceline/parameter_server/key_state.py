"""The optimizer state of keys on the wire, and between keys and whole parameters.

    key 0: [state of each piece] ┐                              ┌ weight: {"step": 7, "exp_avg": (6, 4096)}
    key 1: [state of each piece] ┴── whole_states / of_keys ──► ┴ bias:   {"step": 7, "exp_avg": (6,)}

One key's state travels as bytes: tensors as safetensors, the rest (names, numbers, None) as JSON among them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from paceline.checkpoint.tree import flatten, unflatten
from paceline.errors import CheckpointError
from paceline.optim.piece_state import State, gather_state, scatter_state
from paceline.parameter_server.key_ranges import KeyTable
from paceline.sharding.flat_layout import Piece
from paceline.sharding.slices import Slices

_TREE = "$tree"


def pack_states(states: Sequence[State]) -> Tensor:
    tree, leaves = flatten(list(states))
    tensors = {name: leaf.detach().cpu().contiguous() for name, leaf in leaves.items() if isinstance(leaf, Tensor)}
    tensors[_TREE] = torch.frombuffer(bytearray(json.dumps(tree).encode()), dtype=torch.uint8)
    return torch.frombuffer(bytearray(save(tensors)), dtype=torch.uint8)


def unpack_states(packed: Tensor) -> list[State]:
    try:
        tensors = load(packed.numpy().tobytes())
        tree = json.loads(tensors.pop(_TREE).numpy().tobytes())
        states: list[State] = unflatten(tree, tensors)
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"a key's optimizer state can't be read: {type(error).__name__}: {error}") from error
    return states


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
        for entry, value in max(states, key=_steps).items():
            values = [state[entry] for state in states]
            if all(isinstance(v, Tensor) and v.shape == shape for v, shape in zip(values, shapes, strict=True)):
                places = [(piece.start, values[place]) for place, piece in enumerate(pieces)]
                whole[entry] = Slices.of(parameter.shape, value.dtype, places)
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
