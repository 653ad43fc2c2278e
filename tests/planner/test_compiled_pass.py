"""A pass as torch.compile runs it: the products and gradients of the eager one, and no byte between them twice."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from paceline.engine.activation_checkpointing import blocks_of
from paceline.engine.causal_masks import CausalMasks
from paceline.errors import ConfigError
from paceline.planner.compiled_pass import FusedGraph, Kernel, compiling, steps_of
from paceline.planner.hardware import hardware_named
from paceline.planner.model_profile import PassProfile, Variant, new_fake_mode
from paceline.planner.model_source import Source, profile_source, source_of
from paceline.planner.profile_file import from_json, to_json
from paceline.planner.search import Request, search
from paceline.torch_compat import partitioned
from tests.planner.random_models import Block, loss_of, random_model

F32 = 4


def both(build: Callable[[], Any], precision: str = "fp32", **options: Any) -> tuple[PassProfile, PassProfile]:
    """A pass as it is, and compiled."""
    profile = profile_source(
        Source("one", build),
        lambda n: [Variant(n, precision, compiled=compiled) for compiled in (False, True)],
        blocks=lambda module: list(blocks_of(module)), fused_attention=True, **options,
    )  # fmt: skip
    eager, compiled = profile.passes.values()
    return eager, compiled


def graphs_of(function: Callable[..., Any], *inputs: Tensor) -> list[fx.Graph]:
    """Forward's and backward's."""
    found: list[fx.Graph] = []

    def keep(graph: fx.GraphModule) -> FusedGraph:
        found.append(graph.graph)
        return FusedGraph(graph)

    mode = new_fake_mode()
    out = partitioned(function, keep)(*(mode.from_tensor(one) for one in inputs))
    with mode:
        out.sum().backward()
    return found


def kernels_of(graph: fx.Graph) -> list[Kernel]:
    return [step for step in steps_of(graph) if isinstance(step, Kernel)]


@pytest.mark.parametrize("seed", range(12))
def test_a_compiled_pass_has_the_products_and_gradients_of_the_eager_one(seed: int) -> None:
    eager, compiled = both(lambda: (*random_model(seed), loss_of))
    assert compiled.flops == eager.flops
    assert set(compiled.order) == set(eager.order)
    assert compiled.used == eager.used
    assert compiled.saved_bytes <= eager.saved_bytes
    assert compiled.peak_bytes >= compiled.saved_bytes


def test_a_chain_between_two_products_is_read_once_and_written_once() -> None:
    rows, width = 64, 32

    def chain(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        made = x @ first
        return (torch.tanh(made) * torch.sigmoid(made) + 1.0) @ second

    weights = (torch.randn(width, width, requires_grad=True) for _ in range(2))
    forward, _ = graphs_of(chain, torch.randn(rows, width), *weights)
    (kernel,) = kernels_of(forward)
    assert kernel.moved_bytes == 2 * F32 * rows * width


def test_a_norm_is_one_kernel_forward_and_its_weights_gradient_another_one_backward() -> None:
    rows, width = 4096, 256

    def normed(x: Tensor, weight: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight

    inputs = torch.randn(rows, width, requires_grad=True), torch.randn(width, requires_grad=True)
    forward, backward = (kernels_of(graph) for graph in graphs_of(normed, *inputs))
    tensor, little = F32 * rows * width, F32 * (3 * rows + 3 * width)
    assert [kernel.moved_bytes for kernel in forward] == [pytest.approx(2 * tensor, abs=little)]
    moved = sorted(kernel.moved_bytes for kernel in backward)  # x and the gradient are read by both, one is written
    assert moved == [pytest.approx(2 * tensor, abs=little), pytest.approx(3 * tensor, abs=little)]


def test_logits_are_read_once_forward_and_once_backward_and_never_held_in_fp32() -> None:
    rows, words = 512, 1000

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits.float(), labels)

    inputs = torch.randn(rows, words, dtype=torch.bfloat16, requires_grad=True), torch.zeros(rows, dtype=torch.long)
    forward, backward = (kernels_of(graph) for graph in graphs_of(loss, *inputs))
    logits = 2 * rows * words
    assert sum(kernel.moved_bytes for kernel in forward) < 1.1 * logits
    assert sum(kernel.moved_bytes for kernel in backward) < 2.1 * logits  # read, and their gradient written


def test_kernels_come_after_what_they_need_whatever_the_model() -> None:
    model = Block(32, 2)
    for graph in graphs_of(lambda x: model(x), torch.randn(4, 16, 32, requires_grad=True)):
        there = {node for node in graph.nodes if node.op in ("placeholder", "get_attr")}
        for step in steps_of(graph):
            needed = step.read if isinstance(step, Kernel) else step.all_input_nodes
            assert there.issuperset(needed)
            there |= set(step.made) if isinstance(step, Kernel) else {step}


def blocks() -> Any:
    model = nn.Sequential(*(Block(64, 2) for _ in range(3)))
    return model, (torch.randn(8, 32, 64), torch.randn(8, 32, 64)), loss_of


def test_compiled_blocks_move_less_and_start_fewer_kernels() -> None:
    eager, compiled = both(blocks, "bf16")
    assert compiled.saved_bytes <= eager.saved_bytes
    assert compiled.moved_bytes < eager.moved_bytes
    counts = [sum(sum(work.values()) for work in one.work) for one in (eager, compiled)]
    assert counts[1] < counts[0]


def test_blocks_may_be_compiled_and_made_again() -> None:
    variants = [Variant(8, recomputed=again, compiled=True) for again in (False, True)]
    found = profile_source(Source("one", blocks), lambda n: variants, blocks=lambda module: list(module))
    plain, again = found.passes.values()
    assert again.saved_bytes < plain.saved_bytes / 2
    assert again.flops > plain.flops
    assert from_json(to_json(found)) == found


def test_the_model_gets_its_forward_back() -> None:
    model = Block(8, 1)
    with compiling([model], []):
        assert "forward" in model.__dict__
    assert "forward" not in model.__dict__


def test_a_block_that_torch_can_t_trace_is_named() -> None:
    class Looks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if x.sum().item() > 0 else 2 * x

    def build() -> Any:
        return nn.Sequential(nn.Linear(4, 4), Looks(), Looks()), (torch.randn(4, 4), torch.randn(4, 4)), loss_of

    with pytest.raises(ConfigError, match=r"--compile: Looks can't be traced .*; leave --compile out$"):
        profile_source(
            Source("looks", build), lambda n: [Variant(n, compiled=True)], blocks=lambda m: list(blocks_of(m))
        )


# -- on an H200 --------------------------------------------------------------------------------------------------------

MEASURED = {  # docs/concepts/gpu.md and benchmarks/results/gpu_step.json: tokens/s and GiB, exact, torch 2.11
    ("134m", False): (287_100, 26.83),
    ("134m", True): (530_100, 15.25),
    ("1.26b", False): (44_900, 54.29),
    ("1.26b", True): (61_400, 41.11),
}
SHAPES = {  # batch, sequence, and the model's, as in benchmarks/gpu_step.py
    "134m": (32, 1024, {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12}, 12),
    "1.26b": (8, 2048, {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22}, 32),
}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("model", list(SHAPES))
def test_a_llama_on_an_h200_is_within_15_percent_of_its_tokens_and_10_of_its_peak(
    model: str, compiled: bool, tmp_path: Any
) -> None:
    transformers = pytest.importorskip("transformers")
    batch, sequence, shape, heads = SHAPES[model]
    config = transformers.LlamaConfig(
        vocab_size=32_000,
        max_position_embeddings=sequence,
        tie_word_embeddings=False,
        num_attention_heads=heads,
        **shape,
    )
    config.save_pretrained(tmp_path)
    profile = profile_source(
        source_of(str(tmp_path), batch_size=batch, sequence=sequence),
        lambda n: [Variant(n, "bf16", compiled=compiled)],
        blocks=lambda module: list(blocks_of(module)),
        fused_attention=True, around=lambda module: closing(CausalMasks([module])),
    )  # fmt: skip
    request = Request(strategies=("ddp",), precisions=("bf16",), checkpointing=(False,), compiled=(compiled,))
    best = search(profile, hardware_named("H200"), request).best
    tokens, peak = MEASURED[model, compiled]
    assert best.samples_per_s * sequence == pytest.approx(tokens, rel=0.15)
    assert best.memory.peak / 2**30 == pytest.approx(peak, rel=0.10)
