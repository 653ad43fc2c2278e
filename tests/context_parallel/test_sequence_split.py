"""The split of sequences: every token has one worker, one position and one label; work and weights add up."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.context_parallel import SequenceSplit, TargetCount, next_tokens, shard_batch
from paceline.errors import ConfigError

SIZES = (1, 2, 3, 4, 8)


def splits(size: int) -> list[SequenceSplit]:
    return [SequenceSplit(size, rank) for rank in range(size)]


@pytest.mark.parametrize("size", SIZES)
def test_every_token_has_one_worker_and_is_told_its_position(size: int) -> None:
    tokens = torch.randint(1000, (3, 2 * size * 5))
    places = [split.positions(tokens.shape[1]) for split in splits(size)]
    assert sorted(torch.cat(places).tolist()) == list(range(tokens.shape[1]))
    for split, place in zip(splits(size), places, strict=True):
        assert torch.equal(split.take(tokens), tokens[:, place])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dim", [0, 1, -2])
def test_the_parts_of_all_workers_join_to_the_whole(size: int, dim: int) -> None:
    whole = torch.randn(2 * size, 4 * size, 6 * size, 2 * size)
    assert torch.equal(SequenceSplit(size, 0).join([split.take(whole, dim) for split in splits(size)], dim), whole)


@pytest.mark.parametrize("size", SIZES)
def test_causal_attention_is_the_same_work_for_all_workers(size: int) -> None:
    length = 2 * size * 7
    pairs = {int((split.positions(length) + 1).sum()) for split in splits(size)}
    assert len(pairs) == 1, pairs


@pytest.mark.parametrize("size", SIZES)
def test_labels_are_those_of_the_next_token_across_the_borders_of_chunks(size: int) -> None:
    length = 2 * size * 3
    ids = torch.arange(2 * length).view(2, length)
    for split in splits(size):
        part, _ = shard_batch({"input_ids": ids, "labels": ids}, split)
        last = part["position_ids"].expand(2, -1) == length - 1
        assert torch.equal(part["shift_labels"], torch.where(last, -100, part["input_ids"] + 1))
        assert (part["labels"] == -100).all(), "labels that are shifted once more must not look right"


def test_weighted_means_of_workers_add_up_to_the_mean_of_one_process() -> None:
    chance = random.Random(0)
    for _ in range(40):
        size, rows = chance.choice(SIZES), chance.randint(1, 3)
        length = 2 * size * chance.randint(1, 4)
        ids = torch.randint(11, (rows, length))
        labels = torch.where(torch.rand(rows, length) < chance.choice((0.1, 0.6, 0.95)), -100, ids)
        logits = torch.randn(rows, length, 11, dtype=torch.float64, requires_grad=True)
        targets = next_tokens(labels)
        total = 0.0
        if (targets != -100).any():
            whole = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
            (expected,) = torch.autograd.grad(whole, logits)
        else:
            whole, expected = torch.zeros(()), torch.zeros_like(logits)
        weights = 0.0
        for split in splits(size):
            part, count = shard_batch({"input_ids": ids, "labels": labels}, split)
            loss = F.cross_entropy(split.take(logits).flatten(0, 1), part["shift_labels"].flatten())
            scaled = count.finite(loss) * count.weight(1.0)
            scaled.backward()
            total += float(scaled.detach())
            weights += count.weight(8.0)
        assert total == pytest.approx(float(whole.detach()), rel=1e-12)
        assert weights == pytest.approx(8.0 if (targets != -100).any() else 0.0)
        assert logits.grad is not None
        torch.testing.assert_close(logits.grad, expected, rtol=1e-12, atol=1e-14)


def test_a_worker_without_targets_has_a_loss_of_zero_and_gradients_of_zero() -> None:
    logits = torch.randn(4, 5, requires_grad=True)
    loss = F.cross_entropy(logits, torch.full((4,), -100))
    assert loss.isnan()
    found = TargetCount(0, 7).finite(loss)
    found.backward()
    assert found.item() == 0.0
    assert logits.grad is not None
    assert torch.equal(logits.grad, torch.zeros_like(logits))


def test_a_tuple_is_cut_and_nothing_else() -> None:
    x, y = torch.randn(2, 8, 3), torch.tensor([[1, -100, 3, 4, 5, 6, -100, -100], [1, 2, 3, 4, 5, 6, 7, 8]])
    split = SequenceSplit(2, 1)
    part, count = shard_batch((x, y), split)
    assert isinstance(part, tuple)
    assert torch.equal(part[0], x[:, 2:6])
    assert torch.equal(part[1], y[:, 2:6])
    assert count == TargetCount(8, 13)


def test_what_is_no_sequence_stays_as_it_is() -> None:
    batch = {"input_ids": torch.zeros(2, 8, dtype=torch.long), "score": torch.ones(2), "name": "a"}
    part, count = shard_batch(batch, SequenceSplit(2, 0))
    assert part["score"] is batch["score"]
    assert part["name"] == "a"
    assert count.weight(1.0) == 0.5


def test_aligned_labels_are_not_shifted() -> None:
    labels = torch.arange(8).view(1, 8)
    part, count = shard_batch({"input_ids": labels, "labels": labels}, SequenceSplit(2, 0), labels="aligned")
    assert part["labels"].tolist() == [[0, 1, 6, 7]]
    assert "shift_labels" not in part
    assert count == TargetCount(4, 8)


def padded(rows: list[list[int]]) -> dict[str, Tensor]:
    mask = torch.tensor(rows)
    ids = torch.arange(mask.numel()).view_as(mask)
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.where(mask == 1, ids, -100)}


@pytest.mark.parametrize("rows", [[[1, 1, 1, 1]], [[1, 1, 1, 0], [1, 1, 1, 1]]])
def test_a_mask_that_causal_attention_needs_not_is_left_out(rows: list[list[int]]) -> None:
    part, _ = shard_batch(padded(rows), SequenceSplit(2, 0))
    assert "attention_mask" not in part


IDS = torch.zeros(1, 8, dtype=torch.long)
REFUSED: dict[str, tuple[Any, str]] = {
    "length": ({"input_ids": torch.zeros(1, 6, dtype=torch.long)}, "6 tokens can't be cut into 4 equal chunks"),
    "no tokens": ({"input_ids": torch.zeros(1, 0, dtype=torch.long)}, "0 tokens can't be cut into 4 equal chunks"),
    "left padding": (padded([[0, 1, 1, 1]]), "attention_mask masks tokens"),
    "labels under padding": ({**padded([[1, 1, 1, 0]]), "labels": torch.zeros(1, 4)}, "attention_mask masks tokens"),
    "mask of pairs": ({"input_ids": IDS, "attention_mask": torch.ones(1, 1, 8, 8)}, "attention_mask masks tokens"),
    "packed": ({"input_ids": IDS, "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])}, "several are packed"),
    "another length": ({"input_ids": IDS, "images": torch.zeros(1, 5)}, "'images' of the batch has shape (1, 5)"),
    "shifted twice": ({"input_ids": IDS, "labels": IDS, "shift_labels": IDS}, "has shift_labels already"),
    "text": ("a sequence", "a dict, tuple or list of tensors"),
    "no sequence": ({"score": torch.ones(3)}, "no tensor of the batch has two dimensions"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_batch_that_can_not_be_split_is_refused_in_one_line(name: str) -> None:
    batch, text = REFUSED[name]
    with pytest.raises(ConfigError) as refused:
        shard_batch(batch, SequenceSplit(2, 0))
    assert text in str(refused.value)
    assert "\n" not in str(refused.value)


def test_padding_is_not_left_out_where_attention_is_not_causal() -> None:
    with pytest.raises(ConfigError, match="attention_mask masks tokens"):
        shard_batch(padded([[1, 1, 1, 0]]), SequenceSplit(2, 0), labels="aligned")
    with pytest.raises(ConfigError, match="choose next_token or aligned"):
        shard_batch(padded([[1, 1, 1, 1]]), SequenceSplit(2, 0), labels="shifted")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="rank 2 is not one of a group of 2"):
        SequenceSplit(2, 2)
