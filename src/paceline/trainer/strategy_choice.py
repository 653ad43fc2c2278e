"""Which strategy trains: what the arguments of transformers mean here.

| argument                                          | strategy            |
|---------------------------------------------------|---------------------|
| strategy="…"                                      | that one            |
| fsdp="full_shard" (also True)                     | fsdp                |
| fsdp="shard_grad_op"                              | zero2               |
| fsdp="hybrid_shard"                               | hybrid              |
| fsdp="no_shard"                                   | ddp                 |
| deepspeed={"zero_optimization": {"stage": s}}     | ddp, zero1, zero2, zero3 for s = 0, 1, 2, 3 |
| none of them                                      | ddp                 |

Two that say different things are an error, and so is a part of a config that has no meaning here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.errors import ConfigError

_FSDP = {
    "full_shard": "fsdp",
    "true": "fsdp",
    "shard_grad_op": "zero2",
    "hybrid_shard": "hybrid",
    "no_shard": "ddp",
}
_UNITS = ("auto_wrap",)  # units are found by themselves
_STAGES = {0: "ddp", 1: "zero1", 2: "zero2", 3: "zero3"}

# Parts of DeepSpeed's config that say how fast, not what: sizes and overlaps of its own communication.
_TUNING = frozenset(
    {
        "allgather_bucket_size",
        "allgather_partitions",
        "contiguous_gradients",
        "overlap_comm",
        "reduce_bucket_size",
        "reduce_scatter",
        "round_robin_gradients",
        "stage",
        "stage3_gather_16bit_weights_on_model_save",
        "stage3_max_live_parameters",
        "stage3_max_reuse_distance",
        "stage3_param_persistence_threshold",
        "stage3_prefetch_bucket_size",
        "sub_group_size",
    }
)
_FSDP_TUNING = frozenset(
    {
        "auto_wrap_policy",
        "backward_prefetch",
        "cpu_ram_efficient_loading",
        "forward_prefetch",
        "limit_all_gathers",
        "min_num_params",
        "state_dict_type",
        "sync_module_states",
        "transformer_layer_cls_to_wrap",
        "use_orig_params",
        "version",
    }
)
_SAYS_AGAIN = {
    "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "max_grad_norm",
}
_REPORTS = frozenset({"steps_per_print", "wall_clock_breakdown", "train_batch_size"})


@dataclass(frozen=True)
class Choice:
    strategy: str | None = None  # None: what the launcher says, or ddp
    offload: str | None = None
    recompute: bool = False  # activations


def choose_strategy(arguments: Any) -> Choice:
    """What `strategy`, `fsdp` and `deepspeed` say together."""
    said = {"strategy": Choice(arguments.strategy)} if arguments.strategy is not None else {}
    if arguments.fsdp:
        said["fsdp"] = _of_fsdp(str(arguments.fsdp), arguments.fsdp_config or {})
    elif arguments.fsdp_config:
        raise ConfigError("fsdp_config is given, but fsdp is not; add fsdp='full_shard', or leave the config out")
    if arguments.deepspeed is not None:
        said["deepspeed"] = _of_deepspeed(arguments.deepspeed, arguments)
    if len({choice.strategy for choice in said.values()}) > 1:
        told = ", ".join(f"{name} says {choice.strategy}" for name, choice in said.items())
        raise ConfigError(f"the arguments contradict each other about the strategy: {told}; give one of them")
    offloads = {choice.offload for choice in said.values() if choice.offload} | {arguments.offload} - {None}
    if len(offloads) > 1:
        raise ConfigError(
            f"the arguments contradict each other about offload: {', '.join(sorted(offloads))}; say it once"
        )
    return Choice(
        strategy=next((choice.strategy for choice in said.values()), None),
        offload=next(iter(offloads), None),
        recompute=any(choice.recompute for choice in said.values()),
    )


def _of_fsdp(text: str, config: Mapping[str, Any]) -> Choice:
    words = text.lower().replace(",", " ").split()
    if "offload" in words or config.get("cpu_offload"):
        raise ConfigError(
            f"fsdp={text!r} with offload: weights stay on the device; use strategy='zero3' with offload='parameters'"
        )
    known = [word for word in words if word in _FSDP]
    unknown = [word for word in words if word not in _FSDP and word not in _UNITS]
    if unknown or len(known) != 1:
        raise ConfigError(
            f"fsdp={text!r} is not known here; choose one of {', '.join(_FSDP)}, perhaps with {', '.join(_UNITS)}"
        )
    settings = {name.removeprefix("fsdp_"): value for name, value in config.items()}
    strategy, recompute = _FSDP[known[0]], bool(settings.pop("activation_checkpointing", False))
    if strategy == "fsdp" and settings.pop("reshard_after_forward", True) is False:
        strategy = "zero2"
    if left := sorted(set(settings) - _FSDP_TUNING - {"cpu_offload"}):
        raise ConfigError(f"fsdp_config: {', '.join(left)} has no meaning here; leave it out")
    return Choice(strategy, recompute=recompute)


def _of_deepspeed(config: Mapping[str, Any], arguments: Any) -> Choice:
    zero = dict(config.get("zero_optimization", {}))
    stage = zero.get("stage", 0)
    if stage not in _STAGES:
        raise ConfigError(f"deepspeed: zero_optimization.stage is {stage!r}; choose 0, 1, 2 or 3")
    offload = None
    if (device := zero.pop("offload_optimizer", {}).get("device", "none")) not in ("none", None):
        if device != "cpu":
            raise ConfigError(f"deepspeed: offload_optimizer to {device!r} is not there; choose cpu or none")
        offload = "optimizer"
    if (device := zero.pop("offload_param", {}).get("device", "none")) not in ("none", None):
        if device != "cpu" or offload is None:
            raise ConfigError("deepspeed: offload_param works to the cpu, together with offload_optimizer")
        offload = "parameters"
    if left := sorted(set(zero) - _TUNING):
        raise ConfigError(f"deepspeed: zero_optimization.{left[0]} has no meaning here; leave it out")
    for name, value in config.items():
        _check_part(name, value, arguments)
    return Choice(_STAGES[stage], offload)


def _check_part(name: str, value: Any, arguments: Any) -> None:
    """A part of DeepSpeed's config that TrainingArguments has too: it may only say the same, or auto."""
    if name == "zero_optimization" or name in _REPORTS or value == "auto":
        return
    if name in ("bf16", "fp16"):
        wanted = value.get("enabled", False)
        if wanted != "auto" and bool(wanted) != getattr(arguments, name):
            raise ConfigError(
                f"deepspeed: {name}.enabled is {wanted}, but {name}={getattr(arguments, name)}; say it once"
            )
        return
    if name in _SAYS_AGAIN:
        ours = getattr(arguments, _SAYS_AGAIN[name])
        if value != ours:
            raise ConfigError(f"deepspeed: {name} is {value}, but {_SAYS_AGAIN[name]}={ours}; say it once")
        return
    raise ConfigError(f"deepspeed: {name!r} is not honoured here; leave it out, and give the Trainer its own argument")
