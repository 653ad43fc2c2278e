"""Trainer on text: a small GPT learns Python's own source, byte by byte, from a token file.

    python examples/gpt.py --lanes 2                                      about a minute
    paceline run --workers 2 examples/gpt.py                              2 workers, and the same weights
    paceline run --workers 2 examples/gpt.py --resume-from-checkpoint true    goes on after a Ctrl-C
    paceline data check runs/gpt/python.tokens                            what is in the token file

examples/train_gpt.py trains a better one without Trainer, and lets it write.
"""

import sys
import sysconfig
from pathlib import Path

from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Subset

from paceline import Trainer, TrainingArguments
from paceline.data import TokenFile

CONTEXT, WIDTH, LAYERS, HELD_OUT = 64, 128, 2, 256
DEFAULTS = """--output-dir runs/gpt --max-steps 600 --learning-rate 3e-3 --lr-scheduler-type cosine --warmup-steps 20
--logging-steps 20 --eval-strategy steps --eval-steps 200 --save-steps 200 --save-total-limit 2"""


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        block = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.1, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, x):
        looking_back = nn.Transformer.generate_square_subsequent_mask(CONTEXT, device=x.device)
        return self.head(self.blocks(self.tokens(x) + self.places.weight, looking_back, is_causal=True))


args = TrainingArguments.from_command_line([*DEFAULTS.split(), *sys.argv[1:]])
corpus = Path(args.output_dir) / "python.tokens"
with args.main_process_first():  # one worker makes the file, the others find it
    if not corpus.exists():
        library = Path(sysconfig.get_paths()["stdlib"])
        TokenFile.build(corpus, sorted(library.glob("*.py")), separator=0)  # or: paceline data tokenize
text = TokenFile(corpus).sequences(CONTEXT)  # sample i: 64 bytes, and for each the one that follows
trainer = Trainer(
    model_init=GPT,
    args=args,
    train_dataset=Subset(text, range(len(text) - HELD_OUT)),
    eval_dataset=Subset(text, range(len(text) - HELD_OUT, len(text))),
    compute_loss_func=lambda logits, following: cross_entropy(logits.flatten(0, 1), following.flatten()),
)
trainer.train()
