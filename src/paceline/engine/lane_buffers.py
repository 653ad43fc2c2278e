"""Buffers such as BatchNorm statistics: every lane starts the step from the step's buffers.

    step's buffers ──► lane 0 ──► what lane 0 leaves becomes the next step's, on every worker
                   ├─► lane 1 ──► dropped
                   └─► lane 2 ──► dropped

That is what DDP's broadcast of rank 0's buffers does, said in lanes: it does not depend on which worker computed which
lane. Buffers are restored when a lane's first micro-batch is handed out, never between a forward and its backward.

In a step whose workers don't agree, either all lanes' buffers are dropped (a later step of the group agrees), or every
lane keeps its own and starts its next step from them:

    lane 0 ──► lane 0 ──► lane 0 ─┬─► … next agreement or boundary: lane 0's are the model's, on every worker
    lane 1 ──► lane 1 ──► lane 1 ─┴─► …

Then a boundary changes what the model shows, not what the lanes go on from, unless somebody writes to the buffers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from paceline.collectives.communicator import Communicator, Handle
from paceline.engine.vote import HostReading
from paceline.sharding.local_shard import all_here
from paceline.torch_compat import foreach_copy_, own_buffers, version_of


class LaneBuffers:
    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._models = models
        self._live: list[Tensor] = []
        self._places: list[tuple[nn.Module, str]] = []  # of each in its module, where a forward may put another tensor
        self._at_start: list[Tensor] = []
        self._left: dict[int, list[Tensor]] = {}  # by lane: what it left in this step, where that is wanted
        self._unchanged: dict[int, HostReading] = {}  # likewise: which of them are as at the start
        self._touched = False
        self._moving: list[int] = []  # buffers that some step has changed: the same list on every worker
        self._ahead: _Sent | None = None
        self._undoable = False  # a step has begun, and does not count yet
        self._lost = False  # it was lost, and the workers have yet to regroup
        self._apart: dict[int, list[Tensor]] | None = None  # by lane: its own, since lanes went their own ways
        self._versions: list[tuple[int, int]] = []  # of the live buffers when they were last ours

    def start_step(self) -> None:
        self._live = self._found()
        same = len(self._live) == len(self._at_start) and all(
            a.shape == b.shape and a.dtype == b.dtype and a.device == b.device
            for a, b in zip(self._live, self._at_start, strict=True)
        )
        if not same:
            self._at_start = [torch.empty_like(buffer) for buffer in self._live]
            self._moving = []
        if self._apart is None or not same or self._written_by_others():
            self._apart = None
            self._copy(self._live, self._at_start)
        self._left = {}
        self._touched = False
        self._undoable, self._lost = True, False

    def _found(self) -> list[Tensor]:
        seen: dict[int, tuple[Tensor, tuple[nn.Module, str]]] = {}
        for model in self._models:
            for module in model.modules():
                for name, buffer in own_buffers(module).items():
                    if buffer is not None and buffer.numel():
                        seen.setdefault(id(buffer), (buffer, (module, name)))
        self._places = [place for _, place in seen.values()]
        return [buffer for buffer, _ in seen.values()]

    def _now(self) -> list[Tensor]:
        """What the modules have where the buffers were: others after `self.mean = 0.9 * self.mean + …`."""
        found = [own_buffers(module).get(name) for module, name in self._places]
        return [
            other if other is not None and other.shape == buffer.shape and other.dtype == buffer.dtype else buffer
            for other, buffer in zip(found, self._live, strict=True)
        ]

    def _write(self, source: Sequence[Tensor]) -> None:
        """To the buffers, which stand in their modules again; one that has another shape now is left alone."""
        for (module, name), buffer, now in zip(self._places, self._live, self._now(), strict=True):
            if now is not buffer:
                own_buffers(module)[name] = buffer
        self._copy(source, self._live)

    def start_lane(self, lane: int) -> None:
        if self._apart is not None:
            self._write(self._apart.get(lane, self._at_start))
        elif self._touched:
            self._write(self._at_start)
        self._touched = True

    def start_shadow(self) -> None:
        """What it leaves in the buffers is put back before the next lane starts."""
        self._touched = True

    def finish_lane(self, lane: int, *, keep: bool) -> None:
        """After the lane's last forward; `keep` if its buffers may live on."""
        if keep and self._live:
            left = self._left[lane] = [buffer.detach().clone() for buffer in self._now()]
            self._unchanged[lane] = _are_equal(left, self._at_start)

    def changed(self, lowest: int) -> list[bool]:
        """Which buffers the step changed, as the worker that computed the lowest lane sees it; others see no change."""
        if lowest not in self._left:
            return [False] * len(self._live)
        return [not alike for alike in self._unchanged[lowest].read().tolist()]

    # -- a step that agrees ------------------------------------------------------------------------------------------

    def send_ahead(self, comm: Communicator, owner: int, lowest: int) -> None:
        """Before the worker's last backward: send the buffers that changed in earlier steps while it runs."""
        if comm.size > 1 and self._moving:
            self._ahead = self._broadcast(comm, owner, self._moving, self._left.get(lowest, self._live))

    def finish_step(self, comm: Communicator, owner: int, lowest: int, changed: Sequence[bool]) -> None:
        """Every worker takes over what the lowest lane left; `owner` is the worker that computed it."""
        if not self._live:
            return
        mine = self._left.get(lowest, self._live)
        moved = [number for number, is_changed in enumerate(changed) if is_changed]
        final = list(self._at_start)
        if comm.size == 1:
            for number in moved:
                final[number] = mine[number]
        else:
            gone = self._moving if self._ahead is not None else []
            late = [number for number in moved if number not in gone]
            sent = [self._ahead] if self._ahead is not None else []
            sent += [self._broadcast(comm, owner, late, mine)] if late else []
            for under_way in sent:
                for number, value in under_way.received():
                    final[number] = value
            self._moving = sorted({*self._moving, *late})
            self._ahead = None
        self._write(final)
        self._apart = None

    def put_back(self) -> None:
        """The step leaves no trace: it is left out, or only the last one of its group counts."""
        if self._ahead is not None:
            self._ahead.handle.wait()
            self._ahead = None
        self._write(self._at_start)

    def forget_step(self) -> None:
        """The workers have changed: nothing of the step is waited for, and nothing of it stays.

        Between two steps there is nothing to undo: what a step began with is older than what the last one left.
        """
        self._ahead = None
        self._left = {}
        self._lost = self._lost or (self._undoable and len(self._live) == len(self._at_start))
        if self._lost:
            self._write(self._at_start)
        self._undoable = False

    def put_back_lost(self) -> None:
        """Before the workers regroup: the loop's body went on after the step was lost, and may have run the model."""
        if self._lost:
            self._write(self._at_start)
        self._lost = False

    def step_counts(self) -> None:
        self._undoable = False

    def meet_others(self) -> None:
        """There are other workers, who may not know which buffers move."""
        self._moving = []

    # -- steps that never agree --------------------------------------------------------------------------------------

    def go_apart(self) -> None:
        """Each of this worker's lanes goes on from its own; one whose buffers were not kept, from where it was."""
        self._apart = (self._apart or {}) | self._left
        self._note_versions()

    def meet(self, comm: Communicator, owner: int, lowest: int) -> None:
        """All lanes go on from the lowest lane's."""
        self.drain(comm, owner, lowest)
        self._apart = None

    def drain(self, comm: Communicator, owner: int, lowest: int = 0) -> None:
        """At a boundary of all workers: the model holds the lowest lane's. `owner` is assigned it."""
        if self._apart is None or not self._live:
            return
        final = self._apart.get(lowest, self._at_start)
        if comm.size > 1:
            sent = self._broadcast(comm, owner, range(len(self._live)), final)
            final = [value for _, value in sent.received()]
        self._write(final)
        self._note_versions()

    def local_state(self) -> dict[str, Any] | None:
        """Of lanes that are apart: what they went apart from, and what this worker's lanes have; None: they are not."""
        if self._apart is None or not self._live:
            return None
        return {"start": list(self._at_start), "lanes": all_here(self._apart)}

    def load(self, state: Mapping[str, Any] | None, lanes: Sequence[int]) -> None:
        """Go on from that, with these lanes; the models have got their buffers."""
        self._apart = None
        if state is not None:
            self._live = self._found()
            devices = [buffer.device for buffer in self._live]
            self._at_start = _moved(state["start"], devices)
            self._apart = {lane: _moved(state["lanes"][lane], devices) for lane in lanes if lane in state["lanes"]}
            self._note_versions()

    def _note_versions(self) -> None:
        self._versions = [(id(buffer), version_of(buffer)) for buffer in self._live]

    def _written_by_others(self) -> bool:
        """Loaded, reset, or moved on by a forward of the user's own: lanes start there, as in any other step."""
        return self._versions != [(id(buffer), version_of(buffer)) for buffer in self._live]

    # -- parts -------------------------------------------------------------------------------------------------------

    def _broadcast(self, comm: Communicator, owner: int, numbers: Sequence[int], of: Sequence[Tensor]) -> _Sent:
        tensors = [of[number] for number in numbers]
        packed = torch.cat([_bytes(tensor) for tensor in tensors])
        return _Sent(list(numbers), tensors, packed, comm.broadcast(packed, root=owner))

    def _copy(self, source: Sequence[Tensor], target: Sequence[Tensor]) -> None:
        if source:
            with torch.no_grad():
                foreach_copy_(list(target), list(source))


@dataclass(frozen=True)
class _Sent:
    """Some buffers on their way in one message."""

    numbers: list[int]
    tensors: list[Tensor]
    packed: Tensor
    handle: Handle

    def received(self) -> Iterator[tuple[int, Tensor]]:
        self.handle.wait()
        parts = torch.split(self.packed, [_bytes(tensor).numel() for tensor in self.tensors])
        for number, tensor, part in zip(self.numbers, self.tensors, parts, strict=True):
            # A slice may start at an odd byte; a clone starts where its dtype can.
            yield number, part.clone().view(tensor.dtype).view(tensor.shape)


def _are_equal(first: Sequence[Tensor], second: Sequence[Tensor]) -> HostReading:
    """For each pair."""
    flags = [
        torch.tensor(torch.equal(a, b)) if a.device.type == "cpu" else (a == b).all()
        for a, b in zip(first, second, strict=True)
    ]
    return HostReading(torch.stack([flag.to(flags[0].device) for flag in flags]))


def _moved(tensors: Sequence[Tensor], devices: Sequence[torch.device]) -> list[Tensor]:
    return [tensor.to(device, copy=True) for tensor, device in zip(tensors, devices, strict=True)]


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
