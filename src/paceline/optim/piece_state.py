"""Optimizer state between its two forms: one dict for a whole parameter, or one for each of its pieces.

    whole     {"step": 7, "exp_avg": (6, 4096)}                what a state_dict holds and a checkpoint keeps
                 │ scatter_state      ▲ gather_state
    pieces    {"step": 7, "exp_avg": (8192,)}  {"step": 7, "exp_avg": (16384,)}

What has the parameter's shape is cut or joined; what has not (a step count, a product of momenta) belongs to the whole
and is given to every piece. There and back again changes no bit.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.errors import CheckpointError
from paceline.sharding.flat_layout import Piece, joined, part_of

State = dict[str, Any]


def scatter_state(whole: Mapping[str, Any], shape: Sequence[int], pieces: Sequence[Piece]) -> list[State]:
    """The state of each piece of a parameter of this shape; every tensor in it is a copy."""
    return [{name: _part(value, tuple(shape), piece) for name, value in whole.items()} for piece in pieces]


def _part(value: Any, shape: tuple[int, ...], piece: Piece) -> Any:
    if not isinstance(value, Tensor):
        return copy.copy(value)
    return (part_of(value, piece) if tuple(value.shape) == shape else value.detach()).clone()


def gather_state(states: Sequence[Mapping[str, Any]], pieces: Sequence[Piece], parameter: Tensor, name: str) -> State:
    """The state of the whole parameter from those of all its pieces in order, laid in memory as the parameter is.

    After an asynchronous run that dropped late pushes, pieces may have been updated a different number of times; what
    belongs to the whole then comes from the piece with the most steps.
    """
    _check_all_there(pieces, parameter, name)
    if not any(states):
        return {}
    for piece, state in zip(pieces, states, strict=True):
        if state.keys() != states[0].keys():
            raise CheckpointError(
                f"the optimizer keeps {sorted(states[0])} for elements 0 to {pieces[0].stop} of {name!r} but "
                f"{sorted(state)} for {piece.start} to {piece.stop}: not all of it was updated yet; save after a step "
                "that updates everything"
            )
    ahead = max(range(len(states)), key=lambda place: (_steps(states[place]), -place))
    whole: State = {}
    for entry, value in states[ahead].items():
        values = [state[entry] for state in states]
        if all(_is_per_element(v, piece, parameter) for v, piece in zip(values, pieces, strict=True)):
            whole[entry] = like(parameter, joined(values, tuple(parameter.shape)))
        else:
            whole[entry] = value.detach().clone() if isinstance(value, Tensor) else copy.copy(value)
    return whole


def _check_all_there(pieces: Sequence[Piece], parameter: Tensor, name: str) -> None:
    ends = [0, *(piece.stop for piece in pieces)]
    if [piece.start for piece in pieces] + [parameter.numel()] != ends:
        held = [(piece.start, piece.stop) for piece in pieces]
        raise CheckpointError(
            f"{name!r} has {parameter.numel():,} elements but its pieces are {held}; all of them are needed, in order"
        )


def _is_per_element(value: Any, piece: Piece, parameter: Tensor) -> bool:
    shape = () if parameter.dim() == 0 else (piece.elements,)
    return isinstance(value, Tensor) and tuple(value.shape) == shape


def _steps(state: Mapping[str, Any]) -> float:
    return float(state["step"]) if "step" in state else 0.0


def like(parameter: Tensor, values: Tensor) -> Tensor:
    """Fused optimizers walk a parameter and its state by memory, so they need the same strides."""
    if values.stride() == parameter.stride():
        return values
    return torch.empty_like(
        parameter, dtype=values.dtype, device=values.device, memory_format=torch.preserve_format
    ).copy_(values)
