"""The fields of transformers' TrainingArguments that paceline knows and does not honour: set one, and it says why.

Nothing is ignored in silence. Each field keeps transformers' default, so that callbacks may read it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paceline.errors import ConfigError
from paceline.trainer.honoured_fields import setting

_HUB = "nothing is uploaded from a training run; use huggingface_hub on the saved folder"
_LOG_LEVELS = "paceline prints, it does not log; warnings are Python's own"
_TRACKIO = "there is no trackio report; report_to knows tensorboard, wandb, mlflow, prometheus"
_DDP = "gradients are summed by paceline, not by DistributedDataParallel"
_FULL_EVAL = "evaluation computes in the precision of training; use bf16 or fp16"


@dataclass
class RefusedFields:
    optim_target_modules: list[str] | None = setting(None, "GaLore and APOLLO are not here; give optimizers=")
    bf16_full_eval: bool = setting(False, _FULL_EVAL)
    fp16_full_eval: bool = setting(False, _FULL_EVAL)
    use_liger_kernel: bool = setting(False, "patch the model before you give it to the Trainer")
    liger_kernel_config: dict[str, Any] | str | None = setting(
        None, "patch the model before you give it to the Trainer"
    )
    neftune_noise_alpha: float | None = setting(None, "register a forward hook on the embedding that adds the noise")
    auto_find_batch_size: bool = setting(
        False, "the batch size is part of the job, for life; `paceline doctor` tells what fits"
    )
    logging_nan_inf_filter: bool = setting(
        False, "a loss that is NaN or infinite is never smoothed away; on_nonfinite says what happens"
    )
    log_level: str = setting("passive", _LOG_LEVELS)
    log_level_replica: str = setting("warning", _LOG_LEVELS)
    project: str = setting("huggingface", _TRACKIO)
    trackio_space_id: str | None = setting(None, _TRACKIO)
    trackio_bucket_id: str | None = setting(None, _TRACKIO)
    trackio_static_space_id: str | None = setting(None, _TRACKIO)
    eval_do_concat_batches: bool = setting(True, "the cut into batches would depend on the number of workers")
    eval_use_gather_object: bool = setting(False, "objects would travel by pickle; return tensors")
    save_on_each_node: bool = setting(False, "a checkpoint is one folder that all hosts see")
    push_to_hub: bool = setting(False, _HUB)
    hub_token: str | None = setting(None, _HUB)
    hub_private_repo: bool | None = setting(None, _HUB)
    hub_model_id: str | None = setting(None, _HUB)
    hub_strategy: str = setting("every_save", _HUB)
    hub_always_push: bool = setting(False, _HUB)
    hub_revision: str | None = setting(None, _HUB)
    ignore_data_skip: bool = setting(False, "resuming costs nothing: the place in the data is one number")
    accelerator_config: dict[str, Any] | str | None = setting(
        None, "there is no Accelerate below; the Engine deals the data"
    )
    parallelism_config: Any = setting(None, "data parallel only; strategy= says how")
    ddp_find_unused_parameters: bool | None = setting(None, "unused parameters are found by themselves")
    ddp_broadcast_buffers: bool | None = setting(None, "buffers are those of the lowest lane, on every worker")
    ddp_static_graph: bool | None = setting(None, _DDP)
    debug: str = setting("", "a NaN is found by on_nonfinite, at the step and lane where it is")
    skip_memory_metrics: bool = setting(True, "peak memory is in every log line already")


def check_refused(arguments: RefusedFields) -> None:
    """Raise for the first field that is set to something."""
    for name, known in RefusedFields.__dataclass_fields__.items():
        value = getattr(arguments, name)
        if value != known.default:
            raise ConfigError(f"{name}={value!r} is not honoured here: {known.metadata['help']}")
