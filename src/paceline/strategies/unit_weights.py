"""Weights in shards: whole while a unit is used, elsewhere otherwise.

    forward    unit 0 ─ unit 1 ─ unit 2        before a module runs its unit is gathered, afterwards released
    backward   unit 2 ─ unit 1 ─ unit 0        gathered again when autograd wants a saved weight, released when the
                                               unit's gradients are there
    ahead      the next unit of the item before is asked for while this one is used

Autograd keeps no gathered weight (`saved_weights.py`). So a release is nothing but letting go: what anybody still uses
stays alive, and nothing is ever read that was freed. Weights that are used in other ways than by their module are
fetched by `ReleasedParameter`. With shards on the host a device has the units in use and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.hooks import RemovableHandle

from paceline.collectives.communicator import Work
from paceline.errors import GenerationEnded, LoopError
from paceline.optim.offload import HOST, Lift
from paceline.sharding.shards import BucketShards, cut_buckets
from paceline.sharding.unit import Classes, Unit, cut_units, unit_buckets
from paceline.strategies.compiled_model import refuse_compiled
from paceline.strategies.gathered_unit import GatheredUnit
from paceline.strategies.gradient_buckets import gradient_specs
from paceline.strategies.meta_weights import fill, fill_modules, module_names
from paceline.strategies.own_pieces import in_logical_order
from paceline.strategies.own_shards import OwnShards
from paceline.strategies.registry import Job
from paceline.strategies.released_parameter import engine_is_closed, give_back, is_released, release
from paceline.strategies.shard_pulls import NobodyToAsk, ShardPulls
from paceline.strategies.spare_flats import SpareFlats
from paceline.strategies.unit_order import UnitOrder

_KEPT_BESIDE = 1  # units used before the current one that stay, unless their module has ended


class UnitWeights:
    """All weights that a job's optimizers hold, cut into units and shards once."""

    def __init__(
        self,
        job: Job,
        parameters: Sequence[Parameter],
        classes: Classes | None,
        number: int = 0,
        *,
        on_host: bool = False,
    ) -> None:
        """The parameters are released: from here on a job's `number`-th of these has their weights, or the host."""
        self._rank, workers = (0, 1) if job.comm is None else (job.comm.rank, job.comm.size)
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
        self.mine = OwnShards(parameters, self._rank, self._room)
        self._shards: list[list[Tensor]] = []
        self._gathered: dict[int, GatheredUnit] = {}
        self._held = [0] * len(self._units)  # modules that run with it
        self._recent: list[int] = []
        self._by_memory: dict[int, tuple[int, int, torch.dtype]] = {}  # by address: the unit, its bucket there
        self._order = UnitOrder()
        self._hooks: list[RemovableHandle] = []
        self._wanted = [0] * len(self._units)  # gradients in a backward
        self._there = [0] * len(self._units)
        self._spare, self._lift = SpareFlats(), Lift(job.device)
        self._closed = self._in_step = False
        self._cut_up(job)
        self._pulls: NobodyToAsk | ShardPulls = NobodyToAsk()
        try:
            self._pulls = self._pulls if job.comm is None else ShardPulls(job, self._parts, number)
        except BaseException:
            self.dismantle()
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
        names, owners = module_names(job.models), dict[int, list[nn.Module]]()
        for module in (module for model in job.models for module in model.modules()):
            for parameter in module.parameters(recurse=False):
                owners.setdefault(id(parameter), []).append(module)
        for number, unit in enumerate(self._units):
            used = [module for place in unit.parameters for module in owners.get(id(self.parameters[place]), ())]
            fill_modules(used, names, seed=job.seed, device=job.device)
            self._shards.append([self.mine.cut(shards) for shards in self._buckets[number]])
            for parameter in (self.parameters[place] for place in unit.parameters):
                if parameter.device != job.device:  # its weights were cut on the host, and it is used on the device
                    layout = parameter.shape, parameter.stride()
                    parameter.data = torch.empty_strided(*layout, dtype=parameter.dtype, device=job.device)
            self._let_go(number)
        for model in job.models:
            fill(model, names, seed=job.seed, device=job.device)

    def _room(self, elements: int, dtype: torch.dtype) -> Tensor:
        if self.on_host:
            return self._lift.room(elements, dtype)
        return torch.empty(elements, dtype=dtype, device=self._device)

    def _parts(self, unit: int) -> list[Tensor]:
        return [part.cpu() for part in self._shards[unit] if part.numel()]

    def let_all_go(self) -> None:
        for unit in list(self._gathered):
            self._let_go(unit)

    def make_way(self) -> None:
        """Let all go, and wait until nothing reads the own pieces any more."""
        self.let_all_go()
        self._lift.finish()

    def updated(self) -> None:
        """The own pieces have been changed, on every worker, since all was let go."""
        if self._device.type == "cuda" and self._pulls.peers and not self.on_host:
            torch.cuda.current_stream(self._device).synchronize()  # who answers others looks from another thread
        self._in_step = False
        self._pulls.changed()

    def put(self, parameter: Parameter, whole: Tensor) -> None:
        """All workers have these weights for the parameter."""
        self._let_go(self._unit_of[self._index[id(parameter)]])
        self._pulls.meet()  # until now somebody may look at weights, and gets the old ones
        self._lift.finish()
        self.mine.put(parameter, whole)
        self.updated()

    # -- gathering and letting go ------------------------------------------------------------------------------------

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
        with torch.inference_mode(False), torch.no_grad(), _disable_current_modes():
            self._bring(unit, in_backward, records)

    def _bring(self, unit: int, in_backward: bool, records: bool) -> None:
        self._start(unit)
        following = self._order.after(unit, in_backward=in_backward, records=records)
        if following is not None:
            self._start(following)
        gathered = self._gathered[unit]
        if gathered.versions is None:
            self._arrive(unit, gathered)
        self._recent = [*(other for other in self._recent if other != unit), unit]
        while len(self._recent) > 1 + _KEPT_BESIDE:
            old = self._recent.pop(0)
            if not self._held[old] and old != following:
                self._let_go(old)

    def _start(self, unit: int) -> None:
        if unit in self._gathered:
            return
        flats, rooms = [], {peer: list[Tensor]() for peer in self._pulls.peers}
        copies, lifts = list[tuple[Tensor, Tensor]](), list[tuple[Tensor, Tensor]]()
        for shards, own in zip(self._buckets[unit], self._shards[unit], strict=True):
            flat = self._spare.take(shards.bucket.elements, own.dtype, self._device)
            for worker, (start, stop) in enumerate(shards.ranges):
                part = flat[start:stop]
                if worker == self._rank:
                    if self.on_host:
                        lifts.append((own, part))
                    else:
                        part.copy_(own)
                elif start < stop:
                    room = part if part.device.type == "cpu" else self._lift.room(stop - start, part.dtype)
                    copies += [] if room is part else [(room, part)]
                    rooms[worker].append(room)
            flats.append(flat)
        works, is_over = list[Work](), False
        try:
            works = self._pulls.start(unit, {peer: parts for peer, parts in rooms.items() if parts})
        except GenerationEnded:
            is_over = True
        lifted = self._lift.start(lifts) if lifts else None
        self._gathered[unit] = GatheredUnit(flats, works, copies, lifted, is_lost=is_over)

    def _arrive(self, unit: int, gathered: GatheredUnit) -> None:
        gathered.end(self._lift)
        gathered.arrive(0.0 if self._in_step else math.nan)
        for place, (shards, flat) in enumerate(zip(self._buckets[unit], gathered.flats, strict=True)):
            if flat.numel():
                self._by_memory[flat.untyped_storage().data_ptr()] = unit, place, flat.dtype
            for member in shards.bucket.members:
                weights = flat.as_strided(member.shape, self._strides[member.parameter], member.offset)
                give_back(self.parameters[member.parameter], weights)
        gathered.versions = [self.parameters[number]._version for number in self._units[unit].parameters]

    def _let_go(self, unit: int) -> None:
        """Forget what was gathered; whoever still uses a part of it keeps that alive."""
        gathered = self._gathered.pop(unit, None)
        numbers = self._units[unit].parameters
        if gathered is not None:
            if gathered.versions is None:  # it was asked for and is not wanted: its messages must end all the same
                gathered.end(self._lift)
                return
            for flat in gathered.flats:
                self._by_memory.pop(flat.untyped_storage().data_ptr(), None)
                self._spare.give_back(flat)
            if not gathered.is_lost:
                self._check_unwritten(unit, gathered)
        self._recent = [other for other in self._recent if other != unit]
        for number in numbers:
            if not is_released(self.parameters[number]):
                release(self.parameters[number], self)

    def _check_unwritten(self, unit: int, gathered: GatheredUnit) -> None:
        """Every element has an owner, so what all workers wrote at least one of them finds."""
        versions = [self.parameters[number]._version for number in self._units[unit].parameters]
        buckets = zip(self._buckets[unit], gathered.flats, self._shards[unit], strict=True)
        if versions != gathered.versions or any(
            gathered.was_written(self.parameters, shards, self._rank, flat, own) for shards, flat, own in buckets
        ):
            raise LoopError(
                f"a parameter of {self._units[unit].name!r} was changed in place while its weights were gathered: the "
                "change would be lost, since every worker keeps a part of them; change weights before "
                "engine.prepare(), or with model.load_state_dict() on every worker"
            )

    def check(self, parameter: Parameter) -> None:
        """Raise if somebody wrote to what is here of the parameter's unit."""
        gathered = self._gathered.get(unit := self._unit_of[self._index[id(parameter)]])
        if gathered is not None and gathered.versions is not None and gathered.by_hand:
            self._let_go(unit)

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
        def let_go(module: nn.Module, *_: Any) -> None:
            for unit in used if module is mine else ():
                self._held[unit] = max(0, self._held[unit] - 1)
                if not self._held[unit] and self._order.following != unit and unit in self._gathered:
                    self._let_go(unit)

        return let_go

    def _grown(self, unit: int) -> Callable[[Tensor], None]:
        def gradient_is_there(_: Tensor) -> None:
            self._there[unit] += 1
            if self._there[unit] == self._wanted[unit] and not self._held[unit]:
                self._let_go(unit)

        return gradient_is_there

    def item_ended(self) -> None:
        """Its backward is done, or will not come."""
        self._there = [0] * len(self._units)
        self._held = [0] * len(self._units)
        self.let_all_go()
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
        self._pulls.meet()  # until now somebody may look at weights, and gets the old ones
        self._lift.finish()
        for unit in self._units_of(module):
            self._held[unit] -= 1
            gathered = self._gathered[unit]
            for shards, flat, own in zip(self._buckets[unit], gathered.flats, self._shards[unit], strict=True):
                own.copy_(flat[slice(*shards.ranges[self._rank])])
            gathered.versions = [self.parameters[number]._version for number in self._units[unit].parameters]
        self.let_all_go()
        self.updated()

    def _units_of(self, module: nn.Module) -> list[int]:
        return sorted({self._unit_of[self._index[id(p)]] for p in module.parameters() if id(p) in self._index})

    def __deepcopy__(self, memo: Any) -> UnitWeights:
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

    def dismantle(self) -> None:
        """The group is over: parameters get memory of their own where they were found, for values still to come."""
        self._closed = True
        for hook in self._hooks:
            hook.remove()
        self._pulls.abandon()
        self._lift.finish()
        device = HOST if self.on_host else self._device
        for parameter, stride in zip(self.parameters, self._strides, strict=True):
            parameter.grad = None
            give_back(parameter, torch.empty_strided(parameter.shape, stride, dtype=parameter.dtype, device=device))
        self._gathered.clear()
        self._by_memory.clear()
        self._shards, self._spare, self._pulls = [], SpareFlats(), NobodyToAsk()
        self.mine.forget()
