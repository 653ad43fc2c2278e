"""Points in and around a circle, trained with torchft: replica groups that may come and go.

torchft_lighthouse --min_replicas 1 --bind 0.0.0.0:29510 &
for group in 0 1; do
    TORCHFT_LIGHTHOUSE=http://localhost:29510 REPLICA_GROUP_ID=$group \\
        torchrun --master-port 2960$group --nproc-per-node 1 examples/guides/before/with_torchft.py &
done
"""

import os

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from torchft import DistributedDataParallel, DistributedSampler, Manager, Optimizer, ProcessGroupGloo

STEPS, GROUPS = 24, 2

torch.manual_seed(0)
points = torch.randn(512, 2)
circle = TensorDataset(points, (points.norm(dim=1) > 1.2).long())
group = int(os.environ["REPLICA_GROUP_ID"])
sampler = DistributedSampler(circle, replica_rank=group, num_replica_groups=GROUPS, group_rank=0, num_replicas=1)
loader = DataLoader(circle, batch_size=8, sampler=sampler)
model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 2))
inner = torch.optim.AdamW(model.parameters(), lr=1e-2)


def load(state):
    model.load_state_dict(state["model"])
    inner.load_state_dict(state["optimizer"])


def save():
    return {"model": model.state_dict(), "optimizer": inner.state_dict()}


manager = Manager(
    pg=ProcessGroupGloo(), min_replica_size=1, load_state_dict=load, state_dict=save, replica_id=f"circle_{group}"
)
model = DistributedDataParallel(manager, model)
optimizer = Optimizer(manager, inner)
while manager.current_step() < STEPS:
    for x, y in loader:
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        if manager.current_step() >= STEPS:
            break
print(f"{manager.current_step()} steps, loss {loss.item():.3f}")
manager.shutdown()
