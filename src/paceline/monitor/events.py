"""What a worker writes of each step, and how: a header line of JSON, then records of 96 bytes.

    RUN/events/worker-2.0        slot 2 of the job, its first process
    {"format": "paceline events", "version": 1, "worker": 2, "host": …, "clock": …, "time": …}
    ┌──────────────────────────────────────┬───────────────────────────────────────────┐
    │ kind  rank  generation  step  began  │ STEP: seconds by part, …     NOTE: a text │
    └──────────────────────────────────────┴───────────────────────────────────────────┘

A step's time is cut by marks of one monotonic clock: at every moment exactly one `Part` runs, so the parts add up to
the wall time. What a part waits for other workers (an all-gather of fsdp in forward, of zero in the update) is taken
out of it and is communication. `arrived` and `voted` are the two ends of the step's vote, an all-gather: from `arrived`
on a worker waits for the others, and `voted` is the same moment everywhere, up to the latency: it aligns the clocks of
hosts.

When each bucket of gradients left this worker is in a record of its own (of 17 of them where there are more): a bucket
is summed when it has left its last worker, so the one that comes last to a bucket is whom the others wait for there.

Two bytes say how busy the CPUs and the GPU were (see `Use`): 0 is not known, 1 to 101 are 0 to 100 percent. Files of
versions that did not measure have 0 there, and versions that do not know the bytes pass over them, so VERSION is the
same for all of them.
"""

from __future__ import annotations

import enum
import math
import struct
from collections.abc import Sequence
from typing import NamedTuple

FOLDER = "events"
FORMAT = "paceline events"
VERSION = 1
LONGEST_HEADER = 4096


class Part(enum.IntEnum):
    """Of a step's wall time on one worker."""

    DATA = 0  # the loop waits for an item, and copies it to the device
    FORWARD = 1  # from there to `engine.backward`
    BACKWARD = 2
    EXCHANGE = 3  # communication that no computing hides: after backward and in any other part, but for the vote
    VOTE = 4  # likewise, in the step's vote: waiting for the worker that comes last
    OPTIMIZER = 5  # clipping, commit, update
    CHECKPOINT = 6  # what of saving the loop waits for
    RECOVERY = 7  # going on with other workers, in an elastic job
    OTHER = 8  # the script's own


class Kind(enum.IntEnum):
    STEP = 1
    NOTE = 2  # about this worker: records were dropped
    END = 3  # the worker has left in good order
    JOB = 4  # about the job, told by every worker: a generation begins
    BUCKETS = 5  # when buckets of a step left


class StepRecord(NamedTuple):
    rank: int
    generation: int
    step: int
    began: float  # of the worker's monotonic clock, as the two below
    arrived: float  # at the vote; 0: there was none
    voted: float
    parts: tuple[float, ...]
    hidden_s: float  # how much of backward ran while buckets were on their way
    peer: int = 0  # whose messages were waited for longest, by rank
    peer_s: float = 0.0  # and how much longer than for the median of the others


class BucketsRecord(NamedTuple):
    rank: int
    generation: int
    step: int
    began: float  # the step, as in its own record
    left_at: Sequence[float]  # by bucket, of the same clock; 0: it did not leave


class Use(NamedTuple):
    """What a worker uses of its host when its records are written: bytes, and shares of 1. None: not known."""

    memory: float
    device_memory: float = 0.0
    cpu: float | None = None  # of all CPUs that the process may use, by it and all processes below it
    gpu: float | None = None  # of the time, in which its device had anything to do


_HEAD = struct.Struct("<BxHIQd")
_STEP = struct.Struct(f"<dd{len(Part)}ffffHBBf")
_TEXT_BYTES = 72
RECORD_BYTES = _HEAD.size + _TEXT_BYTES
assert _STEP.size == _TEXT_BYTES

MOST_BUCKETS = 17
_LEFT = struct.Struct(f"<HH{MOST_BUCKETS}f")
assert _LEFT.size == _TEXT_BYTES

DTYPE = [
    ("kind", "u1"),
    ("_", "u1"),
    ("rank", "<u2"),
    ("generation", "<u4"),
    ("step", "<u8"),
    ("began", "<f8"),
    ("arrived", "<f8"),
    ("voted", "<f8"),
    ("parts", "<f4", (len(Part),)),
    ("hidden_s", "<f4"),
    ("memory", "<f4"),
    ("device_memory", "<f4"),
    ("peer", "<u2"),
    ("cpu", "u1"),
    ("gpu", "u1"),
    ("peer_s", "<f4"),
]
"""Of a record, for numpy: a file is read at once."""

BUCKETS_DTYPE = [
    *DTYPE[: [name for name, *_ in DTYPE].index("arrived")],
    ("of", "<u2"),  # so many buckets; `told_of` says which of them are told
    ("_of", "<u2"),
    ("after_s", "<f4", (MOST_BUCKETS,)),  # since the step began; NaN: the bucket did not leave
]


def pack_step(record: StepRecord, use: Use) -> bytes:
    head = _HEAD.pack(Kind.STEP, record.rank, record.generation, record.step, record.began)
    times = record.arrived, record.voted, *record.parts, record.hidden_s
    of_host = use.memory, use.device_memory, record.peer, _byte_of(use.cpu), _byte_of(use.gpu)
    return head + _STEP.pack(*times, *of_host, record.peer_s)


def told_of(buckets: int) -> Sequence[int]:
    """Of so many buckets, which a record has: the first, the last, and as many between them as it holds."""
    if buckets <= MOST_BUCKETS:
        return range(buckets)
    return [place * (buckets - 1) // (MOST_BUCKETS - 1) for place in range(MOST_BUCKETS)]


def pack_buckets(record: BucketsRecord) -> bytes:
    left, began = record.left_at, record.began
    after = [left[number] - began if left[number] else math.nan for number in told_of(len(left))]
    head = _HEAD.pack(Kind.BUCKETS, record.rank, record.generation, record.step, began)
    return head + _LEFT.pack(min(len(left), 0xFFFF), 0, *after, *[math.nan] * (MOST_BUCKETS - len(after)))


def _byte_of(share: float | None) -> int:
    return 0 if share is None else 1 + round(100 * min(max(share, 0.0), 1.0))


def pack_note(kind: Kind, rank: int, generation: int, step: int, at: float, text: str) -> bytes:
    cut = text.encode()[:_TEXT_BYTES].decode(errors="ignore").encode()  # never half a letter
    return _HEAD.pack(kind, rank, generation, step, at) + cut.ljust(_TEXT_BYTES, b"\0")


def text_of(record: bytes) -> str:
    return record[_HEAD.size : RECORD_BYTES].rstrip(b"\0").decode(errors="replace")
