"""Optimizers and learning-rate schedules by transformers' names.

An optimizer has two groups of parameters: weight decay applies to the weights of linear, convolution and embedding
layers, and not to biases, nor to anything in a LayerNorm or whose name says norm.

The learning rate of a step is its highest value times a factor of the step's number:

    factor
      1 ┤    ╭──────╮                linear, cosine …     warm-up in a line, then down
        │   ╱        ╲               constant             no warm-up, no way down
      0 ┼──╱          ╲──            reduce_lr_on_plateau and greedy look at evaluations instead
        0  warm-up    steps

The factors are those of transformers for the same names, so that a run that moves over sees the same rates.
"""

from __future__ import annotations

import importlib
import inspect
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

from paceline.errors import ConfigError
from paceline.input_file import cause_of
from paceline.trainer.argument_fields import OptimizerNames, SchedulerType, chosen
from paceline.trainer.argument_parsing import optimizer_options
from paceline.trainer.training_arguments import TrainingArguments

Scheduler = LambdaLR | ReduceLROnPlateau | Any  # the last: GreedyLR, of transformers

# -- optimizers -------------------------------------------------------------------------------------------------------

_NEVER_DECAYS = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.|_)norm(?:$|\.)", re.IGNORECASE)
_KINDS: dict[OptimizerNames, tuple[str, dict[str, Any]]] = {
    OptimizerNames.ADAMW_TORCH: ("torch.optim.AdamW", {"fused": False}),
    OptimizerNames.ADAMW_TORCH_FUSED: ("torch.optim.AdamW", {"fused": True}),
    OptimizerNames.SGD: ("torch.optim.SGD", {}),
    OptimizerNames.ADAGRAD: ("torch.optim.Adagrad", {}),
    OptimizerNames.RMSPROP: ("torch.optim.RMSprop", {}),
    OptimizerNames.ADAFACTOR: ("transformers.Adafactor", {"scale_parameter": False, "relative_step": False}),
    OptimizerNames.ADAM: ("torch.optim.Adam", {}),
    OptimizerNames.ADADELTA: ("torch.optim.Adadelta", {}),
    OptimizerNames.ADAMAX: ("torch.optim.Adamax", {}),
    OptimizerNames.ASGD: ("torch.optim.ASGD", {}),
    OptimizerNames.MUON: ("torch.optim.Muon", {}),
    OptimizerNames.NADAM: ("torch.optim.NAdam", {}),
    OptimizerNames.RADAM: ("torch.optim.RAdam", {}),
    OptimizerNames.RPROP: ("torch.optim.Rprop", {}),
}
_TAKES_BETAS = ("Adam", "AdamW", "Adamax", "NAdam", "RAdam")


def optimizer_class(arguments: TrainingArguments) -> tuple[Callable[..., Optimizer], dict[str, Any]]:
    """What `optim` names, and the options that the arguments give it."""
    path, options = _KINDS[arguments.optim]
    module, name = path.rsplit(".", 1)
    try:
        kind = getattr(importlib.import_module(module), name)
    except ImportError:
        raise ConfigError(f"optim={arguments.optim.value!r} needs a package that is not installed: {module}") from None
    options = {"lr": arguments.learning_rate} | options
    if name in _TAKES_BETAS:
        options |= {"betas": (arguments.adam_beta1, arguments.adam_beta2), "eps": arguments.adam_epsilon}
    if name == "Rprop":  # it moves by signs, and knows no decay
        check_no_decay(arguments)
    return kind, options | optimizer_options(arguments.optim_args)


def check_no_decay(arguments: TrainingArguments) -> None:
    if arguments.weight_decay:
        raise ConfigError(f"optim={arguments.optim.value!r} has no weight decay; set weight_decay=0")


def make_optimizer(
    model: nn.Module,
    arguments: TrainingArguments,
    kind: Callable[..., Optimizer],
    options: Mapping[str, Any],
    decaying: Sequence[str],
) -> Optimizer:
    """The optimizer over what is trained; weight decay is for the parameters of these names."""
    decays = set(decaying)
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for name, p in trained if name in decays], "weight_decay": arguments.weight_decay},
        {"params": [p for name, p in trained if name not in decays], "weight_decay": 0.0},
    ]
    if not trained:
        raise ConfigError(
            f"{type(model).__name__} has no parameter to train: all have requires_grad=False, or none is there"
        )
    try:
        return kind([group for group in groups if group["params"]], **options)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"optim={arguments.optim.value!r} with optim_args={arguments.optim_args!r}: {cause_of(error)}"
        ) from error


def decaying_names(model: nn.Module) -> Iterator[str]:
    """The names of parameters that weight decay applies to."""
    for path, module in model.named_modules():
        for name, _ in module.named_parameters(recurse=False):
            full = f"{path}.{name}".lstrip(".")
            if not isinstance(module, nn.LayerNorm) and not _NEVER_DECAYS.search(full):
                yield full


# -- schedules -------------------------------------------------------------------------------------------------------

_SHAPES: dict[str, Callable[[float], float]] = {
    "linear": lambda done: 1 - done,
    "cosine": lambda done: (1 + math.cos(math.pi * done)) / 2,
    "1-sqrt": lambda done: 1 - math.sqrt(done),
}


def get_scheduler(
    name: str,
    optimizer: Optimizer,
    num_warmup_steps: int = 0,
    num_training_steps: int = 1,
    scheduler_specific_kwargs: Mapping[str, Any] | None = None,
) -> Scheduler:
    """The scheduler of that name, with what else `lr_scheduler_kwargs` says."""
    kind, more = chosen(SchedulerType, name, "lr_scheduler_type"), dict(scheduler_specific_kwargs or {})
    if kind is SchedulerType.REDUCE_ON_PLATEAU:
        _check_kwargs(kind, ReduceLROnPlateau, more, given=("self", "optimizer"))
        return ReduceLROnPlateau(optimizer, **more)
    if kind is SchedulerType.GREEDY:
        return _greedy(kind, optimizer, more)
    factor = _FACTORS[kind]
    highest = float(optimizer.defaults["lr"])
    all_known = {"num_warmup_steps": num_warmup_steps, "num_training_steps": num_training_steps, "lr_init": highest}
    known = {key: value for key, value in all_known.items() if key in inspect.signature(factor).parameters}
    _check_kwargs(kind, factor, more, given=("step", *known))
    try:
        factor(0, **known, **more)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"lr_scheduler_type={kind.value!r}: {error}") from error
    # A partial: its values are the job's arguments, and are not overwritten by those of a saved state.
    return LambdaLR(optimizer, partial(factor, **known, **more))


def _greedy(kind: SchedulerType, optimizer: Optimizer, more: dict[str, Any]) -> Any:
    try:
        from transformers.optimization import GreedyLR
    except ImportError:
        raise ConfigError("lr_scheduler_type='greedy' needs a package that is not installed: transformers") from None
    _check_kwargs(kind, GreedyLR, more, given=("self", "optimizer"))
    return GreedyLR(optimizer, **more)


def looks_at_metrics(scheduler: Any) -> bool:
    """Whether its step() takes the metric of an evaluation."""
    return isinstance(scheduler, ReduceLROnPlateau) or is_greedy(scheduler)


def is_greedy(scheduler: Any) -> bool:
    """The one scheduler that is not torch's: the Engine does not know it, and the Trainer saves its state."""
    return type(scheduler).__name__ == "GreedyLR"


def reach(scheduler: Any, steps: int) -> None:
    """Let a schedule of ours end after so many steps; the warm-up stays what it was."""
    if isinstance(scheduler, LambdaLR):
        scheduler.lr_lambdas = [
            partial(factor, num_training_steps=steps)
            if isinstance(factor, partial) and "num_training_steps" in factor.keywords
            else factor
            for factor in scheduler.lr_lambdas
        ]


def _check_kwargs(
    kind: SchedulerType, factor: Callable[..., Any], more: Mapping[str, Any], given: tuple[str, ...]
) -> None:
    known = [name for name in inspect.signature(factor).parameters if name not in given]
    for name in more:
        if name not in known:
            raise ConfigError(
                f"lr_scheduler_kwargs: {kind.value!r} does not take {name!r}; it takes {', '.join(known) or 'nothing'}"
            )


# -- factors ---------------------------------------------------------------------------------------------------------


def _rising(step: int, num_warmup_steps: int) -> float:
    return step / max(1, num_warmup_steps)


def _done(step: int, num_warmup_steps: int, num_training_steps: int) -> float:
    """The part of the way after the warm-up."""
    return (step - num_warmup_steps) / max(1, num_training_steps - num_warmup_steps)


def constant(step: int) -> float:
    return 1.0


def constant_with_warmup(step: int, num_warmup_steps: int) -> float:
    return _rising(step, num_warmup_steps) if step < num_warmup_steps else 1.0


def linear(step: int, num_warmup_steps: int, num_training_steps: int) -> float:
    return (
        _rising(step, num_warmup_steps)
        if step < num_warmup_steps
        else max(0.0, 1 - _done(step, num_warmup_steps, num_training_steps))
    )


def cosine(step: int, num_warmup_steps: int, num_training_steps: int, num_cycles: float = 0.5) -> float:
    if step < num_warmup_steps:
        return _rising(step, num_warmup_steps)
    return max(0.0, (1 + math.cos(2 * math.pi * num_cycles * _done(step, num_warmup_steps, num_training_steps))) / 2)


def cosine_with_restarts(step: int, num_warmup_steps: int, num_training_steps: int, num_cycles: int = 1) -> float:
    if step < num_warmup_steps:
        return _rising(step, num_warmup_steps)
    done = _done(step, num_warmup_steps, num_training_steps)
    return 0.0 if done >= 1 else (1 + math.cos(math.pi * (num_cycles * done % 1.0))) / 2


def polynomial(
    step: int, num_warmup_steps: int, num_training_steps: int, lr_init: float, lr_end: float = 1e-7, power: float = 1.0
) -> float:
    if lr_end >= lr_init:
        raise ValueError(f"lr_end={lr_end} is not below the learning rate {lr_init}")
    if step < num_warmup_steps:
        return _rising(step, num_warmup_steps)
    left = 1 - min(1.0, _done(step, num_warmup_steps, num_training_steps))
    return float(((lr_init - lr_end) * left**power + lr_end) / lr_init)


def inverse_sqrt(step: int, num_warmup_steps: int, timescale: int | None = None) -> float:
    if step < num_warmup_steps:
        return _rising(step, num_warmup_steps)
    timescale = timescale or num_warmup_steps or 10_000
    return math.sqrt(timescale / (step + timescale - num_warmup_steps))


def cosine_with_min_lr(
    step: int,
    num_warmup_steps: int,
    num_training_steps: int,
    lr_init: float,
    num_cycles: float = 0.5,
    min_lr: float | None = None,
    min_lr_rate: float | None = None,
) -> float:
    least = _least(lr_init, min_lr, min_lr_rate)
    if step < num_warmup_steps:
        return _rising(step, num_warmup_steps)
    wave = (1 + math.cos(2 * math.pi * num_cycles * _done(step, num_warmup_steps, num_training_steps))) / 2
    return max(0.0, wave * (1 - least) + least)


def cosine_warmup_with_min_lr(
    step: int,
    num_warmup_steps: int,
    num_training_steps: int,
    lr_init: float,
    num_cycles: float = 0.5,
    min_lr: float | None = None,
    min_lr_rate: float | None = None,
    warmup_lr_rate: float | None = None,
) -> float:
    """Its warm-up begins above zero, and each step counts as done when it begins."""
    least = _least(lr_init, min_lr, min_lr_rate)
    if step < num_warmup_steps and warmup_lr_rate is None:
        return (step + 1) / max(1, num_warmup_steps)
    if step < num_warmup_steps:
        assert warmup_lr_rate is not None
        return warmup_lr_rate + (1 - warmup_lr_rate) * step / max(1, num_warmup_steps - 1)
    wave = (1 + math.cos(2 * math.pi * num_cycles * _done(step + 1, num_warmup_steps, num_training_steps))) / 2
    return max(0.0, wave * (1 - least) + least)


def _least(lr_init: float, min_lr: float | None, min_lr_rate: float | None) -> float:
    if (min_lr is None) == (min_lr_rate is None):
        raise ValueError("give one of min_lr and min_lr_rate in lr_scheduler_kwargs")
    return min_lr / lr_init if min_lr is not None else float(min_lr_rate or 0.0)


def warmup_stable_decay(
    step: int,
    num_warmup_steps: int,
    num_training_steps: int,
    num_decay_steps: int,
    num_stable_steps: int | None = None,
    warmup_type: str = "linear",
    decay_type: str = "cosine",
    min_lr_ratio: float = 0.0,
    num_cycles: float = 0.5,
) -> float:
    for name in (warmup_type, decay_type):
        if name not in _SHAPES:
            raise ValueError(f"{name!r} is no shape; choose {', '.join(_SHAPES)}")
    stable = num_training_steps - num_warmup_steps - num_decay_steps if num_stable_steps is None else num_stable_steps
    if step < num_warmup_steps:
        factor = _SHAPES[warmup_type](1 - _rising(step, num_warmup_steps))
    elif step < num_warmup_steps + stable:
        return 1.0
    elif step < num_warmup_steps + stable + num_decay_steps:
        done = (step - num_warmup_steps - stable) / max(1, num_decay_steps)
        factor = _SHAPES[decay_type](done * 2 * num_cycles if decay_type == "cosine" else done)
    else:
        return min_lr_ratio
    return max(0.0, factor * (1 - min_lr_ratio) + min_lr_ratio)


_FACTORS: dict[SchedulerType, Callable[..., float]] = {
    SchedulerType.LINEAR: linear,
    SchedulerType.COSINE: cosine,
    SchedulerType.COSINE_WITH_RESTARTS: cosine_with_restarts,
    SchedulerType.POLYNOMIAL: polynomial,
    SchedulerType.CONSTANT: constant,
    SchedulerType.CONSTANT_WITH_WARMUP: constant_with_warmup,
    SchedulerType.INVERSE_SQRT: inverse_sqrt,
    SchedulerType.COSINE_WITH_MIN_LR: cosine_with_min_lr,
    SchedulerType.COSINE_WARMUP_WITH_MIN_LR: cosine_warmup_with_min_lr,
    SchedulerType.WARMUP_STABLE_DECAY: warmup_stable_decay,
}
