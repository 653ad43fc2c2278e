"""A small transformer, trained with FSDP2 (`fully_shard`).

torchrun --nproc-per-node 4 examples/guides/before/with_fsdp2.py
"""

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

VOCABULARY, WIDTH, EPOCHS = 32, 32, 2


def block() -> nn.Module:
    return nn.TransformerEncoderLayer(WIDTH, nhead=2, dim_feedforward=64, dropout=0.0, batch_first=True)


dist.init_process_group("gloo")
torch.manual_seed(0)
text = (torch.arange(128 * 16) ** 2 % VOCABULARY).view(128, 16)
dataset = TensorDataset(text)
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=8, sampler=sampler)
model = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), block(), block(), nn.Linear(WIDTH, VOCABULARY))
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
for module in model:
    if isinstance(module, nn.TransformerEncoderLayer):
        fully_shard(module, mp_policy=policy)
fully_shard(model, mp_policy=policy)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

for epoch in range(EPOCHS):
    sampler.set_epoch(epoch)
    for (tokens,) in loader:
        logits = model(tokens[:, :-1]).float()
        loss = cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optim": state}, checkpoint_id=f"sharded/epoch-{epoch}")
    if dist.get_rank() == 0:
        print(f"epoch {epoch}: loss {loss.item():.3f}")

dcp.load({"model": weights, "optim": state}, checkpoint_id=f"sharded/epoch-{EPOCHS - 1}")
set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
whole = {name: weight.full_tensor() for name, weight in get_model_state_dict(model).items()}
if dist.get_rank() == 0:
    torch.save(whole, "model.pt")
dist.destroy_process_group()
