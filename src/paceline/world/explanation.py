"""The reading of the environment in words, for `paceline doctor`: what was found, what was passed over and why."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from paceline.errors import WorldError
from paceline.world.launchers import LAUNCHERS, Launcher, from_hand, from_slurm, started_by_srun, world_from
from paceline.world.variables import Variables, text_of
from paceline.world.world import ControlSocket, TcpRendezvous, World


class Level(Enum):
    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True)
class Finding:
    """One line of `paceline doctor`: about what, how it stands, and what to do where it stands badly."""

    level: Level
    about: str
    text: str
    advice: str = ""


def explain(variables: Variables) -> list[Finding]:
    """What `world_from` found, by which variables, what it passed over and why, and what is wrong."""
    try:
        world = world_from(variables)
    except WorldError as error:
        seen = [launcher for launcher in LAUNCHERS if launcher.seen(variables)]
        evidence = [Finding(Level.OK, launcher.name, launcher.evidence(variables)) for launcher in seen]
        return [Finding(Level.PROBLEM, "world", str(error)), *evidence]
    passed_over = [x for x in LAUNCHERS if x.name != world.source and x.seen(variables) and not _same(x, world)]
    return [
        Finding(Level.OK, "world", _in_words(world)),
        _found_by(world, variables),
        *_meeting(world),
        *(_passed_over(launcher, world, variables) for launcher in passed_over),
        *_settings_in_words(world),
        *_left_over(world, variables),
    ]


def _same(launcher: Launcher, world: World) -> bool:
    """torchrun and `paceline run` set RANK and WORLD_SIZE too: they are their own, not another launcher's."""
    return launcher.read is from_hand and world.source in ("torchrun", "paceline run")


def _in_words(world: World) -> str:
    if world.is_server:
        beside = f"{world.size} worker{'s' if world.size > 1 else ''}"
        return (
            f"server {world.server_index} of {world.servers}, beside {beside}, host {world.host_rank} of {world.hosts}"
        )
    if world.size == 1:
        return "one worker, alone" if world.source == "alone" else f"one worker, started by {world.source}"
    place = f"rank {world.rank} of {world.size} workers, local rank {world.local_rank} of {world.local_size}"
    return f"{place}, host {world.host_rank} of {world.hosts}"


def _found_by(world: World, variables: Variables) -> Finding:
    for launcher in LAUNCHERS:
        if launcher.name == world.source:
            return Finding(Level.OK, "found by", f"{launcher.name}: {launcher.evidence(variables)}")
    advice = "start more workers with `paceline run --workers N script.py`"
    return Finding(Level.OK, "found by", "no launcher started this process", advice)


def _meeting(world: World) -> list[Finding]:
    match world.rendezvous:
        case ControlSocket(path):
            where = f"the supervisor's socket {path}"
        case TcpRendezvous(address, port, by_agent):
            where = f"{address}:{port}, served by {'the torchrun agent' if by_agent else 'rank 0'}"
        case _:
            return []
    return [Finding(Level.OK, "meets at", where)]


def _passed_over(launcher: Launcher, world: World, variables: Variables) -> Finding:
    evidence = launcher.evidence(variables)
    if launcher.read is from_slurm and not started_by_srun(variables):
        tasks = text_of(variables, "SLURM_NTASKS") or "1"
        advice = f"start all {tasks} with `srun python script.py` or `paceline run --workers {tasks} script.py`"
        unused = world.size == 1 and tasks != "1"
        return Finding(
            Level.WARNING if unused else Level.OK,
            launcher.name,
            f"inside an allocation of {tasks} tasks, but srun did not start this process ({evidence})",
            advice if unused else "",
        )
    try:
        other = launcher.read(variables)
    except WorldError as error:
        return Finding(Level.WARNING, launcher.name, f"passed over for {world.source}, and contradictory: {error}")
    if other is None:
        return Finding(
            Level.OK, launcher.name, f"passed over for {world.source}: it does not say the rank ({evidence})"
        )
    if (other.rank, other.size) == (world.rank, world.size):
        return Finding(Level.OK, launcher.name, f"passed over for {world.source}, and says the same ({evidence})")
    text = f"says rank {other.rank} of {other.size}; passed over because {world.source} is the inner launcher"
    return Finding(Level.OK, launcher.name, f"{text} ({evidence})")


def _settings_in_words(world: World) -> list[Finding]:
    chosen = {name: value for name, value in vars(world.settings).items() if value is not None}
    return (
        [Finding(Level.OK, "settings", " ".join(f"{name}={value}" for name, value in chosen.items()))] if chosen else []
    )


def _left_over(world: World, variables: Variables) -> Iterator[Finding]:
    """Signs that more workers were meant than came."""
    if world.source == "alone" and (address := text_of(variables, "MASTER_ADDR")) is not None:
        advice = "set RANK and WORLD_SIZE too, or start with `paceline run`"
        yield Finding(Level.WARNING, "MASTER_ADDR", f"MASTER_ADDR={address} is set, but no rank: not used", advice)
    said_local = text_of(variables, "LOCAL_RANK") or text_of(variables, "LOCAL_WORLD_SIZE")
    if world.source == "RANK and WORLD_SIZE" and world.hosts > 1 and said_local is None:
        text = "taken as one worker per host, because MASTER_ADDR is not loopback"
        advice = "with several per host set LOCAL_RANK and LOCAL_WORLD_SIZE, or start with `paceline run`"
        yield Finding(Level.OK, "local rank", text, advice)
    accelerators = text_of(variables, "SKYPILOT_NUM_GPUS_PER_NODE") or "1"
    if world.source == "SkyPilot" and accelerators not in ("0", "1"):
        advice = f"use all with `paceline run --workers {accelerators} script.py`"
        yield Finding(Level.WARNING, "SkyPilot", f"{accelerators} accelerators on this host, and one worker", advice)
