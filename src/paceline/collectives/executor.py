"""The executor: runs any schedule over point-to-point messages, adding what has come while the rest is on its way.

    for each beat:   post its receives, and some of later beats     who finds a receive posted sends at once
                     for each send: finish what it depends on       wait, then add or copy
                                    send

Sums are made in the tensor's own type, which is also what travels: one addition of bf16 or fp16 is done in fp32 and
rounded, as torch does it. Tensors whose device the backend's messages can't take are staged through the host.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.collectives.communicator import Communicator
from paceline.collectives.pipeline import Message, Pipeline, pipeline
from paceline.collectives.schedule import How, Schedule
from paceline.collectives.scratch import Scratch
from paceline.collectives.work import Handle

# Measured over loopback, 25 MiB on 4 and 8 ranks of 16 cores: with 1 or 2 MiB a tree takes 0.65 of its time uncut, a
# star 0.75, rings as long as uncut; 256 KiB costs 1.4 times as much: a message of gloo's costs 100 µs and more.
SEGMENT_BYTES = 2**20
POSTED_AHEAD = 4  # receives of later beats; more were no faster


def run_schedule(
    comm: Communicator,
    schedule: Schedule,
    tensor: Tensor,
    *,
    tag: int = 0,
    scratch: Scratch | None = None,
    segment_bytes: int = SEGMENT_BYTES,
) -> None:
    """Run `schedule` on `tensor`, in place; all ranks call it with the same shape, dtype and tag."""
    if comm.size == 1 or not tensor.numel():
        return
    in_place = tensor.is_contiguous() and comm.sends(tensor.device)
    flat = tensor.view(-1) if in_place else tensor.reshape(-1).to("cpu", copy=True)
    most = max(1, segment_bytes // tensor.element_size())
    plan = pipeline(schedule, comm.rank, comm.size, flat.numel(), most)
    with torch.no_grad():
        _Run(comm, plan, flat, tag, scratch or Scratch(), schedule.name).run()
        if not in_place:
            tensor.copy_(flat.view(tensor.shape))


class _Run:
    """One tensor under way."""

    def __init__(
        self, comm: Communicator, plan: Pipeline, held: Tensor, tag: int, scratch: Scratch, operation: str
    ) -> None:
        self._comm, self._plan, self._held = comm, plan, held
        self._tag, self._operation = tag, operation
        self._handles: dict[int, Handle] = {}  # of messages that were started and not yet waited for
        self._done = [False] * len(plan.messages)
        self._receives = [number for beat in plan.beats for number in beat.receives]
        self._posted = 0
        self._addends: dict[int, Tensor] = {}  # by message; in the order of posting
        slots, width = plan.slots, plan.longest_addend
        memory = scratch.take(held, slots * width + len(plan.parts) * held.numel())
        self._free = list(memory[: slots * width].view(slots, width)) if width else []
        kept = memory[slots * width :].view(len(plan.parts), -1) if plan.parts else memory[:0]
        self._parts: dict[int, Tensor] = dict(zip(plan.parts, kept, strict=True)) | {comm.rank: held}

    def run(self) -> None:
        batched = self._comm.batches(self._held.device)
        started = 0
        for beat in self._plan.beats:
            started += len(beat.receives)
            if batched:
                self._start_together(beat.receives, beat.sends)
                continue
            while self._posted < started:
                self._post(self._receives[self._posted])
            self._post_ahead(started + POSTED_AHEAD)
            for number in beat.sends:
                self._settle_all(number)
                self._send(number)
        for total in self._plan.part_sums:
            for number in total.after:
                self._settle(number)
            self._add_parts(total.low, total.high)
        for number in range(len(self._plan.messages)):
            self._settle(number)

    # -- starting --------------------------------------------------------------------------------------------------

    def _post(self, number: int) -> None:
        target = self._target(number)
        message = self._plan.messages[number]
        self._handles[number] = self._comm.receive(
            target, source=message.peer, tag=self._tag, operation=self._operation
        )
        self._posted += 1

    def _post_ahead(self, until: int) -> None:
        """In order, and only where nothing has to be waited for that is not under way yet."""
        while self._posted < min(until, len(self._receives)):
            number = self._receives[self._posted]
            message = self._plan.messages[number]
            if message.how is How.ADD and not self._free:
                return
            if message.how is How.COPY and not all(self._done[n] or self._is_sending(n) for n in message.after):
                return
            self._post(number)

    def _send(self, number: int) -> None:
        message = self._plan.messages[number]
        self._handles[number] = self._comm.send(
            self._source(message), to=message.peer, tag=self._tag, operation=self._operation
        )

    def _start_together(self, receives: tuple[int, ...], sends: tuple[int, ...]) -> None:
        """For backends whose messages between two ranks run in line: all of a beat as one group."""
        messages = self._plan.messages
        for number in sends:
            self._settle_all(number)
        targets = [(self._target(number), messages[number].peer) for number in receives]
        sources = [(self._source(messages[number]), messages[number].peer) for number in sends]
        handles = self._comm.send_and_receive(sources, targets, operation=self._operation)
        self._handles |= dict(zip((*sends, *receives), handles, strict=True))

    def _target(self, number: int) -> Tensor:
        """Where a message may be written; waits until that is so."""
        message = self._plan.messages[number]
        if message.how is How.KEEP:
            assert message.part is not None
            return self._parts[message.part][message.low : message.high]
        if message.how is How.COPY:
            self._settle_all(number)
            return self._held[message.low : message.high]
        if not self._free:
            self._settle(next(iter(self._addends)))
        self._addends[number] = self._free.pop()
        return self._addends[number][: message.high - message.low]

    def _source(self, message: Message) -> Tensor:
        if message.part is None:
            return self._held[message.low : message.high]
        return self._parts[message.part][message.low : message.high]

    def _is_sending(self, number: int) -> bool:
        return self._plan.messages[number].is_sent and number in self._handles

    # -- finishing -------------------------------------------------------------------------------------------------

    def _settle_all(self, number: int) -> None:
        for earlier in self._plan.messages[number].after:
            self._settle(earlier)

    def _settle(self, number: int) -> None:
        """The message has left, or has come and been added."""
        if self._done[number]:
            return
        self._handles.pop(number).wait()
        message = self._plan.messages[number]
        if message.how is How.ADD:
            self._settle_all(number)
            addend = self._addends.pop(number)
            self._held[message.low : message.high].add_(addend[: message.high - message.low])
            self._free.append(addend)
        self._done[number] = True

    def _add_parts(self, low: int, high: int) -> None:
        """In the order of their names on every rank, so that all get the same bits."""
        total: Tensor | None = None
        own = self._held[low:high]
        for name in sorted(self._parts):
            part = self._parts[name][low:high]
            if total is None:
                total = part
            elif name == self._comm.rank:
                total = torch.add(total, own, out=own)
            else:
                total.add_(part)
