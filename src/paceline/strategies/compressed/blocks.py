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

from paceline.collectives.canonical_sum import merges
from paceline.collectives.communicator import Handle, wait_all
from paceline.collectives.direct_all_reduce import start_messages
from paceline.collectives.gradient_exchange import TAGS_PER_BUCKET
from paceline.compression.block_codec import BlockCodec
from paceline.compression.noise import uniform
from paceline.sharding.bucket import BucketShards
from paceline.sharding.local_shard import LocalShard
from paceline.strategies.buckets import LaneSums
from paceline.strategies.compressed.bucket import OPERATION, Compressing, LaneTensors, State, Step, part
from paceline.world.determinism import mix

BACK = -1  # in place of a lane, in the seed of the way back


class BlockBucket:
    def __init__(
        self, number: int, sums: LaneSums, shards: BucketShards, codec: BlockCodec, shared: Compressing
    ) -> None:
        self._number, self._sums, self._codec, self._shared = number, sums, codec, shared
        block = codec.block
        self._rows = [(start // block, stop // block) for start, stop in shards.ranges]
        self._own = self._rows[shared.comm.rank]
        self._wire = shared.wire_device(sums.bucket.device)
        self._pieces = shards.pieces(shared.comm.rank)
        self._partial = _partial_rows(sums, block)
        self._residuals = LaneTensors(sums, shared.lanes)
        self._back: Tensor | None = None  # of the own range
        self._next_back: Tensor | None = None
        self._spare_back: Tensor | None = None  # memory for the next one
        self._sent: dict[int, Tensor] = {}
        self._out: Tensor | None = None
        self._handle: Handle | None = None

    # -- one step ----------------------------------------------------------------------------------------------------

    def take(self, step: Step, lane: int, gradient: Tensor) -> None:
        values = gradient.view(-1, self._codec.block)
        residual = self._residuals.now.get(lane)
        noise = self._noise(step, lane, 0, values)
        self._sent[lane] = self._codec.split(
            values, self._partial, noise, None if residual is None else residual.view_as(values)
        )
        if self._shared.feedback:
            self._residuals.stage(lane, gradient)
        else:
            self._sums.give_back(gradient)

    def start(self, step: Step) -> None:
        bucket = self._sums.bucket
        self._out = self._sums.buffer() if self._shared.whole else None
        self._handle = self._shared.exchange.start_messages(lambda: self._exchange(step), bucket.device)

    def advance(self) -> None:
        """Both ways are one exchange."""

    def wait(self) -> Tensor:
        assert self._handle is not None
        self._handle.wait()
        self._handle, self._sent = None, {}
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
            own_sum = self._summed(step, arrived, out[start:stop] if shared.whole else out)
        if shared.whole and shared.comm.size > 1:
            for first, rows in self._gathered(own_sum).items():
                last = first + len(rows)
                self._codec.decode(rows, self._partial_in(first, last), out[first:last])

    def _scattered(self, step: Step) -> dict[int, Tensor]:
        """The own range's rows of all lanes."""
        comm, (start, stop) = self._shared.comm, self._own
        mine = {lane: rows.to(self._wire) for lane, rows in self._sent.items()}
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
        found = {lane: rows[start:stop] for lane, rows in self._sent.items()}
        return found | {lane: row.to(self._sums.bucket.device) for (_, lane), row in zip(foreign, room, strict=True)}

    def _summed(self, step: Step, arrived: Mapping[int, Tensor], out: Tensor) -> Tensor:
        """The canonical sum of the own range, encoded; what that loses becomes the own residual."""
        (start, stop), present = self._own, sorted(arrived)
        steps = [(present.index(merge.left), present.index(merge.right)) for merge in merges(step.plan.present)]
        lost = self._spare_back if self._spare_back is not None else torch.empty(out.numel(), device=out.device)
        self._spare_back = None
        rows = self._codec.sum(
            [arrived[lane] for lane in present],
            steps,
            self._partial_in(start, stop),
            self._noise(step, BACK, start, out),
            None if self._back is None else self._back.view_as(out),
            lost.view_as(out),
            out,
        )
        self._next_back = lost
        return rows

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
        self._residuals.commit(used)
        back, old = self._next_back, self._back
        if back is None or not self._shared.feedback:
            return
        for owned in self._pieces:
            if not used[owned.piece.parameter]:
                where = slice(owned.offset, owned.offset + owned.piece.elements)
                back[where] = 0 if old is None else old[where]
        self._spare_back, self._back, self._next_back = old, back, None

    def forget(self) -> None:
        self._residuals.forget()
        if self._next_back is not None:
            self._spare_back = self._next_back
        self._next_back, self._out, self._sent = None, None, {}

    # -- its state ---------------------------------------------------------------------------------------------------

    def state(self, lanes: Sequence[int]) -> State:
        if not self._shared.feedback:
            return {}
        names, dtype = self._shared.names, self._sums.bucket.dtype
        found: State = {name: {"lanes": rows} for name, rows in self._residuals.state(lanes, names).items()}
        back = self._own_back()
        for entry in self._sums.bucket.entries:
            mine = [owned for owned in self._pieces if owned.piece.parameter == entry.parameter]
            ranges = [(o.piece.start, back[o.offset : o.offset + o.piece.elements]) for o in mine]
            if entry.elements:
                found[names[entry.parameter]]["back"] = LocalShard((entry.elements,), dtype, tuple(ranges))
        return found

    def load(self, saved: Mapping[str, Mapping[str, Any]], lanes: Sequence[int]) -> None:
        names = self._shared.names
        entries = self._sums.bucket.entries
        self._residuals.load([saved.get(names[e.parameter], {}).get("lanes") for e in entries], lanes)
        back = self._own_back()
        for owned in self._pieces:
            values = saved.get(names[owned.piece.parameter], {}).get("back")
            if values is not None:
                piece = owned.piece
                back[owned.offset : owned.offset + piece.elements].copy_(part(values, piece.start, piece.stop))

    def _own_back(self) -> Tensor:
        if self._back is None:
            elements = (self._own[1] - self._own[0]) * self._codec.block
            self._back = torch.zeros(elements, dtype=self._sums.bucket.dtype, device=self._sums.bucket.device)
        return self._back

    # -- rows --------------------------------------------------------------------------------------------------------

    def _partial_in(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Of rows [start, stop) of the bucket."""
        return [(row - start, elements) for row, elements in self._partial if start <= row < stop]

    def _noise(self, step: Step, lane: int, start: int, values: Tensor) -> Tensor | None:
        """By position in each parameter, for rows from row `start` of the bucket on."""
        if not self._codec.draws:
            return None
        block = self._codec.block
        noise = torch.empty(values.numel(), dtype=torch.float32, device=values.device)
        low, high = start * block, start * block + values.numel()
        for entry in self._sums.bucket.entries:
            first, last = max(low, entry.offset), min(high, entry.offset + -(-entry.elements // block) * block)
            if first < last:
                seed = mix(self._shared.seed, "compression", self._shared.names[entry.parameter], step.round, lane)
                drawn = uniform(seed, first - entry.offset, last - first, values.device)
                noise[first - low : last - low] = drawn
        return noise.view_as(values)


def _partial_rows(sums: LaneSums, block: int) -> list[tuple[int, int]]:
    """The last row of every parameter that does not fill it."""
    ends = [(entry.offset + entry.elements, entry.elements) for entry in sums.bucket.entries]
    return [(end // block, end % block) for end, elements in ends if elements and end % block]
