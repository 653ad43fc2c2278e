"""The server of the page: what runs look like now, and, while a browser listens, whatever becomes of them.

    GET /            the page                      GET /events      server-sent events: `run`, a run as in /runs
    GET /runs        all runs, as JSON             GET /metrics     for Prometheus

A run is read again when its files have grown, at most once a second, and so seldom that reading takes a tenth of a core
(a run of 64 workers and 10,000 steps: every ten seconds). Nobody listens: nothing is read.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import errno
import hashlib
import importlib.resources
import json
import re
import socket
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from paceline.dashboard.access import Access, Request
from paceline.dashboard.metrics_text import CONTENT_TYPE, metrics_text
from paceline.dashboard.run_view import view_of
from paceline.errors import ConfigError, PacelineError
from paceline.input_file import cause_of
from paceline.monitor.events import FOLDER
from paceline.planner import residuals
from paceline.tracking import json_lines

DEFAULT_PORT = 8350
PORTS_TRIED = 20
EVERY_S = 1.0
SHARE = 0.1
"""Of a core, for reading."""
MOST_CONNECTIONS = 100
ENDS_WITHIN_S = 2

View = dict[str, Any]


class WatchedRun:
    """A run's view as it was when it was last read, and when it is worth reading again."""

    def __init__(self, folder: Path, number: int, view: View | None = None) -> None:
        self.folder, self.number = folder, number
        self.version = 0
        self.view = self._unread("it is being read")
        self.text = ""
        self._seen: Any = None
        self._due = 0.0
        self._reading = asyncio.Lock()
        if view is not None:
            self._seen = self._signature()
            self._take(view)

    async def refresh(self) -> None:
        async with self._reading:
            if time.monotonic() >= self._due:
                await asyncio.to_thread(self._read)

    def _read(self) -> None:
        began, spent = time.monotonic(), time.thread_time()
        seen = self._signature()
        if seen != self._seen:
            try:
                self._take(view_of(self.folder))
            except (PacelineError, OSError) as error:
                self._take(self._unread(cause_of(error)))
            except Exception as error:  # damaged in a way that no reader expects: the other runs are shown all the same
                self._take(self._unread(f"it can't be shown ({type(error).__name__}: {cause_of(error)})"))
            self._seen = seen
        self._due = began + max(EVERY_S, (time.thread_time() - spent) / SHARE)

    def _unread(self, why: str) -> View:
        return {"name": self.folder.name, "folder": str(self.folder), "error": why}

    def _take(self, view: View) -> None:
        numbered = {**view, "number": self.number}
        # In ASCII: a file's name, and a damaged file's text, may have halves of letters, which UTF-8 has none of.
        self.text = json.dumps(numbered, allow_nan=False, separators=(",", ":"))
        self.view = numbered
        self.version += 1

    def _signature(self) -> Any:
        """Files and their sizes: other ones, and the run is worth reading."""
        beside = [self.folder / name for name in (json_lines.FILE_NAME, residuals.FILE_NAME, residuals.PLAN)]
        found = []
        for path in [*sorted(self.folder.glob(f"{FOLDER}/worker-*")), *beside]:
            with contextlib.suppress(OSError):
                about = path.stat()
                found.append((path.name, about.st_size, about.st_mtime_ns))
        return found


class Runs:
    """Those that the page shows; a job adds its own when it has begun."""

    def __init__(self) -> None:
        self.watched: list[WatchedRun] = []
        self.ending = asyncio.Event()

    def add(self, folder: Path, view: View | None = None) -> None:
        if all(run.folder != folder for run in self.watched):
            self.watched.append(WatchedRun(folder, len(self.watched), view))

    async def refresh(self) -> list[WatchedRun]:
        for run in self.watched:
            await run.refresh()
        return list(self.watched)

    async def changes(self) -> AsyncIterator[str]:
        """Every run, and from then on each that has changed, as server-sent events, until the server ends."""
        sent: dict[int, int] = {}
        yield "retry: 1000\n\n"
        while not self.ending.is_set():
            for run in await self.refresh():
                if sent.get(run.number) != run.version:
                    sent[run.number] = run.version
                    yield f"event: run\ndata: {run.text}\n\n"
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.ending.wait(), EVERY_S)
            yield f"event: clock\ndata: {time.time():.3f}\n\n"


# -- the application ---------------------------------------------------------------------------------------------------


class Guarded:
    """Refuses what `Access` refuses, before anything else looks at a request."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app, self._access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        asked = HttpRequest(scope)
        hosts = asked.headers.getlist("host")
        token = asked.query_params.get("token")
        refused = self._access.refusal(
            Request(
                host=hosts[0] if len(hosts) == 1 else "",
                origin=asked.headers.get("origin"),
                cookie=asked.headers.get("cookie", ""),
                authorization=asked.headers.get("authorization", ""),
                token=token,
                by_site=asked.headers.get("sec-fetch-site", "none"),
                mode=asked.headers.get("sec-fetch-mode", "navigate"),
            )
        )
        answer: ASGIApp = self._app
        if refused is not None:
            answer = PlainTextResponse(refused[1] + "\n", refused[0], {"Cache-Control": "no-store"})
        elif token is not None:  # it leaves the address bar, and with it the browser's history
            answer = moved = RedirectResponse(
                "./", 303, {"Cache-Control": "no-store", "Referrer-Policy": "no-referrer"}
            )
            moved.set_cookie(self._access.cookie, token, httponly=True, samesite="strict", path="/")
        await answer(scope, receive, send)


def application(runs: Runs, access: Access) -> ASGIApp:
    page, policy = page_and_policy()
    headers = {
        "Content-Security-Policy": policy,
        "Cache-Control": "no-store",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }

    async def show_page(request: HttpRequest) -> Response:
        return HTMLResponse(page, headers=headers)

    async def show_runs(request: HttpRequest) -> Response:
        texts = [run.text for run in await runs.refresh()]
        return Response(f"[{','.join(texts)}]", media_type="application/json", headers=headers)

    async def show_changes(request: HttpRequest) -> Response:
        return StreamingResponse(runs.changes(), media_type="text/event-stream", headers=headers)

    async def show_metrics(request: HttpRequest) -> Response:
        views = [run.view for run in await runs.refresh()]
        text = metrics_text(views).encode(errors="replace")  # as `_take`
        return Response(text, media_type=CONTENT_TYPE, headers=headers)

    routes = {"/": show_page, "/runs": show_runs, "/events": show_changes, "/metrics": show_metrics}
    return Guarded(Starlette(routes=[Route(path, answer) for path, answer in routes.items()]), access)


def page_and_policy() -> tuple[str, str]:
    """The page, and what a browser may do for it: run its own script, and ask this server."""
    page = importlib.resources.files("paceline.dashboard").joinpath("page.html").read_text(encoding="utf-8")

    def hashes(tag: str) -> str:
        inside = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        digests = (hashlib.sha256(text.encode()).digest() for text in inside)
        return " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)

    policy = (
        f"default-src 'none'; script-src {hashes('script')}; style-src {hashes('style')}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return page, policy


# -- the process -------------------------------------------------------------------------------------------------------


def listen(address: str, port: int | None) -> tuple[socket.socket, str]:
    """A socket that listens, and a line to say where another port than the usual was taken. None: the usual."""
    wanted = [port] if port is not None else range(DEFAULT_PORT, DEFAULT_PORT + PORTS_TRIED)
    for number in wanted:
        try:
            found = _bound(address, number)
        except OSError as error:
            if error.errno == errno.EADDRINUSE and port is None:
                continue
            if error.errno == errno.EADDRINUSE:
                raise ConfigError(
                    f"--port {port} on {address} is in use; leave --port out, and a free one is found"
                ) from error
            raise ConfigError(f"--host {address} --port {number} can't be used: {cause_of(error)}") from error
        taken = port is None and number != DEFAULT_PORT
        return found, f"port {DEFAULT_PORT} is in use; port {number} is taken instead" if taken else ""
    raise ConfigError(
        f"ports {DEFAULT_PORT} to {DEFAULT_PORT + PORTS_TRIED - 1} on {address} are in use; give a free one with --port"
    )


def _bound(address: str, port: int) -> socket.socket:
    family, kind, protocol, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    found = socket.socket(family, kind, protocol)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(where)
        found.listen(MOST_CONNECTIONS)
    except BaseException:
        found.close()
        raise
    return found


class _Server(uvicorn.Server):
    """Tells streams that they end, before it waits for them."""

    def __init__(self, config: uvicorn.Config, runs: Runs) -> None:
        super().__init__(config)
        self._runs = runs

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._runs.ending.set()
        await super().shutdown(sockets)


async def serve(
    listening: socket.socket,
    access: Access,
    folders: Sequence[tuple[Path, View | None]],
    began: Callable[[Runs, Callable[[], None]], None] = lambda runs, end: None,
) -> None:
    """Until a signal comes, or `end` is called; `began` gets the runs, to add others, and `end`. Both are called on
    this loop. The socket is closed."""
    runs = Runs()
    for folder, view in folders:
        runs.add(folder, view)
    # No log of requests: their addresses have the token.
    config = uvicorn.Config(
        application(runs, access), log_config=None, log_level="error", access_log=False, lifespan="off",
        server_header=False, limit_concurrency=MOST_CONNECTIONS, timeout_graceful_shutdown=ENDS_WITHIN_S, ws="none",
        loop="asyncio", http="h11", proxy_headers=False,
    )  # fmt: skip
    server = _Server(config, runs)

    def end() -> None:
        server.should_exit = True

    began(runs, end)
    try:
        await server.serve(sockets=[listening])
    finally:
        listening.close()
