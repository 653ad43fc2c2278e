"""The site in a real browser: it builds, search finds pages, it fits a phone, and asks no other host for anything."""

from __future__ import annotations

import functools
import http.server
import importlib.util
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT
from tests.docs.browser import CHROMIUM, Page

pytestmark = [
    pytest.mark.job,
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="needs pip install 'paceline[docs]'"),
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium"),
]
PAGES = ("index.html", "benchmarks.html", "concepts/gpu.html", "reference/paceline.html", "troubleshooting.html")


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *words: object) -> None:
        pass


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Built as `make docs` does, and served on a port of its own."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_search_finds_a_page_and_nothing_is_asked_of_another_host(site: str, tmp_path: Path) -> None:
    with Page() as page:
        for name in PAGES:
            page.open(f"{site}/{name}")
        page.open(f"{site}/index.html?q=lanes")
        page.wait("document.querySelectorAll('.md-search-result__link').length > 0")
        found = page.value("[...document.querySelectorAll('.md-search-result__link')].map(a => a.href).join(' ')")
        others = [url for url in page.requests if not url.startswith((site, "data:", "blob:"))]
    assert "lanes.html" in found
    assert others == []
    assert len(page.requests) > len(PAGES)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_no_page_scrolls_sideways(site: str, width: int, dark: bool) -> None:
    with Page() as page:
        for name in PAGES:
            page.open(f"{site}/{name}", width=width, dark=dark)
            assert page.value("document.documentElement.scrollWidth") <= width, name
            assert page.value("document.body.dataset.mdColorScheme") == ("slate" if dark else "default")
