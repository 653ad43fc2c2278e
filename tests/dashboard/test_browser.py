"""The page in a real browser: it draws, follows a run that trains, outlives it and its server, and refuses strangers.

`make test-browser` runs these, with playwright and Debian's chromium; where either is missing they say so.
"""

from __future__ import annotations

import http.server
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.monitor.events import Part, Use
from tests.dashboard.served import TOKEN, served
from tests.dashboard.test_run_view import log
from tests.dashboard.training import training
from tests.monitor.simulated import Simulated

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.timeout(180),
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this host: apt install chromium"),
]
sync_api = pytest.importorskip("playwright.sync_api", reason="no playwright: `make test-browser` installs it")

PATIENCE_MS = 40_000


class Watched:
    """A page, and what a browser had to say about it."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.errors: list[str] = []
        self.requests: list[str] = []
        page.set_default_timeout(PATIENCE_MS)
        page.on("console", lambda said: self.errors.append(said.text) if said.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("request", lambda request: self.requests.append(request.url))

    def open(self, url: str) -> Watched:
        self.page.goto(url)
        self.page.wait_for_selector(".run .numbers dd")
        return self

    def step(self) -> int:
        return int(self.page.locator(".numbers dd").first.inner_text().replace(",", ""))

    def wait_for_step(self, least: int) -> None:
        script = "n => +document.querySelector('.numbers dd').innerText.replaceAll(',', '') >= n"
        self.page.wait_for_function(script, arg=least)

    def wait_for(self, selector: str, text: str) -> None:
        self.page.locator(selector, has_text=text).first.wait_for()

    def drawn(self) -> list[int]:
        """How many colours each canvas has: one is an empty one."""
        return self.page.evaluate(  # type: ignore[no-any-return]
            """() => [...document.querySelectorAll("canvas")].map(canvas => {
                const copy = new OffscreenCanvas(canvas.width, canvas.height);
                const pen = copy.getContext("2d", {willReadFrequently: true});
                pen.drawImage(canvas, 0, 0);
                return new Set(new Uint32Array(pen.getImageData(0, 0, copy.width, copy.height).data.buffer)).size;
            })"""
        )

    def hover(self, selector: str) -> None:
        """A page that scrolls hides what is shown at the pointer, so it is scrolled before."""
        self.page.locator(selector).first.scroll_into_view_if_needed()
        self.page.wait_for_timeout(300)
        self.page.locator(selector).first.hover()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        rules = "--host-resolver-rules=MAP rebound.example 127.0.0.1"
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", rules])
        yield found
        found.close()


@pytest.fixture
def watched(browser: Any) -> Iterator[Watched]:
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    yield Watched(context.new_page())
    context.close()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = Simulated(3, 60, delays={(1, Part.DATA): 0.02}, use=Use(2.0**30, 2.0**29, cpu=0.43, gpu=0.9)).write(
        tmp_path / "simulated", strategy="ddp", time=time.time()
    )
    return log(folder, {step: {"loss": 1 / step, "eval_loss": 2 / step} for step in range(1, 61)})


def test_it_draws_with_no_error_and_no_request_to_another_host(watched: Watched, run: Path) -> None:
    with served(run) as server:
        watched.open(server.url)
        watched.wait_for(".says", "Worker 1 is late: data takes it longer than the others")
        watched.wait_for("#link", "connected")
        watched.page.wait_for_timeout(300)
        assert all(colours > 5 for colours in watched.drawn()), watched.drawn()
        for choice in ("#axis [data-value=time]", "#theme [data-value=dark]", "#theme [data-value=light]"):
            watched.page.click(choice)
            watched.page.wait_for_timeout(100)
            assert all(colours > 5 for colours in watched.drawn()), choice
        watched.hover(".card:nth-child(3) canvas")
        watched.wait_for("#tip", "forward")
        watched.hover(".card.wide canvas")
        watched.wait_for("#tip", "worker")
        watched.hover(".card:nth-child(5) canvas")
        watched.wait_for("#tip", "90 %")
        assert "ddp" in watched.page.inner_text(".pairs")
        assert TOKEN not in watched.page.url
        assert watched.errors == []
        here = f"http://127.0.0.1:{server.port}/"
        assert [url for url in watched.requests if not url.startswith((here, "data:"))] == []


@pytest.mark.parametrize("width", [390, 1280, 1920])
def test_64_workers_fit_the_window(width: int, browser: Any, tmp_path: Path) -> None:
    many, few = Simulated(64, 30).write(tmp_path / "many"), Simulated(2, 30).write(tmp_path / "few")
    context = browser.new_context(viewport={"width": width, "height": 800})
    with served(many, few) as server:
        page = Watched(context.new_page()).open(server.url)
        page.page.wait_for_selector(".run:nth-child(2) .numbers dd")
        assert page.page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.page.locator(".card.wide canvas").first.bounding_box()["height"] > 500
        assert page.errors == []
    context.close()


def test_it_follows_a_run_that_trains_and_outlives_it(browser: Any, tmp_path: Path) -> None:
    context = browser.new_context()
    with training(tmp_path) as (job, url):
        of_job = Watched(context.new_page()).open(url)  # it waits for the first step
        with served(tmp_path / "run") as server:
            beside = Watched(context.new_page()).open(server.url)
            for page in (of_job, beside):
                page.wait_for(".state", "running")
                page.wait_for_step(page.step() + 3)
                page.wait_for_step(page.step() + 3)
                assert page.errors == []
            beside.wait_for(".state", "ended")
            beside.wait_for_step(160)
            assert beside.errors == []
        assert job.wait(60) == 0
        of_job.wait_for("#link", "the server is gone; this is what it showed last")
        assert of_job.step() > 6
        assert all(colours > 3 for colours in of_job.drawn())
    context.close()


def test_it_goes_on_when_the_server_is_started_again(watched: Watched, run: Path, tmp_path: Path) -> None:
    with served(run) as server:
        port = server.port
        watched.open(server.url)
        watched.wait_for("#link", "connected")
    watched.wait_for("#link", "the server is gone")
    with served(run, Simulated(2, 7).write(tmp_path / "another"), port=port):
        watched.wait_for("#link", "connected")
        watched.wait_for(".run h2", "another")
        assert watched.page.locator(".run").count() == 2


def test_it_says_when_the_server_has_another_token(
    watched: Watched, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served(run) as server:
        watched.open(server.url)
    monkeypatch.setattr("tests.dashboard.served.TOKEN", "another-token-than-before")
    with served(run, port=server.port):
        watched.wait_for("#link", "the server has a new token: open the address that it printed")


def test_a_wrong_token_and_a_rebound_name_are_refused(watched: Watched, run: Path) -> None:
    with served(run) as server:
        page = watched.page
        for url, status, why in [
            (f"http://127.0.0.1:{server.port}/?token=wrong", 403, "the token is wrong"),
            (f"http://127.0.0.1:{server.port}/", 401, "open the address with the token"),
            (f"http://rebound.example:{server.port}/?token={TOKEN}", 421, "a name that is not its own"),
        ]:
            answer = page.goto(url)
            assert answer.status == status
            assert why in page.inner_text("body")


class _Elsewhere(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(203)  # told from the answers of our server; a browser asks for an icon when it likes
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(b"<title>elsewhere</title>")

    def log_message(self, format: str, *args: Any) -> None: ...


def test_a_page_of_another_origin_reads_nothing_though_the_browser_has_the_cookie(watched: Watched, run: Path) -> None:
    with served(run) as server, http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Elsewhere) as elsewhere:
        thread = threading.Thread(target=elsewhere.serve_forever)
        thread.start()
        try:
            watched.open(server.url)
            watched.page.goto(f"http://127.0.0.1:{elsewhere.server_port}/")  # cookies are for all ports of a host
            answers: list[int] = []  # playwright itself does not tell of answers that the browser keeps from a page
            network = watched.page.context.new_cdp_session(watched.page)
            network.on("Network.responseReceivedExtraInfo", lambda answer: answers.append(answer["statusCode"]))
            network.send("Network.enable")
            script = """async ([url, mode]) => {
                try { return await (await fetch(url, {credentials: "include", mode})).text(); }
                catch (error) { return ""; }
            }"""
            for mode in ("cors", "no-cors"):  # the second has no Origin
                assert watched.page.evaluate(script, [f"http://127.0.0.1:{server.port}/runs", mode]) == ""
            watched.page.wait_for_timeout(200)
            ours = [status for status in answers if status != 203]
            assert len(ours) >= 2  # it may ask again
            assert set(ours) == {403}
        finally:
            elsewhere.shutdown()
            thread.join()
