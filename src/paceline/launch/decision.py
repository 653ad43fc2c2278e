"""Who decides: the coordinator knows every worker and ends the job; another host's supervisor passes word to it.

    host 0   workers ─▶ supervisor = Coordinator ◀═══ host 1   supervisor = Member ◀─ workers
                            │  all ended well, or a failure settled
                            └──▶ Outcome, the same on every host

A failure is not judged at once: the death of one worker topples the others, and whose fall arrives first is luck.
So the coordinator waits `SETTLE_S`, longer while only consequences have arrived, shorter when everyone has ended.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from paceline.errors import WorldError
from paceline.launch.control_channel import Body, KeyValues, reply
from paceline.launch.hosts import SealedLink, Seat
from paceline.launch.verdict import NO_MEETING, Outcome, Phase, Raised, Worker, has_cause, judge, signal_name
from paceline.world.progress_line import ProgressLine

SETTLE_S = 0.5
SETTLE_LONGER_S = 3.0
RELAY_MARGIN_S = 2.0


class Decider(Protocol):
    """What a supervisor tells, and the outcome it waits for."""

    outcome: asyncio.Future[Outcome]

    def told(self, rank: int, kind: str, body: Body) -> None: ...
    async def answer(self, rank: int, kind: str, body: Body, timeout_s: float) -> Body: ...
    def started(self, rank: int, pid: int) -> None: ...
    def exited(self, rank: int, status: int) -> None: ...
    def interrupted(self, by: signal.Signals) -> None: ...
    def broken(self, text: str, code: int) -> None: ...
    async def close(self) -> None: ...


class Coordinator:
    def __init__(
        self, seat: Seat, links: Mapping[int, SealedLink], on_progress: Callable[[ProgressLine], None]
    ) -> None:
        self.workers = [Worker(rank) for rank in range(seat.size)]
        self.outcome: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._keys = KeyValues()
        self._on_progress = on_progress
        self._links = links
        self._failures = 0
        self._news = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        for host, link in links.items():
            self._spawn(self._hear_host(host, link))

    def told(self, rank: int, kind: str, body: Body) -> None:
        worker = self.workers[rank]
        match kind:
            case "hello":
                worker.connected = True
            case "step":
                worker.step = int(body["step"])
            case "phase":
                worker.phase = Phase(body["name"])
            case "progress":
                fields, final = body.get("fields") or {}, bool(body.get("final"))
                self._on_progress(ProgressLine(int(body["step"]), body.get("total"), fields, final))
            case _:
                raise ValueError("this supervisor does not know it")

    async def answer(self, rank: int, kind: str, body: Body, timeout_s: float) -> Body:
        if kind == "failed":
            self.workers[rank].raised = Raised(**body)
            self._failed(self.workers[rank])
            return {}
        return await self._keys.answer(kind, body, timeout_s, self._connected)

    def started(self, rank: int, pid: int) -> None:
        self.workers[rank].pid = pid

    def exited(self, rank: int, status: int) -> None:
        worker = self.workers[rank]
        worker.status = status
        if worker.is_failure or worker.left_early:
            self._failed(worker)
        self._news.set()
        if all(w.status == 0 and w.failed_as is None for w in self.workers):
            self._decide(Outcome(0))

    def interrupted(self, by: signal.Signals, where: str = "") -> None:
        how = "Ctrl-C" if by == signal.SIGINT else by.name
        steps = [worker.step for worker in self.workers if worker.step is not None]
        at = f" at step {max(steps)}" if steps else ""
        self._decide(Outcome(128 + by, (f"paceline: stopped by {how}{where}{at}",)))

    def broken(self, text: str, code: int) -> None:
        self._decide(Outcome(code, (f"paceline: {text}",)))

    async def close(self) -> None:
        """Give every host the outcome; they end by themselves."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for link in self._links.values():
            await link.close()

    def _failed(self, worker: Worker) -> None:
        if worker.failed_as is None:
            worker.failed_as = self._failures
            self._failures += 1
            if self._failures == 1:
                self._spawn(self._settle())
        self._news.set()

    async def _settle(self) -> None:
        loop = asyncio.get_running_loop()
        begun = loop.time()
        while not all(worker.ended for worker in self.workers):
            patience = begun + (SETTLE_S if has_cause(self.workers) else SETTLE_LONGER_S) - loop.time()
            if patience <= 0:
                break
            self._news.clear()
            try:
                await asyncio.wait_for(self._news.wait(), patience)
            except TimeoutError:
                continue
        if all(worker.status == 0 for worker in self.workers):
            self._decide(Outcome(0))  # someone left a moment before the others, and all ended well
        else:
            self._decide(judge(self.workers))

    def _decide(self, outcome: Outcome) -> None:
        if not self.outcome.done():
            self.outcome.set_result(outcome)
            for link in self._links.values():
                link.send({"kind": "outcome", **outcome.as_message()})

    def _connected(self) -> str:
        here = [str(worker.rank) for worker in self.workers if worker.connected]
        missing = [str(worker.rank) for worker in self.workers if not worker.connected]
        if not missing:
            return f"all {len(here)} workers are connected"
        return f"connected so far: workers {', '.join(here) or 'none'}; missing: {', '.join(missing)}"

    async def _hear_host(self, host: int, link: SealedLink) -> None:
        questions: set[asyncio.Task[None]] = set()
        try:
            while (message := await link.receive()) is not None:
                self._obey(host, link, message, questions)
        except WorldError as error:
            self.broken(f"host {host}: {error}", NO_MEETING)
        finally:
            for task in questions:
                task.cancel()
        self.broken(f"lost host {host}: its supervisor went away without a word", NO_MEETING)

    def _obey(self, host: int, link: SealedLink, message: Body, questions: set[asyncio.Task[None]]) -> None:
        match message["kind"]:
            case "told":
                self.told(message["rank"], message["what"], message["body"])
            case "started":
                self.started(message["rank"], message["pid"])
            case "exited":
                self.exited(message["rank"], message["status"])
            case "interrupted":
                self.interrupted(signal.Signals(message["signal"]), f" on host {host}")
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


class Member:
    """Another host's supervisor: what its workers say goes to the coordinator, whose answers and outcome come back."""

    def __init__(self, link: SealedLink) -> None:
        self.outcome: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._link = link
        self._answers: dict[int, asyncio.Future[Body]] = {}
        self._asked = 0
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

    def started(self, rank: int, pid: int) -> None:
        self._link.send({"kind": "started", "rank": rank, "pid": pid})

    def exited(self, rank: int, status: int) -> None:
        self._link.send({"kind": "exited", "rank": rank, "status": status})

    def interrupted(self, by: signal.Signals) -> None:
        self._link.send({"kind": "interrupted", "signal": int(by)})
        how = "Ctrl-C" if by == signal.SIGINT else signal_name(by)
        self._decide(Outcome(128 + by, (f"paceline: stopped by {how}",)))

    def broken(self, text: str, code: int) -> None:
        self._link.send({"kind": "broken", "text": text, "code": code})
        self._decide(Outcome(code, (f"paceline: {text}",)))

    async def close(self) -> None:
        self._listening.cancel()
        await asyncio.gather(self._listening, return_exceptions=True)
        await self._link.close()

    async def _listen(self) -> None:
        try:
            while (message := await self._link.receive()) is not None:
                if "id" in message:
                    answer = self._answers.get(message["id"])
                    if answer is not None and not answer.done():
                        answer.set_result(message)
                else:
                    self._decide(Outcome.from_message(message))
        except WorldError as error:
            self._decide(Outcome(NO_MEETING, (f"paceline: {error}",)))
        self._decide(Outcome(NO_MEETING, ("paceline: lost the coordinator (host 0); its own output says why",)))

    def _decide(self, outcome: Outcome) -> None:
        if not self.outcome.done():
            self.outcome.set_result(outcome)

    def _heard_all(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None and not self.outcome.done():
            self.outcome.set_exception(error)
