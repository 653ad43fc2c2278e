"""A script for transformers' Trainer, and the same script for ours: the two files differ in one import.

    python examples/transformers_original.py                          transformers (which needs accelerate as well)
    python examples/moved_from_transformers.py                        paceline
    paceline run --workers 2 examples/moved_from_transformers.py      and on any number of workers

A tiny BERT learns whether a row of numbers holds more large or more small ones. Callbacks stay those of transformers.
"""

# ruff: noqa: I001
import argparse

import torch
from transformers import BertConfig, BertForSequenceClassification, EarlyStoppingCallback, set_seed
from transformers import Trainer, TrainingArguments

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=300)
parser.add_argument("--output-dir", default="runs/moved")
flags = parser.parse_args()

set_seed(1)
rows = torch.randint(1, 32, (2000, 15))
samples = [{"input_ids": row, "labels": int((row > 16).sum() > 7)} for row in rows]
config = BertConfig(
    vocab_size=32, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, num_labels=2
)
args = TrainingArguments(
    flags.output_dir,
    max_steps=flags.steps,
    per_device_train_batch_size=16,
    learning_rate=3e-3,
    lr_scheduler_type="cosine",
    logging_steps=50,
    eval_strategy="steps",
    eval_steps=50,
    save_steps=50,
    save_total_limit=2,
    load_best_model_at_end=True,
    metric_for_best_model="accuracy",
    report_to="none",
)
trainer = Trainer(
    model=BertForSequenceClassification(config),
    args=args,
    train_dataset=samples[200:],
    eval_dataset=samples[:200],
    compute_metrics=lambda p: {"accuracy": float((p.predictions.argmax(-1) == p.label_ids).mean())},
    callbacks=[EarlyStoppingCallback(early_stopping_patience=3)],
)
trainer.train()
found = trainer.evaluate()
if trainer.is_world_process_zero():
    print(f"accuracy {found['eval_accuracy']:.3f}")
