"""Points in and around a circle, trained with DeepSpeed's ZeRO 2.

deepspeed --num_gpus 2 examples/guides/before/with_deepspeed.py
"""

import deepspeed
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

EPOCHS = 2

CONFIG = {
    "train_micro_batch_size_per_gpu": 8,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
    "zero_optimization": {"stage": 2},
    "bf16": {"enabled": True},
    "gradient_clipping": 1.0,
}

deepspeed.init_distributed()
torch.manual_seed(0)
points = torch.randn(512, 2)
circle = TensorDataset(points, (points.norm(dim=1) > 1.2).long())
model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 2))
engine, optimizer, loader, _ = deepspeed.initialize(
    model=model, model_parameters=model.parameters(), training_data=circle, config=CONFIG
)

for epoch in range(EPOCHS):
    for x, y in loader:
        logits = engine(x.to(engine.device, torch.bfloat16))
        loss = cross_entropy(logits.float(), y.to(engine.device))
        engine.backward(loss)
        engine.step()
    engine.save_checkpoint("circle", tag=f"epoch-{epoch}")
    if engine.global_rank == 0:
        print(f"epoch {epoch}: loss {loss.item():.3f}")
