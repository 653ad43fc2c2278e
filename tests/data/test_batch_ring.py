"""A batch that came through the loader processes' memory is the batch that was made, and nothing stays behind."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections import namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import DataLoader, Dataset, get_worker_info

from paceline.data import fetching
from paceline.data.batch_ring import SLOT_BYTES, BatchMemory, BatchRing, Packed
from paceline.data.loader import ShardedLoader
from paceline.data.work_source import Assignment
from paceline.errors import DataError

Point = namedtuple("Point", "x y")
MIB = 1 << 20


class Labelled(NamedTuple):
    rows: Tensor
    label: str


@dataclass
class Record:
    rows: Tensor
    names: list[str]


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.arange(int(np.prod(shape))).reshape(shape).to(dtype)


TREES: dict[str, Any] = {
    "tensor": numbers(4, 3),
    "scalar": torch.tensor(7),
    "empty": [torch.empty(0), torch.empty(3, 0, dtype=torch.int64), numbers(2), torch.empty(0)],
    "dtypes": [
        numbers(3, 2, dtype=dtype)
        for dtype in (torch.bool, torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.uint8, torch.int64,
                      torch.uint16, torch.complex64, torch.complex128, torch.float8_e4m3fn)
    ],
    "transposed": numbers(4, 3).T,
    "channels last": numbers(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "every other": numbers(8)[::2],
    "expanded": numbers(5, 1).expand(5, 100),
    "shifted": {"in": numbers(3, 9)[:, :-1], "out": numbers(3, 9)[:, 1:]},
    "large": [numbers(100_000), numbers(70_000, dtype=torch.bfloat16), numbers(3)],
    "nested": {"a": [numbers(2), (numbers(3), {"b": numbers(1, 1)})], 3: (), "c": [], "d": {}, "e": None},
    "namedtuples": [Point(numbers(2), 3.5), Labelled(numbers(4), "four")],
    "dataclass": Record(numbers(3), ["a", "b"]),
    "packed sequence": pack_sequence([numbers(3), numbers(2)]),
    "others": ["a", b"b", 1, 2.5, None, True, {"x"}, 1 << 80, np.arange(6).reshape(2, 3), np.float32(2)],
    "arrays": [
        np.arange(60_000).astype(dtype).reshape(6, 100, 100)
        for dtype in ("f4", "i8", ">i4", "c16", "f2", "M8[ns]", "m8[s]", "O", "i4,f8")
    ],
    "arrays in another way": [np.zeros((900, 80)).T, np.ones(90_000)[::2], np.full(50_000, "ab"), np.zeros((3000, 0)),
                              np.ones(SLOT_BYTES + 1, dtype="u1")],
    "no tensors": {"names": ["a", "b"]},
    "subclass": nn.Parameter(numbers(3), requires_grad=False),
    "with gradient": [numbers(2).requires_grad_(), numbers(3)],
    "sparse": numbers(3, 3).to_sparse(),
    "conjugate": [torch.complex(numbers(3) + i, numbers(3)).conj() for i in range(4)],
    "view of much more": numbers(1000, 10)[5],
    "too large": [numbers(3), torch.ones(SLOT_BYTES // 4)],
}  # fmt: skip
AS_TORCH_SENDS_IT = {"subclass", "with gradient", "sparse", "view of much more", "too large"}


def values(tensor: Tensor) -> Tensor:
    dense = tensor.detach().to_dense()
    return dense.float() if dense.dtype is torch.float8_e4m3fn else dense  # which can't be compared


def same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        alike = (a.dtype, a.shape, a.layout, a.requires_grad) == (b.dtype, b.shape, b.layout, b.requires_grad)
        strides = a.layout is not torch.strided or a.stride() == b.stride()
        return alike and strides and torch.equal(values(a), values(b))
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, PackedSequence | list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return same(vars(a), vars(b)) if isinstance(a, Record) else a == b


@pytest.fixture
def memory() -> Iterator[BatchMemory]:
    memory = BatchMemory(1, prefetch_factor=2)
    yield memory
    memory.close()


def sent(batch: Any) -> Any:
    """Through torch's queue."""
    return ForkingPickler.loads(ForkingPickler.dumps(batch))


# -- what comes out is what went in ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TREES)
def test_a_batch_has_the_values_types_and_strides_that_it_had(name: str, memory: BatchMemory) -> None:
    packed = BatchRing(memory.address, 0).packed(TREES[name])
    assert (packed is TREES[name]) == (name in AS_TORCH_SENDS_IT)
    if isinstance(packed, Packed):
        assert same(sent(packed).batch(), TREES[name])


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch's, of its own queue
@pytest.mark.parametrize("receiver", [False, True])
def test_batches_of_any_kind_in_any_order_come_through_loader_processes(
    receiver: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetching, "WORTH_A_THREAD_S", 0.0 if receiver else 60.0)
    names = list(TREES) * 2
    with_numbers = Made(lambda index: index, samples=len(names))
    loader = sharded(with_numbers, num_workers=2, batch_size=1, collate_fn=lambda samples: TREES[names[samples[0]]])
    wrong = [name for (_, batch), name in zip(loader.items(), names, strict=True) if not same(batch, TREES[name])]
    loader.close()
    assert not wrong


def test_tensors_that_share_memory_go_on_to_share_it(memory: BatchMemory) -> None:
    rows = numbers(3, 9)
    one, same_one, left, right = BatchRing(memory.address, 0).packed([rows, rows, rows[:, :-1], rows[:, 1:]]).batch()
    right[0, 0] = 77
    assert one is same_one
    assert one[0, 1] == left[0, 1] == 77
    assert rows[0, 1] == 1


def test_a_batch_is_made_on_the_cpu_whatever_the_default_device(memory: BatchMemory) -> None:
    packed = BatchRing(memory.address, 0).packed([numbers(3), numbers(100_000), numbers(3, 2).T])
    with torch.device("meta"):
        assert [tensor.device.type for tensor in packed.batch()] == ["cpu"] * 3


def batches_of_another_start(context: str) -> None:
    loader = sharded(Counted(), num_workers=1, batch_size=4, multiprocessing_context=context)
    assert [batch[:, 1].tolist() for _, batch in loader.items()] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert bytes_in(loader) > 0
    loader.close()


@pytest.mark.job
@pytest.mark.parametrize("context", ["spawn", "forkserver"])
def test_processes_started_in_another_way_use_the_memory_too(context: str) -> None:
    """In a process of its own, as the servers that Python starts for this stay."""
    program = f"from {__name__} import *; batches_of_another_start({context!r})"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parents[2], timeout=60)


def test_a_dataset_knows_in_which_loader_process_it_is_batch_after_batch() -> None:
    def number_of_process(_: int) -> int:
        info = get_worker_info()
        assert info is not None
        return info.id

    loader = sharded(Made(number_of_process), num_workers=2, batch_size=4)
    found = [batch.tolist() for _, batch in loader.items()]
    loader.close()
    assert found == [[0] * 4, [1] * 4] * (len(found) // 2)


def test_a_batch_that_cannot_be_pickled_is_told_of_at_once() -> None:
    loader = sharded(Made(int), num_workers=1, batch_size=4, collate_fn=lambda samples: threading.Lock())
    with pytest.raises(
        DataError, match=r"^the batch of the samples 0, 1, 2, 3 can't leave the loader process: TypeErr"
    ):
        list(loader.items())
    loader.close()


# -- nothing is overwritten before it is read --------------------------------------------------------------------------


def filled(index: int) -> Tensor:
    """Which process is slow changes all the time."""
    info = get_worker_info()
    assert info is not None
    if (index // 64 + info.id) % 3 == 0:
        time.sleep(0.0005)
    return torch.full((3000,), index)


def assert_whole(items: Iterator[tuple[Any, Tensor]]) -> int:
    count = 0
    for item, batch in items:
        assert batch.tolist() == [[index] * 3000 for index in item.sample_ids]
        count += 1
    return count


@pytest.mark.parametrize(("processes", "prefetch_factor"), [(1, 1), (2, 1), (2, 2), (2, 5)])
def test_no_batch_is_torn_by_fast_and_slow_processes(
    processes: int, prefetch_factor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_slot_to_spare(monkeypatch)
    options = {"num_workers": processes, "prefetch_factor": prefetch_factor, "persistent_workers": True}
    loader = sharded(Made(filled, samples=400), batch_size=4, **options)
    for stop_after in (100, 3, 17, 100):
        items = loader.items()
        assert assert_whole(pair for pair, _ in zip(items, range(stop_after), strict=False)) == stop_after
        items.close()  # type: ignore[attr-defined]
    loader.close()


def no_slot_to_spare(monkeypatch: pytest.MonkeyPatch) -> None:
    made = BatchMemory.__init__
    monkeypatch.setattr(BatchMemory, "__init__", lambda self, processes, ahead: made(self, processes, ahead - 1))


def read_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """By then a loader process has done all that it was asked for."""
    read = Packed.batch
    monkeypatch.setattr(Packed, "batch", lambda self, **how: time.sleep(0.02) or read(self, **how))  # type: ignore[func-returns-value]


@pytest.mark.parametrize("prefetch_factor", [1, 3])
def test_one_slot_more_than_is_fetched_ahead_is_enough(prefetch_factor: int, monkeypatch: pytest.MonkeyPatch) -> None:
    read_late(monkeypatch)
    no_slot_to_spare(monkeypatch)
    loader = sharded(Made(filled), batch_size=1, num_workers=2, prefetch_factor=prefetch_factor)
    assert assert_whole(loader.items()) == 24
    loader.close()


def test_with_fewer_slots_a_torn_batch_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    read_late(monkeypatch)
    no_slot_to_spare(monkeypatch)
    no_slot_to_spare(monkeypatch)
    loader = sharded(Made(filled), batch_size=1, num_workers=2)
    told = (
        r"slot 0 of the loader processes' memory should hold batch 0 of its process, and holds batch 2: this torch "
        r"\(.*\) asks for more batches ahead than prefetch_factor says; use a tested one, or num_workers=0"
    )
    with pytest.raises(DataError, match=told):
        list(loader.items())
    loader.close()


def test_a_batch_is_gone_when_the_loop_lets_go_of_it(memory: BatchMemory) -> None:
    ring = BatchRing(memory.address, 0)
    gc.disable()
    try:
        tensors = [weakref.ref(tensors_in(ring.packed(TREES[name]).batch())[0]) for name in ("large", "shifted")]
        assert [tensor() for tensor in tensors] == [None, None]
    finally:
        gc.enable()


def test_batches_that_the_loop_keeps_stay_as_they_were() -> None:
    loader = sharded(Made(lambda index: torch.full((40_000,), index), samples=40), batch_size=1, num_workers=2)
    kept = [batch[0, 100:200] for _, batch in loader.items()]
    loader.close()
    assert [set(row.tolist()) for row in kept] == [{index} for index in range(40)]


# -- nothing is left ---------------------------------------------------------------------------------------------------


def traces() -> list[str]:
    """Descriptors and mappings of the memory in this process."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            found.append(os.readlink(entry))
        except OSError:
            continue  # the directory's own
    found += Path("/proc/self/maps").read_text().splitlines()
    return [text for text in found if "paceline-batches" in text]


@pytest.mark.slow
@pytest.mark.parametrize("end", ["closed", "forgotten", "killed"])
@pytest.mark.parametrize("persistent", [False, True])
def test_descriptors_mappings_and_processes_end_with_the_loader(end: str, persistent: bool) -> None:
    gc.collect()
    before = traces()
    loader = sharded(Counted(), num_workers=2, batch_size=1, persistent_workers=persistent)
    items = loader.items()
    next(items)
    assert len(traces()) > len(before)
    assert loader._fetching._watch is not None
    pids = [process.pid for process in loader._fetching._watch.processes]
    if end == "killed":
        os.kill(pids[0], signal.SIGKILL)
        with pytest.raises(DataError, match="killed by SIGKILL"):
            list(items)
    else:
        list(items)
    if end != "forgotten":
        loader.close()
    del loader, items
    gc.collect()
    assert traces() == before
    assert not any(map(psutil.pid_exists, pids))


def bytes_in(loader: ShardedLoader) -> int:
    memory = loader._fetching._memory
    assert memory is not None
    return os.stat(memory.address.path).st_blocks * 512


def test_the_memory_takes_what_its_slots_hold_however_many_batches_come() -> None:
    loader = sharded(
        Made(lambda index: torch.zeros(MIB // 4), 40), num_workers=2, batch_size=1, persistent_workers=True
    )
    for _ in range(3):
        list(loader.items())
    taken = bytes_in(loader)
    loader.close()
    assert 8 * MIB <= taken <= 8 * (MIB + 8192)  # two processes of prefetch_factor + 2 slots


# -- pinned memory -----------------------------------------------------------------------------------------------------


def test_torch_s_pinning_thread_gets_the_batch_in_pinned_memory(
    memory: BatchMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty, asked = torch.empty, []

    def recorded(*shape: Any, pin_memory: bool = False, **options: Any) -> Tensor:
        asked.append(pin_memory)
        return empty(*shape, **options)

    packed = sent(BatchRing(memory.address, 0).packed(TREES["nested"]))
    monkeypatch.setattr(torch, "empty", recorded)
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: self)
    assert same(torch.utils.data._utils.pin_memory.pin_memory(packed), TREES["nested"])
    assert asked == [True] * 3


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["tensor", "dtypes", "transposed", "nested", "namedtuples", "large", "too large"])
def test_batches_are_pinned_however_they_came(name: str) -> None:
    loader = sharded(Made(int), num_workers=2, batch_size=2, pin_memory=True, collate_fn=lambda samples: TREES[name])
    for _, batch in loader.items():
        assert same(batch, TREES[name])
        assert all(tensor.is_pinned() for tensor in tensors_in(batch) if tensor.numel())
    loader.close()


def tensors_in(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    parts = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list | tuple) else ()
    return [tensor for part in parts for tensor in tensors_in(part)]


# -- datasets ----------------------------------------------------------------------------------------------------------


class Made(Dataset[Any]):
    """The sample is what `make` gives for its number."""

    def __init__(self, make: Callable[[int], Any], samples: int = 24) -> None:
        self._make, self._samples = make, samples

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> Any:
        return self._make(index)


class Counted(Dataset[Tensor]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((3,), index)


def sharded(dataset: Any, **options: Any) -> ShardedLoader:
    return ShardedLoader(DataLoader(dataset, **options), Assignment(1, 1, (0,), 0, timeout_s=60.0))
