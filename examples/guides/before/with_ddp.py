"""Points in and around a circle, trained with DistributedDataParallel.

torchrun --nproc-per-node 4 examples/guides/before/with_ddp.py
"""

import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS, ACCUMULATE = 2, 2

dist.init_process_group("gloo")
torch.manual_seed(0)
points = torch.randn(640, 2)
circle = TensorDataset(points, (points.norm(dim=1) > 1.2).long())
train, held_out = torch.utils.data.random_split(circle, [512, 128])
sampler = DistributedSampler(train)
loader = DataLoader(train, batch_size=8, sampler=sampler)
eval_loader = DataLoader(held_out, batch_size=32, sampler=DistributedSampler(held_out, shuffle=False))
model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 2))
model = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
steps = EPOCHS * len(loader) // ACCUMULATE
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=steps)

for epoch in range(EPOCHS):
    sampler.set_epoch(epoch)
    for number, (x, y) in enumerate(loader, start=1):
        last = number % ACCUMULATE == 0
        with contextlib.nullcontext() if last else model.no_sync():
            loss = cross_entropy(model(x), y)
            (loss / ACCUMULATE).backward()
        if last:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    model.eval()
    right = torch.zeros(())
    with torch.no_grad():
        for x, y in eval_loader:
            right += (model(x).argmax(-1) == y).sum()
    dist.all_reduce(right)
    model.train()
    if dist.get_rank() == 0:
        print(f"epoch {epoch}: accuracy {right / len(held_out):.3f}")
        torch.save(model.module.state_dict(), "circle.pt")
dist.destroy_process_group()
