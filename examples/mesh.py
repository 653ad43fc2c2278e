"""Data × tensor × context parallel training of a Hugging Face Llama, with checkpoint and verification.

    python examples/mesh.py                                                         one process
    paceline run --workers 8 --tp 2 --cp 2 --lanes 2 examples/mesh.py               dp 2 × cp 2 × tp 2
    paceline run --workers 2 --tp 2 --lanes 2 examples/mesh.py --resume             goes on, on another mesh

The launcher's flags say how workers share the model; the loop is that of one process, and the plan of tensor
parallelism the one that the model carries. `weights_hash` raises if any two workers differ in a bit.
"""

import argparse
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import paceline

parser = argparse.ArgumentParser()
parser.add_argument("--folder", default="runs/mesh")
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--resume", action="store_true")
options = parser.parse_args()

engine = paceline.Engine(lanes=2, seed=1)
shape: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, **shape))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
counting = [(torch.arange(32) + 7 * sample) % 64 for sample in range(256)]
data: Any = [{"input_ids": tokens, "labels": tokens} for tokens in counting]
loader = DataLoader(data, batch_size=4, shuffle=True)
model, optimizer, loader = engine.prepare(model, optimizer, loader)
if options.resume:
    engine.load_state(options.folder, accept=["tp", "cp"])

for batch in loader:
    loss = model(**batch, use_cache=False).loss
    engine.mean("loss", loss)
    engine.backward(loss)
    engine.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    if engine.stepped and engine.step % 10 == 0:
        engine.print(f"step {engine.step}: loss {engine.means['loss']:.4f}")
    if engine.stepped and engine.step == options.steps:
        engine.stop()
engine.save_state(options.folder)
engine.print(f"weights {engine.weights_hash()}")
