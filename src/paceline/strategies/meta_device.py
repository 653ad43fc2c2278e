"""The meta device: models built under `torch.device("meta")` have shapes and no memory, until their modules are filled.

    with torch.device("meta"):            no memory, whatever the size
        model = Gpt(…)
    engine.prepare(model, …)              module by module: memory, a seed of its own, its reset_parameters(), or
                                          the `_init_weights` of a model of transformers
    engine.prepare(…, weights=folder)     or its weights from files; what those don't have, as buffers, is reset

A module's seed is made of the job's and of the module's name, so its weights are the same wherever and beside however
many others it is filled. Strategies that keep shards fill a part of the model, cut it and go on; so a model can be
larger than a worker's memory. Parameters stay the objects that they were: optimizers hold the right ones.

What belongs together is filled together, in one order, whatever part is asked for. A tied weight is the first module's
that has it. A reset may also set weights of modules below, as nn.MultiheadAttention's sets its out_proj.bias: it runs
after theirs. Which ones it sets is found by running it once while all of them are on the meta device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.errors import ConfigError
from paceline.torch_compat import apply_to_tensors, memory_id, memory_written_by, own_buffers, own_parameters
from paceline.world.determinism import drawing_from, mix, seed_everything

RESETS = ("reset_parameters", "_reset_parameters")
Given = Mapping[int, Callable[[], Tensor]]
"""By the id of a tensor on the meta device: how its values are read."""
NOTHING_GIVEN: Given = MappingProxyType({})


def is_on_meta(model: nn.Module) -> bool:
    return any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def moved(model: nn.Module, device: torch.device) -> nn.Module:
    """The model with all that has values on `device`."""
    if not is_on_meta(model):
        return model.to(device)
    apply_to_tensors(model, lambda tensor: tensor if tensor.is_meta else tensor.to(device))
    return model


class Modules(dict[int, str]):
    """Names of all modules by id, prefixed by the model's place when there are several; and what is filled together."""

    def __init__(self, models: Sequence[nn.Module], given: Given = NOTHING_GIVEN) -> None:
        super().__init__()
        self.given = given
        self._models: dict[
            int, nn.Module
        ] = {}  # by id of a module: the innermost that sets first values of those in it
        self._owners: dict[int, nn.Module] = {}  # by id of a tensor on the meta device: the first module that has it
        self._below: dict[int, list[nn.Module]] = {}  # by id of a module: others to whose tensors its reset writes
        self._above: dict[int, list[nn.Module]] = {}  # the other way round, inner ones first
        for place, model in enumerate(models):
            for name, module in model.named_modules():
                self.setdefault(id(module), f"{place}.{name}" if len(models) > 1 else name)
                for tensor in _empty(module).values():
                    self._owners.setdefault(id(tensor), module)
        everything = [module for model in models for module in model.modules()]
        for outer in (module for module in everything if callable(getattr(module, "_init_weights", None))):
            self._models |= {id(module): outer for module in outer.modules()}
        for module in everything if not given else ():
            self._below[id(module)] = _reset_below(module, self.resets_of(module))
            for below in self._below[id(module)]:
                self._above.setdefault(id(below), []).insert(0, module)

    def before(self, module: nn.Module) -> list[nn.Module]:
        """Those that are filled before it."""
        owners = [self._owners.get(id(tensor), module) for tensor in _empty(module).values()]
        return [owner for owner in owners if owner is not module] + self._below.get(id(module), [])

    def after(self, module: nn.Module) -> list[nn.Module]:
        """Those that have to follow before its weights are what they shall be."""
        return self._above.get(id(module), [])

    def sets_below(self, module: nn.Module) -> list[nn.Module]:
        """Those whose weights its reset sets too."""
        return self._below.get(id(module), [])

    def resets_of(self, module: nn.Module) -> list[Callable[[], Any]]:
        """What gives it first weights: a model of transformers that it is in, and its own for what that leaves."""
        model, own = self._models.get(id(module)), _reset_of(module)
        theirs = [] if model is None else [partial(_initialise, model, module, self.given)]
        return [*theirs, *([] if own is None else [own])]


module_names = Modules


def fill(part: nn.Module, names: Modules, *, seed: int, device: torch.device) -> None:
    """Give every module of `part` that has none memory on `device`, and its first weights."""
    fill_modules(part.modules(), names, seed=seed, device=device)


def fill_modules(modules: Iterable[nn.Module], names: Modules, *, seed: int, device: torch.device) -> None:
    """The same for modules without those below them; others that belong to them are filled too."""
    begun: set[int] = set()
    filled: set[int] = set()

    def ensure(module: nn.Module) -> None:
        if id(module) in begun or not (_empty(module) or names.sets_below(module)):
            return
        begun.add(id(module))
        for other in names.before(module):
            ensure(other)
        empty = _empty(module)
        if empty or any(id(below) in filled for below in names.sets_below(module)):
            _fill_module(module, names, list(empty.items()), seed, device)
            filled.add(id(module))
        for other in names.after(module):
            ensure(other)

    for module in modules:
        ensure(module)


def _fill_module(
    module: nn.Module, names: Modules, empty: Sequence[tuple[str, Tensor]], seed: int, device: torch.device
) -> None:
    name = names[id(module)]
    what = f"{name or 'the model'} ({type(module).__name__})"
    for _, tensor in empty:
        if (read := names.given.get(id(tensor))) is not None:
            _give_memory(tensor, what, device)
            tensor.detach().copy_(read())
    was_given = bool(empty)
    empty = [(own, tensor) for own, tensor in empty if tensor.is_meta]
    if was_given and not empty:
        return
    resets = names.resets_of(module)
    if not resets:
        raise ConfigError(
            f"{what} was built on the meta device and has no reset_parameters() to give {empty[0][0]!r} its first "
            "values; write one that sets all its own parameters and buffers, or build the model on a real device"
        )
    # A weight that another module has been given already (a tied one) is that module's: what is drawn here is dropped.
    given = [(tensor, tensor.detach().clone()) for _, tensor in _own_tensors(module) if not tensor.is_meta]
    for _, tensor in empty:
        _give_memory(tensor, what, device)
    drawn = mix(seed, "weights", name)
    with drawing_from(drawn), torch.no_grad():
        seed_everything(drawn)  # the device's numbers too
        for reset in resets:
            reset()
            if not any(_has_unset(tensor) for _, tensor in empty):
                break
        for tensor, value in given:
            tensor.copy_(value)
    for own, tensor in empty:
        if _has_unset(tensor):
            raise ConfigError(
                f"{what} was built on the meta device, and its {_name_of(resets[-1])}() does not set all of {own!r}: "
                "set it there, since values given in __init__ are lost on the meta device"
            )


def _name_of(reset: Callable[[], Any]) -> str:
    return "_init_weights" if isinstance(reset, partial) else reset.__name__


def _initialise(model: nn.Module, module: nn.Module, given: Given) -> None:
    """As transformers does; the flag keeps it from weights that come from files, below too."""
    there = [tensor for tensor in module.parameters() if id(tensor) in given and not hasattr(tensor, _IS_SET)]
    for tensor in there:
        setattr(tensor, _IS_SET, True)
    try:
        model._init_weights(module)  # type: ignore[operator]
    finally:
        for tensor in there:
            delattr(tensor, _IS_SET)


_IS_SET = "_is_hf_initialized"


def _reset_of(module: nn.Module) -> Callable[[], Any] | None:
    return next((getattr(module, name) for name in RESETS if callable(getattr(module, name, None))), None)


def _empty(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in _own_tensors(module) if tensor.is_meta}


def _reset_below(module: nn.Module, resets: Sequence[Callable[[], Any]]) -> list[nn.Module]:
    """The modules below to whose weights its reset writes, found by a run that writes nowhere."""
    inside = list(module.modules())
    tensors = [(below, tensor) for below in inside[1:] for _, tensor in _own_tensors(below)]
    all_on_meta = all(tensor.is_meta for _, tensor in (*tensors, *((module, t) for _, t in _own_tensors(module))))
    reset = next(iter(resets), None)
    # A reset of one's own that is only for modules below is not run: they have theirs.
    if reset is None or not tensors or not all_on_meta or not (isinstance(reset, partial) or _empty(module)):
        return []
    kept = [(below, dict(own_parameters(below)), dict(own_buffers(below))) for below in inside]
    with drawing_from(0), torch.no_grad():
        try:
            writes = memory_written_by(reset)
        except Exception:  # a reset that looks at values; with memory it will tell what is wrong, if something is
            return []
        finally:
            for below, parameters, buffers in kept:
                own_parameters(below).update(parameters)
                own_buffers(below).update(buffers)
    own = {memory_id(tensor) for _, tensor in _own_tensors(module)}
    written = {id(b): b for b, tensor in tensors if memory_id(tensor) in writes - own}
    return list(written.values())


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(recurse=False)
    yield from module.named_buffers(recurse=False)


def _give_memory(tensor: Tensor, what: str, device: torch.device) -> None:
    real: Tensor = torch.full_like(tensor, _UNSET.get(tensor.dtype, 0), device=device, requires_grad=False)
    if isinstance(tensor, nn.Parameter):
        real = nn.Parameter(real, requires_grad=tensor.requires_grad)
    try:
        torch.utils.swap_tensors(tensor, real)  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise ConfigError(
            f"{what} was built on the meta device and something holds on to its tensors: {error}"
        ) from error


# What a reset that forgets a tensor would leave in it; other dtypes can't be told from set ones.
_UNSET = dict.fromkeys((torch.float64, torch.float32, torch.bfloat16, torch.float16), math.nan) | {
    torch.int64: -(2**63) + 1,
    torch.int32: -(2**31) + 1,
}


def _has_unset(tensor: Tensor) -> bool:
    if tensor.dtype.is_floating_point:
        return bool(tensor.isnan().any())
    return tensor.dtype in _UNSET and bool((tensor == _UNSET[tensor.dtype]).any())


def check_states(optimizers: Sequence[Optimizer]) -> None:
    """Some optimizers make their state when they are made: on the meta device it is lost."""
    for optimizer in optimizers:
        for state in optimizer.state.values():
            if any(isinstance(value, Tensor) and value.is_meta for value in state.values()):
                raise ConfigError(
                    f"{type(optimizer).__name__} made its state when it was made, for weights on the meta device; "
                    "build the model on a real device for it, or choose an optimizer that makes its state in step()"
                )
