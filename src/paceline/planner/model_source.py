"""Where a model to plan for comes from, and how it is run in every variant that the search asks for.

    --model gpt2, ./config.json        a configuration of transformers: built without weights, random tokens
    --model package.module:function    a function that returns (model, batch, loss) with loss(model, batch) -> Tensor
    SCRIPT                             the script's own model, batch and loop (planner/script_profile.py)

The model is built and run on fake tensors. One that can't be is built for real and run for real, one sample size only;
the profile says which (`ModelProfile.how`).
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from paceline.errors import ConfigError
from paceline.optim.precision import Precision, lower
from paceline.planner.compiled_pass import compiling
from paceline.planner.gpu_attention import fused
from paceline.planner.model_profile import (
    ModelProfile,
    NotTraceableError,
    PassProfile,
    PassRecorder,
    Variant,
    explained,
    fewest_samples,
    new_fake_mode,
    recomputing,
    resized,
    samples_in,
)
from paceline.sharding.unit import cut_units
from paceline.strategies.buckets import gradient_specs
from paceline.world import process
from paceline.world.environment import may_keep_memory

Loss = Callable[[nn.Module, Any], Tensor]
Around = Callable[[nn.Module], AbstractContextManager[Any]]
Blocks = Callable[[nn.Module], Sequence[nn.Module]]  # what activation checkpointing would make again
STATE_BYTES = {"adamw": 8, "adam": 8, "sgd": 0, "momentum": 4, "lion": 4, "adafactor": 0}
TIMED_PASSES = 3
ENOUGH_S = 1.5  # of timed passes


@dataclass(frozen=True)
class Source:
    """`build` makes model, batch and loss anew, on whatever device and tensors are current."""

    name: str
    build: Callable[[], tuple[nn.Module, Any, Loss]]
    unit: str = "samples/s"
    units_per_sample: int = 1


# -- --model -----------------------------------------------------------------------------------------------------------


def source_of(model: str, *, batch_size: int, sequence: int) -> Source:
    module, colon, function = model.partition(":")
    if colon and not Path(model).exists():
        return _from_function(model, module, function)
    return _from_transformers(model, batch_size, sequence)


def _from_function(model: str, module: str, function: str) -> Source:
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        found = importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f"--model {model}: module {module!r} can't be imported ({error})") from error
    build = getattr(found, function, None)
    if not callable(build):
        raise ConfigError(f"--model {model}: {module} has no function {function!r}")

    def checked() -> tuple[nn.Module, Any, Loss]:
        made = build()
        if not (isinstance(made, tuple) and len(made) == 3 and isinstance(made[0], nn.Module) and callable(made[2])):
            raise ConfigError(
                f"--model {model}: {function}() has to return (model, batch, loss), where loss(model, batch) gives a "
                f"scalar; it returned {type(made).__name__}"
            )
        return made

    return Source(model, checked)


def _from_transformers(model: str, batch_size: int, sequence: int) -> Source:
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(
            f"--model {model} is a configuration of transformers, which is not installed: pip install transformers, or "
            "give package.module:function"
        ) from error
    config = _config_of(transformers, model)
    if getattr(config, "use_cache", False):
        config.use_cache = False  # training reads no cache of keys and values, and paceline's Trainer makes none
    longest = getattr(config, "max_position_embeddings", None) or sequence
    length = min(sequence, longest)

    def build() -> tuple[nn.Module, Any, Loss]:
        network = _class_of(transformers, config)(config)
        network.train()
        tokens = torch.randint(0, min(config.vocab_size, 1000), (batch_size, length))
        return network, {"input_ids": tokens, "labels": tokens}, lambda network, batch: network(**batch).loss

    return Source(model, build, "tokens/s", length)


def _config_of(transformers: Any, model: str) -> Any:
    path = Path(model)
    try:
        if path.is_file():
            told = json.loads(path.read_text())
            return transformers.AutoConfig.for_model(told.pop("model_type"), **told)
        if path.is_dir():
            return transformers.AutoConfig.from_pretrained(model)
        if model in transformers.CONFIG_MAPPING:  # a kind of model, with its defaults
            return transformers.AutoConfig.for_model(model)
        return transformers.AutoConfig.from_pretrained(model)
    except Exception as error:  # of a hub that can't be reached, a file that is none, a kind that is not known
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"--model {model}: no configuration of transformers can be had ({first[:160]}); give the path of a "
            "config.json, a kind such as gpt2 or llama, or package.module:function"
        ) from error


def _class_of(transformers: Any, config: Any) -> Any:
    """That trains: the one the configuration names, otherwise a language model."""
    named = [name for name in config.architectures or [] if hasattr(transformers, name)]
    if named and not named[0].endswith("Model"):
        return getattr(transformers, named[0])
    for automatic in ("AutoModelForCausalLM", "AutoModelForMaskedLM", "AutoModelForSeq2SeqLM"):
        mapping = getattr(transformers, automatic)._model_mapping
        if type(config) in mapping:
            return mapping[type(config)]
    raise ConfigError(
        f"transformers has no language model for {type(config).__name__}; give package.module:function instead"
    )


# -- variants ----------------------------------------------------------------------------------------------------------


def profile_source(
    source: Source,
    variants: Callable[[int], Sequence[Variant]],
    *,
    blocks: Blocks,
    optimizer: str = "adamw",
    bucket_bytes: int = 16 * 2**20,
    time_passes: bool = False,
    threads: int = 1,
    fused_attention: bool = False,
    around: Around = nullcontext,
) -> ModelProfile:
    """Every variant on fake tensors; the given batch also for real, where passes are timed.

    `variants` are asked for by the number of samples in the given batch. `fused_attention`: as a GPU has it. `around`:
    what the model runs in, as what an Engine changes of it.
    """
    if optimizer not in STATE_BYTES:
        raise ConfigError(f"--optimizer {optimizer!r} is not known; choose one of {', '.join(STATE_BYTES)}")
    mode = new_fake_mode()
    try:
        with mode:
            model, batch, loss = source.build()
        wanted = [one for one in variants(samples_in(batch)) if one.samples >= fewest_samples([model])]
        with fused() if fused_attention else nullcontext(), around(model):
            profile = _profiled(source, model, batch, loss, mode, wanted, blocks, bucket_bytes)
    except ConfigError as error:
        if not isinstance(error, NotTraceableError):
            raise
        raise NotTraceableError(f"{source.name} {error}") from error
    except Exception as error:  # whatever the model's code raises when it meets tensors without values
        raise NotTraceableError(f"{source.name} {explained(error)}") from error
    profile = replace(profile, state_bytes=STATE_BYTES[optimizer], update=optimizer)
    return timed(source, profile, blocks, threads) if time_passes else profile


def real_profile(
    source: Source, *, blocks: Blocks, optimizer: str = "adamw", bucket_bytes: int = 16 * 2**20, threads: int = 1
) -> ModelProfile:
    """Of a model that can't run on fake tensors: its own batch, with real weights, measured."""
    model, batch, loss = source.build()
    given = Variant(samples_in(batch))
    profile = _profiled(source, model, batch, loss, None, [given], blocks, bucket_bytes)
    seconds = _time_pass(model, batch, loss, threads)
    passes = {given: replace(profile.passes[given], measured_s=seconds)}
    how = "a real step, measured"
    return replace(profile, passes=passes, how=how, state_bytes=STATE_BYTES[optimizer], update=optimizer)


def _profiled(
    source: Source,
    model: nn.Module,
    batch: Any,
    loss: Loss,
    mode: Any | None,
    variants: Sequence[Variant],
    blocks: Blocks,
    bucket_bytes: int,
) -> ModelProfile:
    given = samples_in(batch)
    profile = describe(source.name, [model], bucket_bytes=bucket_bytes)
    repeated = list(blocks(model))
    trained = [p for p in model.parameters() if p.requires_grad]
    passes: dict[Variant, PassProfile] = {}
    for precision in dict.fromkeys(variant.precision for variant in variants):  # lowering a model is for good
        with mode or nullcontext():
            lowered = lower([model], Precision(precision))  # type: ignore[arg-type]
        try:
            for variant in (one for one in variants if one.precision == precision):
                if variant.recomputed and not repeated:
                    continue
                with mode or nullcontext():
                    sized = resized(batch, variant.samples, given)
                compiled = compiling(repeated or [model], [model]) if variant.compiled else nullcontext()
                with compiled, recomputing(repeated if variant.recomputed else ()):
                    passes[variant] = one_pass([model], trained, mode, sized, loss, variant.samples)
        finally:
            if lowered is not None:
                lowered.close()
    kinds = sorted({type(module).__name__ for module in repeated})
    return replace(
        profile,
        passes=passes,
        samples=given,
        how="fake tensors" if mode is not None else "a real step, measured",
        blocks=f"{len(repeated)} {', '.join(kinds)}" if repeated else "",
        unit=source.unit,
        units_per_sample=source.units_per_sample,
    )


def one_pass(
    models: Sequence[nn.Module], trained: Sequence[Parameter], mode: Any | None, batch: Any, loss: Loss, samples: int
) -> PassProfile:
    with PassRecorder(models, trained, mode) as recorder:
        result = loss(models[0], recorder.took(batch))
        if not isinstance(result, Tensor) or result.numel() != 1 or not result.requires_grad:
            raise ConfigError(f"the loss has to be a scalar with a gradient; it is {type(result).__name__}")
        return recorder.backward(result, samples)


def describe(name: str, models: Sequence[nn.Module], *, bucket_bytes: int) -> ModelProfile:
    """What is known of models before they run."""
    named = {id(p): (n, p) for model in models for n, p in model.named_parameters() if p.requires_grad}
    trained = [parameter for _, parameter in named.values()]
    if not trained:
        raise ConfigError(f"{name} has no parameter that is trained")
    frozen = {id(p): p for model in models for p in model.parameters() if not p.requires_grad}
    buffers = {id(b): b for model in models for b in model.buffers()}
    specs = tuple(replace(spec, device=torch.device("cpu")) for spec in gradient_specs(trained))
    index = {id(parameter): number for number, parameter in enumerate(trained)}
    units = cut_units(models, index, specs, classes=None, unit_bytes=bucket_bytes)
    return ModelProfile(
        name=name,
        specs=specs,
        names=tuple(name for name, _ in named.values()),
        frozen_bytes=sum(p.numel() * p.element_size() for p in frozen.values()),
        buffer_bytes=sum(b.numel() * b.element_size() for b in buffers.values()),
        state_bytes=STATE_BYTES["adamw"],
        units=tuple(unit.parameters for unit in units),
        passes={},
    )


# -- for real ----------------------------------------------------------------------------------------------------------


def timed(source: Source, profile: ModelProfile, blocks: Blocks, threads: int) -> ModelProfile:
    """The pass of the given batch in fp32, run on this machine; the others in proportion to their operators."""
    model, batch, loss = source.build()
    seconds = _time_pass(model, batch, loss, threads)
    given = profile.passes.get(Variant(profile.samples))
    if given is None:
        return profile
    passes = {
        variant: replace(one, measured_s=seconds * _compute(one) / _compute(given))
        for variant, one in profile.passes.items()
    }
    return replace(profile, passes=passes, how=f"{profile.how}, one pass timed here")


def _compute(one: PassProfile) -> float:
    """In proportion to which time grows: products, and bytes as dear as sixteen of their flops."""
    return one.flops + 16.0 * one.moved_bytes


def _time_pass(model: nn.Module, batch: Any, loss: Loss, threads: int) -> float:
    if may_keep_memory():  # as under `paceline run`: of a model of many weights a quarter of a pass is page faults
        process.keep_free_memory()
    model.train()
    with _threads(threads):
        seconds = []
        for _ in range(TIMED_PASSES + 1):
            for parameter in model.parameters():
                parameter.grad = None
            started = time.perf_counter()
            loss(model, batch).backward()  # type: ignore[no-untyped-call]
            seconds.append(time.perf_counter() - started)
            if sum(seconds) > 2 * ENOUGH_S:
                break
    return min(seconds[1:] or seconds)


@contextmanager
def _threads(wanted: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(wanted)
    try:
        yield
    finally:
        torch.set_num_threads(before)
