"""torch's default process group is the job's: whatever asks `torch.distributed` sees all workers.

    dist.is_initialized(), get_rank(), get_world_size()      true from `Engine()` on, of the workers that there are now
    dist.all_reduce(x), torchmetrics, dist.new_group(…)      between these workers, over the engine's backend
    a script that calls init_process_group before `Engine()` keeps its own group, and this module does nothing

The group has connections of its own, so a script's collectives and the engine's can't get into each other's order. They
are made with the first collective that is asked for: a script without any pays nothing for them, nor does a recovery.

In an elastic job the group ends with its generation: a collective that waits for a lost worker raises (it can't be
tried again, since only the script knows what it was for), and the recovery makes the group of the next one. A worker
that has yet to join is alone in it, as in `engine.world`: what its script runs between its loops returns at once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.collectives.communicator import Communicator
from paceline.errors import ConfigError, WorldError
from paceline.torch_compat import HashStore, PrefixStore, Store, rename_default_group
from paceline.world.world import World

LAZY_BACKEND = "paceline_job"
"""What c10d makes the group with; whoever asks for its name is told the backend that moves its tensors."""

Connect = Callable[[World, Store], Communicator]
Check = Callable[[Sequence[Tensor]], None]
"""Raises where a collective can't be called; it is told which tensors it will write to."""


class JobGroup(dist.ProcessGroup):
    """A process group that connects with its first collective, and then passes all of them on."""

    def __init__(self, world: World, store: Store, backend: str, connect: Connect, check: Check) -> None:
        super().__init__(world.rank, world.size)  # type: ignore[call-arg]
        self._world, self._store, self._backend, self._connect, self._check = world, store, backend, connect, check
        self._comm: Communicator | None = None
        self._groups: dict[str, dist.ProcessGroup] = {}
        # Whatever the backend is it moves the host's tensors, which is what torch.distributed.checkpoint asks for.
        self._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.CUSTOM, None)
        self._over: str | None = None
        self._name = self._description = ""

    def group_for(self, arguments: Iterable[Any], received: Sequence[Tensor] = ()) -> Any:
        """The c10d group that moves tensors of the device of `arguments`; without any, the host's."""
        if self._over is not None:
            raise WorldError(
                f"torch.distributed: {self._over}; this group is over. Ask torch.distributed for its default group "
                "again in every step, or use engine.reduce() and engine.gather_for_metrics(), which are tried again"
            )
        self._check(received)
        if self._comm is None:
            self._comm = self._connect(self._world, self._store)
            self._groups = {kind: self._whole(kind, group) for kind, group in self._comm.groups.items()}
        kind = next((tensor.device.type for tensor in _tensors(arguments)), "cpu")
        if kind not in self._groups:
            kinds = " and ".join(self._groups)
            raise ConfigError(
                f"torch.distributed: the job's backend {self._backend!r} moves tensors on {kinds}, not on {kind}; move "
                "them there, or choose another with Engine(backend=…)"
            )
        return self._groups[kind]

    def _whole(self, kind: str, group: Any) -> dist.ProcessGroup:
        """gloo's and NCCL's have the old names of collectives alone; C++, as for a DTensor, calls the new ones too."""
        if isinstance(group, dist.ProcessGroup):
            return group
        whole = dist.ProcessGroup(self._world.rank, self._world.size)  # type: ignore[call-arg]
        whole._register_backend(torch.device(kind), dist.ProcessGroup.BackendType.CUSTOM, group)
        return whole

    def end(self, why: str) -> None:
        self._over = self._over or why
        self._groups = {}  # the communicator has to be the last that holds them
        if self._comm is not None:
            self._comm.close()
            self._comm = None

    # -- what c10d asks of a group -----------------------------------------------------------------------------------

    def shutdown(self) -> None:
        self.end("it was shut down")

    abort = shutdown

    def getBackendName(self) -> str:  # noqa: N802 (c10d's name)
        return self._backend

    name = getBackendName

    def _get_backend(self, device: torch.device) -> Any:
        """Of the host's tensors, None before the first collective: asking connects nothing."""
        if torch.device(device).type != "cpu":
            return super()._get_backend(device)
        return None if self._comm is None else self._comm.groups["cpu"]

    def setGroupName(self, name: str) -> None:  # noqa: N802 (c10d's name)
        self._name = name

    def getGroupName(self) -> str:  # noqa: N802 (c10d's name)
        return self._name

    def setGroupDesc(self, description: str) -> None:  # noqa: N802 (c10d's name)
        self._description = description

    def getGroupDesc(self) -> str:  # noqa: N802 (c10d's name)
        return self._description


COLLECTIVES = (
    "allreduce",
    "allreduce_coalesced",
    "broadcast",
    "reduce",
    "allgather",
    "allgather_coalesced",
    "_allgather_base",
    "allgather_into_tensor_coalesced",
    "all_gather_single",
    "all_gather_single_coalesced",
    "reduce_scatter",
    "_reduce_scatter_base",
    "reduce_scatter_tensor_coalesced",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "alltoall",
    "alltoall_base",
    "all_to_all_single",
    "gather",
    "scatter",
    "barrier",
    "monitored_barrier",
    "send",
    "recv",
    "recv_anysource",
)
"""Methods that move tensors, by c10d's names: those that Python's functions call, and those that C++ does."""


_GIVES_NOTHING = frozenset({"send", "barrier", "monitored_barrier"})
"""Of all others the first argument is what they write to."""


def _passed_on(name: str) -> Callable[..., Any]:
    def collective(self: JobGroup, *arguments: Any, **options: Any) -> Any:
        given = (*arguments, *options.values())
        received = () if name in _GIVES_NOTHING else tuple(_tensors(given[:1]))
        return getattr(self.group_for(given, received), name)(*arguments, **options)

    collective.__name__ = name
    return collective


for _name in COLLECTIVES:
    setattr(JobGroup, _name, _passed_on(_name))


def _tensors(arguments: Iterable[Any]) -> Iterable[Tensor]:
    for argument in arguments:
        if isinstance(argument, Tensor):
            yield argument
        elif isinstance(argument, (list, tuple)):
            yield from _tensors(argument)


class DefaultGroup:
    """The one owner of torch's default group in an engine's process, from its first meeting to its end."""

    def __init__(self, backend: str, timeout_s: float, connect: Connect, check: Check) -> None:
        self._backend, self._timeout_s, self._connect, self._check = backend, timeout_s, connect, check
        self._group: JobGroup | None = None
        self._has_own = dist.is_available() and not dist.is_initialized()

    def meet(self, world: World, store: Store | None) -> None:
        """From now on these are the workers of the default group; `store`: of their generation."""
        if not self._has_own or world.is_server:
            return
        self.leave("the workers have changed")
        if dist.is_initialized():  # the script has made one in place of ours
            self._has_own = False
            return
        # One without others meets none: not in a store either, which may be of a generation that is over when a script
        # that joins an elastic job comes to its first collective.
        place = HashStore() if store is None or world.size == 1 else PrefixStore("default group", store)
        group = JobGroup(world, place, self._backend, self._connect, self._check)
        self._group = group
        if LAZY_BACKEND.upper() not in dist.Backend._plugins:
            dist.Backend.register_backend(LAZY_BACKEND, _next_group, devices=["cpu", "cuda"])
        before = sys.excepthook
        _made.append(group)
        dist.init_process_group(
            LAZY_BACKEND,
            store=place,
            rank=world.rank,
            world_size=world.size,
            timeout=timedelta(seconds=self._timeout_s),
        )
        sys.excepthook = before  # torch's puts the rank before every line of a traceback: the launcher does that
        rename_default_group(self._backend)

    def leave(self, why: str) -> None:
        group, self._group = self._group, None
        if group is None:
            return
        group.end(why)
        if dist.is_initialized() and dist.group.WORLD is group:
            dist.destroy_process_group()


_made: list[JobGroup] = []
"""Between an init_process_group and the function that it calls for a group of our backend."""


def _next_group(*_: Any) -> JobGroup:
    return _made.pop()


def check_batch_norms(models: Iterable[nn.Module], reduction: str) -> None:
    """SyncBatchNorm asks torch for its group, and finds all workers in it."""
    for model in models:
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.SyncBatchNorm) and reduction == "exact":
                raise ConfigError(
                    f"{name or type(model).__name__} is a SyncBatchNorm: its statistics are those of the micro-batches "
                    "that the workers have at the same time, so its numbers depend on how many workers there are. Use "
                    "BatchNorm, whose statistics are those of a micro-batch, or Engine(reduction='fast')"
                )
