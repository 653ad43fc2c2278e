"""What the fuzzer trains: models drawn from a grammar of layers, seven named architectures, and every optimizer.

    model      ::= stem layer* head                    hidden states have the shape (batch, length, width) throughout
    layer      ::= linear | mlp | attention | … | returns_view | in_place | frozen | shared | sometimes | …

Each layer is here because it once broke a data-parallel system, ours or another: a parameter that some lanes don't
use, a module that returns a view of its input, one that is called twice, a weight that two modules share.
A model is described by plain values (`ModelSpec`), so that a failing case can be shrunk and written to a file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

VOCABULARY, CLASSES, LENGTH = 29, 7, 6
Layer = Callable[[int], nn.Module]


# -- layers: (batch, length, width) to (batch, length, width) ----------------------------------------------------------


class Residual(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unsqueeze(1).chunk(3, dim=-1)
        out: Tensor = self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1))
        return x + out


class Convolution(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(width, width, 3, padding=1, bias=False), nn.BatchNorm1d(width)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.relu(self.norm(self.conv(x.transpose(1, 2)))).transpose(1, 2)


class Recurrent(nn.Module):
    def __init__(self, width: int, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.recurrent = kind(width, width, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.recurrent(x)[0]
        return x + out


class Experts(nn.Module):
    """Each sample goes to one expert: most micro-batches leave some of them out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, 5)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x.mean(1)).softmax(-1).max(-1)
        out = x.clone()
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().flatten()
            if len(rows):
                out = out.index_add(0, rows, (weights[rows, None, None] * expert(x[rows])).to(out.dtype))
        return out


class Sometimes(nn.Module):
    """A branch that only some micro-batches take."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x) if int(x.detach().abs().double().sum() * 16) % 2 else x


class Unused(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x


class Lora(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.down, self.up = nn.Linear(width, 2, bias=False), nn.Linear(2, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.base(x) + self.up(self.down(x))


class PartlyFrozen(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.linear.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x)


class CalledTwice(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(torch.tanh(self.linear(x)))


class TiedInside(nn.Module):
    """Two modules with one weight between them, one of them with a bias."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width, bias=False), nn.Linear(width, width)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(F.gelu(self.first(x)))


class ReturnsView(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        out = x + self.linear(x)
        return out.transpose(0, 1).transpose(0, 1)[:, :]


class ReturnsItsInput(nn.Module):
    """Its parameters act on what it hands on beside its input, as T5's blocks do with the position bias."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = PairOut(width)

    def forward(self, x: Tensor) -> Tensor:
        same, extra = self.inner(x)
        return same + extra["extra"]


class PairOut(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return x, {"extra": self.linear(x)}


class InPlace(nn.Module):
    """Changes what its inner module returned, in place."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        out.mul_(1.25).add_(x)
        return F.relu_(out) if out.shape[-1] % 2 else out.tanh_()


class OddParameters(nn.Module):
    """A scalar, one that is sideways in memory, one in double precision, one of no elements."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.sideways = nn.Parameter((torch.randn(width + 3, width) * 0.1).t())
        self.precise = nn.Parameter(torch.randn(width + 3, width, dtype=torch.float64) * 0.1)
        self.empty = nn.Parameter(torch.zeros(0, 4))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(x @ self.sideways.to(x.dtype)).to(self.precise.dtype) @ self.precise
        return x + self.scale.to(x.dtype) * hidden.to(x.dtype)


class Buffers(nn.Module):
    """A running mean and a counter, changed in forward; one buffer is not saved."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("mask", torch.ones(width), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.mul_(0.9).add_(x.detach().mean((0, 1)).to(self.mean.dtype), alpha=0.1)
            self.calls.add_(1)
        return x + self.linear(x - self.mean.to(x.dtype)) * self.mask.to(x.dtype)


class Recomputed(nn.Module):
    """The model's own activation checkpointing."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Dropout(0.1), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.inner, x, use_reentrant=False)
        return x + out


class Repeated(nn.Module):
    """A list of equal blocks with a narrow waist, whose rows no number of workers divides."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            Residual(nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 13), nn.SiLU(), nn.Linear(13, width)))
            for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Keyword(nn.Module):
    """Called by keyword, hands back a dictionary."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = KeywordInner(width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(hidden=x, scale=0.5)["hidden"]
        return out


class KeywordInner(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, *, hidden: Tensor, scale: float) -> dict[str, Tensor]:
        return {"hidden": hidden + scale * self.linear(hidden)}


class ListOfParameters(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(width)) for _ in range(3)])
        self.by_name = nn.ParameterDict({"bias": nn.Parameter(torch.zeros(width))})

    def forward(self, x: Tensor) -> Tensor:
        for scale in self.scales:
            x = x * scale.to(x.dtype)
        return x + self.by_name["bias"].to(x.dtype)


def _mlp(width: int, *, inner: int, activation: nn.Module, dropout: float) -> nn.Module:
    return Residual(nn.Sequential(nn.Linear(width, inner), activation, nn.Dropout(dropout), nn.Linear(inner, width)))


def _encoder(width: int) -> nn.Module:
    return nn.TransformerEncoderLayer(width, 1, dim_feedforward=2 * width, dropout=0.1, batch_first=True)


LAYERS: dict[str, Layer] = {
    "linear": lambda w: nn.Linear(w, w),
    "linear_no_bias": lambda w: nn.Linear(w, w, bias=False),
    "mlp": lambda w: _mlp(w, inner=2 * w, activation=nn.GELU(), dropout=0.1),
    "wide_mlp": lambda w: _mlp(w, inner=301, activation=nn.SiLU(), dropout=0.0),
    "mlp_in_place": lambda w: _mlp(w, inner=21, activation=nn.ReLU(inplace=True), dropout=0.2),
    "attention": Attention,
    "encoder": _encoder,
    "layer_norm": nn.LayerNorm,
    "rms_norm": nn.RMSNorm,
    "convolution": Convolution,
    "lstm": lambda w: Recurrent(w, nn.LSTM),
    "gru": lambda w: Recurrent(w, nn.GRU),
    "experts": Experts,
    "sometimes": Sometimes,
    "unused": Unused,
    "frozen": lambda w: nn.Linear(w, w).requires_grad_(False),
    "partly_frozen": PartlyFrozen,
    "lora": Lora,
    "called_twice": CalledTwice,
    "tied_inside": TiedInside,
    "returns_view": ReturnsView,
    "returns_its_input": ReturnsItsInput,
    "in_place": InPlace,
    "odd_parameters": OddParameters,
    "buffers": Buffers,
    "recomputed": Recomputed,
    "repeated": Repeated,
    "keyword": Keyword,
    "parameter_list": ListOfParameters,
    "weight_norm": lambda w: Residual(parametrizations.weight_norm(nn.Linear(w, w))),
    "spectral_norm": lambda w: Residual(parametrizations.spectral_norm(nn.Linear(w, w))),
    "dropout": lambda w: nn.Dropout(0.3),
    "prelu": lambda w: nn.PReLU(),
}
SHARED = "shared"
"""In place of a layer: the first layer of the model once more, the same module at a second place."""


class Drawn(nn.Module):
    """A model of the grammar. `input`: vectors or tokens; `tied`: embedding and head are one weight."""

    def __init__(self, layers: Sequence[str], *, width: int, input: str, tied: bool) -> None:
        super().__init__()
        self.is_tokens = input == "tokens"
        self.stem: nn.Module = nn.Embedding(VOCABULARY, width) if self.is_tokens else nn.Linear(LENGTH, width)
        made: list[nn.Module] = []
        for name in layers:
            made.append(made[0] if name == SHARED and made else LAYERS["linear" if name == SHARED else name](width))
        self.layers = nn.ModuleList(made)
        self.head = nn.Linear(width, VOCABULARY if self.is_tokens else CLASSES, bias=not tied)
        if tied and self.is_tokens:
            self.head.weight = self.stem.weight

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.stem(x)
        for layer in self.layers:
            hidden = layer(hidden)
        out: Tensor = self.head(hidden)
        return out


# -- seven architectures that people train -----------------------------------------------------------------------------


class _Logits(nn.Module):
    """A model of transformers whose forward gives logits alone; T5 reads its own input as the decoder's too."""

    def __init__(self, model: nn.Module, *, decoder: bool = False) -> None:
        super().__init__()
        self.model, self._decoder = model, decoder

    def forward(self, x: Tensor) -> Tensor:
        extra = {"decoder_input_ids": x} if self._decoder else {"use_cache": False}
        out: Tensor = self.model(input_ids=x, **extra).logits
        return out


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=16, attn_implementation="eager",
    )  # fmt: skip
    return _Logits(LlamaForCausalLM(config))


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=VOCABULARY, d_model=20, d_kv=10, d_ff=36, num_layers=2, num_heads=2,
        relative_attention_num_buckets=8, use_cache=False, decoder_start_token_id=0,
    )  # fmt: skip
    return _Logits(T5ForConditionalGeneration(config), decoder=True)


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=20, num_hidden_layers=2, num_attention_heads=2, intermediate_size=36, image_size=8, patch_size=4,
        num_channels=3, num_labels=CLASSES,
    )  # fmt: skip

    class Images(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = ViTForImageClassification(config)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.model(pixel_values=x).logits
            return out

    return Images()


class _InvertedResidual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        inner = 3 * width
        self.body = nn.Sequential(
            nn.Conv2d(width, inner, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU6(inplace=True),
            nn.Conv2d(inner, inner, 3, padding=1, groups=inner, bias=False), nn.BatchNorm2d(inner),
            nn.ReLU6(inplace=True), nn.Conv2d(inner, width, 1, bias=False), nn.BatchNorm2d(width),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


def mobilenet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 10, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(10), nn.ReLU6(inplace=True),
        _InvertedResidual(10), _InvertedResidual(10),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(10, CLASSES),
    )  # fmt: skip


def lstm() -> nn.Module:
    return Drawn(["lstm", "lstm"], width=18, input="tokens", tied=False)


def mixture() -> nn.Module:
    return Drawn(["attention", "experts", "attention", "experts"], width=16, input="tokens", tied=True)


def lora() -> nn.Module:
    model = Drawn(["attention", "lora", "attention", "lora"], width=16, input="tokens", tied=False)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("down" in name or "up" in name)
    return model


ARCHITECTURES: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "llama": (llama, "tokens"), "t5": (t5, "tokens"), "vit": (vit, "images"), "mobilenet": (mobilenet, "images"),
    "lstm": (lstm, "tokens"), "mixture": (mixture, "tokens"), "lora": (lora, "tokens"),
}  # fmt: skip


# -- optimizers --------------------------------------------------------------------------------------------------------

_BY_LOOP = [{"foreach": False}, {"foreach": True}]
_FUSED = [*_BY_LOOP, {"fused": True}]
# For each optimizer: its variants, and values for each of its options; one of each is drawn, None leaves it out.
OPTIMIZERS: dict[str, tuple[list[dict[str, bool]], dict[str, list[Any]]]] = {
    "SGD": (_FUSED, {"lr": [0.05], "momentum": [None, 0.9], "dampening": [None, 0.1], "weight_decay": [None, 0.01],
                     "nesterov": [None, True], "maximize": [None, None, True]}),
    "Adam": (_FUSED, {"lr": [0.01], "betas": [None, (0.5, 0.9)], "eps": [None, 1e-6], "weight_decay": [None, 0.01],
                      "amsgrad": [None, True], "maximize": [None, None, True], "decoupled_weight_decay": [None, True]}),
    "AdamW": (_FUSED, {"lr": [0.01], "betas": [None, (0.5, 0.9)], "weight_decay": [None, 0.1],
                       "amsgrad": [None, True], "maximize": [None, None, True]}),
    "Adagrad": (_FUSED, {"lr": [0.02], "lr_decay": [None, 0.01], "weight_decay": [None, 0.01],
                         "initial_accumulator_value": [None, 0.1], "maximize": [None, None, True]}),
    "Adadelta": (_BY_LOOP, {"lr": [0.5], "rho": [None, 0.8], "weight_decay": [None, 0.01],
                            "maximize": [None, None, True]}),
    "Adamax": (_BY_LOOP, {"lr": [0.01], "weight_decay": [None, 0.01], "maximize": [None, None, True]}),
    "ASGD": (_BY_LOOP, {"lr": [0.02], "lambd": [None, 1e-3], "t0": [None, 2.0], "weight_decay": [None, 0.01]}),
    "NAdam": (_BY_LOOP, {"lr": [0.01], "momentum_decay": [None, 1e-2], "weight_decay": [None, 0.01],
                         "decoupled_weight_decay": [None, True]}),
    "RAdam": (_BY_LOOP, {"lr": [0.01], "weight_decay": [None, 0.01], "decoupled_weight_decay": [None, True]}),
    "RMSprop": (_BY_LOOP, {"lr": [0.005], "alpha": [None, 0.9], "momentum": [None, 0.9], "centered": [None, True],
                           "weight_decay": [None, 0.01]}),
    "Rprop": (_BY_LOOP, {"lr": [0.005], "etas": [None, (0.6, 1.1)], "step_sizes": [None, (1e-5, 0.1)]}),
    "Adafactor": (_BY_LOOP, {"lr": [0.02], "weight_decay": [None, 0.01], "d": [None, 2.0]}),
    "Muon": ([{}], {"lr": [0.02], "momentum": [None, 0.8], "nesterov": [None, False], "ns_steps": [3]}),
    "lion_pytorch.Lion": ([{}], {"lr": [0.002], "weight_decay": [None, 0.1], "decoupled_weight_decay": [None, True]}),
    "prodigyopt.Prodigy": ([{}], {"lr": [1.0], "weight_decay": [None, 0.01], "use_bias_correction": [None, True]}),
    "schedulefree.AdamWScheduleFree": (_BY_LOOP, {"lr": [0.01], "warmup_steps": [None, 3],
                                                  "weight_decay": [None, 0.01]}),
}  # fmt: skip
WHOLE = ("Adafactor", "Muon", "prodigyopt.Prodigy")
"""They look at more than one element at a time, so they can't update pieces of parameters."""


def optimizer_class(name: str) -> type[torch.optim.Optimizer]:
    module, _, last = name.rpartition(".")
    found = getattr(__import__(module) if module else torch.optim, last)
    assert issubclass(found, torch.optim.Optimizer)
    return found


def make_optimizers(
    name: str, settings: dict[str, Any], model: nn.Module, *, groups: int
) -> list[torch.optim.Optimizer]:
    """The optimizer named, over one or two groups; Muon takes matrices alone, so AdamW has what is left."""
    trained = [p for p in model.parameters() if p.requires_grad]
    rest: list[nn.Parameter] = []
    if name == "Muon":
        matrices = [p for p in trained if p.dim() == 2 and p.numel()]
        rest = [p for p in trained if not any(p is matrix for matrix in matrices)]
        trained = matrices
    made: list[torch.optim.Optimizer] = []
    if trained:
        half = math.ceil(len(trained) / groups)
        parts = [{"params": trained[:half]}, {"params": trained[half:], "lr": settings["lr"] / 2}][:groups]
        made.append(optimizer_class(name)([part for part in parts if part["params"]], **settings))
    if rest:
        made.append(torch.optim.AdamW(rest, lr=0.01, foreach=False))
    return made
