"""All-reduce of sparse tensors, as embeddings' gradients are: everybody gathers everybody's entries and adds them up.

    counts of all ─► indices of all, padded to the longest ─► values likewise ─► one tensor, equal indices added

Bytes read per rank: N times the longest rank's entries, not the dense size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from paceline.collectives.shared_memory.operations import Operations
from paceline.errors import CollectiveError


def all_reduce_sparse(operations: Operations, tensors: Sequence[Tensor], op: ReduceOp.RedOpType) -> None:
    for tensor in tensors:
        if op != ReduceOp.SUM or tensor.layout != torch.sparse_coo:
            raise CollectiveError(f"sparse tensors can be summed, in layout sparse_coo, not {op} of {tensor.layout}")
        mine = tensor.detach().coalesce()
        counts = [int(count) for count in _gathered(operations, torch.tensor([mine._nnz()]))]
        longest = max(counts)
        indices = _gathered(operations, _padded(mine.indices().t(), longest))
        values = _gathered(operations, _padded(mine.values(), longest))
        total = torch.sparse_coo_tensor(
            torch.cat([rows[:count] for rows, count in zip(indices, counts, strict=True)]).t(),
            torch.cat([rows[:count] for rows, count in zip(values, counts, strict=True)]),
            mine.shape,
        )
        tensor.copy_(total.coalesce())


def _gathered(operations: Operations, mine: Tensor) -> list[Tensor]:
    every = [torch.empty_like(mine) for _ in range(operations.size)]
    operations.all_gather([rows.view(-1) for rows in every], mine.view(-1))
    return every


def _padded(rows: Tensor, length: int) -> Tensor:
    out = rows.new_zeros(length, *rows.shape[1:])
    out[: len(rows)] = rows
    return out
