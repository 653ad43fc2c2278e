"""The fields of TrainingArguments, with transformers' names, meanings and defaults: those that are supported, and those
that are not.

A default that is not transformers' is marked in its help; the last supported group is paceline's own. Nothing is
ignored in silence: an unsupported field that is set is an error that says why. It keeps transformers' default, so that
callbacks may read it.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any, TypeVar

from paceline.errors import ConfigError

# -- the values that a field may have, by name ------------------------------------------------------------------------

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
    """How the learning rate moves; `optimization.py` has the curves."""

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
    GREEDY = "greedy"


LOOK_AT_METRICS = (SchedulerType.REDUCE_ON_PLATEAU, SchedulerType.GREEDY)
"""They move when the model was evaluated, not with every step."""


class OptimizerNames(enum.StrEnum):
    """Optimizers by name; `optimization.py` makes them."""

    ADAMW_TORCH = "adamw_torch"
    ADAMW_TORCH_FUSED = "adamw_torch_fused"
    SGD = "sgd"
    ADAGRAD = "adagrad"
    RMSPROP = "rmsprop"
    ADAFACTOR = "adafactor"
    ADAM = "adam"
    ADADELTA = "adadelta"
    ADAMAX = "adamax"
    ASGD = "asgd"
    MUON = "muon"
    NADAM = "nadam"
    RADAM = "radam"
    RPROP = "rprop"


class Sampling(enum.StrEnum):
    """The order of the training samples."""

    RANDOM = "random"
    SEQUENTIAL = "sequential"
    GROUP_BY_LENGTH = "group_by_length"


class HubStrategy(enum.StrEnum):
    """What push_to_hub=True uploads, and when."""

    END = "end"
    EVERY_SAVE = "every_save"
    CHECKPOINT = "checkpoint"
    ALL_CHECKPOINTS = "all_checkpoints"


class DebugOption(enum.StrEnum):
    """What is looked for while a model computes."""

    UNDERFLOW_OVERFLOW = "underflow_overflow"


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


# -- supported -------------------------------------------------------------------------------------------------------


def setting(default: Any, help: str) -> Any:
    """A field with its one-line help."""
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata={"help": help})
    return field(default=default, metadata={"help": help})


@dataclass
class _WhatIsTrained:
    output_dir: str = setting("trainer_output", "where checkpoints, logs and the arguments go")
    per_device_train_batch_size: int = setting(8, "samples of one lane's micro-batch; a worker starts with one lane")
    per_device_eval_batch_size: int = setting(8, "samples of one evaluation batch")
    auto_find_batch_size: bool = setting(False, "halve the batch size and start again when memory is short; one worker")
    gradient_accumulation_steps: int = setting(1, "micro-batches per lane and step")
    num_train_epochs: float = setting(3.0, "epochs, unless max_steps is given")
    max_steps: int = setting(-1, "steps in all; -1: num_train_epochs decides")
    seed: int = setting(42, "seed of weights made by model_init, of dropout and of the order of samples")
    data_seed: int | None = setting(None, "seed of the order of samples alone; default: seed")
    full_determinism: bool = setting(False, "deterministic algorithms; they are used in any case")
    use_cpu: bool = setting(False, "train on the CPU though there is an accelerator")


@dataclass
class _Optimization:
    learning_rate: float = setting(5e-5, "the highest of the schedule")
    lr_scheduler_type: SchedulerType = setting(SchedulerType.LINEAR, "the schedule of the learning rate, by name")
    lr_scheduler_kwargs: dict[str, Any] | str | None = setting(None, "more for the schedule, such as num_cycles")
    warmup_steps: float = setting(0, "steps of warm-up; below 1: a part of all steps")
    optim: OptimizerNames = setting(OptimizerNames.ADAMW_TORCH_FUSED, "the optimizer, by name")
    optim_args: str | None = setting(None, "more for the optimizer: name=value,name=value")
    weight_decay: float = setting(0.0, "applied to matrices; biases and norms never decay")
    adam_beta1: float = setting(0.9, "AdamW's decay of the mean gradient")
    adam_beta2: float = setting(0.999, "AdamW's decay of the mean squared gradient")
    adam_epsilon: float = setting(1e-8, "AdamW's term for numerical stability")
    max_grad_norm: float = setting(1.0, "the gradient of the global batch is clipped to it; 0: not at all")
    label_smoothing_factor: float = setting(0.0, "how much of each label is spread over all classes")
    chunked_loss: bool | None = setting(
        None, "a causal language model's logits are made some rows at a time, to save memory; default: on a GPU"
    )
    neftune_noise_alpha: float | None = setting(
        None, "NEFTune: noise of this size on the input embeddings, in training"
    )
    average_tokens_across_devices: bool = setting(True, "the loss is the mean over all tokens of a step, always")


@dataclass
class _Precision:
    bf16: bool = setting(False, "compute in bf16, keep fp32 master weights")
    fp16: bool = setting(False, "compute in fp16 with loss scaling, keep fp32 master weights")
    tf32: bool | None = setting(None, "fp32 matrix products on tensor cores; needs CUDA")
    gradient_checkpointing: bool = setting(False, "compute activations of blocks again in backward")
    gradient_checkpointing_kwargs: dict[str, Any] | str | None = setting(None, "every_n_layers, use_reentrant=False")
    torch_compile: bool = setting(False, "compile the model")
    torch_compile_backend: str | None = setting(None, "the compiler's backend; default: inductor")
    torch_compile_mode: str | None = setting(None, "the compiler's mode")
    debug: list[DebugOption] = setting([], "underflow_overflow: stop in the module that first gives NaN or infinity")
    torch_empty_cache_steps: int | None = setting(None, "give unused device memory back every so many steps")
    use_cache: bool = setting(False, "what a model with a config gets as config.use_cache")


@dataclass
class _Logging:
    logging_strategy: IntervalStrategy = setting(IntervalStrategy.STEPS, "when to log: no, steps, epoch")
    logging_steps: float = setting(500, "every so many steps; below 1: a part of all steps")
    logging_first_step: bool = setting(False, "log after the first step too")
    log_level: str = setting("passive", "of our messages: debug, info, warning, error, critical; passive: as it is")
    log_level_replica: str = setting("passive", "log_level of workers that don't log (transformers: warning)")
    log_on_each_node: bool = setting(True, "what args.should_log says to callbacks: the first worker of each host")
    include_num_input_tokens_seen: bool | str = setting("no", "count tokens: all, non_padding, no")
    skip_memory_metrics: bool = setting(True, "false: metrics tell how memory changed in init, train, eval, test")
    disable_tqdm: bool = setting(False, "no progress bar")
    report_to: list[str] = setting(
        ["none"], "tensorboard, wandb, mlflow, prometheus, kubeflow, all, none; in a TrainJob of Kubeflow always it"
    )
    run_name: str | None = setting(None, "name of the run in reports; default: output_dir")


@dataclass
class _Evaluation:
    eval_strategy: IntervalStrategy = setting(IntervalStrategy.NO, "when to evaluate: no, steps, epoch")
    eval_steps: float | None = setting(None, "every so many steps; default: logging_steps; below 1: a part of all")
    eval_delay: float = setting(0, "steps or epochs before the first evaluation")
    eval_on_start: bool = setting(False, "evaluate before the first step too")
    prediction_loss_only: bool = setting(False, "keep no predictions")
    eval_accumulation_steps: int | None = setting(None, "predictions move to the host every so many rounds")
    include_for_metrics: list[str] = setting([], "what compute_metrics gets besides: inputs, loss")
    batch_eval_metrics: bool = setting(False, "compute_metrics is called for each round, with compute_result=")
    eval_use_gather_object: bool = setting(False, "predictions may hold lists of plain values, one for each sample")
    label_names: list[str] | None = setting(None, "keys of a batch that are labels; default: labels")
    metric_for_best_model: str | None = setting(None, "a name among the metrics; default but for 'best': loss")
    greater_is_better: bool | None = setting(None, "default: true unless its name ends in loss")
    load_best_model_at_end: bool = setting(False, "end with the best weights")


@dataclass
class _Checkpoints:
    save_strategy: SaveStrategy = setting(SaveStrategy.STEPS, "when to save: no, steps, epoch, best")
    save_steps: float = setting(500, "every so many steps; below 1: a part of all steps")
    save_total_limit: int | None = setting(None, "keep the newest so many, and the best")
    save_only_model: bool = setting(False, "weights alone: small, but nothing can resume from them")
    resume_from_checkpoint: str | None = setting(None, "what train() resumes from: a folder, or True for the newest")
    restore_callback_states_from_checkpoint: bool = setting(
        True, "callbacks' states are restored too (transformers: False)"
    )
    enable_jit_checkpoint: bool = setting(False, "save on SIGTERM; done in any case")


@dataclass
class _Hub:
    push_to_hub: bool = setting(False, "upload what save_model() writes; needs hub_strategy='end'")
    hub_strategy: HubStrategy = setting(HubStrategy.EVERY_SAVE, "when push_to_hub uploads; end: with save_model()")
    hub_model_id: str | None = setting(None, "where trainer.push_to_hub() uploads to; default: output_dir's name")
    hub_token: str | None = setting(None, "what push_to_hub() signs in with; default: that of huggingface_hub")
    hub_private_repo: bool | None = setting(None, "whether a repository that push_to_hub() makes is private")
    hub_revision: str | None = setting(None, "the branch that push_to_hub() uploads to")


@dataclass
class _Data:
    dataloader_drop_last: bool = setting(
        False, "leave the short last step out, and the short last batch of an evaluation"
    )
    dataloader_num_workers: int = setting(0, "loader processes per worker")
    dataloader_pin_memory: bool = setting(True, "where there is an accelerator")
    dataloader_persistent_workers: bool = setting(False, "loader processes are kept between epochs")
    dataloader_prefetch_factor: int | None = setting(None, "batches ahead of each loader process")
    dataloader_multiprocessing_context: str | None = setting(None, "how loader processes start: fork, spawn, …")
    dataloader_in_order: bool = setting(True, "batches come in order, always")
    remove_unused_columns: bool = setting(True, "drop what the model's forward does not take")
    train_sampling_strategy: Sampling = setting(Sampling.RANDOM, "random, sequential, group_by_length")
    length_column_name: str = setting("length", "where group_by_length finds lengths")


@dataclass
class _Workers:
    ddp_backend: str | None = setting(None, "how tensors travel: paceline, gloo, nccl; default: what fits the device")
    ddp_timeout: int = setting(1800, "seconds that a collective waits for a late worker before it is an error")
    ddp_bucket_cap_mb: int | None = setting(None, "gradients that travel together; default: 16")
    fsdp: str | None = setting(None, "full_shard: fsdp, shard_grad_op: zero2, hybrid_shard: hybrid, no_shard: ddp")
    fsdp_config: dict[str, Any] | str | None = setting(None, "reshard_after_forward, activation_checkpointing")
    deepspeed: dict[str, Any] | str | None = setting(
        None, "a config or its file; its ZeRO stage decides: zero1, zero2, zero3"
    )
    accelerator_config: dict[str, Any] | str | None = setting(
        None, "split_batches, num_steps of gradient_accumulation_kwargs; what can't be kept is refused"
    )
    do_train: bool = setting(False, "for your script")
    do_eval: bool = setting(False, "for your script; true where eval_strategy is not no")
    do_predict: bool = setting(False, "for your script")


@dataclass
class _Ours:
    strategy: str | None = setting(None, "ours: how work is shared, as Engine(strategy=…); default: ddp")
    lanes: int | None = setting(None, "ours: logical workers, fixed for the job; default: the workers it starts with")
    threads: int | None = setting(None, "ours: threads per worker; default: cores // lanes")
    tp: int | None = setting(None, "ours: workers that share each layer, by the plan that the model carries")
    cp: int | None = setting(None, "ours: workers that share each sequence")
    reduction: str = setting("exact", "ours: exact gives the same bits on any number of workers; or fast")
    offload: str | None = setting(None, "ours: kept in the host's memory: optimizer, parameters")
    compression: str | None = setting(None, "ours: of gradients: bf16, fp16, int8, sign, topk, powersgd")
    on_nonfinite: str = setting("stop", "ours: a loss that is NaN or infinite: stop, skip, continue")
    overwrite_output_dir: bool = setting(False, "ours: remove the checkpoints of an earlier run in output_dir")
    pretrained_files: bool = setting(True, "ours: checkpoints open with from_pretrained: model.safetensors, config …")
    asynchronous_save: bool = setting(True, "ours: checkpoints are written while training continues")
    record_samples: bool = setting(False, "ours: write which samples went into which step, for paceline data audit")


@dataclass
class SupportedFields(
    _Ours, _Workers, _Data, _Hub, _Checkpoints, _Evaluation, _Logging, _Precision, _Optimization, _WhatIsTrained
):
    """All of them; `output_dir` is the first."""


# -- unsupported -----------------------------------------------------------------------------------------------------

_HUB = "nothing is uploaded during a training; call trainer.push_to_hub() after it"
_TRACKIO = "there is no trackio report; report_to knows tensorboard, wandb, mlflow, prometheus, kubeflow"
_DDP = "gradients are summed by paceline, not by DistributedDataParallel; leave it out"
_FULL_EVAL = "evaluation computes in the precision of training; use bf16 or fp16"


@dataclass
class UnsupportedFields:
    optim_target_modules: list[str] | None = setting(None, "GaLore and APOLLO are not available; give optimizers=")
    bf16_full_eval: bool = setting(False, _FULL_EVAL)
    fp16_full_eval: bool = setting(False, _FULL_EVAL)
    use_liger_kernel: bool = setting(False, "patch the model before you give it to the Trainer")
    liger_kernel_config: dict[str, Any] | str | None = setting(
        None, "patch the model before you give it to the Trainer"
    )
    logging_nan_inf_filter: bool = setting(
        False, "a loss that is NaN or infinite is never smoothed away; on_nonfinite says what happens"
    )
    project: str = setting("huggingface", _TRACKIO)
    trackio_space_id: str | None = setting(None, _TRACKIO)
    trackio_bucket_id: str | None = setting(None, _TRACKIO)
    trackio_static_space_id: str | None = setting(None, _TRACKIO)
    eval_do_concat_batches: bool = setting(True, "the cut into batches would depend on the number of workers")
    save_on_each_node: bool = setting(False, "a checkpoint is one folder that all hosts see")
    hub_always_push: bool = setting(False, _HUB)
    ignore_data_skip: bool = setting(False, "resuming skips no data: the position in an epoch is one number")
    parallelism_config: Any = setting(None, "data parallel only; strategy= says how")
    ddp_find_unused_parameters: bool | None = setting(None, "unused parameters are found automatically")
    ddp_broadcast_buffers: bool | None = setting(None, "buffers are those of the lowest lane, on every worker")
    ddp_static_graph: bool | None = setting(None, _DDP)


def check_unsupported(arguments: UnsupportedFields) -> None:
    """Raise for the first field that is set to something."""
    for name, known in UnsupportedFields.__dataclass_fields__.items():
        value = getattr(arguments, name)
        if value != known.default:
            raise ConfigError(f"{name}={value!r} is not supported: {known.metadata['help']}")
