"""Small training programs whose final weights must have one hash, whatever the number of workers.

Each is a function `program(world, **job) -> hash`, written with the public API as a user would write it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from paceline import Engine, World


def _vectors(samples: int, width: int = 16, classes: int = 10) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(samples, width, generator=generator), torch.randint(0, classes, (samples,), generator=generator)
    )


def _train(
    engine: Engine,
    model: nn.Module,
    data: Dataset[Any],
    *,
    epochs: int = 2,
    clip: float | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    batch_size: int = 4,
    num_workers: int = 0,
) -> str:
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(data, batch_size=batch_size, shuffle=True, num_workers=num_workers)
    model, optimizer, loader = engine.prepare(model, optimizer, loader)
    for _ in range(epochs):
        for x, y in loader:
            loss = F.cross_entropy(model(x).flatten(0, -2), y.flatten())
            engine.backward(loss)
            if clip is not None:
                engine.clip_grad_norm_(clip)
            optimizer.step()
            optimizer.zero_grad()
    return engine.weights_hash()


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class TiedGpt(nn.Module):
    """Embedding and head are one weight; `spare` is used by no sample, `sometimes` only by some micro-batches."""

    def __init__(self, vocabulary: int = 32, width: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.spare = nn.Linear(width, width)
        self.sometimes = nn.Linear(width, width)
        self.blocks = nn.ModuleList(_Block(width) for _ in range(2))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embedding(x)
        if int(x.sum()) % 2:
            hidden = hidden + self.sometimes(hidden)
        for block in self.blocks:
            hidden = block(hidden)
        out: Tensor = self.head(hidden)
        return out


def tied_and_scheduled(engine: Engine) -> tuple[Any, Any, Any, Any]:
    """Model, optimizer, loader and a schedule made before it is prepared, for loops that stop and go on."""
    model = TiedGpt(width=72)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=20)
    text = torch.randint(0, 32, (75, 9), generator=torch.Generator().manual_seed(2))
    loader = DataLoader(TensorDataset(text[:, :-1], text[:, 1:]), batch_size=4, shuffle=True)
    return engine.prepare(model, optimizer, loader, schedule)  # type: ignore[no-any-return]


def gpt(world: World, *, epochs: int = 2, samples: int = 75, **job: Any) -> str:
    with Engine(world=world, **{"device": "cpu"} | job) as engine:
        text = torch.randint(0, 32, (samples, 17), generator=torch.Generator().manual_seed(2))
        return _train(engine, TiedGpt(), TensorDataset(text[:, :-1], text[:, 1:]), epochs=epochs)


class _Augmented(Dataset[tuple[Tensor, Tensor]]):
    """Images with random noise drawn when fetched: the random stream must follow the sample, not the worker."""

    def __init__(self, samples: int) -> None:
        generator = torch.Generator().manual_seed(3)
        self.images = torch.randn(samples, 3, 8, 8, generator=generator)
        self.labels = torch.randint(0, 10, (samples, 1), generator=generator)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.images[index] + 0.1 * torch.randn(3, 8, 8), self.labels[index]


class _Convnet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.2),
            nn.Conv2d(8, 16, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
        )  # fmt: skip
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x).mean((2, 3))).unsqueeze(1)
        return out


def convnet(world: World, *, num_workers: int = 0, samples: int = 77, epochs: int = 2, **job: Any) -> str:
    with Engine(world=world, **{"device": "cpu"} | job) as engine:
        return _train(engine, _Convnet(), _Augmented(samples), epochs=epochs, num_workers=num_workers)


class _Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.lstm, self.head = (
            nn.Embedding(32, 16),
            nn.LSTM(16, 32, batch_first=True),
            nn.Linear(32, 32),
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.lstm(self.embedding(x))[0])
        return out


def lstm(world: World, **job: Any) -> str:
    with Engine(world=world, **{"device": "cpu"} | job) as engine:
        text = torch.randint(0, 32, (66, 13), generator=torch.Generator().manual_seed(4))
        return _train(engine, _Lstm(), TensorDataset(text[:, :-1], text[:, 1:]))


def clipped(world: World, **job: Any) -> str:
    """A limit far below the gradient's norm, so that every step is clipped."""
    with Engine(world=world, **{"device": "cpu"} | job) as engine:
        text = torch.randint(0, 32, (70, 17), generator=torch.Generator().manual_seed(2))
        return _train(engine, TiedGpt(), TensorDataset(text[:, :-1], text[:, 1:]), clip=0.05)


def short_last_step(world: World, **job: Any) -> str:
    """35 samples in global batches of 16 or 20: the last step has 3 or 15 samples, fewer than lanes at L=4."""
    with Engine(world=world, **{"device": "cpu"} | job) as engine:
        model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 10), nn.Unflatten(1, (1, 10)))
        return _train(engine, model, _vectors(35), epochs=3)


def scheduled(world: World, **job: Any) -> str:
    """OneCycle made from the steps of an epoch: it must step once per step, not once per item."""
    with Engine(world=world, **{"device": "cpu"} | job) as engine:
        model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 10))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        loader = DataLoader(_vectors(64), batch_size=4, shuffle=True)
        model, optimizer, loader = engine.prepare(model, optimizer, loader)
        total = 2 * engine.steps_per_epoch(loader)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=total)
        schedule = engine.prepare(schedule)
        for _ in range(2):
            for x, y in loader:
                optimizer.zero_grad()
                engine.backward(F.cross_entropy(model(x), y))
                optimizer.step()
                schedule.step()
        assert engine.step == total, (engine.step, total)
        return engine.weights_hash()


def gan(world: World, **job: Any) -> str:
    with Engine(world=world, **{"device": "cpu"} | job) as engine:
        generator = nn.Sequential(nn.Linear(4, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 16))
        critic = nn.Sequential(nn.Linear(16, 32), nn.LeakyReLU(0.2), nn.Dropout(0.1), nn.Linear(32, 1))
        for_generator = torch.optim.Adam(generator.parameters(), lr=1e-2, betas=(0.5, 0.9))
        for_critic = torch.optim.Adam(critic.parameters(), lr=1e-2, betas=(0.5, 0.9))
        loader = DataLoader(_vectors(72), batch_size=4, shuffle=True)
        generator, critic, for_generator, for_critic, loader = engine.prepare(
            generator, critic, for_generator, for_critic, loader
        )

        def critic_loss(batch: Any) -> Tensor:
            real = batch[0]
            fake = generator(torch.randn(len(real), 4)).detach()
            return F.softplus(-critic(real)).mean() + F.softplus(critic(fake)).mean()

        def generator_loss(batch: Any) -> Tensor:
            return F.softplus(-critic(generator(torch.randn(len(batch[0]), 4)))).mean()

        for _ in range(2):
            for _batch in loader:
                engine.update(for_critic, critic_loss)
                engine.update(for_generator, generator_loss)
        return engine.weights_hash()


class _Odd(nn.Module):
    """A non-contiguous parameter, a frozen one, two precisions and a parameter large enough to travel alone."""

    def __init__(self) -> None:
        super().__init__()
        self.sideways = nn.Parameter(torch.randn(32, 16).t() * 0.1)
        self.frozen = nn.Linear(32, 32)
        self.frozen.requires_grad_(False)
        self.low = nn.Parameter((torch.randn(32, 32) * 0.1).bfloat16())
        self.precise = nn.Parameter(torch.randn(32, 10, dtype=torch.float64) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.frozen(torch.tanh(x @ self.sideways))
        hidden = torch.tanh(hidden.bfloat16() @ self.low)
        return (hidden.double() @ self.precise).unsqueeze(1)


def odd_parameters(world: World, **job: Any) -> str:
    with Engine(world=world, **{"device": "cpu"} | job) as engine:
        model = _Odd()
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
        return _train(engine, model, _vectors(50), optimizer=optimizer)


class _Wide(nn.Module):
    """Parameters of many blocks, so that shards cut them: one of them sideways in memory, one in bf16, a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(16, 150)
        self.sideways = nn.Parameter(torch.randn(151, 150).t() * 0.1)
        self.low = nn.Parameter((torch.randn(151, 101) * 0.1).bfloat16())
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.spare = nn.Linear(90, 91)
        self.head = nn.Linear(101, 10)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.inside(x)) @ self.sideways
        out: Tensor = self.head(torch.tanh(hidden.bfloat16() @ self.low).to(self.scale.dtype) * self.scale)
        return out.unsqueeze(1)


def in_two_groups(model: nn.Module) -> list[dict[str, Any]]:
    """As people do it: no decay for what has fewer than two dimensions; and another learning rate."""
    wide = [p for p in model.parameters() if p.dim() > 1]
    return [{"params": wide}, {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0, "lr": 3e-3}]


def wide(
    world: World,
    *,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    settings: Mapping[str, Any] = MappingProxyType({}),
    clip: float | None = None,
    **job: Any,
) -> str:
    """Two groups with settings of their own."""
    with Engine(world=world, **{"device": "cpu"} | job) as engine:
        model = _Wide()
        made = optimizer(in_two_groups(model), lr=1e-2, **settings)
        return _train(engine, model, _vectors(60), epochs=1, clip=clip, optimizer=made)


def compiled(world: World, **job: Any) -> str:
    with Engine(world=world, **{"device": "cpu"} | job) as engine:
        model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 10), nn.Unflatten(1, (1, 10)))
        return _train(engine, torch.compile(model, backend="aot_eager"), _vectors(48))  # type: ignore[arg-type]


PROGRAMS = {
    "gpt": gpt,
    "convnet": convnet,
    "lstm": lstm,
    "clipped": clipped,
    "short_last_step": short_last_step,
    "scheduled": scheduled,
    "gan": gan,
    "odd_parameters": odd_parameters,
    "wide": wide,
}
# Classes in them to compute again in backward, for activation_checkpointing=.
RECOMPUTED = {
    "gpt": "blocks",
    "convnet": "Sequential",
    "lstm": "LSTM",
    "clipped": "_Block",
    "short_last_step": "Sequential",
    "scheduled": "Sequential",
    "gan": "Sequential",
    "odd_parameters": "_Odd",
    "wide": "_Wide",
}
