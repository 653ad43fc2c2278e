"""Where workers listen: gloo's port proves nothing of who connects, so it is open at the job's own address alone."""

from __future__ import annotations

import socket
from dataclasses import replace

import psutil
import pytest
import torch

from paceline.collectives.process_groups import build_groups, shut_down
from paceline.world.control import NoSupervisor
from paceline.world.rendezvous_store import open_store
from paceline.world.world import World
from tests.workers import run_workers

pytestmark = pytest.mark.workers

ADDRESS = "127.0.0.2"
"""Of this host, and not the one that workers of one host use: as an interface among several is."""


def listens_at() -> set[tuple[str, int]]:
    found = psutil.Process().net_connections("tcp")
    return {(one.laddr.ip, one.laddr.port) for one in found if one.status == psutil.CONN_LISTEN}


def sum_among_strangers(world: World, address: str | None) -> tuple[set[str], float]:
    """Where gloo listens, and a sum while others connect there and talk nonsense."""
    world = world if address is None else replace(world, host_address=address)
    store = open_store(world, NoSupervisor(), 20.0)
    before = listens_at()
    groups, _ = build_groups(world, store, "gloo", torch.device("cpu"), 20.0)
    mine = listens_at() - before
    crowd = [socket.create_connection(place, timeout=5) for place in mine for _ in range(5)]
    for number, stranger in enumerate(crowd):
        stranger.sendall(b"\xff" * 100 * number)
    tensor = torch.ones(1000)
    groups["cpu"].allreduce([tensor]).wait()
    for stranger in crowd:
        stranger.close()
    groups["cpu"].barrier().wait()
    shut_down(groups)
    return {address for address, _ in mine}, tensor[-1].item()


def test_gloo_listens_on_loopback_where_the_job_is_on_one_host() -> None:
    results = run_workers(sum_among_strangers, 2, address=None)
    assert [result.value or result.error for result in results] == [({"127.0.0.1"}, 2.0)] * 2


def test_gloo_listens_at_the_job_s_address_and_nowhere_else() -> None:
    results = run_workers(sum_among_strangers, 2, address=ADDRESS)
    assert [result.value or result.error for result in results] == [({ADDRESS}, 2.0)] * 2
