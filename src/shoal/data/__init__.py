"""Data: which sample stands where in a run, and batches of samples, read ahead.

    Order, Cursor    the sample at a position; the positions that are used
    Interval         consecutive positions
    Feed             one replica's microbatches, step by step
    Source, Batch    what a data set is; samples side by side
    Dataset          what a run trains and evaluates on

The names are imported when they are first used: `shoal.data.config` is read where torch is not.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.data.build import Dataset
    from shoal.data.cursor import Cursor, Interval
    from shoal.data.feed import FedStep, Feed
    from shoal.data.order import Order
    from shoal.data.sample import Batch, Source

__all__ = ["Batch", "Cursor", "Dataset", "FedStep", "Feed", "Interval", "Order", "Source"]

_MODULES = {
    "build": ("Dataset",),
    "cursor": ("Cursor", "Interval"),
    "feed": ("FedStep", "Feed"),
    "order": ("Order",),
    "sample": ("Batch", "Source"),
}


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
