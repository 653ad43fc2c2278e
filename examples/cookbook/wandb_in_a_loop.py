"""Weights & Biases in a loop of your own: every worker logs, one writes, and a resumed job goes on in its run.

WANDB_MODE=offline paceline run --workers 2 examples/cookbook/wandb_in_a_loop.py
"""

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import paceline

RATE = 1e-2

engine = paceline.Engine(seed=0, log_with="wandb", project_dir="runs")
x = torch.randn(256, 4)
loader = DataLoader(TensorDataset(x, x.sin().sum(dim=1, keepdim=True)), batch_size=8, shuffle=True)
model = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
model, optimizer, loader = engine.prepare(model, optimizer, loader)
checkpoints = engine.checkpoints("runs/sine", keep=2)
checkpoints.resume()
engine.init_trackers("sine", config={"learning_rate": RATE, "lanes": engine.config.lanes})  # after resume

while loader.epoch < 2:
    for inputs, wanted in loader:
        loss = mse_loss(model(inputs), wanted)
        engine.mean("loss", loss)  # of the step's lanes on all workers; loss.item() would be one lane's
        engine.backward(loss)
        norm = engine.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if engine.stepped and engine.step % 4 == 0:
            engine.log({"loss": engine.means["loss"], "grad_norm": float(norm)})
    checkpoints.save()
checkpoints.close()
engine.print("weights", engine.weights_hash())
engine.end_training()
