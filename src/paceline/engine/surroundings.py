"""What an Engine finds around it: the supervisor that started it, the other processes, and the device it may use."""

from __future__ import annotations

import itertools
from dataclasses import replace

import torch
from torch._C._distributed_c10d import PrefixStore, Store

from paceline.collectives.communicator import Communicator
from paceline.elastic.memory_checkpoint.replication import on_hosts
from paceline.errors import ConfigError
from paceline.input_file import one_line
from paceline.world.control import ControlClient
from paceline.world.rendezvous_store import open_store
from paceline.world.world import ControlSocket, World

_engines = itertools.count()


def call_supervisor(world: World) -> ControlClient | None:
    if not isinstance(world.rendezvous, ControlSocket):
        return None
    return ControlClient.connect(world.rendezvous.path, world.rank)


def open_meeting(world: World, client: ControlClient | None, timeout_s: float) -> tuple[Store | None, Store | None]:
    """The store of all processes, to be kept as long as what is built on it, and this engine's place in it."""
    if world.size + world.servers == 1 and world.elastic is None:
        return None, None
    store = open_store(world, client, timeout_s)
    # Several engines in one process meet in several places; all processes make theirs in the same order.
    return store, PrefixStore(f"paceline/{next(_engines)}", store)


def connect_workers(
    world: World, store: Store | None, *, backend: str, device: torch.device, timeout_s: float
) -> Communicator | None:
    if store is None or world.size == 1 or world.is_server:
        return None
    if backend == "nccl":
        _check_own_devices(world, store, device)
    if world.elastic is not None:  # keys by which nobody waits any more when the workers have changed
        store = PrefixStore("elastic/1", store)
    return Communicator.connect(world, store, backend=backend, device=device, timeout_s=timeout_s)


def _check_own_devices(world: World, store: Store, device: torch.device) -> None:
    """NCCL finds out that two workers share a GPU in the first collective, and says "invalid usage"."""
    store.set(f"device/{world.rank}", f"{device} of host {world.host_rank}")
    places = [store.get(f"device/{rank}").decode() for rank in range(world.size)]
    for rank, place in enumerate(places):
        if place in places[:rank]:
            raise ConfigError(
                f"workers {places.index(place)} and {rank} both use {place}, and NCCL needs a device for each worker; "
                "leave device out to give each its own, or let them share with Engine(backend='gloo')"
            )


def alone(seat: World) -> World:
    """A worker that joins a job prepares as if there were no other."""
    return replace(seat, rank=0, size=1, local_rank=0, local_size=1, host_rank=0, hosts=1, servers=0)


def among_members(seat: World) -> World:
    """A process's place as it begins: among all, or those of the hosts that are left; a worker that joins is alone."""
    if seat.elastic is None:
        return seat
    if seat.elastic.joins and not seat.is_server:
        return alone(seat)
    members = seat.elastic.members
    if not members:
        return seat
    if seat.is_server:
        return server_among(seat, len(members), seat.servers, seat.server_index)
    rank = [slot for slot, _ in members].index(seat.rank)
    world = replace(alone(seat), rank=rank, size=len(members), servers=seat.servers)
    return on_hosts(world, [host for _, host in members])


def server_among(seat: World, workers: int, servers: int, index: int) -> World:
    """The place of a server process beside so many workers; they count as on its host, unless tensors go over TCP."""
    rank = workers + index
    place = {"rank": rank, "size": workers, "local_rank": rank, "local_size": workers, "servers": servers}
    return replace(seat, **place, host_rank=0, hosts=1)  # type: ignore[arg-type]


def find_device(world: World, wanted: str | torch.device | None) -> torch.device:
    if world.is_server:  # its weights are in the host's memory, wherever the workers compute
        return torch.device("cpu")
    if wanted is not None:
        return _numbered(_device_of(wanted), world.local_rank)
    if not torch.accelerator.is_available():
        return torch.device("cpu")
    kind = torch.accelerator.current_accelerator()
    assert kind is not None
    count = torch.accelerator.device_count()
    if world.local_size > count:
        raise ConfigError(
            f"{world.local_size} workers on this host but {count} {kind.type} device(s); "
            f"start with --workers {count}, let them share with Engine(device='{kind.type}'), or train on the CPU with "
            "Engine(device='cpu')"
        )
    device = torch.device(kind.type, world.local_rank)
    torch.accelerator.set_device_index(world.local_rank)
    return device


def _device_of(wanted: str | torch.device) -> torch.device:
    try:
        if not isinstance(wanted, str | torch.device):
            raise TypeError(f"it is a {type(wanted).__name__}")
        return torch.device(wanted)
    except (RuntimeError, TypeError, ValueError) as error:
        shown, cause = one_line(repr(wanted), 60), one_line(str(error).split("\n")[0], 120)
        raise ConfigError(f"device={shown} is no device ({cause}); give a name such as 'cpu' or 'cuda:0'") from error


def _numbered(device: torch.device, local_rank: int) -> torch.device:
    """With the number of the device that "cuda" means for this worker: memory there has it too, and is compared."""
    if device.type == "cpu" or ":" in str(device):
        return device
    count = torch.accelerator.device_count()
    number = local_rank % count if count else 0
    if count:
        torch.accelerator.set_device_index(number)
    return torch.device(device.type, number)


def default_backend(world: World, device: torch.device) -> str:
    """Shared memory between the workers of one host; otherwise what the field uses.

    NCCL has no way between two workers on one GPU.
    """
    if device.type == "cuda":
        return "nccl" if world.local_size <= torch.cuda.device_count() else "gloo"
    on_one = world.local_size == world.size and not _across_hosts(world)
    return "paceline" if device.type == "cpu" and on_one else "gloo"


def check_backend(world: World, backend: str) -> None:
    """All groups that the job will ever have use the same one."""
    if backend == "paceline" and _across_hosts(world):
        raise ConfigError(
            "backend 'paceline' joins the workers of one host, and this job is on several, or open to further ones "
            "(--coordinator with --max-workers); use gloo"
        )


def _across_hosts(world: World) -> bool:
    return world.elastic is not None and world.elastic.across_hosts
