"""Outputs that hold several things: the built-in losses and accuracies take the prediction, and nothing else."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from shoal.engine.loss import cross_entropy, prediction_in, squared_error, with_prediction
from shoal.errors import UserCodeError


@dataclass
class Both:
    loss: Tensor | None
    logits: Tensor
    states: Tensor


@dataclass
class Single:
    scores: Tensor
    note: str = "none"


class Pair(NamedTuple):
    scores: Tensor
    states: Tensor


LOGITS = torch.randn(4, 3, generator=torch.Generator().manual_seed(1))
OTHER, TARGETS = torch.zeros(4, 7), torch.tensor([0, 2, 1, 1])
FORMS = {
    "tensor": LOGITS,
    "dictionary": {"states": OTHER, "logits": LOGITS},
    "mapping of one tensor": OrderedDict(scores=LOGITS, note="x"),
    "dataclass": Both(None, LOGITS, OTHER),
    "dataclass of one tensor": Single(LOGITS),
    "tuple": (LOGITS, OTHER),
    "tuple behind a missing loss": (None, LOGITS, OTHER),
    "list": [LOGITS, OTHER],
    "named tuple": Pair(LOGITS, OTHER),
}


@pytest.mark.parametrize("form", FORMS)
def test_the_loss_is_that_of_the_prediction(form: str) -> None:
    assert torch.equal(cross_entropy(FORMS[form], TARGETS), cross_entropy(LOGITS, TARGETS))
    assert torch.equal(squared_error(FORMS[form], torch.ones(4, 3)), squared_error(LOGITS, torch.ones(4, 3)))


@pytest.mark.parametrize("form", FORMS)
def test_a_prediction_is_put_in_place_and_the_rest_stays(form: str) -> None:
    """The outputs that the model returned are left as they are."""
    changed = with_prediction(FORMS[form], LOGITS + 1)
    assert type(changed) is type(FORMS[form])
    assert torch.equal(prediction_in(changed), LOGITS + 1)  # type: ignore[arg-type]
    assert prediction_in(FORMS[form]) is LOGITS
    if isinstance(changed, Both):
        assert changed.states is OTHER


@pytest.mark.parametrize("outputs", [{"a": LOGITS, "b": OTHER}, Pair, None, {}, ("x",)])
def test_outputs_without_a_prediction_are_refused_by_their_names(outputs: object) -> None:
    assert prediction_in(outputs) is None
    with pytest.raises(UserCodeError, match=r"the model returned a .* cross-entropy needs logits"):
        cross_entropy(outputs, TARGETS)


def test_the_sentence_names_what_is_there() -> None:
    with pytest.raises(UserCodeError, match=r"a dict of a, b for targets a tensor \(4,\)"):
        cross_entropy({"a": LOGITS, "b": OTHER}, TARGETS)
