from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from paceline.errors import LaunchError, WorldError
from paceline.launch.agents import worker_variables
from paceline.launch.host_link import Link, SealedLink, prove_as_coordinator, prove_as_host
from paceline.launch.rendezvous import (
    Address,
    HostAssignment,
    HostRendezvous,
    JoinRequest,
    free_port,
    join,
)
from paceline.world.environment import read_world
from paceline.world.world import LaunchSettings


async def over_loopback(
    coordinator: Callable[[Link], Awaitable[object]], host: Callable[[Link], Awaitable[object]]
) -> list[object]:
    """Both ends of one connection; what each returned or raised."""
    done: asyncio.Future[object] = asyncio.get_running_loop().create_future()

    async def accept(link: Link) -> None:
        try:
            done.set_result(await coordinator(link))
        except WorldError as error:
            done.set_result(error)
        finally:
            await link.close()

    loop, accepting = asyncio.get_running_loop(), []
    server = await loop.create_server(
        lambda: Link(lambda link: accepting.append(asyncio.create_task(accept(link)))), "127.0.0.1", 0
    )
    _, link = await loop.create_connection(Link, *server.sockets[0].getsockname())
    try:
        result: object = await host(link)
    except WorldError as error:
        result = error
    await link.close()
    server.close()
    return [await asyncio.wait_for(done, 5), result]


def test_both_sides_prove_the_secret_and_then_talk() -> None:
    async def coordinator(link: Link) -> object:
        sealed = await prove_as_coordinator(link, b"secret")
        heard = await sealed.receive()
        sealed.send({"answer": heard})
        return heard

    async def host(link: Link) -> object:
        sealed = await prove_as_host(link, b"secret")
        sealed.send({"question": 1})
        return await sealed.receive()

    assert asyncio.run(over_loopback(coordinator, host)) == [{"question": 1}, {"answer": {"question": 1}}]


def test_a_host_with_another_secret_is_refused_by_both_sides() -> None:
    coordinator, host = asyncio.run(
        over_loopback(lambda link: prove_as_coordinator(link, b"right"), lambda link: prove_as_host(link, b"wrong"))
    )
    assert "closed the connection during the handshake" in str(coordinator)
    assert "the coordinator has another secret than this host" in str(host)


def test_a_host_that_skips_the_check_is_refused_all_the_same() -> None:
    async def impostor(link: Link) -> object:
        link.send({"paceline": 1, "nonce": "00"})
        challenge = await link.receive()
        assert challenge is not None
        link.send({"proof": challenge["proof"]})  # the coordinator's own proof, sent back
        return await link.receive()

    coordinator, host = asyncio.run(over_loopback(lambda link: prove_as_coordinator(link, b"right"), impostor))
    assert str(coordinator) == "the host does not know this job's secret"
    assert host == {"welcome": False}


def test_a_repeated_line_is_dropped() -> None:
    async def coordinator(link: Link) -> object:
        sealed = await prove_as_coordinator(link, b"secret")
        return [await sealed.receive(), await sealed.receive()]

    async def host(link: Link) -> None:
        sealed = await prove_as_host(link, b"secret")
        sealed.send({"n": 1})
        again = SealedLink(link, sealed._key, sends_as="from host", receives_as="")
        again.send({"n": 1})

    heard, _ = asyncio.run(over_loopback(coordinator, host))
    assert "forged or repeated" in str(heard)


@pytest.mark.parametrize("text", ["127.0.0.1", ":29400", "host:", "host:99999", "host:x"])
def test_an_address_that_is_none_is_named(text: str) -> None:
    with pytest.raises(LaunchError, match="is not ADDRESS:PORT"):
        Address.parse(text)


def test_an_ipv6_address_keeps_its_colons() -> None:
    assert Address.parse("[fd00::1]:29400") == Address("fd00::1", 29400)
    assert str(Address.parse("[fd00::1]:29400")) == "[fd00::1]:29400"


def test_servers_are_counted_after_the_workers_of_all_hosts_and_start_on_the_first() -> None:
    assignment = HostAssignment(0, 2, 0, 2, 5, LaunchSettings(), "10.0.0.1", "10.0.0.1", 29999, servers=2)
    worlds = [
        read_world(worker_variables(assignment.world(local_rank, "/run/socket"), assignment))
        for local_rank in range(assignment.processes)
    ]
    assert [(world.name, world.rank, world.local_rank) for world in worlds] == [
        ("worker 0", 0, 0),
        ("worker 1", 1, 1),
        ("server 0", 5, 2),
        ("server 1", 6, 3),
    ]
    assert {(world.size, world.local_size, world.servers) for world in worlds} == {(5, 2, 2)}
    assert replace(assignment, host_rank=1, first_rank=2, workers=3).processes == 3


def test_a_host_with_other_servers_than_the_first_is_refused() -> None:
    async def meet() -> str:
        address = Address("127.0.0.1", free_port("127.0.0.1"))
        said: list[str] = []
        rendezvous = HostRendezvous(address, JoinRequest(0, 2, 1, LaunchSettings(), servers=1), b"secret", said.append)
        meeting = asyncio.create_task(rendezvous.meet(10, lambda size: LaunchSettings()))
        with pytest.raises(WorldError) as refused:
            await join(address, JoinRequest(1, 2, 1, LaunchSettings(), servers=2), b"secret", 5)
        assignment, link = await join(address, JoinRequest(1, 2, 1, LaunchSettings()), b"secret", 5)
        _, joined = await meeting
        for each in (link, *(host.link for host in joined.values())):
            await each.close()
        assert assignment.servers == 1, "a host may leave the flag out"
        return str(refused.value)

    assert "started with --servers 2, the coordinator with --servers 1; servers run on host 0 only" in asyncio.run(
        meet()
    )


def test_every_worker_reads_back_the_world_it_was_given() -> None:
    settings = LaunchSettings(lanes=8, threads=2, backend="gloo", seed=5)
    assignment = HostAssignment(1, 2, 3, 2, 5, settings, "10.0.0.2", "10.0.0.1", 29999)
    for local_rank in (0, 1):
        variables = worker_variables(assignment.world(local_rank, "/run/control.sock"), assignment)
        world = read_world(variables)
        assert (world.rank, world.size, world.local_rank, world.local_size) == (3 + local_rank, 5, local_rank, 2)
        assert (world.host_rank, world.hosts, world.host_address, world.settings) == (1, 2, "10.0.0.2", settings)
        foreign = {name: value for name, value in variables.items() if not name.startswith("PACELINE_")}
        assert foreign == {
            "RANK": str(3 + local_rank),
            "WORLD_SIZE": "5",
            "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": "2",
            "GROUP_RANK": "1",
            "MASTER_ADDR": "10.0.0.1",
            "MASTER_PORT": "29999",
            "OMP_NUM_THREADS": "2",
        }
