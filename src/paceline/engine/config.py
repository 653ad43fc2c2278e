"""What an Engine is told, checked at birth: by its script, by the launcher's flags, and by the machine it finds.

The script and the launcher may each say what the other leaves open; where both speak they must agree (`one_of`). What
neither says has a default. Only that of lanes depends on the number of workers, at the start of the job, and is for
life.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from paceline.collectives.choice import check_algorithm
from paceline.collectives.gradient_exchange import Reduction
from paceline.compression import Compression, compression_of
from paceline.engine import activation_checkpointing as recomputing
from paceline.engine.activation_checkpointing import ActivationCheckpointing
from paceline.engine.compilation import Compile, compile_of
from paceline.errors import ConfigError
from paceline.input_file import one_line
from paceline.mesh.mesh import Mesh
from paceline.optim.loss_scale import LossScale, OnNonFinite, loss_scale_of
from paceline.optim.offload import PARAMETERS, OffloadName, check_offload
from paceline.optim.precision import Precision, precision_of
from paceline.strategies.fsdp.hybrid import HybridConfig
from paceline.strategies.registry import STRATEGIES, Chosen, choose
from paceline.verify.request import Request
from paceline.world.checked_values import number, one_word, seconds, switch, whole_number
from paceline.world.determinism import default_threads
from paceline.world.known_names import AUTO, BACKENDS, MOST_LANES, MOST_THREADS, SEEDS
from paceline.world.world import World

_T = TypeVar("_T")

MOST_ACCUMULATED = 10**6
LARGEST_BUCKET_MIB = 2.0**20


def check_lanes(lanes: Any) -> None:
    whole_number("lanes", lanes, least=1, most=MOST_LANES, why="a job has at least one lane")


def check_threads(threads: Any) -> None:
    whole_number("threads", threads, least=1, most=MOST_THREADS, why="a worker computes with at least one thread")


def check_seed(seed: Any) -> None:
    whole_number("seed", seed, most=SEEDS - 1, why="seeds are whole numbers from 0 to 2**63 - 1")


@dataclass(frozen=True)
class EngineConfig:
    """The job's constants. Lanes and threads are for life: the bits depend on them, never on the number of workers."""

    lanes: int
    accumulate: int
    seed: int
    strategy: Chosen
    reduction: Reduction
    algorithm: str | None
    backend: str
    threads: int
    bucket_mib: float
    overlap: bool
    global_batch_size: int | None
    on_nonfinite: OnNonFinite
    timeout_s: float
    activation_checkpointing: ActivationCheckpointing | None = None
    precision: Precision = field(default_factory=Precision)
    loss_scale: LossScale | None = None
    offload: OffloadName | None = None
    compile: Compile | None = None
    compression: Compression | None = None
    mesh: Mesh = field(default_factory=Mesh)  # with every size known, where a script or a flag asks for one
    is_auto: bool = False  # the strategy is ours to choose, when the optimizers are known (engine/auto_strategy.py)
    chosen_because: str = ""  # of a strategy that we chose

    @property
    def summed_lanes(self) -> int:
        """Lanes that gradients are summed over: those of the data, each as often as workers share its sequences."""
        return self.lanes * self.mesh.cp

    def settle(self, strategy: Chosen, why: str) -> None:
        """The one thing that follows from what is prepared: everybody who has this config sees it from here on."""
        object.__setattr__(self, "strategy", strategy)
        object.__setattr__(self, "chosen_because", why)

    def __post_init__(self) -> None:
        def check(ok: bool, text: str) -> None:
            if not ok:
                raise ConfigError(text)

        check_lanes(self.lanes)
        check_threads(self.threads)
        check_seed(self.seed)
        why = "a lane has at least one micro-batch per step"
        whole_number("accumulate", self.accumulate, least=1, most=MOST_ACCUMULATED, why=why)
        number("bucket_mib", self.bucket_mib, above=0, why="a bucket holds at least one gradient")
        number("bucket_mib", self.bucket_mib, most=LARGEST_BUCKET_MIB)
        waits_s = seconds("timeout_s", self.timeout_s, why="a wait of no time always fails")
        object.__setattr__(self, "timeout_s", waits_s)  # a plain number, whatever it was
        switch("overlap", self.overlap)
        one_word("backend", self.backend, BACKENDS)
        if self.global_batch_size is not None:
            whole_number("global_batch_size", self.global_batch_size, least=1, why="a step has at least one sample")
        one_word("reduction", self.reduction, ("exact", "fast"))
        if self.algorithm is not None:
            check_algorithm(self.algorithm)
            check(
                self.reduction == "fast",
                f"algorithm={self.algorithm!r} with reduction={self.reduction!r}: the exact sum has an order of its "
                "own, whichever way its bytes take; choose reduction='fast' to train over an algorithm",
            )
        one_word("on_nonfinite", self.on_nonfinite, ("stop", "skip", "continue"))
        check(
            self.precision == Precision() or self.strategy.entry.takes_low_precision,
            f"precision={str(self.precision)!r} with strategy={self.strategy.name!r}, which keeps no fp32 masters of "
            "weights in low precision; choose one of "
            + ", ".join(entry.name for entry in STRATEGIES.values() if entry.takes_low_precision),
        )
        if self.compression is not None:
            check(
                self.strategy.entry.takes_compression,
                f"compression with strategy={self.strategy.name!r}, which has none: choose one of "
                + ", ".join(sorted(entry.name for entry in STRATEGIES.values() if entry.takes_compression)),
            )
            check(
                self.reduction == "exact",
                "compression with reduction='fast': lanes are compressed one by one and added in their own order, so "
                "there is nothing to gain; leave reduction out",
            )

    def _check_mesh(self, world: World) -> None:
        """That the rest of the configuration goes with workers that share a model."""
        mesh, name = self.mesh, self.strategy.name
        sharded, copies = mesh.dp_shard or 1, mesh.dp_replicate or 1
        wanted = "hybrid" if sharded > 1 and copies > 1 else "fsdp" if sharded > 1 else "ddp"
        fits = {"hybrid": ("hybrid",), "fsdp": ("fsdp", "zero1", "zero2", "zero3"), "ddp": ("ddp", "star")}[wanted]
        if mesh.dp is None and (sharded, copies) != (1, 1) and name not in fits:
            raise ConfigError(
                f"{mesh} with strategy={name!r}: these sizes are for {' or '.join(fits)}; give dp= instead, which "
                "leaves it to the strategy what data parallelism is"
            )
        if not mesh.splits_model:
            return
        refused = {
            f"strategy={name!r}": name not in WITH_A_MESH,
            "compression": self.compression is not None,
            "--servers": world.servers > 0,
            "compile": self.compile is not None,
        }
        for what, is_so in refused.items():
            if is_so:
                raise ConfigError(
                    f"{mesh} with {what}: can't be combined with workers that share a model; choose one of the "
                    f"strategies {', '.join(WITH_A_MESH)}, and leave out compression, compile and servers"
                )

    def check_against(self, world: World) -> None:
        self._check_mesh(world)
        if world.servers and not self.strategy.entry.uses_servers:
            raise ConfigError(
                f"{counted(world.servers, 'server')} and strategy={self.strategy.name!r}, which "
                "has no use for them; start without --servers"
                + "".join(f", or choose strategy={entry.name!r}" for entry in STRATEGIES.values() if entry.uses_servers)
            )
        if world.settings.replay is not None and not self.strategy.entry.uses_servers:
            raise ConfigError(
                f"replay of {world.settings.replay}: strategy={self.strategy.name!r} has no order of updates to do "
                "again; the script has changed, or the folder is of another run"
            )
        if (workers := world.size // self.mesh.cp) > self.lanes:
            raise ConfigError(
                f"{workers} workers but only {counted(self.lanes, 'lane')}: "
                f"{workers - self.lanes} of them would have "
                f"nothing to do; take Engine(lanes={workers}) or --lanes {workers}, or more (with a smaller "
                f"batch_size, for the same global batch), or start with --workers {self.lanes * self.mesh.model}"
            )


def one_of(name: str, in_script: _T | None, by_launcher: _T | None) -> _T | None:
    """A value that both the script and the launcher may give, but not differently."""
    if in_script is not None and by_launcher is not None and in_script != by_launcher:
        raise ConfigError(
            f"the script says {name}={in_script} and the launcher says --{name.replace('_', '-')} {by_launcher}; give "
            "one of them"
        )
    return in_script if in_script is not None else by_launcher


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


DEFAULT_SEED = 0
WITH_A_MESH = ("ddp", "star", "zero1", "zero2", "zero3", "fsdp", "hybrid")
"""Strategies whose workers may share a model with others."""


def _or(given: Any, otherwise: Any) -> Any:
    """Not what Python's `or` does: 0 and an empty text are values, which somebody has to refuse."""
    return otherwise if given is None else given


def config_of(
    seat: World,
    device: torch.device,
    *,
    lanes: int | None,
    seed: int | None,
    strategy: str | object | None,
    backend: str | None,
    threads: int | None,
    precision: str | Precision | None,
    mixed_precision: str | None,
    accumulate: int,
    gradient_accumulation_steps: int | None,
    loss_scale: LossScale | float | None,
    offload: OffloadName | None,
    activation_checkpointing: recomputing.Wanted,
    compile: Compile | bool | None,
    reduction: Reduction,
    compression: Any,
    mesh: Mesh | None,
    **as_given: Any,
) -> EngineConfig:
    """`as_given`: what no flag speaks of."""
    told = seat.settings
    precision = _as_mixed(precision, mixed_precision)
    accumulate = _as_accumulated(accumulate, gradient_accumulation_steps)
    for check, given in ((check_lanes, lanes), (check_threads, threads), (check_seed, seed)):
        if given is not None:
            check(given)
    mesh = mesh_of(seat, mesh)
    strategy = _or(one_of("strategy", strategy, told.strategy), _by_mesh(mesh) or "ddp")
    strategy, default_lanes = as_verified(
        told.verify, strategy, default_lanes=_or(told.default_lanes, seat.size) // mesh.model
    )
    is_auto = isinstance(strategy, str) and strategy == AUTO and offload is None and told.offload is None
    if isinstance(strategy, str) and strategy == AUTO:  # until it is settled; ddp has no offload
        strategy = "ddp" if is_auto else "zero3" if PARAMETERS in (offload, told.offload) else "zero2"
    precision = precision_of(_or(one_of("precision", precision, told.precision), "fp32"))
    offload = one_of("offload", offload, told.offload)  # type: ignore[arg-type]
    flag: recomputing.Wanted = told.activation_checkpointing
    again = one_of("activation_checkpointing", activation_checkpointing, flag)
    lanes = one_of("lanes", lanes, told.lanes) or default_lanes
    backend = _or(_or(backend, told.backend), default_backend(seat, device))
    check_backend(seat, one_word("backend", backend, BACKENDS))
    config = EngineConfig(
        lanes=lanes,
        accumulate=accumulate,
        seed=one_of("seed", seed, told.seed) if (seed, told.seed) != (None, None) else DEFAULT_SEED,  # type: ignore[arg-type]
        strategy=choose(strategy),
        backend=backend,
        threads=one_of("threads", threads, told.threads) or default_threads(lanes * mesh.model),
        activation_checkpointing=recomputing.parse(again),
        precision=precision,
        loss_scale=loss_scale_of(loss_scale, precision),
        offload=offload,
        compile=compile_of(compile, reduction, device),
        reduction=reduction,
        compression=compression_of(compression),
        mesh=mesh,
        is_auto=is_auto,
        **as_given,
    )
    able = [entry.name for entry in STRATEGIES.values() if entry.takes_offload]
    check_offload(offload, device, config.strategy.name, able)
    return config


def as_verified(folder: str | None, strategy: str | object, default_lanes: int) -> tuple[str | object, int]:
    """In a job of `paceline verify`: the strategy of its setting, and lanes that are the same in all of them."""
    if folder is None:
        return strategy, default_lanes
    request = Request.read(Path(folder))
    if request.strategy is None or (not isinstance(strategy, str) and choose(strategy).name == request.strategy):
        return strategy, request.lanes
    return request.strategy, request.lanes


def mesh_of(seat: World, mesh: Mesh | None) -> Mesh:
    """As the script and the launcher's flags say, for the workers that there are."""
    if mesh is not None and not isinstance(mesh, Mesh):
        raise ConfigError(
            f"mesh={one_line(repr(mesh), 60)} is a {type(mesh).__name__}; give a paceline.Mesh(tp=…, cp=…)"
        )
    told = seat.settings
    asked = Mesh() if mesh is None else mesh
    for name, flag in (("tp", told.tp), ("cp", told.cp)):
        here = getattr(asked, name)
        asked = replace(asked, **{name: one_of(name, None if here == 1 else here, flag) or here})
    if mesh is None and not asked.splits_model:
        return Mesh()
    found = asked.of_workers(seat.size)
    if found.splits_model and seat.is_elastic:
        raise ConfigError(
            f"{found} in a job that is elastic: a lost worker would leave a part of a model behind; start it without "
            "--elastic: it goes on from its last checkpoint"
        )
    return found


def _by_mesh(mesh: Mesh) -> str | object | None:
    """The strategy that sizes of data parallelism stand for; workers that share a sequence share weights with them."""
    if mesh.dp_shard is None or mesh.dp_shard == 1:
        return None
    return "fsdp" if (mesh.dp_replicate or 1) == 1 else HybridConfig(shard_over=mesh.dp_shard * mesh.cp)


# -- names of Accelerate -----------------------------------------------------------------------------------------------

MIXED = {"no": "fp32", "bf16": "bf16", "fp16": "fp16"}
"""Accelerate's `mixed_precision`, and what it is here."""


def _as_mixed(precision: str | Precision | None, mixed: str | None) -> str | Precision | None:
    if mixed is None:
        return precision
    here = MIXED[one_word("mixed_precision", mixed, tuple(MIXED))]
    if precision is not None and precision != here:
        raise ConfigError(f"mixed_precision={mixed!r} and precision={str(precision)!r} differ; give one of them")
    return here


def _as_accumulated(accumulate: int, steps: int | None) -> int:
    if steps is None:
        return accumulate
    why = "a lane has at least one micro-batch per step"
    steps = whole_number("gradient_accumulation_steps", steps, least=1, most=MOST_ACCUMULATED, why=why)
    if accumulate not in (1, steps):
        raise ConfigError(f"gradient_accumulation_steps={steps} and accumulate={accumulate}; give one of them")
    return steps


def find_device(world: World, wanted: str | torch.device | None) -> torch.device:
    if world.is_server:  # its weights are in the host's memory, wherever the workers compute
        return torch.device("cpu")
    if wanted is not None:
        return _numbered(_device_of(wanted), world.local_rank)
    if not torch.accelerator.is_available():
        return torch.device("cpu")
    kind = torch.accelerator.current_accelerator()
    assert kind is not None
    count = torch.accelerator.device_count()
    if world.local_size > count:
        raise ConfigError(
            f"{world.local_size} workers on this host but {count} {kind.type} device(s); "
            f"start with --workers {count}, let them share with Engine(device='{kind.type}'), or train on the CPU with "
            "Engine(device='cpu')"
        )
    device = torch.device(kind.type, world.local_rank)
    torch.accelerator.set_device_index(world.local_rank)
    return device


def _device_of(wanted: str | torch.device) -> torch.device:
    try:
        if not isinstance(wanted, str | torch.device):
            raise TypeError(f"it is a {type(wanted).__name__}")
        return torch.device(wanted)
    except (RuntimeError, TypeError, ValueError) as error:
        shown, cause = one_line(repr(wanted), 60), one_line(str(error).split("\n")[0], 120)
        raise ConfigError(f"device={shown} is no device ({cause}); give a name such as 'cpu' or 'cuda:0'") from error


def _numbered(device: torch.device, local_rank: int) -> torch.device:
    """With the number of the device that "cuda" means for this worker: memory there has it too, and is compared."""
    if device.type == "cpu" or ":" in str(device):
        return device
    count = torch.accelerator.device_count()
    number = local_rank % count if count else 0
    if count:
        torch.accelerator.set_device_index(number)
    return torch.device(device.type, number)


def default_backend(world: World, device: torch.device) -> str:
    """Shared memory between the workers of one host; otherwise what the field uses.

    NCCL has no way between two workers on one GPU.
    """
    if device.type == "cuda":
        return "nccl" if world.local_size <= torch.cuda.device_count() else "gloo"
    on_one = world.local_size == world.size and not _across_hosts(world)
    return "paceline" if device.type == "cpu" and on_one else "gloo"


def check_backend(world: World, backend: str) -> None:
    """All groups that the job will ever have use the same one."""
    if backend == "paceline" and _across_hosts(world):
        raise ConfigError(
            "backend 'paceline' joins the workers of one host, and this job is on several, or open to further ones "
            "(--coordinator with --max-workers); use gloo"
        )


def _across_hosts(world: World) -> bool:
    return world.elastic is not None and world.elastic.across_hosts
