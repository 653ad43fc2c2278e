"""TrainingArguments: what is trained how, in transformers' words, checked when it is made.

    arguments = TrainingArguments("runs/digits", num_train_epochs=5, eval_strategy="epoch")
    arguments = TrainingArguments.from_command_line()        # every field is a flag; --config file.yaml

Every field either does something or is refused when it is set (`argument_fields.py`); `argument_parsing.py` converts
values. What `strategy`, `fsdp` and `deepspeed` say becomes one choice:

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

import json
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch

from paceline.engine.config import LARGEST_BUCKET_MIB, MOST_ACCUMULATED, find_device
from paceline.engine.one_line_errors import show_our_errors_in_one_line
from paceline.errors import ConfigError
from paceline.optim.loss_scale import LossScale
from paceline.strategies.registry import STRATEGIES
from paceline.trainer import argument_parsing
from paceline.trainer.accelerator_config import AcceleratorConfig, ClassGivenError
from paceline.trainer.argument_fields import (
    LOOK_AT_METRICS,
    DistributedType,
    HubStrategy,
    IntervalStrategy,
    ParallelMode,
    SaveStrategy,
    SupportedFields,
    UnsupportedFields,
    check_unsupported,
)
from paceline.trainer.argument_parsing import check_names, converted, field_types, optimizer_options, todays_names
from paceline.world.checked_values import LONGEST_WAIT_S, number, one_word, path_of, whole_number
from paceline.world.environment import kubeflow_server, read_world
from paceline.world.known_names import AUTO, BACKENDS, COMPRESSORS, MOST_LANES, MOST_THREADS, OFFLOADS, SEEDS
from paceline.world.rendezvous_store import in_turn
from paceline.world.world import World

_FOLLOWS = ("run_name", "report_to", "do_eval", "torch_compile_backend", "dataloader_pin_memory")  # from others
_SECRETS = ("hub_token",)
_PASSIVE = "passive"  # a level is left as it is
_LOG_LEVELS = {
    "detail": logging.DEBUG,
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.CRITICAL,
}
_TOKEN_COUNTS = ("no", "all", "non_padding")
_MANY = 2**40
_COUNTS = {
    "per_device_train_batch_size": (1, _MANY),
    "per_device_eval_batch_size": (1, _MANY),
    "gradient_accumulation_steps": (1, MOST_ACCUMULATED),
    "max_steps": (-1, _MANY),
    "seed": (0, SEEDS - 1),
    "data_seed": (0, SEEDS - 1),
    "torch_empty_cache_steps": (1, _MANY),
    "eval_accumulation_steps": (1, _MANY),
    "dataloader_num_workers": (0, 2**10),
    "dataloader_prefetch_factor": (1, _MANY),
    "ddp_timeout": (1, int(LONGEST_WAIT_S)),
    "ddp_bucket_cap_mb": (1, int(LARGEST_BUCKET_MIB)),
    "lanes": (1, MOST_LANES),
    "threads": (1, MOST_THREADS),
    "tp": (1, MOST_LANES),
    "cp": (1, MOST_LANES),
}
"""From, to; where there may be none it is None."""
_NEVER_NEGATIVE = dict.fromkeys(
    ("learning_rate", "weight_decay", "max_grad_norm", "adam_epsilon", "neftune_noise_alpha")
) | dict.fromkeys(
    ("warmup_steps", "num_train_epochs", "eval_delay", "logging_steps", "eval_steps", "save_steps"), _MANY
)
"""With the most of it, where there is one."""
_WORDS: dict[str, Iterable[str]] = {
    "strategy": (AUTO, *STRATEGIES),
    "reduction": ("exact", "fast"),
    "offload": OFFLOADS,
    "compression": COMPRESSORS,
    "on_nonfinite": ("stop", "skip", "continue"),
    "ddp_backend": BACKENDS,
    "dataloader_multiprocessing_context": ("fork", "spawn", "forkserver"),
    "log_level": (_PASSIVE, *_LOG_LEVELS),
    "log_level_replica": (_PASSIVE, *_LOG_LEVELS),
}


@dataclass(frozen=True)
class StrategyChoice:
    strategy: str | None = None  # None: what the launcher says, or ddp
    offload: str | None = None
    recompute: bool = False  # activations
    units: tuple[str, ...] = ()  # classes of modules that fsdp gathers whole; none: it finds them


class _Spelled(type):
    """Old names are taken as today's, and wrong ones are answered with the nearest."""

    def __call__(cls, *positional: Any, **named: Any) -> Any:
        show_our_errors_in_one_line()
        named = todays_names(named)
        check_names(named, getattr(cls, "__dataclass_fields__", {}), "TrainingArguments")
        try:
            return super().__call__(*positional, **named)
        except ConfigError as error:
            raise error.with_traceback(None) from None  # not from the __init__ that dataclasses wrote: from your line


@dataclass
class TrainingArguments(UnsupportedFields, SupportedFields, metaclass=_Spelled):
    """The fields are those of `SupportedFields`; docs/concepts/trainer.md has a table of all."""

    def __post_init__(self) -> None:
        self.output_dir = SupportedFields.output_dir if self.output_dir is None else self.output_dir
        self.report_to = [] if self.report_to is None else self.report_to
        self.debug = [] if self.debug is None else self.debug
        _check_made("accelerator_config", self.accelerator_config)
        _check_whole("torch_empty_cache_steps", self.torch_empty_cache_steps)
        for name, kind in field_types(type(self)).items():
            setattr(self, name, converted(name, getattr(self, name), kind))
        check_unsupported(self)
        self._world: World | None = None
        try:
            self.output_dir = str(path_of("output_dir", self.output_dir).expanduser())
        except RuntimeError as error:
            raise ConfigError(f"output_dir={self.output_dir!r}: {error}") from error
        self._derive()
        self._check_numbers()
        self._check_strategies()
        self._check_best_model()
        self._check_upload()
        self.choice: StrategyChoice = choose_strategy(self)
        self.accelerator_settings = AcceleratorConfig.of(cast("dict[str, Any] | None", self.accelerator_config))

    @classmethod
    def from_command_line(cls, argv: Sequence[str] | None = None) -> Any:
        """From flags and `--config file.yaml`; a flag goes before the file."""
        show_our_errors_in_one_line()
        return cls(**argument_parsing.from_command_line(cls, argv))

    @classmethod
    def from_yaml(cls, path: str | Path, **more: Any) -> Any:
        """From a file with a key for each field; `more` goes before the file."""
        show_our_errors_in_one_line()
        return cls(**(argument_parsing.from_yaml(cls, path) | more))

    # -- what is derived and checked ----------------------------------------------------------------------------------

    def _derive(self) -> None:
        if self.report_to == ["none"]:
            self.report_to = []
        if kubeflow_server() is not None and not {"kubeflow", "all"} & set(self.report_to):
            self.report_to = [*self.report_to, "kubeflow"]
        if isinstance(self.include_num_input_tokens_seen, bool):
            self.include_num_input_tokens_seen = "all" if self.include_num_input_tokens_seen else "no"
        self.fsdp = None if self.fsdp in ("false", "") else self.fsdp
        self.run_name = self.run_name or self.output_dir
        self.do_eval = self.do_eval or self.eval_strategy is not IntervalStrategy.NO
        self.torch_compile = self.torch_compile or bool(self.torch_compile_backend or self.torch_compile_mode)
        if self.torch_compile and self.torch_compile_backend is None:
            self.torch_compile_backend = "inductor"
        self.dataloader_pin_memory = self.dataloader_pin_memory and not self.use_cpu
        if self.eval_strategy is IntervalStrategy.STEPS and not self.eval_steps:
            self.eval_steps = self.logging_steps
        plateau = self.lr_scheduler_type in LOOK_AT_METRICS
        if self.metric_for_best_model is None and (self.load_best_model_at_end or plateau):
            self.metric_for_best_model = "loss"
        if self.greater_is_better is None and self.metric_for_best_model is not None:
            self.greater_is_better = not self.metric_for_best_model.endswith("loss")

    def _check_numbers(self) -> None:
        def check(ok: bool, text: str) -> None:
            if not ok:
                raise ConfigError(text)

        for name, (least, most) in _COUNTS.items():
            if getattr(self, name) is not None:
                whole_number(name, getattr(self, name), least=least, most=most)
        for name, most_of_it in _NEVER_NEGATIVE.items():
            if getattr(self, name) is not None:
                number(name, getattr(self, name), least=0, why="it is never negative")
                number(name, getattr(self, name), most=most_of_it)
        for name in ("adam_beta1", "adam_beta2"):
            number(name, getattr(self, name), least=0, below=1)
        for name, words in _WORDS.items():
            if getattr(self, name) is not None:
                one_word(name, getattr(self, name), words)
        optimizer_options(self.optim_args)
        check(
            self.max_steps > 0 or self.num_train_epochs > 0, "num_train_epochs is 0 or less, and max_steps is not given"
        )
        check(
            0 <= self.label_smoothing_factor < 1,
            f"label_smoothing_factor={self.label_smoothing_factor}: from 0 up to 1",
        )
        check(not (self.fp16 and self.bf16), "fp16 and bf16 are both set; choose one")
        check(
            self.dataloader_prefetch_factor is None or self.dataloader_num_workers > 0,
            "dataloader_prefetch_factor needs loader processes; set dataloader_num_workers to 1 or more",
        )
        if self.save_total_limit is not None:
            why = "at least one checkpoint is kept; save_strategy='no' saves none"
            whole_number("save_total_limit", self.save_total_limit, least=1, why=why)
        check(
            self.include_num_input_tokens_seen in _TOKEN_COUNTS,
            f"include_num_input_tokens_seen={self.include_num_input_tokens_seen!r}: choose {', '.join(_TOKEN_COUNTS)}",
        )
        check(
            self.average_tokens_across_devices, "average_tokens_across_devices=False: the mean is over all tokens here"
        )
        check(
            self.dataloader_in_order, "dataloader_in_order=False: the bits depend on the order of batches; leave it out"
        )
        check(
            not (self.full_determinism and self.reduction == "fast"),
            "full_determinism=True and reduction='fast', whose sums depend on the number of workers; choose 'exact'",
        )
        if unknown := [name for name in self.include_for_metrics if name not in ("inputs", "loss")]:
            raise ConfigError(f"include_for_metrics: {unknown[0]!r} is not known; choose inputs, loss")

    def _check_strategies(self) -> None:
        for kind in ("logging", "eval", "save"):
            steps = getattr(self, f"{kind}_steps")
            if getattr(self, f"{kind}_strategy") != "steps":
                continue
            if steps is None or steps <= 0:
                raise ConfigError(f"{kind}_strategy='steps' and {kind}_steps={steps}: it is more than 0")
            if steps > 1 and steps != int(steps):
                raise ConfigError(f"{kind}_steps={steps}: a number of steps is whole, a part of all steps is below 1")
        if self.lr_scheduler_type in LOOK_AT_METRICS and self.eval_strategy is IntervalStrategy.NO:
            kind = self.lr_scheduler_type.value
            raise ConfigError(f"lr_scheduler_type={kind!r} looks at evaluations; set eval_strategy")
        if self.save_strategy is SaveStrategy.BEST and self.eval_strategy is IntervalStrategy.NO:
            raise ConfigError("save_strategy='best' looks at evaluations; set eval_strategy")
        if self.save_strategy is SaveStrategy.BEST and self.metric_for_best_model is None:
            raise ConfigError("`args.metric_for_best_model` must be provided with save_strategy='best', such as 'loss'")

    def _check_best_model(self) -> None:
        if self.load_best_model_at_end and self.save_only_model:
            raise ConfigError(
                "load_best_model_at_end loads from checkpoints, but save_only_model saves none; choose one"
            )
        if not self.load_best_model_at_end or self.save_strategy is SaveStrategy.BEST:
            return
        if self.eval_strategy != self.save_strategy.value:
            raise ConfigError(
                "load_best_model_at_end needs a checkpoint for each evaluation, but eval_strategy is "
                f"{self.eval_strategy.value!r} and save_strategy {self.save_strategy.value!r}; make them the same, or "
                "set save_strategy='best'"
            )
        if self.eval_strategy is not IntervalStrategy.STEPS:
            return
        assert self.eval_steps is not None
        ratio = self.save_steps / self.eval_steps
        if (self.save_steps < 1) != (self.eval_steps < 1) or abs(ratio - round(ratio)) > 1e-6:
            raise ConfigError(
                "load_best_model_at_end needs an evaluation for each checkpoint, but save_steps="
                f"{self.save_steps} is no multiple of eval_steps={self.eval_steps}"
            )

    def _check_upload(self) -> None:
        if self.push_to_hub and self.hub_strategy is not HubStrategy.END:
            raise ConfigError(
                f"push_to_hub=True with hub_strategy={self.hub_strategy.value!r}: nothing is uploaded during a "
                "training; set hub_strategy='end', which uploads what save_model() writes"
            )

    # -- who and where ------------------------------------------------------------------------------------------------

    @property
    def world(self) -> World:
        if self._world is None:
            self._world = read_world()
        return self._world

    @property
    def world_size(self) -> int:
        return self.world.size

    @property
    def process_index(self) -> int:
        return self.world.rank

    @property
    def local_process_index(self) -> int:
        return self.world.local_rank

    @property
    def parallel_mode(self) -> ParallelMode:
        return ParallelMode.DISTRIBUTED if self.world.size > 1 else ParallelMode.NOT_PARALLEL

    @property
    def distributed_type(self) -> DistributedType:
        if self.world.size == 1:
            return DistributedType.NO
        return DistributedType.MULTI_CPU if self.device.type == "cpu" else DistributedType.MULTI_GPU

    @property
    def device(self) -> torch.device:
        return find_device(self.world, "cpu" if self.use_cpu else None)

    @property
    def n_gpu(self) -> int:
        """Accelerators of this process: one, or none."""
        return int(self.device.type != "cpu")

    @property
    def should_save(self) -> bool:
        return self.world.is_main

    @property
    def should_log(self) -> bool:
        return self.local_process_index == 0 if self.log_on_each_node else self.world.is_main

    @property
    def train_batch_size(self) -> int:
        return self.per_device_train_batch_size

    @property
    def eval_batch_size(self) -> int:
        return self.per_device_eval_batch_size

    @property
    def ddp_timeout_delta(self) -> timedelta:
        return timedelta(seconds=self.ddp_timeout)

    @property
    def precision(self) -> str | None:
        return "bf16" if self.bf16 else "fp16" if self.fp16 else None

    @contextmanager
    def main_process_first(self, local: bool = True, desc: str = "work") -> Iterator[None]:
        """The other workers do what is inside when the main one has done it, and find what it left in a cache.

        With `local` (the caches of hosts differ) they wait for the first of their host.
        """
        world = self.world
        first = self.local_process_index == 0 if local else world.is_main
        of = f"host {world.host_rank}" if local else "all"
        with in_turn(world, first=first, of=of, timeout_s=float(self.ddp_timeout)):
            yield

    @property
    def chosen_log_level(self) -> int | None:
        """What `log_level` or `log_level_replica` say to this worker; None: nothing."""
        return _LOG_LEVELS.get(self.log_level if self.should_log else self.log_level_replica)

    def get_process_log_level(self) -> int:
        """For the loggers of your script."""
        chosen = self.chosen_log_level
        return (logging.INFO if self.should_log else logging.WARNING) if chosen is None else chosen

    def get_warmup_steps(self, num_training_steps: int) -> int:
        if self.warmup_steps >= 1:
            return int(self.warmup_steps)
        return math.ceil(num_training_steps * self.warmup_steps)

    # -- as text ------------------------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Every field, as JSON has it."""
        found = {item.name: _plain(getattr(self, item.name)) for item in fields(self)}
        return found | {name: f"<{name.upper()}>" for name in _SECRETS if found[name] is not None}

    def to_json_string(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

    def to_sanitized_dict(self) -> dict[str, Any]:
        """For reporters that take single values only."""
        simple = bool | int | float | str
        return {name: value if isinstance(value, simple) else str(value) for name, value in self.to_dict().items()}

    def changed(self) -> dict[str, Any]:
        """The fields that have another value than their default, but for secrets."""
        defaults = SupportedFields()
        values = {item.name: _plain(getattr(self, item.name)) for item in fields(SupportedFields)}
        skipped = (*_FOLLOWS, *_SECRETS)
        return {n: value for n, value in values.items() if n not in skipped and value != _plain(getattr(defaults, n))}

    def described(self) -> str:
        """The fields that were changed; all of them are in training_arguments.json."""
        lines = (f"  {name}={json.dumps(value)}" for name, value in self.changed().items())
        return "\n".join(["training arguments that differ from their defaults:", *lines])


def _check_whole(name: str, value: Any) -> None:
    """As transformers has it for this one: a number that happens to be whole, or a text, is none."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        raise ConfigError(f"{name}={value!r}: expected a whole number of steps or None, got {type(value).__name__}")


def _check_made(name: str, value: Any) -> None:
    if isinstance(value, type):
        raise ClassGivenError(
            f"Tried passing in a callable to `{name}`: {value.__name__} is a class; give an object of it, or a mapping"
        )


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(part) for name, part in value.items()}
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return str(value) if isinstance(value, str) else value


# -- the strategy ----------------------------------------------------------------------------------------------------

_FSDP = {
    "full_shard": "fsdp",
    "true": "fsdp",
    "shard_grad_op": "zero2",
    "hybrid_shard": "hybrid",
    "no_shard": "ddp",
}
_UNITS = ("auto_wrap",)  # units are found automatically
_STAGES = {0: "ddp", 1: "zero1", 2: "zero2", 3: "zero3"}

# Keys of others' configs that say what is done here in any case, with the values that do so; any other is refused.
_ZERO_IS = {
    "stage": tuple(_STAGES),
    "overlap_comm": (True,),
    "reduce_scatter": (True,),
    "allgather_partitions": (True,),
    "contiguous_gradients": (True,),
    "stage3_gather_16bit_weights_on_model_save": (True,),
}
_ZERO_INSTEAD = {"reduce_bucket_size": "set ddp_bucket_cap_mb", "allgather_bucket_size": "set ddp_bucket_cap_mb"}
_OFFLOAD_IS: dict[str, tuple[Any, ...]] = {"device": ("none", "cpu", None), "pin_memory": (True,)}
_FP16_IS: dict[str, tuple[Any, ...]] = {
    "enabled": (True,),
    "auto_cast": (False,),
    "loss_scale": (0,),
    "initial_scale_power": (round(math.log2(LossScale.initial)),),
    "loss_scale_window": (LossScale.growth_every,),
    "min_loss_scale": (int(LossScale.smallest), LossScale.smallest),
    "hysteresis": (1,),
}
_FSDP_IS = {
    "version": (2,),
    "auto_wrap_policy": ("TRANSFORMER_BASED_WRAP",),
    "min_num_params": (0,),
    "use_orig_params": (True,),
    "sync_module_states": (True,),
    "cpu_offload": (False,),
    "cpu_ram_efficient_loading": (False,),
    "forward_prefetch": (False,),
    "backward_prefetch": ("NO_PREFETCH",),
    "limit_all_gathers": (False,),
    "state_dict_type": ("FULL_STATE_DICT",),
}
_SAYS_AGAIN = {
    "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "max_grad_norm",
}
_PARTS_IS: dict[str, tuple[Any, ...]] = {"wall_clock_breakdown": (False,), "zero_allow_untested_optimizer": (True,)}
_PARTS_INSTEAD = {
    "steps_per_print": "set logging_steps",
    "train_batch_size": "it follows from per_device_train_batch_size, gradient_accumulation_steps and lanes",
    "wall_clock_breakdown": "step_time_s and data_wait_s are in every log",
}


def choose_strategy(arguments: Any) -> StrategyChoice:
    """What `strategy`, `fsdp` and `deepspeed` say together."""
    choices = {"strategy": StrategyChoice(arguments.strategy)} if arguments.strategy is not None else {}
    if arguments.fsdp:
        choices["fsdp"] = _of_fsdp(str(arguments.fsdp), arguments.fsdp_config or {})
    elif arguments.fsdp_config:
        raise ConfigError("fsdp_config is given, but fsdp is not; add fsdp='full_shard', or leave the config out")
    if arguments.deepspeed is not None:
        choices["deepspeed"] = _of_deepspeed(arguments.deepspeed, arguments)
    if len({choice.strategy for choice in choices.values()}) > 1:
        each = ", ".join(f"{name} says {choice.strategy}" for name, choice in choices.items())
        raise ConfigError(f"the arguments contradict each other about the strategy: {each}; give one of them")
    offloads = {choice.offload for choice in choices.values() if choice.offload} | {arguments.offload} - {None}
    if len(offloads) > 1:
        raise ConfigError(
            f"the arguments contradict each other about offload: {', '.join(sorted(offloads))}; say it once"
        )
    return StrategyChoice(
        strategy=next((choice.strategy for choice in choices.values()), None),
        offload=next(iter(offloads), None),
        recompute=any(choice.recompute for choice in choices.values()),
        units=next((choice.units for choice in choices.values() if choice.units), ()),
    )


def _of_fsdp(text: str, config: Mapping[str, Any]) -> StrategyChoice:
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
    if strategy == "fsdp" and _as_told(settings.pop("reshard_after_forward", True)) is False:
        strategy = "zero2"
    given = settings.pop("transformer_layer_cls_to_wrap", None) or ()
    units = tuple(given.replace(",", " ").split()) if isinstance(given, str) else tuple(str(name) for name in given)
    if units and strategy not in ("fsdp", "hybrid"):
        raise ConfigError(f"fsdp_config: transformer_layer_cls_to_wrap has no meaning with {strategy}; leave it out")
    _check_keys("fsdp_config: ", settings, _FSDP_IS, {})
    return StrategyChoice(strategy, recompute=recompute, units=units)


def _check_keys(
    where: str, given: Mapping[str, Any], known: Mapping[str, tuple[Any, ...]], instead: Mapping[str, str]
) -> None:
    """Raise for the first key that would be ignored: one with another value than what is done in any case."""
    for name, value in given.items():
        told = _as_told(value)
        if told == "auto" or any(told == one and type(told) is type(one) for one in known.get(name, ())):
            continue
        fixed = " or ".join(repr(one) for one in known.get(name, ()) if one is not None)
        why = instead.get(name) or (f"it is always {fixed}" if fixed else "it has no meaning here")
        raise ConfigError(f"{where}{name}={value!r} would have no effect: {why}; leave it out")


def _as_told(value: Any) -> Any:
    """A config file may write a switch as a text."""
    return value.lower() == "true" if isinstance(value, str) and value.lower() in ("true", "false") else value


def _of_deepspeed(config: Mapping[str, Any], arguments: Any) -> StrategyChoice:
    zero = dict(config.get("zero_optimization", {}))
    stage = zero.get("stage", 0)
    if stage not in _STAGES:
        raise ConfigError(f"deepspeed: zero_optimization.stage is {stage!r}; choose 0, 1, 2 or 3")
    offload = None
    if (device := _offload_device(zero, "offload_optimizer")) is not None:
        if device != "cpu":
            raise ConfigError(f"deepspeed: offload_optimizer to {device!r} is not there; choose cpu or none")
        offload = "optimizer"
    if (device := _offload_device(zero, "offload_param")) is not None:
        if device != "cpu" or offload is None:
            raise ConfigError("deepspeed: offload_param works to the cpu, together with offload_optimizer")
        offload = "parameters"
    _check_keys("deepspeed: zero_optimization.", zero, _ZERO_IS, _ZERO_INSTEAD)
    for name, value in config.items():
        _check_part(name, value, arguments)
    return StrategyChoice(_STAGES[stage], offload)


def _offload_device(zero: dict[str, Any], name: str) -> str | None:
    """Where a part is kept; takes the part out of `zero`."""
    part = dict(zero.pop(name, None) or {})
    device = part.pop("device", "none")
    if device in ("none", None):
        return None
    _check_keys(f"deepspeed: zero_optimization.{name}.", part, _OFFLOAD_IS, {})
    return str(device)


def _check_part(name: str, value: Any, arguments: Any) -> None:
    """A part of DeepSpeed's config that TrainingArguments has too: it may only say the same, or auto."""
    if name == "zero_optimization" or value == "auto":
        return
    if name in ("bf16", "fp16"):
        wanted = value.get("enabled", False)
        if wanted != "auto" and bool(wanted) != getattr(arguments, name):
            raise ConfigError(
                f"deepspeed: {name}.enabled is {wanted}, but {name}={getattr(arguments, name)}; say it once"
            )
        if getattr(arguments, name):  # of a precision that is not used nothing is expected
            _check_keys(f"deepspeed: {name}.", value, _FP16_IS if name == "fp16" else {"enabled": (True,)}, {})
        return
    if name in _SAYS_AGAIN:
        ours = getattr(arguments, _SAYS_AGAIN[name])
        if value != ours:
            raise ConfigError(f"deepspeed: {name} is {value}, but {_SAYS_AGAIN[name]}={ours}; say it once")
        return
    if name in _PARTS_IS or name in _PARTS_INSTEAD:
        _check_keys("deepspeed: ", {name: value}, _PARTS_IS, _PARTS_INSTEAD)
        return
    raise ConfigError(f"deepspeed: {name!r} is not supported; leave it out, and give the Trainer its own argument")
