"""Random numbers inside a tensor-parallel group: equal on whole activations, different on sharded ones.

    shared    ── dropout on whole activations ──┐                    ┌── goes on where it was ──    equal on all workers
    sharded                                     └─ colwise … rowwise ┘                              each worker its own

Between a layer that is sharded along its output and one along its input every worker has other channels or heads: the
same dropout mask on all of them would be a mask of a fraction of the width, repeated. The sharded stream begins with a
number drawn from the shared one, so a forward that is run again (activation checkpointing) draws the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from paceline.mesh.tensor_parallel import TensorParallel
from paceline.world.determinism import mix


class ShardedRandomNumbers:
    """Hooks on the models of a job, until `close`."""

    def __init__(self, parallel: TensorParallel, device: torch.device) -> None:
        self._parallel, self._device = parallel, device
        self._inside: nn.Module | None = None  # whose parts are sharded now
        self._shared: list[Tensor] = []  # states of the generators, while others are in use
        self._hooks: list[Any] = []

    def attach(self, model: nn.Module) -> None:
        layouts = {id(module): layout for module, key, layout in self._parallel.sharded() if key == "weight"}
        for parent in model.modules():
            for module in parent.children():
                layout = layouts.get(id(module))
                if layout is None or not isinstance(module, nn.Linear):
                    continue
                if layout.dim == 0:
                    self._hooks.append(module.register_forward_hook(self._enters(parent, layout.local_shape[0])))
                else:
                    self._hooks.append(module.register_forward_pre_hook(self._leaves, prepend=True))
        self._hooks.append(model.register_forward_pre_hook(self._forget))
        self._hooks.append(model.register_forward_hook(self._leaves_at_end))

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _enters(self, parent: nn.Module, width: int) -> Any:
        def hook(module: nn.Module, _: Any, output: Any) -> None:
            # A wide output is whole: it was gathered. A recomputed forward may have ended inside another parent.
            if module.training and self._inside is not parent and _width(output) == width:
                self._inside = parent
                seed = int(torch.randint(2**62, (), device="cpu"))
                self._shared = [torch.get_rng_state()]
                if self._device.type != "cpu":
                    self._shared.append(torch.get_device_module(self._device).get_rng_state(self._device))
                torch.manual_seed(mix(seed, "tensor", self._parallel.coordinate))

        return hook

    def _leaves(self, *_: Any) -> None:
        if self._inside is not None:
            self._inside = None
            torch.set_rng_state(self._shared[0])
            if self._device.type != "cpu":
                torch.get_device_module(self._device).set_rng_state(self._shared[1], self._device)

    def _forget(self, *_: Any) -> None:
        self._inside = None

    def _leaves_at_end(self, *_: Any) -> None:
        self._leaves()


def _width(output: Any) -> int | None:
    """Of what this worker has of it."""
    if not isinstance(output, Tensor):
        return None
    return int((output.to_local() if isinstance(output, DTensor) else output).shape[-1])
