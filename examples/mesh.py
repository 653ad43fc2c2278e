"""Data × tensor × context parallel training of a Hugging Face Llama, with checkpoint and verification.

    paceline run --workers 8 --tp 2 --cp 2 --lanes 2 examples/mesh.py          dp 2 × cp 2 × tp 2
    paceline run --workers 2 --tp 2 --lanes 2 examples/mesh.py --resume        the checkpoint goes on, on another mesh

Only the launcher's flags say how the workers share the model: the loop is that of one process. The plan of tensor
parallelism is the one that the model carries. `weights_hash` raises if any two workers differ in a bit.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset
from transformers import LlamaConfig, LlamaForCausalLM

import paceline

VOCABULARY, LENGTH = 64, 32


class Counting(Dataset[dict[str, torch.Tensor]]):
    """Sequences that count upwards: a model that looks at the token before knows the next."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(LENGTH) + 7 * index) % VOCABULARY
        return {"input_ids": tokens, "labels": tokens.clone()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", default="runs/mesh")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args()

    engine = paceline.Engine(seed=1)
    shape: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, **shape)
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(Counting(), batch_size=4, shuffle=True)
    model, optimizer, loader = engine.prepare(model, optimizer, loader)
    if options.resume:
        engine.load_state(options.folder, accept=["tp", "cp"])

    while engine.step < options.steps:
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


if __name__ == "__main__":
    main()
