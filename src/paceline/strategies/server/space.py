"""A space: parameters that are updated together, cut into keys, as all workers and servers know it.

    optimizers     the loop steps them together          engine.update(), one by one (a GAN)
    one            space 0                               space 0
    A and B        space 0: the parameters of both       spaces 1 and 2: those of A, those of B

Servers don't see the loop, so both are planned at the start; a server makes room for a space when it hears of it. Every
message carries the digest of its space.

Between keys and parameters:

    key 3 |── ln.weight ──|─ ln.bias ─|── head[0:4096] ──|  ──put──►  ln.weight, ln.bias, the first part of head

    key 0: [state of each piece] ┐                              ┌ weight: {"step": 7, "exp_avg": (6, 4096)}
    key 1: [state of each piece] ┴── whole_states / of_keys ──► ┴ bias:   {"step": 7, "exp_avg": (6,)}
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from paceline.compression import UNCOMPRESSED, Compression
from paceline.errors import ConfigError
from paceline.optim.group_settings import GroupSettings
from paceline.optim.piece_state import State, gather_state, scatter_state
from paceline.parameter_server.key_ranges import Key, KeyTable, plan_keys
from paceline.parameter_server.wire import Header, Protocol
from paceline.sharding.bucket import Bucket, GradientSpec, plan_buckets
from paceline.sharding.flat_layout import FlatLayout, Piece
from paceline.sharding.local_shard import LocalShard
from paceline.strategies.buckets import expected_order
from paceline.strategies.compressed.gradients import ChosenCompressors
from paceline.torch_compat import foreach_copy_, version_of


@dataclass(frozen=True)
class Space:
    named: tuple[tuple[str, Parameter], ...]
    optimizers: tuple[Optimizer, ...]
    settings: GroupSettings  # which there are is known from here on: a schedule made later adds its own notes to groups
    buckets: tuple[Bucket, ...]
    protocol: Protocol

    @property
    def table(self) -> KeyTable:
        return self.protocol.table

    @cached_property
    def parameters(self) -> list[Parameter]:
        return [parameter for _, parameter in self.named]

    def is_of(self, optimizers: Sequence[Optimizer]) -> bool:
        return [id(one) for one in self.optimizers] == [id(one) for one in optimizers]


def plan_spaces(
    optimizers: Sequence[Optimizer],
    names: Mapping[int, str],
    *,
    workers: int,
    servers: int,
    lanes: int,
    bucket_bytes: int,
    key_bytes: int | None,
    compression: Compression = UNCOMPRESSED,
) -> list[Space]:
    """All optimizers together first; then, where there are several, each of them."""
    spaces: list[Space] = []
    for together in (tuple(optimizers), *([(one,) for one in optimizers] if len(optimizers) > 1 else [])):
        named = tuple(_trained(together, names))
        if not named and spaces:
            continue
        _check_one_device(named)
        layout = FlatLayout.of(named)
        # Where gradients are is no part of the plan: a server has them in the host's memory.
        specs: Sequence[GradientSpec] = [GradientSpec(tuple(p.shape), p.dtype, torch.device("cpu")) for _, p in named]
        chosen = ChosenCompressors.by(compression, named)
        buckets = plan_buckets(chosen.grouped(specs), expected_order(len(specs)), bucket_bytes, aligned=False)
        table = plan_keys(layout, buckets, servers=servers, key_bytes=key_bytes, compressor_of=chosen.of)
        spaces.append(Space(named, together, GroupSettings(together), buckets, Protocol(table, workers, lanes)))
    return spaces


def _trained(optimizers: Sequence[Optimizer], names: Mapping[int, str]) -> Iterator[tuple[str, Parameter]]:
    unique = {id(p): p for o in optimizers for group in o.param_groups for p in group["params"] if p.requires_grad}
    for place, (number, parameter) in enumerate(unique.items()):
        yield names.get(number, f"unnamed {place}"), parameter


def _check_one_device(named: Sequence[tuple[str, Parameter]]) -> None:
    by_device = {parameter.device: name for name, parameter in reversed(named)}
    if len(by_device) > 1:
        (first, one), (second, other), *_ = by_device.items()
        raise ConfigError(
            f"strategy='parameter_server': {one!r} is on {first} but {other!r} on {second}; put the model on one device"
        )


def check_of(spaces: Sequence[Space], header: Header, *, server: int) -> None:
    """A header against the space it names; one that names none is refused with the reason."""
    space = next((space for space in spaces if space.table.digest == header.digest), spaces[0])
    space.protocol.check(header, server=server)


# -- weights -----------------------------------------------------------------------------------------------------------


class ModelWeights:
    """Weights on their way into the model: what a server holds by key is copied into the parameters it is made of.

    A parameter whose memory is not in logical order has no part that could be written to: it goes through a copy.
    """

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        self._parameters = parameters
        self._flat: dict[int, tuple[int, Tensor]] = {}  # by parameter: its address when that was found
        self._kept: list[Tensor] | None = None

    def put(self, key: Key, weights: Tensor) -> None:
        device = self._parameters[key.pieces[0].parameter].device
        with torch.no_grad():
            targets: list[Tensor] = []
            parts: list[Tensor] = []
            for piece, part in zip(key.pieces, key.views(weights.to(device)), strict=True):
                parameter = self._parameters[piece.parameter]
                if parameter.is_contiguous():
                    targets.append(self._flat_of(piece.parameter)[piece.start : piece.stop])
                    parts.append(part)
                else:
                    _put_piece(parameter, piece, part)
            if targets:
                foreach_copy_(targets, parts)

    def _flat_of(self, index: int) -> Tensor:
        parameter = self._parameters[index]
        address, flat = self._flat.get(index, (0, parameter))
        if address != parameter.data_ptr():
            flat = parameter.detach().view(-1)
            self._flat[index] = parameter.data_ptr(), flat
        return flat

    # -- a round's weights while others are shown --------------------------------------------------------------------

    def keep(self) -> None:
        """Remember the weights as they are, unless some are remembered already."""
        if self._kept is None:
            self._kept = self.copies()

    def restore(self) -> None:
        """Put back what was remembered, if anything."""
        if self._kept is not None:
            self.put_all(self._kept)
            self._kept = None

    def copies(self) -> list[Tensor]:
        return [parameter.detach().clone() for parameter in self._parameters]

    def put_all(self, weights: Sequence[Tensor]) -> None:
        with torch.no_grad():
            foreach_copy_(list(self._parameters), list(weights))

    def remember(self, weights: Sequence[Tensor] | None) -> None:
        """Others than the model holds; None: nothing."""
        self._kept = None if weights is None else list(weights)

    @property
    def remembered(self) -> Sequence[Tensor] | None:
        return self._kept

    def versions(self) -> list[int]:
        """They change when a parameter is written to."""
        return [version_of(parameter) for parameter in self._parameters]


def _put_piece(parameter: Parameter, piece: Piece, part: Tensor) -> None:
    flat = parameter.detach().reshape(-1)
    flat[piece.start : piece.stop] = part
    parameter.copy_(flat.view(parameter.shape))


# -- optimizer state ---------------------------------------------------------------------------------------------------


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
