"""Points in and around a circle, moved from torchft: workers may come and go.

paceline run --workers 2 --lanes 4 --elastic --min-workers 1 examples/guides/from_torchft.py
"""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import paceline

STEPS = 24

engine = paceline.Engine(lanes=4, seed=0)
points = torch.randn(512, 2)
circle = TensorDataset(points, (points.norm(dim=1) > 1.2).long())
loader = DataLoader(circle, batch_size=8, shuffle=True)
model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer, loader = engine.prepare(model, optimizer, loader)
while engine.step < STEPS:
    for x, y in loader:
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        engine.mean("loss", loss)
        engine.backward(loss)
        optimizer.step()
        if engine.stepped and engine.step >= STEPS:
            break
engine.print(f"{engine.step} steps, loss {engine.means['loss']:.3f}")
engine.print("weights", engine.weights_hash())
