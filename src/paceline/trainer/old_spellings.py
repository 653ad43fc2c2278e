"""Names that transformers has given up, accepted with one line that says today's.

TrainingArguments(evaluation_strategy="steps")     UserWarning: evaluation_strategy is called eval_strategy now
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

_RENAMED = {
    "evaluation_strategy": "eval_strategy",
    "no_cuda": "use_cpu",
    "per_gpu_train_batch_size": "per_device_train_batch_size",
    "per_gpu_eval_batch_size": "per_device_eval_batch_size",
    "warmup_ratio": "warmup_steps",
    "torchdynamo": "torch_compile_backend",
    "include_inputs_for_metrics": "include_for_metrics",
    "include_tokens_per_second": "include_num_input_tokens_seen",
    "group_by_length": "train_sampling_strategy",
    "push_to_hub_token": "hub_token",
    "push_to_hub_model_id": "hub_model_id",
}

_VALUES: dict[str, Callable[[Any], Any]] = {
    "include_inputs_for_metrics": lambda on: ["inputs"] if on else [],
    "include_tokens_per_second": lambda on: "all" if on else "no",
    "group_by_length": lambda on: "group_by_length" if on else "random",
}

_GONE = {
    "logging_dir": "logs go to output_dir",
    "local_rank": "the launcher says who this worker is",
    "jit_mode_eval": "use torch_compile",
    "use_ipex": "torch has what it had",
    "use_mps_device": "an accelerator that is there is used",
    "fp16_backend": "there is one way to compute in fp16",
    "fp16_opt_level": "there is one way to compute in fp16",
    "half_precision_backend": "there is one way to compute in low precision",
    "save_safetensors": "checkpoints are always safetensors",
    "dispatch_batches": "every worker fetches its own samples",
    "split_batches": "the batch size is per lane",
    "past_index": "no state is carried from batch to batch",
    "mp_parameters": "there is no SageMaker model parallel",
    "ray_scope": "there is no hyperparameter search",
    "tpu_num_cores": "there are no TPUs",
    "tpu_metrics_debug": "there are no TPUs",
    "fsdp_min_num_params": "units are the model's blocks",
    "fsdp_transformer_layer_cls_to_wrap": "units are the model's blocks",
}

KNOWN = frozenset(_RENAMED) | frozenset(_GONE)


def todays(given: Mapping[str, Any], *, stacklevel: int = 3) -> dict[str, Any]:
    """The same arguments under today's names."""
    out: dict[str, Any] = {}
    for name, value in given.items():
        if name in _GONE:
            warnings.warn(f"{name} is gone and has no effect: {_GONE[name]}", stacklevel=stacklevel)
        elif name in _RENAMED:
            new = _RENAMED[name]
            value = _VALUES.get(name, lambda same: same)(value)
            wins = not _says_something(new, given)
            taken = f"it is taken as {new}={value!r}" if wins else f"{new}={given[new]!r} is given too, and is taken"
            warnings.warn(f"{name} is called {new} now; {taken}", stacklevel=stacklevel)
            if value is not None and wins:
                out[new] = value
        else:
            out.setdefault(name, value)
    return out


def _says_something(new: str, given: Mapping[str, Any]) -> bool:
    """No steps of warm-up leave it to the ratio, as transformers has it."""
    return new in given and not (new == "warmup_steps" and given[new] in (None, 0, "0"))
