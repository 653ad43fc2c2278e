"""Models of transformers: whether a mask reaches torch's attention, and that what comes out is the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.engine import causal_masks
from paceline.engine.causal_masks import CausalMasks
from paceline.planner.model_profile import new_fake_mode

transformers = pytest.importorskip("transformers")

SMALL = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 40,
    "max_position_embeddings": 32,
}  # fmt: skip
PADDED = torch.tensor([[1] * 12, [0] * 4 + [1] * 8])


def llama() -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(num_key_value_heads=1, **SMALL))


def gpt2() -> nn.Module:
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 40, "n_positions": 32}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(bos_token_id=0, eos_token_id=0, **sizes))


def bert() -> nn.Module:
    return transformers.BertForMaskedLM(transformers.BertConfig(**SMALL))


def mistral() -> nn.Module:
    """Its layers look back four tokens."""
    config = transformers.MistralConfig(num_key_value_heads=1, sliding_window=4, **SMALL)
    return transformers.MistralForCausalLM(config)


@pytest.fixture
def masks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Whether each call of torch's attention got one."""
    seen: list[bool] = []
    plain = F.scaled_dot_product_attention

    def watched(*given: Any, **named: Any) -> Tensor:
        seen.append(named.get("attn_mask") is not None)
        return plain(*given, **named)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    yield seen
    torch.compiler.reset()


MODELS = [(llama, False), (gpt2, False), (bert, False), (mistral, True)]


@pytest.mark.parametrize(
    ("make", "has_mask", "compiled"),
    [
        *((*model, False) for model in MODELS),
        *(pytest.param(*model, True, marks=pytest.mark.slow) for model in MODELS[1:]),
        (*MODELS[0], True),
    ],
)
def test_a_batch_without_padding_needs_no_mask_unless_the_model_looks_back_a_few_tokens(
    make: Callable[[], nn.Module], has_mask: bool, compiled: bool, masks: list[bool]
) -> None:
    torch.manual_seed(0)
    model, ids = make().eval(), torch.randint(0, 40, (2, 12))
    whole, padded = model(ids).logits, model(input_ids=ids, attention_mask=PADDED).logits
    hooks = CausalMasks([nn.Sequential(model)])
    called: Any = torch.compile(model, backend="aot_eager") if compiled else model

    def masks_of(**given: Tensor) -> tuple[set[bool], Tensor]:
        masks.clear()
        logits = called(**given).logits
        return set(masks), logits

    seen, found = masks_of(input_ids=ids)
    assert seen == {has_mask}
    assert torch.equal(found, whole)
    seen, found = masks_of(input_ids=ids, attention_mask=PADDED)
    assert seen == {True}
    assert torch.allclose(found[PADDED.bool()], padded[PADDED.bool()], atol=1e-6)
    assert torch.equal(masks_of(input_ids=ids)[1], whole)  # after a batch that had one
    hooks.close()
    assert torch.equal(model(input_ids=ids).logits, whole)


def test_packed_sequences_keep_their_mask(masks: list[bool]) -> None:
    torch.manual_seed(0)
    model, ids = llama().eval(), torch.randint(0, 40, (1, 12))
    places = torch.tensor([[0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5]])
    before = model(input_ids=ids, position_ids=places, use_cache=False).logits
    hooks = CausalMasks([model])
    masks.clear()
    assert torch.equal(model(input_ids=ids, position_ids=places, use_cache=False).logits, before)
    assert set(masks) == {True}
    hooks.close()


def t5() -> nn.Module:
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "vocab_size": 40}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(decoder_start_token_id=0, **sizes))


@pytest.mark.parametrize("make", [llama, bert, t5])
@pytest.mark.parametrize("fails", [False, True])
def test_a_model_that_is_called_after_a_prepared_one_keeps_its_padding(
    make: Callable[[], nn.Module], fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a teacher, a reward model: not prepared. One with an encoder and a decoder gets no hooks, were it prepared."""
    torch.manual_seed(0)
    model, other, ids = llama().eval(), make().eval(), torch.randint(0, 40, (2, 12))
    padded = {"input_ids": ids, "attention_mask": PADDED} | ({"decoder_input_ids": ids} if make is t5 else {})
    expected = other(**padded).logits
    hooks = CausalMasks([model, other] if make is t5 else [model])
    if fails:
        monkeypatch.setattr(model.lm_head, "forward", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(input_ids=ids)
    else:
        model(input_ids=ids)
    assert torch.equal(other(**padded).logits, expected)
    hooks.close()


def test_a_mask_by_any_name_is_heeded(masks: list[bool]) -> None:
    class Patches(transformers.LlamaForCausalLM):  # type: ignore[name-defined, misc]
        def forward(self, input_ids: Tensor, attention_mask: Any = None, pixel_attention_mask: Any = None) -> Any:
            both = attention_mask if pixel_attention_mask is None else pixel_attention_mask
            return super().forward(input_ids=input_ids, attention_mask=both)

    torch.manual_seed(0)
    model = Patches(transformers.LlamaConfig(num_key_value_heads=1, **SMALL)).eval()
    ids = torch.randint(0, 40, (2, 12))
    expected = model(ids, pixel_attention_mask=PADDED).logits
    hooks = CausalMasks([model])
    masks.clear()
    assert torch.equal(model(ids, pixel_attention_mask=PADDED).logits, expected)
    assert set(masks) == {True}
    hooks.close()


def test_a_fake_batch_leaves_nothing_behind_for_real_ones() -> None:
    causal_masks._ones.clear()
    mode = new_fake_mode()
    with mode:
        model, ids = llama(), torch.zeros(2, 12, dtype=torch.long)
    hooks = CausalMasks([model])
    with mode:
        model(input_ids=ids)
    hooks.close()
    assert not causal_masks._ones


def test_a_model_of_ones_own_is_left_alone() -> None:
    model = nn.Linear(2, 2)
    CausalMasks([model]).close()
    assert not model._forward_pre_hooks
