"""A peer without the secret costs little memory, few lines, and keeps no host out; a malformed message costs a line."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import random
import socket
import threading
import time
import warnings
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from paceline.errors import WorldError
from paceline.launch import rendezvous
from paceline.launch.agents import HostAgent
from paceline.launch.control import MALFORMED as MALFORMED_RAISED
from paceline.launch.control import ControlServer
from paceline.launch.coordinator import Coordinator
from paceline.launch.failure_attribution import RENDEZVOUS_FAILED
from paceline.launch.host_link import Link, SealedLink, prove_as_host
from paceline.launch.output import Screen
from paceline.launch.rendezvous import Address, HostAssignment, JoinRequest, free_port, join
from paceline.world import unauthenticated
from paceline.world.unauthenticated import LINE_LIMIT, MOST_CONNECTIONS, RateLimitedLog, to_drop
from paceline.world.world import LaunchSettings
from tests.launch.launching import Launch, wait_until
from tests.launch.test_elastic_jobs import Job
from tests.launch.test_late_hosts import OpenJob
from tests.launch.test_rendezvous_store import Channel

NESTED = b"[" * 3000 + b"]" * 3000
WORDS: dict[str, bytes] = {
    "nothing": b"",
    "an empty line": b"\n",
    "another protocol": b"GET / HTTP/1.1\r\nHost: here\r\n\r\n",
    "no UTF-8": b'{"nonce": "\xff\xfe\xfd"}\n',
    "no object": b"[1, 2]\n",
    "null": b"null\n",
    "a nest": b"[" * 1990 + b"]" * 1990 + b"\n",
    "a nest of objects": b'{"nonce":' * 450 + b"1" + b"}" * 450 + b"\n",
    "a nest that can just be read": b'{"nonce":' + b"[" * 940 + b"]" * 940 + b"}\n",
    "a lone surrogate": b'{"nonce": "\\ud800"}\n{"proof": "\\ud800"}\n',
    "no nonce": b"{}\n{}\n",
    "numbers": b'{"nonce": 1e999}\n{"proof": NaN}\n',
    "a huge number": b'{"nonce": ' + b"9" * 4000 + b"}\n",
    "a wrong proof": b'{"nonce": "00"}\n{"proof": "00"}\n',
    "too long": b"x" * (LINE_LIMIT + 1),
    "too long a line": b'{"nonce": "' + b"x" * LINE_LIMIT + b'"}\n',
}


@pytest.fixture(autouse=True)
def _nothing_is_logged(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """asyncio writes a traceback to the log for what escapes a callback or a task."""
    with caplog.at_level(logging.WARNING):
        yield
    assert caplog.text == ""


def story_of(story: Callable[[OpenJob], Awaitable[None]]) -> None:
    async def whole() -> None:
        job = OpenJob()
        await job.begin()
        job.enter()
        try:
            await story(job)
        finally:
            await job.coordinator.close()

    asyncio.run(asyncio.wait_for(whole(), 30))


async def connect(job: OpenJob, words: bytes = b"") -> socket.socket:
    loop = asyncio.get_running_loop()
    connection = socket.socket()
    connection.setblocking(False)
    await loop.sock_connect(connection, (job.address.host, job.address.port))
    await loop.sock_sendall(connection, words)
    return connection


async def until_dropped(connection: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    try:
        while await asyncio.wait_for(loop.sock_recv(connection, 4096), 5):
            pass
    except ConnectionError:
        pass


# -- before the proof --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", WORDS.values(), ids=WORDS)
def test_messages_without_the_secret_cost_one_line_and_the_next_host_joins(
    words: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unauthenticated, "PROOF_S", 0.2)

    async def story(job: OpenJob) -> None:
        with await connect(job, words) as connection:
            await until_dropped(connection)
        assert len(job.said) == 1
        assert job.said[0].startswith("paceline: refused a connection from 127.0.0.1: ")
        assert len(job.said[0]) < 250
        _, link = await job.join(1)
        await link.close()

    story_of(story)


def test_an_unauthenticated_peer_that_trickles_is_dropped_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unauthenticated, "PROOF_S", 0.3)

    async def story(job: OpenJob) -> None:
        begun = time.monotonic()
        with await connect(job) as connection, pytest.raises(ConnectionError):
            while time.monotonic() < begun + 5:
                await asyncio.get_running_loop().sock_sendall(connection, b" ")
                await asyncio.sleep(0.02)
        assert job.said == ["paceline: refused a connection from 127.0.0.1: it did not prove the secret within 0.3 s"]

    story_of(story)


def test_a_crowd_is_held_to_its_number_in_one_line_and_hosts_join_meanwhile() -> None:
    async def story(job: OpenJob) -> None:
        with ExitStack() as crowd:
            for _ in range(3 * MOST_CONNECTIONS):
                crowd.enter_context(await connect(job, b"{"))
            _, link = await job.join(1)
            assert len(job.rendezvous._unproved) <= MOST_CONNECTIONS
            assert job.said == [
                "paceline: refused a connection from 127.0.0.1: too many connections have not proved the secret"
            ]
            await link.close()

    story_of(story)


def test_a_host_that_is_crowded_out_before_its_proof_tries_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unauthenticated, "MOST_CONNECTIONS", 1)
    tries: list[Link] = []

    async def pushed_out(link: Link, secret: bytes) -> SealedLink:
        tries.append(link)
        if len(tries) == 1:
            with await connect(job_of[0]), await connect(job_of[0]):
                return await prove_as_host(link, secret)
        return await prove_as_host(link, secret)

    job_of: list[OpenJob] = []

    async def story(job: OpenJob) -> None:
        job_of.append(job)
        monkeypatch.setattr(rendezvous, "prove_as_host", pushed_out)
        _, link = await job.join(1)
        assert len(tries) == 2
        await link.close()

    story_of(story)


def test_a_coordinator_that_hangs_up_every_time_is_named_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "CROWDED_S", 0.6)

    async def story() -> None:
        address = Address("127.0.0.1", free_port("127.0.0.1"))
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: Link(Link.abort), address.host, address.port)
        with pytest.raises(WorldError, match=rf"{address}: the other side closed the connection during the handshake"):
            await join(address, JoinRequest(1, 2, 1, LaunchSettings()), b"secret", 30)
        server.close()

    asyncio.run(asyncio.wait_for(story(), 10))


def test_the_oldest_of_the_address_with_most_connections_goes_first() -> None:
    assert to_drop({1: "a", 2: "b", 3: "c", 4: "b"}) == 2
    assert to_drop({1: "a", 2: "b"}) == 1


def test_one_line_is_said_per_source_and_minute_and_few_sources_have_any() -> None:
    said: list[str] = []
    now = [0.0]
    say = RateLimitedLog(said.append, lambda: now[0])
    for _ in range(5):
        say("a", "a line")
    say("b", "another")
    now[0] = 61.0
    say("a", "a line")
    assert said == ["a line", "another", "a line (4 more since the last such line)"]
    for number in range(1000):
        say(f"source {number}", "crowd")
    assert said.count("crowd") == unauthenticated.MOST_SOURCES - 1, "b was forgotten after its minute"
    now[0] = 122.0
    say("source 999", "crowd")
    assert said.count("crowd") == unauthenticated.MOST_SOURCES


@pytest.mark.job
def test_memory_and_log_of_a_real_job_do_not_grow_with_connections(
    launch: Callable[..., Launch], tmp_path: Path
) -> None:
    """A small version of 60 connections with 7.5 MiB each, and of 400 with malformed lines."""
    port = free_port("127.0.0.1")
    (tmp_path / "secret").write_text("secret")
    flags = f"--elastic --max-workers 3 --lanes 3 --coordinator 127.0.0.1:{port} --secret-file secret"
    started = launch(flags, SERVES_UNTIL_TOLD)
    wait_until((tmp_path / "up").exists, 20, "the worker is up")
    supervisor = psutil.Process(started.process.pid)
    before = supervisor.memory_info().rss
    with ExitStack() as crowd:
        for data in [b"x" * 2 * 2**20] * 20 + list(WORDS.values()) * 8:
            peer = crowd.enter_context(socket.create_connection(("127.0.0.1", port), timeout=10))
            crowd.enter_context(sending(peer, data))
        request = JoinRequest(1, None, 1, LaunchSettings())

        async def join_and_leave() -> None:
            _, link = await join(Address("127.0.0.1", port), request, b"secret", 10)
            link.send({"kind": "nonsense"})
            await link.receive()
            await link.close()

        asyncio.run(asyncio.wait_for(join_and_leave(), 15))
        grown = supervisor.memory_info().rss - before
    (tmp_path / "end").touch()
    finished = started.finish()
    assert (finished.code, grown < 20e6) == (0, True), (grown, finished)
    assert "Traceback" not in finished.err, finished.err
    lines = finished.err.splitlines()
    assert len(lines) <= 3, lines
    assert "refused a connection from 127.0.0.1" in lines[0]
    assert "host 1 is lost (its message 'nonsense' is malformed" in finished.err


SERVES_UNTIL_TOLD = """
control.tell("elastic.here", incarnation=int(os.environ["PACELINE_INCARNATION"]))
control.tell("elastic.enter", generation=1, loop=1, step=0, facts={})
open("up", "w").close()
deadline = time.monotonic() + 60
while not os.path.exists("end") and time.monotonic() < deadline:
    control.ask("store.set", timeout_s=10, keys=["key"], values=["MQ=="])
    time.sleep(0.02)
control.tell("elastic.leave", loop=1)
"""


@contextmanager
def sending(connection: socket.socket, data: bytes) -> Iterator[None]:
    """From a thread: whoever reads it may stop to."""

    def send() -> None:
        with suppress(OSError):  # it was dropped
            connection.sendall(data)

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield
    finally:
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
        thread.join(10)
        assert not thread.is_alive()


# -- hosts that know the secret ----------------------------------------------------------------------------------------

MALFORMED: list[Any] = [
    {},
    {"kind": 1},
    {"kind": "weather"},
    {"kind": "report"},
    {"kind": "report", "rank": 99, "what": "step", "body": {"step": 1}},
    {"kind": "report", "rank": 1, "what": 7, "body": {}},
    {"kind": "started", "rank": "1", "pid": 2},
    {"kind": "exited", "rank": -1, "status": 0},
    {"kind": "interrupted", "signal": 4711},
    {"kind": "fail", "text": None, "code": 1},
    {"kind": "store.get", "rank": 1, "id": [], "timeout_s": 1, "body": {}},
]


@pytest.mark.parametrize("message", MALFORMED, ids=str)
def test_a_host_that_sends_malformed_messages_is_lost_in_one_line(message: Any) -> None:
    async def story(job: OpenJob) -> None:
        _, link = await job.join(1)
        link.send(message)
        while await asyncio.wait_for(link.receive(), 5) is not None:
            pass
        assert [line for line in job.said if "malformed" in line] == job.said
        assert len(job.said) == 1
        assert "host 1 is lost (its message" in job.said[0]
        assert not job.coordinator.is_over

    story_of(story)


@pytest.mark.parametrize("line", ["[" * 3000 + "]" * 3000, "7", "x", '{"kind": "ping"'])
def test_a_sealed_line_that_is_no_message_is_lost_in_one_line(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(job: OpenJob) -> None:
        _, link = await job.join(1)
        with monkeypatch.context() as patched:
            patched.setattr(json, "dumps", spoiled(json.dumps, line))
            link.send({"kind": "spoil"})
        while await asyncio.wait_for(link.receive(), 5) is not None:
            pass
        assert len(job.said) == 1
        assert "host 1 is lost (not a control message: " in job.said[0]

    story_of(story)


def spoiled(dumps: Callable[..., str], line: str) -> Callable[..., str]:
    return lambda value, **options: line if value == {"kind": "spoil"} else dumps(value, **options)


@pytest.mark.parametrize(
    "brought",
    [
        {},
        {"host_rank": 1},
        {"host_rank": "1", "hosts": None, "workers": 1, "settings": {}},
        {"host_rank": 1, "hosts": None, "workers": -5, "settings": {}},
        {"host_rank": 1, "hosts": None, "workers": 1, "settings": {"lanes": []}},
        {"host_rank": 1, "hosts": None, "workers": 1, "settings": 7},
        {"host_rank": 1, "hosts": None, "workers": 1, "settings": {}, "elastic": [1]},
        {"host_rank": 1, "hosts": None, "workers": 1, "settings": {}, "more": 1},
    ],
    ids=str,
)
def test_a_host_with_a_malformed_join_request_is_refused_in_one_line(brought: Any) -> None:
    async def story(job: OpenJob) -> None:
        loop = asyncio.get_running_loop()
        _, link = await loop.create_connection(Link, job.address.host, job.address.port)
        sealed = await prove_as_host(link, b"secret")
        sealed.send(brought)
        assert await asyncio.wait_for(sealed.receive(), 5) is None
        assert len(job.said) == 1
        assert "refused a connection from 127.0.0.1: its join request is malformed" in job.said[0]

    story_of(story)


@pytest.mark.parametrize(
    "message",
    [{}, {"kind": "log"}, {"kind": "outcome"}, {"kind": "pass_on", "signal": "x"}, {"kind": "start"}],
    ids=str,
)
def test_a_coordinator_that_sends_malformed_messages_ends_the_host_s_part_in_one_line(message: Any) -> None:
    async def story(job: OpenJob) -> None:
        _, link = await job.join(1)
        member = HostAgent(link, print)
        member.agent = job.agent
        job.coordinator.remote_hosts[1].link.send(message)
        outcome = await asyncio.wait_for(member.outcome, 5)
        assert outcome.code == RENDEZVOUS_FAILED
        assert len(outcome.lines) == 1
        assert "the coordinator (host 0) sent a malformed message" in outcome.lines[0]
        await member.close()

    story_of(story)


def test_a_malformed_slot_assignment_is_named() -> None:
    with pytest.raises(TypeError):
        HostAssignment.from_message({"settings": {}, "assignment": 1})

    async def story(job: OpenJob) -> None:
        job.coordinator._late_hosts._assign = (  # type: ignore[union-attr, method-assign]
            lambda number, host: host.link.send({"assignment": {"settings": {}}})
        )
        with pytest.raises(WorldError, match=r"is malformed .*; use one version of paceline on all hosts"):
            await job.join(1)

    story_of(story)


# -- workers -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def channel(tmp_path: Path) -> Iterator[Channel]:
    opened = Channel(tmp_path / "control.sock")
    yield opened
    opened.close()


def say(channel: Channel, *lines: bytes) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(5)
    connection.connect(channel.path)
    with suppress(BrokenPipeError):  # dropped before the first word
        connection.sendall(b"".join(lines))
    return connection


def assert_dropped(connection: socket.socket) -> None:
    with suppress(ConnectionResetError):  # before all that was sent was read
        assert connection.recv(10) == b""


HELLOS: dict[str, bytes] = {
    "a nest": NESTED[:LINE_LIMIT],
    "too long": b"x" * (LINE_LIMIT + 1),
    "no object": b"7\n",
    "no hello": b'{"kind": {"a": 1}}\n',
    "no body": b'{"kind": "hello"}\n',
    "a body that is none": b'{"kind": "hello", "body": [1]}\n',
    "no number": b'{"kind": "hello", "body": {"rank": "a", "pid": 1}}\n',
    "an endless number": b'{"kind": "hello", "body": {"rank": 1e999, "pid": 1}}\n',
    "a negative rank": b'{"kind": "hello", "body": {"rank": -1, "pid": 1}}\n',
    "a lone surrogate": b'{"kind": "\\ud800", "body": {"rank": 0, "pid": 1}}\n',
}


@pytest.mark.parametrize("hello", HELLOS.values(), ids=HELLOS)
def test_a_process_that_says_no_hello_is_dropped_in_one_line(channel: Channel, hello: bytes) -> None:
    with say(channel, hello + (b"" if hello.endswith(b"\n") else b"x" * LINE_LIMIT)) as connection:
        assert_dropped(connection)
    assert len(channel.complaints) == 1
    assert channel.complaints[0].startswith("paceline: the connection of a process was dropped: ")
    assert channel.client(0).ask("store.check", timeout_s=5, keys=[]) == {"value": True}


def test_a_process_of_another_user_is_dropped(channel: Channel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    with say(channel, b'{"kind": "hello", "body": {"rank": 0, "pid": 1}}\n') as connection:
        assert_dropped(connection)
    with pytest.raises(WorldError, match=f"user {os.getuid()} listens there, and this worker is user 4711's"):
        channel.client(0)


ODD: list[Any] = [None, -1, 0, 1e999, float("nan"), 10**300, "", "\ud800", [], {}, [[1]], {"a": 1}, True]
KINDS = (
    "hello", "step", "phase", "policy", "holds", "memory", "checkpoint", "busy", "progress", "table", "failed",
    "heartbeat", "elastic.here", "elastic.enter", "elastic.leave", "elastic.ready", "elastic.failed", "elastic.lost",
    "elastic.join", "elastic.grouped", "store.set", "store.get", "store.wait", "store.check", "store.add",
    "store.append", "store.compare_set", "store.delete", "store.count",
)  # fmt: skip
FIELDS = (
    "rank", "pid", "step", "name", "survive_worker_loss", "hang_timeout_s", "what", "told", "kills_file", "kills",
    "folder", "total", "fields", "final", "title", "rows", "type", "text", "traceback", "ours", "generation", "loop",
    "facts", "update", "check", "more", "why", "keys", "values", "amount", "ending", "incarnation",
)  # fmt: skip


def odd_message(chance: random.Random) -> Any:
    body: Any = {name: chance.choice(ODD) for name in chance.sample(FIELDS, chance.randrange(len(FIELDS)))}
    message = {"kind": chance.choice(KINDS), "body": body if chance.random() < 0.9 else chance.choice(ODD)}
    if chance.random() < 0.3:
        message |= {"id": chance.choice(ODD), "timeout_s": chance.choice([0, *ODD])}
    if chance.random() < 0.1:
        message[chance.choice(["kind", "body", "id"])] = chance.choice(ODD)
    return message


@pytest.mark.parametrize("seed", range(3))
def test_a_worker_that_sends_malformed_messages_costs_few_lines_and_no_traceback(channel: Channel, seed: int) -> None:
    chance = random.Random(seed)
    hello = b'{"kind": "hello", "body": {"rank": 1, "pid": 1}}\n'
    nowhere = os.open(os.devnull, os.O_WRONLY)
    screen = Screen(nowhere, nowhere)
    channel.coordinator._show = screen.show
    nest = {"kind": "store.get", "id": [[]] * 3, "timeout_s": 1, "body": {"keys": []}}
    lines = [*(odd_message(chance) for _ in range(400)), nest]
    with say(channel, hello, *(json.dumps(line).encode() + b"\n" for line in lines), NESTED + b"\n") as connection:
        while connection.recv(2**16):
            pass
    assert len(channel.complaints) <= unauthenticated.MOST_SOURCES
    assert channel.client(0).ask("store.check", timeout_s=5, keys=[]) == {"value": True}
    assert screen.close(5)
    os.close(nowhere)


@pytest.mark.parametrize("seed", range(3))
def test_an_elastic_job_is_not_broken_by_a_worker_that_sends_malformed_messages(seed: int) -> None:
    chance = random.Random(seed)

    async def story() -> None:
        job = Job(3)
        for _ in range(400):
            message = odd_message(chance)
            with suppress(*MALFORMED_RAISED):  # as the control channel does
                job.coordinator.report(chance.randrange(3), message["kind"], message["body"])
        await asyncio.sleep(0.3)
        outcome = job.coordinator.outcome
        assert not outcome.done() or outcome.exception() is None
        await job.coordinator.close()

    asyncio.run(asyncio.wait_for(story(), 10))


@pytest.mark.parametrize("turns", range(6))
def test_a_connection_accepted_while_the_server_closes_is_closed_with_it(tmp_path: Path, turns: int) -> None:
    """Whichever turn of the event loop it is made in; asyncio warns of a transport that was left."""

    async def whole() -> None:
        path = tmp_path / "control.sock"
        assignment = HostAssignment(0, 1, 0, 1, 1, LaunchSettings(), "127.0.0.1", "127.0.0.1", 1)
        server = ControlServer(path, Coordinator(assignment, {}, lambda line: None, print), print)
        await server.start()
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(path))
            for _ in range(turns):
                await asyncio.sleep(0)
            await server.close()

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always", ResourceWarning)
        asyncio.run(whole())
        gc.collect()
    assert [str(one.message) for one in warned] == []
