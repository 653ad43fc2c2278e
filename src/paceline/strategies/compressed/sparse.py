"""A bucket under `topk`: the places and values of each lane go to all workers, who add them up alike.

    sent, by a worker with m lanes: m · (N-1) payloads of 8 bytes for each value

Every worker has the payloads of all lanes, so it adds them in the order of lanes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.collectives.communicator import Handle, wait_all
from paceline.collectives.direct_all_reduce import start_messages
from paceline.collectives.gradient_exchange import TAGS_PER_BUCKET
from paceline.compression import TopK
from paceline.compression.topk import PLACE_DTYPE, add_lanes, largest
from paceline.sharding.bucket import BucketShards
from paceline.strategies.buckets import LaneSums
from paceline.strategies.compressed.bucket import (
    OPERATION,
    Compressing,
    Exchanging,
    LaneTensors,
    State,
    Step,
    merged_states,
    part_of,
)
from paceline.world.determinism import mix


class SparseLanes:
    """The lanes' side: what is chosen of their gradients, and what waits."""

    def __init__(self, sums: LaneSums, topk: TopK, compressing: Compressing) -> None:
        self._sums, self._topk, self._compressing = sums, topk, compressing
        self._residuals = LaneTensors(sums, compressing.lanes)
        self._velocities = LaneTensors(sums, compressing.lanes)
        self.sent: dict[int, Tensor] = {}  # by lane: places in their order, then the bits of values

    def take(self, step: Step, lane: int, gradient: Tensor) -> None:
        momentum = self._topk.momentum
        values = gradient
        if momentum:
            if (velocity := self._velocities.now.get(lane)) is not None:
                gradient.add_(velocity, alpha=momentum)
            self._velocities.stage(lane, gradient)
            values = self._sums.buffer().copy_(gradient)
        if (residual := self._residuals.now.get(lane)) is not None:
            values.add_(residual)
        places = self._places(step, lane, values)
        self.sent[lane] = torch.stack([places.to(PLACE_DTYPE), values[places].view(PLACE_DTYPE)])
        if momentum:
            gradient.index_fill_(0, places, 0)
        if self._compressing.feedback:
            self._residuals.stage(lane, values.index_fill_(0, places, 0))
        else:
            self._sums.give_back(values)

    def _places(self, step: Step, lane: int, values: Tensor) -> Tensor:
        found = []
        for entry in self._sums.bucket.entries:
            if entry.elements:
                count = self._topk.count(entry.elements, step.steps)
                seed = mix(self._compressing.seed, "topk", self._compressing.names[entry.parameter], step.round, lane)
                found.append(largest(part_of(values, entry), count, seed).add_(entry.offset))
        return torch.cat(found)

    def commit(self, used: Sequence[bool]) -> None:
        self._residuals.commit(used)
        self._velocities.commit(used)

    def forget(self) -> None:
        self._residuals.forget()
        self._velocities.forget()
        self.sent = {}

    def state(self, lanes: Sequence[int]) -> State:
        names = self._compressing.names
        residuals = self._residuals.state(lanes, names) if self._compressing.feedback else {}
        velocities = self._velocities.state(lanes, names) if self._topk.momentum else {}
        return merged_states({"lanes": residuals, "velocities": velocities})

    def load(self, saved: Mapping[str, Mapping[str, Any]], lanes: Sequence[int]) -> None:
        names = self._compressing.names
        for name, tensors in (("lanes", self._residuals), ("velocities", self._velocities)):
            tensors.load([saved.get(names[e.parameter], {}).get(name) for e in self._sums.bucket.entries], lanes)


class SparseBucket(SparseLanes):
    def __init__(self, number: int, sums: LaneSums, shards: BucketShards, topk: TopK, shared: Exchanging) -> None:
        super().__init__(sums, topk, shared)
        self._number, self._shared = number, shared
        self._own = shards.ranges[shared.comm.rank]
        self._out: Tensor | None = None
        self._handle: Handle | None = None

    def start(self, step: Step) -> None:
        self._out = self._sums.buffer()
        self._handle = self._shared.exchange.start_messages(lambda: self._exchange(step), self._out.device)

    def advance(self) -> None:
        """There is one exchange."""

    def wait(self) -> Tensor:
        assert self._handle is not None
        assert self._out is not None
        self._handle.wait()
        self._handle, self.sent = None, {}
        return self._out if self._shared.whole else self._out[slice(*self._own)]

    def _exchange(self, step: Step) -> None:
        comm, wire = self._shared.comm, self._shared.wire_device(self._sums.bucket.device)
        mine = {lane: sent.to(wire) for lane, sent in self.sent.items()}
        others = [(comm.rank + hop) % comm.size for hop in range(1, comm.size)]
        foreign = [(peer, lane) for peer in others for lane in step.plan.holders[peer]]
        count = sum(self._topk.count(e.elements, step.steps) for e in self._sums.bucket.entries if e.elements)
        room = torch.empty((len(foreign), 2, count), dtype=PLACE_DTYPE, device=wire)
        outgoing, incoming = start_messages(
            comm,
            sends=[(sent, peer) for peer in others for sent in mine.values()],
            receives=[(row, peer) for (peer, _), row in zip(foreign, room, strict=True)],
            tag=self._number * TAGS_PER_BUCKET,
            operation=OPERATION,
        )
        wait_all(incoming)
        assert self._out is not None
        add_lanes(self.sent | {lane: row for (_, lane), row in zip(foreign, room, strict=True)}, self._out)
        wait_all(outgoing)

    def forget(self) -> None:
        super().forget()
        if self._out is not None and not self._shared.whole:
            self._sums.give_back(self._out)
        self._out = None
