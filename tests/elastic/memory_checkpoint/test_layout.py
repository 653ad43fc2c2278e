"""What a worker keeps of a state is decided anew exactly when the state has another form."""

from __future__ import annotations

from typing import Any

import torch

from paceline.elastic.memory_checkpoint.layout import FlatTree, Layout
from paceline.sharding.local_shard import LocalShard


def test_the_form_of_a_tree_tells_apart_what_needs_another_layout() -> None:
    one, two = torch.zeros(3), torch.zeros(3)
    trees: list[Any] = [
        {"a": one, "b": two},
        {"a": one, "b": one},
        {"a": one, "c": two},
        {"a": one, "b": two.double()},
        {"a": one, "b": torch.zeros(4)},
        {"a": one, "b": [two]},
        {"a": one, "b": (two,)},
        {"a": one, "b": LocalShard.of((9,), torch.float32, [(0, two)])},
        {"a": one, "b": LocalShard.of((9,), torch.float32, [(3, two)])},
        {"a": one, "b": {}},
        {"a": one, "b": 1},
    ]
    forms = [FlatTree.of(tree).form for tree in trees]
    assert [forms.index(form) for form in forms] == list(range(len(trees)))
    assert FlatTree.of({"a": one, "b": 2}).form == forms[-1]
    assert FlatTree.of({"a": torch.ones(3), "b": torch.ones(3)}).form == forms[0]


def test_shares_of_all_workers_are_the_whole_tensor_once() -> None:
    tree = {"w": torch.zeros(100_003)}
    found = FlatTree.of(tree)
    for size in (1, 2, 3, 7, 50):
        parts = [Layout(tree, found, slot=rank, rank=rank, size=size).parts[0] for rank in range(size)]
        ends = [end for part in parts for end in (part.start, part.stop)]
        assert ends[::2] == [0, *ends[1:-1:2]]
        assert ends[-1] == 100_003
        assert all(part.start % 64 == 0 for part in parts)


def test_memory_is_looked_up_once_and_followed_when_it_moves() -> None:
    parameter = torch.nn.Parameter(torch.zeros(5000))
    found = FlatTree.of({"w": parameter})
    layout = Layout({"w": parameter}, found, slot=0, rank=1, size=2)
    (first,) = layout.sources(found.leaves)
    assert layout.sources([parameter.detach()])[0] is first
    parameter.data = torch.ones(5000)
    (moved,) = layout.sources(found.leaves)
    assert (moved.numel(), float(moved.sum())) == (2504, 2504.0)
