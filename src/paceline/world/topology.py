"""Which ranks share a host: the one fact about the network that every launcher knows.

host 0      host 1            Topology(((0, 1), (2, 3)))
0   1       2   3
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from paceline.errors import WorldError


@dataclass(frozen=True)
class Topology:
    """The ranks of each host; every rank is on one of them."""

    hosts: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        ranks = sorted(rank for host in self.hosts for rank in host)
        if ranks != list(range(len(ranks))) or not all(self.hosts):
            raise WorldError(
                f"hosts with the ranks {self.hosts}: each rank from 0 on is on one host, and none is empty"
            )

    @classmethod
    def one_host(cls, size: int) -> Topology:
        return cls((tuple(range(size)),))

    @classmethod
    def of(cls, host_of_rank: Sequence[int]) -> Topology:
        """From the host number that each rank tells."""
        numbers = sorted(set(host_of_rank))
        return cls(tuple(tuple(r for r, told in enumerate(host_of_rank) if told == number) for number in numbers))

    @property
    def size(self) -> int:
        return sum(len(host) for host in self.hosts)

    @property
    def is_even(self) -> bool:
        """Every host has as many ranks."""
        return len({len(host) for host in self.hosts}) == 1

    @cached_property
    def host_of(self) -> dict[int, int]:
        return {rank: number for number, host in enumerate(self.hosts) for rank in host}
