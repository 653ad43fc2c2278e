"""Who trains while memory is measured: the same model and optimizer in the hands of paceline, torch or DeepSpeed.

| contestant       | model                                                                    |
|------------------|--------------------------------------------------------------------------|
| a strategy       | as it is, given to engine.prepare                                        |
| torch-ddp        | DistributedDataParallel, as most people make it                          |
| torch-fsdp2      | fully_shard around every linear layer, and around the whole              |
| deepspeed-zeroN  | deepspeed.initialize with that stage, and its defaults otherwise         |

AdamW is fused, where the contestant lets the user choose: the other kinds make temporary results as large as a shard.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import paceline
from paceline.bench.memory import MemoryRun
from paceline.bench.workloads import SEED, adamw
from paceline.strategies.registry import STRATEGIES, Chosen
from paceline.world.world import World

MOST_STEPS = 64


@dataclass(frozen=True)
class Mlp:
    """Narrow → wide, `hidden` layers wide → wide, wide → narrow, ReLU between, and what it is trained on."""

    narrow: int
    wide: int
    hidden: int
    batch_size: int

    def build(self) -> nn.Sequential:
        """The same weights for everyone."""
        layers: list[nn.Module] = []
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            for before, after in itertools.pairwise([self.narrow] + [self.wide] * (self.hidden + 1)):
                layers += [nn.Linear(before, after), nn.ReLU()]
            return nn.Sequential(*layers, nn.Linear(self.wide, self.narrow))

    @property
    def parameters(self) -> int:
        with torch.device("meta"):
            return sum(parameter.numel() for parameter in self.build().parameters())

    def batch(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(SEED)
        inputs = torch.randn(self.batch_size, self.narrow, generator=generator)
        return inputs, torch.randint(self.narrow, (self.batch_size,), generator=generator)


MLP50M = Mlp(narrow=1024, wide=2048, hidden=11, batch_size=32)  # 50,357,248 parameters


class _SameBatch(Dataset[tuple[Tensor, Tensor]]):
    """As long as it needs to be, in the memory of one batch."""

    def __init__(self, workload: Mlp, length: int) -> None:
        self._inputs, self._targets = workload.batch()
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        place = index % len(self._inputs)
        return self._inputs[place], self._targets[place]


class Loop(Protocol):
    """A training loop that stops in the middle of a step, where memory is fullest."""

    model: nn.Module

    @property
    def inputs(self) -> Sequence[Tensor]:
        """Of the last batch."""
        ...

    def forward(self) -> Tensor: ...

    def backward(self, loss: Tensor) -> None: ...

    def update(self) -> None: ...

    def also(self) -> Mapping[str, Sequence[Tensor]]:
        """Parameters and gradients that neither the model nor an optimizer shows between backward and step()."""
        ...

    def hidden_bytes(self) -> int:
        """Buffers of communication that are no tensors in Python; asked when all else is done."""
        ...

    def close(self) -> None: ...


def strategies() -> dict[str, Chosen]:
    """Ours whose footprint is known, in every configuration that tests try, by name."""
    chosen = [Chosen(entry, config) for entry in STRATEGIES.values() for config in (entry.config(), *entry.examples)]
    return {str(each): each for each in chosen if each.has_footprint}


def enter(run: MemoryRun, world: World, workload: Mlp) -> Loop:
    peers: dict[str, Callable[[], Loop]] = {
        "torch-ddp": lambda: _Ddp(workload),
        "torch-fsdp2": lambda: _PlainLoop(_fully_sharded(workload), workload),
        **{f"deepspeed-zero{stage}": lambda stage=stage: _DeepSpeed(workload, stage) for stage in (1, 2, 3)},  # type: ignore[misc]
    }
    if run.contestant in peers:
        return peers[run.contestant]()
    return _Paceline(strategies()[run.contestant], run, world, workload)


class _Paceline:
    def __init__(self, strategy: Chosen, run: MemoryRun, world: World, workload: Mlp) -> None:
        buckets: dict[str, Any] = {} if run.bucket_mib is None else {"bucket_mib": run.bucket_mib}
        self._engine = paceline.Engine(
            world=world,
            strategy=strategy.config,
            lanes=world.size,
            threads=1,
            device="cpu",
            backend=run.backend,
            **buckets,
        )
        samples = _SameBatch(workload, MOST_STEPS * world.size * workload.batch_size)
        model = workload.build()
        self.model, self._optimizer, loader = self._engine.prepare(
            model, adamw(model), DataLoader(samples, batch_size=workload.batch_size)
        )
        self._batches = iter(loader)
        self.inputs: Sequence[Tensor] = ()

    def forward(self) -> Tensor:
        self.inputs = next(self._batches)
        return F.cross_entropy(self.model(self.inputs[0]), self.inputs[1])

    def backward(self, loss: Tensor) -> None:
        self._engine.backward(loss)

    def update(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad()

    def also(self) -> Mapping[str, Sequence[Tensor]]:
        return {}

    def hidden_bytes(self) -> int:
        return 0

    def close(self) -> None:
        self._batches.close()  # what a `break` does
        self._engine.close()


class _PlainLoop:
    """A torch user's."""

    def __init__(self, model: nn.Module, workload: Mlp) -> None:
        self.model = model
        self._optimizer = adamw(model)
        self.inputs: Sequence[Tensor] = workload.batch()

    def forward(self) -> Tensor:
        return F.cross_entropy(self.model(self.inputs[0]), self.inputs[1])

    def backward(self, loss: Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def update(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad()

    def also(self) -> Mapping[str, Sequence[Tensor]]:
        return {}

    def hidden_bytes(self) -> int:
        return 0

    def close(self) -> None:
        pass


class _Ddp(_PlainLoop):
    def __init__(self, workload: Mlp) -> None:
        self._wrapped = DistributedDataParallel(workload.build())
        super().__init__(self._wrapped, workload)

    def hidden_bytes(self) -> int:
        """The reducer's buckets, which it shows as copies."""
        return sum(bucket.buffer().nbytes for bucket in self._wrapped.reducer._get_zeros_like_grad_buckets())


def _fully_sharded(workload: Mlp) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    model = workload.build()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    return model


class _DeepSpeed(_PlainLoop):
    def __init__(self, workload: Mlp, stage: int) -> None:
        import deepspeed  # type: ignore[import-not-found,unused-ignore]

        warnings.simplefilter("ignore", FutureWarning)  # of torch's names that it uses, at every call
        model = workload.build()
        config = {
            "train_micro_batch_size_per_gpu": workload.batch_size,
            "gradient_accumulation_steps": 1,
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
        }
        self._deepspeed: Any = deepspeed.initialize(model=model, optimizer=adamw(model), config=config)[0]
        super().__init__(model, workload)
        self._optimizer = self._deepspeed.optimizer

    def forward(self) -> Tensor:
        return F.cross_entropy(self._deepspeed(self.inputs[0]), self.inputs[1])

    def backward(self, loss: Tensor) -> None:
        self._deepspeed.backward(loss)

    def update(self) -> None:
        self._deepspeed.step()

    def also(self) -> Mapping[str, Sequence[Tensor]]:
        """Stage 3 has a parameter's partition beside it; gradients of all stages are with the optimizer."""
        optimizer: Any = self._optimizer
        partitions = [p.ds_tensor for p in self.model.parameters() if hasattr(p, "ds_tensor")]
        masters = getattr(optimizer, "fp32_partitioned_groups_flat", [])
        averaged = [tensor for of_group in optimizer.averaged_gradients.values() for tensor in of_group or []]
        return {"parameters": [*partitions, *masters], "gradients": [t for t in averaged if t is not None]}
