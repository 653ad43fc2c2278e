"""A training script with a bug of your choice.

    paceline verify tests/verify/planted.py --workers 1,2,3 -- seeded_by_rank

Each is a line or two that would go unseen on one worker. Without a name, or with `none`, there is no bug.
"""

from __future__ import annotations

import os
import sys

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, mse_loss

import paceline

BUG = sys.argv[1] if len(sys.argv) > 1 else "none"
BATCH, SAMPLES = 4, 48


class Reshuffling(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """`set_epoch` is missing: it shuffles itself when sample 0 is asked for, which one worker alone sees."""

    def __init__(self) -> None:
        self.x, self.y, self.epoch = torch.randn(SAMPLES, 8), torch.randn(SAMPLES, 1), -1

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.epoch += index == 0
        other = (index + (17 * max(0, self.epoch) if BUG == "missing_set_epoch" else 0)) % SAMPLES
        return self.x[other], self.y[other]


@torch.library.custom_op("planted::scatter_add", mutates_args=())
def scatter_add(values: Tensor) -> Tensor:
    """Adds in the order in which its threads come, as atomic additions of a GPU do."""
    order = sorted(range(len(values)), key=lambda _: os.urandom(4))
    total = torch.zeros_like(values[0])
    for place in order:
        total += values[place]
    return total


@scatter_add.register_fake
def _(values: Tensor) -> Tensor:
    return torch.empty_like(values[0])


class ByNorm(torch.optim.SGD):
    """Every tensor moves by the same length, whatever its gradient's: which zero and fsdp refuse."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                p.sub_(0.01 * p.grad / p.grad.norm())


class OnOneWorker(torch.optim.SGD):
    """Worker 1 moves one element further."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        super().step()
        if rank == 1:
            self.param_groups[0]["params"][0].view(-1)[3] += 0.01


class ByLength(torch.optim.Optimizer):
    """A fused kernel in rounds of 131,072 elements, whose last, short one is rounded in another order."""

    def __init__(self, parameters: object) -> None:
        super().__init__(parameters, {"lr": 1e-4})  # type: ignore[arg-type]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                flat, gradient, whole = p.view(-1), p.grad.reshape(-1), p.numel() // 2**17 * 2**17
                flat[:whole].sub_(gradient[:whole] * 1e-4)
                flat[whole:].copy_((flat[whole:] * 1e4 - gradient[whole:]) / 1e4 if whole else flat - gradient * 1e-4)


def add_in_wrong_order(rank: int) -> None:
    """Worker 1 packs its buckets from the other end."""
    from paceline.collectives.gradient_exchange import GradientExchange

    start = GradientExchange.start

    def wrong(
        self: GradientExchange, of: int, bucket: int, plan: object, roots: dict[int, Tensor], spare: object
    ) -> object:
        for root in roots.values():
            root.copy_(root.flip(0))
        return start(self, of, bucket, plan, roots, spare)  # type: ignore[arg-type]

    if rank == 1:
        GradientExchange.start = wrong  # type: ignore[assignment, method-assign]


engine = paceline.Engine(seed=3)
rank = engine.world.rank
if BUG == "model_seeded_by_rank":
    torch.manual_seed(rank)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
if BUG == "update_by_shard_length":
    model = nn.Sequential(nn.Linear(8, 20_000), nn.ReLU(), nn.Linear(20_000, 1))
kind = {"update_by_norm": ByNorm, "update_on_one_worker": OnOneWorker}.get(BUG, torch.optim.SGD)
optimizer = kind(model.parameters(), 0.1)
if BUG == "update_by_shard_length":
    optimizer = ByLength(model.parameters())  # type: ignore[assignment]
loader = torch.utils.data.DataLoader(Reshuffling(), batch_size=BATCH)
own_generator, running_mean, items = torch.Generator().manual_seed(7), torch.zeros(8), 0
if BUG == "wrong_bucket_order":
    add_in_wrong_order(rank)
model, optimizer, loader = engine.prepare(model, optimizer, loader)

for _ in range(3):
    for x, y in loader:
        items += 1
        weight = None
        if BUG == "seeded_by_rank":
            torch.manual_seed(rank)
        x = dropout(x, 0.1)
        if BUG == "dropout_outside_the_engine":
            x = x * torch.bernoulli(torch.full_like(x, 0.9), generator=own_generator)
        if BUG == "unsynchronised_buffer":
            running_mean = 0.9 * running_mean + 0.1 * x.mean(0)
            x = x - running_mean
        if BUG == "non_deterministic_scatter":
            x = x + 0.01 * scatter_add(torch.cat([x, 1e3 * x, -1e3 * x]))
        loss = mse_loss(model(x), y)
        if BUG == "averaged_averages":
            size, lanes = engine.world.size, engine.config.lanes  # a mean over this worker's lanes, then over workers
            weight = BATCH / ((rank + 1) * lanes // size - rank * lanes // size)
        if BUG == "rank_dependent_branch":
            if rank == 0:
                loss = loss + 1e-3 * model[0].weight.square().mean()
            else:
                loss = loss * 1.0
        engine.backward(loss, weight=weight)
        optimizer.step()
        optimizer.zero_grad()
        if BUG == "weight_written_on_one_worker" and engine.stepped and engine.step == 3 and rank == 0:
            with torch.no_grad():
                model[0].weight[2, 5] += 0.01
        if BUG == "schedule_by_items":
            optimizer.param_groups[0]["lr"] = (
                0.1 / (1 + items // 3) if engine.stepped else optimizer.param_groups[0]["lr"]
            )
