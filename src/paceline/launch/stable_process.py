"""The supervisor's handle on the stable: it starts the process, passes on what to start or signal, hears who ended."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from paceline.launch.stable import LAST_REAPING_S, MESSAGE_LIMIT
from paceline.launch.worker_main import Script
from paceline.world import environment

LAST_MOMENT_S = 1.0
"""Between SIGTERM and SIGKILL, when the job is over."""
CHANNEL_TIMEOUT_S = 30.0


class Process(Protocol):
    """What is asked of the stable's process; a `Popen` has it."""

    def poll(self) -> int | None: ...

    def kill(self) -> None: ...

    def wait(self) -> int: ...


def new_python(arguments: list[str], channel: int, variables: dict[str, str]) -> Process:
    """The stable in an interpreter of its own, which keeps the descriptor `channel`."""
    return subprocess.Popen(
        # -P: the current folder must not shadow what torch imports; the worker puts the script's own in front.
        [sys.executable, "-P", "-m", "paceline.launch.stable", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        pass_fds=[channel],
        env=variables,
        start_new_session=True,
    )


start_process: Callable[[list[str], int, dict[str, str]], Process] = new_python
"""How the stable comes to life; tests have one at hand that has imported torch already."""


class StableProcess:
    """The supervisor's handle on the stable: one process and one channel, both closed together."""

    def __init__(
        self, script: Script, folder: Path, threads: int | None, preloaded: Sequence[str], *, keep_memory: bool = False
    ) -> None:
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            form = "module" if script.is_module else "file"
            for_stable = [str(theirs.fileno()), str(os.getpid()), str(folder), " ".join(preloaded)]
            self._process = start_process(
                [*for_stable, form, script.target, *script.arguments],
                theirs.fileno(),
                environment.parent_environment(threads, keep_memory=keep_memory),
            )
        self._channel.setblocking(False)

    def start_worker(self, rank: int, control: str, variables: dict[str, str], outputs: list[int]) -> None:
        message = {"kind": "start", "rank": rank, "control": control, "variables": variables}
        self._send(message, outputs)

    def signal_worker(self, rank: int, number: int) -> None:
        """The process alone, and not what it started."""
        self._send({"kind": "signal", "signal": number, "rank": rank}, [])

    def signal_workers(self, number: signal.Signals) -> None:
        self._send({"kind": "signal", "signal": int(number)}, [])

    async def receive(self) -> dict[str, Any] | None:
        """The next report; None when the stable has gone."""
        try:
            data = await asyncio.get_running_loop().sock_recv(self._channel, MESSAGE_LIMIT)
        except ConnectionError:
            return None
        if not data:
            return None
        message: dict[str, Any] = json.loads(data)
        return message

    async def wait(self, timeout_s: float) -> int | None:
        deadline = time.monotonic() + timeout_s
        while (status := self._process.poll()) is None and time.monotonic() < deadline:
            await asyncio.sleep(0.005)
        return status

    async def close(self) -> None:
        """End of the channel: the stable kills what is left of its workers and leaves."""
        self._channel.close()
        if await self.wait(LAST_MOMENT_S + LAST_REAPING_S) is None:
            self._process.kill()
            self._process.wait()

    def _send(self, message: dict[str, Any], descriptors: list[int]) -> None:
        self._channel.settimeout(CHANNEL_TIMEOUT_S)  # it reads between forks of 10 ms each: never long
        try:
            socket.send_fds(self._channel, [json.dumps(message).encode()], descriptors)
        except (BrokenPipeError, ConnectionResetError):
            pass  # it has died; `receive` tells the same in a moment, with more to say
        finally:
            self._channel.setblocking(False)
