"""An exponential moving average of the weights, updated once a step, saved and resumed with the job.

paceline run --workers 2 examples/cookbook/ema.py
"""

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

import paceline

engine = paceline.Engine(seed=0)
x = torch.randn(256, 4)
loader = DataLoader(TensorDataset(x, x.sin().sum(dim=1, keepdim=True)), batch_size=8, shuffle=True)
model = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
engine.register_for_checkpointing(average)
model, optimizer, loader = engine.prepare(model, optimizer, loader)
checkpoints = engine.checkpoints("runs/ema", keep=2)
checkpoints.resume()

while loader.epoch < 3:
    for inputs, wanted in loader:
        engine.backward(mse_loss(model(inputs), wanted))
        optimizer.step()
        optimizer.zero_grad()
        if engine.stepped:  # once a step: in every item it would depend on the number of workers, and is refused
            average.update_parameters(model)
    checkpoints.save()
checkpoints.close()
with torch.no_grad():
    engine.print(f"error {mse_loss(average(x), x.sin().sum(dim=1, keepdim=True)):.6f}")
engine.print("weights", engine.weights_hash())
