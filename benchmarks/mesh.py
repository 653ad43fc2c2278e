"""Step time and memory of a small Llama on every mesh of four workers, beside plain torch code for FSDP2 × TP.

    python benchmarks/mesh.py --rounds 3 --json mesh.json --figure mesh.png       about five minutes on two cores

The same global batch everywhere: 8 sequences of 128 tokens, of which each worker computes its part in one micro-batch.
Each contestant runs in processes of its own, one after the other, and rounds turn their order. Time is the median of
the steps after the second; memory is what a worker's peak is above what it had before it built the model. `torch` is
what its tutorials write: parallelize_module, then fully_shard of each block, over gloo. The cores of one machine are
shared by all workers, so a mesh gains nothing in time here: it shows what each kind of sharing costs.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

WORKERS, SEQUENCES, LENGTH, VOCABULARY = 4, 8, 128, 512
CONTESTANTS = {
    "fsdp 4": ["--tp", "1"],
    "fsdp 2 × tp 2": ["--tp", "2"],
    "tp 4": ["--tp", "4"],
    "fsdp 2 × cp 2": ["--cp", "2"],
    "cp 2 × tp 2": ["--cp", "2", "--tp", "2"],
}
TORCH = "torch: fsdp 2 × tp 2"
SHAPE: dict[str, Any] = {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4}


def model_of() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, hidden_size=512, intermediate_size=1536, **SHAPE))


def kib(name: str) -> int:
    """Of this process: VmRSS, or VmHWM, its peak."""
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1])


def told(times: list[float], before: int, rank: int, loss: float) -> None:
    row = {"rank": rank, "step_s": statistics.median(times[2:]), "mib": (kib("VmHWM") - before) / 1024, "loss": loss}
    print("ROW " + json.dumps(row), flush=True)


def ours(steps: int) -> None:
    import paceline

    engine = paceline.Engine(strategy="fsdp", seed=1, threads=1)
    before, model = kib("VmRSS"), model_of()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    drawn = torch.randint(VOCABULARY, (steps * SEQUENCES, LENGTH), generator=torch.Generator().manual_seed(1))
    data: Any = [{"input_ids": one, "labels": one} for one in drawn]
    loader: Any = DataLoader(data, batch_size=SEQUENCES // engine.config.lanes)
    model, optimizer, loader = engine.prepare(model, optimizer, loader)
    times, begun = [], time.perf_counter()
    for batch in loader:
        loss = model(**batch, use_cache=False).loss
        engine.mean("loss", loss)
        engine.backward(loss)
        optimizer.step()
        if engine.stepped:
            times.append(time.perf_counter() - begun)
            begun = time.perf_counter()
    told(times, before, engine._group.seat.rank, engine.means["loss"])


def plain_torch(steps: int) -> None:
    """Of each tensor-parallel group both workers read the same samples."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    before, model = kib("VmRSS"), model_of()
    columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    plan: dict[str, Any] = {f"model.layers.*.{name}": ColwiseParallel() for name in columns}
    plan |= {f"model.layers.*.{name}": RowwiseParallel() for name in ("self_attn.o_proj", "mlp.down_proj")}
    parallelize_module(model, mesh["tp"], plan)
    for block in model.model.layers:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    drawn = torch.randint(VOCABULARY, (steps * SEQUENCES, LENGTH), generator=torch.Generator().manual_seed(1))
    mine = drawn.view(steps, 2, SEQUENCES // 2, LENGTH)[:, mesh["dp"].get_local_rank()]
    times, begun, loss = [], time.perf_counter(), torch.zeros(())
    for batch in mine:
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - begun)
        begun = time.perf_counter()
    told(times, before, dist.get_rank(), float(loss.detach()))
    dist.destroy_process_group()


def run(name: str, steps: int) -> dict[str, float]:
    """One contestant in processes of its own: the slowest worker's time, and the largest worker's memory."""
    here = [str(Path(__file__).resolve()), "--steps", str(steps), "--worker"]
    if name == TORCH:
        command = ["-m", "torch.distributed.run", "--nproc-per-node", str(WORKERS), *here, "torch"]
    else:
        command = ["-m", "paceline", "run", "--workers", str(WORKERS), *CONTESTANTS[name], *here, "ours"]
    found = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=600, check=False)
    rows = [json.loads(row) for row in re.findall(r"ROW (\{.*?\})", found.stdout)]  # torchrun may put two in one line
    if len(rows) != WORKERS:
        raise SystemExit(f"{name}: {len(rows)} of {WORKERS} workers ended well\n{found.stdout}{found.stderr}"[-3000:])
    return {key: max(row[key] for row in rows) for key in ("step_s", "mib", "loss")}


def summary(rounds: list[dict[str, float]]) -> dict[str, float]:
    medians = {key: statistics.median(one[key] for one in rounds) for key in rounds[0]}
    times = [one["step_s"] for one in rounds]
    return medians | {"least_s": min(times), "most_s": max(times)}


def draw(rows: dict[str, dict[str, float]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3), sharey=True)
    colours = ["#999999" if name == TORCH else "#3b6ea5" for name in rows]
    for axis, key, title in ((axes[0], "step_s", "seconds a step"), (axes[1], "mib", "MiB on a worker, peak")):
        bars = axis.barh(list(rows), [row[key] for row in rows.values()], color=colours)
        axis.bar_label(bars, fmt="%.2f" if key == "step_s" else "%.0f", padding=2)
        axis.set_title(title)
        axis.margins(x=0.15)
    axes[0].invert_yaxis()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--figure", type=Path, help="draw there (matplotlib)")
    parser.add_argument("--json", type=Path, help="write every number there")
    parser.add_argument("--worker", choices=("ours", "torch"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    workers: dict[str, Callable[[int], None]] = {"ours": ours, "torch": plain_torch}
    if options.worker is not None:
        workers[options.worker](options.steps)
        return
    names = [*CONTESTANTS, TORCH]
    seen: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for number in range(options.rounds):
        for place in range(len(names)):
            name = names[(place + number) % len(names)]
            seen[name].append(run(name, options.steps))
    rows = {name: summary(some) for name, some in seen.items()}
    for name, row in rows.items():
        spread = f"({row['least_s']:.2f} to {row['most_s']:.2f})"
        print(f"{name:22} {row['step_s']:6.2f} s {spread}  {row['mib']:6.0f} MiB")
    if options.json is not None:
        options.json.write_text(json.dumps({"rows": rows}, indent=1, ensure_ascii=False) + "\n")
    if options.figure is not None:
        draw(rows, options.figure)


if __name__ == "__main__":
    main()
