"""Server processes of an elastic job, as the coordinator knows them: who serves, and who serves instead.

    lost            the keys go to                        in the next generation
    server 1 of 2   server 0                              the same workers, servers (0,)
    the last one    the first worker, who doubles as one  the same workers, no servers

A server says neither READY nor that it enters a loop. What it holds goes with a worker's part of the state to the vault
before that worker is ready, so a commit is as safe as without it. It is not replaced: the others serve from then on.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.elastic.slots import PRESENT, Slot, Standing


class Servers:
    """Their ranks come after those of all `workers`."""

    def __init__(self, workers: int, count: int) -> None:
        self._workers = workers
        self.slots = [Slot(workers + index, standing=Standing.MEMBER) for index in range(count)]

    @property
    def here(self) -> tuple[int, ...]:
        """Those who serve, by rank."""
        return tuple(slot.number for slot in self.slots if slot.standing is Standing.MEMBER)

    def has(self, rank: int) -> bool:
        return 0 <= rank - self._workers < len(self.slots)

    def slot(self, rank: int) -> Slot:
        return self.slots[rank - self._workers]

    def name(self, rank: int) -> str:
        return f"server {rank - self._workers}"

    def anew(self) -> Servers:
        """All of them, started again."""
        return Servers(self._workers, len(self.slots))

    def lose(self, rank: int, now: float, *, fence: bool) -> bool:
        """False where it was lost before."""
        slot = self.slot(rank)
        if slot.standing not in PRESENT:
            return False
        slot.standing, slot.since = Standing.FENCED if fence else Standing.DYING, now
        return True

    def begin_generation(self) -> None:
        for slot in self.slots:
            slot.grouped = slot.standing is not Standing.MEMBER

    def absent(self) -> list[int]:
        """Those who have not come to where a new generation meets: the workers wait for them there."""
        return [slot.number for slot in self.slots if slot.standing is Standing.MEMBER and not slot.grouped]

    def instead(self, members: Sequence[int]) -> str:
        """Who serves from now on what the lost one did, in words."""
        if not members:
            return "nobody needs its keys any more"
        left = [str(rank - self._workers) for rank in self.here]
        if not left:
            return f"worker {members[0]} serves its keys"
        return f"its keys go to server{'s' if len(left) > 1 else ''} {' and '.join(left)}"
