"""What a model returns, and the prediction in it that built-in losses and accuracies are taken of.

A model may return a tensor, or several things of which one is the prediction:

    a mapping or dataclass     its `logits`, else its only tensor          (also transformers' `ModelOutput`)
    a tuple or list            its first tensor

A user's own loss gets the outputs as they are.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any, cast

from torch import Tensor

PREDICTION = "logits"


def prediction_in(outputs: Any) -> Tensor | None:
    """The prediction; None where nothing says which tensor it is."""
    if isinstance(outputs, Tensor):
        return outputs
    if isinstance(outputs, tuple | list):
        return next((entry for entry in outputs if isinstance(entry, Tensor)), None)
    key = _key_in(outputs)
    return None if key is None else _named(outputs)[key]


def with_prediction(outputs: Any, prediction: Tensor) -> Any:
    """`outputs` with another prediction in its place, such as one that is whole where a rank had a part."""
    if isinstance(outputs, Tensor):
        return prediction
    if isinstance(outputs, tuple | list):
        place = next(index for index, entry in enumerate(outputs) if isinstance(entry, Tensor))
        changed = [*outputs[:place], prediction, *outputs[place + 1 :]]
        make: Any = getattr(outputs, "_make", list if isinstance(outputs, list) else tuple)
        return make(changed)
    key = _key_in(outputs)
    assert key is not None, "outputs without a prediction"
    if dataclasses.is_dataclass(outputs) and not isinstance(outputs, type):
        return dataclasses.replace(outputs, **{key: prediction})
    twin = cast(Any, copy.copy(outputs))
    twin[key] = prediction
    return twin


def described(outputs: Any) -> str:
    """The outputs for a message: the shape of a tensor, the names of what is in a mapping or dataclass."""
    if isinstance(outputs, Tensor):
        return f"a tensor {tuple(outputs.shape)}"
    names = ", ".join(map(str, _named(outputs)))
    return f"a {type(outputs).__name__}{f' of {names}' if names else ''}"


def _key_in(outputs: Any) -> str | None:
    tensors = [name for name, entry in _named(outputs).items() if isinstance(entry, Tensor)]
    if PREDICTION in tensors:
        return PREDICTION
    return tensors[0] if len(tensors) == 1 else None


def _named(outputs: Any) -> dict[str, Any]:
    if isinstance(outputs, Mapping):
        return dict(outputs)
    if dataclasses.is_dataclass(outputs) and not isinstance(outputs, type):
        return {field.name: getattr(outputs, field.name) for field in dataclasses.fields(outputs)}
    return {}
