"""The coordinator (host 0's supervisor) knows every process of the job, and is the only one to decide.

    host 0   workers ─▶ supervisor = Coordinator ◀═══ host 1   supervisor = HostAgent ◀─ workers
             servers ─▶      │  over, by the exit rules
                             └──▶ Outcome, the same on every host

A failure is not attributed at once: the death of one worker brings the others down, and which failure arrives first is
luck. So the coordinator waits `CONSEQUENCES_S`, longer while only consequences have arrived, shorter when every process
has ended. Then the failure is attributed or, where the job goes on without those that failed, each gets a line.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Mapping, Set
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.elastic.step_log import StepLog
from paceline.errors import WorldError
from paceline.launch.agents import Agent, RemoteHosts
from paceline.launch.control import MALFORMED, Body, KeyValueStore, reply
from paceline.launch.elastic_job import ElasticJob, FixedJob, LateHosts
from paceline.launch.exit_rules import (
    ANNOUNCE_AFTER_S,
    GRACE_S,
    PATIENCE_S,
    Check,
    Policy,
    ReportedWait,
    StopRequest,
    can_go_on,
    check_last_workers,
    check_waits,
    still_running,
    stopped_as_asked,
    stopped_early,
    success,
)
from paceline.launch.failure_attribution import (
    RENDEZVOUS_FAILED,
    FailedWait,
    MemoryReport,
    Outcome,
    Phase,
    Process,
    Raised,
    Waits,
    attribute_failure,
    count,
    describe,
    has_cause,
    numbers,
)
from paceline.launch.hangs import LAST_TO_COME_S, MOST_STACKS, STACKS_SHOWN_S, find_hang
from paceline.launch.host_link import SealedLink
from paceline.launch.rendezvous import HostAssignment, HostRendezvous, JoinedHost
from paceline.world.terminal import ProgressLine, SummaryTable
from paceline.world.unauthenticated import RateLimitedLog

CONSEQUENCES_S = 0.5
CONSEQUENCES_ALONE_S = 3.0
"""How long other failures are waited for: once a cause has arrived, and while none has."""
LOOK_EVERY_S = 0.5


class Coordinator:
    agent: Agent

    def __init__(
        self,
        assignment: HostAssignment,
        joined: Mapping[int, JoinedHost],
        show: Callable[[ProgressLine | SummaryTable], None],
        log: Callable[[str], None],
        grace_s: float = GRACE_S,
        ledger: StepLog | None = None,
        rendezvous: HostRendezvous | None = None,
        shows: Callable[[str], None] | None = None,
    ) -> None:
        workers = [Process(rank) for rank in range(assignment.size)]
        self.processes = workers + [Process(assignment.size + index, index) for index in range(assignment.servers)]
        self.policy = Policy()
        self.outcome: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self.a_process_ended = False
        self.signals_to_pass_on: asyncio.Queue[signal.Signals] = asyncio.Queue()
        self._grace_s = grace_s
        self._request: StopRequest | None = None
        self.keys = KeyValueStore()
        self._show, self._shows = show, shows
        self.log = log
        self._warn = RateLimitedLog(log)
        self.remote_hosts = RemoteHosts(assignment, joined, self.clock)
        self._rendezvous = rendezvous
        self._checkpoint: str | None = None
        self._failures = 0
        self._collecting = False
        self._reporting_hang: asyncio.Task[None] | None = None
        self._news = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self.job: FixedJob | ElasticJob = FixedJob()
        self._late_hosts: LateHosts | None = None
        patience_s = PATIENCE_S
        if (rules := assignment.elastic) is not None:
            self.job = ElasticJob(assignment.size, rules, ledger or StepLog(), self, assignment.servers)
            self._spawn(self.job.tick())
            self._late_hosts = LateHosts(assignment, self.job, self)
            if rendezvous is not None:
                self._spawn(self._late_hosts.accept(rendezvous))
            patience_s = rules.heartbeat_timeout_s
        self._spawn(self._watch_waits(patience_s))
        for host in joined:
            self.listen_to(host)

    def clock(self) -> float:
        return asyncio.get_running_loop().time()

    @property
    def is_over(self) -> bool:
        return self.outcome.done()

    def agent_of(self, rank: int) -> Agent:
        return self.remote_hosts.agent_of(rank) or self.agent

    def all_agents(self) -> list[Agent]:
        return [self.agent, *self.remote_hosts.all_agents()]

    # ---- reports of workers and supervisors -----------------------------------------------------------------

    def report(self, rank: int, kind: str, body: Body) -> None:
        process = self.processes[rank]
        if kind == "heartbeat" or kind.startswith("elastic."):
            self.job.report(rank, kind, body)
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
                self.policy = replace(self.policy, **body)
            case "holds":
                process.holds = str(body["what"])
            case "memory":
                process.memory = MemoryReport(str(body["told"]), Path(body["kills_file"]), int(body["kills"]))
            case "checkpoint":
                self._checkpoint = str(body["folder"])
            case "waits":
                since = self.clock() - float(body["seconds"])
                process.waits = Waits(str(body["call"]), str(body["place"]), since)
            case "goes_on":
                process.waits = None
            case "wait_failed":
                since = self.clock() - float(body["seconds"])
                waits = Waits(str(body["call"]), str(body["place"]), since)
                self._wait_failed(process, waits, str(body["doing"]), str(body["text"]), body.get("generation"))
            case "busy":
                pass  # `heard_at` is what counts
            case "progress":
                self._show(ProgressLine.from_message(body))
            case "run":
                if self._shows is not None:
                    self._shows(str(body["folder"]))
            case "evaluated":
                begun, whole = process.evaluations or (0, 0)  # of an Engine before
                process.evaluations = begun + int(body["begun"]), whole + int(body["whole"])
            case "table":
                self._show(SummaryTable.of(body["title"], body["rows"]))
            case _:
                raise ValueError("unknown message kind; use one version of paceline on all hosts")

    async def answer(self, rank: int, kind: str, body: Body, timeout_s: float) -> Body:
        process = self.processes[rank]
        process.heard_at = self.clock()
        if kind == "failed":
            process.raised = Raised.from_message(body)
            if process.failed_wait is None and process.waits is not None:  # in a call of torch.distributed's
                self._wait_failed(process, process.waits, "", process.raised.summary)
            if not self.job.raised(process):
                self._failed(process)
            return {}
        if self.job.is_leaving(rank):
            raise WorldError("all workers start anew, and this one is being stopped")
        return await self.keys.answer(kind, body, timeout_s, self._connected)

    def ready(self) -> None:
        raise AssertionError("the coordinator's own host is never late")

    def started(self, rank: int, pid: int) -> None:
        self.processes[rank].pid = pid
        self.job.started(rank)

    def exited(self, rank: int, status: int) -> None:
        process = self.processes[rank]
        process.status, process.ended_at = status, self.clock()
        if self.job.exited(process):
            self._news.set()
            return
        if process.is_failure or process.left_early:
            self._failed(process)
        self._news.set()
        self._end_if_all_is_well()
        if not self.a_process_ended:
            self.a_process_ended = True
            self.remote_hosts.send({"kind": "a_process_ended"})
            self._spawn(self._watch_last_workers())

    def interrupted(self, by: signal.Signals, where: str = "") -> None:
        """Ask all workers to stop, and wait for them. A notice (SIGUSR1) may be followed by an order."""
        first = self._request is None
        self._request = StopRequest(by, where, self._grace_s, self.clock())
        self.job.stop()
        starting = any(process.pid is None for process in self.processes)
        if starting and not self.job.running:  # nothing to save yet
            self.decide(stopped_early(self._request, self.processes))
            return
        if self.policy.stops_on_request:
            self.announce(self._request.announcement())
        self.signals_to_pass_on.put_nowait(self._request.passed_on)
        self.remote_hosts.send({"kind": "pass_on", "signal": int(self._request.passed_on)})
        if first:
            self._spawn(self._await_exits())
        self._news.set()

    def stop_now(self, by: signal.Signals, where: str = "") -> None:
        self.decide(stopped_early(StopRequest(by, where, self._grace_s, self.clock()), self.processes))

    async def _await_exits(self) -> None:
        """Wait until the workers have ended, or their time is up."""
        assert self._request is not None
        announced = self.policy.stops_on_request
        while still_running(self.processes) and not self.outcome.done():
            now = self.clock()
            if now >= self._request.deadline:
                break
            if not announced and now - self._request.since >= ANNOUNCE_AFTER_S:
                self.announce(self._request.waiting(self.processes))
                announced = True
            self._news.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), min(self._request.deadline - now, LOOK_EVERY_S))
        late = still_running(self.processes)
        if late or (not self._collecting and any(map(stopped_as_asked, self.processes))):
            self.decide(stopped_early(self._request, self.processes, late=late))

    def fail(self, text: str, code: int) -> None:
        self.decide(Outcome(code, (f"paceline: {text}",)))

    async def close(self) -> None:
        """Give every host the outcome; they end by themselves."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._rendezvous is not None:
            await self._rendezvous.close()
        await self.remote_hosts.close()
        self.job.close()

    # ---- failures and the end ------------------------------------------------------------------------------

    def _failed(self, process: Process) -> None:
        expected = self._request is not None and stopped_as_asked(process)
        if process.failed_as is None and not expected:
            process.failed_as = self._failures
            self._failures += 1
            if not self._collecting:
                self._collecting = True
                self._spawn(self._collect_failures())
        self._news.set()

    async def _collect_failures(self) -> None:
        """Wait for the consequences of a failure, then attribute it, or go on without the processes that failed."""
        begun = self.clock()
        while not all(process.ended for process in self.processes):
            patience = begun + (CONSEQUENCES_S if has_cause(self.processes) else CONSEQUENCES_ALONE_S) - self.clock()
            if patience <= 0:
                break
            self._news.clear()
            try:
                await asyncio.wait_for(self._news.wait(), patience)
            except TimeoutError:
                continue
        if self._reporting_hang is not None:
            await self._reporting_hang
        self._collecting = False
        self._end_if_all_is_well()  # a worker may have left a moment before the others, and all ended well
        if self.outcome.done():
            return
        if can_go_on(self.processes, self.policy):
            self._go_on()
        else:
            self.decide(attribute_failure(self.processes))

    def _go_on(self) -> None:
        """Announce each process that failed, and end the job where all others have ended."""
        failed = [process for process in self.processes if process.failed_as is not None and not process.lost]
        for process in failed:
            for line in describe(process, self.processes, and_so="; the job goes on without it"):
                self.announce(line)
            process.lost = True
        self._end_if_all_is_well()

    async def _watch_last_workers(self) -> None:
        warned = False
        while not self.outcome.done():
            check = check_last_workers(self.processes, self.policy, self.clock(), warned)
            warned = warned or bool(check.lines)
            await self._act_on(check)

    async def _watch_waits(self, patience_s: float) -> None:
        reported: set[ReportedWait] = set()
        while not self.outcome.done():
            now = self.clock()
            await self._act_on(check_waits(self.processes, self.policy, now, patience_s, reported, self.job.is_missed))

    def _wait_failed(
        self, process: Process, waits: Waits, doing: str, text: str, generation: int | None = None
    ) -> None:
        now = self.clock()
        process.failed_wait = failed = FailedWait(waits, doing, now - waits.since, text, now, generation)
        if failed.timed_out and self._reporting_hang is None and not self.policy.survive_worker_loss:
            waited = {one.rank for one in self.processes if one.waits is not None} | {process.rank}
            self._reporting_hang = self._spawn(self._report_hang(process, failed, waited))

    async def _report_hang(self, process: Process, failed: FailedWait, waited: Set[int]) -> None:
        await asyncio.sleep(LAST_TO_COME_S)
        if self.is_over or self.job.has_ended(failed.generation):
            self._reporting_hang = None
            return
        taking_part = [one for one in self.processes if self.job.takes_part(one.rank)]
        hang = find_hang(taking_part, failed, waited, self.job.where_of(process))
        self.announce(hang.line)
        for one in hang.late[:MOST_STACKS]:
            self.agent_of(one.rank).show_stack(one.rank)
        await asyncio.sleep(STACKS_SHOWN_S)
        self._reporting_hang = None
        self.job.hung(hang.absent, f"has not come for {failed.seconds:.3g} s")

    async def _act_on(self, check: Check) -> None:
        for line in check.lines:
            self.announce(line)
        if check.outcome is not None:
            self.decide(check.outcome)
        await asyncio.sleep(LOOK_EVERY_S)

    def _end_if_all_is_well(self) -> None:
        outcome = success(self.processes)
        if outcome is not None:
            self.decide(outcome)

    def decide(self, outcome: Outcome) -> None:
        if not self.outcome.done():
            if outcome.code and self._checkpoint is not None:
                resume = f"paceline: the last checkpoint is {self._checkpoint}"
                outcome = replace(outcome, closing=(*outcome.closing, resume))
            self.outcome.set_result(outcome)
            self.remote_hosts.send({"kind": "outcome", **outcome.as_message()})

    def announce(self, line: str) -> None:
        """On every host."""
        self.log(line)
        self.remote_hosts.send({"kind": "log", "line": line})

    def _connected(self) -> str:
        missing = [process for process in self.processes if not process.connected]
        if not missing:
            return f"all {count(self.processes)} are connected"
        here = [process for process in self.processes if process.connected]
        return f"connected so far: {numbers(here) or 'none'}; missing: {numbers(missing)}"

    # ---- other hosts ---------------------------------------------------------------------------------------

    def listen_to(self, host: int) -> None:
        self._spawn(self._receive(host))
        self._spawn(self.remote_hosts[host].keepalive.run())

    async def _receive(self, host: int) -> None:
        questions: set[asyncio.Task[None]] = set()
        remote = self.remote_hosts[host]
        try:
            why = await remote.receive(lambda message: self._handle(host, remote.link, message, questions))
        finally:
            for task in questions:
                task.cancel()
        self._lost(host, why)

    def _lost(self, host: int, why: str) -> None:
        """A host is cut off: the end of the job, unless it is elastic and others are left."""
        there = self.remote_hosts.drop(host)
        if not self.job.host_lost(host, there, why):
            self.fail(f"lost host {host}: {why}", RENDEZVOUS_FAILED)
        self._news.set()

    def _handle(self, host: int, link: SealedLink, message: Body, questions: set[asyncio.Task[None]]) -> None:
        _check(message, len(self.processes))
        match message["kind"]:
            case "report":
                rank, kind = message["rank"], message["what"]
                try:
                    self.report(rank, kind, message["body"])
                except MALFORMED as error:
                    text = f"worker {rank} sent a malformed message {kind[:80]!r}: {error}"
                    self._warn(f"host {host}", f"paceline: host {host}: {text}")
            case "ping":
                pass
            case "ready":
                if self._late_hosts is None:
                    raise WorldError("it says that it joined late, and this job is not elastic")
                self._late_hosts.ready(host)
            case "started":
                self.started(message["rank"], message["pid"])
            case "exited":
                self.exited(message["rank"], message["status"])
            case "interrupted":
                self.interrupted(signal.Signals(message["signal"]), f" on host {host}")
            case "stop_now":
                self.stop_now(signal.Signals(message["signal"]), f" on host {host}")
            case "fail" if self.job.can_lose(self.remote_hosts.seating.slots_of(host)):
                self.remote_hosts[host].leaves_because = message["text"]
            case "fail":
                self.fail(f"host {host}: {message['text']}", message["code"])
            case _:
                rank = int(message["rank"])

                async def ask(kind: str, body: Body, timeout_s: float) -> Body:
                    return await self.answer(rank, kind, body, timeout_s)

                task = asyncio.create_task(reply(link, message, ask))
                questions.add(task)
                task.add_done_callback(questions.discard)

    def _spawn(self, work: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    def _finished(self, task: asyncio.Task[None]) -> None:
        """An error of our own in the background ends the job with it, instead of leaving all processes waiting."""
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not self.outcome.done():
            self.outcome.set_exception(error)


FIELDS: Mapping[str, Mapping[str, type]] = {
    "report": {"rank": int, "what": str, "body": dict},
    "ping": {},
    "ready": {},
    "started": {"rank": int, "pid": int},
    "exited": {"rank": int, "status": int},
    "interrupted": {"signal": int},
    "stop_now": {"signal": int},
    "fail": {"text": str, "code": int},
}
FIELDS_OF_QUESTION: Mapping[str, type] = {"kind": str, "rank": int, "body": dict, "id": int}


def _check(message: Body, processes: int) -> None:
    """A malformed message of another host's supervisor is an error of that host, and not one of ours."""
    kind = message.get("kind")
    fields = FIELDS.get(kind, FIELDS_OF_QUESTION) if isinstance(kind, str) else FIELDS_OF_QUESTION
    wrong = [name for name, wanted in fields.items() if type(message.get(name)) is not wanted]
    if "rank" in fields and not wrong and not 0 <= message["rank"] < processes:
        wrong = ["rank"]
    if "signal" in fields and not wrong and message["signal"] not in set(signal.Signals):
        wrong = ["signal"]
    if wrong:
        raise WorldError(
            f"its message {str(kind)[:80]!r} is malformed ({', '.join(wrong)}); use one version of paceline on all "
            "hosts"
        )
