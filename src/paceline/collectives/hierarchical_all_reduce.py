"""Hierarchical all-reduce: first inside each host, then across hosts, then inside again.

    hosts of g ranks each, H hosts                       steps                      bytes sent by a rank
    inside    ring reduce-scatter                        g-1                        (g-1)/g · Z
    across    ring all-reduce of Z/g, between the        2·(H-1)                    2·(H-1)/H · Z/g
              ranks with the same place in their host
    inside    ring all-gather                            g-1                        (g-1)/g · Z

    hosts of unequal size                                steps                      bytes sent by a host's first rank
    inside    tree to the host's first rank              ⌈log2 g⌉                   0, its members Z or more
    across    ring all-reduce between first ranks        2·(H-1)                    2·(H-1)/H · Z
    inside    tree back                                  ⌈log2 g⌉                   ⌈log2 g⌉ · Z

Each host sends 2·(H-1)/H · Z across, with 2·(H-1) steps on the slow links instead of the flat ring's 2·(N-1).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from paceline.collectives import ring_all_reduce, tree_all_reduce
from paceline.collectives.rounds import Ring, Round, rows
from paceline.collectives.schedule import Hop, Schedule
from paceline.errors import ConfigError
from paceline.world.world import Topology

NAME = "hierarchical"


@lru_cache(maxsize=16)
def hierarchical(topology: Topology) -> Schedule:
    def hops(rank: int, size: int) -> Iterator[Hop]:
        if size != topology.size:
            raise ConfigError(f"hosts with the ranks {topology.hosts} have {topology.size} ranks, not {size}")
        return hops_of_even_hosts(rank, topology) if topology.is_even else hops_by_first_ranks(rank, topology)

    def rounds(size: int) -> Iterator[Round]:
        hosts = rows(topology.hosts)
        inside, across = Ring(hosts), Ring(hosts.T)
        yield Round(inside, chunks=len(hosts), times=hosts.shape[1] - 1)
        yield Round(across, times=2 * (len(hosts) - 1))
        yield Round(inside, chunks=len(hosts), times=hosts.shape[1] - 1)

    chunks = topology.size if topology.is_even else len(topology.hosts)
    return Schedule(NAME, chunks=lambda size: chunks, hops=hops, rounds=rounds if topology.is_even else None)


def hops_of_even_hosts(rank: int, topology: Topology) -> Iterator[Hop]:
    """A rank's place in its host owns as many neighbouring chunks as there are hosts."""
    host = topology.host_of[rank]
    inside, hosts = topology.hosts[host], len(topology.hosts)
    place = inside.index(rank)
    across = [members[place] for members in topology.hosts]
    for hop in ring_all_reduce.reduce_scatter_hops(place, len(inside)):
        yield hop.among(inside, width=hosts)
    for hop in ring_all_reduce.hops(host, hosts):
        yield hop.among(across, first=place * hosts)
    for hop in ring_all_reduce.all_gather_hops(place, len(inside)):
        yield hop.among(inside, width=hosts)


def hops_by_first_ranks(rank: int, topology: Topology) -> Iterator[Hop]:
    host = topology.host_of[rank]
    inside, hosts = topology.hosts[host], len(topology.hosts)
    place = inside.index(rank)
    steps_inside = max(len(members) - 1 for members in topology.hosts).bit_length()  # ⌈log2⌉ of the largest host
    up = [hop.among(inside, width=hosts) for hop in tree_all_reduce.reduce_hops(place, len(inside))]
    down = [hop.among(inside, width=hosts) for hop in tree_all_reduce.broadcast_hops(place, len(inside))]
    idle = [Hop()] * (steps_inside - len(up))
    first_ranks = [members[0] for members in topology.hosts]
    yield from [*up, *idle]
    for hop in ring_all_reduce.hops(host, hosts):
        yield hop.among(first_ranks) if place == 0 else Hop()
    yield from [*idle, *down]
