"""What sending less costs in quality: the demo's GPT under ddp, compressors, local_sgd and diloco, after equal samples.

    python benchmarks/local_training.py [--steps 700] [--lanes 4] [ddp "diloco 50 start=70" "diloco 50 int8" …]
    python benchmarks/local_training.py ddp int8 "powersgd rank=4 start=140" "topk momentum=0.9 warmup=140 beta1=0"

One worker trains all lanes: the bits are those of any number of workers. Each line has the bits per byte of held-out
text, how that compares with the first line, and under the strategies the bytes that each of as many workers as lanes
sends per step, by formula (sharding/footprint.py). A way is a strategy, its steps from one outer step to the next, and
int8 or fragments; or a compressor with its settings. start= is its start_after, beta1= is of AdamW, and leave= names
parameters that are not compressed, as patterns with + between them.
"""

from __future__ import annotations

import argparse
import importlib.util
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

import paceline
from paceline.compression import COMPRESSORS, Compression
from paceline.sharding.footprint import Model
from paceline.strategies.local.diloco import DilocoConfig
from paceline.strategies.local.local_sgd import LocalSgdConfig
from paceline.strategies.local.outer_step import BLOCK
from paceline.strategies.registry import choose

DEMO = Path(__file__).parents[1] / "examples" / "train_gpt.py"
WAYS = ("ddp", "local_sgd 8", "diloco 50", "diloco 50 int8", "diloco 50 5")


def demo() -> Any:
    spec = importlib.util.spec_from_file_location("train_gpt", DEMO)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@dataclass(frozen=True)
class Way:
    strategy: Any = "ddp"
    compression: Compression | None = None
    beta1: float = 0.9


def way_of(text: str) -> Way:
    name, *rest = text.split()
    told = dict(one.split("=") for one in rest if "=" in one)
    left_alone = {pattern: None for pattern in told.pop("leave", "").split("+") if pattern}
    options: dict[str, Any] = {key: float(value) for key, value in told.items()}
    plain = [one for one in rest if "=" not in one]
    start, beta1 = int(options.pop("start", 0)), options.pop("beta1", 0.9)
    if name == "ddp":
        return Way(beta1=beta1)
    if name in COMPRESSORS:
        given = {key: int(value) if key in ("rank", "warmup", "block") else value for key, value in options.items()}
        rules = {**left_alone, "*": replace(COMPRESSORS[name], **given)}
        return Way(compression=Compression(rules, start_after=start), beta1=beta1)
    every, *more = plain
    options |= {"every": int(every), "start_after": start}
    for word in more:
        options |= {"outer_gradients": "int8"} if word == "int8" else {"fragments": int(word)}
    return Way(LocalSgdConfig(**options) if name == "local_sgd" else DilocoConfig(**options), beta1=beta1)


def sent_per_step(strategy: Any, parameters: int, lanes: int) -> float:
    """By each of as many workers as lanes."""
    chosen = choose(strategy)
    sent = chosen.footprint(Model(parameters), workers=lanes, lanes=lanes).sent
    if getattr(strategy, "outer_gradients", "fp32") == "int8":
        sent = sent * (1 + 4 / BLOCK) / 4
    return sent / getattr(strategy, "every", 1)


def train(gpt: Any, way: str, args: argparse.Namespace) -> tuple[float, int]:
    """Bits per byte of held-out text after all steps, and the number of parameters."""
    world = paceline.World()
    wanted = way_of(way)
    job: dict[str, Any] = {"strategy": wanted.strategy, "compression": wanted.compression}
    with paceline.Engine(world=world, lanes=args.lanes, threads=args.threads, **job) as engine:
        text, held_out_text = gpt.open_corpus(engine, args.run_dir / "corpus")
        loader = DataLoader(text.sequences(gpt.CONTEXT), batch_size=args.batch_size, shuffle=True, drop_last=True)
        held_out = engine.prepare(DataLoader(gpt.spread(held_out_text, 512), batch_size=16))
        model = gpt.GPT()
        optimizer = gpt.make_optimizer(model, "fused")
        for group in optimizer.param_groups:
            group["betas"] = wanted.beta1, group["betas"][1]
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: gpt.learning_rate_factor(step, args.steps)
        )
        model, optimizer, scheduler, loader = engine.prepare(model, optimizer, scheduler, loader)
        while engine.step < args.steps:
            for x, y in loader:
                if engine.step + 1 == args.steps:
                    engine.stop()
                engine.backward(F.cross_entropy(model(x).flatten(0, 1), y.flatten()))
                engine.clip_grad_norm_(gpt.MAX_GRADIENT_NORM)
                optimizer.step()
                scheduler.step()
        return gpt.bits_per_byte(engine, model, held_out), sum(p.numel() for p in model.parameters())


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ways", nargs="*", default=WAYS)
    parser.add_argument("--steps", type=int, default=700)
    parser.add_argument("--lanes", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--run-dir", type=Path, default=Path("runs/local_training"))
    args = parser.parse_args(argv)
    gpt, first = demo(), None
    print("| way | held-out bits per byte | against the first | bytes sent per step | seconds |\n|---|---|---|---|---|")
    for way in args.ways:
        begun = time.perf_counter()
        bits, parameters = train(gpt, way, args)
        first = first or bits
        wanted = way_of(way)
        sent = "" if wanted.compression else f"{sent_per_step(wanted.strategy, parameters, args.lanes):,.0f}"
        seconds = time.perf_counter() - begun
        print(f"| {way} | {bits:.4f} | {bits / first - 1:+.1%} | {sent} | {seconds:.0f} |", flush=True)


if __name__ == "__main__":
    main()
