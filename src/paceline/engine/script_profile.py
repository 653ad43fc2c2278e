"""`paceline plan SCRIPT`: the loop of a script runs, and what it runs is recorded instead of trained.

    engine.prepare(model, optimizer, loader)      hands the objects back as they are, the loader as `ProfiledLoader`
    for batch in loader:                          one batch, again and again: in each variant, then for its time
        loss = …                                  on fake tensors, under a recorder
        engine.backward(loss)                     recorded; from here to the next batch a tensor's value is 0
    after the last variant                        the profile is written and the process ends

Nothing of it exists in a job that trains: `Engine` makes a `ScriptPreparation` in place of a `Preparation` where the
environment names an order (PACELINE_PLAN).
"""

from __future__ import annotations

import json
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from paceline.engine.activation_checkpointing import blocks_of
from paceline.engine.causal_masks import CausalMasks
from paceline.engine.config import EngineConfig
from paceline.engine.prepare import Preparation, place_of_training_data
from paceline.engine.sources import as_loader, undivided
from paceline.errors import ConfigError
from paceline.mesh.plans import Plan
from paceline.optim.precision import Precision, lower
from paceline.planner.compiled_pass import compiling
from paceline.planner.gpu_attention import fused
from paceline.planner.model_profile import (
    ModelProfile,
    PassProfile,
    PassRecorder,
    Variant,
    fewest_samples,
    is_fake,
    new_fake_mode,
    recomputing,
    resized,
    samples_in,
)
from paceline.planner.model_sizes import sizes_of
from paceline.planner.model_source import describe
from paceline.planner.profile_file import to_json
from paceline.planner.script_run import Order
from paceline.planner.search import variants_for
from paceline.strategies.meta_device import is_on_meta

TIMED = 3
STEPS = 1000  # of an epoch, for schedules that never act


class ScriptPreparation(Preparation):
    """Takes the user's objects, and starts nothing."""

    trains = False

    def order(self, path: Path) -> ScriptPreparation:
        self._order = Order.read(path)
        return self

    def prepare(
        self, objects: tuple[Any, ...], weights: str | Path | None = None, plan: Plan = None
    ) -> tuple[Any, ...]:
        objects = tuple(map(undivided, objects))
        optimizers = [thing for thing in objects if isinstance(thing, Optimizer)]
        self._objects.models += [thing for thing in objects if isinstance(thing, nn.Module)]
        self._objects.optimizers += optimizers
        if not optimizers:
            return objects
        place = place_of_training_data(objects)
        if place is None:
            raise ConfigError("paceline plan: engine.prepare() got an optimizer but no loader; give both in one call")
        step = ProfiledStep(self._order, self._objects.models, optimizers, self._config)
        self._objects.step = step  # type: ignore[assignment]
        loader = as_loader(objects[place], self._config, trains=True)
        return tuple(ProfiledLoader(loader, step) if at == place else thing for at, thing in enumerate(objects))

    def steps_per_epoch(self, loader: Any) -> int:
        return STEPS


class ProfiledLoader:
    """Hands the first batch out once for each variant, and a few times more to be timed with the fetching of others."""

    def __init__(self, loader: Any, step: ProfiledStep) -> None:
        self._loader, self._step = loader, step
        self.dataset = getattr(loader, "dataset", None)
        self.batch_size = getattr(loader, "batch_size", None)
        self.epoch, self.source = 0, SimpleNamespace(steps=STEPS, steps_left=STEPS)  # what a Trainer plans with

    def __len__(self) -> int:
        return len(self._loader)

    def set_epoch(self, epoch: int) -> None:
        """All are alike."""

    def __iter__(self) -> Iterator[Any]:
        fetching = iter(self._loader)
        batch = next(fetching)
        given = samples_in(batch)
        for variant in self._step.variants(given):
            yield self._step.begins(variant, batch, given)
            self._step.ends()
        for _ in range(self._step.timed_passes):
            self._step.begins_timed()
            if not getattr(self._loader, "num_workers", 0):  # otherwise other processes fetch meanwhile
                next(fetching, None)
            yield batch
            self._step.ends()
        self._step.write(given)
        raise SystemExit(0)


class _ValuesAreZero(TorchFunctionMode):
    """What a body does after backward, such as logging a loss, gets a number; nothing of it is recorded."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if args and isinstance(args[0], Tensor) and is_fake(args[0]):
            if function in (Tensor.item, Tensor.__float__):
                return 0.0
            if function is Tensor.__format__:
                return format(0.0, *args[1:])
            if function is Tensor.__int__:
                return 0
            if function is Tensor.__bool__:
                return False
            if function is Tensor.tolist:
                return [0.0] * args[0].shape[0] if args[0].dim() else 0.0
        return function(*args, **(kwargs or {}))


class ProfiledStep:
    """In place of a `TrainStep`, as far as a loop's body looks at it."""

    def __init__(
        self, order: Order, models: Sequence[nn.Module], optimizers: Sequence[Optimizer], config: EngineConfig
    ) -> None:
        self._order, self._models, self._optimizers = order, models, optimizers
        self._lanes, self._accumulate = config.lanes, config.accumulate
        self._mode = None if order.real else new_fake_mode()
        if self._mode is not None:
            for model in (model for model in models if is_on_meta(model)):
                with self._mode:
                    model.to_empty(device="cpu")
        self._trained = [p for model in models for p in model.parameters() if p.requires_grad]
        self._profile = describe(order.name, models, bucket_bytes=int(config.bucket_mib * 2**20))
        self._passes: dict[Variant, PassProfile] = {}
        self._blocks = [module for model in models for module in blocks_of(model)]
        self._sizes = sizes_of(optimizers)
        self._around, self._after = ExitStack(), ExitStack()
        self._recorder: PassRecorder | None = None
        self._variant, self._precision = Variant(0), "fp32"
        self._started, self._seconds = 0.0, list[float]()
        self.means: dict[str, float] = defaultdict(float)
        self.step, self.rounds, self.round, self.stepped, self.inside_step = 0, 0, 0, False, False
        self.broken = None
        self.checks = SimpleNamespace(asks_for_last=False)
        item = {"lane": 0, "micro_batch": 0, "samples": 1, "shadow": False, "present": (0,), "epoch": 0, "step": 0}
        ends = dict.fromkeys(("first_of_lane", "first_of_step", "last_of_lane", "last_of_step"), True)
        self.now = SimpleNamespace(item=SimpleNamespace(**item, **ends), empty=False)  # each batch is a step

    def is_seen_by(self, call: str, *, saves: bool) -> None: ...

    # -- one pass ----------------------------------------------------------------------------------------------------

    def variants(self, given: int) -> list[Variant]:
        if self._order.real:
            return [Variant(given)]
        wanted = variants_for(self._order.request.of_script(self._lanes, self._accumulate, given), given)
        least = fewest_samples(self._models)
        return [one for one in wanted if one.samples >= least and (self._blocks or not one.recomputed)]

    @property
    def timed_passes(self) -> int:
        return TIMED + 1 if self._order.timed else 0

    def begins(self, variant: Variant, batch: Any, given: int) -> Any:
        self._variant = variant
        if variant.precision != self._precision:  # for good: fp32 comes first
            lower(self._models, Precision(variant.precision))  # type: ignore[arg-type]
            self._precision = variant.precision
        self._around.enter_context(closing(CausalMasks(self._models)))
        if variant.compiled:
            blocks = [block for model in self._models for block in (list(blocks_of(model)) or [model])]
            self._around.enter_context(compiling(blocks, self._models))
        self._around.enter_context(recomputing(self._blocks if variant.recomputed else ()))
        if self._order.fused_attention:
            self._around.enter_context(fused())
        recorder = PassRecorder(self._models, self._trained, self._mode)
        if self._mode is not None:
            with self._mode:
                batch = resized(batch, variant.samples, given)
        self._recorder = self._around.enter_context(recorder)
        return recorder.took(batch)

    def begins_timed(self) -> None:
        self._recorder = None
        self._started = time.perf_counter()

    def backward(self, loss: Tensor, weight: Any = None, *, last: bool = True) -> None:
        if not last:
            raise ConfigError("paceline plan: an item with several losses, backward(last=False), can't be profiled")
        if self._recorder is not None:
            self._passes[self._variant] = self._recorder.backward(loss, self._variant.samples)
            self._around.close()
            self._after.enter_context(_ValuesAreZero())
            return
        loss.backward()  # type: ignore[no-untyped-call]
        self._seconds.append(time.perf_counter() - self._started)
        for parameter in self._trained:
            parameter.grad = None

    def ends(self) -> None:
        self._after.close()
        self._around.close()

    def write(self, given: int) -> None:
        profile = self._timed(given)
        kinds = sorted({type(module).__name__ for module in self._blocks})
        state = 8 if self._sizes is None else self._sizes.state
        profile = replace(
            profile,
            samples=given,
            lanes=self._lanes,
            accumulate=self._accumulate,
            state_bytes=state,
            blocks=f"{len(self._blocks)} {', '.join(kinds)}" if self._blocks else "",
            update=type(self._optimizers[0]).__name__,
        )
        Path(self._order.out).write_text(json.dumps(to_json(profile)))

    def _timed(self, given: int) -> ModelProfile:
        how = "a real step, recorded" if self._order.real else "the script's loop on fake tensors"
        if not self._seconds:
            return replace(self._profile, passes=self._passes, how=how)
        seconds = statistics.median(self._seconds[1:])
        first = self._passes[Variant(given)] if Variant(given) in self._passes else next(iter(self._passes.values()))
        scale = seconds / (first.flops + 16.0 * first.moved_bytes)
        passes = {
            variant: replace(one, measured_s=scale * (one.flops + 16.0 * one.moved_bytes))
            for variant, one in self._passes.items()
        }
        return replace(self._profile, passes=passes, how=f"{how}, timed here")

    # -- what else a body asks for -----------------------------------------------------------------------------------

    def add_mean(self, name: str, value: Any, weight: float | None = None) -> None:
        """Nothing was computed."""

    def clip(self, max_norm: float) -> float:
        return 0.0

    def stop(self) -> None:
        """It ends by itself."""

    def drain(self) -> None:
        """Nothing is under way."""

    def close(self) -> None:
        self.ends()
