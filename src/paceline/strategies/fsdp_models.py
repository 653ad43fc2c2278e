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
from torch import Tensor, nn
from torch._C._distributed_c10d import _unregister_process_group
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import TensorWeakRef

from paceline.collectives.communicator import Communicator
from paceline.errors import LoopError
from paceline.optim.precision import Precision, outermost
from paceline.sharding.slices import Slices
from paceline.strategies.fsdp_gather import Gather, hollow_group, hollow_mesh
from paceline.strategies.fsdp_hooks import (
    check_no_gradient_hooks,
    first_parameters,
    outside_modes,
    place_of,
    plain_parameter,
    refuse_second_derivatives,
    replace_in_optimizers,
    undo_fully_shard,
)
from paceline.strategies.fsdp_rows import RowMember, RowShards
from paceline.strategies.fsdp_units import Units, kept_whole, unit_modules, with_units
from paceline.strategies.masters import take_over

_meshes = itertools.count()
OnGradient = Callable[["ShardedUnit", Tensor], None]


class ShardedUnit:
    """One module under `fully_shard`, and what torch keeps for it."""

    def __init__(self, number: int, module: Any, group: Any, comm: Communicator) -> None:
        self.number, self.module = number, module
        self.low: torch.dtype | None = None  # what it is rounded to when it is gathered
        self.rank, self.workers = comm.rank, comm.size
        self._group = group
        self.cuts: list[Any] = group.fsdp_params  # torch's FSDPParam of each parameter
        self.cut_of = {id(cut.sharded_param): cut for cut in self.cuts}  # by id of what it has put into modules
        self._hooked: dict[int, RemovableHandle] = {}

    @property
    def name(self) -> str:
        name = self._group._module_fqn  # once it has run
        return f"{name or type(self.module).__name__!s}"

    @property
    def parameters(self) -> list[Parameter]:
        return [cut.sharded_param for cut in self.cuts]

    @property
    def trained(self) -> list[Parameter]:
        """Those that may get a gradient, in the order of the rows."""
        return [parameter for parameter in self.parameters if parameter.requires_grad]

    @property
    def forwards(self) -> int:
        """How often it ran since the last backward: so often its gradient may come."""
        return len(self._group._post_forward_indices)

    def rows(self, index: dict[int, int]) -> RowShards | None:
        """How its gradients lie; `index` numbers those that are wanted, by id. None: nothing of it is trained."""
        members = [RowMember(index.get(id(p)), tuple(p.shape)) for p in self.trained]
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
        rows: Tensor = self.cut_of[id(parameter)]._sharded_param_data
        return rows

    def has_moved(self, parameter: Parameter, rows: Tensor) -> bool:
        """Whether something else stands in the module, or its rows lie elsewhere."""
        cut = self.cut_of[id(parameter)]
        return cut.sharded_param is not parameter or cut._sharded_param_data.data_ptr() != rows.data_ptr()

    def cut_like(self, parameter: Parameter, whole: Tensor) -> Tensor:
        """Of a tensor of the parameter's shape what this worker has of the parameter, as torch has it.

        In low precision it is loaded as under other strategies: rounded, and rows that round to it stay.
        """
        cut, given = self.cut_of[id(parameter)], whole.detach()
        low, high = RowMember(0, tuple(parameter.shape)).owned(self.rank, self.workers)
        rows: Any = given.to_local() if hasattr(given, "to_local") else given.reshape(-1)[low:high]
        part = rows.reshape(-1).to(parameter.device, parameter.dtype)
        if self.low is not None:
            loaded, part = part, self.own_rows(parameter)[: high - low].clone()
            take_over(part, loaded.to(self.low))
        same: Tensor = cut.to_sharded_dtensor(part.view(cut.sharded_size))
        return same

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
        fill: Callable[[nn.Module], None],
        precision: Precision,
    ) -> None:
        """Rows are in fp32, whatever they are rounded to when they are gathered.

        `fill` gives a part of a model that has none its first weights: unit by unit, each is whole for a moment."""
        self._comm, self._pool, self._precision, self._device = comm, _Pool(), precision, device
        self._mesh_name: Any = f"paceline fsdp {next(_meshes)}"
        before = [list(model.named_parameters(remove_duplicate=False)) for model in models]
        self._group = hollow_group(self._mesh_name, comm)  # torch's registry does not keep it alive
        mesh = hollow_mesh(self._mesh_name, comm, device)
        self.units: list[ShardedUnit] = []
        self._sharded: list[nn.Module] = []  # those with a unit, and those of which others have all
        self._first: dict[int, TensorWeakRef] = {}  # by id of the rows in its place: what was in the module before
        self._twice: list[RemovableHandle] = []
        for model in models:
            self.units += self._shard(model, mesh, wanted, fill)
        self._unit_of = {id(p): unit for unit in self.units for p in unit.parameters}
        self._names = {id(p): name for model in models for name, p in model.named_parameters()}
        self._rounded: set[int] = set()  # frozen parameters
        self._own: dict[int, tuple[Tensor, Slices]] = {}  # by id: this worker's rows, asked for in every step
        self.loads = 0  # by the script
        self.round_frozen()
        self.take_as_right()
        now: dict[int, Parameter] = {}
        for model, old in zip(models, before, strict=True):
            new = dict(model.named_parameters(remove_duplicate=False))
            now |= {id(parameter): new[name] for name, parameter in old}
        replace_in_optimizers(optimizers, now)
        self._loading: list[RemovableHandle] = []
        for model in models:
            self._loading += [
                model.register_load_state_dict_pre_hook(self._cut_loaded),  # type: ignore[no-untyped-call]
                model.register_load_state_dict_post_hook(self._loaded),  # type: ignore[no-untyped-call]
            ]
        self.on_gradient: OnGradient = lambda unit, flat: None
        self.on_seen: Callable[[Parameter], None] = lambda parameter: None

    def _shard(
        self, model: nn.Module, mesh: Any, wanted: Units, fill: Callable[[nn.Module], None]
    ) -> Iterator[ShardedUnit]:
        """Units in the order in which backward comes to them: the last of the model first, the model itself last."""
        from torch.distributed.fsdp import fully_shard

        kept = list(outermost(model, self._precision.kept)) if self._precision.is_low else []
        inner = with_units(model, unit_modules(model, wanted), kept)
        in_fp32 = {id(below) for module in kept for below in module.modules()}
        whole = kept_whole(model, inner)
        check_no_gradient_hooks((name, p) for name, p in model.named_parameters() if p not in whole)
        for number, module in enumerate([*reversed(inner), model], start=len(self.units)):
            fill(module)
            first = first_parameters(module)
            sharded: Any = fully_shard(
                module, mesh=mesh, ignored_params=whole, mp_policy=self._policy(in_fp32=id(module) in in_fp32)
            )
            self._sharded.append(sharded)
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(True)
            state = sharded._get_fsdp_state()
            outside_modes(sharded._forward_pre_hooks, state._pre_forward_hook_handle)
            outside_modes(sharded._forward_hooks, state._post_forward_hook_handle)
            group = state._fsdp_param_group
            if group is not None:
                unit = ShardedUnit(number, sharded, group, self._comm)
                self._first |= {id(cut.sharded_param): first[place_of(cut)] for cut in unit.cuts}
                unit.low = self._precision.dtype if self._precision.is_low and id(module) not in in_fp32 else None
                self._twice.append(sharded.register_forward_hook(refuse_second_derivatives))
                sharded.set_custom_all_gather(Gather(unit, self._comm, lambda: self.loads))
                sharded.set_custom_reduce_scatter(_HandOver(unit, self))
                yield unit

    def _policy(self, *, in_fp32: bool) -> Any:
        """Inputs are cast by the models' own hooks (optim/precision.py)."""
        from torch.distributed.fsdp import MixedPrecisionPolicy

        low = self._precision.is_low and not in_fp32
        dtypes = {"param_dtype": self._precision.dtype, "reduce_dtype": torch.float32} if low else {}
        return MixedPrecisionPolicy(**dtypes, cast_forward_inputs=False)

    # -- gradients ---------------------------------------------------------------------------------------------------

    def watch(self) -> None:
        for unit in self.units:
            unit.watch(lambda parameter: self.on_seen(parameter))

    def room(self, like: RowShards) -> Tensor:
        """Memory for a unit's gradient."""
        return self._pool.take(like.bucket.elements, like.bucket.dtype, like.bucket.device)

    def take_back(self, flat: Tensor) -> None:
        """A gradient that was handed over is not needed any more."""
        self._pool.give_back(flat)

    def drop_gradients(self) -> None:
        """What torch has put into `.grad` is memory that nobody wrote to."""
        for unit in self.units:
            for parameter in unit.parameters:
                parameter.grad = None

    # -- weights -----------------------------------------------------------------------------------------------------

    def check_untouched(self) -> None:
        """Before a step: raise if the script has put a hook on rows, or written to rows that are masters."""
        check_no_gradient_hooks((self._name_of(p), p) for unit in self.units for p in unit.parameters)
        for unit in self.units if self._precision.is_low else ():
            for parameter in unit.parameters:
                if self._versions.get(id(parameter)) not in (None, _version(parameter)):
                    raise LoopError(
                        f"{self._name_of(parameter)!r} was changed in place after engine.prepare(): in "
                        f"{self._precision.parameters} that changed the fp32 rows behind it, where other strategies "
                        "change what they are rounded to, so the result would be another; load weights with "
                        "model.load_state_dict(…), or use strategy='zero2' to change them in place"
                    )

    def _name_of(self, parameter: Parameter) -> str:
        return self._names.get(id(parameter), "a parameter")

    def take_as_right(self) -> None:
        """What the script has written to parameters was loaded. The update writes to rows, past these counters."""
        self._versions = {id(p): _version(p) for unit in self.units for p in unit.parameters}

    def holds(self, parameter: Tensor) -> bool:
        return id(parameter) in self._unit_of

    def unit_of(self, parameter: Tensor) -> ShardedUnit | None:
        return self._unit_of.get(id(parameter))

    def own_rows(self, parameter: Parameter) -> Tensor:
        return self._unit_of[id(parameter)].own_rows(parameter)

    def whole(self, parameter: Parameter) -> Tensor:
        self._round_if_frozen(parameter)
        rows, handle = self._comm.all_gather(self.own_rows(parameter))
        handle.wait()
        whole = rows.view(-1)[: parameter.numel()].view(parameter.shape)
        low = self._unit_of[id(parameter)].low
        return whole if low is None or parameter.requires_grad else whole.to(low)

    def own(self, parameter: Parameter) -> Slices:
        """What this worker has of a parameter's weights."""
        self._round_if_frozen(parameter)
        rows, lower = self.own_rows(parameter), self._unit_of[id(parameter)].low
        if lower is not None and not parameter.requires_grad:
            return self._slices(parameter, rows.to(lower))
        known = self._own.get(id(parameter))
        if known is None or known[0] is not rows:
            known = self._own[id(parameter)] = rows, self._slices(parameter, rows)
        return known[1]

    def _slices(self, parameter: Parameter, rows: Tensor) -> Slices:
        low, high = RowMember(0, tuple(parameter.shape)).owned(self._comm.rank, self._comm.size)
        return Slices.of(parameter.shape, rows.dtype, [(low, rows[: high - low])])

    def round_frozen(self) -> None:
        """What is not trained has no master: it is what it computes with."""
        for unit in self.units:
            for parameter in unit.parameters if unit.low is not None else ():
                self._round_if_frozen(parameter)

    def _round_if_frozen(self, parameter: Parameter) -> None:
        unit = self._unit_of[id(parameter)]
        if parameter.requires_grad:
            self._rounded.discard(id(parameter))
        elif unit.low is not None and id(parameter) not in self._rounded:
            self._rounded.add(id(parameter))
            rows = unit.own_rows(parameter)
            rows.copy_(rows.to(unit.low))

    def put(self, parameter: Parameter, whole: Tensor) -> None:
        own = self.own_rows(parameter)
        low, high = RowMember(0, tuple(parameter.shape)).owned(self._comm.rank, self._comm.size)
        self._rounded.discard(id(parameter))
        own[: high - low] = whole.detach().reshape(-1)[low:high]
        self._unit_of[id(parameter)].module.reshard()

    def _cut_loaded(self, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        """Whole tensors that are loaded, as by model.load_state_dict(…), become this worker's rows of them."""
        self.release()
        for name, parameter in module.named_parameters(remove_duplicate=False):
            given: Any = state.get(prefix + name)
            if not self.holds(parameter) or not isinstance(given, Tensor) or given.shape != parameter.shape:
                continue
            unit = self._unit_of[id(parameter)]
            if type(given) in (Tensor, Parameter) or unit.low is not None:
                state[prefix + name] = unit.cut_like(parameter, given)

    def _loaded(self, module: nn.Module, _: Any) -> None:
        self.loads += 1
        self.take_as_right()

    def check_in_place(self, parameter: Parameter, rows: Tensor, name: str) -> None:
        if self._unit_of[id(parameter)].has_moved(parameter, rows):
            raise LoopError(
                f"the weights of {name!r} have been moved after engine.prepare(), as by model.to(…) or "
                "load_state_dict(…, assign=True), and the optimizer would update what they were; do that before "
                "prepare(), or load without assign"
            )

    def release(self) -> None:
        """Weights have changed: what was gathered before is old. Roots keep theirs after a forward without backward."""
        for unit in self.units:
            unit.module.reshard()

    def close(self) -> None:
        for unit in self.units:
            unit.unhook()
        for hook in (*self._loading, *self._twice):
            hook.remove()
        _unregister_process_group(self._mesh_name)

    def dismantle(self, optimizers: Sequence[Optimizer]) -> None:
        """At any moment, also inside a forward or backward that has failed: models are plain, parameters are whole.

        The optimizers hold them again, without the states of rows.
        """
        self.close()
        self.on_gradient, self.on_seen = lambda unit, flat: None, lambda parameter: None
        plain: dict[int, Parameter] = {}
        for unit in self.units:
            for key, cut in unit.cut_of.items():
                plain[key] = plain_parameter(cut, self._first[key], self._device)
        for optimizer in optimizers:
            for rows in [parameter for parameter in optimizer.state if id(parameter) in plain]:
                del optimizer.state[rows]
        replace_in_optimizers(optimizers, plain)
        for module in self._sharded:
            undo_fully_shard(module)


def _version(parameter: Any) -> tuple[int, int]:
    """Counts what is written to a parameter, or to what its to_local() gives."""
    return parameter._version, parameter._local_tensor._version


class _Pool:
    """Buffers of gradients that have travelled; blocks that are alike use the same ones."""

    def __init__(self) -> None:
        self._free: dict[int, list[Tensor]] = {}

    def take(self, elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        free = self._free.get(elements)
        return free.pop() if free else torch.empty(elements, dtype=dtype, device=device)

    def give_back(self, flat: Tensor) -> None:
        self._free.setdefault(flat.numel(), []).append(flat)


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
