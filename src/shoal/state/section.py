"""`Section`: a part of the state of a run, as checkpoints see it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch

from shoal.state.target import Held


class Section(Protocol):
    """Tensors and facts under names of their own."""

    @property
    def name(self) -> str:
        """Where its facts stand in a checkpoint's state."""
        ...

    def tensors(self) -> Mapping[str, Held]:
        """What is saved."""
        ...

    def targets(self, saved: Mapping[str, torch.dtype]) -> Mapping[str, Held]:
        """What a checkpoint that holds `saved` (name and dtype) is read into."""
        ...

    def elsewhere(self, saved: Mapping[str, torch.dtype]) -> set[str]:
        """Those of `saved` that belong to this section and that other ranks fill."""
        ...

    def facts(self) -> dict[str, Any]:
        """What is not a tensor, for JSON."""
        ...

    def load(self, facts: Mapping[str, Any]) -> None:
        """Goes on from what `facts` gave."""
        ...
