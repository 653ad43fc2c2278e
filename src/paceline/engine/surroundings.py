"""What an Engine finds around it: the supervisor that started it, and the device it may use."""

from __future__ import annotations

import torch

from paceline.errors import ConfigError
from paceline.world.control import ControlClient
from paceline.world.world import ControlSocket, World


def call_supervisor(world: World) -> ControlClient | None:
    if not isinstance(world.rendezvous, ControlSocket):
        return None
    return ControlClient.connect(world.rendezvous.path, world.rank)


def find_device(world: World, wanted: str | torch.device | None) -> torch.device:
    if wanted is not None:
        return torch.device(wanted)
    if not torch.accelerator.is_available():
        return torch.device("cpu")
    kind = torch.accelerator.current_accelerator()
    assert kind is not None
    count = torch.accelerator.device_count()
    if world.local_size > count:
        raise ConfigError(
            f"{world.local_size} workers on this host but {count} {kind.type} device(s); "
            f"start with --workers {count}, or train on the CPU with Engine(device='cpu')"
        )
    device = torch.device(kind.type, world.local_rank)
    torch.accelerator.set_device_index(world.local_rank)
    return device


def default_backend(world: World, device: torch.device) -> str:
    """Shared memory between the workers of one host; otherwise what the field uses."""
    if device.type == "cuda":
        return "nccl"
    return "paceline" if device.type == "cpu" and world.local_size == world.size else "gloo"
