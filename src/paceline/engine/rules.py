"""Rules of the loop: what people write in its body, refused with what to write instead.

Most need nothing but a look. Those that remember something from call to call are classes, and `BodyChecks` at the end
has all of these that a step asks. The table of all rules is docs/concepts/loop.md.
"""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NoReturn, Protocol

from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from paceline.data.sharded_sampler import WorkItem
from paceline.engine.config import EngineConfig
from paceline.engine.forward_state import ForwardState
from paceline.engine.loss_factor import FactorOfLoss
from paceline.engine.vote import WATCHED, HostReading, LaneReport, can_be_summed, sum_of_bits
from paceline.errors import LoopError, NonFiniteLossError
from paceline.input_file import one_line
from paceline.optim.loss_scale import OnNonFinite
from paceline.torch_compat import own_parameters, version_of
from paceline.world import messages

NameOf = Callable[[Parameter], str]


class ItemFacts(Protocol):
    """What has happened with the item that the loop has."""

    @property
    def step_called(self) -> bool: ...

    @property
    def ran_last(self) -> bool:
        """Its last backward is done."""
        ...

    @property
    def failed(self) -> bool:
        """A backward of it raised."""
        ...


def check_backward(
    item: WorkItem | None, loss: Tensor, weight: Any, so_far: ItemFacts, step: int
) -> tuple[WorkItem, float | None]:
    """The item that a backward is for, and its weight as a number, where the loop gives it one."""
    if item is None:
        raise LoopError(
            "engine.backward() needs an item: call it inside `for batch in loader` of the loader that was given to "
            "engine.prepare() together with the optimizer; one that was given without is for evaluation"
        )
    check_backward_held(item, so_far, step)
    if so_far.step_called:
        raise LoopError(
            f"engine.backward() came after optimizer.step() in the same item (step {step + 1}): later lanes "
            "would see new weights. With several optimizers use engine.update(optimizer, loss_fn) for each"
        )
    if so_far.ran_last:
        raise LoopError(
            "a second engine.backward() in one item: its buckets have left; "
            "all but the last need engine.backward(loss, last=False)"
        )
    if loss.numel() != 1:
        raise LoopError(f"engine.backward() takes a scalar loss, got shape {tuple(loss.shape)}; average it first")
    return item, None if weight is None else _weight_of_backward(weight)


def _weight_of_backward(given: Any) -> float:
    """The number that a loop gave, of Python, numpy or a tensor."""
    try:
        weight = float(given)
        if not math.isfinite(weight) or weight < 0 or isinstance(given, bool | str | bytes):
            raise ValueError
    except (TypeError, ValueError, RuntimeError, OverflowError):
        shown = one_line(repr(given), 60)
        raise LoopError(f"backward(weight={shown}): the weight is a number of samples or tokens, 0 or more") from None
    return weight


def refuse_options(name: str) -> NoReturn:
    """A keyword argument of torch's `backward`."""
    raise LoopError(
        f"engine.backward({name}=…): a graph is used once, and its gradients leave as they are made. Add losses of one "
        "graph up before engine.backward(), or give all but the last one engine.backward(loss, last=False)"
    )


def check_backward_held(item: WorkItem, so_far: ItemFacts, step: int) -> None:
    if so_far.failed:
        raise LoopError(
            f"engine.backward() ended with an exception in lane {item.lane} of step {step + 1}, which the loop caught: "
            "the item has no gradient now. Leave it with `continue`, so that it counts as empty, or let the exception "
            "end the program"
        )


def nothing_to_train() -> LoopError:
    return LoopError("nothing to train yet: give a model and an optimizer to engine.prepare() first")


def update_failed(what: str) -> LoopError:
    return LoopError(
        f"{what}, and the loop's body caught that: weights may be half updated, which can't be taken back. "
        "Let the exception through, and go on in a new process from the last saved state"
    )


def step_not_applied(step: int) -> LoopError:
    return LoopError(
        f"step {step + 1} has its gradient but no optimizer.step() was called before the next batch; call step() after "
        "every backward, of an optimizer that engine.prepare() was given: it acts once per step. To accumulate k "
        "micro-batches, use Engine(accumulate=k)"
    )


def step_not_whole(step: int, *, in_update: bool) -> LoopError:
    return LoopError(
        f"an exception in step {step + 1} ended engine.{'update' if in_update else 'backward'}(), and the loop caught "
        "it: a part of the step's gradients is under way or missing, and can't be taken back. Let the exception end "
        "the program"
    )


def accumulates_by_hand(step: int) -> str:
    return (
        f"optimizer.step() was not called after every engine.backward() of step {step + 1}. If the loop accumulates by "
        "itself (a step every k batches, loss / k), leave that out: the items of a step are this worker's lanes, of "
        "which the engine takes the mean over all workers; Engine(accumulate=k) has k batches in each lane. Call "
        "optimizer.step() in every item, or where engine.sync_gradients is true"
    )


def optimizer_of_open_engine() -> LoopError:
    return LoopError(
        "engine.prepare() was given an optimizer that another Engine trains with; call close() of that one first, or "
        "`with paceline.Engine() as engine:`"
    )


def optimizer_of_closed_engine(strategy: str, precision: str) -> LoopError:
    kept = f"state was that job's (strategy={strategy!r})"
    if precision != "fp32":
        kept = f"fp32 master weights were that job's (precision={precision!r})"
    return LoopError(
        f"this optimizer was prepared by an Engine that is closed, and its {kept}: it would go on from other numbers. "
        "Make a new optimizer of model.parameters(); to go on with the old one's state, call engine.save_state(folder) "
        "before close(), and load_state(folder) of the next Engine"
    )


def check_not_seen(call: str, step: int) -> None:
    """Another optimizer of the step is to act; `call` has saved what would be half a step, or waited for workers."""
    if call:
        raise LoopError(
            f"{call} came between two updates of step {step}: what is saved there is half a step, and if a worker of "
            "an elastic job is lost in it the rest is never done. Call it when all optimizers of the step have acted; "
            "values may be collected by engine.mean() before"
        )


def metric_missing(kind: str, step: int) -> LoopError:
    return LoopError(
        f"this worker's last item of step {step} was left without engine.backward(), so the loop's body did not step "
        f"the {kind}, and with which argument it would have can't be known: the workers' learning rates would differ. "
        "Give the item engine.backward(loss, weight=0) in place of `continue`, or step the schedule between two epochs"
    )


def closure_given() -> LoopError:
    return LoopError(
        "optimizer.step(closure) would run forward again inside the step; use engine.update(optimizer, loss_fn), with "
        "an optimizer that needs no closure (LBFGS does)"
    )


def check_one_optimizer(optimizers: int) -> None:
    """Where a step is committed after its last update."""
    if optimizers > 1:
        raise LoopError(
            "in an elastic job a sharded strategy counts a step after its last update, and can't know which of "
            f"{optimizers} optimizers makes it: call engine.update(optimizer, loss_fn) for each, "
            "or use strategy='ddp'"
        )


def check_backward_came_first(item: WorkItem, so_far: ItemFacts, step: int, *, held: bool) -> None:
    """`optimizer.step()` in an item without its last backward; `held`: there was one with last=False."""
    check_backward_held(item, so_far, step)
    hint = "; loss.backward() is not enough"
    if held:
        hint = (
            ": write engine.backward(loss) for loss.backward(), and of several in an item the last without last=False"
        )
    raise LoopError(f"optimizer.step() was called before engine.backward() in step {step + 1}, lane {item.lane}" + hint)


def item_of_mean(item: WorkItem | None, name: str, *, sent: bool) -> WorkItem:
    """The item that a value is collected for; `sent`: the step's means have left."""
    if item is None:
        raise LoopError(
            f"engine.mean({name!r}) collects values inside the loop over the loader that was given to engine.prepare() "
            "together with the optimizer; there is no item of it now"
        )
    if sent:
        raise LoopError(f"engine.mean({name!r}) comes too late: call it before engine.backward(), which sends it")
    return item


def must_leave_out(reports: Sequence[LaneReport], rule: OnNonFinite, step: int, told: str) -> bool:
    """Whether a loss that is not finite takes them out, `told` in a warning; or it stops training."""
    bad = next((report for report in reports if not report.finite), None)
    if bad is None or rule == "continue":
        return False
    what = f"the loss of step {step + 1} is {bad.loss} in lane {bad.lane}"
    if rule == "stop":
        raise NonFiniteLossError(
            f"{what}; training stops before the weights are touched "
            "(on_nonfinite='skip' leaves such steps out, 'continue' applies them)"
        )
    messages.warn(f"{what}; {told}")
    return True


def has_history(optimizers: Sequence[Optimizer], schedulers: Sequence[Any]) -> bool:
    """Whether they have made steps, as far as their states tell; Adagrad has one from the start, of no steps."""
    states = [state for optimizer in optimizers for state in optimizer.state.values() if isinstance(state, dict)]
    stepped = any(state["step"] > 0 if "step" in state else len(state) for state in states)
    return stepped or any(getattr(scheduler, "last_epoch", 0) > 0 for scheduler in schedulers)


SETTINGS = {"lr": "learning rate", "weight_decay": "weight decay", "momentum": "momentum"}
"""Of a parameter group: what schedules change."""


def learning_rates(optimizers: Sequence[Optimizer]) -> list[tuple[str, float]]:
    """And the other settings that schedules change."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    return [(name, float(group[name])) for name in SETTINGS for group in groups if name in group]


def check_learning_rates(before: Sequence[tuple[str, float]], now: Sequence[tuple[str, float]], step: int) -> None:
    if before != now:
        name = next((old[0] for old, new in zip(before, now, strict=False) if old != new), "lr")
        values = [[value for key, value in rates if key == name] for rates in (before, now)]
        raise LoopError(
            f"the {SETTINGS.get(name, name)} changed inside step {step + 1} (from {values[0]} to {values[1]}): "
            "the body runs once per item, not once per step. Hand the scheduler to engine.prepare(), or change the "
            "rate only when engine.stepped is true"
        )


class SchedulersBeside:
    """Schedulers of the optimizers that `prepare` was not given: one that is stepped in every item counts items.

    Mostly that changes the learning rate inside a step. A StepLR whose period is a multiple of this worker's items does
    so between steps alone, and would decay at another pace on another number of workers.
    """

    def __init__(self, optimizers: Sequence[Optimizer], prepared: Sequence[Any]) -> None:
        self._optimizers, self._prepared = optimizers, prepared
        self._found: list[LRScheduler] | None = None

    def counts(self) -> list[tuple[str, float]]:
        if self._found is None:  # once, since it looks at every object that there is
            optimizers, prepared = set(map(id, self._optimizers)), set(map(id, self._prepared))
            every = [thing for thing in gc.get_objects() if issubclass(type(thing), LRScheduler)]
            beside = [scheduler for scheduler in every if id(scheduler) not in prepared]
            self._found = [s for s in beside if id(getattr(s, "optimizer", None)) in optimizers]
        return [(f"count of a {type(s).__name__}", float(getattr(s, "last_epoch", 0))) for s in self._found]


def lengths_of_schedule(scheduler: Any) -> list[int]:
    """In steps: where it ends, or where it changes, as far as torch or transformers tell it."""
    match type(scheduler).__name__:
        case "OneCycleLR":
            return [int(scheduler.total_steps)]
        case "CosineAnnealingLR":
            return [int(scheduler.T_max)]
        case "CosineAnnealingWarmRestarts":
            return [int(scheduler.T_0)]
        case "StepLR":
            return [int(scheduler.step_size)]
        case "MultiStepLR":
            return [int(step) for step in scheduler.milestones]
        case "LinearLR" | "PolynomialLR" if scheduler.total_iters != 5:  # unless nobody has said how long
            return [int(scheduler.total_iters)]
        case "SequentialLR":
            last = lengths_of_schedule(scheduler._schedulers[-1])
            return [int(scheduler._milestones[-1]) + last[-1]] if last else []
        case "LambdaLR":
            told = [getattr(factor, "keywords", {}).get("num_training_steps") for factor in scheduler.lr_lambdas]
            return [int(steps) for steps in told if steps is not None]
    return []


NO_COINCIDENCE = 50
"""Batches in an epoch from which on a multiple of them is no number of steps that somebody has just chosen."""


@dataclass(frozen=True)
class MultipleOfLength:
    """A schedule over as many steps as there are batches: lanes and micro-batches take several of them in one step."""

    kind: str
    whole: int
    seen: str

    @property
    def counts(self) -> str:
        changes = "changes after" if self.kind in ("StepLR", "MultiStepLR") else "is made for"
        return f"{changes} {self.whole} steps"

    def told(self, steps: int, counted: str, if_meant: str) -> str:
        """`counted` says what the loader's length counts; `if_meant`: what to do to have it."""
        return (
            f"the {self.kind} {self.counts}, {self.seen}, but len(loader) counts {counted}, and an epoch has {steps} "
            "steps: it would not follow the training. Count in engine.steps_per_epoch(loader), times the epochs: it is "
            "the same at any number of workers, and with any accumulate= (count a warm-up in steps too); if "
            f"{self.whole} steps are meant, {if_meant}"
        )


def multiple_of_length(scheduler: Any, length: int, steps: int, accumulate: int) -> MultipleOfLength | None:
    """`length` of the loader is what the script saw."""
    for whole in lengths_of_schedule(scheduler):
        for parts in {1, accumulate} if whole >= 1 and length >= 1 else ():
            for epochs in {whole * parts // length, -(-whole * parts // length)}:
                as_batches = (length * epochs // parts, length // parts * epochs, -(-length // parts) * epochs)
                if epochs >= 1 and whole in as_batches and whole != steps * epochs:
                    seen = f"{epochs} × len(loader)" + (f" / {parts}" if parts > 1 else "")
                    return MultipleOfLength(type(scheduler).__name__, whole, seen)
    return None


def check_gradients_empty(parameters: Sequence[Parameter], name_of: NameOf, item: WorkItem, step: int) -> None:
    """Before the first backward of an item: what `.grad` has is of torch's own, and is not divided as ours is.

    Zeros are no harm, as of `zero_grad(set_to_none=False)` after a backward that was only looked at; they are dropped,
    since a parameter that no loss has used gets no update.
    """
    for parameter in [p for p in parameters if p.grad is not None]:
        gradient = parameter.grad
        assert gradient is not None
        if (gradient.to_dense() if gradient.is_sparse else gradient).any():
            raise LoopError(
                f"{name_of(parameter)!r} has a .grad before engine.backward() in step {step + 1}, lane {item.lane}, as "
                "after loss.backward(): it would be mixed in at another scale than the mean over the step. Write "
                "engine.backward(loss, last=False) for all losses of an item but the last, or engine.backward() once "
                "for their sum; after a backward whose gradients are only looked at, call optimizer.zero_grad()"
            )
        parameter.grad = None


def check_gradients_untouched(versions: Sequence[tuple[Parameter, int]], name_of: NameOf) -> None:
    for parameter, version in versions:
        if parameter.grad is None or version_of(parameter.grad) != version:
            raise LoopError(
                f"the gradient of {name_of(parameter)!r} was changed between "
                "engine.backward() and optimizer.step(); torch's clip_grad_norm_ and edits of .grad see only some "
                "items of a step. Use engine.clip_grad_norm_(max_norm)"
            )


def check_all_are_clipped(given: Any, optimizers: Sequence[Optimizer]) -> None:
    """`clip_grad_norm_(parameters, max_norm)`: the norm is that of the whole gradient."""
    clipped = {id(given)} if isinstance(given, Tensor) else {id(parameter) for parameter in given}
    trained = {id(p) for o in optimizers for group in o.param_groups for p in group["params"] if p.requires_grad}
    if not trained <= clipped:
        raise LoopError(
            f"engine.clip_grad_norm_(parameters, max_norm) got {len(trained & clipped)} of {len(trained)} parameters "
            "that are trained: the norm is that of the whole gradient, of which a worker may have a part; give "
            "model.parameters() of all prepared models"
        )


class NoGradScaler:
    """What a prepared optimizer answers to a GradScaler that asks whether it scales by itself."""

    def __bool__(self) -> bool:
        raise LoopError(
            "a GradScaler of torch finds no gradient before a step's last item, and would change the scale between "
            "lanes. Leave it out, and write Engine(precision='fp16'): the engine scales the loss, "
            "engine.clip_grad_norm_() clips without the scale, and optimizer.step() skips what is not finite"
        )


def refuse_update_bn(caller: FrameType) -> None:
    """torch's update_bn over a prepared loader: statistics of one worker's batches."""
    if caller.f_code.co_name == "update_bn" and caller.f_globals.get("__name__") == "torch.optim.swa_utils":
        raise LoopError(
            "update_bn() over a prepared loader: each worker would take the statistics of its own batches, and they "
            "would differ. Give it a DataLoader that is not prepared: every worker then reads all of it"
        )


class ParameterPlaces:
    """Where parameters stand in their modules: one that is replaced after `prepare` would be used and never trained.

    optimizer ──► parameter ◄── module.weight             prepare
    optimizer ──► parameter     module.weight ──► other   after load_state_dict(…, assign=True), model.layer.weight = …
    """

    def __init__(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer], name_of: NameOf) -> None:
        """Where all stand that are trained."""
        trained = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
        self._name_of = name_of
        self._places = [
            (module, key, parameter)
            for model in models
            for module in model.modules()
            for key, parameter in own_parameters(module).items()
            if parameter is not None and id(parameter) in trained
        ]

    def check(self) -> None:
        """One that has gone elsewhere, as under a parametrization, is none of our business."""
        for module, key, parameter in self._places:
            if own_parameters(module).get(key, parameter) is not parameter:
                raise LoopError(
                    f"another parameter stands where {self._name_of(parameter)!r} was in engine.prepare(), as after "
                    "load_state_dict(…, assign=True): the model would use it, and the optimizer train the old one. "
                    "Load without assign, or replace parameters before engine.prepare()"
                )


WHOLE_STEPS, THEN_EVERY = 3, 8
"""All weights are looked at in the first steps of a job (an average of them moves from the second on), then a part."""


class WeightsInStep:
    """Weights don't change between the items of a step: some of its lanes would see others, as the workers have them.

        backward of this worker's first item ──► sum over bits ─┐
        backward of its last item            ──► sum over bits ─┴─► not the same: refused

    Nor do copies, as averages are: they would have as many updates in a step as this worker has items. A clamp that
    finds nothing to do changes no bit, and is no harm. All are looked at in the first steps, since who edits weights in
    every item does so from the start; then a part, in a step out of several. Copies that are made later, as where
    averaging begins after some epochs, are found at steps 8, 16, 32, …: a look at every object is too dear for more.
    """

    def __init__(self, copies: Callable[[], Iterable[tuple[str, Tensor]]]) -> None:
        """`copies` finds those of the weights, by name."""
        self._find_copies = copies
        self._copies: list[tuple[str, weakref.ref[Tensor]]] = []
        self._weights: list[tuple[str, Tensor]] = []
        self._looks_at: list[tuple[str, Tensor]] = []  # in this step
        self._steps = 0

    def watch(self, named: Sequence[tuple[str, Tensor]]) -> None:
        """These are the weights that must not change."""
        self._weights = [pair for pair in named if can_be_summed(pair[1])]

    def look(self, item: WorkItem, seen: list[list[HostReading]]) -> None:
        """Before a backward of the item; what the first one that runs and the last one see is added to `seen`."""
        if not seen and not item.last_of_step:
            self._looks_at = self._of_this_step()
        elif not seen or not item.last_of_step:
            return
        limit = None if self._steps <= WHOLE_STEPS else WATCHED
        seen.append([HostReading(sum_of_bits(tensor.detach().view(-1)[:limit])) for _, tensor in self._looks_at])

    def _of_this_step(self) -> list[tuple[str, Tensor]]:
        steps = self._steps = self._steps + 1
        finds = steps == 1 or (steps >= THEN_EVERY and steps.bit_count() == 1)
        if finds:
            found = self._find_copies()
            self._copies = [(name, weakref.ref(tensor)) for name, tensor in found if can_be_summed(tensor)]
        if steps > WHOLE_STEPS and steps % THEN_EVERY:
            return []
        copies = [(name, tensor) for name, copy in self._copies if (tensor := copy()) is not None]
        if steps <= WHOLE_STEPS:
            return self._weights + copies
        some = [some[steps // THEN_EVERY % len(some)] for some in (self._weights, copies) if some]
        return [*some, *copies] if finds else some  # of each copy, since one that is new may be one of many

    def check(self, seen: Sequence[Sequence[HostReading]], step: int) -> None:
        """At the end of the step, which is that after so many."""
        for name, first, last in zip([name for name, _ in self._looks_at], seen[0], seen[-1], strict=True):
            if first.read() != last.read():
                raise LoopError(
                    f"{name} changed inside step {step + 1}: the loop's body runs once per item, so that lanes would "
                    "be computed from different weights, and averages have as many updates as this worker has items. "
                    "Change weights, and averages of them, where engine.stepped is true; what forward itself changes "
                    "must be a buffer, of which every lane starts from the step's"
                )


@dataclass
class SeenInStep:
    """What `BodyChecks` has seen of a step; every step, and every attempt at it, begins with nothing."""

    settings: list[tuple[str, float]] | None = None  # learning rates and their like
    weights: list[list[HostReading]] = field(default_factory=list)  # in this worker's first and last item
    gradients: list[tuple[Parameter, int]] = field(default_factory=list)  # with versions
    items_without_step: int = 0  # before the last one: the body ran a backward and did not call optimizer.step()


class BodyChecks:
    """What the loop's body must not change inside a step: one method for each place of a step that looks.

    begin_step        parameters stand where they stood in `prepare`
    before_forward    what forward keeps from item to item begins to be noted, in the first items
    loss              is not scaled by what backward counts by itself
    after_forward     nothing of torch's own is in `.grad`; what forward has kept; the weights' bits
    end_items         the weights' bits are what they were
    gradient_is_final … and stays what it is until the update
    settings          learning rates are what they were
    before_update     nobody has written to gradients, and the body does not accumulate by itself
    """

    def __init__(
        self,
        config: EngineConfig,
        models: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        schedulers: Sequence[Any],
        copies: Callable[[], Iterable[tuple[str, Tensor]]],
        joiners_lack_it: Callable[[], bool],
        name_of: NameOf,
    ) -> None:
        """`copies` finds those of the models, by name. `joiners_lack_it`: see ForwardState."""
        self._models, self._optimizers, self._name_of = models, optimizers, name_of
        self._several_lanes, self._exact = config.lanes > 1, config.reduction == "exact"
        self._places = ParameterPlaces(models, optimizers, name_of)
        self._weights = WeightsInStep(copies)
        self._beside = SchedulersBeside(optimizers, schedulers)
        self._factor: FactorOfLoss | None = FactorOfLoss(config.accumulate, config.lanes)
        looks = self._several_lanes and config.compile is None
        self._forward_state: ForwardState | None = ForwardState(models, joiners_lack_it) if looks else None
        self.asks_for_last = False  # the body asks which item is the step's last, and so need not call step() in others

    def regrouped(self, name_of: NameOf) -> None:
        self._name_of, self._places = name_of, ParameterPlaces(self._models, self._optimizers, name_of)

    def begin_step(self) -> None:
        self._places.check()

    def watch(self, weights: Sequence[tuple[str, Tensor]]) -> None:
        """These must not change between the items of a step."""
        self._weights.watch(weights)

    def before_forward(self, item: WorkItem) -> None:
        if self._forward_state is not None:
            self._forward_state.before(item)

    def loss(self, item: WorkItem, loss: Tensor, workers: int, *, only_one: bool) -> None:
        """`only_one`: the item has no other."""
        if self._factor is not None and not (only_one and self._factor.look(loss, item, workers)):
            self._factor = None

    def after_forward(
        self,
        item: WorkItem,
        loss: Tensor,
        seen: SeenInStep,
        empty: Sequence[Parameter],
        step: int,
        *,
        lanes_apart: bool,
    ) -> None:
        """`empty`: parameters that must have no gradient yet."""
        check_gradients_empty(empty, self._name_of, item, step)
        if self._several_lanes and not lanes_apart and not (item.first_of_step and item.last_of_step):
            self._weights.look(item, seen.weights)
        if self._forward_state is not None:
            self._forward_state.after(item, loss)
            if self._forward_state.is_done:
                self._forward_state = None

    def received(self, tensors: Sequence[Tensor]) -> None:
        """By a collective of the script's own, in the body of an item."""
        if self._forward_state is not None and self._exact:
            self._forward_state.received(tensors)

    def end_items(self, seen: SeenInStep, step: int) -> list[tuple[str, float]]:
        """The settings with which the step is made: they are compared between workers."""
        if seen.weights:
            self._weights.check(seen.weights, step)
        return learning_rates(self._optimizers)

    def gradient_is_final(self, parameters: Sequence[Parameter], seen: SeenInStep) -> None:
        seen.gradients = [(p, version_of(p.grad)) for p in parameters if p.grad is not None]

    def settings(self, item: WorkItem | None, seen: SeenInStep, step: int) -> None:
        now = learning_rates(self._optimizers)
        if item is not None and not (item.first_of_step and item.last_of_step):
            now += self._beside.counts()
        if seen.settings is None:
            seen.settings = now
        check_learning_rates(seen.settings, now, step)

    def before_update(self, seen: SeenInStep, step: int, *, is_first: bool) -> None:
        """`is_first`: no other optimizer has acted in this step."""
        if is_first:
            check_gradients_untouched(seen.gradients, self._name_of)
        if seen.items_without_step and not self.asks_for_last:
            self.asks_for_last = True  # said once
            messages.warn(accumulates_by_hand(step))

    def close(self) -> None:
        if self._forward_state is not None:
            self._forward_state.close()
