"""Real worker processes for tests, forked from one preloaded parent.

    results = run_workers(program, 3, lanes=4)         program(world, **options) runs in 3 processes of one world
    results[1].value, results[1].error                 what it returned, or "TypeName: text" of what it raised

Every process is gone when `run_workers` returns, and it returns within `timeout_s`.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from paceline.world.world import TcpRendezvous, World

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.preload"])


@dataclass(frozen=True)
class Result:
    value: Any = None
    error: str | None = None
    traceback: str = ""
    exit_code: int | None = 0


def worlds(size: int) -> list[World]:
    if size == 1:
        return [World()]
    meeting = TcpRendezvous("127.0.0.1", free_port())
    return [
        World(rank=rank, size=size, local_rank=rank, local_size=size, source="tests", rendezvous=meeting)
        for rank in range(size)
    ]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_workers(program: Callable[..., Any], workers: int, *, timeout_s: float = 60.0, **options: Any) -> list[Result]:
    deadline = time.monotonic() + timeout_s
    started: list[tuple[Any, Connection]] = []
    try:
        for world in worlds(workers):
            receiver, sender = _CONTEXT.Pipe(duplex=False)
            process = _CONTEXT.Process(target=_work, args=(sender, program, world, options))
            process.start()
            sender.close()
            started.append((process, receiver))
        return [_result_of(process, receiver, deadline) for process, receiver in started]
    finally:
        for process, receiver in started:
            if process.is_alive():
                process.kill()
            process.join(5)
            receiver.close()


def hashes(results: list[Result]) -> set[str]:
    """The workers' hashes; fails with the traceback of a worker that raised, the cause before its consequences."""
    failed = [(rank, result) for rank, result in enumerate(results) if result.error is not None]
    for rank, result in sorted(failed, key=lambda entry: str(entry[1].error).startswith("PeerLostError")):
        assert result.error is None, f"worker {rank}: {result.error}\n{result.traceback}"
    return {result.value for result in results}


def _result_of(process: Any, receiver: Connection, deadline: float) -> Result:
    if not receiver.poll(max(0.0, deadline - time.monotonic())):
        return Result(error="Timeout: the worker did not finish", exit_code=None)
    try:
        result: Result = receiver.recv()
    except EOFError:
        process.join(5)
        return Result(error=f"Died: exit code {process.exitcode}", exit_code=process.exitcode)
    return result


def _work(sender: Connection, program: Callable[..., Any], world: World, options: dict[str, Any]) -> None:
    try:
        result = Result(value=program(world, **options))
    except BaseException as error:
        result = Result(error=f"{type(error).__name__}: {error}", traceback=traceback.format_exc(), exit_code=1)
    sender.send(result)
    sender.close()
    # As at the end of a script, but without the interpreter's own long goodbye.
    os._exit(0)
