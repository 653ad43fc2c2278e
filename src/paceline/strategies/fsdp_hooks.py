"""Hooks on parameters: torch's `fully_shard` puts other tensors in the modules, and would lose them without a word."""

from __future__ import annotations

from collections.abc import Iterable

from torch.nn import Parameter

from paceline.errors import ConfigError


def check_no_gradient_hooks(named: Iterable[tuple[str, Parameter]]) -> None:
    for name, parameter in named:
        kinds = {
            "register_hook": "_backward_hooks",
            "register_post_accumulate_grad_hook": "_post_accumulate_grad_hooks",
        }
        for kind, kept_in in kinds.items():
            if getattr(parameter, kept_in, None):
                raise ConfigError(
                    f"parameter {name!r} has a hook ({kind}), which would never see its gradient under strategy='fsdp' "
                    "and 'hybrid': modules compute with weights that are gathered, and rows get the sum of all lanes. "
                    "Remove it, or use strategy='zero3', where hooks on parameters work"
                )
