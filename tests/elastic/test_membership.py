"""Who belongs to an elastic job and which steps are done: the rules without a process, and random lives of a job."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from paceline.elastic.decisions import (
    TOO_FEW_LEFT,
    Begin,
    Commit,
    Decision,
    End,
    Fence,
    Generation,
    Refuse,
    Replace,
    Rewind,
    Rules,
    Say,
    StartAnew,
    Wait,
)
from paceline.elastic.failure_detector import DYING_S, FIRST_BEAT_S, MOST_BREAKS, SETTLE_S
from paceline.elastic.membership import Membership
from paceline.elastic.slots import MOST_ATTEMPTS, Ready, Standing, difference
from paceline.elastic.step_log import StepLog
from paceline.errors import LaunchError

FACTS = {"torch": "2.13", "lanes": 4}


def job(workers: int = 4, rules: Rules | None = None, *, at_step: int = 0) -> Membership:
    """All have entered their loop."""
    members = Membership(workers, rules or Rules())
    for slot in range(workers):
        members.count_anew(slot, 0.0)
        members.beat(slot, 0.0)
        members.entered(slot, 1, at_step, FACTS, 0.0)
    assert members.running
    return members


def ready(members: Membership, slots: Iterable[int], step: int, *, check: int = 7, more: bool = True) -> list[Decision]:
    decided: list[Decision] = []
    for slot in slots:
        decided += members.readied(slot, members.generation, Ready(step, 0, check, more), 0.0)
    return decided


def lines(decisions: list[Decision]) -> list[str]:
    return [decision.line for decision in decisions if isinstance(decision, Say)]


def test_a_step_is_committed_when_every_member_is_ready() -> None:
    members = job(3)
    assert ready(members, [0, 2], 1) == []
    assert ready(members, [1], 1) == [Commit(1, 0, 1, (0, 1, 2))]
    assert members.step == 1


def test_a_worker_may_be_ready_before_the_word_of_anothers_entry_has_come() -> None:
    members = Membership(2, Rules())
    members.entered(0, 1, 5, FACTS, 0.0)
    assert ready(members, [0], 6) == []
    members.entered(1, 1, 5, FACTS, 0.0)
    assert ready(members, [1], 6) == [Commit(6, 0, 1, (0, 1))]


def test_words_of_another_generation_are_not_heard() -> None:
    members = job(3)
    members.died(2, "was killed", 0.0)
    assert members.readied(0, 1, Ready(1, 0, 7, True), 0.0) == []
    assert ready(members, [1], 1) == [], "worker 0 is not ready in this generation"
    assert ready(members, [0], 1) == [Commit(1, 0, 2, (0, 1))]


def test_a_death_makes_a_generation_of_the_others_and_a_replacement_at_once() -> None:
    members = job(4)
    ready(members, range(4), 1)
    decided = members.died(2, f"was killed by SIGKILL {members.where}", 0.0)
    told = "worker 2 was killed by SIGKILL in step 2; 3 workers go on, a replacement starts"
    assert decided == [
        Say(told),
        Generation(2, (0, 1, 3), (), 1, "worker 2 was killed by SIGKILL in step 2"),
        Replace(2, 1),
    ]


def test_a_replacement_is_admitted_right_after_a_commit_that_has_a_step_after_it() -> None:
    members = job(2)
    members.died(1, "was killed", 0.0)
    assert members.asks_to_join(1, 1, FACTS) == []
    assert ready(members, [0], 1, more=False) == [Commit(1, 0, 2, (0,))]
    decided = ready(members, [0], 2)
    assert decided == [Commit(2, 0, 2, (0,)), Generation(3, (0, 1), (1,), 2, "worker 1 joined after step 2")]
    assert members.grouped(0, 3) == []
    assert members.grouped(1, 3) == [Say("worker 1 is back after step 2")]


def test_the_main_worker_is_the_first_of_the_others_when_it_is_lost_and_who_comes_back_is_not() -> None:
    members = job(3)

    def main(decided: list[Decision]) -> list[int]:
        return [decision.main for decision in decided if isinstance(decision, Generation)]

    assert main(members.died(0, "was killed", 0.0)) == [1]
    members.asks_to_join(0, 1, FACTS)
    assert main(ready(members, [1, 2], 1)) == [1], "workers 0, 1 and 2 are there again"
    for slot in (0, 1, 2):
        members.grouped(slot, members.generation)
    assert main(members.died(1, "was killed", 0.0)) == [0]


def test_a_replacement_that_had_not_come_to_the_state_joins_after_the_next_step() -> None:
    """The others may be in the middle of something between two steps, in which it can't take part."""
    members = job(3)
    members.died(1, "was killed", 0.0)
    members.asks_to_join(1, 1, FACTS)
    ready(members, [0, 2], 1)
    decided = members.died(2, "was killed", 0.0)
    assert [decision for decision in decided if isinstance(decision, Generation)] == [
        Generation(4, (0,), (), 1, "worker 2 was killed")
    ]
    assert ready(members, [0], 2) == [
        Commit(2, 0, 4, (0,)), Generation(5, (0, 1), (1,), 2, "worker 1 joined after step 2"),
    ]  # fmt: skip


def test_a_module_that_only_one_side_has_imported_is_no_difference() -> None:
    """Workers that have resumed from a checkpoint have imported what reads it; a replacement reads none."""
    members = {"torch": "2.13", "module ours": "a1", "module reads_checkpoints": "b2"}
    assert difference(members, {"torch": "2.13", "module ours": "a1", "module late": "c3"}) == ""
    assert difference(members, {"torch": "2.13", "module ours": "a7"}) == "module ours is a7 there and a1 here"
    assert difference(members, {"module ours": "a1"}) == "torch is unknown there and 2.13 here"


def test_a_replacement_that_differs_is_refused_with_the_difference_and_not_replaced_again() -> None:
    members = job(2)
    members.died(1, "was killed", 0.0)
    other = {**FACTS, "torch": "2.12"}
    decided = members.asks_to_join(1, 1, other)
    why = "worker 1's replacement does not fit: torch is 2.12 there and 2.13 here"
    assert decided == [Refuse(1, why), Say(f"{why}; its place stays empty")]
    assert members.raised(1, "raised WorldError", 0.0) == []
    assert members.died(1, "exited with code 1", 0.0) == []
    assert ready(members, [0], 1) == [Commit(1, 0, 2, (0,))]


def test_a_replacement_in_front_of_a_loop_that_is_over_is_told_to_skip_it() -> None:
    members = job(2)
    members.died(1, "was killed", 0.0)
    members.asks_to_join(1, 1, FACTS)
    members.left(0, 1)
    assert members.entered(0, 2, 0, FACTS, 0.0) == [Begin(2, (0,)), Wait(1, 2)]
    assert members.asks_to_join(1, 2, FACTS) == []
    assert Generation(3, (0, 1), (1,), 1, "worker 1 joined after step 1") in ready(members, [0], 1)


def test_a_replacement_in_front_of_loop_0_joins_whichever_they_are_in() -> None:
    members = job(2)
    members.died(1, "was killed", 0.0)
    assert members.asks_to_join(1, 0, FACTS) == []
    assert isinstance(ready(members, [0], 1)[-1], Generation)


def next_loop(members: Membership, slots: Iterable[int], loop: int) -> list[Decision]:
    for slot in slots:
        members.left(slot, loop - 1)
    return [word for slot in slots for word in members.entered(slot, loop, members.step, FACTS, 0.0)]


def test_a_replacement_is_admitted_when_the_others_enter_a_loop_so_epochs_of_one_step_admit_it_too() -> None:
    members = job(2)
    members.died(1, "was killed", 0.0)
    members.asks_to_join(1, 0, FACTS)
    assert ready(members, [0], 1, more=False) == [Commit(1, 0, 2, (0,))]
    assert next_loop(members, [0], 2) == [
        Begin(2, (0,)), Generation(3, (0, 1), (1,), 1, "worker 1 joined after step 1"),
    ]  # fmt: skip
    assert members.slots[1].loop == 2


def test_a_loop_begins_when_all_have_entered_it_in_the_same_generation() -> None:
    members = job(3)
    ready(members, range(3), 1, more=False)
    assert next_loop(members, [0, 1], 2) == []
    members.died(0, "was killed", 0.0)
    assert members.entered(2, 2, 1, FACTS, 0.0) == [], "worker 1 has to keep its part of the state again"
    assert Begin(2, (1, 2)) in members.entered(1, 2, 1, FACTS, 0.0)


def test_a_replacement_that_counts_its_loops_catches_up_with_loops_of_one_step() -> None:
    """Told to skip to the loop that the others are in, it would come to it when that is over, again and again."""
    members = job(2)
    members.died(1, "was killed", 0.0)
    members.asks_to_join(1, 1, FACTS)
    for step in (1, 2):
        ready(members, [0], step, more=False)
        said = next_loop(members, [0], step + 1)
        members.asks_to_join(1, 2, FACTS)
    assert said == [Begin(3, (0,)), Wait(1, 4)]
    assert members.asks_to_join(1, 3, FACTS) == [], "said before it heard that it is to skip it"
    members.asks_to_join(1, 4, FACTS)
    assert ready(members, [0], 3) == [Commit(3, 0, 2, (0,))], "it stands in front of another loop"
    assert isinstance(next_loop(members, [0], 4)[-1], Generation)


def test_a_replacement_that_came_in_vain_to_a_loop_that_is_over_is_replaced() -> None:
    """It waits for a generation and can't hear that it is to skip a loop; joined now, it would count one too few."""
    members = job(3)
    members.died(1, "was killed", 0.0)
    members.asks_to_join(1, 1, FACTS)
    ready(members, [0, 2], 1)
    members.died(2, "was killed", 0.0)
    ready(members, [0], 2, more=False)
    decided = next_loop(members, [0], 2)
    assert Fence(1) in decided
    assert lines(decided) == ["worker 1 came too late for its loop, before it had joined, a replacement starts"]
    members.died(1, "was killed", 0.0)
    assert members.asks_to_join(1, 2, FACTS) == []


def test_nobody_is_replaced_where_the_flags_say_so_or_the_job_is_asked_to_stop() -> None:
    members = job(3, Rules(restart_workers=False))
    assert lines(members.died(1, "was killed", 0.0)) == ["worker 1 was killed; 2 workers go on"]
    members = job(3)
    members.stop()
    assert not any(isinstance(decision, Replace) for decision in members.died(1, "was killed", 0.0))


def test_replacements_that_die_before_they_join_are_not_started_for_ever() -> None:
    members = job(2)
    members.died(1, "was killed", 0.0)
    for _ in range(MOST_ATTEMPTS - 1):
        decided = members.died(1, "was killed", 0.0)
        assert isinstance(decided[-1], Replace)
    told = ["worker 1 was killed, before it had joined; its place stays empty"]
    assert lines(members.died(1, "was killed", 0.0)) == told


def test_a_worker_without_a_heartbeat_is_fenced_and_never_heard_again() -> None:
    members = job(3, Rules(heartbeat_timeout_s=5))
    decided: list[Decision] = []
    for tenth in range(60):
        for slot in (0, 1):
            members.beat(slot, tenth / 10)
        decided += members.tick(tenth / 10)
    assert decided[0] == Fence(2)
    assert lines(decided) == ["worker 2 sent no heartbeat for 5 s in step 1; 2 workers go on, a replacement starts"]
    assert members.readied(2, members.generation, Ready(1, 0, 7, True), 6.0) == []
    assert members.entered(2, 1, 0, FACTS, 6.0) == []
    assert members.died(2, "was killed by SIGKILL", 6.0) == [Replace(2, 1)], "its exit is no second death"


@pytest.mark.parametrize(
    ("computes_until_s", "fenced_after_s", "why"),
    [
        (0.0, 5.0, "worker 2 sent no heartbeat for 5 s in step 1"),
        (2.0, 5.0, "worker 2 sent no heartbeat for 5 s in step 1"),
        (8.0, 10.5, "worker 2 sent no heartbeat for 5 s in step 1"),
        (99.0, 30.0, "worker 2 was busy, but sent no heartbeat for 30 s in step 1"),
    ],
)
def test_a_silent_worker_that_is_busy_is_waited_for_and_not_for_ever(
    computes_until_s: float, fenced_after_s: float, why: str
) -> None:
    members = job(3, Rules(heartbeat_timeout_s=5))
    decided: list[Decision] = []
    tenth = 0
    while Fence(2) not in decided:
        tenth += 1
        for slot in (0, 1):
            members.beat(slot, tenth / 10)
        if tenth / 10 <= computes_until_s:
            members.computes(2, tenth / 10)
        decided += members.tick(tenth / 10)
    assert fenced_after_s < tenth / 10 < fenced_after_s + 0.3
    busy = (
        "worker 2 missed its heartbeat in step 1 but is using CPU (a C call may hold the GIL); it is killed after 30 s"
    )
    assert lines(decided) == [
        *([busy] if computes_until_s > 5 else []),
        f"{why}; 2 workers go on, a replacement starts",
    ]


def test_a_worker_that_was_heard_again_is_told_of_once() -> None:
    members = job(2, Rules(heartbeat_timeout_s=1))
    decided: list[Decision] = []
    for tenth in range(100):
        members.beat(0, tenth / 10)
        members.computes(1, tenth / 10)
        if tenth % 25 == 0:
            members.beat(1, tenth / 10)
        decided += members.tick(tenth / 10)
    assert len(decided) == len(lines(decided)) == 1


def test_a_worker_whose_script_has_ended_may_be_silent() -> None:
    members = job(2, Rules(heartbeat_timeout_s=1))
    members.left(1, 1)
    members.beat(1, 0.0, ending=True)
    for tenth in range(30):
        members.beat(0, tenth / 10)
        assert members.tick(tenth / 10) == []


def test_silence_is_counted_anew_when_we_were_stopped_ourselves() -> None:
    members = job(2, Rules(heartbeat_timeout_s=5))
    assert members.tick(0.5) == []
    assert members.tick(100.0) == [], "the tick came late: nobody else could be heard either"
    assert members.tick(100.5) == []


def test_a_new_process_gets_time_to_be_born() -> None:
    members = job(2, Rules(heartbeat_timeout_s=1))
    members.died(1, "was killed", 0.0)
    decided: list[Decision] = []
    for tenth in range(70):
        members.beat(0, tenth / 10)
        decided += members.tick(tenth / 10)
        assert not decided or tenth / 10 > 1 + FIRST_BEAT_S
    assert decided[0] == Fence(1)


def test_a_worker_that_others_wait_for_in_a_step_is_fenced_after_the_deadline() -> None:
    members = job(3, Rules(step_timeout_s=10, heartbeat_timeout_s=5))
    ready(members, [0, 1], 1)
    decided: list[Decision] = []
    for tenth in range(105):
        for slot in range(3):
            members.beat(slot, tenth / 10)
        decided += members.tick(tenth / 10)
    assert decided[0] == Fence(2)
    assert lines(decided) == ["worker 2 is alive, but 10 s late in step 1; 2 workers go on, a replacement starts"]


def test_a_worker_that_does_not_regroup_is_fenced_but_not_one_that_has_left_its_loop() -> None:
    members = job(4, Rules(regroup_timeout_s=10, heartbeat_timeout_s=100))
    members.left(3, 1)
    members.died(2, "was killed", 0.0)
    members.grouped(0, 2)
    decided: list[Decision] = []
    for tenth in range(105):
        decided += members.tick(tenth / 10)
    assert [decision for decision in decided if isinstance(decision, Fence)] == [Fence(1)]


def test_communication_that_breaks_is_mended_a_moment_later_unless_a_death_explains_it() -> None:
    members = job(3)
    members.tick(0.0)
    assert members.failed(0, 1, "connection closed by peer", 0.0) == []
    decided = members.died(2, "was killed", 0.01)
    assert any(isinstance(decision, Generation) for decision in decided)
    assert members.tick(0.5) == [], "the death has made the new generation"
    members.failed(0, 2, "connection closed by peer", 0.5)
    decided = members.tick(0.5 + SETTLE_S + 0.01)
    assert isinstance(decided[-1], Generation)
    assert decided[-1].members == (0, 1)


def test_who_can_not_come_because_it_computes_is_waited_for_by_the_others() -> None:
    members = job(2, Rules(heartbeat_timeout_s=1))
    decided: list[Decision] = []
    for tenth in range(200):
        members.beat(0, tenth / 10)
        members.computes(1, tenth / 10)
        if tenth % 50 == 20:
            members.failed(0, members.generation, "nobody there", tenth / 10)
        decided += members.tick(tenth / 10)
    assert lines(decided) == [
        "worker 1 missed its heartbeat in step 1 but is using CPU (a C call may hold the GIL); it is killed after 30 s"
    ]
    members.beat(1, 20.0)
    assert isinstance(members.tick(20.1)[-1], Generation)


def test_nobody_meets_again_when_all_have_ended() -> None:
    members = job(2)
    members.tick(0.0)
    members.failed(0, 1, "connection closed by peer", 0.0)
    for slot in range(2):
        members.left(slot, 1)
        members.ended_well(slot, 0.01)
    assert members.tick(0.5) == []


def test_communication_that_breaks_again_and_again_ends_the_job() -> None:
    members = job(2, Rules(heartbeat_timeout_s=1000))
    decided: list[Decision] = []
    for second in range(MOST_BREAKS + 1):
        for slot in range(2):
            members.failed(slot, members.generation, "cut", second * 0.5)
        decided = members.tick(second * 0.5 + 0.2)
    assert decided == [End(1, "the workers lost each other 6 times in step 1; the last: worker 0: cut")]


def test_who_never_comes_to_where_the_others_meet_in_vain_is_fenced() -> None:
    members = job(3, Rules(heartbeat_timeout_s=1000))
    for second in range(2):
        members.failed(0, members.generation, "nobody there", float(second))
        assert isinstance(members.tick(second + 0.2)[-1], Generation)
    members.failed(0, members.generation, "nobody there", 2.0)
    members.failed(2, members.generation, "nobody there", 4.0)
    decided = [decision for tenth in range(20, 90) for decision in members.tick(tenth / 10)]
    assert decided[0] == Fence(1)
    assert lines(decided) == [
        "worker 1 is alive, but does not come to where the others meet in step 1; 2 workers go on, a replacement starts"
    ]
    assert isinstance(decided[-1], Generation)
    assert decided[-1].members == (0, 2)


def test_the_minority_of_different_weights_is_named_and_fenced() -> None:
    members = job(4)
    ready(members, [0, 1, 3], 1)
    decided = ready(members, [2], 1, check=8)
    assert decided[0] == Fence(2)
    assert lines(decided) == [
        "worker 2's weights differ from those of workers 0, 1 and 3 in step 1: silent corruption; "
        "3 workers go on, a replacement starts"
    ]
    assert members.step == 0


def test_two_workers_with_different_weights_get_a_second_try_and_no_third() -> None:
    members = job(2)
    ready(members, [0], 1)
    first = ready(members, [1], 1, check=8)
    assert isinstance(first[-1], Generation)
    assert first[-1].members == (0, 1)
    ready(members, [0], 1)
    told = (
        "the weights of workers 0 and 1 differ in step 1, twice: silent corruption, and no majority has the right ones"
    )
    assert ready(members, [1], 1, check=8) == [End(1, told)]


def test_a_worker_that_is_ready_for_a_committed_step_is_out_of_step_and_replaced() -> None:
    members = job(2)
    ready(members, [0, 1], 1)
    decided = ready(members, [1], 1)
    assert decided[0] == Fence(1)
    assert lines(decided) == [
        "worker 1 is ready for step 1 again, though step 1 is committed; 1 worker goes on, a replacement starts"
    ]
    assert ready(members, [0], 2) == [Commit(2, 0, 2, (0,))]


def test_a_check_of_0_is_not_compared() -> None:
    members = job(2)
    ready(members, [0], 1, check=0)
    assert ready(members, [1], 1, check=8) == [Commit(1, 0, 1, (0, 1))]


def test_the_same_step_failing_twice_by_an_exception_is_the_code() -> None:
    members = job(4)
    first = members.raised(1, "raised ValueError in step 1: bad", 0.0)
    assert isinstance(first[-1], Generation)
    decided = members.raised(2, "raised ValueError in step 1: bad", 0.0)
    assert isinstance(decided[-1], End)
    assert decided[-1].code is None, "the launcher has the traceback"


def test_an_exception_in_another_step_is_another_fault() -> None:
    members = job(4)
    members.raised(1, "raised ValueError", 0.0)
    assert members.died(1, "exited with code 1", 0.0) == [Replace(1, 1)]
    assert ready(members, [0, 2, 3], 1) == [Commit(1, 0, 2, (0, 2, 3))]
    assert isinstance(members.raised(2, "raised ValueError", 0.0)[-1], Generation)


def test_a_process_that_raised_and_does_not_go_is_fenced() -> None:
    members = job(2)
    members.tick(0.0)
    members.raised(1, "raised ValueError", 0.0)
    decided: list[Decision] = []
    for tenth in range(1, 25):
        members.beat(0, tenth / 10)
        decided += members.tick(tenth / 10)
    assert decided == [Fence(1)]
    assert DYING_S < 2.5


def test_fewer_than_min_workers_end_the_job() -> None:
    members = job(4, Rules(min_workers=3))
    assert not any(isinstance(decision, End) for decision in members.died(0, "was killed", 0.0))
    told = "worker 1 was killed; 2 workers left, and --min-workers is 3"
    assert members.died(1, "was killed", 0.0) == [End(TOO_FEW_LEFT, told)]


def test_when_nobody_is_left_all_start_anew_a_few_times() -> None:
    members = job(2)
    for start in (1, 2, 3):
        members.died(0, "was killed", 0.0)
        decided = members.died(1, "was killed", 0.0)
        assert decided[-1] == StartAnew(start, (0, 1))
        assert not members.running
        assert (members.generation, members.members) == (1, (0, 1))
        for slot in (0, 1):
            members.entered(slot, 1, 0, FACTS, 0.0)
    members.died(0, "was killed", 0.0)
    told = "worker 1 was killed; no worker is left, after 3 starts anew without a new step"
    assert members.died(1, "was killed", 0.0) == [End(TOO_FEW_LEFT, told)]


def all_die(members: Membership) -> Decision:
    for slot in members.members:
        decided = members.died(slot, "was killed", 0.0)
    return decided[-1]


def test_a_new_step_makes_up_for_the_starts_that_it_took() -> None:
    members = job(2)
    for step in (1, 2, 3, 4, 5):
        assert isinstance(all_die(members), StartAnew)
        assert members.table.starts == 1
        for slot in (0, 1):
            members.entered(slot, 1, step - 1, FACTS, 0.0)
        ready(members, [0, 1], step)
    for start in (1, 2, 3):  # without a checkpoint it never comes further than it was
        assert all_die(members) == StartAnew(start, (0, 1))
        for slot in (0, 1):
            members.entered(slot, 1, 0, FACTS, 0.0)
        for step in (1, 2, 3):
            ready(members, [0, 1], step)
    assert isinstance(all_die(members), End)


def starting_anew(workers: int = 4, *, entered: Iterable[int] = ()) -> Membership:
    """All have died in step 3, and of the new ones some have entered the loop."""
    members = job(workers)
    for step in (1, 2):
        ready(members, range(workers), step)
    assert all_die(members) == StartAnew(1, tuple(range(workers)))
    for slot in range(workers):
        members.count_anew(slot, 0.0)
    for slot in entered:
        members.beat(slot, 0.0)
        members.entered(slot, 1, 2, FACTS, 0.0)
    return members


@pytest.mark.parametrize("entered", [(), (1,), (0, 2, 3), (0, 1, 2)])
def test_a_death_while_all_start_anew_makes_them_start_once_more(entered: tuple[int, ...]) -> None:
    members = starting_anew(entered=entered)
    assert members.died(1, f"was killed {members.where}", 0.0) == [
        Say("worker 1 was killed while all start anew: all start anew (2 of at most 3 times)"),
        StartAnew(2, (0, 1, 2, 3)),
    ]
    for slot in range(4):
        assert not members.running
        decided = members.entered(slot, 1, 2, FACTS, 0.0)
    assert decided == [Rewind(2), Begin(1, (0, 1, 2, 3))]
    assert ready(members, range(4), 3) == [Commit(3, 0, 1, (0, 1, 2, 3))]


def test_deaths_while_all_start_anew_are_within_the_budget_and_then_end_the_job() -> None:
    members = starting_anew()
    assert members.died(0, "was killed", 0.0)[-1] == StartAnew(2, (0, 1, 2, 3))
    assert members.died(3, "was killed", 0.0)[-1] == StartAnew(3, (0, 1, 2, 3))
    told = "worker 2 was killed, after 3 starts anew without a new step"
    assert members.died(2, "was killed", 0.0) == [End(TOO_FEW_LEFT, told)]


def test_one_that_is_stopped_while_all_start_anew_is_fenced_and_they_start_once_more() -> None:
    members = starting_anew(entered=(0, 1, 2))
    members.tick(0.0)
    decided: list[Decision] = []
    for tick in range(1, 30):
        for slot in (0, 1, 2):
            members.beat(slot, tick / 2)
        decided += members.tick(tick / 2)
        if decided:
            break
    said = "worker 3 sent no heartbeat for 5 s while all start anew: all start anew (2 of at most 3 times)"
    assert decided == [Fence(3), Say(said), StartAnew(2, (0, 1, 2, 3))]


def test_code_that_fails_while_all_start_anew_is_tried_once_more_and_then_ends_the_job() -> None:
    members = starting_anew()
    assert members.raised(1, "raised OSError", 0.0)[-1] == StartAnew(2, (0, 1, 2, 3))
    ended = End(None, "a start failed so before: it is the code, not the machine")
    assert members.raised(2, "raised OSError", 0.0) == [ended]


def test_without_replacements_a_death_while_starting_is_left_to_the_launcher() -> None:
    members = Membership(3, Rules(restart_workers=False))
    assert members.died(2, "was killed", 0.0) == []
    members = starting_anew()
    members.stop()
    assert members.died(2, "was killed", 0.0) == []


def test_a_replacement_that_has_no_state_yet_is_not_one_who_is_left() -> None:
    members = job(2)
    members.died(1, "was killed", 0.0)
    members.asks_to_join(1, 1, FACTS)
    ready(members, [0], 1)
    assert members.members == (0, 1)
    assert members.died(0, "was killed", 0.0)[-1] == StartAnew(1, (0, 1))


def test_a_job_that_resumes_takes_up_the_step_log_at_its_checkpoint() -> None:
    members = job(2)
    for step in (1, 2, 3):
        ready(members, [0, 1], step)
    members.died(0, "was killed", 0.0)
    members.died(1, "was killed", 0.0)
    assert members.entered(0, 1, 2, FACTS, 0.0) == []
    assert members.entered(1, 1, 2, FACTS, 0.0) == [Rewind(2), Begin(1, (0, 1))]
    assert ready(members, [0, 1], 3) == [Commit(3, 0, 1, (0, 1))]


def test_workers_that_begin_at_different_steps_end_the_job() -> None:
    members = Membership(2, Rules())
    members.entered(0, 1, 4, FACTS, 0.0)
    (end,) = members.entered(1, 1, 5, FACTS, 0.0)
    assert isinstance(end, End)
    assert "worker 0 after step 4, worker 1 after step 5" in end.why


def test_a_fault_before_everyone_has_entered_is_left_to_the_launcher() -> None:
    members = Membership(3, Rules())
    members.entered(0, 1, 0, FACTS, 0.0)
    assert members.died(2, "was killed", 0.0) == []
    assert members.entered(1, 1, 0, FACTS, 0.0) == []
    assert not members.running


def test_a_worker_that_ends_well_after_its_loop_is_missed_by_nobody() -> None:
    members = job(3)
    for slot in range(3):
        members.left(slot, 1)
    assert members.ended_well(2, 0.0) == []
    decided = members.died(1, "was killed after step 0", 0.0)
    assert next(decision for decision in decided if isinstance(decision, Generation)).members == (0,)
    assert not any(isinstance(decision, Replace) for decision in decided), "there is no loop to join"


def test_a_worker_that_ends_in_the_middle_of_its_loop_counts_as_dead() -> None:
    members = job(2)
    decided = members.ended_well(1, 0.0)
    assert lines(decided) == [
        "worker 1 left the job in step 1, while others were training; 1 worker goes on, a replacement starts"
    ]


def test_a_lost_host_takes_its_workers_in_one_generation_and_gets_no_replacements() -> None:
    members = job(4)
    decided = members.host_lost([2, 3], "host 1 is lost (silent for 5 s)", 0.0)
    assert lines(decided) == ["host 1 is lost (silent for 5 s); 2 workers go on"]
    assert [decision for decision in decided if not isinstance(decision, Say)] == [
        Generation(2, (0, 1), (), 0, "host 1 is lost (silent for 5 s)")
    ]


def test_a_host_that_is_back_gets_its_slots_and_its_workers_join_after_a_step() -> None:
    members = job(4, Rules(restart_workers=False))
    members.host_lost([2, 3], "host 1 is lost (silent for 5 s)", 0.0)
    assert members.host_came([2, 3], "host 1 is back", 0.0) == [
        Say("host 1 is back; its 2 workers join after a step"), Replace(2, 1), Replace(3, 1),
    ]  # fmt: skip
    for slot in (2, 3):
        members.asks_to_join(slot, 0, FACTS)
    assert ready(members, [0, 1], 1)[-1] == Generation(
        3, (0, 1, 2, 3), (2, 3), 1, "workers 2 and 3 joined after step 1"
    )
    assert members.grouped(3, 3) == [Say("worker 3 is back after step 1")]


def test_a_host_that_is_back_between_two_loops_waits_for_the_next() -> None:
    members = job(2)
    members.host_lost([1], "host 1 is lost", 0.0)
    members.left(0, 1)
    assert lines(decided := members.host_came([1], "host 1 is back", 0.0)) == [
        "host 1 is back; its 1 worker joins after a step"
    ]
    assert len(decided) == 1
    assert members.entered(0, 2, 0, FACTS, 0.0)[-1] == Replace(1, 1)


def test_a_further_host_gets_slots_at_the_end() -> None:
    members = job(2)
    assert members.table.add(2) == [2, 3]
    assert ready(members, [0, 1], 1) == [Commit(1, 0, 1, (0, 1))], "who is not there is not waited for"
    decided = members.host_came([2, 3], "host 1 has come", 0.0)
    assert decided[1:] == [Replace(2, 1), Replace(3, 1)]
    members.asks_to_join(3, 0, FACTS)
    assert ready(members, [0, 1], 2)[-1] == Generation(2, (0, 1, 3), (3,), 2, "worker 3 joined after step 2")
    assert members.grouped(3, 2) == [Say("worker 3 joined after step 2")]


def test_a_host_none_of_whose_workers_can_join_is_told_apart_from_one_that_has_some() -> None:
    members = job(4)
    assert members.table.why_idle([2, 3]) == ""
    members.died(2, "was killed", 0.0)
    members.asks_to_join(2, 1, {**FACTS, "torch": "2.12"})
    members.died(2, "exited with code 1", 0.0)
    assert members.table.why_idle([2, 3]) == "", "worker 3 trains"
    assert members.table.why_idle([2]) == "torch is 2.12 there and 2.13 here"
    members = job(3, Rules(restart_workers=False))
    members.died(2, "was killed", 0.0)
    assert members.table.why_idle([2]) == "none is started for one that died"
    members.stop()
    assert members.table.why_idle([2]) == ""


def test_a_host_that_goes_before_its_workers_have_joined_is_missed_by_nobody() -> None:
    members = job(2)
    members.table.add(1)
    members.host_came([2], "host 1 has come", 0.0)
    assert members.host_lost([2], "host 1 is lost (silent)", 0.0) == [
        Say("host 1 is lost (silent), before it had joined")
    ]
    assert ready(members, [0, 1], 1) == [Commit(1, 0, 1, (0, 1))]


def test_state_that_is_lost_with_a_host_is_begun_anew_by_the_others() -> None:
    members = job(6)
    ready(members, range(6), 1)
    members.host_lost([2, 3], "host 1 is lost (silent)", 0.0)
    (said, anew) = members.state_lost(4, 2, "worker 2's part is lost")
    told = "worker 2's part is lost: the 4 workers of the hosts that are left start anew (1 of at most 3 times)"
    assert (said, anew) == (Say(told), StartAnew(1, (0, 1, 4, 5)))
    for slot in (0, 1, 4):
        assert members.entered(slot, 1, 0, FACTS, 0.0) == []
    members.host_came([2], "host 1 is back", 0.0)
    decided = members.entered(5, 1, 0, FACTS, 0.0)
    assert (decided[0], decided[-1]) == (Rewind(0), Replace(2, 1))
    assert ready(members, (0, 1, 4, 5), 1) == [Commit(1, 0, 1, (0, 1, 4, 5))]


def test_a_host_that_is_lost_while_others_start_anew_is_done_without_too() -> None:
    members = Membership(3, Rules())
    assert not members.can_lose([2]), "the first start is the launcher's to judge"
    members = job(3)
    members.host_lost([2], "host 2 is lost", 0.0)
    members.state_lost(0, 2, "a part is lost")
    members.entered(0, 1, 0, FACTS, 0.0)
    assert members.can_lose([1])
    (said, anew) = members.host_lost([1], "host 1 is lost", 0.0)
    told = "host 1 is lost: the 1 worker of the hosts that are left starts anew (2 of at most 3 times)"
    assert (said, anew) == (Say(told), StartAnew(2, (0,)))
    members.entered(0, 1, 0, FACTS, 0.0)
    assert ready(members, [0], 1) == [Commit(1, 0, 1, (0,))]


def test_fewer_than_min_workers_do_not_start_anew() -> None:
    members = job(4, Rules(min_workers=2))
    members.host_lost([1, 2], "host 1 is lost", 0.0)
    assert members.died(3, "was killed", 0.0)[-1] == End(
        TOO_FEW_LEFT, "worker 3 was killed; 1 worker left, and --min-workers is 2"
    )
    members = job(4, Rules(min_workers=3))
    members.host_lost([3], "host 1 is lost", 0.0)
    assert isinstance(members.state_lost(0, 2, "a part is lost")[-1], StartAnew)
    for slot in (0, 1, 2):
        members.entered(slot, 1, 0, FACTS, 0.0)
    assert members.host_lost([1, 2], "host 2 is lost", 0.0) == [
        End(TOO_FEW_LEFT, "host 2 is lost; 1 worker left, and --min-workers is 3")
    ]


@pytest.mark.parametrize(
    ("rules", "workers", "text"),
    [
        ({"min_workers": 5}, 4, "4 workers, but --min-workers 5"),
        ({"max_workers": 3}, 4, "4 workers, but --min-workers 1 and --max-workers 3"),
        ({"min_workers": 0}, 4, "--min-workers 0; a job has at least one worker"),
        ({"heartbeat_timeout_s": 0}, 4, "--heartbeat-timeout-s 0; it must be a number of seconds above 0"),
        ({"copies": 0}, 4, "--copies 0"),
    ],
)
def test_flags_that_contradict_each_other_are_refused(rules: dict[str, int], workers: int, text: str) -> None:
    with pytest.raises(LaunchError, match=text):
        Rules(**rules).check(workers)  # type: ignore[arg-type]


# ---- the ledger ----------------------------------------------------------------------------------------------


# ---- random lives --------------------------------------------------------------------------------------------


class Worker:
    """A process that does what the protocol asks, as far as it is alive and has been told."""

    def __init__(self, incarnation: int, generation: int, step: int) -> None:
        self.incarnation, self.generation, self.step = incarnation, generation, step
        self.joined = incarnation == 0
        self.asked = self.alive = False
        self.stuck = False
        self.readied = (0, 0)
        self.has_state = incarnation == 0
        self.loop = self.entered_in = int(incarnation == 0)


class LivesOfAJob(RuleBasedStateMachine):
    """Workers die, stop, hang, raise and come back at any moment; what must hold, holds at each.

    Host 0 has slots 0 and 1, host 1 slots 2 and 3; host 2 comes later, with slot 4.
    """

    SIZE = 5
    HOSTS = ((0, 1), (2, 3), (4,))

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.members = Membership(4, Rules(heartbeat_timeout_s=2, step_timeout_s=8, regroup_timeout_s=4))
        self.ledger = StepLog()
        self.workers: dict[int, Worker] = {}
        self.newest = 1
        self.told: dict[int, list[Decision]] = {}
        self.ended = False
        self.loop = self.begun = 1
        self.doomed: list[tuple[int, Worker]] = []
        self.hosts = {0, 1}
        self._begin((0, 1, 2, 3))
        for slot in range(4):  # a death at the first start is the launcher's to judge
            self.do(self.members.entered(slot, 1, 0, FACTS, self.now))
        assert self.members.table.add(1) == [4]
        self.workers[4] = Worker(0, 0, -1)

    def _begin(self, starting: tuple[int, ...]) -> None:
        self.loop = self.begun = 1
        assert set(starting) == {slot for host in self.hosts for slot in self.HOSTS[host]}
        for slot in set(self.workers) - set(starting):
            self.workers[slot].incarnation = 0
        for slot in starting:
            self.workers[slot] = Worker(0, 1, 0)
            self.workers[slot].alive = True
            self.members.count_anew(slot, self.now)

    def do(self, decisions: list[Decision]) -> None:
        begins_anew: tuple[int, ...] = ()
        for decision in decisions:
            assert not self.ended, f"{decision} after the end"
            match decision:
                case Commit(step, update, generation, slots):
                    assert generation == self.newest
                    self.ledger.commit(Commit(step, update, generation, slots))  # raises at a second one
                    for slot in slots:
                        assert self.workers[slot].loop == self.begun, "every member is in the loop"
                        assert self.workers[slot].step == step - 1, "every member was at the same step"
                        assert self.workers[slot].readied == (generation, step), "every member has done it"
                        self.workers[slot].step = step
                case Begin(loop, slots):
                    assert {self.workers[slot].entered_in for slot in slots} == {self.newest}, "all have kept it"
                    self.begun = loop
                case Generation(generation, slots, joining, step, _):
                    assert generation == self.newest + 1, "generations follow each other"
                    self.newest = generation
                    assert slots == self.members.members
                    assert set(slots) > set(joining), "somebody has the state"
                    for slot in slots:
                        worker = self.workers[slot]
                        worker.generation = generation
                        if slot in joining:
                            worker.joined, worker.step, worker.loop = True, step, self.begun
                        assert worker.joined
                        assert worker.has_state or slot in joining, "who has no state is given it"
                        assert worker.step == step, "survivors all count a step, or none does"
                case Fence(slot):
                    self.doomed.append((slot, self.workers[slot]))
                case Replace(slot, incarnation):
                    assert not self.workers[slot].alive, "two processes in one slot"
                    assert any(slot in self.HOSTS[host] for host in self.hosts), "nobody is there to start it"
                    assert incarnation == self.workers[slot].incarnation + 1
                    self.workers[slot] = Worker(incarnation, 0, -1)
                    self.workers[slot].alive = True
                    self.members.count_anew(slot, self.now)
                case Rewind(step):
                    self.ledger.rewind(step)
                case StartAnew(_, starting):
                    begins_anew = starting
                case End():
                    self.ended = True
                case Say(line):
                    assert "\n" not in line
        if begins_anew:
            self.newest, self.doomed = 1, []
            self._begin(begins_anew)

    @precondition(lambda self: not self.ended)
    @rule(slot=st.integers(0, SIZE - 1))
    def killed(self, slot: int) -> None:
        worker = self.workers[slot]
        if worker.alive:
            worker.alive = False
            self.do(self.members.died(slot, "was killed", self.now))

    @precondition(lambda self: not self.ended)
    @rule(slot=st.integers(0, SIZE - 1))
    def raises(self, slot: int) -> None:
        if self.workers[slot].alive and not self.workers[slot].stuck:
            worker = self.workers[slot]
            self.do(self.members.raised(slot, "raised", self.now))
            if not self.ended and worker is self.workers[slot]:
                worker.alive = False
                self.do(self.members.died(slot, "exited with code 1", self.now))

    @precondition(lambda self: not self.ended)
    @rule(host=st.integers(1, 2))
    def host_is_lost(self, host: int) -> None:
        if host in self.hosts:
            self.hosts.remove(host)
            for slot in self.HOSTS[host]:
                self.workers[slot].alive = False
            self.do(self.members.host_lost(self.HOSTS[host], f"host {host} is lost", self.now))

    @precondition(lambda self: not self.ended)
    @rule(host=st.integers(1, 2))
    def host_comes(self, host: int) -> None:
        if host not in self.hosts:
            self.hosts.add(host)
            self.do(self.members.host_came(self.HOSTS[host], f"host {host} is back", self.now))

    @precondition(lambda self: not self.ended)
    @rule(slot=st.integers(0, SIZE - 1))
    def loses_state(self, slot: int) -> None:
        if self.workers[slot].alive:
            self.do(self.members.state_lost(slot, self.workers[slot].generation, "a part is lost"))

    @rule(slot=st.integers(0, SIZE - 1))
    def hangs(self, slot: int) -> None:
        self.workers[slot].stuck = True

    @precondition(lambda self: not self.ended)
    @rule(slot=st.integers(0, SIZE - 1))
    def breaks(self, slot: int) -> None:
        worker = self.workers[slot]
        if worker.alive:
            self.do(self.members.failed(slot, worker.generation, "cut", self.now))

    @precondition(lambda self: not self.ended)
    @rule(slot=st.integers(0, SIZE - 1), check=st.sampled_from([7, 7, 7, 7, 8]))
    def works(self, slot: int, check: int) -> None:
        worker = self.workers[slot]
        if not worker.alive or worker.stuck:
            return
        self.do(self.members.beat(slot, self.now))
        if not worker.joined:
            worker.asked = True
            self.do(self.members.asks_to_join(slot, 0, FACTS))
            return
        if not self.members.running:
            self.do(self.members.entered(slot, 1, worker.step, FACTS, self.now))
            return
        self.do(self.members.grouped(slot, worker.generation))
        worker.has_state = True
        if self.begun < self.loop:
            self._enter(slot, worker)
            return
        one = Ready(worker.step + 1, 0, check, True)
        worker.readied = (worker.generation, one.step)
        self.do(self.members.readied(slot, worker.generation, one, self.now))

    def _enter(self, slot: int, worker: Worker) -> None:
        if worker.loop < self.loop:
            self.do(self.members.left(slot, worker.loop))
        worker.loop, worker.entered_in = self.loop, worker.generation
        self.do(self.members.entered(slot, self.loop, worker.step, FACTS, self.now))

    @precondition(lambda self: not self.ended and not any(slot.ready for slot in self.members.slots))
    @rule()
    def loop_ends(self) -> None:
        self.loop = self.begun + 1

    @precondition(lambda self: not self.ended and self.newest > 1)
    @rule(slot=st.integers(0, SIZE - 1))
    def says_what_is_over(self, slot: int) -> None:
        one = Ready(self.workers[slot].step + 1, 0, 7, True)
        assert self.members.readied(slot, self.newest - 1, one, self.now) == []
        assert self.members.grouped(slot, self.newest - 1) == []
        self.do(self.members.failed(slot, self.newest - 1, "cut", self.now))

    @precondition(lambda self: not self.ended)
    @rule()
    def all_work(self) -> None:
        for slot in range(self.SIZE):
            if not self.ended:
                self.works(slot, 7)

    @precondition(lambda self: not self.ended)
    @rule(tenths=st.integers(1, 9))
    def time_passes(self, tenths: int) -> None:
        self.now += tenths / 10
        for slot, worker in self.workers.items():
            if worker.alive and not worker.stuck:
                self.do(self.members.beat(slot, self.now))
        self.do(self.members.tick(self.now))
        self._bury()

    def _bury(self) -> None:
        while self.doomed and not self.ended:
            slot, worker = self.doomed.pop()
            if not worker.alive:
                continue
            before = (self.members.generation, self.members.step)
            if worker.joined:  # a fenced one is never heard again
                self.do(self.members.readied(slot, self.newest, Ready(worker.step + 1, 0, 7, True), self.now))
                self.do(self.members.entered(slot, 1, 99, FACTS, self.now))
            assert before == (self.members.generation, self.members.step)
            worker.alive = False
            self.do(self.members.died(slot, "was killed by SIGKILL", self.now))

    @precondition(lambda self: not self.ended)
    @rule()
    def everyone_alive_gets_on(self) -> None:
        """Every wait ends: with time and those who are not stuck, another step is committed, or the job ends."""
        done = self.members.step, self.newest
        for _ in range(400):
            self.now += 0.25
            for slot in range(self.SIZE):
                if not self.ended:
                    self.works(slot, 7)
            if not self.ended:
                self.do(self.members.tick(self.now))
                self._bury()
            if self.ended or self.members.step > done[0]:
                return
        raise AssertionError(f"nothing happened for 100 s: {self.members.slots}")

    @invariant()
    def members_are_alive_or_about_to_be_missed(self) -> None:
        if not self.ended and self.members.running:
            for slot in self.members.members:
                assert self.workers[slot].alive
                assert self.members.slots[slot].standing is Standing.MEMBER


LivesOfAJob.TestCase.settings = settings(
    max_examples=200, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestAnyLifeOfAJob = LivesOfAJob.TestCase
