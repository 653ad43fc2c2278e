"""How tensors move between workers: one group of processes, seen as messages and a few native collectives.

A thin shell over a c10d process group that belongs to us alone (never the global default group), so that a user's own
`torch.distributed` calls and ours can't get into each other's order. Every wait ends: c10d enforces `timeout_s`, and
what it reports becomes a `PeerLostError` that says which worker was waited for and what it last said about itself.

In an elastic job a group may be *abandoned*, by any thread: what waits in it ends at once, and it and all that is asked
of it from then on says `GenerationEnded`. Buffers of what was under way are free when its `wait` has ended.

Whatever is started hands back a `Work`, also where it could not be started: a failure is said by its `wait`, or by its
`ended`, which only records that the group is over. So what torch calls (hooks, saved tensors) may start things and go
on; the loop raises what became of them. Where a wait may last although its end is known from elsewhere, it is made of
short ones with a look in between: at the peers' notes, or whether the group is over. gloo's wait for a message can't be
made of short ones (one that times out closes the group), so another thread has it.

A job of one worker has a communicator too, `SingleWorker`, so that no caller has to ask whether there is one.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.collectives.byte_count import NOTHING, Flow, Traffic
from paceline.collectives.canonical_sum import Scatter, SumPlan
from paceline.collectives.process_groups import (
    GivenUpError,
    OpenSockets,
    build_groups,
    first_line,
    in_time,
    interrupt,
    shut_down,
)
from paceline.collectives.shared_memory.barrier import DIFFERENT_CALLS
from paceline.errors import GenerationEnded, PacelineError, PeerLostError, WorldError
from paceline.torch_compat import HashStore, PrefixStore, Store, started_as_one
from paceline.world.waiting import Waiting, waiting_call
from paceline.world.world import World

# -- something under way -----------------------------------------------------------------------------------------------


LOOK_UP_EVERY_S = 0.1
LONGER_S = 5.0
"""What a wait on another thread is given beyond its own timeout."""


class Handle(Protocol):
    """Something under way that can be waited for."""

    def wait(self) -> None: ...


class Work:
    """Something under way in c10d whose failure names the peer."""

    def __init__(self, work: Any, owner: Communicator, doing: str) -> None:
        self._work, self._owner, self._doing = work, owner, doing
        self.looks_up = False  # while it waits: whether its group is over
        self.is_gloo_message = False  # of a group that may be abandoned
        self.source: int | None = None  # of a message whose sender needs nothing of others for it: waits are counted
        self.keeps: Work | None = None  # another that has to live as long
        self.when_done: Callable[[], None] | None = None
        self._done = False  # gloo forgets a message that was waited for, and would wait for another

    def wait(self, timeout_s: float | None = None, *, vote: int | None = None, look_every_s: float = 0.5) -> None:
        """`timeout_s`: another one than the group's. `vote`: it is that step vote (see `wait_for_vote`)."""
        if not self._done:
            begun = time.perf_counter()
            try:
                with Waiting(doing=self._doing):
                    self._wait_in_c10d(timeout_s, vote, look_every_s)
            except (RuntimeError, TimeoutError, WorldError) as error:  # WorldError: the store knows of a new generation
                raise self._owner.lost(error, self._doing) from error
            self._done = True
            if self.source is not None and not self.is_gloo_message:
                self._owner.count_wait(self.source, time.perf_counter() - begun)
        if self.when_done is not None:
            self.when_done()
            self.when_done = None

    def ended(self, timeout_s: float | None = None) -> bool:
        """Wait for it; False: its group is over. Whoever has no caller to raise it to records that."""
        try:
            self.wait(timeout_s)
        except GenerationEnded:
            return False
        return True

    def wait_for_vote(self, vote: int, look_every_s: float = 0.5) -> None:
        """Wait for step vote number `vote`, and look at the peers' notes while it takes long."""
        self.wait(vote=vote, look_every_s=look_every_s)

    def _wait_in_c10d(self, timeout_s: float | None, vote: int | None, look_every_s: float) -> None:
        if timeout_s is not None:
            self._work.wait(timedelta(seconds=timeout_s))
        elif self.is_gloo_message:
            _wait_for_messages([self])
        elif self.looks_up or vote is not None:
            self._wait_and_look_up(vote, look_every_s)
        else:
            self._work.wait()

    def _wait_and_look_up(self, vote: int | None, look_every_s: float) -> None:
        """In a group that is over gloo was seen to wait on, once in a while, for connections that are shut down."""
        begun = looked_at = time.monotonic()
        while not self._work.is_completed():
            try:
                self._work.wait(timedelta(seconds=LOOK_UP_EVERY_S))
            except RuntimeError as error:
                now = time.monotonic()
                if self._work.is_completed():  # just now, well or not: the short wait's timeout says nothing about it
                    break
                if self._owner.is_quiet:
                    raise GivenUpError("its group is over") from error
                if now - begun > self._owner.timeout_s:
                    raise
                if vote is not None and now - looked_at >= look_every_s:
                    looked_at = now
                    self._owner.raise_if_left(vote)
        self._work.wait()


class _NotStarted:
    """In place of c10d's work, where its group could not start it."""

    def __init__(self, why: str) -> None:
        self._why = why

    def is_completed(self) -> bool:
        return True

    def wait(self, timeout: timedelta | None = None) -> None:
        raise GivenUpError(self._why)


class Done(Work):
    """Something that was over as soon as it began: what a worker without peers waits for."""

    def __init__(self) -> None:
        self.is_gloo_message = False

    def wait(self, timeout_s: float | None = None, *, vote: int | None = None, look_every_s: float = 0.5) -> None:
        """At once."""


def wait_all(works: Sequence[Work]) -> None:
    """If the group ends: until none of them touches its buffers any more."""
    messages = [work for work in works if work.is_gloo_message and not work._done]
    if len(messages) > 1:  # lent to the other thread once
        try:
            with Waiting(doing=messages[0]._doing):
                _wait_for_messages(messages)
        except (RuntimeError, TimeoutError, WorldError) as error:
            late = next((work for work in messages if not work._done), messages[-1])
            failure = late._owner.lost(error, late._doing)
            if not late._owner.is_over:
                raise failure from error
    for over in [work for work in works if not work.ended()]:
        over.wait()


def _wait_for_messages(works: Sequence[Work]) -> None:
    """All of one group. It is told how long: by itself gloo waits as long as for the peers when it built the group."""
    owner = works[0]._owner
    if owner.is_quiet:
        raise GivenUpError("its group is over")

    def wait() -> None:
        for work in works:
            begun = time.perf_counter()
            work._work.wait(timedelta(seconds=owner.timeout_s))
            work._done = True
            if work.source is not None:
                owner.count_wait(work.source, time.perf_counter() - begun)

    in_time(wait, owner.timeout_s + LONGER_S, works[0]._doing, given_up=lambda: owner.is_quiet)


# -- what has moved ----------------------------------------------------------------------------------------------------


class ByteCount:
    """Where a communicator's threads count what byte_count.py tells: a send when the backend is given it, a receive
    when it has arrived."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sent: dict[tuple[str, int], Flow] = {}
        self._received: dict[tuple[str, int], Flow] = {}
        self._native: Counter[str] = Counter()
        self._waited: dict[int, float] = {}

    def sent(self, operation: str, to: int, nbytes: int) -> None:
        self._add(self._sent, operation, to, nbytes)

    def received(self, operation: str, source: int, nbytes: int) -> None:
        self._add(self._received, operation, source, nbytes)

    def called(self, collective: str) -> None:
        with self._lock:
            self._native[collective] += 1

    def waited(self, source: int, seconds: float) -> None:
        with self._lock:
            self._waited[source] = self._waited.get(source, 0.0) + seconds

    def waits(self) -> dict[int, float]:
        with self._lock:
            return dict(self._waited)

    def snapshot(self) -> Traffic:
        with self._lock:
            return Traffic(dict(self._sent), dict(self._received), dict(self._native))

    def of_group(self, ranks: Sequence[int]) -> ByteCount:
        """The same count, for a group of some of the ranks, in which they have other numbers."""
        return _GroupCount(self, ranks)

    def _add(self, flows: dict[tuple[str, int], Flow], operation: str, peer: int, nbytes: int) -> None:
        with self._lock:
            had = flows.get((operation, peer), NOTHING)
            flows[operation, peer] = Flow(had.bytes + nbytes, had.messages + 1)


class _GroupCount(ByteCount):
    def __init__(self, count: ByteCount, ranks: Sequence[int]) -> None:
        super().__init__()
        self._of, self._ranks = count, ranks

    def sent(self, operation: str, to: int, nbytes: int) -> None:
        self._of.sent(operation, self._ranks[to], nbytes)

    def received(self, operation: str, source: int, nbytes: int) -> None:
        self._of.received(operation, self._ranks[source], nbytes)

    def called(self, collective: str) -> None:
        self._of.called(collective)

    def waited(self, source: int, seconds: float) -> None:
        self._of.waited(self._ranks[source], seconds)

    def waits(self) -> dict[int, float]:
        return self._of.waits()

    def snapshot(self) -> Traffic:
        return self._of.snapshot()

    def of_group(self, ranks: Sequence[int]) -> ByteCount:
        return self._of.of_group([self._ranks[rank] for rank in ranks])


# -- the workers of one world ------------------------------------------------------------------------------------------


LAST_BREATH_S = 0.02
LEAVE_IN_S = 0.5
QUIET_S = 1.0
"""After so long in a group that is over no wait for a message goes on, though gloo has not closed all of it."""


class Communicator:
    """The workers of one world. All ranks call collectives in the same order; messages are matched by tag."""

    def __init__(
        self, groups: Mapping[str, Any], store: Store, world: World, *, backend: str, timeout_s: float
    ) -> None:
        self._groups = groups  # by kind of device: NCCL moves CUDA tensors only, so votes and checks go through gloo
        self._store = store
        self._world = world
        self.backend = backend
        self.rank = world.rank
        self.size = world.size
        self.timeout_s = timeout_s
        self._count = ByteCount()
        self._device = torch.device("cpu")
        self._explain: Callable[[], str | None] = lambda: None
        self._elastic = world.is_elastic
        self._sockets = OpenSockets()
        self.is_over = False
        self._ended: str | None = None
        self._gives_up = False
        self._ended_at = 0.0
        self._parent: Communicator | None = None
        self._children: list[Communicator] = []

    @property
    def world(self) -> World:
        return self._world

    @property
    def groups(self) -> Mapping[str, Any]:
        """Groups of c10d, by kind of device."""
        return self._groups

    @property
    def kernels(self) -> str | None:
        """What adds up in shared memory, "c" or "torch", with the same bits; None where memory is not shared."""
        kernels: str | None = self._groups["cpu"].kernels if self.backend == "paceline" else None
        return kernels

    @property
    def traffic(self) -> Traffic:
        """What this rank has sent and received so far."""
        return self._count.snapshot()

    @property
    def waits(self) -> dict[int, float]:
        """By rank: the seconds that its own gradients were waited for, so far, where they come as messages."""
        return self._count.waits()

    def count_wait(self, source: int, seconds: float) -> None:
        self._count.waited(source, seconds)

    @classmethod
    def connect(
        cls, world: World, store: Store, *, backend: str, device: torch.device, timeout_s: float
    ) -> Communicator:
        groups, sockets = build_groups(world, store, backend, device, timeout_s)
        comm = cls(groups, PrefixStore("paceline/notes", store), world, backend=backend, timeout_s=timeout_s)
        comm._device, comm._sockets = device, sockets
        return comm

    # -- the end of a group that others have left ------------------------------------------------------------------

    def give_up(self) -> None:
        """This worker leaves the job with an error: what it has to end ends without waiting for others."""
        self._gives_up = True

    @property
    def gives_up(self) -> bool:
        return self._gives_up or (self._parent is not None and self._parent.gives_up)

    @property
    def is_quiet(self) -> bool:
        """It is over, and nothing of what was under way touches its buffers any more."""
        if self._ended is None:
            return False
        return self._sockets.are_closed or time.monotonic() - self._ended_at > QUIET_S

    def abandon(self, why: str) -> None:
        """End every wait in this group and in those that were made beside it; any thread may say so, again and again.

        What was under way is closed by `close`, which the thread that waited calls.
        """
        if self._ended is not None:
            return
        self._ended, self._ended_at, self.is_over = why, time.monotonic(), True
        for child in list(self._children):
            child.abandon(why)
        for group in self._groups.values():
            interrupt(group)
        self._sockets.shut_down()

    def counts_with(self, other: Communicator, ranks: Sequence[int] | None = None) -> None:
        """From now on what is sent here is counted there, and this group ends with that one.

        `ranks` are those there of the ranks here.
        """
        self._parent = other
        other._children.append(self)
        if other._ended is not None:
            self.abandon(other._ended)
        self._count = other._count if ranks is None else other._count.of_group(ranks)

    def explain_losses(self, explain: Callable[[], str | None]) -> None:
        """`explain` hears of lost peers in another way, and can tell more than this group."""
        self._explain = explain

    def reconnect(self, world: World, store: Store) -> None:
        """Go on as this world, of those that are left; what is under way is given up."""
        old = self._groups
        self._groups, self._sockets = build_groups(world, store, self.backend, self._device, self.timeout_s)
        self._store, self._world = PrefixStore("paceline/notes", store), world
        self.rank, self.size = world.rank, world.size
        shut_down(old)

    # -- messages ------------------------------------------------------------------------------------------------

    def send(self, tensor: Tensor, *, to: int, tag: int, operation: str = "message") -> Work:
        self._count.sent(operation, to, tensor.nbytes)  # before it can arrive: who has it may ask what was sent
        work = self._started(lambda: self._group_of(tensor).send([tensor], to, tag), f"sending to worker {to}")
        work.is_gloo_message = self._by_gloo(tensor)
        return work

    def receive(self, tensor: Tensor, *, source: int, tag: int, operation: str = "message") -> Work:
        work = self._started(lambda: self._group_of(tensor).recv([tensor], source, tag), f"waiting for worker {source}")
        work.is_gloo_message = self._by_gloo(tensor)
        work.when_done = lambda: self._count.received(operation, source, tensor.nbytes)
        return work

    def _by_gloo(self, tensor: Tensor) -> bool:
        """Whether a message of this tensor goes through gloo in a group that may be abandoned."""
        return self._elastic and tensor.device.type == "cpu" and self.backend != "paceline"

    def send_and_receive(
        self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]], *, operation: str
    ) -> list[Work]:
        """Tensors to and from peers, started as one group so that no order between them can block; sends first."""
        (device,) = {tensor.device for tensor, _ in (*sends, *receives)}
        group = self._groups[device.type]

        def start() -> None:
            for tensor, to in sends:
                group.send([tensor], to, 0)
            for tensor, source in receives:
                group.recv([tensor], source, 0)

        peers = sorted({peer for _, peer in (*sends, *receives)})
        work = self._started(lambda: started_as_one(group, device, start), f"exchanging with workers {peers}")
        for tensor, to in sends:
            self._count.sent(operation, to, tensor.nbytes)

        def count_received() -> None:
            for tensor, source in receives:
                self._count.received(operation, source, tensor.nbytes)

        work.when_done = count_received
        return [work] * (len(sends) + len(receives))

    def sends(self, device: torch.device) -> bool:
        """Whether messages take this device's tensors: gloo's are for the host's."""
        return device.type == "cpu" or self.backend == "nccl"

    def batches(self, device: torch.device) -> bool:
        """Whether messages between two ranks run in line, so that those of one moment must start as a group."""
        return device.type != "cpu" and self.backend == "nccl"

    # -- tensors that are read where they lie ---------------------------------------------------------------------

    def shared(self, elements: int, dtype: torch.dtype) -> Tensor | None:
        """Memory that all ranks can read, if there is such; all of them ask for the same, in the same order."""
        if self.backend != "paceline":
            return None
        tensor: Tensor = self._groups["cpu"].allocate(elements, dtype)
        return tensor

    def common(self, bytes_wanted: int) -> Tensor | None:
        """Bytes that exist once for all ranks, if memory can be shared; all of them ask for the same together."""
        if self.backend != "paceline":
            return None
        memory: Tensor = self._groups["cpu"].common(bytes_wanted)
        return memory

    def number_of(self, tensor: Tensor) -> int | None:
        """The place of a flat tensor in shared memory; telling it to a peer is sending the tensor without a copy."""
        number: int | None = self._groups["cpu"].number_of(tensor) if self.backend == "paceline" else None
        return number

    def there(self, rank: int, number: int, elements: int, dtype: torch.dtype) -> Tensor:
        """What `rank` named by that number."""
        tensor: Tensor = self._groups["cpu"].there(rank, number, elements, dtype)
        return tensor

    # -- native collectives --------------------------------------------------------------------------------------

    def all_reduce(self, tensor: Tensor, doing: str = "in an all-reduce") -> Work:
        """Native sum, in whatever order the backend likes: the bits depend on the size and the number of workers."""
        return self._native("all_reduce", lambda: self._group_of(tensor).allreduce([tensor]), doing)

    def all_gather(self, tensor: Tensor, doing: str = "in an all-gather") -> tuple[Tensor, Work]:
        """Equal-sized tensors of all workers, as rows."""
        flat = tensor.contiguous().view(-1)
        out = torch.empty((self.size, flat.numel()), dtype=flat.dtype, device=flat.device)
        group = self._group_of(flat)
        return out, self._native("all_gather", lambda: group._allgather_base(out.view(-1), flat), doing)

    def all_to_all(self, out: Tensor, sent: Tensor, received_counts: list[int], sent_counts: list[int]) -> Work:
        group = self._group_of(out)
        return self._native(
            "all_to_all", lambda: group.alltoall_base(out, sent, received_counts, sent_counts), "in an all-to-all"
        )

    @property
    def sums_buckets(self) -> bool:
        """Whether the backend adds buckets along the canonical tree by itself."""
        return self.backend == "paceline"

    def sum_bucket(
        self, bucket_set: int, bucket: int, plan: SumPlan, roots: Mapping[int, Tensor], like: Tensor
    ) -> tuple[list[Tensor], Work]:
        """Start the canonical sum of all workers' roots; the list gets the total."""
        group, total = self._groups["cpu"], list[Tensor]()
        given = (bucket_set, bucket, plan, roots, like.numel(), like.dtype)
        return total, self._native(
            "sum_bucket", lambda: group.sum_bucket(total, *given), f"in the sum of bucket {bucket}"
        )

    def scatter_bucket(self, bucket_set: int, scatter: Scatter) -> Work:
        """Start the canonical reduce-scatter of a bucket."""
        group = self._groups["cpu"]
        return self._native(
            "scatter_bucket",
            lambda: group.scatter_bucket(bucket_set, scatter),
            f"in the reduce-scatter of bucket {scatter.bucket}",
        )

    def bucket_buffer(self, bucket_set: int, bucket: int, elements: int, dtype: torch.dtype) -> Tensor | None:
        """Where this worker's root of the bucket is best made, if the backend adds it up where it lies."""
        if self.backend != "paceline":
            return None
        group, room = self._groups["cpu"], list[Tensor]()
        given = (bucket_set, bucket, elements, dtype)
        self._started(lambda: group.bucket_buffer(room, *given), "making room for a bucket").wait()
        return room[0]

    def forget_buckets(self, bucket_set: int) -> None:
        if self.backend == "paceline":
            self._groups["cpu"].forget_buckets(bucket_set)

    def broadcast(self, tensor: Tensor, *, root: int) -> Work:
        options = dist.BroadcastOptions()
        options.rootRank = root
        group = self._group_of(tensor)
        return self._native("broadcast", lambda: group.broadcast([tensor], options), f"waiting for worker {root}")

    def barrier(self) -> None:
        _, handle = self.all_gather(torch.zeros(1, dtype=torch.uint8))
        handle.wait()

    def gather_json(self, value: Any) -> list[Any]:
        """Every worker's value, in rank order. For start-up and checks; not for the hot path."""
        payload = json.dumps(value).encode()
        lengths, handle = self.all_gather(torch.tensor([len(payload)], dtype=torch.int64))
        handle.wait()
        longest = int(lengths.max())
        padded = torch.zeros(max(1, longest), dtype=torch.uint8)
        padded[: len(payload)] = torch.frombuffer(bytearray(payload or b"\0"), dtype=torch.uint8)[: len(payload)]
        rows, handle = self.all_gather(padded)
        handle.wait()
        sizes = lengths.view(-1).tolist()
        return [json.loads(bytes(rows[rank, : sizes[rank]].tolist())) for rank in range(self.size)]

    # -- notes: what a worker says about itself when it can no longer take part -----------------------------------

    def leave_note(self, text: str, *, votes: int) -> None:
        """Tell peers that wait for us why we won't come; `votes` says how many step votes we did take part in."""
        with contextlib.suppress(RuntimeError, OSError, WorldError):  # the store may have died with a peer
            self._store.set(f"left/{self.rank}", f"{votes} {text}")

    def take_back_note(self) -> None:
        self._store.delete_key(f"left/{self.rank}")

    def notes(self) -> dict[int, tuple[int, str]]:
        """Per worker that has left: the step votes it took part in, and its words."""
        found: dict[int, tuple[int, str]] = {}
        for rank in range(self.size):
            if rank != self.rank and self._store.check([f"left/{rank}"]):
                votes, _, text = self._store.get(f"left/{rank}").decode().partition(" ")
                found[rank] = int(votes), text
        return found

    def told_by_who_left(self) -> str | None:
        """The words of a worker that has left, if one has."""
        try:
            notes = self.notes()
        except (RuntimeError, OSError, WorldError):  # the store may have died with the peer that served it
            return None
        told = (f"worker {self.rank} waited for worker {rank}, but {note}" for rank, (_, note) in notes.items())
        return next(told, None)

    def raise_if_left(self, vote: int) -> None:
        """Raise if a worker has left before step vote number `vote`; one that left after it has sent its own."""
        if self._ended is not None:
            raise GenerationEnded(self._ended)
        for rank, (votes, note) in self.notes().items():
            if votes <= vote and self._elastic:
                raise GenerationEnded(note)
            if votes <= vote:
                raise PeerLostError(self._explain() or f"worker {self.rank} waited for worker {rank}, but {note}")

    def close(self) -> None:
        if self._parent is not None and self in self._parent._children:
            self._parent._children.remove(self)
        shut_down(self._groups)
        # gloo's destructor joins its threads while it holds the interpreter lock, and a thread may still want the lock
        # to drop its last collective: let it have it first.
        time.sleep(LAST_BREATH_S)
        if self._ended is None:
            self._groups = {}
            return
        last: list[Mapping[str, Any]] = [self._groups]
        self._groups = {}
        with contextlib.suppress(TimeoutError):
            in_time(last.clear, LEAVE_IN_S, "leaving a group")

    def _group_of(self, tensor: Tensor) -> Any:
        return self._groups[tensor.device.type]

    def _native(self, name: str, start: Callable[[], Any], doing: str) -> Work:
        self._count.called(name)
        work = self._started(start, doing)
        work.looks_up = self._elastic and self.backend == "gloo"
        return work

    def _started(self, start: Callable[[], Any], doing: str) -> Work:
        if self._ended is not None:
            return Work(_NotStarted(self._ended), self, doing)
        try:
            work = start()
        except (RuntimeError, WorldError) as error:
            self.lost(error, doing)  # in an elastic job the group is over from here on
            work = _NotStarted(first_line(error))
        return Work(work, self, doing)

    def lost(self, error: Exception, doing: str) -> PacelineError:
        """What an error of c10d means: who was waited for, or in an elastic job that the group has ended."""
        if self._elastic:
            oldest = self
            while oldest._parent is not None:
                oldest = oldest._parent
            oldest.abandon(f"worker {self.rank} lost its peers {doing}: {first_line(error)}")
            return GenerationEnded(self._ended or "the group has ended")
        told = self._explain() or self.told_by_who_left()
        if told is not None:
            return PeerLostError(told)
        text = f"worker {self.rank} lost its peers {doing}: {first_line(error)}"
        if DIFFERENT_CALLS in text:
            call, place = waiting_call(sys._getframe(1))
            text += f". Worker {self.rank} was in {call}{f' ({place})' if place else ''}: do all workers call that?"
        return PeerLostError(text)


# -- a job of one worker -----------------------------------------------------------------------------------------------


class SingleWorker(Communicator):
    """The communicator of a worker without peers: its collectives are the identity, and nothing travels.

    It never ends, so a job that shrinks to one worker has no group to abandon; what changes the membership is noticed
    elsewhere (`elastic/`). Messages need a peer and are refused.
    """

    def __init__(self, world: World | None = None) -> None:
        super().__init__({}, HashStore(), world or World(), backend="single", timeout_s=math.inf)
        self.rank, self.size = 0, 1

    @property
    def groups(self) -> Mapping[str, Any]:
        """None are built for one worker."""
        return {}

    def abandon(self, why: str) -> None:
        """Nothing waits here."""

    def counts_with(self, other: Communicator, ranks: Sequence[int] | None = None) -> None:
        """Nothing is sent here, and nothing has to end with the other group."""

    def reconnect(self, world: World, store: Store) -> None:
        raise WorldError(f"worker {self.rank} is alone and can't go on as one of {world.size} workers")

    def send(self, tensor: Tensor, *, to: int, tag: int, operation: str = "message") -> Work:
        raise WorldError(f"worker {self.rank} is alone: there is no worker {to} to send to")

    def receive(self, tensor: Tensor, *, source: int, tag: int, operation: str = "message") -> Work:
        raise WorldError(f"worker {self.rank} is alone: there is no worker {source} to receive from")

    def send_and_receive(
        self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]], *, operation: str
    ) -> list[Work]:
        for _, peer in (*sends, *receives):
            raise WorldError(f"worker {self.rank} is alone: there is no worker {peer} to exchange with")
        return []

    def all_reduce(self, tensor: Tensor, doing: str = "") -> Work:
        return Done()

    def all_gather(self, tensor: Tensor, doing: str = "") -> tuple[Tensor, Work]:
        """In memory of its own, as in a larger group."""
        return tensor.detach().reshape(1, -1).clone(), Done()

    def all_to_all(self, out: Tensor, sent: Tensor, received_counts: list[int], sent_counts: list[int]) -> Work:
        out.copy_(sent)
        return Done()

    @property
    def kernels(self) -> str | None:
        """Nothing is shared."""
        return None

    @property
    def sums_buckets(self) -> bool:
        """It does, on any device: all merges of the tree were local."""
        return True

    def sum_bucket(
        self, bucket_set: int, bucket: int, plan: SumPlan, roots: Mapping[int, Tensor], like: Tensor
    ) -> tuple[list[Tensor], Work]:
        return list(roots.values()), Done()

    def scatter_bucket(self, bucket_set: int, scatter: Scatter) -> Work:
        ((start, stop),) = scatter.ranges
        if start < stop:
            scatter.finish({}, scatter.outs(), start, stop)
        return Done()

    def broadcast(self, tensor: Tensor, *, root: int) -> Work:
        return Done()

    def barrier(self) -> None:
        """All are here."""

    def gather_json(self, value: Any) -> list[Any]:
        return [value]

    def leave_note(self, text: str, *, votes: int) -> None:
        """No peer would read it."""

    def take_back_note(self) -> None:
        """None was left."""

    def notes(self) -> dict[int, tuple[int, str]]:
        return {}

    def told_by_who_left(self) -> str | None:
        return None

    def raise_if_left(self, vote: int) -> None:
        """There is no peer that could have left."""

    def close(self) -> None:
        """Nothing is open."""
