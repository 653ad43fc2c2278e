"""A GAN over a stream that splits itself: two updates in each step, and workers die between them or after the last."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import paceline

SAMPLES = 6 * 8 * 2


class Parts(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        told = get_worker_info()
        first, every = (0, 1) if told is None else (told.id, told.num_workers)
        for number in range(first, SAMPLES, every):
            yield torch.full((4,), number / SAMPLES) + 0.1 * torch.randn(4)


def die(engine: paceline.Engine, order: str, update: int) -> None:
    """After this update, where ordered as RANK:STEP:UPDATE; a replacement lives."""
    elastic = engine.world.elastic
    slot = int(os.environ["PACELINE_RANK"])
    if elastic is not None and not elastic.joins and f"{slot}:{engine.step}:{update}" in order.split(","):
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    order = os.environ.get("DIES", "")
    with paceline.Engine(device="cpu") as engine:
        generator, critic = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 1))
        for_generator = torch.optim.Adam(generator.parameters(), lr=1e-2)
        for_critic = torch.optim.Adam(critic.parameters(), lr=1e-2)
        loader = DataLoader(Parts(), batch_size=2)
        generator, critic, for_generator, for_critic, loader = engine.prepare(
            generator, critic, for_generator, for_critic, loader
        )

        def critic_loss(real: Any) -> Tensor:
            fake = generator(torch.randn(len(real), 4)).detach()
            return F.softplus(-critic(real)).mean() + F.softplus(critic(fake)).mean()

        def generator_loss(real: Any) -> Tensor:
            return F.softplus(-critic(generator(torch.randn(len(real), 4)))).mean()

        for _ in loader:
            engine.update(for_critic, critic_loss)
            die(engine, order, 1)
            engine.update(for_generator, generator_loss)
            die(engine, order, 2)
        engine.print(f"weights {engine.weights_hash()} after {engine.step} steps")


if __name__ == "__main__":
    main()
