"""Data in the training loop: streams, samplers of every kind, resuming, changes that are accepted, the ledger."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    default_collate,
    get_worker_info,
)

from paceline import Engine, World
from paceline.collectives.communicator import SingleWorker
from paceline.data.audit import audit
from paceline.data.loader import ShardedLoader
from paceline.data.work_source import Assignment
from paceline.engine.replaying_source import ReplayingSource
from paceline.engine.sources import make_source
from paceline.errors import CheckpointError, ConfigError, DataError, GenerationEnded, LoopError
from tests.engine.loops import prepared, vectors
from tests.workers import hashes, run_workers

if TYPE_CHECKING:
    from paceline.collectives.communicator import Communicator
    from paceline.engine.step import TrainStep
    from paceline.parameter_server.replay import Replay


class Rows(IterableDataset[tuple[Tensor, Tensor]]):
    """The vectors as a stream that splits itself."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        info = get_worker_info()
        first, stride = (0, 1) if info is None else (info.id, info.num_workers)
        data = vectors(self.samples)
        for number in range(first, self.samples, stride):
            x, y = data[number]
            yield x + 0.01 * torch.rand(8), y  # augmented


class Whole(Rows):
    """The same without splitting: every worker reads all of it."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        data = vectors(200)
        return (data[number] for number in range(self.samples))


def loader_of(kind: str, samples: int, **options: Any) -> DataLoader[Any]:
    if kind == "stream":
        return DataLoader(Rows(samples), batch_size=4, **options)
    if kind == "whole stream":
        return DataLoader(Whole(samples), batch_size=4, **options)
    data = vectors(samples)
    if kind == "batch sampler":
        return DataLoader(data, batch_sampler=BatchSampler(RandomSampler(data), 5, False), **options)
    return DataLoader(data, batch_size=4, shuffle=True, **options)


def trains(
    world: World,
    *,
    kind: str = "shuffled",
    samples: int = 70,
    epochs: int = 2,
    stop_after: int | None = None,
    folder: str | None = None,
    resume: bool = False,
    record: str | None = None,
    accept: tuple[str, ...] = (),
    loader_options: dict[str, Any] | None = None,
    **job: Any,
) -> str:
    torch.use_deterministic_algorithms(True)
    with Engine(world=world, record_samples=record, **({"lanes": 4} | job)) as engine:
        model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.Linear(16, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        loader = loader_of(kind, samples, **(loader_options or {}))
        model, optimizer, loader = engine.prepare(model, optimizer, loader)
        if resume:
            assert folder is not None
            engine.load_state(folder, accept=accept)
        while loader.epoch < epochs:
            for x, y in loader:
                engine.backward(F.mse_loss(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
                if engine.stepped and engine.step == stop_after:
                    assert folder is not None
                    engine.save_state(folder)
                    return engine.weights_hash()
        return engine.weights_hash()


# -- bits --------------------------------------------------------------------------------------------------------------


@pytest.mark.workers
@pytest.mark.parametrize("kind", ["stream", "whole stream", "batch sampler"])
def test_streams_and_batch_samplers_give_one_hash_at_any_number_of_workers(kind: str) -> None:
    alone = hashes(run_workers(trains, 1, kind=kind))
    for workers in (2, 3, 4):
        assert hashes(run_workers(trains, workers, kind=kind)) == alone


def masked(rows: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """A collate_fn that draws, as the one that masks tokens for a language model."""
    x, y = default_collate(rows)
    return x * (torch.rand(x.shape) > 0.2), y


@pytest.mark.workers
@pytest.mark.parametrize("kind", ["stream", "whole stream", "batch sampler", "shuffled"])
def test_a_collate_fn_that_draws_gives_one_hash_at_any_number_of_workers(kind: str) -> None:
    options = {"collate_fn": masked}
    alone = hashes(run_workers(trains, 1, kind=kind, epochs=1, loader_options=options))
    for workers in (2, 3):
        assert hashes(run_workers(trains, workers, kind=kind, epochs=1, loader_options=options)) == alone


@pytest.mark.workers
@pytest.mark.parametrize("kind", ["whole stream", "batch sampler"])
def test_a_collate_fn_that_draws_in_loader_processes_gives_the_same_hash(kind: str) -> None:
    """Each of them imports torch anew, which takes seconds: once is enough."""
    alone = hashes(run_workers(trains, 1, kind=kind, epochs=1, loader_options={"collate_fn": masked}))
    options = {"collate_fn": masked, "num_workers": 1}
    assert hashes(run_workers(trains, 2, kind=kind, epochs=1, loader_options=options)) == alone


@pytest.mark.workers
@pytest.mark.parametrize("kind", ["stream", "whole stream", "batch sampler", "shuffled"])
def test_a_run_stopped_and_continued_on_others_has_the_hash_of_one_that_never_stopped(
    kind: str, tmp_path: Path
) -> None:
    whole = hashes(run_workers(trains, 2, kind=kind))
    for stop in (2, 5):
        folder = str(tmp_path / f"{kind}-{stop}")
        run_workers(trains, 3, kind=kind, stop_after=stop, folder=folder)
        resumed = run_workers(_quiet, 1 + stop // 2, kind=kind, folder=folder, resume=True)
        assert hashes(resumed) == whole


def _quiet(world: World, **options: Any) -> str:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return trains(world, **options)


@pytest.mark.workers
def test_a_stream_with_loader_processes_gives_one_hash() -> None:
    options = {"kind": "stream", "loader_options": {"num_workers": 2, "persistent_workers": True}}
    assert hashes(run_workers(trains, 2, **options)) == hashes(run_workers(trains, 1, **options))


class Ending(Whole):
    """Only its samples show where it ends: a number that differs between workers is found before the first of them."""

    def __init__(self, samples: int) -> None:
        super().__init__(200)
        self.last = [samples]

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return islice(super().__iter__(), self.last[0])


def streams_differ(world: World) -> None:
    with Engine(world=world, lanes=2) as engine:
        model = nn.Linear(8, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = DataLoader(Ending([20, 23][world.rank]), batch_size=4)
        model, optimizer, loader = engine.prepare(model, optimizer, loader)
        for x, y in loader:
            engine.backward(F.mse_loss(model(x), y))
            optimizer.step()


@pytest.mark.workers
def test_a_stream_that_differs_between_workers_is_named() -> None:
    for result in run_workers(streams_differ, 2):
        assert result.error is not None
        text = r"ReplicaError: the stream gives worker 0 other samples than the others: lane 1 has \[0\] samples there"
        assert re.match(text, result.error), result.error


def samplers_differ(world: World) -> None:
    with Engine(world=world, lanes=2) as engine:
        model = nn.Linear(8, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        order = list(range(20))[:: -1 if world.rank else 1]
        loader = DataLoader(vectors(20), batch_size=4, sampler=order)
        model, optimizer, loader = engine.prepare(model, optimizer, loader)
        for x, y in loader:
            engine.backward(F.mse_loss(model(x), y))
            optimizer.step()


@pytest.mark.workers
def test_a_sampler_that_differs_between_workers_is_named() -> None:
    for result in run_workers(samplers_differ, 2):
        assert result.error is not None
        assert result.error.startswith("ReplicaError: the sampler gives worker 1 another order than worker 0")


def content_differs(world: World) -> None:
    with Engine(world=world, lanes=2) as engine:
        model = nn.Linear(8, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, loader = engine.prepare(model, optimizer, DataLoader(Shuffling(world.rank), batch_size=4))
        for x, y in loader:
            engine.backward(F.mse_loss(model(x), y))
            optimizer.step()


class Shuffling(Whole):
    def __init__(self, rank: int) -> None:
        super().__init__(40)
        self.first = [rank]

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        rows = list(super().__iter__())
        return iter(rows[self.first[0] :] + rows[: self.first[0]])


@pytest.mark.workers
def test_a_whole_stream_in_another_order_on_one_worker_is_named() -> None:
    for result in run_workers(content_differs, 2):
        assert result.error is not None
        assert result.error.startswith("ReplicaError: the stream gives worker 1 other samples than worker 0;")


def draws_after_the_loop(world: World) -> float:
    with Engine(world=world, lanes=4) as engine:
        model = nn.Linear(8, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, loader = engine.prepare(model, optimizer, DataLoader(Rows(38), batch_size=4))
        for x, y in loader:
            engine.backward(F.mse_loss(model(x), y))
            optimizer.step()
        return float(torch.rand(()))


@pytest.mark.workers
def test_what_is_drawn_after_the_loop_is_the_same_on_every_worker() -> None:
    drawn = {result.value for workers in (1, 2, 3) for result in run_workers(draws_after_the_loop, workers)}
    assert len(drawn) == 1


# -- looking, stopping, progress ---------------------------------------------------------------------------------------


def test_a_look_at_a_batch_does_not_spoil_the_loop() -> None:
    with Engine(lanes=2) as engine:
        model, optimizer, loader = prepared(engine)
        next(iter(loader))
        for x, y in loader:
            engine.backward(F.mse_loss(model(x), y))
            optimizer.step()
        assert engine.step == 4


def test_a_stop_after_the_last_step_of_an_epoch_does_not_stop_the_next() -> None:
    with Engine(lanes=2) as engine:
        model, optimizer, loader = prepared(engine)
        for epoch in range(2):
            for x, y in loader:
                engine.backward(F.mse_loss(model(x), y))
                optimizer.step()
                if epoch == 0 and engine.step == 4:
                    engine.stop()
        assert engine.step == 8


def test_progress_counts_what_is_left_of_the_epoch() -> None:
    with Engine(lanes=2) as engine:
        model, optimizer, loader = prepared(engine)
        for x, y in loader:
            engine.stop()
            engine.backward(F.mse_loss(model(x), y))
            optimizer.step()
        assert engine.progress(loader)._total == 4


# -- plain datasets, evaluation ----------------------------------------------------------------------------------------


def test_a_plain_dataset_is_dealt_by_the_global_batch_size() -> None:
    with Engine(lanes=4, global_batch_size=16) as engine:
        model = nn.Linear(8, 1)
        model, optimizer, loader = engine.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), vectors(64))
        shapes = []
        for x, y in loader:
            shapes.append(len(x))
            engine.backward(F.mse_loss(model(x), y))
            optimizer.step()
    assert shapes == [4] * 16


def test_a_plain_dataset_without_a_batch_size_is_refused_with_what_to_do() -> None:
    model = nn.Linear(8, 1)
    text = r"prepare\(\) got a TensorDataset without a batch size; give Engine\(global_batch_size=…\), or DataLoader"
    with Engine(lanes=2) as engine, pytest.raises(ConfigError, match=text):
        engine.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), vectors(64))


def evaluates_a_stream(world: World, *, samples: int, processes: int) -> list[float]:
    with Engine(world=world, lanes=4) as engine:
        loader = engine.prepare(DataLoader(Whole(samples), batch_size=3, num_workers=processes))
        return torch.cat([engine.gather_for_metrics(y) for _, y in loader]).flatten().tolist()  # type: ignore[no-any-return]


@pytest.mark.workers
@pytest.mark.parametrize(("workers", "samples", "processes"), [(1, 10, 0), (2, 11, 1), (3, 20, 0), (4, 3, 0)])
def test_an_evaluation_over_a_stream_counts_every_sample_once_in_order(
    workers: int, samples: int, processes: int
) -> None:
    expected = vectors(200).tensors[1][:samples].flatten().tolist()
    for result in run_workers(evaluates_a_stream, workers, samples=samples, processes=processes):
        assert result.value == expected, result.error


# -- other workers in the middle of an epoch ---------------------------------------------------------------------------


class Group:
    """A communicator of one worker; it fails once it is abandoned."""

    size = 1
    abandoned = False

    def all_gather(self, tensor: Tensor, doing: str = "") -> tuple[Tensor, Any]:
        return tensor.unsqueeze(0), self

    def wait_for_vote(self, votes: Any) -> None:
        if self.abandoned:
            raise GenerationEnded("worker 1 was lost")


def test_a_stream_whose_agreement_is_cut_off_goes_on_with_the_communicator_that_there_is_then() -> None:
    groups = [Group()]
    deal, step = (
        Assignment(lanes=2, accumulate=1, own_lanes=(0, 1), seed=3),
        cast("TrainStep", SimpleNamespace(votes=None)),
    )
    loader = DataLoader(Rows(16), batch_size=2)
    source = make_source(loader, deal, lambda: cast("Communicator", groups[-1]), step)
    items = source.items()
    handed = [next(items) for _ in range(2)]
    groups[-1].abandoned = True
    with pytest.raises(GenerationEnded):
        next(items)
    groups.append(Group())
    source.reassign((0, 1), source.merged([source.state_after(None)]))
    again = source.items()
    assert [(item, batch[1].tolist()) for item, batch in (next(again), next(again))] == [
        (item, batch[1].tolist()) for item, batch in handed
    ]


def test_a_worker_that_is_left_alone_has_nobody_to_agree_with() -> None:
    deal, step = (
        Assignment(lanes=2, accumulate=1, own_lanes=(0, 1), seed=3),
        cast("TrainStep", SimpleNamespace(votes=None)),
    )
    source = make_source(DataLoader(Rows(16), batch_size=2), deal, SingleWorker, step)
    assert sum(item.samples for item, _ in source.items()) == 16


def test_workers_can_not_join_or_leave_a_replay() -> None:
    deal = Assignment(lanes=2, accumulate=1, own_lanes=(0, 1), seed=3)
    source = ReplayingSource(ShardedLoader(loader_of("shuffled", 16), deal), cast("Replay", None), cast("TrainStep", 0))
    with pytest.raises(ConfigError, match="a replay is one process that follows the log of its run: workers can't"):
        source.reassign((0,))


# -- a resume that differs ---------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """The state of a run of lanes=4, batch size 4, 64 samples after one step."""
    with Engine(lanes=4) as engine:
        model, optimizer, loader = prepared(engine, samples=64, shuffle=True)
        for x, y in loader:
            engine.stop()
            engine.backward(F.mse_loss(model(x), y))
            optimizer.step()
        engine.save_state(tmp_path / "state")
    return tmp_path / "state"


@pytest.mark.parametrize(
    ("job", "loader", "text"),
    [
        ({"seed": 5}, {}, r"seed was 0, is 5\. To go on .* accept=\['seed'\]\)"),
        ({}, {"batch_size": 8}, r"batch size was 4, is 8\. To go on all the same, still with every sample once: "),
        ({"lanes": 2, "accumulate": 2}, {}, r"lanes was 4, is 2; accumulate was 1, is 2\. .*\['accumulate', 'lanes'\]"),
        ({}, {"samples": 60}, r"samples was 64, is 60"),
        ({}, {"drop_last": True}, "drop_last was False, is True"),
        ({}, {"shuffle": False}, "order was 'shuffled', is 'sequential'"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_resume_that_differs_says_what_differs_and_how_to_go_on_all_the_same(
    saved: Path, job: dict[str, Any], loader: dict[str, Any], text: str
) -> None:
    with Engine(**({"lanes": 4} | job)) as engine:
        prepared(engine, **({"samples": 64, "shuffle": True} | loader))
        with pytest.raises(CheckpointError, match=text):
            engine.load_state(saved)


def test_an_accepted_seed_and_batch_size_finish_the_epoch_with_the_samples_that_are_left(saved: Path) -> None:
    with Engine(lanes=2, seed=5) as engine:
        model, optimizer, loader = prepared(engine, samples=64, shuffle=True, batch_size=6)
        engine.load_state(saved, accept=["lanes", "seed", "batch size"])
        seen = 0
        for x, y in loader:
            seen += len(x)
            engine.backward(F.mse_loss(model(x), y))
            optimizer.step()
    assert seen == 64 - 16


def test_a_dataset_that_shrank_can_t_be_accepted(saved: Path) -> None:
    with Engine(lanes=4) as engine:
        prepared(engine, samples=60, shuffle=True)
        with pytest.raises(DataError, match="the dataset has shrunk from 64 to 60 samples in the middle of epoch 0"):
            engine.load_state(saved, accept=["samples"])


def test_accepting_what_does_not_exist_is_refused_with_what_does(saved: Path) -> None:
    with Engine(lanes=4) as engine:
        prepared(engine, samples=64, shuffle=True)
        with pytest.raises(CheckpointError, match=r"accept=\['sead'\] names nothing of this job; known are lanes, "):
            engine.load_state(saved, accept=["sead"])


def test_the_loader_s_own_state_goes_on_in_the_middle_of_an_epoch() -> None:
    with Engine(lanes=4) as engine:
        model, optimizer, loader = prepared(engine, samples=64, shuffle=True)
        states, batches = [], []
        for x, y in loader:
            batches.append(x)
            engine.backward(F.mse_loss(model(x), y))
            optimizer.step()
            if engine.stepped:
                states.append(loader.state_dict())
        loader.load_state_dict(states[1])
        again = []
        for x, y in loader:
            again.append(x)
            engine.backward(F.mse_loss(model(x), y))
            optimizer.step()
        assert torch.equal(torch.cat(again), torch.cat(batches[8:]))


# -- the sample log ---------------------------------------------------------------------------------------------


@pytest.mark.workers
@pytest.mark.parametrize("kind", ["shuffled", "batch sampler", "stream", "whole stream"])
def test_the_ledger_of_a_run_stopped_twice_proves_that_nothing_was_lost_or_repeated(kind: str, tmp_path: Path) -> None:
    job = {"kind": kind, "record": str(tmp_path), "folder": str(tmp_path / "state"), "accumulate": 2}
    run_workers(trains, 4, stop_after=1, **job)
    run_workers(_quiet, 3, stop_after=3, resume=True, **job)
    hashes(run_workers(_quiet, 2, resume=True, **job))
    report = audit(tmp_path)
    assert (report.lost, report.repeated) == (0, 0), report
    assert len(list((tmp_path / "samples").iterdir())) == 4 + 3 + 2


def leaves_out(world: World, *, record: str) -> None:
    import warnings

    warnings.simplefilter("ignore")
    with Engine(world=world, lanes=2, record_samples=record) as engine:
        model, optimizer, loader = prepared(engine, samples=32)
        first = True
        for x, y in loader:
            if engine.step == 1 and world.rank == 1 and first:
                first = False
                continue
            engine.backward(F.mse_loss(model(x), y))
            optimizer.step()


@pytest.mark.workers
def test_what_the_loop_left_out_is_on_record(tmp_path: Path) -> None:
    hashes(run_workers(leaves_out, 2, record=str(tmp_path)))
    report = audit(tmp_path)
    assert (report.lost, report.repeated, report.left_out) == (0, 0, 4)


def test_steps_done_again_after_a_rollback_are_not_repeated_samples(tmp_path: Path) -> None:
    """A job killed after its last saved state goes back to it."""
    with Engine(lanes=4, record_samples=tmp_path) as engine:
        model, optimizer, loader = prepared(engine, samples=64, shuffle=True)
        for attempt in range(2):
            if attempt:
                engine.load_state(tmp_path / "state")
            for x, y in loader:
                engine.backward(F.mse_loss(model(x), y))
                optimizer.step()
                if engine.stepped and engine.step == 2 and not attempt:
                    engine.save_state(tmp_path / "state")
    report = audit(tmp_path)
    assert (report.lost, report.repeated) == (0, 0)


def test_the_time_spent_waiting_for_data_is_measured() -> None:
    import time

    with Engine(lanes=2) as engine:
        model = nn.Linear(8, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        slow = DataLoader(vectors(16), batch_size=4, collate_fn=lambda rows: time.sleep(0.05) or vectors(4).tensors)
        model, optimizer, loader = engine.prepare(model, optimizer, slow)
        for x, y in loader:
            engine.backward(F.mse_loss(model(x), y))
            optimizer.step()
            if engine.stepped:
                assert 0.1 <= engine.timing.waited_for_data_s < 1.0


# -- epochs by hand ----------------------------------------------------------------------------------------------------


def resumes_by_hand(world: World, *, kind: str, first: int, epochs: int, folder: str, set_epoch: bool) -> str:
    """As scripts without save_state do: torch.save after epoch 0, torch.load, and the loop over the other epochs."""
    with Engine(world=world, lanes=4) as engine:
        model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.Linear(16, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model, optimizer, loader = engine.prepare(model, optimizer, loader_of(kind, 70))
        file = Path(folder) / "by_hand.pt"
        if first:
            saved = torch.load(file)
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
        for epoch in range(first, epochs):
            if set_epoch:
                loader.set_epoch(epoch)
            for x, y in loader:
                engine.backward(F.mse_loss(model(x), y))
                optimizer.step()
        engine.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
        engine.barrier()
        return engine.weights_hash()


@pytest.mark.workers
@pytest.mark.parametrize("kind", ["shuffled", "stream", "whole stream", "batch sampler"])
def test_a_loop_over_epochs_may_start_anywhere(kind: str, tmp_path: Path) -> None:
    job: dict[str, Any] = {"kind": kind, "folder": str(tmp_path)}
    whole = hashes(run_workers(resumes_by_hand, 1, first=0, epochs=3, set_epoch=False, **job))
    run_workers(resumes_by_hand, 2, first=0, epochs=1, set_epoch=True, **job)
    assert hashes(run_workers(resumes_by_hand, 2, first=1, epochs=3, set_epoch=True, **job)) == whole


def test_going_on_by_hand_without_set_epoch_is_warned_of(tmp_path: Path) -> None:
    job: dict[str, Any] = {"kind": "shuffled", "folder": str(tmp_path), "set_epoch": False}
    resumes_by_hand(World(), first=0, epochs=1, **job)
    with pytest.warns(UserWarning, match=r"the data begin with epoch 0.*loader\.set_epoch\(epoch\)"):
        resumes_by_hand(World(), first=1, epochs=2, **job)


@pytest.mark.parametrize("saved", [True, False])
def test_a_schedule_that_begins_anew_beside_a_loaded_optimizer_is_warned_of(
    saved: bool, recwarn: pytest.WarningsRecorder
) -> None:
    def trains(state: dict[str, Any]) -> dict[str, Any]:
        with Engine(lanes=2) as engine:
            model = nn.Linear(8, 1)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=100)
            model, optimizer, loader, scheduler = engine.prepare(model, optimizer, loader_of("shuffled", 16), scheduler)
            if state:
                optimizer.load_state_dict(state["optimizer"])
                loader.set_epoch(1)
            if state and saved:
                scheduler.load_state_dict(state["scheduler"])
            for x, y in loader:
                engine.backward(F.mse_loss(model(x), y))
                optimizer.step()
                scheduler.step()
            return {"optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}

    trains(trains({}))
    told = [str(one.message) for one in recwarn if "the LinearLR begins at its first" in str(one.message)]
    assert len(told) == (0 if saved else 1), told


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "fsdp"])
@pytest.mark.parametrize("make", [torch.optim.Adagrad, torch.optim.AdamW], ids=lambda make: make.__name__)
def test_an_optimizer_that_is_new_has_no_history(make: Any, strategy: str) -> None:
    with Engine(strategy=strategy, lanes=2) as engine:
        model = nn.Linear(8, 1)
        model, optimizer, loader = engine.prepare(model, make(model.parameters()), loader_of("shuffled", 8))
        for x, y in loader:
            engine.backward(F.mse_loss(model(x), y))
            optimizer.step()
        assert engine.step == 1  # and no warning, which would be an error


def test_set_epoch_leaves_the_rest_of_an_epoch_and_stays_in_the_same() -> None:
    with Engine() as engine:
        model, optimizer, loader = prepared(engine)

        def train(steps: int) -> None:
            for x, y in loader:
                engine.backward(F.mse_loss(model(x), y))
                optimizer.step()
                steps -= 1
                if not steps:
                    break

        train(3)
        loader.set_epoch(0)
        assert (loader.epoch, loader.position) == (0, 12)
        loader.set_epoch(2)
        assert (loader.epoch, loader.position) == (2, 0)
        train(8)
        assert (loader.epoch, loader.position) == (3, 0)
        with pytest.raises(ConfigError, match="set_epoch: epoch=-1"):
            loader.set_epoch(-1)
        with pytest.raises(LoopError, match=r"belongs before `for batch in loader`"):
            for _ in loader:
                loader.set_epoch(4)


class Mapped(Dataset[Tensor]):
    def __init__(self, function: Callable[[int], Tensor]) -> None:
        self.function = function

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        return self.function(index)


class MappedStream(IterableDataset[Tensor]):
    def __init__(self, function: Callable[[int], Tensor]) -> None:
        self.function = function

    def __iter__(self) -> Iterator[Tensor]:
        return map(self.function, range(8))


@pytest.mark.job
@pytest.mark.filterwarnings("ignore:Got pickle error")  # torch's, before it raises
@pytest.mark.parametrize("kind", [Mapped, MappedStream])
@pytest.mark.parametrize("trains", [True, False], ids=["training", "evaluation"])
def test_a_dataset_that_cannot_be_pickled_for_its_processes_is_said(kind: Any, trains: bool) -> None:
    data = kind(lambda index: torch.tensor([float(index)]))
    loader = DataLoader(data, batch_size=2, num_workers=1, multiprocessing_context="forkserver")
    model = nn.Linear(1, 1)
    with Engine(world=World()) as engine:
        things = (model, torch.optim.SGD(model.parameters()), loader)
        ready = engine.prepare(*things)[2] if trains else engine.prepare(loader)
        with pytest.raises(DataError, match=r"local object .*lambda.*multiprocessing_context='fork' or num_workers=0"):
            next(iter(ready))
