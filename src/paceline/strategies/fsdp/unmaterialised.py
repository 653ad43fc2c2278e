"""Unmaterialised parameters: shape, dtype and gradient of a parameter whose weights are in shards until they are used.

    p.shape, p.numel(), p.grad …     answered as it stands
    anything that needs values       its owner gathers them first; from then on it is an ordinary parameter
    p.mul_(0.9), p.copy_(x) …        LoopError: the change would be lost when the weights are released again

A module's hooks gather what it needs before it runs. This is for all the rest: a weight used by another module than its
own, a look at a norm, `state_dict()`. The parameter stays the same object; only its class and its memory change.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from paceline.errors import LoopError
from paceline.torch_compat import plain_torch_function

_LOOKS = frozenset({
    "shape", "dtype", "device", "layout", "ndim", "is_leaf", "requires_grad", "grad", "grad_fn", "is_sparse", "is_cuda",
    "is_meta", "is_quantized", "is_mkldnn", "is_cpu", "is_nested", "itemsize", "nbytes", "_version", "_backward_hooks",
    "_post_accumulate_grad_hooks", "names", "output_nr", "retains_grad",
})  # fmt: skip
_ASKS = frozenset({
    "size", "dim", "ndimension", "numel", "nelement", "element_size", "is_floating_point", "is_complex", "get_device",
    "register_hook", "register_post_accumulate_grad_hook", "requires_grad_", "__len__", "is_same_size", "is_signed",
})  # fmt: skip
_LAYOUT = frozenset({"stride", "is_contiguous", "is_non_overlapping_and_dense"})


class Owner(Protocol):
    """What can gather a parameter's weights."""

    def fetch(self, parameter: Parameter) -> None:
        """Make it an ordinary parameter with all of its weights."""
        ...


_owners: dict[int, weakref.ref[Owner]] = {}
_classes: dict[int, type[Parameter]] = {}  # what it is when it has weights
_alive: dict[int, weakref.ref[Parameter]] = {}
_layouts: dict[int, Tensor] = {}  # without memory: how its own lies
_this_thread = threading.local()


@contextmanager
def names_only() -> Iterator[None]:
    """In this thread `state_dict()` is asked for its names: nothing is gathered, and meta tensors stand for weights.

    Gathering takes all workers, at the same place of their step: another thread than the loop's must not begin it.
    """
    _this_thread.names_only = True
    try:
        yield
    finally:
        _this_thread.names_only = False


class UnmaterialisedParameter(Parameter):
    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs, name = kwargs or {}, func.__name__
        if name in _LAYOUT and id(args[0]) in _layouts:
            return func(_layouts[id(args[0])], *args[1:], **kwargs)
        if name == "detach" and getattr(_this_thread, "names_only", False):
            layout = _layouts.get(id(args[0]))  # None: the loop has just gathered it
            return args[0].data if layout is None else layout
        if name in ("__get__", "__set__", "__delete__"):
            needs_values = getattr(getattr(func, "__self__", None), "__name__", None) not in _LOOKS
        else:
            needs_values = name not in _ASKS
        if needs_values:
            for parameter in _unmaterialised((*args, *kwargs.values())):
                if id(parameter) not in _owners:  # a copy of one, with weights of its own
                    parameter.__class__ = Parameter
                    continue
                owner = _owners[id(parameter)]()
                if owner is None:
                    raise engine_is_closed()
                if _writes(func, parameter, args, kwargs):
                    raise LoopError(
                        f"{func.__name__}() on a parameter whose weights are in shards on several workers would be "
                        "lost; change weights before engine.prepare(), or with model.load_state_dict() on every worker"
                        + advice_for_frozen([parameter])
                    )
                owner.fetch(parameter)
        with plain_torch_function():
            return func(*args, **kwargs)


def engine_is_closed() -> LoopError:
    return LoopError(
        "the weights of this model are in shards on several workers, and its engine is closed; use them before "
        "engine.close(), or save them with engine.save_state(folder)"
    )


def advice_for_frozen(parameters: Iterable[Parameter]) -> str:
    """More to say of a change in place: a script may well change what is not trained, as a moving average."""
    if all(parameter.requires_grad for parameter in parameters):
        return ""
    return "; parameters of no optimizer stay whole on every worker with shard_frozen=False (FsdpConfig, Zero3Config)"


def dematerialise(parameter: Parameter, owner: Owner) -> None:
    """Let its memory go; what still has a view of it keeps that."""
    layout = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device="meta")
    parameter.data = torch.full((), torch.nan, dtype=parameter.dtype, device=parameter.device).expand(parameter.shape)
    _owners[id(parameter)], _classes[id(parameter)] = weakref.ref(owner), type(parameter)
    _layouts[id(parameter)] = layout
    if id(parameter) not in _alive:
        _alive[id(parameter)] = weakref.ref(parameter, partial(_forget, id(parameter)))
    parameter.__class__ = UnmaterialisedParameter


def materialise(parameter: Parameter, weights: Tensor) -> None:
    """Make it an ordinary parameter with these weights."""
    parameter.__class__ = _classes.pop(id(parameter), type(parameter))
    _owners.pop(id(parameter), None)
    _layouts.pop(id(parameter), None)
    parameter.data = weights


def is_unmaterialised(parameter: Tensor) -> bool:
    return type(parameter) is UnmaterialisedParameter


def _forget(key: int, _: Any) -> None:
    for known in (_owners, _classes, _layouts, _alive):
        known.pop(key, None)


def _writes(func: Callable[..., Any], parameter: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    name = func.__name__
    in_place = (name.endswith("_") and not name.endswith("__")) or name in ("__setitem__", "__set__")
    return (in_place and bool(args) and args[0] is parameter) or kwargs.get("out") is parameter


def _unmaterialised(values: Any) -> Iterator[Parameter]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from _unmaterialised(value)
        elif isinstance(value, UnmaterialisedParameter):
            yield value
