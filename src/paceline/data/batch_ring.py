"""Batches through memory that a worker shares with its loader processes: arrays are copied in, and out again.

    loader process 0   batch ──► │ slot 0 │ slot 1 │ slot 2 │ slot 3 │ ──┐  Packed: the slot, and a pickle of the rest
    loader process 1   batch ──► │ slot 4 │ slot 5 │ slot 6 │ slot 7 │ ──┴──► torch's queue ──► fresh arrays

torch makes a file for each tensor and hands that over: a connection, a mapping, and new pages every time. A copy out of
memory that is in use already, into memory that malloc has at hand, is quicker. Large arrays of numpy, which would be
pickled into a pipe, go the same way. A batch with more tensors than a slot holds, or one that is not plain (a subclass,
on a GPU, a view of much more than it shows), travels as torch sends it. The memory is anonymous, so that nothing can
stay behind, whichever process is killed; pages of it exist from when they are written.

A process uses its slots in turn, and is not told when one has been read. With P = prefetch_factor and N processes:

    torch lets P·N tasks be on their way, in order; task t is for process t mod N            P of each process
    before it hands out the batch of task t, it puts task t + P·N, for the same process      P + 1
    that batch is copied before the next one is asked for, and so before task t + (P + 1)·N is put

So a process can be at its batch k + P while its batch k is read, never at k + P + 1, and P + 1 slots are enough. A slow
process does not change that: what others have ready waits in torch, and while it waits it counts as on its way, so no
task is put for it. Nor do processes that stay for the next loop: when that begins, nothing is on its way. One more slot
is kept, and each slot holds the number of its batch: were a torch to ask for more, that would be an error, and no batch
would be handed out torn.
"""

from __future__ import annotations

import ctypes
import io
import itertools
import os
import pickle
import weakref
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from paceline.errors import DataError
from paceline.torch_compat import pin_memory

SLOT_BYTES = 16 << 20  # a loader process may take prefetch_factor + 2 times as much
PICKLED_BELOW = 64 << 10  # bytes of an array of numpy: as much as a pipe takes at once

_LINE = 64  # tensors begin at whole lines of the cache, the first behind the batch's number
# Their place in this list is shorter than a dtype's pickle, and found faster.
_DTYPES = sorted(
    {
        value
        for value in vars(torch).values()
        if isinstance(value, torch.dtype) and not str(value).startswith("torch.q")
    },
    key=str,
)
_NUMBER_OF = {dtype: number for number, dtype in enumerate(_DTYPES)}

Put = tuple[Any, ...]  # offset, bytes, number of the dtype, shape; and strides and storage offset if not contiguous


class RingAddress(NamedTuple):
    """Where a loader process finds the memory; it travels to the process when that starts."""

    path: str
    size: int
    slots: int
    key: int


class BatchMemory:
    """The memory of all rings, in the worker."""

    def __init__(self, processes: int, prefetch_factor: int) -> None:
        slots = prefetch_factor + 2
        size = processes * slots * SLOT_BYTES
        descriptor = os.memfd_create("paceline-batches", os.MFD_CLOEXEC)
        self._close_descriptor = weakref.finalize(self, os.close, descriptor)
        os.ftruncate(descriptor, size)
        key = next(_keys)
        self.address = RingAddress(f"/proc/{os.getpid()}/fd/{descriptor}", size, slots, key)
        self._storage: Any = _mapped(self.address)
        _memories[key] = self

    def at(self, slot: int) -> int:
        return self._storage.data_ptr() + slot * SLOT_BYTES  # type: ignore[no-any-return]

    def close(self) -> None:
        self._close_descriptor()
        _memories.pop(self.address.key, None)
        self._storage = None


class Packed:
    """A batch in a slot, on its way to the worker. Where torch pins memory, its thread asks `pin_memory` for it."""

    __slots__ = ("_count", "_data", "_key", "_slot")

    def __init__(self, key: int, slot: int, count: int, data: bytes) -> None:
        self._key, self._slot, self._count, self._data = key, slot, count, data

    def __reduce__(self) -> tuple[Any, ...]:
        return Packed, (self._key, self._slot, self._count, self._data)

    def batch(self, *, pinned: bool = False) -> Any:
        """What the loader process packed, in memory of its own."""
        memory = _memories[self._key]
        address = memory.at(self._slot)
        batch = _Unpickler(self._data, _Emptying(address, pinned=pinned)).load()
        found = _number_at(address).value
        if found != self._count:
            raise DataError(
                f"slot {self._slot} of the loader processes' memory should hold batch {self._count} of its process, "
                f"and holds batch {found}: this torch ({torch.__version__}) asks for more batches ahead than "
                "prefetch_factor says; use a tested one, or num_workers=0"
            )
        return batch

    def pin_memory(self) -> Any:
        return pinned(self.batch(pinned=True))


class BatchRing:
    """The slots of one loader process, in that process."""

    def __init__(self, address: RingAddress, process: int) -> None:
        self._storage: Any = _mapped(address)
        self._key, self._slots, self._first = address.key, address.slots, process * address.slots
        self._count = 0
        self.took_the_last = True

    def packed(self, batch: Any) -> Any:
        """The batch as `Packed`; or as it is, where torch has to send it."""
        slot = self._first + self._count % self._slots
        address = self._storage.data_ptr() + slot * SLOT_BYTES
        _number_at(address).value = self._count
        file = io.BytesIO()
        try:
            _Pickler(file, _Filling(address)).dump(batch)
        except _NotForASlotError:
            self.took_the_last = False
            return batch
        self.took_the_last = True
        self._count += 1
        return Packed(self._key, slot, self._count - 1, file.getvalue())


class _Filling:
    """One slot as it is filled. Tensors that share a storage go on to share it."""

    def __init__(self, address: int) -> None:
        self._address, self._used = address, _LINE
        self._places: dict[tuple[int, int], int] = {}
        self._resolved: list[Tensor] = []

    def put(self, tensor: Tensor) -> Put:
        dtype = _NUMBER_OF.get(tensor.dtype)
        plain = dtype is not None and tensor.is_cpu and tensor.layout is torch.strided and not tensor.requires_grad
        if not plain:
            raise _NotForASlotError
        if tensor.is_conj() or tensor.is_neg():  # lazily; torch's queue loses that
            tensor = tensor.resolve_conj().resolve_neg()
            self._resolved.append(tensor)  # nothing else may get its address
        storage, shown = tensor.untyped_storage(), tensor.nbytes
        size, start = storage.nbytes(), storage.data_ptr()
        if size > 2 * shown:
            raise _NotForASlotError
        place = self._places.get((start, size))
        if place is None:
            place = self._copied(start, size)
            if size == shown and tensor.is_contiguous():
                return place, size, dtype, tuple(tensor.shape)
        return place, size, dtype, tuple(tensor.shape), tensor.stride(), tensor.storage_offset()

    def put_array(self, array: np.ndarray[Any, Any]) -> Put | None:
        """None if it is better off in the pickle."""
        plain = array.dtype.isbuiltin == 1 and not array.dtype.hasobject and array.flags.c_contiguous
        if not plain or array.nbytes < PICKLED_BELOW or self._used + array.nbytes > SLOT_BYTES:
            return None
        return self._copied(array.ctypes.data, array.nbytes), array.nbytes, array.dtype.str, array.shape

    def _copied(self, start: int, size: int) -> int:
        place = self._used
        if place + size > SLOT_BYTES:
            raise _NotForASlotError
        if size:
            ctypes.memmove(self._address + place, start, size)
            self._places[start, size] = place
            self._used = -(-(place + size) // _LINE) * _LINE
        return place


class _NotForASlotError(Exception):
    """Ends the pickling of a batch that torch has to send, before anything was opened for it."""


class _Pickler(ForkingPickler):
    """Pickles a batch as torch's queue does, but for its tensors and arrays."""

    def __init__(self, file: io.BytesIO, slot: _Filling) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._slot = slot

    def reducer_override(self, value: Any) -> Any:
        if type(value) is Tensor:
            return _tensor, self._slot.put(value)
        if type(value) is np.ndarray and (put := self._slot.put_array(value)) is not None:
            return _array, put
        if isinstance(value, Tensor | torch.UntypedStorage | torch.TypedStorage):
            raise _NotForASlotError
        return NotImplemented


class _Unpickler(pickle.Unpickler):
    """Unpickles a batch whose arrays `slot` makes. This does not make them itself: it and its memo hold each other."""

    def __init__(self, data: bytes, slot: _Emptying) -> None:
        super().__init__(io.BytesIO(data))
        self._makers = {_tensor.__name__: slot.tensor, _array.__name__: slot.array}

    def find_class(self, module: str, name: str) -> Any:
        return self._makers[name] if module == __name__ else super().find_class(module, name)


class _Emptying:
    """One slot as its arrays are made anew, tensors in pinned memory where that is wanted."""

    def __init__(self, address: int, *, pinned: bool) -> None:
        self._address, self._pinned = address, pinned
        self._made: dict[int, Tensor] = {}

    def tensor(
        self, place: int, size: int, dtype: int, shape: tuple[int, ...],
        strides: tuple[int, ...] | None = None, offset: int = 0,
    ) -> Tensor:  # fmt: skip
        if strides is None:
            return self._fresh(place, size, shape, _DTYPES[dtype])
        holds_it = self._made.get(place)
        if holds_it is None:
            holds_it = self._fresh(place, size, (size,), torch.uint8)
        tensor = torch.empty(0, dtype=_DTYPES[dtype], device="cpu")
        return tensor.set_(holds_it.untyped_storage(), offset, shape, strides)

    def _fresh(self, place: int, size: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        tensor = torch.empty(shape, dtype=dtype, device="cpu", pin_memory=self._pinned)
        ctypes.memmove(tensor.data_ptr(), self._address + place, size)
        self._made[place] = tensor
        return tensor

    def array(self, place: int, size: int, dtype: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
        fresh: np.ndarray[Any, Any] = np.empty(shape, dtype)
        ctypes.memmove(fresh.ctypes.data, self._address + place, size)
        return fresh


def pinned(batch: Any) -> Any:
    return pin_memory(batch)


def _tensor(*put: Any) -> Tensor:
    """Stands in pickles for `_Emptying.tensor`, which knows the slot."""
    raise NotImplementedError


def _array(*put: Any) -> Any:
    """For `_Emptying.array`."""
    raise NotImplementedError


def _mapped(address: RingAddress) -> Any:
    # Unlike the mmap module's, this mapping keeps no descriptor of its own.
    return torch.UntypedStorage.from_file(address.path, True, address.size)


_number_at = ctypes.c_int64.from_address
_keys = itertools.count()
_memories: weakref.WeakValueDictionary[int, BatchMemory] = weakref.WeakValueDictionary()
