"""Replicas: what all workers must hold alike, checked at the start and watched during the run.

`weights_hash` is the oracle: sha256 over (name, dtype, shape, little-endian bytes) of parameters and persistent buffers
in sorted name order, tied names once each. At start every worker hashes every tensor and the first difference is named.
During the run a 64-bit integer sum of a rotating part of the weights travels with each vote: about 0.05 ms a step.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import UninitializedParameter
from torch.optim import Optimizer

from paceline.collectives.communicator import Communicator
from paceline.errors import ConfigError, ReplicaError

FullTensorOf = Callable[[Tensor], Tensor]  # all of a parameter or buffer, of which the model may hold a part


def plain_name(name: str) -> str:
    """torch.compile and torch's wrappers put their own words into names; the weights are the same."""
    return name.replace("_orig_mod.", "")


def parameter_names(models: Sequence[nn.Module]) -> dict[int, str]:
    """The name of each parameter, by its id."""
    return {id(parameter): plain_name(name) for model in models for name, parameter in model.named_parameters()}


def named_state(models: Sequence[nn.Module]) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name; a name is prefixed by its model's place when there are several."""
    state: dict[str, Tensor] = {}
    for place, model in enumerate(models):
        prefix = f"{place}." if len(models) > 1 else ""
        for name, value in model.state_dict(keep_vars=True).items():
            if isinstance(value, Tensor):
                state[prefix + plain_name(name)] = value
    return dict(sorted(state.items()))


def tensor_bytes(tensor: Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data


def weights_hash(models: Sequence[nn.Module], full_tensor: FullTensorOf = Tensor.detach) -> str:
    return "sha256:" + hash_of(named_state(models), full_tensor)


def hash_of(state: Mapping[str, Tensor], full_tensor: FullTensorOf = Tensor.detach) -> str:
    """One tensor after another is gathered: all of them together may not fit into memory."""
    digest = hashlib.sha256()
    for name, part in sorted(state.items()):
        tensor = full_tensor(part)
        digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        digest.update(tensor_bytes(tensor))
    return digest.hexdigest()


WRAPPERS = ("DataParallel", "DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule")


def wrapper_of(module: nn.Module) -> str | None:
    """Its name, if it is one of torch's that sum gradients: between processes, or one process's devices."""
    return min({kind.__name__ for kind in type(module).__mro__} & {*WRAPPERS}, default=None)


def check_bare(models: Sequence[nn.Module]) -> None:
    """Models whose parameters have their size, and whose gradients no other library sums."""
    for model in models:
        for module in model.modules():
            if wrapper := wrapper_of(module):
                alone = wrapper == "DataParallel"
                harm = "each worker would run it on all GPUs" if alone else "its gradients would be summed twice"
                raise ConfigError(
                    f"engine.prepare() got a model in a {wrapper} of torch: {harm}; "
                    "give the model itself, and say Engine(strategy=…): 'ddp', 'zero2', 'fsdp' …"
                )
        for name, parameter in model.named_parameters():
            if isinstance(parameter, UninitializedParameter):
                raise ConfigError(
                    f"the parameter {name!r} of a lazy module has no shape yet; run the model once on a batch before "
                    "its optimizer is made and engine.prepare() is called"
                )


def check_belong_together(
    models: Sequence[nn.Module], optimizers: Sequence[Optimizer], schedulers: Sequence[Any]
) -> None:
    """What an optimizer changes that is no model's is trained by each worker for itself, if at all."""
    known = {id(parameter) for model in models for parameter in model.parameters()}
    for optimizer in optimizers:
        name, trained = type(optimizer).__name__, [p for group in optimizer.param_groups for p in group["params"]]
        closure = inspect.signature(type(optimizer).step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise ConfigError(
                f"prepare() got a {name}, whose step() needs a closure, to run forward and backward again inside the "
                "update: an update has one gradient here, that of the global batch. Take an optimizer without"
            )
        strange = [parameter for parameter in trained if id(parameter) not in known]
        if trained and len(strange) == len(trained):
            raise ConfigError(
                f"prepare() got a {name} none of whose {len(trained)} parameters belongs to a model given to it; "
                "make the optimizer from the model that is prepared: a copy of it has parameters of its own"
            )
        if strange:
            raise ConfigError(
                f"prepare() got a {name} of whose {len(trained)} parameters {len(strange)} belong to no model given to "
                f"it, the first of shape {tuple(strange[0].shape)}; put them into a module, and prepare that too"
            )
    for scheduler in schedulers:
        followed = getattr(scheduler, "optimizer", None)
        if isinstance(followed, Optimizer) and not any(followed is optimizer for optimizer in optimizers):
            raise ConfigError(
                f"prepare() got a {type(scheduler).__name__} of an optimizer that was not given to it; "
                "make the scheduler from the optimizer that is prepared"
            )


def check_same_models(comm: Communicator, models: Sequence[nn.Module]) -> None:
    """Raise on every worker, naming the first tensor that is not alike."""
    if comm.size == 1:  # and nothing to hash
        return
    mine = {}
    for name, tensor in named_state(models).items():
        mine[name] = [str(tensor.dtype), list(tensor.shape), list(tensor.stride()), _short_hash(tensor)]
    summary = hashlib.sha256(repr(mine).encode()).hexdigest()
    if len(set(comm.gather_json(summary))) == 1:
        return
    tables: list[dict[str, list[Any]]] = comm.gather_json(mine)
    for rank, table in enumerate(tables):
        complaints = list(_differences(tables[0], table))
        if complaints:
            # Another shape says more about the cause than the other values that come with it.
            first = next((text for text in complaints if "other values" not in text), complaints[0])
            raise ReplicaError(
                f"the models differ: {first.format(rank=rank)}; "
                "build the model from the same seed and config on every worker (create the Engine before the model)"
            )


def _differences(first: Mapping[str, list[Any]], other: Mapping[str, list[Any]]) -> Iterator[str]:
    for name in sorted(first.keys() | other.keys()):
        if name not in other:
            yield f"worker {{rank}} has no {name!r}, worker 0 has"
        elif name not in first:
            yield f"worker {{rank}} has {name!r}, worker 0 has not"
        elif first[name] != other[name]:
            words = ("dtype", "shape", "memory layout", "values")
            place = next(place for place in range(4) if first[name][place] != other[name][place])
            if words[place] == "values":
                yield f"{name!r} has other values on worker {{rank}} than on worker 0"
            else:
                theirs, ours = other[name][place], first[name][place]
                yield f"{name!r} has {words[place]} {theirs} on worker {{rank}}, {ours} on worker 0"


def _short_hash(tensor: Tensor) -> str:
    if tensor.is_meta:
        return "no values yet"
    return hashlib.sha256(tensor_bytes(tensor)).hexdigest()[:16]
