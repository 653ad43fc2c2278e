# mypy: disable-error-code="override,assignment"
"""The face that torch.distributed sees: a process group over shared memory, for the processes of one host.

    torch.distributed.init_process_group("paceline")        after `import paceline.backend`

    group ─► collective queue ─► operations, bucket sums ─► barrier, segments, kernels        collectives
          ─► point-to-point queues                                                            messages

The queue is collectives/collective_queue.py; what is asked of a call's tensors, and its short forms, are calls.py.
"""

from __future__ import annotations

import inspect
import itertools
import json
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from paceline.collectives.collective_queue import CollectiveQueue, Event, QueuedWork
from paceline.collectives.shared_memory import calls
from paceline.collectives.shared_memory.barrier import LINE, Barrier
from paceline.collectives.shared_memory.kernels import choose_kernels, compiled_library
from paceline.collectives.shared_memory.operations import (
    AllReduceInC,
    BucketSums,
    Operations,
    flat_of,
    flat_outs,
    rank_merges,
    reduced,
    share_memory,
)
from paceline.collectives.shared_memory.point_to_point import ANY, CHANNEL_BYTES, PointToPointQueues
from paceline.collectives.shared_memory.segment import PAGE, Arenas, Segment, agree, until_all_have_heard
from paceline.errors import CollectiveError, ConfigError
from paceline.torch_compat import dispatch_modes, never_traced, profiler_enabled
from paceline.world import environment

# -- a call in any of its forms ----------------------------------------------------------------------------------------


def collective(operator: str, short: Callable[..., Any] | None = None) -> Callable[[Callable[..., Any]], Any]:
    """For a method that has the long form: it may also be called in this short one, and is seen as c10d's operator."""

    def decorate(method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def call(self: Any, *given: Any, **named: Any) -> Any:
            if named or not given or not isinstance(given[-1], calls.OPTIONS):
                given = _long_form(method, short, given, named)
            if dispatch_modes() or profiler_enabled():
                return calls.watched(operator, method, self, given)
            return method(self, *given)

        return call

    return decorate


def _long_form(method: Any, short: Any, given: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
    while given and given[-1] is None:  # no options, splits or timeout
        given = given[:-1]
    values = (*given, *named.values())
    if short is not None and not all(isinstance(value, (list, tuple, calls.OPTIONS)) for value in values):
        long: tuple[Any, ...] = short(*given, **named)
        return long
    return inspect.signature(method).bind(None, *given, **named).args[1:] if named else given


# -- the group ---------------------------------------------------------------------------------------------------------


NAME = "paceline"
LINGER_S = 2.0  # how long the end of a group waits for what is under way
MOST_RANKS = 64
LEAST_SLOT_BYTES = 2**20
SMALLEST_SLOT = 4096  # an element for each of 64 ranks fits, whatever its dtype


class SharedMemoryGroup(dist.ProcessGroup):
    """Collectives and messages between processes of one host."""

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        timeout: timedelta,
        *,
        kernels: str | None = None,
        slot_bytes: int | None = None,
    ) -> None:
        """`kernels` and `slot_bytes` are chosen here unless they are given, the same on every rank."""
        super().__init__(rank, size)  # type: ignore[call-arg]
        if size > MOST_RANKS:
            raise ConfigError(f"the paceline backend joins up to {MOST_RANKS} processes, not {size}")
        self._rank, self._size, self._store = rank, size, store
        self._name = self._description = ""
        # A class in Python can't be a c10d::Backend: torch gets to know that this group moves the host's tensors.
        self._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.CUSTOM, None)
        self._segments = itertools.count()
        timeout_s = _seconds(timeout)
        agreed = agree(store, rank, size, kernels or environment.wanted_kernels())
        wanted = _good_slot_bytes(size, agreed.crowded) if slot_bytes is None else max(slot_bytes, SMALLEST_SLOT)
        slot = -(-wanted // PAGE) * PAGE
        line_bytes = -(-size * LINE // PAGE) * PAGE
        channel_bytes = -(-size * size * CHANNEL_BYTES // PAGE) * PAGE
        slot_bytes = 2 * size * slot
        self._segment = self._make_segment(line_bytes + channel_bytes + slot_bytes)
        memory = self._segment.memory[PAGE:]
        lines, channels, slots = torch.split(memory, [line_bytes, channel_bytes, slot_bytes])
        self._barrier = Barrier(lines, rank, size, use_c=agreed.use_c, crowded=agreed.crowded)
        self._arenas = Arenas(rank, size, self._make_segment)
        slots = slots.view(2, size, slot)
        adder = choose_kernels(None if agreed.use_c else "torch")
        self._operations = Operations(self._barrier, slots, self._arenas, adder, rank, size)
        library = compiled_library() if agreed.use_c else None
        if library is not None:
            self._operations.all_reduce_in_c = AllReduceInC(library, self._barrier, slots, rank_merges(size))
        self._operations.timeout_s = self._timeout_s = timeout_s
        self._bucket_sums = BucketSums(self._operations, self._arenas, rank, size)
        channels = channels[: size * size * CHANNEL_BYTES].view(size, size, CHANNEL_BYTES)
        self._messages = PointToPointQueues(channels, self._barrier, rank, size)
        self._queue = CollectiveQueue("paceline-collectives")
        self._closed = False
        self._operations.barrier()

    @property
    def kernels(self) -> str:
        return self._operations.kernels.name

    def allocate(self, elements: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """A tensor in shared memory, which an all-reduce adds up where it lies. All ranks call it in the same order."""
        return self._arenas.allocate(elements, dtype)

    def common(self, bytes_wanted: int) -> Tensor:
        """Memory that exists once for all ranks (see `Arenas.common`). All ranks call it in the same order."""
        return self._arenas.common(bytes_wanted)

    def number_of(self, tensor: Tensor) -> int | None:
        """Where in shared memory a flat tensor lies, if it does; another rank finds it `there`."""
        return self._arenas.number_of(tensor)

    def there(self, rank: int, number: int, elements: int, dtype: torch.dtype) -> Tensor:
        return self._arenas.there(rank, number, elements, dtype)

    def sum_bucket(self, total: list[Tensor], *bucket: Any) -> QueuedWork:
        """Start the canonical sum of a gradient bucket (see `BucketSums.sum`); the list gets this rank's total."""
        return self._run(lambda: total.append(self._bucket_sums.sum(*bucket)), total, None, "sum_bucket")

    def scatter_bucket(self, *bucket: Any) -> QueuedWork:
        """Start the canonical reduce-scatter of a gradient bucket (see `BucketSums.scatter`)."""
        return self._run(lambda: self._bucket_sums.scatter(*bucket), [], None, "scatter_bucket")

    def bucket_buffer(self, room: list[Tensor], *bucket: Any) -> QueuedWork:
        """Shared memory for this rank's root of a bucket (see `BucketSums.buffer`), put into the list."""
        return self._run(lambda: room.append(self._bucket_sums.buffer(*bucket)), room, None, "bucket_buffer")

    def forget_buckets(self, bucket_set: int) -> QueuedWork:
        return self._run(lambda: self._bucket_sums.forget(bucket_set), [], None, "forget_buckets")

    # -- collectives -------------------------------------------------------------------------------------------------

    @collective("allreduce_", calls.allreduce)
    def allreduce(self, tensors: Any, opts: Any = None) -> QueuedWork:
        """Several tensors are several addends of this rank; each of them gets the sum."""
        if len(tensors) == 1:
            return self._reduce_each(tensors, opts)
        op = _op(opts)
        calls.check_not_empty("all_reduce", tensors)
        calls.check_alike("all_reduce", tensors)
        if tensors[0].is_sparse:
            calls.check_sparse(tensors, op)

            def run_sparse() -> None:
                total = torch.stack(tuple(tensors)).sum(0).coalesce()
                self._operations.all_reduce_sparse([total])
                for tensor in tensors:
                    tensor.copy_(total)

            return self._run(run_sparse, list(tensors), opts, "all_reduce")

        def run() -> None:
            total = reduced([flat_of(tensor) for tensor in tensors], ReduceOp.SUM if op == ReduceOp.AVG else op)
            self._operations.all_reduce(total, op)
            _fill(tensors, total)

        return self._run(run, list(tensors), opts, "all_reduce")

    @collective("allreduce_coalesced_")
    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> QueuedWork:
        calls.check_not_empty("all_reduce", tensors)
        return self._reduce_each(list(tensors), opts)

    def _reduce_each(self, tensors: list[Tensor], opts: Any) -> QueuedWork:
        op = _op(opts)
        if any([tensor.layout is not torch.strided for tensor in tensors]):  # noqa: C419 (a list is quicker)
            calls.check_sparse(tensors, op)
            return self._run(lambda: self._operations.all_reduce_sparse(tensors), tensors, opts, "all_reduce")
        return self._each(tensors, opts, "all_reduce", lambda flat: self._operations.all_reduce(flat, op))

    @collective("broadcast_", calls.broadcast)
    def broadcast(self, tensors: Any, opts: Any = None) -> QueuedWork:
        """Several tensors all get what one of the root's is."""
        root, index = (opts.rootRank, opts.rootTensor) if opts is not None else (0, 0)
        calls.check_root("broadcast", root, self._size)
        calls.check_root_tensor("broadcast", index, tensors)
        calls.check_alike("broadcast", tensors)
        source = tensors[index]
        others = [tensor for number, tensor in enumerate(tensors) if number != index]

        def run() -> None:
            with flat_outs([source], filled=True) as (flat,):
                self._operations.broadcast(flat, root)
            for other in others:
                other.detach().copy_(source.detach())

        return self._run(run, list(tensors), opts, "broadcast")

    @collective("reduce_", calls.reduce)
    def reduce(self, tensors: Any, opts: Any = None) -> QueuedWork:
        op, root, index = (_op(opts), opts.rootRank, opts.rootTensor) if opts is not None else (ReduceOp.SUM, 0, 0)
        calls.check_root("reduce", root, self._size)
        calls.check_root_tensor("reduce", index, tensors)
        calls.check_single("reduce", tensors, "tensor list")
        return self._each(list(tensors), opts, "reduce", lambda flat: self._operations.reduce(flat, root, op))

    @collective("allgather_", calls.allgather)
    def allgather(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> QueuedWork:
        """Of n tensors a rank, tensor i of rank r comes to place r·n + i of every list."""
        outputs, inputs, count = output_tensors, input_tensors, len(input_tensors)
        calls.check_not_empty("all_gather", inputs, "input tensor list")
        if len(outputs) != count:
            raise CollectiveError(
                "all_gather requires input/output tensor lists to have the same length, not "
                f"{count} inputs and {len(outputs)} lists of outputs"
            )
        calls.check_alike("all_gather", inputs)
        for outs in outputs:
            calls.check_count("all_gather: invalid output tensor list", outs, self._size * count, "output")
            for place, out in enumerate(outs):
                calls.check_part("all_gather", out, inputs[0], place // count)

        def run() -> None:
            for number, mine in enumerate(inputs):
                with flat_outs(outputs[0][number::count]) as flats:
                    self._operations.all_gather(flats, flat_of(mine))
            for outs in outputs[1:]:
                for out, first in zip(outs, outputs[0], strict=True):
                    out.detach().copy_(first)

        result = list(outputs[0]) if count == 1 else [list(outs) for outs in outputs]
        return self._run(run, result, opts, "all_gather", inputs)

    @collective("allgather_coalesced_")
    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> QueuedWork:
        """`outputs[r][i]` is tensor i of rank r."""
        if len(outputs) != self._size:
            raise CollectiveError(
                f"all_gather_coalesced: output lists should be equal to world size: {len(outputs)} for "
                f"{self._size} ranks"
            )
        for rank, outs in enumerate(outputs):
            calls.check_lists("all_gather_coalesced", outs, inputs, rank)

        def run() -> None:
            for number, mine in enumerate(inputs):
                with flat_outs([outs[number] for outs in outputs]) as flats:
                    self._operations.all_gather(flats, flat_of(mine))

        return self._run(run, [tensor for outs in outputs for tensor in outs], opts, "all_gather", inputs)

    @collective("_allgather_base_")
    def _allgather_base(self, output: Tensor, mine: Tensor, opts: Any = None) -> QueuedWork:
        return self._gather_into([output], [mine], opts)

    @collective("allgather_into_tensor_coalesced_")
    def allgather_into_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> QueuedWork:
        return self._gather_into(outputs, inputs, opts)

    @collective("reduce_scatter_", calls.reduce_scatter)
    def reduce_scatter(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> QueuedWork:
        """Part r of each rank's list goes to rank r; parts may differ in length, in the same way on every rank."""
        op = _op(opts)
        outputs, inputs = list(output_tensors), list(input_tensors)
        for output, parts in zip(outputs, inputs, strict=True):
            calls.check_count("reduce_scatter", parts, self._size, "input")
            calls.check_part("reduce_scatter", parts[self._rank], output, self._rank)

        def run() -> None:
            for output, parts in zip(outputs, inputs, strict=True):
                with flat_outs([output]) as (flat,):
                    self._operations.reduce_scatter(flat, [flat_of(part) for part in parts], op)

        return self._run(run, outputs, opts, "reduce_scatter", [part for parts in inputs for part in parts])

    @collective("_reduce_scatter_base_")
    def _reduce_scatter_base(self, output: Tensor, mine: Tensor, opts: Any = None) -> QueuedWork:
        return self._scatter_sums([output], [mine], opts)

    @collective("reduce_scatter_tensor_coalesced_")
    def reduce_scatter_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> QueuedWork:
        return self._scatter_sums(outputs, inputs, opts)

    @collective("alltoall_base_", calls.alltoall_base)
    def alltoall_base(
        self, output: Tensor, mine: Tensor, output_splits: Any = None, input_splits: Any = None, opts: Any = None
    ) -> QueuedWork:
        def run() -> None:
            with flat_outs([output]) as (flat,):
                outs = calls.split_rows(flat, output, output_splits, self._size)
                self._operations.all_to_all(outs, calls.split_rows(flat_of(mine), mine, input_splits, self._size))

        return self._run(run, [output], opts, "all_to_all", [mine])

    @collective("alltoall_")
    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> QueuedWork:
        def run() -> None:
            with flat_outs(outputs) as flats:
                self._operations.all_to_all(flats, [flat_of(part) for part in inputs])

        return self._run(run, list(outputs), opts, "all_to_all", inputs)

    @collective("gather_", calls.gather)
    def gather(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> QueuedWork:
        root = opts.rootRank if opts is not None else 0
        calls.check_root("gather", root, self._size)
        calls.check_single("gather", input_tensors, "input tensor list")
        mine = input_tensors[0]
        outs = calls.of_root("gather", output_tensors, mine, self._rank == root, self._size, "output")

        def run() -> None:
            with flat_outs(outs) as flats:
                self._operations.gather(flats, flat_of(mine), root)

        return self._run(run, outs, opts, "gather", [mine])

    @collective("scatter_", calls.scatter)
    def scatter(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> QueuedWork:
        root = opts.rootRank if opts is not None else 0
        calls.check_root("scatter", root, self._size)
        calls.check_single("scatter", output_tensors, "output tensor list")
        output = output_tensors[0]
        parts = calls.of_root("scatter", input_tensors, output, self._rank == root, self._size, "input")

        def run() -> None:
            with flat_outs([output]) as (flat,):
                self._operations.scatter(flat, [flat_of(part) for part in parts], root)

        return self._run(run, [output], opts, "scatter", parts)

    @collective("barrier", calls.barrier)
    def barrier(self, opts: Any = None) -> QueuedWork:
        return self._run(self._operations.barrier, [], opts, "barrier")

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Like any barrier here: one that fails names all the ranks that did not come, on every rank that did."""
        self.barrier(timeout).wait()

    # Newer names of the same.
    all_gather_single = _allgather_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    reduce_scatter_single = _reduce_scatter_base
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced
    all_to_all_single = alltoall_base

    # -- messages ----------------------------------------------------------------------------------------------------

    @collective("send")
    def send(self, tensors: Any, to: int, tag: int = 0) -> QueuedWork:
        work = QueuedWork([], Event(f"{NAME}:send", tensors))
        self._messages.send(tensors[0], to, tag, self._timeout_s, work)
        return work

    @collective("recv_")
    def recv(self, tensors: Any, source: int, tag: int = 0) -> QueuedWork:
        return self._receive(tensors, source, tag, "recv")

    @collective("recv_any_source_")
    def recv_anysource(self, tensors: Any, tag: int = 0) -> QueuedWork:
        return self._receive(tensors, ANY, tag, "recvAnySource")

    def _receive(self, tensors: Any, source: int, tag: int, name: str) -> QueuedWork:
        work = QueuedWork([tensors[0]], Event(f"{NAME}:{name}", tensors))
        self._messages.receive(tensors[0], source, tag, self._timeout_s, work)
        return work

    # -- the group ---------------------------------------------------------------------------------------------------

    def _get_backend(self, device: torch.device) -> Any:
        """torch's own groups have a backend for each kind of device; this one is its own, for the host's tensors."""
        if torch.device(device).type != "cpu":
            raise CollectiveError(f"the paceline backend moves CPU tensors; no backend is there for {device}")
        return self

    # What torch asks a backend for before it uses it.
    supports_coalescing = supports_splitting = supports_shrinking = supports_time_estimate = False

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return False  # memory of ours is asked for by all ranks together (`allocate`)

    def getBackendName(self) -> str:  # noqa: N802 (c10d's name)
        return NAME

    def name(self) -> str:
        return NAME

    def setGroupName(self, name: str) -> None:  # noqa: N802 (c10d's name)
        self._name = name

    def getGroupName(self) -> str:  # noqa: N802 (c10d's name)
        return self._name

    def setGroupDesc(self, description: str) -> None:  # noqa: N802 (c10d's name)
        self._description = description

    def getGroupDesc(self) -> str:  # noqa: N802 (c10d's name)
        return self._description

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout_s = _seconds(timeout)

    def shutdown(self) -> None:
        if self._closed:
            return
        self._closed = True
        parts = (self._queue, self._messages)
        for part in parts:
            part.close()
        if not all(part.join(LINGER_S) for part in parts):
            self._barrier.stop()
            self._messages.stop()
            for part in parts:
                part.join(LINGER_S)
        self._barrier.leave()
        self._arenas.close()
        self._segment.close()

    def interrupt(self) -> None:
        """End what waits, at once, and leave the rest to `shutdown`; any thread may call it."""
        self._barrier.stop()
        self._messages.stop()

    def abort(self) -> None:
        """Shut down without waiting for what is under way."""
        self.interrupt()
        self.shutdown()

    # -- parts -------------------------------------------------------------------------------------------------------

    def _each(self, tensors: list[Tensor], opts: Any, name: str, operation: Callable[[Tensor], None]) -> QueuedWork:
        """In place on each tensor; one that is not contiguous, or not alone in its memory, goes through a copy."""

        apart = len(tensors) > 1 and share_memory(tensors)

        def run() -> None:
            with flat_outs(tensors, filled=True, apart=apart) as flats:
                for flat in flats:
                    operation(flat)

        return self._run(run, tensors, opts, name)

    def _gather_into(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any) -> QueuedWork:
        for output, mine in zip(outputs, inputs, strict=True):
            self._check_cut("all_gather", output, mine)

        def run() -> None:
            for output, mine in zip(outputs, inputs, strict=True):
                with flat_outs([output]) as (flat,):
                    self._operations.all_gather(calls.equal_parts(flat, self._size), flat_of(mine))

        return self._run(run, list(outputs), opts, "all_gather", inputs)

    def _check_cut(self, operation: str, whole: Tensor, part: Tensor) -> None:
        if whole.dtype != part.dtype or whole.numel() != self._size * part.numel():
            calls.refuse_cut(operation, whole, part, self._size)

    def _scatter_sums(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any) -> QueuedWork:
        op = _op(opts)
        for output, mine in zip(outputs, inputs, strict=True):
            self._check_cut("reduce_scatter", mine, output)

        def run() -> None:
            for output, mine in zip(outputs, inputs, strict=True):
                with flat_outs([output]) as (flat,):
                    parts = calls.equal_parts(flat_of(mine), self._size)
                    self._operations.reduce_scatter(flat, parts, op)

        return self._run(run, list(outputs), opts, "reduce_scatter", inputs)

    def _run(
        self,
        operation: Callable[[], None],
        result: list[Any],
        opts: Any,
        name: str,
        inputs: Sequence[Tensor] | None = None,
    ) -> QueuedWork:
        at_once = opts is not None and not getattr(opts, "asyncOp", True)
        asked = opts.timeout.total_seconds() if opts is not None else 0.0  # negative where nothing was asked for
        timeout_s = asked if asked > 0 else self._timeout_s

        def run() -> None:
            self._operations.timeout_s = timeout_s
            passed = self._barrier.count
            try:
                operation()
            except CollectiveError:
                raise  # either no rank has begun, or the barrier has drawn the consequences
            except BaseException as error:
                if self._barrier.count != passed:
                    what = f"{type(error).__name__} in {name}"
                    self._barrier.give_up(f"{what}: {error}", what)
                raise

        event = Event(f"{NAME}:{name}", result if inputs is None else inputs)
        return self._queue.run(run, result, event, at_once=at_once)

    def _make_segment(self, size: int) -> Segment:
        """The next segment of this group: rank 0 makes it and keeps it open, the others open it by its descriptor."""
        key = f"segment/{next(self._segments)}"
        if self._rank == 0:
            try:
                segment, told = Segment.create(size)
            except CollectiveError as error:
                self._store.set(key, json.dumps({"error": str(error)}))
                until_all_have_heard(self._store, self._rank, self._size)
                raise
            self._store.set(key, told)
        else:
            told = self._store.get(key).decode()
            if "error" in json.loads(told):
                until_all_have_heard(self._store, self._rank, self._size)
                raise CollectiveError(json.loads(told)["error"])
            segment = Segment.open(told, rank=self._rank)
        return segment


for _one in vars(SharedMemoryGroup).values():
    if inspect.isfunction(_one):
        never_traced(_one)  # DDP's C++ calls them in the middle of a compiled forward


def _good_slot_bytes(size: int, crowded: bool) -> int:
    """What is written into slots is read at once: from a cache that the cores share, if all slots together fit it.

    Where ranks take turns on the cores a barrier costs more than memory does: there slots are large and barriers few.
    """
    most, in_all = (16 * 2**20, 512 * 2**20) if crowded else (4 * 2**20, 16 * 2**20)
    return max(LEAST_SLOT_BYTES, min(most, in_all // (2 * size)))


def _fill(tensors: Sequence[Tensor], flat: Tensor) -> None:
    """Each of them gets what is in `flat`."""
    for tensor in tensors:
        with flat_outs([tensor]) as (out,):
            out.copy_(flat)


def _op(opts: Any) -> Any:
    op = opts.reduceOp if opts is not None else ReduceOp.SUM
    return getattr(op, "op", op)


def _seconds(timeout: timedelta) -> float:
    if timeout.total_seconds() <= 0:
        raise ConfigError(f"a timeout of {timeout.total_seconds():g} s: a wait of no time always fails; give it some")
    return timeout.total_seconds()
