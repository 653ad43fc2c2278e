"""The README's hello world: a plain PyTorch loop with four changed lines, and one that prints the weights' hash.

python examples/hello.py                      one worker
paceline run --workers 2 examples/hello.py    two, and the same hash
"""

# ruff: noqa: I001
import torch
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset
import paceline

engine = paceline.Engine(lanes=6)
data = TensorDataset(torch.randn(256, 8), torch.randn(256, 1))
loader = DataLoader(data, batch_size=8, shuffle=True)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.AdamW(model.parameters())
model, optimizer, loader = engine.prepare(model, optimizer, loader)
for x, y in loader:
    loss = mse_loss(model(x), y)
    engine.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
engine.print("weights", engine.weights_hash())
