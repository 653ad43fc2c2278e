"""The operators of an item: their names, the lines they come from, and what went in and out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from paceline.verify.operators import BATCH, OUTSIDE, OperatorTrace, fingerprint, leaves

HERE = Path(__file__).name


def traced(model: nn.Module, x: torch.Tensor, body: Any) -> list[dict[str, Any]]:
    trace = OperatorTrace(dict(model.named_parameters()), {fingerprint(x)})
    trace.begin()
    try:
        body()
    finally:
        trace.end()
    return trace.entries


def test_an_operator_is_told_with_its_line_and_where_its_inputs_come_from() -> None:
    model, x, kept = nn.Linear(4, 2), torch.randn(3, 4), torch.ones(2)
    entries = traced(model, x, lambda: (model(x) * kept).sum())
    by_name = {entry["name"]: entry for entry in entries}
    assert all(entry["line"].startswith(f"{HERE}:") for entry in entries)
    assert [origin for origin, _ in by_name["aten.addmm"]["inputs"]] == ["bias", BATCH, "weight"]
    assert [origin for origin, _ in by_name["aten.mul"]["inputs"]] == ["an operator", OUTSIDE]
    assert by_name["aten.addmm"]["outputs"] == [by_name["aten.mul"]["inputs"][0][1]]
    assert not any(entry["random"] for entry in entries)


def test_drawing_and_its_generator_are_told() -> None:
    x, own = torch.ones(3, 4), torch.Generator().manual_seed(1)
    one, two = traced(nn.Linear(1, 1), x, lambda: (torch.bernoulli(x / 2), torch.bernoulli(x / 2, generator=own)))[1::2]
    assert (one["random"], one["generator"], two["random"], two["generator"]) == (True, False, True, True)


def test_memory_that_was_not_written_yet_has_no_fingerprint() -> None:
    x = torch.ones(3, 4)
    entries = traced(nn.Linear(1, 1), x, lambda: torch.empty(50).bernoulli_(0.5) * 2)
    by_name = {entry["name"]: entry for entry in entries}
    assert by_name["aten.empty"]["outputs"] == []
    assert by_name["aten.bernoulli_"]["inputs"][0][1] == ""
    assert by_name["aten.mul"]["inputs"][0][0] == "an operator"


def test_a_part_of_memory_that_parameters_share_has_its_own_name() -> None:
    flat = torch.arange(6.0)
    model = nn.Module()
    model.first, model.second = nn.Parameter(flat[:4]), nn.Parameter(flat[4:])
    entries = traced(model, torch.ones(1), lambda: (model.second.detach()[1:] + 1, model.first.detach() + 1))
    added = [entry["inputs"][0][0] for entry in entries if entry["name"] == "aten.add"]
    assert added == ["second", "first"]


def test_fingerprints_see_every_bit_dtype_and_shape() -> None:
    x = torch.zeros(2, 3)
    others = [torch.zeros(3, 2), torch.zeros(2, 3, dtype=torch.float64), -x, x + 2**-140, torch.zeros(2, 3).int()]
    assert len({fingerprint(tensor) for tensor in (x, *others)}) == 6
    assert fingerprint(x.t().contiguous().t()) == fingerprint(x)
    assert fingerprint(torch.ones((), dtype=torch.bfloat16)) != fingerprint(torch.ones(()))


def test_a_batch_is_told_leaf_by_leaf() -> None:
    x = torch.ones(2)
    found = dict(leaves({"x": x, "rest": [x, (1, "a", np.arange(3))]}))
    assert list(found) == ["['x']", "['rest'][0]", "['rest'][1][0]", "['rest'][1][1]", "['rest'][1][2]"]
    again = dict(leaves({"x": x, "rest": [x, (1, "b", np.arange(3))]}))
    assert [path for path in found if fingerprint(found[path]) != fingerprint(again[path])] == ["['rest'][1][1]"]
    assert [path for path, _ in leaves(x)] == ["batch"]
