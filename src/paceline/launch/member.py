"""Another host's supervisor: what its workers say goes to the coordinator, whose answers and outcome come back."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable

from paceline.elastic.decisions import Rules
from paceline.errors import WorldError
from paceline.launch.control_channel import NONSENSE, Body
from paceline.launch.hands import Hands, lend
from paceline.launch.pulse import Pulse
from paceline.launch.sealed_link import SealedLink
from paceline.launch.verdict import NO_MEETING, Outcome, signal_name

RELAY_MARGIN_S = 2.0


class Member:
    """The `Decider` of a host that doesn't decide."""

    def __init__(self, link: SealedLink, say: Callable[[str], None], rules: Rules | None = None) -> None:
        self.outcome: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self.someone_ended = False
        self.to_pass_on: asyncio.Queue[signal.Signals] = asyncio.Queue()
        self._say = say
        self._link = link
        self._answers: dict[int, asyncio.Future[Body]] = {}
        self._asked = 0
        self.hands: Hands | None = None
        self._pulse: Pulse | None = None
        self._pinging: asyncio.Task[None] | None = None
        if rules is not None:
            self._pulse = Pulse(link, rules.heartbeat_timeout_s, asyncio.get_running_loop().time)
            self._pinging = asyncio.create_task(self._pulse.keep())
        self._listening = asyncio.create_task(self._listen())
        self._listening.add_done_callback(self._heard_all)

    def told(self, rank: int, kind: str, body: Body) -> None:
        self._link.send({"kind": "told", "rank": rank, "what": kind, "body": body})

    async def answer(self, rank: int, kind: str, body: Body, timeout_s: float) -> Body:
        self._asked += 1
        number = self._asked
        answer: asyncio.Future[Body] = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        try:
            self._link.send({"kind": kind, "body": body, "timeout_s": timeout_s, "id": number, "rank": rank})
            message = await asyncio.wait_for(answer, timeout_s + RELAY_MARGIN_S)
        except TimeoutError:
            raise WorldError(f"the coordinator did not answer {kind!r} within {timeout_s:g} s") from None
        finally:
            del self._answers[number]
        if "error" in message:
            raise WorldError(message["error"])
        answered: Body = message["body"]
        return answered

    def ready(self) -> None:
        self._link.send({"kind": "ready"})

    def started(self, rank: int, pid: int) -> None:
        self._link.send({"kind": "started", "rank": rank, "pid": pid})

    def exited(self, rank: int, status: int) -> None:
        self._link.send({"kind": "exited", "rank": rank, "status": status})

    def interrupted(self, by: signal.Signals) -> None:
        self._link.send({"kind": "interrupted", "signal": int(by)})

    def leave_now(self, by: signal.Signals) -> None:
        self._link.send({"kind": "leave_now", "signal": int(by)})
        how = "Ctrl-C" if by == signal.SIGINT else signal_name(by)
        self._decide(Outcome(128 + by, (f"paceline: stopped by {how}",)))

    def broken(self, text: str, code: int) -> None:
        self._link.send({"kind": "broken", "text": text, "code": code})
        self._decide(Outcome(code, (f"paceline: {text}",)))

    async def close(self) -> None:
        tasks = [task for task in (self._listening, self._pinging) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._link.close()

    async def _listen(self) -> None:
        try:
            while (message := await self._link.receive()) is not None:
                if self._pulse is not None:
                    self._pulse.heard()
                self._hear(message)
        except WorldError as error:
            self._decide(Outcome(NO_MEETING, (f"paceline: {error}",)))
        except NONSENSE as error:
            said = f"the coordinator (host 0) said what makes no sense: {type(error).__name__}: {str(error)[:200]}"
            self._decide(Outcome(NO_MEETING, (f"paceline: {said}; use one version of paceline on all hosts",)))
        if self._pulse is not None and self._pulse.silence:
            said = f"paceline: lost the coordinator (host 0): {self._pulse.silence}; this host's workers are stopped"
            self._decide(Outcome(NO_MEETING, (said,)))
        self._decide(Outcome(NO_MEETING, ("paceline: lost the coordinator (host 0); its own output says why",)))

    def _hear(self, message: Body) -> None:
        if lend(self.hands, message):
            return
        match message.get("kind"):
            case "outcome":
                self._decide(Outcome.from_message(message))
            case "say":
                self._say(message["line"])
            case "ping":
                pass
            case "someone_ended":
                self.someone_ended = True
            case "pass_on":
                self.to_pass_on.put_nowait(signal.Signals(message["signal"]))
            case _:
                answer = self._answers.get(message["id"])
                if answer is not None and not answer.done():
                    answer.set_result(message)

    def _decide(self, outcome: Outcome) -> None:
        if not self.outcome.done():
            self.outcome.set_result(outcome)

    def _heard_all(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None and not self.outcome.done():
            self.outcome.set_exception(error)
