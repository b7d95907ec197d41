"""What of a user's model can be trained."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from shoal.assembly.trainable import require_trainable
from shoal.errors import UserCodeError


class TrainsItself(nn.Linear):
    """As in PyTorch's example of the forward-forward algorithm."""

    def train(self, positive: Any, negative: Any) -> Any:  # type: ignore[override]
        return positive, negative


class KeepsNorms(nn.Linear):
    """As detectors that keep their batch norms in evaluation mode."""

    def train(self, mode: bool = True) -> nn.Module:
        return super().train(mode)


def test_a_module_with_another_train_is_a_sentence() -> None:
    """It could not be brought into training mode; one that does more than PyTorch's can."""
    require_trainable(nn.Sequential(KeepsNorms(2, 2), nn.ReLU()))
    with pytest.raises(UserCodeError, match=r"the module 1 has a method train\(\) of its own, which cannot be called"):
        require_trainable(nn.Sequential(nn.ReLU(), TrainsItself(2, 2)))
