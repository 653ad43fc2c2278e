"""The small vocabularies of TrainingArguments: when something happens, and how the work is spread."""

from __future__ import annotations

import enum
from typing import TypeVar

from paceline.errors import ConfigError

_E = TypeVar("_E", bound=enum.StrEnum)


class IntervalStrategy(enum.StrEnum):
    """When to log or evaluate."""

    NO = "no"
    STEPS = "steps"
    EPOCH = "epoch"


class SaveStrategy(enum.StrEnum):
    """When to save."""

    NO = "no"
    STEPS = "steps"
    EPOCH = "epoch"
    BEST = "best"


class SchedulerType(enum.StrEnum):
    """How the learning rate moves; `schedules.py` has the curves."""

    LINEAR = "linear"
    COSINE = "cosine"
    COSINE_WITH_RESTARTS = "cosine_with_restarts"
    POLYNOMIAL = "polynomial"
    CONSTANT = "constant"
    CONSTANT_WITH_WARMUP = "constant_with_warmup"
    INVERSE_SQRT = "inverse_sqrt"
    REDUCE_ON_PLATEAU = "reduce_lr_on_plateau"
    COSINE_WITH_MIN_LR = "cosine_with_min_lr"
    COSINE_WARMUP_WITH_MIN_LR = "cosine_warmup_with_min_lr"
    WARMUP_STABLE_DECAY = "warmup_stable_decay"


class OptimizerNames(enum.StrEnum):
    """Who updates; `optimizers.py` makes them."""

    ADAMW_TORCH = "adamw_torch"
    ADAMW_TORCH_FUSED = "adamw_torch_fused"
    SGD = "sgd"
    ADAGRAD = "adagrad"
    RMSPROP = "rmsprop"


class Sampling(enum.StrEnum):
    """The order of the training samples."""

    RANDOM = "random"
    SEQUENTIAL = "sequential"
    GROUP_BY_LENGTH = "group_by_length"


class ParallelMode(enum.Enum):
    """One process drives one device here: either it is alone, or it is one of several."""

    NOT_PARALLEL = "not_parallel"
    DISTRIBUTED = "distributed"


class DistributedType(enum.StrEnum):
    """What the devices of a job are."""

    NO = "NO"
    MULTI_CPU = "MULTI_CPU"
    MULTI_GPU = "MULTI_GPU"


def chosen(kind: type[_E], value: object, name: str) -> _E:
    """The member that `value` names; an enum of transformers will do."""
    text = value.value if isinstance(value, enum.Enum) else value
    try:
        return kind(str(text))
    except ValueError:
        known = ", ".join(member.value for member in kind)
        raise ConfigError(f"{name}={text!r} is not known here; choose one of {known}") from None
