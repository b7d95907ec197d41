"""How two checkpoints differ, tensor by tensor, whatever layouts wrote them: `shoal checkpoint diff`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec
import torch
from torch import Tensor

from shoal.checkpoint.dtypes import BY_NAME
from shoal.checkpoint.load import checkpoint_in, read_into, read_manifest
from shoal.checkpoint.manifest import Manifest, TensorEntry

Kind = Literal["only in the first", "only in the second", "shape", "type", "values"]


class Difference(msgspec.Struct, frozen=True):
    """One tensor that is not the same in both.

    `first` and `second` say what it is there. `max_abs` is the largest absolute difference of the values, None where
    shapes differ, where one is missing, or where it is not finite.
    """

    name: str
    kind: Kind
    first: str | None
    second: str | None
    max_abs: float | None = None


class Comparison(msgspec.Struct, frozen=True):
    """Two checkpoints: the steps they are of, how many tensors are the same, and those that are not, by name."""

    first_step: int
    second_step: int
    same: int
    differences: list[Difference]


def compare(first: Path, second: Path) -> Comparison:
    """What differs between two checkpoints, or the newest whole ones of run directories, a tensor at a time.

    Raises `UsageError` where there is no checkpoint, `CorruptCheckpoint` where a file is damaged.
    """
    folders = checkpoint_in(first), checkpoint_in(second)
    a, b = (read_manifest(folder) for folder in folders)
    found = list(_differences((a, folders[0].parent.parent), (b, folders[1].parent.parent)))
    names = {entry.name for manifest in (a, b) for entry in manifest.tensors}
    return Comparison(a.step, b.step, len(names) - len(found), found)


_Source = tuple[Manifest, Path]


def _differences(first: _Source, second: _Source) -> Iterator[Difference]:
    ours, theirs = ({entry.name: entry for entry in manifest.tensors} for manifest, _ in (first, second))
    for name in sorted({*ours, *theirs}):
        a, b = ours.get(name), theirs.get(name)
        if a is None or b is None:
            kind: Kind = "only in the first" if b is None else "only in the second"
            yield Difference(name, kind, _said(a), _said(b))
        elif a.shape != b.shape:
            yield Difference(name, "shape", _said(a), _said(b))
        elif a != b:  # Equal boxes in equal objects are equal bytes.
            values = _values(first, a), _values(second, b)
            if a.dtype != b.dtype:
                yield Difference(name, "type", _said(a), _said(b), _max_abs(*values))
            elif not _same(*values):
                yield Difference(name, "values", _said(a), _said(b), _max_abs(*values))


def _said(entry: TensorEntry | None) -> str | None:
    return None if entry is None else f"{entry.dtype} {list(entry.shape)}"


def _values(source: _Source, entry: TensorEntry) -> Tensor:
    manifest, directory = source
    tensor = torch.empty(entry.shape, dtype=BY_NAME[entry.dtype].torch)
    read_into(manifest, directory, {entry.name: tensor}, strict=False)
    return tensor


def _same(a: Tensor, b: Tensor) -> bool:
    """Equal bits: a negative zero is not a zero, and a NaN is itself."""
    return torch.equal(a.view(-1).view(torch.uint8), b.view(-1).view(torch.uint8))


def _max_abs(a: Tensor, b: Tensor) -> float | None:
    if not a.numel():
        return 0.0
    largest = (a.to(torch.float64) - b.to(torch.float64)).abs().max()
    return float(largest) if bool(largest.isfinite()) else None
