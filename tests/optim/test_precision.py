"""Precision: which combinations make sense, and what a model in low precision gets and gives."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline import Precision
from paceline.errors import ConfigError
from paceline.optim.precision import cast_tensors, lower, precision_of


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"parameters": "int8"}, r"Precision\(parameters='int8'\) is not known; choose fp32, bf16, fp16"),
        ({"parameters": "bf16", "reduction": "fp16"}, "a large gradient would become infinite on its way"),
        ({"parameters": "bf16", "output": "fp16"}, "nothing is computed in fp16; choose output='fp32' or 'bf16'"),
        ({"buffers": "bf16"}, "nothing is computed in bf16; choose buffers='fp32'$"),
        ({"keep_fp32": (nn.LayerNorm,)}, "all of them are in fp32 already"),
        ({"parameters": "bf16", "keep_fp32": ("LayerNorm",)}, "give classes of modules, such as nn.LayerNorm"),
    ],
)
def test_a_combination_that_makes_no_sense_is_refused_with_the_reason(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Precision(**fields)


def test_a_name_is_a_precision_of_parameters() -> None:
    assert precision_of("bf16") == Precision(parameters="bf16")
    assert str(Precision("bf16", reduction="bf16", keep_fp32=(nn.LayerNorm,))) == (
        "bf16, reduction bf16, LayerNorm in fp32"
    )
    with pytest.raises(ConfigError, match=r"precision='half' is not known; choose fp32, bf16, fp16"):
        precision_of("half")


class Mixed(nn.Module):
    """Statistics, a norm, a table of angles, something in fp64 and a frozen layer."""

    angles: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.norm, self.statistics = nn.Linear(4, 8), nn.LayerNorm(8), nn.BatchNorm1d(8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.precise = nn.Parameter(torch.ones(8, dtype=torch.float64))
        self.register_buffer("angles", torch.linspace(0, 1, 8))
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor, *, scale: Tensor) -> dict[str, Tensor]:
        hidden = self.statistics(self.norm(self.inside(x)))
        self.seen += [x.dtype, scale.dtype, hidden.dtype]
        return {"out": self.frozen(hidden * scale), "argmax": hidden.argmax(1)}


def test_parameters_are_lowered_and_what_has_a_reason_to_be_precise_is_not() -> None:
    model = Mixed()
    before = model.inside.weight.detach().clone()
    lowered = lower([model], Precision("bf16", keep_fp32=(nn.LayerNorm,)))
    assert lowered is not None
    found = {name: str(p.dtype).removeprefix("torch.") for name, p in model.named_parameters()}
    assert found == {
        "precise": "float64", "inside.weight": "bfloat16", "inside.bias": "bfloat16",
        "norm.weight": "float32", "norm.bias": "float32", "statistics.weight": "float32", "statistics.bias": "float32",
        "frozen.weight": "bfloat16", "frozen.bias": "bfloat16",
    }  # fmt: skip
    assert model.angles.dtype == torch.float32
    assert set(lowered.originals) == {id(model.inside.weight), id(model.inside.bias)}
    assert torch.equal(lowered.originals[id(model.inside.weight)], before)


def test_inputs_are_cast_at_the_root_outputs_after_it_and_kept_modules_compute_in_fp32() -> None:
    model = Mixed()
    lowered = lower([model], Precision("bf16", keep_fp32=(nn.LayerNorm,)))
    assert lowered is not None
    inside: list[torch.dtype] = []
    model.norm.register_forward_hook(lambda module, args, output: inside.append(args[0].dtype))
    out = model(torch.randn(4, 4), scale=torch.ones(8))
    assert model.seen == [torch.bfloat16] * 3
    assert inside == [torch.float32]
    assert (out["out"].dtype, out["argmax"].dtype) == (torch.float32, torch.int64)
    lowered.close()
    with pytest.raises(RuntimeError):
        model(torch.randn(4, 4), scale=torch.ones(8))


def test_buffers_and_output_may_be_low_too() -> None:
    model = Mixed()
    model.statistics = nn.Identity()  # type: ignore[assignment]
    lower([model], Precision("fp16", buffers="fp16", output="fp16"))
    assert model.angles.dtype == torch.float16
    assert model(torch.randn(4, 4), scale=torch.ones(8))["out"].dtype == torch.float16


def test_fp32_changes_nothing() -> None:
    assert lower([Mixed()], Precision()) is None


def test_a_parameter_in_a_kept_and_in_another_module_is_refused_by_its_name() -> None:
    model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4))
    model[1].bias = model[0].bias
    with pytest.raises(ConfigError, match=r"'1\.bias' is shared with a module that is kept in fp32"):
        lower([model], Precision("bf16", keep_fp32=(nn.LayerNorm,)))


Pair = namedtuple("Pair", ["first", "second"])


@dataclass(frozen=True)
class Record:
    value: Tensor
    name: str = "r"


def test_tensors_are_cast_wherever_they_are_and_the_rest_is_left_as_it_is() -> None:
    x, whole = torch.ones(2), torch.arange(2)
    given = [Pair(x, whole), OrderedDict(a=(x, None)), Record(x), x.shape]
    pair, named, record, shape = cast_tensors(given, torch.bfloat16)
    assert (type(pair), pair.first.dtype, pair.second.dtype) == (Pair, torch.bfloat16, torch.int64)
    assert (type(named), named["a"][0].dtype) == (OrderedDict, torch.bfloat16)
    assert (record.value.dtype, record.name, shape) == (torch.bfloat16, "r", x.shape)
    assert x.dtype == torch.float32
    untouched = (whole, {"b": [whole]})
    assert cast_tensors(untouched, torch.bfloat16) is untouched


class Table(nn.Module):
    """A product with a buffer, which stays in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("table", torch.eye(8))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x) @ self.table
        return out


def test_buffers_that_torch_does_not_mix_with_low_precision_are_named_beside_its_error() -> None:
    model = Table()
    lower([model], Precision("bf16"))
    with pytest.raises(RuntimeError, match="same dtype") as raised:
        model(torch.ones(2, 8))
    (note,) = raised.value.__notes__
    assert note == (
        "paceline: in bf16 the model's buffers are in fp32 ('table'), and torch does not mix the two here; choose "
        "paceline.Precision('bf16', buffers='bf16'), or cast them in forward: buffer.to(x.dtype)"
    )


def test_other_errors_are_left_as_they_are() -> None:
    model = Table()
    lower([model], Precision("bf16"))
    with pytest.raises(RuntimeError, match="shapes") as raised:
        model(torch.ones(2, 7))
    assert not hasattr(raised.value, "__notes__")


@pytest.mark.parametrize("native", [True, False])
def test_a_gpu_that_emulates_bf16_is_named(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: native or including_emulation)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    gpu = torch.device("cuda", 0)
    told = Precision("bf16").emulated_on(gpu)
    assert told is None if native else str(told).startswith("Tesla T4 (compute capability 7.5) has no bf16 arithmetic")
    assert Precision("fp16").emulated_on(gpu) is None
    assert Precision("bf16").emulated_on(torch.device("cpu")) is None
