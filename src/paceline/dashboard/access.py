"""Who may read a run: whoever has the token, from a page of this server.

    http://127.0.0.1:8350/?token=…    printed once; it becomes a cookie, and leaves the address bar
    Authorization: Bearer …           for Prometheus and curl

A page of another site could have a browser on this host ask for ours (by a name that suddenly means 127.0.0.1: DNS
rebinding). So requests for a Host that is not ours are refused, and those whose Origin is another, or that a browser
says a page of another site makes (Sec-Fetch-Site: cookies are for all ports of a host, whichever server is there). The
port of the Host may differ: an SSH tunnel brings that about.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import secrets
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from pathlib import Path

from paceline.errors import ConfigError
from paceline.input_file import cause_of, read_input

LOOPBACK_NAMES = ("127.0.0.1", "localhost", "::1")
TOKEN_BYTES = 24
LONGEST_TOKEN = 1000
_TOKEN = re.compile(r"[A-Za-z0-9_.~-]{16,}")


@dataclass(frozen=True)
class Request:
    """What of a request tells whose it is."""

    host: str = ""
    origin: str | None = None
    cookie: str = ""
    authorization: str = ""
    token: str | None = None  # of the address
    by_site: str = "none"  # Sec-Fetch-Site; none: a person typed the address
    mode: str = "navigate"  # Sec-Fetch-Mode; it may follow a link from anywhere


@dataclass(frozen=True)
class Access:
    token: str
    cookie: str
    hosts: frozenset[str] = frozenset(LOOPBACK_NAMES)

    def refusal(self, request: Request) -> tuple[int, str] | None:
        """A status and why; None: it may read."""
        if host_name(request.host) not in self.hosts:
            return 421, "refused: this server is asked for by a name that is not its own (--allow-host NAME adds one)"
        own = (None, f"http://{request.host}", f"https://{request.host}")
        if request.origin not in own or (request.by_site not in ("none", "same-origin") and request.mode != "navigate"):
            return 403, "refused: a page of another site asks"
        if request.token is not None:
            return None if self._is_it(request.token) else (403, "refused: the token is wrong")
        if self._is_it(_bearer(request.authorization)) or self._is_it(_of_cookie(request.cookie, self.cookie)):
            return None
        return 401, "refused: open the address with the token that `paceline monitor` printed"

    def _is_it(self, given: str) -> bool:
        return secrets.compare_digest(given.encode(errors="replace"), self.token.encode())


def host_name(host: str) -> str:
    """Without the port: `[::1]:8350` is ::1."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()


def is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def hosts_of(address: str, allowed: Iterable[str]) -> frozenset[str]:
    """Names that a server on this address is asked for by; on all addresses, this host's name."""
    return frozenset({*LOOPBACK_NAMES, shown_host(address).lower(), *(host_name(name) for name in allowed)})


def shown_host(address: str) -> str:
    with contextlib.suppress(ValueError):
        if ipaddress.ip_address(address).is_unspecified:
            return socket.gethostname()
    return address


def token_of(file: Path | None) -> str:
    """A new one; with a file the one that is in it, which is made if it is not there."""
    if file is None:
        return secrets.token_urlsafe(TOKEN_BYTES)
    try:
        with contextlib.suppress(FileExistsError):
            descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with open(descriptor, "w") as new:
                new.write(secrets.token_urlsafe(TOKEN_BYTES) + "\n")
        token = read_input(file, LONGEST_TOKEN).decode().strip()
    except (OSError, ValueError) as error:
        raise ConfigError(f"--token-file {file} can't be used: {cause_of(error)}") from error
    if not _TOKEN.fullmatch(token):
        raise ConfigError(
            f"--token-file {file}: expected at least 16 letters and digits (remove the file, and one is made)"
        )
    return token


def _bearer(header: str) -> str:
    kind, _, token = header.partition(" ")
    return token.strip() if kind.lower() == "bearer" else ""


def _of_cookie(header: str, name: str) -> str:
    try:
        found = SimpleCookie(header).get(name)
    except CookieError:
        return ""
    return found.value if found is not None else ""
