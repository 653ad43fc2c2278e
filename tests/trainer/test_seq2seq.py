"""Evaluation by generate: the texts of transformers, alike on any number of workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

transformers = pytest.importorskip("transformers")

from paceline.errors import ConfigError  # noqa: E402
from paceline.trainer import Seq2SeqTrainer, Seq2SeqTrainingArguments, TrainingArguments  # noqa: E402
from paceline.world.world import World  # noqa: E402
from tests.workers import run_workers  # noqa: E402


def tiny() -> Any:
    torch.manual_seed(3)
    config = transformers.T5Config(
        vocab_size=23, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=0, pad_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config)


def texts(count: int) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(2, 23, (6,), generator=generator) for _ in range(count)]
    return [{"input_ids": row, "labels": row[:4]} for row in rows]


def arguments(folder: Path, **more: Any) -> Seq2SeqTrainingArguments:
    given: dict[str, Any] = {"predict_with_generate": True, "generation_max_length": 9, "per_device_eval_batch_size": 2}
    return Seq2SeqTrainingArguments(str(folder), use_cpu=True, threads=1, max_steps=2, lanes=2, **(given | more))


def lengths(prediction: Any) -> dict[str, float]:
    predictions, labels = prediction
    return {"tokens": float(predictions.shape[1]), "labels": float(labels.shape[1]), "sum": float(predictions.sum())}


def generated(world: World, folder: Path, **generation: Any) -> dict[str, Any]:
    trainer = Seq2SeqTrainer(
        model_init=tiny,
        args=arguments(folder, eval_strategy="epoch", learning_rate=0.1, num_train_epochs=1),
        train_dataset=texts(8),
        eval_dataset=texts(5),
        compute_metrics=lengths,
        world=world,
    )
    trainer.train()
    output = trainer.predict(texts(7), **generation)
    logged = [row["eval_sum"] for row in trainer.state.log_history if "eval_sum" in row]
    return {"tokens": output.predictions.tolist(), "loss": output.metrics["test_loss"], "logged": logged}


@pytest.mark.workers
@pytest.mark.parametrize("generation", [{}, {"num_beams": 2}, {"do_sample": True}])
def test_generated_texts_are_the_same_on_any_number_of_workers(tmp_path: Path, generation: dict[str, Any]) -> None:
    one = run_workers(generated, 1, folder=tmp_path / "1", **generation)
    two = run_workers(generated, 2, folder=tmp_path / "2", **generation)
    assert one[0].error is None
    assert [result.value for result in two] == [one[0].value] * 2
    assert np.array(one[0].value["tokens"]).shape == (7, 9)


def test_predictions_are_those_of_generate(tmp_path: Path) -> None:
    trainer = Seq2SeqTrainer(tiny(), arguments(tmp_path), eval_dataset=texts(5), compute_metrics=lengths)
    batch = torch.stack([row["input_ids"] for row in texts(2)])
    expected = trainer.model.eval().generate(input_ids=batch, max_length=5)
    found = trainer.predict(texts(2), max_length=5).predictions
    assert found[:, : expected.shape[1]].tolist() == expected.tolist()
    assert (found[:, expected.shape[1] :] == 0).all()
    metrics = trainer.evaluate(max_new_tokens=3)
    assert (metrics["eval_tokens"], metrics["eval_labels"]) == (4.0, 4.0)
    plain = Seq2SeqTrainer(tiny(), arguments(tmp_path, predict_with_generate=False), eval_dataset=texts(5))
    assert plain.evaluate()["eval_loss"] == metrics["eval_loss"]
    assert plain.predict(texts(2)).predictions[0].shape == (2, 4, 23)


def test_a_generation_config_is_taken_and_a_wrong_one_refused(tmp_path: Path) -> None:
    config = transformers.GenerationConfig(max_length=6, decoder_start_token_id=0, pad_token_id=0)
    config.save_pretrained(tmp_path)
    for given in (config, str(tmp_path), tmp_path / "generation_config.json"):
        made = arguments(tmp_path, generation_config=given, generation_max_length=None)
        trainer = Seq2SeqTrainer(tiny(), made)
        assert trainer.predict(texts(2)).predictions.shape == (2, 6)
    wrong = transformers.GenerationConfig(max_length=6, do_sample=False, temperature=0.3)
    with pytest.raises(ConfigError, match=r"^generation_config: .*temperature"):
        Seq2SeqTrainer(tiny(), arguments(tmp_path, generation_config=wrong))


def test_arguments_that_cannot_be_honoured_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="sortish_sampler=True is not supported: set train_sampling_strategy"):
        arguments(tmp_path, sortish_sampler=True)
    with pytest.raises(ConfigError, match="generation_num_beams=0: it is at least 1"):
        arguments(tmp_path, generation_num_beams=0)
    with pytest.raises(ConfigError, match="needs Seq2SeqTrainingArguments"):
        Seq2SeqTrainer(tiny(), TrainingArguments(str(tmp_path)))


def sharded(world: World, folder: Path, eval_strategy: str = "no") -> str:
    """What was refused, and after how many steps."""
    parts: dict[str, Any] = {"train_dataset": texts(8), "eval_dataset": texts(5), "compute_metrics": lengths}
    made = arguments(folder, strategy="fsdp", eval_strategy=eval_strategy)
    trainer = Seq2SeqTrainer(model_init=tiny, args=made, world=world, **parts)
    try:
        trainer.train()
        trainer.evaluate()
    except ConfigError as error:
        return f"{trainer.state.global_step}: {error}"
    return "nothing"


@pytest.mark.workers
def test_generating_with_weights_in_parts_is_refused_before_the_first_step_if_that_is_known(tmp_path: Path) -> None:
    told = "predict_with_generate with several workers under strategy='fsdp'"
    for result in run_workers(sharded, 2, folder=tmp_path):
        assert result.error is None
        assert told in result.value
        assert not result.value.startswith("0: ")
    for result in run_workers(sharded, 2, folder=tmp_path / "evaluates", eval_strategy="epoch"):
        assert result.value.startswith(f"0: {told}")
