"""Who decides: the coordinator knows every process and ends the job; another host's supervisor passes word to it.

    host 0   workers ─▶ supervisor = Coordinator ◀═══ host 1   supervisor = Member ◀─ workers
             servers ─▶      │  over, by the rules of `ending`
                             └──▶ Outcome, the same on every host

A failure is not judged at once: the death of one worker topples the others, and whose fall arrives first is luck.
So the coordinator waits `SETTLE_S`, longer while only consequences have arrived, shorter when everyone has ended. What
follows is the verdict, or, where the job goes on without those that fell, a line about each.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from paceline.elastic.step_log import StepLog
from paceline.errors import WorldError
from paceline.launch.control_channel import NONSENSE, Body, KeyValues, reply
from paceline.launch.door import Door
from paceline.launch.elastic_job import ElasticJob
from paceline.launch.ending import Policy, goes_on, good_end, look_at_the_last
from paceline.launch.far_hosts import FarHosts
from paceline.launch.hands import Hands
from paceline.launch.hosts import Guest, Seat
from paceline.launch.latecomers import Latecomers
from paceline.launch.sealed_link import SealedLink
from paceline.launch.stopping import GRACE_S, TELL_AFTER_S, Request, cut_short, obeyed, still_there
from paceline.launch.verdict import (
    NO_MEETING,
    MemoryTold,
    Outcome,
    Phase,
    Process,
    Raised,
    Waits,
    count,
    describe,
    has_cause,
    judge,
    numbers,
)
from paceline.launch.waits import PATIENCE_S, Told, look_at_waits
from paceline.world.progress_line import ProgressLine
from paceline.world.strangers import SeldomSaid
from paceline.world.summary_table import SummaryTable

SETTLE_S = 0.5
SETTLE_LONGER_S = 3.0
LOOK_EVERY_S = 0.5


class Decider(Protocol):
    """What a supervisor tells, and the outcome it waits for."""

    outcome: asyncio.Future[Outcome]
    someone_ended: bool
    """From then on signs of life of those who still run are worth telling, as `busy`."""
    to_pass_on: asyncio.Queue[signal.Signals]
    """What every worker is to be asked by, once."""
    hands: Hands | None
    """What the supervisor lends to whoever decides; elastic jobs need them."""

    def told(self, rank: int, kind: str, body: Body) -> None: ...
    async def answer(self, rank: int, kind: str, body: Body, timeout_s: float) -> Body: ...
    def ready(self) -> None:
        """This host came late, and can start workers now."""

    def started(self, rank: int, pid: int) -> None: ...
    def exited(self, rank: int, status: int) -> None: ...
    def interrupted(self, by: signal.Signals) -> None: ...
    def leave_now(self, by: signal.Signals) -> None: ...
    def broken(self, text: str, code: int) -> None: ...
    async def close(self) -> None: ...


class Coordinator:
    def __init__(
        self,
        seat: Seat,
        guests: Mapping[int, Guest],
        show: Callable[[ProgressLine | SummaryTable], None],
        say: Callable[[str], None],
        grace_s: float = GRACE_S,
        ledger: StepLog | None = None,
        door: Door | None = None,
    ) -> None:
        workers = [Process(rank) for rank in range(seat.size)]
        self.processes = workers + [Process(seat.size + index, index) for index in range(seat.servers)]
        self.policy = Policy()
        self.outcome: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self.someone_ended = False
        self.to_pass_on: asyncio.Queue[signal.Signals] = asyncio.Queue()
        self._grace_s = grace_s
        self._request: Request | None = None
        self.keys = KeyValues()
        self._show = show
        self._say = say
        self._complain = SeldomSaid(say)
        self.far = FarHosts(seat, guests, self.clock)
        self._door = door
        self._checkpoint: str | None = None
        self._failures = 0
        self._settling = False
        self._news = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self.hands: Hands | None = None
        self._elastic: ElasticJob | None = None
        self._latecomers: Latecomers | None = None
        if seat.elastic is not None:
            self._elastic = ElasticJob(seat.size, seat.elastic, ledger or StepLog(), self, seat.servers)
            self._spawn(self._elastic.tick())
            self._latecomers = Latecomers(seat, self.far, self._elastic, self, say)
            if door is not None:
                self._spawn(self._latecomers.welcome(door))
        self._spawn(self._watch_waits(PATIENCE_S if seat.elastic is None else seat.elastic.heartbeat_timeout_s))
        for host in guests:
            self.listen_to(host)

    def clock(self) -> float:
        return asyncio.get_running_loop().time()

    @property
    def is_over(self) -> bool:
        return self.outcome.done()

    def hands_of(self, rank: int) -> Hands:
        hands = self.far.hands_of(rank) or self.hands
        assert hands is not None, "a supervisor lends its hands before it starts a worker"
        return hands

    def all_hands(self) -> list[Hands]:
        return [hands for hands in (self.hands, *self.far.all_hands()) if hands is not None]

    def told(self, rank: int, kind: str, body: Body) -> None:
        process = self.processes[rank]
        if kind == "heartbeat" or kind.startswith("elastic."):
            if self._elastic is not None:
                self._elastic.told(rank, kind, body)
            return
        process.heard_at = self.clock()
        match kind:
            case "hello":
                process.connected = True
            case "step":
                process.step = int(body["step"])
            case "phase":
                process.phase = Phase(body["name"])
            case "policy":
                self.policy = self.policy.told(body)
            case "holds":
                process.holds = str(body["what"])
            case "memory":
                process.memory = MemoryTold(str(body["told"]), Path(body["kills_file"]), int(body["kills"]))
            case "checkpoint":
                self._checkpoint = str(body["folder"])
            case "waits":
                since = self.clock() - float(body["seconds"])
                process.waits = Waits(str(body["call"]), str(body["place"]), since)
            case "goes_on":
                process.waits = None
            case "busy":
                pass  # that it was heard is all there is to it
            case "progress":
                self._show(ProgressLine.told(body))
            case "table":
                self._show(SummaryTable.of(body["title"], body["rows"]))
            case _:
                raise ValueError("this supervisor does not know it")

    async def answer(self, rank: int, kind: str, body: Body, timeout_s: float) -> Body:
        process = self.processes[rank]
        process.heard_at = self.clock()
        if kind != "failed" and self._elastic is not None and self._elastic.is_leaving(rank):
            raise WorldError("all workers start anew, and this one is being stopped")
        if kind == "failed":
            process.raised = Raised.told(body)
            if self._elastic is None or not self._elastic.raised(process):
                self._failed(process)
            return {}
        return await self.keys.answer(kind, body, timeout_s, self._connected)

    def ready(self) -> None:
        raise AssertionError("the coordinator's own host is never late")

    def started(self, rank: int, pid: int) -> None:
        self.processes[rank].pid = pid
        if self._elastic is not None:
            self._elastic.started(rank)

    def exited(self, rank: int, status: int) -> None:
        process = self.processes[rank]
        process.status, process.ended_at = status, self.clock()
        if self._elastic is not None and self._elastic.exited(process):
            self._news.set()
            return
        if process.is_failure or process.left_early:
            self._failed(process)
        self._news.set()
        self._end_if_all_is_well()
        if not self.someone_ended:
            self.someone_ended = True
            self.far.tell({"kind": "someone_ended"})
            self._spawn(self._watch_the_last())

    def interrupted(self, by: signal.Signals, where: str = "") -> None:
        """Ask all workers to stop, and see them off. A notice may be followed by an order."""
        first = self._request is None
        self._request = Request(by, where, self._grace_s, self.clock())
        if self._elastic is not None:
            self._elastic.stop()
        starting = any(process.pid is None for process in self.processes)
        if starting and (self._elastic is None or not self._elastic.membership.running):  # nothing to save yet
            self.decide(cut_short(self._request, self.processes))
            return
        if self.policy.stops_on_request:
            self.announce(self._request.first_words())
        self.to_pass_on.put_nowait(self._request.passed_on)
        self.far.tell({"kind": "pass_on", "signal": int(self._request.passed_on)})
        if first:
            self._spawn(self._see_off())
        self._news.set()

    def leave_now(self, by: signal.Signals, where: str = "") -> None:
        self.decide(cut_short(Request(by, where, self._grace_s, self.clock()), self.processes))

    async def _see_off(self) -> None:
        """Wait until the workers have gone, or their time is up."""
        assert self._request is not None
        told = self.policy.stops_on_request
        while still_there(self.processes) and not self.outcome.done():
            now = self.clock()
            if now >= self._request.deadline:
                break
            if not told and now - self._request.since >= TELL_AFTER_S:
                self.announce(self._request.waiting(self.processes))
                told = True
            self._news.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), min(self._request.deadline - now, LOOK_EVERY_S))
        late = still_there(self.processes)
        if late or (not self._settling and any(map(obeyed, self.processes))):
            self.decide(cut_short(self._request, self.processes, late=late))

    def broken(self, text: str, code: int) -> None:
        self.decide(Outcome(code, (f"paceline: {text}",)))

    async def close(self) -> None:
        """Give every host the outcome; they end by themselves."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._door is not None:
            await self._door.close()
        await self.far.close()
        if self._elastic is not None:
            self._elastic.close()

    def _failed(self, process: Process) -> None:
        expected = self._request is not None and obeyed(process)
        if process.failed_as is None and not expected:
            process.failed_as = self._failures
            self._failures += 1
            if not self._settling:
                self._settling = True
                self._spawn(self._settle())
        self._news.set()

    async def _settle(self) -> None:
        begun = self.clock()
        while not all(process.ended for process in self.processes):
            patience = begun + (SETTLE_S if has_cause(self.processes) else SETTLE_LONGER_S) - self.clock()
            if patience <= 0:
                break
            self._news.clear()
            try:
                await asyncio.wait_for(self._news.wait(), patience)
            except TimeoutError:
                continue
        self._settling = False
        self._end_if_all_is_well()  # someone may have left a moment before the others, and all ended well
        if self.outcome.done():
            return
        if goes_on(self.processes, self.policy):
            self._go_on()
        else:
            self.decide(judge(self.processes))

    def _go_on(self) -> None:
        """Say who has fallen, and end the job where nobody else was left to wait for."""
        fallen = [process for process in self.processes if process.failed_as is not None and not process.lost]
        for process in fallen:
            for line in describe(process, self.processes, and_so="; the job goes on without it"):
                self.announce(line)
            process.lost = True
        self._end_if_all_is_well()

    async def _watch_the_last(self) -> None:
        warned = False
        while not self.outcome.done():
            look = look_at_the_last(self.processes, self.policy, self.clock(), warned)
            for line in look.lines:
                self.announce(line)
                warned = True
            if look.outcome is not None:
                self.decide(look.outcome)
            await asyncio.sleep(LOOK_EVERY_S)

    async def _watch_waits(self, patience_s: float) -> None:
        said: set[Told] = set()
        is_missed = self._elastic.is_missed if self._elastic is not None else lambda process: True
        while not self.outcome.done():
            look = look_at_waits(self.processes, self.policy, self.clock(), patience_s, said, is_missed)
            for line in look.lines:
                self.announce(line)
            if look.outcome is not None:
                self.decide(look.outcome)
            await asyncio.sleep(LOOK_EVERY_S)

    def _end_if_all_is_well(self) -> None:
        outcome = good_end(self.processes)
        if outcome is not None:
            self.decide(outcome)

    def decide(self, outcome: Outcome) -> None:
        if not self.outcome.done():
            if outcome.code and self._checkpoint is not None:
                resume = f"paceline: the last checkpoint is {self._checkpoint}"
                outcome = replace(outcome, closing=(*outcome.closing, resume))
            self.outcome.set_result(outcome)
            self.far.tell({"kind": "outcome", **outcome.as_message()})

    def announce(self, line: str) -> None:
        self._say(line)
        self.far.tell({"kind": "say", "line": line})

    def _connected(self) -> str:
        missing = [process for process in self.processes if not process.connected]
        if not missing:
            return f"all {count(self.processes)} are connected"
        here = [process for process in self.processes if process.connected]
        return f"connected so far: {numbers(here) or 'nobody'}; missing: {numbers(missing)}"

    def listen_to(self, host: int) -> None:
        self._spawn(self._hear(host))
        if (pulse := self.far.pulse(host)) is not None:
            self._spawn(pulse.keep())

    async def _hear(self, host: int) -> None:
        questions: set[asyncio.Task[None]] = set()
        link = self.far.link(host)
        try:
            why = await self.far.hear(host, lambda message: self._obey(host, link, message, questions))
        finally:
            for task in questions:
                task.cancel()
        self._lost(host, why)

    def _lost(self, host: int, why: str) -> None:
        """A host is cut off: the end of the job, unless it is elastic and others are left."""
        there = self.far.drop(host)
        if self._elastic is None or not self._elastic.host_lost(host, there, why):
            self.broken(f"lost host {host}: {why}", NO_MEETING)
        self._news.set()

    def _obey(self, host: int, link: SealedLink, message: Body, questions: set[asyncio.Task[None]]) -> None:
        _check(message, len(self.processes))
        match message["kind"]:
            case "told":
                try:
                    self.told(message["rank"], message["what"], message["body"])
                except NONSENSE as error:
                    told = f"worker {message['rank']} told {message['what'][:80]!r}, which makes no sense: {error}"
                    self._complain(f"host {host}", f"paceline: host {host}: {told}")
            case "ping":
                pass
            case "ready":
                if self._latecomers is None:
                    raise WorldError("it says that it came late, to a job that is not elastic")
                self._latecomers.ready(host)
            case "started":
                self.started(message["rank"], message["pid"])
            case "exited":
                self.exited(message["rank"], message["status"])
            case "interrupted":
                self.interrupted(signal.Signals(message["signal"]), f" on host {host}")
            case "leave_now":
                self.leave_now(signal.Signals(message["signal"]), f" on host {host}")
            case "broken" if self._elastic is not None and self._elastic.can_lose(self.far.seating.slots_of(host)):
                self.far.leaves(host, message["text"])
            case "broken":
                self.broken(f"host {host}: {message['text']}", message["code"])
            case _:
                rank = int(message["rank"])

                async def ask(kind: str, body: Body, timeout_s: float) -> Body:
                    return await self.answer(rank, kind, body, timeout_s)

                task = asyncio.create_task(reply(link, message, ask))
                questions.add(task)
                task.add_done_callback(questions.discard)

    def _spawn(self, work: Any) -> None:
        task: asyncio.Task[None] = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        """An error of our own in the background ends the job with it, instead of leaving everyone waiting."""
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not self.outcome.done():
            self.outcome.set_exception(error)


FORMS: Mapping[str, Mapping[str, type]] = {
    "told": {"rank": int, "what": str, "body": dict},
    "ping": {},
    "ready": {},
    "started": {"rank": int, "pid": int},
    "exited": {"rank": int, "status": int},
    "interrupted": {"signal": int},
    "leave_now": {"signal": int},
    "broken": {"text": str, "code": int},
}
A_QUESTION: Mapping[str, type] = {"kind": str, "rank": int, "body": dict, "id": int}


def _check(message: Body, processes: int) -> None:
    """Of another host's supervisor: what has another form than ours is an error of that host, and not one of ours."""
    kind = message.get("kind")
    form = FORMS.get(kind, A_QUESTION) if isinstance(kind, str) else A_QUESTION
    wrong = [name for name, wanted in form.items() if type(message.get(name)) is not wanted]
    if "rank" in form and not wrong and not 0 <= message["rank"] < processes:
        wrong = ["rank"]
    if "signal" in form and not wrong and message["signal"] not in set(signal.Signals):
        wrong = ["signal"]
    if wrong:
        raise WorldError(
            f"its message {str(kind)[:80]!r} makes no sense ({', '.join(wrong)}); use one version of paceline on all "
            "hosts"
        )
