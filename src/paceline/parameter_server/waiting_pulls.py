"""Pulls that wait: a worker asks once, and is answered when its key has the updates of all rounds that it needs.

A later question about the same key takes the place of an earlier one that still waits: nobody reads that answer.
"""

from __future__ import annotations

from collections.abc import Iterable

from paceline.parameter_server.wire import Header, Kind


class WaitingPulls:
    def __init__(self, keys: Iterable[int]) -> None:
        self._asked: dict[int, dict[tuple[int, Kind], Header]] = {key: {} for key in keys}

    def add(self, key: int, header: Header) -> None:
        self._asked[key][header.sender, header.kind] = header

    def take(self, key: int, complete: int) -> list[Header]:
        """Those that a key with all updates up to round `complete` answers, in the order they came."""
        ready = [header for header in self._asked[key].values() if header.complete <= complete]
        for header in ready:
            del self._asked[key][header.sender, header.kind]
        return ready

    def forget(self, worker: int) -> None:
        """It will not read an answer."""
        for asked in self._asked.values():
            for place in [place for place in asked if place[0] == worker]:
                del asked[place]

    def __len__(self) -> int:
        return sum(len(asked) for asked in self._asked.values())
