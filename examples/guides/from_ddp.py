"""Points in and around a circle, moved from DistributedDataParallel.

python examples/guides/from_ddp.py                      one worker
rm -r runs/circle                                       otherwise the next goes on from its checkpoint
paceline run --workers 2 examples/guides/from_ddp.py    or torchrun --nproc-per-node 2
"""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import paceline

EPOCHS, ACCUMULATE = 2, 2

engine = paceline.Engine(lanes=4, accumulate=ACCUMULATE, seed=0)
points = torch.randn(640, 2)
circle = TensorDataset(points, (points.norm(dim=1) > 1.2).long())
train, held_out = torch.utils.data.random_split(circle, [512, 128])
loader = DataLoader(train, batch_size=8, shuffle=True)
eval_loader = DataLoader(held_out, batch_size=32)
model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
steps = EPOCHS * engine.steps_per_epoch(loader)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=steps)
model, optimizer, scheduler, loader, eval_loader = engine.prepare(model, optimizer, scheduler, loader, eval_loader)
checkpoints = engine.checkpoints("runs/circle", keep=2)
checkpoints.resume()

for epoch in range(loader.epoch, EPOCHS):
    for x, y in loader:
        loss = cross_entropy(model(x), y)
        engine.backward(loss)
        engine.clip_grad_norm_(1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    model.eval()
    right = torch.zeros(())
    with torch.no_grad():
        for x, y in eval_loader:
            right += (model(x).argmax(-1) == y).sum()
    right = engine.reduce(right)
    model.train()
    engine.print(f"epoch {epoch}: accuracy {right / len(held_out):.3f}")
    checkpoints.save()
checkpoints.close()
engine.print("weights", engine.weights_hash())
