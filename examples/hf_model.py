"""A Hugging Face model from a config: a tiny GPT-2 with random weights, so that nothing is downloaded.

    python examples/hf_model.py --lanes 2                         a few seconds
    paceline run --workers 2 examples/hf_model.py                 2 workers, and the same weights
    paceline run --workers 2 examples/hf_model.py --strategy fsdp     weights in shards, and the same weights again

It is saved as Hugging Face saves models, and loaded again by from_pretrained. It needs pip install 'paceline[hf]'.
"""

import inspect
import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.utils.logging import disable_progress_bar

from paceline import Trainer, TrainingArguments

DEFAULTS = """--output-dir runs/hf_model --overwrite-output-dir --num-train-epochs 2 --learning-rate 3e-3
--logging-steps 20 --save-strategy no"""
CONTEXT = 64

disable_progress_bar()
args = TrainingArguments.from_command_line([*DEFAULTS.split(), *sys.argv[1:]])
config = GPT2Config(vocab_size=256, n_positions=CONTEXT, n_embd=64, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
text = torch.tensor(list(inspect.getsource(inspect).encode()))  # bytes are the tokens
windows = text[: len(text) // CONTEXT * CONTEXT].view(-1, CONTEXT)
trainer = Trainer(
    model_init=lambda: GPT2LMHeadModel(config),
    args=args,
    train_dataset=[{"input_ids": window, "labels": window} for window in windows],  # the model shifts them itself
)
trainer.train()
trainer.save_model()

if trainer.is_world_process_zero():
    model = GPT2LMHeadModel.from_pretrained(args.output_dir)
    prompt = torch.tensor([list(b"    def ")])
    written = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=40, do_sample=True, top_k=5)
    print(bytes(written[0].tolist()).decode(errors="replace"))
