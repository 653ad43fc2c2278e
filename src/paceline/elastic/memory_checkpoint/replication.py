"""Replication of the in-memory checkpoint: every worker serves its host's files, and keeps a copy on another host.

    host 0   files: slots 0 1 │ copies of 4       host 1   files: slots 2 3 │ copies of 0 1       host 2   …
               0 ─── before each READY, `keep` ──────────────▶ 2
               1 ────────────────────────────────────────────▶ 3

    lost        what is left of it                           what those who are left do
    a worker    its files, served by the others of its host  read them, here or over TCP
    a host      copies=2: its files, on the next host        the same
                copies=1: nothing                            `StateLostError`: all start anew, from a checkpoint

Between two hosts, on one TCP connection:

    RemoteCheckpoint ── steps, about, part ──▶ CheckpointServer ── maps ──▶ slot-2-0, slot-2-1    its own
                     ── keep ────────────────▶                  ── writes ▶ slot-0-0, slot-0-1    a copy of host 0's

    {"do": "part", "slot": 2, …}            ───▶
                                            ◀─── {"bytes": 4096}, the bytes, {}                   {}: they were valid
    {"do": "keep", "slot": 0, "step": 7, …} ───▶ makes room
                                            ◀─── {}
    the file, {"whole": true}               ───▶ sets the stamp
                                            ◀─── {}

A text is its length (4 bytes) and a JSON object; bytes are as many as the text before them said. Before any request
both ends prove that they know the job's token, which comes from the job's store and is never sent:

    reader   nonce r                       ───▶   server
             ◀─── nonce s, HMAC(token, "server", r, s)             it knows the token
             HMAC(token, "reader", r, s)   ───▶                    so does the reader

A server has all slots of its host's folder, so any worker of the host can stand in for one that died. Where both ends
are alive nothing waits longer than `timeout_s`.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import mmap
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from paceline.elastic.memory_checkpoint.files import (
    AT_BYTES,
    AT_MAGIC,
    AT_STAMP,
    HEAD_BYTES,
    MAGIC,
    LocalPart,
    MemoryCheckpoint,
    SlotPart,
    StoredState,
    in_words,
    new_file,
    paths_of,
    read,
    step_in,
    steps_of,
    turn_of,
)
from paceline.elastic.worker_agent import WorkerAgent
from paceline.errors import CheckpointError, GenerationEnded, PacelineError, PeerLostError, StateLostError
from paceline.world import unauthenticated
from paceline.world.environment import tensor_address
from paceline.world.world import World

TIMEOUT_S = 30.0
CONNECT_S = 5.0
AGAIN_S = 0.02
IDLE_S = 600.0  # a server lets a connection go on which nothing was asked for so long; the reader makes a new one
_MOST_TABLE = 256 * 2**20  # tables and values of a large model
MOST_TEXT = 2**16
CHUNK = 64 * 2**20  # bytes that must move within one timeout
_NONCE, _PROOF = 16, 32

# -- texts, bytes and the proof ----------------------------------------------------------------------------------------


class Wire:
    """Texts and bytes on a socket that has a timeout."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.deadline: float | None = None
        """For all that is received, however it trickles in; None: each piece has the socket's timeout."""
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def say(self, text: Mapping[str, Any]) -> None:
        encoded = json.dumps(text).encode()
        self.connection.sendall(len(encoded).to_bytes(4, "little") + encoded)

    def hear(self) -> dict[str, Any]:
        length = bytearray(4)
        self.receive(memoryview(length))
        size = int.from_bytes(length, "little")
        if size > MOST_TEXT:
            raise ValueError(f"a text of {size} bytes")
        text = bytearray(size)
        self.receive(memoryview(text))
        try:
            found = json.loads(text)
        except RecursionError as error:
            raise ValueError("a text that is nested too deeply") from error
        if not isinstance(found, dict):
            raise ValueError("a text that is no request and no answer")
        return found

    def send(self, data: memoryview) -> None:
        for start in range(0, len(data), CHUNK):
            self.connection.sendall(data[start : start + CHUNK])

    def receive(self, room: memoryview) -> None:
        while room:
            if self.deadline is not None:
                self.connection.settimeout(max(1e-3, self.deadline - time.monotonic()))
            got = self.connection.recv_into(room)
            if not got:
                raise EOFError("the connection ended")
            room = room[got:]


def _proof(token: str, who: str, reader: bytes, server: bytes) -> bytes:
    return hmac.new(token.encode(), who.encode() + reader + server, hashlib.sha256).digest()


def proved_to_server(wire: Wire, token: str) -> bool:
    """The server's side: both know the token."""
    wire.deadline = time.monotonic() + unauthenticated.PROOF_S
    told, mine = bytearray(_NONCE), secrets.token_bytes(_NONCE)
    wire.receive(memoryview(told))
    wire.connection.sendall(mine + _proof(token, "server", bytes(told), mine))
    proof = bytearray(_PROOF)
    wire.receive(memoryview(proof))
    wire.deadline = None
    return hmac.compare_digest(bytes(proof), _proof(token, "reader", bytes(told), mine))


def prove_to_server(wire: Wire, token: str) -> None:
    mine, told = secrets.token_bytes(_NONCE), bytearray(_NONCE + _PROOF)
    wire.connection.sendall(mine)
    wire.receive(memoryview(told))
    server, proof = bytes(told[:_NONCE]), bytes(told[_NONCE:])
    if not hmac.compare_digest(proof, _proof(token, "server", mine, server)):
        raise ValueError("it does not know this job's token: another job's server")
    wire.connection.sendall(_proof(token, "reader", mine, server))


# -- a host's files, served and read -----------------------------------------------------------------------------------


class CheckpointServer:
    """Serves this host's files at one of its addresses; its threads end with `close`, or with the process."""

    def __init__(self, host: str, folder: Path, token: str, *, timeout_s: float = TIMEOUT_S) -> None:
        self._folder, self._token, self._timeout_s = folder, token, timeout_s
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._listener = socket.create_server((host, 0), family=family)
        except OSError as error:
            why = error.strerror or error
            raise PeerLostError(f"this host's in-memory checkpoint can't be served at {host} ({why})") from error
        port = self._listener.getsockname()[1]
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._copies = _Copies(folder)
        self._open: set[socket.socket] = set()
        self._strangers: dict[socket.socket, str] = {}
        """Those of the open ones that have not proved to be of this job, the oldest first, and their addresses."""
        self._closed = False
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._accept, name="paceline-checkpoint-server", daemon=True)]
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
                thread = threading.Thread(
                    target=self._serve, args=(connection,), name="paceline-checkpoint-server", daemon=True
                )
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
        slot = LocalPart(self._folder, request["slot"], request["step"])
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
            raise CheckpointError(f"worker {slot}'s part of {in_words(step)} was written over while it was copied")
        stamp[AT_STAMP] = step + 1


def _inode_of(path: Path) -> int:
    try:
        return os.stat(path).st_ino
    except FileNotFoundError:
        return 0


class RemoteCheckpoint:
    """The files of another host, by one connection that is made when it is needed; any thread may use it."""

    def __init__(self, address: str, token: str, *, name: str, timeout_s: float = TIMEOUT_S) -> None:
        self.address, self.name = address, name
        self._token, self._timeout_s = token, timeout_s
        self._connection: socket.socket | None = None
        self._wire: Wire | None = None  # once both have proved who they are
        self._abandoned = ""  # why
        self._one_at_a_time = threading.Lock()

    def steps_of(self, slot: int) -> list[int]:
        steps: list[int] = self._asked({"do": "steps", "slot": slot}, lambda wire, answer: answer["steps"])
        return steps

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

    def abandon(self, why: str) -> None:
        """End every wait at once, from any thread; for good."""
        self._abandoned, connection = why or "the workers have changed", self._connection
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
            raise EOFError(f"it was given up: {self._abandoned}")
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
        step = f" of {in_words(request['step'])}" if "step" in request else ""
        doing = {"keep": "giving it a copy of", "steps": "asking it for"}.get(request["do"], "reading")
        raise PeerLostError(
            f"the in-memory checkpoint of {self.name} at {self.address} is lost ({why}), while {doing} worker "
            f"{request['slot']}'s part{step}"
        ) from error


class RemotePart:
    """What one slot kept of one step on another host.

    A strategy may read it as late as in its next step, and with the host its group ends.
    """

    def __init__(self, host: RemoteCheckpoint, slot: int, step: int) -> None:
        self._host, self._slot, self._step = host, slot, step

    def about(self) -> tuple[dict[str, Any], list[Any]]:
        with _ending_group():
            return self._host.about(self._slot, self._step)

    def read_into(self, offset: int, room: memoryview) -> None:
        with _ending_group():
            self._host.read_into(self._slot, self._step, offset, room)


@contextmanager
def _ending_group() -> Iterator[None]:
    try:
        yield
    except PeerLostError as error:
        raise GenerationEnded(str(error)) from error


# -- the parts of all workers, wherever they are -----------------------------------------------------------------------

Offer = tuple[int, str, str]
"""Host, address and token of a worker's server."""


class OneHost:
    """All workers are on one host, whose files have every part: nothing is sent."""

    across_hosts = False
    copies = 0
    """Of each part, on other hosts."""

    def __init__(self, checkpoint: MemoryCheckpoint) -> None:
        self._checkpoint = checkpoint

    def connect(self, tell: Callable[[Offer], Sequence[Offer]], agent: WorkerAgent, generation: int) -> list[int]:
        """Once the workers of a generation have met; `tell` gives what each says, in rank order. The host of each."""
        return []

    def keep(self, number: int) -> None:
        """A copy of what was just written, on other hosts; they are whole when this returns."""

    def renew(self, number: int) -> None:
        """The same where hosts have come or gone since it was written."""

    def read(self, number: int, writers: Sequence[int]) -> StoredState:
        """The state that these slots made together, from wherever it is."""
        return read(self._checkpoint.folder, number, writers)

    def close(self) -> None: ...


class Replication(OneHost):
    """`seat` is the place that the launcher gave; `copies` of each part are kept, on so many hosts.

    Addresses are those of one generation: workers tell each other theirs whenever they have met. A copy counts only as
    part of the state that its writers made together, so one that an older generation left on a third host is passed
    over.
    """

    across_hosts = True

    def __init__(self, seat: World, checkpoint: MemoryCheckpoint, copies: int) -> None:
        super().__init__(checkpoint)
        self._seat, self._wanted = seat, copies
        self._token = secrets.token_hex(32)
        self._server: CheckpointServer | None = None
        self._keepers: list[RemoteCheckpoint] = []
        self._peers: list[RemoteCheckpoint] = []

    def connect(self, tell: Callable[[Offer], Sequence[Offer]], agent: WorkerAgent, generation: int) -> list[int]:
        """From now on it is the files of these workers that are read and copied to."""
        offers = tell(self.offer())
        for peer in self._peers:
            peer.close()
        assert self._server is not None
        hosts = [host for host, _, _ in offers]
        mine, on = self._seat.host_rank, hosts_of(hosts)
        place = on[mine].index([address for _, address, _ in offers].index(self._server.address))
        after = sorted(on, key=lambda host: (host <= mine, host))[:-1]  # all others, the next one first
        chosen = {host: on[host][place % len(on[host])] for host in after}
        self._peers = [
            RemoteCheckpoint(offers[there][1], offers[there][2], name=f"host {host}") for host, there in chosen.items()
        ]
        self._keepers = self._peers[: self._wanted - 1]
        self.copies = len(self._keepers)
        for peer in self._peers:
            agent.watch(peer, generation)
        return hosts

    def offer(self) -> Offer:
        """What the others need to know of this worker."""
        if self._server is None:
            self._server = CheckpointServer(tensor_address(self._seat), self._checkpoint.folder, self._token)
        return self._seat.host_rank, self._server.address, self._token

    def keep(self, number: int) -> None:
        for keeper in self._keepers:
            keeper.keep(self._checkpoint.slot, number, self._checkpoint.memory(number))

    def renew(self, number: int) -> None:
        for keeper in self._keepers:
            if number not in keeper.steps_of(self._checkpoint.slot):
                keeper.keep(self._checkpoint.slot, number, self._checkpoint.memory(number))

    def read(self, number: int, writers: Sequence[int]) -> StoredState:
        found = {slot: self._found(number, slot, rank, len(writers)) for rank, slot in enumerate(writers)}
        return StoredState(self._checkpoint.folder, number, found)

    def _found(self, number: int, slot: int, rank: int, size: int) -> SlotPart:
        folder = self._checkpoint.folder
        if number in steps_of(folder, slot) and _is_part(here := LocalPart(folder, slot, number), rank, size):
            return here
        for peer in self._peers:
            if number in peer.steps_of(slot) and _is_part(there := RemotePart(peer, slot, number), rank, size):
                return there
        where = f"this host has no copy of it, nor {'have' if len(self._peers) > 1 else 'has'} " + " and ".join(
            peer.name for peer in self._peers
        )
        more = "" if self._wanted > 1 else "; --copies 2 keeps every part on a second host"
        raise StateLostError(
            f"worker {slot}'s part of the state of {in_words(number)} is lost with its host "
            f"({where if self._peers else 'no other is left'}){more}"
        )

    def close(self) -> None:
        for peer in self._peers:
            peer.close()
        if self._server is not None:
            self._server.close()
            self._server = None


def _is_part(source: SlotPart, rank: int, size: int) -> bool:
    table, _ = source.about()
    return (table["rank"], table["size"]) == (rank, size)


def hosts_of(hosts: Sequence[int]) -> dict[int, list[int]]:
    """The ranks on each host, which is told by rank."""
    return {host: [rank for rank, on in enumerate(hosts) if on == host] for host in sorted(set(hosts))}


def on_hosts(world: World, hosts: Sequence[int]) -> World:
    """This worker's place on its host and among the hosts that are left; the host of each rank is told."""
    on, mine = hosts_of(hosts), hosts[world.rank]
    here = on[mine]
    return replace(
        world,
        local_rank=here.index(world.rank),
        local_size=len(here),
        host_rank=list(on).index(mine),
        hosts=len(on),
    )
