"""The state of a step comes back from memory whoever is left to read it; a write that ends midway costs nothing."""

from __future__ import annotations

import multiprocessing
import os
import random
import resource
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.checkpoint.load import StoredTensor, full_tree
from paceline.elastic.memory_checkpoint import files
from paceline.elastic.memory_checkpoint.files import (
    LAST_UPDATE,
    MemoryCheckpoint,
    in_words,
    number_at_loop_start,
    number_for_joiners,
    state_number,
    steps_of,
    turn_of,
)
from paceline.errors import CheckpointError
from paceline.sharding.local_shard import LocalShard

Tree = dict[str, Any]

FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload(["tests.preload"])


def write(folder: Path, step: int, tree: Tree | Callable[[int], Tree], slots: list[int]) -> list[MemoryCheckpoint]:
    """As if by one worker in each slot; `tree` may depend on the rank."""
    written = [MemoryCheckpoint(folder, slot) for slot in slots]
    for rank, one in enumerate(written):
        one.write(step, tree(rank) if callable(tree) else tree, rank=rank, size=len(slots))
    return written


def read(folder: Path, step: int, slots: list[int]) -> Tree:
    tree: Tree = full_tree(files.read(folder, step, slots).tree)
    return tree


def same(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor):
        alike = (first.shape, first.dtype) == (second.shape, second.dtype)
        return alike and torch.equal(first.contiguous(), second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple):
        pairs = zip(first, second, strict=True)
        return type(first) is type(second) and all(same(a, b) for a, b in pairs)
    return type(first) is type(second) and bool(first == second)


def mixed() -> Tree:
    big = torch.randn(70, 130)
    return {
        "models": [{"weight": big, "tied": big, "half": big.bfloat16(), "turned": big.t(), "empty": torch.empty(0, 3)}],
        "optimizers": [
            {
                "state": {0: {"step": torch.tensor(7.0), "sums": torch.randn(5000, dtype=torch.float64)}},
                "param_groups": [{"lr": 0.1, "betas": (0.9, 0.95), "params": [0, 1], "foreach": None}],
            }
        ],
        "counted": torch.tensor(2**40 + 1),
        "flags": torch.rand(90) > 0.5,
        "int:1": {"$tensor": "a name that the encoding uses itself", "deep": [[torch.arange(20)], [], ()]},
        "worst": float("-inf"),
        "text": "µ",
    }


# -- what is written comes back ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("slots", [[0], [0, 1], [1, 2, 5], [0, 1, 2, 3, 4, 5, 6]])
def test_what_everyone_has_comes_back_whoever_kept_which_part(tmp_path: Path, slots: list[int]) -> None:
    tree = mixed()
    written = write(tmp_path, 3, tree, slots)
    found = read(tmp_path, 3, slots)
    assert same(tree, found), (tree, found)
    assert sum(one.bytes for one in written) < 1.5 * written[0].bytes * len(slots)


def test_tensors_are_shared_out_and_only_small_ones_kept_by_all(tmp_path: Path) -> None:
    one, two = write(tmp_path, 1, {"big": torch.zeros(100_000), "small": torch.zeros(4095)}, [0, 1])
    assert {one.bytes, two.bytes} == {4 * (49_984 + 4095), 4 * (50_016 + 4095)}


def test_small_tensors_come_as_tensors_and_large_ones_are_not_read_before_they_are_asked_for(tmp_path: Path) -> None:
    write(tmp_path, 1, {"count": torch.tensor(5), "weight": torch.arange(9000.0)}, [0, 1])
    tree = files.read(tmp_path, 1, [0, 1]).tree
    assert isinstance(tree["count"], Tensor)
    assert isinstance(tree["weight"], StoredTensor)
    assert (tree["weight"].shape, tree["weight"].dtype) == (torch.Size([9000]), torch.float32)
    assert torch.equal(tree["weight"].part(4400, 4600), torch.arange(4400.0, 4600.0))
    assert tree["weight"].part(17, 17).numel() == 0


@pytest.mark.parametrize(("writers", "readers"), [(1, 3), (2, 5), (3, 2), (4, 1), (5, 7)])
def test_slices_of_n_workers_are_read_by_m_with_other_cuts(tmp_path: Path, writers: int, readers: int) -> None:
    whole = torch.randn(101, 97).bfloat16()

    def cuts(parts: int, seed: int) -> list[int]:
        inner = random.Random(seed).sample(range(1, whole.numel()), 2 * parts - 1)
        return [0, *sorted(inner), whole.numel()]

    def mine(rank: int) -> Tree:
        ends = cuts(writers, 1)
        parts = [(ends[at], whole.view(-1)[ends[at] : ends[at + 1]]) for at in range(rank, 2 * writers, writers)]
        return {"w": LocalShard.of(whole.shape, whole.dtype, parts), "step": torch.tensor(4.0)}

    write(tmp_path, 9, mine, list(range(writers)))
    stored = files.read(tmp_path, 9, list(range(writers))).tree["w"]
    ends = cuts(readers, 2)
    for low, high in pairwise(ends):
        assert torch.equal(stored.part(low, high), whole.view(-1)[low:high]), (low, high)


def test_what_only_the_first_worker_knows_is_in_the_state(tmp_path: Path) -> None:
    def mine(rank: int) -> Tree:
        return {"models": [], **({"step": 4, "data": {"position": [1, None]}} if rank == 0 else {})}

    write(tmp_path, 4, mine, [0, 1, 2])
    assert read(tmp_path, 4, [0, 1, 2]) == {"models": [], "step": 4, "data": {"position": [1, None]}}


def test_every_slot_may_keep_something_of_its_own(tmp_path: Path) -> None:
    own: dict[int, Any] = {0: {"stream": {3: [1, (2, None)]}}, 4: None, 7: float("inf")}
    for rank, (slot, value) in enumerate(own.items()):
        MemoryCheckpoint(tmp_path, slot).write(1, {"w": torch.zeros(9000)}, rank=rank, size=3, own=value)
    state = files.read(tmp_path, 1, [0, 4, 7])
    assert state.own == own
    assert state.tree["w"].full_tensor().tolist() == [0.0] * 9000
    with pytest.raises(CheckpointError, match="'own/big' is a tensor: a worker's own values in memory are plain ones"):
        MemoryCheckpoint(tmp_path, 0).write(2, {}, rank=0, size=1, own={"big": torch.zeros(100)})


def test_a_state_is_a_copy_of_that_moment(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.zeros(5000))
    (one,) = write(tmp_path, 1, {"w": weight}, [0])
    with torch.no_grad():
        weight.fill_(1.0)
    one.write(2, {"w": weight}, rank=0, size=1)
    assert [float(read(tmp_path, step, [0])["w"].sum()) for step in (1, 2)] == [0.0, 5000.0]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_tensors_of_an_accelerator_are_kept_on_the_host(tmp_path: Path) -> None:
    big = torch.randn(300, 700, device="cuda")
    one = MemoryCheckpoint(tmp_path, 0)
    for step in range(1, 5):
        big = big @ big.t() @ big / 1e3  # the copy waits for it
        part = LocalShard.of((9000,), torch.bfloat16, [(0, big.view(-1)[:9000].bfloat16())])
        tree = {
            "big": big,
            "turned": big.t(),
            "part": part,
            "count": torch.tensor(step, device="cuda"),
            "host": big.cpu(),
        }
        one.write(step, tree, rank=0, size=1)
        found = read(tmp_path, step, [0])
        assert {value.device.type for value in found.values()} == {"cpu"}
        whole = {**tree, "part": part.parts[0][1]}
        assert same({name: value.cpu() for name, value in whole.items()}, found)


def test_new_memory_under_the_same_shape_is_followed(tmp_path: Path) -> None:
    one = MemoryCheckpoint(tmp_path, 0)
    for step in range(1, 5):
        one.write(step, {"w": torch.full((5000,), float(step)), "lr": 1 / step}, rank=0, size=1)
        assert (float(read(tmp_path, step, [0])["w"].mean()), read(tmp_path, step, [0])["lr"]) == (step, 1 / step)


# -- which steps are there ---------------------------------------------------------------------------------------------


def test_the_last_two_steps_are_there(tmp_path: Path) -> None:
    one = MemoryCheckpoint(tmp_path, 3)
    seen = []
    for step in range(4):
        one.write(step, {"w": torch.zeros(10)}, rank=0, size=1)
        seen.append(steps_of(tmp_path, 3))
    assert seen == [[0], [0, 1], [1, 2], [2, 3]]
    assert sorted(os.listdir(tmp_path)) == ["slot-3-0", "slot-3-1"]


def test_doing_a_step_again_keeps_the_step_before_it(tmp_path: Path) -> None:
    assert turn_of([6, 7], 7) == 1
    assert turn_of([7, 6], 7) == 0
    assert turn_of([6, 7], 8) == 0
    assert turn_of([None, 7], 8) == 0
    assert turn_of([7, None], 7) == 1
    one = MemoryCheckpoint(tmp_path, 0)
    for step, value in ((6, 6.0), (7, 7.0), (7, 7.5)):
        one.write(step, {"w": torch.full((100,), value)}, rank=0, size=1)
    assert [float(read(tmp_path, step, [0])["w"][0]) for step in (6, 7)] == [6.0, 7.5]


def test_a_step_that_is_in_the_past_again_leaves_no_future_behind(tmp_path: Path) -> None:
    one = MemoryCheckpoint(tmp_path, 0)
    for step in (8, 9, 5):
        one.write(step, {"w": torch.zeros(100)}, rank=0, size=1)
    assert steps_of(tmp_path, 0)[0] == 5
    one.write(6, {"w": torch.zeros(100)}, rank=0, size=1)
    assert steps_of(tmp_path, 0) == [5, 6]


def test_the_worker_that_follows_in_a_slot_does_not_write_over_the_newest_step(tmp_path: Path) -> None:
    first = MemoryCheckpoint(tmp_path, 0)
    for step in (1, 2, 3):
        first.write(step, {"w": torch.full((100,), float(step))}, rank=0, size=1)
    MemoryCheckpoint(tmp_path, 0).write(4, {"w": torch.full((50,), 4.0)}, rank=0, size=2)
    assert steps_of(tmp_path, 0) == [3, 4]
    assert read(tmp_path, 3, [0])["w"].tolist() == [3.0] * 100


# -- another layout ----------------------------------------------------------------------------------------------------


def test_another_layout_gets_a_file_of_its_size_and_the_step_before_stays(tmp_path: Path) -> None:
    one = MemoryCheckpoint(tmp_path, 0)
    one.write(1, {"w": torch.ones(100_000)}, rank=0, size=1)
    one.write(2, {"w": torch.ones(300)}, rank=0, size=1)
    assert float(read(tmp_path, 1, [0])["w"].sum()) == 100_000
    one.write(3, {"w": torch.ones(300)}, rank=0, size=1)
    assert max(path.stat().st_size for path in tmp_path.iterdir()) < 20_000
    assert one.bytes == 1200


def test_who_reads_a_step_keeps_it_when_its_file_is_replaced(tmp_path: Path) -> None:
    one = MemoryCheckpoint(tmp_path, 0)
    one.write(1, {"w": torch.ones(100_000)}, rank=0, size=1)
    state = files.read(tmp_path, 1, [0])
    for step in (2, 3):
        one.write(step, {"w": torch.zeros(300)}, rank=0, size=1)
    assert float(state.tree["w"].full_tensor().sum()) == 100_000


def test_plain_values_may_grow(tmp_path: Path) -> None:
    one = MemoryCheckpoint(tmp_path, 0)
    for step in range(1, 6):
        one.write(step, {"w": torch.ones(10), "note": "x" * 10**step}, rank=0, size=1)
        assert len(read(tmp_path, step, [0])["note"]) == 10**step


# -- errors ------------------------------------------------------------------------------------------------------------


def test_a_step_that_a_slot_does_not_have_is_an_error_that_names_both(tmp_path: Path) -> None:
    written = write(tmp_path, state_number(6), {"w": torch.zeros(9000)}, [0, 1, 3])
    for rank, one in enumerate(written[:2]):
        one.write(state_number(7), {"w": torch.zeros(9000)}, rank=rank, size=3)
    for step, slot, there in ((7, 3, "step 6"), (6, 2, "nothing")):
        with pytest.raises(CheckpointError) as told:
            files.read(tmp_path, state_number(step), [0, 1, slot])
        assert str(told.value) == (
            f"worker {slot}'s part of the state of step {step} is not in this host's in-memory checkpoint {tmp_path} "
            f"(there is {there} of it); start again, and resume from the newest checkpoint"
        )


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (state_number(7), "step 7"),
        (state_number(8, 2), "update 2 of step 8"),
        (state_number(8, LAST_UPDATE), "step 8"),
        (number_for_joiners(state_number(7)), "step 7, laid out for those who join"),
        (number_at_loop_start(7, committed=state_number(7)), "step 7"),
    ],
)
def test_people_read_of_steps_and_not_of_numbers(number: int, text: str) -> None:
    assert in_words(number) == text


@pytest.mark.parametrize(
    "committed", [state_number(6), state_number(6, LAST_UPDATE), number_for_joiners(state_number(6))]
)
def test_what_a_loop_begins_with_is_kept_beside_what_was_committed_until_the_next_step(
    committed: int, tmp_path: Path
) -> None:
    """Of those who enter one may write while another dies: what they had committed before has to be whole then."""
    mine = files.MemoryCheckpoint(tmp_path, 0)
    for number in (state_number(5), committed, begun := number_at_loop_start(6, committed)):
        mine.write(number, {"w": torch.zeros(9000)}, rank=0, size=1)
    assert files.steps_of(tmp_path, 0) == [committed, begun]
    mine.write(state_number(7), {"w": torch.zeros(9000)}, rank=0, size=1)
    assert files.steps_of(tmp_path, 0) == [begun, state_number(7)]
    assert number_at_loop_start(3, committed) == state_number(3), "an older state was loaded"


def test_slots_that_did_not_make_the_step_together_are_refused(tmp_path: Path) -> None:
    write(tmp_path, state_number(6), {"w": torch.zeros(9000)}, [0, 1, 3])
    expected = "worker 3 kept step 6 as the one of rank 2 among 3, not of rank 0 among 1: worker 3 did not make this"
    with pytest.raises(CheckpointError, match=expected):
        files.read(tmp_path, state_number(6), [3])


def test_elements_that_nobody_kept_are_an_error_with_step_and_slots(tmp_path: Path) -> None:
    def mine(rank: int) -> Tree:
        return {"w": LocalShard.of((100,), torch.float32, [(60 * rank, torch.zeros(40))])}

    write(tmp_path, state_number(2), mine, [0, 4])
    expected = r"of step 2 that workers 0 and 4 kept is not whole: /w has 100 elements, but those from 40 to 60 were"
    with pytest.raises(CheckpointError, match=expected):
        _ = files.read(tmp_path, state_number(2), [0, 4]).tree


def test_a_state_that_is_read_too_late_is_an_error_and_not_another_steps_bytes(tmp_path: Path) -> None:
    one = MemoryCheckpoint(tmp_path, 0)
    one.write(state_number(1), {"w": torch.ones(5000)}, rank=0, size=1)
    stored = files.read(tmp_path, state_number(1), [0]).tree["w"]
    for step in (2, 3):
        one.write(state_number(step), {"w": torch.zeros(5000)}, rank=0, size=1)
    with pytest.raises(CheckpointError, match=r"worker 0's part of the state of step 1 was written over while it was"):
        stored.full_tensor()


def test_a_value_that_no_file_can_hold_is_named_and_costs_no_step(tmp_path: Path) -> None:
    one = MemoryCheckpoint(tmp_path, 0)
    one.write(1, {"w": torch.ones(10), "extra": {"seen": 1}}, rank=0, size=1)
    with pytest.raises(CheckpointError, match="'extra/seen' is a set, which can't be saved without pickle"):
        one.write(2, {"w": torch.ones(10), "extra": {"seen": {1}}}, rank=0, size=1)
    assert steps_of(tmp_path, 0) == [1]


def test_memory_that_is_not_there_is_an_error_and_not_a_bus_error(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    one = MemoryCheckpoint(tmp_path, 0)
    one.write(1, {"w": torch.ones(10)}, rank=0, size=1)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(CheckpointError, match=r"slot-0-1: 4,\d+,\d+ bytes for a worker's state can't be had"):
            one.write(2, {"w": torch.ones(10**6)}, rank=0, size=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert steps_of(tmp_path, 0) == [1]


# -- a worker that is killed -------------------------------------------------------------------------------------------


def writes_for_ever(folder: Path, first: int) -> None:
    one, step = MemoryCheckpoint(folder, 0), first
    while True:
        elements = 200_000 + step // 3 % 2  # sometimes another layout
        one.write(step, {"w": torch.full((elements,), float(step)), "step": step}, rank=0, size=1)
        step += 1


def killed_after(delay_s: float, folder: Path, newest: int) -> None:
    """A process that writes the steps after `newest`, and is killed so long after the first of them."""
    writer = FORKED.Process(target=writes_for_ever, args=(folder, newest + 1))
    writer.start()
    try:
        deadline = time.monotonic() + 20
        # Between two looks the writer may have gone from one file to the other: then there seems to be no step.
        while steps_of(folder, 0)[-1:] in ([], [newest]) and time.monotonic() < deadline:
            time.sleep(0.0005)
        time.sleep(delay_s)
    finally:
        writer.kill()
        writer.join(20)


@pytest.mark.workers
def test_a_writer_that_is_killed_at_any_moment_leaves_a_whole_step(tmp_path: Path) -> None:
    MemoryCheckpoint(tmp_path, 0).write(0, {"w": torch.zeros(200_000), "step": 0}, rank=0, size=1)
    delays, midway, newest = random.Random(5), 0, 0
    for kill in range(40):
        killed_after(delays.uniform(0.0, 0.004), tmp_path, newest)
        steps = steps_of(tmp_path, 0)
        assert steps, f"kill {kill}: no step is left"
        assert steps[-1] > newest
        for step in steps:
            found = read(tmp_path, step, [0])
            assert found["step"] == step
            assert bool((found["w"] == step).all()), f"kill {kill}: step {step} is torn: {found['w'].unique()}"
        midway += len(steps) == 1
        newest = steps[-1]
    assert midway > 0, "some were killed while they wrote"


# -- nothing is left ---------------------------------------------------------------------------------------------------


def held_of(folder: Path) -> tuple[int, int]:
    """Mappings and descriptors of files in a folder, removed ones too."""
    links = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            links.append(os.readlink(descriptor))
    return Path("/proc/self/maps").read_text().count(str(folder)), sum(str(folder) in link for link in links)


def test_a_thousand_writes_hold_two_mappings_and_two_files(tmp_path: Path) -> None:
    one, fresh = MemoryCheckpoint(tmp_path, 0), 0
    tree = {"w": torch.ones(5000), "lr": 0.5}
    for step in range(3):
        one.write(step, tree, rank=0, size=1)
    for step in range(3, 1003):
        if step % 50 == 0:
            fresh += 64
            tree["w"] = torch.ones(5000 + fresh)
        tree["lr"] = 1 / step
        one.write(step, tree, rank=0, size=1)
        if step % 20 == 0:
            assert read(tmp_path, step, [0])["lr"] == 1 / step
    assert held_of(tmp_path) == (2, 2)
    assert sorted(os.listdir(tmp_path)) == ["slot-0-0", "slot-0-1"]
    del one
    assert held_of(tmp_path) == (0, 0)
    assert steps_of(tmp_path, 0) == [1001, 1002]
