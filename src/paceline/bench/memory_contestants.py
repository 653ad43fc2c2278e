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

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from paceline.bench.contestants import PacelineLoop, PlainLoop, engine_options, fully_sharded
from paceline.bench.memory import MemoryRun
from paceline.bench.workloads import Workload, adamw, mlp
from paceline.strategies.registry import STRATEGIES, Chosen
from paceline.world.world import World

MOST_STEPS = 64


MLP50M = mlp("mlp50m", narrow=1024, wide=2048, hidden=11, batch_size=32)  # 50,357,248 parameters


class Loop(Protocol):
    """A training loop that stops in the middle of a step, where memory is fullest."""

    model: nn.Module
    inputs: Sequence[Tensor]  # of the last batch

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


def enter(run: MemoryRun, world: World, workload: Workload) -> Loop:
    peers: dict[str, Callable[[], Loop]] = {
        "torch-ddp": lambda: _Ddp(workload),
        "torch-fsdp2": lambda: _Plain(fully_sharded(workload), workload, batches=1),
        **{f"deepspeed-zero{stage}": lambda stage=stage: _DeepSpeed(workload, stage) for stage in (1, 2, 3)},  # type: ignore[misc]
    }
    if run.contestant in peers:
        return peers[run.contestant]()
    options = engine_options(run.backend, run.bucket_mib)
    strategy = strategies()[run.contestant].config
    return CountedLoop(workload, world, MOST_STEPS, batches=1, strategy=strategy, **options)


class _ShowsAll:
    """A loop whose tensors are all with the model, an optimizer or the interpreter."""

    def also(self) -> Mapping[str, Sequence[Tensor]]:
        return {}

    def hidden_bytes(self) -> int:
        return 0


class CountedLoop(_ShowsAll, PacelineLoop):
    pass


class _Plain(_ShowsAll, PlainLoop):
    pass


class _Ddp(_Plain):
    def __init__(self, workload: Workload) -> None:
        self._wrapped = DistributedDataParallel(workload.build())
        super().__init__(self._wrapped, workload, batches=1)

    def hidden_bytes(self) -> int:
        """The reducer's buckets, which it shows as copies."""
        return sum(bucket.buffer().nbytes for bucket in self._wrapped.reducer._get_zeros_like_grad_buckets())


class _DeepSpeed(_Plain):
    def __init__(self, workload: Workload, stage: int) -> None:
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
        super().__init__(model, workload, batches=1)
        self._optimizer = self._deepspeed.optimizer

    def forward(self) -> Tensor:
        self.inputs = inputs, targets = next(self._batches)
        return self._workload.loss(self._deepspeed(inputs), targets)

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
