"""Compressed pushes: each lane's payload of a bucket, cut into keys, and the residuals that are kept for it.

    lane's gradient + residual ──► payload ──cut into keys──► servers, which decode and add (parameter_server's part)
                          └──────► the lane's residual        and keep the residual of a key's sum

Residuals of lanes are here, those of sums on the servers; saved they are one state, which is ddp's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from paceline.compression import UNCOMPRESSED, BlockCompressor, Compressor, TopK
from paceline.parameter_server.compressed_key import part_of_key, range_of
from paceline.parameter_server.key_ranges import Key, KeyTable
from paceline.sharding.bucket import BucketShards
from paceline.sharding.local_shard import LocalShard
from paceline.strategies.buckets import LaneSums
from paceline.strategies.compressed.blocks import BlockLanes
from paceline.strategies.compressed.bucket import Compressing, State, part
from paceline.strategies.compressed.gradients import CompressedByLane
from paceline.strategies.compressed.sparse import SparseLanes
from paceline.strategies.registry import Job

PushedLanes = BlockLanes | SparseLanes


class PushedGradients(CompressedByLane[PushedLanes]):
    def __init__(self, job: Job, named: Sequence[tuple[str, Parameter]], table: KeyTable) -> None:
        compression = job.compression or UNCOMPRESSED
        super().__init__(compression, named)
        names = [name for name, _ in named]
        self._compressing = Compressing(names, job.lanes, job.seed, compression.feedback)
        self._table = table
        self._ranges = {
            key.number: range_of(key, key.compressor, names, job.seed)
            for key in table.keys
            if isinstance(key.compressor, BlockCompressor)
        }

    def _made(self, number: int, sums: LaneSums, shards: BucketShards, compressor: Compressor) -> PushedLanes:
        if isinstance(compressor, TopK):
            return SparseLanes(sums, compressor, self._compressing)
        assert isinstance(compressor, BlockCompressor)
        return BlockLanes(sums, compressor, self._compressing)

    def codes(self, number: int) -> Iterator[tuple[int, Key, Tensor]]:
        """Of a bucket: (lane, key, payload), in the host's memory."""
        for lane, sent in self._buckets[number].sent.items():
            payload = sent.cpu()
            for key in self._table.of_bucket(number):
                yield lane, key, part_of_key(key, payload)

    def decode(self, key: Key, rows: Tensor, out: Tensor) -> None:
        """Rows of a sum that came back become the key's gradient."""
        self._ranges[key.number].decode(rows.to(out.device), out)

    # -- the residuals of sums, which servers keep -------------------------------------------------------------------

    def with_sums(self, state: State, residuals: Mapping[int, Tensor] | None) -> State:
        """A state of lanes with what servers keep, by key; None: another worker has asked for it."""
        names, layout = self._compressing.names, self._table.layout
        parts: dict[int, list[tuple[int, Tensor]]] = {}
        for number in self._ranges if state and self._compressing.feedback else ():
            key = self._table.keys[number]
            for place, piece in enumerate(key.pieces):
                found = parts.setdefault(piece.parameter, [])
                if residuals is not None:
                    found.append((piece.start, key.gradient_views(residuals[number])[place]))
        for parameter, found in parts.items():
            shard = LocalShard.of((layout.sizes[parameter],), torch.float32, sorted(found, key=lambda one: one[0]))
            state[names[parameter]]["back"] = shard
        return state

    def sums_of(self, saved: Mapping[str, Mapping[str, Any]]) -> dict[int, Tensor]:
        """The inverse: by key, of those that have something."""
        names = self._compressing.names
        found: dict[int, Tensor] = {}
        for number in self._ranges:
            key = self._table.keys[number]
            kept = torch.zeros(key.gradient_elements)
            for piece, view in zip(key.pieces, key.gradient_views(kept), strict=True):
                values = saved.get(names[piece.parameter], {}).get("back")
                if values is not None:
                    view.copy_(part(values, piece.start, piece.stop))
                    found[number] = kept
        return found
