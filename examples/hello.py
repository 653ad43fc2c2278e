"""The README's hello world: a plain PyTorch loop with four changed lines.

python examples/hello.py                      one worker
paceline run --workers 2 examples/hello.py    two
"""

# ruff: noqa: I001
import torch
from torch.nn.functional import mse_loss
import paceline

engine = paceline.Engine()
data = torch.utils.data.TensorDataset(torch.randn(256, 8), torch.randn(256, 1))
loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.AdamW(model.parameters())
model, optimizer, loader = engine.prepare(model, optimizer, loader)
for x, y in loader:
    loss = mse_loss(model(x), y)
    engine.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
print("done")
