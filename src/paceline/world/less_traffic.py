"""Ways to send less than ddp does, as far as the network sees them: an exchange every so many steps, of so many bytes.

    a step of s seconds, w of which wait for gradients; a way that sends the share r of the bytes waits at most r · w

At most, because what is hidden behind backward today is at least as well hidden when it is less. It is said of a wait
for bytes: one for a slower worker is shortened only by meeting less often. What compressing computes is not in it.

A worker sends one sum of its lanes, but of what is compressed every lane's payload, and one for all comes back: with m
lanes (m + 1) / 2 times the bytes of one. In shared memory compressing saves no message and costs time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

LARGE = 0.1
"""A smaller share of a step is not worth another way to train."""


@dataclass(frozen=True)
class Way:
    name: str
    every: int = 1
    element_bytes: float = 4.0

    @property
    def is_compressed(self) -> bool:
        return self.element_bytes < 4

    def share(self, lanes: int = 1) -> float:
        """Of ddp's bytes, sent by a worker with so many lanes."""
        payloads = (lanes + 1) / 2 if self.is_compressed else 1.0
        return payloads * self.element_bytes / 4 / self.every

    def leaves(self, waiting: float, lanes: int = 1) -> float:
        """The share of its own step that it waits, where under ddp `waiting` of a step is."""
        return self.share(lanes) * waiting / (1 - waiting + self.share(lanes) * waiting)

    def sent(self, parameters: int, workers: int) -> float:
        """Bytes by each worker with one lane, in a step on average."""
        return 2 * (workers - 1) / workers * self.element_bytes * parameters / self.every

    def waits(self, parameters: int, workers: int, bandwidth: float, latency_s: float) -> float:
        """Seconds of a step, on average, where nothing of it is hidden behind backward."""
        return self.sent(parameters, workers) / bandwidth + 2 * latency_s / self.every


WAYS = (
    Way("ddp"),
    Way("compression=bf16", element_bytes=2.0),
    Way("compression=int8", element_bytes=1 + 4 / 128),
    Way("local_sgd every=8", every=8),
    Way("diloco every=50", every=50),
    Way("diloco every=50 outer_gradients=int8", every=50, element_bytes=1 + 4 / 256),
)
"""The first that is enough is advised. sign is not among them: its loss was measured with a small network alone."""


def ways_out(*, shares_memory: bool) -> tuple[Way, ...]:
    """What can be gone instead of ddp; where gradients lie in shared memory, only what meets less often."""
    return tuple(way for way in WAYS[1:] if not (shares_memory and way.is_compressed))


def waiting_told(waiting: float, ways: Sequence[Way] = (), *, lanes: int = 1) -> str:
    """For a run that has waited for gradients in this share of its steps; nothing where that is little.

    With the first of `ways` whose wait would be small on workers with so many lanes, or else the one that waits least.
    """
    if not LARGE <= waiting <= 1:
        return ""
    told = f"{waiting:.0%} of a step waits for gradients"
    if not ways:
        return told
    left = {way: way.leaves(waiting, lanes) for way in ways}
    way = next((way for way in left if left[way] < LARGE), min(ways, key=lambda way: way.share(lanes)))
    faster = (1 - left[way]) / (1 - waiting) if waiting < 1 else 1 / way.share(lanes)
    return f"{told}; if that is for bytes, {way.name} leaves {left[way]:.0%}: {faster:.1f} times the steps per second"
