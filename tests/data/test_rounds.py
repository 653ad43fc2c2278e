"""Rounds: all workers run equally many items, every micro-batch once, and lanes of a turn end together."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from paceline.data.loader import ShardedLoader
from paceline.data.rounds import Rides, Slot, slots_of
from paceline.data.streams import StreamLoader
from paceline.data.work_source import Deal
from paceline.world.lanes import neighbouring_lanes, strided_lanes


def drawn(slots: list[Slot]) -> str:
    names = [f"{slot.lane}{'ab'[slot.micro_batch]}" for slot in slots]
    return " ".join(f"({name})" if slot.shadow else name for name, slot in zip(names, slots, strict=True))


def all_slots(counts: dict[int, int], rides: Rides) -> list[list[Slot]]:
    return [slots_of(counts, ride, rides) for ride in rides]


def test_the_picture() -> None:
    counts = {0: 2, 1: 2, 2: 1, 3: 1, 4: 1}
    rounds = [drawn(slots) for slots in all_slots(counts, strided_lanes(5, 3))]
    assert rounds == ["0a 0b 3a", "1a 1b 4a", "(2a) 2a (2a)"]


def test_three_workers_share_four_full_lanes() -> None:
    rounds = all_slots(dict.fromkeys(range(4), 2), strided_lanes(4, 3))
    assert [drawn(slots) for slots in rounds] == ["0a 0b 3a 3b", "1a 1b (1b) (1b)", "2a 2b (2b) (2b)"]
    assert [slot.last_of_lane for slot in rounds[1]] == [False, True, False, True]


def test_a_worker_without_any_lane_runs_the_lowest_ones_first_micro_batch() -> None:
    rounds = all_slots({0: 1}, strided_lanes(4, 3))
    assert [drawn(slots) for slots in rounds] == ["0a", "(0a)", "(0a)"]


@settings(max_examples=200, deadline=None)
@given(
    st.dictionaries(st.integers(0, 8), st.integers(1, 3), min_size=1),
    st.integers(1, 9),
    st.sampled_from([strided_lanes, neighbouring_lanes]),
)
def test_all_workers_run_equally_often_and_every_micro_batch_once(counts, workers, riding) -> None:  # type: ignore[no-untyped-def]
    rides = riding(9, workers)
    rounds = all_slots(counts, rides)
    assert len({len(slots) for slots in rounds}) == 1
    real = [(slot.lane, slot.micro_batch) for slots in rounds for slot in slots if not slot.shadow]
    assert sorted(real) == sorted((lane, number) for lane, count in counts.items() for number in range(count))
    ends = {tuple(place for place, slot in enumerate(slots) if slot.last_of_lane) for slots in rounds}
    assert len(ends) == 1, "lanes of a turn end in the same round"
    assert all(slots[-1].last_of_lane for slots in rounds)


def deal(worker: int, workers: int = 3, lanes: int = 4) -> Deal:
    rides = strided_lanes(lanes, workers)
    return Deal(lanes, 2, rides[worker], seed=0, rides=rides)


def test_a_loader_hands_out_shadows_and_marks_the_last_item_of_all_workers_in_the_same_round() -> None:
    """16 samples are two micro-batches for each lane; the 5 left make three of them."""
    data = TensorDataset(torch.arange(21))
    items = []
    for worker in range(3):
        loader = ShardedLoader(DataLoader(data, batch_size=2), deal(worker))
        items.append([item for item, _ in loader.items()])
        loader.close()
    assert [len(mine) for mine in items] == [5, 5, 5]
    for mine in items:
        assert [item.last_of_step for item in mine] == [False, False, False, True, True]
        assert [item.first_of_step for item in mine] == [True, False, False, False, True]
    ids = sorted(sample for mine in items for item in mine if not item.shadow for sample in item.sample_ids)
    assert ids == list(range(21))


class Numbers(IterableDataset[torch.Tensor]):
    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter(torch.arange(21.0))


def test_a_stream_hands_out_shadows_that_are_copies() -> None:
    """A body that writes into the batch of a shadow leaves the real one, which may follow, alone."""
    seen = []
    rounds = []
    for worker in range(3):
        loader = StreamLoader(DataLoader(Numbers(), batch_size=2), deal(worker), lambda mine, _: mine)
        items = []
        for item, batch in loader.items():
            items.append(item)
            if item.shadow:
                batch.fill_(-1)
            else:
                seen += batch.tolist()
        loader.close()
        rounds.append(len(items))
        assert [item.last_of_step for item in items] == [False, False, False, True, True]
    assert sorted(seen) == list(range(21))
    assert rounds == [5, 5, 5]
