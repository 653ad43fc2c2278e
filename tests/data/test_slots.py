"""What a worker does in a step: its lanes in order, or one shadow where it has none with samples."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset

from paceline.data.slots import Slot, slots_of
from paceline.data.streams import StreamLoader
from paceline.data.work_source import Deal
from paceline.world.lanes import neighbouring_lanes, strided_lanes


@settings(max_examples=200, deadline=None)
@given(
    st.dictionaries(st.integers(0, 8), st.integers(1, 3), min_size=1),
    st.integers(1, 9),
    st.sampled_from([strided_lanes, neighbouring_lanes]),
)
def test_every_micro_batch_is_run_once_and_nobody_has_nothing_to_run(counts, workers, riding) -> None:  # type: ignore[no-untyped-def]
    slots = [slots_of(counts, ride) for ride in riding(9, workers)]
    real = [(slot.lane, slot.micro_batch) for mine in slots for slot in mine if not slot.shadow]
    assert sorted(real) == sorted((lane, number) for lane, count in counts.items() for number in range(count))
    assert all(mine for mine in slots)
    assert all(mine[-1].last_of_lane for mine in slots)


def test_a_worker_without_samples_runs_the_lowest_lanes_first_micro_batch() -> None:
    assert slots_of({1: 2, 3: 1}, (0, 2)) == [Slot(1, 0, shadow=True, last_of_lane=True)]


class Numbers(IterableDataset[torch.Tensor]):
    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter(torch.arange(18.0))


def test_a_stream_hands_out_shadows_that_are_copies() -> None:
    """16 samples are two micro-batches for each of four lanes; the 2 left make one, of lane 0."""
    seen, shadows = [], 0
    for worker, ride in enumerate(strided_lanes(4, 3)):
        deal = Deal(4, 2, ride, seed=0)
        loader = StreamLoader(DataLoader(Numbers(), batch_size=2), deal, lambda mine, _: mine)
        for item, batch in loader.items():
            if item.shadow:
                shadows += 1
                assert worker > 0
                batch.fill_(-1)
            else:
                seen += batch.tolist()
        loader.close()
    assert sorted(seen) == list(range(18))
    assert shadows == 2
