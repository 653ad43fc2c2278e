"""The gather of a unit's rows, in place of torch's own: who is somewhere else than the others is told so.

    row of worker 0    | unit's number, loads, … | its rows ……… |    a header of 16 elements, so that rows stay aligned
    row of worker 1    | unit's number, loads, … | its rows ……… |

Workers that gather different units would compute with wrong weights, and so would all if one alone had loaded others.

In an elastic job a worker may be lost meanwhile. The item is lost with it and will be run again, so its forward goes on
with zeros, and the loop that it is part of never hears of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _register_process_group

from paceline.collectives.communicator import Communicator
from paceline.errors import CollectiveError, GenerationEnded, LoopError, PeerLostError

HEADER = 16  # elements before a row
_ALIKE = (
    "every worker has to run the same units in the same order: a module that only some micro-batches use can't be one. "
    "Choose units=… so that it is part of a larger one"
)


class Unit(Protocol):
    @property
    def number(self) -> int: ...

    @property
    def name(self) -> str: ...


class Gather:
    """torch's all-gather of a unit: `input_tensor` is this worker's row of `output_tensor`, in the same memory."""

    def __init__(self, unit: Unit, comm: Communicator, loads: Callable[[], int]) -> None:
        """`loads`: how often this worker's script has loaded weights."""
        self._unit, self._comm, self._loads = unit, comm, loads
        self._mark = unit.number % 256  # whole in bf16

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> None:
        try:
            self._gather(output_tensor, input_tensor)
        except GenerationEnded:
            output_tensor.zero_()

    def _gather(self, output_tensor: Tensor, input_tensor: Tensor) -> None:
        comm = self._comm
        marks = self._mark, self._loads() % 256
        if comm.backend == "gloo":  # which does not look whether all send as much
            self._check(self._gathered(torch.tensor(marks)), *marks)
        row = input_tensor.new_empty(HEADER + input_tensor.numel())
        row[0], row[1] = marks
        row[HEADER:] = input_tensor
        rows = self._gathered(row)
        if comm.backend != "nccl":  # where a look at the numbers would wait for the device
            self._check(rows[:, :2], *marks)
        output_tensor.view(comm.size, -1).copy_(rows[:, HEADER:])

    def _gathered(self, row: Tensor) -> Tensor:
        rows, handle = self._comm.all_gather(row)
        try:
            handle.wait()
        except (PeerLostError, GenerationEnded) as error:
            if not isinstance(error.__cause__, CollectiveError) or "different things" not in str(error.__cause__):
                raise
            raise LoopError(
                f"worker {self._comm.rank} gathers {self._unit.name!r}: {error.__cause__}; {_ALIKE}"
            ) from error
        return rows

    def _check(self, told: Tensor, mark: int, loads: int) -> None:
        for worker, (number, their_loads) in enumerate(told.tolist()):
            if int(number) == mark and int(their_loads) != loads:
                raise LoopError(
                    f"worker {self._comm.rank} has called model.load_state_dict() {self._loads()} times since "
                    f"engine.prepare(), worker {worker} {'more' if their_loads > loads else 'less'} often: each has "
                    "rows of the weights, so all workers have to load, with the same"
                )
            if int(number) != mark:
                raise LoopError(
                    f"worker {self._comm.rank} gathers the weights of {self._unit.name!r} while worker {worker} is at "
                    f"another unit; {_ALIKE}"
                )


# -- what torch is shown instead of a group that communicates ----------------------------------------------------------


def hollow_group(name: Any, comm: Communicator) -> Any:
    """A process group that can do nothing; whoever wants it in torch's registry keeps it alive."""
    hollow: Any = dist.ProcessGroup
    group = hollow(comm.rank, comm.size)
    group._set_group_name(name)
    _register_process_group(name, group)
    return group


def hollow_mesh(name: Any, comm: Communicator, device: torch.device) -> Any:
    from torch.distributed.device_mesh import DeviceMesh

    mesh = DeviceMesh(device.type, list(range(comm.size)), _init_backend=False, _rank=comm.rank)
    mesh._dim_group_names = [name]
    return mesh
