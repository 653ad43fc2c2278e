"""What forward keeps beside parameters and buffers: found in a worker's first items, since lanes would hand it on.

    self.mean = 0.9 * self.mean + …          a tensor that is no buffer, read and then changed: the next lane on this
                                             worker would go on from it, and which lane that is depends on the workers
    self.attention = softmax(…)              only left for others to look at: no harm
    torch.randn(…, generator=self.random)    draws of one item, then of the next on this worker: likewise handed on
    torch.randn(…, generator=mine)           likewise, in the loop's body (body_state.py); only said
    criterion(…) with `center` as a buffer   changed by a module that `prepare` was not given: likewise handed on
    a head with its own optimizer            trained by a script that prepared neither: each worker would have its own
    self.calls += 1                          counts items; whether it enters the numbers can't be seen, and is only said
    model.temperature *= 0.99, in the body   likewise: it changes from item to item, and not from step to step
    out, h = model(x, h), in the body        a tensor that the body carries on (body_state.py): likewise only said

Tensors are replaced by probes until the item's backward: tensors that note whether a function was given their values.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from paceline.data.sharded_sampler import WorkItem
from paceline.engine.body_state import BodyState
from paceline.errors import LoopError
from paceline.torch_compat import own_buffers, own_parameters, plain_torch_function, version_of
from paceline.world import messages
from paceline.world.determinism import own_generators, state_of

ITEMS = 2
"""That are looked at: what is None before the first forward is there before the second."""

LARGEST = 1 << 24
"""Elements of a tensor that is looked at: a copy is kept to compare."""

_OF_TORCH = frozenset(vars(nn.Module()))
_OVERWRITES = {"copy_", "fill_", "zero_"}
_ASKS_NO_VALUES = {"__get__", "size", "dim", "ndimension", "numel", "nelement", "stride", "is_contiguous", "__len__"}


class Probe(Tensor):
    """A tensor that notes whether its values were wanted; functions get the tensor that it stands for."""

    original: Tensor
    was_read: bool
    is_overwritten: bool

    @staticmethod
    def of(tensor: Tensor) -> Probe:
        probe = tensor.as_subclass(Probe)
        probe.original, probe.was_read, probe.is_overwritten = tensor, False, False
        return probe

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        with plain_torch_function():
            if name in _OVERWRITES and isinstance(args[0], Probe):
                args[0].is_overwritten = True
            wants = name not in _ASKS_NO_VALUES or getattr(func, "__self__", None) is Tensor.data
            return func(*_unwrapped(args, wants), **_unwrapped(kwargs or {}, wants))


def _unwrapped(value: Any, wants: bool) -> Any:
    if isinstance(value, Probe):
        value.was_read |= wants and not value.is_overwritten
        return value.original
    if type(value) in (list, tuple):
        return type(value)(_unwrapped(one, wants) for one in value)
    if type(value) is dict:
        return {key: _unwrapped(one, wants) for key, one in value.items()}
    return value


@dataclass
class _Kept:
    """An attribute of a module with tensors in it: in a place each, of which a container may have several."""

    module: nn.Module
    name: str
    attribute: str
    probes: dict[Any, Probe]
    before: dict[Any, Tensor]

    def probe(self, place: Any, _: Tensor) -> Tensor:
        return self.probes[place]

    def is_state(self) -> bool:
        """Forward has read it, and it is another now."""
        now = dict(_places(vars(self.module).get(self.attribute)))
        read = [place for place, probe in self.probes.items() if probe.was_read]
        grown = type(vars(self.module).get(self.attribute)) in (list, deque) and len(now) != len(self.before)
        return bool(read) and (grown or any(_differ(self.before[at], now[at]) for at in read if at in now))


def _differ(before: Tensor, now: Tensor) -> bool:
    """In values; one that has another shape, or was moved, is a cache that was made anew."""
    return before.shape == now.shape and not torch.equal(before, now.detach().to(before.device, before.dtype))


def _places(value: Any) -> Iterator[tuple[Any, Tensor]]:
    """The tensors of an attribute."""
    if isinstance(value, Tensor):
        yield None, value
    elif type(value) in (list, tuple, deque):
        yield from ((at, one) for at, one in enumerate(value) if isinstance(one, Tensor))
    elif type(value) is dict:
        yield from ((key, one) for key, one in value.items() if isinstance(one, Tensor))


def _exchanged(value: Any, change: Callable[[Any, Tensor], Tensor]) -> Any:
    """The attribute with other tensors; a container stays the one that it is where it can."""
    if isinstance(value, Tensor):
        return change(None, value)
    if type(value) is tuple:
        return tuple(change(at, one) if isinstance(one, Tensor) else one for at, one in enumerate(value))
    for at, one in list(_places(value)):
        value[at] = change(at, one)
    return value


def _original(_: Any, tensor: Tensor) -> Tensor:
    return tensor.original if isinstance(tensor, Probe) else tensor


class ForwardState:
    """For a worker's first items: `before` their forward, and `after` it."""

    def __init__(self, models: Sequence[nn.Module], joiners_lack_it: Callable[[], bool]) -> None:
        """`joiners_lack_it`: workers may join this job, and nothing of what the script keeps is handed to them."""
        self._joiners_lack_it = joiners_lack_it
        self._modules = [(n, m) for model in models for n, m in model.named_modules() if not _is_metric(m)]
        self._prepared = {id(module) for model in models for module in model.modules()}
        # Probes, and hooks on all modules, would have a compiled one compiled once more.
        self._items = 0 if any(type(m).__name__ == "OptimizedModule" for _, m in self._modules) else ITEMS
        self._kept: list[_Kept] = []
        self._numbers: dict[tuple[str, str], list[float]] = {}
        self._within_a_step = False  # the item that is looked at follows another of its step
        self._others: dict[int, tuple[nn.Module, dict[str, tuple[Tensor, int]]]] = {}
        self._hook: Any = None
        self._trained: dict[int, tuple[Tensor, int]] = {}  # parameters of other modules, when they were first used
        self._drawn: list[tuple[nn.Module, str, str]] = []  # a generator, and its state before the item
        self._body = BodyState(
            (one for _, module in self._modules for one in own_generators(module).values()),
            (one for model in models for one in (*model.parameters(), *model.buffers())),
        )

    @property
    def is_done(self) -> bool:
        return self._items == 0 and not self._body.is_under_way

    def before(self, item: WorkItem) -> None:
        self._restore()
        if self._items == 0:
            self._body.begin_again()
            return
        self._within_a_step = not item.first_of_step
        self._items -= 1
        self._kept = [one for pair in self._modules for one in self._with_probes(*pair)]
        self._note_numbers()
        self._drawn = [(m, at, state_of(one)) for _, m in self._modules for at, one in own_generators(m).items()]
        self._hook = register_module_forward_pre_hook(self._note_buffers)
        other_lane = item.first_of_lane and not item.first_of_step
        self._body.begin(other_lane=other_lane, joins=item.first_of_step and self._joiners_lack_it())

    def after(self, item: WorkItem, loss: Tensor) -> None:
        if self._hook is None:
            self._body.end_again(loss)
            return
        self._body.end(loss, another_follows=not item.last_of_step)
        states = [one for one in self._kept if one.is_state()]
        self._restore()
        for one in states:
            where = f"{one.name}.{one.attribute}" if one.name else one.attribute
            raise LoopError(
                f"forward of {type(one.module).__name__} reads and changes {where!r}, which is no buffer: each lane "
                "would go on from what the last one on its worker left, and the numbers depend on the workers. Write "
                f"self.register_buffer({one.attribute!r}, …): every lane then starts from the step's"
            )
        self._check_others()
        self._check_generators()
        self._note_numbers()
        if self._items == 0:
            self._tell_counters()
            self._body.tell()

    def received(self, tensors: Sequence[Tensor]) -> None:
        """By a collective of the script's own."""
        self._body.received(tensors)

    def close(self) -> None:
        self._items = 0
        self._restore()
        self._body.abandon()
        self._trained.clear()

    def _with_probes(self, name: str, module: nn.Module) -> Iterator[_Kept]:
        for attribute, value in list(vars(module).items()):
            places = {} if attribute in _OF_TORCH else dict(_places(value))
            if places and all(_is_plain(tensor) for tensor in places.values()):
                kept = _Kept(module, name, attribute, {at: Probe.of(t) for at, t in places.items()}, {})
                kept.before = {at: tensor.detach().clone() for at, tensor in places.items()}
                vars(module)[attribute] = _exchanged(value, kept.probe)
                yield kept

    def _restore(self) -> None:
        """Wherever forward has put them, within the models."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        for _, module in self._modules if self._kept else ():
            for attribute, value in list(vars(module).items()):
                if any(isinstance(tensor, Probe) for _, tensor in _places(value)):
                    vars(module)[attribute] = _exchanged(value, _original)
        self._kept = []

    def _check_generators(self) -> None:
        for module, attribute, before in self._drawn:
            generator = own_generators(module).get(attribute)
            if generator is not None and state_of(generator) != before:
                raise LoopError(
                    f"forward of {type(module).__name__} draws from a random generator of its own, {attribute!r}: what "
                    "it gives depends on the items that its worker had before. Draw from torch, numpy or random "
                    "without a generator: they are seeded for every item, the same on any number of workers"
                )

    # -- numbers -----------------------------------------------------------------------------------------------------

    def _note_numbers(self) -> None:
        for name, module in self._modules:
            for attribute, value in vars(module).items():
                if type(value) in (int, float):
                    where = f"{name}.{attribute}" if name else attribute
                    self._numbers.setdefault((type(module).__name__, where), []).append(value)

    def _tell_counters(self) -> None:
        """Those that each of the items changed, from before it to behind it; and those that the body changed then."""
        for (kind, where), values in self._numbers.items():
            if len(values) != 2 * ITEMS:
                continue
            if self._within_a_step and values[-3] != values[-2]:
                messages.warn(
                    f"the number {where!r} of {kind} is changed in the loop's body inside a step, so once per item of "
                    "this worker, and a step has others on another number of workers. If the model's results depend "
                    "on it, change it where engine.stepped is true, or set it from engine.step"
                )
            elif all(values[at] != values[at + 1] for at in range(0, 2 * ITEMS, 2)):
                messages.warn(
                    f"forward of {kind} changes the number {where!r}: it counts this worker's items, of which a step "
                    "has others on another number of workers. If the model's results depend on it, set it from "
                    "engine.step, or make it a buffer"
                )
        self._numbers.clear()

    # -- modules that were not prepared ------------------------------------------------------------------------------

    def _note_buffers(self, module: nn.Module, _: Any) -> None:
        if id(module) not in self._prepared and id(module) not in self._others:
            found = {name: (b, version_of(b)) for name, b in own_buffers(module).items() if b is not None}
            self._others[id(module)] = module, found
            if torch.is_grad_enabled():  # not a teacher, which may be averaged where engine.stepped is true
                self._check_trained(module)

    def _check_trained(self, module: nn.Module) -> None:
        """An optimizer that was not prepared has changed it since an earlier item."""
        for name, parameter in own_parameters(module).items():
            if parameter is None or not parameter.requires_grad:
                continue
            if self._trained.setdefault(id(parameter), (parameter, version_of(parameter)))[1] != version_of(parameter):
                raise LoopError(
                    f"a {type(module).__name__} that engine.prepare() was not given is trained in the loop (its "
                    f"{name!r} has changed): its gradients are not summed, and each worker trains its own. Give it, "
                    "and its optimizer, to engine.prepare() with the model"
                )

    def _check_others(self) -> None:
        others, self._others = self._others, {}
        for module, buffers in others.values():
            for name, (buffer, version) in buffers.items():
                if own_buffers(module).get(name) is not buffer or version_of(buffer) != version:
                    raise LoopError(
                        f"a {type(module).__name__} that engine.prepare() was not given changes its buffer {name!r} in "
                        "forward: each lane would go on from what the last one on its worker left, and the numbers "
                        "depend on the workers. Give it to engine.prepare() with the model, or call it in eval mode"
                    )


def _is_plain(tensor: Tensor) -> bool:
    return (
        type(tensor) is Tensor
        and not tensor.requires_grad
        and tensor.layout is torch.strided
        and tensor.numel() <= LARGEST
    )


def _is_metric(module: nn.Module) -> bool:
    """torchmetrics' states are such tensors; they are reduced when the metric is computed, and enter no weights."""
    return any(kind.__module__.partition(".")[0] == "torchmetrics" for kind in type(module).__mro__)
