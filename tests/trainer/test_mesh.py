"""The Trainer where workers share a model or sequences: losses, metrics and token counts of a plain run."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline import Trainer, TrainingArguments
from paceline.errors import ConfigError
from paceline.trainer.seq2seq import Seq2SeqTrainer, Seq2SeqTrainingArguments
from paceline.world.world import TcpRendezvous, World
from tests.workers import free_port, run_workers

pytest.importorskip("transformers")

pytestmark = pytest.mark.workers

LENGTH, VOCABULARY = 16, 32
MESHES: dict[str, tuple[dict[str, int], tuple[int, ...]]] = {  # sizes, and which of four workers run it
    "tp": ({"tp": 2}, (0, 1)),
    "cp": ({"cp": 2}, (2, 3)),
    "cp × tp": ({"cp": 2, "tp": 2}, (0, 1, 2, 3)),
    "dp × cp": ({"cp": 2}, (0, 1, 2, 3)),
}


def texts(count: int, seed: int) -> list[dict[str, Any]]:
    """Sequences with padding at the right end, some of them so much of it that a worker has no target."""
    draw = torch.Generator().manual_seed(seed)
    found = []
    for number in range(count):
        tokens = torch.randint(VOCABULARY, (LENGTH,), generator=draw)
        mask = (torch.arange(LENGTH) < (3 if number == 2 else LENGTH - number % 5)).long()
        found.append({"input_ids": tokens, "labels": tokens.masked_fill(mask == 0, -100), "attention_mask": mask})
    return found


def next_token_accuracy(prediction: Any) -> dict[str, float]:
    guessed, labels = prediction.predictions.argmax(-1)[:, :-1], prediction.label_ids[:, 1:]
    return {"accuracy": float((guessed == labels)[labels != -100].mean())}


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    shape: dict[str, Any] = {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, **shape))


def train(world: World, folder: Path, sizes: dict[str, int], **more: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "max_steps": 2,
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_strategy": "no",
        "include_num_input_tokens_seen": "non_padding",
    }
    arguments = TrainingArguments(
        str(folder), use_cpu=True, threads=1, lanes=2, learning_rate=1e-3, adam_epsilon=1e-4,
        per_device_train_batch_size=2, per_device_eval_batch_size=2, **(settings | sizes | more),
    )  # fmt: skip
    trainer = Trainer(
        model_init=llama,
        args=arguments,
        train_dataset=texts(8, seed=1),
        eval_dataset=texts(7, seed=2),
        compute_metrics=next_token_accuracy,
        world=world,
    )
    before = trainer.evaluate()
    trainer.train()
    predicted = trainer.predict(texts(3, seed=3))
    found = {
        "eval_loss": [before["eval_loss"], *_logged(trainer, "eval_loss")],
        "accuracy": [before["eval_accuracy"], *_logged(trainer, "eval_accuracy")],
        "loss": _logged(trainer, "loss"),
        "tokens": trainer.state.num_input_tokens_seen,
        "predictions": predicted.predictions,
        "labels": predicted.label_ids.tolist(),
        "hash": trainer.engine.weights_hash(),
    }
    trainer.engine.close()
    return found


def refused(world: World, folder: Path, kind: Any, arguments: Any, **more: Any) -> str:
    args = arguments(str(folder), use_cpu=True, threads=1, lanes=1, cp=2, **more)
    own = {"eval_dataset": texts(2, seed=2), "compute_metrics": next_token_accuracy}
    trainer = kind(model_init=llama, args=args, world=world, **own)
    with pytest.raises(ConfigError) as error:
        trainer.evaluate()
    trainer.engine.close()
    return str(error.value)


def _logged(trainer: Trainer, name: str) -> list[float]:
    return [row[name] for row in trainer.state.log_history if name in row]


def train_on_meshes(world: World, folder: Path, ports: dict[str, int]) -> dict[str, Any]:
    def among(workers: tuple[int, ...], name: str) -> World:
        place = {"rank": workers.index(world.rank), "size": len(workers)}
        place |= {f"local_{key}": value for key, value in place.items()}
        return replace(world, rendezvous=TcpRendezvous("127.0.0.1", ports[name]), **place)  # type: ignore[arg-type]

    found: dict[str, Any] = {}
    if world.rank == 0:
        found["plain"] = train(World(), folder / "plain", {})
    for name, (sizes, workers) in MESHES.items():
        if world.rank in workers:
            found[name] = train(among(workers, name), folder / name, sizes)
    if world.rank in (2, 3):
        generating = {"kind": Seq2SeqTrainer, "arguments": Seq2SeqTrainingArguments, "predict_with_generate": True}
        objects = {"kind": Trainer, "arguments": TrainingArguments, "eval_use_gather_object": True}
        for name, given in (("generating", generating), ("objects", objects)):
            found[name] = refused(among((2, 3), name), folder / name, **given)  # type: ignore[arg-type]
    return found


def test_losses_metrics_and_token_counts_are_those_of_a_plain_run(tmp_path: Path) -> None:
    ports = {name: free_port() for name in (*MESHES, "generating", "objects")}
    results = run_workers(
        train_on_meshes,
        4,
        timeout_s=80,
        imports=("transformers.models.llama.modeling_llama",),
        folder=tmp_path,
        ports=ports,
    )
    for result in sorted(results, key=lambda r: str(r.error).startswith(("PeerLost", "Collective"))):
        assert result.error is None, f"{result.name}: {result.traceback}"
    plain = results[0].value["plain"]
    assert plain["tokens"] == sum(int(text["attention_mask"].sum()) for text in texts(8, seed=1))
    real = np.array(plain["labels"]) != -100  # what padding sees differs where sequences are shared, and is no result
    for name, (_, workers) in MESHES.items():
        found = [results[worker].value[name] for worker in workers]
        assert len({one["hash"] for one in found}) == 1, name
        for one in found:
            np.testing.assert_allclose(one["eval_loss"], plain["eval_loss"], rtol=1e-6, err_msg=name)
            np.testing.assert_allclose(one["loss"], plain["loss"], rtol=1e-6, err_msg=name)
            np.testing.assert_allclose(one["predictions"][real], plain["predictions"][real], atol=1e-6, err_msg=name)
            for key in ("accuracy", "tokens", "labels"):
                assert one[key] == plain[key], (name, key)
    for name in ("loss", "eval_loss"):  # with cp fixed, the same bits for any dp
        assert results[2].value["cp"][name] == results[2].value["dp × cp"][name]
    assert results[2].value["cp"]["hash"] == results[2].value["dp × cp"]["hash"]
    for result in results[2:]:  # one line each, before anything is generated or gathered
        assert re.fullmatch(r"predict_with_generate with Mesh\(cp=2\): .* without cp", result.value["generating"])
        assert re.fullmatch(r"eval_use_gather_object with Mesh\(cp=2\): .* without cp", result.value["objects"])


def train_otherwise(world: World, folder: Path, ports: list[int]) -> dict[str, Any]:
    def anew() -> World:
        return replace(world, rendezvous=TcpRendezvous("127.0.0.1", ports.pop()))

    found: dict[str, Any] = {"chunked": train(anew(), folder / "a", {"cp": 2}, chunked_loss=True)}
    others: dict[str, Any] = {"smoothed": {"label_smoothing_factor": 0.1}, "tp": {"chunked_loss": True}}
    for name, more in others.items():
        with pytest.raises(ConfigError) as error:
            train(anew(), folder / name, {"tp": 2} if name == "tp" else {"cp": 2}, **more)
        found[name] = str(error.value)
    if world.rank == 0:
        found["plain"] = train(World(), folder / "plain", {})
    return found


def test_a_chunked_loss_takes_parts_of_sequences_and_labels_that_nobody_would_get_are_refused(tmp_path: Path) -> None:
    ports, imports = [free_port() for _ in range(3)], ("transformers.models.llama.modeling_llama",)
    results = run_workers(train_otherwise, 2, timeout_s=80, imports=imports, folder=tmp_path, ports=ports)
    for result in results:
        assert result.error is None, f"{result.name}: {result.traceback}"
        np.testing.assert_allclose(result.value["chunked"]["loss"], results[0].value["plain"]["loss"], rtol=1e-6)
        assert re.fullmatch(r"Mesh\(cp=2\) splits sequences, .* leave them or cp out", result.value["smoothed"])
        assert re.fullmatch(r"chunked_loss=True with Mesh\(tp=2\): .* leave one of them out", result.value["tp"])
