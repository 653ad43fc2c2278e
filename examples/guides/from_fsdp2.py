"""A small transformer, moved from FSDP2 (`fully_shard`).

paceline run --workers 2 examples/guides/from_fsdp2.py    or torchrun --nproc-per-node 2
"""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.strategies import FsdpConfig

VOCABULARY, WIDTH, EPOCHS = 32, 32, 2


def block() -> nn.Module:
    return nn.TransformerEncoderLayer(WIDTH, nhead=2, dim_feedforward=64, dropout=0.0, batch_first=True)


engine = paceline.Engine(lanes=4, strategy=FsdpConfig(units=nn.TransformerEncoderLayer), precision="bf16", seed=0)
text = (torch.arange(128 * 16) ** 2 % VOCABULARY).view(128, 16)
dataset = TensorDataset(text)
loader = DataLoader(dataset, batch_size=8, shuffle=True)
model = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), block(), block(), nn.Linear(WIDTH, VOCABULARY))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimizer, loader = engine.prepare(model, optimizer, loader)
checkpoints = engine.checkpoints("runs/sharded", keep=2)
checkpoints.resume()

for epoch in range(loader.epoch, EPOCHS):
    for (tokens,) in loader:
        logits = model(tokens[:, :-1]).float()
        loss = cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        engine.mean("loss", loss)
        engine.backward(loss)
        engine.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    checkpoints.save()
    engine.print(f"epoch {epoch}: loss {engine.means['loss']:.3f}")

checkpoints.close()
engine.save_model(model, "runs/sharded/model")
engine.print("weights", engine.weights_hash())
