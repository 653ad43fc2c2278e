"""The wire: one header of sixteen integers per message, then at most one tensor. Nothing is pickled.

    magic format kind – │ sender round lane key │ version complete elements dtype │ weight flags digest place

    worker ─► server (tags 0, 1)                              server ─► worker (tags 2, 3)
    OPEN      which lanes I have in this round                WEIGHTS   of a key, with version and complete
    SETTINGS  what my pushes are applied with from now on     SUM       of a key, scaled (aggregate); flags: used
    PUSH      a lane's or a root's gradient of a key          STATE     the optimizer's state of a key
    CLOSE     my round is over: lane weights, clip, settings  LOAD      it is loaded
    PULL      a key (or ALL), when `complete` is reached      PING      I am here
    STATE     the optimizer's state of a key, please          ERROR     utf-8 text; nothing more will come
    LOAD      weights or optimizer state of a key
    PING, BYE                                                 server ─► server (tags 0, 1)
                                                              NORMS     squares of a round's block norms

Who sets the learning rate. Deterministic clocks: the round's CLOSE, which must say the same on all workers.
Asynchronous ones, where a push is applied before its round is closed: the worker's last SETTINGS, which it sends before
its first push and again whenever they changed; until then those the server's own optimizer was built with.

Which parameters were used: bit i of a PUSH's `flags` says whether piece i of the key got a gradient in any of the lanes
in it. Lanes of a round: those the workers name in OPEN, each its own; a worker without any says so with an empty one.
Where gradients are compressed a PUSH is a lane's payload, of bytes; so is a SUM whose compressor is one of blocks.
`weight`, in an asynchronous PUSH: what the gradient is multiplied by (its weight over the round's nominal weight, as
far as backward has not done it). In WEIGHTS: the gradient's norm, where the last round was clipped, otherwise NaN.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

import torch
from torch import Tensor

from paceline.errors import PacelineError
from paceline.parameter_server.compressed_key import code_bytes
from paceline.parameter_server.key_ranges import Key, KeyTable

MAGIC = 0x7061_6365_6C69_6E65
FORMAT = 1
FIELDS = 16
ALL = -1  # in `key`: all keys of the server

HEADER_TO_SERVER, PAYLOAD_TO_SERVER, HEADER_TO_WORKER, PAYLOAD_TO_WORKER = range(4)
LOADS_WEIGHTS, LOADS_STATE, LOADS_RESIDUAL = 1, 2, 3  # flags of LOAD
RESIDUAL = 1  # a flag of STATE, and of the answer: what compression keeps of the key's sums, not the optimizer's state
AS_THEY_ARE = 1  # a flag of PULL, and of WEIGHTS that answer it: not looked ahead
LAST_PING = 2**62  # as its round: nothing comes after it
MOST_TEXT = 1 << 16
MOST_SETTINGS = 1 << 16
MOST_STATE = 1 << 34

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8)


class WireError(PacelineError):
    """A message that does not fit this job: it names the sender, the field, what was expected and what came."""


class Kind(IntEnum):
    OPEN = 1
    SETTINGS = 2
    PUSH = 3
    CLOSE = 4
    PULL = 5
    WEIGHTS = 6
    SUM = 7
    NORMS = 8
    STATE = 9
    LOAD = 10
    PING = 11
    BYE = 12
    ERROR = 13


@dataclass(frozen=True)
class Header:
    kind: Kind
    sender: int
    digest: int
    round: int = 0
    lane: int = 0
    key: int = ALL
    version: int = 0
    complete: int = -1
    elements: int = 0
    dtype: torch.dtype = torch.float32
    weight: float = 1.0
    flags: int = 0

    def holding(self, payload: Tensor) -> Header:
        """This header for a payload."""
        return replace(self, elements=payload.numel(), dtype=payload.dtype)


def is_last(header: Header, *, from_server: bool) -> bool:
    """Whether nothing comes after it: a worker says goodbye, a server fails or ends its pings."""
    if not from_server:
        return header.kind is Kind.BYE
    return header.kind is Kind.ERROR or (header.kind, header.round) == (Kind.PING, LAST_PING)


def pack(header: Header) -> Tensor:
    (weight,) = struct.unpack("<q", struct.pack("<d", header.weight))
    fields = [
        *(MAGIC, FORMAT, header.kind, 0),
        *(header.sender, header.round, header.lane, header.key),
        *(header.version, header.complete, header.elements, DTYPES.index(header.dtype)),
        *(weight, header.flags, header.digest, 0),
    ]
    return torch.tensor(fields, dtype=torch.int64)


def unpack(packed: Tensor, sender: int) -> Header:
    """The header that came from `sender`; whether it fits the job is for `Protocol.check` to say."""

    def expect(field: str, expected: object, found: object, ok: bool) -> None:
        if not ok:
            raise WireError(f"rank {sender} sent a header whose {field} is {found}, expected {expected}; {_OTHER}")

    expect("length", FIELDS, packed.numel(), packed.numel() == FIELDS and packed.dtype == torch.int64)
    magic, version, kind, _, named, round, lane, key, *rest = packed.tolist()
    updates, complete, elements, dtype, weight, flags, digest, _ = rest
    expect("magic number", hex(MAGIC), hex(magic), magic == MAGIC)
    expect("format", FORMAT, version, version == FORMAT)
    expect("kind", f"1 to {len(Kind)}", kind, 1 <= kind <= len(Kind))
    expect("dtype", f"0 to {len(DTYPES) - 1}", dtype, 0 <= dtype < len(DTYPES))
    expect("sender", sender, named, named == sender)
    (scale,) = struct.unpack("<d", struct.pack("<q", weight))
    return Header(
        kind=Kind(kind),
        sender=sender,
        digest=digest,
        round=round,
        lane=lane,
        key=key,
        version=updates,
        complete=complete,
        elements=elements,
        dtype=DTYPES[dtype],
        weight=scale,
        flags=flags,
    )


_OTHER = "it is not a worker or server of this job, or runs another version of paceline"


@dataclass(frozen=True)
class Protocol:
    """What one process may be sent: by the keys and lanes of the job. Ranks: workers first, then servers."""

    table: KeyTable
    workers: int
    lanes: int

    def name(self, rank: int) -> str:
        return f"worker {rank}" if rank < self.workers else f"server {rank - self.workers}"

    def lost_server(self, server: int, how: str) -> str:
        return (
            f"server {server}, which held {self.table.held_by(server)}, was lost ({how}); what it had learned is gone: "
            "resume from the last saved state"
        )

    def check(self, header: Header, *, server: int) -> Header:
        """Refuse what does not fit; `server` is the one that sends or receives it."""
        kinds = _FROM_WORKERS if header.sender < self.workers else _FROM_SERVERS
        self._expect(
            header, "kind", f"one that {self.name(header.sender)} may send", header.kind.name, header.kind in kinds
        )
        self._expect(header, "layout digest", self.table.digest, header.digest, header.digest == self.table.digest)
        self._expect(header, "round", "0 or more", header.round, header.round >= 0)
        self._expect(header, "complete", "-1 or more", header.complete, header.complete >= -1)
        self._expect(header, "version", "0 or more", header.version, header.version >= 0)
        key = self._checked_key(header, server)
        if header.kind is Kind.PUSH:
            assert key is not None
            self._check_push(header, key)
        self._check_payload(header, key)
        return header

    def _checked_key(self, header: Header, server: int) -> Key | None:
        """The key it is about, which must live on the server."""
        if header.kind not in _ABOUT_A_KEY or (header.key == ALL and header.kind in _MAY_MEAN_ALL):
            return None
        keys = self.table.keys
        self._expect(header, "key", f"0 to {len(keys) - 1}", header.key, 0 <= header.key < len(keys))
        key = keys[header.key]
        self._expect(header, "key", f"one of server {server}", self.table.name(key.number), key.server == server)
        return key

    def _check_push(self, header: Header, key: Key) -> None:
        self._expect(header, "lane", f"0 to {self.lanes - 1}", header.lane, 0 <= header.lane < self.lanes)
        most = (1 << len(key.pieces)) - 1
        self._expect(header, "flags", f"0 to {most:#x}", f"{header.flags:#x}", 0 <= header.flags <= most)
        good = math.isfinite(header.weight) and header.weight >= 0
        self._expect(header, "weight", "a number, 0 or more", header.weight, good)

    def _check_payload(self, header: Header, key: Key | None) -> None:
        least, most, dtype = self._payload(header, key)
        expected = least if least == most else f"{least} to {most}"
        self._expect(header, "elements", expected, header.elements, least <= header.elements <= most)
        if header.elements:
            self._expect(header, "dtype", dtype, header.dtype, header.dtype == dtype)

    def _payload(self, header: Header, key: Key | None) -> tuple[int, int, torch.dtype]:
        """How many elements it has, at least and at most, and of which type."""
        kind = header.kind
        loads_weights = kind is Kind.LOAD and header.flags == LOADS_WEIGHTS and header.sender < self.workers
        if key is not None and kind in (Kind.PUSH, Kind.SUM):
            if key.compressor is not None and (header.dtype == torch.uint8 or not header.elements):
                return *code_bytes(key), torch.uint8
            return key.gradient_elements, key.gradient_elements, key.sum_dtype
        if key is not None and (kind is Kind.WEIGHTS or loads_weights):
            return key.elements, key.elements, key.dtype
        if kind in (Kind.PULL, Kind.PING, Kind.BYE):
            return 0, 0, torch.float32
        if kind is Kind.OPEN:
            return 0, self.lanes, torch.int64
        if kind is Kind.NORMS:
            return 0, self.table.layout.blocks, torch.float64
        if kind in (Kind.STATE, Kind.LOAD):
            return 0, MOST_STATE, torch.uint8
        if kind is Kind.ERROR:
            return 0, MOST_TEXT, torch.uint8
        return 0, MOST_SETTINGS + 2 * self.lanes, torch.float64

    def _expect(self, header: Header, field: str, expected: object, found: object, ok: bool) -> None:
        if not ok:
            why = (
                "the models differ: build the same one, from the same seed and config, in every process"
                if field in ("layout digest", "elements", "dtype", "key")
                else "a process runs another version of paceline, or the message was damaged on its way"
            )
            raise WireError(
                f"{self.name(header.sender)} sent {header.kind.name} of round {header.round} whose {field} is {found}, "
                f"expected {expected}; {why}"
            )


_FROM_WORKERS = frozenset(Kind) - {Kind.WEIGHTS, Kind.SUM, Kind.NORMS}
_FROM_SERVERS = frozenset({Kind.WEIGHTS, Kind.SUM, Kind.NORMS, Kind.STATE, Kind.LOAD, Kind.PING, Kind.ERROR})
_ABOUT_A_KEY = frozenset({Kind.PUSH, Kind.PULL, Kind.WEIGHTS, Kind.SUM, Kind.STATE, Kind.LOAD})
_MAY_MEAN_ALL = frozenset({Kind.PULL})


# -- payloads that are not tensors of the model ------------------------------------------------------------------------


@dataclass(frozen=True)
class Close:
    """What a worker says of a round when its part in it is over."""

    lanes: tuple[tuple[int, float], ...]  # (lane, weight) of its own lanes
    samples: float  # of the round, all lanes; backward has divided by it
    max_norm: float | None = None
    skip: bool = False  # the round changes nothing: a loss was not finite
    settings: tuple[float, ...] = ()

    def packed(self) -> Tensor:
        clip = math.nan if self.max_norm is None else self.max_norm
        lanes = [float(number) for pair in self.lanes for number in pair]
        values = [len(self.lanes), self.samples, clip, float(self.skip), *lanes, *self.settings]
        return torch.tensor(values, dtype=torch.float64)

    @classmethod
    def unpacked(cls, payload: Tensor | None) -> Close:
        values = [] if payload is None else payload.tolist()
        if len(values) < 4 or not 0 <= values[0] <= (len(values) - 4) // 2:
            raise WireError(f"a CLOSE has {len(values)} numbers, of which the first, {values[:1]}, counts its lanes")
        count, samples, clip, skip = values[:4]
        lanes, settings = values[4 : 4 + 2 * int(count)], values[4 + 2 * int(count) :]
        return cls(
            lanes=tuple((int(lane), weight) for lane, weight in zip(lanes[::2], lanes[1::2], strict=True)),
            samples=samples,
            max_norm=None if math.isnan(clip) else clip,
            skip=bool(skip),
            settings=tuple(settings),
        )


def lanes_payload(lanes: Sequence[int]) -> Tensor:
    return torch.tensor(lanes, dtype=torch.int64)


def text_payload(text: str) -> Tensor:
    return torch.frombuffer(bytearray(text.encode()[:MOST_TEXT] or b" "), dtype=torch.uint8)


def text_of(payload: Tensor | None) -> str:
    return "" if payload is None else payload.numpy().tobytes().decode(errors="replace")
