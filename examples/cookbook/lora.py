"""LoRA in a loop of your own: peft makes the adapters, the Engine trains them and saves nothing else.

paceline run --workers 2 examples/cookbook/lora.py
"""

import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import paceline

engine = paceline.Engine(seed=0)
config = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, use_cache=False
)
base = LlamaForCausalLM(config)  # or from_pretrained(…): the same files on every worker
model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1))
trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
optimizer = torch.optim.AdamW(trained, lr=1e-2)
rows = (torch.arange(64 * 16) ** 2 % 64).view(64, 16)
loader = DataLoader(rows, batch_size=4, shuffle=True)
model, optimizer, loader = engine.prepare(model, optimizer, loader)
checkpoints = engine.checkpoints("runs/lora", keep=2)
checkpoints.resume()

while loader.epoch < 2:
    for tokens in loader:
        loss = model(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    checkpoints.save()
checkpoints.close()
engine.save_model(model, "runs/lora/adapters")  # PeftModel.from_pretrained(base, "runs/lora/adapters")
engine.print("weights", engine.weights_hash())
