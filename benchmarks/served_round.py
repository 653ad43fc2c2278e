"""A round of servers on the workers' hosts, message by message: links are queues, and a tensor waits for a word.

    worker ── header ──────────────────────────────► server      gloo sends a tensor when its reader has said that it is
    worker ◄────────────────────────────── word ──── server      ready. The word is one packet, and stands in the queues
    worker ══ tensor ══════════════════════════════► server      of the other direction: behind what the reader's host
             uplink of its host ─► downlink of the other's       sends, then behind what comes into the sender's host

A server on a host of its own sends nothing while it reads, and its words cost a latency: `push_and_pull` in exchange.py
has none. Where every host has a worker and a server, both directions are full of tensors. All workers push their keys
in one order, so they queue before one host after another, and a word into that host waits for all of them, while the
link that it would set to work has nothing to do.

When a message leaves depends on the queues, and the queues on when messages leave. All messages are arrays: a pass
takes all of them through all queues, with the times of the pass before. What happens first is right after one pass and
stays so, what follows from it after the next, until nothing changes (some 20 passes for 8 hosts). Times are whole
nanoseconds: as floats, two messages at the same time could change places for ever.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from paceline.collectives.rounds import Ranks
from paceline.parameter_server.channel import TENSORS
from paceline.parameter_server.wire import FIELDS
from paceline.simulate.network import Placed
from paceline.simulate.ring_time import Times

Ticks: TypeAlias = NDArray[np.int64]  # nanoseconds

MESSAGE_S = 100e-6
"""What a message costs each of its ends before the next one's turn: Python and gloo (collectives/executor.py)."""
WORD_BYTES = 48 + 66.0  # gloo's preamble; TCP, IP, Ethernet
HEADER_BYTES = 8 * FIELDS + WORD_BYTES
PIECE_BYTES = 16 * 2**10
"""A tensor travels in pieces of so much, and others come in between. It is the burst of benchmarks/shaped_links.py."""


class ServedRound:
    """Every worker pushes its keys to their servers, and each server sends all of its keys back when it has them."""

    def __init__(self, placed: Placed, workers: int, servers: int, nbytes: float, keys: int) -> None:
        """Among the ranks workers come first, then servers. Keys are of equal size; servers hold them in turn."""
        worker, key = (each.ravel() for each in np.indices((workers, keys)))
        server = key % servers
        sources, targets = np.concatenate([[worker, workers + server], [workers + server, worker]], axis=1)
        count, self._pushes, self._worker, self._server = len(sources), len(key), worker, server
        # A server answers key by key, and for each of them the workers as they are numbered.
        turn = np.concatenate([key, key // servers * workers + worker])
        self._posted = _ticks(2 * MESSAGE_S * (1 + turn))  # a header and a tensor for each
        self._message = _ticks(MESSAGE_S)
        # A channel has the receives of so many tensors posted: the next one's word follows when one has come.
        self._behind = np.flatnonzero(np.tile(key, 2) >= TENSORS * servers)
        self._ahead = self._behind - TENSORS * servers
        pieces = max(1, round(nbytes / keys / PIECE_BYTES))
        piece = np.repeat(np.arange(count), pieces)
        sizes = np.repeat([HEADER_BYTES, WORD_BYTES, nbytes / keys / pieces], [count, count, len(piece)])
        ends = np.concatenate([[sources, targets], [targets, sources], [sources[piece], targets[piece]]], axis=1)
        self._piece = piece
        self._path = _Path(placed, ends[0], ends[1], sizes)

    def run(self, starts: Times) -> Times:
        """When each worker begins; when it has all weights."""
        count, pushes = len(self._posted), self._pushes
        begun = np.concatenate([_ticks(starts)[self._worker], np.zeros(pushes, dtype=np.int64)])
        heard = ready = there = begun.copy()  # when a header, a word and a tensor are at their other end
        while True:  # it ends: a pass makes right at least the first event that was not
            read = there + self._message
            begun[pushes:] = _last(read[:pushes], self._server)[self._server]
            asks = heard + self._message
            asks[self._behind] = np.maximum(asks[self._behind], read[self._ahead])
            out = self._path.take(np.concatenate([begun + self._posted, asks, ready[self._piece]]))
            found = out[:count], out[count : 2 * count], out[2 * count :].reshape(count, -1)[:, -1]
            if all(map(np.array_equal, found, (heard, ready, there))):
                return _last(read[pushes:], self._worker) / 1e9
            heard, ready, there = found


class _Path:
    """From one rank to another: the queues of all links on the way. Nothing is between ranks at one place."""

    def __init__(self, placed: Placed, sources: Ranks, targets: Ranks, sizes: Times) -> None:
        self._up: list[_Queues] = []
        self._down: list[_Queues] = []
        latency = np.zeros(len(sources))
        for links, level, bandwidth in zip(placed.links, placed.levels, placed.bandwidths, strict=True):
            passing = np.flatnonzero(links[sources] != links[targets])
            latency[passing] = level.latency_s
            takes = _ticks(sizes[passing] / bandwidth)
            self._up.append(_Queues(passing, links[sources[passing]], takes))
            self._down.insert(0, _Queues(passing, links[targets[passing]], takes))
        self._latency = _ticks(latency)

    def take(self, joins: Ticks) -> Ticks:
        at = joins.copy()
        for queues in self._up:
            queues.take(at)
        at += self._latency
        for queues in self._down:
            queues.take(at)
        return at


@dataclass(frozen=True)
class _Queues:
    """The links of a level in one direction, and of all messages those that pass them."""

    passing: Ranks
    links: Ranks
    takes: Ticks

    def take(self, at: Ticks) -> None:
        """Who joins first leaves first: after the longest that it takes from any before it on, without a gap."""
        if not len(self.passing):
            return
        joins = at[self.passing]
        order = np.lexsort((joins, self.links))
        links, takes = self.links[order], self.takes[order]
        used = takes.cumsum()
        begins = joins[order] - (used - takes)
        apart = links * (int(begins.max() - begins.min()) + 1)  # no link's maximum reaches into the next one's
        at[self.passing[order]] = np.maximum.accumulate(begins + apart) - apart + used


def _last(at: Ticks, whose: Ranks) -> Ticks:
    latest = np.zeros(int(whose.max()) + 1, dtype=np.int64)
    np.maximum.at(latest, whose, at)
    return latest


def _ticks(seconds: float | Times) -> Ticks:
    return np.rint(np.asarray(seconds) * 1e9).astype(np.int64)
