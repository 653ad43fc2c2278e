"""The workers of a tensor-parallel group: what they agree on, and sums in which each part counts once."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Parameter

from paceline.collectives.communicator import Communicator
from paceline.mesh.tensor_parallel import TensorParallel
from paceline.strategies.strategy import TensorPeers


class TensorParallelPeers(TensorPeers):
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
