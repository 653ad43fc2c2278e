"""Range optimizers: the user's optimizer, updating pieces of parameters instead of whole ones.

    the user's    AdamW   lr 0.1   params: weight (6, 4096), bias (6,)      state of its own
    on pieces     AdamW   lr 0.1   params: weight[0:8192]                   state of its own        copied: all the rest

Most optimizers update each element from that element's own history, so a parameter cut into pieces gets the same bits.
Whether the user's does is not looked up in a list but tried at the start (`check_elementwise`), on random values.

Threads cut tensors too (`check_thread_cuts`):

    one thread       |·················· vectors ··················|       the last few elements one by one
    two threads      |······ vectors ······||······ vectors ·······|       … of each half

For most optimizers one by one or as a vector is the same; some (SGD in bf16) round differently. A worker that updates a
piece has its threads cut at other elements than one that updates the whole, so with several threads those are refused.
"""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from paceline.errors import ConfigError
from paceline.optim.group_settings import Settings
from paceline.optim.piece_state import State, scatter_state
from paceline.sharding.flat_layout import FlatLayout, joined, part_of
from paceline.torch_compat import OPTIMIZER_HOOKS

TRIAL_SHAPE = (17, 4099)  # seventeen blocks and a tail: threads share it, and no cut falls at the end of a row
TRIAL_STEPS = 8  # RAdam changes its rule in the sixth
PIECES = 3

# What belongs to one optimizer and not to its copy. `step` is there when the engine or a scheduler has put its own in
# place of the class's; that one would update the user's parameters.
_NOT_TAKEN_OVER = ("step", "zero_grad", "param_groups", "state")


def optimizer_on(
    optimizer: Optimizer,
    pieces_per_group: Sequence[Sequence[Tensor]],
    states: Mapping[Tensor, State] | None = None,
) -> Optimizer:
    """A copy of `optimizer` that updates the given pieces, starting from the given states where there are any.

    There is one list of pieces for each of the optimizer's groups; a group without pieces is left out of the copy.
    The user's hooks stay with the user's optimizer.
    """
    made: Optimizer = object.__new__(type(optimizer))
    for name, value in optimizer.__dict__.items():
        if name not in _NOT_TAKEN_OVER:
            made.__dict__[name] = _own(value)
    for name in OPTIMIZER_HOOKS:
        made.__dict__[name] = OrderedDict()
    made.param_groups = [
        {**_settings_of(group), "params": list(pieces)}
        for group, pieces in zip(optimizer.param_groups, pieces_per_group, strict=True)
        if pieces
    ]
    made.state = defaultdict(dict)
    for group in made.param_groups:
        for piece in group["params"]:
            if states is not None and piece in states:
                made.state[piece] = states[piece]
    return made


def _settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _own(value) for name, value in group.items() if name not in ("params", "param_names")}


def _own(value: Any) -> Any:
    """What a step may change in place must not be shared."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    return copy.copy(value) if isinstance(value, dict | list | set) else value


# -- can it run on ranges? ---------------------------------------------------------------------------------------------


def check_elementwise(
    optimizer: Optimizer, device: torch.device | str | None = None, *, is_told_settings: bool = False
) -> None:
    """Raise ConfigError unless pieces give the bits of whole parameters; nothing of the user's is touched.

    `is_told_settings`: the copy gets the script's settings, and nobody hears of those that it changes by itself.
    """
    reason = _why_not(optimizer, device)
    if reason is None and is_told_settings:
        with torch.random.fork_rng(devices=[]):
            name = _counted_by(optimizer, device)
        if name:
            reason = f"its step() changes {name!r} and goes on from that, and a server tells no worker of it"
    if reason is not None:
        raise ConfigError(
            f"optimizer {type(optimizer).__name__} can't run on ranges of parameters, which are spread over servers or "
            f"workers: {reason}. Train with strategy='ddp', where every worker updates whole parameters"
        )


def _why_not(optimizer: Optimizer, device: torch.device | str | None) -> str | None:
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        return "its step() needs a closure, to run forward and backward again inside the update"
    inner = next((name for name, value in optimizer.__dict__.items() if isinstance(value, Optimizer)), None)
    if inner is not None:
        return f"it wraps another optimizer, its attribute {inner!r}, which keeps parameters of its own"
    other = next((name for name in ("train", "eval") if callable(getattr(type(optimizer), name, None))), None)
    if other is not None:
        return f"its {other}() changes parameters too, and would find the whole ones without the state that it needs"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        try:
            return _trial(optimizer, device)
        except Exception as error:
            return f"a step on one-dimensional pieces raised {type(error).__name__}: {error}"


def _trial(optimizer: Optimizer, device: torch.device | str | None) -> str | None:
    """A random matrix for each group and precision in it, updated whole, and in pieces that are not updated together.

    What differs says why pieces won't do: the updated values, what is kept for each element, or the group's settings
    (a step size that the optimizer finds from all elements may stay what it was for the few steps of a trial).
    """
    of_group = [[_like(p, device) for p in _one_of_each_dtype(group["params"])] for group in optimizer.param_groups]
    models = [model for some in of_group for model in some]
    layout = FlatLayout.of(("", model) for model in models)
    cuts = [layout.split(number, PIECES) for number in range(len(models))]
    wholes = [Parameter(model.clone()) for model in models]
    parts = [[Parameter(part_of(model, cut).clone()) for cut in cuts[n]] for n, model in enumerate(models)]
    groups, states = list[list[int]](), dict[Tensor, State]()
    for group, some in zip(optimizer.param_groups, of_group, strict=True):
        groups.append([sum(map(len, groups)) + place for place in range(len(some))])
        for number in groups[-1]:
            kept = [p for p in group["params"] if optimizer.state.get(p) and p.dim() and p.numel()]
            example = next((p for p in kept if p.dtype == models[number].dtype), None)
            if example is not None:  # Adagrad makes its state when it is made, not in its first step
                state = {
                    name: grown(value, example, wholes[number]) for name, value in optimizer.state[example].items()
                }
                states[wholes[number]] = state
                states |= dict(zip(parts[number], scatter_state(state, TRIAL_SHAPE, cuts[number]), strict=True))
    on_wholes = optimizer_on(optimizer, [[wholes[number] for number in some] for some in groups], states)
    on_parts = [
        optimizer_on(optimizer, [[parts[number][piece] for number in some] for some in groups], states)
        for piece in range(PIECES)
    ]
    for made in (on_wholes, *on_parts):
        for group in made.param_groups:
            _wake(group)
    for _ in range(TRIAL_STEPS):
        for number, whole in enumerate(wholes):
            whole.grad = torch.randn_like(whole) * torch.rand_like(whole)
            for part, cut in zip(parts[number], cuts[number], strict=True):
                part.grad = part_of(whole.grad, cut).clone()
        for made in (on_wholes, *on_parts):
            made.step()
    for number, (whole, model) in enumerate(zip(wholes, models, strict=True)):
        if _same_bits(whole, model):
            return "its step() did not change the parameters in its param_groups"
        if not _same_bits(whole, joined([part.detach() for part in parts[number]], TRIAL_SHAPE)):
            return "it gave a parameter cut into pieces another update than the whole one"
        for name, value in on_wholes.state[whole].items():
            if isinstance(value, Tensor) and value.shape == whole.shape:
                kept_parts = [made.state[part][name] for made, part in zip(on_parts, parts[number], strict=True)]
                if not _same_bits(value, joined(kept_parts, TRIAL_SHAPE)):
                    return f"what it keeps as {name!r} differs for a parameter cut into pieces"
    for made in on_parts:
        for mine, theirs in zip(made.param_groups, on_wholes.param_groups, strict=True):
            changed = [name for name, value in _settings_of(theirs).items() if not _equal(value, mine.get(name))]
            if changed:
                return f"its step() finds {changed[0]!r} from all elements of its parameters together"
    return None


def _counted_by(optimizer: Optimizer, device: torch.device | str | None) -> str:
    """A setting that its step() changes by itself: with all settings put back after every step its updates differ."""
    drawn = [[_like(p, device) for p in _one_of_each_dtype(group["params"])] for group in optimizer.param_groups]
    free, told = (_on_copies(optimizer, drawn) for _ in range(2))
    before = Settings.of(told)
    for _ in range(TRIAL_STEPS):
        for one, other in zip(_wholes_of(free), _wholes_of(told), strict=True):
            one.grad = torch.randn_like(one)
            other.grad = one.grad.clone()
        free.step()
        told.step()
        before.put_back(told)
    if all(_same_bits(one, other) for one, other in zip(_wholes_of(free), _wholes_of(told), strict=True)):
        return ""
    after = Settings.of(free)
    pairs = [*zip(before.groups, after.groups, strict=True), (before.numbers, after.numbers)]
    return next((n for old, new in pairs for n, value in new.items() if not _equal(value, old.get(n))), "a setting")


def _on_copies(optimizer: Optimizer, drawn: Sequence[Sequence[Tensor]]) -> Optimizer:
    """Of each group one matrix of each precision."""
    groups = [[Parameter(one.clone()) for one in some] for some in drawn]
    states = dict[Tensor, State]()
    for group, wholes in zip(optimizer.param_groups, groups, strict=True):
        for example, whole in zip(_one_of_each_dtype(group["params"]), wholes, strict=True):
            if kept := optimizer.state.get(example):
                states[whole] = {name: grown(value, example, whole) for name, value in kept.items()}
    made = optimizer_on(optimizer, groups, states)
    for group in made.param_groups:
        _wake(group)
    return made


def _wholes_of(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _one_of_each_dtype(parameters: Sequence[Tensor]) -> list[Tensor]:
    return list({p.dtype: p for p in reversed(parameters)}.values()) or [torch.empty(0)]


def _like(example: Tensor, device: torch.device | str | None) -> Tensor:
    return torch.randn(TRIAL_SHAPE).to(device if device is not None else example.device, example.dtype)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return bool(one == other)


def _wake(group: dict[str, Any]) -> None:
    """A schedule that warms up starts at a learning rate of zero, which would hide everything."""
    if "lr" in group and float(group["lr"]) == 0.0:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(1e-3)
        else:
            group["lr"] = 1e-3


def grown(value: Any, example: Tensor, whole: Tensor) -> Any:
    """What the optimizer keeps for `example`, as it would keep it for a parameter like `whole`."""
    if not isinstance(value, Tensor):
        return value
    if value.shape != example.shape:
        return value.detach().clone()
    values = value.detach().reshape(-1).to(whole.device)
    return values.repeat(-(-whole.numel() // values.numel()))[: whole.numel()].view(whole.shape)


def _same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.detach().contiguous().view(torch.uint8), other.detach().contiguous().view(torch.uint8))


# -- does it matter how many threads share a tensor? -------------------------------------------------------------------

SHARED_FROM = 32768  # elements: torch lets several threads share a tensor that has more for each
_LEFT_OVER = 31  # of every thread's part: one less than the longest vector
_TENSORS, _STEPS = 4, 8


def check_thread_cuts(optimizer: Optimizer) -> None:
    """Raise ConfigError if the update of a tensor depends on how many threads share it; nothing is touched."""
    threads = torch.get_num_threads()
    if threads == 1:
        return
    for dtype in sorted(_dtypes_that_threads_share(optimizer), key=str):
        several = _updated(optimizer, dtype, threads)
        try:
            torch.set_num_threads(1)
            alone = _updated(optimizer, dtype, threads)
        finally:
            torch.set_num_threads(threads)
        if not all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(several, alone, strict=True)):
            raise ConfigError(
                f"optimizer {type(optimizer).__name__} gives {str(dtype).removeprefix('torch.')} parameters other bits "
                f"where {threads} threads share a tensor than where one updates it, so the pieces that workers own "
                "would differ from the whole; start with --threads 1, keep parameters in fp32, or train with "
                "strategy='ddp'"
            )


def _dtypes_that_threads_share(optimizer: Optimizer) -> set[torch.dtype]:
    parameters: list[Tensor] = [p for group in optimizer.param_groups for p in group["params"]]
    return {p.dtype for p in parameters if p.numel() > SHARED_FROM and p.device.type == "cpu"}


def _updated(optimizer: Optimizer, dtype: torch.dtype, parts: int) -> list[Tensor]:
    """Random tensors for each group, after some steps; the same ones whenever it is called."""
    elements = parts * (SHARED_FROM + _LEFT_OVER)
    drawn = torch.Generator().manual_seed(0)

    def values() -> Tensor:
        return torch.randn(elements, generator=drawn).to(dtype)

    groups = [[Parameter(values()) for _ in range(_TENSORS)] for _ in optimizer.param_groups]
    states: dict[Tensor, State] = {}
    for theirs, group in zip(optimizer.param_groups, groups, strict=True):
        example = next((p for p in theirs["params"] if optimizer.state.get(p) and p.dim() and p.numel()), None)
        if example is not None:
            kept = optimizer.state[example]
            states |= {whole: {name: grown(value, example, whole) for name, value in kept.items()} for whole in group}
    made = optimizer_on(optimizer, groups, states)
    for _ in range(_STEPS):
        for parameter in (p for group in groups for p in group):
            parameter.grad = values()
        made.step()
    return [parameter.detach() for group in groups for parameter in group]


# -- how much state does it keep? --------------------------------------------------------------------------------------

_TRIED = 4096


def state_bytes(optimizer: Optimizer) -> float | None:
    """Bytes per element, over groups by their sizes; None: it does not run on a piece of a parameter."""
    groups = optimizer.param_groups
    sizes = [sum(p.numel() for p in group["params"] if p.requires_grad) for group in groups]
    pieces = [[torch.zeros(_TRIED)] for _ in groups]
    for (piece,) in pieces:
        piece.grad = torch.zeros(_TRIED)
    try:
        made = optimizer_on(optimizer, pieces)
        made.step()
    except Exception:  # whatever an optimizer of the user's own raises: it is only a question
        return None
    kept = [sum(value.nbytes for value in made.state[piece].values() if _per_element(value)) for (piece,) in pieces]
    everything = sum(sizes)
    return sum(k * size for k, size in zip(kept, sizes, strict=True)) / _TRIED / everything if everything else 0.0


def _per_element(value: object) -> bool:
    return isinstance(value, Tensor) and value.numel() == _TRIED
