"""What can't fit is refused before the first step, with what would; what dies of it all the same is told by name."""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Iterator
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from paceline import Engine, World
from paceline.compression import Compression, PowerSgd, TopK
from paceline.engine import memory_check
from paceline.launch.failure_attribution import MemoryReport, Process, what_happened
from paceline.optim.range_optimizer import state_bytes
from paceline.sharding.footprint import Model, Residuals
from paceline.strategies.fsdp.fsdp import FsdpConfig
from paceline.strategies.registry import choose
from paceline.world import out_of_memory
from paceline.world.host_limits import MemoryLimit
from tests.workers import run_workers

GROUPS = Path("/sys/fs/cgroup/memory")
PARAMETERS = 4 * 2**20


@pytest.fixture
def group() -> Iterator[Path]:
    """A real cgroup of 54 MiB, for as long as the test runs."""
    made = GROUPS / f"paceline-test-{os.getpid()}"
    try:
        made.mkdir()
        (made / "memory.limit_in_bytes").write_text(str(54 * 2**20))
    except OSError:
        pytest.skip("needs root and the memory controller of cgroups, version 1")
    yield made
    made.rmdir()


def prepares(world: World, *, strategy: str, group: str, all_together: bool) -> str:
    """In the group before anything is held, and out of it again for the rest."""
    if all_together or world.rank == 1:
        (Path(group) / "cgroup.procs").write_text(str(os.getpid()))
    try:
        with Engine(world=world, strategy=strategy, backend="gloo") as engine:
            model = nn.Linear(2048, PARAMETERS // 2048, bias=False)
            engine.prepare(model, torch.optim.AdamW(model.parameters()))
            return "fits"
    finally:
        (GROUPS / "cgroup.procs").write_text(str(os.getpid()))


@pytest.mark.workers
def test_a_strategy_that_does_not_fit_is_refused_by_all_workers_with_those_that_do(group: Path) -> None:
    results = run_workers(prepares, 2, strategy="ddp", group=str(group), all_together=False)
    for result in results:
        assert result.error == (
            "ConfigError: strategy='ddp' does not fit: weights, gradients and optimizer state of 4,194,304 parameters "
            f"take 0.06 GiB on each worker, and the limit is 0.05 GiB (cgroup /{group.name}). Instead: on 2 workers "
            "strategy='fsdp' takes 0.03 GiB, strategy='hybrid' takes 0.03 GiB, strategy='zero1' takes 0.05 GiB, "
            "strategy='zero2' takes 0.04 GiB, strategy='zero3' takes 0.03 GiB"
        ), result.traceback


def sharers(world: World, *, hosts: int) -> int:
    """As many workers on each host; all host names are this machine's."""
    own = {"host_rank": world.rank, "hosts": 2, "local_rank": 0, "local_size": 1} if hosts == 2 else {}
    memory_check.memory_limit = lambda: MemoryLimit(2**40, "this host")  # type: ignore[attr-defined]
    with Engine(world=replace(world, **own), backend="gloo") as engine:
        model = nn.Linear(4, 4)
        optimizer = torch.optim.AdamW(model.parameters())
        fit = memory_check.fit_of(engine.config, engine.world, engine._group.comm, engine.device, [model], [optimizer])
        assert fit is not None
        return fit.sharers


@pytest.mark.workers
@pytest.mark.parametrize("hosts", [1, 2])
def test_hosts_of_the_same_name_do_not_share_their_memory(hosts: int) -> None:
    assert {result.value for result in run_workers(sharers, 2, hosts=hosts)} == {2 // hosts}


@pytest.mark.workers
def test_workers_of_one_group_share_its_limit(group: Path) -> None:
    (group / "memory.limit_in_bytes").write_text(str(62 * 2**20))  # both are in it, with what Python and gloo take
    results = run_workers(prepares, 2, strategy="ddp", group=str(group), all_together=True)
    for result in results:
        assert "the limit is 0.06 GiB for 2 workers" in str(result.error), result.traceback
        assert "Instead: strategy='zero3' needs at least 3 workers of this size" in str(result.error)


@pytest.mark.parametrize(
    ("optimizer", "settings", "bytes_each"),
    [
        (torch.optim.SGD, {"lr": 0.1}, 0), (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, 4),
        (torch.optim.AdamW, {}, 8), (torch.optim.Adam, {"amsgrad": True}, 12),
    ],
)  # fmt: skip
def test_the_state_of_an_optimizer_is_found_by_trying(optimizer: type, settings: dict, bytes_each: int) -> None:
    assert state_bytes(optimizer(nn.Linear(4, 4).parameters(), **settings)) == bytes_each


def test_an_optimizer_that_can_not_be_tried_is_not_judged() -> None:
    assert state_bytes(torch.optim.LBFGS(nn.Linear(4, 4).parameters())) is None


def test_a_worker_that_the_kernel_killed_for_its_memory_is_told_from_one_that_somebody_killed(tmp_path: Path) -> None:
    file = tmp_path / "memory.oom_control"
    told = MemoryReport("weights take 2 GiB", file, kills=1)
    victim = Process(rank=0, pid=1, status=-9, memory=told)
    assert what_happened(victim, [victim]) == "was killed by SIGKILL (out of memory?)"  # the file is on another host
    file.write_text("under_oom 0\noom_kill 1\n")
    assert what_happened(victim, [victim]) == "was killed by SIGKILL"
    file.write_text("under_oom 0\noom_kill 2\n")
    assert what_happened(victim, [victim]) == "was killed by SIGKILL: out of memory. Weights take 2 GiB"


@pytest.mark.parametrize(
    ("kib", "text"),
    [
        (200, "local_sgd fits on 8 workers of this size"),
        (70, "on 4 workers strategy='fsdp' takes 0.00 GiB"),
        (10, "strategy='zero3' needs at least 16 workers of this size"),
    ],
)
def test_what_has_everything_once_per_lane_may_fit_on_more_workers(kib: int, text: str) -> None:
    """10,000 parameters with Adam: 160 kB, and 160 kB for each lane but one copy of the weights; 8 lanes."""
    limit = MemoryLimit(kib * 1000, "here")
    sizes = {"workers": 4, "lanes": 8, "accumulate": 1, "per_host": 1, "on_host": 4}
    fit = memory_check.Fit(choose("local_sgd"), Model(10_000), limit, sharers=1, **sizes)
    assert fit.held(fit.chosen) == 10_000 * (4 + 2 * 16)
    assert not fit.fits
    assert text in fit.advice()


RULES = {
    "int8": ("int8", 8, 8),
    "without feedback": (Compression("int8", feedback=False), 0, 0),
    "topk": (TopK(share=0.1), 8, 0),
    "topk with momentum": (TopK(share=0.1, momentum=0.5), 16, 0),
    "topk with momentum alone": (Compression(TopK(share=0.1, momentum=0.5), feedback=False), 8, 0),
    "powersgd": (PowerSgd(rank=2), 8, 0),
}


@pytest.mark.parametrize(("compression", "lane", "sums"), RULES.values(), ids=RULES)
@pytest.mark.parametrize("bias", ["compressed", "left alone"])
def test_residuals_count_for_what_is_compressed_and_are_what_training_keeps(
    compression: Any, lane: int, sums: int, bias: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes of a parameter for each lane, and for all owners of sums; the state has half of it, what is kept now."""
    monkeypatch.setattr(memory_check, "memory_limit", lambda: MemoryLimit(2**30, "here"))
    given = compression if isinstance(compression, Compression) else Compression(compression)
    if bias == "left alone":
        given = replace(given, rules={"bias": None, **dict(given.rules)})
    has_bias = bias == "compressed" and not isinstance(compression, PowerSgd)  # which leaves vectors alone
    elements = 32 * 48 + (48 if has_bias else 0)
    with Engine(world=World(), lanes=3, device="cpu", compression=given) as engine:
        model = nn.Linear(32, 48)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        fit = memory_check.fit_of(engine.config, engine.world, engine._group.comm, engine.device, [model], [optimizer])
        data = TensorDataset(torch.randn(12, 32))
        prepared, optimizer, loader = engine.prepare(model, optimizer, DataLoader(data, batch_size=2))
        for (points,) in loader:
            engine.backward(prepared(points).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        state = engine._training().strategies.compression_state()
    kept = sum(4 * prod(shard.shape) for kinds in state.values() for kind, shard in kinds.items() if kind != "q")
    assert fit is not None
    assert fit.residuals == Residuals(lane * elements, sums * elements)
    assert fit.held(fit.chosen) - replace(fit, residuals=None).held(fit.chosen) == (3 * lane + sums) * elements
    assert kept == (3 * lane + sums) * elements // 2


def test_on_more_workers_each_has_fewer_lanes_residuals_and_a_smaller_range_of_sums() -> None:
    kept = Residuals(lane=800, sums=800)
    assert [kept.on_worker(workers, 4) for workers in (1, 2, 3, 4)] == [4 * 800 + 800, 2000, 1600 + 267, 1000]


def test_what_fits_without_compression_is_told_and_only_what_takes_it_is_advised() -> None:
    sizes = {"workers": 1, "lanes": 1, "accumulate": 1, "per_host": 1, "on_host": 1}
    limit = MemoryLimit(170_000, "here")
    fit = memory_check.Fit(choose("ddp"), Model(10_000), limit, 1, **sizes, residuals=Residuals(lane=80_000))
    assert not fit.fits
    assert fit.told().startswith("weights, gradients, residuals and optimizer state of 10,000 parameters")
    assert fit.advice() == "without compression strategy='ddp' takes 0.00 GiB"
    without_feedback = replace(fit, residuals=Residuals())
    assert "residuals" not in without_feedback.told()
    assert {other.name for other in without_feedback._others()} == {"ddp", "zero1", "zero2"}


@pytest.mark.parametrize(
    ("offload", "model", "device", "host"),
    [
        ("optimizer", Model(10_000), 4 + 4, 8 + 4 + 4),  # Adam's state, a master and a gradient
        ("optimizer", Model.mixed(10_000), 2 + 2, 12 + 2),
        ("parameters", Model(10_000), 0, 8 + 4 + 4),  # a shard in fp32 is its own master
        ("parameters", Model.mixed(10_000), 0, 12 + 2 + 2),
    ],
)
def test_what_is_offloaded_counts_on_the_host(offload: Any, model: Model, device: int, host: int) -> None:
    """A parameter's bytes, on one worker."""
    limit = MemoryLimit(10_000 * host * 2 - 1, "the host's")
    sizes = {"workers": 1, "lanes": 1, "accumulate": 1, "per_host": 1, "on_host": 1}
    fit = memory_check.Fit(choose("fsdp"), model, MemoryLimit(2**30, "cuda:0"), sharers=1, **sizes, offload=offload)
    assert (fit.held(fit.chosen), fit.offloaded) == (10_000 * device, 10_000 * host)
    assert replace(fit, host_limit=limit).fits_host
    crowded = replace(fit, host_limit=limit, host_sharers=2)
    assert not crowded.fits_host
    assert f"offload={offload!r} does not fit" in crowded.told_of_host()


@pytest.mark.parametrize("strategy", ["ddp", "local_sgd"])
def test_a_worker_with_several_lanes_says_what_they_cost_where_they_are_apart(
    strategy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with Engine(world=World(), lanes=4, strategy=strategy, device="cpu") as engine:
        model = nn.Linear(256, 256)
        engine.prepare(model, torch.optim.AdamW(model.parameters()))
    told = "local_sgd keeps weights, a gradient and optimizer state for each lane: 4.3 MiB for 4 lanes on a worker"
    assert (told in capsys.readouterr().out) == (strategy == "local_sgd")


def test_weights_that_are_not_trained_count_whole_or_as_the_shard_that_a_worker_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory_check, "memory_limit", lambda: MemoryLimit(2**20, "here"))
    model = nn.Sequential(nn.Linear(300, 1000), nn.BatchNorm1d(1000), nn.Linear(1000, 10)).requires_grad_(False)
    adapter = nn.Linear(10, 10)
    with Engine(world=World(), device="cpu") as engine:
        trained = torch.optim.SGD([*adapter.parameters(), model[2].weight], lr=0.1)  # which has a frozen one
        asked = engine.config, engine.world, engine._group.comm, engine.device
        fit = memory_check.fit_of(*asked, [nn.Sequential(model, adapter)], [trained])
    assert fit is not None
    frozen = 4 * sum(tensor.numel() for tensor in (*model.parameters(), *model.buffers())) + 4  # of a count of int64
    assert (fit.model.parameters, fit.model.frozen) == (110, frozen)
    assert not fit.fits
    assert "of 110 parameters and 0.00 GiB of weights that are not trained take" in fit.told()
    on_four = replace(fit, workers=4, lanes=4, on_host=4)
    of_ddp, of_fsdp = (replace(on_four, chosen=choose(name)).held(choose(name)) for name in ("ddp", "fsdp"))
    assert of_ddp == frozen + 110 * 8
    assert of_fsdp == -(-frozen // 4) + 110 * 4 // 4 + 28 * 4  # 28 of 110 are in the largest shard
    whole = replace(choose("fsdp"), config=FsdpConfig(shard_frozen=False))
    assert on_four.held(whole) == of_fsdp - -(-frozen // 4) + frozen


def out_of_memory_error(world: World, *, strategy: str = "ddp") -> str:
    """As a script's forward may raise it after prepare()."""
    memory_check.memory_limit = lambda: MemoryLimit(2**30, "cuda:0")  # type: ignore[attr-defined]
    with Engine(world=world, strategy=strategy) as engine:
        model = nn.Linear(2048, 2048)
        engine.prepare(model, torch.optim.AdamW(model.parameters()))
        error = torch.OutOfMemoryError("CUDA out of memory.")
        out_of_memory.explain(error)
        other = RuntimeError("theirs")
        out_of_memory.explain(other)
        assert not hasattr(other, "__notes__")
        return "".join(traceback.format_exception_only(error))


@pytest.mark.workers
def test_a_device_that_is_out_of_memory_is_told_by_part_with_what_takes_less() -> None:
    weights = r"0.02 GiB of weights, 0.02 GiB of gradients and 0.03 GiB of optimizer state; 0.\d\d GiB were left for"
    (alone,) = run_workers(out_of_memory_error, 1)
    assert re.search(
        rf"paceline: of 1.00 GiB \(cuda:0\) ddp holds {weights} activations and what is under way. "
        r"Less: activation_checkpointing='blocks'; a smaller batch, with accumulate for the rest of it$",
        alone.value.strip(),
    ), alone.value or alone.traceback
    for result in run_workers(out_of_memory_error, 2):
        assert "; strategy='fsdp', which holds 0.03 GiB on 2 workers" in result.value, result.traceback
