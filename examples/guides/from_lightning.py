"""Points in and around a circle, moved from Lightning's Trainer.

python examples/guides/from_lightning.py                      one worker
paceline run --workers 2 examples/guides/from_lightning.py    two
"""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from paceline import Trainer, TrainingArguments


class Circle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 2))

    def forward(self, x):
        return self.layers(x)


class CircleTrainer(Trainer):
    def create_optimizer(self):
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        return self.optimizer


def accuracy(prediction):
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


torch.manual_seed(0)
points = torch.randn(640, 2)
circle = TensorDataset(points, (points.norm(dim=1) > 1.2).long())
train, held_out = torch.utils.data.random_split(circle, [512, 128])
args = TrainingArguments(
    "runs/circle",
    seed=0,
    num_train_epochs=2,
    per_device_train_batch_size=8,
    per_device_eval_batch_size=32,
    gradient_accumulation_steps=2,
    max_grad_norm=1.0,
    lr_scheduler_type="constant",
    eval_strategy="epoch",
    save_strategy="epoch",
)
trainer = CircleTrainer(
    model_init=Circle,
    args=args,
    train_dataset=train,
    eval_dataset=held_out,
    compute_loss_func=cross_entropy,
    compute_metrics=accuracy,
)
trainer.train(resume_from_checkpoint=True)
