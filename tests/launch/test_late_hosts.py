"""Hosts that join a job which runs already: which slots each gets, and why some are refused."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import torch

from paceline.elastic.decisions import Rules
from paceline.engine.config import check_backend, default_backend
from paceline.errors import ConfigError, LaunchError, WorldError
from paceline.launch import elastic_job
from paceline.launch.agents import worker_variables
from paceline.launch.control import Body
from paceline.launch.coordinator import Coordinator
from paceline.launch.host_link import SealedLink
from paceline.launch.job import Hosts, Job
from paceline.launch.rendezvous import Address, HostAssignment, HostRendezvous, JoinRequest, free_port, join
from paceline.launch.worker_main import Script
from paceline.world.environment import read_world
from paceline.world.world import Elasticity, LaunchSettings
from tests.launch.test_elastic_jobs import FACTS, NotedAgent, within

RULES = Rules(max_workers=3, heartbeat_timeout_s=30)


class OpenJob:
    """A coordinator of one worker, open to further hosts."""

    def __init__(self, rules: Rules = RULES) -> None:
        self.address = Address("127.0.0.1", free_port("127.0.0.1"))
        self.said: list[str] = []
        request = JoinRequest(0, 1, 1, LaunchSettings(seed=7), elastic=rules)
        self.rendezvous = HostRendezvous(self.address, request, b"secret", self.said.append)
        self.agent = NotedAgent()

    async def begin(self) -> None:
        assignment, joined = await self.rendezvous.meet(5, lambda size: LaunchSettings(lanes=4, seed=7))
        self.coordinator = Coordinator(
            assignment, joined, lambda shown: None, self.said.append, rendezvous=self.rendezvous
        )
        self.coordinator.agent = self.agent
        self.coordinator.started(0, 100)

    def enter(self) -> None:
        self.coordinator.report(0, "elastic.enter", {"generation": 1, "loop": 1, "step": 0, "facts": FACTS})

    async def join(self, host: int, workers: int = 2, **brought: Any) -> tuple[HostAssignment, SealedLink]:
        request = JoinRequest(host, brought.pop("hosts", None), workers, LaunchSettings(**brought))
        return await join(self.address, request, b"secret", 5)

    async def refused(self, host: int, workers: int = 2, **brought: Any) -> str:
        with pytest.raises(WorldError) as error:
            await self.join(host, workers, **brought)
        return str(error.value)


def story_of(story: Callable[[OpenJob], Awaitable[None]]) -> None:
    async def whole() -> None:
        job = OpenJob()
        await job.begin()
        try:
            await story(job)
        finally:
            await job.coordinator.close()

    within(whole)


async def heard(link: SealedLink, kind: str) -> Body:
    while (message := await link.receive()) is not None:
        if message["kind"] == kind:
            return message
    raise AssertionError(f"the link ended before {kind!r}")


def test_a_host_waits_until_the_job_runs_and_starts_its_workers_when_it_can() -> None:
    async def story(job: OpenJob) -> None:
        coming = asyncio.create_task(job.join(1))
        await asyncio.sleep(0.2)
        assert not coming.done(), "the workers have not entered their loop"
        job.enter()
        assignment, link = await coming
        assert (assignment.first_rank, assignment.workers, assignment.size, assignment.hosts, assignment.late) == (
            1,
            2,
            3,
            2,
            True,
        )
        assert assignment.settings == LaunchSettings(lanes=4, seed=7)
        link.send({"kind": "ready"})
        started = [await heard(link, "start") for _ in range(2)]
        assert [(each["rank"], each["incarnation"]) for each in started] == [(1, 1), (2, 1)]
        assert job.said == ["paceline: host 1 has joined; its 2 workers join after a step"]
        await link.close()

    story_of(story)


def test_a_host_that_is_lost_may_come_back_and_one_that_is_there_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elastic_job, "NOTICED_S", 0.3 - RULES.heartbeat_timeout_s)

    async def story(job: OpenJob) -> None:
        job.enter()
        _, link = await job.join(1)
        link.send({"kind": "ready"})
        assert "host 1 is there, and alive; give every host its own --host-rank" in await job.refused(1)
        await link.close()
        assignment, link = await job.join(1, 1)  # its loss is noticed while it waits
        assert (assignment.first_rank, assignment.workers) == (1, 1)
        link.send({"kind": "ready"})
        assert (await heard(link, "start"))["rank"] == 1
        assert job.said == [
            "paceline: host 1 has joined; its 2 workers join after a step",
            "paceline: refused host 1: host 1 is there, and alive; give every host its own --host-rank",
            "paceline: host 1 is lost (its supervisor ended without giving a reason), before it had joined",
            "paceline: host 1 is back; its 1 worker joins after a step",
        ]
        await link.close()

    story_of(story)


def test_a_host_whose_workers_do_not_fit_is_sent_away_so_that_it_can_be_started_again() -> None:
    async def story(job: OpenJob) -> None:
        job.enter()
        _, link = await job.join(1, 1)
        link.send({"kind": "ready"})
        await heard(link, "start")
        link.send({"kind": "started", "rank": 1, "pid": 200})
        other = {"loop": 1, "facts": {"torch": "2.12"}}
        link.send({"kind": "report", "rank": 1, "what": "elastic.join", "body": other})
        assert (await heard(link, "push"))["what"] == "elastic.refused"
        link.send({"kind": "exited", "rank": 1, "status": 1})
        outcome = await heard(link, "outcome")
        assert (outcome["code"], outcome["lines"]) == (
            3, ["paceline: the coordinator dismissed this host: none of its workers can join (torch is 2.12 there "
                "and 2.13 here); fix that, and start it again"],
        )  # fmt: skip
        await link.close()
        _, link = await job.join(1, 1)
        why = "none of its workers can join (torch is 2.12 there and 2.13 here)"
        assert f"paceline: host 1 is lost ({why})" in job.said
        await link.close()

    story_of(story)


def test_a_host_on_which_workers_can_not_be_started_does_not_end_the_job() -> None:
    async def story(job: OpenJob) -> None:
        job.enter()
        _, link = await job.join(1, 1)
        link.send({"kind": "fail", "text": "the process that imports torch ended with code 1", "code": 1})
        await link.close()
        _, link = await job.join(1, 1)
        assert job.said == ["paceline: host 1 is lost (the process that imports torch ended with code 1)"]
        assert not job.coordinator.is_over
        await link.close()

    story_of(story)


def test_a_host_that_does_not_fit_is_refused_with_the_difference() -> None:
    async def story(job: OpenJob) -> None:
        job.enter()
        assert "it brings 3 workers, and 1 is there: the job has at most 3" in await job.refused(1, 3)
        assert "it was started with --seed 8, the coordinator with 7; use the same" in await job.refused(1, seed=8)
        said = await job.refused(1, hosts=2)
        assert "--hosts 2, the coordinator with --hosts 1; a further host leaves --hosts out" in said
        assert "host rank 0 is taken" in await job.refused(0)
        job.coordinator.job.stop()
        assert "the job is about to end" in await job.refused(1)

    story_of(story)


def test_a_job_that_others_may_join_listens_where_they_can_reach_it() -> None:
    async def story() -> None:
        rendezvous = HostRendezvous(
            Address("0.0.0.0", free_port("127.0.0.1")), JoinRequest(0, 1, 1, LaunchSettings()), b"", print
        )
        with pytest.raises(LaunchError, match="give the address at which other hosts reach this one"):
            await rendezvous.meet(5, lambda size: LaunchSettings())

    within(story)


def test_more_workers_than_lanes_can_not_be_asked_for() -> None:
    hosts = Hosts(1, 0, Address("127.0.0.1", 1), b"", 1.0)
    with pytest.raises(LaunchError, match=r"--max-workers 4, but 2 lanes; .* use --lanes 4 or more"):
        Job(Script("train.py", ()), 2, LaunchSettings(), hosts, elastic=Rules(max_workers=4))
    Job(Script("train.py", ()), 2, LaunchSettings(lanes=4), hosts, elastic=Rules(max_workers=4))


def test_a_worker_of_a_job_that_may_grow_does_not_listen_on_loopback_alone() -> None:
    assignment = HostAssignment(0, 1, 0, 1, 1, LaunchSettings(), "10.0.0.1", "10.0.0.1", 1, elastic=RULES, grows=True)
    variables = worker_variables(assignment.world(0, "/run/control.sock", Elasticity(across_hosts=True)), assignment)
    assert "GLOO_SOCKET_IFNAME" not in variables
    world = read_world(variables)
    assert (world.host_address, world.elastic) == ("10.0.0.1", Elasticity(across_hosts=True))
    assert default_backend(world, torch.device("cpu")) == "gloo"
    with pytest.raises(ConfigError, match=r"joins the workers of one host, and this job is on several, or open"):
        check_backend(world, "paceline")
