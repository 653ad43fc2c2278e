"""Vaults of other hosts, over TCP: ranges of their files are read from there, and a copy of one's own is kept there.

    host 0                                       host 1
    RemoteVault ──── steps_of, about, part ────▶ PeerServer ── maps ──▶ slot-2-0, slot-2-1       its own
    push_copy   ──── keep ─────────────────────▶            ── writes ▶ slot-0-0, slot-0-1       a copy of host 0's

    {"do": "part", "slot": 2, …}            ───▶
                                            ◀─── {"bytes": 4096}, the bytes, {}                   {}: they were valid
    {"do": "keep", "slot": 0, "step": 7, …} ───▶ makes room
                                            ◀─── {}
    the file, {"whole": true}               ───▶ sets the stamp
                                            ◀─── {}

What is said first, and how, is in `peer_wire`. A server has all slots of its host's folder, so any
worker of the host can stand in for one that died. Where both ends are alive nothing waits longer than `timeout_s`.
"""

from __future__ import annotations

import json
import mmap
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from paceline.elastic.peer_wire import Wire, prove_to_server, proved_to_server
from paceline.elastic.state_number import all_said, said
from paceline.elastic.vault import (
    AT_BYTES,
    AT_MAGIC,
    AT_STAMP,
    HEAD_BYTES,
    MAGIC,
    MappedSlot,
    SlotSource,
    Vault,
    VaultState,
    new_file,
    paths_of,
    step_in,
    steps_of,
    turn_of,
)
from paceline.errors import CheckpointError, PacelineError, PeerLostError
from paceline.world import unauthenticated

TIMEOUT_S = 30.0
CONNECT_S = 5.0
AGAIN_S = 0.02
IDLE_S = 600.0  # a server lets a connection go on which nothing was asked for so long; the reader makes a new one
_MOST_TABLE = 256 * 2**20  # tables and values of a large model


class PeerServer:
    """Serves the vault of this host at one of its addresses; its threads end with `close`, or with the process."""

    def __init__(self, host: str, folder: Path, token: str, *, timeout_s: float = TIMEOUT_S) -> None:
        self._folder, self._token, self._timeout_s = folder, token, timeout_s
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._listener = socket.create_server((host, 0), family=family)
        except OSError as error:
            raise PeerLostError(f"this host's vault can't be served at {host} ({error.strerror or error})") from error
        port = self._listener.getsockname()[1]
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._copies = _Copies(folder)
        self._open: set[socket.socket] = set()
        self._strangers: dict[socket.socket, str] = {}
        """Those of the open ones that have not proved to be of this job, the oldest first, and their addresses."""
        self._closed = False
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._accept, name="paceline-vault", daemon=True)]
        self._threads[0].start()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for connection in [self._listener, *self._open]:
                with suppress(OSError):  # it may be gone already
                    connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(self._timeout_s)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, address = self._listener.accept()
            except OSError:
                if self._closed:
                    return
                time.sleep(0.01)  # who knocked has left again, or there are too many
                continue
            with self._lock:
                if self._closed:
                    connection.close()
                    return
                self._open.add(connection)
                self._strangers[connection] = str(address[0])
                if len(self._strangers) > unauthenticated.MOST_CONNECTIONS:
                    self._drop(unauthenticated.to_drop(self._strangers))
                self._threads = [thread for thread in self._threads if thread.is_alive()]
                thread = threading.Thread(target=self._serve, args=(connection,), name="paceline-vault", daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # no more threads can be had
                    self._strangers.pop(connection, None)
                    self._open.discard(connection)
                    connection.close()
                    continue
                self._threads.append(thread)

    def _serve(self, connection: socket.socket) -> None:
        """One reader, until it leaves, is silent for long, or says what makes no sense."""
        with connection:
            try:
                connection.settimeout(self._timeout_s)
                wire = Wire(connection)
                if proved_to_server(wire, self._token):
                    with self._lock:
                        self._strangers.pop(connection, None)
                    while True:
                        self._answer(wire)
            except (OSError, EOFError, ValueError, LookupError, TypeError, OverflowError):
                return  # the reader says so on its side
            finally:
                with self._lock:
                    self._open.discard(connection)
                    self._strangers.pop(connection, None)

    def _drop(self, connection: socket.socket) -> None:
        """Its thread closes it."""
        del self._strangers[connection]
        with suppress(OSError):  # it is gone already
            connection.shutdown(socket.SHUT_RDWR)

    def _answer(self, wire: Wire) -> None:
        wire.connection.settimeout(IDLE_S)
        request = wire.hear()
        if not all(name == "do" or (type(value) is int and value >= 0) for name, value in request.items()):
            raise ValueError("a request that makes no sense")  # a slot is part of a path: it is a number
        wire.connection.settimeout(self._timeout_s)
        try:
            if request["do"] == "steps":
                wire.say({"steps": steps_of(self._folder, request["slot"])})
            elif request["do"] == "keep":
                self._copies.keep(wire, request["slot"], request["step"], request["bytes"])
            else:
                self._give(wire, request)
        except PacelineError as error:
            wire.say({"error": str(error)})

    def _give(self, wire: Wire, request: Mapping[str, Any]) -> None:
        slot = MappedSlot(self._folder, request["slot"], request["step"])
        if request["do"] == "about":
            table, values = slot.texts()
            wire.say({"table": len(table), "values": len(values)})
            wire.send(memoryview(table + values))
            return
        data = slot.data(request["offset"], request["bytes"])
        wire.say({"bytes": len(data)})
        wire.send(data)
        slot.check()  # only now: what was sent was valid until here
        wire.say({})


class _Copies:
    """Files of other hosts' slots, as they were pushed; mapped for as long as pushes of that size come."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._mapped: dict[Path, tuple[mmap.mmap, int]] = {}  # and its inode: others may have replaced the file
        self._one_at_a_time = threading.Lock()
        self._slots: dict[int, threading.Lock] = {}

    def keep(self, wire: Wire, slot: int, step: int, size: int) -> None:
        """Receive a file; it has its stamp only when all of it is there, and the step before stays until then."""
        with self._one_at_a_time:
            busy = self._slots.setdefault(slot, threading.Lock())
        if not busy.acquire(timeout=1.0):
            raise CheckpointError(f"worker {slot}'s part is being copied here by another connection")
        try:
            paths = paths_of(self._folder, slot)
            turn = turn_of([step_in(path) for path in paths], step)
            memory = memoryview(self._room(paths[turn], size))
            wire.say({})
            self._receive(wire, slot, step, memory)
            other = step_in(paths[1 - turn])
            if other is not None and other >= step:
                self._mapped.pop(paths[1 - turn], None)
                paths[1 - turn].unlink(missing_ok=True)
        finally:
            busy.release()
        wire.say({})

    def _room(self, path: Path, size: int) -> mmap.mmap:
        mapped, inode = self._mapped.pop(path, (None, 0))
        if mapped is None or len(mapped) != size or inode != _inode_of(path):
            mapped = None  # its memory is free before new memory is taken
            mapped = new_file(path, size)
        self._mapped[path] = mapped, _inode_of(path)
        return mapped

    def _receive(self, wire: Wire, slot: int, step: int, memory: memoryview) -> None:
        stamp = memory[:HEAD_BYTES].cast("q")
        stamp[AT_STAMP] = 0
        head = bytearray(HEAD_BYTES)
        wire.receive(memoryview(head))
        fields = memoryview(head).cast("q")
        if (fields[AT_MAGIC], fields[AT_STAMP], fields[AT_BYTES]) != (MAGIC, step + 1, len(memory)):
            raise ValueError(f"no file of step {step} in {len(memory)} bytes")
        fields[AT_STAMP] = 0
        memory[:HEAD_BYTES] = head
        wire.receive(memory[HEAD_BYTES:])
        if wire.hear()["whole"] is not True:
            raise CheckpointError(f"worker {slot}'s part of {said(step)} was written over while it was copied")
        stamp[AT_STAMP] = step + 1


def _inode_of(path: Path) -> int:
    try:
        return os.stat(path).st_ino
    except FileNotFoundError:
        return 0


class RemoteVault:
    """The vault of another host, by one connection that is made when it is needed; any thread may use it."""

    def __init__(self, address: str, token: str, *, name: str, timeout_s: float = TIMEOUT_S) -> None:
        self.address, self.name = address, name
        self._token, self._timeout_s = token, timeout_s
        self._connection: socket.socket | None = None
        self._wire: Wire | None = None  # once both have proved who they are
        self._abandoned = False
        self._one_at_a_time = threading.Lock()

    def steps_of(self, slot: int) -> list[int]:
        steps: list[int] = self._asked({"do": "steps", "slot": slot}, lambda wire, answer: answer["steps"])
        return steps

    def slot(self, slot: int, step: int) -> RemoteSlot:
        return RemoteSlot(self, slot, step)

    def about(self, slot: int, step: int) -> tuple[dict[str, Any], list[Any]]:
        def texts(wire: Wire, answer: Mapping[str, Any]) -> tuple[dict[str, Any], list[Any]]:
            if answer["table"] + answer["values"] > _MOST_TABLE:
                raise ValueError(f"a table of {answer['table']} bytes")
            both = bytearray(answer["table"] + answer["values"])
            wire.receive(memoryview(both))
            return json.loads(both[: answer["table"]]), json.loads(both[answer["table"] :])

        found: tuple[dict[str, Any], list[Any]] = self._asked({"do": "about", "slot": slot, "step": step}, texts)
        return found

    def read_into(self, slot: int, step: int, offset: int, room: memoryview) -> None:
        def take(wire: Wire, answer: Mapping[str, Any]) -> None:
            if answer["bytes"] != len(room):
                raise ValueError(f"{answer['bytes']} bytes instead of {len(room)}")
            wire.receive(room)
            self._refuse_error(wire.hear())

        self._asked({"do": "part", "slot": slot, "step": step, "offset": offset, "bytes": len(room)}, take)

    def keep(self, slot: int, step: int, memory: memoryview) -> None:
        """Have the other host keep a copy of a file of this one."""

        def give(wire: Wire, _: Mapping[str, Any]) -> None:
            wire.send(memory)
            wire.say({"whole": memory[:HEAD_BYTES].cast("q")[AT_STAMP] == step + 1})
            self._refuse_error(wire.hear())

        self._asked({"do": "keep", "slot": slot, "step": step, "bytes": len(memory)}, give)

    def close(self) -> None:
        with self._one_at_a_time:
            self._hang_up()

    def abandon(self) -> None:
        """End every wait at once, from any thread; for good."""
        self._abandoned, connection = True, self._connection
        if connection is not None:
            with suppress(OSError):  # it is closed already
                connection.shutdown(socket.SHUT_RDWR)

    def _asked(self, request: Mapping[str, Any], take: Callable[[Wire, Mapping[str, Any]], Any]) -> Any:
        with self._one_at_a_time:
            try:
                wire, answer = self._first_answer(request)
                self._refuse_error(answer)
                return take(wire, answer)
            except CheckpointError:
                raise
            except (OSError, EOFError, ValueError, LookupError, TypeError, OverflowError, RecursionError) as error:
                self._hang_up()
                self._lost(request, error)
            except BaseException:
                self._hang_up()  # half an answer is on its way
                raise

    def _first_answer(self, request: Mapping[str, Any]) -> tuple[Wire, Mapping[str, Any]]:
        if self._wire is not None:
            try:
                self._wire.say(request)
                return self._wire, self._wire.hear()
            except TimeoutError:
                raise
            except (OSError, EOFError):  # let go by the server since the last time; or it is gone, as a new try shows
                self._hang_up()
        self._wire = self._connected()
        self._wire.say(request)
        return self._wire, self._wire.hear()

    def _connected(self) -> Wire:
        """Strangers may crowd a server, which drops the oldest of them: who is dropped before its proof tries again."""
        until = time.monotonic() + min(self._timeout_s, CONNECT_S)
        while True:
            wire = self._connect()
            try:
                prove_to_server(wire, self._token)
                return wire
            except (EOFError, ConnectionError):
                if self._abandoned or time.monotonic() > until:
                    raise
                self._hang_up()
                time.sleep(AGAIN_S)

    def _connect(self) -> Wire:
        host, _, port = self.address.rpartition(":")
        if not self._abandoned:
            limit_s = min(self._timeout_s, CONNECT_S)
            self._connection = socket.create_connection((host.strip("[]"), int(port)), timeout=limit_s)
        if self._abandoned or self._connection is None:  # perhaps meanwhile
            raise EOFError("it was given up")
        self._connection.settimeout(self._timeout_s)
        return Wire(self._connection)

    def _hang_up(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = self._wire = None

    def _refuse_error(self, answer: Mapping[str, Any]) -> None:
        if "error" in answer:
            raise CheckpointError(f"{self.name} ({self.address}): {answer['error']}")

    def _lost(self, request: Mapping[str, Any], error: Exception) -> NoReturn:
        if isinstance(error, TimeoutError):
            why = f"it said nothing for {self._timeout_s:g} s"
        else:
            why = str(getattr(error, "strerror", None) or error or type(error).__name__)
        step = f" of {said(request['step'])}" if "step" in request else ""
        doing = {"keep": "giving it a copy of", "steps": "asking it for"}.get(request["do"], "reading")
        raise PeerLostError(
            f"the vault of {self.name} at {self.address} is lost ({why}), while {doing} worker {request['slot']}'s "
            f"part{step}"
        ) from error


class RemoteSlot:
    """What one slot kept of one step on another host."""

    def __init__(self, vault: RemoteVault, slot: int, step: int) -> None:
        self._vault, self._slot, self._step = vault, slot, step

    def about(self) -> tuple[dict[str, Any], list[Any]]:
        return self._vault.about(self._slot, self._step)

    def read_into(self, offset: int, room: memoryview) -> None:
        self._vault.read_into(self._slot, self._step, offset, room)


def push_copy(vault: Vault, step: int, to: RemoteVault) -> None:
    """Keep a copy of what was just written on another host; it is valid there when this returns, and not before."""
    to.keep(vault.slot, step, vault.memory(step))


def read_anywhere(folder: Path, step: int, slots: Sequence[int], peers: Sequence[RemoteVault]) -> VaultState:
    """The state that these slots made together: from this host's vault where it has it, else from the first peer."""
    return VaultState(folder, step, {slot: _found(folder, step, slot, peers) for slot in slots})


def _found(folder: Path, step: int, slot: int, peers: Sequence[RemoteVault]) -> SlotSource:
    if step in steps_of(folder, slot):
        return MappedSlot(folder, slot, step)
    told = []
    for peer in peers:
        try:
            if step in (steps := peer.steps_of(slot)):
                return peer.slot(slot, step)
            told.append(f"{peer.name} has {all_said(steps)} of it")
        except PeerLostError as error:  # another may have a copy
            told.append(str(error))
    there = "; ".join([f"this one has {all_said(steps_of(folder, slot))} of it", *told])
    raise CheckpointError(
        f"no host has worker {slot}'s part of the state of {said(step)}: {there}. Resume from the newest checkpoint; "
        "--copies 2 keeps every part on a second host"
    )
