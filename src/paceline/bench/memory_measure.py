"""What each worker runs for `paceline bench memory`: a few steps, one for the peak, one to count.

    python -m paceline.bench.memory_measure RUN FOLDER      under `paceline run`'s supervisor; writes FOLDER/RANK.json

A process's memory is the kernel's figures for it, and where its tensors lie:

    PSS         pages that only this process has, and its share of those that others have too
    peak        the highest resident size since `reset_peak`, with shared pages counted as PSS counts them
    tensors     what is alive in the process, asked of the interpreter: no contestant's own books are trusted

                parameters         of the model, and of every optimizer there is (a sharded one's own pieces)
                gradients          their .grad
                optimizer state    what the optimizers keep for them
                buffers            all other tensors
"""

from __future__ import annotations

import gc
import json
import mmap
import os
import sys
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.optim import Optimizer

from paceline.bench.measure import meeting
from paceline.bench.memory import PEERS, ROLES, Memory, MemoryRun, Spans, joined, union, without
from paceline.bench.memory_contestants import MLP50M, Loop, enter, strategies
from paceline.bench.workloads import Workload, adamw
from paceline.sharding.footprint import FOOTPRINTS, Model, footprint
from paceline.strategies.local.lane_optimizer import LaneOptimizer
from paceline.strategies.local.local_training import LaneGradients
from paceline.strategies.zero.zero1 import Zero1
from paceline.world.environment import read_world
from paceline.world.process import keep_no_free_memory
from paceline.world.world import World

RESET_PEAK = "5"
PRESENT = 1 << 63  # of a page's entry in pagemap


# -- by the kernel -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Resident:
    rss: int
    pss: int

    @classmethod
    def now(cls) -> Resident:
        found = _fields(Path("/proc/self/smaps_rollup"))
        return cls(found["Rss"], found["Pss"])


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text(RESET_PEAK)


def peak_pss() -> int:
    """The kernel keeps the peak of the resident size only; what of it counts less, because it is shared, is as now."""
    now = Resident.now()
    return _fields(Path("/proc/self/status"))["VmHWM"] - now.rss + now.pss


def shared_pss() -> int:
    """Of memory that workers made to share: anonymous files, mapped by all of them."""
    total, counts = 0, False
    with Path("/proc/self/smaps").open() as lines:
        for line in lines:
            first, _, rest = line.partition(" ")
            if not first.endswith(":"):
                counts = "/memfd:paceline" in rest
            elif counts and first == "Pss:":
                total += 1024 * int(rest.split()[0])
    return total


def resident(spans: Iterable[tuple[int, int]]) -> int:
    """Of private memory, what has been touched: a page exists from then on."""
    pages = sorted({page for start, stop in spans for page in range(start // mmap.PAGESIZE, -(-stop // mmap.PAGESIZE))})
    if not pages:
        return 0
    entries = array("Q")
    pagemap = os.open("/proc/self/pagemap", os.O_RDONLY)
    try:
        for first, count in _runs(pages):
            entries.frombytes(os.pread(pagemap, count * entries.itemsize, first * entries.itemsize))
    finally:
        os.close(pagemap)
    return mmap.PAGESIZE * sum(1 for entry in entries if entry & PRESENT)


def _runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Neighbours together: (first, how many)."""
    first = before = numbers[0]
    for number in numbers[1:]:
        if number != before + 1:
            yield first, before - first + 1
            first = number
        before = number
    yield first, before - first + 1


def _fields(file: Path) -> dict[str, int]:
    """In bytes; the kernel writes kB."""
    found = {}
    for line in file.read_text().splitlines():
        name, _, value = line.partition(":")
        if value.endswith(" kB"):
            found[name] = 1024 * int(value.split()[0])
    return found


# -- by tensors --------------------------------------------------------------------------------------------------------


class Mappings:
    """Which memory an address lies in, as the process is mapped now."""

    def __init__(self, worker: str, text: str | None = None) -> None:
        self._worker = worker
        self._shared = sorted(_shared_mappings(Path("/proc/self/maps").read_text() if text is None else text))
        self._starts = [mapping.start for mapping in self._shared]

    def span_of(self, tensor: Tensor) -> tuple[Memory, int, int]:
        with _only_looking():
            return self._span_of(_local(tensor))

    def _span_of(self, tensor: Tensor) -> tuple[Memory, int, int]:
        storage = tensor.untyped_storage()
        start = tensor.data_ptr() if storage.nbytes() else 0
        place = bisect_right(self._starts, start) - 1
        if place >= 0 and start < self._shared[place].stop:
            mapping = self._shared[place]
            offset = start - mapping.start + mapping.offset
            return mapping.file, offset, offset + _extent(tensor)
        return self._worker, storage.data_ptr(), storage.data_ptr() + storage.nbytes()

    def spans_of(self, tensors: Iterable[Tensor]) -> Spans:
        return union(self.span_of(tensor) for tensor in tensors)


@dataclass(frozen=True, order=True)
class _Mapping:
    start: int
    stop: int
    offset: int
    file: str


def _shared_mappings(text: str) -> Iterator[_Mapping]:
    for line in text.splitlines():
        addresses, permissions, offset, device, inode, *_ = line.split()
        if permissions.endswith("s"):
            start, stop = (int(address, 16) for address in addresses.split("-"))
            yield _Mapping(start, stop, int(offset, 16), f"file {device} {inode}")


def _only_looking() -> AbstractContextManager[None]:
    """Tensors that fetch their values when asked, or refuse to be asked, are seen as they lie."""
    return torch._C.DisableTorchFunctionSubclass()


def _local(tensor: Tensor) -> Tensor:
    """This worker's part of a DTensor."""
    local: Tensor = getattr(tensor, "_local_tensor", tensor)
    return local


def _extent(tensor: Tensor) -> int:
    if not tensor.numel():
        return 0
    last = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


@dataclass(frozen=True)
class Held:
    """By role; no byte is in two of them."""

    parameters: Spans
    gradients: Spans
    optimizer_state: Spans
    buffers: int  # bytes in private memory; of what is shared the kernel knows more


def held_now(
    model: nn.Module,
    worker: str,
    inputs: Iterable[Tensor] = (),
    also: Mapping[str, Sequence[Tensor]] = MappingProxyType({}),
) -> Held:
    """Best asked between backward and step(), when everything is there. `also`: by role, what is kept elsewhere."""
    mappings = Mappings(worker)
    objects = gc.get_objects()
    optimizers = [thing for thing in objects if issubclass(type(thing), Optimizer)]
    owned = [*model.parameters(), *(p for o in optimizers for group in o.param_groups for p in group["params"])]
    lanes = [thing for thing in objects if isinstance(thing, LaneOptimizer)]
    of_lanes = [tensor for thing in objects if isinstance(thing, LaneGradients) for tensor in thing.held]
    parameters = mappings.spans_of(
        [*owned, *(w for one in lanes for w in one.weights_held), *also.get("parameters", ())]
    )
    gradients = mappings.spans_of([*_gradients(owned), *of_lanes, *_whole_roots(objects), *also.get("gradients", ())])
    states = [list(state.values()) for state in (*(o.state for o in optimizers), *(s for o in lanes for s in o.states))]
    state = mappings.spans_of(_tensors_in(states))
    gradients = without(gradients, parameters)
    state = without(state, joined(parameters, gradients))
    known = joined(parameters, gradients, state, mappings.spans_of(inputs))
    others = mappings.spans_of(thing for thing in objects if _has_memory(thing))
    private = without({worker: others.get(worker, ())}, known)
    return Held(parameters, gradients, state, resident(private.get(worker, ())))


def _gradients(owned: Iterable[Tensor]) -> list[Tensor]:
    return [tensor.grad for tensor in owned if tensor.grad is not None]


def _whole_roots(objects: Iterable[Any]) -> list[Tensor]:
    """In shared memory a gradient's own bytes are counted; zero1's pieces are parts of roots that are there whole."""
    return [root for thing in objects if isinstance(thing, Zero1) for root in thing.roots_held]


def _tensors_in(thing: Any) -> Iterator[Tensor]:
    if isinstance(thing, Tensor):
        yield thing
    elif isinstance(thing, dict):
        yield from _tensors_in(list(thing.values()))
    elif isinstance(thing, list | tuple):
        for part in thing:
            yield from _tensors_in(part)


def _has_memory(thing: Any) -> bool:
    if not issubclass(type(thing), Tensor):
        return False
    with _only_looking():
        return bool(thing.layout == torch.strided and thing.device.type == "cpu")


class Activations:
    """What autograd keeps for backward: a saved-tensor hook that counts, every memory once, without parameters."""

    def __init__(self, model: nn.Module, worker: str) -> None:
        self._model, self._mappings = model, Mappings(worker)
        self._spans: list[tuple[Memory, int, int]] = []

    def pack(self, tensor: Tensor) -> Tensor:
        with _only_looking():
            own = {_local(p).untyped_storage().data_ptr() for p in self._model.parameters()}
            if _local(tensor).untyped_storage().data_ptr() not in own:
                self._spans.append(self._mappings.span_of(tensor))
        return tensor

    @property
    def bytes(self) -> int:
        return sum(stop - start for found in union(self._spans).values() for start, stop in found)


# -- a run -------------------------------------------------------------------------------------------------------------


WARM_UP_STEPS = 4
"""Buckets are cut anew after the first; an allocator needs some more to find its places."""


def measure(run: MemoryRun, world: World, workload: Workload = MLP50M) -> dict[str, Any]:
    """This worker's figures, in bytes, and where its tensors are."""
    torch.set_num_threads(1)
    if not run.keep_memory:
        keep_no_free_memory()
    use_everything_once()
    at_start = Resident.now().pss
    reset_peak()
    with meeting(world) if run.contestant in PEERS else nullcontext():
        loop = enter(run, world, workload)
        try:
            for _ in range(WARM_UP_STEPS):
                _step(loop)
            highest = peak_pss()
            gc.collect()
            reset_peak()
            _step(loop)
            peak = peak_pss()
            figures = counted_once(loop, f"worker {world.rank}")
            figures["private_buffers"] += loop.hidden_bytes()
        finally:
            loop.close()
    told = {"parameters": workload.parameters, "formula": formula(run, workload.parameters)}
    return told | figures | {"pss_at_start": at_start, "step_peak": peak, "highest_peak": highest}


def formula(run: MemoryRun, parameters: int) -> int | None:
    """Bytes of parameters, gradients and optimizer state; None where no formula is known."""
    if run.contestant not in PEERS:
        chosen = strategies()[run.contestant]
        together = run.workers if run.backend == "paceline" else 1
        return chosen.footprint(Model(parameters), workers=run.workers, lanes=run.workers, per_host=together).held
    like = PEERS[run.contestant]
    if like not in FOOTPRINTS:
        return None
    return footprint(like, Model(parameters), workers=run.workers, lanes=run.workers).held


def use_everything_once() -> None:
    """What libraries load and allocate at first use is no contestant's memory."""
    layer = torch.nn.Linear(256, 256)
    optimizer = adamw(layer)
    for _ in range(2):
        layer(torch.randn(32, 256)).sum().backward()
        optimizer.step()


def _step(loop: Loop) -> None:
    loop.backward(loop.forward())
    loop.update()


def counted_once(loop: Loop, worker: str) -> dict[str, Any]:
    activations = Activations(loop.model, worker)
    with saved_tensors_hooks(activations.pack, lambda tensor: tensor):
        loss = loop.forward()
    kept = activations.bytes
    loop.backward(loss)
    del activations, loss
    before_step, shared = Resident.now().pss, shared_pss()  # looking at all objects writes to pages of theirs
    held = held_now(loop.model, worker, loop.inputs, loop.also())
    loop.update()
    return {
        "spans": {role: getattr(held, role) for role in ROLES},
        "activations": kept,
        "private_buffers": held.buffers,
        "shared_pss": shared,
        "pss_before_step": before_step,
    }


def main(run: str, folder: str) -> None:
    world = read_world()
    figures = measure(MemoryRun.from_json(run), world)
    (Path(folder) / f"{world.rank}.json").write_text(json.dumps(figures))


if __name__ == "__main__":
    main(*sys.argv[1:])
