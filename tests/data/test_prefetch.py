"""Batches reach the device in order and unchanged, ahead of use where that helps."""

from __future__ import annotations

from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from paceline.data.fetching import Prefetch, to_device
from paceline.data.global_order import Sequential
from paceline.data.sharded_sampler import BatchPlan, WorkItem, work_items
from paceline.errors import DataError

CPU = torch.device("cpu")
META = torch.device("meta")  # a device that every machine has, to see what is moved
CUDA = torch.device("cuda", 0)
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class Items:
    """Work items with tensors of their number; remembers how many were asked for, and that it was closed."""

    def __init__(self, count: int, *, fails_at: int = -1, elements: int = 4) -> None:
        self.plan = BatchPlan(count, batch_size=1, lanes=1, accumulate=1)
        self.fails_at, self.elements = fails_at, elements
        self.asked = 0
        self.closed = False

    def __call__(self) -> Iterator[tuple[WorkItem, Any]]:
        try:
            for item in work_items(self.plan, Sequential(self.plan.samples), (0,), epoch=0, first_step=0):
                self.asked += 1
                if item.step == self.fails_at:
                    raise DataError(f"no sample {item.step}")
                yield item, {"numbers": torch.full((self.elements,), float(item.step)), "name": f"batch {item.step}"}
        finally:
            self.closed = True


# -- on the CPU --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ahead", [False, True])
def test_on_the_cpu_items_pass_through_as_they_are_and_nothing_is_asked_for_ahead(ahead: bool) -> None:
    items = Items(3)
    given = list(items())
    items.asked = 0
    prefetch = Prefetch(iter(given), CPU, ahead=ahead)
    assert [pair == (item, batch) for pair, (item, batch) in zip(prefetch, given, strict=True)] == [True] * 3
    counted = Prefetch(items(), CPU, ahead=ahead)
    next(counted)
    assert items.asked == 1


def test_closing_closes_what_the_items_come_from() -> None:
    items = Items(3)
    prefetch = Prefetch(items(), CPU, ahead=False)
    next(prefetch)
    assert not items.closed
    prefetch.close()
    assert items.closed


def test_a_plain_iterator_can_be_closed_too() -> None:
    Prefetch(iter([]), CPU, ahead=False).close()


# -- what is moved -----------------------------------------------------------------------------------------------------

Point = namedtuple("Point", ["x", "y"])


class Encoding(UserDict[str, Any]):
    """As transformers' BatchEncoding: a mapping that is no dict, with more than its items, and moves itself."""

    def __init__(self, data: dict[str, Any], encodings: str) -> None:
        super().__init__(data)
        self.encodings = encodings

    def to(self, device: torch.device) -> Encoding:
        return Encoding({key: value.to(device) for key, value in self.data.items()}, self.encodings)


class Described(OrderedDict[str, Any]):
    note = ""


class Graph:
    """As graph libraries have it: no container that anybody could look into."""

    def __init__(self, nodes: Tensor) -> None:
        self.nodes = nodes

    def to(self, device: torch.device, non_blocking: bool) -> Graph:
        return Graph(self.nodes.to(device, non_blocking=non_blocking))


def test_tensors_are_moved_wherever_they_are_in_a_batch() -> None:
    batch = {"a": [torch.ones(2), (torch.ones(3), "text")], "b": Point(torch.ones(1), 7), "c": None}
    moved = to_device(batch, META)
    (first, (second, text)), point = moved["a"], moved["b"]
    assert [t.device for t in (first, second, point.x)] == [META] * 3
    assert (text, type(point), point.y, moved["c"]) == ("text", Point, 7, None)


def test_a_mapping_of_the_user_s_own_type_keeps_its_type_and_attributes() -> None:
    batch = Described(ids=torch.ones(2))
    batch.note = "from here"
    moved = to_device(batch, META)
    assert (type(moved), moved.note, moved["ids"].device) == (Described, "from here", META)
    assert batch["ids"].device == CPU


def test_a_batch_that_can_move_itself_is_asked_to() -> None:
    encoding = to_device(Encoding({"ids": torch.ones(2)}, "kept"), META)
    assert (encoding["ids"].device, encoding.encodings) == (META, "kept")
    packed: PackedSequence = to_device(pack_sequence([torch.ones(3), torch.ones(2)]), META)
    assert (packed.data.device, packed.batch_sizes.device) == (META, CPU)
    assert to_device(Graph(torch.ones(2)), META).nodes.device == META


# -- on a GPU ----------------------------------------------------------------------------------------------------------


@needs_cuda
def test_the_next_batch_is_copied_while_this_one_is_used_and_all_arrive_in_order() -> None:
    items = Items(5)
    prefetch = Prefetch(items(), CUDA, ahead=True)
    for number, (item, batch) in enumerate(prefetch):
        assert (item.step, batch["name"]) == (number, f"batch {number}")
        assert batch["numbers"].device == CUDA
        assert batch["numbers"].tolist() == [number] * 4
        assert items.asked == min(number + 2, 5)
    assert items.closed


@needs_cuda
def test_without_loader_processes_nothing_is_asked_for_ahead() -> None:
    items = Items(3)
    _, batch = next(Prefetch(items(), CUDA, ahead=False))
    assert (batch["numbers"].device, items.asked) == (CUDA, 1)


@needs_cuda
def test_a_failure_ahead_comes_when_its_batch_is_due() -> None:
    prefetch = Prefetch(Items(3, fails_at=1)(), CUDA, ahead=True)
    assert next(prefetch)[0].step == 0
    with pytest.raises(DataError, match="no sample 1"):
        next(prefetch)
    assert list(prefetch) == []


@needs_cuda
def test_memory_of_a_batch_is_not_given_away_while_the_loop_s_work_on_it_is_queued() -> None:
    slow = torch.randn(4096, 4096, device=CUDA)
    sums = []
    for _, batch in Prefetch(Items(30, elements=1 << 22)(), CUDA, ahead=True):
        for _ in range(4):
            slow = torch.tanh(slow @ slow)  # the sum below is still queued when the batch's name is gone
        sums.append(batch["numbers"].double().sum())
        del batch
    assert [int(total) for total in torch.stack(sums).tolist()] == [number << 22 for number in range(30)]


@needs_cuda
@pytest.mark.parametrize("wrap", [lambda t: Encoding({"ids": t}, ""), Graph, lambda t: pack_sequence([t, t])])
def test_objects_that_move_themselves_arrive_too(wrap: Any) -> None:
    pairs = [(item, wrap(batch["numbers"])) for item, batch in Items(3)()]
    for (_, given), (_, moved) in zip(pairs, Prefetch(iter(pairs), CUDA, ahead=True), strict=True):
        before, after = (next(t for t in _tensors(each)) for each in (given, moved))
        assert (after.device, after.tolist()) == (CUDA, before.tolist())


def _tensors(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Graph):
        yield batch.nodes
    elif isinstance(batch, Encoding):
        yield from batch.values()
    else:
        yield batch.data
