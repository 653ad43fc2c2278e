"""Buckets on their way: start the exchange of one bucket's roots while backward goes on, and hand back the sum.

    reduction   workers                    how
    exact       1                          nothing: all merges were local (`SingleWorker`)
    exact       any, in shared memory      the owner of a range adds it where it lies (shared_memory/operations.py)
    exact       2, one root each           native all-reduce (a + b = b + a: the canonical bits)
    exact       4, 8, … one root each,     recursive halving and doubling: few messages
                a small bucket
    exact       otherwise                  direct: slices to their owners, the rest of the tree, slices back
    fast        any                        native all-reduce of each worker's own sum, in the backend's order
    fast        any, with an algorithm     the schedule of that name, or the cheapest one for the bucket ("auto")

`start_scatter` leaves every sum with the owners of its ranges, always by the canonical tree: nothing comes back.

Native collectives are started by the caller, in bucket order, which is the same on every worker. The others run one
after another on a thread of their own, matched by tag; torch and gloo release the interpreter while they add and wait.
(Two threads were no faster: gloo keeps both directions busy by itself, and a second one only takes time from backward.)
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from paceline.collectives.canonical_sum import Scatter, SumPlan
from paceline.collectives.choice import Choice
from paceline.collectives.collective_queue import CollectiveQueue, Event, QueuedWork
from paceline.collectives.communicator import Communicator, Done, Handle
from paceline.collectives.direct_all_reduce import (
    direct_all_reduce,
    direct_all_reduce_by_collectives,
    direct_reduce_scatter,
    direct_reduce_scatter_by_collectives,
)
from paceline.collectives.executor import Scratch, run_schedule
from paceline.collectives.halving_doubling import HALVING_DOUBLING
from paceline.collectives.schedule import Schedule
from paceline.elastic.faults import fault_point, ordered
from paceline.world.waiting import Waiting

Reduction = Literal["exact", "fast"]

# Bytes per worker up to which 2·log2 N messages in turn beat 2·(N-1) at once. Measured on 16 cores over loopback:
# halving takes 0.8 of direct's time for 1 MiB on 16 workers, 1.05 of it for 16 MiB; on 4 and 8 they meet near here.
HALVING_UP_TO = 256 * 2**10
# The two rounds of the canonical sum have a tag each; schedules need one, their messages are matched by order.
TAGS_PER_BUCKET = 2
CLOSE_IN_S = 1.0


class PendingSum:
    """One bucket's sum; `wait` returns it, in the memory that the exchange chose."""

    def __init__(self, out: Sequence[Tensor], handle: Handle | None = None) -> None:
        """`out` is, or becomes by then, one tensor."""
        self._out, self._handle = out, handle

    def wait(self) -> Tensor:
        if self._handle is not None:
            self._handle.wait()
            self._handle = None
        return self._out[0]


class GradientExchange:
    """With an `algorithm` making one is a collective: all workers do it at the same place."""

    def __init__(self, comm: Communicator, reduction: Reduction, algorithm: str | None = None) -> None:
        self._comm = comm
        self._reduction = reduction
        self._choice = Choice.agreed(comm, algorithm) if algorithm is not None and comm.size > 1 else None
        self._queue = CollectiveQueue("paceline-exchange")
        self._scratch, self._scratch_of_queue = Scratch(), Scratch()
        self._sets = itertools.count()

    def new_set(self, old: int | None = None) -> int:
        """A number for a set of buckets, in place of the `old` one if there was one."""
        if old is not None:
            self._comm.forget_buckets(old)
        return next(self._sets)

    def slot(self, of: int, bucket: int, elements: int, dtype: torch.dtype) -> Tensor | None:
        """Memory in which a worker's root of this bucket travels best, if there is any such.

        All workers ask for the same buckets in the same order.
        """
        if self._reduction == "fast":
            return None
        return self._comm.bucket_buffer(of, bucket, elements, dtype)

    def start(
        self, of: int, bucket: int, plan: SumPlan, roots: Mapping[int, Tensor], spare: Callable[[], Tensor]
    ) -> PendingSum:
        """Begin the sum of `roots` of a bucket of a set over all workers.

        `spare` gives a buffer to a worker that has no root.
        """
        pending = self._started(of, bucket, plan, roots, spare)
        if ordered:
            fault_point("bucket")
        return pending

    def _started(
        self, of: int, bucket: int, plan: SumPlan, roots: Mapping[int, Tensor], spare: Callable[[], Tensor]
    ) -> PendingSum:
        comm = self._comm
        tag = bucket * TAGS_PER_BUCKET
        if self._reduction == "fast":
            out = _sum_in_order(roots, spare)
            if self._choice is None:
                return PendingSum([out], comm.all_reduce(out, f"in the all-reduce of bucket {bucket}"))
            return PendingSum([out], self._run(self._choice.schedule(out.nbytes), out, tag))
        if comm.sums_buckets:
            like = next(iter(roots.values())) if roots else spare()
            return PendingSum(*comm.sum_bucket(of, bucket, plan, roots, like))
        if plan.is_pairwise:
            (out,) = roots.values()
            if comm.size == 2:
                return PendingSum([out], comm.all_reduce(out, f"in the all-reduce of bucket {bucket}"))
            if out.device.type == "cpu" and out.nbytes <= HALVING_UP_TO * comm.size:
                return PendingSum([out], self._run(HALVING_DOUBLING, out, tag))
        out = next(iter(roots.values())) if roots else spare()
        if out.device.type != "cpu":
            direct_all_reduce_by_collectives(comm, plan, roots, out)
            return PendingSum([out])
        return PendingSum(
            [out],
            self._queued(
                lambda scratch: direct_all_reduce(comm, plan, roots, out, tag=tag, scratch=scratch),
                f"in the sum of bucket {bucket}",
            ),
        )

    def start_scatter(self, of: int, scatter: Scatter, like: Tensor) -> Handle:
        """Begin to add up a bucket at the owners of its ranges; `like` is a tensor of its dtype and device.

        Once it is waited for this worker's nodes are free, and `scatter.held` has its own range's sums.
        """
        handle = self._started_scatter(of, scatter, like)
        if ordered:
            fault_point("bucket")
        return handle

    def _started_scatter(self, of: int, scatter: Scatter, like: Tensor) -> Handle:
        comm = self._comm
        if comm.sums_buckets:
            return comm.scatter_bucket(of, scatter)
        if like.device.type != "cpu":
            direct_reduce_scatter_by_collectives(comm, scatter, like)
            return Done()
        tag = scatter.bucket * TAGS_PER_BUCKET
        return self._queued(
            lambda scratch: direct_reduce_scatter(comm, scatter, tag=tag, scratch=scratch),
            f"in the reduce-scatter of bucket {scatter.bucket}",
        )

    def start_messages(self, exchange: Callable[[], None], device: torch.device) -> Handle:
        """Begin an exchange of the caller's own making, made of messages, in line with the others."""
        if device.type == "cpu":
            handle: Handle = self._queued(lambda _: exchange(), "in an exchange of gradients")
        else:  # in line with what the caller's stream computes
            exchange()
            handle = Done()
        if ordered:
            fault_point("bucket")
        return handle

    def _queued(self, exchange: Callable[[Scratch], None], doing: str) -> Handle:
        def run() -> None:
            with Waiting(doing=doing):  # of the messages inside, which can't tell their bucket
                exchange(self._scratch_of_queue)

        return _OnTheThread(self._queue.run(run, [], Event("paceline:exchange"), at_once=False), doing)

    def close(self) -> None:
        self._queue.close()
        self._queue.join(CLOSE_IN_S)

    def _run(self, schedule: Schedule, out: Tensor, tag: int) -> Handle | None:
        comm = self._comm
        if out.device.type != "cpu":  # in line with what the caller's stream computes
            run_schedule(comm, schedule, out, tag=tag, scratch=self._scratch)
            return None
        return self._queued(
            lambda scratch: run_schedule(comm, schedule, out, tag=tag, scratch=scratch),
            f"in the all-reduce of bucket {tag // TAGS_PER_BUCKET}",
        )


def _sum_in_order(roots: Mapping[int, Tensor], spare: Callable[[], Tensor]) -> Tensor:
    if not roots:
        return spare().zero_()
    first, *rest = roots.values()
    for root in rest:
        first.add_(root)
    return first


class _OnTheThread:
    """An exchange in the queue; a failure is raised where its result is waited for."""

    def __init__(self, work: QueuedWork, doing: str) -> None:
        self._work, self._doing = work, doing

    def wait(self) -> None:
        with Waiting(doing=self._doing):
            self._work.wait()  # ends: every message inside the exchange has the group's timeout
