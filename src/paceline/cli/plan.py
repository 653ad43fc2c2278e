"""`paceline plan`: which strategy, micro-batch, precision and checkpointing to train with, before a step is run.

paceline plan --model gpt2 --hardware H100 --workers 8
paceline plan --model mypackage.models:small --workers 4 --hardware here.json --html plan.html
paceline plan train.py --workers 4 -- --batch-size 32
paceline plan --residuals runs
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.errors import ConfigError

if TYPE_CHECKING:
    from paceline.planner.hardware import Hardware
    from paceline.planner.model_profile import ModelProfile
    from paceline.planner.search import Request

MOST = 10**7


# -- the flags ---------------------------------------------------------------------------------------------------------

_model = partial(typer.Option, rich_help_panel="Model")
_machines = partial(typer.Option, rich_help_panel="Hardware")
_tried = partial(typer.Option, rich_help_panel="What is tried")

ScriptFile = Annotated[Path | None, typer.Argument(help="a script that trains with paceline", show_default=False)]
Arguments = Annotated[list[str] | None, typer.Argument(help="of the script; write them after --", show_default=False)]
ModelName = Annotated[
    str | None,
    _model(
        help="a transformers configuration (name, folder, config.json), or module:function -> (model, batch, loss)",
        show_default=False,
    ),
]
BatchSize = Annotated[int, _model(max=MOST, help="samples of a lane's batch")]
Sequence = Annotated[int, _model(max=MOST, help="tokens of a sample, of a transformers model")]
Optimizer = Annotated[str, _model(help="adamw, adam, sgd, momentum, lion or adafactor")]
HardwareName = Annotated[
    str | None,
    _machines(
        help="H100, H200, A100, L4, RTX 4090, or a file, as `paceline bench hardware --json` writes [default: here]",
        show_default=False,
    ),
]
NetworkName = Annotated[
    str | None, _machines(help="between hosts, such as InfiniBand 400 or 25 GbE", show_default=False)
]
Workers = Annotated[int, _machines(max=MOST, help="in all")]
PerHost = Annotated[int | None, _machines(max=MOST, help="workers on each host [default: all]", show_default=False)]
MemoryGib = Annotated[float | None, _machines(help="of a worker [default: the hardware's]", show_default=False)]
Backend = Annotated[str | None, _machines(help="paceline (shared memory), gloo or nccl", show_default=False)]
StrategyNames = Annotated[
    list[str] | None,
    _tried(help="may be repeated [default: all that give the bits of ddp]", show_default=False),
]
Precisions = Annotated[
    list[str] | None,
    _tried(help="may be repeated: fp32, bf16, fp16 [default: fp32, on GPUs also bf16]", show_default=False),
]
MicroBatches = Annotated[
    str | None, _tried(help="a list such as 1,2,4 [default: what divides the batch]", show_default=False)
]
GlobalBatch = Annotated[
    int | None, _tried(max=MOST, help="samples of a step [default: batch size × workers]", show_default=False)
]
Checkpointing = Annotated[bool, _tried(help="also with activations made again in backward")]
Compiled = Annotated[bool, _tried("--compile", help="also under Engine(compile=True), on GPUs")]
TimePasses = Annotated[
    bool | None,
    _tried(
        "--time/--no-time",
        help="run a pass here to time it [default: if it is planned for here]",
        show_default=False,
    ),
]
Everything = Annotated[bool, typer.Option("--all", help="show every way that fits")]
JsonFile = Annotated[Path | None, typer.Option("--json", help="write every number there", show_default=False)]
HtmlFile = Annotated[Path | None, typer.Option("--html", help="write a page there", show_default=False)]
Residuals = Annotated[
    Path | None, typer.Option(help="instead: how wrong predictions of runs in this folder were", show_default=False)
]


def plan(
    script: ScriptFile = None,
    arguments: Arguments = None,
    model: ModelName = None,
    batch_size: BatchSize = 8,
    sequence: Sequence = 512,
    optimizer: Optimizer = "adamw",
    hardware: HardwareName = None,
    network: NetworkName = None,
    workers: Workers = 1,
    per_host: PerHost = None,
    memory_gib: MemoryGib = None,
    backend: Backend = None,
    strategy: StrategyNames = None,
    precision: Precisions = None,
    micro_batches: MicroBatches = None,
    global_batch: GlobalBatch = None,
    checkpointing: Checkpointing = True,
    compiled: Compiled = False,
    time_passes: TimePasses = None,
    everything: Everything = False,
    json_file: JsonFile = None,
    html_file: HtmlFile = None,
    residuals: Residuals = None,
) -> None:
    """What fits and what is fastest: every strategy, micro-batch, precision and checkpointing, ranked, before training.

    The model runs on fake tensors, which take no memory: any model can be planned for, on any machine.
    """
    from paceline.bench.report import check_writable, console
    from paceline.planner.report import page, show_plan
    from paceline.planner.search import search

    if residuals is not None:
        _show_residuals(residuals)
        return
    if (script is None) == (model is None):
        raise ConfigError("paceline plan takes a script or --model, one of the two")
    for file, option in ((json_file, "--json"), (html_file, "--html")):
        check_writable(file, option)
    where = _hardware(hardware, network)
    request = _request(
        where,
        workers,
        per_host,
        memory_gib,
        backend,
        strategy,
        precision,
        micro_batches,
        global_batch,
        checkpointing,
        compiled,
    )
    here = hardware is None or where.is_measured
    times = here if time_passes is None else time_passes
    if model is not None:
        profile = _of_model(model, request, where, batch_size, sequence, optimizer, times)
    else:
        assert script is not None
        profile = _of_script(script, arguments or [], request, where, times)
        request = request.of_script(profile.lanes, profile.accumulate, profile.samples)
    found = search(profile, where, request)
    if json_file is not None:
        json_file.write_text(json.dumps(found.to_json(), indent=2) + "\n")
    show_plan(found, console(), everything=everything)
    if html_file is not None:
        html_file.write_text(page(found))


def _hardware(name: str | None, network: str | None) -> Hardware:
    from dataclasses import replace

    from paceline.planner.hardware import hardware_named, link_named
    from paceline.planner.hardware_here import quick_hardware

    if name is not None:
        return hardware_named(name, network)
    here = quick_hardware()
    return here if network is None else replace(here, between=link_named(network))


def _request(
    where: Hardware, workers: int, per_host: int | None, memory_gib: float | None, backend: str | None,
    strategy: list[str] | None, precision: list[str] | None, micro_batches: str | None, global_batch: int | None,
    checkpointing: bool, compiled: bool,
) -> Request:  # fmt: skip
    from paceline.planner.search import Request

    for name in precision or ():
        if name not in ("fp32", "bf16", "fp16"):
            raise ConfigError(f"--precision {name!r} is not known; choose fp32, bf16 or fp16")
    known = {"cpu": ("paceline", "gloo"), "cuda": ("nccl", "gloo")}[where.device]
    if backend is not None and backend not in known:
        raise ConfigError(f"--backend {backend!r} does not go with {where.name}; choose {' or '.join(known)}")
    if compiled and where.device != "cuda":
        raise ConfigError(
            "--compile: compiled code is modelled for GPUs alone; name one by --hardware, or leave it out"
        )
    return Request(
        workers=workers,
        per_host=per_host or min(workers, 8 if where.device == "cuda" else workers),
        global_batch=global_batch,
        strategies=tuple(dict.fromkeys(strategy or ())),
        precisions=tuple(dict.fromkeys(precision or (("fp32",) if where.device == "cpu" else ("fp32", "bf16")))),
        checkpointing=(False, True) if checkpointing else (False,),
        compiled=(False, True) if compiled else (False,),
        micro_batches=_numbers(micro_batches),
        backend=backend,
        memory_bytes=None if memory_gib is None else int(memory_gib * 2**30),
    )


def _numbers(text: str | None) -> tuple[int, ...]:
    if text is None:
        return ()
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and 0 < int(word) <= MOST for word in words):
        raise ConfigError(f"--micro-batches {text!r}: give positive numbers such as 1,2,4")
    return tuple(dict.fromkeys(int(word) for word in words))


def _of_model(
    model: str, request: Request, where: Hardware, batch_size: int, sequence: int, optimizer: str, time_passes: bool
) -> ModelProfile:
    from contextlib import closing

    from paceline.engine.activation_checkpointing import blocks_of
    from paceline.engine.causal_masks import CausalMasks
    from paceline.planner.model_profile import NotTraceableError
    from paceline.planner.model_source import profile_source, real_profile, source_of
    from paceline.planner.search import variants_for

    if batch_size < 1 or sequence < 1:
        raise ConfigError("--batch-size and --sequence are at least 1")
    source = source_of(model, batch_size=batch_size, sequence=sequence)
    options: dict[str, Any] = {"blocks": lambda module: list(blocks_of(module)), "optimizer": optimizer}
    try:
        return profile_source(
            source, lambda samples: variants_for(request, samples), threads=where.threads,
            time_passes=time_passes and where.device == "cpu", fused_attention=where.device == "cuda",
            around=lambda module: closing(CausalMasks([module])), **options,
        )  # fmt: skip
    except NotTraceableError as error:
        if where.device != "cpu":
            raise ConfigError(
                f"{error}; a model that needs values can be planned for on CPUs, where it is run for real, and not for "
                f"{where.name}"
            ) from error
        if not time_passes:
            raise ConfigError(f"{error}; --time runs it for real instead, on this machine") from error
        typer.echo(f"paceline: {error}; it is run for real instead", err=True)
        return real_profile(source, threads=where.threads, **options)


def _of_script(script: Path, arguments: list[str], request: Request, where: Hardware, times: bool) -> ModelProfile:
    from paceline.planner.script_run import profile_script

    profile, why = profile_script(
        script, arguments, request, timed=times and where.device == "cpu", threads=where.threads,
        fused_attention=where.device == "cuda",
    )  # fmt: skip
    if why is not None:
        typer.echo(f"paceline: {script} can't be traced ({why}); its own batch was run for real instead", err=True)
    return profile


def _show_residuals(folder: Path) -> None:
    from paceline.bench.report import console
    from paceline.planner.residuals import read_residuals, show_residuals

    show_residuals(read_residuals(folder), console())
