"""Points in and around a circle, trained with Accelerate.

torchrun --nproc-per-node 4 examples/guides/before/with_accelerate.py
"""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

EPOCHS = 2

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
set_seed(0)
points = torch.randn(640, 2)
circle = TensorDataset(points, (points.norm(dim=1) > 1.2).long())
train, held_out = torch.utils.data.random_split(circle, [512, 128])
loader = DataLoader(train, batch_size=8, shuffle=True)
eval_loader = DataLoader(held_out, batch_size=32)
model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
steps = EPOCHS * len(loader) // 2
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=steps)
model, optimizer, loader, eval_loader, scheduler = accelerator.prepare(model, optimizer, loader, eval_loader, scheduler)

for epoch in range(EPOCHS):
    model.train()
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = cross_entropy(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    model.eval()
    right = 0
    for x, y in eval_loader:
        with torch.no_grad():
            found = model(x).argmax(-1)
        found, y = accelerator.gather_for_metrics((found, y))
        right += (found == y).sum().item()
    accelerator.print(f"epoch {epoch}: accuracy {right / len(held_out):.3f}")
    accelerator.save_state(f"circle/epoch-{epoch}")

accelerator.save_model(model, "circle/model")
accelerator.end_training()
