"""A stream of shards that splits itself, and is resumed where it stood.

paceline run --workers 2 examples/cookbook/streaming.py
"""

import json
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import paceline

STEPS = 12


class Shards(IterableDataset):
    """Lines of files. `get_worker_info` counts over all workers here: leave ranks out."""

    def __init__(self, folder: Path) -> None:
        self.paths = sorted(folder.glob("*.jsonl"))

    def __iter__(self):
        info = get_worker_info()
        first, stride = (0, 1) if info is None else (info.id, info.num_workers)
        for path in self.paths[first::stride]:
            for line in path.read_text().splitlines():
                row = json.loads(line)
                yield torch.tensor(row["x"]), torch.tensor([row["y"]])


engine = paceline.Engine(seed=0)
folder = Path("runs/shards")
with engine.main_process_first():
    if engine.is_main_process:
        folder.mkdir(parents=True, exist_ok=True)
        for shard in range(8):
            rows = [{"x": [n / 40, shard / 8], "y": n / 40 - shard / 8} for n in range(40)]
            (folder / f"{shard}.jsonl").write_text("\n".join(map(json.dumps, rows)))
loader = DataLoader(Shards(folder), batch_size=5)
model = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer, loader = engine.prepare(model, optimizer, loader)
checkpoints = engine.checkpoints("runs/stream", keep=2)
checkpoints.resume()

while engine.step < STEPS:  # a stream has no length: count steps, and begin it again when it ends
    for x, y in loader:
        loss = mse_loss(model(x), y)
        engine.mean("loss", loss)
        engine.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if engine.stepped:
            if engine.step % 5 == 0:
                checkpoints.save()
            if engine.step == STEPS:
                break
checkpoints.close()
engine.print(f"{engine.step} steps, loss {engine.means['loss']:.4f}")
engine.print("weights", engine.weights_hash())
