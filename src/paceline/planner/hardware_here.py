"""This machine, looked at for a second: enough to rank, not to predict. `paceline bench hardware` measures it well.

A GPU is not measured: it has the rates of its data sheet, and the memory that it reports.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from paceline.errors import ConfigError
from paceline.planner.hardware import Hardware, Link, Rates, hardware_reported_as
from paceline.world.host_limits import memory_limit, usable_cores

SIDE = 768  # of matrices
COPIED = 64 * 2**20
ENOUGH_S = 0.15
CROWDED_S = 0.6  # many turns of the scheduler
STEP_OPERATORS, ITEM_OPERATORS = 40, 100
"""What the Engine adds to a step and to each item, in the time of so many of torch's smallest operators: 70 and 170 µs
on the machine of docs/accuracy.md. `paceline bench hardware` measures it."""


def rate_of(run: Callable[[], object], work: float, crowded: bool = False) -> float:
    """Of `work` done by `run`, a second: the best of several, since everything else only slows it.

    Workers that take turns on too few cores are the exception: their best is a run that had a core to itself, so there
    all of the time counts.
    """
    seconds = []
    run()
    started = last = time.perf_counter()
    while last < started + (CROWDED_S if crowded else ENOUGH_S):
        run()
        now = time.perf_counter()
        seconds.append(now - last)
        last = now
    return work / (statistics.fmean(seconds) if crowded else min(seconds))


def rates_here(
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16), workers: int = 1, threads: int = 1
) -> Rates:
    """Of one worker, while so many measure at once."""
    crowded = workers * threads > usable_cores()
    flops = {}
    for dtype in dtypes:
        a, b = torch.randn(SIDE, SIDE).to(dtype), torch.randn(SIDE, SIDE).to(dtype)
        flops[str(dtype).removeprefix("torch.")] = rate_of(lambda a=a, b=b: a @ b, 2.0 * SIDE**3, crowded)  # type: ignore[misc]
    source, target = torch.zeros(COPIED // 4), torch.zeros(COPIED // 4)
    bandwidth = rate_of(lambda: target.copy_(source), 2.0 * COPIED, crowded)
    tiny = torch.zeros(16)
    operator_s = 1 / rate_of(lambda: [tiny.add_(1.0) for _ in range(100)], 100.0, crowded)
    engine = STEP_OPERATORS * operator_s, ITEM_OPERATORS * operator_s
    return Rates(flops, bandwidth, operator_s, update_rate(crowded), *engine)


def update_rate(crowded: bool, elements: int = 2**21) -> float:
    """Bytes that AdamW reads and writes a second."""
    parameter = torch.nn.Parameter(torch.zeros(elements))
    parameter.grad = torch.zeros(elements)
    optimizer = torch.optim.AdamW([parameter], fused=True)
    return rate_of(optimizer.step, elements * (4 + 4 + 1.5 * 8.0), crowded)


def memory_here() -> int:
    limit = memory_limit()
    if limit is None:
        raise ConfigError("nothing says how much memory this machine has; give --memory-gib")
    return limit.bytes


def quick_hardware(threads: int = 1) -> Hardware:
    if torch.cuda.is_available():
        memory = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        return hardware_reported_as(torch.cuda.get_device_name(), memory)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        rates = rates_here()
    finally:
        torch.set_num_threads(before)
    link = Link("shared memory", rates.memory_bandwidth / 3, 50e-6)
    cores = usable_cores()
    shared = {count: _shared(rates, cores, threads, count) for count in sorted({1, cores, 2 * cores})}
    return Hardware("this machine", "cpu", memory_here(), shared, link, cores=cores, threads=threads)


def _shared(rates: Rates, cores: int, threads: int, workers: int) -> Rates:
    """Each worker's part, if cores are all that they share."""
    part = min(1.0, cores / (workers * threads))
    flops = {dtype: part * rate for dtype, rate in rates.flops.items()}
    operator_s, step_s, item_s = rates.operator_s / part, rates.step_s / part, rates.item_s / part
    return Rates(flops, part * rates.memory_bandwidth, operator_s, part * rates.updates, step_s, item_s)
