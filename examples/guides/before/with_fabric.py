"""Points in and around a circle, trained with Lightning Fabric.

python examples/guides/before/with_fabric.py
"""

import lightning
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

EPOCHS, ACCUMULATE = 2, 2

fabric = lightning.Fabric(accelerator="cpu", strategy="ddp", devices=2)
fabric.launch()
fabric.seed_everything(0)
points = torch.randn(640, 2)
circle = TensorDataset(points, (points.norm(dim=1) > 1.2).long())
train, held_out = torch.utils.data.random_split(circle, [512, 128])
loader = DataLoader(train, batch_size=8, shuffle=True)
eval_loader = DataLoader(held_out, batch_size=32)
model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer = fabric.setup(model, optimizer)
loader, eval_loader = fabric.setup_dataloaders(loader, eval_loader)

for epoch in range(EPOCHS):
    for number, (x, y) in enumerate(loader, start=1):
        last = number % ACCUMULATE == 0
        with fabric.no_backward_sync(model, enabled=not last):
            loss = cross_entropy(model(x), y)
            fabric.backward(loss / ACCUMULATE)
        if last:
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
    model.eval()
    right = torch.zeros(())
    with torch.no_grad():
        for x, y in eval_loader:
            right += (model(x).argmax(-1) == y).sum()
    right = fabric.all_reduce(right, reduce_op="sum")
    model.train()
    fabric.print(f"epoch {epoch}: accuracy {right / len(held_out):.3f}")
    fabric.save(f"circle-{epoch}.ckpt", {"model": model, "optimizer": optimizer, "epoch": epoch})
