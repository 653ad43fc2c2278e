"""What one worker holds, by part, and at the worst moment of a step.

    weights, gradients, master weights, optimizer state     by `sharding/footprint.py`, as every strategy tells it
    frozen                                                  weights and buffers that no optimizer trains
    activations                                             what autograd keeps, found by running on fake tensors
    temporary                                               results beyond these, at the worst moment of a pass; and
                                                            on a CPU what libraries take in a step
    communication                                           buffers of buckets, or of gathered units, under way

On a GPU gradients are made as activations go, and not all are there at the worst moment; on a CPU their memory stays.

On the CPU the workers of a host have one memory between them, so all of them have to fit; a GPU has its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from paceline.planner.model_profile import ModelProfile, PassProfile
from paceline.planner.model_sizes import GRADIENT_BYTES
from paceline.planner.traffic import Sizes, full_order
from paceline.sharding.bucket import plan_buckets
from paceline.sharding.footprint import Model
from paceline.sharding.unit import Unit, unit_buckets
from paceline.strategies.registry import Chosen

MASTER_BYTES = 4
LIBRARIES_BYTES = 32 * 10**6
"""What a worker on a CPU takes in a step besides tensors: workspaces of libraries, threads. Measured."""


@dataclass(frozen=True)
class Memory:
    """Bytes of the busiest worker."""

    weights: int
    gradients: int
    master_weights: int
    optimizer_state: int
    activations: int
    temporary: int
    communication: int
    inputs: int = 0
    later_gradients: int = 0  # that come after the worst moment; `gradients` are there by then

    @property
    def model_state(self) -> int:
        return self.weights + self.gradients + self.later_gradients + self.master_weights + self.optimizer_state

    @property
    def peak(self) -> int:
        return sum(self.parts().values())

    def parts(self) -> dict[str, int]:
        """At the worst moment."""
        return {name: getattr(self, name) for name in PARTS}


PARTS: Mapping[str, str] = {
    "weights": "weights",
    "gradients": "gradients",
    "master_weights": "master weights",
    "optimizer_state": "optimizer state",
    "activations": "activations",
    "temporary": "temporary results",
    "communication": "communication buffers",
    "inputs": "inputs",
}


def memory_of(
    strategy: Chosen, model: ModelProfile, step: PassProfile, sizes: Sizes, precision: str, per_host: int
) -> Memory:
    low = precision != "fp32"
    weight = 2 if low else round(model.weight_bytes / model.parameters)
    master = MASTER_BYTES if low else 0
    told = Model(
        model.parameters,
        weight=weight,
        gradient=GRADIENT_BYTES,
        state=round(model.state_bytes) + master,
        frozen=(model.frozen_bytes + model.buffer_bytes) // (2 if low else 1),
    )
    on_host = per_host if sizes.workers % per_host == 0 else None
    held = strategy.footprint(
        told,
        workers=sizes.workers,
        lanes=sizes.lanes,
        accumulate=sizes.accumulate,
        per_host=sizes.workers if sizes.shares_memory else 1,
        on_host=on_host,
    )
    masters = held.optimizer_state * master // told.state if told.state else 0
    later = 0
    if sizes.backend == "nccl" and sizes.lanes == sizes.workers and sizes.accumulate == 1:
        worst = step.worst_moment(held.gradients, [spec.elements for spec in model.specs])
        later = min(held.gradients, step.saved_bytes + step.temporary_bytes + held.gradients - worst)
    return Memory(
        weights=held.parameters,
        gradients=held.gradients - later,
        master_weights=masters,
        optimizer_state=held.optimizer_state - masters,
        activations=step.saved_bytes,
        temporary=step.temporary_bytes + (0 if sizes.backend == "nccl" else LIBRARIES_BYTES),
        communication=communication_bytes(strategy.name, model, step, sizes),
        inputs=step.input_bytes,
        later_gradients=later,
    )


def communication_bytes(strategy: str, model: ModelProfile, step: PassProfile, sizes: Sizes) -> int:
    """Buffers beside the gradients that a strategy keeps, while its exchange is under way.

    What is held is known from the code; how many buckets are on their way at the worst moment was measured, with 2
    and 4 workers in shared memory (docs/accuracy.md).
    """
    if sizes.workers == 1:
        return 0
    buckets = plan_buckets(model.specs, full_order(step, len(model.specs)), sizes.bucket_bytes)
    largest = max(bucket.elements * bucket.dtype.itemsize for bucket in buckets)
    alone = max((b.elements * b.dtype.itemsize for b in buckets if b.alone), default=0)
    if strategy in ("fsdp", "hybrid") or (strategy == "zero3" and not sizes.shares_memory):
        return _of_units(model, sizes)
    if strategy == "star":  # the others' roots at worker 0, and messages on their way to it
        return (sizes.workers - 1) * largest * 5 // 2
    if strategy in ("zero2", "zero3"):  # every lane leaves by itself: two buckets, and parts of others that arrive
        return (4 + sizes.workers) * largest // 2
    if strategy == "zero1":
        return alone
    return 0 if sizes.shares_memory else (sizes.workers - 1) * -(-largest // sizes.workers)


def _of_units(model: ModelProfile, sizes: Sizes) -> int:
    """A unit that is used and the next one; the gradients of two; and what packed gradients travel in."""
    units = [Unit("", None, unit) for unit in model.units]
    elements = sorted(sum(model.specs[number].elements for number in unit) for unit in model.units)
    packed = sum(
        bucket.elements
        for unit in units
        for bucket in unit_buckets(model.specs, unit, sizes.bucket_bytes)
        if not bucket.alone
    )
    in_use = sum(elements[-2:]) if len(elements) > 1 else elements[0]
    return in_use * sizes.weight_dtype.itemsize + GRADIENT_BYTES * (in_use + packed)
