"""Attention's kernels are found from a model's first forward, tried once, and told; nothing else changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend
from torch.utils.checkpoint import checkpoint

from paceline import Engine
from paceline.engine.attention_kernels import AttentionKernels, Call, tried
from paceline.engine.compilation import Compile, CompiledBlocks
from paceline.errors import ReplicaError

CPU = torch.device("cpu")
X = torch.linspace(-1, 1, 2 * 12 * 16).view(2, 12, 16)
SEEN = "flash kernel (2 × 2 × 12 × 8, float32, causal)"
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class Attention(nn.Module):
    def __init__(self, *, mask: bool = False) -> None:
        super().__init__()
        self.inside, self.outside = nn.Linear(16, 48), nn.Linear(16, 16)
        self.mask, self.ran = mask, 0

    def forward(self, x: Tensor) -> Tensor:
        self.ran += 1
        query, key, value = self.inside(x).view(*x.shape[:2], 3, 2, 8).permute(2, 0, 3, 1, 4)
        length = x.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool, device=x.device).tril() if self.mask else None
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=not self.mask)
        return x + self.outside(out.transpose(1, 2).flatten(2))


class Recomputed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Attention()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.block, x, use_reentrant=False)
        return out


@pytest.fixture
def told() -> list[str]:
    return []


def trained(model: nn.Module, told: list[str], items: int = 3, x: Tensor = X) -> AttentionKernels:
    kernels = AttentionKernels([model], CPU, told.append)
    for _ in range(items):
        model(x).sum().backward()
    return kernels


def hooks(model: nn.Module) -> int:
    return len(model._forward_hooks) + len(model._forward_pre_hooks)


def test_a_kernel_is_told_once_and_no_hook_is_left(told: list[str]) -> None:
    model = nn.Sequential(Attention(), Attention())
    trained(model, told)
    assert len(told) == 1, told  # both blocks make the same call
    assert told[0].startswith(f"paceline: attention: {SEEN}, ")
    assert told[0].endswith("the same bits in 10 runs")
    assert hooks(model) == 0


def test_a_forward_without_gradients_counts_for_nothing(told: list[str]) -> None:
    model = Attention()
    kernels = AttentionKernels([model], CPU, told.append)
    with torch.no_grad():
        model(X), model(X)
    assert told == []
    assert hooks(model) == 2
    kernels.close()
    assert hooks(model) == 0


def test_a_model_without_attention_tells_nothing(told: list[str]) -> None:
    model = nn.Linear(16, 16)
    trained(model, told)
    assert told == []
    assert hooks(model) == 0


@pytest.mark.job  # inductor starts a Python
@pytest.mark.beside
@pytest.mark.filterwarnings("ignore")  # of torch's compiler, about itself
def test_attention_in_blocks_that_the_engine_compiles_is_seen(told: list[str]) -> None:
    model = nn.Sequential(Attention(), Attention())
    blocks = CompiledBlocks(Compile(), [model], "a cpu")
    try:
        trained(model, told)
    finally:
        blocks.close()
        torch.compiler.reset()
    assert told
    assert all(SEEN in line for line in told), told


@pytest.mark.filterwarnings("ignore")
def test_code_that_the_script_compiles_is_left_in_one_piece(told: list[str]) -> None:
    model = Attention()
    made: Callable[[Tensor], Tensor] = torch.compile(lambda x: model(x), backend="eager", fullgraph=True)
    kernels = AttentionKernels([model], CPU, told.append)
    try:
        for _ in range(2):
            made(X).sum().backward()
    finally:
        kernels.close()
        torch.compiler.reset()
    assert told == []


def test_activations_are_computed_again_as_often_as_without(told: list[str]) -> None:
    model = Recomputed()
    trained(model, told, items=3)
    assert model.block.ran == 6
    assert len(told) == 1
    assert SEEN in told[0]


def test_the_scripts_random_numbers_stay_where_they_are(told: list[str]) -> None:
    model = Attention()
    before = torch.get_rng_state()
    trained(model, told)
    assert told
    assert torch.equal(torch.get_rng_state(), before)


def test_another_kernel_is_named_with_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU takes its flash kernel with a mask too; here it is slow with one."""
    plain = F.scaled_dot_product_attention

    def slow(*given: Any, attn_mask: Tensor | None, **named: Any) -> Tensor:
        if attn_mask is None:
            return plain(*given, **named)
        query, key, value = given
        for _ in range(20):
            scores = (query @ key.transpose(-1, -2)).softmax(-1) @ value
        return scores

    monkeypatch.setattr(F, "scaled_dot_product_attention", slow)
    shape = (2, 4, 64, 16)
    line = tried(Call(shape, shape, shape, torch.float32, False, mask=((64, 64), torch.bool)), CPU)
    assert line.startswith("math kernel (2 × 4 × 64 × 16, float32), "), line
    assert "flash would take " in line
    assert line.endswith("but takes no mask: leave it out where nothing is padded")


def test_other_bits_end_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = F.scaled_dot_product_attention
    runs = iter(range(1000))
    monkeypatch.setattr(
        F, "scaled_dot_product_attention", lambda *given, **named: plain(*given, **named) + 1e-3 * (next(runs) == 15)
    )
    shape = (2, 2, 12, 8)
    with pytest.raises(
        ReplicaError, match=r"attention kernel gives other bits in every run for 2 × 2 × 12 × 8, float32"
    ):
        tried(Call(shape, shape, shape, torch.float32, True), CPU)


def test_what_cannot_be_tried_is_told_and_ends_nothing() -> None:
    shape = (2, 2, 12, 8)
    line = tried(Call(shape, shape, shape, torch.float32, True, kernel=SDPBackend.CUDNN_ATTENTION), CPU)
    assert line.startswith("kernel for 2 × 2 × 12 × 8, float32, causal not tried: ")


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    monkeypatch.setattr("paceline.engine.group.Group.note", lambda self, text, area="": found.append(text))
    return found


@needs_gpu
@pytest.mark.parametrize(("mask", "kernel"), [(False, "flash"), (True, "memory-efficient")])
def test_on_a_gpu_a_training_tells_which_kernel_it_took(mask: bool, kernel: str, lines: list[str]) -> None:
    with Engine(precision="bf16") as engine:
        model: Any = Attention(mask=mask).to(engine.device)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, loader = engine.prepare(
            model, optimizer, torch.utils.data.DataLoader([X[0]] * 8, batch_size=2)
        )
        for x in loader:
            engine.backward(model(x).float().square().mean())
            optimizer.step()
    told = [line for line in lines if "attention" in line]
    assert len(told) == 1
    assert f"attention: {kernel} kernel (2 × 2 × 12 × 8, bfloat16" in told[0], told
