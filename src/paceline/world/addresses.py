"""Addresses and ports that workers meet at, where no launcher has said them."""

from __future__ import annotations

import hashlib
from ipaddress import ip_address

# What torchrun and most scripts use; only where nothing tells two jobs on one host apart.
DEFAULT_PORT = 29500


def derived_port(*identity: str | None) -> int:
    """The same port for every worker of a job and, mostly, another one for another job; below the ephemeral range."""
    if identity[-1] is None:
        return DEFAULT_PORT
    digest = hashlib.blake2b("/".join(str(part) for part in identity).encode(), digest_size=4).digest()
    return 10_000 + int.from_bytes(digest, "big") % 20_000


def is_loopback(address: str) -> bool:
    try:
        return ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"
