"""Elastic jobs as the launcher runs them: most with a coordinator inside this process, a few with real ones."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from paceline.elastic.decisions import Rules
from paceline.elastic.step_log import read_step_log
from paceline.errors import WorldError
from paceline.launch import coordinator, elastic_job
from paceline.launch.agents import Members, RemoteAgent, carry_out
from paceline.launch.control import Body, ControlServer, KeyValueStore
from paceline.launch.coordinator import Coordinator
from paceline.launch.folders import LOCK, MEMORY, RUN, memory_folder, open_run_folder, remove_folders, run_folder, sweep
from paceline.launch.host_link import Keepalive
from paceline.launch.rendezvous import HostAssignment
from paceline.world.control import ControlClient
from paceline.world.world import LaunchSettings
from tests.launch.launching import Launch, alive, wait_until, wait_until_gone
from tests.workers import free_port

Start = Callable[..., Launch]

FACTS = {"torch": "2.13"}


class NotedAgent:
    """Agent that only note what they are asked for."""

    def __init__(self) -> None:
        self.done: list[tuple[Any, ...]] = []

    def push(self, ranks: Sequence[int], kind: str, body: Body) -> None:
        self.done += [("push", rank, kind, body) for rank in ranks]

    def fence(self, rank: int) -> None:
        self.done.append(("fence", rank))

    def show_stack(self, rank: int) -> None:
        self.done.append(("show_stack", rank))

    def start(self, rank: int, incarnation: int, members: Members) -> None:
        self.done.append(("start", rank, incarnation, *([members] if members else [])))

    def empty_memory(self) -> None:
        self.done.append(("empty_memory",))

    def pushed(self, kind: str) -> dict[int, Body]:
        """The last of a kind to each."""
        return {rank: body for _, rank, said, body in (d for d in self.done if d[0] == "push") if said == kind}


class Job:
    """A coordinator of workers that have all entered their loop."""

    def __init__(self, workers: int, rules: Rules | None = None, servers: int = 0) -> None:
        here = "127.0.0.1"
        assignment = HostAssignment(
            0, 1, 0, workers, workers, LaunchSettings(), here, here, 1, servers, elastic=rules or Rules()
        )
        self.said: list[str] = []
        self.agent = NotedAgent()
        self.coordinator = Coordinator(assignment, {}, lambda shown: None, self.said.append)
        self.coordinator.agent = self.agent
        for slot in range(workers + servers):
            self.coordinator.started(slot, 100 + slot)
        for slot in range(workers):
            self.tell(slot, "enter", generation=1, loop=1, step=0, facts=FACTS)

    def tell(self, slot: int, kind: str, **body: Any) -> None:
        self.coordinator.report(slot, f"elastic.{kind}", body)

    def step(self, number: int, generation: int, slots: list[int]) -> None:
        for slot in slots:
            self.tell(slot, "ready", generation=generation, step=number, update=0, check=7, more=True)

    async def fail(self, slot: int, text: str) -> None:
        await self.coordinator.answer(
            slot, "failed", {"type": "ValueError", "text": text, "traceback": f"Traceback …\nValueError: {text}"}, 1.0
        )
        self.coordinator.exited(slot, 1)


def within(story: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(story(), 20))  # type: ignore[arg-type]


def test_a_death_is_told_to_the_others_at_once_and_its_slot_given_again() -> None:
    async def story() -> None:
        job = Job(3)
        job.step(1, 1, [0, 1, 2])
        assert set(job.agent.pushed("elastic.commit")) == {0, 1, 2}
        job.coordinator.exited(1, -signal.SIGKILL)
        why = "worker 1 was killed by SIGKILL in step 2"
        expected = {"generation": 2, "members": [0, 2], "joining": [], "step": 1, "why": why, "main": 0}
        assert job.agent.pushed("elastic.generation") == {0: expected, 2: expected}
        assert job.agent.done[-1] == ("start", 1, 1)
        job.coordinator.started(1, 201)
        job.tell(1, "join", loop=1, facts=FACTS)
        job.step(2, 2, [0, 2])
        assert job.agent.pushed("elastic.generation")[1]["joining"] == [1]
        for slot in (0, 1, 2):
            job.tell(slot, "grouped", generation=3)
        assert job.said == [
            f"paceline: {why}; 2 workers go on, a replacement starts",
            "paceline: worker 1 is back after step 2",
        ]
        for slot in (0, 1, 2):
            job.tell(slot, "leave", loop=1)
            job.coordinator.exited(slot, 0)
        assert job.coordinator.outcome.result().code == 0
        await job.coordinator.close()

    within(story)


@pytest.mark.parametrize("died", ["before", "after", "never"])
def test_a_wait_that_a_death_has_ended_is_no_hang_of_the_replacement(
    died: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`died` before the failed wait was told, or after it."""
    monkeypatch.setattr(coordinator, "LAST_TO_COME_S", 0.1)
    monkeypatch.setattr(coordinator, "STACKS_SHOWN_S", 0.0)

    async def story() -> None:
        job = Job(2)
        job.step(1, 1, [0, 1])
        if died == "before":
            job.coordinator.exited(1, -signal.SIGKILL)
        told = {"call": "the training loop", "place": "train.py:9", "doing": "in the vote of step 2", "generation": 1}
        text = "Application timeout caused pair closure"
        job.coordinator.report(0, "wait_failed", {**told, "text": text, "seconds": 0.1})
        if died == "after":
            job.coordinator.exited(1, -signal.SIGKILL)
        if died != "never":
            job.coordinator.started(1, 201)
            job.tell(1, "join", loop=1, facts=FACTS)
            job.step(2, 2, [0])
        await asyncio.sleep(0.3)
        assert any("hang" in line for line in job.said) == (died == "never")
        assert (("fence", 1) in job.agent.done) == (died == "never")
        await job.coordinator.close()

    within(story)


def test_a_lost_server_is_told_to_workers_and_servers_and_started_again() -> None:
    async def story() -> None:
        job = Job(2, servers=2)
        job.coordinator.exited(3, -signal.SIGKILL)
        told = job.agent.pushed("elastic.generation")
        assert {rank: body["servers"] for rank, body in told.items()} == {0: [2], 1: [2], 2: [2]}
        assert job.agent.done[-1] == ("start", 3, 1)
        job.coordinator.started(3, 203)
        job.tell(3, "join", loop=0, facts=FACTS)
        job.step(1, 2, [0, 1])
        assert job.agent.pushed("elastic.commit")[0]["then"] == 3
        assert job.agent.pushed("elastic.generation")[3]["servers"] == [2, 3]
        job.tell(3, "grouped", generation=3)
        for slot in (0, 1):
            job.tell(slot, "leave", loop=1)
        for rank in (2, 3, 0, 1):
            job.coordinator.exited(rank, 0)
        assert job.coordinator.outcome.result().code == 0
        assert job.said[-1] == "paceline: server 1 is back after step 1"
        await job.coordinator.close()

    within(story)


def test_a_server_that_waits_for_workers_who_have_ended_is_dismissed(monkeypatch: pytest.MonkeyPatch) -> None:
    """One worker dies after the others have said goodbye: the server waits for them in a generation without it."""
    monkeypatch.setattr(elastic_job, "SERVERS_LEAVE_S", 0.1)

    async def story() -> None:
        job = Job(3, servers=1)
        for slot in (0, 1, 2):
            job.tell(slot, "leave", loop=1)
        job.coordinator.exited(2, -signal.SIGKILL)
        assert job.agent.pushed("elastic.generation")[3]["members"] == [0, 1]
        for slot in (0, 1):
            job.coordinator.exited(slot, 0)
        assert (await job.coordinator.outcome).code == 0
        await job.coordinator.close()

    within(story)


def test_an_exception_is_shown_once_and_the_second_in_the_same_step_ends_the_job() -> None:
    async def story() -> None:
        job = Job(3)
        await job.fail(2, "bad sample")
        assert job.said == [
            "paceline: worker 2 raised ValueError in step 1: bad sample; 2 workers go on, a replacement starts",
            "Traceback …\nValueError: bad sample",
        ]
        await job.fail(0, "bad sample")
        outcome = job.coordinator.outcome.result()
        assert outcome.code == 1
        assert outcome.lines == (
            "paceline: worker 0 (pid 100) raised ValueError: bad sample",
            "paceline: the same step failed before: it is the code, not the machine",
        )
        await job.coordinator.close()

    within(story)


def test_an_exception_after_the_loop_fails_the_job_though_the_others_end_well() -> None:
    async def story() -> None:
        job = Job(2)
        job.step(1, 1, [0, 1])
        for slot in (0, 1):
            job.tell(slot, "leave", loop=1)
        await job.fail(0, "no space left")
        assert job.said[0] == "paceline: worker 0 raised ValueError after step 1: no space left; 1 worker goes on"
        job.coordinator.exited(1, 0)
        outcome = job.coordinator.outcome.result()
        assert outcome.code == 1
        assert outcome.lines[0] == "paceline: worker 0 (pid 100) raised ValueError at step 1: no space left"
        await job.coordinator.close()

    within(story)


def test_what_old_processes_say_while_all_start_anew_counts_for_nothing() -> None:
    """A part of the state is lost with a host: those who live are fenced, and speak until they are gone."""

    async def story() -> None:
        job = Job(2)
        job.step(1, 1, [0, 1])
        job.tell(0, "lost", generation=1, why="a part is lost")
        assert [done for done in job.agent.done if done[0] != "push"] == [("empty_memory",), ("fence", 0), ("fence", 1)]
        membership = job.coordinator.job.membership  # type: ignore[union-attr]
        for slot in (0, 1):
            job.tell(slot, "enter", generation=1, loop=1, step=7, facts=FACTS)
        assert not membership.running
        with pytest.raises(WorldError, match="all workers start anew, and this one is being stopped"):
            await job.coordinator.answer(0, "store.add", {"keys": ["elastic/1/came"], "amount": 1}, 1.0)
        raised = {"type": "PeerLostError", "text": "gone", "traceback": "", "ours": True, "secondary": True}
        await job.coordinator.answer(1, "failed", raised, 1.0)
        job.coordinator.exited(1, 1)
        job.coordinator.exited(0, -signal.SIGKILL)
        assert [done[:3] for done in job.agent.done[-2:]] == [("start", 1, 0), ("start", 0, 0)]
        for slot in (0, 1):
            job.tell(slot, "enter", generation=1, loop=1, step=1, facts=FACTS)
        assert membership.running
        assert job.said == ["paceline: a part is lost: all start anew (1 of at most 3 times)"]
        await job.coordinator.close()

    within(story)


def test_a_job_that_is_stopped_while_it_starts_has_not_ended_well_though_one_worker_has() -> None:
    async def story() -> None:
        here = "127.0.0.1"
        assignment = HostAssignment(0, 1, 0, 2, 2, LaunchSettings(), here, here, 1, 0, elastic=Rules())
        coordinator = Coordinator(assignment, {}, lambda shown: None, lambda line: None, grace_s=5.0)
        coordinator.agent = NotedAgent()
        for slot in (0, 1):
            coordinator.started(slot, 100 + slot)
        coordinator.exited(1, 0)
        coordinator.interrupted(signal.SIGTERM)
        coordinator.exited(0, -signal.SIGTERM)
        assert (await coordinator.outcome).code == 143
        await coordinator.close()

    within(story)


def test_a_consequence_while_all_start_anew_waits_for_its_cause() -> None:
    async def story() -> None:
        job = Job(3)
        job.tell(0, "lost", generation=1, why="a part is lost")
        for slot in (0, 1, 2):
            job.coordinator.exited(slot, -signal.SIGKILL)
            job.coordinator.started(slot, 200 + slot)
        raised = {"type": "PeerLostError", "text": "gone", "traceback": "", "ours": True, "secondary": True}
        await job.coordinator.answer(0, "failed", raised, 1.0)
        job.coordinator.exited(1, -signal.SIGKILL)
        job.coordinator.exited(0, 1)
        told = "worker 1 was killed by SIGKILL while all start anew: all start anew (2 of at most 3 times)"
        assert job.said[1:] == [f"paceline: {told}"]
        job.coordinator.exited(2, -signal.SIGKILL)
        started = [done[1] for done in job.agent.done if done[0] == "start"]
        assert started == [0, 1, 2, 1, 0, 2]
        assert not job.coordinator.outcome.done()
        await job.coordinator.close()

    within(story)


def test_a_server_that_dies_while_all_start_anew_makes_them_start_once_more() -> None:
    async def story() -> None:
        job = Job(2, servers=1)
        job.tell(0, "lost", generation=1, why="a part is lost")
        for rank in (0, 1, 2):
            job.coordinator.exited(rank, -signal.SIGKILL)
            job.coordinator.started(rank, 200 + rank)
        job.coordinator.exited(2, -signal.SIGKILL)
        told = "server 0 was killed by SIGKILL while all start anew: all start anew (2 of at most 3 times)"
        assert job.said[1:] == [f"paceline: {told}"]
        assert job.agent.done[-1][:3] == ("start", 2, 0)
        for slot in (0, 1):
            job.coordinator.exited(slot, -signal.SIGKILL)
            job.tell(slot, "enter", generation=1, loop=1, step=0, facts=FACTS)
        assert job.coordinator.job.membership.table.serving == (2,)  # type: ignore[union-attr]
        await job.coordinator.close()

    within(story)


def test_code_that_fails_at_every_start_anew_ends_the_job_with_its_traceback() -> None:
    async def story() -> None:
        job = Job(2)
        job.tell(0, "lost", generation=1, why="a part is lost")
        for slot in (0, 1):
            job.coordinator.exited(slot, -signal.SIGKILL)
            job.coordinator.started(slot, 200 + slot)
        await job.fail(1, "no such file")
        told = "worker 1 raised ValueError while all start anew: no such file: all start anew (2 of at most 3 times)"
        assert job.said[1:] == [f"paceline: {told}", "Traceback …\nValueError: no such file"]
        job.coordinator.exited(0, -signal.SIGKILL)
        for slot in (0, 1):
            job.coordinator.started(slot, 300 + slot)
        await job.fail(0, "no such file")
        outcome = job.coordinator.outcome.result()
        assert outcome.code == 1
        assert outcome.lines == (
            "paceline: worker 0 (pid 300) raised ValueError: no such file",
            "paceline: a start failed so before: it is the code, not the machine",
        )
        await job.coordinator.close()

    within(story)


def test_a_replacement_that_nobody_waits_for_does_not_hold_up_the_end() -> None:
    async def story() -> None:
        job = Job(2)
        job.coordinator.exited(1, -signal.SIGKILL)
        job.coordinator.started(1, 201)
        job.step(1, 2, [0])
        job.tell(0, "leave", loop=1)
        job.coordinator.exited(0, 0)
        assert job.coordinator.outcome.result().code == 0
        await job.coordinator.close()

    within(story)


def test_too_few_workers_are_named_with_the_last_checkpoint() -> None:
    async def story() -> None:
        job = Job(3, Rules(min_workers=3))
        job.coordinator.report(0, "checkpoint", {"folder": "run/step-5"})
        job.coordinator.exited(2, -signal.SIGKILL)
        outcome = job.coordinator.outcome.result()
        assert outcome.code == 4
        told = "paceline: worker 2 was killed by SIGKILL in step 1; 2 workers left, and --min-workers is 3"
        assert outcome.lines == (told,)
        assert outcome.closing == ("paceline: the last checkpoint is run/step-5",)
        await job.coordinator.close()

    within(story)


def test_a_stopped_job_replaces_nobody_and_ends_as_it_was_asked_to() -> None:
    async def story() -> None:
        job = Job(2)
        job.coordinator.interrupted(signal.SIGTERM)
        for slot in (0, 1):
            job.coordinator.exited(slot, -signal.SIGTERM)
        outcome = await job.coordinator.outcome
        assert outcome.code == 128 + signal.SIGTERM
        assert not [done for done in job.agent.done if done[0] == "start"]
        await job.coordinator.close()

    within(story)


def test_who_is_silent_is_not_judged_while_others_end_as_they_were_asked_to() -> None:
    async def story() -> None:
        job = Job(2, Rules(heartbeat_timeout_s=0.05))
        job.coordinator.report(0, "heartbeat", {})
        job.coordinator.exited(1, -signal.SIGKILL)
        assert job.agent.done[-1] == ("start", 1, 1)
        job.coordinator.interrupted(signal.SIGTERM)  # the replacement is being forked
        job.coordinator.exited(0, -signal.SIGTERM)
        await asyncio.sleep(0.4)
        assert not job.coordinator.outcome.done()
        job.coordinator.started(1, 201)
        job.coordinator.exited(1, -signal.SIGTERM)
        assert (await job.coordinator.outcome).code == 128 + signal.SIGTERM
        await job.coordinator.close()

    within(story)


def test_a_stopped_job_does_not_wait_for_workers_of_a_host_that_is_lost() -> None:
    async def story() -> None:
        job = Job(3)
        assert job.coordinator.job.host_lost(1, [2], "its supervisor ended")
        job.coordinator.interrupted(signal.SIGTERM)
        for slot in (0, 1):
            job.coordinator.exited(slot, -signal.SIGTERM)
        assert (await asyncio.wait_for(job.coordinator.outcome, 5)).lines == ("paceline: stopped by SIGTERM",)
        await job.coordinator.close()

    within(story)


def test_whoever_waits_for_a_key_of_an_older_generation_hears_that_it_is_over() -> None:
    async def story() -> None:
        keys = KeyValueStore()
        old = asyncio.create_task(keys.answer("store.get", {"keys": ["p/elastic/1/address"]}, 20, str))
        new = asyncio.create_task(keys.answer("store.get", {"keys": ["p/elastic/2/address"]}, 20, str))
        await asyncio.sleep(0.01)
        keys.forget_before(2)
        with pytest.raises(WorldError, match="of a generation that is over; generation 2 has begun"):
            await asyncio.wait_for(old, 1)
        await keys.answer("store.set", {"keys": ["p/elastic/2/address"], "values": ["YQ=="]}, 1, str)
        assert await asyncio.wait_for(new, 1) == {"values": ["YQ=="]}
        await keys.answer("store.set", {"keys": ["p/elastic/1/late"], "values": ["YQ=="]}, 1, str)  # no harm, no key
        assert await keys.answer("store.count", {"keys": []}, 1, str) == {"value": 1}
        with pytest.raises(WorldError, match="of a generation that is over"):  # a look is enough to hear of it
            await keys.answer("store.check", {"keys": ["p/elastic/1/late"]}, 1, str)

    within(story)


def test_words_of_a_dead_process_are_not_taken_for_its_successors(tmp_path: Path) -> None:
    class Listener:
        def __init__(self) -> None:
            self.heard: list[tuple[int, str]] = []

        def report(self, rank: int, kind: str, body: Body) -> None:
            self.heard.append((rank, kind))

        async def answer(self, rank: int, kind: str, body: Body, timeout_s: float) -> Body:
            return {}

    async def story() -> None:
        listener = Listener()
        server = ControlServer(tmp_path / "control.sock", listener, print)
        await server.start()
        pushed: list[str] = []
        client = await asyncio.to_thread(ControlClient.connect, str(server.path), 3)
        client.heard = lambda kind, body: pushed.append(kind)
        client.tell("elastic.here", incarnation=0)
        while (3, "elastic.here") not in listener.heard:
            await asyncio.sleep(0.01)
        server.push([3, 2], "elastic.commit", {})  # nobody listens in slot 2
        while not pushed:
            await asyncio.sleep(0.01)
        server.retire(os.getpid())
        client._closing = True  # its connection is about to be closed, and this is no worker that should leave
        client.tell("elastic.ready")
        await server.drain(os.getpid(), 5)
        assert listener.heard == [(3, "hello"), (3, "elastic.here")]
        await asyncio.to_thread(client.close)
        await server.close()

    within(story)


def test_hands_reach_another_host_as_lines() -> None:
    sent: list[Body] = []

    class Wire:
        def send(self, message: Body) -> None:
            sent.append(json.loads(json.dumps(message)))

    far, near = RemoteAgent(Wire()), NotedAgent()
    far.push([2], "elastic.commit", {"step": 1})
    far.fence(2)
    far.start(2, 1, None)
    far.start(4, 0, [(0, 0), (4, 2)])
    far.empty_memory()
    assert all(carry_out(near, message) for message in sent)
    assert near.done == [
        ("push", 2, "elastic.commit", {"step": 1}),
        ("fence", 2),
        ("start", 2, 1),
        ("start", 4, 0, [(0, 0), (4, 2)]),
        ("empty_memory",),
    ]
    assert not carry_out(near, {"kind": "outcome"})


def test_a_silent_host_is_given_up_but_not_for_a_pause_of_our_own() -> None:
    now = [0.0]
    keepalive = Keepalive(None, 5.0, lambda: now[0])  # type: ignore[arg-type]
    for now[0] in (1.0, 2.0, 3.0):
        assert not keepalive.check()
    assert keepalive.is_late
    now[0] = 60.0  # we were stopped ourselves
    assert not keepalive.check()
    for now[0] in (61.0, 62.0, 63.0, 64.0, 65.0):
        assert not keepalive.check()
    now[0] = 66.0
    assert keepalive.check()


def test_a_memory_folder_goes_with_its_job_and_is_swept_when_nobody_holds_it(tmp_path: Path) -> None:
    memory = tmp_path / "shm"
    memory.mkdir()
    with run_folder() as run, memory_folder(run, memory) as kept:
        assert kept.parent == memory
        assert kept.stat().st_mode & 0o777 == 0o700
        sweep(memory)
        assert kept.exists(), "it is held"
        with open_run_folder(run) as held:
            remove_folders(held)  # as the fork server does
        assert not kept.exists()
        assert not run.exists()
    left = memory / "paceline-1-0123abcd"
    left.mkdir()
    (left / LOCK).touch()
    other = memory / "paceline-notes"
    other.mkdir()
    sweep(memory)
    assert list(memory.iterdir()) == [other]


def test_the_run_folder_of_a_swept_memory_folder_goes_too_unless_it_is_anothers_by_now(tmp_path: Path) -> None:
    memory = tmp_path / "shm"
    memory.mkdir()
    for name, points_to in (("mine", "paceline-1-0123abcd"), ("anothers", "paceline-2-0123abcd")):
        run, left = tmp_path / name, memory / "paceline-1-0123abcd"
        run.mkdir()
        left.mkdir()
        (run / MEMORY).symlink_to(memory / points_to)
        (left / RUN).symlink_to(run)
        (left / LOCK).touch()
        sweep(memory)
    assert list(memory.iterdir()) == []
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["anothers", "shm"]


# ---- real processes ------------------------------------------------------------------------------------------

TRAINS = """
import queue
from pathlib import Path
steps, incarnation = 12, int(os.environ["PACELINE_INCARNATION"])
news = queue.Queue()
control.heard = lambda kind, body: news.put((kind, body))
control.tell("elastic.here", incarnation=incarnation)
facts = {"lanes": os.environ["PACELINE_DEFAULT_LANES"]}
generation, step = 1, 0

def regroup(body):
    global generation, step
    generation, step = body["generation"], body["step"]
    control.tell("elastic.grouped", generation=generation)

def wait_for(*names):
    deadline = time.monotonic() + 30
    while not all(Path(name).exists() for name in names):
        assert time.monotonic() < deadline, names
        time.sleep(0.01)

def first_time(name):
    try:
        Path(name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True

if incarnation:
    control.tell("elastic.join", loop=0, facts=facts)
    Path(f"stands-in-front-{rank}").touch()
    regroup(news.get(timeout=30)[1])
else:
    control.tell("elastic.enter", generation=1, loop=1, step=0, facts=facts)
    assert news.get(timeout=30) == ("elastic.begin", {"loop": 1, "then": None})
print("kept", os.environ["PACELINE_MEMORY_FOLDER"], "pids", os.getpid(), flush=True)
while step < steps:
    FAULTS
    control.tell("elastic.ready", generation=generation, step=step + 1, update=0, check=7, more=step + 1 < steps)
    kind, body = news.get(timeout=30)
    if kind == "elastic.commit":
        step = body["step"]
        if step < steps and step % 2 == 0:
            time.sleep(0.02)
    else:
        regroup(body)
    while not news.empty():
        kind, body = news.get()
        assert kind == "elastic.generation"
        regroup(body)
control.tell("elastic.leave", loop=1)
"""


def training(faults: str) -> str:
    return TRAINS.replace("    FAULTS", faults)


@pytest.mark.job
def test_a_killed_and_a_stopped_worker_are_replaced_and_every_step_is_committed_once(
    launch: Start, tmp_path: Path
) -> None:
    finished = launch(
        "--workers 4 --elastic --heartbeat-timeout-s 1 --ledger ledger.jsonl",
        training("""
    if rank == 1 and step == 2 and not incarnation:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 2 and step == 4 and not incarnation:
        os.kill(os.getpid(), signal.SIGSTOP)
    if step == 8:
        wait_for("stands-in-front-1", "stands-in-front-2")
"""),
    ).finish()
    assert finished.code == 0, finished.err
    rows = read_step_log(tmp_path / "ledger.jsonl")
    assert [row.step for row in rows] == list(range(1, 13))
    assert rows[0].members == rows[-1].members == (0, 1, 2, 3), rows
    said = finished.err.splitlines()
    assert said[0] == "paceline: worker 1 was killed by SIGKILL in step 3; 3 workers go on, a replacement starts"
    silent = "paceline: worker 2 sent no heartbeat for 1 s in step 5; "
    assert [line for line in said if line.startswith(silent)], finished.err
    for worker in (1, 2):
        assert any(re.fullmatch(rf"paceline: worker {worker} is back after step \d+", line) for line in said), said
    (kept,) = set(re.findall(r"kept (\S+)", finished.out))
    assert not Path(kept).exists()


@pytest.mark.job
def test_a_replacement_that_is_forked_while_the_job_is_asked_to_stop_is_asked_too(launch: Start) -> None:
    for _ in range(2):
        finished = launch(
            "--workers 2 --elastic --heartbeat-timeout-s 1",
            training("""
    if rank == 1 and step == 2 and not incarnation:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 0 and generation == 2:
        fork_server = Path(f"/proc/{os.getppid()}/stat").read_text()
        os.kill(int(fork_server.rpartition(")")[2].split()[1]), signal.SIGTERM)
        wait_for("never")
"""),
        ).finish()
        assert finished.code == 143, finished.err
        assert "sent no heartbeat" not in finished.err


@pytest.mark.job
def test_of_two_that_hold_pythons_lock_the_one_that_computes_is_borne_with(launch: Start) -> None:
    finished = launch(
        "--workers 3 --elastic --heartbeat-timeout-s 1",
        "import ctypes\n"
        + training("""
    if rank == 1 and step == 2:
        sum(range(12 * 10**7))
    if rank == 2 and step == 4 and not incarnation:
        ctypes.PyDLL(None).sleep(30)
"""),
    ).finish()
    assert finished.code == 0, finished.err
    said = [line for line in finished.err.splitlines() if " is back " not in line]
    assert said == [
        "paceline: worker 1 missed its heartbeat in step 3 but is using CPU (a C call may hold the GIL); it is killed "
        "after 30 s",
        "paceline: worker 2 sent no heartbeat for 1 s in step 5; 2 workers go on, a replacement starts",
    ]


@pytest.mark.job
def test_when_all_die_they_start_anew_and_when_the_supervisor_dies_nothing_is_left(launch: Start) -> None:
    started = launch(
        "--workers 2 --min-workers 1",
        training("""
    if step == 2 and first_time(f"died-{rank}"):
        wait_for("died-0", "died-1")
        os.kill(os.getpid(), signal.SIGKILL)
    if step == 5:
        Path(f"again-{rank}").touch()
        wait_for("never")
"""),
    )
    folder = started.temporary.parent
    wait_until(lambda: (folder / "again-0").exists() and (folder / "again-1").exists(), 20, "both are there again")
    assert started.process.stdout is not None
    heard = [started.process.stdout.readline().decode() for _ in range(4)]
    (kept,) = {line.split("kept ")[1].split()[0] for line in heard}
    assert Path(kept).is_dir()
    processes = started.descendants()
    started.process.kill()
    wait_until_gone(processes, Path(kept), timeout_s=5)
    assert "all start anew (1 of at most 3 times)" in started.finish().err
    assert started.run_folders() == []


@pytest.mark.job
def test_a_host_that_is_cut_off_is_done_without_and_stops_its_own_workers(launch: Start, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("known to both")
    where = f"--hosts 2 --coordinator 127.0.0.1:{free_port()} --secret-file secret --workers 2"
    script = training("""
    if step == 3:
        wait_for("cut")
""")
    near = launch(f"{where} --host-rank 0 --elastic --heartbeat-timeout-s 1.5 --ledger ledger.jsonl", script)
    far = launch(f"{where} --host-rank 1", script)
    ledger = tmp_path / "ledger.jsonl"
    wait_until(lambda: ledger.exists() and len(ledger.read_text().splitlines()) == 3, 20, "three steps are done")
    workers = far.descendants()
    far.interrupt(signal.SIGSTOP)
    (tmp_path / "cut").touch()
    finished = near.finish()
    assert finished.code == 0, finished.err
    told = "paceline: host 1 is lost (no message came from it for 1.5 s); 2 workers go on\n"
    assert told in finished.err
    assert "sent no heartbeat" not in finished.err
    assert [row.members for row in read_step_log(ledger)] == [(0, 1, 2, 3)] * 3 + [(0, 1)] * 9
    far.interrupt(signal.SIGCONT)
    left = far.finish()
    assert left.code == 3, left.err
    assert "paceline: lost the coordinator (host 0)" in left.err
    assert not alive(workers)
