"""Attention on a GPU: which kernel torch has taken, whether its bits are always the same, and what a faster one needs.

    first forward of a model       calls of torch's attention are noted: in eager mode as what autograd will call, in
                                   code compiled by blocks from the graph that inductor is given
    before the next forward        the same shapes, RUNS times forward and backward on random numbers: other bits end
                                   the job, and one line tells the kernel and its time
    a faster kernel                is timed too, and the line says why it was not taken: flash takes no mask, cuDNN
                                   gives other bits each time

By then what the first item held for its backward is free, so nothing here makes a job larger. Not seen: attention in
code that the script compiles by itself, attention of other libraries, FlexAttention, and torch's own "math" form, which
consists of ordinary products.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.hooks import RemovableHandle

from paceline.errors import ReplicaError
from paceline.input_file import one_line
from paceline.torch_compat import shape_of_input, watching_graphs

RUNS = 10
CLEARLY_FASTER = 0.85
MOST_TOLD = 4  # kinds of calls
NAMES = {
    "Flash": ("flash", SDPBackend.FLASH_ATTENTION),
    "Efficient": ("memory-efficient", SDPBackend.EFFICIENT_ATTENTION),
    "Cudnn": ("cuDNN", SDPBackend.CUDNN_ATTENTION),
}
NODE = "ScaledDotProduct"

Shape = tuple[int, ...]


class Call(NamedTuple):
    """Of torch's attention. Where autograd tells of it the kernel is known, and whether there was a mask is not."""

    query: Shape
    key: Shape
    value: Shape
    dtype: torch.dtype
    causal: bool
    kernel: SDPBackend | None = None
    mask: tuple[Shape, torch.dtype] | None = None

    def __str__(self) -> str:
        size, dtype = " × ".join(map(str, self.query)), str(self.dtype).removeprefix("torch.")
        return f"{size}, {dtype}{', causal' if self.causal else ''}"


class Ran(NamedTuple):
    name: str
    ms: float
    same_bits: bool


class AttentionKernels:
    """Hooks on models, until what they ran has been told; `close` takes them off."""

    def __init__(self, models: Sequence[nn.Module], device: torch.device, tell: Callable[[str], None]) -> None:
        self._device, self._tell = device, tell
        self._calls: dict[Call, None] = {}  # in their order
        self._seen: set[int] = set()  # models, by id
        self._hooks: list[RemovableHandle] = [model.register_forward_pre_hook(self._before) for model in models]
        self._hooks += [model.register_forward_hook(self._after) for model in models]
        self._stop_watching = watching_graphs(self._compiled)

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._stop_watching()

    # Both hooks begin with a word that the compiler knows: in code that the script compiles they are then nothing.

    def _before(self, model: nn.Module, _: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if id(model) in self._seen and torch.is_grad_enabled():
            self.close()
            for call in list(self._calls)[:MOST_TOLD]:
                self._tell(f"paceline: attention: {tried(call, self._device)}")

    def _after(self, model: nn.Module, _: Any, out: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if id(model) not in self._seen and torch.is_grad_enabled():
            self._seen.add(id(model))
            self._calls |= dict.fromkeys(calls_behind(_tensors(out)))

    def _compiled(self, graph: torch.fx.GraphModule) -> None:
        if torch.is_grad_enabled():
            self._calls |= dict.fromkeys(calls_in(graph))


def _tensors(out: Any) -> list[Tensor]:
    leaves = out.values() if isinstance(out, dict) else out if isinstance(out, list | tuple) else (out,)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def calls_behind(outputs: Sequence[Tensor]) -> Iterator[Call]:
    """What autograd will call for them. Saved tensors are not looked at: activations may be computed again for it."""
    waiting = [out.grad_fn for out in outputs if out.grad_fn is not None]
    met = set(waiting)
    while waiting:
        node = waiting.pop()
        name = node.name()
        if name.startswith(NODE):
            kernel = next((kernel for word, (_, kernel) in NAMES.items() if name.startswith(NODE + word)), None)
            inputs = [shape_of_input(*edge) for edge in node.next_functions[:3]]
            known = [one for one in inputs if one is not None]  # not of what needs no gradient
            if len(known) == 3:
                (query, dtype), (key, _), (value, _) = known
                yield Call(query, key, value, dtype, bool(getattr(node, "_saved_is_causal", False)), kernel)
        for after, _ in node.next_functions:
            if after is not None and after not in met:
                met.add(after)
                waiting.append(after)


def calls_in(graph: torch.fx.GraphModule) -> Iterator[Call]:
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    for node in graph.graph.nodes:
        if node.target is F.scaled_dot_product_attention:
            given: dict[str, Any] = dict(zip(names, node.args, strict=False)) | node.kwargs
            query, key, value = (given[name].meta["example_value"] for name in names[:3])
            mask = given.get("attn_mask")
            of_mask = None if mask is None else (_shape(mask.meta["example_value"]), mask.meta["example_value"].dtype)
            causal = bool(given.get("is_causal"))
            yield Call(_shape(query), _shape(key), _shape(value), query.dtype, causal, mask=of_mask)


def _shape(tensor: Tensor) -> Shape:
    return tuple(map(int, tensor.shape))


def tried(call: Call, device: torch.device) -> str:
    """What there is to tell of its kernel; an error if its bits are not always the same."""
    try:
        ran = run(call, device)
    except RuntimeError as error:  # such as too little memory
        return f"kernel for {call} not tried: {one_line(str(error), 120)}"
    if not ran.same_bits:
        raise ReplicaError(
            f"torch's {ran.name} attention kernel gives other bits in every run for {call}; choose another with "
            "torch.nn.attention.sdpa_kernel(…) around the model, or reduction='fast', which promises no bits"
        )
    told = f"{ran.name} kernel ({call}), {ran.ms:.2f} ms forward and backward, the same bits in {RUNS} runs"
    return told + "".join(_faster(call, ran, device))


def _faster(call: Call, ran: Ran, device: torch.device) -> Iterator[str]:
    """Other kernels, each with the reason why it was not taken."""
    for name, kernel, algorithms, why in (
        ("flash", SDPBackend.FLASH_ATTENTION, nullcontext, "but takes no mask: leave it out where nothing is padded"),
        ("cuDNN", SDPBackend.CUDNN_ATTENTION, _any_algorithms, "but has no deterministic backward"),
    ):
        if name == ran.name:
            continue
        try:
            with algorithms():
                other = run(call._replace(mask=None, kernel=kernel), device)
        except RuntimeError:  # it does not take these shapes, or this dtype
            continue
        if other.ms < CLEARLY_FASTER * ran.ms:
            yield f"; {name} would take {other.ms:.2f} ms, {why}"


@contextmanager
def _any_algorithms() -> Iterator[None]:
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode(0)
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)


def run(call: Call, device: torch.device) -> Ran:
    """Forward and backward, RUNS times for the clock and as often for the bits. Random numbers come from a generator of
    their own: the script's must not move."""
    numbers = torch.Generator(device).manual_seed(1)
    drawn = partial(torch.randn, generator=numbers, device=device, dtype=call.dtype)
    inputs = [drawn(shape).requires_grad_() for shape in (call.query, call.key, call.value)]
    gradient = drawn((*call.query[:-1], call.value[-1]))
    mask = None if call.mask is None else torch.ones(call.mask[0], dtype=call.mask[1], device=device)
    chosen = nullcontext() if call.kernel is None else sdpa_kernel(call.kernel)
    attend = partial(
        F.scaled_dot_product_attention,
        attn_mask=mask,
        is_causal=call.causal,
        enable_gqa=call.query[-3:-2] != call.key[-3:-2],
    )

    def once() -> tuple[Tensor, ...]:
        out = attend(*inputs)
        return (out, *torch.autograd.grad(out, inputs, gradient))

    with torch.enable_grad(), torch.autocast(device.type, enabled=False), chosen:
        first = once()  # kernels are loaded
        _wait_for(device)
        begun = time.perf_counter()
        for _ in range(RUNS):
            once()
        _wait_for(device)
        ms = (time.perf_counter() - begun) / RUNS * 1000
        same = all(all(map(torch.equal, once(), first)) for _ in range(RUNS))
    return Ran(_name_of(first[0]), ms, same)


def _name_of(out: Tensor) -> str:
    node = "" if out.grad_fn is None else out.grad_fn.name()
    return next((name for word, (name, _) in NAMES.items() if node.startswith(NODE + word)), "math")


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
