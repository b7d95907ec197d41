"""Checkpoints of a run directory, listed and verified; and two of them compared, tensor by tensor, whatever layouts
wrote them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Literal

import msgspec
import torch
from torch import Tensor

from shoal.checkpoint.commit import (
    Finding,
    checkpoint_in,
    checkpoints,
    findings,
    latest_finding,
    read_manifest,
    run_directory_of,
    unprotected,
)
from shoal.checkpoint.load import empty, read_into
from shoal.checkpoint.manifest import Manifest, TensorEntry
from shoal.checkpoint.objects import (
    MANIFEST,
    Places,
    require_checkpoints,
    require_folder,
    step_name,
)
from shoal.errors import UsageError, VerificationFailed

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
    found = list(_differences((a, run_directory_of(folders[0])), (b, run_directory_of(folders[1]))))
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
    tensor = empty(entry)
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


class Row(msgspec.Struct, frozen=True):
    """One checkpoint. `created` is in unix seconds; what an unreadable manifest would have said is None.

    `nbytes` counts the objects that the checkpoint names, those it shares with others included. `verified` says that
    every byte is as it was written; `protected` that the manifest has a hash, which earlier versions did not write.
    `best`: it is the one that `checkpoint.keep_best` keeps.
    """

    step: int
    created: float | None
    nbytes: int | None
    tensors: int | None
    verified: bool
    protected: bool
    best: bool = False


def listing(directory: Path) -> list[Row]:
    """A row for each checkpoint of a run directory, newest first; every object is hashed."""
    require_folder(directory)
    best = Places(directory).best.resolve().name
    rows = [_row(folder, directory) for folder in checkpoints(directory)]
    return [msgspec.structs.replace(row, best=step_name(row.step) == best) for row in rows]


def verify(directory: Path, step: int | None = None) -> list[Finding]:
    """What is wrong with the checkpoint of `step`, or with any of them and `latest` when it is None.

    Raises `UsageError` where there is no such checkpoint.
    """
    require_checkpoints(directory)
    folders = checkpoints(directory)
    if step is not None:
        folders = [folder for folder in folders if folder == Places(directory).step(step)]
        if not folders:
            raise UsageError(f"{directory} has no checkpoint of step {step}: `shoal checkpoint ls` shows those it has")
    pointer = latest_finding(directory) if step is None else None
    found = [finding for folder in folders for finding in _findings(folder, directory)]
    return [*found, pointer] if pointer is not None else found


def unprotected_notes(directory: Path, step: int | None = None) -> list[str]:
    """A sentence for each checkpoint, or that of `step`, whose manifest an earlier version wrote without a hash."""
    notes: list[str] = []
    for folder in checkpoints(directory):
        with suppress(VerificationFailed):
            manifest = read_manifest(folder)
            note = unprotected(manifest)
            if note and step in (None, manifest.step):
                notes.append(note)
    return notes


def _findings(folder: Path, directory: Path) -> list[Finding]:
    try:
        return list(findings(read_manifest(folder), directory))
    except VerificationFailed as error:
        return [Finding(_step(folder), str(folder / MANIFEST), [], str(error))]


def _row(folder: Path, directory: Path) -> Row:
    try:
        manifest = read_manifest(folder)
    except VerificationFailed:
        return Row(_step(folder), None, None, None, verified=False, protected=False)
    verified = not any(findings(manifest, directory))
    nbytes = sum(manifest.objects.values())
    return Row(manifest.step, manifest.created, nbytes, len(manifest.tensors), verified, protected=bool(manifest.hash))


def _step(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))
