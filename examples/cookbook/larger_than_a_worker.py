"""Weights larger than a worker's memory: built without memory, read tensor by tensor, kept and saved in shards.

paceline run --workers 2 examples/cookbook/larger_than_a_worker.py
"""

from pathlib import Path

import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import paceline
from paceline.strategies import FsdpConfig

engine = paceline.Engine(
    strategy=FsdpConfig(units="LlamaDecoderLayer"), activation_checkpointing="LlamaDecoderLayer", seed=0
)
config = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=2, use_cache=False
)
pretrained = Path("runs/pretrained")  # a download, in real life
with engine.main_process_first():
    if engine.is_main_process and not pretrained.exists():
        LlamaForCausalLM(config).save_pretrained(pretrained)

with torch.device("meta"):  # shapes and no memory
    model = LlamaForCausalLM(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader((torch.arange(64 * 16) ** 2 % 64).view(64, 16), batch_size=4, shuffle=True)
model, optimizer, loader = engine.prepare(model, optimizer, loader, weights=pretrained)
for tokens in loader:
    loss = model(input_ids=tokens, labels=tokens).loss
    engine.backward(loss)
    engine.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
engine.save_model(model, "runs/tuned")  # each worker writes some; LlamaForCausalLM.from_pretrained with the config
engine.print("weights", engine.weights_hash())
