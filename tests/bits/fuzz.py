"""A property test of the promise: random jobs, each of which must end with the bits of one worker under ddp.

A strategy that trains other numbers than ddp is compared with itself on one worker.

    make fuzz                                               60 s of it, seeded by the date
    python -m tests.bits.fuzz --cases 2000 --jobs 8         so many, several at a time
    python -m tests.bits.fuzz --seed 8 --only 41            one case again
    python -m tests.bits.fuzz --cases 300 --elastic         each with a worker killed

A *case* is a model, an optimizer and a loop (the *job*), and one or two *legs*: a strategy with its options on so many
workers. With two legs the job is stopped after a step, saved, and resumed by the second. A case ends in one of

    same        the hash of one worker under ddp
    refused     paceline said in one line, before the first step, that it can't do this
    no job      one worker under ddp refuses or fails too: nothing to compare with
    FAILED      another hash, an exception, a hang, an error after the first step

A case that failed is shrunk: whatever can be left out without mending it is. What remains is written to
`runs/fuzz/case-SEED-NUMBER.py`, a script that anybody can run, with the first step and tensor that differ.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import hashlib
import json
import os
import random
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from paceline import Engine, World
from paceline.compression import Compression, Int8, PowerSgd, Sign, TopK
from paceline.strategies.registry import synchronous_strategies
from tests.bits import fuzz_models as models
from tests.workers import _CONTEXT, Result, run_workers

STRATEGIES = {str(chosen): chosen for chosen in synchronous_strategies()}
UPDATE_WHOLE_PARAMETERS = ("ddp", "star", "parameter_server mode=aggregate")
COMPRESSIONS: dict[str, Any] = {
    "int8": "int8",
    "int8 stochastic": Int8(block=16, rounding="stochastic"),
    "bf16": "bf16",
    "sign": Sign(block=32),
    "topk": TopK(share=0.1, momentum=0.5, warmup=2),
    "mixed": Compression({"*bias*": None, "*norm*": "fp16", "*": PowerSgd(rank=1)}, start_after=1),
}
COMPRESS = [name for name, chosen in STRATEGIES.items() if chosen.entry.takes_compression]
OTHER_NUMBERS = tuple(name for name, chosen in STRATEGIES.items() if not chosen.entry.bits_of_ddp)
UPDATE_WHOLE_PARAMETERS = ("ddp", "star", "parameter_server mode=aggregate", *OTHER_NUMBERS)
PHASES = ("data", "forward", "backward", "exchange", "ready", "before_commit", "after_commit", "apply")  # to die in
TIMEOUT_S = 90.0
FAILURES = Path("runs/fuzz")
SHRINKING = 60  # tries at most


# -- the case ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Leg:
    """How a part of the job is run. None of it may change a bit."""

    strategy: str = "ddp"
    workers: int = 1
    hosts: int = 1
    servers: int = 0
    backend: str = "paceline"
    bucket_mib: float = 16.0
    overlap: bool = True
    recompute: str | None = None


@dataclass(frozen=True)
class Case:
    """The job, all of which is part of the result, and its legs."""

    seed: int
    architecture: str | None  # None: of the grammar
    layers: tuple[str, ...]
    width: int
    input: str
    tied: bool
    optimizer: str
    settings: dict[str, Any]
    groups: int = 1
    precision: str = "fp32"
    lanes: int = 2
    accumulate: int = 1
    threads: int = 1
    batch_size: int = 4
    samples: int = 40
    epochs: int = 2
    drop_last: bool = False
    noise: bool = False
    clip: float | None = None
    schedule: str | None = None
    losses: int = 1
    legs: tuple[Leg, ...] = field(default_factory=tuple)
    stop_at: int | None = None
    kill: str | None = None
    compression: str | None = None

    @property
    def alone(self) -> Leg:
        """One worker, under ddp or the strategy that trains other numbers."""
        named = self.legs[0].strategy if self.legs else "ddp"
        return Leg(strategy=named if named in OTHER_NUMBERS else "ddp")

    @property
    def text(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def of(cls, text: str) -> Case:
        values = json.loads(text)
        legs = tuple(Leg(**leg) for leg in values.pop("legs"))
        layers = tuple(values.pop("layers"))
        values["settings"] = {k: tuple(v) if isinstance(v, list) else v for k, v in values["settings"].items()}
        return cls(**values, layers=layers, legs=legs)

    def __str__(self) -> str:
        what = self.architecture or "+".join(self.layers) or "stem and head alone"
        how = " then ".join(f"{leg.strategy} on {leg.workers} ({leg.backend})" for leg in self.legs)
        settings = ", ".join(f"{k}={v}" for k, v in self.settings.items())
        compressed = f", {self.compression}" if self.compression else ""
        return f"{what}, {self.optimizer}({settings}), {self.precision}{compressed}, {self.lanes} lanes: {how}"


def draw(seed: int, *, elastic: bool = False, strategies: Sequence[str] = ()) -> Case:
    """`strategies`: those that may be drawn, by the beginnings of their names; all of them by default."""
    rng = random.Random(seed)
    architecture = rng.choice([None, None, rng.choice(list(models.ARCHITECTURES))])
    layers = tuple(rng.choice([*models.LAYERS, models.SHARED]) for _ in range(rng.randint(1, 4)))
    source = rng.choice(["vectors", "tokens"])
    if architecture is not None:
        source = models.ARCHITECTURES[architecture][1]
    name = rng.choice(list(models.OPTIMIZERS))
    variants, options = models.OPTIMIZERS[name]
    settings: dict[str, Any] = dict(rng.choice(variants))
    settings |= {k: v for k, values in options.items() if (v := rng.choice(values)) is not None}
    if settings.get("nesterov") and name == "SGD":
        settings["momentum"] = 0.9
        settings.pop("dampening", None)
    lanes = rng.choice([2, 3, 4, 4, 5, 7, 8])
    accumulate = rng.choice([1, 1, 2, 3])
    batch_size = rng.choice([4, 4, 5])
    step = lanes * accumulate * batch_size
    samples = 2 * step + rng.randint(0, step)
    precision = rng.choice(["fp32", "fp32", "fp32", "bf16", "fp16"])
    whole = name in models.WHOLE and rng.random() < 0.9
    legs = tuple(
        _leg(rng, lanes, precision, whole, strategies) for _ in range(rng.choice([1, 1, 2]) if not elastic else 1)
    )
    if any(leg.strategy in OTHER_NUMBERS for leg in legs):  # it goes on under itself alone
        legs = (legs[0], *(replace(leg, strategy=legs[0].strategy, servers=0) for leg in legs[1:]))
    kill = None
    if elastic:
        leg = legs[0]
        if leg.workers == 1:
            leg = replace(leg, workers=2)
        legs = (replace(leg, hosts=1, servers=0),)
        phase = rng.choice(
            ["data", "forward", "backward", "exchange", "ready", "before_commit", "after_commit", "apply"]
        )
        kill = f"kill:rank={rng.randrange(leg.workers)},step={rng.randint(1, 3)},phase={phase}"
    compression = rng.choice([None] * 2 * len(COMPRESSIONS) + list(COMPRESSIONS))
    if compression is not None:
        able = [name for name in COMPRESS if not strategies or name.startswith(tuple(strategies))]
        able = [name for name in able if not whole or name in UPDATE_WHOLE_PARAMETERS]
        able = [name for name in able if precision == "fp32" or STRATEGIES[name].entry.takes_low_precision]
        if compression == "mixed":  # it has PowerSgd, which servers can't add up
            able = [name for name in able if not STRATEGIES[name].entry.uses_servers]
        compression = compression if able else None
        legs = tuple(_compressing(leg, rng.choice(able)) if able else leg for leg in legs)
    return Case(
        seed=seed,
        compression=compression,
        architecture=architecture,
        layers=layers if architecture is None else (),
        width=rng.choice([8, 12, 17, 24, 33, 130]),
        input=source,
        tied=rng.random() < 0.3,
        optimizer=name,
        settings=settings,
        groups=1 if name == "prodigyopt.Prodigy" else rng.choice([1, 2]),
        precision=precision,
        lanes=lanes,
        accumulate=accumulate,
        threads=rng.choice([1, 1, 1, 2]) if source == "vectors" else 1,
        batch_size=batch_size,
        samples=samples,
        epochs=2,
        drop_last=rng.random() < 0.2,
        noise=rng.random() < 0.3,
        clip=rng.choice([None, None, 0.05, 1.0]),
        schedule=rng.choice([None, None, "OneCycleLR", "CosineAnnealingLR", "StepLR", "LambdaLR"]),
        losses=rng.choice([1, 1, 1, 2]),
        legs=legs,
        stop_at=rng.randint(1, 4) if len(legs) == 2 else None,
        kill=kill,
    )


def _compressing(leg: Leg, strategy: str) -> Leg:
    return replace(leg, strategy=strategy, servers=leg.servers if STRATEGIES[strategy].entry.uses_servers else 0)


def _leg(rng: random.Random, lanes: int, precision: str, whole: bool, wanted: Sequence[str]) -> Leg:
    """`whole`: under a strategy that updates whole parameters, as the optimizer needs it."""
    able = [n for n, chosen in STRATEGIES.items() if precision == "fp32" or chosen.entry.takes_low_precision]
    able = [n for n in able if not whole or n in UPDATE_WHOLE_PARAMETERS]
    able = [n for n in able if n.startswith(tuple(wanted))] or able
    workers = rng.randint(1, min(4, lanes))
    hosts = 2 if workers % 2 == 0 and rng.random() < 0.2 else 1
    strategy = rng.choice(able)
    servers = rng.choice([0, 1, 2]) if STRATEGIES[strategy].entry.uses_servers and hosts == 1 else 0
    return Leg(
        strategy=strategy,
        workers=workers,
        hosts=hosts,
        servers=servers,
        backend="gloo" if hosts > 1 else rng.choice(["paceline", "gloo"]),
        bucket_mib=rng.choice([0.0005, 0.005, 0.05, 16.0]),
        overlap=rng.random() < 0.8,
        recompute=rng.choice([None, None, None, "Linear", "Linear+matmuls"]),
    )


# -- running it --------------------------------------------------------------------------------------------------------


class Samples(Dataset[tuple[Tensor, Tensor]]):
    """`noise` is drawn when a sample is fetched: it must follow the sample, not the worker."""

    def __init__(self, case: Case) -> None:
        drawn = torch.Generator().manual_seed(case.seed)
        count, self.noise = case.samples, case.noise and case.input != "tokens"
        if case.input == "tokens":
            text = torch.randint(0, models.VOCABULARY, (count, models.LENGTH + 1), generator=drawn)
            self.x, self.y = text[:, :-1], text[:, 1:]
        elif case.input == "images":
            self.x = torch.randn(count, 3, 8, 8, generator=drawn)
            self.y = torch.randint(0, models.CLASSES, (count, 1), generator=drawn)
        else:
            self.x = torch.randn(count, models.LENGTH, models.LENGTH, generator=drawn)
            self.y = torch.randint(0, models.CLASSES, (count, models.LENGTH), generator=drawn)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = self.x[index]
        return x + 0.1 * torch.randn(x.shape) if self.noise else x, self.y[index]


def build(case: Case) -> nn.Module:
    if case.architecture is not None:
        return models.ARCHITECTURES[case.architecture][0]()
    return models.Drawn(case.layers, width=case.width, input=case.input, tied=case.tied)


def make_schedule(case: Case, optimizer: torch.optim.Optimizer) -> Any:
    schedulers = torch.optim.lr_scheduler
    match case.schedule:
        case "OneCycleLR":
            moves = "momentum" in optimizer.param_groups[0] or "betas" in optimizer.param_groups[0]
            return schedulers.OneCycleLR(optimizer, 0.02, total_steps=200, cycle_momentum=moves)
        case "CosineAnnealingLR":
            return schedulers.CosineAnnealingLR(optimizer, 5)
        case "StepLR":
            return schedulers.StepLR(optimizer, 2, gamma=0.7)
        case "LambdaLR":
            return schedulers.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    return None


def train(
    world: World | None,
    case: str,
    leg: int | None,
    folder: str | None = None,
    trace: bool = False,
    device: str = "cpu",
    record: str | None = None,
) -> Any:
    """The loop. `leg` None: one worker alone, all of it. Returns the hash, or with `trace` all tensors' digests."""
    if world is not None:
        _be_quiet()
    job = Case.of(case)
    how = job.alone if leg is None else job.legs[leg]
    here = world
    if here is not None and how.hosts > 1:
        each = here.size // how.hosts
        here = replace(here, local_rank=here.rank % each, local_size=each, host_rank=here.rank // each, hosts=how.hosts)
    with Engine(
        world=here,
        lanes=job.lanes,
        accumulate=job.accumulate,
        seed=job.seed % 1000,
        strategy=STRATEGIES[how.strategy].config,
        backend=how.backend if device == "cpu" else "gloo",
        threads=job.threads,
        device=device,
        bucket_mib=how.bucket_mib,
        overlap=how.overlap,
        precision=job.precision,
        activation_checkpointing=how.recompute,
        compression=None if job.compression is None else COMPRESSIONS[job.compression],
        record_samples=record,
        timeout_s=30.0,
    ) as engine:
        hashes = _train(engine, job, leg, folder, trace)
        return hashes if trace else engine.weights_hash()


def _be_quiet() -> None:
    """What workers print belongs to no case; a failure comes back as a traceback."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        os.dup2(nothing, descriptor)
    os.close(nothing)


def _train(engine: Engine, job: Case, leg: int | None, folder: str | None, trace: bool) -> list[dict[str, str]]:
    model = build(job)
    optimizers = models.make_optimizers(job.optimizer, job.settings, model, groups=job.groups)
    loader = DataLoader(Samples(job), batch_size=job.batch_size, shuffle=True, drop_last=job.drop_last)
    schedules = [made for optimizer in optimizers if (made := make_schedule(job, optimizer)) is not None]
    model, loader, *rest = engine.prepare(model, loader, *optimizers, *schedules)
    optimizers, schedules = rest[: len(optimizers)], rest[len(optimizers) :]
    for optimizer in optimizers:
        if hasattr(optimizer, "train"):
            optimizer.train()
    traced: list[dict[str, str]] = []
    checkpoints = None if folder is None else engine.checkpoints(folder, asynchronous=job.seed % 2 == 0)
    if checkpoints is not None and leg == 1:
        assert checkpoints.resume() is not None, "nothing to resume from"
    until = job.stop_at if leg == 0 else None
    while loader.epoch < job.epochs and (until is None or engine.step < until):
        for x, y in loader:
            out = model(x)
            loss = F.cross_entropy(out.reshape(-1, out.shape[-1]), y.flatten())
            if job.losses == 2:
                engine.backward(loss, last=False)
                loss = 0.1 * model(x).square().mean()
            engine.backward(loss)
            if job.clip is not None:
                engine.clip_grad_norm_(job.clip)
            for acting in (*optimizers, *schedules):
                acting.step()
            for optimizer in optimizers:
                optimizer.zero_grad()
            if engine.stepped and trace:
                traced.append({name: _digest(tensor) for name, tensor in engine.state_dict().items()})
            if engine.stepped and engine.step == until:
                break
    if checkpoints is not None and leg == 0:
        checkpoints.save()
    if checkpoints is not None:
        checkpoints.close()
    return traced


def _digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:12]


# -- judging it --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    kind: str  # same, refused, no job, FAILED
    text: str = ""

    @property
    def failed(self) -> bool:
        return self.kind == "FAILED"


REFUSALS = ("ConfigError",)
"""Errors with which a job may be refused; they are raised before the first step, or the launch fails otherwise."""


def judge(case: Case, device: str = "cpu") -> Outcome:
    alone = run_workers(train, 1, case=case.text, leg=None, device=device, timeout_s=TIMEOUT_S)
    if alone[0].error is not None:
        return Outcome("no job", _first_line(alone[0].error))
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        for number in range(len(case.legs)):
            if case.kill is not None:
                return _judge_elastic(case, str(alone[0].value), Path(folder), device)
            results = _run_leg(case, number, str(Path(folder) / "run") if len(case.legs) > 1 else None, device)
            errors = [r for r in results if r.error is not None]
            if errors:
                return _of_errors(errors)
    found = {r.value for r in results if not r.name.startswith("server")}
    if found == {alone[0].value}:
        return Outcome("same")
    return Outcome("FAILED", f"another hash: {sorted(map(str, found))} instead of {alone[0].value}")


def _run_leg(case: Case, number: int, folder: str | None, device: str, **extra: Any) -> list[Result]:
    leg = case.legs[number]
    return run_workers(
        train, leg.workers, servers=leg.servers, case=case.text, leg=number, folder=folder, device=device,
        timeout_s=TIMEOUT_S, **extra,
    )  # fmt: skip


def _of_errors(errors: list[Result]) -> Outcome:
    cause = next((r for r in errors if not str(r.error).startswith("PeerLostError")), errors[0])
    at_start = any(place in cause.traceback for place in ("engine.prepare(", "config_of"))
    refused = at_start and str(cause.error).startswith(REFUSALS)
    others = "".join(f"\n{one.name}: {_first_line(str(one.error))}" for one in errors if one is not cause)
    return Outcome("refused" if refused else "FAILED", f"{cause.name}: {cause.error}\n{cause.traceback}{others}")


def _judge_elastic(case: Case, expected: str, folder: Path, device: str) -> Outcome:
    """The same script under `paceline run --elastic`, with a worker killed."""
    from tests.faults.jobs import run_job

    leg = case.legs[0]
    script = folder / "case.py"
    script.write_text(script_of(case, "a case under elastic", record="run", device=device))
    flags = f"--workers {leg.workers} --lanes {case.lanes} --elastic --heartbeat-timeout-s 5"
    job = run_job(folder, flags, faults=case.kill, script=script, timeout_s=TIMEOUT_S)
    if job.code != 0:
        refused = "ConfigError" in job.err or "can't know which of" in job.err
        refused = refused and not job.ledger
        return Outcome("refused" if refused else "FAILED", f"exit code {job.code}\n{job.text[-3000:]}")
    found = set(re.findall(r"weights (sha256:\w+)", job.out))
    if found != {expected}:
        return Outcome("FAILED", f"another hash: {sorted(found)} instead of {expected}\n{job.text[-3000:]}")
    if not job.samples.clean or job.left:
        return Outcome("FAILED", f"samples {job.samples}, left behind {job.left}\n{job.text[-3000:]}")
    return Outcome("same")


def _first_line(text: str | None) -> str:
    return (text or "").strip().splitlines()[0][:300] if text else ""


# -- shrinking it ------------------------------------------------------------------------------------------------------


def simpler(case: Case) -> Iterator[Case]:
    """Cases with one thing less, the most telling first."""
    if len(case.legs) == 2:
        yield replace(case, legs=(case.legs[1],), stop_at=None)
        yield replace(case, legs=(case.legs[0],), stop_at=None)
    if case.kill is not None:
        yield replace(case, kill=None)
    for place in range(len(case.layers)):
        yield replace(case, layers=case.layers[:place] + case.layers[place + 1 :])
    plain: dict[str, Any] = {
        "compression": None, "losses": 1, "schedule": None, "clip": None, "noise": False, "drop_last": False,
        "accumulate": 1, "precision": "fp32", "threads": 1, "groups": 1, "tied": False, "epochs": 1, "batch_size": 4,
        "width": 8,
    }  # fmt: skip
    for name, value in plain.items():
        if getattr(case, name) != value:
            yield replace(case, **{name: value})
    for name in case.settings:
        if name != "lr":
            yield replace(case, settings={k: v for k, v in case.settings.items() if k != name})
    if case.optimizer != "SGD":
        yield replace(case, optimizer="SGD", settings={"lr": 0.05})
    for place, leg in enumerate(case.legs):
        others = {"overlap": True, "recompute": None, "bucket_mib": 16.0, "hosts": 1, "servers": 0}
        for name, value in others.items():
            if getattr(leg, name) != value:
                yield replace(case, legs=_with(case.legs, place, replace(leg, **{name: value})))
        if leg.workers > 2:
            fewer = leg.workers - 1
            hosts = leg.hosts if fewer % leg.hosts == 0 else 1
            yield replace(case, legs=_with(case.legs, place, replace(leg, workers=fewer, hosts=hosts)))
    most = max((leg.workers for leg in case.legs), default=1)
    if case.lanes > max(2, most):
        yield replace(case, lanes=case.lanes - 1)
    step = case.lanes * case.accumulate * case.batch_size
    for samples in (step, 2 * step):
        if case.samples > samples and (case.stop_at is None or samples * case.epochs // step > case.stop_at):
            yield replace(case, samples=samples)


def _with(legs: tuple[Leg, ...], place: int, leg: Leg) -> tuple[Leg, ...]:
    return (*legs[:place], leg, *legs[place + 1 :])


def shrink(
    case: Case, outcome: Outcome, judged: Callable[[Case], Outcome], tries: int = SHRINKING
) -> tuple[Case, Outcome]:
    """The smallest case found that still fails in the same way."""
    smaller = True
    while smaller and tries > 0:
        smaller = False
        for candidate in simpler(case):
            tries -= 1
            found = judged(candidate)
            if found.failed and _way(found) == _way(outcome):
                case, outcome, smaller = candidate, found, True
                break
            if tries <= 0:
                break
    return case, outcome


def _way(outcome: Outcome) -> str:
    """Another hash, or an exception's type."""
    return re.sub(r"worker \d+: ", "", outcome.text).split(":")[0]


def first_difference(case: Case, device: str) -> str:
    """The first step and tensors that differ, for cases of one leg."""
    if len(case.legs) != 1 or case.kill is not None:
        return ""
    one = run_workers(train, 1, case=case.text, leg=None, trace=True, device=device, timeout_s=TIMEOUT_S)[0].value
    many = _run_leg(case, 0, None, device, trace=True)[0].value
    if not one or not many:
        return ""
    for step, (left, right) in enumerate(zip(one, many, strict=False), start=1):
        names = [name for name in left if left[name] != right.get(name)]
        if names:
            return f"first differs after step {step} in {', '.join(names[:6])}{' …' if len(names) > 6 else ''}"
    return "no difference seen when traced"


SCRIPT = '''"""{title}

    paceline run --workers 1 {script} alone          the reference: one worker, ddp
    paceline run --workers {workers} {script}

{found}
"""

import sys

sys.path.insert(0, {root!r})
from tests.bits.fuzz import train

CASE = r"""{case}"""
alone = sys.argv[1:] == ["alone"]
print("weights", train(None, CASE, None if alone else 0, record=None if alone else {record!r}, device={device!r}))
'''


def script_of(case: Case, title: str, found: str = "", record: str | None = None, device: str = "cpu") -> str:
    root = str(Path(__file__).resolve().parents[2])
    workers = case.legs[0].workers
    text = "\n".join(f"    {line}" for line in found.splitlines())
    return SCRIPT.format(
        title=title, script="THIS_FILE", workers=workers, found=text.replace('"""', "'''").replace("\\", "/"),
        root=root, case=case.text, record=record, device=device,
    )  # fmt: skip


# -- main --------------------------------------------------------------------------------------------------------------


def main() -> int:
    asked = _arguments()
    vars(sys.modules["__main__"])["__spec__"] = None  # or every worker would run this file again, as its main module
    preload = ["tests.preload", "tests.bits.fuzz", *(["transformers.models.t5.modeling_t5"] if not asked.lean else [])]
    _CONTEXT.set_forkserver_preload(preload)
    deadline = None if asked.seconds is None else time.monotonic() + asked.seconds
    numbers = iter([asked.only] if asked.only is not None else range(asked.first, asked.first + asked.cases))
    count: Counter[str] = Counter()
    refusals: Counter[str] = Counter()
    failures: list[int] = []
    begun = time.monotonic()
    log = asked.log.open("a") if asked.log is not None else None
    with ThreadPoolExecutor(asked.jobs) as pool:
        running: dict[Future[Outcome], tuple[int, Case]] = {}
        while True:
            while len(running) < asked.jobs and (deadline is None or time.monotonic() < deadline):
                number = next(numbers, None)
                if number is None:
                    break
                case = draw(asked.seed * 1_000_003 + number, elastic=asked.elastic, strategies=asked.strategy)
                running[pool.submit(judge, case, asked.device)] = (number, case)
            if not running:
                break
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                number, case = running.pop(future)
                outcome = future.result()
                count[outcome.kind] += 1
                if log is not None:
                    log.write(json.dumps({"number": number, "kind": outcome.kind, "case": str(case)}) + "\n")
                    log.flush()
                if outcome.kind in ("refused", "no job"):
                    refusals[f"{outcome.kind}: {re.sub(r'[0-9]+', 'N', _first_line(outcome.text))[:160]}"] += 1
                if outcome.failed:
                    failures.append(number)
                    print(f"case {number} FAILED: {case}\n{_indented(outcome.text)}", flush=True)
                    if asked.shrink:
                        _report(case, outcome, asked.seed, number, asked.device)
                elif asked.verbose:
                    print(f"case {number} {outcome.kind}: {case}", flush=True)
    for text, times in refusals.most_common():
        print(f"{times:5d} × {text}")
    total, seconds = sum(count.values()), time.monotonic() - begun
    print(f"seed {asked.seed}: {total} cases in {seconds:.0f} s: " + ", ".join(f"{n} {k}" for k, n in count.items()))
    if failures:
        print(f"failed: {failures}")
    return 1 if failures or not count["same"] else 0


def _report(case: Case, outcome: Outcome, seed: int, number: int, device: str) -> None:
    case, outcome = shrink(case, outcome, lambda candidate: judge(candidate, device))
    where = first_difference(case, device) if "another hash" in outcome.text else ""
    FAILURES.mkdir(parents=True, exist_ok=True)
    path = FAILURES / f"case-{seed}-{number}.py"
    path.write_text(
        script_of(case, f"Found by tests/bits/fuzz.py, seed {seed}, case {number}.", f"{outcome.text}\n{where}")
    )
    print(f"shrunk to: {case}\n{_indented(_first_line(outcome.text))}\n    {where}\n    written to {path}", flush=True)


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.strip().splitlines()[-14:])


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    today = int(datetime.date.today().strftime("%Y%m%d"))
    parser.add_argument("--seed", type=int, default=today, help="default: today's date")
    parser.add_argument("--cases", type=int, default=10**9)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--only", type=int, help="this case alone")
    parser.add_argument("--seconds", type=float, help="start no case after so long")
    parser.add_argument("--jobs", type=int, default=1, help="cases at a time")
    parser.add_argument("--elastic", action="store_true", help="under `paceline run --elastic`, with a worker killed")
    parser.add_argument("--strategy", action="append", default=[], help="only strategies of this name; may be repeated")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--log", type=Path, help="a line of JSON for every case")
    parser.add_argument("--lean", action="store_true", help="don't preload transformers")
    parser.add_argument("--no-shrink", dest="shrink", action="store_false")
    parser.add_argument("--verbose", action="store_true")
    asked = parser.parse_args()
    if asked.cases == 10**9 and asked.seconds is None and asked.only is None:
        parser.error("say how many: --cases, --seconds or --only")
    return asked


if __name__ == "__main__":
    sys.exit(main())
