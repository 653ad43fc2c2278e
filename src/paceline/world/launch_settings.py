"""What PACELINE_* variables fix under every launcher, as `paceline run`'s flags do.

PACELINE_LANES, _THREADS, _BACKEND, _SEED, _STRATEGY, _PRECISION, _ACTIVATION_CHECKPOINTING, _OFFLOAD, _REPLAY
PACELINE_HOST_ADDRESS     the address that tensors leave this host from
PACELINE_INCARNATION, _VAULT, _COPIES, _MEMBERS, _ACROSS_HOSTS     of an elastic job, by `paceline run` alone
"""

from __future__ import annotations

from paceline.errors import WorldError
from paceline.world.checked_variables import Variables, number_of, text_of
from paceline.world.world import LOOPBACK, Elasticity, LaunchSettings


def settings_of(variables: Variables, size: int) -> LaunchSettings:
    lanes = number_of(variables, "PACELINE_LANES", least=1)
    is_elastic = number_of(variables, "PACELINE_INCARNATION") is not None  # its slots may be more than its workers
    if lanes is not None and lanes < size and not is_elastic:
        raise WorldError(
            f"PACELINE_LANES={lanes} but there are {size} workers: a worker without a lane has nothing to do; "
            f"give at least {size} lanes, or start no more workers than lanes"
        )
    return LaunchSettings(
        lanes=lanes,
        threads=number_of(variables, "PACELINE_THREADS", least=1),
        backend=text_of(variables, "PACELINE_BACKEND"),
        seed=number_of(variables, "PACELINE_SEED"),
        strategy=text_of(variables, "PACELINE_STRATEGY"),
        precision=text_of(variables, "PACELINE_PRECISION"),
        activation_checkpointing=text_of(variables, "PACELINE_ACTIVATION_CHECKPOINTING"),
        offload=text_of(variables, "PACELINE_OFFLOAD"),
        replay=text_of(variables, "PACELINE_REPLAY"),
    )


def elasticity(variables: Variables) -> Elasticity | None:
    incarnation = number_of(variables, "PACELINE_INCARNATION")
    if incarnation is None:
        return None
    copies = number_of(variables, "PACELINE_COPIES", least=1)
    listed = [one.partition("@") for one in (text_of(variables, "PACELINE_MEMBERS") or "").split()]
    members = tuple((int(slot), int(host)) for slot, _, host in listed)
    return Elasticity(
        incarnation,
        text_of(variables, "PACELINE_VAULT"),
        2 if copies is None else copies,
        members,
        across_hosts=bool(number_of(variables, "PACELINE_ACROSS_HOSTS")),
    )


def host_address(variables: Variables, hosts: int) -> str | None:
    return text_of(variables, "PACELINE_HOST_ADDRESS") or (LOOPBACK if hosts == 1 else None)
