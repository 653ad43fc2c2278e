"""Ballots: what a worker says is what the others read."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.engine.vote import (
    MOST_MEANS,
    LaneReport,
    StepVote,
    Stop,
    any_used,
    lanes_in_order,
    name_key,
    pack,
    unpack,
)
from paceline.errors import ConfigError

MOST_LANES = 4

int64 = st.integers(-(2**63), 2**63 - 1)
numbers = st.floats(allow_nan=False)
means = st.dictionaries(st.integers(1, 2**64 - 1), st.tuples(numbers, numbers), max_size=MOST_MEANS)
reports = st.builds(LaneReport, st.integers(0, 2**40), numbers, numbers, st.booleans(), means)
votes = st.builds(
    StepVote,
    step=st.integers(0, 2**62),
    update=st.integers(0, 2**62),
    stop=st.sampled_from(Stop),
    check=int64,
    used=st.lists(st.booleans(), max_size=40).map(tuple),
    lanes=st.lists(reports, max_size=MOST_LANES).map(tuple),
    rates=st.integers(0, 2**32 - 1),
)


def vote(*lanes: LaneReport, used: tuple[bool, ...] = ()) -> StepVote:
    return StepVote(step=1, update=0, stop=Stop.NO, check=0, used=used, lanes=lanes)


@settings(max_examples=100, deadline=None)
@given(votes)
def test_a_vote_is_read_as_it_was_written(said: StepVote) -> None:
    assert unpack(pack(said, MOST_LANES), len(said.used)) == said


@settings(max_examples=50, deadline=None)
@given(votes)
def test_votes_of_one_job_have_one_size_whatever_is_in_them(said: StepVote) -> None:
    nothing = StepVote(step=0, update=0, stop=Stop.NO, check=0, used=(False,) * len(said.used), lanes=())
    assert pack(said, MOST_LANES).shape == pack(nothing, MOST_LANES).shape


def test_a_vote_full_to_the_last_mean_and_lane_is_read_as_it_was_written() -> None:
    means = {key: (float(key), 2.0) for key in range(1, MOST_MEANS + 1)}
    said = vote(*(LaneReport(lane, means=means) for lane in range(MOST_LANES)), used=(True,) * 9)
    assert unpack(pack(said, MOST_LANES), 9) == said


def test_a_loss_that_is_not_finite_travels() -> None:
    losses = [math.nan, math.inf, -math.inf]
    said = vote(*(LaneReport(lane, loss=loss, finite=False) for lane, loss in enumerate(losses)))
    assert [str(report.loss) for report in unpack(pack(said, MOST_LANES), 0).lanes] == ["nan", "inf", "-inf"]


def test_a_vote_may_be_a_row_of_a_gathered_table() -> None:
    said = vote(LaneReport(2, weight=4.0, means={7: (1.0, 2.0)}), used=(True, False, True))
    table = torch.stack([torch.zeros_like(pack(said, MOST_LANES)), pack(said, MOST_LANES)])
    assert unpack(table[1], 3) == said


def test_a_mean_is_the_weighted_sum_of_its_values_and_the_sum_of_the_weights() -> None:
    report = LaneReport(0)
    report.add_mean(5, value=3.0, weight=2.0)
    report.add_mean(5, value=1.0, weight=4.0)
    assert report.means == {5: (10.0, 6.0)}


def test_one_name_too_many_is_refused_and_a_known_name_is_not() -> None:
    report = LaneReport(0)
    for key in range(1, MOST_MEANS + 1):
        report.add_mean(key, 1.0, 1.0)
    report.add_mean(MOST_MEANS, 1.0, 1.0)
    with pytest.raises(ConfigError, match=f"engine.mean takes at most {MOST_MEANS} different names per step"):
        report.add_mean(MOST_MEANS + 1, 1.0, 1.0)


def test_names_have_stable_keys_of_their_own() -> None:
    assert name_key("loss") == 7841856413942573454
    assert len({name_key(f"metric {number}") for number in range(1000)}) == 1000


def test_a_parameter_is_used_when_any_worker_used_it() -> None:
    assert any_used([vote(used=(True, False, False)), vote(used=(True, True, False))]) == [True, True, False]


def test_reports_of_all_workers_are_read_in_lane_order() -> None:
    said = [vote(LaneReport(2), LaneReport(0)), vote(), vote(LaneReport(1))]
    assert [report.lane for report in lanes_in_order(said)] == [0, 1, 2]
