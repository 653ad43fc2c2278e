"""`paceline plan`: which strategy, micro-batch, precision and checkpointing to train with, before a step is run.

paceline plan --model gpt2 --hardware H100 --workers 8
paceline plan --model mypackage.models:small --workers 4 --hardware here.json --html plan.html
paceline plan train.py --workers 4 -- --batch-size 32
paceline plan --residuals runs
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.errors import ConfigError

if TYPE_CHECKING:
    from paceline.planner.hardware import Hardware
    from paceline.planner.model_profile import ModelProfile
    from paceline.planner.search import Request

MOST = 10**7


def plan(
    script: Annotated[
        Path | None, typer.Argument(help="a script that trains with paceline", show_default=False)
    ] = None,
    arguments: Annotated[
        list[str] | None, typer.Argument(help="of the script; write them after --", show_default=False)
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="a transformers configuration (name, folder, config.json), or module:function -> (model, batch, loss)",
            show_default=False,
            rich_help_panel="Model",
        ),
    ] = None,
    batch_size: Annotated[int, typer.Option(max=MOST, help="samples of a lane's batch", rich_help_panel="Model")] = 8,
    sequence: Annotated[
        int, typer.Option(max=MOST, help="tokens of a sample, of a transformers model", rich_help_panel="Model")
    ] = 512,
    optimizer: Annotated[
        str, typer.Option(help="adamw, adam, sgd, momentum, lion or adafactor", rich_help_panel="Model")
    ] = "adamw",
    hardware: Annotated[
        str | None,
        typer.Option(
            help="H100, H200, A100, L4, RTX 4090, or what `paceline bench hardware --json` wrote [default: here]",
            show_default=False,
            rich_help_panel="Hardware",
        ),
    ] = None,
    network: Annotated[
        str | None,
        typer.Option(
            help="between hosts, such as InfiniBand 400 or 25 GbE", show_default=False, rich_help_panel="Hardware"
        ),
    ] = None,
    workers: Annotated[int, typer.Option(max=MOST, help="in all", rich_help_panel="Hardware")] = 1,
    per_host: Annotated[
        int | None,
        typer.Option(
            max=MOST, help="workers on each host [default: all]", show_default=False, rich_help_panel="Hardware"
        ),
    ] = None,
    memory_gib: Annotated[
        float | None,
        typer.Option(help="of a worker [default: the hardware's]", show_default=False, rich_help_panel="Hardware"),
    ] = None,
    backend: Annotated[
        str | None,
        typer.Option(help="paceline (shared memory), gloo or nccl", show_default=False, rich_help_panel="Hardware"),
    ] = None,
    strategy: Annotated[
        list[str] | None,
        typer.Option(
            help="may be repeated [default: all that give the bits of ddp]",
            show_default=False,
            rich_help_panel="What is tried",
        ),
    ] = None,
    precision: Annotated[
        list[str] | None,
        typer.Option(
            help="may be repeated: fp32, bf16, fp16 [default: fp32, on GPUs also bf16]",
            show_default=False,
            rich_help_panel="What is tried",
        ),
    ] = None,
    micro_batches: Annotated[
        str | None,
        typer.Option(
            help="a list such as 1,2,4 [default: what divides the batch]",
            show_default=False,
            rich_help_panel="What is tried",
        ),
    ] = None,
    global_batch: Annotated[
        int | None,
        typer.Option(
            max=MOST,
            help="samples of a step [default: batch size × workers]",
            show_default=False,
            rich_help_panel="What is tried",
        ),
    ] = None,
    checkpointing: Annotated[
        bool, typer.Option(help="also with activations made again in backward", rich_help_panel="What is tried")
    ] = True,
    time_passes: Annotated[
        bool | None,
        typer.Option(
            "--time/--no-time",
            help="run a pass here to time it [default: if it is planned for here]",
            show_default=False,
            rich_help_panel="What is tried",
        ),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="show every way that fits")] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="write every number there", show_default=False)
    ] = None,
    html_file: Annotated[Path | None, typer.Option("--html", help="write a page there", show_default=False)] = None,
    residuals: Annotated[
        Path | None,
        typer.Option(help="instead: how wrong predictions of runs in this folder were", show_default=False),
    ] = None,
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
        where, workers, per_host, memory_gib, backend, strategy, precision, micro_batches, global_batch, checkpointing
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
    checkpointing: bool,
) -> Request:  # fmt: skip
    from paceline.planner.search import Request

    for name in precision or ():
        if name not in ("fp32", "bf16", "fp16"):
            raise ConfigError(f"--precision {name!r} is not known; choose fp32, bf16 or fp16")
    known = {"cpu": ("paceline", "gloo"), "cuda": ("nccl", "gloo")}[where.device]
    if backend is not None and backend not in known:
        raise ConfigError(f"--backend {backend!r} does not go with {where.name}; choose {' or '.join(known)}")
    return Request(
        workers=workers,
        per_host=per_host or min(workers, 8 if where.device == "cuda" else workers),
        global_batch=global_batch,
        strategies=tuple(dict.fromkeys(strategy or ())),
        precisions=tuple(dict.fromkeys(precision or (("fp32",) if where.device == "cpu" else ("fp32", "bf16")))),
        checkpointing=(False, True) if checkpointing else (False,),
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
    from paceline.engine.activation_checkpointing import blocks_of
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
            time_passes=time_passes and where.device == "cpu", fused_attention=where.device == "cuda", **options,
        )  # fmt: skip
    except NotTraceableError as error:
        if not time_passes or where.device != "cpu":
            raise ConfigError(f"{error}; where it will train, --time runs it for real instead") from error
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
