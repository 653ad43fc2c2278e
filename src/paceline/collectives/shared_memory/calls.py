"""A collective as people call it: torch has several forms for some of them, which all mean one long form.

    group.allreduce([x], AllreduceOptions())           the long form: lists, and options; torch.distributed's own calls
    group.allreduce(x, ReduceOp.MAX)                   a short form
    group.allgather([a, b], x)                         likewise: [[a, b]], [x]

A short form has a tensor, a root, a reduction or a timeout where the long one has lists and options: that is how they
are told apart. What is asked for is checked here, before any rank hears of it, in the words that gloo has for it.

torch's own groups call an operator of the dispatcher (`torch.ops.c10d.allreduce_`), whose kernel calls the backend: so
profilers and dispatch modes see collectives. A group in Python is called without it, and so lets them know by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp
from torch.distributed import distributed_c10d as c10d

from paceline.errors import CollectiveError
from paceline.torch_compat import begin_record, end_record, profiler_enabled, seen_by_modes

AllgatherOptions: Any = c10d.AllgatherOptions  # type: ignore[attr-defined]  # there, but not exported
OPTIONS = (
    c10d.AllreduceOptions,
    AllgatherOptions,
    c10d.ReduceScatterOptions,
    c10d.BroadcastOptions,
    c10d.AllreduceCoalescedOptions,
    c10d.AllToAllOptions,
    c10d.BarrierOptions,
    c10d.ReduceOptions,
    c10d.GatherOptions,
    c10d.ScatterOptions,
)


# -- short forms: each gives the arguments of the long one -------------------------------------------------------------


def allreduce(tensors: Any = None, op: Any = None, timeout: timedelta | None = None, *, tensor: Any = None) -> Any:
    one = tensors if tensor is None else tensor
    return [one] if isinstance(one, Tensor) else one, _options(c10d.AllreduceOptions, timeout, reduceOp=op)


def broadcast(tensor: Tensor, root: int, timeout: timedelta | None = None) -> Any:
    return [tensor], _options(c10d.BroadcastOptions, timeout, rootRank=root)


def reduce(tensor: Tensor, root: int, op: Any = None, timeout: timedelta | None = None) -> Any:
    return [tensor], _options(c10d.ReduceOptions, timeout, rootRank=root, reduceOp=op)


def allgather(output_tensors: Sequence[Tensor], input_tensor: Tensor, timeout: timedelta | None = None) -> Any:
    return [output_tensors], [input_tensor], _options(AllgatherOptions, timeout)


def gather(output_tensors: Sequence[Tensor], input_tensor: Tensor, root: int, timeout: timedelta | None = None) -> Any:
    outputs = [output_tensors] if output_tensors else []
    return outputs, [input_tensor], _options(c10d.GatherOptions, timeout, rootRank=root)


def scatter(output_tensor: Tensor, input_tensors: Sequence[Tensor], root: int, timeout: timedelta | None = None) -> Any:
    inputs = [input_tensors] if input_tensors else []
    return [output_tensor], inputs, _options(c10d.ScatterOptions, timeout, rootRank=root)


def reduce_scatter(output: Tensor, input: Sequence[Tensor], op: Any = None, timeout: timedelta | None = None) -> Any:
    return [output], [input], _options(c10d.ReduceScatterOptions, timeout, reduceOp=op)


def alltoall_base(
    output: Tensor,
    input: Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    timeout: timedelta | None = None,
) -> Any:
    return output, input, output_split_sizes, input_split_sizes, _options(c10d.AllToAllOptions, timeout)


def barrier(timeout: timedelta | None = None) -> Any:
    return (_options(c10d.BarrierOptions, timeout),)


def _options(kind: Any, timeout: timedelta | None, **fields: Any) -> Any:
    made = kind()
    for name, value in {"timeout": timeout, **fields}.items():
        if value is not None:
            setattr(made, name, value)
    return made


# -- who watches -------------------------------------------------------------------------------------------------------


# By the names that c10d's operators have for them, what options hold.
_FIELDS = {
    "reduce_op": "reduceOp",
    "root_rank": "rootRank",
    "root_tensor": "rootTensor",
    "async_op": "asyncOp",
    "timeout": "timeout",
    "device_ids": "device_ids",
}


def watched(name: str, method: Callable[..., Any], group: Any, given: tuple[Any, ...]) -> Any:
    """A profiler, and modes such as CommDebugMode, see the operator that torch's own groups call, and what with."""
    operator = getattr(torch.ops.c10d, name).default
    opts = given[-1] if given and isinstance(given[-1], OPTIONS) else None
    tensors = iter(given if opts is None else given[:-1])
    arguments = []
    for argument in operator._schema.arguments:
        if argument.name == "process_group":
            arguments.append(group.boxed())
        elif argument.name in _FIELDS:
            arguments.append(getattr(opts, _FIELDS[argument.name], argument.default_value))
        else:
            arguments.append(next(tensors, None))
    made: list[Any] = []
    record = begin_record(f"c10d::{name}") if profiler_enabled() else None
    try:
        seen_by_modes(operator, tuple(arguments), lambda: made.append(method(group, *given)))
    finally:
        if record is not None:
            end_record(record)
    if not made:
        raise CollectiveError(f"{name}: a dispatch mode did not call the operator, so nothing was moved")
    return made[0]


# -- checks, and tensors in parts --------------------------------------------------------------------------------------


def check_root(operation: str, root: int, size: int) -> None:
    if not 0 <= root < size:
        raise CollectiveError(f"{operation}: invalid root rank {root}: there are ranks 0 to {size - 1}")


def check_root_tensor(operation: str, index: int, tensors: Sequence[Tensor]) -> None:
    if not 0 <= index < len(tensors):
        raise CollectiveError(f"{operation}: invalid root tensor {index} in a list of {len(tensors)}")


def check_alike(operation: str, tensors: Sequence[Tensor]) -> None:
    """Several tensors that stand for one, as those of a rank with several devices did."""
    for tensor in tensors[1:]:
        if tensor.layout != tensors[0].layout:
            raise CollectiveError(f"{operation}: invalid tensor layout {tensor.layout} beside {tensors[0].layout}")
        if tensor.dtype != tensors[0].dtype:
            raise CollectiveError(f"{operation}: invalid tensor type {tensor.dtype} beside {tensors[0].dtype}")
        if tensor.shape != tensors[0].shape:
            raise CollectiveError(
                f"{operation}: invalid tensor size {list(tensor.shape)} beside {list(tensors[0].shape)}"
            )


def check_sparse(tensors: Sequence[Tensor], op: Any) -> None:
    """Sparse tensors, of embeddings' gradients say, can be summed, and nothing else."""
    for tensor in tensors:
        if tensor.layout != torch.sparse_coo:
            raise CollectiveError(f"all_reduce: invalid tensor layout {tensor.layout} where others are sparse_coo")
    if op != ReduceOp.SUM:
        raise CollectiveError(f"all_reduce: unsupported reduction operation {op} of sparse tensors; they can be summed")


def check_single(operation: str, tensors: Sequence[Any], what: str) -> None:
    if len(tensors) != 1:
        raise CollectiveError(f"{operation} requires a single-element {what}, not one of {len(tensors)}")


def check_not_empty(operation: str, tensors: Sequence[Any], what: str = "tensor list") -> None:
    if not tensors:
        raise CollectiveError(f"{operation} requires non-empty {what}")


def check_parts(operation: str, parts: Sequence[Tensor], whole: Tensor, size: int, which: str) -> None:
    """One tensor for each rank, like the whole one."""
    check_count(operation, parts, size, which)
    for rank, part in enumerate(parts):
        check_part(operation, part, whole, rank)


def check_count(operation: str, parts: Sequence[Tensor], size: int, which: str) -> None:
    if len(parts) != size:
        raise CollectiveError(
            f"{operation}: Incorrect {which} list size {len(parts)}. {which.capitalize()} list size should be {size}: "
            "one tensor for each rank"
        )


def check_part(operation: str, part: Tensor, whole: Tensor, rank: int) -> None:
    wrong = "type" if part.dtype != whole.dtype else "size" if part.numel() != whole.numel() else None
    if wrong is not None:
        raise CollectiveError(
            f"{operation}: invalid tensor {wrong}: the tensor for rank {rank} is {part.numel():,} {part.dtype}, "
            f"this rank's own {whole.numel():,} {whole.dtype}"
        )


def check_lists(operation: str, outs: Sequence[Tensor], inputs: Sequence[Tensor], rank: int) -> None:
    """What is to come from that rank, beside what this one gives."""
    if len(outs) != len(inputs):
        raise CollectiveError(f"{operation}: {len(outs)} tensors for rank {rank}, which gives {len(inputs)}")
    for index, (out, mine) in enumerate(zip(outs, inputs, strict=True)):
        if out.dtype != mine.dtype:
            raise CollectiveError(f"{operation}: invalid tensor type at index {index}: {out.dtype}, not {mine.dtype}")
        if out.shape != mine.shape:
            raise CollectiveError(
                f"{operation}: invalid size of output tensor at index {index}: {list(out.shape)}, not "
                f"{list(mine.shape)}"
            )


def of_root(
    operation: str, lists: Sequence[Sequence[Tensor]], whole: Tensor, is_root: bool, size: int, which: str
) -> list[Tensor]:
    """The list that the root has, and no other rank: one tensor for each rank."""
    if not is_root:
        if lists:
            raise CollectiveError(f"{operation} requires empty {which} on non-root ranks")
        return []
    check_single(operation, lists, f"{which} list")
    check_parts(operation, lists[0], whole, size, which)
    return list(lists[0])


def check_equal_parts(operation: str, whole: Tensor, size: int) -> None:
    if whole.numel() % size:
        raise CollectiveError(f"{operation}: {whole.numel():,} elements can't be cut into {size} equal parts")


def refuse_cut(operation: str, whole: Tensor, part: Tensor, size: int) -> None:
    """The whole is not one part for each rank."""
    check_equal_parts(operation, whole, size)
    wrong = "type" if whole.dtype != part.dtype else "size"
    raise CollectiveError(
        f"{operation}: invalid tensor {wrong}: a part of {part.numel():,} {part.dtype} for each of {size} ranks, "
        f"and a whole of {whole.numel():,} {whole.dtype}"
    )


def equal_parts(flat: Tensor, size: int) -> list[Tensor]:
    return list(flat.view(size, -1).unbind()) if flat.numel() else [flat] * size


def split_rows(flat: Tensor, tensor: Tensor, splits: Any, size: int) -> list[Tensor]:
    """Parts of so many rows each; equal ones where nothing is said."""
    if not splits:
        check_equal_parts("all_to_all", flat, size)
        return equal_parts(flat, size)
    row = flat.numel() // tensor.shape[0] if tensor.shape[0] else 0
    if sum(splits) != tensor.shape[0]:
        raise CollectiveError(f"all_to_all: splits {list(splits)} don't add up to {tensor.shape[0]} rows")
    return list(torch.split(flat, [rows * row for rows in splits]))
