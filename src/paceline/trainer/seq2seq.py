"""Seq2SeqTrainer: evaluation and prediction by `generate`, for models that write texts.

    Seq2SeqTrainingArguments("runs/summary", predict_with_generate=True, generation_max_length=64)
    trainer.evaluate(num_beams=4)            what generate takes; the arguments' values where nothing is said

| in a batch           | loss                      | predictions                                              |
|----------------------|---------------------------|----------------------------------------------------------|
| labels               | that of the labels        | generated tokens, filled up to the longest allowed       |
| no labels            | none                      | generated tokens                                         |

Training is the Trainer's. Texts end at different lengths, so workers call the model a different number of times. Where
a forward needs all workers, because each has a part of the weights, that would wait for ever, and is refused.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from paceline.errors import ConfigError
from paceline.trainer.argument_fields import IntervalStrategy, setting
from paceline.trainer.trainer import PredictionOutput, Trainer
from paceline.trainer.training_arguments import TrainingArguments
from paceline.trainer.training_loop import TrainOutput
from paceline.world.checked_values import whole_number

_FROM_LABELS = ("decoder_input_ids", "decoder_attention_mask")


@dataclass
class Seq2SeqTrainingArguments(TrainingArguments):
    """TrainingArguments, and how texts are generated in evaluation."""

    sortish_sampler: bool = setting(False, "not supported: set train_sampling_strategy='group_by_length'")
    predict_with_generate: bool = setting(False, "evaluate and predict by generate, not by the logits of the labels")
    generation_max_length: int | None = setting(None, "tokens of a generated text; default: the model's")
    generation_num_beams: int | None = setting(None, "beams of the search; default: the model's")
    generation_config: Any = setting(None, "a GenerationConfig, or the folder or file of one")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sortish_sampler:
            raise ConfigError("sortish_sampler=True is not supported: set train_sampling_strategy='group_by_length'")
        for name in ("generation_max_length", "generation_num_beams"):
            if getattr(self, name) is not None:
                whole_number(name, getattr(self, name), least=1)

    def to_dict(self) -> dict[str, Any]:
        config = self.generation_config
        return super().to_dict() | {"generation_config": config.to_dict() if hasattr(config, "to_dict") else config}


class Seq2SeqTrainer(Trainer):
    """A Trainer whose evaluation can generate texts, every sample once (`predict_with_generate`)."""

    def __init__(self, model: nn.Module | None = None, args: Any = None, *positional: Any, **named: Any) -> None:
        if not isinstance(args, Seq2SeqTrainingArguments):
            raise ConfigError("the Seq2SeqTrainer needs Seq2SeqTrainingArguments: they say how texts are generated")
        self._generation: dict[str, Any] = {}
        super().__init__(model, args, *positional, **named)
        self.args: Seq2SeqTrainingArguments
        if args.generation_config is not None:
            self.model.generation_config = self.load_generation_config(args.generation_config)

    @staticmethod
    def load_generation_config(gen_config_arg: Any) -> Any:
        """A GenerationConfig, of transformers, as it is or from where it was saved."""
        from transformers import GenerationConfig

        if isinstance(gen_config_arg, GenerationConfig):
            found = copy.deepcopy(gen_config_arg)
        else:
            path = Path(gen_config_arg)
            folder, name = (path.parent, path.name) if path.is_file() else (gen_config_arg, None)
            found = GenerationConfig.from_pretrained(folder, name)
        try:
            found.validate(strict=True)  # before the training: a model with another can't be saved at its end
        except ValueError as error:
            raise ConfigError(f"generation_config: {' '.join(str(error).split())}") from error
        return found

    def train(self, *given: Any, **named: Any) -> TrainOutput:
        """As the Trainer's. An evaluation in it that would be refused is so before the first step."""
        evaluates = self.args.eval_strategy != IntervalStrategy.NO and not self.args.prediction_loss_only
        if evaluates and self.args.predict_with_generate:
            self._check_mesh()
            self._check_strategy()
        return super().train(*given, **named)

    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
        **gen_kwargs: Any,
    ) -> dict[str, float]:
        """As the Trainer's; `gen_kwargs` go to generate."""
        self._generation = self._with_defaults(gen_kwargs)
        return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)

    def predict(
        self,
        test_dataset: Any,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "test",
        **gen_kwargs: Any,
    ) -> PredictionOutput:
        """As the Trainer's; predictions are token numbers where predict_with_generate is set."""
        self._generation = self._with_defaults(gen_kwargs)
        return super().predict(test_dataset, ignore_keys, metric_key_prefix)

    def _with_defaults(self, given: Mapping[str, Any]) -> dict[str, Any]:
        wanted = {name: value for name, value in given.items() if value is not None}
        if not {"max_length", "max_new_tokens"} & set(wanted) and self.args.generation_max_length is not None:
            wanted["max_length"] = self.args.generation_max_length
        if self.args.generation_num_beams is not None:
            wanted.setdefault("num_beams", self.args.generation_num_beams)
        return wanted

    def prediction_step(
        self,
        model: nn.Module,
        inputs: Any,
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
        **gen_kwargs: Any,
    ) -> tuple[Tensor | None, Any, Any]:
        """Loss, generated tokens and labels of a batch."""
        if not self.args.predict_with_generate or prediction_loss_only:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        self._check_mesh()
        if self.has_trained:
            self._check_strategy()
        labels = inputs.get("labels")
        loss = None
        if labels is not None:
            loss, _, _ = super().prediction_step(model, inputs, prediction_loss_only=True, ignore_keys=ignore_keys)
        options = self._with_defaults(gen_kwargs) if gen_kwargs else self._generation
        tokens = self._generated(self._prepare_inputs(inputs), options)
        longest = self._longest(options)
        return loss, self._filled(tokens, longest), None if labels is None else self._filled(labels, longest)

    def _check_mesh(self) -> None:
        mesh = self.engine.config.mesh
        if mesh.cp > 1:
            raise ConfigError(
                f"predict_with_generate with {mesh}: a text is generated token by token, and workers have parts of it; "
                "leave it out, or evaluate a checkpoint without cp"
            )

    def _check_strategy(self) -> None:
        strategy = self.engine.config.strategy
        if self.engine.world.size > 1 and not strategy.entry.full_weights:
            raise ConfigError(
                f"predict_with_generate with several workers under strategy={strategy.name!r}: each of them calls the "
                "model as often as its texts are long, but a forward needs all of them; use ddp, zero1 or zero2, or "
                "save the model and evaluate it on one worker"
            )

    def _generated(self, inputs: Any, options: Mapping[str, Any]) -> Tensor:
        given = dict(inputs)
        made, labels = given.get("decoder_input_ids"), given.pop("labels", None)
        if made is not None and labels is not None and made.shape == labels.shape:  # the collator made them of labels
            for name in _FROM_LABELS:
                given.pop(name, None)
        model: Any = self.model
        tokens: Tensor = model.generate(**given, **options)
        return tokens

    def _longest(self, options: Mapping[str, Any]) -> int:
        """Tokens that a text may have at most, as generate counts them; 0 where nothing says it."""
        config: Any = self.model.generation_config
        fresh = options.get("max_new_tokens") or (None if "max_length" in options else config.max_new_tokens)
        if fresh is not None:
            return int(fresh) + 1
        return int(options.get("max_length") or config.max_length or 0)

    def _filled(self, tokens: Tensor, longest: int) -> Tensor:
        """Rows of one length, so that what is gathered does not depend on which texts met in a batch."""
        if tokens.shape[-1] >= longest:
            return tokens
        out = tokens.new_full((tokens.shape[0], longest), self._padding())
        out[:, : tokens.shape[-1]] = tokens
        return out

    def _padding(self) -> int:
        config: Any = getattr(self.model, "config", None)
        known = [getattr(self.processing_class, name, None) for name in ("pad_token_id", "eos_token_id")]
        found = next((value for value in (*known, getattr(config, "pad_token_id", None)) if value is not None), None)
        if found is None:
            raise ConfigError("generated texts are filled up with a token: set model.config.pad_token_id")
        return int(found)
