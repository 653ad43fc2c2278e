"""A job with servers whose processes die and are replaced, without the launcher and the engine of real ones.

    generation 1    workers 0 1 2   servers 3       … step 4 is in the memory checkpoint ── step 5: worker 1 dies
    generation 2    workers 0 2     servers 3       torn down, opened again,step 4 put back ── steps 5 to 8

There is no coordinator here: a file says that a generation is over, and what all of its workers have in the memory
checkpoint is the step to go on from.
"""

from __future__ import annotations

import hashlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch._C._distributed_c10d import FileStore, PrefixStore, Store

from paceline.checkpoint.load import full_tree
from paceline.collectives.communicator import Communicator, SingleWorker
from paceline.elastic.memory_checkpoint.files import MemoryCheckpoint, read, steps_of
from paceline.engine.strategy_table import StrategyTable
from paceline.errors import GenerationEnded
from paceline.strategies.registry import Job, choose
from paceline.strategies.strategy import ItemPlace, Tally
from paceline.world.control import NoSupervisor
from paceline.world.world import Elasticity, World

LANES, STEPS, ROWS = 4, 8, 3
CPU = torch.device("cpu")
WAIT_S = 20.0


@dataclass(frozen=True)
class Members:
    """Of one generation, by the ranks that processes have in the first one."""

    workers: Sequence[int]
    servers: Sequence[int] = ()

    def world(self, seat: World) -> World:
        place = [*self.workers, *self.servers].index(seat.rank)
        size = len(self.workers)
        here: dict[str, Any] = {"rank": place, "size": size, "local_rank": place, "local_size": size}
        return replace(seat, elastic=Elasticity(), servers=len(self.servers), **here)


@dataclass(frozen=True)
class Death:
    """Of a process, in a step, where `phase` says or at any moment after the step began."""

    rank: int
    step: int
    phase: str | None = None
    seed: int = 0
    generation: int = 1

    def now(self, folder: Path) -> None:
        (folder / f"over-{self.generation}").touch()
        os.kill(os.getpid(), signal.SIGKILL)

    def soon(self) -> float:
        return random.Random(self.seed).uniform(0, 0.03)


@dataclass
class Group:
    """What ends when a file says so: the test's own word of a new generation."""

    said: Path
    comms: list[Communicator] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    over: bool = False

    def watch(self) -> threading.Thread:
        thread = threading.Thread(target=self._watch, daemon=True)
        thread.start()
        return thread

    def adopt(self, comm: Communicator) -> None:
        with self.lock:
            self.comms.append(comm)
            if self.over:
                comm.abandon("somebody is gone")

    def _watch(self) -> None:
        deadline = time.monotonic() + 60
        while not self.said.exists() and time.monotonic() < deadline:
            time.sleep(0.002)
        with self.lock:
            self.over = True
            for comm in self.comms:
                comm.abandon("somebody is gone")


class Training:
    """One process's part in one generation."""

    def __init__(self, world: World, store: Store, group: Group, model: nn.Module, optimizer: Any, job: Any) -> None:
        self.world, self.model, self.optimizer = world, model, optimizer
        self.comm: Communicator = SingleWorker()
        if world.size > 1 and not world.is_server:
            self.comm = Communicator.connect(world, store, backend=job["backend"], device=CPU, timeout_s=WAIT_S)
            group.adopt(self.comm)
        try:
            self.table = StrategyTable(choose(job["strategy"]), self._job(store, group, job["backend"]))
        except GenerationEnded:
            self._leave()
            raise
        self.strategy, _ = self.table.of([optimizer])

    def _job(self, store: Store, group: Group, backend: str) -> Job:
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        return Job(
            world=self.world,
            comm=self.comm,
            store=store,
            supervisor=NoSupervisor(),
            device=CPU,
            models=[self.model],
            names=names,
            optimizers=[self.optimizer],
            lanes=LANES,
            reduction="exact",
            algorithm=None,
            backend=backend,
            bucket_bytes=1000,
            overlap=True,
            timeout_s=WAIT_S,
            adopt_group=group.adopt,
        )

    def step(self, number: int, at: Callable[[str], None]) -> None:
        """Steps count from 1, rounds from 0."""
        strategy, mine = self.strategy, self.table.assignment[self.world.rank]
        strategy.start_step(number - 1, self.table.plan(tuple(range(LANES))).sums)
        at("forward")
        for lane in mine:
            place = ItemPlace(lane, True, lane == mine[-1], False, float(ROWS), False, ROWS)
            torch.manual_seed(1000 * number + lane)
            x, y = torch.randn(ROWS, 8), torch.randint(0, 4, (ROWS,))
            loss = F.cross_entropy(self.model(x), y)
            strategy.start_backward(place, last=True)
            torch.autograd.backward(loss, torch.full_like(loss, 1 / LANES))
            strategy.finish_backward(place)
        at("exchange")
        weights = tuple((lane, float(ROWS)) for lane in range(LANES))
        strategy.collect(Tally(True, weights, ROWS * LANES, [True] * len(strategy.parameters)))
        strategy.clip(0.5)
        at("apply")
        strategy.apply(self.optimizer, self.optimizer.step)

    def tree(self) -> dict[str, Any]:
        return {
            "models": [{name: self.table.local_shard(value) for name, value in self.model.named_parameters()}],
            "optimizers": [self.table.local_state(self.optimizer)],
        }

    def put_back(self, tree: Mapping[str, Any], step: int) -> None:
        for name, parameter in self.model.named_parameters():
            self.table.load_full(parameter, full_tree(tree["models"][0][name]))
        self.table.load(self.optimizer, tree["optimizers"][0], round=step)

    def end(self) -> str:
        self.table.drain()
        self.comm.barrier()
        digest = hashlib.sha256()
        for parameter in self.model.parameters():
            digest.update(parameter.detach().numpy().tobytes())
        self.table.close()
        self._leave()
        return digest.hexdigest()

    def teardown(self) -> None:
        self.table.teardown()
        self._leave()

    def _leave(self) -> None:
        self.comm.close()


def built() -> tuple[nn.Module, Any]:
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(8, 33), nn.ReLU(), nn.Dropout(0.2), nn.Linear(33, 4))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def take_part(
    seat: World, *, folder: str, generations: Sequence[Members], deaths: Sequence[Death] = (), **job: Any
) -> str | None:
    place = Path(folder)
    (model, optimizer), store = built(), FileStore(f"{folder}/store")
    store.set_timeout(timedelta(seconds=WAIT_S))
    checkpoint = MemoryCheckpoint(place / "memory", seat.rank)
    checkpoint.folder.mkdir(exist_ok=True)
    for number, members in enumerate(generations, 1):
        if seat.rank not in (*members.workers, *members.servers):
            wait_for(place / f"over-{number}")  # a spare, who comes in later
            continue
        group = Group(place / f"over-{number}")
        group.watch()
        death = next((one for one in deaths if one.rank == seat.rank and one.generation == number), None)
        if death is not None and seat.rank in members.servers:
            threading.Thread(target=die_while_serving, args=(death, place), daemon=True).start()
        training: Training | None = None
        try:
            world = members.world(seat)
            training = Training(world, PrefixStore(f"elastic/{number}", store), group, model, optimizer, job)
            last = job.get("joins_after", STEPS) if number < len(generations) else STEPS
            found = train(training, checkpoint, generations[: number - 1], death, last)
            if found is not None:
                return found
            group.said.touch()
            training.teardown()
        except GenerationEnded:
            if training is not None:
                training.teardown()
        if seat.rank in (*members.workers, *members.servers):
            stopped(place, number, seat.rank, [*generations[number].workers, *generations[number].servers], members)
    return None


def stopped(place: Path, number: int, rank: int, next_ones: Sequence[int], members: Members) -> None:
    """Nobody goes on before all that are left have come to an end: only then is the memory checkpoint at rest."""
    (place / f"stopped-{number}-{rank}").touch()
    for other in next_ones:
        if other in (*members.workers, *members.servers):
            wait_for(place / f"stopped-{number}-{other}")


def train(
    training: Training, checkpoint: MemoryCheckpoint, before: Sequence[Members], death: Death | None, last: int = STEPS
) -> str | None:
    """None: others join after the step `last`."""
    step, world, place = resume(training, checkpoint.folder, before), training.world, checkpoint.folder.parent
    while step < last:
        step += 1
        if world.is_main:
            (place / f"began-{step}").touch()
        at = dying(death, step, place)
        training.step(step, at)
        at("memory checkpoint")
        checkpoint.write(step, training.tree(), rank=world.rank, size=world.size)
        at("ready")
        training.strategy.end_step()
    return training.end() if last == STEPS else None


def resume(training: Training, folder: Path, before: Sequence[Members]) -> int:
    """The last step that all workers of the generation before have in the memory checkpoint; 0: there is none."""
    for members in reversed(before):
        there = [steps_of(folder, rank) for rank in members.workers]
        if all(there):
            step = min(steps[-1] for steps in there)
            training.put_back(read(folder, step, list(members.workers)).tree, step)
            return step
    return 0


def dying(death: Death | None, step: int, place: Path) -> Callable[[str], None]:
    def at(phase: str) -> None:
        if death is not None and (death.step, death.phase) == (step, phase):
            death.now(place)

    if death is not None and death.step == step and death.phase is None:
        threading.Timer(death.soon(), death.now, [place]).start()
    return at


def die_while_serving(death: Death, place: Path) -> None:
    wait_for(place / f"began-{death.step}")
    time.sleep(death.soon())
    death.now(place)


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + WAIT_S
    while not path.exists():
        assert time.monotonic() < deadline, f"{path.name} did not come"
        time.sleep(0.002)
