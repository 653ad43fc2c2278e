"""Weights in shards: whole while a unit is used, elsewhere otherwise. fsdp, zero3 off one host and hybrid all use this.

    forward    unit 0 ─ unit 1 ─ unit 2        before a module runs its unit is gathered, afterwards released
    backward   unit 2 ─ unit 1 ─ unit 0        gathered again when autograd wants a saved weight, released when the
                                               unit's gradients are there
    ahead      the next unit of the item before is asked for while this one is used

Autograd keeps no gathered weight (`SavedWeights`). So a release is nothing but letting go: what anything still uses
stays alive, and nothing is ever read that was freed. Weights that are used in other ways than by their module are
gathered by `UnmaterialisedParameter`. With shards on the host a device has the units in use and nothing else.

What is below: `WeightsInShards`, all weights of a job; `ShardedWeights`, those that were cut together; `GatheredUnit`,
one unit while it is here; `UnitOrder`, what is gathered ahead; `LocalRanges`, what this worker owns; `SavedWeights`,
what autograd keeps.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from paceline.collectives.communicator import Work
from paceline.errors import ConfigError, GenerationEnded, LoopError
from paceline.optim.offload import HOST, Lift
from paceline.sharding.bucket import BucketShards, OwnedPiece, cut_buckets
from paceline.sharding.flat_layout import Piece, extent, in_logical_order, part_of, piece_of
from paceline.sharding.local_shard import LocalShard
from paceline.sharding.unit import Classes, Unit, cut_units, unit_buckets
from paceline.strategies.buckets import BufferPool, gradient_specs
from paceline.strategies.fsdp.shard_pulls import NoPeers, ShardPulls
from paceline.strategies.fsdp.unmaterialised import (
    advice_for_frozen,
    dematerialise,
    engine_is_closed,
    is_unmaterialised,
    materialise,
)
from paceline.strategies.master_weights import MasterShards
from paceline.strategies.meta_device import fill, fill_modules, module_names
from paceline.strategies.registry import Job
from paceline.strategies.strategy import WriteWatch
from paceline.strategies.zero.sharded_optimizer import OptimizerShard, check_apart
from paceline.strategies.zero.weights import ModelWeights
from paceline.torch_compat import eval_frame_callback, without_modes
from paceline.world import messages
from paceline.world.process import give_back_free_memory

_KEPT_BESIDE = 1  # units used before the current one that stay, unless their module has ended


class WeightsInShards(ModelWeights):
    """All weights of a job's optimizers: those of `prepare`, and more for parameters that an optimizer gets later."""

    on_every_worker = False

    def __init__(
        self, job: Job, strategy: str, classes: Classes | None, masters: MasterShards, *, on_host: bool, frozen: bool
    ) -> None:
        """`frozen`: also parameters that no optimizer holds."""
        self._job, self._strategy, self._classes, self._on_host = job, strategy, classes, on_host
        self.all: list[ShardedWeights] = []
        masters.rounded = lambda parameter, piece: self.of(parameter).mine.of_piece(parameter, piece)
        self._saved = SavedWeights(self.all)
        try:
            held = held_parameters(job) + (frozen_parameters(job) if frozen else [])
            self.hold([(job.names.get(id(parameter), "unnamed"), parameter) for parameter in held])
        except BaseException:  # as when a worker dies while all of them begin
            self.teardown()
            raise

    def of(self, parameter: Parameter) -> ShardedWeights:
        return next(some for some in self.all if some.knows(parameter))

    def hold(self, named: Sequence[tuple[str, Parameter]]) -> None:
        """Also parameters that are frozen now."""
        new = {id(p): (name, p) for name, p in named if not any(some.knows(p) for some in self.all)}
        if new or not self.all:
            check_shardable(self._job.models, list(new.values()), self._strategy)
            number = len(self.all)
            classes = self._classes if number == 0 else None
            parameters = [parameter for _, parameter in new.values()]
            self.all.append(ShardedWeights(self._job, parameters, classes, number, on_host=self._on_host))

    def check(self) -> None:
        """What the script wrote to a unit is found when that is released."""

    def update(self, shard: OptimizerShard, run: Callable[[], Any]) -> Any:
        self._job.comm.barrier()  # until now a worker may look at weights, and gets those before the update
        for some in self.all:
            some.drain()
        result = run()
        for some in self.all:
            some.updated()
        return result

    def close(self) -> None:
        self._saved.close()
        for some in self.all:
            some.close()

    def teardown(self) -> None:
        self._saved.close()
        for some in self.all:
            some.teardown()


def held_parameters(job: Job) -> list[Parameter]:
    """Those of the optimizers, trained or frozen."""
    return [p for optimizer in job.optimizers for group in optimizer.param_groups for p in group["params"]]


def frozen_parameters(job: Job) -> list[Parameter]:
    """Those that no optimizer holds and that can be in shards, as the base of adapters.

    In an elastic job there are none: the part of a worker that is lost would be nowhere, since the in-memory checkpoint
    has what changes.
    """
    if job.world.is_elastic:
        return []
    known = {id(p): p for model in job.models for p in model.parameters()}
    memory = Counter(p.untyped_storage().data_ptr() for p in known.values() if not p.is_meta)
    held = {id(p) for p in held_parameters(job)}
    return [
        p
        for p in known.values()
        if id(p) not in held
        and not p.requires_grad
        and type(p) is Parameter
        and p.is_floating_point()
        and (in_logical_order(p) or extent(p) == p.numel())
        and (p.is_meta or memory[p.untyped_storage().data_ptr()] == 1)
    ]


def check_shardable(models: Sequence[nn.Module], named: Sequence[tuple[str, Parameter]], strategy: str) -> None:
    check_apart(named)
    for name, parameter in named:
        if not in_logical_order(parameter) and extent(parameter) != parameter.numel():
            raise ConfigError(
                f"strategy={strategy!r}: parameter {name!r} has gaps between its elements in memory and can't be "
                "gathered; make it contiguous(), or use strategy='zero2'"
            )
    check_not_compiled(models)


class ShardedWeights:
    """Weights that are cut into units and shards once."""

    def __init__(
        self,
        job: Job,
        parameters: Sequence[Parameter],
        classes: Classes | None,
        number: int = 0,
        *,
        on_host: bool = False,
    ) -> None:
        """The parameters are dematerialised: their weights are here now, in the `number`-th of these that a job has."""
        self._rank, workers = job.comm.rank, job.comm.size
        self.parameters, self._device, self.on_host = parameters, job.device, on_host
        self._index = {id(parameter): number for number, parameter in enumerate(parameters)}
        specs = [replace(spec, device=job.device) for spec in gradient_specs(parameters)]
        self._units = cut_units(job.models, self._index, specs, classes=classes, unit_bytes=job.bucket_bytes)
        self._unit_of = {number: place for place, unit in enumerate(self._units) for number in unit.parameters}
        uncut = {number for number, parameter in enumerate(parameters) if not in_logical_order(parameter)}
        buckets = [list(unit_buckets(specs, unit, job.bucket_bytes, uncut)) for unit in self._units]
        # Backward comes to the last unit first.
        self._cut = cut_buckets([b for of_unit in reversed(buckets) for b in of_unit], workers, uncut).buckets
        found = {shards.bucket: shards for shards in self._cut}
        self._buckets = [[found[bucket] for bucket in of_unit] for of_unit in buckets]
        self._strides = [parameter.stride() for parameter in parameters]
        self.mine = LocalRanges(parameters, self._rank, self._memory)
        self._shards: list[list[Tensor]] = []
        self._gathered: dict[int, GatheredUnit] = {}
        self._held = [0] * len(self._units)  # modules that run with it
        self._recent: list[int] = []
        self._by_memory: dict[int, tuple[int, int, torch.dtype]] = {}  # by address: the unit, its bucket there
        self._order = UnitOrder()
        self._hooks: list[RemovableHandle] = []
        self._wanted = [0] * len(self._units)  # gradients in a backward
        self._there = [0] * len(self._units)
        self._pool, self._lift = BufferPool(viewed=True), Lift(job.device)
        self._watch = WriteWatch()
        self._closed = self._in_step = False
        self._cut_up(job)
        self._pulls: NoPeers | ShardPulls = NoPeers()
        try:
            self._pulls = self._pulls if workers == 1 else ShardPulls(job, self._parts, number)
        except BaseException:
            self.teardown()
            raise
        self._install(job.models)

    def buckets_of(self, parameters: Sequence[Parameter]) -> list[BucketShards]:
        """How the gradients of some of the parameters travel, these numbered by place; in backward's order."""
        known = [(place, parameter) for place, parameter in enumerate(parameters) if self.knows(parameter)]
        numbers = {self._index[id(parameter)]: place for place, parameter in known}
        found = [shards.only(numbers) for shards in self._cut]
        return [shards for shards in found if shards is not None]

    def knows(self, parameter: Parameter) -> bool:
        return id(parameter) in self._index

    # -- what this worker owns ---------------------------------------------------------------------------------------

    def _cut_up(self, job: Job) -> None:
        """Unit by unit, so that of a model on the meta device never more than a unit is whole."""
        names, owners = module_names(job.models, job.given), dict[int, list[nn.Module]]()
        for module in (module for model in job.models for module in model.modules()):
            for parameter in module.parameters(recurse=False):
                owners.setdefault(id(parameter), []).append(module)
        for number, unit in enumerate(self._units):
            used = [module for place in unit.parameters for module in owners.get(id(self.parameters[place]), ())]
            was_empty = any(parameter.is_meta for parameter in self._of_unit(number))
            fill_modules(used, names, seed=job.seed, device=job.device)
            self._shards.append([self.mine.cut(shards) for shards in self._buckets[number]])
            for parameter in (self.parameters[place] for place in unit.parameters):
                if parameter.device != job.device:  # its weights were cut on the host, and it is used on the device
                    layout = parameter.shape, parameter.stride()
                    parameter.data = torch.empty_strided(*layout, dtype=parameter.dtype, device=job.device)
            self._release(number)
            if was_empty:  # shards among them keep the holes that whole weights leave from being used again
                give_back_free_memory()
        for model in job.models:
            fill(model, names, seed=job.seed, device=job.device)

    def _memory(self, elements: int, dtype: torch.dtype) -> Tensor:
        if self.on_host:
            return self._lift.keep(elements, dtype)
        return torch.empty(elements, dtype=dtype, device=self._device)

    def _parts(self, unit: int) -> list[Tensor]:
        return [part.cpu() for part in self._shards[unit] if part.numel()]

    def release_all(self) -> None:
        for unit in list(self._gathered):
            self._release(unit)

    def drain(self) -> None:
        """Release all, and wait until nothing reads the own pieces any more."""
        self.release_all()
        if self.on_host:
            self._lift.finish()

    def updated(self) -> None:
        """The own pieces have been changed, on every worker, since all was released."""
        if self._device.type == "cuda" and self._pulls.peers and not self.on_host:
            torch.cuda.current_stream(self._device).synchronize()  # who answers others looks from another thread
        self._in_step = False
        self._pulls.changed()

    def load_full(self, parameter: Parameter, full: Tensor) -> None:
        """All workers have these weights for the parameter."""
        self._release(self._unit_of[self._index[id(parameter)]])
        self._pulls.meet()  # until now a worker may look at weights, and gets the old ones
        self._lift.finish()
        self.mine.load_full(parameter, full)
        self.updated()

    # -- gathering and releasing --------------------------------------------------------------------------------------

    def fetch(self, parameter: Parameter) -> None:
        if self._closed:
            raise engine_is_closed()
        unit = self._unit_of[self._index[id(parameter)]]
        self._use(unit)
        self._gathered[unit].by_hand = True
        if not self._in_step:
            self.check_here(parameter)

    def _use(self, unit: int, *, in_backward: bool = False) -> None:
        """Have the unit's weights here, and its likely successor's on their way."""
        records = in_backward or torch.is_grad_enabled()
        if unit in self._gathered and self._recent[-1:] == [unit]:
            self._order.after(unit, in_backward=in_backward, records=records)
            return
        # Checkpointing would take our copies for the model's, and what an inference makes could not be trained with.
        with torch.inference_mode(False), torch.no_grad(), without_modes():
            self._bring(unit, in_backward, records)

    def _bring(self, unit: int, in_backward: bool, records: bool) -> None:
        self._start(unit)
        following = self._order.after(unit, in_backward=in_backward, records=records)
        if following is not None:
            self._start(following)
        gathered = self._gathered[unit]
        if not gathered.is_here:
            self._arrive(unit, gathered)
        self._recent = [*(other for other in self._recent if other != unit), unit]
        while len(self._recent) > 1 + _KEPT_BESIDE:
            old = self._recent.pop(0)
            if not self._held[old] and old != following:
                self._release(old)

    def _start(self, unit: int) -> None:
        if unit in self._gathered:
            return
        flats, arriving = [], {peer: list[Tensor]() for peer in self._pulls.peers}
        copies, lifts = list[tuple[Tensor, Tensor]](), list[tuple[Tensor, Tensor]]()
        for shards, own in zip(self._buckets[unit], self._shards[unit], strict=True):
            flat = self._pool.take(shards.bucket.elements, own.dtype, self._device)
            for worker, (start, stop) in enumerate(shards.ranges):
                part = flat[start:stop]
                if worker == self._rank:
                    if self.on_host:
                        lifts.append((own, part))
                    else:
                        part.copy_(own)
                elif start < stop:
                    host = part if part.device.type == "cpu" else self._lift.host_buffer(stop - start, part.dtype)
                    copies += [] if host is part else [(host, part)]
                    arriving[worker].append(host)
            flats.append(flat)
        works = self._pulls.start(unit, {peer: parts for peer, parts in arriving.items() if parts})
        lifted = self._lift.start(lifts) if lifts else None
        self._gathered[unit] = GatheredUnit(flats, works, copies, lifted)

    def _arrive(self, unit: int, gathered: GatheredUnit) -> None:
        gathered.end(self._lift)
        gathered.arrive(0.0 if self._in_step else math.nan)
        for place, (shards, flat) in enumerate(zip(self._buckets[unit], gathered.flats, strict=True)):
            if flat.numel():
                self._by_memory[flat.untyped_storage().data_ptr()] = unit, place, flat.dtype
            for entry in shards.bucket.entries:
                weights = flat.as_strided(entry.shape, self._strides[entry.parameter], entry.offset)
                materialise(self.parameters[entry.parameter], weights)
        gathered.is_here = True
        self._watch.mark_clean(self._of_unit(unit))

    def _of_unit(self, unit: int) -> list[Parameter]:
        return [self.parameters[number] for number in self._units[unit].parameters]

    def _release(self, unit: int) -> None:
        """Forget what was gathered; what still uses a part of it keeps that alive."""
        gathered = self._gathered.pop(unit, None)
        if gathered is not None:
            if not gathered.is_here:  # it was asked for and is not wanted: its messages must end all the same
                gathered.end(self._lift)
                return
            for flat in gathered.flats:
                self._by_memory.pop(flat.untyped_storage().data_ptr(), None)
                self._pool.give_back(flat)
            if not gathered.is_lost:
                self._check_unwritten(unit, gathered)
        self._recent = [other for other in self._recent if other != unit]
        for parameter in self._of_unit(unit):
            if not is_unmaterialised(parameter):
                dematerialise(parameter, self)

    def _check_unwritten(self, unit: int, gathered: GatheredUnit) -> None:
        """Every element has an owner, so what all workers wrote at least one of them finds."""
        buckets = zip(self._buckets[unit], gathered.flats, self._shards[unit], strict=True)
        if any(map(self._watch.was_written, self._of_unit(unit))) or any(
            gathered.was_written(self.parameters, shards, self._rank, flat, own) for shards, flat, own in buckets
        ):
            raise LoopError(
                f"a parameter of {self._units[unit].name!r} was changed in place while its weights were gathered: the "
                "change would be lost, since every worker keeps a part of them; change weights before "
                "engine.prepare(), or with model.load_state_dict() on every worker"
                + advice_for_frozen(self._of_unit(unit))
            )

    def check(self, parameter: Parameter) -> None:
        """Raise if the script wrote to what is here of the parameter's unit."""
        gathered = self._gathered.get(unit := self._unit_of[self._index[id(parameter)]])
        if gathered is not None and gathered.is_here and gathered.by_hand:
            self._release(unit)

    def check_here(self, parameter: Parameter) -> None:
        """Raise if the parameter has something else than its weights, since its unit is lost."""
        gathered = self._gathered.get(self._unit_of[self._index[id(parameter)]])
        if gathered is not None:
            gathered.raise_if_lost(self._rank)

    # -- when modules run ----------------------------------------------------------------------------------------------

    def _install(self, models: Sequence[nn.Module]) -> None:
        for model in models:
            self._hooks += [
                model.register_forward_pre_hook(refuse_compiled, prepend=True),
                model.register_load_state_dict_pre_hook(self._before_load),  # type: ignore[no-untyped-call]
                model.register_load_state_dict_post_hook(self._after_load),  # type: ignore[no-untyped-call]
            ]
        for unit in self._units:
            if unit.module is not None:
                used = self._used_by(unit)
                self._hooks += [
                    unit.module.register_forward_pre_hook(self._before(unit.module, used)),
                    unit.module.register_forward_hook(self._behind(unit.module, used), always_call=True),
                ]
        for number, parameter in enumerate(self.parameters):
            if parameter.requires_grad:
                self._wanted[self._unit_of[number]] += 1
                hook = parameter.register_post_accumulate_grad_hook(self._grown(self._unit_of[number]))  # type: ignore[no-untyped-call]
                self._hooks.append(hook)

    def _used_by(self, unit: Unit) -> list[int]:
        """The unit itself, and others that have parameters of its module because they are shared."""
        assert unit.module is not None
        whole = {self._unit_of[number] for number in unit.parameters}
        below = {self._index[id(p)] for p in unit.module.parameters() if id(p) in self._index}
        own = {self._index[id(p)] for p in unit.module.parameters(recurse=False) if id(p) in self._index}
        is_all = set(unit.parameters) - own or not list(unit.module.children())
        return sorted(whole | {self._unit_of[number] for number in (below if is_all else own)})

    def _before(self, mine: nn.Module, used: Sequence[int]) -> Callable[..., None]:
        def gather(module: nn.Module, *_: Any) -> None:
            refuse_compiled()
            for unit in used if module is mine else ():  # a copy of a module has its hooks, and weights of its own
                self._held[unit] += 1
                self._use(unit)
                if not self._in_step:
                    self._gathered[unit].warn_if_lost(self._rank, self._units[unit].name)

        return gather

    def _behind(self, mine: nn.Module, used: Sequence[int]) -> Callable[..., None]:
        def release(module: nn.Module, *_: Any) -> None:
            for unit in used if module is mine else ():
                self._held[unit] = max(0, self._held[unit] - 1)
                if not self._held[unit] and self._order.following != unit and unit in self._gathered:
                    self._release(unit)

        return release

    def _grown(self, unit: int) -> Callable[[Tensor], None]:
        def gradient_is_there(_: Tensor) -> None:
            self._there[unit] += 1
            if self._there[unit] == self._wanted[unit] and not self._held[unit]:
                self._release(unit)

        return gradient_is_there

    def item_ended(self) -> None:
        """Its backward is done, or will not come."""
        self._there = [0] * len(self._units)
        self._held = [0] * len(self._units)
        self.release_all()
        self._order.item_ended()

    # -- what autograd saves -------------------------------------------------------------------------------------------

    def place_of(self, address: int) -> tuple[int, int, torch.dtype] | None:
        return self._by_memory.get(address)

    def for_backward(self, unit: int, bucket: int) -> Tensor:
        self._use(unit, in_backward=True)
        return self._gathered[unit].flats[bucket]

    # -- a model's own load_state_dict ---------------------------------------------------------------------------------

    def _before_load(self, module: nn.Module, *_: Any) -> None:
        for unit in self._units_of(module):
            self._held[unit] += 1
            self._use(unit)

    def _after_load(self, module: nn.Module, _: Any) -> None:
        if not self._units_of(module):
            return
        self._pulls.meet()  # until now a worker may look at weights, and gets the old ones
        self._lift.finish()
        for unit in self._units_of(module):
            self._held[unit] -= 1
            gathered = self._gathered[unit]
            for shards, flat, own in zip(self._buckets[unit], gathered.flats, self._shards[unit], strict=True):
                own.copy_(flat[slice(*shards.ranges[self._rank])])
            self._watch.mark_clean(self._of_unit(unit))
        self.release_all()
        self.updated()

    def _units_of(self, module: nn.Module) -> list[int]:
        return sorted({self._unit_of[self._index[id(p)]] for p in module.parameters() if id(p) in self._index})

    def __deepcopy__(self, memo: Any) -> ShardedWeights:
        """A copy of a model has our hooks; there is one of us all the same."""
        return self

    def rest(self, *, at_rest: bool) -> None:
        """Whether a step is running; between steps others may still need this worker's part when it leaves."""
        self._in_step = not at_rest
        self._pulls.rest(at_rest=at_rest)

    def close(self) -> None:
        self._closed = True
        for hook in self._hooks:
            hook.remove()
        self._pulls.close()

    def teardown(self) -> None:
        """The group is over: parameters get memory of their own where they were found, for values still to come."""
        self._closed = True
        for hook in self._hooks:
            hook.remove()
        self._pulls.abandon()
        self._lift.finish()
        device = HOST if self.on_host else self._device
        for parameter, stride in zip(self.parameters, self._strides, strict=True):
            parameter.grad = None
            materialise(parameter, torch.empty_strided(parameter.shape, stride, dtype=parameter.dtype, device=device))
        self._gathered.clear()
        self._by_memory.clear()
        self._shards, self._pool, self._pulls = [], BufferPool(viewed=True), NoPeers()
        self.mine.forget()


@dataclass
class GatheredUnit:
    """Whole buckets of weights that are on their way here, or here.

        asked for ──► messages end ──► its parameters have their weights ──► released
                           │
                           └─ the group is over: it is *lost*, and its parameters are filled with a stand-in value

    No worker waits for a lost unit and no error comes of it, since it is found out inside the user's forward. What is
    computed with it is of no use: the engine drops it.
    """

    flats: list[Tensor]
    works: Sequence[Work]
    copies: Sequence[tuple[Tensor, Tensor]]  # on the host, and where its elements go
    lifted: Any = None  # when what this worker has on the host is there
    is_here: bool = False  # and its parameters have it
    by_hand: bool = False  # the script asked for a weight and may also write to it, past the version counters
    is_lost: bool = False

    def end(self, lift: Lift) -> None:
        """Wait until nothing writes to it any more."""
        ended = [work.ended() for work in self.works]  # all of them, whatever became of the first
        self.is_lost |= not all(ended)
        self.works = ()
        if self.lifted is not None:
            lift.arrive(self.lifted)

    def arrive(self, stands_for_lost: float) -> None:
        """Its messages have ended: let all of it be in its buckets."""
        for host, part in self.copies:
            part.copy_(host, non_blocking=True)
        self.copies = ()
        if self.is_lost:
            for flat in self.flats:
                flat.fill_(stands_for_lost)

    def raise_if_lost(self, rank: int) -> None:
        if self.is_lost:
            raise GenerationEnded(f"worker {rank} looked at weights of others when the workers changed")

    def warn_if_lost(self, rank: int, name: str) -> None:
        if self.is_lost:
            messages.warn(
                f"worker {rank}: the workers changed while the model was used between two steps; the weights of "
                f"{name!r} can't be had before the next step, and are nan until then"
            )

    def was_written(
        self, parameters: Sequence[Parameter], shards: BucketShards, rank: int, flat: Tensor, own: Tensor
    ) -> bool:
        """Whether a bucket has other weights than its parameters came with, as far as `rank` can tell by its `own`."""
        for entry in shards.bucket.entries:
            weights = parameters[entry.parameter]
            if weights.numel() and weights.data_ptr() != flat[entry.offset :].data_ptr():
                return True
        return self.by_hand and not _same_bytes(flat[slice(*shards.ranges[rank])], own)


def _same_bytes(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.to(a.device).view(torch.uint8))


Use = tuple[int, bool]  # a unit, and whether backward uses it


class UnitOrder:
    """The order in which an item uses units: that of the item before, found again where it differs."""

    def __init__(self) -> None:
        self._known: list[Use] = []
        self._place = 0  # in it: of what comes next
        self._last: Use | None = None
        self._seen: list[Use] = []

    @property
    def following(self) -> int | None:
        """The unit that is used next, if all goes as it did before."""
        return self._known[self._place][0] if self._place < len(self._known) else None

    def after(self, unit: int, *, in_backward: bool, records: bool = True) -> int | None:
        """A unit is being used: what probably follows. An evaluation follows the order too, but is not recorded."""
        use = unit, in_backward
        if self._last == use:
            return self.following
        self._last = use
        if records:
            self._seen.append(use)
        try:
            self._place = self._known.index(use, self._place) + 1
        except ValueError:
            self._place = self._known.index(use) + 1 if use in self._known else len(self._known)
        return self.following

    def item_ended(self) -> None:
        self._known, self._seen, self._last, self._place = self._seen, [], None, 0


Memory = Callable[[int, torch.dtype], Tensor]  # of (elements, dtype)


class LocalRanges:
    """This worker's range of every bucket of weights, in one piece of memory each.

    bucket      |── weight 0 ──|─ bias ─|────── weight 1 ──────|        weights as they lie in memory, one after another
    own range            |──────────────────|                           pieces of three parameters, in one tensor
    """

    def __init__(self, parameters: Sequence[Parameter], rank: int, memory: Memory) -> None:
        """`memory` makes some where shards are kept."""
        self._parameters, self._rank, self._memory = parameters, rank, memory
        self._index = {id(parameter): number for number, parameter in enumerate(parameters)}
        self._strides = [parameter.stride() for parameter in parameters]
        self._bucket_of: dict[int, tuple[BucketShards, Tensor]] = {}
        self._shards: dict[int, LocalShard] = {}

    def cut(self, shards: BucketShards) -> Tensor:
        """The own range of a bucket, from parameters that have their weights."""
        start, stop = shards.ranges[self._rank]
        part = self._memory(stop - start, self._parameters[shards.bucket.entries[0].parameter].dtype).zero_()
        for entry in shards.bucket.entries:
            self._bucket_of[entry.parameter] = shards, part
        for owned in shards.pieces(self._rank):
            self._place(owned, part).copy_(piece_of(self._parameters[owned.piece.parameter], owned.piece))
        return part

    def _place(self, owned: OwnedPiece, part: Tensor) -> Tensor:
        """An own piece where it lies: one-dimensional, or a whole parameter whose memory has another order."""
        piece, kept = owned.piece, part[owned.offset : owned.offset + owned.piece.elements]
        parameter = self._parameters[piece.parameter]
        if parameter.dim() == 0:
            return kept.view(())
        if not in_logical_order(parameter):
            return kept.as_strided(parameter.shape, self._strides[piece.parameter])
        return kept

    def of_piece(self, parameter: Parameter, piece: Piece) -> Tensor:
        """Where the values of an own piece are; the piece may be numbered by another order of parameters."""
        number = self._index[id(parameter)]
        shards, part = self._bucket_of[number]
        mine = Piece(number, piece.start, piece.stop)
        return self._place(next(owned for owned in shards.pieces(self._rank) if owned.piece == mine), part)

    def shard_of(self, parameter: Parameter) -> LocalShard:
        """All own pieces of a parameter, as they are now and, where their memory is in order, as they will be."""
        number = self._index[id(parameter)]
        if number not in self._shards:
            part = self._bucket_of[number][1]
            parts = [(owned.piece.start, self._place(owned, part)) for owned in self._owned(parameter)]
            shard = LocalShard.of(parameter.shape, part.dtype, parts)
            if not in_logical_order(parameter):
                return shard
            self._shards[number] = shard
        return self._shards[number]

    def pieces_of(self, parameter: Parameter) -> list[Piece]:
        return [owned.piece for owned in self._owned(parameter)]

    def load_full(self, parameter: Parameter, full: Tensor) -> None:
        """Take the own pieces of a parameter's weights."""
        part = self._bucket_of[self._index[id(parameter)]][1]
        for owned in self._owned(parameter):
            mine = self._place(owned, part)
            mine.copy_(full if mine.shape == full.shape else part_of(full, owned.piece))

    def forget(self) -> None:
        self._bucket_of.clear()
        self._shards.clear()

    def _owned(self, parameter: Parameter) -> list[OwnedPiece]:
        number = self._index[id(parameter)]
        shards = self._bucket_of[number][0]
        return [owned for owned in shards.pieces(self._rank) if owned.piece.parameter == number]


@dataclass(frozen=True)
class _Place:
    of: ShardedWeights
    unit: int
    bucket: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class _Wrapped:
    """A tensor of several, such as a DTensor, whose inner ones are kept as places."""

    kind: Any
    inner: dict[str, Any]
    about: Any
    size: torch.Size
    stride: tuple[int, ...]


class SavedWeights:
    """Autograd keeps the place of a gathered weight, not the weight, and looks it up again in backward.

        forward    torch saves W, a view of a gathered flat ─► Place(unit 3, bucket 0, size, stride, offset)
        backward   torch wants W ─► unit 3 is gathered again, if it is not here ─► the same view of it

    The hooks hold from `prepare` to `close`, wherever a weight is used: without them autograd would keep the parameter
    itself, whose memory goes when its unit is released. Hooks pushed on top of these (checkpointing) are given a tensor
    of the same memory instead of the parameter, and keep that alive. `weights` may grow.
    """

    def __init__(self, weights: Sequence[ShardedWeights]) -> None:
        self._weights = weights
        self._hooks = saved_tensors_hooks(self._pack, self._unpack)
        self._hooks.__enter__()

    def close(self) -> None:
        self._hooks.__exit__()

    def _pack(self, saved: Tensor) -> Tensor | _Place | _Wrapped:
        if saved.layout is not torch.strided or not saved.numel():
            return saved
        if hasattr(saved, "__tensor_flatten__"):
            names, about = saved.__tensor_flatten__()
            made_of = {name: getattr(saved, name) for name in names}  # not of tensors alone
            inner = {name: self._pack(one) if isinstance(one, Tensor) else one for name, one in made_of.items()}
            if not any(isinstance(one, _Place | _Wrapped) for one in inner.values()):
                return saved
            return _Wrapped(type(saved), inner, about, saved.size(), saved.stride())
        address = saved.untyped_storage().data_ptr()
        for some in self._weights:
            found = some.place_of(address)
            if found is not None:
                unit, bucket, dtype = found
                if dtype == saved.dtype:
                    return _Place(some, unit, bucket, saved.size(), saved.stride(), int(saved.storage_offset()))
        return saved

    def _unpack(self, packed: Tensor | _Place | _Wrapped) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        if isinstance(packed, _Wrapped):
            packs = _Place | _Wrapped
            inner = {name: self._unpack(one) if isinstance(one, packs) else one for name, one in packed.inner.items()}
            whole: Tensor = packed.kind.__tensor_unflatten__(inner, packed.about, packed.size, packed.stride)
            return whole
        flat = packed.of.for_backward(packed.unit, packed.bucket)
        return flat.as_strided(packed.size, packed.stride, packed.offset)


# -- torch.compile does not see the hooks that gather weights ----------------------------------------------------------

_WHY = "fsdp, hybrid and zero3 gather weights in the modules' hooks, which torch.compile does not see"


def check_not_compiled(models: Sequence[nn.Module]) -> None:
    """Before training."""
    if any(type(module).__name__ == "OptimizedModule" for model in models for module in model.modules()):
        raise ConfigError(
            f"{_WHY}; give engine.prepare() the model as it was before torch.compile, and the Engine compile=True"
        )


def refuse_compiled(*_: Any) -> None:
    """Before a module runs.

    A hook that looks here is traced itself. The look is one that torch can't trace, so it runs as it stands, and sees
    that frames are being rewritten around it.
    """
    if eval_frame_callback() is not None:
        raise LoopError(f"{_WHY}; use the model that engine.prepare() gave back as it is, with Engine(compile=True)")
