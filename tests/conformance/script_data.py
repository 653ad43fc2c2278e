"""What the ported scripts read: random sentences, pictures and digits, and tiny models with random weights.

Each lies where the script looks for it by its name on the Hugging Face Hub, in the folder that the script is run in.
"""

from __future__ import annotations

import json
import pickle
import random
import struct
from pathlib import Path
from typing import Any

import numpy as np

WORDS = ("the", "a", "red", "small", "old", "cat", "dog", "bird", "tree", "sees", "likes", "has", "is", "and", "not")
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def make_data(folder: Path) -> None:
    draw = random.Random(5)
    _make_pairs(folder, draw)
    _make_text(folder / "text", draw)
    _make_phrases(folder / "temp" / "data" / "FinancialPhraseBank-v1.0", draw)
    _make_pictures(folder)
    _make_digits(folder / "Datasets" / "MNIST" / "raw")
    _make_tokens(folder / "data" / "chars", draw)
    _make_models(folder)


def _sentence(draw: random.Random) -> str:
    return " ".join(draw.choices(WORDS, k=draw.randint(3, 9)))


def _make_pairs(folder: Path, draw: random.Random) -> None:
    """GLUE's MRPC as the hub has it, and as two files."""
    from datasets import ClassLabel, Dataset, Features, Value

    hub, plain = folder / "nyu-mll" / "glue" / "mrpc", folder / "pairs"
    hub.mkdir(parents=True)
    plain.mkdir()
    features = Features(
        sentence1=Value("string"), sentence2=Value("string"), label=ClassLabel(names=["no", "yes"]), idx=Value("int32")
    )
    for part, number in (("train", 70), ("validation", 21)):
        rows = [
            {"sentence1": _sentence(draw), "sentence2": _sentence(draw), "label": draw.randint(0, 1), "idx": index}
            for index in range(number)
        ]
        data = Dataset.from_list(rows, features=features)
        data.to_parquet(hub / f"{part}.parquet")
        data.remove_columns("idx").to_csv(plain / f"{part}.csv")
    lines = [f"    - split: {part}\n      path: mrpc/{part}.parquet" for part in ("train", "validation")]
    head = "---\nconfigs:\n- config_name: mrpc\n  data_files:\n"
    (hub.parent / "README.md").write_text(head + "\n".join(lines) + "\n---\n")


def _make_text(folder: Path, draw: random.Random) -> None:
    folder.mkdir()
    for part, number in (("train", 300), ("validation", 60)):
        (folder / f"{part}.txt").write_text("\n".join(_sentence(draw) for _ in range(number)) + "\n")
    (folder / "long.txt").write_text("\n".join(" ".join(draw.choices(WORDS, k=50)) for _ in range(90)) + "\n")


def _make_phrases(folder: Path, draw: random.Random) -> None:
    folder.mkdir(parents=True)
    for part, number in (("train", 33), ("val", 9)):
        rows = [{"sentence": _sentence(draw), "label": draw.choice(["red", "old", "small"])} for _ in range(number)]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"financial_phrase_bank_{part}.jsonl").write_text(text)


def _make_pictures(folder: Path) -> None:
    """Two kinds of pets, and of ImageNet's classes."""
    from PIL import Image

    draw = np.random.default_rng(5)
    (folder / "pets").mkdir()
    for index in range(40):
        pixels = draw.integers(0, 256, (48, 48, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / "pets" / f"{('cat', 'dog')[index % 2]}_{index}.jpg")
    for part, number in (("train", 22), ("val", 11)):
        for index in range(number):
            kind = folder / "images" / part / ("cat", "dog")[index % 2]
            kind.mkdir(parents=True, exist_ok=True)
            Image.fromarray(draw.integers(0, 256, (48, 48, 3), dtype=np.uint8)).save(kind / f"{index}.jpg")


def _make_digits(folder: Path) -> None:
    """In the format of MNIST's files: magic number, sizes, bytes."""
    folder.mkdir(parents=True)
    draw = np.random.default_rng(6)
    for part, number in (("train", 50), ("t10k", 21)):
        pixels = draw.integers(0, 256, (number, 28, 28), dtype=np.uint8)
        labels = draw.integers(0, 10, number, dtype=np.uint8)
        (folder / f"{part}-images-idx3-ubyte").write_bytes(
            struct.pack(">iiii", 2051, number, 28, 28) + pixels.tobytes()
        )
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(struct.pack(">ii", 2049, number) + labels.tobytes())


def _make_tokens(folder: Path, draw: random.Random) -> None:
    folder.mkdir(parents=True)
    for part, number in (("train", 3000), ("val", 500)):
        np.array([draw.randrange(30) for _ in range(number)], dtype=np.uint16).tofile(folder / f"{part}.bin")
    (folder / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 30}))


def _make_models(folder: Path) -> None:
    import torch
    from transformers import (
        BertConfig,
        BertForSequenceClassification,
        DistilBertConfig,
        DistilBertForMaskedLM,
        GPT2Config,
        GPT2LMHeadModel,
        T5Config,
        T5ForConditionalGeneration,
    )

    torch.manual_seed(5)
    size = len(WORDS) + len(SPECIAL)
    bert = BertConfig(vocab_size=size, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
    distil = DistilBertConfig(vocab_size=size, dim=16, n_layers=2, n_heads=2, hidden_dim=32)
    gpt2 = GPT2Config(vocab_size=size, n_positions=64, n_embd=16, n_layer=2, n_head=2, bos_token_id=2, eos_token_id=3)
    t5 = T5Config(
        vocab_size=size,
        d_model=16,
        d_kv=8,
        d_ff=32,
        num_layers=2,
        num_heads=2,
        decoder_start_token_id=0,
        pad_token_id=0,
    )
    models: dict[str, Any] = {
        "bert-base-cased": BertForSequenceClassification(bert),
        "distilbert-base-uncased": DistilBertForMaskedLM(distil),
        "tiny-gpt2": GPT2LMHeadModel(gpt2),
        "t5-base": T5ForConditionalGeneration(t5),
    }
    for name, model in models.items():
        model.save_pretrained(folder / name)
        _tokenizer().save_pretrained(folder / name)


def _tokenizer() -> Any:
    """One token for each word."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    known = {word: number for number, word in enumerate((*SPECIAL, *WORDS))}
    tokenizer = Tokenizer(models.WordLevel(known, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", known["[CLS]"]), ("[SEP]", known["[SEP]"])],
    )
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), SPECIAL, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=64, eos_token="[SEP]", **names)
