"""The joint group: workers and servers meet once, make sure that they mean the same job, and share memory.

facts of every process ─► all alike?  no: one line that names the process and the difference, on all of them
weights of every process ─► the servers' are worker 0's, whatever their own script made of them
memory that all can see ─► gradients lie where a worker made them, weights where a server updates them
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store

from paceline.collectives.communicator import Communicator
from paceline.errors import ReplicaError
from paceline.parameter_server.key_ranges import Key, KeyTable
from paceline.sharding.flat_layout import FlatLayout
from paceline.world.world import World

_ALIGNED = 64


def connect(world: World, store: Store | None, *, workers_use: str, timeout_s: float) -> Communicator | None:
    """A group of all workers and servers for tensors of the host; None: this process is alone."""
    joint = world.joint()
    if store is None or joint.size == 1:
        return None
    backend = "gloo" if workers_use == "gloo" or joint.local_size < joint.size else "paceline"
    place = PrefixStore("parameter_server", store)
    if world.elastic is not None and world.servers:
        _gather(joint, store, timeout_s)
    return Communicator.connect(joint, place, backend=backend, device=torch.device("cpu"), timeout_s=timeout_s)


def _gather(joint: World, store: Store, timeout_s: float) -> None:
    """All come to one place first: in an elastic job building a group waits for nobody."""
    store.set(_here(joint.rank), "")
    store.wait([_here(rank) for rank in range(joint.size)], timedelta(seconds=timeout_s))


def await_workers(store: Store, workers: int, timeout_s: float) -> None:
    """Until so many, the first of all ranks, have come there; for a server that still serves another group of them."""
    store.wait([_here(rank) for rank in range(workers)], timedelta(seconds=timeout_s))


def _here(rank: int) -> str:
    return f"parameter_server/here/{rank}"


# -- the same job ------------------------------------------------------------------------------------------------------


def check_same_job(
    comm: Communicator | None, world: World, layout: FlatLayout, facts: Mapping[str, Any], own: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """What every process says, workers first: facts, which must be alike, and others of its own.

    Raises on all of them, naming the first difference to worker 0.
    """
    if comm is None:
        return [{**facts, **own}]
    told: list[dict[str, Any]] = comm.gather_json({"layout": layout.digest, **facts, **own})
    if len({one["layout"] for one in told}) > 1:
        _name_parameter(comm, world, layout)
    for rank, one in enumerate(told):
        for name in facts:
            if one[name] != told[0][name]:
                raise ReplicaError(
                    f"{name_of(world, rank)} has {name} {one[name]}, worker 0 has {told[0][name]}; "
                    "start every process from the same script, with the same arguments"
                )
    return told


def _name_parameter(comm: Communicator, world: World, layout: FlatLayout) -> None:
    rows = [f"{name} {tuple(shape)} {dtype}" for name, shape, dtype in zip(*_columns(layout), strict=True)]
    tables: list[list[str]] = comm.gather_json(rows)
    for rank, theirs in enumerate(tables):
        if theirs != tables[0]:
            place = next((p for p, (a, b) in enumerate(zip(theirs, tables[0], strict=False)) if a != b), None)
            what = f"{len(theirs)} trainable parameters, worker 0 has {len(tables[0])}"
            if place is not None:
                what = f"{theirs[place]!r} where worker 0 has {tables[0][place]!r}"
            raise ReplicaError(
                f"the models differ: {name_of(world, rank)} has {what}; build the same model in every process"
            )


def _columns(layout: FlatLayout) -> tuple[Sequence[Any], ...]:
    return layout.names, layout.shapes, layout.dtypes


def weights_digest(parameters: Sequence[Tensor]) -> str:
    digest = hashlib.sha256()
    for parameter in parameters:
        digest.update(parameter.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def take_over_weights(comm: Communicator, parameters: Sequence[Tensor]) -> None:
    """Worker 0's, on every process; a script may load or initialise them where only the workers are."""
    for parameter in parameters:
        values = parameter.detach().cpu().contiguous()
        comm.broadcast(values, root=0).wait()
        with torch.no_grad():
            parameter.copy_(values)


def name_of(world: World, rank: int) -> str:
    return f"worker {rank}" if rank < world.size else f"server {rank - world.size}"


# -- shared memory -----------------------------------------------------------------------------------------------------


def shared_gradients(comm: Communicator | None, sizes: Sequence[tuple[int, torch.dtype]]) -> list[Tensor] | None:
    """This process's room for the gradient of each bucket; None: nobody else could look into it."""
    if comm is None or comm.backend != "paceline":
        return None
    rooms = [comm.shared(elements, dtype) for elements, dtype in sizes]
    return [room for room in rooms if room is not None]


def shared_keys(comm: Communicator | None, table: KeyTable, *, sums: bool) -> dict[int, Tensor] | None:
    """This process's room for the weights of each key, or for the sums of their gradients."""
    if comm is None or comm.backend != "paceline":
        return None
    places: dict[int, int] = {}
    end = 0
    for key in table.keys:
        places[key.number] = end
        end += -(-key.elements * _dtype(key, sums).itemsize // _ALIGNED) * _ALIGNED
    memory = comm.shared(end, torch.uint8)
    assert memory is not None
    return {
        key.number: memory[start : start + key.elements * _dtype(key, sums).itemsize].view(_dtype(key, sums))
        for key, start in zip(table.keys, places.values(), strict=True)
    }


def _dtype(key: Key, sums: bool) -> torch.dtype:
    return key.sum_dtype if sums else key.dtype
