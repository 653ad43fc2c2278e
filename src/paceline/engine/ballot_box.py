"""The ballot box: in a round that agrees, every worker hears every ballot, in one small all-gather.

Hearing them comes with two checks: that all are in the same step, and that a rotating part of the weights is alike.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from paceline.collectives.communicator import Communicator
from paceline.engine.ballot import Ballot, pack, unpack
from paceline.engine.replicas import WeightsWatch
from paceline.errors import ReplicaError
from paceline.strategies.registry import Rides


class BallotBox:
    def __init__(self, comm: Communicator | None, rides: Rides, *, raises: bool = True) -> None:
        """`raises`: weights that differ end the job here; otherwise the coordinator of an elastic job decides."""
        self._comm, self._raises = comm, raises
        self._most_lanes = max(len(ride) for ride in rides)
        self._watch: WeightsWatch | None = None
        self._after_update: tuple[int, int] | None = None  # a step, and what it should find of the weights
        self.votes = 0

    @property
    def watching(self) -> bool:
        return self._watch is not None

    def watch(self, named: Sequence[tuple[str, Tensor]]) -> None:
        """Which weights must be alike."""
        self._watch = WeightsWatch(named)

    def check(self, step: int) -> int:
        """This worker's sum over the part of the weights whose turn it is."""
        if self._comm is None or self._watch is None:
            return 0
        return self._watch.check(step) if self._raises else self._watch.check_many(step)

    def updated(self, step: int) -> None:
        """The weights are those that `step` begins with. Of two workers, one can be found out only by itself."""
        if not self._raises and self._watch is not None and self._comm is not None and self._comm.size == 2:
            self._after_update = step, self._watch.check_many(step)

    def _find_out_oneself(self, ballot: Ballot, ballots: Sequence[Ballot]) -> None:
        if self._raises or self._after_update is None or len({other.check for other in ballots}) == 1:
            return
        step, before = self._after_update
        if step == ballot.step and before != ballot.check:
            raise ReplicaError(
                f"the weights of this worker have changed between the update of step {step} and the end of step "
                f"{step + 1}, and those of the other have not: silent corruption of its memory"
            )

    def cast(self, ballot: Ballot) -> list[Ballot]:
        """The ballots of all workers, in rank order."""
        if self._comm is None:
            return [ballot]
        rows, handle = self._comm.all_gather(pack(ballot, self._most_lanes))
        handle.wait_for_vote(self.votes)
        self.votes += 1
        ballots = [unpack(row, len(ballot.used)) for row in rows]
        for rank, other in enumerate(ballots):
            if (other.step, other.update) != (ballot.step, ballot.update):
                raise ReplicaError(
                    f"worker {self._comm.rank} is in step {ballot.step + 1} (update {ballot.update}) but worker {rank} "
                    f"is in step {other.step + 1} (update {other.update}); their loops took different turns"
                )
        self._find_out_oneself(ballot, ballots)
        if self._watch is not None and self._raises:
            self._watch.compare(ballot.step, [other.check for other in ballots])
        return ballots
