"""Server processes of an elastic job: who serves when one of them is lost, and that no step counts twice for it."""

from __future__ import annotations

from paceline.elastic.decisions import Commit, Decision, Fence, Generation, Refuse, Replace, Rules, Say, StartAnew
from paceline.elastic.failure_detector import FIRST_BEAT_S
from paceline.elastic.membership import Membership
from paceline.elastic.slots import MOST_ATTEMPTS, Ready

FACTS = {"torch": "2.13", "data": "of workers"}
KEPT = Rules(restart_workers=False)


def job(workers: int = 2, servers: int = 2, rules: Rules = KEPT) -> Membership:
    """All workers have entered their loop, and everybody is heard."""
    members = Membership(workers, rules, servers)
    for rank in range(workers + servers):
        members.count_anew(rank, 0.0)
        members.beat(rank, 0.0)
    for slot in range(workers):
        members.entered(slot, 1, 0, FACTS, 0.0)
    return members


def ready(members: Membership, slots: tuple[int, ...], step: int) -> list[Decision]:
    decided: list[Decision] = []
    for slot in slots:
        decided += members.readied(slot, members.generation, Ready(step, 0, 7, True), 0.0)
    return decided


def test_a_step_is_committed_without_a_word_of_the_servers() -> None:
    assert ready(job(), (0, 1), 1) == [Commit(1, 0, 1, (0, 1), (2, 3))]


def test_a_lost_server_makes_a_generation_of_the_same_workers_and_the_other_servers() -> None:
    members = job(rules=Rules())
    decided = members.died(3, "was killed by SIGKILL in step 1", 0.0)
    what = "server 1 was killed by SIGKILL in step 1"
    assert decided == [
        Say(f"{what}; its keys go to server 0, a replacement starts"),
        Generation(2, (0, 1), (), 0, what, servers=(2,)),
        Replace(3, 1),
    ]
    assert members.readied(0, 1, Ready(1, 0, 7, True), 0.0) == [], "it was ready in the generation before"
    assert ready(members, (0, 1), 1) == [Commit(1, 0, 2, (0, 1), (2,))]


def test_when_no_server_is_left_the_first_worker_serves() -> None:
    members = job()
    members.died(2, "was killed", 0.0)
    members.died(0, "was killed", 0.0)
    decided = members.died(3, "was killed", 0.0)
    assert decided[0] == Say("server 1 was killed; worker 1 serves its keys")
    assert decided[1] == Generation(4, (1,), (), 0, "server 1 was killed", main=1)


def test_a_worker_that_dies_leaves_the_servers_where_they_are() -> None:
    decided = job().died(1, "was killed", 0.0)
    assert Generation(2, (0,), (), 0, "worker 1 was killed", servers=(2, 3)) in decided


def test_a_server_that_raised_is_lost_once_and_not_again_when_its_process_ends() -> None:
    members = job()
    assert len(members.raised(3, "raised RuntimeError", 0.0, cause=False)) == 2
    assert members.died(3, "exited with code 1", 0.1) == []
    assert members.generation == 2


def test_a_silent_server_is_fenced() -> None:
    members = job(rules=Rules(heartbeat_timeout_s=1, restart_workers=False))
    for rank in (0, 1, 2):
        members.beat(rank, 0.9)
    members.tick(0.9)
    decided = members.tick(1.5)
    assert decided[0] == Fence(3)
    assert decided[1] == Say("server 1 sent no heartbeat for 1 s in step 1; its keys go to server 0")
    assert isinstance(decided[2], Generation)


def test_a_server_that_was_told_why_it_failed_and_does_not_go_is_fenced() -> None:
    members = job()
    members.raised(2, "raised RuntimeError", 0.0, cause=False)
    for now in (0.5, 1.0, 1.5):
        assert members.tick(now) == []
    assert members.tick(2.0) == [Fence(2)]


def test_a_server_that_does_not_come_to_the_meeting_is_fenced_and_not_the_workers_who_wait_for_it() -> None:
    members = job(rules=Rules(regroup_timeout_s=1, heartbeat_timeout_s=60, restart_workers=False))
    members.died(1, "was killed", 0.0)
    members.grouped(2, 2)
    for now in (0.5, 1.0):
        members.tick(now)
    decided = members.tick(1.5)
    assert decided[0] == Fence(3)
    assert decided[1] == Say("server 1 is alive, but 1 s late in step 1; its keys go to server 0")


def test_before_all_have_entered_their_loop_a_lost_server_is_for_the_launcher_to_judge() -> None:
    members = Membership(1, Rules(heartbeat_timeout_s=1, restart_workers=False), 1)
    assert members.died(1, "was killed", 0.0) == []
    silent = Membership(1, Rules(heartbeat_timeout_s=1, restart_workers=False), 1)
    silent.count_anew(1, 0.0)
    silent.tick(0.0)
    decided: list[Decision] = []
    for tick in range(1, int(FIRST_BEAT_S) * 2 + 4):
        decided += silent.tick(tick / 2)
    assert decided == [Fence(1), Say("server 0 sent no heartbeat for 1 s while starting; it is stopped")]


def test_a_server_may_end_when_the_workers_have_left_their_loop_and_not_before() -> None:
    members = job()
    decided = members.server_ended_well(2, "exited with code 0 in step 1", 0.0)
    assert decided[0] == Say("server 0 exited with code 0 in step 1; its keys go to server 1")
    for slot in (0, 1):
        members.left(slot, 1)
    assert members.server_ended_well(3, "exited with code 0", 0.0) == []
    assert members.generation == 2


def test_a_server_lost_when_all_workers_have_ended_is_only_told_of() -> None:
    members = job()
    for slot in (0, 1):
        members.left(slot, 1)
        members.ended_well(slot, 0.0)
    decided = members.died(3, "was killed", 0.0)
    assert decided == [Say("server 1 was killed; no worker needs its keys any more")]


def test_communication_that_broke_at_a_server_makes_a_new_generation() -> None:
    members = job()
    members.tick(0.0)
    members.failed(3, 1, "connection reset", 0.0)
    decided = members.tick(0.5)
    assert decided[0] == Say("the workers lost each other in step 1 (server 1: connection reset); they meet again")
    assert decided[1] == Generation(2, (0, 1), (), 0, "server 1: connection reset", servers=(2, 3))


def test_when_all_start_anew_so_do_the_servers() -> None:
    members = job(workers=1, rules=Rules())
    members.died(2, "was killed", 0.0)
    assert StartAnew(1, (0,)) in members.died(0, "was killed", 0.0)
    assert members.table.serving == (1, 2)


def test_a_fresh_server_serves_from_the_next_committed_step_on() -> None:
    members = job(rules=Rules())
    members.died(3, "was killed", 0.0)
    assert members.asks_to_join(3, 0, {"torch": "2.13"}) == [], "of what it does not know nothing is compared"
    assert ready(members, (0, 1), 1) == [
        Commit(1, 0, 2, (0, 1), (2,)), Generation(3, (0, 1), (), 1, "server 1 joined after step 1", servers=(2, 3)),
    ]  # fmt: skip
    assert members.grouped(2, 3) == []
    assert members.grouped(3, 3) == [Say("server 1 is back after step 1")]


def test_a_fresh_server_that_differs_is_refused_and_its_place_stays_empty() -> None:
    members = job(rules=Rules())
    members.died(3, "was killed", 0.0)
    why = "server 1's replacement does not fit: torch is 2.12 there and 2.13 here"
    assert members.asks_to_join(3, 0, {"torch": "2.12"}) == [Refuse(3, why), Say(f"{why}; its place stays empty")]
    assert members.raised(3, "raised WorldError", 0.0, cause=False) == []
    assert members.died(3, "exited with code 1", 0.0) == []
    assert ready(members, (0, 1), 1) == [Commit(1, 0, 2, (0, 1), (2,))]


def test_a_fresh_server_that_dies_before_it_has_joined_is_replaced_a_few_times() -> None:
    members = job(rules=Rules())
    started = 0
    decided = members.died(2, "was killed", 0.0)
    while any(isinstance(decision, Replace) for decision in decided):
        started += 1
        decided = members.died(2, "was killed", 0.0)
    assert started == MOST_ATTEMPTS - 1
    assert decided == [Say("server 0 was killed, before it had joined; its place stays empty")]
    assert members.generation == 2


def test_a_server_that_dies_again_and_again_while_steps_are_committed_is_replaced_each_time() -> None:
    members = job(rules=Rules())
    for step in range(1, 2 * MOST_ATTEMPTS, 2):
        assert Replace(2, step // 2 + 1) in members.died(2, "was killed", 0.0)
        members.asks_to_join(2, 0, {})
        ready(members, (0, 1), step)
        ready(members, (0, 1), step + 1)
