"""Streams whose workers change in the middle of a step: what is committed is what one undisturbed worker is handed.

What workers tell each other before a step is known from that undisturbed one, so no worker has to wait for another.
"""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from paceline.data.streams import Counts, StreamLoader
from paceline.data.work_source import Assignment
from paceline.errors import DataError, GenerationEnded
from tests.data.crews import Change, Crew, Handed, changes, of_a_step
from tests.data.test_streams import Numbers, Resumable, Unsplit

pytestmark = pytest.mark.filterwarnings("ignore:the stream .* has no state_dict:UserWarning")


class KeepsItsState(Numbers):
    """Hands out its own state, and goes on with the one it is given; its samples are drawn."""

    def __init__(self, samples: int) -> None:
        super().__init__(samples)
        self.state = {"read": 0}

    def state_dict(self) -> dict[str, int]:
        return self.state

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.state = state

    def __iter__(self) -> Iterator[Tensor]:
        info = get_worker_info()
        assert info is not None
        while (number := info.id + self.state["read"] * info.num_workers) < self.samples:
            self.state["read"] += 1
            yield number + torch.rand(()) / 2


Make = Callable[[int], IterableDataset[Any]]
KINDS: list[Make] = [Numbers, Unsplit, Resumable, KeepsItsState]


@dataclass
class StreamCrew(Crew):
    make: Make = Numbers
    samples: int = 50
    loader: dict[str, Any] = field(default_factory=dict)
    undisturbed: list[Handed] | None = None

    def member(self, own_lanes: tuple[int, ...]) -> StreamLoader:
        source = DataLoader(self.make(self.samples), **{"batch_size": 3} | self.loader)
        member = StreamLoader(
            source,
            Assignment(self.lanes, self.accumulate, own_lanes, seed=3),
            lambda mine, _: self._agree(member, mine),
        )
        return member

    def _agree(self, member: StreamLoader, mine: Counts) -> Counts:
        if self.interrupted:
            raise GenerationEnded("a worker was lost")
        if self.undisturbed is None:
            return mine
        all_lanes = self._counts(member.epoch)
        assert mine == {lane: all_lanes[lane] for lane in mine}
        return all_lanes

    def _counts(self, epoch: int) -> Counts:
        assert self.undisturbed is not None
        handed = self.undisturbed[epoch] if epoch < len(self.undisturbed) else {}
        items = [item for (step, _, _), (item, _) in handed.items() if step == self.step]
        return {lane: [item.samples for item in items if item.lane == lane] for lane in range(self.lanes)}

    def _steps_left(self, epoch: int) -> bool:
        return any(self._counts(epoch).values())


@settings(max_examples=100, deadline=None)
@given(
    make=st.sampled_from(KINDS),
    samples=st.integers(1, 60),
    lanes=st.integers(1, 5),
    accumulate=st.integers(1, 3),
    workers=st.integers(1, 5),
    strided=st.booleans(),
    drop_last=st.booleans(),
    history=changes,
)
def test_any_changes_inside_steps_commit_what_one_undisturbed_worker_is_handed(
    make: Make, samples: int, lanes: int, accumulate: int, workers: int, strided: bool, drop_last: bool,
    history: list[Change],
) -> None:  # fmt: skip
    samples = max(samples, 3 * lanes * accumulate)
    stream: dict[str, Any] = {"make": make, "samples": samples, "loader": {"drop_last": drop_last}}
    undisturbed = StreamCrew(lanes, accumulate, **stream).run(1, epochs=2)
    crew = StreamCrew(lanes, accumulate, strided, undisturbed=undisturbed, **stream)
    assert crew.run(min(workers, lanes), tuple(history), epochs=2) == undisturbed


HISTORY = (
    Change(step=1, handed=1, lost=frozenset({1})),
    Change(step=2, handed=2, joining=1, interrupted=frozenset({0})),
    Change(step=3, handed=1, lost=frozenset({0}), joining=2),
    Change(step=3, handed=0, interrupted=frozenset({0, 1, 2})),
    Change(step=4, handed=1, lost=frozenset({0, 1})),
)


@pytest.mark.slow
@pytest.mark.parametrize("make", [Unsplit, KeepsItsState])
@pytest.mark.parametrize(
    "options",
    [{"num_workers": 1}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}],
    ids=["one process", "processes", "processes that stay"],
)
def test_lanes_of_the_lost_go_on_where_their_last_committed_step_ended(make: Make, options: dict[str, Any]) -> None:
    stream: dict[str, Any] = {"make": make, "samples": 40, "loader": {"batch_size": 2, **options}}
    undisturbed = StreamCrew(**stream).run(1, epochs=2)
    assert StreamCrew(undisturbed=undisturbed, **stream).run(2, HISTORY, epochs=2) == undisturbed
    assert not multiprocessing.active_children()


def stream_of(make: Make = Resumable, own_lanes: tuple[int, ...] = (0, 1), **options: Any) -> StreamLoader:
    source = DataLoader(make(50), **{"batch_size": 2} | options)
    return StreamLoader(source, Assignment(lanes=4, accumulate=1, own_lanes=own_lanes, seed=3), lambda mine, _: mine)


@pytest.mark.parametrize("make", KINDS)
def test_dealing_the_same_lanes_anew_hands_out_the_same_step_again(make: Make) -> None:
    stream = stream_of(make)
    loop = stream.items()
    for item, _ in of_a_step(loop):
        if item.last_of_step:
            stream.commit(item)
    lost = list(of_a_step(loop))
    stream.reassign((0, 1))
    assert next(loop, None) is None
    assert list(of_a_step(stream.items())) == lost


def test_a_committed_place_is_json_and_small_enough_to_be_told_at_every_step() -> None:
    stream = stream_of()
    for item, _ in of_a_step(stream.items()):
        if item.last_of_step:
            stream.commit(item)
    place = stream.state_after(None)
    assert json.loads(json.dumps(place)) == place
    assert {lane: value["samples"] for lane, value in place["lanes"].items()} == {"0": 2, "1": 2}
    assert len(json.dumps(place)) < 500


def test_lanes_whose_places_nobody_told_are_refused_once_something_is_committed() -> None:
    stream = stream_of()
    stream.reassign((1, 2))  # at the beginning everyone knows all places
    for item, _ in of_a_step(stream.items()):
        if item.last_of_step:
            stream.commit(item)
    with pytest.raises(DataError, match=r"lanes 0, 3 of the stream can't go on here: .* give reassign\(\) those of"):
        stream.reassign((0, 1, 3))


def test_only_a_stream_in_parts_needs_the_places_of_others() -> None:
    assert stream_of(Numbers).takes_places
    assert not stream_of(Unsplit).takes_places


def test_a_worker_that_has_not_yet_learned_of_the_end_of_the_epoch_ends_its_loop_too() -> None:
    first, second = stream_of(own_lanes=(0, 1)), stream_of(own_lanes=(2, 3))
    for item, _ in first.items():
        if item.last_of_step:
            first.commit(item)
    loop = second.items()
    for item, _ in loop:
        if item.last_of_step:
            second.commit(item)
        if item.step == 5:
            break
    assert (first.epoch, second.epoch) == (1, 0)
    for _ in range(2):
        second.reassign((0, 1, 2, 3), second.merged([second.state_after(None), first.state_after(None)]))
    assert list(second.items()) == []
    assert next(second.items())[0].epoch == 1


def test_reading_again_is_told() -> None:
    stream = stream_of(Numbers)
    for item, _ in of_a_step(stream.items()):
        if item.last_of_step:
            stream.commit(item)
    with pytest.warns(UserWarning, match=r"Numbers has no state_dict\(\): to go on, up to 2 samples are read again"):
        stream.reassign((0, 1))


class SaysWho(Numbers):
    def __iter__(self) -> Iterator[Tensor]:
        for _ in super().__iter__():
            yield torch.tensor(os.getpid())


@pytest.mark.parametrize("persistent", [False, True])
def test_loader_processes_end_with_the_lanes_they_read(persistent: bool) -> None:
    stream = stream_of(SaysWho, num_workers=2, persistent_workers=persistent)
    loop = stream.items()
    before = {int(pid) for _, batch in of_a_step(loop) for pid in batch}
    stream.reassign((1, 2))
    assert not any(psutil.pid_exists(pid) for pid in before)
    loop = stream.items()
    after = {int(pid) for _, batch in of_a_step(loop) for pid in batch}
    stream.close()
    assert not any(psutil.pid_exists(pid) for pid in after)
