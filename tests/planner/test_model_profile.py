"""A pass on fake tensors is the pass on real ones: operators, saved bytes, the order of gradients, the peak."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from paceline.planner.gpu_attention import fused
from paceline.planner.model_profile import (
    NotTraceableError,
    PassProfile,
    PassRecorder,
    Variant,
    explained,
    new_fake_mode,
    recomputing,
    resized,
    samples_in,
)
from paceline.planner.model_source import Source, profile_source
from paceline.planner.profile_file import from_json, to_json
from tests.planner.random_models import Block, loss_of, random_model

Loss = Callable[[nn.Module, Any], Tensor]


def recorded(model: nn.Module, batch: Any, loss: Loss = loss_of, *, fake: bool) -> PassProfile:
    trained = [p for p in model.parameters() if p.requires_grad]
    with PassRecorder([model], trained, new_fake_mode() if fake else None) as recorder:
        return recorder.backward(loss(model, recorder.took(batch)), samples_in(batch))


def saved_for_real(model: nn.Module, batch: Any) -> int:
    """Counted in the plainest way: every storage that autograd keeps, without parameters, buffers and the batch."""
    known = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers(), *batch)}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = loss_of(model, batch)  # alive: otherwise memory would be used again, and count once
    total = sum(kept.values())
    del loss
    return total


@pytest.mark.parametrize("seed", range(12))
def test_fake_and_real_passes_of_random_models_are_the_same(seed: int) -> None:
    model, batch = random_model(seed)
    real, fake = recorded(model, batch, fake=False), recorded(model, batch, fake=True)
    assert fake == real


@pytest.mark.parametrize("seed", range(12))
def test_predicted_activations_are_the_bytes_that_autograd_saves(seed: int) -> None:
    model, batch = random_model(seed)
    assert recorded(model, batch, fake=True).saved_bytes == saved_for_real(model, batch)


@pytest.mark.parametrize("seed", range(12))
def test_gradients_come_while_activations_go(seed: int) -> None:
    """The worst moment has at least the worse of the two, and at most both."""
    model, batch = random_model(seed)
    found, elements = recorded(model, batch, fake=True), [p.numel() for p in model.parameters() if p.requires_grad]
    gradients = 4 * sum(elements)
    worst = found.worst_moment(gradients, elements)
    assert max(found.peak_bytes, gradients) <= worst <= found.peak_bytes + gradients
    assert found.worst_moment(0, elements) == found.peak_bytes


def test_the_last_layers_gradient_is_not_there_when_its_own_activations_are() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    found = recorded(model, (torch.randn(1000, 8), torch.randn(1000, 8)), fake=True)
    gradients = 4 * (2 * 72)
    assert found.peak_bytes <= found.worst_moment(gradients, [64, 8, 64, 8]) < found.peak_bytes + gradients


def test_products_are_counted_by_their_textbook_formula() -> None:
    model, batch = nn.Linear(16, 32), (torch.randn(5, 16), torch.randn(5, 32))
    found = recorded(model, batch, fake=True)
    assert found.flops == 2 * (2 * 5 * 16 * 32)  # forward, and the weight's gradient: the input needs none
    assert set(found.order) == {0, 1}
    assert found.saved_bytes == 5 * 32 * 4  # of the loss, which keeps the output; the input is the batch


def test_attention_keeps_no_square_of_scores_and_half_of_it_is_computed_where_it_is_causal() -> None:
    rows, heads, length, width = 2, 2, 64, 8
    shape = (rows, heads, length, width)

    class Mixes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v = (nn.Parameter(torch.randn(shape)) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(self.q * x, self.k, self.v, is_causal=True)

    found = recorded(Mixes(), (torch.randn(1), torch.randn(shape)), fake=True)
    products = 4 * rows * heads * length * length * width / 2
    assert found.flops == products + 2.5 * products
    assert found.saved_bytes < rows * heads * length * length * 4


def test_attention_as_a_gpu_has_it_keeps_no_scores_even_with_dropout() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        x = model(batch[0]).unflatten(-1, (4, 4)).transpose(1, 2)
        return F.scaled_dot_product_attention(x, x, x, dropout_p=0.1, is_causal=True).square().mean()

    model, batch = nn.Linear(16, 16), (torch.randn(2, 256, 16), torch.zeros(2))
    plain = recorded(model, batch, loss, fake=True)
    with fused():
        found = recorded(model, batch, loss, fake=True)
    assert plain.saved_bytes > 2 * 4 * 256 * 256 * 4
    assert found.saved_bytes < 2 * 4 * 256 * 256
    assert F.scaled_dot_product_attention.__module__ != "paceline.planner.gpu_attention"


def test_blocks_that_are_made_again_keep_less_and_compute_more() -> None:
    model = nn.Sequential(*(Block(32, 2) for _ in range(3)))
    batch = torch.randn(4, 16, 32), torch.randn(4, 16, 32)
    plain = recorded(model, batch, fake=True)
    with recomputing(model):
        again = recorded(model, batch, fake=True)
    assert again.saved_bytes < plain.saved_bytes / 3
    assert plain.flops < again.flops < 1.4 * plain.flops
    assert all("forward" not in module.__dict__ for module in model)


def test_a_model_that_looks_at_values_is_refused_with_the_line() -> None:
    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            if self.layer(x).sum().item() > 0:
                return x
            return self.layer(x)

    source = Source("looks", lambda: (Looks(), (torch.randn(4, 4), torch.randn(4, 4)), loss_of))
    with pytest.raises(NotTraceableError, match=r"^looks can't be traced .*test_model_profile\.py:\d+ .*\.item\(\)"):
        profile_source(source, lambda samples: [Variant(samples)], blocks=lambda model: [])


def test_an_error_of_torch_itself_is_told_in_one_line() -> None:
    try:
        torch.zeros(2) @ torch.zeros(3)
    except RuntimeError as error:
        text = str(explained(error))
    assert "\n" not in text
    assert "RuntimeError" in text


def test_a_batch_is_cut_and_repeated_in_its_first_dimension() -> None:
    batch = {"x": torch.arange(6).view(3, 2), "n": [torch.arange(3)], "scalar": torch.tensor(2.0), "name": "x"}
    assert resized(batch, 5, 3)["x"].tolist() == [[0, 1], [2, 3], [4, 5], [0, 1], [2, 3]]
    assert resized(batch, 2, 3)["n"][0].tolist() == [0, 1]
    assert resized(batch, 2, 3)["scalar"] == 2.0


def test_a_profile_survives_its_file() -> None:
    source = Source("one", lambda: (*random_model(3), loss_of))
    profile = profile_source(source, lambda samples: [Variant(samples), Variant(2)], blocks=lambda model: [])
    assert from_json(to_json(profile)) == profile


def test_low_precision_saves_half_of_what_products_keep() -> None:
    def build() -> Any:
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64))
        return model, (torch.randn(8, 64), torch.randn(8, 64)), loss_of

    found = profile_source(
        Source("linear", build), lambda samples: [Variant(samples), Variant(samples, "bf16")], blocks=lambda model: []
    )
    kept = {variant.precision: one.saved_bytes for variant, one in found.passes.items()}
    hidden, output = 8 * 64 * 2, 8 * 64
    assert kept["fp32"] == 4 * (hidden + output)
    assert kept["bf16"] == 2 * hidden + 2 * 8 * 64 + 4 * output  # and the input, cast
