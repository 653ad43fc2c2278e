"""Which all-reduce for this many bytes, ranks and hosts: the one whose schedule, walked hop by hop, costs least.

    α   seconds until a message is there, however small     a hop costs α + (messages-1)·further + bytes·β + added·γ
    β   seconds per byte on its way                         of the rank that has most to do in it
    γ   seconds per byte added

Walking gives the costs of the literature (ring 2(N-1)α + 2(N-1)/N·nβ + (N-1)/N·nγ, tree 2⌈log2 N⌉(α+nβ) …) and, where
there is no textbook formula, the right thing too: any N, hosts of any size. α, β and γ are measured once by a
ping-pong, inside a host and between two of them, and all ranks use the same numbers, so they choose alike.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache

import torch

from paceline.collectives.communicator import Communicator, wait_all
from paceline.collectives.direct_all_reduce import DIRECT
from paceline.collectives.halving_doubling import HALVING_DOUBLING
from paceline.collectives.hierarchical_all_reduce import hierarchical
from paceline.collectives.ring_all_reduce import RING, UNSPLIT_RING
from paceline.collectives.schedule import Hop, How, Schedule
from paceline.collectives.star_all_reduce import STAR
from paceline.collectives.tree_all_reduce import TREE
from paceline.errors import ConfigError
from paceline.world.world import Topology

FLAT = {schedule.name: schedule for schedule in (RING, HALVING_DOUBLING, DIRECT, TREE, STAR, UNSPLIT_RING)}
HIERARCHICAL = "hierarchical"
AUTO = "auto"
ALGORITHMS = (*FLAT, HIERARCHICAL, AUTO)

PING_PONG = "ping-pong"
PING_PONG_TAG = 2**30  # above every bucket's
ROUND_TRIPS, BURST = 12, 8
LARGE_BYTES = 2**20


@dataclass(frozen=True)
class Link:
    """Seconds: until a small message is there, per byte, and for each further message that starts with it."""

    alpha_s: float
    beta_s: float
    further_s: float = 0.0

    def seconds(self, messages: int, nbytes: float) -> float:
        return self.alpha_s + (messages - 1) * self.further_s + nbytes * self.beta_s if messages else 0.0


@dataclass(frozen=True)
class Network:
    """Links inside a host and across; `shared`: what the ranks of a host send across goes through one card."""

    inside: Link
    across: Link
    gamma_s: float = 0.0
    shared: bool = True


def check_algorithm(name: str) -> None:
    if not isinstance(name, str) or name not in ALGORITHMS:
        raise ConfigError(f"algorithm={name!r} is not known; choose one of {', '.join(ALGORITHMS)}")


def schedule_named(name: str, topology: Topology) -> Schedule:
    check_algorithm(name)
    return hierarchical(topology) if name == HIERARCHICAL else FLAT[name]


# -- the choice, a pure function ---------------------------------------------------------------------------------------


@lru_cache(maxsize=1024)
def choose(nbytes: int, topology: Topology, network: Network) -> str:
    """The name of the cheapest; of equals the one that is listed first."""
    names = [*FLAT, *([HIERARCHICAL] if len(topology.hosts) > 1 else [])]
    return min(names, key=lambda name: predicted_s(schedule_named(name, topology), nbytes, topology, network))


def predicted_s(schedule: Schedule, nbytes: int, topology: Topology, network: Network) -> float:
    """Hops one after another, nothing overlapping: it ranks algorithms, it does not tell the time."""
    size = topology.size
    per_chunk = nbytes / schedule.chunks(size)
    together = zip(*(schedule.hops(rank, size) for rank in range(size)), strict=True)
    return sum(_hop_s(hops, per_chunk, topology, network) for hops in together)


def _hop_s(hops: Sequence[Hop], per_chunk: float, topology: Topology, network: Network) -> float:
    """The slowest rank's time; both directions of a link work at once, and so do links inside and across."""
    host_of = topology.host_of
    inside, across, added = _Load(network.inside), _Load(network.across), [0.0] * len(hops)

    def card(rank: int) -> int:
        return host_of[rank] if network.shared else rank

    def load(rank: int, peer: int, direction: str, nbytes: float) -> None:
        if host_of[rank] == host_of[peer]:
            inside.add(rank, direction, nbytes)
        else:
            across.add(card(rank), direction, nbytes)

    for rank, hop in enumerate(hops):
        for send in hop.sends:
            load(rank, send.to, "out", len(send.chunks) * per_chunk)
        for receive in hop.receives:
            load(rank, receive.source, "in", len(receive.chunks) * per_chunk)
            added[rank] += len(receive.chunks) * per_chunk * (receive.how is not How.COPY)
    return max(
        max(inside.seconds(rank), across.seconds(card(rank))) + nbytes * network.gamma_s
        for rank, nbytes in enumerate(added)
    )


class _Load:
    """Messages and bytes in both directions of some links of one kind."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._messages: dict[tuple[int, str], int] = defaultdict(int)
        self._bytes: dict[tuple[int, str], float] = defaultdict(float)

    def add(self, end: int, direction: str, nbytes: float) -> None:
        self._messages[end, direction] += 1
        self._bytes[end, direction] += nbytes

    def seconds(self, end: int) -> float:
        """Of the busier direction."""
        keys = [(end, "out"), (end, "in")]
        return max(self._link.seconds(self._messages.get(key, 0), self._bytes.get(key, 0.0)) for key in keys)


# -- what all ranks agree on -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Choice:
    """What was asked for, and what all ranks know about their network."""

    algorithm: str
    topology: Topology
    network: Network | None = None  # known where it is needed: for "auto"

    @classmethod
    def agreed(cls, comm: Communicator, algorithm: str, network: Network | None = None) -> Choice:
        """A collective: all ranks of `comm` call it at the same place. "auto" measures, unless the network is given."""
        check_algorithm(algorithm)
        topology = Topology.of(comm.gather_json(comm.world.host_rank))
        if algorithm == AUTO and network is None:
            network = measure_network(comm, topology)
        return cls(algorithm, topology, network)

    def schedule(self, nbytes: int) -> Schedule:
        name = self.algorithm
        if name == AUTO:
            assert self.network is not None
            name = choose(nbytes, self.topology, self.network)
        return schedule_named(name, self.topology)


def measure_network(comm: Communicator, topology: Topology) -> Network:
    """A collective. One pair inside a host and one across play ping-pong; all ranks take rank 0's view of both."""
    crowded = max(topology.hosts, key=len)
    inside = _ping_pong(comm, crowded[0], crowded[1]) if len(crowded) > 1 else None
    across = _ping_pong(comm, topology.hosts[0][0], topology.hosts[1][0]) if len(topology.hosts) > 1 else None
    told = comm.gather_json([asdict(link) if link else None for link in (inside, across)] + [_seconds_per_byte_added()])
    links = [next((Link(**row[column]) for row in told if row[column]), None) for column in (0, 1)]
    near, far = links[0] or links[1], links[1] or links[0]
    assert near is not None
    assert far is not None
    return Network(inside=near, across=far, gamma_s=told[0][2])


def _ping_pong(comm: Communicator, first: int, second: int) -> Link | None:
    """The link between two ranks as `first` measured it; None everywhere else."""
    if comm.rank not in (first, second):
        return None
    peer = second if comm.rank == first else first
    device = "cuda" if comm.backend == "nccl" else "cpu"
    small, large = (torch.zeros(nbytes, dtype=torch.uint8, device=device) for nbytes in (8, LARGE_BYTES))

    def there_and_back(tensor: torch.Tensor, messages: int = 1) -> Callable[[], None]:
        """`messages` at once there, one back."""

        def send(count: int) -> None:
            wait_all([comm.send(tensor, to=peer, tag=PING_PONG_TAG, operation=PING_PONG) for _ in range(count)])

        def receive(count: int) -> None:
            targets = [torch.empty_like(tensor) for _ in range(count)]
            wait_all([comm.receive(t, source=peer, tag=PING_PONG_TAG, operation=PING_PONG) for t in targets])

        def play() -> None:
            if comm.rank == first:
                send(messages)
                receive(1)
            else:
                receive(messages)
                send(1)
            if device == "cuda":
                torch.cuda.synchronize()

        return play

    one, burst, long = (
        _median_s(play, ROUND_TRIPS)
        for play in (there_and_back(small), there_and_back(small, BURST), there_and_back(large))
    )
    if comm.rank != first:
        return None
    return Link(
        alpha_s=one / 2,
        beta_s=max(0.0, long - one) / 2 / LARGE_BYTES,
        further_s=max(0.0, burst - one) / (BURST - 1),
    )


def _seconds_per_byte_added() -> float:
    total, addend = torch.zeros(LARGE_BYTES // 4), torch.zeros(LARGE_BYTES // 4)
    return _median_s(lambda: total.add_(addend), 8) / LARGE_BYTES


def _median_s(play: Callable[[], object], times: int) -> float:
    return statistics.median(_timed(play) for _ in range(times))


def _timed(play: Callable[[], object]) -> float:
    started = time.perf_counter()
    play()
    return time.perf_counter() - started
