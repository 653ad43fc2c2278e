"""What torch's `fully_shard` hangs on modules, what it would lose there without a word, and how all of it comes off.

on a module                            put there by    here
forward hooks that gather, release     fully_shard     `outside_modes`: unseen by what watches operations
FSDP<class>, states, other hooks       fully_shard     `undo_fully_shard`: a plain module again
rows in place of parameters            fully_shard     `plain_parameter`: whole ones, as before
hooks on parameters                    the user        refused: nobody would call them
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import TensorWeakRef

from paceline.errors import ConfigError, LoopError


def check_no_gradient_hooks(named: Iterable[tuple[str, Parameter]]) -> None:
    for name, parameter in named:
        kinds = {
            "register_hook": "_backward_hooks",
            "register_post_accumulate_grad_hook": "_post_accumulate_grad_hooks",
        }
        for kind, kept_in in kinds.items():
            if getattr(parameter, kept_in, None):
                raise ConfigError(
                    f"parameter {name!r} has a hook ({kind}), which would never see its gradient under strategy='fsdp' "
                    "and 'hybrid': modules compute with weights that are gathered, and rows get the sum of all lanes. "
                    "Remove it, or use strategy='zero3', where hooks on parameters work"
                )


def outside_modes(hooks: dict[int, Callable[..., Any]], handle: RemovableHandle) -> None:
    """Checkpointing that keeps some results watches all operations, and must not take gathers for the model's.

    Nor may a forward in inference mode be the first to gather: torch keeps the tensors that it gathers into.
    """
    hook = hooks[handle.id]

    def unwatched(*args: Any) -> Any:
        with _disable_current_modes():
            if not torch.is_inference_mode_enabled():
                return hook(*args)
            with torch.inference_mode(False), torch.no_grad():
                return hook(*args)

    hooks[handle.id] = unwatched


def refuse_second_derivatives(module: nn.Module, args: Any, output: Any) -> None:
    """torch lets a unit's weights go after its backward, though a graph of that backward may still read them."""

    def look(_: Tensor) -> None:
        if torch.is_grad_enabled():
            raise LoopError(
                f"a backward with create_graph=True came to a {type(module).__name__}: torch's fully_shard lets "
                "weights go after their first backward, and can't differentiate twice; use strategy='zero3', which can"
            )

    for value in tree_leaves(output):
        if isinstance(value, Tensor) and value.requires_grad:
            value.register_hook(look)  # type: ignore[no-untyped-call]


# -- off again ---------------------------------------------------------------------------------------------------------


def first_parameters(module: nn.Module) -> dict[tuple[int, str], TensorWeakRef]:
    """Before `fully_shard`: the parameters by place, without keeping them. One that nobody else keeps is not missed."""
    return {
        (id(below), name): TensorWeakRef(parameter)
        for below in module.modules()
        for name, parameter in below.named_parameters(recurse=False)
    }


def place_of(cut: Any) -> tuple[int, str]:
    """Of torch's FSDPParam: where `first_parameters` found what it has cut."""
    return id(cut._module_info.module), cut._module_info.param_name


def plain_parameter(cut: Any, first: TensorWeakRef, device: torch.device) -> Parameter:
    """Put a whole parameter where torch's FSDPParam `cut` has rows: the first one, or one like it; of any values."""
    rows: Parameter = cut.sharded_param
    found: Any = first()
    if found is None or found.shape != cut._orig_size or found.device != device or found.dtype != rows.dtype:
        found = Parameter(torch.empty(cut._orig_size, dtype=rows.dtype, device=device))
    parameter: Parameter = found
    parameter.requires_grad_(rows.requires_grad)
    parameter.grad = None
    vars(parameter).pop("_fsdp_orig_uid", None)
    cut._setattr_on_modules(parameter)
    return parameter


def replace_in_optimizers(optimizers: Iterable[Optimizer], now: Mapping[int, Parameter]) -> None:
    """Let them hold other parameters, by id of those that they have, with the states of these."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"] = [now.get(id(parameter), parameter) for parameter in group["params"]]
        for parameter in list(optimizer.state):
            state = optimizer.state.pop(parameter)
            optimizer.state[now.get(id(parameter), parameter)] = state


def groups_of(state: Any) -> list[Any]:
    """Of parameters that are gathered together; before torch 2.13 there was at most one."""
    several = getattr(state, "_fsdp_param_groups", None)
    one = getattr(state, "_fsdp_param_group", None)
    return list(several) if several is not None else [one] if one is not None else []


def undo_fully_shard(module: Any) -> None:
    """Take off a module what is there besides parameters; what was gathered and cut is let go, whoever looks at it."""
    from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
    from torch.distributed._composable_state import _module_state_mapping
    from torch.distributed.fsdp import FSDPModule

    state = module._get_fsdp_state()
    for group in groups_of(state):
        for cut in group.fsdp_params:
            cut._post_load_hook_handle.remove()
        for handles in (
            group._module_to_pre_save_state_dict_hook_handle,
            group._module_to_pre_load_state_dict_hook_handle,
        ):
            for handle in handles.values():
                handle.remove()
    state._pre_forward_hook_handle.remove()
    state._post_forward_hook_handle.remove()
    _module_state_mapping.pop(module, None)
    for key, entry in ((STATE_KEY, fully_shard_key()), (REGISTRY_KEY, "fully_shard")):
        entries = module.__dict__.get(key, {})
        entries.pop(entry, None)
        if not entries:
            module.__dict__.pop(key, None)
    for below in module.modules():
        for mark in ("_is_fsdp_managed_module", "_fsdp_use_orig_params"):
            below.__dict__.pop(mark, None)
    place = type(module).__mro__.index(FSDPModule)
    module.__class__ = type(module).__mro__[place + 1]
    _let_go(state)


def fully_shard_key() -> Any:
    """What torch's registry of states calls it."""
    from torch.distributed.fsdp import fully_shard

    return fully_shard.__wrapped__  # type: ignore[attr-defined]


def _let_go(state: Any) -> None:
    """These objects hold each other, and a graph that the user still has holds them: their tensors go now."""
    for group in groups_of(state):
        for cut in group.fsdp_params:
            vars(cut).clear()
        vars(group).clear()
    vars(state._comm_ctx).clear()
    vars(state).clear()
