"""A tiny Llama on byte text, trained with transformers' Trainer.

torchrun --nproc-per-node 2 examples/guides/before/with_transformers.py
"""

import inspect

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

CONTEXT = 32

set_seed(0)
text = torch.tensor(list(inspect.getsource(inspect).encode()))[: 256 * CONTEXT].view(-1, CONTEXT)
samples = [{"input_ids": row, "labels": row} for row in text]
config = LlamaConfig(
    vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, use_cache=False
)
args = TrainingArguments(
    "runs/llama",
    use_cpu=True,
    max_steps=8,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    learning_rate=3e-3,
    lr_scheduler_type="cosine",
    max_grad_norm=1.0,
    logging_steps=4,
    eval_strategy="steps",
    eval_steps=4,
    save_steps=4,
    save_total_limit=1,
    report_to="none",
)
trainer = Trainer(
    model=LlamaForCausalLM(config),
    args=args,
    train_dataset=samples[32:],
    eval_dataset=samples[:32],
)
trainer.train()
trainer.save_model("runs/llama/final")
