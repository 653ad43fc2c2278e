"""Applications: every update of a key is told to the log and counted, before anybody can see what it made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from paceline.optim.group_settings import GroupSettings
from paceline.parameter_server.application_log import Applied, Settings
from paceline.parameter_server.staleness_stats import StalenessCounter
from paceline.parameter_server.treatment import Outcome

Log = Callable[[Applied], None]


class Applications:
    def __init__(self, server: int, settings: GroupSettings, log: Log | None, stats: StalenessCounter) -> None:
        self._server, self._settings, self._log = server, settings, log
        self._order: Counter[int] = Counter()
        self._named: tuple[Sequence[float], Settings] = ((), ())
        self.stats = stats

    def tell(
        self,
        key: int,
        round: int,
        values: Sequence[float],
        outcome: Outcome,
        *,
        lane: int | None = None,
        worker: int | None = None,
        incarnation: int = 0,
        check: Callable[[], int] | None = None,
    ) -> None:
        """A push of one lane, or (neither lane nor worker) the sum of all lanes of a round.

        `check` sums up the bits of what it made: a replay that differs finds out where it begins to.
        """
        if outcome.dropped:
            self.stats.dropped(outcome.delay)
        else:
            self.stats.applied(outcome.delay)
        if self._log is not None:
            if values != self._named[0] or not self._named[1]:
                self._named = values, self._settings.by_group(values)
            order, named = self._order[key], self._named[1]
            made = None if check is None or outcome.dropped else check()
            self._log(Applied(self._server, key, order, round, lane, worker, named, outcome, incarnation, made))
        self._order[key] += 1
