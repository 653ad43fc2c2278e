"""Sizes and places of a mesh, parts of full tensors, and what is refused: one clear line, before the first step."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch.distributed.tensor.parallel import ColwiseParallel

from paceline import Mesh
from paceline.errors import ConfigError
from paceline.mesh.mesh import world_of
from paceline.strategies.fsdp.hybrid import HybridConfig, hybrid_lanes_of_parts
from paceline.world.lanes import lanes_of_parts, neighbouring_lanes
from paceline.world.world import Elasticity, World
from tests.mesh.small_llama import PLAN
from tests.mesh.training import first_error, trained
from tests.workers import run_workers, worlds


def test_every_worker_has_one_place_and_groups_meet_in_it() -> None:
    draw = random.Random(1)
    for _ in range(50):
        dp, cp, tp = (draw.choice([1, 2, 3, 4]) for _ in range(3))
        mesh, everyone = Mesh(dp=-1, cp=cp, tp=tp).of_workers(dp * cp * tp), range(dp * cp * tp)
        assert mesh.data == dp
        places = [mesh.place(rank) for rank in everyone]
        assert len({(p.data, p.context, p.tensor) for p in places}) == len(places)
        for place in places:
            assert set(place.replicas) & set(place.tensor_group) == {place.rank}
            assert {places[rank].tensor for rank in place.replicas} == {place.tensor}
            assert [places[rank].tensor for rank in place.tensor_group] == list(range(tp))
            assert len(place.replicas) == dp * cp


def test_a_column_of_the_mesh_knows_who_shares_a_host() -> None:
    seat = World(rank=5, size=8, local_rank=1, local_size=4, host_rank=1, hosts=2, rendezvous=worlds(2)[0].rendezvous)
    column = world_of(seat, Mesh(tp=2).of_workers(8).place(5).replicas)  # 1, 3 | 5, 7
    assert (column.rank, column.size, column.local_rank, column.local_size) == (2, 4, 0, 2)
    assert (column.host_rank, column.hosts) == (1, 2)


def test_the_parts_of_a_sequence_have_lanes_of_their_own() -> None:
    found = lanes_of_parts(neighbouring_lanes(3, 2), 2)
    assert found == ((0,), (1,), (2, 4), (3, 5))


def test_sizes_of_data_parallelism_say_the_strategy() -> None:
    from paceline.engine.config import _by_mesh

    assert _by_mesh(Mesh(dp_shard=4, cp=2)) == "fsdp"
    assert _by_mesh(Mesh(dp_replicate=2, dp_shard=2, cp=2)) == HybridConfig(shard_over=4)
    assert _by_mesh(Mesh(dp_replicate=2, cp=2)) is None


def test_under_hybrid_workers_that_share_a_sample_have_the_same_lanes_of_it() -> None:
    draw = random.Random(2)
    for _ in range(100):
        parts, data, size = draw.choice([1, 2, 3]), draw.randint(1, 6), draw.randint(1, 6)
        lanes = draw.randint(data, 12)
        if data * parts % size:
            continue
        groups = tuple(tuple(range(low, low + size)) for low in range(0, data * parts, size))
        found = hybrid_lanes_of_parts(lanes * parts, groups, parts)
        assert sorted(lane for own in found for lane in own) == list(range(lanes * parts))
        for worker, own in enumerate(found):
            assert {lane % parts for lane in own} <= {worker % parts}
            assert [lane // parts for lane in own] == [lane // parts for lane in found[worker - worker % parts]]


@pytest.mark.parametrize(
    ("mesh", "text"),
    [
        (Mesh(tp=3), "make 3 workers or a multiple of it, but the job has 4"),
        (Mesh(dp=2, tp=4), "make 8 workers, but the job has 4"),
        (Mesh(dp_replicate=2, dp_shard=2, tp=2), "make 8 workers, but the job has 4"),
    ],
)
def test_sizes_that_do_not_multiply_to_the_workers_are_refused(mesh: Mesh, text: str) -> None:
    with pytest.raises(ConfigError, match=text) as refused:
        mesh.of_workers(4)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ({"tp": 0}, "tp"),
        ({"dp": -1, "tp": -1}, "both to be inferred"),
        ({"dp": 2, "dp_shard": 2}, "give dp, or these two"),
    ],
)
def test_sizes_that_are_none_are_refused(sizes: dict[str, int], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Mesh(**sizes)


def test_an_elastic_job_takes_no_mesh() -> None:
    from paceline.engine.config import mesh_of

    first, *_ = worlds(2)
    elastic = World(size=2, local_size=2, rendezvous=first.rendezvous, elastic=Elasticity())
    with pytest.raises(ConfigError, match="elastic: a lost worker would leave a part of a model behind"):
        mesh_of(elastic, Mesh(tp=2))


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"mesh": Mesh(tp=2), "model": {"heads": 1}}, "tp=2 does not divide the 1 heads of blocks.0.attention (n_heads)"),
    ({"mesh": Mesh(tp=2), "plan": {"blocks.*.mlp.gaet": "colwise"}}, "has no such module"),
    ({"mesh": Mesh(tp=2), "plan": {"norm": "sideways"}}, "the style 'sideways'"),
    ({"mesh": Mesh(tp=2), "plan": {"head": 3}}, "a style is torch's"),
    (
        {"mesh": Mesh(tp=2), "model": {"tied": True}, "plan": PLAN | {"head": ColwiseParallel()}},
        "splits tied weights differently",
    ),
    ({"mesh": Mesh(tp=2), "strategy": "local_sgd"}, "can't be combined with workers that share a model"),
    ({"mesh": Mesh(tp=2), "compression": "int8"}, "with compression: can't be combined"),
    ({"mesh": Mesh(dp_shard=2), "strategy": "ddp"}, "these sizes are for fsdp or zero1"),
    ({"mesh": Mesh(tp=3)}, "but the job has 2"),
    ({"mesh": Mesh(dp=2), "plan": PLAN}, "plan=…) is for tensor parallelism"),
    ({"mesh": Mesh(tp=2), "record_samples": "there"}, "with record_samples"),
]


@pytest.mark.workers
def test_bad_input_gets_one_line_before_the_first_step() -> None:
    for options, text in REFUSED:
        results = run_workers(trained, 2, **options)
        for result in results:
            error = str(result.error)
            assert error.startswith("ConfigError"), (options, error)
            assert text in error
            assert "\n" not in error


@pytest.mark.workers
def test_a_sequence_that_cp_does_not_divide_is_refused() -> None:
    found = first_error(run_workers(trained, 3, mesh=Mesh(cp=3)))
    assert "ConfigError: context parallel" in found
    assert "16" in found
    assert "\n" not in found


@pytest.mark.workers
def test_dropout_is_equal_on_whole_activations_and_differs_on_sharded_ones() -> None:
    first, second = run_workers(masks, 2)
    assert first.error is second.error is None, first.traceback or second.traceback
    assert first.value["whole"] == second.value["whole"]
    assert first.value["sharded"] != second.value["sharded"]
    assert len(set(map(tuple, first.value["sharded"]))) == 2  # another in every pass


def masks(world: World) -> dict[str, list[list[float]]]:
    import paceline
    from tests.mesh.small_llama import SmallLlama, loss_of, tokens

    engine = paceline.Engine(world=world, mesh=Mesh(tp=2), threads=1, lanes=1, timeout_s=20)
    model = SmallLlama(blocks=1, dropout=0.5)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader: Any = torch.utils.data.DataLoader(tokens(4), batch_size=2)
    model, optimizer, loader = engine.prepare(model, optimizer, loader, plan=PLAN)
    seen: dict[str, list[list[float]]] = {"whole": [], "sharded": []}

    def look(name: str) -> Any:
        return lambda _, given, out: seen[name].append((out == 0).float().mean(dim=(0, 1)).tolist())

    model.blocks[0].dropout.register_forward_hook(look("whole"))
    model.blocks[0].mlp.dropout.register_forward_hook(look("sharded"))
    for batch, targets in loader:
        engine.backward(loss_of(model(batch), targets))
        optimizer.step()
    engine.weights_hash()  # raises where whole parameters have gone apart
    return seen


def test_the_launcher_refuses_workers_that_are_no_multiple_of_those_that_share_a_model() -> None:
    from paceline.cli.run import _with_mesh
    from paceline.errors import LaunchError
    from paceline.world.world import LaunchSettings

    with pytest.raises(
        LaunchError, match=r"--tp 2 --cp 2: 4 workers share a model, and 6 are no multiple .* --workers 4"
    ):
        _with_mesh(LaunchSettings(), 6, 2, 2)
    assert _with_mesh(LaunchSettings(), 8, 2, 2) == LaunchSettings(tp=2, cp=2)
