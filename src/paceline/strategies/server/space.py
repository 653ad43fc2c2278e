"""A space: parameters that are updated together, cut into keys, as all workers and servers know it.

    optimizers     the loop steps them together          engine.update(), one by one (a GAN)
    one            space 0                               space 0
    A and B        space 0: the parameters of both       spaces 1 and 2: those of A, those of B

Servers don't see the loop, so both are planned at the start; a server makes room for a space when it hears of it. Every
message carries the digest of its space.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch.nn import Parameter
from torch.optim import Optimizer

from paceline.errors import ConfigError
from paceline.optim.group_settings import GroupSettings
from paceline.parameter_server.key_ranges import KeyTable, plan_keys
from paceline.parameter_server.wire import Header, Protocol
from paceline.sharding.bucket import Bucket, GradientSpec, plan_buckets
from paceline.sharding.flat_layout import FlatLayout
from paceline.strategies.buckets import expected_order


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
        specs = [GradientSpec(tuple(p.shape), p.dtype, torch.device("cpu")) for _, p in named]
        buckets = plan_buckets(specs, expected_order(len(specs)), bucket_bytes, aligned=False)
        table = plan_keys(layout, buckets, servers=servers, key_bytes=key_bytes)
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
