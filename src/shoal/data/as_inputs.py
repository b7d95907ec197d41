"""Data sets of a user's own loop: whatever a sample is, it is all inputs, and what is a target the loop knows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from shoal.data.packed import as_rows, hosted
from shoal.data.sample import Sample, Source, as_tree


class AsInputs:
    """`source`, each sample as inputs that count once: a tensor, an array, a number, a text or bytes, or a tuple, list,
    dict or dataclass of them and of None.

    Raises `UserCodeError` where a sample is something else.
    """

    def __init__(self, source: Source) -> None:
        self.source = source

    def reading(self, source: Source) -> AsInputs:
        """The same of another source."""
        return AsInputs(source)

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Sample:
        item = self.source[index]
        inputs = as_tree(item if item is None else hosted(item), "sample")  # None is a part, but no sample
        return Sample(inputs, torch.zeros((), dtype=torch.int64), torch.ones(()))


class Collated(AsInputs):
    """The same with the loop's own way to put samples side by side, as `collate_fn` of PyTorch's DataLoader. What it
    returns has a row for each sample, or is carried as it is (`packed.as_rows`).
    """

    def __init__(self, source: Source, collate: Callable[[list[Any]], Any]) -> None:
        super().__init__(source)
        self._collate = collate

    def reading(self, source: Source) -> Collated:
        return Collated(source, self._collate)

    def item_at(self, index: int) -> Any:
        """The sample as the loop's data set returns it, which only `collate` has to understand."""
        return self.source[index]

    def collated(self, items: Sequence[Any]) -> Sample:
        """What `collate` makes of `items`."""
        inputs = as_tree(as_rows(self._collate(list(items)), len(items)), "batch")
        return Sample(inputs, torch.zeros(len(items), dtype=torch.int64), torch.ones(len(items)))
