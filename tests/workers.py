"""Real worker processes for tests, forked from one preloaded parent.

    results = run_workers(program, 3, lanes=4)         program(world, **options) runs in 3 processes of one world
    results[1].value, results[1].error                 what it returned, or "TypeName: text" of what it raised

    results = run_workers(program, 3, servers=2)       and in 2 servers of that world, whose results come last

A program that ends by SystemExit(0), as a server does inside `engine.prepare`, has ended well and returned None.
Every process is gone when `run_workers` returns, and it returns within `timeout_s`.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import secrets
import socket
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
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
    name: str = ""


def worlds(size: int, servers: int = 0) -> list[World]:
    """The workers' worlds, then the servers'."""
    if size + servers == 1:
        return [World()]
    meeting = TcpRendezvous("127.0.0.1", free_port())
    worker_0 = World(size=size, local_size=size, source="tests", rendezvous=meeting, servers=servers)
    return [replace(worker_0, rank=rank, local_rank=rank) for rank in range(size + servers)]


def free_port() -> int:
    """Below those that the kernel gives to connections: one of them could have it before a worker listens there."""
    while True:
        port = 20_000 + secrets.randbelow(12_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def run_workers(
    program: Callable[..., Any],
    workers: int,
    *,
    servers: int = 0,
    timeout_s: float = 60.0,
    imports: tuple[str, ...] = (),
    **options: Any,
) -> list[Result]:
    """`imports`: what takes long, and a parent of these workers alone imports for all of them."""
    if imports:
        job = (program, workers, servers, timeout_s, imports, options)
        (parent,) = run_workers(_as_parent, 1, timeout_s=timeout_s + 30, job=job)
        assert parent.error is None, parent.traceback
        return list(parent.value)
    deadline = time.monotonic() + timeout_s
    started: list[tuple[Any, Connection]] = []
    try:
        places = worlds(workers, servers)
        for world in places:
            receiver, sender = _CONTEXT.Pipe(duplex=False)
            process = _CONTEXT.Process(target=_work, args=(sender, program, world, options))
            process.start()
            sender.close()
            started.append((process, receiver))
        return [
            replace(_result_of(process, receiver, deadline), name=world.name)
            for world, (process, receiver) in zip(places, started, strict=True)
        ]
    finally:
        for process, receiver in started:
            if process.is_alive():
                process.kill()
            process.join(5)
            receiver.close()


def _as_parent(_: World, job: tuple[Any, ...]) -> list[Result]:
    global _CONTEXT
    program, workers, servers, timeout_s, imports, options = job
    for name in imports:
        importlib.import_module(name)
    _CONTEXT = multiprocessing.get_context("fork")  # type: ignore[assignment]
    return run_workers(program, workers, servers=servers, timeout_s=timeout_s, **options)


def hashes(results: list[Result]) -> set[str]:
    """The workers' hashes; fails with the traceback of a process that raised, the cause before its consequences."""
    failed = [result for result in results if result.error is not None]
    for result in sorted(failed, key=lambda result: str(result.error).startswith("PeerLostError")):
        assert result.error is None, f"{result.name}: {result.error}\n{result.traceback}"
    return {result.value for result in results if not result.name.startswith("server")}


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
        if isinstance(error, SystemExit) and error.code in (0, None):
            result = Result()
    sender.send(result)
    sender.close()
    # As at the end of a script, but without the interpreter's own long goodbye.
    os._exit(0)
