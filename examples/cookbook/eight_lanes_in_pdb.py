"""Eight lanes in one process: a job of eight workers, step by step in pdb.

python examples/cookbook/eight_lanes_in_pdb.py            then: p engine.lane, engine.step, loss   …   c
"""

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import paceline

engine = paceline.Engine(seed=0, lanes=8)
x = torch.randn(128, 4)
x[77] *= 100  # the sample that we are looking for
loader = DataLoader(TensorDataset(x, x.sum(dim=1, keepdim=True)), batch_size=4, shuffle=True)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
model, optimizer, loader = engine.prepare(model, optimizer, loader)
for inputs, wanted in loader:
    loss = mse_loss(model(inputs), wanted)
    if loss > 100 and engine.num_processes == 1:
        breakpoint()
    engine.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
engine.print("weights", engine.weights_hash())
