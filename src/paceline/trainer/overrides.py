"""What a subclass of the Trainer may override, and what of transformers' Trainer has no counterpart here.

    class Mine(Trainer):
        def training_step(self, model, inputs, num_items_in_batch=None): …      called, for every micro-batch
        def _inner_training_loop(self, *args, **kwargs): …                       refused when a Mine is made

A method that the Trainer would never call is the worst kind of wrong: training runs, with other numbers than its author
thinks. So every method of transformers' Trainer is either called here, with its documented meaning, or stands in
`NEVER_CALLED` with what to write instead, and a subclass that overrides it is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from paceline.errors import ConfigError, LoopError
from paceline.torch_compat import version_of

if TYPE_CHECKING:
    from paceline.trainer.trainer import Trainer

_LOOP = "the loop is the Engine's; use a callback, or override training_step"
_STATE = (
    "checkpoints hold it in parts, from all workers; give the callback that owns it a state(), or override save_model"
)
_ACCELERATE = "there is no Accelerate below; TrainingArguments say how work is shared"
_PARALLEL = "data parallel only; strategy= says how"
_SEARCH = "there is no hyperparameter search; start one run for each trial"
_HUB = "nothing is uploaded during a run; call push_to_hub() after it"
_FLOPS = "operations are not summed up in total_flos; mfu is in every log"
_CLIP = "the gradient of the global batch is clipped by the Engine: set max_grad_norm"
_WRAP = "the model is never wrapped; the Engine prepares it"

_SETTINGS = ("split_batches", "dispatch_batches", "even_batches", "use_seedable_sampler", "non_blocking")

NEVER_CALLED = {
    "_inner_training_loop": _LOOP,
    "_run_epoch": _LOOP,
    "_init_training_state": _LOOP,
    "_prepare_for_training": _LOOP,
    "_finalize_training": "use a callback's on_train_end",
    "_maybe_log_save_evaluate": "set control.should_log, should_evaluate and should_save in a callback",
    "set_initial_training_values": "set num_train_epochs or max_steps",
    "get_total_train_batch_size": "set per_device_train_batch_size, gradient_accumulation_steps and lanes",
    "end": "use a callback's on_train_end",
    "_evaluate": "override evaluate",
    "prediction_loop": "override evaluation_loop",
    "_get_dataloader": "override get_train_dataloader or get_eval_dataloader",
    "num_examples": "it is the length of the dataset",
    "num_tokens": "set include_num_input_tokens_seen",
    "_track_num_input_tokens": "set include_num_input_tokens_seen",
    "_clip_grad_norm": _CLIP,
    "_get_grad_norm": _CLIP,
    "_mixed_mesh_grad_norm": _PARALLEL,
    "_has_mixed_mesh_grads": _PARALLEL,
    "_prepare_context_parallel_inputs": _PARALLEL,
    "_sync_replicated_trainable_parameters": _PARALLEL,
    "get_sp_size": _PARALLEL,
    "get_cp_size": _PARALLEL,
    "get_tp_size": _PARALLEL,
    "_wrap_model": _WRAP,
    "_move_model_to_device": _WRAP,
    "create_accelerator_and_postprocess": _ACCELERATE,
    "_build_accelerator_args": _ACCELERATE,
    "_validate_args": "check them in your __init__",
    "_update_auto_batch_size": "auto_find_batch_size sets per_device_train_batch_size",
    "_save_optimizer_and_scheduler": _STATE,
    "_save_rng_state": _STATE,
    "_save_scaler": _STATE,
    "_load_from_checkpoint": _STATE,
    "_load_optimizer_and_scheduler": _STATE,
    "_load_rng_state": _STATE,
    "_load_scaler": _STATE,
    "_load_callback_state": _STATE,
    "_issue_warnings_after_load": "a state that does not fit is an error",
    "_get_output_dir": "set output_dir",
    "floating_point_ops": _FLOPS,
    "store_flos": _FLOPS,
    "_push_from_checkpoint": _HUB,
    "_finish_current_push": _HUB,
    "_hp_search_setup": _SEARCH,
    "_report_to_hp_search": _SEARCH,
    "_tune_save_checkpoint": _SEARCH,
}
"""Methods of transformers' Trainer that have no place in this one, and what to write instead."""


def check_overrides(kind: type, base: type) -> None:
    """Raise for the first method of a subclass that would never be called."""
    for owner in kind.__mro__[: kind.__mro__.index(base)]:
        for name in vars(owner):
            if name in NEVER_CALLED:
                raise ConfigError(
                    f"{owner.__name__}.{name} would never be called by paceline's Trainer: {NEVER_CALLED[name]}"
                )


def overrides(trainer: Trainer, name: str, base: type) -> bool:
    """Whether this Trainer has a method of that name of its own, by its class or on the object."""
    return name in vars(trainer) or getattr(type(trainer), name) is not getattr(base, name)


@contextmanager
def refusing_plain_backward(model: nn.Module) -> Iterator[None]:
    """While a training_step of a subclass runs: `loss.backward()` would add to this worker's gradient alone."""
    plain = Tensor.backward

    def checked(loss: Tensor, *positional: Any, **named: Any) -> None:
        before = _gradients(model)
        plain(loss, *positional, **named)  # type: ignore[no-untyped-call]
        if _gradients(model) != before:
            raise LoopError(
                "training_step called loss.backward(), whose gradient no other worker would get; add the losses of the "
                "micro-batch up and call self.accelerator.backward(loss) once"
            )

    Tensor.backward = checked  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        Tensor.backward = plain  # type: ignore[method-assign]


def _gradients(model: nn.Module) -> list[tuple[int, int]]:
    grads = [parameter.grad for parameter in model.parameters()]
    return [(0, 0) if grad is None else (id(grad), version_of(grad)) for grad in grads]


class TrainerAccelerator:
    """`trainer.accelerator`, for methods that were written for transformers' Trainer: its Engine, by another name.

    `backward` weighs the loss as the Trainer does: by the labels of the micro-batch that it belongs to.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def backward(self, loss: Tensor, **options: Any) -> None:
        if options:
            raise ConfigError(f"accelerator.backward: {', '.join(options)} has no meaning here; leave it out")
        self._trainer.backward(loss)

    def unwrap_model(self, model: nn.Module, **options: Any) -> nn.Module:
        """The model inside what torch wraps one in."""
        inner: nn.Module = getattr(model, "_orig_mod", model)
        return inner.module if isinstance(inner, nn.DataParallel | nn.parallel.DistributedDataParallel) else inner

    @property
    def gradient_state(self) -> GradientState:
        settings, steps = self._trainer.args.accelerator_settings, self._trainer.args.gradient_accumulation_steps
        given = {**settings.gradient_accumulation_kwargs, "num_steps": steps}
        return GradientState(steps, self.sync_gradients, given)

    def __getattr__(self, name: str) -> Any:
        """What accelerator_config says, or the Engine's."""
        owner = self._trainer.args.accelerator_settings if name in _SETTINGS else self._trainer.engine
        return getattr(owner, name)


@dataclass(frozen=True)
class GradientState:
    """How gradients are accumulated, by Accelerate's names."""

    num_steps: int
    sync_gradients: bool
    plugin_kwargs: dict[str, Any]
