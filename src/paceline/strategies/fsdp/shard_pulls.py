"""Pulls: a worker asks the owners for their parts of a unit, whenever it needs it; no worker has to be in step with it.

    worker 0                        worker 1
    unit 3, version 7? ────────►    a thread of its own, one for each peer: waits until version 7 is there
    memory for it      ◄────────    sends its part from where it lies

So workers may have different numbers of items, run different branches of a model or evaluate alone: there is no
collective whose order could differ. *Version* counts updates. A part is not written to before all workers have finished
their backward (their votes say so), and by then every answer has arrived.

The group is one for this alone. Its receives wait for as long as the job lasts, since a peer may have nothing to ask
for; a worker that waits for an answer waits no longer than the job's timeout. A worker that leaves between steps says
so, and answers until all others do.

Weights that scripts load are written when all workers *meet* in it. One that has started another step instead will
never come: the first of those two that sees it raises.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from paceline.collectives.communicator import Communicator, Work
from paceline.errors import GenerationEnded, LoopError, PeerLostError
from paceline.strategies.registry import Job
from paceline.torch_compat import PrefixStore

FOREVER_S = 10 * 86400.0
LEAVES_WITHIN_S = 2.0
_ASK, _ANSWER = 0, 1  # tags
_LEAVES, _MEETS, _REFUSES = -1, -2, -3  # in place of a unit
_STEPS = 2**32  # a meeting is sent as its number · _STEPS + the steps that its worker has started
_OPERATION = "gather of weights"
_KEPT = 8  # answers whose memory is kept until they are known to have been sent

Parts = Callable[[int], Sequence[Tensor]]  # of a unit: what this worker owns, on the host, in the order of buckets


class NoPeers:
    """One worker has all parts itself."""

    peers: Sequence[int] = ()

    def start(self, unit: int, buffers: Mapping[int, Sequence[Tensor]]) -> list[Work]:
        return []

    def changed(self) -> None: ...
    def meet(self) -> None: ...
    def rest(self, *, at_rest: bool) -> None: ...
    def close(self) -> None: ...
    def abandon(self) -> None: ...


class ShardPulls:
    def __init__(self, job: Job, parts: Parts, number: int) -> None:
        assert job.store is not None
        store, host = PrefixStore(f"pulls/{number}", job.store), torch.device("cpu")
        self._comm = Communicator.connect(job.comm.world, store, backend="gloo", device=host, timeout_s=job.timeout_s)
        self._comm.counts_with(job.comm)
        self._comm.explain_losses(job.comm.told_by_who_left)  # notes are left in the job's own group
        self._workers = job.comm
        self._timeout_s, self._parts = job.timeout_s, parts
        self._at_rest = True
        self.peers = [worker for worker in range(self._comm.size) if worker != self._comm.rank]
        self._told: deque[Work] = deque(maxlen=4 * len(self.peers))  # more than can be on their way at once
        self._change = threading.Condition()
        self._version, self._closing = 0, False
        self._steps, self._meetings = 0, 0  # that this worker has started, and come to
        self._met = dict.fromkeys(self.peers, 0)  # by peer: the meetings that it came to
        self._refused_by: int | None = None
        self._gone: set[int] = set()
        self._threads = [
            threading.Thread(target=self._answer, args=(peer,), name=f"paceline-shards-for-{peer}", daemon=True)
            for peer in self.peers
        ]
        for thread in self._threads:
            thread.start()

    @property
    def version(self) -> int:
        return self._version

    def changed(self) -> None:
        """This worker's parts are those of the next version."""
        with self._change:
            self._version += 1
            self._change.notify_all()

    def start(self, unit: int, buffers: Mapping[int, Sequence[Tensor]]) -> list[Work]:
        """Ask every peer that owns something of the unit; `buffers` has memory on the host for each one's parts."""
        works = {
            peer: [self._comm.receive(part, source=peer, tag=_ANSWER, operation=_OPERATION) for part in parts]
            for peer, parts in buffers.items()
        }
        for peer, answers in works.items():
            answers[-1].keeps = self._ask(peer, unit)
        return [answer for answers in works.values() for answer in answers]

    def _ask(self, peer: int, unit: int, number: int | None = None) -> Work:
        """The caller keeps the work until the peer is known to have it: gloo forgets a message whose work is gone."""
        request = torch.tensor([unit, self._version if number is None else number])
        return self._comm.send(request, to=peer, tag=_ASK, operation="request")

    def _tell(self, peer: int, what: int, number: int | None = None) -> None:
        """Something that has no answer."""
        self._told.append(self._ask(peer, what, number))

    def _answer(self, peer: int) -> None:
        """Until the peer leaves or is lost; then a worker that waits for it hears of it."""
        asked, answers = torch.empty(2, dtype=torch.int64), deque[Work]()
        try:
            while True:
                if not self._comm.receive(asked, source=peer, tag=_ASK, operation="request").ended(FOREVER_S):
                    return
                unit, version = asked.tolist()
                if unit in (_MEETS, _REFUSES):
                    self._hear(peer, unit, version)
                    continue
                if unit == _LEAVES or not self._reaches(version):
                    return
                for part in self._parts(unit):
                    answers.append(self._comm.send(part, to=peer, tag=_ANSWER, operation=_OPERATION))
                while len(answers) > _KEPT:
                    answers.popleft().ended()
        except (PeerLostError, KeyError):  # lost, or our own group is closed
            return
        finally:
            with self._change:
                self._gone.add(peer)
                self._change.notify_all()

    # -- meetings ----------------------------------------------------------------------------------------------------

    def meet(self) -> None:
        """All workers are here, to load weights."""
        with self._change:
            self._meetings += 1
            number = self._meetings
        for peer in self.peers:
            self._tell(peer, _MEETS, number * _STEPS + self._steps)

        def missing() -> list[int]:
            return [peer for peer, met in self._met.items() if met < number]

        with self._change:
            self._change.wait_for(
                lambda: not missing() or self._refused_by is not None or not self._gone.isdisjoint(missing()),
                timeout=self._timeout_s,
            )
            if self._refused_by is not None:
                raise self._not_all(self._comm.rank, self._refused_by)
            if missing() and self._comm.is_over:
                raise GenerationEnded(f"worker {self._comm.rank} loaded weights when the workers changed")
            if missing():
                raise PeerLostError(
                    f"worker {self._comm.rank} waited in model.load_state_dict() or engine.load_state() for worker "
                    f"{missing()[0]}, which did not come; all workers have to load weights"
                )

    def rest(self, *, at_rest: bool) -> None:
        """Whether a step is running; the next one may not start while others load weights."""
        self._at_rest = at_rest
        if at_rest:
            return
        with self._change:
            self._steps += 1
            ahead = [peer for peer, met in self._met.items() if met > self._meetings]
        if ahead:
            raise self._not_all(ahead[0], self._comm.rank)

    def _hear(self, peer: int, what: int, sent: int) -> None:
        number, steps = divmod(sent, _STEPS)
        with self._change:
            if what == _REFUSES:
                self._refused_by = peer
            else:
                self._met[peer] = number
            trains_on = what == _MEETS and number > self._meetings and self._steps > steps
            self._change.notify_all()
        if trains_on:
            self._tell(peer, _REFUSES, sent)

    def _not_all(self, loads: int, trains: int) -> LoopError:
        return LoopError(
            f"worker {loads} has called model.load_state_dict(), and worker {trains} trains on without: each has a "
            "part of the weights, so all workers have to load, with the same"
        )

    def _reaches(self, version: int) -> bool:
        with self._change:
            self._change.wait_for(lambda: self._closing or self._version >= version, timeout=self._timeout_s)
            return self._version >= version

    def close(self) -> None:
        if self._workers.gives_up and not self._closing:
            self.abandon()
        with self._change:
            if self._closing:
                return
            self._closing = True
            self._change.notify_all()
        for peer in self.peers:
            self._tell(peer, _LEAVES)
        # Between steps a peer may go on alone, to evaluate or to save; inside one it will hear that we have left, as
        # where the group is over.
        waits = self._at_rest and not self._workers.is_over
        until = time.monotonic() + (self._timeout_s if waits else LEAVES_WITHIN_S)
        for thread in self._threads:
            thread.join(timeout=max(0.0, until - time.monotonic()))
        self._close()

    def abandon(self) -> None:
        """In place of `close`, when the workers have changed: a worker that still asks hears nothing any more."""
        with self._change:
            self._closing = True
            self._change.notify_all()
        self._comm.abandon("this worker has left the group")
        for thread in self._threads:
            thread.join(timeout=LEAVES_WITHIN_S)
        self._close()

    def _close(self) -> None:
        self._told.clear()  # they would keep the group's connections open
        self._comm.close()
        for thread in self._threads:
            thread.join(timeout=LEAVES_WITHIN_S)
