"""Optimizers by transformers' names, with two groups of parameters: those that decay and those that don't.

decays              weights of linear, convolution and embedding layers …
does not            biases, everything in a LayerNorm, everything whose name says norm
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from paceline.errors import ConfigError
from paceline.input_file import cause_of
from paceline.trainer.argument_fields import OptimizerNames
from paceline.trainer.argument_parsing import optimizer_options
from paceline.trainer.training_arguments import TrainingArguments

_NEVER_DECAYS = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.|_)norm(?:$|\.)", re.IGNORECASE)


def make_optimizer(
    model: nn.Module, arguments: TrainingArguments, named: tuple[Callable[..., Optimizer], dict[str, Any]] | None = None
) -> Optimizer:
    """The optimizer that the arguments name, or the class that is `named` with its options, over what is trained."""
    decaying = set(decaying_names(model))
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for name, p in trained if name in decaying], "weight_decay": arguments.weight_decay},
        {"params": [p for name, p in trained if name not in decaying], "weight_decay": 0.0},
    ]
    if not trained:
        raise ConfigError(
            f"{type(model).__name__} has no parameter to train: all have requires_grad=False, or none is there"
        )
    groups = [group for group in groups if group["params"]]
    if named is not None:
        return named[0](groups, **named[1])
    kind, options = _KINDS[arguments.optim]
    more = optimizer_options(arguments.optim_args)
    if arguments.optim in (OptimizerNames.ADAMW_TORCH, OptimizerNames.ADAMW_TORCH_FUSED):
        options = options | {
            "betas": (arguments.adam_beta1, arguments.adam_beta2),
            "eps": arguments.adam_epsilon,
        }
    try:
        return kind(groups, lr=arguments.learning_rate, **(options | more))
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


_KINDS: dict[OptimizerNames, tuple[Callable[..., Optimizer], dict[str, Any]]] = {
    OptimizerNames.ADAMW_TORCH: (torch.optim.AdamW, {"fused": False}),
    OptimizerNames.ADAMW_TORCH_FUSED: (torch.optim.AdamW, {"fused": True}),
    OptimizerNames.SGD: (torch.optim.SGD, {}),
    OptimizerNames.ADAGRAD: (torch.optim.Adagrad, {}),
    OptimizerNames.RMSPROP: (torch.optim.RMSprop, {}),
}
