"""A worker's side of the protocol: what it says, what it makes of what it hears, and that its waits end."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest

from paceline.elastic.decisions import Generation
from paceline.elastic.recovery import Recovery
from paceline.elastic.worker_agent import WorkerAgent
from paceline.errors import WorldError
from paceline.world.world import Elasticity, World


class Line:
    """A control client that remembers what was told, and answers when it is told to."""

    def __init__(self) -> None:
        self.told: list[tuple[str, dict[str, Any]]] = []
        self.heard: Any = None
        self.answers: dict[str, list[tuple[str, dict[str, Any]]]] = {}

    def tell(self, kind: str, **fields: Any) -> None:
        self.told.append((kind, fields))
        for answer in self.answers.pop(kind, []):
            threading.Thread(target=self.heard, args=answer).start()


class Group:
    """Remembers why it was abandoned."""

    def __init__(self, heard: list[str]) -> None:
        self._heard = heard

    def abandon(self, why: str) -> None:
        self._heard.append(why)


def generation(number: int, members: list[int], step: int = 0) -> tuple[str, dict[str, Any]]:
    body = {"generation": number, "members": members, "joining": [], "step": step, "why": "worker 2 died", "main": 0}
    return "elastic.generation", body


def agent(line: Line, wait_s: float = 5.0, incarnation: int = 0) -> WorkerAgent:
    return WorkerAgent(line, 1, incarnation, Generation(1, (0, 1, 2)), wait_s)  # type: ignore[arg-type]


def test_a_step_counts_when_its_commit_is_heard() -> None:
    line = Line()
    worker = agent(line)
    line.answers["elastic.ready"] = [("elastic.commit", {"generation": 1, "step": 4, "update": 0})]
    assert worker.commits(4, 0, check=77, more=True)
    ready = {"generation": 1, "step": 4, "update": 0, "check": 77, "more": True}
    assert line.told == [("elastic.here", {"incarnation": 0}), ("elastic.ready", ready)]


def test_a_new_generation_without_a_commit_means_that_the_step_is_done_again() -> None:
    line = Line()
    worker = agent(line)
    line.answers["elastic.ready"] = [generation(2, [0, 1])]
    assert not worker.commits(4, 0, check=0, more=True)
    assert worker.changed
    assert worker.next_generation(1, "lost").members == (0, 1)


def test_a_commit_before_a_generation_counts() -> None:
    line = Line()
    worker = agent(line)
    worker._hear("elastic.commit", {"generation": 1, "step": 4, "update": 0})
    worker._hear(*generation(2, [0, 1], step=4))
    assert worker.commits(4, 0, check=0, more=True)


def test_the_group_is_abandoned_when_a_newer_generation_is_heard_and_only_then() -> None:
    line, heard = Line(), []
    worker = agent(line)
    worker.watch(Group(heard), 1)
    worker._hear(*generation(3, [0, 1]))
    worker._hear(*generation(2, [0, 1, 2]))
    assert heard == ["worker 2 died"]
    assert worker.next_generation(1, "lost").number == 3


def test_what_is_watched_for_a_generation_that_is_over_is_abandoned_at_once() -> None:
    heard: list[str] = []
    worker = agent(Line())
    worker._hear(*generation(2, [0, 1]))
    worker.watch(Group(heard), 1)
    assert heard == ["the workers have changed"]


def test_the_group_of_a_generation_that_was_left_without_a_loss_is_not_abandoned_later() -> None:
    left: list[str] = []
    now: list[str] = []
    worker = agent(Line())
    worker.watch(Group(left), 1)
    worker._hear("elastic.commit", {"generation": 1, "step": 4, "update": 0, "then": 2})
    worker._hear(*generation(2, [0, 1, 2, 3]))
    assert left == [], "a worker joins: all change to the new generation together"
    worker.watch(Group(now), 2)
    worker._hear(*generation(3, [0, 1]))
    assert (left, now) == ([], ["worker 2 died"])


def test_who_waits_for_a_generation_that_nobody_announces_asks_for_one_and_gives_up_in_time() -> None:
    line = Line()
    worker = agent(line, wait_s=1.5)
    with pytest.raises(WorldError, match=r"worker 1 waited 1\.5 s to hear who goes on, after: the line broke"):
        worker.next_generation(1, "the line broke")
    assert ("elastic.failed", {"generation": 1, "why": "the line broke"}) in line.told


def test_a_wait_for_the_coordinator_ends_and_says_what_may_be_stopped() -> None:
    worker = agent(Line(), wait_s=0.1)
    commit = (
        r"worker 1 waited 0\.1 s for the coordinator \(`paceline run` on host 0\) to commit step 7; "
        r"is that process stopped \(SIGSTOP\)\?"
    )
    with pytest.raises(WorldError, match=commit):
        worker.commits(7, 0, check=0, more=True)
    begin = (
        r"worker 1 waited 0\.1 s for all workers to enter their training loop; has one of them not come to it, or is"
    )
    with pytest.raises(WorldError, match=begin):
        worker.enters(1, 0, {})


def test_a_worker_that_the_others_go_on_without_says_so_and_exits(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def exits(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr("paceline.elastic.worker_agent.os._exit", exits)
    worker = agent(Line())
    with caplog.at_level(logging.WARNING, logger="paceline.elastic"), pytest.raises(SystemExit):
        worker._hear(*generation(2, [0, 2]))
    assert caplog.messages == ["paceline: the coordinator goes on without worker 1 (worker 2 died); this process exits"]


def test_an_elastic_job_without_a_folder_for_its_state_says_how_to_start_it() -> None:
    seat = World(elastic=Elasticity())
    with pytest.raises(WorldError, match=r"PACELINE_MEMORY_FOLDER names none; start it with `paceline run --elastic`"):
        Recovery(agent(Line()), seat, None, print)  # type: ignore[arg-type]


def test_a_joiner_that_is_refused_hears_why() -> None:
    line = Line()
    worker = agent(line, incarnation=1)
    line.answers["elastic.join"] = [("elastic.refused", {"why": "torch is 2.12 there and 2.13 here"})]
    with pytest.raises(WorldError, match=r"worker 1 may not join: torch is 2\.12 there and 2\.13 here"):
        worker.ask_to_join(1, {"torch": "2.12"})


def test_a_loop_begins_when_all_have_entered_it() -> None:
    line = Line()
    worker = agent(line)
    line.answers["elastic.enter"] = [("elastic.begin", {"loop": 2, "then": 2})]
    assert worker.enters(2, 7, {})
    assert worker.changed, "somebody joins before the loop's first step"
    line.answers["elastic.enter"] = [generation(3, [0, 1])]
    assert not worker.enters(3, 8, {}), "somebody died: it is entered again, by those who are left"


def test_a_joiner_in_front_of_a_loop_that_is_over_is_told_so() -> None:
    line = Line()
    worker = agent(line, incarnation=1)
    line.answers["elastic.join"] = [("elastic.wait", {"loop": 3})]
    assert worker.ask_to_join(1, {}) is None
    told = list(line.told)
    assert worker.ask_to_join(2, {}) is None
    assert line.told == told, "it is on its way to the third"
