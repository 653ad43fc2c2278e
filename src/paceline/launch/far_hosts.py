"""The other hosts as the coordinator has them: who is there, in which slots, and how they are reached and heard.

slot 3 ─ `SlotAssignment` ─▶ host 1 ─┬─ hands: push, fence, start
                              ├─ link:  what all hosts are told
                              └─ pulse: silent for too long is lost
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from paceline.elastic.slots import SlotAssignment
from paceline.errors import WorldError
from paceline.launch.control_channel import Body
from paceline.launch.hands import FarHands, Hands
from paceline.launch.hosts import Guest, Seat
from paceline.launch.pulse import Pulse
from paceline.launch.sealed_link import SealedLink
from paceline.launch.verdict import NO_MEETING, Outcome


class FarHosts:
    def __init__(self, seat: Seat, guests: Mapping[int, Guest], clock: Callable[[], float]) -> None:
        self._rules, self._clock = seat.elastic, clock
        most = seat.size if seat.elastic is None else seat.elastic.max_workers or seat.size
        began = [seat.workers, *(guests[host].workers for host in sorted(guests))]
        self.seating = SlotAssignment(began, most=most, lanes=seat.settings.lanes or seat.size, servers=seat.servers)
        self._links: dict[int, SealedLink] = {}
        self._hands: dict[int, FarHands] = {}
        self._pulses: dict[int, Pulse] = {}
        self._sent_away: dict[int, str] = {}
        for host, guest in guests.items():
            self.add(host, guest.link)

    def add(self, host: int, link: SealedLink) -> None:
        self._links[host], self._hands[host] = link, FarHands(link)
        if self._rules is not None:
            self._pulses[host] = Pulse(link, self._rules.heartbeat_timeout_s, self._clock)

    def drop(self, host: int) -> Sequence[int]:
        """It is lost; the slots that it had."""
        self.seating.leave(host)
        self._links.pop(host).abort()
        self._pulses.pop(host, None)
        return self.seating.slots_of(host)

    def link(self, host: int) -> SealedLink:
        return self._links[host]

    def pulse(self, host: int) -> Pulse | None:
        return self._pulses.get(host)

    async def hear(self, host: int, obey: Callable[[Body], None]) -> str:
        """Pass on what it says until it is lost; why it was."""
        link, pulse = self._links[host], self._pulses.get(host)
        try:
            while (message := await link.receive()) is not None:
                if pulse is not None:
                    pulse.heard()
                obey(message)
        except WorldError as error:
            return str(error)
        if host in self._sent_away:
            return self._sent_away.pop(host)
        return pulse.silence if pulse is not None and pulse.silence else "its supervisor went away without a word"

    def send_away(self, host: int, why: str) -> None:
        """None of its workers is of use, but it may be started again."""
        self.leaves(host, why)
        said = f"paceline: this host is sent away: {why}; mend that, and start it again"
        self._links[host].send({"kind": "outcome", **Outcome(NO_MEETING, (said,)).as_message()})

    def leaves(self, host: int, why: str) -> None:
        """It has said why, and will be gone in a moment."""
        self._sent_away[host] = why

    def tell(self, message: Body) -> None:
        for link in self._links.values():
            link.send(message)

    def hands_of(self, slot: int) -> Hands | None:
        """None: the slot is on this host, or a server's."""
        host = self.host_of(slot)
        return self._hands[host] if host else None

    def all_hands(self) -> list[Hands]:
        return [self._hands[host] for host in self._links]

    def host_of(self, slot: int) -> int:
        return self.seating.host_of(slot) if slot < self.seating.size else 0

    def neighbours(self, slot: int) -> Sequence[int]:
        """The slots of its host, if that is another than this."""
        host = self.host_of(slot)
        return self.seating.slots_of(host) if host else ()

    def out_of_earshot(self) -> list[int]:
        """The slots on hosts that are silent altogether: what their workers say could not be heard."""
        late = [host for host, pulse in self._pulses.items() if pulse.is_late]
        return [slot for host in late for slot in self.seating.slots_of(host)]

    async def close(self) -> None:
        for link in self._links.values():
            await link.close()
