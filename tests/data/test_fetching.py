"""What a sample is does not depend on who fetches it; and who can't fetch it says at which sample that was."""

from __future__ import annotations

import ctypes
import gc
import itertools
import multiprocessing
import os
import random
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.sharedctypes import RawArray
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset

from paceline import Engine
from paceline.data import fetching
from paceline.data.global_order import Shuffled, scrambled
from paceline.data.loader import ShardedLoader
from paceline.data.sharded_sampler import WorkItem
from paceline.data.work_source import Assignment
from paceline.errors import DataError
from paceline.world.determinism import mix, seed_everything
from paceline.world.lanes import neighbouring_lanes

SEED = 3
SAMPLES = 30


class Samples(Dataset[Any]):
    """The sample is what `make` gives for its number."""

    def __init__(self, make: Callable[[int], Any], samples: int = SAMPLES) -> None:
        self._make, self._samples = make, samples

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> Any:
        return self._make(index)


class FetchesMany(Samples):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self._make(index) for index in indices]


def noisy(index: int) -> Tensor:
    """Draws from all three libraries that people use."""
    return torch.tensor([index, random.random(), np.random.rand(), torch.rand(())], dtype=torch.float64)


def noisy_at_times(index: int) -> Tensor:
    return noisy(index) if index % 7 == 3 else torch.tensor([index, 0, 0, 0], dtype=torch.float64)


def with_one_library(index: int) -> Tensor:
    """Each sample draws from another library."""
    draw: Any = (random.random, np.random.rand, lambda: torch.rand(()))[index % 3]
    return torch.tensor([index, draw()], dtype=torch.float64)


def sharded(
    dataset: Any, *, batch_size: int = 4, lanes: int = 1, accumulate: int = 1, worker: int = 0, workers: int = 1,
    timeout_s: float = 60.0, **options: Any,
) -> ShardedLoader:  # fmt: skip
    own_lanes = neighbouring_lanes(lanes, workers)[worker]
    source = DataLoader(dataset, batch_size=batch_size, shuffle=True, **options)
    return ShardedLoader(source, Assignment(lanes, accumulate, own_lanes, SEED, timeout_s=timeout_s))


def in_epoch(loader: ShardedLoader, epoch: int) -> Iterator[tuple[WorkItem, Any]]:
    loader.restore(loader.state_after(None) | {"epoch": epoch, "position": 0})
    return loader.items()


def by_sample(dataset: Any, epoch: int = 1, *, workers: int = 1, **layout: Any) -> dict[int, list[float]]:
    """What each sample was in this epoch, from all workers together."""
    found = {}
    for worker in range(workers):
        loader = sharded(dataset, worker=worker, workers=workers, **layout)
        for item, batch in in_epoch(loader, epoch):
            if not item.shadow:
                found |= dict(zip(item.sample_ids, batch.tolist(), strict=True))
        loader.close()
    return found


def as_promised(make: Callable[[int], Tensor], epoch: int = 1) -> dict[int, list[float]]:
    """Each sample under the seed of its place in the epoch."""
    found = {}
    for position, sample in enumerate(Shuffled(SAMPLES, SEED, epoch).samples_at(range(SAMPLES))):
        seed_everything(scrambled(mix(SEED, "sample", epoch) + position))
        found[sample] = make(sample).tolist()
    return found


# -- a sample depends on (seed, epoch, position) -----------------------------------------------------------------------


@pytest.mark.parametrize("make", [noisy, noisy_at_times, with_one_library])
@pytest.mark.parametrize(
    "layout",
    [
        {"batch_size": 1},
        {"batch_size": 30},
        {"batch_size": 3, "lanes": 4, "accumulate": 2},
        {"batch_size": 7, "lanes": 3, "workers": 3},
        {"batch_size": 3, "num_workers": 1},
        {"batch_size": 5, "lanes": 2, "accumulate": 3, "num_workers": 2},
    ],
    ids=["singles", "one batch", "lanes", "workers", "loader process", "loader processes"],
)
def test_an_augmented_sample_has_the_values_of_its_place_however_it_is_fetched(
    make: Callable[[int], Tensor], layout: dict[str, int]
) -> None:
    assert by_sample(Samples(make), **layout) == as_promised(make)


@pytest.mark.parametrize("processes", [0, 2])
@pytest.mark.parametrize(
    "dataset", [Subset(Samples(noisy), range(SAMPLES)), FetchesMany(noisy)], ids=["subset", "fetches many"]
)
def test_samples_fetched_many_at_once_have_the_same_values(dataset: Any, processes: int) -> None:
    assert by_sample(dataset, batch_size=4, num_workers=processes) == as_promised(noisy)


def test_values_are_others_in_another_epoch() -> None:
    first, second = (by_sample(Samples(noisy), epoch) for epoch in (0, 1))
    assert not {value for row in first.values() for value in row[1:]} & {v for row in second.values() for v in row[1:]}


class MakesBatches(Samples):
    """Hands a collated batch over, as datasets that read columns do."""

    def __getitems__(self, indices: list[int]) -> Any:
        return torch.stack([noisy(index) for index in indices])


def test_a_dataset_that_makes_whole_batches_draws_the_same_with_any_loader_processes() -> None:
    alone, others = (by_sample(MakesBatches(noisy), collate_fn=as_it_is, num_workers=processes) for processes in (0, 2))
    assert alone == others
    assert len({value for row in alone.values() for value in row[1:]}) == 3 * SAMPLES


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_sample_augmented_on_the_gpu_has_the_values_of_its_place() -> None:
    def on_gpu(index: int) -> Tensor:
        return torch.rand(4, device="cuda") + index

    torch.cuda.init()
    assert by_sample(Samples(on_gpu), batch_size=4) == by_sample(Samples(on_gpu), batch_size=7) == as_promised(on_gpu)


def as_it_is(batch: Any) -> Any:
    return batch


def noisy_collate(samples: list[Tensor]) -> Tensor:
    return torch.stack([torch.tensor([*sample, random.random(), np.random.rand()]) for sample in samples])


@pytest.mark.parametrize("make", [noisy, noisy_at_times])
def test_a_collate_function_that_draws_gives_the_same_with_any_workers_and_loader_processes(
    make: Callable[[int], Tensor],
) -> None:
    layouts: list[dict[str, int]] = [{}, {"workers": 2}, {"num_workers": 2}]
    alone, *others = (
        by_sample(Samples(make), lanes=2, batch_size=3, collate_fn=noisy_collate, **layout) for layout in layouts
    )
    assert all(other == alone for other in others)
    assert len({value for row in alone.values() for value in row[-2:]}) == 2 * SAMPLES


def test_a_generator_made_from_torch_s_seed_is_another_one_in_every_process_and_epoch() -> None:
    seeds = set()
    for worker, epoch in itertools.product(range(2), range(2)):
        loader = sharded(Samples(lambda index: torch.initial_seed()), lanes=2, worker=worker, workers=2, num_workers=2)
        seeds |= {int(seed) for _, batch in in_epoch(loader, epoch) for seed in batch}
        loader.close()
    assert len(seeds) == 8


# -- what a dataset is asked -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("processes", [0, 1, 2])
@pytest.mark.parametrize("kind", [Samples, FetchesMany])
def test_a_dataset_that_does_not_draw_is_fetched_from_once_per_sample(kind: type[Samples], processes: int) -> None:
    calls = RawArray("i", SAMPLES)

    def counted(index: int) -> int:
        calls[index] += 1
        return index

    by_sample(kind(counted), num_workers=processes)
    assert list(calls) == [1] * SAMPLES


def test_a_dataset_that_draws_is_fetched_from_again_only_until_that_is_known() -> None:
    calls = RawArray("i", SAMPLES)

    def counted(index: int) -> Tensor:
        calls[index] += 1
        return noisy(index)

    by_sample(Samples(counted), batch_size=4)
    assert sorted(calls) == [1] * (SAMPLES - 4) + [2] * 4


class KnowsItsEpoch(Samples):
    told: tuple[int, float] = (-1, 0.0)

    def __init__(self) -> None:
        super().__init__(lambda index: (index, *self.told, os.getpid()))

    def set_epoch(self, epoch: int) -> None:
        self.told = epoch, random.random()


@pytest.mark.parametrize(
    "options",
    [{}, {"num_workers": 1}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}],
    ids=["here", "one process", "two processes", "processes that stay"],
)
def test_a_dataset_is_told_its_epoch_wherever_it_lives(options: dict[str, Any]) -> None:
    loader = sharded(KnowsItsEpoch(), **options)
    drawn = set()
    for epoch in (0, 1, 4):
        told = {
            pair for _, (_, epochs, draws, _) in in_epoch(loader, epoch) for pair in zip(epochs, draws, strict=True)
        }
        assert {int(each) for each, _ in told} == {epoch}
        drawn |= {float(draw) for _, draw in told}
    loader.close()
    assert len(drawn) == 3  # what set_epoch draws is the epoch's, not the process's


# -- processes that stay -----------------------------------------------------------------------------------------------


def pids_of(items: Iterator[tuple[WorkItem, Any]]) -> set[int]:
    return {int(pid) for _, batch in items for pid in batch[-1]}


def test_processes_that_stay_are_the_same_over_epochs_and_after_a_loop_that_ended_early() -> None:
    loader = sharded(KnowsItsEpoch(), num_workers=2, persistent_workers=True)
    pids = pids_of(in_epoch(loader, 0))
    early = in_epoch(loader, 1)
    next(early)
    early.close()  # type: ignore[attr-defined]
    assert pids_of(in_epoch(loader, 1)) == pids_of(in_epoch(loader, 2)) == pids
    loader.close()
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_nothing_that_was_on_its_way_to_a_loop_that_ended_early_reaches_the_next() -> None:
    loader = sharded(Samples(noisy), batch_size=3, num_workers=2, persistent_workers=True)
    for epoch, items in itertools.product((0, 1), (0, 1, 4)):
        early = in_epoch(loader, epoch)
        list(itertools.islice(early, items))
        early.close()  # type: ignore[attr-defined]
        found = [(item.sample_ids, batch.tolist()) for item, batch in in_epoch(loader, 1)]
        assert {s: row for ids, rows in found for s, row in zip(ids, rows, strict=True)} == as_promised(noisy)
    loader.close()


def test_a_loop_that_ended_early_goes_on_behind_its_last_step() -> None:
    loader = sharded(Samples(noisy), batch_size=4, num_workers=1, persistent_workers=True)
    early = loader.items()
    for item, _ in itertools.islice(early, 3):
        loader.commit(item)
    early.close()  # type: ignore[attr-defined]
    assert [item.position for item, _ in loader.items()] == [12, 16, 20, 24, 28]
    loader.close()


def test_slow_batches_on_their_way_do_not_count_as_late() -> None:
    slow = Samples(lambda index: time.sleep(0.1) or index, samples=6)
    staying = {"num_workers": 1, "persistent_workers": True, "prefetch_factor": 5}
    loader = sharded(slow, batch_size=1, timeout_s=0.4, **staying)
    early = loader.items()
    next(early)
    early.close()  # type: ignore[attr-defined]
    assert len(list(loader.items())) == 6
    loader.close()


# -- errors in the user's code -----------------------------------------------------------------------------------------


def fails_at_17(index: int) -> int:
    if index == 17:
        raise ValueError("no such picture")
    return index


@pytest.mark.parametrize("processes", [0, 1, 2])
def test_a_sample_that_fails_is_named_with_the_error_and_the_line(processes: int) -> None:
    loader = sharded(Samples(fails_at_17), num_workers=processes)
    with pytest.raises(DataError) as caught:
        list(loader.items())
    loader.close()
    text = str(caught.value)
    assert text.startswith("the dataset failed on sample 17: ValueError: no such picture\n")
    assert 'raise ValueError("no such picture")' in text
    assert "in fails_at_17" in text


@pytest.mark.parametrize("processes", [0, 1])
def test_samples_that_fail_together_are_named_together(processes: int) -> None:
    loader = sharded(FetchesMany(fails_at_17), num_workers=processes)
    with pytest.raises(DataError, match=r"failed on the samples (\d+, )*17(, \d+)*: ValueError: no such") as caught:
        list(loader.items())
    loader.close()
    assert "in fails_at_17" in str(caught.value)


def ragged_collate(samples: list[int]) -> Tensor:
    raise TypeError(f"{len(samples)} samples of different length")


@pytest.mark.parametrize("processes", [0, 1])
def test_a_collate_function_that_fails_is_named_with_the_samples(processes: int) -> None:
    loader = sharded(Samples(lambda index: index), batch_size=10, num_workers=processes, collate_fn=ragged_collate)
    with pytest.raises(DataError) as caught:
        list(loader.items())
    loader.close()
    first = Shuffled(SAMPLES, SEED, 0).samples_at(range(10))
    names = ", ".join(str(sample) for sample in first[:8])
    text = f"collate_fn failed on the samples {names}, … (10 in all): TypeError: 10 samples of different length"
    assert str(caught.value).startswith(text)
    assert "in ragged_collate" in str(caught.value)


class RefusesItsEpoch(Samples):
    def set_epoch(self, epoch: int) -> None:
        raise KeyError(f"no shards for epoch {epoch}")


def test_a_set_epoch_that_fails_is_named() -> None:
    with pytest.raises(DataError, match=r"the dataset's set_epoch\(0\) failed: KeyError: 'no shards for epoch 0'"):
        list(sharded(RefusesItsEpoch(int)).items())


# -- loader processes that die -----------------------------------------------------------------------------------------


def killed_at_17(index: int) -> int:
    if index == 17:
        os.kill(os.getpid(), signal.SIGKILL)
    return index


def segfaults_at_17(index: int) -> int:
    if index == 17:
        ctypes.string_at(0)
    return index


def leaves_at_17(code: int) -> Callable[[int], int]:
    return lambda index: os._exit(code) if index == 17 else index


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize(
    ("make", "how"),
    [
        (killed_at_17, "killed by SIGKILL; the system kills so when memory runs out"),
        (segfaults_at_17, "killed by SIGSEGV"),
        (leaves_at_17(3), "it exited with code 3"),
        (leaves_at_17(0), "it exited with code 0"),  # of which torch's handler of SIGCHLD says nothing
    ],
    ids=["SIGKILL", "SIGSEGV", "exit 3", "exit 0"],
)
def test_a_loader_process_that_dies_is_named_with_its_sample(
    make: Callable[[int], int], how: str, persistent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetching, "LOOK_AFTER_THEM_S", 0.1)
    loader = sharded(Samples(make), num_workers=2, persistent_workers=persistent)
    with pytest.raises(DataError, match=rf"^loader process [01] \(pid \d+\) died at sample 17: {how}"):
        list(loader.items())
    with pytest.raises(DataError, match="died at sample 17"):  # and the next loop has new processes
        list(loader.items())
    loader.close()


def test_a_crash_is_told_with_the_place_in_the_user_s_code() -> None:
    loader = sharded(Samples(segfaults_at_17), num_workers=1)
    with pytest.raises(DataError, match="Segmentation fault") as caught:
        list(loader.items())
    loader.close()
    assert f'File "{__file__}", line {segfaults_at_17.__code__.co_firstlineno + 2} in segfaults_at_17' in str(
        caught.value
    )


@pytest.mark.parametrize(
    ("kind", "collate", "place"),
    [
        (FetchesMany, None, r"at sample \d+ or one of the 3 with it"),
        (Samples, lambda samples: os._exit(3), r"in collate_fn, after sample \d+"),
    ],
    ids=["fetches many", "collate_fn"],
)
def test_a_place_that_is_no_single_sample_is_told_as_it_is(kind: type[Samples], collate: Any, place: str) -> None:
    make = leaves_at_17(3) if collate is None else int
    loader = sharded(kind(make), num_workers=1, collate_fn=collate)
    with pytest.raises(DataError, match=f"died {place}: it exited with code 3"):
        list(loader.items())
    loader.close()


def test_a_process_that_dies_between_batches_is_not_blamed_on_its_last_sample() -> None:
    loader = sharded(KnowsItsEpoch(), num_workers=1, persistent_workers=True)
    (pid,) = pids_of(in_epoch(loader, 0))
    os.kill(pid, signal.SIGKILL)
    for process in multiprocessing.active_children():
        process.join(10)  # one that is still dying when the epoch begins is taken for slow, and replaced
    with pytest.raises(DataError, match=r"died between batches, after sample \d+: killed by SIGKILL"):
        list(in_epoch(loader, 1))
    loader.close()


class DiesAtSample7(Dataset[Tensor]):
    """The next batch ends the process while the loop's body sleeps."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        if index == 7:
            time.sleep(0.4)  # the batch before is handed over
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.ones(4)


def test_a_loader_process_that_dies_while_the_body_runs_is_told_at_the_next_batch() -> None:
    with Engine(lanes=1) as engine:
        model = nn.Linear(4, 1)
        source = DataLoader(DiesAtSample7(), batch_size=4, num_workers=1)
        model, optimizer, loader = engine.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), source)
        with pytest.raises(
            DataError, match=r"^loader process 0 \(pid \d+\) died at sample 7: killed by SIGKILL; the sys"
        ):
            for batch in loader:
                engine.backward(model(batch).mean())
                time.sleep(0.8)  # torch would raise here
                optimizer.step()
                optimizer.zero_grad()
        assert engine.step == 1


def test_torch_still_raises_for_processes_that_are_not_ours() -> None:
    list(sharded(Samples(noisy), num_workers=1).items())
    of_others = iter(DataLoader(DiesAtSample7(), batch_size=4, num_workers=1))
    next(of_others)
    with pytest.raises(RuntimeError, match="is killed by signal: Killed"):
        time.sleep(5)
        next(of_others)


# -- batches taken over while the body runs ----------------------------------------------------------------------------


@pytest.mark.parametrize("persistent", [False, True])
def test_batches_taken_over_while_the_body_runs_are_the_same_in_the_same_order(
    persistent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetching, "WORTH_A_THREAD_S", 0.0)
    loader = sharded(Samples(noisy), batch_size=3, num_workers=2, persistent_workers=persistent)
    for stop_after in (2, 100, 5):
        items = in_epoch(loader, 1)
        found = [(item.position, dict(zip(item.sample_ids, rows.tolist(), strict=True))) for item, rows in items][
            :stop_after
        ]
        assert [position for position, _ in found] == list(range(0, 30, 3))[:stop_after]
        assert all(as_promised(noisy).items() >= rows.items() for _, rows in found)
        items.close()  # type: ignore[attr-defined]
        assert "paceline-batch-receiver" not in {thread.name for thread in threading.enumerate()}
    loader.close()


@pytest.mark.parametrize("make", [fails_at_17, killed_at_17, leaves_at_17(0)], ids=["fails", "killed", "leaves"])
def test_what_goes_wrong_while_the_body_runs_is_told_by_the_loop(
    make: Callable[[int], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetching, "WORTH_A_THREAD_S", 0.0)
    loader = sharded(Samples(make), batch_size=1, num_workers=1)
    order = Shuffled(SAMPLES, SEED, 0).samples_at(range(SAMPLES))
    handed = []
    with pytest.raises(DataError, match=r"(at|on) sample 17"):
        for item, _ in loader.items():
            handed += item.sample_ids
    assert handed == order[: order.index(17)]
    assert "paceline-batch-receiver" not in {thread.name for thread in threading.enumerate()}
    loader.close()


# -- loader processes that hang ----------------------------------------------------------------------------------------


def hangs_at_17(index: int) -> int:
    if index == 17:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(60)
    return index


@pytest.mark.parametrize("persistent", [False, True])
def test_a_loader_process_that_hangs_is_named_with_its_sample_and_leaves_nothing(
    persistent: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.1)  # torch's patience at the end
    before = in_shared_memory()
    loader = sharded(Samples(hangs_at_17), num_workers=2, persistent_workers=persistent, timeout_s=0.5)
    text = (
        r"the loader processes gave no batch for 0\.5 s: process 0 is (.*), process 1 is (.*); where that is no error"
    )
    with pytest.raises(DataError, match=text) as caught:
        list(loader.items())
    assert "at sample 17" in str(caught.value)
    assert not loader_processes()  # the error is still at hand, and so are its frames
    loader.close()
    assert not list(tmp_path.iterdir())
    assert in_shared_memory() == before


def loader_processes() -> list[psutil.Process]:
    """Children of this process, but for those by which other tests fork their workers."""
    found = psutil.Process().children(recursive=True)
    return [child for child in found if not {"forkserver", "resource_tracker"} & set(words_of(child))]


def words_of(process: psutil.Process) -> list[str]:
    try:
        return re.findall(r"\w+", " ".join(process.cmdline()))
    except psutil.NoSuchProcess:
        return []


def in_shared_memory() -> list[str]:
    """What this process and its children have left there under a name."""
    mine = {f"_{os.getpid()}_", f"-{os.getpid()}-"}
    return sorted(name for name in os.listdir("/dev/shm") if any(part in name for part in mine))


def test_a_loop_left_by_an_error_leaves_no_process_while_the_error_is_at_hand() -> None:
    loader = sharded(Samples(noisy), num_workers=2)
    items = loader.items()
    next(items)
    try:
        try:
            raise ZeroDivisionError  # in the loop's body
        finally:
            items.close()  # type: ignore[attr-defined]
    except ZeroDivisionError:
        assert sys.exc_info()[2] is not None
        assert not loader_processes()
    loader.close()


def test_a_loader_that_is_forgotten_leaves_no_descriptor() -> None:
    list(sharded(Samples(noisy), num_workers=1).items())  # what the first one opens for good is open now
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    list(sharded(Samples(noisy), num_workers=1).items())
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def test_worker_init_fn_sees_the_dataset_that_the_user_gave() -> None:
    def shift(_: int) -> None:
        info = torch.utils.data.get_worker_info()
        assert info is not None
        info.dataset.shift = 100

    handed = [batch for _, batch in sharded(Shifted(), num_workers=1, worker_init_fn=shift, collate_fn=list).items()]
    assert sorted(number for batch in handed for number in batch) == list(range(100, 130))


class Shifted(Dataset[int]):
    shift = 0

    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> int:
        return index + self.shift
