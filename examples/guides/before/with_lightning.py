"""Points in and around a circle, trained with Lightning's Trainer.

python examples/guides/before/with_lightning.py
"""

import lightning
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset


class Circle(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 2))

    def training_step(self, batch, index):
        x, y = batch
        loss = cross_entropy(self.layers(x), y)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, index):
        x, y = batch
        right = (self.layers(x).argmax(-1) == y).float().mean()
        self.log("accuracy", right, sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


lightning.seed_everything(0)
points = torch.randn(640, 2)
circle = TensorDataset(points, (points.norm(dim=1) > 1.2).long())
train, held_out = torch.utils.data.random_split(circle, [512, 128])
trainer = lightning.Trainer(
    accelerator="cpu",
    strategy="ddp",
    devices=2,
    max_epochs=2,
    accumulate_grad_batches=2,
    gradient_clip_val=1.0,
    default_root_dir="runs/circle",
)
trainer.fit(Circle(), DataLoader(train, batch_size=8, shuffle=True), DataLoader(held_out, batch_size=32))
