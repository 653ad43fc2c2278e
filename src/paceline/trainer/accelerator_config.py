"""`accelerator_config`: what transformers' Trainer tells Accelerate about batches, and what of it there is here.

| key                                    | here                                                                        |
|----------------------------------------|-----------------------------------------------------------------------------|
| split_batches                          | batch sizes are those of all lanes together; each lane gets an equal part   |
| gradient_accumulation_kwargs.num_steps | gradient_accumulation_steps, where that is 1                                |
| even_batches                           | whatever it says, no sample is taken twice: lanes may be uneven             |
| use_seedable_sampler                   | whatever it says, the order follows from the seed                           |
| non_blocking                           | whatever it says, copies from pinned memory don't block                     |
| dispatch_batches, sync_each_batch      | one worker has none to send to, and none to wait for; refused with several  |
| use_configured_state                   | Accelerate's state has to be there, and say of this worker what we know     |

Two more keys of gradient_accumulation_kwargs, `adjust_scheduler` and `sync_with_dataloader`, do nothing in
transformers' Trainer, which accumulates by itself, and nothing here.
"""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass, field
from typing import Any

from paceline.errors import ConfigError

_ACCUMULATION = ("num_steps", "sync_each_batch", "adjust_scheduler", "sync_with_dataloader")


class ClassGivenError(ConfigError, NotImplementedError):
    """A class where an object of it belongs; scripts that were written for transformers expect NotImplementedError."""


@dataclass(frozen=True)
class AcceleratorConfig:
    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = True
    non_blocking: bool = False
    gradient_accumulation_kwargs: dict[str, Any] = field(default_factory=dict)
    use_configured_state: bool = False

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name != "gradient_accumulation_kwargs" and not isinstance(value, bool | None):
                raise ConfigError(f"accelerator_config: {name}={value!r}: expected true or false")
        if self.use_configured_state and not _configured_state():
            raise ConfigError(
                "accelerator_config: use_configured_state=True, but there is no state of Accelerate; make an "
                "Accelerator() or PartialState() before TrainingArguments, or leave it out"
            )
        if unknown := [name for name in self.gradient_accumulation_kwargs if name not in _ACCUMULATION]:
            raise ConfigError(
                f"accelerator_config: gradient_accumulation_kwargs has no {unknown[0]!r}; it has "
                f"{', '.join(_ACCUMULATION)}"
            )
        steps = self.gradient_accumulation_kwargs.get("num_steps", 1)
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
            raise ConfigError(f"accelerator_config: num_steps={steps!r}: expected a whole number from 1 on")

    @classmethod
    def of(cls, given: dict[str, Any] | None) -> AcceleratorConfig:
        known = [item.name for item in dataclasses.fields(cls)]
        if unknown := [name for name in given or {} if name not in known]:
            raise ConfigError(f"accelerator_config has no {unknown[0]!r}; it has {', '.join(known)}")
        named = {name: value for name, value in (given or {}).items() if value is not None}
        return cls(**named)

    def accumulation(self, given: int) -> int:
        """Micro-batches per lane and step, where the arguments say `given`."""
        wanted: int = self.gradient_accumulation_kwargs.get("num_steps", given)
        if given not in (1, wanted):
            raise ConfigError(
                f"The `AcceleratorConfig`'s `num_steps` is set but gradient_accumulation_steps={given} is too; say it "
                "once"
            )
        return wanted

    def check_worker(self, rank: int, workers: int) -> None:
        """That what is said about the exchange between processes is true of this worker, one of several."""
        state = _configured_state() if self.use_configured_state else {"num_processes": workers, "process_index": rank}
        theirs = state.get("num_processes", 1), state.get("process_index", 0)
        if theirs != (workers, rank):
            raise ConfigError(
                f"accelerator_config: use_configured_state=True, but Accelerate's state is of process {theirs[1]} of "
                f"{theirs[0]}, and this is worker {rank} of {workers}; start the script with one launcher"
            )
        if workers > 1 and self.dispatch_batches:
            raise ConfigError(
                f"accelerator_config: dispatch_batches=True with {workers} workers: each fetches its own samples; "
                "leave it out"
            )
        if workers > 1 and self.gradient_accumulation_kwargs.get("sync_each_batch"):
            raise ConfigError(
                f"accelerator_config: sync_each_batch=True with {workers} workers: gradients travel once a step; set "
                "strategy='zero2' to hold only a part of them"
            )

    def lane_batch_size(self, given: int, lanes: int) -> int:
        """Samples of one lane's micro-batch, where the arguments say `given`."""
        if not self.split_batches:
            return given
        if given % lanes:
            raise ConfigError(
                f"accelerator_config: split_batches=True shares a batch of {given} among {lanes} lanes, which does not "
                "come out even; choose a multiple"
            )
        return given // lanes


def _configured_state() -> dict[str, Any]:
    """What Accelerate knows of this process, where a script has asked it."""
    state = sys.modules.get("accelerate.state")
    return {} if state is None else dict(state.PartialState._shared_state)
