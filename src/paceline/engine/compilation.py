"""torch.compile by blocks: the modules that a model repeats are compiled, one kind once, and the rest runs as it is.

    Engine(compile=True)                           or Compile(backend="inductor", mode=None)

    model ─► embedding ─► block ─► block ─► … ─► head ─► loss          what is compiled: block, and a loss function of
             as it is     └─ the same code for all ─┘    └─ compiled   transformers, which passes over all logits

A strategy's hooks stand around a block's forward, so weights in shards are gathered outside compiled code: the same
code runs under every strategy, and with it the same bits. That is not so of `torch.compile(model)`, in which hooks
would be traced. Blocks that are alike are compiled once, so a model of many layers starts quickly.

Which code a batch runs must not depend on the batches before it, which are others on another worker. So every shape has
code of its own, never one for several, and where shapes are too many (torch's limit is 8) training ends with an error.

A model without blocks is one block. Under strategies with weights in shards blocks are the units that are gathered.

`Compile(cuda_graphs=True)`: on a GPU the kernels of a block are launched together, as a CUDA graph. A micro-batch may
be small, and launching its kernels one by one takes the host longer than the device needs to run them. A graph has its
own memory, which the next item's run writes to again. So it is used where nothing of an item outlives it: in training,
for blocks in low precision (their gradients are copied to fp32 sums as they come; fp32 gradients may themselves become
the sum), whose weights stay where they are, and not for what is run again in backward (activation checkpointing).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from types import MethodType
from typing import Any

import torch
from torch import nn

from paceline.engine.activation_checkpointing import blocks_of, give_back_forward
from paceline.errors import ConfigError
from paceline.input_file import one_line
from paceline.torch_compat import compiler, inductor
from paceline.world.checked_values import one_word, switch

MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
SAFE_MODES = ("default",)
"""Others measure which kernel is fastest, in every process anew, and reuse memory that lanes still need."""


@dataclass(frozen=True)
class Compile:
    """`cuda_graphs`: launch the kernels of a block together, for lanes of small micro-batches."""

    backend: str = "inductor"
    mode: str | None = None
    cuda_graphs: bool = False

    def __post_init__(self) -> None:
        one_word("compile: backend", self.backend, torch.compiler.list_backends(exclude_tags=()))
        if self.mode is not None:
            one_word("compile: mode", self.mode, MODES)
        switch("compile: cuda_graphs", self.cuda_graphs)
        if self.cuda_graphs and (self.backend != "inductor" or self.mode not in (None, "default")):
            raise ConfigError(f"compile: cuda_graphs=True with {self}: they are inductor's, in its default mode")

    def why_no_graphs(self, device: torch.device, *, low_precision: bool, in_place: bool, recomputed: bool) -> str:
        """What they can't be used with, if there is something. `in_place`: weights stay where they are."""
        if device.type != "cuda":
            return f"a {device.type}"
        if not low_precision:
            return "parameters in fp32"
        if not in_place:
            return "weights in shards"
        return "activation_checkpointing" if recomputed else ""

    def __str__(self) -> str:
        return self.backend + (f" {self.mode}" if self.mode not in (None, "default") else "")


def compile_of(wanted: object, reduction: str, device: torch.device) -> Compile | None:
    """What Engine(compile=…) means."""
    if wanted is None or wanted is False:
        return None
    if not (wanted is True or isinstance(wanted, Compile)):
        shown = one_line(repr(wanted), 60)
        raise ConfigError(f"compile={shown} is not known; give True, or a paceline.Compile(backend=…, mode=…)")
    compile = Compile() if wanted is True else wanted
    if compile.backend == "inductor" and device.type == "cuda" and find_spec("triton") is None:
        raise ConfigError(
            "Engine(compile=…) needs triton on a GPU: inductor writes its kernels in it; run `pip install triton`, or "
            "leave compile out"
        )
    if reduction == "exact" and compile.mode not in (None, *SAFE_MODES):
        raise ConfigError(
            f"compile mode {compile.mode!r} chooses kernels by measuring them, in each process anew, so bits would "
            "differ; leave the mode out, or choose reduction='fast'"
        )
    return compile


class CompiledBlocks:
    """Modules whose forward is compiled, until `close`."""

    def __init__(self, wanted: Compile, models: Sequence[nn.Module], why_no_graphs: str) -> None:
        self._models = models
        self._check()
        self.modules = [block for model in models for block in (list(blocks_of(model)) or [model])]
        self.in_graphs = wanted.cuda_graphs
        if not why_no_graphs and any(model in self.modules for model in models):
            why_no_graphs = "a model without blocks, whose outputs are the script's to keep"
        if self.in_graphs and why_no_graphs:
            raise ConfigError(f"compile: cuda_graphs=True with {why_no_graphs}, where they can't be used; leave it out")
        self._own = [module.__dict__.get("forward") for module in self.modules]
        self._losses: list[tuple[nn.Module, Any]] = [
            (model, model.loss_function) for model in models if _has_loss_function(model)
        ]
        self._compiler = compiler()
        self._graphs = self._compiler.graphs
        # torch would run further shapes as they are: code, and so bits, would depend on the batches before.
        self._before = self._compiler.stay_compiled(wanted=True)

        def compiled(function: Callable[..., Any], mode: str | None = wanted.mode) -> Callable[..., Any]:
            made: Callable[..., Any]
            if wanted.backend == "inductor":
                made = torch.compile(function, backend=inductor(mode), dynamic=False)
            else:
                made = torch.compile(function, backend=wanted.backend, mode=mode, dynamic=False)
            return made

        def of_block(function: Callable[..., Any]) -> Callable[..., Any]:
            plain = compiled(function)
            return _in_training(compiled(function, "reduce-overhead"), plain) if self.in_graphs else plain

        of_class = {type(module).forward: of_block(type(module).forward) for module in self.modules}
        for module, own in zip(self.modules, self._own, strict=True):
            # A method of the module, so that a deep copy of it has one of its own.
            module.forward = MethodType(of_class[type(module).forward], module) if own is None else of_block(own)
        for model, loss in self._losses:
            model.loss_function = compiled(loss)  # type: ignore[assignment]
        kinds = Counter(type(module).__name__ for module in self.modules)
        self.kinds = ", ".join(kinds) + (" and the loss" if self._losses else "")
        told = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
        graphs = ", in CUDA graphs" if self.in_graphs else ""
        self.described = f"{told}{' and the loss' if self._losses else ''} compiled by {wanted}{graphs}"

    @property
    def graphs(self) -> int:
        """How many have been compiled: more than the kinds of blocks and of shapes, and something changes in each."""
        return self._compiler.graphs - self._graphs

    def begin_item(self) -> None:
        """What the graphs of the item before hold is let go, were its backward skipped too."""
        if self.in_graphs:
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]

    def _check(self) -> None:
        for module in (module for model in self._models for module in model.modules()):
            if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
                raise ConfigError(
                    f"Engine(compile=…) with {type(getattr(module, '_orig_mod', module)).__name__}, which is compiled "
                    "already; leave one of the two out"
                )

    def close(self) -> None:
        self._compiler.stay_compiled(wanted=self._before)
        give_back_forward(self.modules, self._own)
        for model, loss in self._losses:
            model.loss_function = loss
        self.modules, self._own, self._losses = [], [], []


def _in_training(graphed: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    """What is evaluated may be kept by who evaluates it."""

    def forward(*given: Any, **named: Any) -> Any:
        return (graphed if torch.is_grad_enabled() else plain)(*given, **named)

    return forward


def _has_loss_function(model: nn.Module) -> bool:
    """A model of transformers with a head that has one."""
    return isinstance(getattr(type(model), "loss_function", None), property) and callable(
        getattr(model, "loss_function", None)
    )
