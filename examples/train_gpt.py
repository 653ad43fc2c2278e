"""Train a small GPT, byte by byte, on the source of Python's own standard library. About a minute on two cores.

    make demo                                                            2 workers, results in runs/demo
    paceline run --workers 2 examples/train_gpt.py                       the same by hand; torchrun does as well
    python examples/train_gpt.py --lanes 2                               1 worker, and the same weights, bit for bit
    paceline run --workers 2 examples/train_gpt.py --stop-after 100      save and end there, or at any Ctrl-C ...
    paceline run --workers 1 examples/train_gpt.py --lanes 2 --resume    ... then go on, with fewer workers if you like
    paceline data audit runs/train_gpt                                   proves each sample once, after --record-samples

The run folder gets corpus/ (the text as token files), metrics.jsonl (a line per step and per evaluation), loss.png,
sample.txt, checkpoint-{step}/ (to continue from) and samples/ (the record). The last line printed is
`weights sha256:...`: it depends on the lanes, not on the number of workers.

Read it from top to bottom: text, model, evaluation, training, results.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import sysconfig
import time
from collections.abc import Iterator, Sequence
from hashlib import sha256
from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset

import paceline
from paceline.data import TokenFile
from paceline.strategies import ParameterServer, parse_clock

CONTEXT = 128  # bytes the model looks back
LAYERS, HEADS, WIDTH = 4, 4, 128
DROPOUT = 0.1
LEARNING_RATE, WARMUP_STEPS, WEIGHT_DECAY, MAX_GRADIENT_NORM = 3e-3, 20, 0.1, 1.0
EVALUATE_EVERY, EVALUATION_WINDOWS = 50, 128
PROMPT, SAMPLE_BYTES, TEMPERATURE = "def ", 300, 0.8

# -- the text: every byte of Python's standard library, every 20th file held out ---------------------------------------

CORPUS_BYTES = 16_000_000
HELD_OUT_EVERY = 20
END_OF_FILE = 0  # a byte that no source file contains
# Tests are another language, encodings/ and pydoc_data/ are generated tables, and the rest is not Python's own.
SKIPPED_FOLDERS = {"test", "tests", "idle_test", "encodings", "pydoc_data", "site-packages", "dist-packages"}


def source_files(root: Path) -> list[Path]:
    """The library's modules without its tests, in an order that does not depend on the file system."""
    found = [path.relative_to(root) for path in root.rglob("*.py")]
    return sorted((path for path in found if not SKIPPED_FOLDERS & set(path.parts)), key=Path.as_posix)


def corpus_files(root: Path) -> tuple[list[Path], list[Path]]:
    """(files to train on, held-out files); whole files go to one side or the other."""
    sides: tuple[list[Path], list[Path]] = ([], [])
    size = 0
    for number, path in enumerate(source_files(root)):
        sides[number % HELD_OUT_EVERY == HELD_OUT_EVERY - 1].append(root / path)
        size += (root / path).stat().st_size + 1
        if size >= CORPUS_BYTES:
            break
    return sides


def open_corpus(engine: paceline.Engine, folder: Path) -> tuple[TokenFile, TokenFile]:
    """(training text, held-out text): the first worker of each host writes the files, then all workers map them."""
    training, held_out = folder / "train.tokens", folder / "held_out.tokens"
    if engine.world.local_rank == 0:
        training_files, held_out_files = corpus_files(Path(sysconfig.get_paths()["stdlib"]))
        build_unless_there(training, training_files)
        build_unless_there(held_out, held_out_files)
    engine.barrier()
    return TokenFile(training), TokenFile(held_out)


def build_unless_there(path: Path, sources: list[Path]) -> None:
    """One token file of the sources' bytes; an earlier run's is kept if it was made of the same files."""
    names_and_sizes = "".join(f"{source} {source.stat().st_size}\n" for source in sources)
    description = f"{len(sources)} files, sha256 of names and sizes {sha256(names_and_sizes.encode()).hexdigest()}"
    try:
        if TokenFile(path).description == description:
            return
    except paceline.errors.DataError:
        pass  # not there yet, or damaged
    TokenFile.build(path, sources, separator=END_OF_FILE, description=description)


def spread(text: TokenFile, count: int) -> Subset[tuple[Tensor, Tensor]]:
    """`count` windows at equal distances: enough to judge by, and quick."""
    windows = text.sequences(CONTEXT)
    return Subset(windows, range(0, len(windows), max(1, len(windows) // count))[:count])


# -- the model: a GPT with 256 bytes for a vocabulary ------------------------------------------------------------------


class Block(nn.Module):
    """Look back, then think: attention and a small network, each added to what is there."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.query_key_value = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.attention_out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.mlp_norm = nn.LayerNorm(WIDTH)
        self.mlp_in = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.mlp_out = nn.Linear(4 * WIDTH, WIDTH, bias=False)
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attend(self.attention_norm(x)))
        return x + self.dropout(self.mlp_out(F.relu(self.mlp_in(self.mlp_norm(x))).square()))

    def attend(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        heads = self.query_key_value(x).view(batch, length, 3, HEADS, WIDTH // HEADS)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(turn(query), turn(key), value, is_causal=True)
        return self.attention_out(seen.transpose(1, 2).reshape(batch, length, WIDTH))


def turn(x: Tensor) -> Tensor:
    """Rotary positions: pairs of features turn with the place in the text, so attention feels distances."""
    length, features = x.shape[-2:]
    speeds = 100.0 ** -torch.linspace(0, 1, features // 2, device=x.device)
    angles = torch.arange(length, device=x.device)[:, None] * speeds
    left, right = x.chunk(2, dim=-1)
    return torch.cat([left * angles.cos() - right * angles.sin(), left * angles.sin() + right * angles.cos()], dim=-1)


class GPT(nn.Module):
    """Bytes in, a guess at each next byte out."""

    def __init__(self) -> None:
        super().__init__()
        # A byte is read together with the three before it: what a tokenizer is for, without one.
        self.embeddings = nn.ModuleList(nn.Embedding(256, WIDTH) for _ in range(4))
        self.dropout = nn.Dropout(DROPOUT)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 256, bias=False)
        for name, parameter in self.blocks.named_parameters():
            if parameter.dim() == 2:
                # Every block adds to the stream twice; smaller steps at first keep the sum in bounds.
                shrink = math.sqrt(2 * LAYERS) if name.endswith("_out.weight") else 1
                nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5 / shrink)
        for embedding in self.embeddings:
            nn.init.normal_(embedding.weight, std=0.3)
        nn.init.normal_(self.head.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        read = [embed(F.pad(x, (back, 0))[:, :length]) for back, embed in enumerate(self.embeddings)]
        return self.head(self.norm(self.blocks(self.dropout(torch.stack(read).sum(0)))))


def make_optimizer(model: nn.Module, way: str) -> torch.optim.Optimizer:
    """AdamW that lets matrices decay, but not norms. The ways differ in speed, and in their last bits."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(
        groups, lr=LEARNING_RATE, betas=(0.9, 0.99), fused=way == "fused", foreach=way == "foreach"
    )


def learning_rate_factor(step: int, steps: int) -> float:
    """Up in a line over the first steps, then down to a tenth along a cosine."""
    warmup = min(WARMUP_STEPS, steps // 2)
    if step < warmup:
        return (step + 1) / (warmup + 1)
    done = (step - warmup) / max(1, steps - warmup)
    return 0.1 + 0.9 * (1 + math.cos(math.pi * min(1.0, done))) / 2


# -- evaluation --------------------------------------------------------------------------------------------------------


@torch.no_grad()
def bits_per_byte(engine: paceline.Engine, model: nn.Module, loader: DataLoader[tuple[Tensor, Tensor]]) -> float:
    """How many bits the model would need for each held-out byte. Workers share the work; the sum has one order."""
    model.eval()
    losses = []
    for x, y in loader:
        each = F.cross_entropy(model(x).transpose(1, 2), y, reduction="none")
        losses.append(engine.gather_for_metrics(each.double().mean(1)))
    model.train()
    return float(torch.cat(losses).mean()) / math.log(2)


@torch.no_grad()
def generate(model: nn.Module, prompt: str, count: int, seed: int, device: torch.device) -> str:
    """`prompt` and `count` more bytes, drawn one by one."""
    model.eval()
    dice = torch.Generator().manual_seed(seed)
    text = torch.tensor([[END_OF_FILE, *prompt.encode()]], device=device)
    for _ in range(count):
        logits = model(text[:, -CONTEXT:])[0, -1].float().cpu()
        drawn = torch.multinomial(F.softmax(logits / TEMPERATURE, dim=0), 1, generator=dice)
        text = torch.cat([text, drawn.view(1, 1).to(device)], dim=1)
    model.train()
    return bytes(text[0, 1:].tolist()).decode(errors="replace").replace("\0", "\n")


# -- training ----------------------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    with paceline.Engine(
        lanes=args.lanes,
        accumulate=args.accumulate,
        seed=args.seed,
        strategy=strategy_of(args),
        reduction=args.reduction,
        algorithm=args.algorithm,
        backend=args.backend,
        threads=args.threads,
        bucket_mib=args.bucket_mib,
        record_samples=args.run_dir if args.record_samples else None,
    ) as engine:
        train(engine, args)


def strategy_of(args: argparse.Namespace) -> str | ParameterServer:
    if args.strategy != "parameter_server":
        return str(args.strategy)
    return ParameterServer(clock=parse_clock(args.clock), mode=args.server_mode)


def train(engine: paceline.Engine, args: argparse.Namespace) -> None:
    text, held_out_text = open_corpus(engine, args.run_dir / "corpus")
    # Sample i is the i-th stretch of CONTEXT bytes, and for each of them the byte that follows.
    loader = DataLoader(text.sequences(CONTEXT), batch_size=args.batch_size, shuffle=True, drop_last=True)
    held_out = engine.prepare(DataLoader(spread(held_out_text, EVALUATION_WINDOWS), batch_size=16))
    model = GPT()
    optimizer = make_optimizer(model, args.update)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_factor(step, args.steps))
    model, optimizer, scheduler, loader = engine.prepare(model, optimizer, scheduler, loader)
    checkpoints = engine.checkpoints(args.run_dir, keep=2)
    elastic = engine.world.elastic
    if not args.resume and not (elastic is not None and elastic.begins_again):  # all were lost, and start from there
        forget_earlier_run(engine, args.run_dir)
    elif checkpoints.resume(accept=args.accept) is None:
        engine.print(f"there is no checkpoint in {args.run_dir}; training starts at step 0")
    engine.stop_on_signals()

    metrics = Metrics(engine, args.run_dir / "metrics.jsonl")
    tokens = engine.config.lanes * args.accumulate * args.batch_size * CONTEXT
    last_step = min(args.steps, args.stop_after or args.steps)
    clock = time.perf_counter()
    while engine.step < last_step and not engine.stop_requested:  # once around the text, or as often as it takes
        for x, y in (bar := engine.progress(loader, total=args.steps)):
            if engine.step + 1 == last_step:
                engine.stop()  # all workers leave the loop after this step
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
            engine.mean("loss", loss)
            engine.backward(loss)
            norm = engine.clip_grad_norm_(MAX_GRADIENT_NORM)
            rate = optimizer.param_groups[0]["lr"]
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if not engine.stepped:
                continue  # other items of the same step follow

            seconds, clock = time.perf_counter() - clock, time.perf_counter()
            metrics.add(
                step=engine.step,
                loss=engine.means["loss"],
                gradient_norm=norm,
                learning_rate=rate,
                tokens_per_s=round(tokens / seconds),
            )
            bar.show(loss=engine.means["loss"], **{"tokens/s": round(metrics.recent("tokens_per_s", 20))})
            if engine.step % EVALUATE_EVERY == 0 or engine.step == args.steps:
                bits = bits_per_byte(engine, model, held_out)
                metrics.add(step=engine.step, held_out_bits_per_byte=bits)
                bar.show(**{"bits/byte": bits})
                checkpoints.save()  # written while the training goes on
                clock = time.perf_counter()

    if engine.step < args.steps:
        checkpoints.save()
    checkpoints.close()
    metrics.write()  # the worker that wrote may have been lost after the last line
    engine.exit_if_stopped()
    if engine.step < args.steps:
        engine.print(f"stopped after step {engine.step} of {args.steps}; --resume continues from {args.run_dir}")
    else:
        show_results(engine, model, metrics, args)
    engine.print("weights", engine.weights_hash())


def forget_earlier_run(engine: paceline.Engine, folder: Path) -> None:
    """Checkpoints of later steps than this run has come to would be taken for its newest."""
    if engine.is_main_process:
        for checkpoint in folder.glob("checkpoint-*"):
            shutil.rmtree(checkpoint)
    engine.barrier()


# -- results -----------------------------------------------------------------------------------------------------------


class Metrics:
    """metrics.jsonl: one object per line, written as it happens. A resumed run keeps the lines of the steps it has.

    Every worker has all lines, and whoever is the main process at the moment writes. When that one is lost, the next
    sees in the file how far it came, and goes on from there: no line is missing, and none is there twice.
    """

    def __init__(self, engine: paceline.Engine, path: Path) -> None:
        self._engine, self._path = engine, path
        self.rows = [row for row in rows_of(path) if row["step"] <= engine.step] if engine.step else []
        self._written: int | None = None  # lines in the file; None: another worker writes
        engine.barrier()  # all have read what was there
        if engine.is_main_process:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(json.dumps(row) + "\n" for row in self.rows))
            self._written = len(self.rows)
        engine.share_with_joiners(lambda: self.rows, self._take)

    def _take(self, rows: list[dict[str, float]]) -> None:
        """This worker replaces one that was lost: these are the lines so far."""
        self.rows = rows

    def add(self, **row: float) -> None:
        self.rows.append(row)
        self.write()

    def write(self) -> None:
        """On the main process: what the file lacks."""
        if not self._engine.is_main_process:
            return
        if self._written is None:
            self._written = whole_lines(self._path)
        if len(self.rows) > self._written:  # less: the lost worker was ahead of this one
            with self._path.open("a") as file:
                file.write("".join(json.dumps(row) + "\n" for row in self.rows[self._written :]))
            self._written = len(self.rows)

    def recent(self, name: str, count: int) -> float:
        """The mean of the last few values."""
        values = list(islice((row[name] for row in reversed(self.rows) if name in row), count))
        return sum(values) / len(values)

    def column(self, name: str) -> tuple[list[float], list[float]]:
        """(steps, values)"""
        rows = [row for row in self.rows if name in row]
        return [row["step"] for row in rows], [row[name] for row in rows]


def whole_lines(path: Path) -> int:
    """How many there are; one that a lost worker had only begun is cut off."""
    text = path.read_bytes() if path.exists() else b""
    if not text.endswith(b"\n") and text:
        os.truncate(path, text.rfind(b"\n") + 1)
    return text.count(b"\n")


def rows_of(path: Path) -> Iterator[dict[str, float]]:
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            yield json.loads(line)
        except ValueError:
            return  # the run was killed while it wrote this line


def show_results(engine: paceline.Engine, model: nn.Module, metrics: Metrics, args: argparse.Namespace) -> None:
    # All workers write the sample, the same one: where weights are sharded, a forward needs everybody.
    sample = generate(model, PROMPT, SAMPLE_BYTES, engine.config.seed, engine.device)
    if not engine.is_main_process:
        return
    (args.run_dir / "sample.txt").write_text(sample, encoding="utf-8")
    plot(metrics, args.run_dir / "loss.png")
    bits = metrics.recent("held_out_bits_per_byte", 1)
    print(f"\n{sample.rstrip()}\n")
    print(f"{bits:.3f} bits per held-out byte after {engine.step} steps; see {args.run_dir}/loss.png")


def plot(metrics: Metrics, path: Path) -> None:
    """Training loss of every step, and what counts: bits per byte on text the model has never seen."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no loss.png: pip install matplotlib")
        return
    steps, losses = metrics.column("loss")
    bits = [loss / math.log(2) for loss in losses]
    held_out = metrics.column("held_out_bits_per_byte")
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(steps, bits, color="tab:blue", alpha=0.25, linewidth=1)
    axes.plot(steps, smooth(bits), color="tab:blue", label="training batches, smoothed")
    axes.plot(*held_out, color="tab:orange", marker="o", label="held-out files")
    end = (held_out[0][-1], held_out[1][-1])
    axes.annotate(f"{end[1]:.2f}", end, (0, 12), textcoords="offset points", ha="center", color="tab:orange")
    axes.set(xlabel="step", ylabel="bits per byte", title="A byte-level GPT learns Python's standard library")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


def smooth(values: Sequence[float], keep: float = 0.9) -> list[float]:
    """A running mean that forgets, corrected for its start."""
    out, total, weight = [], 0.0, 0.0
    for value in values:
        total, weight = keep * total + value, keep * weight + 1
        out.append(total / weight)
    return out


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small GPT on the source of Python's standard library.")
    parser.add_argument("--steps", type=at_least_one, default=700, help="updates; the learning rate follows them")
    parser.add_argument("--batch-size", type=at_least_one, default=4, help="windows per lane and micro-batch")
    parser.add_argument("--accumulate", type=at_least_one, default=1, help="micro-batches per lane and step")
    parser.add_argument("--lanes", type=at_least_one, help="logical workers, for life; default: the workers")
    parser.add_argument("--threads", type=at_least_one, help="per worker; default: cores // lanes")
    parser.add_argument("--strategy", default="ddp", help="how the work is shared: ddp, zero1, zero2, zero3, fsdp, …")
    parser.add_argument("--update", default="fused", choices=("fused", "foreach", "plain"), help="how AdamW computes")
    parser.add_argument("--clock", default="s=0", help="of a parameter server: s=2 (staleness), s=inf, d=1 (delay)")
    parser.add_argument("--server-mode", default="update", help="what a parameter server does: update or aggregate")
    parser.add_argument("--reduction", default="exact", help="exact: the same bits on any number of workers; or fast")
    parser.add_argument("--algorithm", help="of a fast reduction: ring, tree, ... or auto; default: the backend's own")
    parser.add_argument("--backend", help="how tensors travel: paceline, gloo or nccl; default: what fits")
    parser.add_argument("--bucket-mib", type=float, default=4.0, help="gradients that travel together")
    parser.add_argument("--seed", type=int, help="of weights, order and dropout")
    parser.add_argument("--run-dir", type=Path, default=Path("runs/train_gpt"), help="where results go")
    parser.add_argument("--stop-after", type=at_least_one, metavar="STEP", help="save after STEP and end")
    parser.add_argument("--resume", action="store_true", help="continue from the newest checkpoint in --run-dir")
    parser.add_argument("--accept", nargs="+", default=[], metavar="FACT", help="what may differ from the saved job")
    parser.add_argument("--record-samples", action="store_true", help="write which samples went into which step")
    return parser.parse_args(argv)


def at_least_one(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return number


if __name__ == "__main__":
    main()
