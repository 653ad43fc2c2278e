"""Points in and around a circle, moved from DeepSpeed's ZeRO 2.

paceline run --workers 2 examples/guides/from_deepspeed.py
"""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import paceline

EPOCHS = 2

engine = paceline.Engine(lanes=4, strategy="zero2", precision="bf16", accumulate=2, seed=0)
points = torch.randn(512, 2)
circle = TensorDataset(points, (points.norm(dim=1) > 1.2).long())
model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = DataLoader(circle, batch_size=8, shuffle=True)
model, optimizer, loader = engine.prepare(model, optimizer, loader)
checkpoints = engine.checkpoints("runs/circle", keep=2)
checkpoints.resume()

for epoch in range(loader.epoch, EPOCHS):
    for x, y in loader:
        loss = cross_entropy(model(x).float(), y)
        engine.mean("loss", loss)
        engine.backward(loss)
        engine.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    checkpoints.save()
    engine.print(f"epoch {epoch}: loss {engine.means['loss']:.3f}")
checkpoints.close()
engine.print("weights", engine.weights_hash())
