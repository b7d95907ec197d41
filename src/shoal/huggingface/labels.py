"""What the loss of a batch is a mean over, and whether a collator makes the same batch of the same samples.

transformers' models compute the mean of the cross-entropy over the labels that count: those other than -100. A causal
model predicts the label behind each position, so the first label of every sequence is no target. A mean of such means
over microbatches is not the mean over the batch: transformers#34373.

A masked language model's collator draws which tokens it masks. Here the collator only pads, and `Masking` draws in the
loop, whose draws are keyed on the sample: a sample has the same mask in its epoch, whatever batch it is in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy, deepcopy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset
from transformers import DataCollatorForLanguageModeling
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from shoal.errors import UserCodeError
from shoal.models.draw_watch import DrawWatch

IGNORED = -100
TRIED_SAMPLES = 8
"""So many samples are given to a collator to see whether it draws."""


def innermost(model: nn.Module) -> nn.Module:
    """The model inside of what `torch.compile` returns, and of adapters of peft."""
    inside: Any = getattr(model, "_orig_mod", model)
    return inside.get_base_model() if hasattr(inside, "get_base_model") else inside


def shifts_labels(model: nn.Module) -> bool:
    """Whether the loss of `model` compares each position with the label behind it."""
    inside = innermost(model)
    if getattr(getattr(inside, "config", None), "is_encoder_decoder", False):
        return False
    known = type(inside).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    return (known or getattr(inside, "loss_type", None) == "ForCausalLM") and _loss_of(inside) is ForCausalLMLoss


def _loss_of(model: nn.Module) -> Any:
    return getattr(model, "loss_function", None)


def label_count(inputs: Mapping[str, Any], model: nn.Module, *, shifted: bool) -> float:
    """How many labels count, of [samples, ...]; how many samples there are, where none is a tensor."""
    labels = inputs.get("shift_labels", inputs.get("labels"))
    if not isinstance(labels, Tensor):
        return float(len(next(value for value in inputs.values() if isinstance(value, Tensor))))
    if shifted and "shift_labels" not in inputs:
        labels = labels[..., 1:]
    counts = labels != IGNORED
    other = getattr(getattr(innermost(model), "config", None), "semantic_loss_ignore_index", None)
    return float((counts if other is None else counts & (labels != other)).sum())


def input_tokens(inputs: Mapping[str, Any], model: nn.Module, *, padding: bool) -> int:
    """Tokens of the model's main input in a batch, those of the padding too or, where a mask tells them, not."""
    mask = None if padding else inputs.get("attention_mask")
    counted = inputs.get(getattr(model, "main_input_name", "input_ids")) if mask is None else mask
    if not isinstance(counted, Tensor):
        return 0
    return counted.numel() if mask is None else int(mask.sum())


def lengths(data: Any) -> list[int]:
    """By which `group_by_length` puts samples together: the column `length`, or the lengths of `input_ids`."""
    columns = getattr(data, "column_names", None) or ()
    if "length" in columns:
        return list(data["length"])
    found = data["input_ids"] if "input_ids" in columns else (sample["input_ids"] for sample in data)
    return [len(tokens) for tokens in found]


class Masking:
    """What `collator` of a masked language model does once it has padded."""

    def __init__(self, collator: DataCollatorForLanguageModeling) -> None:
        self._collator = copy(collator)

    def __call__(self, inputs: Mapping[str, Any], *, seed: int | None = None) -> dict[str, Any]:
        """`inputs` with some tokens masked, and labels for these. `seed`: draws from it, not as the loop does."""
        tokens = inputs["input_ids"]
        self._collator.generator = None if seed is None else torch.Generator().manual_seed(seed)
        masked, labels = self._collator.torch_mask_tokens(tokens.cpu().clone())
        return {**inputs, "input_ids": masked.to(tokens.device), "labels": labels.to(tokens.device)}


def without_masking(collator: Any) -> tuple[Any, Masking | None]:
    """The collator as one that only pads, and its masking; None where it masks no tokens, or whole words."""
    if type(collator) is not DataCollatorForLanguageModeling or not collator.mlm:
        return collator, None
    if getattr(collator, "whole_word_mask", False):
        return collator, None
    return replace(collator, mlm=False, seed=None), Masking(collator)


def require_repeatable(collate: Callable[[list[Any]], Any], data: Any) -> Any:
    """A batch of the first samples; None of an iterable. Raises `UserCodeError` for a collator that draws, such as one
    that masks tokens: what it draws would depend on how the batch is divided among ranks; and for one that cannot put
    samples together.
    """
    if isinstance(data, IterableDataset):
        return None
    items = [data[index] for index in range(min(TRIED_SAMPLES, len(data)))]
    watch = DrawWatch(host=True)
    try:
        first = collate(deepcopy(items))
    except ValueError as error:
        raise UserCodeError(
            f"the data_collator ({_name(collate)}) cannot put {len(items)} samples together: {error}. To pad those of "
            "different lengths, pass processing_class=tokenizer to the Trainer, or "
            "data_collator=DataCollatorWithPadding(tokenizer)"
        ) from error
    if not watch.drew() and _same(first, collate(deepcopy(items))):
        return first
    raise UserCodeError(
        f"the data_collator ({_name(collate)}) draws random numbers for a batch, so that the result would depend on "
        "the number of ranks and a resume would not repeat it: draw in data.augment, which keys what it draws on the "
        "sample, or in the data set, by a generator seeded with the index"
    )


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return type(one) is type(other)


def _name(collate: Any) -> str:
    inside = getattr(collate, "data_collator", collate)
    return getattr(inside, "__name__", type(inside).__name__)
