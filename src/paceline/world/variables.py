"""Variables of the environment, read with care: an empty one is unset, a wrong one is named with its value.

Below the readers of single variables are those of the families that every launcher shares: addresses and ports, and the
PACELINE_* settings, which fix the same things as the flags of `paceline run`:

PACELINE_LANES, _THREADS, _BACKEND, _SEED, _STRATEGY, _PRECISION, _ACTIVATION_CHECKPOINTING, _OFFLOAD
PACELINE_REPLAY           the folder of a recorded run that one process does again (`paceline replay`)
PACELINE_VERIFY           the folder in which a job is told what to record (`paceline verify`)
PACELINE_PLAN             what to profile of a script that is not trained (`paceline plan SCRIPT`)
PACELINE_HOST_ADDRESS     the address that tensors leave this host from
PACELINE_HARDWARE         a profile of this machine by which strategy="auto" chooses (`paceline bench hardware`)
PACELINE_KEEP_MEMORY=0    freed memory goes back to the system as glibc has it (`paceline run --no-keep-memory`)
PACELINE_INCARNATION, _MEMORY_FOLDER, _COPIES, _MEMBERS, _ACROSS_HOSTS, _DEFAULT_LANES
                          of an elastic job, by `paceline run` alone
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import fields
from ipaddress import ip_address
from typing import Any

from paceline.errors import WorldError
from paceline.world.world import LOOPBACK, Elasticity, LaunchSettings, TcpRendezvous

Variables = Mapping[str, str]


def text_of(variables: Variables, name: str) -> str | None:
    return variables.get(name, "").strip() or None


def is_number(variables: Variables, name: str) -> bool:
    return (text_of(variables, name) or "").isdecimal()


def number_of(variables: Variables, name: str, least: int = 0) -> int | None:
    value = text_of(variables, name)
    if value is None:
        return None
    if not value.isdecimal() or int(value) < least:
        raise WorldError(f"{name}={value!r} is not a whole number of at least {least}")
    return int(value)


def required_number(variables: Variables, name: str, advice: str, least: int = 0) -> int:
    value = number_of(variables, name, least)
    if value is None:
        raise WorldError(f"{name} is not set; {advice}")
    return value


def first_set(variables: Variables, *names: str) -> str:
    """The most specific name that is set; the last one when none is."""
    return next((name for name in names if text_of(variables, name) is not None), names[-1])


def place_of(
    variables: Variables, rank_name: str, size_name: str, advice: str, servers: int = 0
) -> tuple[int, int] | None:
    """(rank, size), both or neither; the ranks of servers come after the size, which counts workers."""
    rank, size = number_of(variables, rank_name), number_of(variables, size_name, least=1)
    if rank is None and size is None:
        return None
    if rank is None:
        raise WorldError(f"{size_name}={size} is set but {rank_name} is not; {advice}")
    if size is None:
        raise WorldError(f"{rank_name}={rank} is set but {size_name} is not; {advice}")
    if rank >= size + servers:
        raise beyond(rank_name, rank, size_name, size, servers)
    return rank, size


def local_place(
    variables: Variables, names: tuple[str, str], place: tuple[int, int], default_to_place: bool, servers: int = 0
) -> tuple[int, int]:
    """(local rank, local size), which are (rank, size) where all workers are known to be on this host."""
    local = place_of(variables, *names, "set both, or neither", servers)
    if local is None and not default_to_place:
        raise WorldError(f"{names[0]} and {names[1]} are not set: nothing says which of the workers are on this host")
    return local or place


def beyond(rank_name: str, rank: int, size_name: str, size: int, servers: int = 0) -> WorldError:
    allowed = f"from 0 to {size + servers - 1}" if size + servers > 1 else "only 0"
    beside = f" beside {servers} server{'s' if servers > 1 else ''}" if servers else ""
    return WorldError(f"{rank_name}={rank} but {size_name}={size}{beside}: {rank_name} may be {allowed}")


def tcp_of(variables: Variables, address_name: str, port_name: str, served_by_agent: bool = False) -> TcpRendezvous:
    address, port = text_of(variables, address_name), port_of(variables, port_name)
    if address is None:
        raise WorldError(f"{address_name} is not set: the workers have no place to meet; set it to rank 0's host")
    if port is None:
        raise WorldError(f"{address_name}={address} is set but {port_name} is not; set it to a free port of that host")
    return TcpRendezvous(address, port, served_by_agent)


def port_of(variables: Variables, name: str) -> int | None:
    value = text_of(variables, name)
    if value is None:
        return None
    if not value.isdecimal() or not 1 <= int(value) <= 65535:
        raise WorldError(f"{name}={value!r} is not a port; use a number from 1 to 65535")
    return int(value)


def host_by_host(rank: int, size: int, local_rank: int, local_size: int, advice: str) -> tuple[int, int]:
    """Where no variable names the host, ranks must fill one host after the other, and hosts be equal."""
    if size % local_size:
        raise WorldError(
            f"{size} workers with {local_size} on this host: hosts differ in size "
            f"and nothing says which host this is; {advice}"
        )
    if rank % local_size != local_rank:
        raise WorldError(
            f"rank {rank} is local rank {local_rank} of {local_size}: ranks do not fill one host after the other "
            f"and nothing says which host this is; {advice}"
        )
    return rank // local_size, size // local_size


def launcher_needed(source: str, found: str) -> WorldError:
    return WorldError(
        f"{source} asks for several workers on this host ({found}) and this process is only one of them; "
        "start the script with `paceline run script.py`, which starts them all"
    )


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


def settings_of(variables: Variables, size: int) -> LaunchSettings:
    lanes = number_of(variables, "PACELINE_LANES", least=1)
    for name in ("PACELINE_TP", "PACELINE_CP"):  # workers that share their lanes
        size //= number_of(variables, name, least=1) or 1
    is_elastic = number_of(variables, "PACELINE_INCARNATION") is not None  # its slots may be more than its workers
    if lanes is not None and lanes < size and not is_elastic:
        raise WorldError(
            f"PACELINE_LANES={lanes} but there are {size} workers: a worker without a lane has nothing to do; "
            f"give at least {size} lanes, or start no more workers than lanes"
        )
    settings: dict[str, Any] = {}
    for name in (one.name for one in fields(LaunchSettings)):
        least = {"lanes": 1, "default_lanes": 1, "threads": 1, "seed": 0, "tp": 1, "cp": 1}.get(name)
        variable = setting_variable(name)
        settings[name] = text_of(variables, variable) if least is None else number_of(variables, variable, least)
    return LaunchSettings(**settings)


def setting_variable(name: str) -> str:
    """The variable of a field of `LaunchSettings`."""
    return f"PACELINE_{name.upper()}"


def elasticity(variables: Variables) -> Elasticity | None:
    incarnation = number_of(variables, "PACELINE_INCARNATION")
    if incarnation is None:
        return None
    copies = number_of(variables, "PACELINE_COPIES", least=1)
    listed = [one.partition("@") for one in (text_of(variables, "PACELINE_MEMBERS") or "").split()]
    members = tuple((int(slot), int(host)) for slot, _, host in listed)
    return Elasticity(
        incarnation,
        text_of(variables, "PACELINE_MEMORY_FOLDER"),
        2 if copies is None else copies,
        members,
        across_hosts=bool(number_of(variables, "PACELINE_ACROSS_HOSTS")),
    )


def host_address(variables: Variables, hosts: int) -> str | None:
    return text_of(variables, "PACELINE_HOST_ADDRESS") or (LOOPBACK if hosts == 1 else None)
