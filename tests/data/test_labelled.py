"""Samples with labels, as transformers' data sets have them: what of them is a target, and which labels count."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from shoal.data.batches import read_batch
from shoal.data.build import from_objects
from shoal.data.iterable import without_loaders
from shoal.data.labelled import IGNORED, is_labelled, predicts_next_token, with_labels
from shoal.data.sample import Batch
from shoal.errors import UserCodeError

IDS = np.arange(3)


def tokens(length: int) -> dict:
    return {"input_ids": list(range(length)), "attention_mask": [1] * length, "labels": [7, IGNORED, *range(2, length)]}


def batch_of(data: object, *, next_token: bool) -> Batch:
    made = with_labels(from_objects(without_loaders(data)), next_token=next_token)
    return read_batch(made.train, IDS, IDS, denominator="auto").batch


def test_labels_are_the_targets_and_all_else_is_inputs() -> None:
    """Lists and tensors alike; of shorter samples the padding does not count, nor do labels of -100."""
    batch = batch_of([tokens(4), {k: torch.tensor(v) for k, v in tokens(5).items()}, tokens(3)], next_token=False)
    assert isinstance(batch.inputs, dict)
    assert {*batch.inputs} == {"input_ids", "attention_mask"}
    assert batch.inputs["attention_mask"].sum(1).tolist() == [4, 5, 3]
    assert batch.targets[0].tolist() == [7, IGNORED, 2, 3, 0]
    assert batch.weights.sum(1).tolist() == [3, 4, 2]


def test_a_model_of_the_next_token_gets_labels_moved_by_one() -> None:
    """As transformers moves them: position t has the label of t + 1, and the last has none."""
    batch = batch_of([tokens(4), tokens(5), tokens(3)], next_token=True)
    assert batch.targets[0].tolist() == [IGNORED, 2, 3, IGNORED, 0]
    assert batch.weights[0].tolist() == [0, 1, 1, 0, 0]


@pytest.mark.parametrize("next_token", [False, True])
def test_a_collator_pads_in_its_own_way(next_token: bool) -> None:
    """Its -100 do not count either: the same targets count as without it."""

    def collate(items: list[dict]) -> dict:
        most = max(len(item["labels"]) for item in items)
        fill = {"input_ids": 9, "attention_mask": 0, "labels": IGNORED}
        return {k: torch.tensor([item[k] + [pad] * (most - len(item[k])) for item in items]) for k, pad in fill.items()}

    samples = [tokens(4), tokens(5), tokens(3)]
    own = batch_of(samples, next_token=next_token)
    theirs = batch_of(DataLoader(samples, batch_size=2, collate_fn=collate), next_token=next_token)
    assert torch.equal(own.weights, theirs.weights)
    assert torch.equal(own.targets[own.weights > 0], theirs.targets[own.weights > 0])


def test_whole_samples_with_one_label() -> None:
    """As of a classifier of texts."""
    batch = batch_of([{"input_ids": [1, 2], "labels": n} for n in range(3)], next_token=False)
    assert batch.targets.tolist() == [0, 1, 2]
    assert batch.weights.tolist() == [1, 1, 1]
    with pytest.raises(UserCodeError, match="one number a token"):
        batch_of([{"input_ids": [1, 2], "labels": n} for n in range(3)], next_token=True)


def test_what_is_said_and_what_stays_as_it_was() -> None:
    """Samples of Shoal's own forms are not touched; a mapping that has both is refused as ever."""
    assert "moved by one token" in with_labels(from_objects([tokens(3)]), next_token=True).said_of_targets
    plain = from_objects([(torch.zeros(2), 1)])
    assert with_labels(plain, next_token=True) is plain
    assert not is_labelled({"inputs": 1, "targets": 2, "labels": 3})
    with pytest.raises(UserCodeError, match="keys"):
        batch_of([{"inputs": 1, "targets": 2, "labels": 3}] * 3, next_token=False)


def test_which_models_predict_the_next_token() -> None:
    """By the names of transformers' classes, theirs and their subclasses'."""
    by_name = {name: type(name, (), {})() for name in ("GPT2LMHeadModel", "PeftModelForCausalLM", "BertForMaskedLM")}
    assert [name for name, model in by_name.items() if predicts_next_token(model)] == [
        "GPT2LMHeadModel",
        "PeftModelForCausalLM",
    ]
    assert predicts_next_token(type("Mine", (type(by_name["GPT2LMHeadModel"]),), {})())
