"""The names of Accelerate's Accelerator, with their meaning on any number of workers, each a line over what there is.

    engine.accumulate(model)         what the loop does by itself
    engine.num_processes             workers; `main_process_first`, `gather` and others are what these do together
    engine.no_sync                   has no meaning here: refused, with what to write instead
    engine.bakward                   likewise, with the nearest name that there is

docs/concepts/loop.md has the table of both. What an Engine can do beyond it is `engine.py`.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from paceline.checkpoint.save import Beside
from paceline.checkpoint.weights_file import WEIGHTS, remove_weights, write_weights
from paceline.engine.adapted_models import saves_adapters
from paceline.engine.boundary import check_boundary
from paceline.engine.checkpoints import Saver
from paceline.engine.config import MIXED, EngineConfig
from paceline.engine.evaluation import share_of
from paceline.engine.group import Group
from paceline.engine.prepare import BetweenSteps, PreparedObjects
from paceline.errors import ConfigError, UnknownNameError
from paceline.input_file import one_line
from paceline.optim.precision import DTYPES
from paceline.world.checked_values import path_of


class AccelerateNames:
    """The Engine's base: it has the parts, and this their names in Accelerate."""

    config: EngineConfig
    device: torch.device
    _group: Group
    _objects: PreparedObjects
    _between: BetweenSteps
    _saver: Saver
    _is_run: bool
    """This is the run that the script is for: no plan, replay or verification, which leave its folder alone."""

    # -- who am I ----------------------------------------------------------------------------------------------------

    @property
    def num_processes(self) -> int:
        """Workers, now. The samples of a step depend on lanes instead, `engine.config.lanes`."""
        self._objects.workers_were_asked = True
        return self._group.among.size

    @property
    def process_index(self) -> int:
        """This worker's rank among those who are there."""
        return self._group.among.rank

    @property
    def local_process_index(self) -> int:
        """This worker's number on its host."""
        return self._group.among.local_rank

    @property
    def is_local_main_process(self) -> bool:
        """The first worker of its host."""
        return self._group.among.local_rank == 0

    @property
    def is_last_process(self) -> bool:
        """The worker with the highest rank."""
        return self._group.among.rank == self._group.among.size - 1

    @property
    def use_distributed(self) -> bool:
        """Whether there is more than one worker."""
        return self._group.among.size > 1

    @property
    def distributed_type(self) -> str:
        """A word of Accelerate's `DistributedType`, which compares equal; it says nothing of the strategy."""
        return f"MULTI_{'CPU' if self.device.type == 'cpu' else 'GPU'}" if self.use_distributed else "NO"

    # -- the loop ----------------------------------------------------------------------------------------------------

    @property
    def mixed_precision(self) -> str:
        """`precision` in the words of Accelerate: "no", "bf16" or "fp16"."""
        return next(there for there, here in MIXED.items() if here == self.config.precision.parameters)

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches of a lane in one step: `accumulate`."""
        return self.config.accumulate

    @property
    def sync_gradients(self) -> bool:
        """Whether the item that the loop has is this worker's last of the step, with which the optimizer acts."""
        if (step := self._objects.step) is not None:
            step.was_asked_for = step.checks.asks_for_last = True
        return self._ends_step

    @property
    def _ends_step(self) -> bool:
        """Likewise, for our own calls: they don't tell whether the script counts steps."""
        step = self._objects.step
        return step is None or step.now.item is None or step.now.item.last_of_step

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """The last step was left out: a gradient was too large for fp16, or a loss not finite (`on_nonfinite`)."""
        return self._objects.step is not None and self._objects.step.now.empty

    @contextmanager
    def accumulate(self, *models: nn.Module) -> Iterator[None]:
        """One micro-batch. The loop adds them up by itself; `Engine(gradient_accumulation_steps=k)` says how many."""
        self._objects.training()
        yield

    def autocast(self, **there: Any) -> AbstractContextManager[Any]:
        """For what is computed outside the prepared models, which do this by themselves: torch's autocast."""
        taken("autocast", there)
        low = DTYPES[self.config.precision.parameters]
        return nullcontext() if low == torch.float32 else torch.autocast(self.device.type, low)

    # -- between steps -----------------------------------------------------------------------------------------------

    def wait_for_everyone(self) -> None:
        """No worker goes on before all are here: `barrier`."""
        check_boundary(self._objects.step, "wait_for_everyone")
        self._between.barrier()

    def main_process_first(self) -> AbstractContextManager[None]:
        """`with` it, the other workers do what is inside when the main one has done it, as to find its cache."""
        check_boundary(self._objects.step, "main_process_first")
        return self._between.goes_first(self._group.is_main)

    def local_main_process_first(self) -> AbstractContextManager[None]:
        """Likewise, the first worker of every host before the others."""
        check_boundary(self._objects.step, "local_main_process_first")
        return self._between.goes_first(self.is_local_main_process)

    def on_main_process(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Decorates what one worker alone does; on the others it returns None."""
        return wraps(function)(lambda *args, **named: function(*args, **named) if self._group.is_main else None)

    def on_local_main_process(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Decorates what one worker of every host does."""
        return wraps(function)(lambda *args, **named: function(*args, **named) if self.is_local_main_process else None)

    def on_last_process(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Decorates what the last worker does."""
        return wraps(function)(lambda *args, **named: function(*args, **named) if self.is_last_process else None)

    def pad_across_processes(
        self, values: Any = None, dim: int = 0, pad_index: int = 0, pad_first: bool = False, **there: Any
    ) -> Any:
        """Tensors as long in dimension `dim` as the longest of all workers: before a `gather` of different lengths."""
        [values] = taken("pad_across_processes", there, values=values)
        check_boundary(self._objects.step, "pad_across_processes")
        return self._between.padded(values, dim, pad_index, pad_first)

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """This worker's part of `inputs`, as for inference; with padding all parts are equally long."""
        yield share_of(inputs, self.process_index, self.num_processes, pad=apply_padding)

    def unwrap_model(
        self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> nn.Module:
        """The model: `prepare` wraps nothing. Whole weights, whatever the strategy, are `get_state_dict(model)`."""
        inner: nn.Module = model if keep_torch_compile else getattr(model, "_orig_mod", model)
        return inner

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Tensor]:
        """Whole weights and buffers of one model by name, on the host; all workers call it and get them."""
        check_boundary(self._objects.step, "get_state_dict")
        return self._between.full_state([model])

    def save_model(self, model: nn.Module, save_directory: str | Path, **there: Any) -> None:
        """`save_directory/model.safetensors`, whole, whatever the strategy; all workers call it.

        Where they hold parts of the weights each writes some, a large model in shards with an index, and none holds all
        of it. Of a PeftModel its adapters are written instead, as its `save_pretrained` does.
        """
        taken("save_model", there)
        check_boundary(self._objects.step, "save_model")
        if not self._is_run:
            return
        folder = path_of("save_directory", save_directory)
        if not saves_adapters(model) and self._save_in_parts(model, folder):
            return
        weights = self._between.full_state([model])
        if self._group.is_main and saves_adapters(model):
            model.save_pretrained(str(folder), state_dict=weights)  # type: ignore[operator]
        elif self._group.is_main:
            write_weights(folder / WEIGHTS, weights)
            remove_weights(folder, but=[WEIGHTS])
        self._between.boundary.barrier()

    def _save_in_parts(self, model: nn.Module, folder: Path, beside: Beside | None = None) -> bool:
        """Whether this model's weights are in parts on the workers; then they are written, and what `beside` adds."""
        in_parts = self._group.among.size > 1 and not self.config.strategy.entry.full_weights
        if not in_parts or self._objects.step is None or model not in self._objects.models:
            return False
        self._between.drain()
        self._saver.save_model(folder, self._objects.models.index(model), beside)
        return True

    def save(self, thing: Any = None, file: Any = None, **there: Any) -> None:
        """`torch.save` by one worker."""
        thing, file = taken("save", there, thing=thing, file=file)
        if self._group.is_main:
            torch.save(thing, path_of("file", file))

    def register_for_checkpointing(self, *things: Any) -> None:
        """What has `state_dict()` and `load_state_dict()` is saved and loaded with the job, and given to joiners."""
        for thing in things:
            if not (callable(getattr(thing, "state_dict", None)) and callable(getattr(thing, "load_state_dict", None))):
                raise ConfigError(
                    f"engine.register_for_checkpointing() got a {type(thing).__name__}, without state_dict() and "
                    "load_state_dict(); give engine.checkpoints(…).save(extra=…) plain values"
                )
        self._objects.registered += things


# -- names that are refused --------------------------------------------------------------------------------------------

_ALL_ONCE = "leave it out: every sample is dealt to one worker, once, whatever the number of workers"

_ALL_IN_ONE = "give models, optimizers, schedulers and loaders to engine.prepare(…), in one call and any order"
_DATA_PARALLEL = "leave it out: all workers train the same model, each on its part of the batch"
_EXCHANGED_ONCE = (
    "write Engine(gradient_accumulation_steps=k): a step's gradients are exchanged once, whatever its micro-batches, "
    "and optimizer.step() acts with the last of them"
)
_STOPS = "call engine.stop() before engine.backward(): the loop of all workers ends after the same step"

_SHARED_SEQUENCES = "write Engine(mesh=paceline.Mesh(cp=…)): the loader hands out this worker's part of each sequence"
_ON_THE_MESH = "write engine.device_mesh.get_local_rank('dp'), 'cp' or 'tp'"
_STRATEGY = "ask engine.config.strategy"
_FOLDER = "keep the folder that Engine(project_dir=…) is given: 'runs' by default"
_LETS_GO = "call engine.close() and let go of the objects"

_LAUNCHER_STARTS = "leave it out: `paceline run --workers N script.py` starts the workers, one for each device"

ARGUMENTS_ELSEWHERE: Mapping[str, str] = {
    "accelerator": "write device= if the default is not meant: the worker's GPU, or the CPU where there is none",
    "callbacks": "write them into the loop, or give them to paceline.Trainer",
    "config": "give the settings themselves: strategy='zero2', precision='bf16', accumulate=k …",
    "cpu": "write device='cpu'",
    "dataloader_config": _ALL_ONCE,
    "deepspeed_plugin": "write strategy='zero1', 'zero2' or 'zero3'",
    "devices": _LAUNCHER_STARTS,
    "device_placement": "leave it out: batches and models go to engine.device",
    "dispatch_batches": _ALL_ONCE,
    "dynamo_backend": "call torch.compile(model) before engine.prepare()",
    "even_batches": _ALL_ONCE,
    "fsdp_plugin": "write strategy='fsdp'",
    "gradient_accumulation_plugin": "write gradient_accumulation_steps=k",
    "kwargs_handlers": "write timeout_s= for a group's timeout and loss_scale= for a scaler's settings; parameters "
    "without a gradient are found by themselves",
    "loggers": "write log_with= and project_dir=, then engine.init_trackers(name) and engine.log(values)",
    "megatron_lm_plugin": _DATA_PARALLEL,
    "num_nodes": "leave it out: `paceline run --hosts N` on each host",
    "parallelism_config": _DATA_PARALLEL,
    "project_config": "give the folder to engine.save_state(), or to engine.checkpoints(folder, keep=…)",
    "rng_types": "leave it out: all random numbers follow from seed=",
    "split_batches": "write global_batch_size=, the samples of all workers in one step",
    "step_scheduler_with_optimizer": "leave it out: a prepared scheduler acts when the optimizer does, in every step "
    "once; step one that counts epochs after the loop",
    "torch_tp_plugin": _DATA_PARALLEL,
    "zero_stage": "write strategy='zero1', 'zero2' or 'zero3'",
}
"""Of Accelerate's, Fabric's and DeepSpeed's constructors; what means here the same as there is the Engine's too."""

NAMES_HERE: Mapping[str, Mapping[str, str]] = {
    "gather": {"tensor": "values"},
    "gather_for_metrics": {"input_data": "values"},
    "load_state": {"input_dir": "folder"},
    "pad_across_processes": {"tensor": "values"},
    "reduce": {"tensor": "values"},
    "save": {"obj": "thing", "f": "file"},
    "save_state": {"output_dir": "folder"},
}
"""Of arguments of the Engine's methods, by the names that they have in Accelerate."""

_NO_PICKLE = "leave it out: what is written is safetensors, and no pickle"

NOTHING_HERE: Mapping[tuple[str, str], tuple[tuple[Any, ...], str]] = {
    ("autocast", "autocast_handler"): ((None,), "write torch.autocast(…) for other settings than the job's precision"),
    ("gather_for_metrics", "use_gather_object"): (
        (False,),
        "gather numbers and tensors; what is neither torch.distributed.all_gather_object(list, thing) gathers",
    ),
    ("init_trackers", "init_kwargs"): (
        (None, {}),
        "write the tracker's own variables into the environment, such as WANDB_PROJECT",
    ),
    ("load_state", "load_kwargs"): ((None, {}), "leave it out: what was saved is read whole, or refused"),
    ("log", "log_kwargs"): ((None, {}), "leave it out: each tracker gets the numbers and their step"),
    ("prepare", "device_placement"): ((None,), ARGUMENTS_ELSEWHERE["device_placement"]),
    ("profile", "profile_handler"): ((None,), "write engine.profile(wait=…, warmup=…, active=…)"),
    ("reduce", "scale"): ((1, 1.0), "multiply what it returns"),
    ("save", "safe_serialization"): ((False,), "write safetensors.torch.save_file(tensors, file) on the main process"),
    ("save_model", "max_shard_size"): (("10GB",), "leave it out: a file of each worker that has a part, or one file"),
    ("save_model", "safe_serialization"): ((True,), _NO_PICKLE),
    ("save_state", "safe_serialization"): ((True,), _NO_PICKLE),
}
"""Arguments of Accelerate's methods that the Engine's have no use for: values that say what happens anyhow, and what to
write in place of others."""

NAMES_ELSEWHERE: Mapping[str, str] = {
    "check_trigger": _STOPS,
    "clear": _LETS_GO,
    "clip_grad_value_": "use engine.clip_grad_norm_(parameters, max_norm): few strategies keep the gradient in .grad",
    "context_parallel_rank": _ON_THE_MESH,
    "data_parallel_rank": _ON_THE_MESH,
    "data_parallel_shard_rank": _ON_THE_MESH,
    "deepspeed_plugin": _STRATEGY,
    "deepspeed_ulysses_dl_adapter": _SHARED_SEQUENCES,
    "dispatch_batches": _ALL_ONCE,
    "even_batches": _ALL_ONCE,
    "fp8_backend": "ask engine.config.precision",
    "free_memory": _LETS_GO,
    "get_tracker": "engine.log(values) writes to all that Engine(log_with=…) names",
    "is_composable_parallelism_enabled": _STRATEGY,
    "is_fsdp2": _STRATEGY,
    "join_uneven_inputs": _ALL_ONCE,
    "logging_dir": _FOLDER,
    "maybe_context_parallel": _SHARED_SEQUENCES,
    "multi_device": "write engine.use_distributed",
    "no_sync": _EXCHANGED_ONCE,
    "non_blocking": "leave it out: the loader hands out batches that are on engine.device",
    "on_local_process": "ask `if engine.local_process_index == …`",
    "on_process": "ask `if engine.process_index == …`",
    "parallelism_config": "ask engine.config.mesh",
    "pipeline_parallel_rank": "leave it out: no model is split into stages",
    "prepare_data_loader": _ALL_IN_ONE,
    "prepare_model": _ALL_IN_ONE,
    "prepare_optimizer": _ALL_IN_ONE,
    "prepare_scheduler": _ALL_IN_ONE,
    "project_dir": _FOLDER,
    "register_load_state_pre_hook": "engine.register_for_checkpointing(thing) loads what has load_state_dict()",
    "register_save_state_pre_hook": "engine.register_for_checkpointing(thing) saves what has state_dict()",
    "save_iteration": "engine.checkpoints(folder, keep=…).save() names its folders by their step",
    "scaler": "engine.loss_scale is the scale, and Engine(precision='fp16', loss_scale=…) sets it",
    "set_trigger": _STOPS,
    "should_save_model": "leave it out: of the workers that call engine.save_model() those write that have to",
    "skip_first_batches": "leave it out: after engine.load_state() the loader goes on with the next sample by itself",
    "split_batches": ARGUMENTS_ELSEWHERE["split_batches"],
    "state": "ask engine.world and engine.config",
    "tensor_parallel_rank": _ON_THE_MESH,
    "torch_device_mesh": "write engine.device_mesh",
    "trigger_sync_in_backward": _EXCHANGED_ONCE,
    "unscale_gradients": "leave it out: engine.clip_grad_norm_() clips the gradient without the loss scale",
    "use_seedable_sampler": ARGUMENTS_ELSEWHERE["rng_types"],
    "use_stateful_dataloader": "leave it out: engine.save_state() has the place in the data",
    "verify_device_map": "leave it out: a model is spread by Engine(strategy='zero3') or Engine(mesh=…)",
    # Fabric's
    "all_gather": "use engine.gather_for_metrics(values), or engine.reduce(values) where their sum is wanted",
    "all_reduce": "use engine.reduce(values, reduction='mean')",
    "clip_gradients": "use engine.clip_grad_norm_(max_norm)",
    "global_rank": "write engine.process_index",
    "is_global_zero": "write engine.is_main_process",
    "launch": _LAUNCHER_STARTS,
    "load": "use engine.load_state(folder)",
    "log_dict": "use engine.log(values)",
    "no_backward_sync": _EXCHANGED_ONCE,
    "rank_zero_first": "write engine.main_process_first(), or engine.local_main_process_first()",
    "seed_everything": "write Engine(seed=…)",
    "setup": _ALL_IN_ONE,
    "setup_dataloaders": _ALL_IN_ONE,
    "setup_module": _ALL_IN_ONE,
    "setup_optimizers": _ALL_IN_ONE,
    "world_size": "write engine.num_processes",
    # DeepSpeed's
    "global_steps": "write engine.step",
    "is_gradient_accumulation_boundary": "ask engine.sync_gradients before the step, engine.stepped after it",
    "load_checkpoint": "use engine.load_state(folder), or engine.checkpoints(folder).resume()",
    "module": "use the model: `prepare` wraps nothing",
    "save_checkpoint": "use engine.save_state(folder), or engine.checkpoints(folder).save()",
    "train_batch": "write the loop: `for batch in loader`, engine.backward(loss), optimizer.step()",
}
"""Of Accelerate's Accelerator, Lightning's Fabric and DeepSpeed's engine, with what to write here."""


def taken(method: str, there: Mapping[str, Any], **ours: Any) -> list[Any]:
    """The values of `ours`, of which some may be given by their names in Accelerate. Others than these are refused."""
    for name, value in there.items():
        here = NAMES_HERE.get(method, {}).get(name)
        if here is not None and ours[here] is None:
            ours[here] = value
        elif here is not None:
            raise ConfigError(
                f"engine.{method}({name}=…) is Accelerate's name for {here}, which is given too; give one"
            )
        else:
            usual, instead = NOTHING_HERE.get((method, name), ((), "docs/concepts/loop.md lists what there is"))
            if not any(isinstance(value, type(one)) and value == one for one in usual):
                raise ConfigError(f"engine.{method}({name}={one_line(repr(value), 40)}) is not known; {instead}")
    if missing := [name for name, value in ours.items() if value is None]:
        called = f"engine.{method}({', '.join(ours)})"
        raise ConfigError(f"engine.{method}({missing[0]}=None): {missing[0]} is missing; write {called}")
    return list(ours.values())


def refuse_argument(name: str, known: Iterable[str]) -> NoReturn:
    """A keyword argument that the Engine doesn't have."""
    raise ConfigError(f"Engine({name}=…) is not known; {_instead(name, ARGUMENTS_ELSEWHERE, known, '{}=')}")


def refuse_name(name: str, known: Iterable[str]) -> NoReturn:
    """An attribute that the Engine doesn't have."""
    public = [other for other in known if not other.startswith("_")]
    raise UnknownNameError(f"engine.{name} is not known; {_instead(name, NAMES_ELSEWHERE, public, 'engine.{}')}")


def _instead(name: str, elsewhere: Mapping[str, str], known: Iterable[str], form: str) -> str:
    if name in elsewhere:
        return elsewhere[name]
    nearest = difflib.get_close_matches(name, [*known, *elsewhere], n=1)
    if nearest and nearest[0] in elsewhere:
        return f"if {nearest[0]} is meant: {elsewhere[nearest[0]]}"
    return f"did you mean {form.format(nearest[0])}?" if nearest else "docs/concepts/loop.md lists what there is"
