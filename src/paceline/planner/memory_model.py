"""What one worker holds, by part, and at the worst moment of a step.

    weights, gradients, master weights, optimizer state     by `sharding/footprint.py`, as every strategy tells it
    frozen                                                  weights and buffers that no optimizer trains
    activations                                             what autograd keeps, found by running on fake tensors
    temporary                                               results beyond these, at the worst moment of a pass
    communication                                           buffers of buckets, or of gathered units, under way

On the CPU the workers of a host have one memory between them, so all of them have to fit; a GPU has its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from paceline.planner.model_profile import ModelProfile, PassProfile
from paceline.planner.model_sizes import GRADIENT_BYTES
from paceline.planner.traffic import Sizes, full_order
from paceline.sharding.bucket import plan_buckets
from paceline.sharding.footprint import Model
from paceline.strategies.registry import Chosen

MASTER_BYTES = 4


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

    @property
    def model_state(self) -> int:
        return self.weights + self.gradients + self.master_weights + self.optimizer_state

    @property
    def peak(self) -> int:
        return self.model_state + self.activations + self.temporary + self.communication + self.inputs

    def parts(self) -> dict[str, int]:
        return asdict(self)


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
    return Memory(
        weights=held.parameters,
        gradients=held.gradients,
        master_weights=masters,
        optimizer_state=held.optimizer_state - masters,
        activations=step.saved_bytes,
        temporary=step.temporary_bytes,
        communication=communication_bytes(strategy.name, model, step, sizes),
        inputs=step.input_bytes,
    )


def communication_bytes(strategy: str, model: ModelProfile, step: PassProfile, sizes: Sizes) -> int:
    """Buffers beside the gradients that a strategy keeps, while its exchange is under way."""
    if sizes.workers == 1:
        return 0
    buckets = plan_buckets(model.specs, full_order(step, len(model.specs)), sizes.bucket_bytes)
    largest = max(bucket.elements * bucket.dtype.itemsize for bucket in buckets)
    share = -(-largest // sizes.workers)
    in_shards = strategy in ("fsdp", "hybrid") or (strategy == "zero3" and not sizes.shares_memory)
    if in_shards:  # a unit that is used and the next one, and the gradients of a unit
        units = sorted(sum(model.specs[number].elements for number in unit) for unit in model.units)
        whole = sum(units[-2:]) * sizes.weight_dtype.itemsize
        return whole + GRADIENT_BYTES * units[-1]
    if strategy == "star":
        return largest * (sizes.workers - 1)
    if strategy == "zero2":  # lanes' gradients, bucket by bucket
        return 2 * largest + share
    if sizes.shares_memory:
        return share
    return (sizes.workers - 1) * share
