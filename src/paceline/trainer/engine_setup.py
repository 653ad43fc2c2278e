"""The Engine that TrainingArguments describe, and what it needs to begin: one model on all workers.

| argument                              | Engine                                        |
|---------------------------------------|-----------------------------------------------|
| gradient_accumulation_steps           | accumulate                                    |
| strategy, fsdp, deepspeed             | strategy, offload                             |
| tp, cp                                | mesh                                          |
| bf16, fp16                            | precision                                     |
| gradient_checkpointing and its kwargs | activation_checkpointing                      |
| torch_compile, its backend and mode   | compile                                       |
| ddp_backend, ddp_timeout, ddp_bucket_cap_mb | backend, timeout_s, bucket_mib          |
| use_cpu                               | device                                        |
| seed, lanes, threads, reduction, on_nonfinite | the same                              |
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from paceline.engine.activation_checkpointing import blocks_of
from paceline.engine.compilation import Compile
from paceline.engine.engine import Engine
from paceline.engine.replicas import named_state, weights_hash
from paceline.errors import ConfigError
from paceline.mesh.mesh import Mesh
from paceline.strategies.fsdp.fsdp import FsdpConfig
from paceline.strategies.fsdp.hybrid import HybridConfig
from paceline.trainer.training_arguments import StrategyChoice, TrainingArguments
from paceline.world.determinism import mix, seed_everything
from paceline.world.world import TcpRendezvous

DEFAULT_SEED = 42
DEFAULT_BUCKET_MIB = 16.0


def build_engine(arguments: TrainingArguments, model: nn.Module | None = None, *, lanes: int | None = None) -> Engine:
    """For this model, where it is known: one without blocks may know by itself how to checkpoint activations."""
    world, choice = arguments.world, arguments.choice
    _allow_tf32(arguments)
    seed_everything(start_seed(arguments))  # as the Engine does, which would speak of a seed that was set before it
    engine = Engine(
        world=world,
        lanes=lanes or arguments.lanes,
        accumulate=arguments.gradient_accumulation_steps,
        seed=_seed(arguments),
        strategy=_strategy(choice),
        reduction=arguments.reduction,  # type: ignore[arg-type]
        backend=arguments.ddp_backend,
        threads=arguments.threads,
        device="cpu" if arguments.use_cpu else None,
        bucket_mib=float(arguments.ddp_bucket_cap_mb or DEFAULT_BUCKET_MIB),
        precision=arguments.precision,
        offload=choice.offload,  # type: ignore[arg-type]
        compression=arguments.compression,
        mesh=_mesh(arguments),
        activation_checkpointing=_recomputed(arguments, model),
        compile=_compiled(arguments),
        on_nonfinite=arguments.on_nonfinite,  # type: ignore[arg-type]
        record_samples=arguments.output_dir if arguments.record_samples else None,
        timeout_s=float(arguments.ddp_timeout),
    )
    if text := _unused_devices(arguments):
        engine._note(text, "trainer")
    return engine


def _mesh(arguments: TrainingArguments) -> Mesh | None:
    """What they leave open a launcher's flag may say."""
    if arguments.tp is None and arguments.cp is None:
        return None
    return Mesh(tp=arguments.tp or 1, cp=arguments.cp or 1)


def _strategy(choice: StrategyChoice) -> Any:
    """By name, or with the units that the arguments name."""
    if not choice.units:
        return choice.strategy
    return HybridConfig(units=choice.units) if choice.strategy == "hybrid" else FsdpConfig(units=choice.units)


def share_weights(engine: Engine, model: nn.Module) -> None:
    """A script may build its model before the Trainer, from no seed: then all workers take worker 0's weights."""
    if engine._group.all.size == 1 or engine.world.is_server or any(p.is_meta for p in model.parameters()):
        return
    model.to(engine.device)
    state = named_state([model])
    form = [[name, str(value.dtype), list(value.shape)] for name, value in state.items()]
    gathered = engine._between.boundary.told([form, weights_hash([model])])
    if len({theirs[1] for theirs in gathered}) == 1 or any(theirs[0] != form for theirs in gathered):
        return  # alike, or so different that prepare() will say in what
    for value in state.values():
        whole = value.detach().contiguous()
        engine._group.all.broadcast(whole, root=0).wait()
        value.detach().copy_(whole)
    engine._note("paceline: the workers had built different weights; all now use those of worker 0", "trainer")


def start_seed(arguments: TrainingArguments) -> int:
    """What an Engine of these arguments is seeded with when it is made."""
    return mix(_seed(arguments), "start")


def _seed(arguments: TrainingArguments) -> int:
    """Where it only has its default, the launcher may give another: `paceline run --seed 7`."""
    of_launcher = arguments.world.settings.seed
    return of_launcher if of_launcher is not None and arguments.seed == DEFAULT_SEED else arguments.seed


def check_can_be_replaced(engine: Engine, optimizer_may_go: bool) -> None:
    """Raise where this Engine can't be followed by another one in the same process."""
    rendezvous, strategy = engine.world.rendezvous, engine.config.strategy
    if not optimizer_may_go:
        raise ConfigError(
            "train() was called again, but the optimizer given to the Trainer belongs to the first training; make a "
            "new Trainer with a new optimizer"
        )
    if not strategy.entry.full_weights:
        raise ConfigError(
            f"train() was called again, but under strategy={strategy.name!r} the weights lie in parts on the workers; "
            "save_model(), and make a new Trainer"
        )
    if engine.world.size > 1 and isinstance(rendezvous, TcpRendezvous) and not rendezvous.served_by_agent:
        raise ConfigError(
            "train() needs another Engine than the one that is there, but these workers can meet only once; train "
            "first and evaluate then, one training in each start of the script, or start it with `paceline run`"
        )


def _recomputed(arguments: TrainingArguments, model: nn.Module | None) -> Any:
    given = arguments.gradient_checkpointing_kwargs
    options = dict(given) if isinstance(given, dict) else {}
    every = options.pop("every_n_layers", 1)
    if options.pop("use_reentrant", False):
        raise ConfigError("gradient_checkpointing_kwargs: use_reentrant=True is not there; leave it out, or say False")
    if options:
        raise ConfigError(f"gradient_checkpointing_kwargs: {', '.join(options)} is not supported; leave it out")
    if not (arguments.gradient_checkpointing or arguments.choice.recompute):
        return None
    by_itself = model is not None and getattr(model, "supports_gradient_checkpointing", False)
    if model is not None and by_itself and every == 1 and next(blocks_of(model), None) is None:
        model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
        return None
    return "blocks" if every == 1 else int(every)


def _compiled(arguments: TrainingArguments) -> Compile | None:
    if not arguments.torch_compile:
        return None
    return Compile(arguments.torch_compile_backend or "inductor", arguments.torch_compile_mode)


def advice_to_compile(arguments: TrainingArguments, device_type: str, model: nn.Module) -> str:
    """Compiling is no default: a batch of another shape takes other code, and batches may have any number of them."""
    has_blocks = next(blocks_of(model), None) is not None
    if device_type != "cuda" or arguments.torch_compile or not has_blocks or find_spec("triton") is None:
        return ""
    return "torch_compile=True trains Llamas 1.4 to 1.9 times as fast; its batches may have at most 8 shapes"


def _allow_tf32(arguments: TrainingArguments) -> None:
    if arguments.tf32 is None:
        return
    if arguments.tf32 and not torch.cuda.is_available():
        raise ConfigError("tf32=True needs an NVIDIA GPU, and there is none")
    torch.set_float32_matmul_precision("high" if arguments.tf32 else "highest")


def _unused_devices(arguments: TrainingArguments) -> str:
    """One process drives one device: say how to use the others."""
    if arguments.use_cpu or arguments.world.size > 1 or not torch.accelerator.is_available():
        return ""
    if (count := torch.accelerator.device_count()) < 2:
        return ""
    return f"paceline: {count} devices here, this process uses one; `paceline run --workers {count} …` uses all"
