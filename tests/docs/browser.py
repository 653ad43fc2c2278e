"""A page in a real Chromium, driven through two pipes (`--remote-debugging-pipe`): no library, no port.

with Page() as page:
    page.open("http://127.0.0.1:8000/index.html", width=390, dark=True)
    page.value("document.title")
    page.requests                                                every address that the pages have asked for
    page.screenshot(Path("index.png"))
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Page:
    """One tab of a browser of its own, gone with the `with` block."""

    def __enter__(self) -> Page:
        assert CHROMIUM is not None
        self.requests: list[str] = []
        self._number, self._rest, self._session = 0, b"", ""
        self._profile = tempfile.mkdtemp(prefix="paceline-browser-")
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        passed_on = f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}'
        flags = ["--remote-debugging-pipe", "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        self._browser = subprocess.Popen(
            ["bash", "-c", passed_on, "-", CHROMIUM, *flags, f"--user-data-dir={self._profile}"],
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        target = self._ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime"):
            self._ask(f"{domain}.enable")
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, frames: TracebackType | None) -> None:
        self._browser.kill()
        self._browser.wait()
        os.close(self._in)
        os.close(self._out)
        shutil.rmtree(self._profile, ignore_errors=True)

    def open(self, address: str, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self._ask("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._ask("Emulation.setEmulatedMedia", features=[scheme])
        self._ask("Page.navigate", url=address)
        self.wait("document.readyState === 'complete'")

    def value(self, expression: str) -> Any:
        return self._ask("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def wait(self, expression: str, timeout_s: float = 60) -> None:
        """Until the expression is true."""
        deadline = time.monotonic() + timeout_s
        while not self.value(expression):
            assert time.monotonic() < deadline, f"{expression} did not come true within {timeout_s:g} s"
            time.sleep(0.05)

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self._ask("Page.captureScreenshot")["data"]))

    def _ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("method") == "Network.requestWillBeSent":
                self.requests.append(answer["params"]["request"]["url"])
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return dict(answer["result"])

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            read = os.read(self._in, 1 << 20)
            assert read, "the browser has ended"
            self._rest += read
        message, _, self._rest = self._rest.partition(b"\0")
        return dict(json.loads(message))
