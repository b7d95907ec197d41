"""PyTorch's DataLoaders as data: their data sets, and their way to put samples side by side.

Which samples make a batch, and in which order, a run says itself: a loader's batch size and order become keys of the
run file (`shoal.api`, `shoal.own_loop.start`), and what its `collate_fn` makes of a microbatch is taken as it comes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.utils.data import DataLoader, default_collate

from shoal.data.iterable import as_source
from shoal.data.sample import Sample, Source, map_tree, parse_sample


class CollatedSamples:
    """`source`, whose samples `collate` puts side by side: it returns what a sample is, each tensor with a leading dim
    of samples. `read` makes a `Sample` of that.
    """

    def __init__(
        self, source: Source, collate: Callable[[list[Any]], Any], read: Callable[[Any], Sample] = parse_sample
    ) -> None:
        self.source, self.collate, self._read = source, collate, read

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Sample:
        """A batch of this sample alone, without its leading dim."""
        alone = self.collated([self.source[index]])
        first = lambda leaf: leaf[0]  # noqa: E731
        weights = None if alone.weights is None else alone.weights[0]
        return Sample(map_tree(first, alone.inputs), map_tree(first, alone.targets), weights)

    def item_at(self, index: int) -> Any:
        """The sample as the data set returns it, which only `collate` has to understand."""
        return self.source[index]

    def collated(self, items: Sequence[Any]) -> Sample:
        """What `collate` makes of `items`. Raises `UserCodeError` where that is of none of a sample's forms."""
        made = self.collate(list(items))
        return self._read(tuple(made) if isinstance(made, list) else made)


def without_loaders(data: Any) -> Any:
    """`data` with the samples of a DataLoader in its place; of a pair (training, held out) of each of them."""
    if isinstance(data, tuple):
        return tuple(without_loaders(part) for part in data) if any(isinstance(p, DataLoader) for p in data) else data
    if not isinstance(data, DataLoader):
        return data
    if data.collate_fn is default_collate or data.batch_size is None:
        return data.dataset
    return CollatedSamples(as_source(data.dataset), data.collate_fn)


def training_loader(data: Any) -> DataLoader | None:
    """The DataLoader of the training data, alone or of a pair (training, held out); None where it is something else."""
    first = data[0] if isinstance(data, tuple) and data else data
    return first if isinstance(first, DataLoader) else None
