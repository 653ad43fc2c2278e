"""The models under torch's `fully_shard`: it places, gathers and releases weights, and hands each unit's gradient over.

    fully_shard                                     here
    DTensor parameters, rows of dim 0               stand in the modules, and in the users' optimizers
    all-gather before forward and backward          through our own group, whose errors name the worker that is missing
    reduce-scatter after a unit's backward          `on_gradient(unit, flat)`: nothing is reduced, `.grad` means nothing

torch asks for a mesh with a process group. Ours has a rank and a size and can do nothing: all that would go through it
goes through the two hooks above. So a default group that the user has or will have is not touched, and none is needed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import _register_process_group, _unregister_process_group
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from paceline.collectives.communicator import Communicator
from paceline.strategies.fsdp_rows import RowMember, RowShards
from paceline.strategies.fsdp_units import Units, kept_whole, unit_modules

_meshes = itertools.count()
OnGradient = Callable[["ShardedUnit", Tensor], None]


class ShardedUnit:
    """One module under `fully_shard`, and what torch keeps for it."""

    def __init__(self, number: int, module: Any, group: Any, workers: int) -> None:
        self.number, self.module, self.workers = number, module, workers
        self._group = group
        self.cuts: list[Any] = group.fsdp_params  # torch's FSDPParam of each parameter
        self._hooked: dict[int, RemovableHandle] = {}

    @property
    def parameters(self) -> list[Parameter]:
        return [cut.sharded_param for cut in self.cuts]

    @property
    def forwards(self) -> int:
        """How often it ran since the last backward: so often its gradient may come."""
        return len(self._group._post_forward_indices)

    def rows(self, index: dict[int, int]) -> RowShards | None:
        """How its gradients lie; `index` numbers those that are wanted, by id. None: nothing of it is trained."""
        members = [
            RowMember(index.get(id(cut.sharded_param)), tuple(cut.sharded_param.shape))
            for cut in self.cuts
            if cut.sharded_param.requires_grad
        ]
        if all(member.parameter is None for member in members):
            return None
        first = self.cuts[0].sharded_param
        return RowShards.of(members, self.workers, first.dtype, first.device)

    def watch(self, seen: Callable[[Parameter], None]) -> None:
        """Call `seen` whenever a parameter gets a gradient; parameters are there once forward has run."""
        for cut in self.cuts:
            unsharded = getattr(cut, "_unsharded_param", None)
            if unsharded is not None and unsharded.requires_grad and id(cut) not in self._hooked:
                self._hooked[id(cut)] = unsharded.register_post_accumulate_grad_hook(
                    lambda _, parameter=cut.sharded_param: seen(parameter)
                )

    def own_rows(self, parameter: Parameter) -> Tensor:
        """This worker's part of a parameter: one range of its elements, in memory that gathers read."""
        cut = next(cut for cut in self.cuts if cut.sharded_param is parameter)
        rows: Tensor = cut._sharded_param_data
        return rows

    def unhook(self) -> None:
        for hook in self._hooked.values():
            hook.remove()
        self._hooked.clear()


class ShardedModels:
    def __init__(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        comm: Communicator,
        device: torch.device,
        wanted: Units,
    ) -> None:
        self._comm, self._pool = comm, _Pool()
        self._mesh_name: Any = f"paceline fsdp {next(_meshes)}"
        before = [list(model.named_parameters(remove_duplicate=False)) for model in models]
        self._group = _group(self._mesh_name, comm)  # torch's registry does not keep it alive
        mesh = _mesh(self._mesh_name, comm, device)
        self.units: list[ShardedUnit] = []
        for model in models:
            self.units += self._shard(model, mesh, wanted)
        self._unit_of = {id(p): unit for unit in self.units for p in unit.parameters}
        _swap(models, before, optimizers)
        self.on_gradient: OnGradient = lambda unit, flat: None
        self.on_seen: Callable[[Parameter], None] = lambda parameter: None

    def _shard(self, model: nn.Module, mesh: Any, wanted: Units) -> Iterator[ShardedUnit]:
        """Units in the order in which backward comes to them: the last of the model first, the model itself last."""
        from torch.distributed.fsdp import fully_shard

        inner = unit_modules(model, wanted)
        whole = kept_whole(model, inner)
        for number, module in enumerate([*reversed(inner), model], start=len(self.units)):
            sharded: Any = fully_shard(module, mesh=mesh, ignored_params=whole)
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(True)
            sharded.set_reduce_scatter_unused_params(True)
            group = sharded._get_fsdp_state()._fsdp_param_group
            if group is not None:
                unit = ShardedUnit(number, sharded, group, self._comm.size)
                sharded.set_custom_all_gather(_Gather(self._comm))
                sharded.set_custom_reduce_scatter(_HandOver(unit, self))
                yield unit

    # -- gradients ---------------------------------------------------------------------------------------------------

    def watch(self) -> None:
        for unit in self.units:
            unit.watch(lambda parameter: self.on_seen(parameter))

    def take_back(self, flat: Tensor) -> None:
        """A gradient that was handed over is not needed any more."""
        self._pool.give_back(flat)

    def drop_gradients(self) -> None:
        """What torch has put into `.grad` is memory that nobody wrote to."""
        for unit in self.units:
            for parameter in unit.parameters:
                parameter.grad = None

    # -- weights -----------------------------------------------------------------------------------------------------

    def holds(self, parameter: Tensor) -> bool:
        return id(parameter) in self._unit_of

    def unit_of(self, parameter: Tensor) -> ShardedUnit | None:
        return self._unit_of.get(id(parameter))

    def own_rows(self, parameter: Parameter) -> Tensor:
        return self._unit_of[id(parameter)].own_rows(parameter)

    def whole(self, parameter: Parameter) -> Tensor:
        rows, handle = self._comm.all_gather(self.own_rows(parameter))
        handle.wait()
        return rows.view(-1)[: parameter.numel()].view(parameter.shape)

    def put(self, parameter: Parameter, whole: Tensor) -> None:
        own = self.own_rows(parameter)
        low, high = RowMember(0, tuple(parameter.shape)).owned(self._comm.rank, self._comm.size)
        own[: high - low] = whole.detach().reshape(-1)[low:high]
        self.release()

    def release(self) -> None:
        """Weights have changed: what was gathered before is old. Roots keep theirs after a forward without backward."""
        for unit in self.units:
            unit.module.reshard()

    def close(self) -> None:
        for unit in self.units:
            unit.unhook()
        _unregister_process_group(self._mesh_name)


def _group(name: Any, comm: Communicator) -> Any:
    hollow: Any = dist.ProcessGroup
    group = hollow(comm.rank, comm.size)
    group._set_group_name(name)
    _register_process_group(name, group)
    return group


def _mesh(name: Any, comm: Communicator, device: torch.device) -> Any:
    from torch.distributed.device_mesh import DeviceMesh

    mesh = DeviceMesh(device.type, list(range(comm.size)), _init_backend=False, _rank=comm.rank)
    mesh._dim_group_names = [name]
    return mesh


def _swap(
    models: Sequence[nn.Module], before: Sequence[Sequence[tuple[str, Parameter]]], optimizers: Sequence[Optimizer]
) -> None:
    """Let the users' optimizers hold what stands in the modules now, with the states they had."""
    now: dict[int, Parameter] = {}
    for model, old in zip(models, before, strict=True):
        new = dict(model.named_parameters(remove_duplicate=False))
        now |= {id(parameter): new[name] for name, parameter in old}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"] = [now.get(id(parameter), parameter) for parameter in group["params"]]
        for parameter in list(optimizer.state):
            state = optimizer.state.pop(parameter)
            optimizer.state[now.get(id(parameter), parameter)] = state


class _Pool:
    """Buffers of gradients that have travelled; blocks that are alike use the same ones."""

    def __init__(self) -> None:
        self._free: dict[int, list[Tensor]] = {}

    def take(self, elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        free = self._free.get(elements)
        return free.pop() if free else torch.empty(elements, dtype=dtype, device=device)

    def give_back(self, flat: Tensor) -> None:
        self._free.setdefault(flat.numel(), []).append(flat)


class _Gather:
    """torch's all-gather of a unit: `mine` is this worker's row of `rows`, in the same memory."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> None:
        rows, handle = self._comm.all_gather(input_tensor)
        handle.wait()
        output_tensor.view(self._comm.size, -1).copy_(rows)


class _HandOver:
    """torch's reduce-scatter of a unit: the input goes to the strategy, the output is nothing that anybody reads."""

    def __init__(self, unit: ShardedUnit, models: ShardedModels) -> None:
        self._unit, self._models = unit, models

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self._models._pool.take(size[0], dtype, device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        self._models.take_back(output_tensor)
        for parameter in self._unit.parameters:  # torch would add to one that is there, in memory that is ours again
            parameter.grad = None
        self._models.on_gradient(self._unit, input_tensor)
