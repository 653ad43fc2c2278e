"""Replay: one process does again what the log of an asynchronous run says, one lane of one round at a time.

    log ──► turns ──► the loader hands out the items of a turn's (round, lane)
                 ├──► the weights that were read then are put into the model
                 └──► the gradient is applied to the keys in the logged order, by the code that the servers use

All updates are in at the end of every training loop, in the run and here, so there the weights are compared. What has
no such end, because the run was killed, is replayed up to where its log ends. With every update the log has a sum over
the bits of the new weights: a difference is found at the key and version where it begins.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path

from paceline.errors import CheckpointError, ReplicaError
from paceline.parameter_server.replay_order import Turn, replay_order
from paceline.parameter_server.update_log import RecordedRun, read_log

WHY = (
    "the script, its data, torch or the hardware have changed, or the script depends on something else than its lane "
    "and round, such as the time or its rank"
)


class Replay:
    """How far it is, and how it went."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run: RecordedRun = read_log(folder)
        self.turns: Sequence[Turn] = replay_order(self.run)
        self._last_of_round = {turn.item.round: number for number, turn in enumerate(self.turns)}
        self._handed_out = 0
        self.done = 0  # turns that were computed and applied
        self.pushes = 0
        self._weights: str | None = None  # after the last loop
        self._equal = False

    # -- the loop ----------------------------------------------------------------------------------------------------

    def loop(self, first_round: int, rounds: int) -> Sequence[Turn]:
        """The turns of a loop that begins with `first_round` and has at most so many rounds."""
        if self._handed_out == len(self.turns):
            raise SystemExit(0)  # the script would train on, but the run did not come further
        turns: list[Turn] = []
        for turn in self.turns[self._handed_out :]:
            if turn.item.round >= first_round + rounds:
                break
            if turn.item.round < first_round:
                raise CheckpointError(
                    f"replay: the script is in round {first_round}, but the log goes on with {turn.item}; the script "
                    "or its data have changed, or workers left a loop after different rounds"
                )
            turns.append(turn)
        return turns

    def hand_out(self) -> Turn:
        """The next turn begins."""
        self._handed_out += 1
        return self.turn

    @property
    def turn(self) -> Turn:
        return self.turns[self._handed_out - 1]

    @property
    def ends_round(self) -> bool:
        """Whether no later turn is of this turn's round."""
        return self._last_of_round[self.turn.item.round] == self._handed_out - 1

    def applied(self) -> None:
        self.done += 1
        self.pushes += len(self.turn.applications)

    # -- how it went -------------------------------------------------------------------------------------------------

    def loop_ended(self, rounds: int, weights: Callable[[], str]) -> None:
        """All updates are in; raises where the weights are not those of the run."""
        mine = weights()
        self._weights = mine
        recorded = next((loop.weights for loop in self.run.loops if loop.rounds == rounds), None)
        self._equal = recorded == mine
        if recorded is not None and not self._equal:
            raise ReplicaError(
                f"replay: after round {rounds - 1} the weights are {mine}, but were {recorded} in the recorded run; "
                f"{WHY}"
            )

    def verdict(self) -> str:
        """One line about a replay that went well; raises where the script did something else than was recorded."""
        left = self.turns[self.done :]
        if left:
            raise ReplicaError(
                f"replay: the script ended after {self.pushes:,} pushes, but the log goes on with {left[0].item}; the "
                "script or its arguments have changed"
            )
        workers = self.run.job.workers
        mine = "their weights were not looked at" if self._weights is None else self._weights
        replayed = f"replayed {self.pushes:,} pushes of {workers} worker{'s' if workers > 1 else ''}: {mine}"
        if self._equal:
            return f"{replayed} equal to the recorded run"
        if self.run.cut:
            cut = ", ".join(self.run.cut)
            return f"{replayed} where the log ends; the run was cut before it could record its own ({cut})"
        return f"{replayed}; the run recorded none (let loops end, or call engine.weights_hash() after a break)"


@lru_cache(maxsize=4)
def replay_of(folder: Path) -> Replay:
    """The one of this process: the engine works through it, and `paceline replay` asks how it went."""
    return Replay(folder)
