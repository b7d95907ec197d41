"""Samples in the style of transformers' data sets: a mapping with `labels` among the model's inputs.

    {"input_ids": [n], "attention_mask": [n], "labels": [n]}   the labels are the targets, all else the model's inputs

A model that predicts the next token compares its output at position t with the label at t + 1. Such a model of
transformers moves the labels itself where it computes its own loss, as a mean over whatever samples it was given. Here
the loss is computed from its logits, one value a token, so that it is averaged over the whole global batch; the labels
are moved when a sample is read, before anybody counts which of them are left out (-100).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.data.collate import IGNORED
from shoal.data.dataset import TARGETS, Dataset
from shoal.data.inputs import AsInputs
from shoal.data.iterable import CollatedSamples
from shoal.data.sample import KEYS, Sample, Source, as_tree
from shoal.errors import UserCodeError

LABELS = "labels"
_NEXT_TOKEN = ("ForCausalLM", "LMHeadModel")
"""How the names of transformers' classes end that predict the next token."""


SAME_TOKEN = "the labels of each sample are its targets"
NEXT_TOKEN = f"{SAME_TOKEN}, moved by one token"


class Labelled:
    """`source`, whose samples have labels; `next_token`: those of position t + 1 are the targets of position t."""

    def __init__(self, source: Source, *, next_token: bool) -> None:
        self.source, self.next_token = source, next_token

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Sample:
        """Raises `UserCodeError` for a sample that is no such mapping."""
        return self.read(self.source[index])

    def read(self, raw: Any) -> Sample:
        """A sample, or several that were put side by side."""
        if not is_labelled(raw):
            raise UserCodeError("The data set returned labels with its first sample alone: return them with each.")
        inputs = {str(key): as_tree(_array(value), key) for key, value in raw.items() if key != LABELS}
        labels = as_tree(_array(raw[LABELS]), LABELS)
        return Sample(inputs, _next(labels, raw) if self.next_token else labels, weights=None)


def with_labels(data: Dataset, *, next_token: bool) -> Dataset:
    """The data, where its samples have `labels` as those of transformers' data sets do: with these as the targets."""
    if isinstance(data.train, AsInputs) or not is_labelled(_first_of(data)):
        return data
    held_out = None if data.held_out is None else _labelled(data.held_out, next_token)
    facts = {**data.facts, TARGETS: NEXT_TOKEN if next_token else SAME_TOKEN}
    return replace(data, train=_labelled(data.train, next_token), held_out=held_out, facts=facts)


def _labelled(source: Source, next_token: bool) -> Source:
    if isinstance(source, CollatedSamples):
        return CollatedSamples(source.source, source.collate, Labelled(source.source, next_token=next_token).read)
    return Labelled(source, next_token=next_token)


def _first_of(data: Dataset) -> Any:
    """The first sample as it comes; None where it cannot be read, which whoever reads it next will say."""
    try:
        if isinstance(data.train, CollatedSamples):
            return data.train.collate([data.train.source[0]])
        return next(iter(data.iterable.first(1)), None) if data.iterable is not None else data.train[0]
    except Exception:
        return None


def is_labelled(raw: Any) -> bool:
    """Whether a sample is a mapping with labels and, beside them, inputs under other names than Shoal's own."""
    return isinstance(raw, Mapping) and LABELS in raw and len(raw) > 1 and not {*raw} & {*KEYS}


def predicts_next_token(model: object) -> bool:
    """Whether a class of `model` is one of transformers' that predict the next token, or of PEFT's around one."""
    names = [kind.__name__ for kind in type(model).__mro__]
    return getattr(model, "loss_type", None) == "ForCausalLM" or any(name.endswith(_NEXT_TOKEN) for name in names)


def _array(value: Any) -> Any:
    return np.asarray(value) if isinstance(value, list) else value


def _next(labels: Any, raw: Mapping[str, Any]) -> Any:
    """Labels [..., tokens] moved to the left by one; nothing follows the last."""
    if not isinstance(labels, Tensor) or labels.ndim == 0:
        raise UserCodeError(
            "The model predicts the next token, and the labels of a sample are not one number a token; the sample has "
            f"{', '.join(map(str, raw))}."
        )
    return torch.cat([labels[..., 1:], labels.new_full((*labels.shape[:-1], 1), IGNORED)], dim=-1)
