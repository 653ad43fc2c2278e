"""A fork server for one job, forked from a process that has imported torch: a launch takes 0.1 s, and not 5 s.

    forkserver (tests/preload) ──forks──▶ supervisor ──forks──▶ fork server ──forks──▶ worker 0, worker 1, …

All of it is the real thing (`paceline.cli.main`, `Supervisor`, `ForkServer`, `run_worker`) except how the fork server
is started. The supervisor forks it first of all, while it has one thread, and tells it later what to be.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import socket
import sys
import threading
from typing import Any, NoReturn

from paceline.launch import fork_server

MESSAGE_LIMIT = 128 * 2**10


class Forked:
    """Our child, as `fork_server.Process` describes one."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None

    def poll(self) -> int | None:
        return self._ended(os.WNOHANG)

    def wait(self) -> int:
        code = self._ended(0)
        assert code is not None
        return code

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def _ended(self, options: int) -> int | None:
        if self._code is None:
            pid, status = os.waitpid(self.pid, options)
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
        return self._code


def lend_fork_server() -> None:
    """Fork the fork server of the supervisor that this process is about to become."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        ours.close()
        _become_fork_server(theirs)
    theirs.close()

    def start(arguments: list[str], channel: int, variables: dict[str, str]) -> Forked:
        with ours:
            message = {"arguments": arguments, "variables": variables}
            socket.send_fds(ours, [json.dumps(message).encode()], [channel])
        return Forked(pid)

    fork_server.start_process = start


def _become_fork_server(told: socket.socket) -> NoReturn:
    with told:
        data, descriptors, _, _ = socket.recv_fds(told, MESSAGE_LIMIT, 1)
    if not data:
        os._exit(0)  # the supervisor ended before it needed one
    message: dict[str, Any] = json.loads(data)
    os.setsid()
    os.environ.clear()
    os.environ.update(message["variables"])
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    os.close(nothing)
    sys.argv = ["fork_server", str(descriptors[0]), *message["arguments"][1:]]
    _end_as_a_program_does(_code_of_main())


def _code_of_main() -> int:
    """In every worker that the fork server forks this returns too: `main` becomes the worker and runs the script."""
    try:
        fork_server.main()
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    return 0


def _end_as_a_program_does(code: int) -> NoReturn:
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
