"""Tensor parallelism: a plan shards a model's parameters; a sharded one is a DTensor in forward, and outside of it its
local tensor.

    a plan                    torch's styles, or a Hugging Face model's own   ─►  parameters are DTensors
    `localise`                module.weight is this worker's part of it, a plain Parameter
    forward of its module     DTensor.from_local(part); backward gives the part its gradient, or where that is partial
                              the sum over the group

So strategies, optimizers and precisions know nothing of DTensors: they see a smaller model, the same on all workers of
a column of the mesh. What has to know of the other parts asks `layout_of`: hashes, checkpoints, the global norm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.nn import Parameter

from paceline.collectives.communicator import Communicator
from paceline.errors import ConfigError
from paceline.mesh.mesh import Mesh
from paceline.strategies.strategy import TensorPeers
from paceline.torch_compat import own_parameters


def torch_mesh(mesh: Mesh, device: torch.device) -> DeviceMesh:
    """The job's mesh as torch knows it, over its default group; all workers make it together."""
    return init_device_mesh(device.type, (mesh.data, mesh.cp, mesh.tp), mesh_dim_names=("dp", "cp", "tp"))


def own_group(axis: DeviceMesh) -> dist.ProcessGroup:
    """An axis of all workers has torch's default group, whose collectives are taken for the script's own."""
    group = axis.get_group()
    return dist.new_group() if group is dist.group.WORLD else group


@dataclass(frozen=True)
class Layout:
    """How a tensor-parallel group holds one parameter: in parts along `dim`, or (None) every worker all of it."""

    dim: int | None
    shape: torch.Size  # of the whole
    stride: tuple[int, ...]
    mesh: DeviceMesh
    partial_gradient: bool = False  # every worker computes a part of its gradient, from activations that are sharded

    @property
    def workers(self) -> int:
        return self.mesh.size()

    @property
    def local_shape(self) -> torch.Size:
        if self.dim is None:
            return self.shape
        return torch.Size(n // self.workers if d == self.dim else n for d, n in enumerate(self.shape))

    @property
    def placements(self) -> tuple[Placement, ...]:
        return (Replicate() if self.dim is None else Shard(self.dim),)

    def in_forward(self, local: Tensor) -> Tensor:
        """What a module computes with."""
        whole = DTensor.from_local(
            local, self.mesh, self.placements, run_check=False, shape=self.shape, stride=self.stride
        )
        return whole.to_local(grad_placements=[Partial()]) if self.partial_gradient else whole


class TensorParallel:
    """What is sharded in the models of one job."""

    def __init__(self, mesh: DeviceMesh, coordinate: int) -> None:
        self.mesh, self.coordinate = mesh, coordinate
        self._layouts: dict[tuple[int, str], tuple[nn.Module, Layout]] = {}  # by module and the name in it

    def layouts(self) -> dict[int, Layout]:
        """By id of the parameters that stand in the modules now."""
        found = {}
        for (_, key), (module, layout) in self._layouts.items():
            parameter = own_parameters(module).get(key)
            if parameter is not None:
                found[id(parameter)] = layout
        return found

    def sharded(self) -> list[tuple[nn.Module, str, Layout]]:
        """Where the parameters stand that are."""
        return [(module, key, layout) for (_, key), (module, layout) in self._layouts.items() if layout.dim is not None]

    def localise(self, model: nn.Module, partial: Iterable[str] = ()) -> dict[int, Parameter]:
        """Make every DTensor in the model its local tensor; by id of what stood there, what stands there now.

        `partial`: names of plain parameters of which every worker computes a part of the gradient.
        """
        moved: dict[int, Parameter] = {}
        partial = set(partial)
        for name, module in model.named_modules():
            mine: dict[str, Layout] = {}
            for key, parameter in list(own_parameters(module).items()):
                if parameter is None:
                    continue
                path = f"{name}.{key}" if name else key
                if isinstance(parameter, DTensor):
                    mine[key] = self._layout(path, parameter)
                    if id(parameter) not in moved:
                        moved[id(parameter)] = _local_parameter(parameter)
                    own_parameters(module)[key] = moved[id(parameter)]
                elif path in partial:
                    mine[key] = Layout(None, parameter.shape, parameter.stride(), self.mesh, partial_gradient=True)
            for key, layout in mine.items():
                self._layouts[id(module), key] = module, layout
            if mine:
                _compute_with(module, mine)
        return moved

    def _layout(self, name: str, parameter: DTensor) -> Layout:
        (placement,) = parameter.placements if len(parameter.placements) == 1 else (None,)
        shards = type(placement) is Shard
        if not (shards or isinstance(placement, Replicate)):
            raise ConfigError(
                f"the plan places {name!r} as {parameter.placements}; a mesh takes parameters that are sharded along "
                "one dimension in equal parts, or replicated"
            )
        dim = placement.dim % parameter.dim() if isinstance(placement, Shard) else None
        if dim is not None and parameter.shape[dim] % self.mesh.size():
            raise ConfigError(
                f"the plan shards {name!r} of shape {tuple(parameter.shape)} along dimension {dim}, which "
                f"tp={self.mesh.size()} does not divide; choose another tp, or leave that module out of the plan"
            )
        return Layout(dim, parameter.shape, parameter.stride(), self.mesh)


def _local_parameter(parameter: DTensor) -> Parameter:
    local = parameter.to_local().detach().contiguous()
    if local.untyped_storage().nbytes() > local.nbytes:  # a view of the whole
        local = local.clone()
    return Parameter(local, requires_grad=parameter.requires_grad)


def _compute_with(module: nn.Module, layouts: Mapping[str, Layout]) -> None:
    """While the module's forward runs, its parameters are what the plan made of them.

    Not by a hook: those of strategies, which bring weights, come before forward in whatever order they were set.
    """
    original: Callable[..., Any] = module.forward

    def forward(*args: Any, **options: Any) -> Any:
        own: dict[str, Any] = own_parameters(module)
        kept = {key: own[key] for key in layouts}
        try:
            for key, layout in layouts.items():
                own[key] = layout.in_forward(kept[key])
            return original(*args, **options)
        finally:
            own.update(kept)

    module.forward = forward


def replace_in(groups: Sequence[dict[str, Any]], moved: Mapping[int, Parameter]) -> None:
    """An optimizer made before its model was sharded trains what stands there now."""
    for group in groups:
        group["params"] = [moved.get(id(parameter), parameter) for parameter in group["params"]]


class TensorParallelPeers(TensorPeers):
    """The workers of the group: what they agree on, and sums in which each part counts once."""

    def __init__(self, comm: Communicator, parallel: TensorParallel) -> None:
        self._comm, self._parallel = comm, parallel
        self._sharded: set[int] | None = None  # ids of parameters; they live as long as their models

    def counts(self, parameter: Parameter) -> bool:
        """What every worker of the group has alike is counted by its first."""
        if self._sharded is None:
            layouts = self._parallel.layouts()
            self._sharded = {identity for identity, layout in layouts.items() if layout.dim is not None}
        return self._comm.rank == 0 or id(parameter) in self._sharded

    def gathered(self, norms: Tensor) -> Tensor:
        rows, handle = self._comm.all_gather(norms)
        handle.wait()
        return rows.view(-1)

    def all_true(self, here: bool) -> bool:
        flags, handle = self._comm.all_gather(torch.tensor([here], dtype=torch.uint8))
        handle.wait()
        return bool(flags.all())
