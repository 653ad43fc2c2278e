"""The loss without the logits of a whole batch: torch's values and gradients, and one hash on any number of workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import paceline
from paceline import Trainer, TrainerCallback, TrainingArguments, World
from paceline.errors import ConfigError
from paceline.torch_compat import compiler
from paceline.trainer import chunked_loss
from paceline.trainer.chunked_loss import ChunkedLoss, linear_cross_entropy
from paceline.trainer.losses import LossRule
from tests.workers import run_workers

transformers = pytest.importorskip("transformers")

VOCABULARY = 67
CLOSE = [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.05)]


@pytest.fixture
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked_loss, "LOGITS_AT_ONCE", 5 * VOCABULARY)


def case(seed: int, *, dtype: torch.dtype = torch.float64, ignored: float = 0.3) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    rows = int(torch.randint(1, 23, (), generator=generator))
    targets = torch.randint(0, VOCABULARY, (2, rows), generator=generator)
    targets[torch.rand(2, rows, generator=generator) < ignored] = -100
    tensors = {"hidden": draw(2, rows, 8), "weight": draw(VOCABULARY, 8), "bias": draw(VOCABULARY)}
    return {name: x.to(dtype).requires_grad_() for name, x in tensors.items()} | {"targets": targets}


def whole(hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None = None) -> Tensor:
    logits = F.linear(hidden, weight, bias).view(-1, VOCABULARY)
    return F.cross_entropy(logits.to(torch.promote_types(hidden.dtype, torch.float32)), targets.view(-1))


@pytest.mark.usefixtures("few_rows")
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.05)]
)
def test_it_is_the_loss_of_all_logits_with_its_gradients(seed: int, dtype: torch.dtype, tolerance: float) -> None:
    given = case(seed, dtype=dtype)
    if bool((given["targets"] == -100).all()):
        given["targets"][0, 0] = 3
    leaves = [given["hidden"], given["weight"], given["bias"]]
    ours, theirs = linear_cross_entropy(**given) * 3, whole(**given) * 3
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance, check_dtype=True)
    of_theirs = torch.autograd.grad(theirs, leaves)
    for mine, its, leaf in zip(torch.autograd.grad(ours, leaves), of_theirs, leaves, strict=True):
        assert mine.dtype == leaf.dtype
        torch.testing.assert_close(mine, its, rtol=tolerance, atol=tolerance)


@pytest.mark.usefixtures("few_rows")
@pytest.mark.job  # inductor starts processes
@pytest.mark.filterwarnings("ignore")  # of torch's compiler, about itself
def test_compiled_it_is_the_same_loss_and_code_for_one_shape_serves_all_batches() -> None:
    graphs = compiler()
    before = graphs.graphs
    for seed in range(6):
        given = case(seed, dtype=torch.float32)
        leaves = [given["hidden"], given["weight"], given["bias"]]
        ours, plain = (linear_cross_entropy(**given, compile=compile) for compile in (True, False))
        torch.testing.assert_close(ours, plain)
        torch.testing.assert_close(torch.autograd.grad(ours, leaves), torch.autograd.grad(plain, leaves))
    assert graphs.graphs == before + 1


@pytest.mark.usefixtures("few_rows")
def test_of_no_targets_it_is_nothing_and_moves_nothing() -> None:
    given = case(1, ignored=2.0)
    loss = linear_cross_entropy(**given)
    loss.backward()
    assert loss.item() == 0
    assert not given["weight"].grad.any()
    assert not given["hidden"].grad.any()


def test_frozen_weights_have_no_gradient_and_cost_none() -> None:
    given = case(2)
    given["weight"].requires_grad_(False)
    given["bias"] = None
    (gradient,) = torch.autograd.grad(linear_cross_entropy(**given), [given["hidden"]])
    (its,) = torch.autograd.grad(whole(**given), [given["hidden"]])
    torch.testing.assert_close(gradient, its)


def test_targets_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"targets of shape \(3,\) for hidden states of shape \(2, 8\)"):
        paceline.linear_cross_entropy(torch.zeros(2, 8), torch.zeros(5, 8), torch.zeros(3, dtype=torch.long))


def test_no_tensor_of_all_logits_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked_loss, "LOGITS_AT_ONCE", 2**18)
    made: list[int] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            made.append(result.numel() if isinstance(result, Tensor) else 0)
            return result

    tokens, vocabulary = 128, 2**12
    hidden, weight = torch.randn(tokens, 2, requires_grad=True), torch.randn(vocabulary, 2, requires_grad=True)
    with Watch():
        linear_cross_entropy(hidden, weight, torch.zeros(tokens, dtype=torch.long)).backward()
    assert max(made) == chunked_loss.LOGITS_AT_ONCE == tokens * vocabulary // 2


# -- the Trainer -------------------------------------------------------------------------------------------------------


def llama(**more: Any) -> nn.Module:
    torch.manual_seed(5)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, **more
    )
    return transformers.LlamaForCausalLM(config)


def texts(count: int = 24) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randint(0, VOCABULARY, (9,), generator=generator) for _ in range(count)]
    return [
        {"input_ids": row, "labels": row.where(torch.arange(9) > place % 4, -100)} for place, row in enumerate(rows)
    ]


def trained(world: World, *, folder: str, strategy: str = "ddp", tied: bool = False, **more: Any) -> tuple[str, float]:
    chunked_loss.LOGITS_AT_ONCE = 5 * VOCABULARY
    arguments = TrainingArguments(
        folder, max_steps=4, per_device_train_batch_size=4, lanes=2, use_cpu=True, save_strategy="no",
        strategy=strategy, logging_steps=1, learning_rate=1e-2, disable_tqdm=True, report_to="none", **more,
    )  # fmt: skip
    trainer = Trainer(
        llama(tie_word_embeddings=tied), arguments, train_dataset=texts(), eval_dataset=texts(8), world=world
    )
    output = trainer.train()
    assert "forward" not in trainer.model.get_output_embeddings().__dict__
    assert trainer.evaluate()["eval_loss"] > 0
    return trainer.engine.weights_hash(), output.training_loss


@pytest.mark.workers
@pytest.mark.parametrize(("strategy", "tied"), [("ddp", True), ("zero2", False), ("fsdp", False), ("fsdp", True)])
def test_one_hash_on_any_number_of_workers_and_the_losses_of_all_logits(
    strategy: str, tied: bool, tmp_path: Path
) -> None:
    ask = {"tied": tied, "chunked_loss": True}
    (alone,) = run_workers(trained, 1, folder=str(tmp_path / "1"), **ask)
    assert alone.error is None, alone.traceback
    for result in run_workers(trained, 2, folder=str(tmp_path / "2"), strategy=strategy, **ask):
        assert result.error is None, result.traceback
        assert result.value == alone.value
    (plain,) = run_workers(trained, 1, folder=str(tmp_path / "plain"), tied=tied)
    assert plain.value[1] == pytest.approx(alone.value[1], rel=1e-5)
    assert plain.value[0] != alone.value[0]  # another order of rounding: it was really on


def test_a_model_that_does_more_with_its_logits_is_refused() -> None:
    """Its logits are capped by tanh; a factor, as in other families, does the hidden states no harm."""
    config = transformers.Gemma2Config(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, final_logit_softcapping=0.5,
    )  # fmt: skip
    torch.manual_seed(1)
    model = transformers.Gemma2ForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight.mul_(20)
    with pytest.raises(ConfigError, match=r"Gemma2ForCausalLM's own loss of 16 tokens is .* leave chunked_loss out"):
        ChunkedLoss(model)
    assert "forward" not in model.lm_head.__dict__


@pytest.mark.parametrize(
    ("model", "settings", "told"),
    [
        (lambda: nn.Linear(2, 2), {}, "a causal language model of transformers with a linear head, and Linear is none"),
        (llama, {"label_smoothing_factor": 0.1}, "which label_smoothing_factor and compute_loss_func need"),
    ],
)
def test_what_has_no_logits_to_leave_out_is_told_so(model: Any, settings: Any, told: str, tmp_path: Path) -> None:
    arguments = TrainingArguments(
        str(tmp_path), use_cpu=True, chunked_loss=True, max_steps=1, report_to="none", **settings
    )
    with pytest.raises(ConfigError, match=told):
        Trainer(model(), arguments, train_dataset=texts(8), world=World()).train()


def test_where_it_is_not_asked_for_a_model_that_can_t_has_its_own_loss() -> None:
    model, told = nn.Linear(2, 2), []
    with LossRule(model).in_chunks(model, compile=False, needed=False, tell=told.append):
        pass
    causal = llama()
    with LossRule(causal).in_chunks(causal, compile=False, needed=False, tell=told.append):
        pass
    assert told == ["paceline: LlamaForCausalLM has its loss made of 1,048,576 rows of logits at a time (chunked_loss)"]


@pytest.mark.parametrize(
    ("device", "asked", "on"), [("cuda", None, True), ("cuda", False, False), ("cpu", None, False), ("cpu", True, True)]
)
def test_by_default_it_is_for_gpus(device: str, asked: bool | None, on: bool, tmp_path: Path) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    arguments = TrainingArguments(
        str(tmp_path), use_cpu=device == "cpu", chunked_loss=asked, max_steps=1, report_to="none", save_strategy="no"
    )

    class Watch(TrainerCallback):
        def on_step_end(self, *given: Any, **named: Any) -> None:
            assert (trainer.loss_rule._chunked is not None) is on

    trainer = Trainer(llama(), arguments, train_dataset=texts(8), world=World(), callbacks=[Watch()])
    trainer.train()
    assert trainer.state.global_step == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_who_looks_at_logits_has_them_on_a_gpu_too(tmp_path: Path) -> None:
    seen: list[int] = []

    class Looks(Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **named: Any) -> Any:
            outputs = model(**inputs)
            seen.append(outputs.logits.shape[-1])
            return (outputs.loss, outputs) if return_outputs else outputs.loss

    arguments = TrainingArguments(str(tmp_path), max_steps=1, report_to="none", save_strategy="no")
    Looks(llama(), arguments, train_dataset=texts(8), world=World()).train()
    assert set(seen) == {VOCABULARY}
