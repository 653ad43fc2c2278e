"""The gradient's norm where cuts fall inside blocks: the owner of a block's first element receives the rest of it.

    blocks     |── 0 ──|── 1 ──|── 2 ─|         of one parameter, 4096 elements each
    owners     |─── worker 0 ──·──|─ 1 ──|      worker 0 owns the first element of 0 and 1, and gets the end of 1 from 1

Inside a block there is then one norm over the same elements as anywhere else, and all blocks' norms are told to all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.collectives.communicator import Communicator
from paceline.collectives.work import Handle, wait_all
from paceline.optim.gradient_norm import BLOCK, all_block_norms
from paceline.sharding.flat_layout import Piece

_OPERATION = "ends of blocks"


@dataclass(frozen=True)
class BlockEnd:
    """A part of a block that lies with `holder`, while `owner` has the block's first element."""

    piece: Piece
    holder: int
    owner: int


def block_ends(owners: Mapping[int, Sequence[tuple[int, Piece]]]) -> list[BlockEnd]:
    """For each parameter its pieces in order and who owns them: what has to move, in that order."""
    found = []
    for pieces in owners.values():
        first_of_block = 0  # who owns it
        for holder, piece in pieces:
            start = piece.start
            if start % BLOCK:
                stop = min(piece.stop, -(-start // BLOCK) * BLOCK)
                if holder != first_of_block:
                    found.append(BlockEnd(Piece(piece.parameter, start, stop), holder, first_of_block))
                start = stop
            if start < piece.stop:
                first_of_block = holder
    return found


class BlockNorms:
    """`pieces` are this worker's, by worker the others': the norms of all blocks, the same on every worker."""

    def __init__(self, owners: Mapping[int, Sequence[tuple[int, Piece]]], comm: Communicator | None) -> None:
        self._comm = comm
        self._rank, self._workers = (0, 1) if comm is None else (comm.rank, comm.size)
        self._ends = block_ends(owners)
        begun = [0] * self._workers
        for pieces in owners.values():
            for holder, piece in pieces:
                begun[holder] += -(-piece.stop // BLOCK) - -(-piece.start // BLOCK)
        self._most_blocks = max(begun, default=0)

    def norms(self, gradients: Mapping[Piece, Tensor | None]) -> Tensor:
        """Of this worker's pieces and their gradients; None for parameters that nobody used."""
        used = {piece: gradient for piece, gradient in gradients.items() if gradient is not None}
        arrived = self._exchanged(used, {piece.parameter for piece in used})
        parts = []
        for piece, gradient in used.items():
            flat = gradient.detach().reshape(-1)
            begin = -(-piece.start // BLOCK) * BLOCK - piece.start
            if begin >= piece.elements:
                continue
            ends = arrived.get(piece.parameter, [])
            whole = piece.elements - begin if not ends else (piece.elements - begin) // BLOCK * BLOCK
            parts.append(flat[begin : begin + whole])
            if ends:
                parts.append(torch.cat([flat[begin + whole :], *ends]))
        norms = all_block_norms([part for part in parts if part.numel()])
        if self._comm is None:
            return norms
        padded = norms.new_zeros(self._most_blocks)
        padded[: norms.numel()] = norms
        rows, handle = self._comm.all_gather(padded)
        handle.wait()
        return rows.view(-1)

    def _exchanged(self, used: Mapping[Piece, Tensor], parameters: set[int]) -> dict[int, list[Tensor]]:
        """Send what others own the beginnings of, in one message each; by parameter, what came for this worker."""
        comm = self._comm
        if comm is None:
            return {}
        mine = {piece.parameter: (piece, gradient) for piece, gradient in used.items()}
        moving = [end for end in self._ends if end.piece.parameter in parameters]
        handles: list[Handle] = []
        rooms: list[tuple[list[BlockEnd], Tensor]] = []
        for peer in range(self._workers):
            coming = [end for end in moving if end.holder == peer and end.owner == self._rank]
            if coming:
                room = torch.empty(sum(end.piece.elements for end in coming))
                rooms.append((coming, room))
                handles.append(comm.receive(room, source=peer, tag=0, operation=_OPERATION))
        for peer in range(self._workers):
            leaving = [end.piece for end in moving if end.holder == self._rank and end.owner == peer]
            if leaving:
                packed = torch.cat([_part(*mine[piece.parameter], piece) for piece in leaving]).cpu()
                handles.append(comm.send(packed, to=peer, tag=0, operation=_OPERATION))
        wait_all(handles)
        arrived: dict[int, list[Tensor]] = {}
        for coming, room in rooms:
            for end, part in zip(coming, torch.split(room, [end.piece.elements for end in coming]), strict=True):
                gradient = mine[end.piece.parameter][1]
                arrived.setdefault(end.piece.parameter, []).append(part.to(gradient.device))
        return arrived


def _part(of: Piece, gradient: Tensor, piece: Piece) -> Tensor:
    return gradient.detach().reshape(-1)[piece.start - of.start : piece.stop - of.start]
