"""A bucket under a block codec: lanes' rows go to the owners of ranges, and the owners' sums come back in rows too.

    a lane's rows     |── owner 0 ──|── owner 1 ──|          sent: lanes · (N-1)/N of a payload
    owner             decode all lanes, canonical sum, + its own residual ──encode──► rows
    rows of the sum   |─────────────|─────────────|          sent: (N-1)/N of a payload; every worker decodes the same

The way back loses as the way there does, and its residual is the owner's: of its range, kept by element. Where owners
keep the sums (ZeRO) nothing comes back, but the sum is encoded and decoded all the same: it has the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.collectives.communicator import Handle, wait_all
from paceline.collectives.direct_all_reduce import start_messages
from paceline.collectives.gradient_exchange import TAGS_PER_BUCKET
from paceline.compression.block_codec import BlockCodec
from paceline.compression.block_range import BlockRange, OwnedSum, Span
from paceline.sharding.bucket import BucketShards
from paceline.sharding.local_shard import LocalShard
from paceline.strategies.buckets import LaneSums
from paceline.strategies.compressed.bucket import OPERATION, Compressing, Exchanging, LaneTensors, State, Step, part


class BlockLanes:
    """The lanes' side: rows of their gradients, and what these lose."""

    def __init__(self, sums: LaneSums, codec: BlockCodec, compressing: Compressing) -> None:
        self._sums, self._codec, self._compressing = sums, codec, compressing
        spans = [Span(compressing.names[e.parameter], 0, e.elements, e.offset) for e in sums.bucket.entries]
        self._range = BlockRange(codec, tuple(spans), sums.bucket.elements, compressing.seed)
        self._residuals = LaneTensors(sums, compressing.lanes)
        self.sent: dict[int, Tensor] = {}  # by lane

    def take(self, step: Step, lane: int, gradient: Tensor) -> None:
        values = gradient.view(-1, self._codec.block)
        residual = self._residuals.now.get(lane)
        noise = self._range.noise(step.round, lane, values.device)
        self.sent[lane] = self._codec.split(
            values, self._range.partial, noise, None if residual is None else residual.view_as(values)
        )
        if self._compressing.feedback:
            self._residuals.stage(lane, gradient)
        else:
            self._sums.give_back(gradient)

    def commit(self, used: Sequence[bool]) -> None:
        self._residuals.commit(used)

    def forget(self) -> None:
        self._residuals.forget()
        self.sent = {}

    def state(self, lanes: Sequence[int]) -> State:
        if not self._compressing.feedback:
            return {}
        kept = self._residuals.state(lanes, self._compressing.names)
        return {name: {"lanes": rows} for name, rows in kept.items()}

    def load(self, saved: Mapping[str, Mapping[str, Any]], lanes: Sequence[int]) -> None:
        names = self._compressing.names
        self._residuals.load([saved.get(names[e.parameter], {}).get("lanes") for e in self._sums.bucket.entries], lanes)


class BlockBucket(BlockLanes):
    def __init__(
        self, number: int, sums: LaneSums, shards: BucketShards, codec: BlockCodec, shared: Exchanging
    ) -> None:
        super().__init__(sums, codec, shared)
        self._number, self._shared = number, shared
        block, rank = codec.block, shared.comm.rank
        self._rows = [(start // block, stop // block) for start, stop in shards.ranges]
        self._own = self._rows[rank]
        self._wire = shared.wire_device(sums.bucket.device)
        self._pieces = shards.pieces(rank)
        spans = [Span(shared.names[o.piece.parameter], o.piece.start, o.piece.elements, o.offset) for o in self._pieces]
        own = BlockRange(codec, tuple(spans), shards.width(rank), shared.seed)
        self._back = OwnedSum(own, feedback=shared.feedback, device=sums.bucket.device)
        self._out: Tensor | None = None
        self._handle: Handle | None = None

    # -- one step ----------------------------------------------------------------------------------------------------

    def start(self, step: Step) -> None:
        bucket = self._sums.bucket
        self._out = self._sums.buffer() if self._shared.whole else None
        self._handle = self._shared.exchange.start_messages(lambda: self._exchange(step), bucket.device)

    def advance(self) -> None:
        """Both ways are one exchange."""

    def wait(self) -> Tensor:
        assert self._handle is not None
        self._handle.wait()
        self._handle, self.sent = None, {}
        assert self._out is not None
        return self._out

    def _exchange(self, step: Step) -> None:
        shared, block, (start, stop) = self._shared, self._codec.block, self._own
        if not shared.whole:
            self._out = torch.empty((stop - start) * block, device=self._sums.bucket.device)
        assert self._out is not None
        out = self._out.view(-1, block)
        own_sum = torch.empty((0, self._codec.row_bytes), dtype=torch.uint8, device=self._sums.bucket.device)
        arrived = self._scattered(step)
        if start < stop:
            own_sum = self._back.add(step.round, arrived, (out[start:stop] if shared.whole else out).view(-1))
        if shared.whole and shared.comm.size > 1:
            for first, rows in self._gathered(own_sum).items():
                last = first + len(rows)
                self._codec.decode(rows, self._range.partial_in(first, last), out[first:last])

    def _scattered(self, step: Step) -> dict[int, Tensor]:
        """The own range's rows of all lanes."""
        comm, (start, stop) = self._shared.comm, self._own
        mine = {lane: rows.to(self._wire) for lane, rows in self.sent.items()}
        others = [(comm.rank + hop) % comm.size for hop in range(1, comm.size)]
        foreign = [(peer, lane) for peer in others for lane in step.plan.holders[peer]] if start < stop else []
        room = torch.empty((len(foreign), stop - start, self._codec.row_bytes), dtype=torch.uint8, device=self._wire)
        sends = [
            (rows[slice(*self._rows[peer])], peer)
            for peer in others
            if self._rows[peer][0] < self._rows[peer][1]
            for rows in mine.values()
        ]
        receives = [(row, peer) for (peer, _), row in zip(foreign, room, strict=True)]
        outgoing, incoming = start_messages(
            comm, sends=sends, receives=receives, tag=self._number * TAGS_PER_BUCKET, operation=OPERATION
        )
        wait_all(incoming)
        wait_all(outgoing)
        found = {lane: rows[start:stop] for lane, rows in self.sent.items()}
        return found | {lane: row.to(self._sums.bucket.device) for (_, lane), row in zip(foreign, room, strict=True)}

    def _gathered(self, own: Tensor) -> dict[int, Tensor]:
        """The rows of all other owners, by their first."""
        comm, (start, stop) = self._shared.comm, self._own
        sent = own.to(self._wire)
        others = [(comm.rank + hop) % comm.size for hop in range(1, comm.size)]
        owners = [peer for peer in others if self._rows[peer][0] < self._rows[peer][1]]
        found = {
            self._rows[peer][0]: torch.empty(
                (self._rows[peer][1] - self._rows[peer][0], self._codec.row_bytes), dtype=torch.uint8, device=self._wire
            )
            for peer in owners
        }
        outgoing, incoming = start_messages(
            comm,
            sends=[(sent, peer) for peer in others] if start < stop else [],
            receives=[(found[self._rows[peer][0]], peer) for peer in owners],
            tag=self._number * TAGS_PER_BUCKET + 1,
            operation=OPERATION,
        )
        wait_all([*incoming, *outgoing])
        return {first: rows.to(self._sums.bucket.device) for first, rows in found.items()}

    def commit(self, used: Sequence[bool]) -> None:
        super().commit(used)
        self._back.commit([used[owned.piece.parameter] for owned in self._pieces])

    def forget(self) -> None:
        super().forget()
        self._back.forget()
        self._out = None

    # -- its state ---------------------------------------------------------------------------------------------------

    def state(self, lanes: Sequence[int]) -> State:
        found = super().state(lanes)
        if not self._shared.feedback:
            return found
        names, back = self._shared.names, self._back.residual
        for entry in self._sums.bucket.entries:
            mine = [owned for owned in self._pieces if owned.piece.parameter == entry.parameter]
            ranges = [(o.piece.start, back[o.offset : o.offset + o.piece.elements]) for o in mine]
            if entry.elements:
                found[names[entry.parameter]]["back"] = LocalShard((entry.elements,), back.dtype, tuple(ranges))
        return found

    def load(self, saved: Mapping[str, Mapping[str, Any]], lanes: Sequence[int]) -> None:
        super().load(saved, lanes)
        names, back = self._shared.names, self._back.residual
        for owned in self._pieces:
            values = saved.get(names[owned.piece.parameter], {}).get("back")
            if values is not None:
                piece = owned.piece
                back[owned.offset : owned.offset + piece.elements].copy_(part(values, piece.start, piece.stop))
