"""What a sample may be, and what a batch is.

A data set is anything with `len(d)` and `d[i]`. A sample is `(inputs, targets)`, `(inputs, targets, weights)` or a
mapping with those keys. Inputs and targets are a tensor, an array or a number, or a tuple or dict of such; weights are
one number, or one for each position of the targets. Numbers become float32 and int64, and so do numpy's float64 and
its wider unsigned integers; the dtype of a torch tensor is left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from shoal.errors import UserCodeError

Tree: TypeAlias = "Tensor | tuple[Tree, ...] | dict[str, Tree]"
KEYS = ("inputs", "targets", "weights")
MOST = np.iinfo(np.int64).max
WANTED = "return (inputs, targets), (inputs, targets, weights) or a mapping with those keys"


@runtime_checkable
class Source(Protocol):
    """A map-style data set: sample ids are 0 .. len - 1."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


@runtime_checkable
class BatchSource(Source, Protocol):
    """A source that reads many samples of equal shape at once, which spares Python's cost for each."""

    def samples_at(self, ids: np.ndarray) -> Any:
        """What `d[i]` returns, but with a leading dim for `ids` (int64 [samples]) on every leaf."""
        ...


@runtime_checkable
class Collates(Protocol):
    """A source whose samples are put side by side in a way of its own. They are items of any kind until then."""

    def item_at(self, index: int) -> Any:
        """The sample, as whoever augments it takes it."""
        ...

    def collated(self, items: Sequence[Any]) -> Any:
        """The items side by side: what `d[i]` returns, but with a leading dim for the items on every leaf."""
        ...


@runtime_checkable
class SkipsSamples(Protocol):
    """A source that says of a sample that raises DataError whether it is left out."""

    def skips(self, index: int) -> bool: ...


@dataclass(frozen=True)
class Sample:
    """A sample, or several stacked ones, as tensors. `pads`: its inputs may be made as long as those of others."""

    inputs: Tree
    targets: Tree
    weights: Tensor | None
    pads: bool = True


@dataclass(frozen=True)
class Batch:
    """Samples side by side: every tensor in it has the leading dim `samples`.

    The loss of a step is sum(losses * weights) / (sum of weights over the whole global batch). `weights` is [samples]
    or the shape of the targets; `positions` (int64 [samples]) are the samples' places in the run.
    """

    inputs: Tree
    targets: Tree
    weights: Tensor
    positions: Tensor

    def __len__(self) -> int:
        return len(self.positions)

    @cached_property
    def real_samples(self) -> int:
        """Its samples without those that are made up."""
        return int((as_numbers(self.positions) >= 0).sum())

    @cached_property
    def weight(self) -> float:
        """This batch's part of the denominator, summed in float64."""
        return float(self.weights.numel() if self.weighs_ones else self.weights.sum(dtype=torch.float64))

    @cached_property
    def tokens(self) -> int:
        """Its target positions of positive weight; 0 where samples are weighed, and not tokens."""
        if self.weights.ndim < 2:
            return 0
        return self.weights.numel() if self.weighs_ones else int(torch.count_nonzero(self.weights))

    def count(self) -> Batch:
        """Itself, with the sums that a step asks for: whoever reads ahead makes them while the step before trains."""
        _ = self.real_samples, self.weight, self.tokens, self.weighs_ones
        return self

    @cached_property
    def weighs_ones(self) -> bool:
        """Is every weight 1? Of tensors without numbers, on which a plan traces a step, nobody knows."""
        return type(self.weights) is Tensor and bool((as_numbers(self.weights) == 1).all())

    def pinned(self) -> Batch:
        """The same batch in memory that a GPU reads by itself, while the host goes on."""
        inputs, targets = map_tree(Tensor.pin_memory, self.inputs), map_tree(Tensor.pin_memory, self.targets)
        return Batch(inputs, targets, weights=self.weights.pin_memory(), positions=self.positions.pin_memory())

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Batch:
        """The same batch on `device`."""

        def move(leaf: Tensor) -> Tensor:
            return leaf.to(device, non_blocking=non_blocking)

        inputs, targets = map_tree(move, self.inputs), map_tree(move, self.targets)
        return Batch(inputs, targets, weights=move(self.weights), positions=move(self.positions))


def as_numbers(tensor: Tensor) -> Any:
    """For a look at a few numbers: NumPy's array of the same memory, which answers faster, where there is one."""
    plain = type(tensor) is Tensor and tensor.is_cpu and tensor.dtype in (torch.float32, torch.float64, torch.int64)
    return tensor.detach().numpy() if plain else tensor


PADDING_POSITION = -1
"""Where a sample stands that is made up."""


def padding_like(batch: Batch, samples: int) -> Batch:
    """`samples` copies of the first sample that weigh nothing."""
    repeat = lambda leaf: leaf[:1].expand(samples, *leaf.shape[1:])  # noqa: E731
    return Batch(
        map_tree(repeat, batch.inputs),
        map_tree(repeat, batch.targets),
        weights=torch.zeros_like(repeat(batch.weights)),
        positions=torch.full((samples,), PADDING_POSITION),
    )


def map_tree(function: Callable[[Tensor], Tensor], tree: Tree) -> Tree:
    """`function` of every tensor of `tree`, in the same structure."""
    if isinstance(tree, tuple):
        return tuple(map_tree(function, branch) for branch in tree)
    if isinstance(tree, dict):
        return {key: map_tree(function, branch) for key, branch in tree.items()}
    return function(tree)


def leaves(*trees: object) -> list[Tensor]:
    """The leaves in the order in which `map_tree` visits them."""
    found: list[Tensor] = []
    for tree in trees:
        map_tree(lambda leaf: found.append(leaf) or leaf, tree)  # type: ignore[arg-type]
    return found


def first_leaf(tree: Any) -> Tensor:
    """The first tensor of `tree`, such as the tokens among the inputs of a language model. Of a tree that has none, one
    without dims.
    """
    found = _first(tree)
    return torch.zeros(()) if found is None else found


def _first(tree: Any) -> Tensor | None:
    if isinstance(tree, Tensor):
        return tree
    branches = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, tuple) else ()
    return next((leaf for branch in branches if (leaf := _first(branch)) is not None), None)


def parse_sample(raw: Any) -> Sample:
    """What a data set returned, as tensors.

    Raises:
        UserCodeError: it is not of the forms above; the message says what came.
    """
    if isinstance(raw, Sample):
        return raw
    if isinstance(raw, Mapping):
        parts = _parts_of_mapping(raw)
    elif isinstance(raw, tuple) and len(raw) in (2, 3):
        parts = dict(zip(KEYS, raw, strict=False))
    else:
        pair = "; data=(a, b) is training and held-out data, TensorDataset(a, b) pairs inputs with targets"
        raise UserCodeError(f"The data set returned {describe(raw)}: {WANTED}{pair if hasattr(raw, 'shape') else ''}.")
    inputs, targets = (as_tree(parts[name], name) for name in KEYS[:2])
    if len(parts) == 2:
        return Sample(inputs, targets, weights=None)
    return Sample(inputs, targets, weights=_as_weights(parts["weights"], targets))


def describe(value: Any) -> str:
    """What `value` is, in a few words: its type, with the length or shape where it has one."""
    kind = type(value).__name__
    article = "an" if kind[0] in "aeiouAEIOU" else "a"
    if value is None:
        return "None"
    if isinstance(value, str | bytes):
        return f"{article} {kind}, {value[:20]!r}"
    if hasattr(value, "shape"):
        return f"one {kind} of shape {tuple(value.shape)}"
    return f"{article} {kind} of {len(value)}" if hasattr(value, "__len__") else f"{article} {kind}"


def _parts_of_mapping(raw: Mapping[str, Any]) -> dict[str, Any]:
    missing = [key for key in KEYS[:2] if key not in raw]
    unknown = [key for key in raw if key not in KEYS]
    if missing or unknown:
        raise UserCodeError(f"The data set returned a mapping with the keys {list(raw)}: {WANTED}.")
    return dict(raw)


def as_tree(value: Any, name: str) -> Tree:
    """`value`, the `name` of a sample, as tensors. Raises `UserCodeError` where it is none and holds none."""
    if isinstance(value, tuple) and value:
        return tuple(as_tree(branch, f"{name}[{index}]") for index, branch in enumerate(value))
    if isinstance(value, Mapping) and value:
        return {str(key): as_tree(branch, f"{name}[{key!r}]") for key, branch in value.items()}
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, np.ndarray | np.generic | bool | int | float):
        return _from_numpy(np.asarray(value), name)
    raise UserCodeError(
        f"The data set's {name} is {describe(value)}: it must be a tensor, an array or a number, or a tuple or dict of "
        "those."
    )


def _from_numpy(array: np.ndarray, name: str) -> Tensor:
    if array.dtype.kind not in "fiub":
        raise UserCodeError(f"The data set's {name} has dtype {array.dtype}: it must hold numbers or booleans.")
    if array.dtype in (np.float64, np.longdouble):
        array = array.astype(np.float32)
    elif array.dtype == np.uint64 and array.size and array.max() > MOST:
        raise UserCodeError(f"The data set's {name} holds {array.max()}, more than an int64 can: make it smaller.")
    elif array.dtype in (np.uint16, np.uint32, np.uint64):
        array = array.astype(np.int64)
    native = array.astype(array.dtype.newbyteorder("="), copy=not array.flags.writeable)
    return torch.from_numpy(np.ascontiguousarray(native).reshape(array.shape))


def _as_weights(value: Any, targets: Tree) -> Tensor:
    weights = as_tree(value, "weights")
    if not isinstance(weights, Tensor):
        raise UserCodeError(f"The data set's weights are {describe(value)}: give one number, or one per position.")
    if isinstance(targets, Tensor) and weights.shape != targets.shape[: weights.ndim]:
        raise UserCodeError(
            f"The data set's weights have shape {tuple(weights.shape)} and its targets {tuple(targets.shape)}: give "
            "one number, or one per position."
        )
    weights = weights if weights.is_floating_point() else weights.float()
    if not bool((torch.isfinite(weights) & (weights >= 0)).all()):
        raise UserCodeError("The data set's weights are not all finite and at least 0: mend them, they scale the loss.")
    return weights
