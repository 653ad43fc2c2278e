"""The server of the page on a thread of this process, and requests to it over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from paceline.dashboard.access import Access, hosts_of
from paceline.dashboard.server import Runs, listen, serve

TOKEN = "a-token-of-the-tests"


@dataclass
class Answer:
    status: int
    headers: Mapping[str, str]
    text: str


@dataclass
class Served:
    port: int
    runs: Runs
    loop: asyncio.AbstractEventLoop

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/?token={TOKEN}"

    def get(self, path: str, **headers: str) -> Answer:
        """With the token; other headers as keyword arguments, Host among them."""
        return self.get_as({"Authorization": f"Bearer {TOKEN}", **headers}, path)

    def get_as(self, headers: Mapping[str, str], path: str = "/runs", method: str = "GET") -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        try:
            connection.request(method, path, headers=dict(headers))
            answer = connection.getresponse()
            return Answer(answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read().decode())
        finally:
            connection.close()


@contextlib.contextmanager
def served(*folders: Path, port: int = 0) -> Iterator[Served]:
    """Afterwards its thread and all of its sockets are gone."""
    listening, _ = listen("127.0.0.1", port)
    port = listening.getsockname()[1]
    ready: list[tuple[Runs, Callable[[], None], asyncio.AbstractEventLoop]] = []
    has_begun = threading.Event()

    def began(runs: Runs, end: Callable[[], None]) -> None:
        ready.append((runs, end, asyncio.get_running_loop()))
        has_begun.set()

    access = Access(TOKEN, f"paceline_{port}", hosts_of("127.0.0.1", []))
    work = serve(listening, access, [(folder, None) for folder in folders], began)
    thread = threading.Thread(target=asyncio.run, args=(work,), name="served")
    thread.start()
    assert has_begun.wait(10)
    runs, end, loop = ready[0]
    try:
        yield Served(port, runs, loop)
    finally:
        loop.call_soon_threadsafe(end)
        thread.join(10)
        assert not thread.is_alive()
