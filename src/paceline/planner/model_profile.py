"""What one micro-batch costs, found without weights or data: its operators are recorded while they run on fake tensors.

    forward                              backward
    operators: flops, bytes, dtype       the same, in stretches: after each of them some gradients are final
    saved for backward: bytes            which weights it reads again
                     memory that is alive, at most ──── without weights, gradients and inputs

A fake tensor has a shape, a type and a device, and no memory, so a model of any size is profiled in seconds. A model
whose Python looks at values (`.item()`, `if (x > 0).any()`) can't run so: `NotTraceableError` says where.

`flops` are those of matrix products, convolutions and attention, by torch's own formulas; where attention is causal,
half of them. Whatever else runs is counted in bytes alone: what it reads and writes.
"""

from __future__ import annotations

import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Parameter
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import flop_registry

from paceline.errors import ConfigError
from paceline.planner import gpu_attention
from paceline.planner.hardware import ATTENTION
from paceline.sharding.bucket import GradientSpec
from paceline.torch_compat import fake_tensors, watching_operators

Work = Counter[tuple[int, int, str]]  # how many operators of (flops, bytes, dtype)

_WRITE_NOTHING = frozenset({"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"})
_BACKWARD_OF_ATTENTION = 2.5
"""Five products where forward has two: it makes the scores again."""


class NotTraceableError(ConfigError):
    """A model that can't run on fake tensors; the text says where and why."""


@dataclass(frozen=True)
class Stretch:
    """A part of backward; when it ends, the gradients of these parameters are final."""

    work: Work
    ready: tuple[int, ...]
    peak_bytes: int = 0  # of results that are alive, without gradients that are final


@dataclass(frozen=True)
class PassProfile:
    """One forward and backward of one micro-batch."""

    samples: int
    forward: Work
    backward: tuple[Stretch, ...]
    saved_bytes: int
    peak_bytes: int
    input_bytes: int
    read_again: frozenset[int]
    forward_peak_bytes: int = 0
    used: tuple[int, ...] = ()  # parameters in the order in which forward reads them first
    measured_s: float | None = None  # a pass on the real machine, where there was one

    @property
    def flops(self) -> int:
        return sum(flops * count for work in self.work for (flops, _, _), count in work.items())

    @property
    def moved_bytes(self) -> int:
        """Read and written by operators."""
        return sum(moved * count for work in self.work for (_, moved, _), count in work.items())

    @property
    def work(self) -> list[Work]:
        return [self.forward, *(stretch.work for stretch in self.backward)]

    @property
    def order(self) -> tuple[int, ...]:
        """Parameters in the order in which backward finishes their gradients."""
        return tuple(number for stretch in self.backward for number in stretch.ready)

    @property
    def temporary_bytes(self) -> int:
        """Beyond what is saved, at the worst moment."""
        return max(0, self.peak_bytes - self.saved_bytes)

    def worst_moment(self, gradients: int, elements: Sequence[int]) -> int:
        """Bytes of results and gradients together: gradients come while activations go. `elements` by parameter."""
        whole, there = max(1, sum(elements)), 0
        worst = max(gradients, self.forward_peak_bytes)
        for stretch in self.backward:
            worst = max(worst, stretch.peak_bytes + gradients * there // whole)
            there += sum(elements[number] for number in stretch.ready)
        return worst


@dataclass(frozen=True)
class Variant:
    """A way to run the micro-batch: how many samples, in which precision, what is made again, and whether compiled."""

    samples: int
    precision: str = "fp32"
    recomputed: bool = False
    compiled: bool = False


@dataclass(frozen=True)
class ModelProfile:
    """A model as the planner knows it: its parameters, what trains them, and a micro-batch in several variants."""

    name: str
    specs: tuple[GradientSpec, ...]  # of the trained parameters
    names: tuple[str, ...]
    frozen_bytes: int  # of what no optimizer trains
    buffer_bytes: int
    state_bytes: float  # of the optimizer, per trained parameter
    units: tuple[tuple[int, ...], ...]  # trained parameters that fsdp gathers together
    passes: Mapping[Variant, PassProfile]
    how: str = "fake tensors"
    blocks: str = ""  # what checkpointing would make again; empty: the model has no blocks
    update: str = "AdamW"
    samples: int = 0  # of the micro-batch that was given
    lanes: int = 1  # that a script has when it runs alone
    accumulate: int = 1
    unit: str = "samples/s"
    units_per_sample: int = 1
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def parameters(self) -> int:
        return sum(spec.elements for spec in self.specs)

    @property
    def weight_bytes(self) -> int:
        return sum(spec.elements * spec.dtype.itemsize for spec in self.specs)

    def pass_of(self, variant: Variant) -> PassProfile | None:
        return self.passes.get(variant)


# -- one pass ----------------------------------------------------------------------------------------------------------


class PassRecorder:
    """Records from `with recorder:` on; `backward(loss)` belongs inside. `mode` of fake tensors; None: real ones."""

    def __init__(self, models: Sequence[nn.Module], trained: Sequence[Parameter], mode: Any | None) -> None:
        self._models, self._trained, self._mode = models, trained, mode
        self._number = {id(parameter): number for number, parameter in enumerate(trained)}
        self._memory: dict[int, tuple[int, Any]] = {}  # by id of a storage: its bytes, and who hears of its end
        self._known: dict[int, tuple[Any, int | None]] = {}  # storages of the model and the batch: (it, a parameter)
        self._gradients: set[int] = set()
        self._alive = self._peak = self._recent_peak = 0  # the last since a gradient was final
        self._forward: Work = Counter()
        self._stretches: list[Stretch] = []
        self._work: Work = self._forward
        self._saved: dict[int, int] = {}
        self._read_again: set[int] = set()
        self._used: dict[int, None] = {}
        self._in_backward = self._paused = False
        self._inputs: dict[int, int] = {}
        self._kept: list[Any] = []
        self._stack = ExitStack()

    def __enter__(self) -> PassRecorder:
        for model in self._models:
            for tensor in (*model.parameters(), *model.buffers()):
                self._know(tensor, self._number.get(id(tensor)))
        if self._mode is not None:
            self._stack.enter_context(self._mode)
        self._stack.enter_context(saved_tensors_hooks(self._pack, lambda tensor: tensor))
        self._stack.enter_context(watching_operators(self._note))
        _recorders.append(self)
        return self

    def __exit__(self, *failure: Any) -> None:
        _recorders.remove(self)
        self._stack.close()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What runs inside is no part of the pass."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def kernel(self, read: Sequence[Tensor], moved: int) -> None:
        """One that no operator of torch shows: it reads and writes so many bytes, and has no products."""
        if not self._paused:
            self._hear_of(read, (), is_view=False)
            self._work[0, moved, "float32"] += 1

    def appeared(self, made: Sequence[Tensor]) -> None:
        """Such a kernel's results."""
        if not self._paused:
            self._hear_of((), made, is_view=False)

    def took(self, batch: Any) -> Any:
        """These tensors are the batch; returns it as the pass should see it."""
        for tensor in tensors_in(batch):
            self._know(tensor, None)
            storage = tensor.untyped_storage()
            self._inputs[id(storage)] = storage.nbytes()
            self._kept.append(storage)
        return batch

    def backward(self, loss: Tensor, samples: int) -> PassProfile:
        saved, forward_peak, self._recent_peak = sum(self._saved.values()), self._peak, self._alive
        self._work, self._in_backward = Counter(), True
        hooks = [p.register_post_accumulate_grad_hook(self._final) for p in self._trained]  # type: ignore[no-untyped-call]
        try:
            loss.backward()  # type: ignore[no-untyped-call]
        finally:
            for hook in hooks:
                hook.remove()
            for parameter in self._trained:
                parameter.grad = None
        if self._work:
            self._stretches.append(Stretch(self._work, (), self._recent_peak))
        return PassProfile(
            samples=samples,
            forward=self._forward,
            backward=tuple(self._stretches),
            saved_bytes=saved,
            peak_bytes=self._peak,
            input_bytes=sum(self._inputs.values()),
            read_again=frozenset(self._read_again),
            forward_peak_bytes=forward_peak,
            used=tuple(self._used),
        )

    def _final(self, parameter: Parameter) -> None:
        number, gradient = self._number[id(parameter)], parameter.grad
        if gradient is not None:  # its memory is the strategy's affair
            storage = gradient.untyped_storage()
            if id(storage) not in self._gradients and id(storage) in self._memory:
                self._gradients.add(id(storage))
                self._alive -= self._memory[id(storage)][0]
        if self._stretches and not self._work:
            last = self._stretches.pop()
            self._stretches.append(replace(last, ready=(*last.ready, number)))
        else:
            self._stretches.append(Stretch(self._work, (number,), self._recent_peak))
        self._work, self._recent_peak = Counter(), self._alive

    def _know(self, tensor: Tensor, parameter: int | None) -> None:
        if self._mode is not None and not is_fake(tensor):
            fake = self._mode.from_tensor(tensor)
            self._kept.append(fake)
            storage = fake.untyped_storage()
            self._known[id(storage)] = storage, parameter
        storage = tensor.untyped_storage()
        self._known[id(storage)] = storage, parameter

    def _pack(self, tensor: Tensor) -> Tensor:
        if self._paused:
            return tensor
        storage = tensor.untyped_storage()
        if id(storage) in self._known:
            parameter = self._known[id(storage)][1]
            if parameter is not None:
                self._read_again.add(parameter)
        elif id(tensor) in self._number:
            self._read_again.add(self._number[id(tensor)])
        else:
            self._saved[id(storage)] = storage.nbytes()
        return tensor

    def _note(self, operator: Any, args: Any, kwargs: Mapping[str, Any], out: Any) -> None:
        if self._paused or operator.namespace == "prim":  # what fake tensors ask about themselves
            return
        inputs, outputs = list(tensors_in((args, kwargs))), list(tensors_in(out))
        self._hear_of(inputs, outputs, is_view=operator.is_view)
        if operator.is_view or not outputs or operator.overloadpacket.__name__ in _WRITE_NOTHING:
            return
        flops = flops_of(operator, args, kwargs, out)
        moved = sum(touched(tensor) for tensor in (*inputs, *outputs))
        low = next((t.dtype for t in inputs if t.is_floating_point()), outputs[0].dtype)
        kind = ATTENTION if _is_attention(operator) else ""
        self._work[flops, moved, str(low).removeprefix("torch.") + kind] += 1

    def _hear_of(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor], *, is_view: bool) -> None:
        for tensor in inputs:
            known = self._known.get(id(tensor.untyped_storage()))
            number = self._number.get(id(tensor)) if known is None else known[1]
            if number is not None and self._in_backward:
                self._read_again.add(number)  # also where a block is made again
            elif number is not None:
                self._used.setdefault(number)
        for tensor in outputs:
            storage = tensor.untyped_storage()
            key, size = id(storage), storage.nbytes()
            if key in self._memory or key in self._known:
                continue
            if is_view:  # of something that was there before
                self._known[key] = storage, None
                continue
            self._memory[key] = size, weakref.ref(storage, lambda _, key=key: self._freed(key))  # type: ignore[misc]
            self._alive += size
            self._peak, self._recent_peak = max(self._peak, self._alive), max(self._recent_peak, self._alive)

    def _freed(self, key: int) -> None:
        size, _ = self._memory.pop(key)
        if key in self._gradients:
            self._gradients.discard(key)
        else:
            self._alive -= size


_recorders: list[PassRecorder] = []


def recording() -> PassRecorder | None:
    """Of the pass that runs now, if one is recorded."""
    return _recorders[-1] if _recorders else None


def is_fake(tensor: Tensor) -> bool:
    return hasattr(tensor, "fake_mode")


def tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for inside in value.values():
            yield from tensors_in(inside)
    elif isinstance(value, list | tuple):
        for inside in value:
            yield from tensors_in(inside)


def touched(tensor: Tensor) -> int:
    """Bytes; what was expanded is read once."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def flops_of(operator: Any, args: Any, kwargs: Mapping[str, Any], out: Any) -> int:
    if _is_attention(operator):
        backward = operator.overloadpacket.__name__.endswith("_backward")
        return _attention_flops(operator, args, kwargs, backward=backward)
    formula = flop_registry.get(operator.overloadpacket)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=out))


def _is_attention(operator: Any) -> bool:
    name = operator.overloadpacket.__name__
    return operator.namespace == gpu_attention.NAMESPACE or (
        name.startswith("_scaled_dot_product") and "attention" in name
    )


def _attention_flops(operator: Any, args: Any, kwargs: Mapping[str, Any], *, backward: bool) -> int:
    """torch counts the whole square of scores; kernels skip the half that a causal mask hides."""
    given = dict(zip((argument.name for argument in operator._schema.arguments), args, strict=False)) | dict(kwargs)
    shapes = [given[name].shape for name in ("query", "key", "value")]
    whole = gpu_attention.products(*shapes) * (_BACKWARD_OF_ATTENTION if backward else 1)
    return int(whole / 2 if given.get("is_causal") else whole)


# -- a model, several times --------------------------------------------------------------------------------------------


@contextmanager
def recomputing(modules: Iterable[nn.Module]) -> Iterator[None]:
    """These modules keep nothing but their inputs for backward, as under Engine(activation_checkpointing=…)."""
    changed = [(module, module.__dict__.get("forward")) for module in modules]
    try:
        for module, _ in changed:
            module.forward = _checkpointed(module.forward)
        yield
    finally:
        for module, own in changed:
            if own is None:
                module.__dict__.pop("forward", None)
            else:
                module.forward = own


def _checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        # Random numbers of fake tensors are none: there is no state to restore.
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    return run


def resized(batch: Any, samples: int, given: int) -> Any:
    """The batch with another number of samples in its first dimension; values are of no meaning."""
    if isinstance(batch, Tensor):
        if not batch.dim() or batch.shape[0] != given:
            return batch
        if samples <= given:
            return batch[:samples]
        return batch.repeat(-(-samples // given), *[1] * (batch.dim() - 1))[:samples]
    if isinstance(batch, Mapping):
        return {key: resized(value, samples, given) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        parts = [resized(value, samples, given) for value in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    return batch


def fewest_samples(models: Sequence[nn.Module]) -> int:
    """BatchNorm1d over features has nothing to normalise over in a batch of one, and raises."""
    return 2 if any(isinstance(module, nn.BatchNorm1d) for model in models for module in model.modules()) else 1


def samples_in(batch: Any) -> int:
    """The length of the first dimension of the first tensor that has one."""
    lengths = [tensor.shape[0] for tensor in tensors_in(batch) if tensor.dim()]
    if not lengths:
        raise NotTraceableError("the batch has no tensor with samples in its first dimension: nothing can be resized")
    return int(lengths[0])


def explained(error: BaseException) -> NotTraceableError:
    """Where a model looked at values that fake tensors don't have."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "/torch/" not in f.filename]
    ours = f"/{__package__.partition('.')[0]}/"
    own = next((f for f in reversed(frames) if ours not in f.filename), None)
    where = "" if own is None else f" at {own.filename}:{own.lineno} ({own.line})"
    text = str(error).strip().splitlines()
    return NotTraceableError(
        f"can't be traced with fake tensors{where}: {type(error).__name__}: {text[0] if text else ''}"
    )


def new_fake_mode() -> Any:
    """Fake tensors that take real ones beside them."""
    return fake_tensors(allow_non_fake_inputs=True)
