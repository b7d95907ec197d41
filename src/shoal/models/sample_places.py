"""Where an element of a drawn tensor stands within its sample: what keyed draws count by (`shoal.models.keyed_draws`).

The dimension of samples is found by its length: dim 0, else a dim 0 of all tokens, else dim 1, else a dim 0 that holds
several rows of each. On ranks that hold a part of a sample, `Extent`s say where their slices stand in the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor

from shoal.errors import UserCodeError
from shoal.maths.counter import bits
from shoal.models.laws import Loops

APART = 2**21 + 17
"""Rows of a sample's numbers are so far from each other: those of attention are longer in a batch that is padded to a
longer sample, and draw the same there. Odd, so that rows stay apart modulo 2^64.
"""

SampleKeys = Callable[[], Tensor]
"""Gives the key of each sample of a forward, int64 `[samples]`: asked for where something is drawn."""


class AskedOnce:
    """`SampleKeys` that are computed when something is drawn, and kept."""

    def __init__(self, keys: SampleKeys) -> None:
        self._ask = keys
        self._keys: Tensor | None = None

    def __call__(self) -> Tensor:
        if self._keys is None:
            self._keys = self._ask()
        return self._keys


@dataclass(frozen=True)
class Extent:
    """Slices of a dimension that a rank holds: their places in the whole, int64, and the length of the whole."""

    places: Tensor
    whole: int


@dataclass(frozen=True)
class Inside:
    """What a rank of `tensor` holds between a column and a row layer; `heads` None where features stand alone.

    `features` None: in blocks on a grid, of which a draw cannot know its part.
    """

    features: Extent | None
    heads: Extent | None = None


@dataclass(frozen=True)
class Slices:
    """What a rank holds of each sample. `sequence` gives, for the tokens of a sample that reach this rank, the extents
    of what it may find in dim 1, by their length. `columns` are the names of split layers behind which a part of the
    features follows, `rows` those of layers that end it.
    """

    sequence: Callable[[int], Mapping[int, Extent]] | None = None
    columns: Mapping[str, Inside] = field(default_factory=dict)
    rows: frozenset[str] = frozenset()


def samples_in(shape: Sequence[int], samples: int, *, rows: Collection[int]) -> tuple[int | None, tuple[int, ...]]:
    """Which dimension of `shape` counts so many samples, and the shape of one; None where none does.

    `rows`: how many the tokens of all samples are, whole or in slices. Of one sample there is no telling tokens from
    others, and no need: they stand in dim 0 either way.
    """
    if shape and shape[0] == samples:
        return 0, tuple(shape[1:])
    if len(shape) > 1 and shape[1] == samples and not (samples > 1 and shape[0] in rows):
        return 1, (shape[0], *shape[2:])
    if shape and shape[0] and shape[0] % samples == 0:
        return 0, (shape[0] // samples, *shape[1:])
    return None, tuple(shape)


def numbered(inner: Sequence[int], extents: Mapping[int, Extent], device: torch.device) -> Tensor:
    """A number for every element of this rank's part `inner` of a sample, int64 in its shape: that of its place in the
    whole sample, however far that is padded (modulo 2^64). `extents` by dimension.
    """
    flat = torch.zeros((), dtype=torch.int64, device=device)
    for dim, length in enumerate(inner):
        extent = extents.get(dim) or Extent(torch.arange(length, device=device), length)
        flat = flat[..., None] * max(APART, extent.whole) + extent.places.to(device)
    return flat


@lru_cache(maxsize=256)
def rows_of(inner: tuple[int, ...]) -> Tensor:
    """The number of the first element in each row of a whole sample, int64 `[rows]` on the CPU, to be read alone."""
    return numbered(inner[:-1], {}, torch.device("cpu")).flatten() * max(APART, inner[-1])


def bits_in(
    keys: Tensor, layer: int, inner: tuple[int, ...], extents: Mapping[int, Extent], *, loops: Loops | None
) -> Tensor:
    """64 bits for each element of samples with these `keys` (int64 `[samples]`) of which this rank has the part
    `inner`: int64 `[samples, *inner]`. `layer`: the key of the draw.
    """
    if loops is not None and keys.is_cpu and not extents:
        out = torch.empty(len(keys), *inner, dtype=torch.int64, device=keys.device)
        row = inner or (1,)
        loops.bits(keys.contiguous(), layer, rows_of(row), out.view(len(keys), *row))
        return out
    own = bits(keys, torch.full_like(keys, layer))
    return bits(own.view(-1, *[1] * len(inner)), numbered(inner, extents, keys.device)[None])


def extents_in(
    inner: Sequence[int], sequence: Mapping[int, Extent], inside: Inside | None, *, module: str
) -> dict[int, Extent]:
    """The extents of a tensor's part of a sample by its dimension: in dim 0 of what `sequence` says of its length, else
    of what lies `inside` split layers. Raises `UserCodeError`, naming the `module` that draws, where that is unknown.
    """
    found = {0: sequence[inner[0]]} if inner and inner[0] in sequence else {}
    if inside is None:
        return found
    if inside.features is not None and len(inner) <= 2 and inner[-1:] == (len(inside.features.places),):
        return found | {len(inner) - 1: inside.features}
    if inside.heads is not None and len(inner) == 3 and len(inside.heads.places) in inner[:2]:
        return found | {int(inner[0] != len(inside.heads.places)): inside.heads}
    where = "the loop, past the model's forward," if module.startswith("\0") else f"the module {module}"
    raise UserCodeError(
        f"{where} drops from a tensor of {list(inner)} a sample between split layers, and which part of "
        "the whole sample that is cannot be known: drop behind the row layer, or set layout.tensor = 1"
    )
