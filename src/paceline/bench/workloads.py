"""The three workloads: what every contestant trains, from the same seed, on the same kind of batches.

| workload | model                                                            | parameters | batch | counted in |
|----------|------------------------------------------------------------------|------------|-------|------------|
| mlp25m   | 1024 → 2048, five 2048 → 2048, head 2048 → 1024, ReLU between    | 25,179,136 | 32    | samples/s  |
| gpt10m   | 5 blocks of width 384, 6 heads, vocabulary 2048, sequence of 128 | 10,495,104 | 4     | tokens/s   |
| convnet  | six 3×3 convolutions with BatchNorm and ReLU, on 32×32 images    | 1,129,514  | 32    | samples/s  |

They stand for three ratios of communication to computation: much, middling, and little with buffers to keep in step.
The loss is the cross entropy in all of them, the batch is per worker, and AdamW is fused.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

# So small that nothing is learned: once a model knows its few batches by heart its gradients are subnormal numbers, and
# a step takes up to three times as long on some processors.
LEARNING_RATE = 1e-7
SEED = 0
BATCHES = 4
"""So many different ones are made beforehand, and come again and again."""


class Mlp(nn.Sequential):
    """Narrow → wide, `hidden` layers wide → wide, wide → narrow, ReLU between."""

    def __init__(self, narrow: int, wide: int, hidden: int) -> None:
        layers: list[nn.Module] = []
        for before, after in itertools.pairwise([narrow] + [wide] * (hidden + 1)):
            layers += [nn.Linear(before, after), nn.ReLU()]
        super().__init__(*layers, nn.Linear(wide, narrow))


class Block(nn.Module):
    """Attention, then a feed-forward four times as wide; the norm comes before each."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.attention_out(self._attend(self.attention_norm(hidden)))
        widened: Tensor = self.feed_forward(self.feed_forward_norm(hidden))
        return hidden + widened

    def _attend(self, hidden: Tensor) -> Tensor:
        split = self.queries_keys_values(hidden).unflatten(-1, (3, self.heads, -1))
        queries, keys, values = split.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        return attended.transpose(1, 2).flatten(-2)


class Gpt(nn.Module):
    VOCABULARY, WIDTH, BLOCKS, HEADS, SEQUENCE = 2048, 384, 5, 6, 128

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(self.VOCABULARY, self.WIDTH)
        self.positions = nn.Embedding(self.SEQUENCE, self.WIDTH)
        self.blocks = nn.Sequential(*(Block(self.WIDTH, self.HEADS) for _ in range(self.BLOCKS)))
        self.norm = nn.LayerNorm(self.WIDTH)
        self.head = nn.Linear(self.WIDTH, self.VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        logits: Tensor = self.head(self.norm(self.blocks(hidden)))
        return logits


class Convnet(nn.Module):
    CHANNELS_AND_STRIDES = ((32, 1), (64, 2), (128, 2), (128, 1), (256, 2), (256, 1))

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        before = 3
        for after, stride in self.CHANNELS_AND_STRIDES:
            layers += [nn.Conv2d(before, after, 3, stride, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
            before = after
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(before, 10)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.features(images).mean((2, 3)))
        return logits


@dataclass(frozen=True)
class Workload:
    name: str
    model: Callable[[], nn.Module]
    samples: Callable[[int, torch.Generator], tuple[Tensor, Tensor]]
    repeated: type[nn.Module]  # what a peer that gathers weights is told to gather
    batch_size: int
    units_per_sample: int
    unit: str

    def build(self) -> nn.Module:
        """The model with the weights that all contestants start from."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            return self.model()

    @property
    def parameters(self) -> int:
        with torch.device("meta"):
            return sum(parameter.numel() for parameter in self.build().parameters())

    def draw(self, count: int, seed: int) -> tuple[Tensor, Tensor]:
        """`count` random samples: inputs and targets."""
        return self.samples(count, torch.Generator().manual_seed(seed))

    @staticmethod
    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


class ReadyBatches(Dataset[tuple[Tensor, Tensor]]):
    """A dataset of any length whose batches are made beforehand, as those of the peers are: fetching costs nothing."""

    def __init__(self, workload: Workload, length: int, seed: int = SEED, batches: int = BATCHES) -> None:
        self._batches = [workload.draw(workload.batch_size, seed + number) for number in range(batches)]
        self._batch_size, self._length = workload.batch_size, length

    def __len__(self) -> int:
        return self._length

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        return self._batches[indices[0] // self._batch_size % len(self._batches)]

    def loader(self, batch_size: int) -> DataLoader[tuple[Tensor, Tensor]]:
        return DataLoader(self, batch_size=batch_size, collate_fn=as_it_is)


def as_it_is(batch: Any) -> Any:
    return batch


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)


def _texts(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(Gpt.VOCABULARY, (count, Gpt.SEQUENCE + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _images(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randn(count, 3, 32, 32, generator=generator), torch.randint(10, (count,), generator=generator)


def mlp(name: str, narrow: int, wide: int, hidden: int, batch_size: int) -> Workload:
    def vectors(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        return torch.randn(count, narrow, generator=generator), torch.randint(narrow, (count,), generator=generator)

    return Workload(name, lambda: Mlp(narrow, wide, hidden), vectors, nn.Linear, batch_size, 1, "samples/s")


WORKLOADS = {
    workload.name: workload
    for workload in (
        mlp("mlp25m", narrow=1024, wide=2048, hidden=5, batch_size=32),
        Workload("gpt10m", Gpt, _texts, repeated=Block, batch_size=4, units_per_sample=Gpt.SEQUENCE, unit="tokens/s"),
        Workload("convnet", Convnet, _images, repeated=nn.Conv2d, batch_size=32, units_per_sample=1, unit="samples/s"),
    )
}
