"""Models under context parallelism: losses and gradients of one process, and no wrong numbers without an error."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from paceline import World
from paceline.context_parallel import ContextParallel, next_tokens
from paceline.errors import ConfigError
from tests.collectives.shared_memory.ranks import torch_distributed
from tests.context_parallel.test_attention import values_of
from tests.workers import run_workers

pytestmark = pytest.mark.workers

WIDTH, HEADS, VOCABULARY, LENGTH = 16, 2, 23, 32


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.options: dict[str, Any] = {"is_causal": True}

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return self.out(self.attend(q, k, v).transpose(1, 2).flatten(2))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, **self.options)


class EagerAttention(Attention):
    """Which no route sees."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = (q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        return scores.masked_fill(later, -torch.inf).softmax(-1) @ v


class Block(nn.Module):
    def __init__(self, attention: type[Attention] = Attention) -> None:
        super().__init__()
        self.attention, self.mlp = attention(), nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU())
        self.down, self.norm = nn.Linear(2 * WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.down(self.mlp(x))


class Model(nn.Module):
    def __init__(self, *attentions: type[Attention]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList([Block(attention) for attention in attentions or (Attention, Attention)])
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.recompute: bool | None = None  # None: nothing; otherwise whether by a reentrant autograd

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        shift_labels: Tensor | None = None,
    ) -> dict[str, Tensor]:
        x = self.tokens(input_ids) + self.places(self.positions(input_ids, position_ids))
        for block in self.blocks:
            x = block(x) if self.recompute is None else checkpoint(block, x, use_reentrant=self.recompute)
        logits = self.mixed(self.head(x))
        if shift_labels is None and labels is not None:
            shift_labels = next_tokens(labels)
        if shift_labels is None:
            return {"logits": logits}
        return {"loss": F.cross_entropy(logits.flatten(0, 1), shift_labels.flatten()), "logits": logits}

    def positions(self, input_ids: Tensor, position_ids: Tensor | None) -> Tensor:
        return torch.arange(input_ids.shape[1]) if position_ids is None else position_ids

    def mixed(self, logits: Tensor) -> Tensor:
        return logits


class WithoutPositions(Model):
    def positions(self, input_ids: Tensor, position_ids: Tensor | None) -> Tensor:
        return torch.arange(input_ids.shape[1])


class WithAMean(Model):
    def mixed(self, logits: Tensor) -> Tensor:
        return logits - logits.mean(1, keepdim=True)


def batch(rows: int = 2) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(VOCABULARY, (rows, LENGTH), generator=generator)
    labels = torch.where(torch.rand(ids.shape, generator=generator) < 0.4, -100, ids)
    labels[:, 12:] = torch.where(torch.arange(LENGTH - 12) < 8, -100, labels[:, 12:])  # some workers have few targets
    return {"input_ids": ids, "labels": labels}


def gradients(model: nn.Module) -> Tensor:
    return torch.cat([torch.zeros(p.numel()) if p.grad is None else p.grad.flatten() for p in model.parameters()])


def of_one_process(model: nn.Module, given: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    alone = copy.deepcopy(model)
    loss = alone(**given)["loss"]
    loss.backward()
    return loss.detach(), gradients(alone)


def over_the_group(cp: ContextParallel, model: nn.Module, given: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Loss and gradients, added up over the group as an engine does it."""
    cp.attach(model)
    part, count = cp.shard(given)
    loss = count.finite(model(**part)["loss"]) * count.weight(1.0)
    loss.backward()
    cp.close()
    total, whole = loss.detach().clone(), gradients(model)
    dist.all_reduce(total)
    dist.all_reduce(whole)
    return total, whole


def errors_of(cp: ContextParallel, model: nn.Module, given: dict[str, Tensor]) -> tuple[float, float]:
    (loss, grads), (their_loss, their_grads) = of_one_process(model, given), over_the_group(cp, model, given)
    largest = (grads - their_grads).abs().max() / grads.abs().max()
    return float((loss - their_loss).abs() / loss), float(largest)


def trains_torch_models(world: World) -> dict[str, tuple[float, float]]:
    found = {}
    with torch_distributed(world):
        for recompute in (None, False, True):
            model = Model()
            model.recompute = recompute
            found[f"recompute {recompute}"] = errors_of(ContextParallel(), model, batch())
        full = Model()
        for block in full.blocks:
            block.attention.options = {}
        found["full"] = errors_of(ContextParallel(), full, batch())
        cp, given = ContextParallel(), batch()
        given["labels"][:, : LENGTH - 4] = -100  # all of one worker
        found["few"] = errors_of(cp, Model(), given)
    return found


@pytest.mark.parametrize("size", [1, 2, 4])
def test_loss_and_gradients_are_those_of_one_process(size: int) -> None:
    for found in values_of(run_workers(trains_torch_models, size)):
        assert max(max(errors) for errors in found.values()) < 1e-5, found


def refusal(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def model_with(**options: Any) -> Model:
    model = Model()
    model.blocks[1].attention.options = {"is_causal": True, **options}
    return model


def is_refused(world: World) -> dict[str, str]:
    found = {}
    with torch_distributed(world):
        cases: dict[str, Callable[[], nn.Module]] = {
            "no route": lambda: Model(EagerAttention),
            "mask": lambda: model_with(attn_mask=torch.ones(LENGTH, LENGTH).tril().bool(), is_causal=False),
            "dropout": lambda: model_with(dropout_p=0.1),
            "torch's layer": lambda: nn.Sequential(nn.TransformerEncoderLayer(WIDTH, HEADS)),
        }
        for name, make in cases.items():
            cp, model = ContextParallel(), make()
            found[name] = refusal(lambda cp=cp, model=model: (cp.attach(model), model(**cp.shard(batch())[0])))
            cp.close()
            assert "forward" not in model.__dict__
    return found


def test_attention_that_would_be_wrong_is_refused_in_the_first_forward() -> None:
    expected = {
        "no route": "a forward of Model had no attention over the group",
        "mask": "scaled_dot_product_attention got an attn_mask of shape (32, 32)",
        "dropout": "attention dropout of 0.1 is not supported",
        "torch's layer": "the model has one at '0'",
    }
    for found in values_of(run_workers(is_refused, 2)):
        for name, text in expected.items():
            assert text in found[name], found[name]
            assert found[name].startswith("ConfigError: context parallel: ")
            assert "\n" not in found[name]


def is_checked(world: World) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with torch_distributed(world):
        for name, make in MODELS.items():
            cp, model = ContextParallel(), make()
            cp.attach(model)
            model.train()
            state = torch.get_rng_state()
            with warnings.catch_warnings(action="error"):
                try:
                    checked = cp.check(model, batch())
                    assert checked is not None
                    found[name] = (checked.error, checked.without_routes)
                except (ConfigError, UserWarning) as error:
                    found[name] = f"{type(error).__name__}: {error}"
            assert torch.equal(torch.get_rng_state(), state)
            assert model.training
            cp.close()
    return found


def checks_few_tokens(world: World) -> tuple[float, float]:
    """Two of each worker, none of which is a target."""
    with torch_distributed(world):
        cp, model = ContextParallel(), Model()
        cp.attach(model)
        few = {name: value[:, : 2 * world.size] for name, value in batch().items()}
        few["labels"] = torch.full_like(few["labels"], -100)
        checked = cp.check(model, few)
        assert checked is not None
        return checked.error, checked.without_routes


def test_short_sequences_without_targets_are_checked_too() -> None:
    for error, without in values_of(run_workers(checks_few_tokens, 2)):
        assert error < 1e-5 < 1e-2 < without


def zero_projections() -> Model:
    model = Model()
    for block in model.blocks:
        nn.init.zeros_(block.attention.out.weight)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "right": Model,
    "right in bfloat16": lambda: Model().bfloat16(),
    "one block of two": lambda: Model(Attention, EagerAttention),
    "positions": WithoutPositions,
    "mean": WithAMean,
    "blind": zero_projections,
}


def test_a_model_whose_split_differs_from_its_whole_is_refused() -> None:
    for found in values_of(run_workers(is_checked, 2)):
        error, without = found["right"]
        assert error < 1e-5 < 1e-2 < without, found
        error, without = found["right in bfloat16"]
        assert error < 3e-2 < without, found
        for name in ("one block of two", "positions", "mean"):
            assert "gives other values for a split sequence than for a whole one" in found[name], (name, found)
        assert "tokens have no visible effect on others" in found["blind"]


# -- transformers ------------------------------------------------------------------------------------------------------


def llama(**options: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": VOCABULARY}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": LENGTH}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, initializer_range=0.3, **options))


def mistral(**options: Any) -> Any:
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(1)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "vocab_size": VOCABULARY}
    return MistralForCausalLM(MistralConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, **options))


def runs_transformers(world: World) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with torch_distributed(world):
        plain = llama()
        found["sdpa"] = errors_of(ContextParallel(), plain, batch())
        assert plain.config._attn_implementation == "sdpa"
        found["eager"] = errors_of(ContextParallel(), llama(attn_implementation="eager"), batch())
        recomputed = llama()
        recomputed.gradient_checkpointing_enable()
        found["recomputed"] = errors_of(ContextParallel(), recomputed.train(), batch())
        padded = batch() | {"attention_mask": torch.ones(2, LENGTH, dtype=torch.long)}
        padded["attention_mask"][1, 25:], padded["labels"][1, 25:] = 0, -100
        found["padded"] = errors_of(ContextParallel(), llama(), padded)
        cp, model = ContextParallel(), llama()
        cp.attach(nn.ModuleList([model]))
        assert "paceline" not in model.config.to_json_string()
        cp.close()
        cp.attach(model)
        checked = cp.check(model, batch())
        assert checked is not None
        found["checked"] = (checked.error, checked.without_routes)
        padded["attention_mask"][0, 3:], padded["labels"][0, 3:] = 0, -100  # what padding sees is no result
        cp.check(model, padded)
        found["copy"] = refusal(lambda: copy.deepcopy(model)(**cp.shard(batch())[0]))
        found["own labels"] = float(model(**(cp.shard(batch())[0] | {"shift_labels": None})).loss)
        found["window"] = _refused_by(mistral(sliding_window=8))
        found["no window"] = errors_of(ContextParallel(), mistral(sliding_window=None), batch())
        found["dropout"] = _refused_by(llama(attention_dropout=0.1).train())
    return found


def _refused_by(model: Any) -> str:
    cp = ContextParallel()
    cp.attach(model)
    return refusal(lambda: model(**cp.shard(batch())[0]))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_models_of_transformers_are_routed_by_their_attention_interface() -> None:
    pytest.importorskip("transformers")
    models = tuple(f"transformers.models.{name}.modeling_{name}" for name in ("llama", "mistral"))
    for found in values_of(run_workers(runs_transformers, 2, timeout_s=80, imports=models)):
        for name in ("sdpa", "eager", "recomputed", "padded", "no window"):
            assert max(found[name]) < 1e-5, (name, found)
        assert found["checked"][0] < 1e-5 < 1e-2 < found["checked"][1]
        assert "that is no part of the attached model" in found["copy"]
        assert found["own labels"] != found["own labels"], "a model that shifts labels once more must not give a number"
        assert "sliding window of 8 tokens" in found["window"]
        assert "attention dropout of 0.1 is not supported" in found["dropout"]
