"""How two checkpoints differ, tensor by tensor, whatever layouts wrote them: `shoal checkpoint diff`.

What lies in a run directory, for people: `shoal checkpoint ls` and `shoal checkpoint verify`. Changes nothing.

Weights in and out: one safetensors file of the unsplit model, which other programs read and write.

An exported file has the model's own names, without the prefix that a checkpoint gives them. An imported one becomes a
checkpoint that holds weights alone, for `run.warm_start` and `shoal evaluate`.
Format: https://github.com/huggingface/safetensors.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from shoal.checkpoint.agreement import LocalExchange
from shoal.checkpoint.dtypes import BY_NAME
from shoal.checkpoint.load import Finding, checkpoint_in, checkpoints, findings, read_all, read_into, read_manifest
from shoal.checkpoint.manifest import Manifest, TensorEntry
from shoal.checkpoint.objects import MANIFEST, Places, temporary
from shoal.checkpoint.save import Saver
from shoal.errors import EnvironmentFault, UsageError, VerificationFailed

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


class Row(msgspec.Struct, frozen=True):
    """One checkpoint. `created` is in unix seconds; what an unreadable manifest would have said is None.

    `nbytes` counts the objects that the checkpoint names, those it shares with others included.
    """

    step: int
    created: float | None
    nbytes: int | None
    tensors: int | None
    verified: bool


def listing(directory: Path) -> list[Row]:
    """A row for each checkpoint of a run directory, newest first; every object is hashed."""
    if not directory.is_dir():
        raise UsageError(f"{directory} is no folder: give the folder of a run, such as runs/NAME")
    return [_row(folder, directory) for folder in checkpoints(directory)]


def verify(directory: Path, step: int | None = None) -> list[Finding]:
    """What is wrong with the checkpoint of `step`, or with any when it is None; `UsageError` if it is not there."""
    folders = checkpoints(directory)
    if not folders:
        raise UsageError(f"{directory} holds no checkpoint: give the folder of a run, such as runs/NAME")
    if step is not None:
        folders = [folder for folder in folders if folder == Places(directory).step(step)]
        if not folders:
            raise UsageError(f"{directory} has no checkpoint of step {step}: `shoal checkpoint ls` shows those it has")
    return [finding for folder in folders for finding in _findings(folder, directory)]


def _findings(folder: Path, directory: Path) -> list[Finding]:
    try:
        return list(findings(read_manifest(folder), directory))
    except VerificationFailed as error:
        return [Finding(_step(folder), str(folder / MANIFEST), [], str(error))]


def _row(folder: Path, directory: Path) -> Row:
    try:
        manifest = read_manifest(folder)
    except VerificationFailed:
        return Row(_step(folder), None, None, None, False)
    verified = not any(findings(manifest, directory))
    return Row(manifest.step, manifest.created, sum(manifest.objects.values()), len(manifest.tensors), verified)


def _step(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


PREFIX = "model/"


def weights_of(source: Path) -> dict[str, Tensor]:
    """The weights of the checkpoint `source`, or of a run directory's newest, by the model's own names."""
    folder = checkpoint_in(source)
    weights = read_all(read_manifest(folder), folder.parent.parent, PREFIX)
    return {name.removeprefix(PREFIX): weight for name, weight in weights.items()}


def export(source: Path, file: Path) -> int:
    """Write the weights of the checkpoint `source`, or of a run directory's newest, to `file`; the step they are from.

    Raises `UsageError` where there is nothing to export or `file` exists.
    """
    if file.exists():
        raise UsageError(f"{file} exists: give another name, or move it away")
    folder = checkpoint_in(source)
    manifest = read_manifest(folder)
    weights = read_all(manifest, folder.parent.parent, PREFIX)
    if not weights:
        raise UsageError(f"{folder} holds no weights: no tensor in it is called {PREFIX}...")
    unfinished = temporary(file, "export")
    try:
        save_file({name.removeprefix(PREFIX): weight for name, weight in weights.items()}, unfinished)
        os.replace(unfinished, file)
    except (OSError, SafetensorError) as error:
        unfinished.unlink(missing_ok=True)
        raise EnvironmentFault(f"{file} cannot be written ({error}): give a place that can") from error
    return manifest.step


def import_weights(file: Path, directory: Path) -> Path:
    """Make the weights in `file` the checkpoint of step 0 of a new run directory; its folder.

    Raises `UsageError` where `directory` has checkpoints already, or `file` is no safetensors file.
    """
    if checkpoints(directory):
        raise UsageError(f"{directory} holds checkpoints of a run: give a new folder")
    try:
        weights = load_file(file)
    except (OSError, SafetensorError) as error:
        raise UsageError(f"{file} cannot be read as a safetensors file ({error}): export it in that format") from error
    saver = Saver(directory, rank=0, world_size=1, exchange=LocalExchange(), keep=1)
    tensors = {f"{PREFIX}{name}": weight for name, weight in weights.items()}
    saver.save(0, tensors, {"imported": file.name}, layout={})
    (report,) = saver.wait()
    if not report.committed:
        raise EnvironmentFault(f"{file} was not imported: {report.error}")
    return Places(directory).step(0)
