# mypy: disable-error-code="override,assignment"
"""The face that torch.distributed sees: a process group over shared memory, for the processes of one host.

torch.distributed.init_process_group("paceline")        after `import paceline.backend`
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from paceline.collectives.shared_memory.agreement import agree, until_all_have_heard
from paceline.collectives.shared_memory.all_reduce_in_c import AllReduceInC
from paceline.collectives.shared_memory.arena import Arenas
from paceline.collectives.shared_memory.bucket_sums import BucketSums
from paceline.collectives.shared_memory.compiling import compiled_library
from paceline.collectives.shared_memory.flat_tensors import equal_parts, flat_of, flat_outs, split_rows
from paceline.collectives.shared_memory.kernels import choose_kernels
from paceline.collectives.shared_memory.mailbox import ANY, CHANNEL_BYTES, Mailbox
from paceline.collectives.shared_memory.meeting import LINE, Meeting
from paceline.collectives.shared_memory.operations import Operations, rank_merges
from paceline.collectives.shared_memory.segment import PAGE, Segment
from paceline.collectives.shared_memory.sparse import all_reduce_sparse
from paceline.collectives.shared_memory.work_line import LINGER_S, Event, LineWork, WorkLine
from paceline.errors import CollectiveError, ConfigError
from paceline.world import environment

NAME = "paceline"
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
        self._meeting = Meeting(lines, rank, size, use_c=agreed.use_c, crowded=agreed.crowded)
        self._arenas = Arenas(rank, size, self._make_segment)
        slots = slots.view(2, size, slot)
        adder = choose_kernels(None if agreed.use_c else "torch")
        self._operations = Operations(self._meeting, slots, self._arenas, adder, rank, size)
        library = compiled_library() if agreed.use_c else None
        if library is not None:
            self._operations.all_reduce_in_c = AllReduceInC(library, self._meeting, slots, rank_merges(size))
        self._operations.timeout_s = self._timeout_s = timeout_s
        self._bucket_sums = BucketSums(self._operations, self._arenas, rank, size)
        room = channels[: size * size * CHANNEL_BYTES].view(size, size, CHANNEL_BYTES)
        self._mailbox = Mailbox(room, self._meeting, rank, size)
        self._line = WorkLine("paceline-collectives")
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

    def sum_bucket(self, *bucket: Any) -> LineWork:
        """Start the canonical sum of a gradient bucket (see `BucketSums.sum`); the result is this rank's total."""
        result: list[Any] = []
        return self._run(lambda: result.append(self._bucket_sums.sum(*bucket)), result, None, "sum_bucket")

    def scatter_bucket(self, *bucket: Any) -> LineWork:
        """Start the canonical reduce-scatter of a gradient bucket (see `BucketSums.scatter`)."""
        return self._run(lambda: self._bucket_sums.scatter(*bucket), [], None, "scatter_bucket")

    def home_of_bucket(self, *bucket: Any) -> LineWork:
        """Room in shared memory for this rank's root of a bucket (see `BucketSums.home`)."""
        result: list[Any] = []
        return self._run(lambda: result.append(self._bucket_sums.home(*bucket)), result, None, "home_of_bucket")

    def forget_buckets(self, owner: int) -> LineWork:
        return self._run(lambda: self._bucket_sums.forget(owner), [], None, "forget_buckets")

    # -- collectives -------------------------------------------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = None) -> LineWork:
        tensors = _listed(tensors)
        op = _op(opts)
        if any(tensor.is_sparse for tensor in tensors):
            return self._run(lambda: all_reduce_sparse(self._operations, tensors, op), tensors, opts, "all_reduce")
        return self._each(tensors, opts, "all_reduce", lambda flat: self._operations.all_reduce(flat, op))

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> LineWork:
        return self.allreduce(tensors, opts)

    def broadcast(self, tensors: Any, opts: Any = None) -> LineWork:
        root = opts.rootRank if opts is not None else 0
        return self._each(_listed(tensors), opts, "broadcast", lambda flat: self._operations.broadcast(flat, root))

    def reduce(self, tensors: Any, opts: Any = None) -> LineWork:
        op, root = _op(opts), opts.rootRank if opts is not None else 0
        return self._each(_listed(tensors), opts, "reduce", lambda flat: self._operations.reduce(flat, root, op))

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> LineWork:
        def run() -> None:
            for outs, mine in zip(outputs, inputs, strict=True):
                with flat_outs(outs) as flats:
                    self._operations.all_gather(flats, flat_of(mine))

        return self._run(run, [tensor for outs in outputs for tensor in outs], opts, "all_gather", inputs)

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> LineWork:
        """`outputs[r][i]` is tensor i of rank r."""

        def run() -> None:
            for number, mine in enumerate(inputs):
                with flat_outs([outs[number] for outs in outputs]) as flats:
                    self._operations.all_gather(flats, flat_of(mine))

        return self._run(run, [tensor for outs in outputs for tensor in outs], opts, "all_gather", inputs)

    def _allgather_base(self, output: Tensor, mine: Tensor, opts: Any = None) -> LineWork:
        return self._gather_into([output], [mine], opts)

    def allgather_into_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> LineWork:
        return self._gather_into(outputs, inputs, opts)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> LineWork:
        op = _op(opts)

        def run() -> None:
            for out, parts in zip(outputs, inputs, strict=True):
                with flat_outs([out]) as (flat,):
                    self._operations.reduce_scatter(flat, [flat_of(part) for part in parts], op)

        return self._run(run, list(outputs), opts, "reduce_scatter", [part for parts in inputs for part in parts])

    def _reduce_scatter_base(self, output: Tensor, mine: Tensor, opts: Any = None) -> LineWork:
        return self._scatter_sums([output], [mine], opts)

    def reduce_scatter_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> LineWork:
        return self._scatter_sums(outputs, inputs, opts)

    def alltoall_base(
        self, output: Tensor, mine: Tensor, output_splits: Any = None, input_splits: Any = None, opts: Any = None
    ) -> LineWork:
        def run() -> None:
            with flat_outs([output]) as (flat,):
                outs = split_rows(flat, output, output_splits, self._size)
                self._operations.all_to_all(outs, split_rows(flat_of(mine), mine, input_splits, self._size))

        return self._run(run, [output], opts, "all_to_all", [mine])

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> LineWork:
        def run() -> None:
            with flat_outs(outputs) as flats:
                self._operations.all_to_all(flats, [flat_of(part) for part in inputs])

        return self._run(run, list(outputs), opts, "all_to_all", inputs)

    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> LineWork:
        root = opts.rootRank if opts is not None else 0
        outs = list(outputs[0]) if outputs and self._rank == root else []

        def run() -> None:
            with flat_outs(outs) as flats:
                self._operations.gather(flats, flat_of(inputs[0]), root)

        return self._run(run, outs, opts, "gather", inputs)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> LineWork:
        root = opts.rootRank if opts is not None else 0
        parts = list(inputs[0]) if inputs and self._rank == root else []

        def run() -> None:
            with flat_outs(outputs) as (flat,):
                self._operations.scatter(flat, [flat_of(part) for part in parts], root)

        return self._run(run, list(outputs), opts, "scatter", parts)

    def barrier(self, opts: Any = None) -> LineWork:
        return self._run(self._operations.barrier, [], opts, "barrier")

    # Newer names of the same.
    all_gather_single = _allgather_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    reduce_scatter_single = _reduce_scatter_base
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced
    all_to_all_single = alltoall_base

    # -- messages ----------------------------------------------------------------------------------------------------

    def send(self, tensors: Any, to: int, tag: int = 0) -> LineWork:
        return self._mailbox.send(tensors[0], to, tag, self._timeout_s, Event(f"{NAME}:send", tensors))

    def recv(self, tensors: Any, source: int, tag: int = 0) -> LineWork:
        return self._mailbox.receive(tensors[0], source, tag, self._timeout_s, Event(f"{NAME}:recv", tensors))

    def recv_anysource(self, tensors: Any, tag: int = 0) -> LineWork:
        return self._mailbox.receive(tensors[0], ANY, tag, self._timeout_s, Event(f"{NAME}:recvAnySource", tensors))

    # -- the group ---------------------------------------------------------------------------------------------------

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
        parts = (self._line, self._mailbox)
        for part in parts:
            part.close()
        if not all(part.join(LINGER_S) for part in parts):
            self._meeting.stop()
            self._mailbox.stop()
            for part in parts:
                part.join(LINGER_S)
        self._meeting.leave()
        self._arenas.close()
        self._segment.close()

    def interrupt(self) -> None:
        """End what waits, at once, and leave the rest to `shutdown`; any thread may call it."""
        self._meeting.stop()
        self._mailbox.stop()

    def abort(self) -> None:
        """Shut down without waiting for what is under way."""
        self.interrupt()
        self.shutdown()

    # -- parts -------------------------------------------------------------------------------------------------------

    def _each(self, tensors: list[Tensor], opts: Any, name: str, operation: Callable[[Tensor], None]) -> LineWork:
        """In place on each tensor; one that is not contiguous goes through a copy."""

        def run() -> None:
            for tensor in tensors:
                with flat_outs([tensor], filled=True) as (flat,):
                    operation(flat)

        return self._run(run, tensors, opts, name)

    def _gather_into(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any) -> LineWork:
        def run() -> None:
            for output, mine in zip(outputs, inputs, strict=True):
                with flat_outs([output]) as (flat,):
                    self._operations.all_gather(equal_parts(flat, self._size, "all_gather"), flat_of(mine))

        return self._run(run, list(outputs), opts, "all_gather", inputs)

    def _scatter_sums(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any) -> LineWork:
        op = _op(opts)

        def run() -> None:
            for output, mine in zip(outputs, inputs, strict=True):
                with flat_outs([output]) as (flat,):
                    parts = equal_parts(flat_of(mine), self._size, "reduce_scatter")
                    self._operations.reduce_scatter(flat, parts, op)

        return self._run(run, list(outputs), opts, "reduce_scatter", inputs)

    def _run(
        self,
        operation: Callable[[], None],
        result: list[Any],
        opts: Any,
        name: str,
        inputs: Sequence[Tensor] | None = None,
    ) -> LineWork:
        at_once = opts is not None and not getattr(opts, "asyncOp", True)
        asked = opts.timeout.total_seconds() if opts is not None else 0.0  # negative where nothing was asked for
        timeout_s = asked if asked > 0 else self._timeout_s

        def run() -> None:
            self._operations.timeout_s = timeout_s
            met = self._meeting.count
            try:
                operation()
            except CollectiveError:
                raise  # either nobody has begun, or the meeting has drawn the consequences
            except BaseException as error:
                if self._meeting.count != met:
                    what = f"{type(error).__name__} in {name}"
                    self._meeting.give_up(f"{what}: {error}", what)
                raise

        event = Event(f"{NAME}:{name}", result if inputs is None else inputs)
        return self._line.run(run, result, event, at_once=at_once)

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


def _good_slot_bytes(size: int, crowded: bool) -> int:
    """What is written into slots is read at once: from a cache that the cores share, if all slots together fit it.

    Where ranks take turns on the cores a meeting costs more than memory does: there slots are large and meetings few.
    """
    most, in_all = (16 * 2**20, 512 * 2**20) if crowded else (4 * 2**20, 16 * 2**20)
    return max(LEAST_SLOT_BYTES, min(most, in_all // (2 * size)))


def _listed(tensors: Any) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def _op(opts: Any) -> Any:
    op = opts.reduceOp if opts is not None else ReduceOp.SUM
    return getattr(op, "op", op)


def _seconds(timeout: timedelta) -> float:
    if timeout.total_seconds() <= 0:
        raise ConfigError(f"a timeout of {timeout.total_seconds():g} s: a wait of no time always fails; give it some")
    return timeout.total_seconds()
