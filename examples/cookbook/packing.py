"""Packed sequences: as many documents in a row as fit a budget of tokens, each attending to itself alone.

paceline run --workers 2 examples/cookbook/packing.py
"""

import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.utils.data import DataLoader

import paceline
from paceline.data import TokenBudgetSampler

VOCABULARY, WIDTH, BUDGET = 32, 16, 96


def pack(documents: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Inputs, targets and which document each token is of; a document's last token has no target."""
    inputs = torch.cat([document[:-1] for document in documents])
    targets = torch.cat([document[1:] for document in documents])
    owner = torch.cat([torch.full((len(document) - 1,), n) for n, document in enumerate(documents)])
    return inputs, targets, owner


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, tokens, owner):
        x = self.embed(tokens)
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        own = (owner[:, None] == owner[None, :]).tril()  # causal, and inside one document
        return self.head(x + scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=own)[0])


engine = paceline.Engine(seed=0)
lengths = torch.randint(4, 40, (200,))
documents = [(torch.randint(VOCABULARY, ()) + torch.arange(int(n))) % VOCABULARY for n in lengths]
sampler = TokenBudgetSampler(lengths.tolist(), tokens=BUDGET, padded=False)
loader = DataLoader(documents, batch_sampler=sampler, collate_fn=pack)
model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer, loader = engine.prepare(model, optimizer, loader)
for _ in range(2):
    for tokens, targets, owner in loader:
        loss = cross_entropy(model(tokens, owner), targets)
        engine.mean("loss", loss, weight=len(targets))
        engine.backward(loss, weight=len(targets))  # rows have different numbers of targets: a mean over all of them
        optimizer.step()
        optimizer.zero_grad()
engine.print(f"loss {engine.means['loss']:.3f}")
engine.print("weights", engine.weights_hash())
