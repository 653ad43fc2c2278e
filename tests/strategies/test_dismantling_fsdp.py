"""fsdp and hybrid, taken apart at any moment and opened for other workers: plain models in between, the same bits."""

from __future__ import annotations

import gc
import itertools
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._distributed_c10d import FileStore, PrefixStore
from torch.utils.data import DataLoader, TensorDataset

from paceline import Engine, World
from paceline.engine import preparation, surroundings
from paceline.engine.strategy_table import StrategyTable
from paceline.engine.surroundings import connect_workers
from paceline.errors import ConfigError
from paceline.sharding.slices import Slices
from paceline.strategies.hybrid import HybridConfig, groups_of, say_if_smaller
from paceline.world.topology import Topology
from paceline.world.world import Elasticity, TcpRendezvous
from tests.bits.programs import TiedGpt
from tests.workers import free_port, hashes, run_workers

SAVED, LAST = 2, 4  # steps


def begun(world: World, **job: Any) -> Engine:
    """An engine whose strategies and groups take it for one of an elastic job, with nobody to decide."""
    engine = Engine(world=world, **{"lanes": 4, "bucket_mib": 0.01, "timeout_s": 30.0} | job)
    elastic, job_of = replace(world, elastic=Elasticity()), engine._preparation.job
    if engine._group.comm is not None:
        engine._group.comm._world, engine._group.comm._elastic = elastic, True
    preparation.check_memory = lambda *_: None  # regrouping does not ask whether what is left would be a good start
    engine._preparation.job = lambda: replace(job_of(), world=elastic)  # type: ignore[method-assign]
    return engine


def made() -> tuple[TiedGpt, torch.optim.Optimizer]:
    """Tied weights, a layer that no sample uses, one that is frozen, and a parameter that can't be cut."""
    model = TiedGpt(width=36)
    model.sometimes.requires_grad_(False)
    model.head.scale = nn.Parameter(torch.tensor(1.5))
    wide, rest = ([p for p in model.parameters() if (p.dim() > 1) is many] for many in (True, False))
    return model, torch.optim.AdamW([{"params": wide}, {"params": rest, "weight_decay": 0.0}], lr=1e-2)


def data() -> DataLoader[Any]:
    text = torch.randint(0, 32, (75, 9), generator=torch.Generator().manual_seed(2))
    return DataLoader(TensorDataset(text[:, :-1], text[:, 1:]), batch_size=4, shuffle=True)


def loss_of(model: Any, batch: Any) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x).flatten(0, 1) * model.head.scale, y.flatten())


def train(engine: Engine, model: Any, optimizer: Any, batches: Any, *, until: int) -> None:
    for batch in batches:
        engine.backward(loss_of(model, batch))
        engine.clip_grad_norm_(0.05)
        optimizer.step()
        if engine.stepped and engine.step == until:
            return


def straight(world: World, **job: Any) -> str:
    with begun(world, **job) as engine:
        model, optimizer, loader = engine.prepare(*made(), data())
        train(engine, model, optimizer, loader, until=LAST)
        return engine.weights_hash()


@cache
def undisturbed(precision: str) -> frozenset[str]:
    return frozenset(hashes(run_workers(straight, 1, precision=precision)))


# -- moments -----------------------------------------------------------------------------------------------------------


class Moment:
    """Something happens to the group while this worker is at a place; `dies`: to this worker."""

    def __init__(self, engine: Engine, *, dies: bool) -> None:
        self._engine, self._dies = engine, dies

    def now(self) -> None:
        if self._dies:
            os._exit(0)
        if self._engine._group.comm is not None:
            self._engine._group.comm.abandon("workers have changed")

    def soon(self) -> None:
        """The others wait for the one that dies before they hear of it."""
        if self._dies:
            os._exit(0)
        threading.Timer(0.2, self.now).start()


PLACES: dict[str, Callable[[Any, Any, Callable[[], None]], Any]] = {
    "forward": lambda model, _, at: model.blocks[0].register_forward_hook(lambda *_: at()),
    "backward": lambda model, _, at: model.blocks[1].register_full_backward_hook(lambda *_: at()),
    "update": lambda _, optimizer, at: optimizer.register_step_post_hook(lambda *_: at()),
}
MOMENTS = {
    "in forward": ("forward", "now"),
    "in a gather": ("forward", "soon"),
    "in backward": ("backward", "now"),
    "in a gather of backward": ("backward", "soon"),
    "after the update": ("update", "now"),
}


def picture(model: nn.Module, optimizer: torch.optim.Optimizer, *, identity: bool = True) -> list[Any]:
    """All that a strategy could leave behind. `identity`: somebody keeps the parameters, so they are to be the same."""
    modules = [
        (name, type(module), sorted(vars(module)), [len(v) for k, v in sorted(vars(module).items()) if "hooks" in k])
        for name, module in model.named_modules()
    ]

    def seen(p: Tensor) -> tuple[Any, ...]:
        kind = type(p), tuple(p.shape), p.dtype, p.device, p.requires_grad, p.untyped_storage().nbytes()
        return (*kind, sorted(vars(p)), p.grad, *([id(p)] if identity else []))

    parameters = [(name, *seen(p)) for name, p in model.named_parameters(remove_duplicate=False)]
    groups = [[seen(p) for p in group["params"]] for group in optimizer.param_groups]
    hooks = [len(v) for k, v in sorted(vars(optimizer).items()) if "hooks" in k]
    return [modules, parameters, groups, len(optimizer.state), hooks]


def among(world: World, size: int, port: int) -> World:
    """The first workers of a world, as one of their own."""
    if size == 1:
        return World()
    return replace(world, size=size, local_size=size, rendezvous=TcpRendezvous("127.0.0.1", port))


def regroups(
    world: World, *, first: int, then: int, ports: tuple[int, int], moment: str, folder: str, keep: bool, **job: Any
) -> str:
    """The first workers save, go on, and lose some of them or get more at a moment of the next step; then others open,
    load, and go on to the end."""
    if world.rank < first:
        model, optimizer = interrupted(among(world, first, ports[0]), then, moment, folder, keep=keep, **job)
    else:
        model, optimizer = made()
    for parameter in model.parameters():
        parameter.detach().fill_(0.125)  # values may be anything; the second engine compares those of all workers
    surroundings._engines = itertools.count(1)  # whoever comes later meets the others where they meet now
    engine = begun(among(world, then, ports[1]), **job)
    model, optimizer, loader = engine.prepare(model, optimizer, data())
    engine.load_state(folder)
    train(engine, model, optimizer, loader, until=LAST)
    return engine.weights_hash()


def interrupted(
    world: World, left: int, moment: str, folder: str, *, keep: bool, **job: Any
) -> tuple[TiedGpt, torch.optim.Optimizer]:
    engine = begun(world, **job)
    model, optimizer = made()
    kept, before = list(model.parameters()) if keep else [], picture(model, optimizer, identity=keep)
    model, optimizer, loader = engine.prepare(model, optimizer, data())
    batches = iter(loader)
    train(engine, model, optimizer, batches, until=SAVED)
    engine.save_state(folder)
    disturb(engine, model, optimizer, batches, moment, dies=world.rank >= left)
    assert engine._group.comm is None or engine._group.comm.is_over
    engine._training().strategies.dismantle()
    if engine._group.comm is not None:
        engine._group.comm.close()
    if engine._objects.recomputed is not None:
        engine._objects.recomputed.close()
    del optimizer.step
    assert picture(model, optimizer, identity=keep) == before
    del kept
    assert model.head.weight is model.embedding.weight
    return model, optimizer


def disturb(engine: Engine, model: Any, optimizer: Any, batches: Any, moment: str, *, dies: bool) -> None:
    happens = Moment(engine, dies=dies)
    if moment == "between steps":
        happens.now()
        return
    place, when = MOMENTS[moment]
    hook = PLACES[place](model, optimizer, getattr(happens, when))
    for batch in batches:
        loss = loss_of(model, batch)  # no exception comes out of here
        engine.backward(loss)
        optimizer.step()
        if engine._group.comm is not None and engine._group.comm.is_over:
            hook.remove()
            return


def check_regrouped(
    tmp_path: Path, first: int, then: int, *, precision: str = "fp32", keep: bool = True, **job: Any
) -> None:
    job |= {"first": first, "then": then, "ports": (free_port(), free_port()), "keep": keep, "precision": precision}
    found = run_workers(regroups, max(first, then), folder=str(tmp_path / "state"), **job)
    assert hashes(found[:then]) == undisturbed(precision)


# -- fsdp --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("moment", "job"),
    [
        ("in forward", {}), ("in forward", {"backend": "gloo", "precision": "bf16"}), ("in a gather", {}),
        ("in a gather", {"backend": "gloo"}), ("in backward", {"precision": "bf16"}), ("after the update", {}),
        ("in a gather of backward", {"backend": "gloo"}),
        ("in a gather of backward", {"precision": "bf16", "activation_checkpointing": "blocks"}),
    ],
)  # fmt: skip
def test_fsdp_opened_again_for_fewer_workers_gives_the_bits_of_one_process(
    moment: str, job: dict[str, Any], tmp_path: Path
) -> None:
    check_regrouped(tmp_path, 3, 2, moment=moment, strategy="fsdp", **job)


@pytest.mark.parametrize(("first", "then", "precision"), [(2, 1, "bf16"), (1, 2, "bf16"), (2, 3, "fp32")])
def test_fsdp_opened_again_for_one_worker_or_for_more_gives_the_bits_of_one_process(
    first: int, then: int, precision: str, tmp_path: Path
) -> None:
    check_regrouped(tmp_path, first, then, precision=precision, keep=False, moment="between steps", strategy="fsdp")


def sees_zeros(world: World) -> list[float]:
    """What the second block computes with when the group has ended in the first, and what follows in the same item."""
    engine = begun(world, strategy="fsdp")
    model, optimizer, loader = engine.prepare(*made(), data())
    batches, seen = iter(loader), []
    train(engine, model, optimizer, batches, until=1)
    weight = lambda block, _: seen.append(float(block.qkv.weight.detach().abs().sum()))  # noqa: E731
    model.blocks[1].register_forward_pre_hook(weight)
    PLACES["forward"](model, optimizer, Moment(engine, dies=False).now)
    loss = loss_of(model, next(batches))
    sent = engine._group.comm.traffic if engine._group.comm is not None else None
    engine.backward(loss)
    assert engine._group.comm is not None
    assert engine._group.comm.traffic == sent, "something was sent in a group that is over"
    return seen


def test_a_forward_whose_group_ends_goes_on_with_zeros_and_nothing_more_is_sent() -> None:
    for result in run_workers(sees_zeros, 2):
        assert result.error is None, result.traceback
        assert result.value == [0.0]


def kept_by(engine: Engine, model: nn.Module, optimizer: Any) -> list[Tensor]:
    """Copies of the slices that this worker has of weights and state."""
    strategies = engine._training().strategies
    states = strategies.kept_state(optimizer)["state"]
    leaves = [strategies.kept(p) for p in model.parameters()] + [v for s in states.values() for v in s.values()]
    return [part.clone() for leaf in leaves if isinstance(leaf, Slices) for _, part in leaf.parts]


def keeps(world: World, **job: Any) -> list[list[bool]]:
    """Per step: whether each thing that a worker keeps is in the step, right after its update, what it is after it."""
    engine = begun(world, **job)
    model, optimizer, loader = engine.prepare(*made(), data())
    inside = []
    optimizer.register_step_post_hook(lambda *_: inside.append(kept_by(engine, model, optimizer)))
    same = []
    for batch in loader:
        engine.backward(loss_of(model, batch))
        optimizer.step()
        if engine.stepped:
            engine._between.settle()
            after = kept_by(engine, model, optimizer)
            alike = zip(inside[-1], after, strict=True) if len(after) == len(inside[-1]) else ()
            same.append([torch.equal(a, b) for a, b in alike])
    return same


@pytest.mark.parametrize(
    ("workers", "strategy", "precision"),
    [(2, "fsdp", "fp32"), (2, "fsdp", "bf16"), (4, HybridConfig(shard_over=2), "fp32")],
)
def test_what_a_worker_keeps_is_right_as_soon_as_the_update_is_made(
    workers: int, strategy: Any, precision: str
) -> None:
    for result in run_workers(keeps, workers, strategy=strategy, precision=precision)[:2]:
        assert result.error is None, result.traceback
        assert len(result.value) == 5
        assert all(same and all(same) for same in result.value), result.value


def goes_round(world: World, *, folder: str, **job: Any) -> list[int]:
    """Open, train and take apart again and again; how many tensors there are after each round."""
    counts = []
    gc.disable()  # what is let go is gone at once
    engine, (model, optimizer) = begun(world, **job), made()
    model, optimizer, loader = engine.prepare(model, optimizer, data())
    train(engine, model, optimizer, iter(loader), until=1)
    chosen, first = engine.config.strategy, engine._preparation.job()
    tables, comm = [engine._training().strategies], engine._group.comm
    del engine._objects.step.work.strategies  # type: ignore[union-attr]
    engine._objects.step.work.active = None  # type: ignore[union-attr]
    for turn in range(6):
        assert comm is not None
        comm.abandon("again")
        tables.pop().dismantle()
        comm.close()
        counts.append(sum(1 for thing in gc.get_objects() if issubclass(type(thing), Tensor)))
        store = PrefixStore(f"turn {turn}", FileStore(f"{folder}/store"))
        comm = connect_workers(comm.world, store, backend="gloo", device=engine.device, timeout_s=30.0)
        tables.append(StrategyTable(chosen, replace(first, comm=comm, store=store)))
        loss_of(model, next(iter(data()))).backward()
    return counts


def test_nothing_of_an_fsdp_that_was_taken_apart_stays_in_memory(tmp_path: Path) -> None:
    for result in run_workers(goes_round, 2, strategy="fsdp", backend="gloo", folder=str(tmp_path)):
        assert result.error is None, result.traceback
        assert len(set(result.value[1:])) == 1, result.value


# -- hybrid ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "then", "moment", "backend", "precision"),
    [
        (4, 3, "between steps", "paceline", "fp32"), (4, 3, "in a gather", "gloo", "bf16"),
        (4, 2, "in a gather of backward", "paceline", "fp32"), (4, 1, "after the update", "gloo", "fp32"),
        (3, 4, "between steps", "paceline", "bf16"),
    ],
)  # fmt: skip
def test_hybrid_opened_again_for_other_workers_gives_the_bits_of_one_process(
    first: int, then: int, moment: str, backend: str, precision: str, tmp_path: Path
) -> None:
    """Pairs share weights where they can; three workers can't be paired, so each of them has all."""
    job = {"backend": backend, "precision": precision, "strategy": HybridConfig(shard_over=2)}
    check_regrouped(tmp_path, first, then, moment=moment, **job)


def parts_kept(world: World) -> list[int]:
    """Elements of weights and state that this worker keeps inside a step, and between two."""
    engine = begun(world, strategy=HybridConfig(shard_over=2))
    model, optimizer, loader = engine.prepare(*made(), data())
    counts = []

    def count(*_: Any) -> None:
        counts.append(sum(part.numel() for part in kept_by(engine, model, optimizer)))

    optimizer.register_step_post_hook(count)
    train(engine, model, optimizer, loader, until=1)
    engine._between.settle()
    count()
    return counts


def test_in_a_step_every_group_of_hybrid_keeps_its_own_and_between_steps_the_first_speaks_for_all() -> None:
    inside, between = zip(*(result.value for result in run_workers(parts_kept, 4)), strict=True)
    assert inside[:2] == inside[2:] == between[:2], (inside, between)
    assert between[2:] == (0, 0)


def test_groups_that_are_smaller_than_configured_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    say_if_smaller(Topology.of([0] * 4), 2, shard_over=2)
    say_if_smaller(Topology.of([0, 0, 1, 1]), 2, shard_over=None)
    assert capsys.readouterr().out == ""
    say_if_smaller(Topology.of([0] * 3), 1, shard_over=2)
    say_if_smaller(Topology.of([0] * 4 + [1] * 2), 2, shard_over=None)
    assert capsys.readouterr().out.splitlines() == [
        "paceline: 3 workers are no groups of 2: every worker holds all weights until there are others",
        "paceline: 4 and 2 workers are no groups of 4: weights are shared by 2 workers until there are others",
    ]


def test_where_the_workers_left_can_not_be_grouped_as_configured_the_largest_groups_are_taken() -> None:
    hosts = {"one of 6": [0] * 6, "one of 3": [0] * 3, "4 and 3": [0] * 4 + [1] * 3, "4 and 2": [0] * 4 + [1] * 2}
    found = {
        (name, wanted): len(groups_of(Topology.of(host), wanted, elastic=True)[0])
        for name, host in hosts.items()
        for wanted in (None, 4, 2)
    }
    assert found == {
        ("one of 6", None): 6, ("one of 6", 4): 3, ("one of 6", 2): 2,
        ("one of 3", None): 3, ("one of 3", 4): 3, ("one of 3", 2): 1,
        ("4 and 3", None): 1, ("4 and 3", 4): 1, ("4 and 3", 2): 1,
        ("4 and 2", None): 2, ("4 and 2", 4): 2, ("4 and 2", 2): 2,
    }  # fmt: skip
    with pytest.raises(ConfigError, match="which are no groups of 4"):
        groups_of(Topology.of([0] * 6), 4)
