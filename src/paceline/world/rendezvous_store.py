"""Where workers meet: a `torch.distributed.Store` for any world.

| world            | store                                                                                    |
|------------------|------------------------------------------------------------------------------------------|
| `ControlSocket`  | `ControlStore`: keys live in the coordinator and travel over the control channel; no port |
| `TcpRendezvous`  | `TCPStore`, served by torchrun's agent, or else by rank 0 on the named address only        |
| alone            | `HashStore`, inside the process                                                           |

A store is a table of strings to bytes in which `get` waits for the key. torch builds its process groups from it.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import socket
from base64 import b64decode, b64encode
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any
from weakref import WeakValueDictionary

# Public names, which torch's `__all__` leaves out.
from torch.distributed import DistStoreError, HashStore, Store, TCPStore  # type: ignore[attr-defined]

from paceline.errors import WorldError
from paceline.world.control import ControlClient, Supervisor, call_supervisor
from paceline.world.variables import is_loopback
from paceline.world.world import ControlSocket, TcpRendezvous, World


class StoreTimeoutError(WorldError, DistStoreError):
    """A key that no worker set in time. torch retries on `DistStoreError`, so it is one of those too."""


class ControlStore(Store):
    """A store over the control channel.

    torch's C++ side holds a bare pointer to this object and calls its methods by name, some in Python's spelling and
    some in its own (`deleteKey`, `getNumKeys`). If the Python half were collected those calls would fail, so the
    caller that opens a store keeps it for as long as groups built from it live.
    """

    def __init__(self, client: ControlClient, timeout_s: float) -> None:
        super().__init__()
        self._client = client
        self.set_timeout(timedelta(seconds=timeout_s))

    def set(self, key: str, value: str | bytes) -> None:
        self._ask("store.set", keys=[key], values=[_pack(value)])

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [b64decode(value) for value in self._ask("store.get", keys=list(keys))["values"]]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        self._ask("store.set", keys=list(keys), values=[_pack(value) for value in values])

    def append(self, key: str, value: str | bytes) -> None:
        self._ask("store.append", keys=[key], values=[_pack(value)])

    def add(self, key: str, amount: int) -> int:
        return int(self._ask("store.add", keys=[key], amount=amount)["value"])

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Set `desired` where the key holds `expected` (empty: where it is absent); the value that is there after."""
        answer = self._ask("store.compare_set", keys=[key], values=[_pack(expected), _pack(desired)])
        return b64decode(answer["value"])

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._ask("store.check", keys=list(keys))["value"])

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._ask("store.wait", keys=list(keys), within=timeout)

    def delete_key(self, key: str) -> bool:
        return bool(self._ask("store.delete", keys=[key])["value"])

    def num_keys(self) -> int:
        return int(self._ask("store.count", keys=[])["value"])

    def has_extended_api(self) -> bool:
        return True

    def clone(self) -> ControlStore:
        return self  # safe to share: the client is, and a copy would need an owner for its Python half

    deleteKey = delete_key  # noqa: N815
    getNumKeys = num_keys  # noqa: N815

    def _ask(self, kind: str, *, within: timedelta | None = None, keys: list[str], **fields: Any) -> dict[str, Any]:
        patience: timedelta = self.timeout if within is None else within  # type: ignore[attr-defined]  # not in the stub
        answer = self._client.ask(kind, timeout_s=patience.total_seconds(), keys=keys, **fields)
        if "late" in answer:
            raise StoreTimeoutError(answer["late"])
        return answer


def open_store(world: World, supervisor: Supervisor, timeout_s: float) -> Store:
    """The store of this world; the caller keeps it for as long as groups built from it live."""
    if world.rendezvous is None:
        return HashStore()
    if isinstance(world.rendezvous, ControlSocket):
        if not isinstance(supervisor, ControlClient):
            raise WorldError(f"rank {world.rank}: the store of a control socket needs its ControlClient")
        return ControlStore(supervisor, timeout_s)
    return _tcp_store(world, world.rendezvous, timeout_s)


_served: WeakValueDictionary[TcpRendezvous, Store] = WeakValueDictionary()
"""By this process: at an address there can be one. Others connect anew: a store answers one thread at a time."""
_kept: list[Store] = []
"""By `in_turn`: the others may still read from it when rank 0 has gone on."""
_turns = itertools.count()


@contextlib.contextmanager
def in_turn(world: World, *, first: bool, of: str, timeout_s: float) -> Iterator[None]:
    """The others come to what is inside when the one that is `first` has left it, well or by an exception.

    `of` names those who wait for the same one. Nothing else has to be there yet, as no `Engine`; every process calls it
    as often. A worker that joins later finds that it was done, and waits for nobody.
    """
    key = f"in_turn/{of}/{next(_turns)}"
    if world.size + world.servers == 1 and not world.is_elastic:
        yield
        return
    supervisor = call_supervisor(world)
    try:
        store = open_store(world, supervisor, timeout_s)
        if not supervisor.is_there:
            _kept.append(store)
        if not first:
            store.wait([key], timedelta(seconds=timeout_s))
        try:
            yield
        finally:
            if first:
                store.set(key, "done")
    finally:
        supervisor.close()


def _tcp_store(world: World, meeting: TcpRendezvous, timeout_s: float) -> Store:
    serves = world.rank == 0 and not meeting.served_by_agent
    if serves and (known := _served.get(meeting)) is not None:
        return known
    listener = _listen(meeting) if serves else None
    try:
        store = TCPStore(
            meeting.address,
            meeting.port,
            # world_size would make rank 0 wait inside the constructor; the group that is built next does the waiting
            world_size=None,
            is_master=serves,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            multi_tenant=False,
            master_listen_fd=None if listener is None else listener.fileno(),
        )
    except RuntimeError as error:  # DistNetworkError and DistStoreError are RuntimeErrors
        raise WorldError(
            f"rank {world.rank}: no store answers at {meeting.address}:{meeting.port} within {timeout_s:g} s "
            f"({_first_line(error)}); is rank 0 running, and are MASTER_ADDR and MASTER_PORT the same on every worker?"
        ) from error
    if listener is not None:
        listener.detach()  # the server thread owns the descriptor now
    if serves:
        _served[meeting] = store
    return store


def _listen(meeting: TcpRendezvous) -> socket.socket:
    """A socket bound to the meeting address alone: left to itself `TCPStore` listens on every interface.

    A name that belongs to no interface (a Kubernetes service in front of rank 0) can't be bound; there, and only
    there, rank 0 listens on all of them.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(meeting.address, meeting.port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise WorldError(f"the meeting address {meeting.address!r} is not known here ({error.strerror})") from error
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL or is_loopback(str(address[0])):
                raise
            listener.bind(("", meeting.port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise WorldError(
                f"port {meeting.port} on {meeting.address} is in use, probably by another job; "
                "choose another MASTER_PORT, or stop what listens there"
            ) from error
        raise WorldError(
            f"rank 0 can't listen at {meeting.address}:{meeting.port} ({error.strerror}); "
            "MASTER_ADDR must name the host of rank 0"
        ) from error
    return listener


def _pack(value: str | bytes) -> str:
    return b64encode(value.encode() if isinstance(value, str) else value).decode()


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
