"""Private names of torch, all in one place: looked up when this module is imported, each with its own error.

    torch has the name       it is that object, at no cost
    torch has it no more     a stand-in: whatever calls it raises ConfigError, which names feature and name

So a torch release that drops a name disables the feature that needs it and nothing else: a strategy that can't work
says so in `engine.prepare()`, and ddp trains on.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from datetime import timedelta
from functools import reduce
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.errors import ConfigError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import HashStore, PrefixStore, Store
else:
    from torch.distributed import HashStore, PrefixStore, Store

__all__ = ["HashStore", "PrefixStore", "Store"]  # public in torch.distributed, but not exported there for type checkers


class Missing:
    """Stands for a private name that torch does not have."""

    def __init__(self, name: str, feature: str) -> None:
        self.name, self.feature = name, feature

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise ConfigError(
            f"{self.feature} needs {self.name}, which torch {torch.__version__} does not have; install a torch release "
            "that paceline was tested with (see its requirements), or train without it"
        )


def resolve(name: str, feature: str) -> Any:
    """The object of that name, or what raises in its place; `feature` is what people know that needs it."""
    module, _, path = name.partition(":")
    try:
        return reduce(getattr, path.split("."), importlib.import_module(module))
    except (ImportError, AttributeError):
        return Missing(f"{module}.{path}", feature)


def attribute(of: type, name: str, feature: str) -> Any:
    """What gets the private attribute of an object of that class, which defines or declares it; or what raises."""
    declared = hasattr(of, name) or name in getattr(of, "__annotations__", {})
    return attrgetter(name) if declared else Missing(f"{of.__module__}.{of.__name__}.{name}", feature)


def require(*needed: Any) -> None:
    """Raise for the first of these that torch does not have: for a strategy to ask before it touches a model."""
    for one in needed:
        if isinstance(one, Missing):
            one()


_META = "a model on the meta device"
_WATCHED = "collectives that CommDebugMode sees"
_COMPILED = "DistributedDataParallel under torch.compile"

# -- tensors -----------------------------------------------------------------------------------------------------------

foreach_copy_: Callable[[list[Tensor], list[Tensor]], None] = resolve("torch:_foreach_copy_", "copying gradients")
foreach_mul_: Callable[[list[Tensor], float | Tensor], None] = resolve("torch:_foreach_mul_", "clip_grad_norm_()")
foreach_norm: Callable[[list[Tensor], float], list[Tensor]] = resolve("torch:_foreach_norm", "loss scaling")

version_of: Callable[[Tensor], int] = attribute(Tensor, "_version", "a look for writes to weights")  # it counts them

plain_torch_function = resolve("torch._C:DisableTorchFunctionSubclass", "a strategy with sharded gradients")

innermost_function_mode = resolve("torch.overrides:_get_current_function_mode", "a look at the loop's random numbers")

without_modes = resolve("torch.utils._python_dispatch:_disable_current_modes", "weights in shards")

eval_frame_callback = resolve("torch._C._dynamo.eval_frame:get_eval_frame_callback", "weights in shards")


def compiler() -> Compiler:
    """torch's compiler, looked up when it is used: importing it takes seconds."""
    feature = "Engine(compile=…)"
    return Compiler(resolve("torch._dynamo.utils:counters", feature), resolve("torch._dynamo:config", feature))


class Compiler:
    def __init__(self, counters: Any, settings: Any) -> None:
        require(counters, settings)
        self._counters, self._settings = counters, settings

    @property
    def graphs(self) -> int:
        """That this process has compiled."""
        return int(self._counters["stats"]["unique_graphs"])

    def stay_compiled(self, *, wanted: bool) -> bool:
        """Whether a function that was compiled too often raises, or goes on as it is; what was so before."""
        before = bool(self._settings.fail_on_recompile_limit_hit)
        self._settings.fail_on_recompile_limit_hit = wanted
        return before


_COMPILED_BLOCKS = "Engine(compile=…)"
_graph_watchers: list[Callable[[Any], None]] = []


def watching_graphs(see: Callable[[Any], None]) -> Callable[[], None]:
    """From now on `see(graph)` is told of every graph that `inductor` is given; what comes back ends that."""
    _graph_watchers.append(see)
    return lambda: _graph_watchers.remove(see) if see in _graph_watchers else None


def inductor(mode: str | None) -> Any:
    """torch.compile(backend=…): what the name "inductor" stands for, but its graphs are told of."""
    own = resolve("torch:_TorchCompileInductorWrapper", _COMPILED_BLOCKS)
    require(own)

    class Inductor(own):  # type: ignore[misc,valid-type]
        __name__ = "inductor"  # in torch's messages

        def __call__(self, graph: Any, *inputs: Any, **options: Any) -> Any:
            for see in tuple(_graph_watchers):
                see(graph)
            return super().__call__(graph, *inputs, **options)

    return Inductor(mode, None, False)


dispatch_modes: Callable[[], int] = resolve("torch._C:_len_torch_dispatch_stack", _WATCHED)  # how many are active
_mode_stack: Callable[[], list[Any]] = resolve(
    "torch.utils._python_dispatch:_get_current_dispatch_mode_stack", _WATCHED
)
_without_top_mode: Callable[[], Any] = resolve("torch.utils._python_dispatch:_pop_mode_temporarily", _WATCHED)


class Watched:
    """An operator of torch as dispatch modes get to see it, whose work is done in Python instead of in its kernel."""

    def __init__(self, operator: Any, run: Callable[[], Any]) -> None:
        self._operator, self._run = operator, run

    def __call__(self, *_: Any, **__: Any) -> Any:
        return self._run()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._operator, name)

    def __eq__(self, other: object) -> bool:
        return bool(self._operator == other)

    def __hash__(self) -> int:
        return hash(self._operator)

    def __repr__(self) -> str:
        return repr(self._operator)


def seen_by_modes(operator: Any, arguments: tuple[Any, ...], run: Callable[[], Any]) -> Any:
    """Call `run` as torch calls a kernel: every active mode sees the operator, and none what `run` does.

    Modes that take part in tracing (fake, functional, proxy tensors) replace what an operator does: they are not asked.
    """
    if not dispatch_modes() or any(mode.is_infra_mode() for mode in _mode_stack()):
        return run()
    with _without_top_mode() as mode:
        below = Watched(operator, lambda: seen_by_modes(operator, arguments, run))
        return mode.__torch_dispatch__(below, (), arguments, {})


_code_strategy = resolve("torch._C._dynamo.eval_frame:set_code_exec_strategy", _COMPILED)
_strategy = resolve("torch._C._dynamo.eval_frame:_FrameExecStrategy", _COMPILED)
_action = resolve("torch._C._dynamo.eval_frame:_FrameAction", _COMPILED)


def never_traced(function: Callable[..., Any]) -> None:
    """torch.compile leaves this function alone, and what it calls; dynamo itself is not imported for it."""
    if not any(isinstance(one, Missing) for one in (_code_strategy, _strategy, _action)):
        _code_strategy(function.__code__, _strategy(_action.SKIP, _action.SKIP))


_use_count = resolve("torch._C:_storage_Use_Count", "using the memory of gathered weights again")
_storage_id: Callable[[Any], int] = attribute(torch.UntypedStorage, "_cdata", _META)


def memory_id(tensor: Tensor) -> int:
    """The same for all tensors over the same memory, also where there is none (on the meta device)."""
    return _storage_id(tensor.untyped_storage())


def _uses(tensor: Tensor) -> int:
    return int(_use_count(memory_id(tensor)))


def _counts_views() -> bool:
    """Whether torch counts who looks at memory as it did when this was written: by trying it."""
    if isinstance(_use_count, Missing) or isinstance(_storage_id, Missing):
        return False
    tensor = torch.empty(1)
    alone = _uses(tensor)
    view = tensor[:]
    seen = _uses(tensor)
    del view
    return (alone, seen, _uses(tensor)) == (_ALONE, _ALONE + 1, _ALONE)


_ALONE = 2  # uses of memory that only one tensor has, while it is being counted
_CAN_COUNT = _counts_views()


def nothing_else_views(tensor: Tensor) -> bool:
    """Whether no other tensor has this one's memory; False where torch can't tell."""
    return _CAN_COUNT and _uses(tensor) == _ALONE


# -- modules -----------------------------------------------------------------------------------------------------------

_batch_norm = resolve("torch.nn.modules.batchnorm:_BatchNorm", "BatchNorm of your own")
_known_norms = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
BATCH_NORMS: tuple[type[nn.Module], ...] = _known_norms if isinstance(_batch_norm, Missing) else (_batch_norm,)

own_parameters: Callable[[nn.Module], dict[str, nn.Parameter | None]] = attribute(nn.Module, "_parameters", _META)
own_buffers: Callable[[nn.Module], dict[str, Tensor | None]] = attribute(nn.Module, "_buffers", _META)
_apply: Callable[[nn.Module], Callable[[Callable[[Tensor], Tensor]], Any]] = attribute(nn.Module, "_apply", _META)


def apply_to_tensors(model: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """As model.to() does it: parameters and buffers stay the objects that they are."""
    _apply(model)(change)


def each_operator(see: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> Any:
    """Inside this context `see(operator, args, kwargs)` is called in place of each operator, and has to run it."""
    mode = resolve("torch.utils._python_dispatch:TorchDispatchMode", "a look at each operator")
    require(mode)

    class Seen(mode):  # type: ignore[misc,valid-type]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return see(func, args, kwargs or {})

    return Seen()


_PLAN = "paceline plan"


def fake_tensors(**options: Any) -> Any:
    """A mode in which tensors have no memory. Looked up when it is used: importing it takes time."""
    return resolve("torch._subclasses.fake_tensor:FakeTensorMode", _PLAN)(**options)


_PLAN_COMPILED = "paceline plan --compile"
pytree: Any = resolve("torch.utils:_pytree", _PLAN_COMPILED)  # the module


def partitioned(function: Callable[..., Any], compile_graph: Callable[[Any], Callable[..., Any]]) -> Callable[..., Any]:
    """`function` as torch.compile cuts it: a graph of forward and one of backward, with what is saved between the two.

    `compile_graph(graph)` gives what runs in place of each: it is called with the graph's inputs. The graphs consist of
    inductor's operators, and what backward makes again is chosen by torch's own cut.
    """
    aot_function = resolve("torch._functorch.aot_autograd:aot_function", _PLAN_COMPILED)
    cut = resolve("torch._functorch.partitioners:min_cut_rematerialization_partition", _PLAN_COMPILED)
    table = resolve("torch._inductor.decomposition:select_decomp_table", _PLAN_COMPILED)
    require(aot_function, cut, table)
    made: Callable[..., Any] = aot_function(
        function,
        fw_compiler=lambda graph, _: compile_graph(graph),
        bw_compiler=lambda graph, _: compile_graph(graph),
        partition_fn=lambda *given, **named: cut(*given, **(named | {"compiler": "inductor"})),
        decompositions=table(),
    )
    return made


def watching_operators(note: Callable[[Any, Any, Any, Any], None]) -> Any:
    """A context in which every operator of this thread, and of its backward, is told: (it, args, kwargs, result)."""

    def see(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = operator(*args, **kwargs)
        note(operator, args, kwargs, out)
        return out

    return each_operator(see)


def memory_written_by(run: Callable[[], Any]) -> set[int]:
    """The `memory_id` of every tensor that is written to while `run` runs."""
    written: set[int] = set()

    def see(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for argument, value in zip(operator._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, Tensor):
                written.add(memory_id(value))
        return operator(*args, **kwargs)

    with each_operator(see):
        run()
    return written


# -- loader processes --------------------------------------------------------------------------------------------------

_LOADERS = "DataLoader(num_workers=…)"
loader_worker: Any = resolve("torch.utils.data._utils:worker", _LOADERS)  # the module: get_worker_info() reads it
watch_for_dead_loaders: Callable[[], None] = resolve(
    "torch.utils.data._utils.signal_handling:_set_SIGCHLD_handler", _LOADERS
)
pin_memory: Callable[[Any], Any] = resolve("torch.utils.data._utils.pin_memory:pin_memory", "pin_memory=True")

# -- the profiler ------------------------------------------------------------------------------------------------------

_PROFILER = "collectives by their names in the profiler"
profiler_enabled: Callable[[], bool] = resolve("torch._C._autograd:_profiler_enabled", _PROFILER)
begin_record: Callable[..., Any] = resolve("torch._C._autograd:_record_function_with_args_enter", _PROFILER)
end_record: Callable[[Any], None] = resolve("torch._C._autograd:_record_function_with_args_exit", _PROFILER)

# -- torch.distributed -------------------------------------------------------------------------------------------------

_DEFAULT_GROUP = "torch.distributed inside a job"
_world: Any = resolve("torch.distributed.distributed_c10d:_world", _DEFAULT_GROUP)


def rename_default_group(backend: str) -> None:
    """What `torch.distributed.get_backend()` says of the default group, and what its subgroups are made with."""
    from torch.distributed.distributed_c10d import Backend

    require(_world)
    group = _world.default_pg
    _world.pg_map[group] = (Backend(backend), _world.pg_map[group][1])
    _world.pg_backend_config[group] = "cpu:gloo,cuda:nccl" if backend == "nccl" else f"cpu:{backend}"


_gloo_options: Any = resolve("torch.distributed:ProcessGroupGloo._Options", "the gloo backend")
_coalescing: Any = resolve("torch.distributed:ProcessGroup._start_coalescing", "messages to several workers at once")


def gloo_options(address: str, timeout: timedelta, threads: int) -> Any:
    """Without an address gloo listens on whatever the host name resolves to, which may be any interface."""
    options = _gloo_options()
    options._timeout, options._threads = timeout, threads
    options._devices = [torch.distributed.ProcessGroupGloo.create_device(hostname=address)]
    return options


def started_as_one(group: Any, device: torch.device, start: Callable[[], None]) -> Any:
    """The work of all operations that `start` begins."""
    require(_coalescing)
    group._start_coalescing(device)
    start()
    return group._end_coalescing(device)


flight_record: Callable[..., str | bytes] = resolve(
    "torch._C._distributed_c10d:_dump_fr_trace_json", "torch's flight recorder"
)


def let_wait(group: Any, timeout: timedelta) -> None:
    """A group that was built with another timeout: ours, torch's own, and torch's before it had `set_timeout`."""
    (getattr(group, "set_timeout", None) or group._set_default_timeout)(timeout)


# -- optimizers --------------------------------------------------------------------------------------------------------

_HOOKS = "hooks on the step of a sharded optimizer"
step_pre_hooks: Callable[[Optimizer], dict[int, Any]] = attribute(Optimizer, "_optimizer_step_pre_hooks", _HOOKS)
step_post_hooks: Callable[[Optimizer], dict[int, Any]] = attribute(Optimizer, "_optimizer_step_post_hooks", _HOOKS)
OPTIMIZER_HOOKS = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)
STEP_WAS_CALLED = "_opt_called"  # an attribute that schedulers look for, to see that optimizer.step() came before them
WRAPPED_BY_SCHEDULER = "_wrapped_by_lr_sched"  # an attribute of a step() that a scheduler has wrapped, for its check
SCALES_BY_ITSELF = "_step_supports_amp_scaling"  # an attribute that torch's GradScaler asks an optimizer for


def shape_of_input(node: Any, place: int) -> tuple[tuple[int, ...], torch.dtype] | None:
    """Of the tensor that a node of autograd's graph makes the gradient of, if it makes one."""
    metadata = () if node is None else getattr(node, "_input_metadata", ())
    return (tuple(map(int, metadata[place].shape)), metadata[place].dtype) if place < len(metadata) else None


def saved_other(node: Any) -> Tensor | None:
    """What a node of a graph has multiplied or divided by; None where torch doesn't tell, or has let go of it.

    Only a warning reads it. With a hook it would be computed again (activation checkpointing), so it is left alone.
    """
    try:
        saved = node._raw_saved_other
        other = None if saved.unpack_hook is not None else saved.data
    except (AttributeError, RuntimeError):  # another torch, or a graph that was used already
        return None
    return other if isinstance(other, Tensor) else None
