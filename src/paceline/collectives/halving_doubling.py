"""Recursive halving, then doubling: partners at distance 1, 2, 4, …      steps: 2·log2 N   bytes sent: 2·(N-1)/N · Z

    halving    at each distance a rank keeps one half of its chunks, sends the other half to its partner
               and adds what it receives: after log2 N steps it owns one chunk, finished
    doubling   the same partners in reverse order exchange finished chunks

    not a power of two: N = P + e      steps          bytes sent
    fold       the odd ones of the     1              Z by each of e ranks
               first 2·e ranks give
               theirs to the even one
    the rest   halving and doubling    2·log2 P       2·(P-1)/P · Z by each of P ranks
    unfold     and get the sum back    1              Z by each of e ranks: the busiest send Z + 2·(P-1)/P · Z

At distance 1 rank 2i adds to rank 2i+1, at distance 2 pairs add to pairs: where N is a power of two that *is* the
canonical tree, and since an addition of two numbers commutes, both partners get its bits.
"""

from __future__ import annotations

from collections.abc import Iterator

from paceline.collectives.rounds import Pairs, Round, span
from paceline.collectives.schedule import Hop, How, Receive, Schedule, Send


def power_below(size: int) -> int:
    """The largest power of two that is not above `size`."""
    return 1 << (size.bit_length() - 1)


def hops_of_a_power_of_two(rank: int, size: int) -> Iterator[Hop]:
    halvings: list[tuple[int, range, range]] = []
    held = range(size)
    distance = 1
    while distance < size:
        middle = (held.start + held.stop) // 2
        lower, upper = range(held.start, middle), range(middle, held.stop)
        held, given = (lower, upper) if rank & distance == 0 else (upper, lower)
        halvings.append((rank ^ distance, held, given))
        distance *= 2
    for partner, kept, given in halvings:
        yield Hop(sends=(Send(partner, given),), receives=(Receive(partner, kept, How.ADD),))
    for partner, kept, given in reversed(halvings):
        yield Hop(sends=(Send(partner, kept),), receives=(Receive(partner, given, How.COPY),))


def hops(rank: int, size: int) -> Iterator[Hop]:
    core = power_below(size)
    extra = size - core
    members = [2 * place if place < extra else place + extra for place in range(core)]
    whole = range(core)
    if rank not in members:
        yield Hop(sends=(Send(rank - 1, whole),))
        yield from [Hop()] * (2 * (core.bit_length() - 1))
        yield Hop(receives=(Receive(rank - 1, whole, How.COPY),))
        return
    has_guest = rank < 2 * extra
    if extra:
        yield Hop(receives=(Receive(rank + 1, whole, How.ADD),)) if has_guest else Hop()
    for hop in hops_of_a_power_of_two(members.index(rank), core):
        yield hop.among(members)
    if extra:
        yield Hop(sends=(Send(rank + 1, whole),)) if has_guest else Hop()


def rounds(size: int) -> Iterator[Round]:
    core = power_below(size)
    extra = size - core
    places = span(0, core)
    members = places + places.clip(max=extra)  # 0, 2, 4, … while ranks are folded, then one after another
    folded = span(1, 2 * extra, 2)
    distances = [1 << level for level in range(core.bit_length() - 1)]
    halves = [Round(Pairs(members, members[places ^ d]), chunks=core // (2 * d)) for d in distances]
    if extra:
        yield Round(Pairs(folded, folded - 1), chunks=core)
    yield from [*halves, *reversed(halves)]
    if extra:
        yield Round(Pairs(folded - 1, folded), chunks=core)


HALVING_DOUBLING = Schedule("halving-doubling", chunks=power_below, hops=hops, rounds=rounds)
