"""Hosts that are network namespaces, joined by a bridge over cables of a given speed; see `shaped_network.py`.

    with network(hosts=3, mbit=100) as names: …                   run things by `ip netns exec NAME`
    interface_bytes()                                             inside of one: what its cable has carried

What it makes has the process number in the name and is removed on every way out but SIGKILL.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

SUBNET = "10.78.0"
# A bucket that lets out no more than 11 packets at once, and a queue so long that nothing has to be sent twice.
BURST, QUEUE = "16kb", "8mb"


def why_not() -> str | None:
    """What is missing on this machine."""
    if os.geteuid() != 0:
        return "needs root, to make network namespaces"
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    return f"needs {' and '.join(missing)}: install iproute2" if missing else None


@contextlib.contextmanager
def network(hosts: int, mbit: int) -> Iterator[list[str]]:
    """Namespaces joined by a bridge in one more; their names. Links and bridge go when their namespaces go."""
    switch, *names = (f"paceline-{os.getpid()}-{what}" for what in ("switch", *range(hosts)))
    made: list[str] = []
    try:
        for name in (switch, *names):
            made.append(name)
            _run("ip", "netns", "add", name)
            _run("ip", "-n", name, "link", "set", "lo", "up")
        _run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "bridge", "up")
        for number, name in enumerate(names):
            _plug_in(name, switch, number, mbit)
        yield names
    finally:
        with undisturbed():
            for name in made:
                subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=10, check=False)


def _plug_in(name: str, switch: str, number: int, mbit: int) -> None:
    port = f"port{number}"
    _run("ip", "link", "add", "eth0", "netns", name, "type", "veth", "peer", "name", port, "netns", switch)
    _run("ip", "-n", switch, "link", "set", port, "master", "bridge", "up")
    _run("ip", "-n", name, "addr", "add", f"{address(number)}/24", "dev", "eth0")
    _run("ip", "-n", name, "link", "set", "eth0", "up")
    for namespace, device in ((name, "eth0"), (switch, port)):
        shape = ("tbf", "rate", f"{mbit}mbit", "burst", BURST, "limit", QUEUE)
        _run("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", *shape)


def address(number: int) -> str:
    return f"{SUBNET}.{number + 1}"


def _run(*words: str) -> None:
    ran = subprocess.run(words, capture_output=True, text=True, timeout=10, check=False)
    if ran.returncode:
        sys.exit(f"shaped_network: `{' '.join(words)}` failed: {ran.stderr.strip() or ran.stdout.strip()}")


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Who presses Ctrl-C twice still gets everything removed."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def interface_bytes() -> list[int]:
    """Received and sent by eth0 since it is up, headers included."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == "eth0":
            return [int(counts.split()[column]) for column in (0, 8)]
    raise AssertionError("no eth0 in this namespace")
