"""Ways to send less than ddp does, as far as the network sees them: an exchange every so many steps, of so many bytes.

    a step of s seconds, w of which wait for gradients; a way that sends the share r of the bytes waits at most r · w

At most, because what is hidden behind backward today is at least as well hidden when it is less. It is said of a wait
for bytes: one for a slower worker is shortened only by meeting less often. What compressing computes is not in it.
"""

from __future__ import annotations

from dataclasses import dataclass

LARGE = 0.1
"""A smaller share of a step is not worth another way to train."""


@dataclass(frozen=True)
class Way:
    name: str
    every: int = 1
    element_bytes: float = 4.0

    @property
    def share(self) -> float:
        """Of ddp's bytes."""
        return self.element_bytes / 4 / self.every

    def sent(self, parameters: int, workers: int) -> float:
        """Bytes by each worker with one lane, in a step on average."""
        return 2 * (workers - 1) / workers * self.element_bytes * parameters / self.every

    def waits(self, parameters: int, workers: int, bandwidth: float, latency_s: float) -> float:
        """Seconds of a step, on average, where nothing of it is hidden behind backward."""
        return self.sent(parameters, workers) / bandwidth + 2 * latency_s / self.every


WAYS = (
    Way("ddp"),
    Way("compression=int8", element_bytes=1 + 4 / 128),
    Way("local_sgd every=8", every=8),
    Way("diloco every=50", every=50),
    Way("diloco every=50 outer_gradients=int8", every=50, element_bytes=1 + 4 / 256),
)


def waiting_told(waiting: float, *, is_ddp: bool) -> str:
    """For a run that has waited for gradients in this share of its steps; nothing where that is little.

    Under ddp with the first way whose wait would be small, or else the one that waits least.
    """
    if not LARGE <= waiting <= 1:
        return ""
    told = f"{waiting:.0%} of a step waits for gradients"
    if not is_ddp:
        return told
    left = {way: way.share * waiting / (1 - waiting + way.share * waiting) for way in WAYS[1:]}
    way = next((way for way in left if left[way] < LARGE), WAYS[-1])
    faster = (1 - left[way]) / (1 - waiting) if waiting < 1 else 1 / way.share
    return f"{told}; if that is for bytes, {way.name} leaves {left[way]:.0%}: {faster:.1f} times the steps per second"
