"""The server over real sockets: who may read, what is sent while a run goes on, and that nothing of it is left."""

from __future__ import annotations

import http.client
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from paceline.dashboard import run_view
from paceline.dashboard import server as server_module
from paceline.dashboard.access import Access, Request, hosts_of, token_of
from paceline.dashboard.server import DEFAULT_PORT, listen, page_and_policy
from paceline.errors import ConfigError
from paceline.monitor.events import FOLDER, Part, Use, pack_step
from tests.dashboard.served import TOKEN, Served, served
from tests.monitor.simulated import Simulated


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return Simulated(3, 40, delays={(1, Part.DATA): 0.02}).write(tmp_path / "run", ended=False)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


# -- who may read ------------------------------------------------------------------------------------------------------


def test_without_the_token_nothing_is_told(run: Path) -> None:
    with served(run) as server:
        for path in ("/", "/runs", "/events", "/metrics", "/elsewhere"):
            for headers in ({}, {"Authorization": f"Bearer {TOKEN}x"}, {"Cookie": f"paceline_{server.port}=wrong"}):
                answer = server.get_as(headers, path)
                assert answer.status == 401
                assert "run" not in answer.text.replace("`paceline monitor` printed", "")
        assert server.get_as({}, "/?token=wrong").status == 403
        assert server.get("/runs").status == 200


def test_the_token_in_the_address_becomes_a_cookie_and_leaves_it(run: Path) -> None:
    with served(run) as server:
        answer = server.get_as({}, f"/?token={TOKEN}")
        assert (answer.status, answer.headers["location"]) == (303, "./")
        cookie = answer.headers["set-cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=strict" in cookie
        page = server.get_as({"Cookie": cookie.partition(";")[0]}, "/")
        assert page.status == 200
        assert TOKEN not in page.text
        assert page.headers["referrer-policy"] == "no-referrer"


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example:80", "", "[::2]"])
def test_another_host_is_refused_though_the_token_is_right(host: str, run: Path) -> None:
    with served(run) as server:
        assert server.get("/runs", Host=host).status in (400, 421)


def test_an_ssh_tunnel_on_another_port_is_no_other_host(run: Path) -> None:
    with served(run) as server:
        for host in ("localhost:9", "127.0.0.1:12345", "LOCALHOST", "[::1]:8350"):
            assert server.get("/runs", Host=host).status == 200


def test_another_origin_is_refused_though_the_token_is_right(run: Path) -> None:
    with served(run) as server:
        here = f"127.0.0.1:{server.port}"
        for origin in ("http://evil.example", "null", "http://127.0.0.1:1", f"http://localhost:{server.port}"):
            for path in ("/runs", "/events", f"/?token={TOKEN}"):
                assert server.get(path, Host=here, Origin=origin).status == 403
        assert server.get("/runs", Host=here, Origin=f"http://{here}").status == 200


def test_a_browser_that_asks_for_a_page_of_another_site_is_refused_and_a_link_is_followed(run: Path) -> None:
    def status(site: str, mode: str) -> int:
        return server.get("/runs", **{"Sec-Fetch-Site": site, "Sec-Fetch-Mode": mode}).status

    with served(run) as server:
        assert status("same-site", "no-cors") == status("cross-site", "cors") == 403
        assert status("cross-site", "navigate") == status("none", "navigate") == status("same-origin", "cors") == 200


def test_only_reading_is_possible(run: Path) -> None:
    with served(run) as server:
        for method in ("POST", "PUT", "DELETE"):
            assert server.get_as({"Authorization": f"Bearer {TOKEN}"}, "/runs", method).status == 405


def test_no_request_is_logged(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with served(run) as server:
        server.get_as({}, f"/?token={TOKEN}")
        server.get("/runs")
        server.get("/nowhere")
    said = capfd.readouterr()
    assert (said.out, said.err) == ("", "")


def test_a_name_that_was_allowed_is_no_foreign_host() -> None:
    access = Access("secret", "cookie", hosts_of("10.0.0.2", ["Monitor.example:443"]))
    for host in ("10.0.0.2:8350", "monitor.example", "monitor.example:443", "localhost"):
        assert access.refusal(Request(host, authorization="Bearer secret")) is None
    assert access.refusal(Request("10.0.0.3", authorization="Bearer secret")) is not None


def test_a_token_file_is_made_for_its_owner_alone_and_used_again(tmp_path: Path) -> None:
    file = tmp_path / "token"
    token = token_of(file)
    assert token_of(file) == token
    assert file.stat().st_mode & 0o777 == 0o600
    assert token_of(None) != token_of(None)
    for wrong in ("short", "with a space in the middle", "x" * 2000):
        file.write_text(wrong)
        with pytest.raises(ConfigError, match="--token-file"):
            token_of(file)
    with pytest.raises(ConfigError, match="can't be used"):
        token_of(tmp_path / "no" / "folder")


# -- the page and its data ---------------------------------------------------------------------------------------------


def test_the_page_is_whole_and_asks_no_other_host(run: Path) -> None:
    page, policy = page_and_policy()
    assert "http://" not in page.replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in page
    assert "default-src 'none'" in policy
    assert policy.count("sha256-") == 2
    with served(run) as server:
        assert server.get("/").text == page


def test_runs_are_told_side_by_side(run: Path, tmp_path: Path) -> None:
    other = Simulated(2, 7).write(tmp_path / "other")
    with served(run, other) as server:
        views = json.loads(server.get("/runs").text)
    assert [(view["number"], view["name"], view["last_step"]) for view in views] == [(0, "run", 40), (1, "other", 7)]
    assert views[0]["verdict"]["worker"] == 1


class Stream:
    """Of server-sent events."""

    def __init__(self, server: Served) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
        self._connection.request("GET", "/events", headers={"Authorization": f"Bearer {TOKEN}"})
        self._answer = self._connection.getresponse()

    def next_run(self) -> dict[str, Any] | None:
        """None: the server has ended."""
        is_run = False
        while line := self._answer.readline().decode():
            if is_run:
                return json.loads(line.removeprefix("data: "))  # type: ignore[no-any-return]
            is_run = line == "event: run\n"
        return None

    def close(self) -> None:
        self._connection.close()


def test_what_a_run_adds_is_sent_as_it_comes_and_a_run_that_begins_later_too(run: Path, tmp_path: Path) -> None:
    with served(run) as server:
        stream = Stream(server)
        first = stream.next_run()
        assert first is not None
        assert first["last_step"] == 40
        for worker, records in enumerate(Simulated(3, 45).own):
            with open(run / FOLDER / f"worker-{worker}.0", "ab") as file:
                file.write(b"".join(pack_step(record, Use(2.0**30)) for record in records[40:]))
        while (view := stream.next_run()) is not None and view["last_step"] == 40:
            pass  # read between two files
        assert view is not None
        assert view["last_step"] == 45
        later = Simulated(1, 3).write(tmp_path / "later")
        server.loop.call_soon_threadsafe(server.runs.add, later)
        while (view := stream.next_run()) is not None and view["number"] == 0:
            pass
        assert view is not None
        assert view["name"] == "later"
        stream.close()


def test_a_run_that_can_no_longer_be_read_is_told_and_the_server_goes_on(run: Path) -> None:
    with served(run) as server:
        assert "error" not in json.loads(server.get("/runs").text)[0]
        for path in (run / FOLDER).iterdir():
            path.unlink()
        server.runs.watched[0]._due = 0.0
        assert "has no events" in json.loads(server.get("/runs").text)[0]["error"]
        assert server.get("/metrics").status == 200


def test_a_damaged_record_takes_neither_its_run_nor_the_others_away(run: Path, tmp_path: Path) -> None:
    other = Simulated(2, 7).write(tmp_path / "other")
    record = Simulated(1, 41).own[0][-1]
    with open(run / FOLDER / "worker-0.0", "ab") as file:
        file.write(pack_step(record._replace(hidden_s=float("nan")), Use(float("inf"))))
    with served(run, other) as server:
        views = json.loads(server.get("/runs").text)
        assert server.get("/metrics").status == 200
    assert [view["last_step"] for view in views] == [40, 7]


@pytest.mark.parametrize("harm", [lambda folder: {"a": float("nan")}, lambda folder: 1 / 0])
def test_a_run_that_no_reader_expected_is_told_and_the_others_are_shown(
    harm: Any, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Simulated(2, 7).write(tmp_path / "other")
    monkeypatch.setattr(server_module, "view_of", lambda of: harm(of) if of == run else run_view.view_of(of))
    with served(run, other) as server:
        stream = Stream(server)
        views = [stream.next_run(), stream.next_run()]
        assert server.get("/metrics").status == 200
        stream.close()
    assert [view is not None and "error" in view for view in views] == [True, False]
    assert views[0] is not None
    assert "it can't be shown (" in views[0]["error"]


def test_a_run_whose_files_have_not_grown_is_not_read_again(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with served(run) as server:
        server.get("/runs")
        version = server.runs.watched[0].version
        server.runs.watched[0]._due = 0.0
        server.get("/runs")
        assert server.runs.watched[0].version == version


def test_threads_and_sockets_are_gone_also_with_a_browser_that_listens(run: Path) -> None:
    with served(run):  # what the first of them imports and opens
        pass
    threads, open_files = set(threading.enumerate()), descriptors()
    with served(run) as server:
        streams = [Stream(server) for _ in range(3)]
        assert all(stream.next_run() is not None for stream in streams)
    assert all(stream.next_run() is None for stream in streams)  # the server's end of the stream, not a timeout
    for stream in streams:
        stream.close()
    assert set(threading.enumerate()) == threads
    assert descriptors() == open_files


# -- ports -------------------------------------------------------------------------------------------------------------


def test_a_port_in_use_is_one_line_or_the_next_one() -> None:
    first, _ = listen("127.0.0.1", None)
    second, said = listen("127.0.0.1", None)
    try:
        port = second.getsockname()[1]
        assert first.getsockname()[1] != port
        assert said == f"port {DEFAULT_PORT} is in use; port {port} is taken instead"
        with pytest.raises(ConfigError, match=f"--port {port} on 127.0.0.1 is in use; leave --port out"):
            listen("127.0.0.1", port)
    finally:
        first.close()
        second.close()


def test_an_address_that_is_not_this_hosts_is_one_line() -> None:
    for address in ("203.0.113.7", "no.such.host.invalid"):
        with pytest.raises(ConfigError, match=f"--host {address} --port 0 can't be used"):
            listen(address, 0)
