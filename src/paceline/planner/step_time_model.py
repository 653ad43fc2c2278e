"""How long a step takes: compute, the update, and the communication that nothing hides.

    lane's micro-batches     forward ─ backward ─ forward ─ backward ──┐
    buckets                                             └─ 0 ─ 1 ─ 2 ──┼── exposed ──┐ update ┐
                                                          hidden       │             │        │
    step                     ├──────────── compute ────────────────────┤             ├────────┤

Compute is measured, where the model ran on this machine, or the sum over operators of max(flops / rate, bytes /
bandwidth). With it counts what the Engine's own Python takes, for an item and for a step, which is most of it where
models are tiny. A bucket leaves when its last gradient is final, and buckets travel one after another: what of it ends
before backward does is hidden. Workers that share cores with their exchange hide nothing: copying and adding take
processor time, and there is none left over.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.planner.hardware import Exchange, Hardware, Rates
from paceline.planner.model_profile import ModelProfile, PassProfile, Work
from paceline.planner.traffic import Sizes, StepTraffic, full_order, pulls_of
from paceline.sharding.bucket import plan_buckets
from paceline.sharding.footprint import Model, footprint

READ_AND_WRITTEN = 1.5
"""An update reads gradients, weights and state, and writes weights and state again."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step."""

    compute_s: float
    update_s: float
    communication_s: float
    exposed_s: float
    measured: bool  # the exchange was measured on this hardware; otherwise it is the textbook's formula

    @property
    def hidden_s(self) -> float:
        return max(0.0, self.communication_s - self.exposed_s)

    @property
    def step_s(self) -> float:
        return self.compute_s + self.update_s + self.exposed_s


def work_s(work: Work, rates: Rates) -> float:
    return sum(count * rates.seconds(flops, moved, dtype) for (flops, moved, dtype), count in work.items())


def pass_s(step: PassProfile, hardware: Hardware, busy: int) -> float:
    """Of one forward and backward, while so many workers of a host are busy."""
    by_operators = sum(work_s(work, hardware.rates_for(busy)) for work in step.work)
    if step.measured_s is None:
        return by_operators
    alone = sum(work_s(work, hardware.rates_for(1)) for work in step.work)
    return step.measured_s * by_operators / alone


def step_time(
    strategy: str,
    model: ModelProfile,
    step: PassProfile,
    sizes: Sizes,
    traffic: StepTraffic,
    hardware: Hardware,
    per_host: int,
    low_precision: bool = False,
) -> StepTime:
    busy = min(sizes.workers, per_host)
    items = -(-sizes.lanes // sizes.workers) * sizes.accumulate
    one, rates = pass_s(step, hardware, busy), hardware.rates_for(busy)
    compute = items * (one + rates.item_s) + rates.step_s
    update = update_s(strategy, model, sizes, rates, low_precision)
    if sizes.workers == 1:
        return StepTime(compute, update, 0.0, 0.0, hardware.is_measured)
    measured = hardware.exchange(strategy, sizes.backend, sizes.workers) if per_host >= sizes.workers else None
    if measured is not None:  # against a plain loop, so the Engine's part of a step of one item is in it
        total = exchange_s(strategy, model, sizes, measured)
        return StepTime(compute - rates.item_s - rates.step_s, update, total, total, True)
    link = hardware.link_of(sizes.workers, per_host)
    sent = traffic.most or _read_in_memory(strategy, model, sizes)
    total = sent / link.bandwidth + _latencies(strategy, traffic, sizes) * link.latency_s
    if traffic.across is not None:  # sums between groups come when backward is over
        inside, after = hardware.inside, traffic.across / link.bandwidth
        total = (sent - traffic.across) / inside.bandwidth
        total += _latencies(strategy, traffic, sizes) * inside.latency_s
    else:
        after = 0.0
    exposed = total if hardware.shares_memory else _exposed(strategy, model, step, sizes, total, one, items)
    return StepTime(compute, update, total + after, exposed + after, False)


def exchange_s(strategy: str, model: ModelProfile, sizes: Sizes, measured: Exchange) -> float:
    """Of one step, as it was measured: these strategies exchange every item by itself."""
    items = -(-sizes.lanes // sizes.workers) * sizes.accumulate
    rounds = items if strategy in ("fsdp", "zero2", "zero3") else 1
    gradient_bytes = 4 * model.parameters
    moved = measured.seconds(gradient_bytes, len(model.specs))
    return moved + (rounds - 1) * (measured.per_byte_s * gradient_bytes)


def update_s(strategy: str, model: ModelProfile, sizes: Sizes, rates: Rates, low_precision: bool) -> float:
    """Of this worker's part of the optimizer: it waits for memory."""
    state = round(model.state_bytes) + (4 if low_precision else 0)
    told = Model(model.parameters, weight=2 if low_precision else 4, gradient=4, state=state)
    if strategy in ("ddp", "star"):
        parts = 1
    else:
        parts = max(1, model.parameters * state // max(1, _held_state(strategy, told, sizes)))
    touched = model.parameters / parts * (told.weight + told.gradient + READ_AND_WRITTEN * state)
    return touched / rates.updates


def _held_state(strategy: str, told: Model, sizes: Sizes) -> int:
    return footprint(strategy, told, workers=sizes.workers, lanes=sizes.lanes).optimizer_state


def _latencies(strategy: str, traffic: StepTraffic, sizes: Sizes) -> int:
    """Messages one after another: a ring's for ddp and zero, two for a star and where memory is shared."""
    return traffic.messages * (2 if strategy == "star" or sizes.shares_memory else 2 * (sizes.workers - 1))


def _read_in_memory(strategy: str, model: ModelProfile, sizes: Sizes) -> int:
    """Of gradients in other workers' memory: a range of each, and under ddp the finished ranges too."""
    each = 4 * model.parameters * (sizes.workers - 1) // sizes.workers
    return 2 * each if strategy == "ddp" else each


def _exposed(
    strategy: str, model: ModelProfile, step: PassProfile, sizes: Sizes, total: float, one: float, items: int
) -> float:
    """Buckets leave as the last item's backward finishes them, and travel one after another beside it."""
    works = [_weight(stretch.work) for stretch in step.backward]
    everything = sum(works) + _weight(step.forward)
    backward_s = one * sum(works) / everything if everything else 0.0
    if strategy in ("fsdp", "zero3", "hybrid"):
        return _exposed_units(model, step, total, one, items)
    if strategy == "star":
        return total
    buckets = plan_buckets(model.specs, full_order(step, len(model.specs)), sizes.bucket_bytes)
    sizes_of = [bucket.elements for bucket in buckets]
    scattered = total / 2 if strategy in ("zero1", "zero2") else total  # weights come back after the update
    ready, done, at = {}, 0.0, 0.0
    for work, stretch in zip(works, step.backward, strict=True):
        done += work
        for number in stretch.ready:
            ready[number] = backward_s * done / sum(works)
    for bucket, size in zip(buckets, sizes_of, strict=True):
        leaves = max(ready.get(entry.parameter, backward_s) for entry in bucket.entries)
        at = max(at, leaves) + scattered * size / sum(sizes_of)
    return max(0.0, at - backward_s) + (total - scattered)


def _exposed_units(model: ModelProfile, step: PassProfile, total: float, one: float, items: int) -> float:
    """The next unit is gathered while one is used: the first gather waits, and so do the last unit's gradients."""
    pulls = pulls_of(model, step)
    sizes = [sum(model.specs[number].elements for number in unit) for unit in model.units]
    moved = sum(size * (count + 1) for size, count in zip(sizes, pulls, strict=True))
    first = next((place for place, count in enumerate(pulls) if count), 0)
    ends = total * 2 * sizes[first] / max(1, moved * items)
    return min(total, max(ends, total - items * one))


def _weight(work: Work) -> float:
    """A stretch's share of a pass."""
    return float(sum(count * (flops + moved) for (flops, moved, _), count in work.items()))
