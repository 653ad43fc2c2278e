"""Attention over a group is attention of one process: values, gradients, and the same bits on every backend."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import paceline.context_parallel.group_attention as under_test
from paceline import World
from paceline.context_parallel import SequenceSplit, attention
from tests.collectives.shared_memory.ranks import torch_distributed
from tests.workers import Result, run_workers

CASES = 12


def values_of(results: list[Result]) -> list[Any]:
    for result in results:
        assert result.error is None, result.traceback
    return [result.value for result in results]


def random_case(number: int, size: int) -> dict[str, Any]:
    chance = random.Random(number)
    kv_heads = chance.choice((1, 2, 3))
    return {
        "batch": chance.randint(1, 3),
        "kv_heads": kv_heads,
        "heads": kv_heads * chance.choice((1, 1, 2, 4)),
        "length": 2 * size * chance.randint(1, 9),
        "width": chance.choice((4, 8, 16)),
        "value_width": chance.choice((None, 6)),
        "causal": chance.random() < 0.7,
        "scale": chance.choice((None, 0.3)),
        "seed": number,
    }


def tensors(case: dict[str, Any], dtype: torch.dtype) -> list[Tensor]:
    """Queries, keys, values, and the gradient of what comes out."""
    generator = torch.Generator().manual_seed(case["seed"])
    value_width = case["value_width"] or case["width"]
    shapes = ((case["heads"], case["width"]), (case["kv_heads"], case["width"]), (case["kv_heads"], value_width))
    made = [(case["batch"], heads, case["length"], width) for heads, width in (*shapes, (case["heads"], value_width))]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in made]


def of_one_process(case: dict[str, Any], given: list[Tensor]) -> list[Tensor]:
    *leaves, gradient = [tensor.double() for tensor in given]
    leaves = [leaf.requires_grad_() for leaf in leaves]
    grouped = case["heads"] != case["kv_heads"]
    out = F.scaled_dot_product_attention(*leaves, is_causal=case["causal"], scale=case["scale"], enable_gqa=grouped)
    return [out.detach(), *torch.autograd.grad(out, leaves, gradient)]


def over_the_group(case: dict[str, Any], given: list[Tensor], split: SequenceSplit) -> list[Tensor]:
    *leaves, gradient = [split.take(tensor, -2) for tensor in given]
    leaves = [leaf.clone().requires_grad_() for leaf in leaves]
    out = attention(*leaves, group=None, split=split, causal=case["causal"], scale=case["scale"])
    return [out.detach(), *torch.autograd.grad(out, leaves, gradient)]


def compares(world: World, *, backend: str, dtype: torch.dtype, mutation: str = "") -> tuple[float, str]:
    """The largest relative error of outputs and gradients in all cases, and a hash of their bits."""
    if mutation:
        setattr(under_test, *MUTATIONS[mutation])
    worst, bits = 0.0, hashlib.sha256()
    with torch_distributed(world, backend=backend):
        split = SequenceSplit(world.size, world.rank)
        for number in range(CASES):
            case = random_case(number, world.size)
            given = tensors(case, dtype)
            expected = of_one_process(case, given)
            for found, whole in zip(over_the_group(case, given, split), expected, strict=True):
                assert found.dtype == dtype
                error = (found.double() - split.take(whole, -2)).abs().max() / whole.abs().max()
                worst = max(worst, float(error))
                bits.update(found.contiguous().view(torch.uint8).numpy().tobytes())
    return worst, bits.hexdigest()


def own_part_alone(outgoing: Tensor, size: int, group: Any) -> Tensor:
    return outgoing.chunk(size)[dist.get_rank(group)].clone()


def all_see_all(query: Tensor, key: Tensor, value: Tensor, *, causal: bool, scale: float | None) -> Tensor:
    return plain(query, key, value, causal=False, scale=scale)


plain = under_test._plain
MUTATIONS: dict[str, tuple[str, Any]] = {
    "no reduce-scatter": ("sum_by_rank", own_part_alone),
    "no causal mask": ("_plain", all_see_all),
}


@pytest.mark.workers
@pytest.mark.parametrize("backend", ["paceline", "gloo"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_values_and_gradients_are_those_of_one_process(size: int, backend: str) -> None:
    found = values_of(run_workers(compares, size, backend=backend, dtype=torch.float32))
    assert max(error for error, _ in found) < 1e-5


@pytest.mark.workers
def test_bfloat16_is_as_near_as_bfloat16_can_be() -> None:
    found = values_of(run_workers(compares, 2, backend="paceline", dtype=torch.bfloat16))
    assert max(error for error, _ in found) < 3e-2


@pytest.mark.workers
def test_bits_are_the_same_in_every_run_and_on_every_backend() -> None:
    runs = [
        values_of(run_workers(compares, 4, backend=one, dtype=torch.float32)) for one in ("paceline", "gloo", "gloo")
    ]
    assert runs[0] == runs[1] == runs[2]


@pytest.mark.workers
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_the_comparison_fails_without(mutation: str) -> None:
    found = values_of(run_workers(compares, 2, backend="paceline", dtype=torch.float32, mutation=mutation))
    assert min(error for error, _ in found) > 0.05


def refuses(world: World) -> str:
    with torch_distributed(world):
        query, key = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 6, 8)
        try:
            attention(query, key, key, group=None, split=SequenceSplit(2, world.rank), causal=True)
        except Exception as error:
            return str(error)
    return ""


@pytest.mark.workers
def test_attention_to_another_sequence_is_refused() -> None:
    for text in values_of(run_workers(refuses, 2)):
        assert "attention of 4 queries to 6 keys" in text


def under_autocast(world: World) -> tuple[str, float]:
    with torch_distributed(world):
        split = SequenceSplit(2, world.rank)
        query, key, value, _ = tensors(random_case(3, 2) | {"causal": True}, torch.float32)
        with torch.autocast("cpu", torch.bfloat16):
            parts = [split.take(one, -2).requires_grad_() for one in (query, key, value.bfloat16())]
            out = attention(*parts, group=None, split=split, causal=True)
            whole = F.scaled_dot_product_attention(query, key, value.bfloat16(), is_causal=True, enable_gqa=True)
        out.sum().backward()
        assert [one.grad.dtype for one in parts if one.grad is not None] == [torch.float32] * 2 + [torch.bfloat16]
        return str(out.dtype), float((out - split.take(whole, -2)).abs().max())


@pytest.mark.workers
def test_autocast_does_what_it_does_to_attention() -> None:
    for dtype, error in values_of(run_workers(under_autocast, 2)):
        assert dtype == "torch.bfloat16"
        assert error < 2e-2


@pytest.mark.unit
def test_the_mask_of_an_accelerator_is_causal_and_its_memory_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    query, key = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 12, 8)
    torch.use_deterministic_algorithms(True)
    try:
        mask = under_test._lower_right(4, 12)
        out = F.scaled_dot_product_attention(query, key, key, attn_mask=mask)
    finally:
        torch.use_deterministic_algorithms(False)
    filled = mask.as_subclass(Tensor).isnan()
    assert not filled.all(), "deterministic algorithms have filled a mask that nothing reads"
    assert torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.testing.assert_close(out, plain(query, key, key, causal=True, scale=None))
