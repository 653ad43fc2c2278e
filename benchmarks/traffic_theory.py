"""What the literature says each exchange moves, rank by rank: closed forms, to lay beside what was counted.

    Z bytes, N ranks         sent by the busiest rank                 sent by all ranks together
    star                     (N-1)·Z                                  2·(N-1)·Z
    unsplit ring             (N-1)·Z                                  N·(N-1)·Z
    ring, direct             2·(N-1)/N·Z                              2·(N-1)·Z
    tree                     ⌈log2 N⌉·Z                               2·(N-1)·Z
    halving-doubling         2·(P-1)/P·Z, + Z where N > P             2·(N-1)·Z          P: the power of two below N
    hierarchical             2·(g-1)/g·Z + 2·(H-1)/H·Z/g              2·(N-1)·Z          H hosts of g ranks
    parameter server         N·Z/S at a server, Z at a worker         2·N·Z              S servers beside N workers
    … worker 0 serves        (N-1)·Z                                  2·(N-1)·Z

These hold when Z divides by the number of chunks. Where it does not, chunk i has ⌈(n-i)/N⌉ of the n elements, and the
functions below say exactly who sends how much. None of them looks at a schedule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.collectives.canonical_sum import SumPlan, owner_ranges
from paceline.world.world import Topology


@dataclass(frozen=True)
class Moved:
    """Elements that one rank sends and receives."""

    sent: int
    received: int


def chunk_length(elements: int, chunks: int, chunk: int) -> int:
    return -(-(elements - chunk % chunks) // chunks)


def star(n: int, size: int) -> list[Moved]:
    return [Moved((size - 1) * n, (size - 1) * n) if rank == 0 else Moved(n, n) for rank in range(size)]


def unsplit_ring(n: int, size: int) -> list[Moved]:
    return [Moved((size - 1) * n, (size - 1) * n)] * size


def ring_reduce_scatter(n: int, size: int) -> list[Moved]:
    return [Moved(n - chunk_length(n, size, r), n - chunk_length(n, size, r - 1)) for r in range(size)]


def ring_all_gather(n: int, size: int) -> list[Moved]:
    return [Moved(n - chunk_length(n, size, r + 1), n - chunk_length(n, size, r)) for r in range(size)]


def ring(n: int, size: int) -> list[Moved]:
    return _added(ring_reduce_scatter(n, size), ring_all_gather(n, size))


def tree(n: int, size: int) -> list[Moved]:
    """As many tensors as a rank has children and a parent, each way."""
    children = [
        sum(rank % (2 << level) == 0 and rank + (1 << level) < size for level in range(size.bit_length()))
        for rank in range(size)
    ]
    return [Moved(n * (below + (rank > 0)), n * (below + (rank > 0))) for rank, below in enumerate(children)]


def halving_doubling(n: int, size: int) -> list[Moved]:
    """All but its own chunk, and the blocks of 1, 2, 4, … chunks around it; the first 2·(N-P) ranks work in pairs."""
    levels = size.bit_length() - 1
    core = 1 << levels
    extra = size - core
    out = []
    for rank in range(size):
        if rank < 2 * extra and rank % 2:
            out.append(Moved(n, n))
            continue
        place = rank // 2 if rank < 2 * extra else rank - extra
        own = sum(1 << (levels - 1 - bit) for bit in range(levels) if place >> bit & 1)
        blocks = 0
        for level in range(levels):
            first = own >> level << level
            blocks += sum(chunk_length(n, core, first + chunk) for chunk in range(1 << level))
        moved = n - chunk_length(n, core, own) + blocks + (n if rank < 2 * extra else 0)
        out.append(Moved(moved, moved))
    return out


def direct(n: int, size: int) -> list[Moved]:
    moved = [n + (size - 2) * chunk_length(n, size, rank) for rank in range(size)]
    return [Moved(each, each) for each in moved]


def hierarchical(n: int, topology: Topology) -> list[Moved]:
    return _even_hosts(n, topology) if topology.is_even else _uneven_hosts(n, topology)


def canonical(n: int, plan: SumPlan) -> list[Moved]:
    """Each root to each owner, and each finished range back to everybody."""
    widths = [high - low for low, high in owner_ranges(n, len(plan.holders))]
    roots = [len(plan.roots(rank)) for rank in range(len(plan.holders))]
    return [
        Moved(
            roots[rank] * (n - width) + (len(widths) - 1) * width,
            (sum(roots) - roots[rank]) * width + n - width,
        )
        for rank, width in enumerate(widths)
    ]


def canonical_star(n: int, plan: SumPlan) -> list[Moved]:
    """Each root to rank 0, and the sum back to everybody."""
    roots = [len(plan.roots(rank)) for rank in range(len(plan.holders))]
    others = [Moved(count * n, n) for count in roots[1:]]
    return [Moved(len(others) * n, sum(roots[1:]) * n), *others]


def scatter_to_owners(owned: Sequence[int], nodes: Sequence[int]) -> list[Moved]:
    """Each node of each rank, without the elements that the rank owns itself, to the ranks that own them."""
    n = sum(owned)
    return [Moved(nodes[rank] * (n - own), (sum(nodes) - nodes[rank]) * own) for rank, own in enumerate(owned)]


def gather_from_owners(owned: Sequence[int]) -> list[Moved]:
    """What each rank owns to all others."""
    return [Moved((len(owned) - 1) * own, sum(owned) - own) for own in owned]


def parameter_server(held: Sequence[int], plan: SumPlan, *, named: bool = False) -> list[Moved]:
    """Each root to the servers, by the elements that each of them holds, and one answer to each worker.

    The workers first, then the servers. In both modes: what comes back is weights (update) or a sum (aggregate), and
    gradients and sums are in the buckets' dtype, weights in their own. `named`: all of them on one host, where a
    worker's first root and every answer are read where they lie, so that only further roots are sent.
    """
    roots, answers = _roots_sent(plan, named), 0 if named else len(plan.holders)
    workers = [Moved(count * sum(held), answers and sum(held)) for count in roots]
    return workers + [Moved(answers * own, sum(roots) * own) for own in held]


def parameter_server_inside(n: int, plan: SumPlan, *, named: bool = False) -> list[Moved]:
    """Worker 0 doubles as the server, and sends itself nothing: the canonical star."""
    if not named:
        return canonical_star(n, plan)
    others = _roots_sent(plan, named)[1:]
    return [Moved(0, sum(others) * n), *(Moved(count * n, 0) for count in others)]


def _roots_sent(plan: SumPlan, named: bool) -> list[int]:
    roots = [len(plan.roots(rank)) for rank in range(len(plan.holders))]
    return [max(0, count - 1) for count in roots] if named else roots


def _even_hosts(n: int, topology: Topology) -> list[Moved]:
    hosts, places = len(topology.hosts), len(topology.hosts[0])

    def own(place: int, host: int) -> int:
        return chunk_length(n, hosts * places, place % places * hosts + host % hosts)

    def group(place: int) -> int:
        return sum(own(place, host) for host in range(hosts))

    out = {}
    for host, members in enumerate(topology.hosts):
        for p, rank in enumerate(members):
            across = 2 * group(p) - own(p, host)
            out[rank] = Moved(
                2 * n - group(p) - group(p + 1) + across - own(p, host + 1),
                2 * n - group(p - 1) - group(p) + across - own(p, host - 1),
            )
    return [out[rank] for rank in range(topology.size)]


def _uneven_hosts(n: int, topology: Topology) -> list[Moved]:
    across = ring(n, len(topology.hosts))
    out: dict[int, Moved] = {}
    for host, members in enumerate(topology.hosts):
        inside = tree(n, len(members))
        inside[0] = _added([inside[0]], [across[host]])[0]
        out |= dict(zip(members, inside, strict=True))
    return [out[rank] for rank in range(topology.size)]


def _added(first: Sequence[Moved], second: Sequence[Moved]) -> list[Moved]:
    return [Moved(a.sent + b.sent, a.received + b.received) for a, b in zip(first, second, strict=True)]
