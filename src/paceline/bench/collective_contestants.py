"""Who moves the tensors: each contestant makes a call of an operation on tensors of a size, to be made again and again.

    tensors       whole   S bytes      all_reduce, broadcast, reduce: in place
                  part    S / N        reduce_scatter: whole → part        all_gather: part → whole
                  other   S            all_to_all: whole → other

Ordinary tensors are the same memory for all contestants. Those that need theirs in shared memory bring their own.
Every call is checked once before it is timed: rank r brings r + 1 everywhere.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.bench.collectives import ALGORITHMS, ITEM_BYTES, OPERATIONS, Comparison
from paceline.collectives.canonical_sum import owner_ranges
from paceline.collectives.choice import Choice
from paceline.collectives.communicator import Communicator
from paceline.collectives.executor import Scratch, run_schedule
from paceline.collectives.ring_all_reduce import RING_ALL_GATHER, RING_REDUCE_SCATTER
from paceline.collectives.schedule import Schedule
from paceline.collectives.shared_memory.barrier import LINE, Barrier, Call
from paceline.collectives.shared_memory.group import NAME, SharedMemoryGroup
from paceline.collectives.shared_memory.kernels import choose_kernels
from paceline.collectives.shared_memory.operations import ALIGNED, rank_merges
from paceline.collectives.shared_memory.segment import PAGE, Segment
from paceline.errors import CollectiveError, ConfigError
from paceline.torch_compat import PrefixStore, Store
from paceline.world.environment import enter as enter_environment
from paceline.world.world import World

TIMEOUT_S = 120.0
TORCH_KERNELS = "paceline_torch"
ROOT = 0


@dataclass(frozen=True)
class Tensors:
    whole: Tensor
    part: Tensor
    other: Tensor

    def fill(self, value: float) -> None:
        for tensor in (self.whole, self.part, self.other):
            tensor.fill_(value)


@dataclass(frozen=True)
class Prepared:
    """A call on its tensors."""

    operation: str
    tensors: Tensors
    call: Callable[[], object]

    def check(self, name: str, rank: int, size: int) -> None:
        """Call it once and look at the result; what is left are zeros, which stay zeros however often one adds them."""
        self.tensors.fill(float(rank + 1))
        self.call()
        total = sum(range(size + 1))
        by_rank = torch.arange(1.0, size + 1).view(size, 1)
        results: dict[str, tuple[Tensor, Tensor | float]] = {
            "all_reduce": (self.tensors.whole, total),
            "reduce": (self.tensors.whole if rank == ROOT else torch.empty(0), total),
            "broadcast": (self.tensors.whole, ROOT + 1),
            "reduce_scatter": (self.tensors.part, total),
            "all_gather": (self.tensors.whole.view(size, -1), by_rank),
            "all_to_all": (self.tensors.other.view(size, -1), by_rank),
        }
        result, wanted = results[self.operation]
        if not bool(result.eq(wanted).all()):
            raise CollectiveError(f"{name}: the result of {self.operation} on rank {rank} is wrong")
        self.tensors.fill(0.0)


class Contestant(Protocol):
    def prepare(self, operation: str, elements: int) -> Prepared: ...

    def sent_bytes(self) -> int | None:
        """By this rank so far, where bytes are counted as they leave."""
        ...

    def formula_bytes(self, operation: str, elements: int) -> float:
        """What the busiest rank has to send of one call."""
        ...

    def close(self) -> None: ...


class Room:
    """One rank's ordinary tensors, as large as the largest size needs; smaller ones are their beginnings."""

    def __init__(self, comparison: Comparison) -> None:
        self.workers = comparison.workers
        most = comparison.elements(max(comparison.sizes))
        self._whole, self._part = torch.zeros(most), torch.zeros(most // self.workers)
        self._other = torch.zeros(most if "all_to_all" in comparison.operations else 0)

    def tensors(self, elements: int) -> Tensors:
        part = self._part[: elements // self.workers]
        return Tensors(self._whole[:elements], part, self._other[:elements])


class _Uncounted:
    """What a rank must send at least; what it does send can't be seen from outside."""

    def __init__(self, room: Room) -> None:
        self.room = room

    def sent_bytes(self) -> int | None:
        return None

    def formula_bytes(self, operation: str, elements: int) -> float:
        return OPERATIONS[operation].factor(self.room.workers) * elements * ITEM_BYTES

    def close(self) -> None:
        pass


class C10d(_Uncounted):
    """The calls of torch.distributed, as a user writes them."""

    def __init__(self, room: Room, group: Any) -> None:
        super().__init__(room)
        self.group = group

    def prepare(self, operation: str, elements: int) -> Prepared:
        return self.prepared(operation, self.room.tensors(elements))

    def prepared(self, operation: str, tensors: Tensors) -> Prepared:
        whole, part, group = tensors.whole, tensors.part, self.group
        calls: dict[str, Callable[[], object]] = {
            "all_reduce": lambda: dist.all_reduce(whole, group=group),
            "reduce": lambda: dist.reduce(whole, ROOT, group=group),
            "broadcast": lambda: dist.broadcast(whole, ROOT, group=group),
            "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole, group=group),
            "all_gather": lambda: dist.all_gather_into_tensor(whole, part, group=group),
            "all_to_all": lambda: dist.all_to_all_single(tensors.other, whole, group=group),
        }
        return Prepared(operation, tensors, calls[operation])


class Buckets(C10d):
    """The same calls, on tensors that the group has allocated: the Engine's gradient buckets."""

    def __init__(self, room: Room, group: Any, most_elements: int) -> None:
        super().__init__(room, group)
        self._whole: Tensor = group.allocate(most_elements)

    def prepare(self, operation: str, elements: int) -> Prepared:
        ordinary = self.room.tensors(elements)
        return self.prepared(operation, Tensors(self._whole[:elements], ordinary.part, ordinary.other))


class Bound(_Uncounted):
    """What the machine can do: every rank adds its part of all tensors and writes it to all, between two barriers."""

    def __init__(self, room: Room, store: Store, rank: int, most_elements: int) -> None:
        super().__init__(room)
        self._rank, size = rank, room.workers
        self._kernels = choose_kernels()
        if self._kernels.name != "c":
            raise ConfigError("--backend bound is a sum in C, but there is no compiler; leave it out")
        line_bytes = -(-size * LINE // PAGE) * PAGE
        each = -(-most_elements * ITEM_BYTES // PAGE) * PAGE
        if rank == 0:
            self._segment, told = Segment.create(line_bytes + size * each)
            store.set("segment", told)
        else:
            self._segment = Segment.open(store.get("segment").decode(), rank=rank)
        lines, rows = torch.split(self._segment.memory[PAGE:], [line_bytes, size * each])
        self._barrier = Barrier(lines, rank, size, use_c=True)
        self._rows = rows.view(size, each).view(torch.float32)

    def prepare(self, operation: str, elements: int) -> Prepared:
        size, meet = self.room.workers, self._barrier.wait
        low, high = owner_ranges(elements, size, ALIGNED)[self._rank]
        rows = [self._rows[rank, low:high] for rank in range(size)]
        merges, sum_into, about = rank_merges(size), self._kernels.sum_into, Call("bound").packed()

        def call() -> None:
            meet(about, TIMEOUT_S)
            if high > low:
                sum_into(rows, rows, merges)
            meet(about, TIMEOUT_S)

        ordinary = self.room.tensors(elements)
        return Prepared(operation, Tensors(self._rows[self._rank, :elements], ordinary.part, ordinary.other), call)

    def close(self) -> None:
        self._barrier.leave()
        self._segment.close()


class Scheduled:
    """One of our schedules over gloo's point-to-point; its bytes are counted where they leave."""

    def __init__(self, room: Room, comm: Communicator, algorithm: str) -> None:
        self.room, self._comm = room, comm
        self._choice = Choice.agreed(comm, algorithm)
        self._scratch = Scratch()

    def prepare(self, operation: str, elements: int) -> Prepared:
        ordinary = self.room.tensors(elements)
        own = ordinary.whole.view(self._comm.size, -1)[self._comm.rank]  # schedules work in place
        schedule = self._schedule(operation, elements)
        return Prepared(
            operation,
            Tensors(ordinary.whole, own, ordinary.other),
            lambda: run_schedule(self._comm, schedule, ordinary.whole, scratch=self._scratch),
        )

    def sent_bytes(self) -> int | None:
        return self._comm.traffic.sent_bytes

    def formula_bytes(self, operation: str, elements: int) -> float:
        return self._schedule(operation, elements).most_sent(elements, self._comm.size) * ITEM_BYTES

    def close(self) -> None:
        self._comm.close()

    def _schedule(self, operation: str, elements: int) -> Schedule:
        match operation:
            case "reduce_scatter":
                return RING_REDUCE_SCATTER
            case "all_gather":
                return RING_ALL_GATHER
        return self._choice.schedule(elements * ITEM_BYTES)


class OpenMpi(_Uncounted):
    """mpi4py on the same memory."""

    def __init__(self, room: Room) -> None:
        super().__init__(room)
        self._mpi = importlib.import_module("mpi4py.MPI")
        self._comm = self._mpi.COMM_WORLD
        if self._comm.Get_size() != room.workers:
            raise ConfigError(
                f"--backend openmpi: MPI knows {self._comm.Get_size()} processes, not {room.workers}; start with mpirun"
            )

    def prepare(self, operation: str, elements: int) -> Prepared:
        tensors, comm, in_place = self.room.tensors(elements), self._comm, self._mpi.IN_PLACE
        whole, part, other = (tensor.numpy() for tensor in (tensors.whole, tensors.part, tensors.other))
        calls: dict[str, Callable[[], object]] = {
            "all_reduce": lambda: comm.Allreduce(in_place, whole),
            "reduce": lambda: comm.Reduce(in_place, whole) if comm.Get_rank() == ROOT else comm.Reduce(whole, None),
            "broadcast": lambda: comm.Bcast(whole, ROOT),
            "reduce_scatter": lambda: comm.Reduce_scatter_block(whole, part),
            "all_gather": lambda: comm.Allgather(part, whole),
            "all_to_all": lambda: comm.Alltoall(whole, other),
        }
        return Prepared(operation, tensors, calls[operation])


class DeepSpeed(_Uncounted):
    """Its all-reduce for inference between the processes of one host."""

    def __init__(self, room: Room, world: World) -> None:
        super().__init__(room)
        place = {"LOCAL_RANK": world.local_rank, "LOCAL_SIZE": world.local_size, "RANK": world.rank}
        told = {name: str(value) for name, value in place.items()}
        enter_environment({**told, "WORLD_SIZE": str(world.size), "DS_ACCELERATOR": "cpu"})
        importlib.import_module("deepspeed").init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
        try:
            self._all_reduce = torch.ops.deepspeed.inference_all_reduce_
        except AttributeError as error:
            raise ConfigError("--backend deepspeed: its shared-memory operator was not built; leave it out") from error

    def prepare(self, operation: str, elements: int) -> Prepared:
        tensors = self.room.tensors(elements)
        return Prepared(operation, tensors, lambda: self._all_reduce(tensors.whole))

    def close(self) -> None:
        """It leaves its buffers in /dev/shm, so what this process has mapped of them is removed here."""
        mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
        for path in mapped:
            if path.startswith("/dev/shm/deepspeed_"):
                Path(path).unlink(missing_ok=True)


def enter(name: str, room: Room, world: World, store: Store, most_elements: int) -> Contestant:
    """All ranks enter the same contestants in the same order."""
    match name:
        case "gloo":
            return C10d(room, dist.group.WORLD)
        case "paceline":
            return C10d(room, dist.new_group(backend=_registered(NAME, None)))
        case "paceline-torch":
            return C10d(room, dist.new_group(backend=_registered(TORCH_KERNELS, "torch")))
        case "paceline-buckets":
            return Buckets(room, dist.new_group(backend=_registered(NAME, None)), most_elements)
        case "bound":
            return Bound(room, PrefixStore("bound", store), world.rank, most_elements)
        case "openmpi":
            return OpenMpi(room)
        case "deepspeed":
            return DeepSpeed(room, world)
    assert name in ALGORITHMS, name
    device = torch.device("cpu")
    prefix = PrefixStore(name, store)
    return Scheduled(
        room, Communicator.connect(world, prefix, backend="gloo", device=device, timeout_s=TIMEOUT_S), name
    )


def _registered(backend: str, kernels: str | None) -> str:
    """The name of a c10d backend that is known from now on."""
    import paceline.backend  # noqa: F401 (it registers "paceline")

    def create(store: Any, rank: int, size: int, timeout: timedelta) -> SharedMemoryGroup:
        return SharedMemoryGroup(store, rank, size, timeout, kernels=kernels)

    if backend.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(backend, create, devices=["cpu"])
    return backend
