"""The in-memory checkpoint: a worker's part of the state of its last two steps, in shared memory that outlives it.

    slot-2-0    step 6   ░░░░░░░░░░      valid until step 7 is in the other file, whatever happens meanwhile
    slot-2-1    step 7   ▒▒▒▒······      being written: not valid yet

    a file      │ head: stamp, sizes │ table │ plain values │ data: parts, each at a multiple of 64 bytes │

A *stamp* is the state's number plus one, or 0 while the rest of the file is not that state's. It is taken away first
and set last, so a worker that is killed while it writes leaves the step before. One that knows the slots that committed
a step reads its state from their files, those of the dead among them, as from a checkpoint: any worker any range.

The *number* of a state counts steps, updates inside them and what is laid out for joiners, and grows:

    state_number(7)  =  4 · (7 · 1024)    after step 7
    state_number(8, update=2)             after the second update of step 8, which has several (`engine.update`)
    state_number(7) + 1                   that of step 7 again, laid out by those who stay for those who join
    state_number(7) + 2                   and again, by those who enter a loop after it; until all of them have, what
                                          was committed must stay as it is, and whole

Files and messages between workers carry the number; people read it `in_words`.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import compress
from math import prod
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from paceline.checkpoint.load import StoredTensor
from paceline.checkpoint.manifest import Range, merge
from paceline.checkpoint.tensor_file import DTYPES
from paceline.checkpoint.tree import SMALL, unflatten
from paceline.elastic.decisions import LAST_UPDATE, MOST_UPDATES
from paceline.elastic.memory_checkpoint.layout import ALIGN, FlatTree, Layout, with_values
from paceline.elastic.slots import named
from paceline.errors import CheckpointError
from paceline.sharding.local_shard import LocalShard
from paceline.torch_compat import foreach_copy_
from paceline.world.owned_folder import open_own_file

MAGIC = 0x7661_756C_7431  # "vault1"
PAGE = 4096
HEAD_FIELDS = 8
HEAD_BYTES = 8 * HEAD_FIELDS
AT_MAGIC, AT_STAMP, AT_TABLE_BYTES, AT_VALUES, AT_VALUES_BYTES, AT_DATA, AT_BYTES = range(7)
_MORE_VALUES = 4096  # bytes that plain values may grow by before the file is replaced

_KINDS = 4


def state_number(step: int, update: int = 0) -> int:
    return _KINDS * (step * MOST_UPDATES + update)


def number_for_joiners(number: int) -> int:
    """Of the same state, in parts for those who join."""
    return number | 1


def number_at_loop_start(step: int, committed: int) -> int:
    """As a loop begins after `step`, where `committed` is the newest; after another step one has gone back, or on."""
    same = committed // (_KINDS * MOST_UPDATES) == step and committed > 0
    return committed | 2 if same else state_number(step)


def in_words(number: int) -> str:
    """`step 7`, `update 2 of step 8`, `step 7, laid out for those who join`."""
    step, update = divmod(number // _KINDS, MOST_UPDATES)
    of = f"step {step}" if update in (0, LAST_UPDATE) else f"update {update} of step {step}"
    return f"{of}, laid out for those who join" if number % 2 else of


def all_in_words(numbers: Iterable[int | None]) -> str:
    there = sorted(number for number in numbers if number is not None)
    return " and ".join(map(in_words, there)) or "nothing"


# -- writing -----------------------------------------------------------------------------------------------------------


class MemoryCheckpoint:
    """The two files of one slot, written by the worker that has it."""

    def __init__(self, folder: Path, slot: int) -> None:
        self.folder, self.slot = folder, slot
        self.bytes = 0
        """Of tensors, written in each step."""
        self.only_here: list[Tensor] = []
        """Of what was written last that which no other worker has, where it lies."""
        self._layout: Layout | None = None
        self._files: list[_WrittenFile | None] = [None, None]
        self._steps = [step_in(path) for path in paths_of(folder, slot)]  # a worker before this one may have been here

    def write(self, step: int, tree: Any, *, rank: int, size: int, own: Any = None) -> None:
        """Keep this worker's part of a state; the newest step before it stays readable.

        What several workers have in their trees is the same; `own` is plain values that this one alone has.
        """
        found = FlatTree.of(tree)
        layout = self._layout
        if layout is None or not layout.fits(found, rank, size):
            layout = self._layout = Layout(tree, found, slot=self.slot, rank=rank, size=size)
            self.bytes = layout.bytes
        values = found.values(tree, own)
        turn = turn_of(self._steps, step)
        self._steps[turn] = None
        file = self._file(turn, layout, len(values))
        sources = layout.sources(found.leaves)
        file.write(step, values, sources)
        only_here = [isinstance(found.leaves[part.leaf], LocalShard) for part in layout.parts]
        self.only_here = list(compress(sources, only_here))
        self._steps[turn] = step
        self._forget_later_than(step, 1 - turn)

    def memory(self, step: int) -> memoryview:
        """The file of a step that this object has written; valid until the step after the next is written."""
        for file, held in zip(self._files, self._steps, strict=True):
            if file is not None and held == step:
                return file.memory
        raise CheckpointError(
            f"worker {self.slot} has kept nothing of {in_words(step)}; it has {all_in_words(self._steps)}"
        )

    def _file(self, turn: int, layout: Layout, values: int) -> _WrittenFile:
        file = self._files[turn]
        if file is None or file.layout is not layout or file.values_room < values:
            self._files[turn] = file = None  # its memory is free before new memory is taken
            self._files[turn] = file = _WrittenFile(paths_of(self.folder, self.slot)[turn], layout, values)
        return file

    def _forget_later_than(self, step: int, turn: int) -> None:
        """A step that was written, not committed, and done again, is in one file only."""
        held = self._steps[turn]
        if held is not None and held >= step:
            self._steps[turn] = self._files[turn] = None
            paths_of(self.folder, self.slot)[turn].unlink(missing_ok=True)


def turn_of(steps: Sequence[int | None], step: int) -> int:
    """Which of two files to write a step into: not the one with the newest step before it."""
    keep = max((held for held in steps if held is not None and held < step), default=None)
    if keep is not None:
        return 1 - list(steps).index(keep)
    return list(steps).index(None) if None in steps else 0


class _WrittenFile:
    """A file of one layout, mapped, with its data as tensors."""

    def __init__(self, path: Path, layout: Layout, values: int) -> None:
        self.layout = layout
        self.values_room = 2 * values + _MORE_VALUES
        self._values_at = HEAD_BYTES + -(-len(layout.table) // ALIGN) * ALIGN
        data = -(-(self._values_at + self.values_room) // PAGE) * PAGE
        mapped = new_file(path, data + max(layout.data_bytes, ALIGN))
        self.memory = memoryview(mapped)
        self._head = self.memory[:HEAD_BYTES].cast("q")
        self._head[AT_TABLE_BYTES], self._head[AT_VALUES], self._head[AT_DATA] = (
            len(layout.table),
            self._values_at,
            data,
        )
        self._head[AT_BYTES] = len(self.memory)
        self.memory[HEAD_BYTES : HEAD_BYTES + len(layout.table)] = layout.table
        flat = torch.frombuffer(mapped, dtype=torch.uint8)  # keeps the mapping, which is never closed under it
        self._targets = [
            flat[data + part.offset : data + part.offset + part.bytes].view(part.dtype) for part in layout.parts
        ]
        self._head[AT_MAGIC] = MAGIC

    def write(self, step: int, values: bytes, sources: list[Tensor]) -> None:
        self._head[AT_STAMP] = 0
        self._head[AT_VALUES_BYTES] = len(values)
        self.memory[self._values_at : self._values_at + len(values)] = values
        if sources:
            with torch.no_grad():
                foreach_copy_(self._targets, sources)
        self._head[AT_STAMP] = step + 1


def new_file(path: Path, size: int) -> mmap.mmap:
    """Mapped memory of zeros under a name; who has mapped what had the name before keeps that."""
    path.unlink(missing_ok=True)
    descriptor = -1
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        os.posix_fallocate(descriptor, 0, size)  # memory that is not there is an error here, and SIGBUS later
        return mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    except OSError as error:
        path.unlink(missing_ok=True)
        room = f": {_free(path.parent):,} are free; give it more (a container's --shm-size)"
        more = room if error.errno in (errno.ENOSPC, errno.ENOMEM) else ""
        raise CheckpointError(
            f"{path}: {size:,} bytes for a worker's state can't be had ({error.strerror}){more}"
        ) from error
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def _free(folder: Path) -> int:
    try:
        about = os.statvfs(folder)
    except OSError:
        return 0
    return about.f_bavail * about.f_frsize


def paths_of(folder: Path, slot: int) -> list[Path]:
    return [folder / f"slot-{slot}-{turn}" for turn in range(2)]


def steps_of(folder: Path, slot: int) -> list[int]:
    """The steps whose state is there, the older first; of a worker that goes on writing, perhaps fewer."""
    return sorted(step for path in paths_of(folder, slot) if (step := step_in(path)) is not None)


def step_in(path: Path) -> int | None:
    try:
        with open_own_file(path) as file:
            head = memoryview(file.read(HEAD_BYTES))
            size = os.fstat(file.fileno()).st_size
    except (FileNotFoundError, PermissionError):  # what another user has put there is no worker's state
        return None
    fields = head.cast("q") if len(head) == HEAD_BYTES else [0] * HEAD_FIELDS
    valid = fields[AT_MAGIC] == MAGIC and fields[AT_BYTES] == size and fields[AT_STAMP] > 0
    return int(fields[AT_STAMP]) - 1 if valid else None


# -- reading -----------------------------------------------------------------------------------------------------------


class SlotPart(Protocol):
    """The state of one step that one slot has kept, wherever it is."""

    def about(self) -> tuple[dict[str, Any], list[Any]]:
        """The table, and the plain values; the last of them is the slot's own."""
        ...

    def read_into(self, offset: int, room: memoryview) -> None:
        """Bytes of the data; an error if the slot has been written since."""
        ...


class LocalPart:
    """A slot's file of one step, mapped: what is read from it stays that step's, or is an error."""

    def __init__(self, folder: Path, slot: int, step: int) -> None:
        self._folder, self._slot, self._step = folder, slot, step
        self._memory = memoryview(self._mapped())
        self._head = self._memory[:HEAD_BYTES].cast("q")
        self.check()

    def _mapped(self) -> mmap.mmap:
        for path in paths_of(self._folder, self._slot):
            if step_in(path) == self._step:
                with open_own_file(path) as file:
                    return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        there = all_in_words(steps_of(self._folder, self._slot))
        raise CheckpointError(
            f"worker {self._slot}'s part of the state of {in_words(self._step)} is not in this host's in-memory "
            f"checkpoint {self._folder} (there is {there} of it); start again, and resume from the newest checkpoint"
        )

    def about(self) -> tuple[dict[str, Any], list[Any]]:
        table, values = (json.loads(text) for text in self.texts())
        return table, values

    def texts(self) -> tuple[bytes, bytes]:
        head = self._head
        table = self._memory[HEAD_BYTES : HEAD_BYTES + head[AT_TABLE_BYTES]].tobytes()
        values = self._memory[head[AT_VALUES] : head[AT_VALUES] + head[AT_VALUES_BYTES]].tobytes()
        self.check()
        return table, values

    def data(self, offset: int, size: int) -> memoryview:
        """Bytes that may be changed by now: `check` after they were used."""
        start = self._head[AT_DATA] + offset
        if offset < 0 or size < 0 or start + size > len(self._memory):
            raise CheckpointError(f"{self._what} has no bytes {offset} to {offset + size}")
        return self._memory[start : start + size]

    def read_into(self, offset: int, room: memoryview) -> None:
        room[:] = self.data(offset, len(room))
        self.check()

    def check(self) -> None:
        if self._head[AT_STAMP] != self._step + 1:
            raise CheckpointError(
                f"{self._what} was written over while it was read, in {self._folder}; a state is read before the next "
                "but one step is written"
            )

    @property
    def _what(self) -> str:
        return f"worker {self._slot}'s part of the state of {in_words(self._step)}"


class _Ranges:
    """Reads for stored tensors; apart from the state, so that memory goes when the last of them does."""

    def __init__(self, slots: Mapping[int, SlotPart]) -> None:
        self._slots = slots

    def read(self, where: Range, start: int, stop: int) -> Tensor:
        """Some of a range, whose name says what its bytes are and where."""
        code, offset = where.name.split()
        flat = torch.empty(stop - start, dtype=DTYPES[code])
        inside = (start - where.start) * flat.element_size()
        self._slots[int(where.file)].read_into(int(offset) + inside, flat.view(torch.uint8).numpy().data)
        return flat


class StoredState:
    """The state of a step, from the slots that kept it in rank order; leaves are `StoredTensor`s, as a checkpoint's."""

    def __init__(self, folder: Path, step: int, slots: Mapping[int, SlotPart]) -> None:
        self.folder, self.step, self._slots = folder, step, dict(sorted(slots.items()))
        self._tables = {slot: source.about() for slot, source in self._slots.items()}
        for place, (slot, (table, _)) in enumerate(self._tables.items()):
            if (table["slot"], table["rank"], table["size"]) != (slot, place, len(slots)):
                who = named(list(self._slots))
                raise CheckpointError(
                    f"worker {slot} kept {in_words(step)} as the one of rank {table['rank']} among {table['size']}, "
                    f"not of rank {place} among {len(slots)}: {who} did not make this step together"
                )

    @cached_property
    def tree(self) -> dict[str, Any]:
        try:
            manifest = merge("", {"step": self.step}, self._told_by_each())
        except CheckpointError as error:
            raise CheckpointError(
                f"the state of {in_words(self.step)} that {named(list(self._slots))} kept is not whole: {error}"
            ) from error
        source, small = _Ranges(self._slots), self._small
        leaves = {path: StoredTensor(source, path, stored) for path, stored in manifest.tensors.items()}
        tree: dict[str, Any] = unflatten(
            manifest.tree, {path: leaf.full_tensor() if path in small else leaf for path, leaf in leaves.items()}
        )
        return tree

    @property
    def own(self) -> dict[int, Any]:
        """What each slot kept for itself, in rank order."""
        return {slot: unflatten(values[-1], {}) for slot, (_, values) in self._tables.items()}

    def _told_by_each(self) -> Iterator[dict[str, Any]]:
        """What each slot's file says, as workers say it of their part of a checkpoint."""
        known: set[str] = set()
        told_of: set[tuple[str, int, int]] = set()
        for slot, (table, values) in self._tables.items():
            rows: dict[str, Any] = {}
            for path, row in table["tensors"].items():
                ranges = [] if row["everywhere"] and path in known else row["ranges"]
                ranges = [where for where in ranges if (path, *where[:2]) not in told_of]  # groups may have the same
                told_of.update((path, start, stop) for start, stop, _ in ranges)
                known.add(path)
                told = [
                    {
                        "start": start,
                        "stop": stop,
                        "file": str(slot),
                        "name": f"{row['dtype']} {offset}",
                        "checksum": "",
                    }
                    for start, stop, offset in ranges
                ]
                rows[path] = {"dtype": row["dtype"], "shape": row["shape"], "ranges": told}
            about = {"name": str(slot), "bytes": 0, "checksum": ""}
            yield {"tree": with_values(table["tree"], values), "tensors": rows, "file": about}

    @property
    def _small(self) -> set[str]:
        """Tensors that a checkpoint has in its tree, and hands out as tensors."""
        rows = [item for table, _ in self._tables.values() for item in table["tensors"].items()]
        return {path for path, row in rows if row["everywhere"] and _bytes_of(row) <= SMALL}


def _bytes_of(row: Mapping[str, Any]) -> int:
    elements: int = prod(row["shape"])
    return elements * DTYPES[row["dtype"]].itemsize


def read(folder: Path, step: int, slots: Sequence[int]) -> StoredState:
    """The state of a step that these slots, and no others, have made together and kept on this host."""
    return StoredState(folder, step, {slot: LocalPart(folder, slot, step) for slot in slots})
