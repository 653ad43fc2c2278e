"""The engine in an elastic job: steps count when the coordinator commits them, and workers that are left go on.

    a step         … READY ─► COMMIT                                                              `commits`
    a death        GENERATION ─► the group is abandoned ─► the step is lost ─► `start_over`:
                   take the strategies apart ─► meet the others ─► open them again ─► committed state, lanes
    a joiner       prepares alone, stands in front of the loop (`join`), and is taken in between two steps, or when the
                   others enter a loop

Where every worker has all of the state (`replicated`) a step's update is made after its commit, so what a worker has is
always right. Elsewhere the update is made first and each worker's part of the state goes to the vault: what was not
committed is undone by reading the step before from there, the parts of the dead among it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from paceline.checkpoint.manifest import size_text
from paceline.checkpoint.tensor_file import DTYPES, code_of
from paceline.checkpoint.tree import flatten, unflatten
from paceline.collectives.communicator import Communicator
from paceline.elastic.decisions import Generation
from paceline.elastic.fault_injection import fault_point
from paceline.elastic.member import Member
from paceline.elastic.state_number import LAST_UPDATE, entered, laid_out, numbered
from paceline.elastic.vault import Vault, VaultState, read
from paceline.engine.host_copies import HostCopies, Offer, on_hosts
from paceline.engine.seal import Seal
from paceline.errors import CheckpointError, PacelineError, PeerLostError, StateLostError
from paceline.world.world import World

RECOVERABLE = (PacelineError, RuntimeError, OSError)
"""What building a group out of workers that may die meanwhile raises."""


class Parts(Protocol):
    """What an engine is made of, as far as it changes with the workers."""

    @property
    def replicated(self) -> bool:
        """Every worker has all of the state."""
        ...

    @property
    def takes_places(self) -> bool:
        """Only the worker that rides a lane knows its place in the data."""
        ...

    def tensors(self) -> dict[str, Any]:
        """This worker's part of the state."""
        ...

    def plain(self) -> dict[str, Any]:
        """What every worker has, and can be told: counts, schedules, settings of groups."""
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

    def dismantle(self, *, lost: bool) -> None:
        """Leave the group that is over; models and optimizers are plain again. May be called again.

        `lost`: somebody is not there any more.
        """
        ...

    def connect(self, world: World) -> Communicator | None: ...

    def assemble(self, world: World, comm: Communicator | None) -> None:
        """Open the strategies for these workers."""
        ...

    def put_plain(self, plain: Mapping[str, Any]) -> None: ...

    def put_tensors(self, tensors: Mapping[str, Any], plain: Mapping[str, Any] | None) -> None:
        """The committed state; of what is not trained, what this worker has or, if it joins, what is in `plain`."""
        ...

    def deal_anew(self, world: World, lanes: Sequence[Any] | None, *, joins: bool) -> None:
        """This worker's lanes, from the committed place on."""
        ...


class Elastic:
    """`seat` is the world that the launcher gave: its rank is the slot."""

    def __init__(self, member: Member, seat: World, parts: Parts, say: Callable[[str], None]) -> None:
        assert seat.elastic is not None
        self.member = member
        self.loop = 0
        self.admitted = not seat.elastic.joins
        self._seat, self._parts, self._say = seat, parts, say
        self._vault = None if seat.elastic.vault is None else Vault(Path(seat.elastic.vault), seat.rank)
        self._across_hosts = seat.hosts > 1 or seat.elastic.across_hosts
        many = self._vault is not None and self._across_hosts
        self._copies = HostCopies(seat, self._vault, seat.elastic.copies) if self._vault and many else None
        self._number = 0  # of the committed state in the vault
        self._writers: tuple[int, ...] = ()  # of it, in rank order
        self._tried = member.now.number
        self._said_what_it_costs = seat.elastic.joins
        self.seal: Seal | None = None
        self.loop_is_over = self.left_early = False  # this worker has joined others that have just left their loop

    # -- committing --------------------------------------------------------------------------------------------------

    @property
    def before_update(self) -> bool:
        return self._parts.replicated

    def enter(self, step: int, facts: Mapping[str, str | int]) -> None:
        """A loop begins: from here on others can go on where this worker ends."""
        if self._copies is not None and not self._copies.met:
            self._meet(self._parts.told(self._copies.offer()))
        number = entered(step, self._number)
        while not (self._kept(number) and self.member.enters(self.loop, step, facts)):
            self.start_over()
            number = entered(step, self._number)
        self._number, self._writers = number, self.member.now.members
        if self.changed:
            self.start_over()

    def commits(self, step: int, update: int, *, check: int) -> bool:
        number = numbered(step, update)
        if not self._kept(number):
            return False
        self._parts.record()
        committed = self.member.commits(step, update, check=check, more=self._parts.more())
        if committed and not self._said_what_it_costs:
            self._say_what_it_costs()
        if committed:
            self._number, self._writers = number, self.member.now.members
        return committed

    def _say_what_it_costs(self) -> None:
        self._said_what_it_costs = True
        if self._vault is None or not self._vault.bytes:
            self._say("paceline: elastic: every worker has all of the state, so no copy of it is kept")
            return
        where = "shared memory" if self._copies is None else "the memory of its host"
        if not self._vault.folder.is_relative_to("/dev/shm"):  # the launcher has said why
            where = f"files in {self._vault.folder}"
        each = size_text(self._vault.bytes)
        others = 0 if self._copies is None else self._copies.count - 1
        more = f" and a copy on {others} more" if others else ""
        self._say(
            f"paceline: elastic: each worker keeps {each} of the state in {where}{more} and writes it in every step"
        )

    def check_part(self, step: int) -> None:
        if self.seal is not None:
            self.seal.check(step)

    @property
    def part(self) -> Sequence[Tensor]:
        return () if self.seal is None else self.seal.part

    def ends_updates(self, step: int) -> None:
        """A step of several updates is over: others may join here, and not between two of them."""
        self.commits(step, LAST_UPDATE, check=0)

    def _keep(self, number: int) -> None:
        parts = self._parts
        if parts.replicated and not parts.takes_places:
            return
        if self._vault is None:
            raise CheckpointError("an elastic job of this kind keeps its state in a vault, and the launcher made none")
        members = self.member.now.members
        tree = {} if parts.replicated else parts.tensors()
        own = self._places() if parts.takes_places else None
        self._vault.write(number, tree, rank=members.index(self.member.slot), size=len(members), own=own)
        if self.seal is not None:
            self.seal.put(number, self._vault.only_here)
        if self._copies is not None:
            self._copies.keep(number)

    def _places(self) -> list[Any]:
        """Whether an update was the step's last only the body knows, by what it does next: both places are kept."""
        done = self._parts.place(step_done=True)
        return [self._parts.place(step_done=False) if self._parts.between_updates else done, done]

    def _kept(self, number: int) -> bool:
        """Whether this worker's part is safe; False: who should have a copy of it is gone, and so is this group."""
        try:
            self._keep(number)
        except PeerLostError:
            if not self._writers:  # as any fault before the first loop
                raise
            return False
        return True

    def _meet(self, offers: Sequence[Offer]) -> None:
        """Where the vaults of the other hosts are, in this generation."""
        if self._copies is not None:
            self._copies.meet(offers, self.member, self._tried)

    # -- changing ----------------------------------------------------------------------------------------------------

    @property
    def now_in(self) -> int:
        """The generation that this worker is in, or is about to be."""
        return self._tried

    @property
    def changed(self) -> bool:
        return self.member.changed

    @property
    def is_main(self) -> bool:
        return self.admitted and self.member.now.main == self.member.slot

    def start_over(self) -> None:
        """Go on with the workers that the coordinator names, from the last committed step."""
        why = "its group is over"
        if self.seal is not None:
            self.seal.forget()
        while True:
            generation = self.member.next_generation(self._tried, why)
            self._tried = generation.number
            try:
                self._regroup(generation)
            except StateLostError as error:
                self.member.lost_state(generation.number, str(error))
                why = str(error)
                continue
            except RECOVERABLE as error:
                why = f"{type(error).__name__}: {error}"
                continue
            self.member.grouped(generation)
            return

    def _regroup(self, generation: Generation) -> None:
        parts, world = self._parts, self._world_of(generation)
        joins = self.member.slot in generation.joining
        if joins:
            fault_point("join", generation.step + 1)
        parted = self._lay_out(generation) if generation.joining and not joins and parts.replicated else None
        parts.dismantle(lost=not generation.includes(self.member.now))
        comm = parts.connect(world)
        if self._copies is not None:
            offers = [self._copies.offer()] if comm is None else comm.gather_json(self._copies.offer())
            world = on_hosts(world, [host for host, _, _ in offers])
            self._meet(offers)
        plain = self._agree(comm, generation, parted) if generation.joining else None
        if joins and plain is not None:
            parts.put_plain(plain)
        parts.assemble(world, comm)
        state = self._read() if joins or parts.takes_places or not parts.replicated else None
        if state is not None and (joins or not parts.replicated):
            parts.put_tensors(state.tree, plain if joins else None)
        if self._copies is not None and state is not None and not joins and self.member.slot in self._writers:
            self._copies.renew(self._number)
        places = None
        if state is not None and parts.takes_places:
            places = [state.own[slot][not parts.between_updates] for slot in self._writers]
        elif joins and plain is not None:
            places = [plain["place"]]
        parts.deal_anew(world, places, joins=joins)
        if comm is not None:
            comm.barrier()
        self.admitted = True
        if joins and plain is not None:
            self.loop_is_over, self.left_early = not plain["in loop"], plain["left early"]

    def _lay_out(self, generation: Generation) -> tuple[int, tuple[int, ...]]:
        """All of the state for those who join, each of the others a part of it."""
        if self._vault is None:
            raise CheckpointError("workers join through a vault, and the launcher made none")
        parts, staying = self._parts, generation.staying
        own = self._places() if parts.takes_places else None
        number, rank = laid_out(self._number), staying.index(self.member.slot)
        self._vault.write(number, parts.tensors(), rank=rank, size=len(staying), own=own)
        return number, staying

    def _agree(
        self, comm: Communicator | None, generation: Generation, parted: tuple[int, tuple[int, ...]] | None
    ) -> dict[str, Any]:
        """What the first of those who stay knows, told to those who join."""
        assert comm is not None
        mine: Any = None
        leaves: dict[str, Any] = {}
        if self.member.slot == generation.staying[0]:
            packed, leaves = flatten({**self._parts.plain(), "place": self._parts.place(step_done=True)})
            tensors = [[path, list(t.shape), code_of(t.dtype, path)] for path, t in leaves.items()]
            number, writers = parted or (self._number, self._writers)
            mine = [number, writers, self.loop, packed, tensors]
        told = comm.gather_json(mine)
        root = next(rank for rank, word in enumerate(told) if word is not None)
        self._number, writers, self.loop, packed, tensors = told[root]
        self._writers = tuple(writers)
        for path, shape, code in tensors:
            if path not in leaves:
                leaves[path] = torch.empty(shape, dtype=DTYPES[code])
            leaves[path] = leaves[path].detach().cpu().contiguous()
            comm.broadcast(leaves[path], root=root).wait()
        plain: dict[str, Any] = unflatten(packed, leaves)
        return plain

    def _read(self) -> VaultState:
        if self._vault is None:
            raise CheckpointError("the state of lost workers is nowhere: this job keeps no copies of it")
        if self._copies is not None:
            return self._copies.read(self._number, self._writers)
        return read(self._vault.folder, self._number, self._writers)

    def _world_of(self, generation: Generation) -> World:
        """This worker's place among the members; all on one host, unless the job has several."""
        rank, size = generation.members.index(self.member.slot), len(generation.members)
        servers = len(generation.servers)
        alone = replace(self._seat, rank=0, size=1, local_rank=0, local_size=1, host_rank=0, hosts=1, servers=servers)
        here = (0, 1) if self._across_hosts else (rank, size)
        return replace(alone, rank=rank, size=size, local_rank=here[0], local_size=here[1])

    def close(self) -> None:
        if self._copies is not None:
            self._copies.close()

    # -- joining -----------------------------------------------------------------------------------------------------

    def join(self, facts: Mapping[str, str | int], *, any_loop: bool = False) -> bool:
        """Stand in front of the loop until the others take this worker in; False: they have left it behind."""
        if self.member.ask_to_join(0 if any_loop else self.loop, facts) is None:
            return False
        self.start_over()
        return True
