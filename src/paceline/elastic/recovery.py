"""A worker's side of an elastic job: committing steps, and recovering when the workers change.

    a step     … READY ─► COMMIT                                                                      `commits`
    a death    GENERATION ─► the group is abandoned ─► the step is lost ─► `recover`:
                 the next generation ─► teardown ─► connect ─► agree with joiners ─► reopen the strategies, assign lanes
                 ─► committed state ─► the loader's share of the data ─► barrier ─► the step runs again
    a joiner   prepares alone, stands in front of the loop (`join`), and is taken in between two steps, or when the
               others enter a loop

Where every worker has all of the state (`replicated`) a step's update is made after its commit, so what a worker has is
always right; only what compression keeps of lanes goes to the in-memory checkpoint. Elsewhere the update is made first
and each worker's part of the state goes there: what was not committed is undone by reading the step before from there,
the parts of the dead among it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from paceline.checkpoint.load import StoredTensor
from paceline.checkpoint.manifest import size_text
from paceline.checkpoint.tensor_file import DTYPES, code_of
from paceline.checkpoint.tree import flatten, unflatten
from paceline.collectives.communicator import Communicator
from paceline.elastic.decisions import LAST_UPDATE, Generation
from paceline.elastic.faults import fault_point
from paceline.elastic.memory_checkpoint.files import (
    MemoryCheckpoint,
    number_at_loop_start,
    number_for_joiners,
    state_number,
)
from paceline.elastic.memory_checkpoint.replication import Offer, OneHost, Replication, on_hosts
from paceline.elastic.memory_checkpoint.shard_checksum import NoShardChecksum
from paceline.elastic.worker_agent import Abandonable, WorkerAgent
from paceline.errors import PacelineError, PeerLostError, StateLostError, WorldError
from paceline.sharding.local_shard import LocalShard
from paceline.world.world import World

RECOVERABLE = (PacelineError, RuntimeError, OSError)
"""What building a group out of workers that may die meanwhile raises."""


Facts = Callable[[], Mapping[str, str | int]]
"""What must be the same in all workers; asked for in elastic jobs only, since it reads all code of the script."""


class Parts(Protocol):
    """What an engine is made of, as far as it changes with the workers."""

    @property
    def replicated(self) -> bool:
        """Every worker has all of the state."""
        ...

    @property
    def takes_places(self) -> bool:
        """Only the worker that a lane is assigned to knows its place in the data."""
        ...

    @property
    def keeps_residuals(self) -> bool:
        """Compression has a state of lanes, which is with one worker alone, also where the rest is replicated."""
        ...

    def tensors(self) -> dict[str, Any]:
        """This worker's part of the state."""
        ...

    def residuals(self) -> dict[str, Any]:
        """Of that what compression keeps."""
        ...

    def plain(self) -> dict[str, Any]:
        """What every worker has, and can be told: counts, schedules, settings of groups."""
        ...

    @property
    def in_loop(self) -> bool:
        """Its training loop is running."""
        ...

    @property
    def between_updates(self) -> bool:
        """The body makes several updates of a step's items: until it has ended it gets them again."""
        ...

    def place(self, *, step_done: bool) -> Any:
        """In the data: when the step that is out is done, or as it begins."""
        ...

    def more(self) -> bool:
        """Whether the loop has another step after the one that is out, as far as can be known."""
        ...

    def record(self) -> None:
        """Write down which samples are in the step that is about to count."""
        ...

    def told(self, value: Any) -> list[Any]:
        """What every worker says, in rank order, between two loops."""
        ...

    def teardown(self, *, lost: bool) -> None:
        """Leave the group that is over; models and optimizers are plain again. May be called again.

        `lost`: a worker is not there any more.
        """
        ...

    def connect(self, world: World) -> Communicator: ...

    def assemble(self, world: World) -> None:
        """Open the strategies for these workers, which assigns the lanes."""
        ...

    def put_plain(self, plain: Mapping[str, Any]) -> None: ...

    def put_residuals(self, tensors: Mapping[str, Any]) -> None: ...

    def put_tensors(self, tensors: Mapping[str, Any], plain: Mapping[str, Any] | None) -> None:
        """The committed state; of what is not trained, what this worker has or, if it joins, what is in `plain`."""
        ...

    def deal_anew(self, world: World, lanes: Sequence[Any] | None, *, joins: bool) -> None:
        """Give the loaders this worker's share of the data, by its lanes, from the committed place on."""
        ...


@dataclass(frozen=True)
class Saved:
    """The state from which workers go on: its number in the in-memory checkpoint, and whose parts it is made of."""

    number: int = 0
    writers: tuple[int, ...] = ()
    """Slots, in rank order."""


class NoRecovery:
    """What a step and its loop ask of the membership, answered for a job that is not elastic: its workers stay."""

    is_elastic = False
    admitted = True  # not a worker that has yet to join the others
    changed = False  # the workers are others than those of this generation
    before_update = True  # a step counts from its start: there is nothing to wait for
    loop = 0
    loop_is_over = left_early = False  # this worker has joined others that have just left their loop
    shard_checksum = NoShardChecksum()

    @property
    def now_in(self) -> int | None:
        """The generation that this worker is in, or is about to be."""
        return None

    @property
    def part(self) -> Sequence[Tensor]:
        """Those tensors of this worker's part of the state that are watched."""
        return ()

    @property
    def about_generation(self) -> Sequence[str]:
        """About the generation that this worker is in, in words: who is in it, and why it began."""
        return ()

    def is_main(self, world: World) -> bool:
        return world.is_main

    def enter(self, step: int, facts: Facts) -> None:
        """A loop begins."""

    def leave(self) -> None:
        """It has ended."""

    def join(self, facts: Facts, *, any_loop: bool = False) -> bool:
        """Become one of the others in front of a loop; False: they are past it."""
        return True

    def commits(self, step: int, update: int, *, check: int) -> bool:
        """Whether the step counts; False: the workers have changed, and it is to be done again."""
        return True

    def ends_updates(self, step: int) -> None:
        """A step of several updates is over."""

    def watch(self, one: Abandonable) -> None:
        """Have it end with the generation."""

    def recover(self) -> None:
        """Go on with the workers that are left."""
        raise NotImplementedError("a job that is not elastic has no other generation")

    def close(self) -> None: ...


class Recovery(NoRecovery):
    """`seat` is the world that the launcher gave: its rank is the slot."""

    is_elastic = True

    def __init__(self, agent: WorkerAgent, seat: World, parts: Parts, say: Callable[[str], None]) -> None:
        assert seat.elastic is not None
        if seat.elastic.memory_folder is None:
            raise WorldError(
                "an elastic job needs a folder that outlives its workers, and PACELINE_MEMORY_FOLDER names none; start "
                "it with `paceline run --elastic`, which sets it"
            )
        self.agent = agent
        self.loop = 0
        self.admitted = not seat.elastic.joins
        self._seat, self._parts, self._say = seat, parts, say
        self._checkpoint = MemoryCheckpoint(Path(seat.elastic.memory_folder), seat.rank)
        across_hosts = seat.hosts > 1 or seat.elastic.across_hosts
        self._replication = (
            Replication(seat, self._checkpoint, seat.elastic.copies) if across_hosts else OneHost(self._checkpoint)
        )
        self._has_connected = False
        self._saved = Saved()
        self._tried = agent.now.number
        self._said_what_it_costs = seat.elastic.joins

    @property
    def now_in(self) -> int:
        return self._tried

    @property
    def changed(self) -> bool:  # type: ignore[override]
        return self.agent.changed

    @property
    def about_generation(self) -> Sequence[str]:
        now = self.agent.now
        who = f"generation {now.number}: workers {', '.join(map(str, now.members))}"
        return (who, now.why) if now.why else (who,)

    def is_main(self, world: World) -> bool:
        return self.admitted and self.agent.now.main == self.agent.slot

    def watch(self, one: Abandonable) -> None:
        """It ends with the generation that this worker is in."""
        self.agent.watch(one, self._tried)

    def close(self) -> None:
        self._replication.close()

    # -- committing --------------------------------------------------------------------------------------------------

    @property
    def before_update(self) -> bool:  # type: ignore[override]
        return self._parts.replicated

    def enter(self, step: int, facts: Facts) -> None:
        """A loop begins: from here on others can go on where this worker ends."""
        known = facts()
        if not self._has_connected:
            self._connect_replicas(self._parts.told)
        number = number_at_loop_start(step, self._saved.number)
        while not (self._keep(number) and self.agent.enters(self.loop, step, known)):
            self.recover()
            number = number_at_loop_start(step, self._saved.number)
        self._saved = Saved(number, self.agent.now.members)
        if self.changed:
            self.recover()

    def leave(self) -> None:
        self.agent.leave(self.loop)

    def commits(self, step: int, update: int, *, check: int) -> bool:
        number = state_number(step, update)
        if not self._keep(number):
            return False
        self._parts.record()
        committed = self.agent.commits(step, update, check=check, more=self._parts.more())
        if committed:
            self._saved = Saved(number, self.agent.now.members)
            self._say_what_it_costs()
        return committed

    def ends_updates(self, step: int) -> None:
        """A step of several updates is over: others may join here, and not between two of them."""
        self.commits(step, LAST_UPDATE, check=0)

    @property
    def part(self) -> Sequence[Tensor]:
        return self.shard_checksum.part

    def _keep(self, number: int) -> bool:
        """Whether this worker's part is safe; False: who should have a copy of it is gone, and so is this group."""
        parts, members = self._parts, self.agent.now.members
        if parts.replicated and not (parts.takes_places or parts.keeps_residuals):
            return True
        try:
            kept_alone = parts.residuals() if parts.keeps_residuals else {}
            tree = kept_alone if parts.replicated else parts.tensors()
            rank, own = members.index(self.agent.slot), self._places()
            self._checkpoint.write(number, tree, rank=rank, size=len(members), own=own)
            self.shard_checksum.take(number, self._checkpoint.only_here)
            self._replication.keep(number)
        except PeerLostError:
            if not self._saved.writers:  # as any fault before the first loop
                raise
            return False
        return True

    def _places(self) -> list[Any] | None:
        """Whether an update was the step's last only the body knows, by what it does next: both places are kept."""
        if not self._parts.takes_places:
            return None
        done = self._parts.place(step_done=True)
        return [self._parts.place(step_done=False) if self._parts.between_updates else done, done]

    def _say_what_it_costs(self) -> None:
        if self._said_what_it_costs:
            return
        self._said_what_it_costs = True
        if not self._checkpoint.bytes:
            self._say("paceline: elastic: every worker has all of the state, so no copy of it is kept")
            return
        where = "the memory of its host" if self._replication.across_hosts else "shared memory"
        if not self._checkpoint.folder.is_relative_to("/dev/shm"):  # the launcher has said why
            where = f"files in {self._checkpoint.folder}"
        each, others = size_text(self._checkpoint.bytes), self._replication.copies
        more = f" and a copy on {others} more" if others else ""
        self._say(
            f"paceline: elastic: each worker keeps {each} of the state in {where}{more} and writes it in every step"
        )

    # -- recovering --------------------------------------------------------------------------------------------------

    def recover(self) -> None:
        """Go on with the workers that the coordinator names, from the last committed step."""
        why = "its group is over"
        self.shard_checksum.forget()
        while True:
            generation = self.agent.next_generation(self._tried, why)
            self._tried = generation.number
            try:
                self._regroup(generation)
            except StateLostError as error:
                self.agent.lost_state(generation.number, str(error))
                why = str(error)
            except RECOVERABLE as error:  # another worker is lost: the coordinator names those that are left
                why = f"{type(error).__name__}: {error}"
            else:
                self.agent.grouped(generation)
                return

    def _regroup(self, generation: Generation) -> None:
        """This worker's place among the members of a generation, from teardown to where the step runs again."""
        parts, world = self._parts, self._world_of(generation)
        joins = self.agent.slot in generation.joining
        if joins:
            fault_point("join", generation.step + 1)
        # Before teardown, collect the state that joining workers get: the strategies can still locate it.
        lays_out = bool(generation.joining) and not joins and parts.replicated
        laid_out = parts.tensors() if lays_out else {}
        parts.teardown(lost=not generation.includes(self.agent.now))

        # Connect, agree with joiners on the state to go on from, and reopen the strategies.
        comm = parts.connect(world)
        hosts = self._connect_replicas(comm.gather_json)
        world = on_hosts(world, hosts) if hosts else world
        saved = self._lay_out(generation, laid_out) if lays_out else self._saved
        told = self._agree(comm, generation, saved) if generation.joining else {}
        if joins:
            parts.put_plain(told)
        parts.assemble(world)

        # The committed state and this worker's share of the data; no worker begins the step before all are there.
        places = [told["place"]] if joins else None
        if joins or parts.takes_places or parts.keeps_residuals or not parts.replicated:
            number, writers = self._saved.number, self._saved.writers
            state = self._replication.read(number, writers)
            if joins or not parts.replicated:
                parts.put_tensors(state.tree, told if joins else None)
            elif parts.keeps_residuals:
                parts.put_residuals(state.tree)
            if not joins and self.agent.slot in writers:
                self._replication.renew(number)
            if parts.takes_places:
                places = [state.own[slot][not parts.between_updates] for slot in writers]
        parts.deal_anew(world, places, joins=joins)
        comm.barrier()
        self.admitted = True
        if joins:
            self.loop_is_over, self.left_early = not told["in loop"], told["left early"]

    def _world_of(self, generation: Generation) -> World:
        """This worker's place among the members: on one host, until the hosts of a job that has several are told."""
        rank, size = generation.members.index(self.agent.slot), len(generation.members)
        local = (0, 1) if self._replication.across_hosts else (rank, size)
        return replace(
            self._seat,
            rank=rank,
            size=size,
            local_rank=local[0],
            local_size=local[1],
            host_rank=0,
            hosts=1,
            servers=len(generation.servers),
        )

    def _lay_out(self, generation: Generation, tensors: dict[str, Any]) -> Saved:
        """All of the state for those who join, each of the others a part of it: `tensors`, and what a lost worker alone
        had from the in-memory checkpoint."""
        staying = generation.staying
        number, rank = number_for_joiners(self._saved.number), staying.index(self.agent.slot)
        if self._parts.keeps_residuals and self._saved.writers:
            committed = self._replication.read(self._saved.number, self._saved.writers).tree["compression"]
            tensors = {**tensors, "compression": _share_of(committed, rank, len(staying))}
        self._checkpoint.write(number, tensors, rank=rank, size=len(staying), own=self._places())
        return Saved(number, staying)

    def _connect_replicas(self, tell: Callable[[Offer], Sequence[Offer]]) -> list[int]:
        """Where the in-memory checkpoints of the other hosts are, in this generation; the host of each worker."""
        hosts = self._replication.connect(tell, self.agent, self._tried)
        self._has_connected = True
        return hosts

    def _agree(self, comm: Communicator, generation: Generation, saved: Saved) -> dict[str, Any]:
        """What the first of those who stay knows, told to those who join."""
        mine: Any = None
        leaves: dict[str, Any] = {}
        if self.agent.slot == generation.staying[0]:
            packed, leaves = flatten({**self._parts.plain(), "place": self._parts.place(step_done=True)})
            tensors = [[path, list(t.shape), code_of(t.dtype, path)] for path, t in leaves.items()]
            mine = [saved.number, saved.writers, self.loop, packed, tensors]
        words = comm.gather_json([mine, self.agent.slot in generation.staying and self._parts.in_loop])
        root = next(rank for rank, (word, _) in enumerate(words) if word is not None)
        number, writers, self.loop, packed, tensors = words[root][0]
        self._saved = Saved(number, tuple(writers))
        for path, shape, code in tensors:
            if path not in leaves:
                leaves[path] = torch.empty(shape, dtype=DTYPES[code])
            leaves[path] = leaves[path].detach().cpu().contiguous()
            comm.broadcast(leaves[path], root=root).wait()
        told: dict[str, Any] = unflatten(packed, leaves)
        # One that an exception is about to end has left its loop by then; the others go on in theirs.
        told["in loop"] = any(in_loop for _, in_loop in words)
        return told

    # -- joining -----------------------------------------------------------------------------------------------------

    def join(self, facts: Facts, *, any_loop: bool = False) -> bool:
        """Stand in front of the loop until the others take this worker in; False: they have left it behind."""
        if self.agent.ask_to_join(0 if any_loop else self.loop, facts()) is None:
            return False
        self.recover()
        return True


def _share_of(tree: Any, rank: int, size: int) -> Any:
    """One part of every tensor of a stored tree, for one of so many workers."""
    if isinstance(tree, StoredTensor):
        elements = tree.stored.elements
        start, stop = rank * elements // size, (rank + 1) * elements // size
        return LocalShard.of(tree.shape, tree.dtype, [(start, tree.part(start, stop))] if start < stop else [])
    return {name: _share_of(value, rank, size) for name, value in tree.items()}
