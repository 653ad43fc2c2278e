"""A communicator of one: the protocol of every communicator, with collectives that are the identity."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import Tensor

from paceline import World
from paceline.collectives.byte_count import Traffic
from paceline.collectives.canonical_sum import Scatter, scatter_plans_by_lane, sum_plan
from paceline.collectives.communicator import Communicator, SingleWorker
from paceline.collectives.gradient_exchange import GradientExchange, Reduction
from paceline.errors import WorldError
from paceline.world.world import TcpRendezvous
from tests.collectives.one_process import lane_values, one_process_sum, roots_of, same_bits


def test_it_is_rank_0_of_1_whatever_rank_its_world_has() -> None:
    world = World(rank=3, size=4, local_rank=3, local_size=4, rendezvous=TcpRendezvous("127.0.0.1", 1))
    comm = SingleWorker(world)
    assert (comm.rank, comm.size, comm.world) == (0, 1, world)


def test_its_collectives_give_back_what_they_were_given() -> None:
    comm, tensor = SingleWorker(), torch.arange(6.0).view(2, 3)
    comm.all_reduce(tensor).wait()
    comm.broadcast(tensor, root=0).wait()
    assert torch.equal(tensor, torch.arange(6.0).view(2, 3))
    rows, handle = comm.all_gather(tensor)
    handle.wait_for_vote(0)
    assert torch.equal(rows, torch.arange(6.0).view(1, 6))
    out = torch.empty(6)
    comm.all_to_all(out, tensor.view(-1), [6], [6]).wait()
    assert torch.equal(out, torch.arange(6.0))
    assert comm.gather_json({"step": 3}) == [{"step": 3}]
    comm.barrier()


def test_what_it_gathers_is_a_copy_as_in_a_larger_group() -> None:
    tensor = torch.zeros(3)
    rows, _ = SingleWorker().all_gather(tensor)
    rows.fill_(1.0)
    assert torch.equal(tensor, torch.zeros(3))


def test_nothing_travels_and_it_never_ends() -> None:
    comm = SingleWorker()
    comm.abandon("the workers have changed")
    comm.leave_note("it was stopped", votes=0)
    comm.raise_if_left(1)
    comm.all_reduce(torch.zeros(3)).wait()
    comm.close()
    assert (comm.is_over, comm.is_quiet, comm.notes(), comm.traffic) == (False, False, {}, Traffic())


def test_it_has_no_memory_to_share() -> None:
    comm = SingleWorker()
    assert comm.shared(8, torch.float32) is None
    assert comm.common(64) is None
    assert comm.number_of(torch.zeros(3)) is None
    assert comm.bucket_buffer(0, 0, 8, torch.float32) is None


def test_messages_are_refused_because_there_is_no_peer() -> None:
    comm, tensor = SingleWorker(), torch.zeros(3)
    assert comm.send_and_receive([], [], operation="message") == []
    with pytest.raises(WorldError, match="worker 0 is alone: there is no worker 1 to send to"):
        comm.send(tensor, to=1, tag=0)
    with pytest.raises(WorldError, match="worker 0 is alone: there is no worker 1 to receive from"):
        comm.receive(tensor, source=1, tag=0)
    with pytest.raises(WorldError, match="worker 0 is alone: there is no worker 1 to exchange with"):
        comm.send_and_receive([(tensor, 1)], [], operation="message")


@pytest.mark.parametrize("algorithm", [None, "ring", "auto"])
@pytest.mark.parametrize("reduction", ["exact", "fast"])
def test_a_bucket_of_one_worker_is_its_own_sum(reduction: Reduction, algorithm: str | None) -> None:
    values, plan = lane_values((0, 1, 2), 100), sum_plan(3, 1, (0, 1, 2))
    roots = roots_of(plan, 0, values)
    exchange = GradientExchange(SingleWorker(), reduction, algorithm)
    total = exchange.start(0, 0, plan, roots, lambda: torch.empty(100)).wait()
    assert total.data_ptr() == roots[0].data_ptr()
    assert same_bits(total, one_process_sum(values))


def test_a_scattered_bucket_of_one_worker_is_held_whole() -> None:
    values, held = lane_values((0, 1, 2), 100), dict[int, Tensor]()
    exchange = GradientExchange(SingleWorker(), "exact")
    for sent_now in scatter_plans_by_lane(sum_plan(3, 1, (0, 1, 2))):
        nodes = {lane: values[lane].clone() for lane in sent_now.sent[0]}
        scatter = Scatter(0, sent_now, ((0, 100),), torch.float32, nodes, held, buffer_for=lambda _: torch.empty(100))
        exchange.start_scatter(0, scatter, torch.empty(0)).wait()
    assert same_bits(held[0], one_process_sum(values))


def test_every_public_call_that_would_reach_a_group_is_its_own() -> None:
    """A method that is added to the communicator and reaches for c10d fails here, not in a job of one worker."""
    source = {
        name: inspect.getsource(member.fget if isinstance(member, property) else member)
        for name, member in vars(Communicator).items()
        if not name.startswith("_") and (inspect.isfunction(member) or isinstance(member, property))
    }
    reaching = {name for name, text in source.items() if "_groups" in text or "_group_of" in text or "_store" in text}
    only_in_shared_memory = {"shared", "common", "number_of", "there", "bucket_buffer", "forget_buckets"}
    assert reaching - only_in_shared_memory <= vars(SingleWorker).keys()
