"""Training on one GPU, paceline beside the loops that people write: tokens a second and peak memory.

    python benchmarks/gpu_step.py --model 134m --contestant raw-compile --contestant engine-compile
    python benchmarks/gpu_step.py --json gpu.json                        all of them with both models, about 15 minutes
    python benchmarks/gpu_step.py --lanes 4 --contestant engine-compile  the same global batch in four micro-batches

Each contestant has a process of its own, one after another. All train the same Llama-shaped model on the same random
tokens in bf16 with fused AdamW; a step is timed on the device, from the end of step WARM_UP to the end of the last.

    raw, raw-compile          autocast, loss.backward(), optimizer.step(); as it is, and with torch.compile(model)
    accelerate, fabric        the same loop through them
    hf-trainer                transformers.Trainer
    engine, engine-compile    paceline, exact: the same bits on any number of workers; -fast: what a single run needs
    engine-blocks             the same with Engine(compile=True), by blocks, under any strategy; -fast too
    trainer, trainer-compile  paceline's Trainer, exact; -compile by blocks; -chunked without ever holding all logits
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from command_line import Result, command, run
from rich.console import Console

from paceline import __version__
from paceline.bench.report import table_of
from paceline.errors import ConfigError

STEPS, WARM_UP = 40, 10
MOST_S = 420.0
MODELS: dict[str, dict[str, int]] = {
    "134m": {"width": 768, "inner": 2048, "layers": 12, "heads": 12, "sequence": 1024, "batch": 32},
    "1.26b": {"width": 2048, "inner": 5632, "layers": 22, "heads": 32, "sequence": 2048, "batch": 8},
    "tiny": {"width": 64, "inner": 128, "layers": 2, "heads": 2, "sequence": 32, "batch": 4},
}
VOCABULARY = 32_000
CONTESTANTS = (
    "raw", "raw-compile", "accelerate", "fabric", "hf-trainer",
    "engine", "engine-blocks", "engine-blocks-fast", "engine-compile", "engine-compile-fast",
    "trainer", "trainer-compile", "trainer-compile-chunked",
)  # fmt: skip


class Clock:
    """When steps ended on the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.steps = 0
        self.first = self.last = 0.0
        self.begun = time.perf_counter()
        self.started_s = 0.0  # until the first step had ended: compilation is in it

    def step(self) -> None:
        self.steps += 1
        if self.steps in (1, WARM_UP, STEPS):
            if self._device.type == "cuda":
                torch.cuda.synchronize()
            now = time.perf_counter()
            if self.steps == 1:
                self.started_s = now - self.begun
            elif self.steps == WARM_UP:
                self.first = now
            else:
                self.last = now


def llama(model: str) -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = MODELS[model]
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, max_position_embeddings=shape["sequence"], tie_word_embeddings=False, use_cache=False,
        hidden_size=shape["width"], intermediate_size=shape["inner"], num_hidden_layers=shape["layers"],
        num_attention_heads=shape["heads"],
    )  # fmt: skip
    made: torch.nn.Module = LlamaForCausalLM(config)
    return made


def samples(model: str) -> list[dict[str, torch.Tensor]]:
    shape = MODELS[model]
    drawn = torch.Generator().manual_seed(1)
    few = [torch.randint(0, VOCABULARY, (shape["sequence"],), generator=drawn) for _ in range(shape["batch"] * 4)]
    return [{"input_ids": few[n % len(few)], "labels": few[n % len(few)]} for n in range(shape["batch"] * STEPS)]


def loader_of(model: str, parts: int = 1) -> Any:
    size = MODELS[model]["batch"] // parts
    return torch.utils.data.DataLoader(
        samples(model),  # type: ignore[arg-type]
        batch_size=size,
        num_workers=2,
        pin_memory=torch.cuda.is_available(),
        drop_last=True,
    )


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=torch.cuda.is_available())


def trained(
    batches: Any, model: Any, optimizer: Any, backward: Callable[[Any], Any], clock: Clock, stepped: Callable[[], bool],
    context: Callable[[], Any] = nullcontext,
) -> None:  # fmt: skip
    for batch in batches:
        with context():
            loss = model(**batch).loss
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if stepped():
            clock.step()


def raw(name: str, asked: argparse.Namespace, clock: Clock, device: torch.device) -> dict[str, Any]:
    model: Any = llama(asked.model).to(device)
    optimizer = adamw(model)
    if name == "raw-compile":
        model = torch.compile(model)
    batches = ({k: v.to(device, non_blocking=True) for k, v in batch.items()} for batch in loader_of(asked.model))
    trained(
        batches, model, optimizer, lambda loss: loss.backward(), clock, lambda: True,
        lambda: torch.autocast(device.type, torch.bfloat16),
    )  # fmt: skip
    return {}


def through_accelerate(name: str, asked: argparse.Namespace, clock: Clock, device: torch.device) -> dict[str, Any]:
    from accelerate import Accelerator

    accelerator = Accelerator(mixed_precision="bf16")
    model = llama(asked.model).to(device)
    made = accelerator.prepare(model, adamw(model), loader_of(asked.model))
    trained(made[2], made[0], made[1], accelerator.backward, clock, lambda: True)
    return {}


def through_fabric(name: str, asked: argparse.Namespace, clock: Clock, device: torch.device) -> dict[str, Any]:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator=device.type, devices=1, precision="bf16-mixed")
    fabric.launch()
    plain = llama(asked.model)
    model, optimizer = fabric.setup(plain, adamw(plain))
    trained(fabric.setup_dataloaders(loader_of(asked.model)), model, optimizer, fabric.backward, clock, lambda: True)
    return {}


def through_trainer(name: str, asked: argparse.Namespace, clock: Clock, device: torch.device) -> dict[str, Any]:
    import transformers

    ours = name.startswith("trainer")
    if ours:
        import paceline as library
    else:
        library: Any = transformers  # type: ignore[no-redef]

    class Ticks(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            clock.step()

    options: dict[str, Any] = {"torch_compile": "compile" in name, "chunked_loss": "chunked" in name} if ours else {}
    arguments = library.TrainingArguments(
        output_dir=tempfile.mkdtemp(), per_device_train_batch_size=MODELS[asked.model]["batch"], max_steps=STEPS,
        bf16=True, optim="adamw_torch_fused" if device.type == "cuda" else "adamw_torch", report_to=[],
        save_strategy="no", logging_steps=10, dataloader_num_workers=2, max_grad_norm=asked.clip, **options,
    )  # fmt: skip
    trainer = library.Trainer(
        model=llama(asked.model), args=arguments, train_dataset=samples(asked.model), callbacks=[Ticks()]
    )
    trainer.train()
    return {"hash": trainer.engine.weights_hash()} if ours else {}


def engine(name: str, asked: argparse.Namespace, clock: Clock, device: torch.device) -> dict[str, Any]:
    import paceline

    options: dict[str, Any] = {"precision": "bf16", "lanes": asked.lanes, "strategy": asked.strategy}
    options["compile"] = "blocks" in name
    if name.endswith("-fast"):
        options["reduction"] = "fast"
    with paceline.Engine(**options) as made:
        model: Any = llama(asked.model).to(made.device)
        optimizer = adamw(model)
        if "compile" in name:
            model = torch.compile(model)
        model, optimizer, loader = made.prepare(model, optimizer, loader_of(asked.model, asked.lanes))

        def backward(loss: torch.Tensor) -> None:
            made.backward(loss)
            if asked.clip:
                made.clip_grad_norm_(asked.clip)

        trained(loader, model, optimizer, backward, clock, lambda: made.stepped)
        return {"hash": made.weights_hash()}


def one(name: str, asked: argparse.Namespace) -> dict[str, Any]:
    """In this process."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")
    ways = {"raw": raw, "accelerate": through_accelerate, "fabric": through_fabric, "hf": through_trainer,
            "trainer": through_trainer, "engine": engine}  # fmt: skip
    clock = Clock(device)
    profiler: Any = nullcontext()
    if asked.profile:
        profiler = torch.profiler.profile(schedule=None)
    with profiler:
        more = ways[name.split("-")[0]](name, asked, clock, device)
    if asked.profile:
        print(profiler.key_averages().table(sort_by="self_device_time_total", row_limit=30, max_name_column_width=70))
    shape, seconds = MODELS[asked.model], clock.last - clock.first
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
    tokens = shape["batch"] * shape["sequence"] * (STEPS - WARM_UP) / seconds
    about = {"contestant": name, "model": asked.model, "lanes": asked.lanes, "strategy": asked.strategy}
    return {
        **about,
        "tokens_s": round(tokens),
        "peak_gib": round(peak, 2),
        "started_s": round(clock.started_s, 1),
        **more,
    }


def measure(asked: argparse.Namespace) -> Result:
    unknown = [name for name in asked.contestant or () if name not in CONTESTANTS]
    if unknown:
        raise ConfigError(f"--contestant {unknown[0]} is not known; there are {', '.join(CONTESTANTS)}")
    rows = []
    for model in asked.models:
        for name in asked.contestant or CONTESTANTS:
            for _ in range(asked.repeat):
                rows.append(_in_process(model, name, asked))
                print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    versions = {"torch": torch.__version__, "paceline": __version__}
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return {"date": time.strftime("%Y-%m-%d"), "gpu": gpu, **versions, "commit": asked.commit, "rows": rows}


def _in_process(model: str, name: str, asked: argparse.Namespace) -> dict[str, Any]:
    options = ["--lanes", str(asked.lanes), "--strategy", asked.strategy, "--clip", str(asked.clip)]
    words = [sys.executable, __file__, "--one", name, "--model", model, *options]
    words += ["--profile"] if asked.profile else []
    about = {"contestant": name, "model": model, "lanes": asked.lanes, "strategy": asked.strategy}
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=MOST_S, env=os.environ, check=False)
    except subprocess.TimeoutExpired:
        return {**about, "failed": f"not done after {MOST_S:.0f} s"}
    if asked.profile:
        print(done.stdout, file=sys.stderr)
    found = [line for line in done.stdout.splitlines() if line.startswith('{"contestant"')]
    if done.returncode or not found:
        return {**about, "failed": " · ".join(done.stderr.strip().splitlines()[-3:])[-400:]}
    row: dict[str, Any] = json.loads(found[-1])
    return row


def show(result: Result, console: Console) -> None:
    table = table_of("model", "contestant", "lanes", "tokens/s", "peak GiB", "first step s")
    for row in result["rows"]:
        about = row["model"], row["contestant"], str(row["lanes"])
        if "failed" in row:
            table.add_row(*about, row["failed"])
        else:
            table.add_row(*about, f"{row['tokens_s']:,}", f"{row['peak_gib']:.1f}", f"{row['started_s']:.0f}")
    console.print(table)


def main() -> None:
    parser = command(__doc__)
    parser.add_argument("--model", dest="models", action="append", choices=MODELS, help="by default 134m and 1.26b")
    parser.add_argument("--contestant", action="append", help="may be repeated; by default all")
    parser.add_argument("--lanes", type=int, default=1)
    parser.add_argument("--strategy", default="ddp")
    parser.add_argument(
        "--clip", type=float, default=0.0, help="the gradient's norm, in the Trainers and paceline's Engine"
    )
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--commit", default="", help="what the result says it was measured at")
    parser.add_argument("--profile", action="store_true", help="print where the device's time went")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    asked.models = asked.models or ["134m", "1.26b"]
    if asked.one:
        asked.model = asked.models[0]
        print(json.dumps(one(asked.one, asked)))
        return
    run(parser, asked.json, lambda: measure(asked), show)


if __name__ == "__main__":
    main()
