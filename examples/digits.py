"""Trainer on a classifier: scikit-learn's handwritten digits, with accuracy, early stopping and the best model.

    python examples/digits.py --lanes 2                           a few seconds
    paceline run --workers 2 examples/digits.py                   2 workers, and the same weights
    python examples/digits.py --learning-rate 1e-2 --report-to tensorboard

The arguments are in digits.yaml; each is a flag as well. scikit-learn comes with pip install 'paceline[examples]'.
"""

import sys
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset, random_split

from paceline import EarlyStoppingCallback, Trainer, TrainingArguments

args = TrainingArguments.from_command_line(["--config", str(Path(__file__).with_suffix(".yaml")), *sys.argv[1:]])

pixels, numbers = load_digits(return_X_y=True)  # 1,797 pictures of 8 × 8
digits = TensorDataset(torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(numbers))
train, held_out = random_split(digits, [0.8, 0.2], torch.Generator().manual_seed(0))


def make_model():
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.3), nn.Linear(128, 10))


def accuracy(prediction):
    return {"accuracy": (prediction.predictions.argmax(-1) == prediction.label_ids).mean()}


trainer = Trainer(
    model_init=make_model,  # called with the job's seed, so that every worker builds the same weights
    args=args,
    train_dataset=train,
    eval_dataset=held_out,
    compute_loss_func=nn.functional.cross_entropy,
    compute_metrics=accuracy,
    callbacks=[EarlyStoppingCallback(early_stopping_patience=5)],
)
trainer.train()
trainer.log_metrics("held-out", trainer.evaluate())  # of the best model
