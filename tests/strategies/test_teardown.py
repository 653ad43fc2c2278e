"""Strategies are taken apart at any moment and opened again for other workers, and the bits are those of one process.

    workers 0 1 2 ──step──step── moment ──► teardown ──► workers 0 1 ──► the state is put back ──step── …

A step that was not finished is done again. What each worker has of the state is written down right after `apply`, as
elastic jobs do, and that is all that others get of it.
"""

from __future__ import annotations

import gc
import os
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import FileStore, PrefixStore

from paceline.collectives.communicator import Communicator, SingleWorker
from paceline.engine.replicas import named_state, parameter_names, weights_hash
from paceline.engine.strategy_table import StrategyTable
from paceline.errors import GenerationEnded, WorldError
from paceline.optim.precision import precision_of
from paceline.sharding.local_shard import LocalShard
from paceline.strategies.fsdp import shard_pulls
from paceline.strategies.fsdp.hybrid import HybridConfig
from paceline.strategies.fsdp.unmaterialised import is_unmaterialised
from paceline.strategies.registry import Job, choose
from paceline.strategies.strategy import ItemPlace, Strategy, Tally
from paceline.strategies.zero.zero1 import Zero1Config
from paceline.strategies.zero.zero2 import Zero2Config
from paceline.strategies.zero.zero3 import Zero3Config
from paceline.world.control import NoSupervisor
from paceline.world.world import Elasticity, World
from tests.launch.launching import alive, wait_until
from tests.workers import hashes, run_workers

pytestmark = pytest.mark.workers

CPU = torch.device("cpu")
LANES = 4
WAYS: dict[str, tuple[Any, str | None]] = {  # and what is offloaded, which the CPU shows as well
    "ddp": ("ddp", None),
    "star": ("star", None),
    "zero1": ("zero1", None),
    "zero1 per worker": (Zero1Config(weights="per worker"), None),
    "zero2": ("zero2", None),
    "zero2 per worker": (Zero2Config(weights="per worker"), None),
    "zero2 offloaded": ("zero2", "optimizer"),
    "zero3": ("zero3", None),
    "zero3 in shards": (Zero3Config(weights="in shards"), None),
    "zero3 offloaded": ("zero3", "parameters"),
    "hybrid": (HybridConfig(shard_over=2), None),
}


class Model(nn.Module):
    """Large enough to be cut, with a weight whose memory is not in logical order, and one that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 256), nn.LayerNorm(256), nn.GELU(), nn.Linear(256, 64))
        self.turned = nn.Parameter(torch.randn(64, 96).t() * 0.1)
        self.frozen = nn.Linear(64, 64)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.frozen(self.layers(x))
        return hidden @ self.turned.t() * self.scale


@dataclass(frozen=True)
class Stage:
    """A group of workers, the steps that they finish, and the moment of the next one at which it is over."""

    members: tuple[int, ...]
    steps: int
    moment: str = "between steps"
    dies: int | None = None  # a member that is gone from this moment on, unlike the others


class Told(Exception):  # noqa: N818 (nothing went wrong)
    """The moment has come."""


class Place:
    """What a worker trains, by the calls that an engine makes; a `Crew` of it for every stage."""

    def __init__(self, world: World, folder: str, way: str, precision: str, backend: str) -> None:
        self.slot, self.folder = world.rank, Path(folder)
        self.store = FileStore(f"{folder}/store")
        self.store.set_timeout(timedelta(seconds=20))
        strategy, self.offload = WAYS[way]
        self.chosen, self.precision, self.backend = choose(strategy), precision_of(precision), backend
        torch.manual_seed(0)
        self.model = Model()
        for parameter in self.model.frozen.parameters():
            parameter.requires_grad_(False)
        first, *rest = self.model.parameters()
        self.optimizer = torch.optim.AdamW([{"params": [first], "weight_decay": 0.1}, {"params": rest}], lr=1e-2)
        self.world, self.round, self.stages = world, 0, 0

    def open(self, members: Sequence[int]) -> Crew:
        self.stages += 1
        store, rank = PrefixStore(f"elastic/{self.stages}", self.store), members.index(self.slot)
        comm: Communicator = SingleWorker()
        size = len(members)
        world = replace(self.world, rank=rank, local_rank=rank, size=size, local_size=size, elastic=Elasticity())
        if size > 1:
            comm = Communicator.connect(world, store, backend=self.backend, device=CPU, timeout_s=20.0)
        job = Job(
            world, comm, store, NoSupervisor(), CPU, [self.model], parameter_names([self.model]), [self.optimizer],
            LANES, "exact", None, self.backend, bucket_bytes=40_000, overlap=True, timeout_s=20.0,
            precision=self.precision, offload=self.offload is not None, facts={"offload": self.offload},
        )  # fmt: skip
        return Crew(self, members, comm, StrategyTable(self.chosen, job))

    def path(self, slot: int) -> Path:
        return self.folder / f"round {self.round} of {slot}"


@dataclass
class Crew:
    place: Place
    members: Sequence[int]
    comm: Communicator
    table: StrategyTable

    @property
    def strategy(self) -> Strategy:
        return self.table.of([self.place.optimizer])[0]

    def step(self, moment: str = "") -> None:
        """One step; raises `Told` at the moment."""
        place, strategy = self.place, self.strategy
        plan = self.table.plan(tuple(range(LANES))).sums
        mine = self.table.assignment[self.members.index(self.place.slot)]
        strategy.start_step(place.round, plan)
        _tell("step begun", moment)
        for lane in mine:
            x = torch.randn(4, 64, generator=torch.Generator().manual_seed(place.round * LANES + lane))
            loss = self.forward(x)
            _tell("forward", moment)
            at = ItemPlace(lane, last_of_lane=True, last_of_step=lane == mine[-1], shadow=False, weight=4.0, samples=4)
            strategy.start_backward(at, last=True)
            hook = place.model.layers[0].bias.register_hook(lambda _: _tell("backward", moment))
            try:
                torch.autograd.backward(loss, torch.full_like(loss, 1 / LANES))
            finally:
                hook.remove()
            strategy.finish_backward(at)
        _tell("buckets under way", moment)
        weights = tuple((lane, 4.0) for lane in range(LANES))
        strategy.collect(Tally(True, weights, 4 * LANES, strategy.used()))
        _tell("collected", moment)
        strategy.clip(0.5)
        place.optimizer.param_groups[0]["lr"] = 1e-2 / (1 + place.round)
        strategy.apply(place.optimizer, place.optimizer.step)
        place.round += 1
        self.save()
        _tell("applied", moment)
        strategy.end_step()

    def forward(self, x: Tensor) -> Tensor:
        try:
            return self.place.model(x).float().square().mean()  # type: ignore[no-any-return]
        except GenerationEnded as error:
            raise AssertionError("it has reached the user's forward") from error

    def save(self) -> None:
        """What this worker has, of now; written at once or not at all."""
        tensors = {name: self.table.local_shard(value) for name, value in named_state([self.place.model]).items()}
        path = self.place.path(self.place.slot)
        torch.save((self.members, tensors, self.table.local_state(self.place.optimizer)), f"{path} begun")
        os.rename(f"{path} begun", path)

    def put_back(self) -> None:
        """What all workers wrote after the last step."""
        members = _read(next(p for slot in range(9) if (p := self.place.path(slot)).exists()))[0]
        trees = [_read(self.place.path(slot)) for slot in members]
        named = named_state([self.place.model])
        for name, whole in _whole([tensors for _, tensors, _ in trees]).items():
            self.table.load_full(named[name], whole)
        state = _whole([state for _, _, state in trees])
        self.table.load(self.place.optimizer, state, round=self.place.round)

    def meet(self) -> None:
        """All members are at the moment, whatever is under way between them."""
        at = f"stage {self.place.stages}"
        self.place.store.set(f"{at} of {self.place.slot}", "here")
        self.place.store.wait([f"{at} of {slot}" for slot in self.members])

    def leave(self) -> None:
        self.comm.abandon("the workers change")
        self.table.teardown()
        self.comm.close()


def _tell(now: str, wanted: str) -> None:
    if now == wanted:
        raise Told(now)


def _read(path: Path) -> Any:
    until = time.monotonic() + 20
    while not path.exists():
        assert time.monotonic() < until, f"nobody wrote {path}"
        time.sleep(0.005)
    return torch.load(path, weights_only=False)


def _whole(trees: Sequence[Any]) -> Any:
    """One tree of whole tensors from those of all workers."""
    first = trees[0]
    if isinstance(first, LocalShard):
        flat = torch.full((first.elements,), torch.nan, dtype=first.dtype)
        for start, values in (part for tree in trees for part in tree.parts):
            flat[start : start + values.numel()] = values
        return flat.view(first.shape)
    if isinstance(first, dict):
        keys = dict.fromkeys(key for tree in trees for key in tree)
        return {key: _whole([tree[key] for tree in trees if key in tree]) for key in keys}
    return first


def goes_through(world: World, *, stages: Sequence[Stage], **place: Any) -> str | None:
    """All stages of which this worker is a member; the hash after the last."""
    here = Place(world, **place)
    for number, stage in enumerate(stages):
        if here.slot not in stage.members:
            here.round += stage.steps + (stage.moment == "applied")
            here.stages += 1
            continue
        crew = here.open(stage.members)
        new = number > 0 and not set(stage.members) <= set(stages[number - 1].members)
        if number == 0:
            crew.save()
        elif new or not here.chosen.entry.replicated:
            crew.put_back()
        for _ in range(stage.steps):
            crew.step()
        if stage is stages[-1]:
            found = weights_hash([here.model], crew.table.full_tensor)
            crew.meet()  # others may still read this worker's part
            return found
        if stage.dies is not None:
            _lose(crew, stage)
        else:
            if stage.moment != "between steps":
                with pytest.raises(Told):
                    crew.step(stage.moment)
            crew.meet()
        crew.leave()
        _look_untouched(here)
    return None


def _lose(crew: Crew, stage: Stage) -> None:
    """One member dies in the step; the others hear of it a little later than some of them find out."""
    assert crew.comm is not None
    if crew.place.slot == stage.dies:
        with pytest.raises(Told):
            crew.step(stage.moment)
        os._exit(0)
    told = threading.Timer(0.3, crew.comm.abandon, [f"worker {stage.dies} is gone"])
    told.start()
    with pytest.raises(GenerationEnded):
        crew.step()
    told.join()


def _look_untouched(here: Place) -> None:
    """Model and optimizer are as they were before anything was opened."""
    torch.manual_seed(0)
    for (name, parameter), (_, fresh) in zip(here.model.named_parameters(), Model().named_parameters(), strict=True):
        assert type(parameter) is nn.Parameter, name
        assert not is_unmaterialised(parameter)
        assert parameter.shape == fresh.shape, name
        assert parameter.stride() == fresh.stride(), name
        assert parameter.dtype == torch.float32 or not parameter.requires_grad, name
        assert parameter.grad is None, name
        assert parameter.untyped_storage().nbytes() == parameter.nbytes, f"{name} is in somebody else's memory"
        assert not parameter._post_accumulate_grad_hooks, name
    hooks = [
        hook for m in here.model.modules() for hook in (*m._forward_pre_hooks.values(), *m._forward_hooks.values())
    ]
    assert not hooks
    here.optimizer.state_dict()
    assert not here.optimizer._optimizer_load_state_dict_pre_hooks
    assert [len(group["params"]) for group in here.optimizer.param_groups] == [1, 9]


@cache
def hash_of_one(precision: str, steps: int) -> str:
    with tempfile.TemporaryDirectory() as folder:
        job: dict[str, Any] = {"way": "ddp", "precision": precision, "backend": "gloo"}
        (found,) = hashes(run_workers(goes_through, 1, stages=[Stage((0,), steps)], folder=folder, **job))
        return str(found)


CHANGES = [
    Stage((0, 1, 2), 0, "between steps"),
    Stage((0, 1, 2), 2, "backward"),
    Stage((1, 2), 1, "buckets under way"),
    Stage((1, 2), 1, "collected"),
    Stage((0, 1, 2), 0, "applied"),
    Stage((1,), 1, "forward"),
    Stage((0, 1), 0, "step begun"),
    Stage((0, 1), 2),
]


@pytest.mark.parametrize(("precision", "backend"), [("fp32", "paceline"), ("bf16", "gloo")])
@pytest.mark.parametrize("way", WAYS)
def test_opened_again_for_other_workers_at_any_moment_it_gives_the_bits_of_one(
    way: str, precision: str, backend: str, tmp_path: Path
) -> None:
    job: dict[str, Any] = {"way": way, "precision": precision, "backend": backend}
    found = hashes(run_workers(goes_through, 3, stages=CHANGES, folder=str(tmp_path), **job))
    assert found == {None, hash_of_one(precision, 8)}


DEATHS = [Stage((0, 1, 2, 3), 1, "forward", dies=3), Stage((0, 1, 2), 1, "step begun", dies=0), Stage((1, 2), 2)]


@pytest.mark.parametrize(("precision", "backend"), [("fp32", "gloo"), ("bf16", "paceline")])
@pytest.mark.parametrize("way", WAYS)
def test_when_workers_die_the_others_notice_nothing_in_their_forward_and_go_on_to_the_same_bits(
    way: str, precision: str, backend: str, tmp_path: Path
) -> None:
    job: dict[str, Any] = {"way": way, "precision": precision, "backend": backend}
    gone, *survivors, also_gone = run_workers(goes_through, 4, stages=DEATHS, folder=str(tmp_path), **job)
    assert (gone.error, also_gone.error) == ("Died: exit code 0", "Died: exit code 0"), gone.traceback
    assert hashes(survivors) == {hash_of_one(precision, 4)}


# -- nothing stays behind ----------------------------------------------------------------------------------------------

ROUNDS = 20


def comes_and_goes(world: World, *, way: str, folder: str) -> list[dict[str, int]]:
    """What this process holds after each of many groups, which end inside a step, between steps or unused."""
    here, found = Place(world, folder, way, "bf16", "paceline"), []
    crew = here.open((0, 1))
    crew.save()
    crew.meet()  # one that leaves while another still connects would end that
    crew.leave()
    for number in range(ROUNDS):
        crew = here.open((0, 1))
        crew.put_back()
        if number % 3:
            with pytest.raises(Told):
                crew.step("buckets under way" if number % 3 == 1 else "applied")
        crew.meet()
        crew.leave()
        del crew
        gc.collect()  # parts of a group refer to each other
        maps = Path("/proc/self/maps").read_text()
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * 4096
        held = {"segments": maps.count("memfd:paceline"), "threads": threading.active_count(), "resident": resident}
        found.append(held | {"descriptors": len(os.listdir("/proc/self/fd"))})
    return found


@pytest.mark.parametrize("way", ["zero1", "zero3 in shards"])
def test_twenty_groups_after_one_another_hold_no_more_than_one(way: str, tmp_path: Path) -> None:
    results = run_workers(comes_and_goes, 2, way=way, folder=str(tmp_path))
    assert [result.error for result in results] == [None, None], "\n".join(result.traceback for result in results)
    for result in results:
        first, last = result.value[ROUNDS // 4], result.value[-1]
        assert last["segments"] == 0
        assert last["threads"] <= first["threads"]
        assert last["descriptors"] <= first["descriptors"] + 2, result.value
        assert last["resident"] - first["resident"] < 8 * 2**20, [held["resident"] >> 10 for held in result.value]


# -- weights of others, between steps ----------------------------------------------------------------------------------


def looks_when_left_alone(world: World, *, folder: str) -> str | None:
    here = Place(world, folder, "zero3 in shards", "fp32", "gloo")
    crew = here.open((0, 1))
    crew.step()
    here.store.set(f"process of {here.slot}", str(os.getpid()))
    crew.meet()
    if here.slot == 1:
        return None
    other = int(here.store.get("process of 1"))
    wait_until(lambda: not alive([other]), 10, "the other worker has ended, and does not answer any more")
    with pytest.warns(UserWarning, match="the workers changed while the model was used between two steps"):
        assert here.model(torch.ones(1, 64)).isnan().all()
    with pytest.raises(GenerationEnded, match="worker 0 looked at weights of others when the workers changed"):
        here.model.layers[0].weight.norm()
    with pytest.raises(GenerationEnded):
        weights_hash([here.model], crew.table.full_tensor)
    crew.leave()
    crew = here.open((0,))
    crew.put_back()
    crew.step()
    return weights_hash([here.model], crew.table.full_tensor)


def test_between_steps_weights_that_died_with_their_worker_are_not_taken_for_zeros(tmp_path: Path) -> None:
    alone, _ = run_workers(looks_when_left_alone, 2, folder=str(tmp_path))
    assert hashes([alone]) == {hash_of_one("fp32", 2)}


def begins_without_the_others(world: World, *, folder: str) -> str:
    """A group whose weights can't be asked for, since the other worker is gone: then alone."""
    here = Place(world, folder, "zero3 in shards", "bf16", "gloo")
    shard_pulls.Communicator = Refuses  # type: ignore[misc,assignment]
    with pytest.raises(WorldError):
        here.open((0, 1))
    shard_pulls.Communicator = Communicator  # type: ignore[misc]
    _look_untouched(here)
    torch.manual_seed(0)
    here.model.load_state_dict(Model().state_dict())
    crew = here.open((here.slot,))
    crew.step()
    return weights_hash([here.model], crew.table.full_tensor)


class Refuses:
    @staticmethod
    def connect(*_: Any, **__: Any) -> None:
        raise WorldError("the others are gone")


def test_a_worker_that_is_lost_while_all_begin_leaves_the_others_their_models(tmp_path: Path) -> None:
    assert hashes(run_workers(begins_without_the_others, 2, folder=str(tmp_path))) == {hash_of_one("bf16", 1)}
