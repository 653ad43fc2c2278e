"""The handshake: workers and servers form one group, make sure that they mean the same job, and share memory.

facts of every process ─► all alike?  no: one line that names the process and the difference, on all of them
weights of every process ─► the servers' are worker 0's, whatever their own script made of them
memory that all can see ─► gradients lie where a worker made them, weights where a server updates them

Later, workers of an asynchronous job wait for each other at step boundaries, also when some of them are lost. A group's
collectives need all of its members; keys in the store of the job do not, and servers write there which worker is lost.

    barrier/4/0  barrier/4/2      workers 0 and 2 have come to barrier 4
    gone/1                        worker 1 was lost, or has said goodbye: no worker waits for it
    stats/server 0                what a process counted, for the one that tells it at the end
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Mapping, Sequence, Set
from datetime import timedelta
from itertools import accumulate, count
from typing import Any

import torch
from torch import Tensor

from paceline.collectives.communicator import Communicator
from paceline.errors import PeerLostError, ReplicaError, WorldError
from paceline.parameter_server.key_ranges import KeyTable
from paceline.parameter_server.wire import Protocol
from paceline.torch_compat import PrefixStore, Store
from paceline.world.world import World

_ALIGNED = 64
_ARRIVED = "parameter_server/here"


def connect(world: World, store: Store | None, *, workers_use: str, timeout_s: float) -> Communicator | None:
    """A group of all workers and servers for tensors of the host; None: this process is alone."""
    joint = world.joint()
    if store is None or joint.size == 1:
        return None
    backend = "gloo" if workers_use == "gloo" or joint.local_size < joint.size else "paceline"
    place = PrefixStore("parameter_server", store)
    if world.is_elastic and world.servers:
        _arrive(joint, store, timeout_s)
    return Communicator.connect(joint, place, backend=backend, device=torch.device("cpu"), timeout_s=timeout_s)


def _arrive(joint: World, store: Store, timeout_s: float) -> None:
    """All ranks arrive first: in an elastic job building a group waits for no rank."""
    store.set(f"{_ARRIVED}/{joint.rank}", "")
    await_ranks(store, joint.size, timeout_s)


def await_ranks(store: Store, ranks: int, timeout_s: float) -> None:
    """Until the first so many ranks have arrived; a server of the group before waits so for the workers of the next."""
    store.wait([f"{_ARRIVED}/{rank}" for rank in range(ranks)], timedelta(seconds=timeout_s))


# -- the same job ------------------------------------------------------------------------------------------------------


def check_same_job(
    comm: Communicator | None, protocol: Protocol, facts: Mapping[str, Any], own: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """What every process says, workers first: facts, which must be alike, and others of its own.

    Raises on all of them, naming the first difference to worker 0.
    """
    if comm is None:
        return [{**facts, **own}]
    gathered: list[dict[str, Any]] = comm.gather_json({"layout": protocol.table.layout.digest, **facts, **own})
    if len({one["layout"] for one in gathered}) > 1:
        _name_parameter(comm, protocol)
    for rank, one in enumerate(gathered):
        for name in facts:
            if one[name] != gathered[0][name]:
                raise ReplicaError(
                    f"{protocol.name(rank)} has {name} {one[name]}, worker 0 has {gathered[0][name]}; "
                    "start every process from the same script, with the same arguments"
                )
    return gathered


def _name_parameter(comm: Communicator, protocol: Protocol) -> None:
    layout = protocol.table.layout
    columns: tuple[Sequence[Any], ...] = layout.names, layout.shapes, layout.dtypes
    rows = [f"{name} {tuple(shape)} {dtype}" for name, shape, dtype in zip(*columns, strict=True)]
    tables: list[list[str]] = comm.gather_json(rows)
    for rank, theirs in enumerate(tables):
        if theirs != tables[0]:
            place = next((p for p, (a, b) in enumerate(zip(theirs, tables[0], strict=False)) if a != b), None)
            what = f"{len(theirs)} trainable parameters, worker 0 has {len(tables[0])}"
            if place is not None:
                what = f"{theirs[place]!r} where worker 0 has {tables[0][place]!r}"
            raise ReplicaError(
                f"the models differ: {protocol.name(rank)} has {what}; build the same model in every process"
            )


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


# -- shared memory -----------------------------------------------------------------------------------------------------


def shared_gradients(comm: Communicator | None, sizes: Sequence[tuple[int, torch.dtype]]) -> list[Tensor] | None:
    """This process's room for the gradient of each bucket; None: no other process could look into it."""
    if comm is None or comm.backend != "paceline":
        return None
    rooms = [comm.shared(elements, dtype) for elements, dtype in sizes]
    return [room for room in rooms if room is not None]


def shared_keys(comm: Communicator | None, table: KeyTable, *, sums: bool) -> dict[int, Tensor] | None:
    """This process's room for the weights of each key, or for the sums of their gradients."""
    if comm is None or comm.backend != "paceline":
        return None
    dtypes = [key.sum_dtype if sums else key.dtype for key in table.keys]
    sizes = [key.elements * dtype.itemsize for key, dtype in zip(table.keys, dtypes, strict=True)]
    starts = list(accumulate((-(-size // _ALIGNED) * _ALIGNED for size in sizes), initial=0))
    memory = comm.shared(starts.pop(), torch.uint8)
    assert memory is not None
    places = zip(table.keys, dtypes, sizes, starts, strict=True)
    return {key.number: memory[start : start + size].view(dtype) for key, dtype, size, start in places}


# -- step boundaries of an asynchronous job ----------------------------------------------------------------------------


_NAP_S, _LONGEST_NAP_S = 1e-3, 20e-3


class StoreBarrier:
    """Waits for the workers that are left; `store` is None where a process is alone."""

    def __init__(self, store: Store | None, worker: int, workers: int, timeout_s: float) -> None:
        self._store = None if store is None else PrefixStore("parameter_server/barriers", store)
        self._worker, self._workers, self._timeout_s = worker, workers, timeout_s
        self._barriers = count()

    @classmethod
    def of_one(cls) -> StoreBarrier:
        return cls(None, worker=0, workers=1, timeout_s=0.0)

    def wait(self) -> Set[int]:
        """No worker goes on before all that are left have come; those that did not and never will."""
        if self._store is None or self._workers == 1:
            return frozenset()
        try:
            return self._wait(self._store, f"barrier/{next(self._barriers)}")
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            raise PeerLostError(
                f"worker {self._worker} lost the store in which workers wait for each other, which worker 0 or the "
                f"launcher serves ({reason}); resume from the last saved state"
            ) from error

    def _wait(self, store: Store, name: str) -> Set[int]:
        store.set(f"{name}/{self._worker}", "")
        missing = [worker for worker in range(self._workers) if worker != self._worker]
        deadline, nap = time.monotonic() + self._timeout_s, _NAP_S
        while missing := [worker for worker in missing if not store.check([f"{name}/{worker}"])]:
            if all(store.check([f"gone/{worker}"]) for worker in missing):
                break
            if time.monotonic() > deadline:
                raise PeerLostError(
                    f"worker {self._worker} waited {self._timeout_s:g} s at a boundary for worker"
                    f"{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
                )
            time.sleep(nap)
            nap = min(_LONGEST_NAP_S, 1.5 * nap)
        return frozenset(missing)

    def mark_gone(self, worker: int) -> None:
        if self._store is not None:
            with contextlib.suppress(RuntimeError, WorldError):  # its store may have gone with it
                self._store.set(f"gone/{worker}", "")

    # -- what was counted --------------------------------------------------------------------------------------------

    def publish(self, name: str, value: Any) -> None:
        if self._store is not None:
            with contextlib.suppress(RuntimeError, WorldError):
                self._store.set(name, json.dumps(value))

    def published(self, names: list[str], within_s: float) -> dict[str, Any]:
        """What other processes have published under these names, as far as it is there in time."""
        values: dict[str, Any] = {}
        if self._store is None:
            return values
        deadline = time.monotonic() + within_s
        while missing := [name for name in names if name not in values]:
            there = [name for name in missing if self._store.check([name])]
            values |= {name: json.loads(self._store.get(name)) for name in there}
            if time.monotonic() > deadline:
                break
            time.sleep(0 if there else _LONGEST_NAP_S)
        return values
