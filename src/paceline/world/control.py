"""The worker's end of the control channel: JSON lines over the Unix socket of this host's supervisor.

    worker ──▶ {"kind": "step", "body": {"step": 17}}                                   tell: no answer
    worker ──▶ {"kind": "store.get", "body": {"keys": ["a"]}, "id": 4, "timeout_s": 30}  ask: waits for its id
    worker ◀── {"id": 4, "body": {"values": ["MQ=="]}}   or   {"id": 4, "error": "…"}

| report     | fields                              | so that                                                     |
|------------|-------------------------------------|-------------------------------------------------------------|
| hello      | rank, pid                           | the supervisor knows which process it is; sent by `connect` |
| step       | step                                | a failure is reported with its step                         |
| phase      | name: training, idle                | leaving while others train counts as a failure              |
| progress   | step, total, fields, final          | one line is drawn below the output                          |
| table      | title, rows                         | a summary is drawn at the end                               |
| evaluated  | begun, whole                        | evaluations that only some workers ran are told at the end  |
| policy     | survive_worker_loss, hang_timeout_s | the job ends by what the strategy needs: `exit_rules`       |
|            | stops_on_request                    | SIGTERM is known to end it after a step, with time to save  |
| holds      | what                                | a failure is reported with what is lost: `keys 4…7`         |
| checkpoint | folder                              | the line about a failure says where to resume               |
| run        | folder                              | the dashboard of the job shows it (--dashboard)             |
| memory     | told, kills_file, kills             | a kill for lack of memory is told with what was held        |
| waits      | call, place, seconds                | a wait that can't end is found: `exit_rules`                |
| goes_on    |                                     | it waits no more                                            |
| wait_failed| call, place, doing, text, seconds,  | a wait whose time was up is told with those that were late  |
|            | generation                          |                                                             |

Unasked, the supervisor sends only what an elastic job needs (`elastic.commit`, `elastic.generation`, …): `heard` is
called with it, on the reading thread.

Any thread may tell or ask. One daemon thread reads; when the connection ends the supervisor is gone, nothing
coordinates this process any more, and it ends itself with `SUPERVISOR_GONE`. Tensors never travel here, and torch is
not imported.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NoReturn

from paceline.errors import LaunchError, WorldError
from paceline.world import messages
from paceline.world.world import ControlSocket, World

JSON = str | int | float | bool | None | Sequence["JSON"] | Mapping[str, "JSON"]

SUPERVISOR_GONE = 74
"""Exit code of a worker whose supervisor went away."""

STOPPED_ON_REQUEST = 75
"""Exit code of a worker, and of the job, that a signal stopped between two steps: start again to continue.
It is EX_TEMPFAIL of sysexits.h, which schedulers can tell apart from a failure."""

ANSWER_MARGIN_S = 5.0
"""The supervisor answers a question it can't answer when its time is up; only then do we stop waiting for it."""

SEND_TIMEOUT_S = 30.0


def no_thread(rank: int, error: RuntimeError) -> LaunchError:
    return LaunchError(
        f"rank {rank} could not start a thread ({error}); raise the limit of processes (ulimit -u, pids.max of the "
        "container), or use fewer workers"
    )


class NoSupervisor:
    """Of a process that no launcher of ours has started: nobody is told anything, and it prints its lines itself."""

    is_there = False

    def tell(self, kind: str, **fields: JSON) -> None: ...

    def close(self) -> None: ...


class ControlClient:
    """A connection to the supervisor. The caller that connects closes it; the end of the process does so too."""

    is_there = True

    def __init__(self, connection: socket.socket, rank: int) -> None:
        self._connection = connection
        self._rank = rank
        self._sending = threading.Lock()
        self._waiting = threading.Lock()
        self._questions: dict[int, Future[dict[str, Any]]] = {}
        self._asked = 0
        self._closing = False
        self.heard: Callable[[str, dict[str, Any]], None] = lambda kind, body: None
        self._reader = threading.Thread(target=self._read, name="paceline-control", daemon=True)

    @classmethod
    def connect(cls, path: str, rank: int, *, timeout_s: float = 30.0) -> ControlClient:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(timeout_s)
        try:
            connection.connect(path)
        except OSError as error:
            connection.close()
            raise WorldError(
                f"rank {rank}: no supervisor answers at {path} ({error.strerror or error}); "
                "the `paceline run` that started this worker has ended"
            ) from error
        if (user := peer_user(connection)) != os.geteuid():
            connection.close()
            raise WorldError(
                f"rank {rank}: {path} is not this job's supervisor: user {user} listens there, and this worker is user "
                f"{os.geteuid()}'s; set TMPDIR to a folder in which no other user can rename anything"
            )
        connection.settimeout(None)  # the reader waits as long as the job lasts; what is sent has its own limit:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(SEND_TIMEOUT_S), 0))
        client = cls(connection, rank)
        try:
            client._reader.start()
        except RuntimeError as error:
            connection.close()
            raise no_thread(rank, error) from error
        client.tell("hello", rank=rank, pid=os.getpid())
        return client

    def tell(self, kind: str, **fields: JSON) -> None:
        """Fire and forget; what one thread tells arrives in its order."""
        self._send({"kind": kind, "body": fields})

    def ask(self, kind: str, *, timeout_s: float, **fields: JSON) -> dict[str, Any]:
        """The supervisor's answer; `WorldError` with its text when it refuses, or when time is up."""
        question: Future[dict[str, Any]] = Future()
        with self._waiting:
            self._asked += 1
            number = self._asked
            self._questions[number] = question
        try:
            self._send({"kind": kind, "body": fields, "id": number, "timeout_s": timeout_s})
            answer = question.result(timeout_s + ANSWER_MARGIN_S)
        except TimeoutError:
            raise WorldError(
                f"rank {self._rank}: the supervisor did not answer {kind!r} within "
                f"{timeout_s + ANSWER_MARGIN_S:g} s; it is overloaded or stopped (SIGSTOP?)"
            ) from None
        finally:
            with self._waiting:
                del self._questions[number]
        if "error" in answer:
            raise WorldError(f"rank {self._rank}: {answer['error']}")
        body: dict[str, Any] = answer["body"]
        return body

    def close(self) -> None:
        self._closing = True
        with contextlib.suppress(OSError):  # the other side closed first
            self._connection.shutdown(socket.SHUT_RDWR)
        if threading.current_thread() is not self._reader:
            self._reader.join(timeout=SEND_TIMEOUT_S)
        self._connection.close()

    def _send(self, message: dict[str, Any]) -> None:
        line = json.dumps(message, separators=(",", ":")).encode() + b"\n"
        try:
            with self._sending:
                self._connection.sendall(line)
        except (BrokenPipeError, ConnectionResetError):
            self._supervisor_gone()
        except BlockingIOError as error:
            raise WorldError(
                f"rank {self._rank}: the supervisor took nothing from this worker for {SEND_TIMEOUT_S:g} s; "
                "it is stopped (SIGSTOP?) or the host is out of memory"
            ) from error

    def _read(self) -> None:
        try:
            with self._connection.makefile("rb") as lines:
                for line in lines:
                    self._hear(json.loads(line))
        except OSError:
            pass  # a reset connection is a supervisor that went away, like the end of the stream
        if not self._closing:
            self._supervisor_gone()

    def _hear(self, message: dict[str, Any]) -> None:
        if "id" not in message:
            self.heard(message["kind"], message["body"])
            return
        with self._waiting:
            question = self._questions.get(message["id"])
        if question is not None:  # otherwise its asker ran out of time and left
            question.set_result(message)

    def _supervisor_gone(self) -> NoReturn:
        # Not an exception: no thread could handle it, and a half-alive worker would hold its port and memory.
        messages.logger("world").error(f"paceline: rank {self._rank}: the supervisor is gone; this worker leaves")
        os._exit(SUPERVISOR_GONE)


Supervisor = ControlClient | NoSupervisor


def call_supervisor(world: World) -> Supervisor:
    if not isinstance(world.rendezvous, ControlSocket):
        return NoSupervisor()
    return ControlClient.connect(world.rendezvous.path, world.rank)


def peer_user(connection: socket.socket) -> int:
    """Whose process is at the other end of a Unix socket, as the kernel knows it."""
    pid_user_group = struct.Struct("3i")
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, pid_user_group.size)
    return int(pid_user_group.unpack(packed)[1])
