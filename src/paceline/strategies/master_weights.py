"""Master weights: the fp32 weights behind parameters that compute in low precision, kept where the optimizer updates.

                     forward, backward     update                                       afterwards
    ddp, star        bf16 parameter        the parameter *is* its master, in fp32       the master is rounded into it
    zero1, zero2     bf16 parameter        this worker's pieces of it, in fp32          they are rounded, then gathered

A master rounds to its parameter. Where it does not, the script has written to the parameter (it loaded weights, or
clamped them) and the parameter is right there: `take_over` decides it element by element. A parameter that is frozen
loses its master; when it is trained again it starts from what it computed with.

A job in fp32 has these objects too: no parameter has a master then, and nothing is done.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from paceline.optim.offload import HOST, Offload
from paceline.optim.piece_state import like
from paceline.optim.precision import lower
from paceline.sharding.flat_layout import Piece, PieceOf, in_logical_order, part_of, piece_of
from paceline.strategies.registry import Job
from paceline.strategies.strategy import WriteWatch
from paceline.torch_compat import foreach_copy_

MASTER = "master"  # among what is kept for a piece, when pieces go to other owners


def take_over(master: Tensor, parameter: Tensor) -> None:
    """Make the elements of `master` that don't round to the parameter's the parameter's."""
    low = parameter.detach().to(master.device)
    master.copy_(torch.where(master.to(low.dtype) == low, master, low.to(master.dtype)))


class _Masters(WriteWatch):
    """Which parameters have masters, and when they were last right."""

    def __init__(self, job: Job, kept_on: torch.device | None = None) -> None:
        super().__init__()
        self._lowered = lowered = lower(job.models, job.precision)
        self._originals = lowered.originals if lowered else {}
        self._low = {id(parameter): parameter for parameter in lowered.low} if lowered else {}
        self.any = lowered is not None or kept_on is not None  # whether a parameter can have one
        self._hooks = [h for o in job.optimizers for h in _load_in_full_precision(o, self, kept_on)] if self.any else []

    def has(self, parameter: Tensor) -> bool:
        return id(parameter) in self._low

    def dtype_of(self, parameter: Tensor) -> torch.dtype:
        """A master is more precise than its parameter if that was lowered for it, and not just elsewhere."""
        return torch.float32 if id(parameter) in self._low else parameter.dtype

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        if self._lowered is not None:
            self._lowered.close()


class FullMasters(_Masters):
    """Every worker has all of them."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._masters = self._originals
        self._rounded: dict[int, Tensor] = {}  # by id: what the parameter holds when it is not its master

    def drop_frozen(self) -> None:
        for parameter in self._low.values():
            if not parameter.requires_grad:
                self._masters.pop(id(parameter), None)

    def full(self, parameter: Parameter) -> Tensor:
        """The newest values, in fp32."""
        if id(parameter) not in self._masters:
            self._masters[id(parameter)] = parameter.detach().float()
        master = self._masters[id(parameter)]
        if id(parameter) not in self._rounded and self.was_written(parameter):
            take_over(master, parameter)
            self.mark_clean([parameter])
        return master

    def load_full(self, parameter: Parameter, full: Tensor) -> None:
        with torch.no_grad():
            self.full(parameter).copy_(full)
            parameter.copy_(full)
        self.mark_clean([parameter])

    def step_in(self, parameters: Iterable[Parameter]) -> None:
        """Let the parameters be their masters, until they are `rounded`: gradients and updates are in fp32."""
        for parameter in filter(self.has, parameters):
            master = self.full(parameter)
            if id(parameter) not in self._rounded:
                self._rounded[id(parameter)] = parameter.data
                parameter.data = master

    def round(self, parameters: Iterable[Parameter]) -> None:
        """Let the parameters be in low precision again, with what their masters have become."""
        changed = [parameter for parameter in parameters if id(parameter) in self._rounded]
        if not changed:
            return
        lows = [self._rounded.pop(id(parameter)) for parameter in changed]
        masters = [parameter.data for parameter in changed]
        foreach_copy_(lows, masters)
        for parameter, low, master in zip(changed, lows, masters, strict=True):
            self._masters[id(parameter)] = master
            parameter.grad = None
            parameter.data = low
        self.mark_clean(changed)

    def teardown(self) -> None:
        """Let the parameters be their masters for good. What was frozen has none, and stays as it is."""
        for parameter in self._low.values():
            if parameter.requires_grad or id(parameter) in self._masters:
                master = parameter.data if id(parameter) in self._rounded else self.full(parameter)
                parameter.grad = None
                parameter.data = master
        self._rounded.clear()
        self._masters.clear()
        self.close()


class Pieces(Protocol):
    """This worker's pieces of some parameters, and where their values are."""

    parameters: list[Parameter]
    tensors: dict[Piece, Tensor]


class MasterShards(_Masters):
    """This worker has those of its own pieces; before pieces are assigned for the first time, all that there were.

    With `offload` they are on the host, also those of parameters in fp32.
    """

    def __init__(self, job: Job, offload: Offload | None = None) -> None:
        super().__init__(job, kept_on=None if offload is None else HOST)
        self._offload = offload
        self.rounded: PieceOf = piece_of  # where a piece lies rounded: in the model, or wherever its weights are

    def has(self, parameter: Tensor) -> bool:
        return self._offload is not None or super().has(parameter)

    def of_piece(self, parameter: Parameter, piece: Piece) -> Tensor:
        """Where the values of a piece are kept; those of a master that had an owner before come with its state."""
        if not self.has(parameter):
            return piece_of(parameter, piece)
        original, rounded = self._originals.get(id(parameter)), self.rounded(parameter, piece)
        if original is None:
            master = rounded.detach().to(self.dtype_of(parameter))
        else:
            master = part_of(original, piece) if in_logical_order(parameter) else original
            take_over(master, rounded)
        if self._offload is not None:
            return self._offload.host_copy(master)
        return master if piece.elements == parameter.numel() else master.clone()

    def before_assignment(self, parameter: Parameter) -> Tensor:
        """What a master is as long as its pieces have no owners."""
        original = self._originals.get(id(parameter))
        if original is None:
            return parameter.detach().to(self.dtype_of(parameter))
        take_over(original, parameter)
        return original

    def load_before_assignment(self, parameter: Parameter, full: Tensor) -> None:
        """In memory as the parameter lies, which is how an update walks it."""
        layout = parameter.shape, parameter.stride()
        kept = torch.empty_strided(*layout, dtype=self.dtype_of(parameter), device=parameter.device)
        self._originals[id(parameter)] = kept.copy_(full.detach())

    def assigned(self, parameters: Iterable[Parameter]) -> None:
        """Their owners have them."""
        if self._originals:
            for parameter in parameters:
                self._originals.pop(id(parameter), None)

    def load_piece(self, pieces: Pieces, piece: Piece, full: Tensor) -> None:
        """The piece's part of a full master."""
        parameter, tensor = pieces.parameters[piece.parameter], pieces.tensors[piece]
        tensor.copy_(part_of(full, piece) if in_logical_order(parameter) else full)

    def take_over_writes(self, pieces: Pieces) -> None:
        """Before a step: take over what the script wrote to parameters since the last one."""
        written = {number for number, p in enumerate(pieces.parameters) if self.has(p) and self.was_written(p)}
        for piece, tensor in pieces.tensors.items():
            if piece.parameter in written:
                take_over(tensor, self.rounded(pieces.parameters[piece.parameter], piece))
        self.mark_clean(pieces.parameters[number] for number in written)

    def round(self, pieces: Pieces, of: Iterable[Piece]) -> None:
        """Write own pieces into the model, or wherever its weights are."""
        changed = [piece for piece in of if self.has(pieces.parameters[piece.parameter])]
        if not changed:
            return
        parts = [self.rounded(pieces.parameters[piece.parameter], piece) for piece in changed]
        masters = [pieces.tensors[piece] for piece in changed]
        if self._offload is None:
            foreach_copy_(parts, masters)
        else:
            self._offload.give(parts, masters)

    def teardown(self) -> None:
        """Give parameters that were lowered memory in full precision, for values that are still to come."""
        for parameter in self._low.values():
            if parameter.requires_grad or id(parameter) in self._originals:
                parameter.grad = None
                parameter.data = torch.empty_strided(
                    parameter.shape, parameter.stride(), dtype=torch.float32, device=parameter.device
                )
        self._originals.clear()
        self.close()


# -- states of optimizers ----------------------------------------------------------------------------------------------


def _load_in_full_precision(optimizer: Optimizer, masters: _Masters, kept_on: torch.device | None) -> list[Any]:
    """torch would cast a state that it loads to its parameter's precision and device; a master's is elsewhere.

    So the states of masters are taken out before and put in afterwards; `kept_on` is where masters are kept.
    """
    given: list[dict[str, Any]] = []

    def before(_: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        given[:] = [state]
        taken_out = masters_of(state)
        return {**state, "state": {number: v for number, v in state["state"].items() if number not in taken_out}}

    def masters_of(state: dict[str, Any]) -> dict[Any, tuple[Parameter, dict[str, Any]]]:
        numbers = [number for group in state["param_groups"] for number in group["params"]]
        mine = [(parameter, group) for group in optimizer.param_groups for parameter in group["params"]]
        return {number: found for number, found in zip(numbers, mine, strict=False) if masters.has(found[0])}

    def after(_: Optimizer) -> None:
        (state,) = given
        given.clear()
        for number, (parameter, group) in masters_of(state).items():
            if number in state["state"]:
                where = kept_on or parameter.device, masters.dtype_of(parameter)
                kept = {k: placed(k, v, group, *where) for k, v in state["state"][number].items()}
                optimizer.state[parameter] = kept

    return [optimizer.register_load_state_dict_pre_hook(before), optimizer.register_load_state_dict_post_hook(after)]


def placed(name: str, value: Any, group: Mapping[str, Any], device: torch.device, dtype: torch.dtype) -> Any:
    """As torch places it: a count of steps goes to the device for those who look at it there."""
    if not isinstance(value, Tensor):
        return value
    if name == "step" and not group.get("capturable") and not group.get("fused"):
        return value.detach().clone()
    # A number of the whole parameter, as NAdam's product of momenta, stays in the precision that it was made in: torch
    # would turn it into the parameter's, and a run that was stopped would end with other bits.
    return value.detach().to(device, dtype if value.is_floating_point() and value.dim() else value.dtype, copy=True)


def load_exactly(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """`optimizer.load_state_dict`, to the very state that was saved.

    torch casts numbers that belong to a whole parameter to its precision. And what is kept for each element has to lie
    in memory as the parameter does: fused optimizers walk both by memory.
    """
    optimizer.load_state_dict(state)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for place, saved in state["state"].items():
        parameter = parameters[place]
        for name, value in saved.items():
            loaded = optimizer.state[parameter].get(name)
            if not isinstance(loaded, Tensor) or not isinstance(value, Tensor):
                continue
            if not value.dim() and loaded.dtype != value.dtype:
                loaded = value.detach().to(loaded.device, copy=True)
            if loaded.shape == parameter.shape:
                loaded = like(parameter, loaded)
            optimizer.state[parameter][name] = loaded
