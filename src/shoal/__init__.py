"""Shoal: distributed deep-learning training on PyTorch.

    import shoal
    shoal.train("run.toml", model=my_module, data=(train_set, held_out_set))

Importing the package imports nothing heavy; `train` does when it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.api import train

__all__ = ["train"]


def __getattr__(name: str) -> Any:
    if name == "train":
        from shoal.api import train

        return train
    raise AttributeError(f"module 'shoal' has no attribute '{name}'")
