"""Full tensors of what tensor parallelism has sharded, for hashes and checkpoints, and this worker's part of one.

A parameter of shape (a, b, c), sharded along b over t workers, seen as rows:

    whole    a rows of b·c elements             row 0 │ part 0 │ part 1 │ … │ row 1 │ part 0 │ part 1 │ …
    part p   a rows of b·c/t elements           row 0 │ row 1 │ …

A strategy may have cut a worker's part once more, into ranges of its elements. A checkpoint has the elements of the
whole, whoever wrote them: where there is one row (sharded along the first dimension) a range of the part is a range of
the whole, and every worker saves its own; otherwise the group puts its parts together first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.checkpoint.load import StoredTensor
from paceline.checkpoint.manifest import Range, StoredShape
from paceline.collectives.communicator import Communicator
from paceline.mesh.tensor_parallel import Layout, TensorParallel
from paceline.sharding.local_shard import LocalShard


class FullTensors:
    """Without tensor parallelism every tensor is whole."""

    def full(self, weights: Tensor, local: Tensor) -> Tensor:
        """All of what `local` is this worker's part of; `weights` is the parameter. The group calls it together."""
        return local

    def part(self, weights: Tensor, full: Any) -> Any:
        """This worker's part of a whole tensor, or of one that is stored."""
        return full

    def shape(self, weights: Tensor) -> torch.Size:
        return weights.shape

    def saved(self, weights: Tensor, local: Tensor | LocalShard) -> Tensor | LocalShard:
        """What this worker saves; the group calls it together, tensor by tensor."""
        return local

    def saved_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
        """Likewise of an optimizer's state."""
        return dict(state)

    def state_part(self, optimizer: Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
        """This worker's part of a whole state."""
        return dict(state)


class ShardedTensors(FullTensors):
    def __init__(self, parallel: TensorParallel, peers: Communicator) -> None:
        self._parallel, self._peers = parallel, peers

    def _layout(self, weights: Tensor) -> Layout | None:
        layout = self._parallel.layouts().get(id(weights))
        return None if layout is None or layout.dim is None else layout

    def shape(self, weights: Tensor) -> torch.Size:
        layout = self._layout(weights)
        return weights.shape if layout is None else layout.shape

    def full(self, weights: Tensor, local: Tensor) -> Tensor:
        layout = self._layout(weights)
        return local if layout is None else self._joined(layout, local)

    def part(self, weights: Tensor, full: Any) -> Any:
        layout = self._layout(weights)
        return full if layout is None else _part(layout, self._parallel.coordinate, full)

    def saved(self, weights: Tensor, local: Tensor | LocalShard) -> Tensor | LocalShard:
        return self._saved(self._layout(weights), local)

    def _saved(self, layout: Layout | None, local: Tensor | LocalShard) -> Tensor | LocalShard:
        if layout is None:  # every worker of the group has it
            return local if isinstance(local, Tensor) or self._peers.rank == 0 else local.nothing_here()
        if isinstance(local, Tensor):
            return self._joined(layout, local)
        rows = _rows(layout)
        parts: list[tuple[int, Tensor]] = []
        for start, values in local.parts:
            if rows == 1:
                parts.append((self._parallel.coordinate * prod(layout.local_shape) + start, values))
            else:
                parts += self._joined_range(layout, start, values)
        return LocalShard.of(layout.shape, local.dtype, parts)

    def _joined(self, layout: Layout, local: Tensor) -> Tensor:
        parts, handle = self._peers.all_gather(local)
        handle.wait()
        return torch.cat(list(parts.view(-1, *layout.local_shape)), layout.dim or 0)

    def _joined_range(self, layout: Layout, start: int, values: Tensor) -> list[tuple[int, Tensor]]:
        """Elements from `start` on of every worker's part, as ranges of the whole; the group's first worker has them.

        Whole rows are one range. A row that the range begins or ends in is one range for each worker.
        """
        parts, handle = self._peers.all_gather(values)
        handle.wait()
        if self._peers.rank:
            return []
        width, workers, stop = prod(layout.local_shape) // _rows(layout), layout.workers, start + values.numel()
        first, last = -(-start // width), stop // width
        found: list[tuple[int, Tensor]] = []
        if first < last:
            whole = parts[:, first * width - start : last * width - start].view(workers, last - first, width)
            found.append((first * width * workers, whole.transpose(0, 1).reshape(-1)))
        for low, high in {(start, min(first * width, stop)), (max(last * width, start), stop)}:
            row = low // width
            if low < high and not first <= row < last:
                found += [
                    ((row * workers + worker) * width + low - row * width, parts[worker, low - start : high - start])
                    for worker in range(workers)
                ]
        return found

    def saved_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
        return self._of_each(optimizer, state, lambda layout, shape, value: self._state_saved(layout, shape, value))

    def state_part(self, optimizer: Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
        def part(layout: Layout | None, shape: torch.Size, value: Any) -> Any:
            sharded = layout is not None and getattr(value, "shape", None) == layout.shape
            return _part(layout, self._parallel.coordinate, value) if sharded and layout is not None else value

        return self._of_each(optimizer, state, part)

    def _state_saved(self, layout: Layout | None, shape: torch.Size, value: Any) -> Any:
        if not isinstance(value, Tensor | LocalShard):
            return value
        return self._saved(layout if tuple(value.shape) == tuple(shape) else None, value)

    def _of_each(self, optimizer: Optimizer, state: Mapping[str, Any], change: Any) -> dict[str, Any]:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        changed = {
            number: {
                key: change(self._layout(parameters[number]), parameters[number].shape, value)
                for key, value in of_one.items()
            }
            for number, of_one in state["state"].items()
        }
        return {**state, "state": changed}


def _rows(layout: Layout) -> int:
    return prod(layout.shape[: layout.dim])


def _part(layout: Layout, coordinate: int, full: Any) -> Any:
    assert layout.dim is not None
    if isinstance(full, StoredTensor):
        everything = Range(0, prod(layout.local_shape), file="", name="", checksum="")
        shape = StoredShape(full.stored.dtype, tuple(layout.local_shape), (everything,))
        return StoredTensor(_PartOfStored(full, layout, coordinate), full.path, shape)
    size = layout.local_shape[layout.dim]
    return full.narrow(layout.dim, coordinate * size, size).contiguous()


@dataclass(frozen=True)
class _PartOfStored:
    """Reads this worker's part out of a stored tensor, as far as it is asked for."""

    whole: StoredTensor
    layout: Layout
    coordinate: int

    def read(self, where: Range, start: int, stop: int) -> Tensor:
        rows = _rows(self.layout)
        width, workers = prod(self.layout.local_shape) // rows, self.layout.workers
        if rows == 1:
            first = self.coordinate * width
            return self.whole.part(first + start, first + stop)
        low, high = start // width, -(-stop // width)
        read = self.whole.part(low * width * workers, high * width * workers).view(-1, workers, width)
        return read[:, self.coordinate].reshape(-1)[start - low * width : stop - low * width]
